"""What silver says of the merge itself: its rows `batch`, which say how far each batch has merged
each topic-partition, and its rows `idle`, decisions of the idle policy in the order in which they
hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from watersmeet.core.idle import IdleDecision
from watersmeet.core.plan import BatchPlan, OffsetRange, TopicPartition
from watersmeet.core.silver import BATCH, IDLE
from watersmeet.lake import tables
from watersmeet.lake.commits import commits
from watersmeet.lake.history import Generation
from watersmeet.lake.inputs import topic_partition
from watersmeet.lake.pieces import read_pieces
from watersmeet.lake.table_reader import (
    ROW_BYTES,
    Condition,
    Histories,
    TableReader,
    Where,
    extreme,
    normalise,
)
from watersmeet.lake.tables import Table


def facts_of(plan: BatchPlan, decisions: int = 0) -> dict[str, Any]:
    """Return a batch as facts of its commit to silver: its numbers, and that of the last decision
    that it follows.
    """
    numbers = {"batch": plan.batch, "epoch": plan.epoch, "generation": plan.generation}
    return {**numbers, "decisions": decisions}


def batch_rows(plan: BatchPlan, committed_at_ms: int) -> pa.Table:
    """Return a row (`core.silver.BATCH`) for every topic-partition.

    So the rows of the last batch alone have the state of all of them.
    """
    rows = []
    for tp, done in plan.ranges.items():
        offsets = (done.from_offset, done.until_offset)
        times = (done.head, plan.clocks.get(tp.partition), done.position)
        numbers = (plan.epoch, plan.generation, committed_at_ms)
        rows.append((plan.batch, *tp.input, tp.partition, *offsets, *times, *numbers))
    return Table(tables.PROGRESS, BATCH).rows(rows)


def last_batch(reader: TableReader) -> BatchPlan | None:
    """Return silver's last batch, without the positions before it; None before the first."""
    last = extreme(reader, tables.PROGRESS, "batch")
    return None if last is None else read_batches(reader, [last])[last]


def read_batches(reader: TableReader, numbers: Collection[int]) -> dict[int, BatchPlan]:
    """Return batches by their numbers, without the positions before them."""
    names = ["batch", "source", "topic", "partition", "from_offset", "until_offset", "position"]
    names += ["head", "clock", "epoch", "generation"]
    rows = reader.select(tables.PROGRESS, names, [[("batch", "in", sorted(numbers))]]).to_pylist()
    by_batch = defaultdict[int, list[dict[str, Any]]](list)
    for row in rows:
        by_batch[row["batch"]].append(row)
    return {batch: _plan_of(of_batch) for batch, of_batch in by_batch.items()}


def _plan_of(rows: Sequence[Mapping[str, Any]]) -> BatchPlan:
    ranges = {}
    for row in rows:
        offsets = (row["from_offset"], row["until_offset"])
        ranges[topic_partition(row)] = OffsetRange(*offsets, None, row["position"], row["head"])
    clocks = {row["partition"]: row["clock"] for row in rows if row["clock"] is not None}
    numbers = {name: rows[0][name] for name in ("batch", "generation", "epoch")}
    return BatchPlan(ranges=ranges, clocks=clocks, **numbers)


class BatchVersions:
    """The versions of silver that batches have made, as far back as its log goes."""

    def __init__(self, reader: Histories) -> None:
        self._older = (
            (commit.facts["batch"], version.number)
            for version, commit in commits(reader, tables.SILVER)
            if "batch" in commit.facts
        )
        self._read = dict[int, int]()

    def of(self, batch: int | None) -> int | None:
        """Return a batch's version; None for None, and where the log does not have its commit.

        The log is read back to that batch.
        """
        if batch is not None and batch not in self._read:
            for older, version in self._older:
                self._read[older] = version
                if older <= batch:
                    break
        return None if batch is None else self._read.get(batch)


Decided: TypeAlias = tuple[TopicPartition, IdleDecision]

PIECE_ROWS = 20_000
"""Maximum number of rows that are read at a time, unless one time has more."""

_INPUT = ("source", "topic", "partition")
_ORDER = ("partition", "after_offset", "decided_at")
"""The columns by which decisions are cut into pieces; rows of one decision have the same values."""


def read_decisions(
    reader: TableReader, generation: Generation, where: Where = ()
) -> Iterator[Decided]:
    """Yield the decisions of a generation that meet the conditions.

    Those of one topic-partition come in their order. They are read in pieces, since there is no end
    to them: memory holds `PIECE_ROWS` at a time.
    """
    of_these = [[_of(generation), *term] for term in where or [()]]
    size = PIECE_ROWS * ROW_BYTES
    for rows in read_pieces(reader, tables.IDLE_HEARTBEATS, _ROW, of_these, _ORDER, size):
        yield from _decided(normalise(rows))


def last_decisions(
    reader: TableReader, generation: Generation
) -> dict[TopicPartition, IdleDecision]:
    """Return a generation's last decision about each topic-partition, without times of tenants."""
    return _at_the_end(reader, [[_of(generation), _ITSELF]], "max")


def first_decided(
    reader: TableReader, generation: Generation, times: Mapping[int, int]
) -> dict[TopicPartition, IdleDecision]:
    """Return the first decision of a generation with at least the time (ms) of its partition.

    Times of tenants are left out, and topic-partitions without such a decision.
    """
    return _at_the_end(reader, [[_of(generation), _ITSELF, ("event_time", ">=", times)]], "min")


def _at_the_end(reader: TableReader, where: Where, kind: str) -> dict[TopicPartition, IdleDecision]:
    values = {"after": (kind, "after_offset"), "time": (kind, "event_time")}
    rows = reader.summary(tables.IDLE_HEARTBEATS, _INPUT, values, where).to_pylist()
    return {topic_partition(row): IdleDecision(row["after"], row["time"]) for row in rows}


_ITSELF: Condition = ("tenant", "is null", None)
_ROW = (*_INPUT, "after_offset", "event_time", "decided_at", "tenant")


def _of(generation: Generation) -> Condition:
    return ("generation", "=", generation.number)


def _decided(rows: pa.Table) -> Iterator[Decided]:
    tenant_times: dict[tuple[object, ...], list[tuple[str, int]]] = {}
    decided = []
    for row in rows.to_pylist():
        key = *topic_partition(row), row["after_offset"], row["decided_at"]
        if (tenant := row["tenant"]) is None:
            decided.append((row["after_offset"], row["event_time"], key))
        else:
            tenant_times.setdefault(key, []).append((tenant, row["event_time"]))
    for after, time, key in sorted(decided):
        tenants = tuple(sorted(tenant_times.get(key, ())))
        yield TopicPartition(*key[:2]), IdleDecision(after, time, tenants)


def decision_rows(
    decided: Sequence[Decided], decided_at_ms: int, batch: int | None, generation: int
) -> pa.Table:
    """Return decisions of a generation as rows (`core.silver.IDLE`).

    `batch`: the one that they let go on; None for those that a lost lake had made.
    """
    numbers = (batch, generation)
    rows = [
        (*tp.input, tp.partition, decision.after_offset, time, decided_at_ms, tenant, *numbers)
        for tp, decision in decided
        for tenant, time in [(None, decision.event_time), *decision.tenant_times]
    ]
    return Table(tables.IDLE_HEARTBEATS, IDLE).rows(rows)
