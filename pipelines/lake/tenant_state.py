"""Clocks of tenants after a batch, which no table keeps.

They are derived from bronze and the idle policy's decisions. For each topic-partition this takes
the largest event time of each tenant, unless it is too old to count, and the first record that had
reached the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from pipelines.core.clocks import Clocks, SharedClock
from pipelines.core.columns import NULL_TIME
from pipelines.core.idle import IdleDecision
from pipelines.core.plan import BatchPlan, Cursor, OffsetRange, TopicPartition
from pipelines.core.tenants import HEADS, TenantClocks
from pipelines.lake import tables
from pipelines.lake.decisions import read_decisions
from pipelines.lake.generations import Generation
from pipelines.lake.table_reader import Condition, TableReader, Where, in_portions, within

_RECORDS = pa.schema(
    {
        "source": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "event_time": pa.int64(),
        "tenant": pa.string(),
    }
)


class BatchEnd(NamedTuple):
    """The end of a batch.

    `cursors`: how far the merge had read each topic-partition. `clocks`: by partition, in ms.
    """

    cursors: Mapping[TopicPartition, Cursor]
    clocks: Mapping[int, int]


def read_batch_end(reader: TableReader, batch: int) -> BatchEnd:
    """Return the end of a batch that `progress` has."""
    columns = ["source", "partition", "until_offset", "position", "clock"]
    rows = reader.select(tables.PROGRESS, columns, [[("batch", "=", batch)]]).to_pylist()
    cursors = {
        TopicPartition(row["source"], row["partition"]): Cursor(
            row["until_offset"], row["position"]
        )
        for row in rows
    }
    return BatchEnd(
        cursors, {row["partition"]: row["clock"] for row in rows if row["clock"] is not None}
    )


@dataclass(frozen=True)
class TenantStateReader:
    """Reader of the clocks of tenants in a generation of a lake."""

    reader: TableReader
    generation: Generation

    def clocks_at(
        self,
        moment: BatchEnd,
        lag_ms: int | None,
        global_floor: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> Clocks:
        """Return the clocks at a moment.

        `lag_ms`: maximum by which a tenant's clock may be behind the global one; None without
        tenants. `global_floor`: by topic-partition, a lower bound (ms) of every tenant's position
        since an earlier epoch, which had another lag.
        """
        known = {
            tp: cursor for tp, cursor in moment.cursors.items() if tp.partition in moment.clocks
        }
        ranges = {
            tp: OffsetRange(c.next_offset, c.next_offset, c.position, c.position, None)
            for tp, c in known.items()
        }
        plan = BatchPlan(0, ranges, moment.clocks, has_late=False)
        if lag_ms is None:
            return SharedClock(plan, {})
        idle: dict[TopicPartition, list[IdleDecision]] = {}
        for tp, decision in read_decisions(self.reader, self.generation):
            idle.setdefault(tp, []).append(decision)
        heads = [HEADS.empty_table()]
        waiting = [_RECORDS.empty_table()]
        for source in sorted({tp.source for tp in known}):
            states = [
                PartitionState(
                    tp,
                    self.generation.begin.get(tp, 0),
                    cursor,
                    moment.clocks[tp.partition],
                    idle.get(tp, ()),
                    global_floor.get(tp),
                )
                for tp, cursor in known.items()
                if tp.source == source
            ]
            heads.append(self._heads(source, states, lag_ms))
            waiting.append(self._waiting(source, [x for x in states if not x.is_cut_passed]))
        return TenantClocks.of(
            pa.concat_tables(waiting), pa.concat_tables(heads), plan, idle, lag_ms
        )

    def _waiting(self, source: str, stood: Sequence[PartitionState]) -> pa.Table:
        """Return the first waiting record of each topic-partition."""
        at = {each.tp.partition: each.cursor.next_offset for each in stood}
        ranges = {p: (offset, offset + 1) for p, offset in at.items()}
        found = self.reader.select(
            tables.bronze(source), _RECORDS.names[1:], within(ranges)
        ).to_pylist()
        rows = (
            {"source": source, **row} for row in found if at.get(row["partition"]) == row["offset"]
        )
        return pa.Table.from_pylist(list(rows), _RECORDS)

    def _heads(self, source: str, stood: Sequence[PartitionState], lag_ms: int) -> pa.Table:
        """Return the heads of a source's tenants, as `core.tenants.HEADS`."""
        first = self._first_at_clock(source, [each for each in stood if each.is_cut_passed])
        passed = [
            (each, each.cursor.next_offset) for each in stood if each.cursor.position is not None
        ]
        own = self._largest(source, passed, lag_ms)
        cuts = {
            each: each.cut(first.get(each.tp.partition)) for each in stood if each.is_cut_passed
        }
        at_cut = self._largest(
            source, [(each, cut.records_until) for each, cut in cuts.items()], lag_ms
        )
        for each in stood:
            p = each.tp.partition
            for decision in each.passed():
                _raise(own, p, decision.tenant_times)
            for decision in cuts[each].decisions if each in cuts else ():
                _raise(at_cut, p, decision.tenant_times)
            if each.global_floor is not None:
                for found in (own, at_cut):
                    _raise(found, p, [(None, each.global_floor)])
        rows = [
            (source, p, tenant, time, at_cut.get((p, tenant), NULL_TIME))
            for (p, tenant), time in own.items()
        ]
        return pa.Table.from_pylist(
            [dict(zip(HEADS.names, row, strict=True)) for row in rows], HEADS
        )

    def _first_at_clock(self, source: str, stood: Sequence[PartitionState]) -> dict[int, int]:
        """Return, by partition, the offset of the first record that had reached the clock."""
        found: dict[int, int] = {}
        for some in in_portions(stood):
            where: Where = [
                [*each.passed_offsets(each.cursor.next_offset), ("event_time", ">=", each.clock)]
                for each in some
            ]
            rows = self.reader.summary(
                tables.bronze(source), ["partition"], {"first": ("min", "offset")}, where
            ).to_pylist()
            found |= {row["partition"]: row["first"] for row in rows}
        return found

    def _largest(
        self, source: str, until: Sequence[tuple[PartitionState, int]], lag_ms: int
    ) -> _Own:
        """Return the largest event time of each tenant before these offsets.

        A time that is too old to count is left out.
        """
        found: _Own = {}
        for some in in_portions(until):
            where: Where = [
                [
                    *each.passed_offsets(offset),
                    ("event_time", ">", (each.cursor.position or 0) - lag_ms),
                ]
                for each, offset in some
            ]
            values = {"time": ("max", "event_time")}
            rows = self.reader.summary(
                tables.bronze(source), ["partition", "tenant"], values, where
            ).to_pylist()
            found |= {(row["partition"], row["tenant"]): row["time"] for row in rows}
        return found


class ClockPrefix(NamedTuple):
    """A cut that was read in full: the exclusive end offset of its records, and its decisions."""

    records_until: int
    decisions: Sequence[IdleDecision]


@dataclass(frozen=True, eq=False)
class PartitionState:
    """Merge state of a topic-partition after a batch.

    - `begin`: the offset from which on its state counts.
    - `cursor`: how far it was read.
    - `clock`: of its partition, in ms.
    """

    tp: TopicPartition
    begin: int
    cursor: Cursor
    clock: int
    decisions: Sequence[IdleDecision]
    global_floor: int | None

    @property
    def is_cut_passed(self) -> bool:
        """True where the merge had read the first record that reached the clock."""
        return self.cursor.position is not None and self.cursor.position >= self.clock

    def passed(self) -> list[IdleDecision]:
        """Return the decisions that the merge had read."""
        at = self.cursor.next_offset
        position = self.cursor.position or 0
        return [
            each
            for each in self.decisions
            if each.after_offset < at and each.event_time <= position
        ]

    def cut(self, first: int | None) -> ClockPrefix:
        """Return the cut.

        `first`: the first record that had reached the clock. A decision may have reached it
        earlier.
        """
        passed = self.passed()
        until = self.cursor.next_offset if first is None else first + 1
        for number, decision in enumerate(passed):
            if decision.after_offset + 1 >= until:
                return ClockPrefix(until, passed[:number])
            if decision.event_time >= self.clock:
                return ClockPrefix(decision.after_offset + 1, passed[: number + 1])
        return ClockPrefix(until, passed)

    def passed_offsets(self, until: int) -> list[Condition]:
        """Return the condition for the records since the beginning, before an offset."""
        return [
            ("partition", "=", self.tp.partition),
            ("offset", ">=", self.begin),
            ("offset", "<", until),
        ]


_Own: TypeAlias = dict[tuple[int, "str | None"], int]


def _raise(found: _Own, partition: int, tenant_times: Iterable[tuple[str | None, int]]) -> None:
    for tenant, time in tenant_times:
        found[partition, tenant] = max(time, found.get((partition, tenant), time))
