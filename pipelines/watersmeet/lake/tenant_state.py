"""Clocks of tenants after a batch, which no table keeps.

They are derived from bronze and the idle policy's decisions. For each topic-partition this takes
the largest event time of each tenant, unless it is too old to count, and the first record that had
reached the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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

_TenantTimes: TypeAlias = dict[tuple[int, "str | None"], int]


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
        states = {
            tp: PartitionState(
                tp,
                self.generation.begin.get(tp, 0),
                cursor,
                end.clocks[tp.partition],
                global_floor.get(tp),
            )
            for tp, cursor in cursors.items()
        }
        by_input = {
            input_id: [state for tp, state in states.items() if tp.input == input_id]
            for input_id in sorted({tp.input for tp in cursors})
        }
        for input_id, input_states in by_input.items():
            self._cut(input_id, [state for state in input_states if state.is_cut_consumed])
        for tp, decision in read_decisions(self.reader, self.generation):
            if tp in states:
                states[tp].add(decision)
        heads = [HEADS.empty_table()]
        waiting = [_RECORDS.empty_table()]
        for input_id, input_states in by_input.items():
            heads.append(self._heads(input_id, input_states, lag_ms))
            waiting.append(
                self._waiting(input_id, [each for each in input_states if not each.is_cut_consumed])
            )
        idle = {tp: state.next_decisions for tp, state in states.items()}
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
        prefixes = [
            (state, min(state.cut_until, state.cursor.next_offset))
            for state in states
            if state.is_cut_consumed
        ]
        at_cut = self._largest(input_id, prefixes, lag_ms)
        for state in states:
            _raise(own, state.tenant_times.items())
            _raise(at_cut, state.tenant_times_at_cut.items())
            if state.global_floor is not None:
                for by_tenant in (own, at_cut):
                    _raise(by_tenant, [((state.tp.partition, None), state.global_floor)])
        rows = [
            (*input_id, p, tenant, time, at_cut.get((p, tenant), NULL_TIME))
            for (p, tenant), time in own.items()
        ]
        return pa.Table.from_pylist(
            [dict(zip(HEADS.names, row, strict=True)) for row in rows], HEADS
        )

    def _cut(self, input_id: InputId, states: Sequence[PartitionState]) -> None:
        """Set the end of each cut after the first record that had reached the clock."""
        first = first_offsets(
            self.reader,
            input_id,
            "event_time",
            {state.tp.partition: state.clock for state in states},
            {state.tp.partition: state.begin for state in states},
            {state.tp.partition: state.cursor.next_offset for state in states},
        )
        for state in states:
            offset = first.get(state.tp.partition)
            # Where no record had, a decision ends the cut, which may stand after the last of them.
            state.cut_until = (state.cursor.next_offset if offset is None else offset) + 1

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


@dataclass(eq=False)
class PartitionState:
    """Merge state of a topic-partition after a batch.

    - `begin`: the offset from which on its state counts.
    - `cursor`: how far it was read.
    - `clock`: of its partition, in ms.
    - `global_floor`: a lower bound (ms) of every tenant's position, if there is one.
    - `cut_until`: the exclusive end offset of the cut's records, where it was read in full.
    - `tenant_times`: the largest time (ms) that the decisions read give to each tenant.
    - `tenant_times_at_cut`: the same of those in the cut.
    - `next_decisions`: the decisions that were not read.
    """

    tp: TopicPartition
    begin: int
    cursor: Cursor
    clock: int
    global_floor: int | None
    cut_until: int = 0
    tenant_times: _TenantTimes = field(default_factory=dict)
    tenant_times_at_cut: _TenantTimes = field(default_factory=dict)
    next_decisions: list[IdleDecision] = field(default_factory=list)

    @property
    def is_cut_consumed(self) -> bool:
        """True where the merge had read the first record that reached the clock."""
        return self.cursor.position is not None and self.cursor.position >= self.clock

    def add(self, decision: IdleDecision) -> None:
        """Add the next decision about the topic-partition. It may have reached the clock before a
        record did; the cut ends there."""
        if not self.cursor.has_consumed(decision):
            self.next_decisions.append(decision)
            return
        p = self.tp.partition
        times = [((p, tenant), time) for tenant, time in decision.tenant_times]
        _raise(self.tenant_times, times)
        if decision.after_offset + 1 < self.cut_until:
            _raise(self.tenant_times_at_cut, times)
            if decision.event_time >= self.clock:
                self.cut_until = decision.after_offset + 1


def _raise(times: _TenantTimes, raised: Iterable[tuple[tuple[int, str | None], int]]) -> None:
    for place, time in raised:
        times[place] = max(time, times.get(place, time))
