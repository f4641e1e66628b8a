"""Where the clocks of tenants stood after a batch, derived from bronze and the idle policy's decisions: no table keeps it.

Of each topic-partition it takes the largest event time of each tenant, as far as that is not too old to count, and the first
record that was at the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from pipelines.core.columns import NO_TIME
from pipelines.core.idle import IdleDecision
from pipelines.core.plan import BatchPlan, Cursor, OffsetRange, TopicPartition
from pipelines.core.tenants import HEADS, TenantClocks
from pipelines.lake import tables
from pipelines.lake.decisions import read_decisions
from pipelines.lake.generations import Generation
from pipelines.lake.questions import Condition, Questions, Where, in_portions, within

_RECORDS = pa.schema(
    {"source": pa.string(), "partition": pa.int32(), "offset": pa.int64(), "event_time": pa.int64(), "tenant": pa.string()}
)


class Moment(NamedTuple):
    """The end of a batch: how far the merge had passed each topic-partition, and by partition the clock (ms)."""

    cursors: Mapping[TopicPartition, Cursor]
    clocks: Mapping[int, int]


def moment_of(questions: Questions, batch: int) -> Moment:
    """The end of a batch that `progress` has."""
    columns = ["source", "partition", "until_offset", "position", "clock"]
    rows = questions.select(tables.PROGRESS, columns, [[("batch", "=", batch)]]).to_pylist()
    cursors = {TopicPartition(row["source"], row["partition"]): Cursor(row["until_offset"], row["position"]) for row in rows}
    return Moment(cursors, {row["partition"]: row["clock"] for row in rows if row["clock"] is not None})


@dataclass(frozen=True)
class Heads:
    """Asks for the clocks of tenants in a generation of a lake."""

    questions: Questions
    generation: Generation

    def clocks_at(self, moment: Moment, lag_ms: int, of_all: Mapping[TopicPartition, int] = MappingProxyType({})) -> TenantClocks:
        """The clocks of tenants at a moment. `of_all`: what all tenants had at the least on a topic-partition since an earlier
        epoch (ms), which had another lag.
        """
        begins = self.generation.begin
        idle: dict[TopicPartition, list[IdleDecision]] = {}
        for tp, decision in read_decisions(self.questions, self.generation):
            idle.setdefault(tp, []).append(decision)
        heads, waiting = [HEADS.empty_table()], [_RECORDS.empty_table()]
        known = {tp: cursor for tp, cursor in moment.cursors.items() if tp.partition in moment.clocks}
        for source in sorted({tp.source for tp in known}):
            stood = [
                _Stood(tp, begins.get(tp, 0), cursor, moment.clocks[tp.partition], idle.get(tp, ()), of_all.get(tp))
                for tp, cursor in known.items()
                if tp.source == source
            ]
            heads.append(self._heads(source, stood, lag_ms))
            waiting.append(self._waiting(source, [each for each in stood if not each.is_cut_passed]))
        ranges = {tp: OffsetRange(c.next_offset, c.next_offset, c.position, c.position, None) for tp, c in known.items()}
        plan = BatchPlan(0, ranges, moment.clocks, has_late=False)
        return TenantClocks.of(pa.concat_tables(waiting), pa.concat_tables(heads), plan, idle, lag_ms)

    def _waiting(self, source: str, stood: Sequence[_Stood]) -> pa.Table:
        """The records that wait first."""
        at = {each.tp.partition: each.cursor.next_offset for each in stood}
        ranges = {p: (offset, offset + 1) for p, offset in at.items()}
        found = self.questions.select(tables.bronze(source), _RECORDS.names[1:], within(ranges)).to_pylist()
        rows = ({"source": source, **row} for row in found if at.get(row["partition"]) == row["offset"])
        return pa.Table.from_pylist(list(rows), _RECORDS)

    def _heads(self, source: str, stood: Sequence[_Stood], lag_ms: int) -> pa.Table:
        """Those of a source, as `core.tenants.HEADS`."""
        first = self._first_at_clock(source, [each for each in stood if each.is_cut_passed])
        passed = [(each, each.cursor.next_offset) for each in stood if each.cursor.position is not None]
        own = self._largest(source, passed, lag_ms)
        cuts = {each: each.cut(first.get(each.tp.partition)) for each in stood if each.is_cut_passed}
        at_cut = self._largest(source, [(each, cut.records_until) for each, cut in cuts.items()], lag_ms)
        for each in stood:
            p = each.tp.partition
            for decision in each.passed():
                _raise(own, p, decision.told)
            for decision in cuts[each].decisions if each in cuts else ():
                _raise(at_cut, p, decision.told)
            if each.of_all is not None:
                for found in (own, at_cut):
                    _raise(found, p, [(None, each.of_all)])
        rows = [(source, p, tenant, time, at_cut.get((p, tenant), NO_TIME)) for (p, tenant), time in own.items()]
        return pa.Table.from_pylist([dict(zip(HEADS.names, row, strict=True)) for row in rows], HEADS)

    def _first_at_clock(self, source: str, stood: Sequence[_Stood]) -> dict[int, int]:
        """By partition the offset of the first record that had come to the clock."""
        found: dict[int, int] = {}
        for some in in_portions(stood):
            where: Where = [[*each.passed_offsets(each.cursor.next_offset), ("event_time", ">=", each.clock)] for each in some]
            rows = self.questions.summary(tables.bronze(source), ["partition"], {"first": ("min", "offset")}, where).to_pylist()
            found |= {row["partition"]: row["first"] for row in rows}
        return found

    def _largest(self, source: str, until: Sequence[tuple[_Stood, int]], lag_ms: int) -> _Own:
        """The largest event time of each tenant before these offsets, where it is not too old to count."""
        found: _Own = {}
        for some in in_portions(until):
            where: Where = [
                [*each.passed_offsets(offset), ("event_time", ">", (each.cursor.position or 0) - lag_ms)] for each, offset in some
            ]
            values = {"time": ("max", "event_time")}
            rows = self.questions.summary(tables.bronze(source), ["partition", "tenant"], values, where).to_pylist()
            found |= {(row["partition"], row["tenant"]): row["time"] for row in rows}
        return found


class _Cut(NamedTuple):
    """A cut that was passed: the exclusive end offset of its records, and its decisions."""

    records_until: int
    decisions: Sequence[IdleDecision]


@dataclass(frozen=True, eq=False)
class _Stood:
    """A topic-partition at a moment: since which offset its state counts, how far it was passed, and the clock (ms)."""

    tp: TopicPartition
    begin: int
    cursor: Cursor
    clock: int
    decisions: Sequence[IdleDecision]
    of_all: int | None

    @property
    def is_cut_passed(self) -> bool:
        """Whether the first record that has come to the clock was passed."""
        return self.cursor.position is not None and self.cursor.position >= self.clock

    def passed(self) -> list[IdleDecision]:
        """The decisions that were passed."""
        at, position = self.cursor.next_offset, self.cursor.position or 0
        return [each for each in self.decisions if each.after_offset < at and each.event_time <= position]

    def cut(self, first: int | None) -> _Cut:
        """The cut; `first`: the first record that had come to the clock. A decision may have come to it before."""
        passed = self.passed()
        until = self.cursor.next_offset if first is None else first + 1
        for number, decision in enumerate(passed):
            if decision.after_offset + 1 >= until:
                return _Cut(until, passed[:number])
            if decision.event_time >= self.clock:
                return _Cut(decision.after_offset + 1, passed[: number + 1])
        return _Cut(until, passed)

    def passed_offsets(self, until: int) -> list[Condition]:
        """The records since the beginning, before an offset."""
        return [("partition", "=", self.tp.partition), ("offset", ">=", self.begin), ("offset", "<", until)]


_Own: TypeAlias = dict[tuple[int, "str | None"], int]


def _raise(found: _Own, partition: int, told: Iterable[tuple[str | None, int]]) -> None:
    for tenant, time in told:
        found[partition, tenant] = max(time, found.get((partition, tenant), time))
