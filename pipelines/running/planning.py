"""Plans silver's next batch: offset ranges and clocks.

Plans are made from the narrow columns of bronze beyond the last batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.columns import NULL_TIME, Int64s, groups, int64s, looked_up
from pipelines.core.idle import Idle, IdleDecision
from pipelines.core.plan import (
    NOTHING_AVAILABLE,
    Available,
    BatchPlan,
    Cursor,
    End,
    OffsetRange,
    Rules,
    TopicPartition,
    heads_of,
    plan_batch,
    positions_of,
)
from pipelines.core.reading import REDRIVEN_FROM
from pipelines.core.tenants import HEADS, TenantClocks
from pipelines.core.types import TENANT, own_columns
from pipelines.lake import tables
from pipelines.lake.table_reader import TableReader, first_offsets, sizes_of, with_sizes, within
from pipelines.monitoring.events import MergeProgress, SourceStanding
from pipelines.settings import Settings

_NARROW = ["partition", "offset", "event_time"]


class Sizes(NamedTuple):
    """The offsets of a topic-partition's records, in order, and their running total of bytes.

    The total at a record includes the record itself.
    """

    offsets: Int64s
    sums: Int64s

    def before(self, until: int) -> int:
        """Return the size (bytes) of the records before an offset."""
        count = int(np.searchsorted(self.offsets, until))
        return int(self.sums[count - 1]) if count else 0

    def within(self, limit: int) -> int:
        """Return how many records fit into a limit (bytes); at least one."""
        return max(1, int(np.searchsorted(self.sums, limit, side="right")))


@dataclass
class Tenants:
    """The tenants, as far as a planner knows them.

    `heads`: what the last batch has left (`core.tenants.HEADS`). `horizons`: what earlier epochs
    have left. `since`: what a lost lake has left (both as in `core.plan.Rules`). `rows`: the rows
    that the last plan saw, by source. `clocks`: the clocks then.
    """

    heads: pa.Table = field(default_factory=HEADS.empty_table)
    horizons: Mapping[tuple[int, str], int] = field(default_factory=dict)
    since: Mapping[int, int] = field(default_factory=dict)
    rows: list[pa.Table] = field(default_factory=list)
    clocks: TenantClocks | None = None

    def done(self) -> None:
        """Take the heads from the last plan, which is now committed."""
        if self.clocks is not None:
            self.heads = self.clocks.heads()


@dataclass
class Planner:
    """Plans the batches of one lake, from the last one on; writes nothing.

    `cursors`: how far the merge has consumed each topic-partition. `clocks`: the clocks (ms) of the
    last batch, by partition. `max_bytes`: maximum size of a batch's records, as they are in memory
    (`Engine.merge_bytes`). `ends`: where a rebuild stops; without any, what bronze has is merged as
    far as the clock goes. `horizons` and `epoch_start_clock`: what earlier epochs have left, by
    partition (`core.plan.Rules`). `epoch`: the number of the settings' epoch, and the batch that it
    begins with. `generation`: that of the batches. `tenants`: what is known of them, if there are
    any.
    """

    reader: TableReader
    settings: Settings
    next_batch: int
    cursors: dict[TopicPartition, Cursor]
    clocks: Mapping[int, int]
    idle: dict[TopicPartition, list[IdleDecision]]
    max_bytes: int
    ends: Mapping[TopicPartition, End] = field(default_factory=dict)
    horizons: dict[int, int] = field(default_factory=dict)
    epoch_start_clock: dict[int, int] = field(default_factory=dict)
    epoch: tuple[int, int] = (0, 0)
    generation: int = 0
    tenants: Tenants | None = None
    _available: dict[TopicPartition, Available] = field(default_factory=dict, repr=False)
    _heads_beyond: dict[TopicPartition, int] = field(default_factory=dict, repr=False)
    _sizes: dict[TopicPartition, Sizes] = field(default_factory=dict, repr=False)
    """Sizes of the records that the last plan looked at."""

    has_redriven: bool = field(default=True, repr=False)
    """True where there may be redriven records among those that the last plan looked at."""

    def next(self) -> BatchPlan | None:
        """Return the next batch; None if nothing has changed.

        Each topic-partition has an equal share of `max_records_per_batch`. If the batch would have
        more than `max_bytes`, each has an equal share of these, but always one record.
        """
        share = max(1, self.settings.merge.max_records_per_batch // len(self.cursors))
        plan = self._within(share)
        if plan is not None and self._bytes(plan) > self.max_bytes:
            plan = self._within(share, self.max_bytes // len(self.cursors))
        if plan is None or self.tenants is None:
            return plan
        self.tenants.clocks = self._clocks_of_tenants(plan)
        return replace(
            plan,
            has_late=self.begins_epoch(plan)
            or any(late for _, late in self.handled(plan).values()),
        )

    def begins_epoch(self, plan: BatchPlan) -> bool:
        """Return True if a plan is the first one of an epoch other than the lake's first."""
        return plan.epoch > 0 and self.epoch == (plan.epoch, plan.batch)

    def _within(self, share: int, share_bytes: int | None = None) -> BatchPlan | None:
        self._heads_beyond.clear()
        self._sizes.clear()
        self.has_redriven = False
        if self.tenants is not None:
            self.tenants.rows.clear()
        starts = {tp: cursor.next_offset for tp, cursor in self.cursors.items()}
        self._available = self._read(starts, share, share_bytes)
        plan = self._plan()
        if plan is None:
            # Offsets may have gaps longer than a share (transaction markers, compaction, a start at
            # `latest`). The search begins at the start: what has come since the first read lies in
            # the range of that read, and is not behind a gap.
            missing = {tp: start for tp, start in starts.items() if tp not in self._available}
            beyond = self._first_offsets(missing)
            if beyond:
                self._available |= self._read(beyond, share, share_bytes)
                plan = self._plan()
        return plan

    def _bytes(self, plan: BatchPlan) -> int:
        """Return the size (bytes) of a batch's records in memory."""
        return sum(
            self._sizes[tp].before(done.until_offset)
            for tp, done in plan.ranges.items()
            if tp in self._sizes
        )

    def done(self, plan: BatchPlan) -> None:
        """Move on behind a plan, which is now committed."""
        if self.tenants is not None:
            self.tenants.done()
        self.next_batch = plan.batch + 1
        self.clocks = plan.clocks
        self.cursors |= plan.cursors()

    def decided(self, decisions: Iterable[tuple[TopicPartition, IdleDecision]]) -> None:
        """Add decisions that the idle policy has made."""
        for tp, decision in decisions:
            self.idle.setdefault(tp, []).append(decision)

    @property
    def rules(self) -> Rules:
        """The rules for when a record is late, joins, and times out."""
        merge = self.settings.merge
        rules = Rules(merge.window, self.horizons, self.epoch_start_clock, not merge.has_due)
        if self.tenants is None:
            return rules
        return replace(
            rules,
            lag_ms=merge.tenant_max_lag_ms,
            tenant_horizons=self.tenants.horizons,
            since=self.tenants.since,
        )

    def bronze_ends(self) -> dict[TopicPartition, int]:
        """Return the offset after each topic-partition's last record in bronze.

        It is known as far as the last plan looked.
        """
        last = {tp: int(rows.offsets[-1]) + 1 for tp, rows in self._available.items()}
        return {tp: last.get(tp, cursor.next_offset) for tp, cursor in self.cursors.items()}

    def heads(self) -> dict[TopicPartition, int | None]:
        """Return the heads (ms) that the last plan saw."""
        return heads_of(self.cursors, self._available)

    def progress(self) -> MergeProgress:
        """Return the progress of the merge, as far as the last plan looked."""
        ends = self.bronze_ends()
        heads = self.heads()
        sources = {}
        for tp, cursor in self.cursors.items():
            head = heads[tp]
            decisions = self.idle.get(tp)
            if decisions and decisions[-1].after_offset + 1 >= ends[tp]:
                state = "idle"
            elif head is None:
                state = "waiting"
            else:  # what waits and is not ahead of the clock does not wait for another source
                is_ahead = head > self.clocks.get(tp.partition, NULL_TIME)
                state = "held" if ends[tp] > cursor.next_offset and is_ahead else "active"
            sources[tp] = SourceStanding(cursor.next_offset, cursor.position, head, state)
        return MergeProgress(
            self.clocks, sources, None if self.tenants is None else self.tenants.clocks
        )

    def records(self, plan: BatchPlan) -> dict[TopicPartition, int]:
        """Return, by topic-partition, how many records with a time a plan consumes.

        The plan must be the last one. Records count as far as it has looked.
        """
        counts = {}
        for tp, rows in self._available.items():
            if tp in plan.ranges:
                is_in = (rows.offsets < plan.ranges[tp].until_offset) & (
                    rows.event_times != NULL_TIME
                )
                counts[tp] = np.count_nonzero(
                    is_in if rows.is_idle is None else is_in & ~rows.is_idle
                )
        return counts

    def handled(self, plan: BatchPlan) -> dict[str, tuple[int, int]]:
        """Return, by source, how many of a plan's records are merged and how many are late.

        The plan must be the last one. Positions decide; heartbeats are counted, too, as either.
        """
        rules = self.rules
        if self.tenants is not None:
            return self._handled_of_tenants(rules)
        counts: dict[str, tuple[int, int]] = {}
        for tp, done in plan.ranges.items():
            rows = self._available.get(tp, NOTHING_AVAILABLE)
            is_in = (rows.offsets < done.until_offset) & (rows.event_times != NULL_TIME)
            if rows.is_idle is not None:
                is_in &= ~rows.is_idle
            positions = positions_of(Cursor(done.from_offset, done.position_before), rows)
            oldest = rules.late_before(np.full(len(positions), tp.partition), positions)
            late = np.count_nonzero(is_in & (rows.event_times < oldest))
            before = counts.get(tp.source, (0, 0))
            counts[tp.source] = before[0] + int(np.count_nonzero(is_in)) - late, before[1] + late
        return counts

    def _handled_of_tenants(self, rules: Rules) -> dict[str, tuple[int, int]]:
        """Return what `handled` does, with tenants: a record that waits for its tenant counts as
        merged.
        """
        tenants = self.tenants or Tenants()
        rows = self._rows()
        positions = np.array([], np.int64) if tenants.clocks is None else tenants.clocks.positions
        is_in = positions != NULL_TIME
        partitions = int64s(rows["partition"])
        late = is_in & (
            int64s(rows["event_time"].fill_null(NULL_TIME))
            < rules.late_before(partitions, positions, rows["tenant"])
        )
        late &= positions >= looked_up(partitions, rules.since, NULL_TIME)
        counts = {}
        for source in self.settings.inputs:
            mine = pc.equal(rows["source"], source).to_numpy()
            counts[source] = (
                int(np.count_nonzero(mine & is_in & ~late)),
                int(np.count_nonzero(mine & late)),
            )
        return counts

    def tenant_times(self, silent: Mapping[int, Idle]) -> dict[int, tuple[tuple[str, int], ...]]:
        """Return, by partition, what a decision about these silent sources tells tenants.

        Each tenant that is known on the other sources gets its smallest position there (ms), as far
        as the last plan looked. Empty without tenants.
        """
        if self.tenants is None or not silent:
            return {}
        heads = self.heads()
        ends = self.bronze_ends()
        ranges = {
            tp: OffsetRange(cursor.next_offset, ends[tp], cursor.position, heads[tp], heads[tp])
            for tp, cursor in self.cursors.items()
            if tp.partition in silent and tp.source not in silent[tp.partition].sources
        }
        clocks = {p: idle.event_time for p, idle in silent.items()}
        return self._clocks_of_tenants(
            BatchPlan(self.next_batch, ranges, clocks, has_late=False)
        ).ahead()

    def _clocks_of_tenants(self, plan: BatchPlan) -> TenantClocks:
        """Return the clocks of tenants after a plan, which must be the last one."""
        heads = (self.tenants or Tenants()).heads
        lag_ms = self.settings.merge.tenant_max_lag_ms or 0
        return TenantClocks.of(self._rows(), heads, plan, self.idle, lag_ms)

    def _rows(self) -> pa.Table:
        names = ["source", *_NARROW, *TENANT.names]
        kinds = [pa.string(), pa.int32(), pa.int64(), pa.int64(), pa.string()]
        nothing = pa.schema(list(zip(names, kinds, strict=True))).empty_table()
        return pa.concat_tables(
            [nothing, *(found.select(names) for found in (self.tenants or Tenants()).rows)]
        )

    def waits(self, tp: TopicPartition) -> bool:
        """Return True if the last plan saw records of a topic-partition beyond the clock."""
        return tp in self._available

    def _plan(self) -> BatchPlan | None:
        number, since = self.epoch
        begins = number > 0 and since == self.next_batch
        known = (self.clocks, self.rules, self._heads_beyond)
        plan = plan_batch(
            self.next_batch, self.cursors, self._available, *known, begins_epoch=begins
        )
        return None if plan is None else replace(plan, epoch=number, generation=self.generation)

    def before(self, plan: BatchPlan, clocks: Mapping[int, int]) -> Planner:
        """Return the planner as it was before a plan, after the batch with these clocks (ms)."""
        cursors = self.cursors | {
            tp: Cursor(done.from_offset, done.position_before) for tp, done in plan.ranges.items()
        }
        return replace(self, cursors=cursors, clocks=clocks, has_redriven=True)

    def _read(
        self, starts: Mapping[TopicPartition, int], share: int, share_bytes: int | None
    ) -> dict[TopicPartition, Available]:
        """Return offsets and event times in `[start, start + share)` of each topic-partition.

        A topic-partition without any is absent. `share_bytes`: of each, only as many records as fit
        into this size, but at least one.
        """
        untils = {tp: start + share for tp, start in starts.items()}
        for tp in starts.keys() & self.ends.keys():
            last = self.ends[tp]
            if untils[tp] >= last.until:
                untils[tp] = max(starts[tp], last.until)
                if last.head is not None:
                    self._heads_beyond[tp] = last.head
        rows: dict[TopicPartition, Available] = {}
        for source, mine in _by_source(starts).items():
            ranges = {p: (start, untils[TopicPartition(source, p)]) for p, start in mine.items()}
            found = self._select(source, ranges)
            rows |= by_partition(source, found, ranges)
            sizes = sizes_by_partition(
                found, sizes_of(self.reader, tables.bronze(source), found), ranges
            )
            self._sizes |= {TopicPartition(source, p): each for p, each in sizes.items()}
            for p, each in sizes.items():
                tp = TopicPartition(source, p)
                if share_bytes is not None and (kept := each.within(share_bytes)) < len(
                    rows[tp].offsets
                ):
                    rows[tp] = rows[tp].first(kept)
                    untils[tp] = rows[tp].end(kept)
                    self._heads_beyond.pop(tp, None)
        for tp, until in untils.items():
            decisions = [
                decision for decision in self.idle.get(tp, ()) if self._is_next(decision, tp, until)
            ]
            if decisions:
                rows[tp] = rows.get(tp, NOTHING_AVAILABLE).with_idle(decisions)
        return rows

    def _select(self, source: str, ranges: Mapping[int, tuple[int, int]]) -> pa.Table:
        table = tables.bronze(source)
        narrow = with_sizes(self.reader, table, _NARROW)
        narrow += own_columns(self.reader.columns(table), pa.schema([REDRIVEN_FROM]))
        found = self._select_all(source, narrow, ranges)
        says = found[REDRIVEN_FROM.name] if REDRIVEN_FROM.name in found.column_names else None
        self.has_redriven |= says is not None and says.null_count < len(says)
        return found

    def _select_all(
        self, source: str, narrow: Sequence[str], ranges: Mapping[int, tuple[int, int]]
    ) -> pa.Table:
        if self.tenants is None:
            return self.reader.select(tables.bronze(source), narrow, within(ranges))
        # The first record behind a range decides how far the clocks of tenants are.
        with_next = {p: (start, until + 1) for p, (start, until) in ranges.items()}
        found = self.reader.select(
            tables.bronze(source), [*narrow, *TENANT.names], within(with_next)
        )
        self.tenants.rows.append(
            found.append_column("source", pa.repeat(pa.scalar(source), found.num_rows))
        )
        return found

    def _is_next(self, decision: IdleDecision, tp: TopicPartition, until: int) -> bool:
        """Return True if a decision is before `until`, is not consumed, and moves the position."""
        cursor = self.cursors[tp]
        last = self.ends.get(tp)
        if last is not None and decision.after_offset + 1 >= last.until:
            return False  # it is part of the head already, or came later
        is_new = cursor.position is None or decision.event_time > cursor.position
        return is_new and cursor.next_offset <= decision.after_offset + 1 <= until

    def _first_offsets(self, starts: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Return bronze's first offset at or after each of these; absent if it has none."""
        return {
            TopicPartition(source, p): offset
            for source, mine in _by_source(starts).items()
            for p, offset in first_offsets(
                self.reader, tables.bronze(source), "offset", mine
            ).items()
        }


def _by_source(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[int, int]]:
    by_source: dict[str, dict[int, int]] = {}
    for tp, offset in offsets.items():
        by_source.setdefault(tp.source, {})[tp.partition] = offset
    return by_source


def sizes_by_partition(
    found: pa.Table, sizes: Int64s, ranges: Mapping[int, tuple[int, int]]
) -> dict[int, Sizes]:
    """Return the sizes of rows of bronze (bytes) by partition, only of those in its range."""
    offsets = int64s(found["offset"])
    by_number = {}
    for partition, rows in groups(int64s(found["partition"]), offsets).items():
        since, until = ranges.get(partition, (0, 0))
        rows = rows[(offsets[rows] >= since) & (offsets[rows] < until)]
        if len(rows):
            by_number[partition] = Sizes(offsets[rows], np.cumsum(sizes[rows]))
    return by_number


def by_partition(
    source: str, found: pa.Table, ranges: Mapping[int, tuple[int, int]]
) -> dict[TopicPartition, Available]:
    """Return rows of bronze by topic-partition, in order of offset, only those in its range."""
    offsets = int64s(found["offset"])
    times = int64s(found["event_time"].fill_null(NULL_TIME))
    available = {}
    for partition, rows in groups(int64s(found["partition"]), offsets).items():
        # A query may also return neighbours of the requested rows.
        since, until = ranges.get(partition, (0, 0))
        rows = rows[(offsets[rows] >= since) & (offsets[rows] < until)]
        if len(rows):
            available[TopicPartition(source, partition)] = Available(offsets[rows], times[rows])
    return available
