"""The table `idle_heartbeats`: decisions of the idle policy, in the order in which they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.lake import tables
from watersmeet.lake.generations import Generation
from watersmeet.lake.table_reader import TableReader, Where
from watersmeet.settings import Settings

Decided: TypeAlias = tuple[TopicPartition, IdleDecision]


def read_decisions(reader: TableReader, generation: Generation) -> list[Decided]:
    """Return every decision of a generation. Those of one topic-partition come in their order."""
    columns = ["source", "topic", "partition", "after_offset", "event_time", "decided_at", "tenant"]
    of_generation: Where = [[("generation", "=", generation.number)]]
    tenant_times: dict[tuple[object, ...], list[tuple[str, int]]] = {}
    decided = []
    for row in reader.select(tables.IDLE_HEARTBEATS, columns, of_generation).to_pylist():
        input_id = InputId(row["source"], row["topic"])
        key = input_id, row["partition"], row["after_offset"], row["decided_at"]
        if (tenant := row["tenant"]) is None:
            decided.append((row["after_offset"], row["event_time"], key))
        else:
            tenant_times.setdefault(key, []).append((tenant, row["event_time"]))
    return [
        (
            TopicPartition(*key[:2]),
            IdleDecision(after, time, tuple(sorted(tenant_times.get(key, ())))),
        )
        for after, time, key in sorted(decided)
    ]


def decision_rows(
    settings: Settings, decided: Sequence[Decided], decided_at_ms: int, generation: int
) -> pa.Table:
    """Return decisions of a generation as rows of `idle_heartbeats`.

    A decision is one row without a tenant, and one row for each tenant with a time of its own.
    """
    rows = [
        {**tp.input._asdict(), "partition": tp.partition, "tenant": tenant}
        | {
            "after_offset": decision.after_offset,
            "event_time": time,
            "decided_at": decided_at_ms,
            "generation": generation,
        }
        for tp, decision in decided
        for tenant, time in [(None, decision.event_time), *decision.tenant_times]
    ]
    return tables.layout(settings)[tables.IDLE_HEARTBEATS].rows_of(rows)
