-- What `verify` finds without the merge model, in the SQL of `ask.answers`. {own}: the condition for
-- the rows of a generation that are judged.

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
WHERE s.status IN ('late', 'passed', 'duplicate', 'excess') AND s.batch >= {first}
    AND s.batch <= {last} AND (s.offset IS NULL OR s.offset >= p.until_offset
        OR s.offset < p.from_offset AND s.status NOT IN ('duplicate', 'excess')
            AND NOT (s.status = 'late' AND s.batch IN ({rejudging})))

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
    FROM silver WHERE {own} AND status IN ('open', 'waiting', 'timed_out')) s
JOIN spans g ON g.number = s.`partition` WHERE part['offset'] >= g.origin AND {of_part} = {topic}

-- alone
SELECT `partition`, s.offset AS at, status, tenant, merge_key, event_time
FROM silver s JOIN spans g ON g.number = s.`partition`
WHERE {own} AND status IN ('late', 'duplicate', 'excess', 'passed')
    AND NOT coalesce(is_late, FALSE) AND s.offset >= g.origin
    AND source = {source_text} AND topic = {topic}

-- repeats
SELECT `partition`, entry['offset'] AS at, status, tenant, merge_key, event_time
FROM (SELECT `partition`, status, tenant, merge_key, event_time, each(record_ids) AS entry
    FROM silver
    WHERE {own} AND status IN ('open', 'waiting', 'timed_out') AND closed_at IS NULL) s
JOIN spans g ON g.number = s.`partition`
WHERE entry['of_offset'] IS NOT NULL AND entry['source'] = {source_text}
    AND entry['topic'] = {topic} AND entry['offset'] >= g.origin

-- erasing
WITH spans AS ({spans}), places AS ({places})
SELECT `partition`, status, tenant, merge_key, ms(event_time) AS event_time FROM places
WHERE {erased}

-- in_two_messages
SELECT `partition`, at, count(*) AS n FROM (
    SELECT `partition`, part['offset'] AS at, {of_part} AS topic
    FROM (SELECT `partition`, each(`{source}`) AS part
        FROM merged WHERE status = 'timed_out' AND valid)
) WHERE topic = {topic} GROUP BY `partition`, at HAVING count(*) > 1
UNION ALL
SELECT `partition`, c.offset, count(*) FROM corrections c
WHERE has_message AND valid AND source = {source_text} AND topic = {topic}
GROUP BY `partition`, c.offset HAVING count(*) > 1
