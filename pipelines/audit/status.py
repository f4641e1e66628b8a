"""Where every partition stands: heads, clock, lag, and how many records ended where. Reads only."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from confluent_kafka import Consumer

from pipelines import tables
from pipelines.adapters.decisions import read_decisions
from pipelines.adapters.kafka import Cluster, co_partitioned, read_to_end
from pipelines.adapters.lake import Lake
from pipelines.adapters.progress import read_last_batch
from pipelines.beginning import begun
from pipelines.core.idle import Decision
from pipelines.core.plan import BatchPlan, TopicPartition
from pipelines.errors import KafkaUnreachableError
from pipelines.settings import Settings
from pipelines.transforms.ranges import within

log = logging.getLogger("watersmeet.status")

EXACT_LAG = 1000
"""Up to so many offsets, what bronze lacks is counted record by record: the markers of transactions take offsets too."""


class _New(NamedTuple):
    """What bronze holds of a topic-partition beyond what silver has passed."""

    records: int
    head: int | None
    last_offset: int


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
    last = read_last_batch(lake) if lake.exists(tables.PROGRESS) else None
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
    found = [p for source in settings.sources for (p,) in _rows(lake, tables.bronze(source), "SELECT DISTINCT `partition` FROM")]
    known = [tp.partition for tp in last.ranges] if last else []
    return max([-1, *known, *found]) + 1, False


def _last_decisions(lake: Lake) -> dict[TopicPartition, Decision]:
    """What the idle policy has said last of each topic-partition."""
    return dict(read_decisions(lake)) if lake.exists(tables.IDLE_HEARTBEATS) else {}


def _standings(
    lake: Lake, source: str, partitions: int, last: BatchPlan | None, idle: Mapping[TopicPartition, Decision]
) -> dict[int, Standing]:
    """From the progress on: what silver has passed need not be read again."""
    passed = {tp.partition: done for tp, done in (last.ranges.items() if last else ()) if tp.source == source}
    kept = begun(lake, source) if lake.exists(tables.RECOVERED) and lake.exists(tables.RESETS) else []
    first = {p: max(offset for q, offset in kept if q == p) for p, _ in kept}
    since = {p: passed[p].until_offset if p in passed else first.get(p, 0) for p in range(partitions)}
    beyond = _rows(
        lake,
        tables.bronze(source),
        "SELECT `partition`, COUNT(*), MAX(event_time), MAX(`offset`) FROM",
        f"WHERE {within({p: (offset, None) for p, offset in since.items()})} GROUP BY `partition`",
    )
    new = {p: _New(*found) for p, *found in beyond}
    standings = {}
    for p, offset in since.items():
        position = passed[p].position if p in passed else None
        next_offset = max(offset, first.get(p, 0), new[p].last_offset + 1 if p in new else 0)
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


def _rows(lake: Lake, table: str, select: str, condition: str = "") -> list[tuple[Any, ...]]:
    """Nothing where the table is not there yet."""
    return lake.rows_if_any(f"{select} {{{table}}} {condition}")


def _counts(lake: Lake, table: str) -> dict[int, int]:
    return dict(_rows(lake, table, "SELECT `partition`, COUNT(*) FROM", "GROUP BY `partition`"))


def _silver_counts(lake: Lake) -> dict[tuple[int, str], int]:
    rows = _rows(lake, tables.SILVER, "SELECT `partition`, status, COUNT(*) FROM", "GROUP BY `partition`, status")
    return {(partition, status): count for partition, status, count in rows}


def _published(lake: Lake) -> dict[int, int]:
    """The sequence has no gap, so its last number says how many there are."""
    return dict(_rows(lake, tables.PUBLISHED, "SELECT `partition`, MAX(last_seq) + 1 FROM", "GROUP BY `partition`"))
