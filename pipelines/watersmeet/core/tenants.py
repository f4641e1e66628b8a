"""Clocks of tenants over a batch: positions of records in their tenants, and moves of the clocks.

The moves are how far each tenant's clock has come, and when.

A tenant's position on a topic-partition is the largest of:

- its own event times there,
- the event times of heartbeats that count for all tenants,
- the position of all less the lag.

Its clock is the smallest, over the sources, of what its position was at the cut. The cut ends with
the first record that had come to the global clock. `core.model` has the rules record by record;
these functions are compared with it. Times are in ms. Those of tenants are kept only where they
exceed what all tenants have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import (
    MAX_TIME,
    NULL_TIME,
    Booleans,
    Int64s,
    groups,
    int64s,
    looked_up,
    times_ms,
)
from watersmeet.core.idle import IdleDecision
from watersmeet.core.plan import (
    BatchPlan,
    OffsetRange,
    Rules,
    TopicPartition,
    by_topic_partition,
)
from watersmeet.core.positions import Positioned

HEADS = pa.schema(
    {
        "source": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "tenant": pa.string(),
        "own": pa.int64(),
        "at_cut": pa.int64(),
    }
)
"""Schema of what a batch leaves to the next one, by topic-partition and tenant.

`own` is the largest event time (ms) of the tenant's own records and heartbeats so far. `at_cut` is
the largest up to the end of the cut at the last clock. Either is `NULL_TIME` where it is too old
to count: not beyond the position of all less the lag. The tenant null has the heartbeats that count
for all tenants.
"""


class Cut(NamedTuple):
    """The cut of a topic-partition at a clock.

    - `until`: the exclusive end offset of its records.
    - `position`: that (ms) of its last record or decision, which had reached the clock.
    """

    until: int
    position: int


_ALL = -1
"""The number of no tenant, for heartbeats that count for all tenants."""


@dataclass(frozen=True)
class TenantClocks:
    """The clocks of tenants as a batch moves them."""

    plan: BatchPlan
    positions: Int64s
    """Each record's position in its tenant.

    It is `NULL_TIME` where the batch does not pass the record, or it has no tenant.
    """
    names: pa.Array
    """The tenants by their numbers."""
    _timelines: Mapping[int, Sequence[_PartitionTimeline]]

    @classmethod
    def of(
        cls,
        records: pa.Table,
        heads: pa.Table,
        plan: BatchPlan,
        idle: Mapping[TopicPartition, Sequence[IdleDecision]],
        lag_ms: int,
        partitions: Collection[int] | None = None,
    ) -> TenantClocks:
        """Compute the clocks of tenants over a batch.

        `records` has source, topic, partition, offset, event_time and tenant of at least every
        record in the batch's ranges, and of the first one after each range, in any order; others
        are passed over. `heads` is what the batch before has left (`HEADS`). `partitions` limits
        these records to some partitions; without it, all are considered.
        """
        decided = {tp: done.idle_decisions_in(idle.get(tp, ())) for tp, done in plan.ranges.items()}
        tenant_times = [
            tenant
            for decisions in decided.values()
            for decision in decisions
            for tenant, _ in decision.tenant_times
        ]
        (record_tenants, head_tenants, _), names = _numbered(
            records["tenant"], heads["tenant"], pa.chunked_array([tenant_times], pa.string())
        )
        numbers = (
            {name: number for number, name in enumerate(names.to_pylist())} if tenant_times else {}
        )
        inputs = sorted({tp.input for tp in plan.ranges})
        rows_of = by_topic_partition(records, inputs, int64s(records["offset"]))
        heads_of = by_topic_partition(heads, inputs, np.zeros(heads.num_rows, np.int64))
        offsets = int64s(records["offset"])
        times = _times(records["event_time"])
        own = int64s(heads["own"])
        at_cut = int64s(heads["at_cut"])
        positions = np.full(records.num_rows, NULL_TIME)
        timelines: dict[int, list[_PartitionTimeline]] = {}
        for tp, done in plan.ranges.items():
            clock = plan.clocks.get(tp.partition)
            if clock is None or (partitions is not None and tp.partition not in partitions):
                continue
            rows = rows_of.get(tp, _NO_ROWS)
            rows = rows[
                (offsets[rows] >= done.from_offset)
                & (offsets[rows] <= done.until_offset)
                & (times[rows] != NULL_TIME)
            ]
            kept = heads_of.get(tp, _NO_ROWS)
            before = _Before(head_tenants[kept], own[kept], at_cut[kept])
            read = _Records(offsets[rows], times[rows], record_tenants[rows])
            timeline = _PartitionTimeline.of(
                tp, done, clock, lag_ms, read, before, _Decided.of(decided[tp], numbers)
            )
            own_positions = timeline.own_positions()
            positions[rows[: len(own_positions)]] = own_positions
            timelines.setdefault(tp.partition, []).append(timeline)
        return cls(plan, positions, names, timelines)

    def positioned(self, records: pa.Table) -> Positioned:
        """See `core.clocks.SharedClock`. The clocks must have been made of these records."""
        is_keyed = ~records["heartbeat"].to_numpy()
        numbers = np.flatnonzero((self.positions != NULL_TIME) & is_keyed)
        times = times_ms(records["event_time"])[numbers]
        return Positioned(records.take(pa.array(numbers)), times, self.positions[numbers])

    def waits(self, records: Positioned) -> Booleans:
        """See `core.clocks.SharedClock`."""
        clocks = self.at(int64s(records.rows["partition"]), records.rows["tenant"])
        return np.asarray(records.positions > clocks, np.bool_)

    def may_have_late(self, records: pa.Table, rules: Rules) -> bool:
        """See `core.clocks.SharedClock`. Heartbeats count, too."""
        partitions = int64s(records["partition"])
        oldest = rules.late_before(partitions, self.positions, records["tenant"])
        is_late = (self.positions != NULL_TIME) & (_times(records["event_time"]) < oldest)
        is_late &= self.positions >= looked_up(partitions, rules.since, NULL_TIME)
        return bool(is_late.any())

    def at(self, partitions: Int64s, tenants: pa.ChunkedArray) -> Int64s:
        """Return the clock of each of these tenants in its partition.

        It is `NULL_TIME` where the partition has none.
        """
        tenant_clocks = np.full(len(partitions), NULL_TIME)
        numbers = self._numbers(tenants)
        for p, rows in groups(partitions).items():
            if p in self._timelines:
                clocks = [
                    timeline.at_cut(numbers[rows], len(self.names))
                    for timeline in self._timelines[p]
                ]
                tenant_clocks[rows] = np.minimum.reduce(
                    [*clocks, np.full(len(rows), self.plan.clocks[p])]
                )
        return tenant_clocks

    def last_open(self, partitions: Int64s, tenants: pa.ChunkedArray, due: Int64s) -> Int64s:
        """Return, per tenant, the largest global clock at which its clock was not yet past `due`.

        The tenant's clock has passed that time now. The result is the largest, over the sources, of
        the position just before the record that took the tenant's position past the time. Sources
        that had passed it before the batch do not count, since others had not.
        """
        befores = np.full(len(partitions), NULL_TIME)
        numbers = self._numbers(tenants)
        for p, rows in groups(partitions).items():
            befores[rows] = np.maximum.reduce(
                [
                    timeline.before_passing(numbers[rows], due[rows], len(self.names))
                    for timeline in self._timelines[p]
                ]
            )
        return np.asarray(np.maximum(due, befores), np.int64)

    def ahead(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """Return by partition each known tenant with its smallest position (ms) after all records.

        Only tenants are included whose position is larger than that of a tenant of which nothing is
        known. They are in order of their names.
        """
        tenants_ahead = {}
        for p, timelines in self._timelines.items():
            numbers = np.unique(np.concatenate([timeline.numbers for timeline in timelines]))
            numbers = numbers[numbers != _ALL]
            ends = np.minimum.reduce(
                [
                    timeline.at_end(np.append(numbers, len(self.names)), len(self.names))
                    for timeline in timelines
                ]
            )
            is_ahead = ends[:-1] > ends[-1]
            names = self.names.take(pa.array(numbers[is_ahead])).to_pylist()
            tenants_ahead[p] = tuple(sorted(zip(names, ends[:-1][is_ahead].tolist(), strict=True)))
        return tenants_ahead

    def cuts(self) -> dict[TopicPartition, Cut]:
        """Return the cuts after the batch that are others than before."""
        return {
            each.tp: Cut(int(each.ends[each.cut]), int(each.positions[each.cut]))
            for timelines in self._timelines.values()
            for each in timelines
            if each.cut is not None
        }

    def heads(self) -> pa.Table:
        """Return what the batch leaves to the next one (`HEADS`)."""
        chunks = [HEADS.empty_table()]
        for p, timelines in self._timelines.items():
            for timeline in timelines:
                numbers, own, at_cut = timeline.after(len(self.names))
                tenants = self.names.take(pa.array(numbers, pa.int64(), mask=numbers == _ALL))
                count = len(numbers)
                columns = [
                    *(pa.repeat(pa.scalar(text), count) for text in timeline.tp.input),
                    pa.array(np.full(count, p), pa.int32()),
                    tenants,
                ]
                chunks.append(
                    pa.Table.from_arrays([*columns, pa.array(own), pa.array(at_cut)], schema=HEADS)
                )
        return pa.concat_tables(chunks)

    def _numbers(self, tenants: pa.ChunkedArray) -> Int64s:
        """Return the numbers of names; one that the batch does not know has that after the last."""
        return int64s(
            pc.fill_null(
                pc.index_in(tenants.cast(pa.string()), value_set=self.names), len(self.names)
            )
        )


class _Before(NamedTuple):
    """A topic-partition's `HEADS`, with the tenants' numbers."""

    numbers: Int64s
    own: Int64s
    at_cut: Int64s


class _Records(NamedTuple):
    """Records of a topic-partition in order of offset, with the tenants' numbers."""

    offsets: Int64s
    times: Int64s
    tenants: Int64s


class _Decided(NamedTuple):
    """Decisions of the idle policy about a topic-partition, in order.

    `offsets` and `times`: by decision, the offset that it comes before, and its event time.
    `numbers`, `tenants` and `tenant_times`: for each time that a decision gives to a tenant, the
    number of the decision, that of the tenant, and the time.
    """

    offsets: Int64s
    times: Int64s
    numbers: Int64s
    tenants: Int64s
    tenant_times: Int64s

    @classmethod
    def of(cls, decisions: Sequence[IdleDecision], tenants: Mapping[str, int]) -> _Decided:
        """Return decisions as columns; `tenants` has the number of each tenant."""
        offsets = [decision.after_offset + 1 for decision in decisions]
        times = [decision.event_time for decision in decisions]
        of_tenants = [
            (number, tenants[tenant], time)
            for number, decision in enumerate(decisions)
            for tenant, time in decision.tenant_times
        ]
        columns = np.array(of_tenants, np.int64).reshape(-1, 3).T
        return cls(np.array(offsets, np.int64), np.array(times, np.int64), *columns)


@dataclass(frozen=True)
class _PartitionTimeline:
    """A topic-partition over a batch, row by row, up to the first row that waits.

    Row 0 is the state before the batch. `numbers`, `rows` and `rises` are about events: each is a
    row at which a tenant had an event time of its own. Events are sorted by tenant, then by row.
    """

    tp: TopicPartition
    done: OffsetRange
    lag_ms: int
    positions: Int64s
    """The position of all records at each row."""
    ends: Int64s
    """The exclusive end offset of the records up to each row."""
    last_reached: int
    """The last row that the clock has reached."""
    cut: int | None
    """The last row of the cut; None where the cut was passed before."""
    numbers: Int64s
    """The tenant's number, by event."""
    rows: Int64s
    """The row, by event."""
    rises: Int64s
    """The largest of the tenant's own event times up to then, by event."""
    before: _Before
    record_events: Int64s
    """The events of the records, in order of offset."""

    @classmethod
    def of(
        cls,
        tp: TopicPartition,
        done: OffsetRange,
        clock: int,
        lag_ms: int,
        records: _Records,
        before: _Before,
        decided: _Decided,
    ) -> _PartitionTimeline:
        """Build it from a range's records, and the one after it, if it is there.

        Raise ValueError where the first record at the clock is missing.
        """
        at = NULL_TIME if done.position_before is None else done.position_before
        # Where nothing waits, what follows the range came after the plan. Where a rebuild ends, the
        # head alone says so: it has the decisions that are there.
        is_reached = done.position is not None and done.position >= clock
        if is_reached or (done.head is not None and done.head <= clock):
            behind = int(np.searchsorted(records.offsets, done.until_offset))
            records = _Records(*(column[:behind] for column in records))
        count = len(decided.offsets)
        all_offsets = np.concatenate([decided.offsets, records.offsets])
        all_times = np.concatenate([decided.times, records.times])
        # So a decision comes before the record whose offset it has.
        order = np.argsort(all_offsets, kind="stable")
        row_of = np.empty(len(order), np.int64)
        row_of[order] = np.arange(1, len(order) + 1)
        positions = np.maximum.accumulate(np.concatenate([[at], all_times[order]]))
        ends = np.append(done.from_offset, all_offsets[order] + (order >= count))
        has_own = before.own != NULL_TIME
        begin = np.count_nonzero(has_own)
        first_rows = np.zeros(begin, np.int64)
        rows = np.concatenate([first_rows, row_of[count:], row_of[decided.numbers]])
        numbers = np.concatenate([before.numbers[has_own], records.tenants, decided.tenants])
        times = np.concatenate([before.own[has_own], records.times, decided.tenant_times])
        by_row = np.argsort(rows, kind="stable")  # nearly sorted already
        by_tenant = by_row[np.argsort(numbers[by_row], kind="stable")]
        event_of = np.empty(len(by_tenant), np.int64)
        event_of[by_tenant] = np.arange(len(by_tenant))
        record_events = event_of[begin : begin + len(records.times)]
        last_reached = int(np.searchsorted(positions, clock, side="right")) - 1
        cut = None if at >= clock else int(np.searchsorted(positions, clock))
        if cut is not None and cut >= len(positions):
            raise ValueError(
                f"the first record of {tp.input.topic} at the clock, at or behind offset "
                f"{done.until_offset}, is missing"
            )
        return cls(
            tp,
            done,
            lag_ms,
            positions,
            ends,
            last_reached,
            cut,
            numbers[by_tenant],
            rows[by_tenant],
            _running(numbers[by_tenant], times[by_tenant]),
            before,
            record_events,
        )

    def own_positions(self) -> Int64s:
        """Return each record's position in its tenant.

        It is `NULL_TIME` where the clock has not reached the record, or it has no tenant.
        """
        rows = self.rows[self.record_events]
        positions = np.maximum(
            self.rises[self.record_events],
            np.maximum(self._shared_times[rows], self.positions[rows] - self.lag_ms),
        )
        return np.where(
            (rows <= self.last_reached) & (self.numbers[self.record_events] != _ALL),
            positions,
            NULL_TIME,
        )

    @cached_property
    def _shared_times(self) -> Int64s:
        """The largest event time of heartbeats that count for all tenants, up to each row."""
        is_shared = self.numbers == _ALL
        maxima = np.full(len(self.positions), NULL_TIME)
        np.maximum.at(maxima, self.rows[is_shared], self.rises[is_shared])
        return np.asarray(np.maximum.accumulate(maxima), np.int64)

    def at_cut(self, tenants: Int64s, count: int) -> Int64s:
        return self._positions(tenants, self._own_at_cut(count), self.cut or 0)

    def at_end(self, tenants: Int64s, count: int) -> Int64s:
        return self._positions(tenants, _last(self.numbers, self.rises, count), -1)

    def _positions(self, tenants: Int64s, own: Int64s, row: int) -> Int64s:
        """Return the positions of tenants at a row.

        `own` is as `_last` returns it for the events up to that row.
        """
        return np.asarray(
            np.maximum(np.maximum(own[tenants], own[_ALL]), self.positions[row] - self.lag_ms),
            np.int64,
        )

    def before_passing(self, tenants: Int64s, times: Int64s, count: int) -> Int64s:
        """Return the position of all just before each tenant's position passed a time.

        It is `NULL_TIME` where that was in the cut of an earlier batch.
        """
        at_cut = _last(self.before.numbers, self.before.at_cut, count)
        befores = np.concatenate([[NULL_TIME], self.positions[:-1], [MAX_TIME]])
        last = len(befores) - 1
        shared_rows = np.searchsorted(self._shared_times, times, side="right")
        global_rows = np.searchsorted(self.positions, times + self.lag_ms, side="right")
        distinct, ranks = np.unique(np.concatenate([self.rises, times]), return_inverse=True)
        stride = len(distinct) + 1
        rise_ranks = ranks[: len(self.rises)]
        time_ranks = ranks[len(self.rises) :]
        events = np.searchsorted(
            self.numbers * stride + rise_ranks, tenants * stride + time_ranks, side="right"
        )
        is_own = np.append(self.numbers, _ALL)[events] == tenants
        own_rows = np.where(is_own, np.append(self.rows, last)[events], last)
        position = befores[global_rows]
        for rows, was_at_cut in ((shared_rows, at_cut[_ALL]), (own_rows, at_cut[tenants])):
            # A record after the cut came while the clock stood: it counts from the next step on.
            is_after_cut = (rows == 0) & (was_at_cut <= times)
            own_position = np.where(is_after_cut, self.positions[0], befores[rows])
            position = np.minimum(position, own_position)
        return np.asarray(position, np.int64)

    def after(self, count: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return what is left to the next batch: tenants, and for each the times of `HEADS`."""
        is_reached = self.rows <= self.last_reached
        own = _last(self.numbers[is_reached], self.rises[is_reached], count)
        at_cut = self._own_at_cut(count)
        position = self.done.position
        oldest = NULL_TIME if position is None else position - self.lag_ms
        own, at_cut = (np.where(times > oldest, times, NULL_TIME) for times in (own, at_cut))
        kept = np.flatnonzero((own != NULL_TIME) | (at_cut != NULL_TIME))
        numbers = np.where(kept == count + 1, _ALL, kept)
        return numbers, own[kept], at_cut[kept]

    def _own_at_cut(self, count: int) -> Int64s:
        """Return by tenant its own largest event time at the end of the cut.

        At the number after the last it is `NULL_TIME`.
        """
        if self.cut is None:
            return _last(self.before.numbers, self.before.at_cut, count)
        is_in = self.rows <= self.cut
        return _last(self.numbers[is_in], self.rises[is_in], count)


_NO_ROWS: Int64s = np.array([], np.int64)


def heads_after(
    heads: pa.Table, oldest: Mapping[TopicPartition, int] = MappingProxyType({})
) -> pa.Table:
    """Return the largest times of rows of `HEADS`: one row for each topic-partition and tenant.

    `oldest`: by topic-partition, the time (ms) up to which none counts.
    """
    if not heads.num_rows:
        return heads
    by = HEADS.names[:4]
    largest = heads.group_by(by).aggregate([("own", "max"), ("at_cut", "max")])
    largest = largest.rename_columns(HEADS.names).cast(HEADS)
    limits = np.full(largest.num_rows, NULL_TIME)
    inputs = sorted({tp.input for tp in oldest})
    for tp, rows in by_topic_partition(largest, inputs, int64s(largest["own"])).items():
        limits[rows] = oldest.get(tp, NULL_TIME)
    times = {name: int64s(largest[name]) for name in ("own", "at_cut")}
    times = {name: np.where(each > limits, each, NULL_TIME) for name, each in times.items()}
    is_kept = np.logical_or(*(each != NULL_TIME for each in times.values()))
    columns = [*(largest[name] for name in by), *map(pa.array, times.values())]
    return pa.Table.from_arrays(columns, schema=HEADS).filter(pa.array(is_kept))


def _last(numbers: Int64s, values: Int64s, count: int) -> Int64s:
    """Return by tenant the last of its values, `NULL_TIME` where it has none.

    The last element is that of no tenant.
    """
    lasts = np.full(count + 2, NULL_TIME)
    lasts[numbers] = values  # of several, numpy takes the last
    return lasts


def _running(by: Int64s, values: Int64s) -> Int64s:
    """Return the running maximum of values within each group.

    The rows of a group must be together, and groups ascend.
    """
    if not len(values):
        return values
    nth = np.cumsum(np.diff(by, prepend=by[:1]) != 0)
    low = int(values.min())
    span = int(values.max()) - int(values.min()) + 1
    if span * (int(nth[-1]) + 1) >= MAX_TIME:  # overflow: too many groups, times too far apart
        distinct, ranks = np.unique(values, return_inverse=True)
        return distinct[_running(by, np.asarray(ranks, np.int64))]
    starts = nth * span - low
    return np.asarray(np.maximum.accumulate(values + starts) - starts, np.int64)


def _numbered(*columns: pa.ChunkedArray) -> tuple[list[Int64s], pa.Array]:
    """Return columns of names as numbers, `_ALL` where null, and the names by number."""
    chunks = [chunk.cast(pa.string()) for column in columns for chunk in column.chunks]
    coded = pa.chunked_array(chunks, pa.string()).combine_chunks().dictionary_encode()
    numbers = int64s(coded.indices.fill_null(_ALL))
    ends = np.cumsum([len(column) for column in columns])
    return np.split(numbers, ends[:-1]), coded.dictionary


def _times(column: pa.ChunkedArray) -> Int64s:
    """Return a column of event times in ms, as bronze or as the answer of a question has them."""
    return (
        int64s(column.fill_null(NULL_TIME))
        if pa.types.is_integer(column.type)
        else times_ms(column)
    )
