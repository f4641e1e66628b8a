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

from watersmeet.core.clocks import Clocks, SharedClock
from watersmeet.core.columns import NULL_TIME
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import BatchPlan, Cursor, OffsetRange, TopicPartition
from watersmeet.core.tenants import HEADS, TenantClocks
from watersmeet.lake import tables
from watersmeet.lake.decisions import read_decisions
from watersmeet.lake.generations import Generation
from watersmeet.lake.inputs import first_offsets, of_topic, topic_partition
from watersmeet.lake.table_reader import TableReader, Where, in_portions, within

_RECORDS = pa.schema(
    {
        "source": pa.string(),
        "topic": pa.string(),
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
    columns = ["source", "topic", "partition", "until_offset", "position", "clock"]
    rows = reader.select(tables.PROGRESS, columns, [[("batch", "=", batch)]]).to_pylist()
    cursors = {topic_partition(row): Cursor(row["until_offset"], row["position"]) for row in rows}
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
        end: BatchEnd,
        lag_ms: int | None,
        global_floor: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> Clocks:
        """Return the clocks at the end of a batch.

        `lag_ms`: maximum by which a tenant's clock may be behind the global one; None without
        tenants. `global_floor`: by topic-partition, a lower bound (ms) of every tenant's position
        since an earlier epoch, which had another lag.
        """
        cursors = {tp: cursor for tp, cursor in end.cursors.items() if tp.partition in end.clocks}
        ranges = {
            tp: OffsetRange(c.next_offset, c.next_offset, c.position, c.position, None)
            for tp, c in cursors.items()
        }
        plan = BatchPlan(0, ranges, end.clocks, has_late=False)
        if lag_ms is None:
            return SharedClock(plan, {})
        idle: dict[TopicPartition, list[IdleDecision]] = {}
        for tp, decision in read_decisions(self.reader, self.generation):
            idle.setdefault(tp, []).append(decision)
        heads = [HEADS.empty_table()]
        waiting = [_RECORDS.empty_table()]
        for input_id in sorted({tp.input for tp in cursors}):
            states = [
                PartitionState(
                    tp,
                    self.generation.begin.get(tp, 0),
                    cursor,
                    end.clocks[tp.partition],
                    idle.get(tp, ()),
                    global_floor.get(tp),
                )
                for tp, cursor in cursors.items()
                if tp.input == input_id
            ]
            heads.append(self._heads(input_id, states, lag_ms))
            waiting.append(
                self._waiting(input_id, [state for state in states if not state.is_cut_consumed])
            )
        return TenantClocks.of(
            pa.concat_tables(waiting), pa.concat_tables(heads), plan, idle, lag_ms
        )

    def _waiting(self, input_id: InputId, states: Sequence[PartitionState]) -> pa.Table:
        """Return the first waiting record of each topic-partition."""
        offsets = {state.tp.partition: state.cursor.next_offset for state in states}
        ranges = {p: (offset, offset + 1) for p, offset in offsets.items()}
        columns = _RECORDS.names[1:]
        where = of_topic(input_id, within(ranges))
        rows = self.reader.select(tables.bronze(input_id.source), columns, where).to_pylist()
        waiting = [
            {"source": input_id.source, **row}
            for row in rows
            if offsets.get(row["partition"]) == row["offset"]
        ]
        return pa.Table.from_pylist(waiting, _RECORDS)

    def _heads(self, input_id: InputId, states: Sequence[PartitionState], lag_ms: int) -> pa.Table:
        """Return the heads of an input's tenants, as `core.tenants.HEADS`."""
        consumed = [
            (state, state.cursor.next_offset)
            for state in states
            if state.cursor.position is not None
        ]
        own = self._largest(input_id, consumed, lag_ms)
        with_cut = [state for state in states if state.is_cut_consumed]
        first = first_offsets(
            self.reader,
            input_id,
            "event_time",
            {state.tp.partition: state.clock for state in with_cut},
            {state.tp.partition: state.begin for state in with_cut},
            {state.tp.partition: state.cursor.next_offset for state in with_cut},
        )
        cuts = {state: state.cut(first.get(state.tp.partition)) for state in with_cut}
        prefixes = [(state, cut.records_until) for state, cut in cuts.items()]
        at_cut = self._largest(input_id, prefixes, lag_ms)
        for state in states:
            p = state.tp.partition
            for decision in state.consumed_decisions():
                _raise(own, p, decision.tenant_times)
            for decision in cuts[state].decisions if state in cuts else ():
                _raise(at_cut, p, decision.tenant_times)
            if state.global_floor is not None:
                for by_tenant in (own, at_cut):
                    _raise(by_tenant, p, [(None, state.global_floor)])
        rows = [
            (*input_id, p, tenant, time, at_cut.get((p, tenant), NULL_TIME))
            for (p, tenant), time in own.items()
        ]
        return pa.Table.from_pylist(
            [dict(zip(HEADS.names, row, strict=True)) for row in rows], HEADS
        )

    def _largest(
        self, input_id: InputId, until: Sequence[tuple[PartitionState, int]], lag_ms: int
    ) -> _TenantTimes:
        """Return the largest event time of each tenant before these offsets.

        A time that is too old to count is left out.
        """
        largest: _TenantTimes = {}
        for portion in in_portions(until):
            where: Where = [
                [
                    ("partition", "=", state.tp.partition),
                    ("offset", ">=", state.begin),
                    ("offset", "<", offset),
                    ("event_time", ">", (state.cursor.position or 0) - lag_ms),
                ]
                for state, offset in portion
            ]
            values = {"time": ("max", "event_time")}
            rows = self.reader.summary(
                tables.bronze(input_id.source),
                ["partition", "tenant"],
                values,
                of_topic(input_id, where),
            ).to_pylist()
            largest |= {(row["partition"], row["tenant"]): row["time"] for row in rows}
        return largest


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
    def is_cut_consumed(self) -> bool:
        """True where the merge had read the first record that reached the clock."""
        return self.cursor.position is not None and self.cursor.position >= self.clock

    def consumed_decisions(self) -> list[IdleDecision]:
        """Return the decisions that the merge had read."""
        at = self.cursor.next_offset
        position = self.cursor.position or 0
        return [
            decision
            for decision in self.decisions
            if decision.after_offset < at and decision.event_time <= position
        ]

    def cut(self, first: int | None) -> ClockPrefix:
        """Return the cut.

        `first`: the first record that had reached the clock. A decision may have reached it
        earlier.
        """
        consumed = self.consumed_decisions()
        until = self.cursor.next_offset if first is None else first + 1
        for number, decision in enumerate(consumed):
            if decision.after_offset + 1 >= until:
                return ClockPrefix(until, consumed[:number])
            if decision.event_time >= self.clock:
                return ClockPrefix(decision.after_offset + 1, consumed[: number + 1])
        return ClockPrefix(until, consumed)


_TenantTimes: TypeAlias = dict[tuple[int, "str | None"], int]


def _raise(
    times: _TenantTimes, partition: int, tenant_times: Iterable[tuple[str | None, int]]
) -> None:
    for tenant, time in tenant_times:
        times[partition, tenant] = max(time, times.get((partition, tenant), time))
