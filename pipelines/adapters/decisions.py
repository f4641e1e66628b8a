"""The table `idle_heartbeats`: what the idle policy has decided, in the order in which it holds."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines import tables
from pipelines.adapters.lake import APPLICATION, Lake, wall_clock_ms
from pipelines.core.idle import Decision
from pipelines.core.plan import TopicPartition
from pipelines.settings import Settings

Decided = tuple[TopicPartition, Decision]


def read_decisions(lake: Lake, before: int | None = None) -> list[Decided]:
    """Every decision (that was taken before a time in epoch ms), by topic-partition in its order."""
    taken = "" if before is None else f"WHERE decided_at < {lake.time_literal(before)} "
    rows = lake.rows(
        f"SELECT source, `partition`, after_offset, event_time FROM {{idle_heartbeats}} {taken}ORDER BY after_offset, event_time"
    )
    return [(TopicPartition(source, partition), Decision(after, time)) for source, partition, after, time in rows]


def write_decisions(lake: Lake, settings: Settings, decided: Sequence[Decided], application: str = APPLICATION) -> None:
    """Durable afterwards, in one commit."""
    now, sources = wall_clock_ms(), settings.sources
    rows = [(tp.source, sources[tp.source].topic, tp.partition, d.after_offset, d.event_time, now) for tp, d in decided]
    lake.append_rows(rows, tables.IDLE_HEARTBEATS, application=application)
