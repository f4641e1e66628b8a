-- What `verify` finds without the merge model, in the SQL of `ask.answers`. {own}: the condition for
-- the rows of a generation that are judged; {holding}: the statuses of rows that hold records;
-- {alone}: those of rows that are one.

-- numbers
SELECT generation,
    concat('rows are of batches from ', min(batch), ' to ', max(batch), ', and generation ',
        {generation}, ' has those from ', {since}, ' to ', {last}) AS what
FROM silver GROUP BY generation
-- What a jump that is not decided has written belongs to no batch, and counts for nothing.
HAVING generation = {generation} AND (min(batch) < {since} OR max(batch) > {last})
    OR coalesce(generation, -1) NOT IN ({numbers}) AND min(batch) IS NOT NULL

-- repeated
SELECT `partition`, tenant, merge_key, ms(event_time) AS event_time,
    concat(count(*), ' rows with the same partition, key and event time') AS what
FROM merged WHERE {own} AND coalesce(invalid_reason, '') <> 'reset'
GROUP BY `partition`, tenant, merge_key, event_time HAVING count(*) > 1
UNION ALL
SELECT `partition`, tenant, merge_key, CAST(NULL AS BIGINT),
    concat(count(*), ' open rows for one key')
FROM merged WHERE {own} AND status = 'open'
GROUP BY `partition`, tenant, merge_key HAVING count(*) > 1
UNION ALL
SELECT `partition`, tenant, merge_key, min(ms(event_time)),
    concat(count(*), ' corrections by one late record')
FROM corrections c WHERE {own}
GROUP BY `partition`, source, topic, c.offset, tenant, merge_key HAVING count(*) > 1

-- closed
WITH epochs AS ({epochs}), clocks AS (
    SELECT `partition`, batch, max(ms(clock)) AS clock FROM progress
    WHERE batch >= {begin} AND batch <= {last} GROUP BY `partition`, batch
), steps AS (
    SELECT *, lag(clock) OVER (PARTITION BY `partition` ORDER BY batch) AS earlier FROM clocks
), final AS (
    SELECT `partition`, tenant, merge_key, ms(event_time) AS event_time, batch, status,
        ms(last_event_time) AS last_event_time, ms(due) AS due, ms(closed_at) AS time
    FROM merged
    WHERE {own} AND status = 'timed_out' AND coalesce(invalid_reason, '') <> 'reset'
    UNION ALL
    SELECT `partition`, tenant, merge_key, ms(event_time), batch, 'correction',
        CAST(NULL AS BIGINT), CAST(NULL AS BIGINT), ms(settled_at)
    FROM corrections WHERE {own}
)
SELECT f.`partition`, f.tenant, f.merge_key, f.event_time,
    concat('the ', f.status, ' row is of batch ', f.batch, ', which takes the clock from ',
        coalesce(CAST(s.earlier AS STRING), 'nothing'), ' to ',
        coalesce(CAST(s.clock AS STRING), 'nothing'), '; its time is ',
        coalesce(CAST(f.time AS STRING), 'null'), ', and it could be joined until ',
        coalesce(CAST(f.due AS STRING), 'null')) AS what
FROM final f
LEFT JOIN steps s ON s.`partition` = f.`partition` AND s.batch = f.batch
LEFT JOIN epochs e ON f.batch >= e.since AND f.batch <= e.until
WHERE f.time IS NULL OR s.clock IS NULL OR f.time > s.clock + e.number OR f.time <= s.earlier
    OR f.status = 'timed_out' AND (f.due IS NULL OR f.due >= f.time
        OR f.due <> least(f.last_event_time + e.gap, f.event_time + e.longest))

-- passed
SELECT s.source, s.topic, s.`partition`, s.offset,
    concat('the ', s.status, ' record is of batch ', s.batch, ', which did not pass it') AS what
FROM silver s
JOIN progress p ON p.source = s.source AND p.topic = s.topic AND p.`partition` = s.`partition`
    AND p.batch = s.batch
WHERE s.status IN {alone} AND s.batch >= {first}
    AND s.batch <= {last} AND (s.offset IS NULL OR s.offset >= p.until_offset
        OR s.offset < p.from_offset AND s.status NOT IN ('duplicate', 'excess')
            AND NOT (s.status = 'late' AND s.batch IN ({rejudging})))

-- batches
WITH epochs AS ({epochs}), begins AS ({begins}), steps AS (
    SELECT source, topic, `partition`, batch, coalesce(from_offset, -1) AS from_offset,
        until_offset, coalesce(ms(head), -1) AS head, coalesce(ms(clock), -1) AS clock,
        coalesce(ms(position), -1) AS position, coalesce(epoch, -1) AS epoch,
        coalesce(generation, -1) AS generation
    FROM progress WHERE batch >= {first} AND batch <= {last}
), ordered AS (
    SELECT *, min(head) OVER (PARTITION BY `partition`, batch) AS least,
        lag(batch) OVER (PARTITION BY source, topic, `partition` ORDER BY batch) AS earlier,
        lead(batch) OVER (PARTITION BY source, topic, `partition` ORDER BY batch) AS later,
        lag(until_offset) OVER (PARTITION BY source, topic, `partition` ORDER BY batch) AS ended
    FROM steps
)
SELECT b.source, b.topic, b.number AS `partition`, s.batch,
    CASE WHEN s.batch IS NULL THEN 'no batch is there'
        WHEN coalesce(later, s.batch + 1) <> s.batch + 1 OR later IS NULL AND s.batch <> {last}
            THEN 'the next one is missing'
        ELSE concat('it goes from offset ', from_offset, ' to the position ', position,
            ' with the head ', head, ', the clock ', clock, ', epoch ', epoch, ' and generation ',
            generation, '; the batch before it is ', coalesce(earlier, {first} - 1),
            ' and ended at ', coalesce(ended, since_offset), ', and the smallest head is ', least)
    END AS what
FROM begins b
LEFT JOIN ordered s ON s.source = b.source AND s.topic = b.topic AND s.`partition` = b.number
LEFT JOIN epochs e ON s.batch >= e.since AND s.batch <= e.until
WHERE s.batch IS NULL OR s.batch <> coalesce(earlier, {first} - 1) + 1
    OR coalesce(later, s.batch + 1) <> s.batch + 1 OR later IS NULL AND s.batch <> {last}
    OR from_offset <> coalesce(ended, since_offset) OR clock <> least OR position > clock
    OR head < position OR head = clock AND position < clock
    OR epoch <> e.number OR generation <> {generation}

-- decisions
SELECT i.source, i.topic, i.`partition`, i.batch,
    concat('the decision after offset ', i.after_offset, ', of batch ',
        coalesce(CAST(i.batch AS STRING), 'null'), ', is there ', count(*), ' times for ',
        coalesce(concat('tenant ', i.tenant), 'all'), '; the batch goes from ',
        coalesce(CAST(p.from_offset AS STRING), 'nowhere'), ' to ',
        coalesce(CAST(p.until_offset AS STRING), 'nowhere')) AS what
FROM idle_heartbeats i
LEFT JOIN progress p ON p.source = i.source AND p.topic = i.topic AND p.`partition` = i.`partition`
    AND p.batch = i.batch AND p.batch >= {first} AND p.batch <= {last}
LEFT JOIN (SELECT DISTINCT source, topic, `partition`, after_offset, decided_at
    FROM idle_heartbeats WHERE tenant IS NULL AND generation = {generation}) o
    ON o.source = i.source AND o.topic = i.topic AND o.`partition` = i.`partition`
    AND o.after_offset = i.after_offset AND o.decided_at = i.decided_at
WHERE i.generation = {generation} AND (i.batch IS NOT NULL OR NOT {is_read_back})
    AND coalesce(i.batch, -1) NOT BETWEEN {since} AND {history}
GROUP BY i.source, i.topic, i.`partition`, i.batch, i.after_offset, i.event_time, i.decided_at,
    i.tenant, p.from_offset, p.until_offset, o.after_offset
HAVING count(*) > 1 OR o.after_offset IS NULL OR p.from_offset IS NULL
    OR i.after_offset + 1 < p.from_offset OR i.after_offset + 1 > p.until_offset

-- positions
WITH spans AS ({spans}), moves AS (
    SELECT `partition`, 2 * b.offset AS at, ms(event_time) AS time, CAST(NULL AS BIGINT) AS decided
    FROM {bronze} b JOIN spans g ON g.number = b.`partition`
    WHERE topic = {topic} AND reason IS NULL AND event_time IS NOT NULL AND b.offset >= g.since
    UNION ALL
    SELECT `partition`, 2 * after_offset + 1, ms(event_time), coalesce(batch, -1)
    FROM idle_heartbeats i JOIN spans g ON g.number = i.`partition`
    WHERE source = {source_text} AND topic = {topic} AND tenant IS NULL
        AND generation = {generation} AND after_offset >= g.since - 1
    UNION ALL
    SELECT number, 2 * since - 2, before, CAST(NULL AS BIGINT) FROM spans
), steps AS (
    SELECT `partition`, batch, coalesce(until_offset, -1) AS until_offset,
        coalesce(ms(head), -1) AS head, coalesce(ms(clock), -1) AS clock,
        coalesce(ms(position), -1) AS position
    FROM progress
    WHERE source = {source_text} AND topic = {topic} AND batch >= {first} AND batch <= {last}
), marks AS (
    SELECT `partition`, at, time AS place, 0 AS kind, time, decided, CAST(NULL AS BIGINT) AS batch,
        CAST(NULL AS BIGINT) AS position, CAST(NULL AS BIGINT) AS bound
    FROM moves
    UNION ALL
    SELECT `partition`, 2 * until_offset - 1, clock, 1, CAST(NULL AS BIGINT) AS time,
        CAST(NULL AS BIGINT) AS decided, batch, position,
        CASE WHEN head = clock THEN clock ELSE clock + 1 END
    FROM steps
    UNION ALL
    SELECT s.`partition`, at, head AS place, 1, CAST(NULL AS BIGINT) AS time,
        CAST(NULL AS BIGINT) AS decided, batch, head, CAST(NULL AS BIGINT) AS bound
    FROM steps s
    LEFT JOIN (SELECT `partition`, time, min(at) AS at FROM moves GROUP BY `partition`, time) m
        ON m.`partition` = s.`partition` AND m.time = s.head
), told AS (
    SELECT *, max(time) OVER (PARTITION BY `partition` ORDER BY at, place, kind
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before,
        max(bound) OVER (PARTITION BY `partition` ORDER BY at, place, kind
            ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS reached
    FROM marks
)
SELECT CASE WHEN batch IS NOT NULL
            THEN concat('a position or head is ', position, ', and bronze gives ',
                coalesce(CAST(min(before) AS STRING), 'nothing'))
        WHEN decided IS NOT NULL
            THEN concat('a decision of batch ', decided, ' moves nothing on from ', min(before))
        ELSE 'not passed, although the clock has reached its position' END AS what,
    CASE WHEN batch IS NOT NULL
            THEN concat('progress: batch ', batch, ', ', {topic}, '[', `partition`, ']')
        ELSE concat(CASE WHEN decided IS NULL THEN '' ELSE 'idle_heartbeats: ' END, {topic}, '[',
            `partition`, ']@', CAST((min(at) - min(at) % 2) / 2 AS BIGINT)) END AS at
FROM told
WHERE batch IS NOT NULL AND coalesce(before, -2) <> position
    OR decided >= {first} AND time <= before
    OR batch IS NULL AND decided IS NULL AND greatest(time, before) < reached
GROUP BY `partition`, batch, decided, position

-- outcomes
WITH spans AS ({spans}), places AS ({places}), traces AS (
    SELECT `partition`, at, count(*) AS n FROM places GROUP BY `partition`, at
), records AS (
    SELECT `partition`, b.offset AS at, max(CASE WHEN heartbeat THEN 1 ELSE 0 END) AS is_erased
    FROM {bronze} b JOIN spans g ON g.number = b.`partition`
    WHERE topic = {topic} AND reason IS NULL AND event_time IS NOT NULL
        AND (NOT heartbeat OR value IS NULL) AND b.offset >= g.since AND b.offset < g.until
    GROUP BY `partition`, b.offset
)
SELECT coalesce(t.`partition`, r.`partition`) AS `partition`, coalesce(t.at, r.at) AS at,
    coalesce(n, 0) AS n, is_erased FROM traces t
FULL JOIN records r ON r.`partition` = t.`partition` AND r.at = t.at
WHERE coalesce(n, 0) <> 1 - coalesce(is_erased, 1)

-- parts
SELECT `partition`, part['offset'] AS at, status, tenant, merge_key, event_time
FROM (SELECT `partition`, status, tenant, merge_key, event_time, each(`{source}`) AS part
    FROM silver WHERE {own} AND status IN {holding}) s
JOIN spans g ON g.number = s.`partition` WHERE part['offset'] >= g.origin AND {of_part} = {topic}

-- alone
SELECT `partition`, s.offset AS at, status, tenant, merge_key, event_time
FROM silver s JOIN spans g ON g.number = s.`partition`
WHERE {own} AND status IN {alone}
    AND NOT coalesce(is_late, FALSE) AND s.offset >= g.origin
    AND source = {source_text} AND topic = {topic}

-- repeats
SELECT `partition`, entry['offset'] AS at, status, tenant, merge_key, event_time
FROM (SELECT `partition`, status, tenant, merge_key, event_time, each(record_ids) AS entry
    FROM silver
    WHERE {own} AND status IN {holding} AND closed_at IS NULL) s
JOIN spans g ON g.number = s.`partition`
WHERE entry['of_offset'] IS NOT NULL AND entry['source'] = {source_text}
    AND entry['topic'] = {topic} AND entry['offset'] >= g.origin

-- erasing
WITH spans AS ({spans}), places AS ({places})
SELECT `partition`, status, tenant, merge_key, ms(event_time) AS event_time FROM places
WHERE {erased}

-- in_two_messages
SELECT concat({topic}, '[', `partition`, ']@', at) AS at,
    concat('the record is in ', count(*), ' messages') AS what
FROM (
    SELECT `partition`, part['offset'] AS at, {of_part} AS topic
    FROM (SELECT `partition`, each(`{source}`) AS part
        FROM merged WHERE status = 'timed_out' AND valid)
) WHERE topic = {topic} GROUP BY `partition`, at HAVING count(*) > 1
UNION ALL
SELECT concat({topic}, '[', `partition`, ']@', c.offset),
    concat('the record is in ', count(*), ' messages')
FROM corrections c
WHERE has_message AND valid AND source = {source_text} AND topic = {topic}
GROUP BY `partition`, c.offset HAVING count(*) > 1
