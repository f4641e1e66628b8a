-- The life of a key, in the SQL of `ask.answers`. {own[t]}: the condition for its rows in a table t.

-- records
SELECT generation, `partition`, tenant, merge_key, status, event_time, last_event_time, valid,
    invalid_reason, batch, due, closed_at, record_count, {size} AS parts
FROM merged m WHERE {own[m]} ORDER BY `partition`, event_time, tenant

-- parts
SELECT generation, `partition`, tenant, opened, '{source}' AS source, {topic} AS topic,
    part['offset'] AS at, part['event_time'] AS event_time
FROM (SELECT generation, `partition`, tenant, event_time AS opened, each(`{source}`) AS part
    FROM merged m WHERE {own[m]} AND {near})

-- late_places
SELECT generation, `partition`, tenant, NULL AS opened, source, topic, l.offset AS at, event_time
FROM late l WHERE {own[l]}

-- read
WITH places AS ({places})
SELECT p.*, r.batch, r.from_offset AS since, b.position AS before FROM places p
LEFT JOIN progress r ON r.generation = p.generation AND r.source = p.source AND r.topic = p.topic
    AND r.`partition` = p.`partition` AND r.from_offset <= p.at AND r.until_offset > p.at
LEFT JOIN progress b ON b.generation = r.generation AND b.source = r.source AND b.topic = r.topic
    AND b.`partition` = r.`partition` AND b.batch = r.batch - 1

-- positions
WITH r AS ({ranges}), times AS (
    SELECT r.*, b.offset AS at, 2 AS place, ms(b.event_time) AS time,
        coalesce({own[b]}, FALSE) AS is_own
    FROM r JOIN {bronze} b ON b.topic = r.topic AND b.`partition` = r.`partition`
        AND b.offset >= r.since AND b.offset <= r.until
    WHERE {near}
    UNION ALL
    SELECT r.*, i.after_offset + 1, 1, ms(i.event_time), FALSE
    FROM r JOIN idle_heartbeats i ON i.generation = r.generation AND i.topic = r.topic
        AND i.`partition` = r.`partition` AND i.after_offset + 1 >= r.since
        AND i.after_offset + 1 <= r.until
    WHERE i.source = '{source}' AND i.tenant IS NULL
    UNION ALL
    SELECT r.*, since AS at, 0 AS place, before AS time, FALSE AS is_own FROM r
)
SELECT generation, '{source}' AS source, topic, `partition`, at, position
FROM (SELECT *, max(time) OVER (PARTITION BY batch, topic, `partition` ORDER BY at, place
    ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW) AS position FROM times)
WHERE is_own

-- read_by_batch
SELECT '{source}' AS source, topic, `partition`, b.offset, event_time, tenant FROM {bronze} b
WHERE topic = '{topic}' AND `partition` = {partition} AND b.offset >= {since}
    AND b.offset <= {until} ORDER BY b.offset

-- ends
SELECT batch, source, topic, `partition`, head, clock FROM progress
WHERE batch = {last} OR batch IN ({batches}) AND `partition` IN ({partitions})

-- late
SELECT l.generation, l.source, l.topic, l.`partition`, l.offset, l.tenant, l.event_time, l.position,
    l.batch, l.u, c.version, c.event_time AS corrected, c.is_late_born, c.invalid_reason,
    d.source IS NOT NULL AS is_repeated
FROM late l
LEFT JOIN corrections c ON c.generation = l.generation AND c.source = l.source
    AND c.topic = l.topic AND c.`partition` = l.`partition` AND c.offset = l.offset AND {own[c]}
LEFT JOIN duplicates d ON d.generation = l.generation AND d.source = l.source
    AND d.topic = l.topic AND d.`partition` = l.`partition` AND d.offset = l.offset AND {own[d]}
    AND d.is_late
WHERE {own[l]} ORDER BY l.position, l.`partition`, l.offset, l.source, l.topic

-- corrections
SELECT generation, `partition`, tenant, event_time, last_event_time, is_late_born, version, source,
    topic, c.offset, position, u, settled_at, valid, invalid_reason, batch, id, has_message,
    {sources}
FROM corrections c WHERE {own[c]} AND version > 0
ORDER BY `partition`, settled_at, tenant, u, source, topic, c.offset

-- duplicates
SELECT source, topic, `partition`, d.offset, event_time, id, of_offset, is_late, batch, tenant
FROM duplicates d WHERE {own[d]} ORDER BY `partition`, d.offset, source, topic

-- quarantined
SELECT source, topic, `partition`, q.offset, reason, detail
FROM quarantine q WHERE q.key = X'{key}' ORDER BY `partition`, q.offset, source, topic

-- waiting
SELECT source, topic, `partition`, w.offset, event_time, tenant, position
FROM waiting w WHERE {own[w]} ORDER BY `partition`, w.offset, source, topic

-- unread
SELECT '{source}' AS source, topic, `partition`, b.offset, event_time, tenant FROM {bronze} b
WHERE topic = '{topic}' AND {own[b]} AND {beyond} ORDER BY `partition`, b.offset

-- near
SELECT DISTINCT merge_key, levenshtein(merge_key, {key}) AS unlike FROM merged
WHERE left(merge_key, {half}) = {first} OR right(merge_key, {half}) = {last}
ORDER BY unlike, merge_key LIMIT 100

-- sent
WITH r AS ({places})
SELECT * FROM (
    SELECT r.n, p.last_seq, p.sink_offset, {tails},
        row_number() OVER (PARTITION BY r.n ORDER BY p.last_seq) AS place
    FROM r JOIN published p ON p.`partition` = r.`partition` AND {is_after}
    WHERE p.topic = {topic} AND p.topic_id = {topic_id} AND p.{clock} IS NOT NULL
) WHERE place = 1

-- behind
WITH r AS ({places})
SELECT r.n, count(*) AS behind
FROM r JOIN {table} t ON t.`partition` = r.`partition` AND t.generation = r.generation
    AND {is_after} AND {is_up_to}
WHERE {has_message} AND t.{clock} >= at({first}) AND t.{clock} <= at({last}) GROUP BY r.n
