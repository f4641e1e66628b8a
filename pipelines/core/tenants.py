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
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.columns import (
    MAX_TIME,
    NULL_TIME,
    Booleans,
    Int64s,
    groups,
    int64s,
    looked_up,
    times_ms,
)
from pipelines.core.idle import IdleDecision
from pipelines.core.plan import (
    BatchPlan,
    OffsetRange,
    Rules,
    TopicPartition,
    by_topic_partition,
)
from pipelines.core.positions import Positioned

HEADS = pa.schema(
    {
        "source": pa.string(),
        "partition": pa.int32(),
        "tenant": pa.string(),
        "own": pa.int64(),
        "at_cut": pa.int64(),
    }
)
"""Schema of what a batch leaves to the next one, by topic-partition and tenant.

`own` is the largest event time (ms) of the tenant's own records and heartbeats so far. `at_cut` is
the largest up to the end of the cut at the last clock (`NULL_TIME`: none). The tenant null has the
heartbeats that count for all tenants.
"""

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

        `records` has source, partition, offset, event_time and tenant of at least every record in
        the batch's ranges, and of the first one after each range, in any order; others are passed
        over. `heads` is what the batch before has left (`HEADS`). `partitions` limits these records
        to some partitions; without it, all are considered.
        """
        decided = {tp: done.idle_decisions_in(idle.get(tp, ())) for tp, done in plan.ranges.items()}
        tenant_times = [
            tenant
            for decisions in decided.values()
            for decision in decisions
            for tenant, _ in decision.tenant_times
        ]
        (of_records, of_heads, _), names = _numbered(
            records["tenant"], heads["tenant"], pa.chunked_array([tenant_times], pa.string())
        )
        numbers = (
            {name: number for number, name in enumerate(names.to_pylist())} if tenant_times else {}
        )
        sources = sorted({tp.source for tp in plan.ranges})
        rows_of = by_topic_partition(records, sources, int64s(records["offset"]))
        heads_of = by_topic_partition(heads, sources, np.zeros(heads.num_rows, np.int64))
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
            before = _Before(of_heads[kept], own[kept], at_cut[kept])
            timeline = _PartitionTimeline.of(
                tp.source,
                done,
                clock,
                lag_ms,
                offsets[rows],
                times[rows],
                of_records[rows],
                before,
                decided[tp],
                numbers,
            )
            own_positions = timeline.own_positions()
            positions[rows[: len(own_positions)]] = own_positions
            timelines.setdefault(tp.partition, []).append(timeline)
        return cls(plan, positions, names, timelines)

    def positioned(self, records: pa.Table) -> Positioned:
        """See `core.clocks.Clocks.positioned`. The clocks must have been made of these records."""
        is_keyed = ~records["heartbeat"].to_numpy()
        numbers = np.flatnonzero((self.positions != NULL_TIME) & is_keyed)
        times = times_ms(records["event_time"])[numbers]
        return Positioned(records.take(pa.array(numbers)), times, self.positions[numbers])

    def waits(self, records: Positioned) -> Booleans:
        """See `core.clocks.Clocks.waits`."""
        clocks = self.at(int64s(records.rows["partition"]), records.rows["tenant"])
        return np.asarray(records.positions > clocks, np.bool_)

    def may_have_late(self, records: pa.Table, rules: Rules) -> bool:
        """See `core.clocks.Clocks.may_have_late`. Heartbeats count, too."""
        partitions = int64s(records["partition"])
        oldest = rules.late_before(partitions, self.positions)
        if rules.tenant_horizons:
            oldest = np.maximum(oldest, rules.tenant_floor(partitions, records["tenant"]))
        is_late = (self.positions != NULL_TIME) & (_times(records["event_time"]) < oldest)
        is_late &= self.positions >= looked_up(partitions, rules.since, NULL_TIME)
        return bool(is_late.any())

    def at(self, partitions: Int64s, tenants: pa.ChunkedArray) -> Int64s:
        """Return the clock of each of these tenants in its partition.

        It is `NULL_TIME` where the partition has none.
        """
        found = np.full(len(partitions), NULL_TIME)
        numbers = self._numbers(tenants)
        for p, rows in groups(partitions).items():
            if p in self._timelines:
                clocks = [
                    timeline.at_cut(numbers[rows], len(self.names))
                    for timeline in self._timelines[p]
                ]
                found[rows] = np.minimum.reduce([*clocks, np.full(len(rows), self.plan.clocks[p])])
        return found

    def last_open(self, partitions: Int64s, tenants: pa.ChunkedArray, due: Int64s) -> Int64s:
        """Return, per tenant, the largest global clock at which its clock was not yet past `due`.

        The tenant's clock has passed that time now. The result is the largest, over the sources, of
        the position just before the record that took the tenant's position past the time. Sources
        that had passed it before the batch do not count, since others had not.
        """
        found = np.full(len(partitions), NULL_TIME)
        numbers = self._numbers(tenants)
        for p, rows in groups(partitions).items():
            found[rows] = np.maximum.reduce(
                [
                    timeline.before_passing(numbers[rows], due[rows], len(self.names))
                    for timeline in self._timelines[p]
                ]
            )
        return np.asarray(np.maximum(due, found), np.int64)

    def of_unknown_tenant(self) -> dict[int, int]:
        """Return by partition the clock (ms) of a tenant of which nothing is known."""
        partitions = np.array(sorted(self._timelines), np.int64)
        nobody = pa.chunked_array([pa.nulls(len(partitions), pa.string())])
        return dict(zip(partitions.tolist(), self.at(partitions, nobody).tolist(), strict=True))

    def of_tenants(self) -> dict[tuple[int, str], int]:
        """Return by partition and tenant the clocks (ms) of the tenants that are known there."""
        heads = self.heads()
        known = (
            heads.filter(heads["tenant"].is_valid()).group_by(["partition", "tenant"]).aggregate([])
        )
        clocks = self.at(int64s(known["partition"]), known["tenant"])
        return dict(
            zip(
                zip(*(known[name].to_pylist() for name in known.column_names), strict=True),
                clocks.tolist(),
                strict=True,
            )
        )

    def ahead(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """Return by partition each known tenant with its smallest position (ms) after all records.

        Only tenants are included whose position is larger than that of a tenant of which nothing is
        known. They are in order of their names.
        """
        found = {}
        for p, timelines in self._timelines.items():
            known = np.unique(np.concatenate([timeline.numbers for timeline in timelines]))
            known = known[known != _ALL]
            ends = np.minimum.reduce(
                [
                    timeline.at_end(np.append(known, len(self.names)), len(self.names))
                    for timeline in timelines
                ]
            )
            known = known[ends[:-1] > ends[-1]]
            times = ends[:-1][ends[:-1] > ends[-1]]
            found[p] = tuple(
                sorted(
                    zip(self.names.take(pa.array(known)).to_pylist(), times.tolist(), strict=True)
                )
            )
        return found

    def considered(self) -> dict[TopicPartition, int]:
        """Return the position (ms) of the last record considered, by topic-partition.

        The first record that waits counts, too.
        """
        return {
            TopicPartition(timeline.source, p): int(
                timeline.positions[max(timeline.passed, timeline.cut or 0)]
            )
            for p, timelines in self._timelines.items()
            for timeline in timelines
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
                    pa.repeat(pa.scalar(timeline.source), count),
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


@dataclass(frozen=True)
class _PartitionTimeline:
    """A topic-partition over a batch, row by row, up to the first row that waits.

    Row 0 is the state before the batch. `numbers`, `rows` and `rises` are about events: each is a
    row at which a tenant had an event time of its own. Events are sorted by tenant, then by row.
    """

    source: str
    done: OffsetRange
    lag_ms: int
    positions: Int64s
    """The position of all records at each row."""
    passed: int
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
    of_records: Int64s
    """The events of the records, in order of offset."""

    @classmethod
    def of(
        cls,
        source: str,
        done: OffsetRange,
        clock: int,
        lag_ms: int,
        offsets: Int64s,
        times: Int64s,
        tenants: Int64s,
        before: _Before,
        decisions: Sequence[IdleDecision],
        numbers: Mapping[str, int],
    ) -> _PartitionTimeline:
        """Build it from a range's records in order of offset, and the one after it, if it is there.

        Raise ValueError where the first record at the clock is missing.
        """
        at = NULL_TIME if done.position_before is None else done.position_before
        # Where nothing waits, what follows the range came after the plan.
        if done.position is not None and done.position >= clock:
            known = int(np.searchsorted(offsets, done.until_offset))
            offsets = offsets[:known]
            times = times[:known]
            tenants = tenants[:known]
        count = len(decisions)
        of_all = np.concatenate(
            [np.array([each.after_offset + 1 for each in decisions], np.int64), offsets]
        )
        of_all_times = np.concatenate(
            [np.array([each.event_time for each in decisions], np.int64), times]
        )
        # So a decision comes before the record whose offset it has.
        order = np.argsort(of_all, kind="stable")
        row_of = np.empty(len(order), np.int64)
        row_of[order] = np.arange(1, len(order) + 1)
        positions = np.maximum.accumulate(np.concatenate([[at], of_all_times[order]]))
        tenant_times = [
            (row_of[i], numbers[tenant], time)
            for i, each in enumerate(decisions)
            for tenant, time in each.tenant_times
        ]
        told_rows, told_numbers, told_times = (
            np.array([each[i] for each in tenant_times], np.int64) for i in range(3)
        )
        of_rows = np.concatenate(
            [np.zeros(len(before.numbers), np.int64), row_of[count:], told_rows]
        )
        of_tenants = np.concatenate([before.numbers, tenants, told_numbers])
        by_row = np.argsort(of_rows, kind="stable")  # nearly sorted already
        by_tenant = by_row[np.argsort(of_tenants[by_row], kind="stable")]
        rises = _running(
            of_tenants[by_tenant], np.concatenate([before.own, times, told_times])[by_tenant]
        )
        place_of = np.empty(len(by_tenant), np.int64)
        place_of[by_tenant] = np.arange(len(by_tenant))
        of_records = place_of[len(before.numbers) : len(before.numbers) + len(times)]
        passed = int(np.searchsorted(positions, clock, side="right")) - 1
        cut = None if at >= clock else int(np.searchsorted(positions, clock))
        if cut is not None and cut >= len(positions):
            raise ValueError(
                f"the first record of {source} at the clock, at or behind offset "
                f"{done.until_offset}, is missing"
            )
        by_rows = of_tenants[by_tenant], of_rows[by_tenant], rises
        return cls(source, done, lag_ms, positions, passed, cut, *by_rows, before, of_records)

    def own_positions(self) -> Int64s:
        """Return each record's position in its tenant.

        It is `NULL_TIME` where the record is not passed, or has no tenant.
        """
        rows = self.rows[self.of_records]
        found = np.maximum(
            self.rises[self.of_records],
            np.maximum(self._of_all[rows], self.positions[rows] - self.lag_ms),
        )
        return np.where(
            (rows <= self.passed) & (self.numbers[self.of_records] != _ALL), found, NULL_TIME
        )

    @cached_property
    def _of_all(self) -> Int64s:
        """The largest event time of heartbeats that count for all tenants, up to each row."""
        is_mine = self.numbers == _ALL
        found = np.full(len(self.positions), NULL_TIME)
        np.maximum.at(found, self.rows[is_mine], self.rises[is_mine])
        return np.asarray(np.maximum.accumulate(found), np.int64)

    def at_cut(self, tenants: Int64s, count: int) -> Int64s:
        """Return the positions of tenants at the end of the cut."""
        return self._positions(tenants, self._own_at_cut(count), self.cut or 0)

    def at_end(self, tenants: Int64s, count: int) -> Int64s:
        """Return the positions of tenants after all rows."""
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
        of_all = np.searchsorted(self._of_all, times, side="right")
        of_every = np.searchsorted(self.positions, times + self.lag_ms, side="right")
        known, ranks = np.unique(np.concatenate([self.rises, times]), return_inverse=True)
        stride = len(known) + 1
        of_rises = ranks[: len(self.rises)]
        of_times = ranks[len(self.rises) :]
        found = np.searchsorted(
            self.numbers * stride + of_rises, tenants * stride + of_times, side="right"
        )
        is_own = np.append(self.numbers, _ALL)[found] == tenants
        of_own = np.where(is_own, np.append(self.rows, last)[found], last)
        found = befores[of_every]
        for rows, was_at_cut in ((of_all, at_cut[_ALL]), (of_own, at_cut[tenants])):
            # A record after the cut came while the clock stood: it counts from the next step on.
            is_after_cut = (rows == 0) & (was_at_cut <= times)
            found = np.minimum(found, np.where(is_after_cut, self.positions[0], befores[rows]))
        return np.asarray(found, np.int64)

    def after(self, count: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return what is left to the next batch: tenants, and for each the times of `HEADS`."""
        is_passed = self.rows <= self.passed
        own = _last(self.numbers[is_passed], self.rises[is_passed], count)
        at_cut = self._own_at_cut(count)
        position = self.done.position
        left = np.flatnonzero(own > (NULL_TIME if position is None else position - self.lag_ms))
        numbers = np.where(left == count + 1, _ALL, left)
        return numbers, own[left], at_cut[left]

    def _own_at_cut(self, count: int) -> Int64s:
        """Return by tenant its own largest event time at the end of the cut.

        At the number after the last it is `NULL_TIME`.
        """
        if self.cut is None:
            return _last(self.before.numbers, self.before.at_cut, count)
        is_in = self.rows <= self.cut
        return _last(self.numbers[is_in], self.rises[is_in], count)


_NO_ROWS: Int64s = np.array([], np.int64)


def _last(numbers: Int64s, values: Int64s, count: int) -> Int64s:
    """Return by tenant the last of its values, `NULL_TIME` where it has none.

    The last element is that of no tenant.
    """
    found = np.full(count + 2, NULL_TIME)
    found[numbers] = values  # of several, numpy takes the last
    return found


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
        known, ranks = np.unique(values, return_inverse=True)
        return known[_running(by, np.asarray(ranks, np.int64))]
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
