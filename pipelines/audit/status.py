"""Where every partition stands: heads, clock, lag, and how many records ended where. Reads only."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from confluent_kafka import Consumer
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.kafka import Cluster, co_partitioned, read_to_end
from pipelines.adapters.lake import Lake
from pipelines.adapters.progress import read_last_batch
from pipelines.core.idle import Decision
from pipelines.core.plan import BatchPlan, TopicPartition
from pipelines.errors import KafkaUnreachableError
from pipelines.settings import Settings
from pipelines.transforms.ranges import is_within

log = logging.getLogger("watersmeet.status")

EXACT_LAG = 1000
"""Up to so many offsets, what bronze lacks is counted record by record: the markers of transactions take offsets too."""


class Standing(NamedTuple):
    """One topic-partition: its head (ms), the records in bronze that the merge has not passed, the next offset to read, and
    whether the idle policy has spoken since its last record.
    """

    head: int | None
    waiting: int
    next_offset: int
    is_idle: bool


def status(lake: Lake, settings: Settings) -> dict[str, Any]:
    """The answer of `status --json`: times in epoch ms, null where there is none yet.

    `lag` counts records that silver has not passed and those that bronze lacks; where Kafka does not answer, the latter are
    left out and a warning says so.
    """
    last = read_last_batch(lake, settings) if lake.exists(tables.PROGRESS) else None
    partitions, reachable = _partitions(lake, settings, last)
    idle = _last_decisions(lake)
    standings = {
        TopicPartition(source, p): standing
        for source in settings.sources
        for p, standing in _standings(lake, source, partitions, last, idle).items()
    }
    behind = _records_beyond(settings, standings) if reachable else {}
    counts = {name: _counts(lake, name) for name in (tables.LATE, tables.QUARANTINE)}
    silver = _silver_counts(lake)
    published = _published(lake)
    return {
        "partitions": [
            {
                "partition": p,
                "clock": _clock(settings, standings, p),
                "open": silver.get((p, "open"), 0),
                "timed_out": silver.get((p, "timed_out"), 0),
                "late": counts[tables.LATE].get(p, 0),
                "quarantined": counts[tables.QUARANTINE].get(p, 0),
                "published": published.get(p, 0),
                "sources": {
                    source: _source(standings[tp], _clock(settings, standings, p), behind.get(tp, 0))
                    for source in settings.sources
                    for tp in [TopicPartition(source, p)]
                },
            }
            for p in range(partitions)
        ]
    }


def _source(standing: Standing, clock: int | None, behind: int) -> dict[str, Any]:
    head = standing.head
    return {
        "head": head,
        "lead": None if head is None or clock is None else head - clock,
        "lag": standing.waiting + behind,
        "state": _state(standing, clock),
    }


def _state(standing: Standing, clock: int | None) -> str:
    if standing.is_idle:
        return "idle"
    if standing.head is None:
        return "waiting"
    is_ahead = clock is None or standing.head > clock
    return "held" if standing.waiting and is_ahead else "active"


def _clock(settings: Settings, standings: Mapping[TopicPartition, Standing], partition: int) -> int | None:
    heads = [standings[TopicPartition(source, partition)].head for source in settings.sources]
    return None if None in heads else min(head for head in heads if head is not None)


def _partitions(lake: Lake, settings: Settings, last: BatchPlan | None) -> tuple[int, bool]:
    """The number of partitions, and whether Kafka answers."""
    try:
        return co_partitioned(settings, Cluster(settings.kafka).partition_counts()), True
    except KafkaUnreachableError as error:
        log.warning("%s; records that are not in bronze yet are not counted", error)
    largest = [F.max("partition").alias("largest")]
    found = [_read(lake, tables.bronze(source)).agg(*largest).collect()[0][0] for source in settings.sources]
    known = [tp.partition for tp in last.ranges] if last else []
    return max([-1, *known, *(p for p in found if p is not None)]) + 1, False


def _last_decisions(lake: Lake) -> dict[TopicPartition, Decision]:
    """What the idle policy has said last of each topic-partition."""
    rows = _read(lake, tables.IDLE_HEARTBEATS).groupBy("source", "partition")
    last = rows.agg(F.max("after_offset").alias("after_offset"), F.max(F.unix_millis("event_time")).alias("event_time"))
    return {TopicPartition(r.source, r.partition): Decision(r.after_offset, r.event_time) for r in last.collect()}


def _standings(
    lake: Lake, source: str, partitions: int, last: BatchPlan | None, idle: Mapping[TopicPartition, Decision]
) -> dict[int, Standing]:
    """From the progress on: what silver has passed need not be read again."""
    passed = {tp.partition: done for tp, done in (last.ranges.items() if last else ()) if tp.source == source}
    is_its = F.col("source") == source
    resets = _read(lake, tables.RESETS).where(is_its).select("partition", F.col("to_offset").alias("offset"))
    recovered = _read(lake, tables.RECOVERED).where(is_its).select("partition", "offset")
    begun: dict[int, int] = dict(resets.union(recovered).groupBy("partition").agg(F.max("offset")).collect())
    since = {p: passed[p].until_offset if p in passed else begun.get(p, 0) for p in range(partitions)}
    beyond = (
        _read(lake, tables.bronze(source))
        .where(is_within({p: (offset, None) for p, offset in since.items()}))
        .groupBy("partition")
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.max(F.unix_millis("event_time")).alias("head"),
            F.max("offset").alias("offset"),
        )
    )
    new = {row.partition: row for row in beyond.collect()}
    standings = {}
    for p, offset in since.items():
        position = passed[p].position if p in passed else None
        next_offset = max(offset, begun.get(p, 0), new[p].offset + 1 if p in new else 0)
        decision = idle.get(TopicPartition(source, p))
        is_idle = decision is not None and decision.after_offset + 1 >= next_offset
        said = decision.event_time if decision is not None and is_idle else None
        heads = [head for head in (position, said, new[p].head if p in new else None) if head is not None]
        standings[p] = Standing(max(heads, default=None), new[p].records if p in new else 0, next_offset, is_idle)
    return standings


def _records_beyond(settings: Settings, standings: Mapping[TopicPartition, Standing]) -> dict[TopicPartition, int]:
    """How many records Kafka has after each topic-partition's end in bronze."""
    cluster = Cluster(settings.kafka)
    consumer = cluster.consumer()
    try:
        beyond = {}
        for source, kept in settings.sources.items():
            mine = {tp.partition: s for tp, s in standings.items() if tp.source == source}
            for p, (first, end) in cluster.bounds(kept.topic, len(mine)).items():
                since = max(first, mine[p].next_offset)
                beyond[TopicPartition(source, p)] = _count(consumer, kept.topic, p, since, end)
        return beyond
    finally:
        consumer.close()


def _count(consumer: Consumer, topic: str, partition: int, since: int, end: int) -> int:
    if not 0 < end - since <= EXACT_LAG:
        return max(0, end - since)
    return len(read_to_end(consumer, topic, partition, since))


def _read(lake: Lake, table: str) -> DataFrame:
    return lake.read(table) if lake.exists(table) else lake.spark.createDataFrame([], lake.schema(table))


def _counts(lake: Lake, table: str) -> dict[int, int]:
    return dict(_read(lake, table).groupBy("partition").count().collect())


def _silver_counts(lake: Lake) -> dict[tuple[int, str], int]:
    rows = _read(lake, tables.SILVER).groupBy("partition", "status").count().collect()
    return {(row[0], row[1]): row[2] for row in rows}


def _published(lake: Lake) -> dict[int, int]:
    """The sequence has no gap, so its last number says how many there are."""
    rows = _read(lake, tables.PUBLISHED).groupBy("partition").agg(F.max("last_seq") + 1).collect()
    return dict(rows)
