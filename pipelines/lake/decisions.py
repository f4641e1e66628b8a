"""The table `idle_heartbeats`: what the idle policy has decided, in the order in which it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

from pipelines.core.idle import IdleDecision
from pipelines.core.plan import TopicPartition
from pipelines.lake import tables
from pipelines.lake.questions import Questions, Where
from pipelines.settings import Settings

Decided: TypeAlias = tuple[TopicPartition, IdleDecision]


def read_decisions(questions: Questions, before_ms: int | None = None) -> list[Decided]:
    """Every decision (taken before a time in epoch ms), by topic-partition in its order."""
    where: Where = () if before_ms is None else [[("decided_at", "<", before_ms)]]
    columns = ["after_offset", "event_time", "source", "partition"]
    found = questions.select(tables.IDLE_HEARTBEATS, columns, where)
    rows = sorted(zip(*(found[name].to_pylist() for name in columns), strict=True))
    return [(TopicPartition(source, partition), IdleDecision(after, time)) for after, time, source, partition in rows]


def decision_rows(settings: Settings, decided: Sequence[Decided], decided_at_ms: int) -> pa.Table:
    """Decisions as rows of `idle_heartbeats`."""
    sources = settings.sources
    return tables.layout(settings)[tables.IDLE_HEARTBEATS].rows(
        (tp.source, sources[tp.source].topic, tp.partition, d.after_offset, d.event_time, decided_at_ms) for tp, d in decided
    )
