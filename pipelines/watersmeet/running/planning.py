"""Plans silver's next batch: offset ranges and clocks.

Plans are made from the narrow columns of bronze beyond the last batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.clocks import Clocks, clocks_of, lookahead
from watersmeet.core.columns import NULL_TIME, Int64s, groups, int64s, row_values
from watersmeet.core.idle import Idle, IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.merge import Batch
from watersmeet.core.plan import (
    NOTHING_AVAILABLE,
    Available,
    BatchPlan,
    End,
    OffsetRange,
    TopicPartition,
    heads_of,
    plan_batch,
)
from watersmeet.core.reading import RECORD_BYTES, REDRIVEN_FROM
from watersmeet.core.state import State
from watersmeet.core.types import TENANT
from watersmeet.engine import Engine
from watersmeet.lake import tables
from watersmeet.lake.history import Generation
from watersmeet.lake.inputs import by_input, first_offsets, of_topic
from watersmeet.lake.recovered import read_out
from watersmeet.lake.schemas import avro_schemas
from watersmeet.lake.table_reader import TableReader, sizes_of, within
from watersmeet.monitoring.events import MergeProgress, SourceStanding
from watersmeet.running.published_parts import parts_among
from watersmeet.settings import Settings

_NARROW = pa.schema([("partition", pa.int32()), ("offset", pa.int64()), ("event_time", pa.int64())])
_RECORDS = pa.schema([("source", pa.string()), ("topic", pa.string()), *_NARROW, *TENANT])


@dataclass
class Planner:
    """Plans the batches of one lake, from a state on; writes nothing.

    - `state`: that after the last batch, under the rules of the settings' epoch.
    - `max_bytes`: maximum size of a batch's records, as they are in memory (`Engine.merge_bytes`).
    - `ends`: where a rebuild stops; without any, bronze is merged as far as the clock goes.
    - `has_redriven`: True where there may be redriven records among those that the last plan saw.
    """

    reader: TableReader
    settings: Settings
    state: State
    max_bytes: int
    ends: Mapping[TopicPartition, End] = field(default_factory=dict)
    has_redriven: bool = field(default=True, repr=False)
    _available: dict[TopicPartition, Available] = field(default_factory=dict, repr=False)
    _heads_beyond: dict[TopicPartition, int] = field(default_factory=dict, repr=False)
    _rows: list[pa.Table] = field(default_factory=list, repr=False)
    """The rows that the last plan looked at, by input, and those after them."""
    clocks: Clocks = field(init=False, repr=False)
    """The clocks after the last plan."""

    @property
    def partitions(self) -> list[int]:
        """The Kafka partitions that the merge reads."""
        return sorted({tp.partition for tp in self.state.cursors})

    def next(self) -> BatchPlan | None:
        """Return the next batch; None if nothing has changed.

        Each topic-partition has an equal share of `max_records_per_batch`. If the batch would have
        more than `max_bytes`, each has an equal share of these, but always one record.
        """
        count = len(self.state.cursors)
        share = max(1, self.settings.merge.max_records_per_batch // count)
        plan = self._within(share)
        if plan is not None and self.size(plan) > self.max_bytes:
            plan = self._within(share, self.max_bytes // count)
        if plan is None:
            return None
        rows = self._looked_at()
        self.clocks = self._clocks_after(plan, rows)
        may_have_late = self.clocks.may_have_late(rows, self.state.rules)
        return replace(plan, has_late=plan.has_late or self.state.begins_epoch or may_have_late)

    def _within(self, share: int, share_bytes: int | None = None) -> BatchPlan | None:
        self._heads_beyond.clear()
        self.has_redriven = False
        self._rows.clear()
        starts = {tp: cursor.next_offset for tp, cursor in self.state.cursors.items()}
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

    def size(self, plan: BatchPlan) -> int:
        """Return the size (bytes) of a plan's records in memory; the plan must be the last one."""
        return sum(
            rows.size_before(plan.ranges[tp].until_offset)
            for tp, rows in self._available.items()
            if tp in plan.ranges and len(rows.sizes)
        )

    def done(self, plan: BatchPlan) -> None:
        """Move on behind a plan, which is now committed."""
        self.state = self.state.after(plan, self.clocks)

    def bronze_ends(self) -> dict[TopicPartition, int]:
        """Return the offset after each topic-partition's last record in bronze.

        It is known as far as the last plan looked.
        """
        last = {tp: int(rows.offsets[-1]) + 1 for tp, rows in self._available.items()}
        return {tp: last.get(tp, cursor.next_offset) for tp, cursor in self.state.cursors.items()}

    def heads(self) -> dict[TopicPartition, int | None]:
        """Return the heads (ms) that the last plan saw."""
        return heads_of(self.state.cursors, self._available)

    def progress(self) -> MergeProgress:
        """Return the progress of the merge, as far as the last plan looked."""
        ends = self.bronze_ends()
        heads = self.heads()
        sources = {}
        for tp, cursor in self.state.cursors.items():
            head = heads[tp]
            decisions = self.state.idle.get(tp)
            if decisions and decisions[-1].after_offset + 1 >= ends[tp]:
                state = "idle"
            elif head is None:
                state = "waiting"
            else:  # what waits and is not ahead of the clock does not wait for another source
                is_ahead = head > self.state.clocks.get(tp.partition, NULL_TIME)
                state = "held" if ends[tp] > cursor.next_offset and is_ahead else "active"
            sources[tp] = SourceStanding(cursor.next_offset, cursor.position, head, state)
        return MergeProgress(self.state.clocks, sources, self.state)

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

    def tenant_times(self, silent: Mapping[int, Idle]) -> dict[int, tuple[tuple[str, int], ...]]:
        """Return, by partition, what a decision about these silent sources tells tenants.

        Each tenant that is known on the other sources gets its smallest position there (ms), as far
        as the last plan looked. Empty without tenants.
        """
        if not silent:
            return {}
        heads = self.heads()
        ends = self.bronze_ends()
        ranges = {
            tp: OffsetRange(cursor.next_offset, ends[tp], cursor.position, heads[tp], heads[tp])
            for tp, cursor in self.state.cursors.items()
            if tp.partition in silent and tp.input not in silent[tp.partition].inputs
        }
        clocks = {p: idle.event_time for p, idle in silent.items()}
        plan = BatchPlan(self.state.next_batch, ranges, clocks, has_late=False)
        return self._clocks_after(plan, self._looked_at()).ahead()

    def raised(
        self, tp: TopicPartition, times: Iterable[tuple[str, int]]
    ) -> tuple[tuple[str, int], ...]:
        """Return those of these tenants' times (ms) that a topic-partition has not come to."""
        heads = self.state.heads
        for column, value in {**tp.input._asdict(), "partition": tp.partition}.items():
            heads = heads.filter(pc.equal(heads[column], value))
        own = dict(row_values(heads, "tenant", "own"))
        return tuple((tenant, time) for tenant, time in times if time > own.get(tenant, NULL_TIME))

    def _clocks_after(self, plan: BatchPlan, rows: pa.Table) -> Clocks:
        """Return the clocks after a plan, which must be the last one."""
        state = self.state
        return clocks_of(state.rules, plan, state.idle, rows, state.heads)

    def _looked_at(self) -> pa.Table:
        return pa.concat_tables([_RECORDS.empty_table(), *self._rows])

    def waits(self, tp: TopicPartition) -> bool:
        """Return True if the last plan saw records of a topic-partition beyond the clock."""
        return tp in self._available

    def _plan(self) -> BatchPlan | None:
        state = self.state
        plan = plan_batch(
            state.next_batch,
            state.cursors,
            self._available,
            state.clocks,
            state.rules,
            self._heads_beyond,
            begins_epoch=state.begins_epoch,
        )
        if plan is None:
            return None
        ranges = self._to_ends(plan.ranges)
        return replace(plan, ranges=ranges, epoch=state.epoch, generation=state.generation)

    def _to_ends(
        self, ranges: Mapping[TopicPartition, OffsetRange]
    ) -> dict[TopicPartition, OffsetRange]:
        """Return the ranges of a rebuild's batch, of which each that takes all there is goes to the
        end, over holes before the record that waited there.
        """
        heads = self.heads() if self._heads_beyond else {}
        return {
            tp: replace(done, until_offset=max(done.until_offset, self.ends[tp].until))
            if tp in self._heads_beyond and done.position == heads[tp]
            else done
            for tp, done in ranges.items()
        }

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
        for input_id, input_starts in by_input(starts).items():
            ranges = {
                p: (start, untils[TopicPartition(input_id, p)]) for p, start in input_starts.items()
            }
            rows |= by_partition(input_id, self._select(input_id, ranges), ranges)
        if share_bytes is not None:
            within_share = {tp: every.within(share_bytes) for tp, every in rows.items()}
            for tp, first in within_share.items():
                if len(first.offsets) < len(rows[tp].offsets):
                    untils[tp] = first.end(len(first.offsets))
                    self._heads_beyond.pop(tp, None)
            rows = within_share
        for tp, until in untils.items():
            decided = self.state.idle.get(tp, ())
            decisions = [decision for decision in decided if self._is_next(decision, tp, until)]
            if decisions:
                rows[tp] = rows.get(tp, NOTHING_AVAILABLE).with_idle(decisions)
        return rows

    def _select(self, input_id: InputId, ranges: Mapping[int, tuple[int, int]]) -> pa.Table:
        table = tables.bronze(input_id.source)
        needs = lookahead(self.state.rules)
        until_next = {p: (start, until + needs.records) for p, (start, until) in ranges.items()}
        columns = [*_NARROW.names, REDRIVEN_FROM.name, RECORD_BYTES.name, *needs.columns]
        rows = self.reader.select(table, columns, of_topic(input_id, within(until_next)))
        redriven_from = rows[REDRIVEN_FROM.name]
        self.has_redriven |= redriven_from.null_count < len(redriven_from)
        if needs.records:
            records = rows
            for name, text in input_id._asdict().items():
                records = records.append_column(name, pa.repeat(pa.scalar(text), rows.num_rows))
            self._rows.append(records.select(_RECORDS.names))
        return rows

    def _is_next(self, decision: IdleDecision, tp: TopicPartition, until: int) -> bool:
        cursor = self.state.cursors[tp]
        last = self.ends.get(tp)
        if last is not None and decision.after_offset + 1 >= last.until:
            return False  # it is part of the head already, or came later
        is_new = cursor.position is None or decision.event_time > cursor.position
        return is_new and cursor.next_offset <= decision.after_offset + 1 <= until

    def _first_offsets(self, starts: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        offsets: dict[TopicPartition, int] = {}
        for input_id, input_starts in by_input(starts).items():
            firsts = first_offsets(self.reader, input_id, "offset", input_starts)
            offsets |= {TopicPartition(input_id, p): offset for p, offset in firsts.items()}
        return offsets


def by_partition(
    input_id: InputId, bronze_rows: pa.Table, ranges: Mapping[int, tuple[int, int]]
) -> dict[TopicPartition, Available]:
    """Return rows of bronze by topic-partition, in order of offset, only those in its range."""
    offsets = int64s(bronze_rows["offset"])
    times = int64s(bronze_rows["event_time"].fill_null(NULL_TIME))
    has_sizes = RECORD_BYTES.name in bronze_rows.column_names
    sizes = sizes_of(bronze_rows) if has_sizes else np.zeros_like(offsets)
    available = {}
    for partition, rows in groups(int64s(bronze_rows["partition"]), offsets).items():
        # A query may also return neighbours of the requested rows.
        since, until = ranges.get(partition, (0, 0))
        its = rows[(offsets[rows] >= since) & (offsets[rows] < until)]
        if len(its):
            tp = TopicPartition(input_id, partition)
            available[tp] = Available(offsets[its], times[its], sizes=sizes[its])
    return available


def make_batch(
    engine: Engine, settings: Settings, plan: BatchPlan, planner: Planner, generation: Generation
) -> Batch:
    """Return the planner's last plan as the merge takes it."""
    state = planner.state
    lake_settings = engine.lake.settings
    out: Mapping[TopicPartition, Int64s] = {}
    if plan.generation or planner.has_redriven:
        is_part = partial(parts_among, engine.reader, lake_settings, generation)
        out = read_out(engine.reader, generation, plan.offsets(), is_part)
    return Batch(
        plan,
        {name: source.value_type for name, source in lake_settings.sources.items()},
        state.rules,
        state.idle,
        settings.publish.max_bytes if settings.publish.value is None else None,
        {name: source.read_type for name, source in settings.sources.items()},
        [name for name, source in settings.sources.items() if source.has_earlier_schemas],
        avro_schemas(engine.reader, settings),
        begins_epoch=state.begins_epoch,
        has_ids=lake_settings.has_ids,
        out=out,
        within_ms=settings.publish.within_ms,
    )
