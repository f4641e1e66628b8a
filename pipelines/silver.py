"""Silver: the merge of the sources by event time, a pure function of bronze, kept by one Delta commit per batch.

Progress is in tables, never in a Spark checkpoint. A batch is committed in this order:

1. *plan*: exact offset ranges and clocks, from bronze beyond the last batch (`plan_next`; writes nothing);
2. *progress*: the plan as rows of `progress` (`write_progress`): from here on the batch is decided;
3. *late*: the batch's late records (`_write_late`);
4. *merge*: the rows that change, by MERGE, or marked as gone and added, or with all open rows written anew (`_merge`);
5. *version*: which version of silver that was, as a row of `versions` (`write_version`).

A start completes the last batch of `progress` first: each write carries the batch's number, and Delta's own record of it says
which of them were made. Hence after a crash before 2 nothing is known of the batch and another plan may be made; between 2 and
3, and between 3 and 4, the same ranges are read again and what is missing is written; between 4 and 5, silver's history says
which version it was.

Where a source is silent, the idle policy may speak for it, between two batches: its decision is a row of `idle_heartbeats`,
and from then on as good as a record of bronze. A deliberate reset is a batch too: it merges nothing, closes what is open, and
goes on elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property, reduce

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.decisions import Decided, read_decisions, write_decisions
from pipelines.adapters.lake import Lake, wall_clock_ms
from pipelines.adapters.progress import metadata, read_last_batch, write_progress, write_version
from pipelines.batch_input import BatchInput
from pipelines.core.idle import Decision, decide
from pipelines.core.plan import (
    NO_ROWS,
    NO_TIME,
    BatchPlan,
    Cursor,
    End,
    Rows,
    TopicPartition,
    heads_of,
    plan_batch,
)
from pipelines.faults import reach
from pipelines.settings import Settings
from pipelines.silence import Silence
from pipelines.transforms.decode import parsed_value
from pipelines.transforms.fold import fold, union_with_open
from pipelines.transforms.message import with_validity
from pipelines.transforms.position import not_published, split_late, with_position
from pipelines.transforms.ranges import by_partition, within


@dataclass
class Silver:
    """The merge of one lake over `partitions` Kafka partitions; one owner at a time."""

    lake: Lake
    settings: Settings
    partitions: int
    silence: Silence | None = None
    """Who watches for silent sources; None: the idle policy does not speak."""
    ends: Mapping[TopicPartition, End] = field(default_factory=dict)
    """Where a rebuild stops; without any, what bronze has is merged as far as the clock goes."""
    _done: BatchPlan | None = field(default=None, repr=False)
    _cursors: dict[TopicPartition, Cursor] = field(default_factory=dict, repr=False)
    _available: dict[TopicPartition, Rows] = field(default_factory=dict, repr=False)
    _idle: dict[TopicPartition, list[Decision]] = field(default_factory=dict, repr=False)
    _recovered: DataFrame | None = None
    _heads_beyond: dict[TopicPartition, int] = field(default_factory=dict, repr=False)
    """Of a rebuild, the heads of what a batch considers up to the end."""

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[BatchPlan]:
        """Merges, batch by batch, everything in bronze that the clock has reached; yields each batch once it is committed."""
        if not self._cursors:
            self._recover()
        while not is_stopping():
            plan = self._plan_next()
            if plan is None:
                if not self._speak_for_the_silent():
                    return
                continue
            reach("silver.progress")
            self.commit(plan)
            reach("silver.done")
            yield plan

    def commit(self, plan: BatchPlan) -> None:
        """Steps 2 to 5 of a batch that was never begun."""
        try:
            write_progress(self.lake, self.settings, plan)
            self._complete(self._input(plan))
        except BaseException:
            self._cursors = {}  # the batch may be decided by now: it must be completed before another is planned
            raise
        self._done = plan
        self._cursors |= plan.cursors()

    def _complete(self, batch: BatchInput) -> None:
        """Steps 3 to 5, as far as they were not made."""
        plan = batch.plan
        if not self._has(tables.SILVER, plan):
            reach("silver.late")
            if plan.has_late and plan.reset is None and not self._has(tables.LATE, plan):
                self._write_late(batch)
            reach("silver.merge")
            with self.lake.saying(metadata(self.settings, plan)):
                self._merge(batch)
        reach("silver.version")
        if not self._has(tables.VERSIONS, plan):
            write_version(self.lake, plan)

    @property
    def cursors(self) -> Mapping[TopicPartition, Cursor]:
        """How far the merge has passed each topic-partition."""
        if not self._cursors:
            self._recover()
        return self._cursors

    @property
    def next_batch(self) -> int:
        """The number that the next batch has."""
        return self._done.batch + 1 if self._done else 0

    def _recover(self) -> None:
        """Takes up the state after the last batch in `progress`, having completed that batch where a crash cut it short."""
        every = [TopicPartition(source, p) for source in self.settings.sources for p in range(self.partitions)]
        self._recovered = self._read_recovered()
        last = self._done = read_last_batch(self.lake)
        cursors = dict.fromkeys(every, Cursor())
        begun = {tp: done.from_offset for tp, done in last.ranges.items()} if last else {}
        self._idle = self._read_idle({tp: begun.get(tp, 0) for tp in every})
        if last is not None:
            cursors |= last.cursors()
            if not self._has(tables.VERSIONS, last):  # the last of its writes
                self._complete(self._input(last))
        self._cursors = cursors

    def _has(self, table: str, plan: BatchPlan) -> bool:
        return self.lake.has_batch(table, plan.batch)

    def _plan_next(self) -> BatchPlan | None:
        """Step 1. Each topic-partition gets an equal share of `max_records_per_batch` to be considered in."""
        self._heads_beyond.clear()
        share = max(1, self.settings.merge.max_records_per_batch // len(self._cursors))
        starts = {tp: cursor.next_offset for tp, cursor in self._cursors.items()}
        self._available = self._read_rows(starts, share)
        plan = self._plan()
        if plan is None:
            # Offsets may have holes (transaction markers, compaction, a start at the latest) longer than a share.
            missing = {tp: start + share for tp, start in starts.items() if tp not in self._available}
            beyond = self._first_offsets_beyond(missing)
            if beyond:
                self._available |= self._read_rows(beyond, share)
                plan = self._plan()
        return plan

    def _plan(self) -> BatchPlan | None:
        clocks = self._done.clocks if self._done else {}
        timeout_ms = self.settings.merge.timeout_ms
        return plan_batch(self.next_batch, self._cursors, self._available, clocks, timeout_ms, self._heads_beyond)

    def _speak_for_the_silent(self) -> bool:
        """Whether a source was silent for so long that the idle policy moved its head on; its decision is durable then."""
        if self.silence is None:
            return False
        ends = {
            tp: int(r.offsets[-1]) + 1 if (r := self._available.get(tp)) else c.next_offset for tp, c in self._cursors.items()
        }
        silent = self.silence.observe(ends)
        heads, decided = heads_of(self._cursors, self._available), []
        for p in range(self.partitions):
            here = {tp.source: head for tp, head in heads.items() if tp.partition == p}
            decision = decide(here, {tp.source for tp in silent if tp.partition == p and tp not in self._available})
            if decision is not None:
                sources, event_time = decision
                after = {TopicPartition(s, p): self._cursors[TopicPartition(s, p)].next_offset - 1 for s in sources}
                if self.silence.has_nothing_beyond(after):
                    decided += [(tp, Decision(offset, event_time)) for tp, offset in after.items()]
        if decided:
            reach("idle.decide")
            write_decisions(self.lake, self.settings, decided)
            for tp, heartbeat in decided:
                self._idle.setdefault(tp, []).append(heartbeat)
        return bool(decided)

    def _read_idle(self, begun: Mapping[TopicPartition, int]) -> dict[TopicPartition, list[Decision]]:
        """The idle policy's heartbeats from these offsets on, by topic-partition."""
        found: dict[TopicPartition, list[Decision]] = {}
        for tp, decision in self._read_decisions():
            if decision.after_offset + 1 >= begun.get(tp, 0):
                found.setdefault(tp, []).append(decision)
        return found

    def _read_decisions(self) -> list[Decided]:
        return read_decisions(self.lake)

    def _read_recovered(self) -> DataFrame | None:
        if not self.lake.rows("SELECT 1 FROM {recovered} WHERE merge_key IS NOT NULL LIMIT 1"):
            return None
        return self.lake.read(tables.RECOVERED).where(F.col("merge_key").isNotNull())

    def _read_rows(self, starts: Mapping[TopicPartition, int], share: int) -> dict[TopicPartition, Rows]:
        """The narrow columns of bronze in `[start, start + share)` of each topic-partition; absent where there are none."""
        rows: dict[TopicPartition, Rows] = {}
        for source in {tp.source for tp in starts}:
            stretches = within({tp.partition: (o, self._end(tp, o, share)) for tp, o in starts.items() if tp.source == source})
            found = self.lake.query(
                f"SELECT `partition`, `offset`, event_time FROM {{{tables.bronze(source)}}} WHERE {stretches}"
            )
            partitions, offsets = found["partition"].to_numpy(), found["offset"].to_numpy()
            times = found["event_time"].fill_null(NO_TIME).to_numpy()
            for p in np.unique(partitions):
                mine = np.flatnonzero(partitions == p)
                ordered = mine[np.argsort(offsets[mine], kind="stable")]
                rows[TopicPartition(source, int(p))] = Rows(offsets[ordered], times[ordered])
        for tp in starts:
            heartbeats = [h for h in self._idle.get(tp, ()) if self._is_next(h, tp, self._end(tp, starts[tp], share))]
            if heartbeats:
                rows[tp] = rows.get(tp, NO_ROWS).with_idle(heartbeats)
        return rows

    def _end(self, tp: TopicPartition, start: int, share: int) -> int:
        """Before which offset a batch considers what stands in a topic-partition from `start` on."""
        end, last = start + share, self.ends.get(tp)
        if last is None or end < last.until:
            return end
        if last.head is not None:
            self._heads_beyond[tp] = last.head
        return max(start, last.until)

    def _is_next(self, heartbeat: Decision, tp: TopicPartition, end: int) -> bool:
        """Whether it stands before `end`, and is neither passed nor without effect."""
        cursor, last = self._cursors[tp], self.ends.get(tp)
        if last is not None and heartbeat.after_offset + 1 >= last.until:
            return False  # it is in the head already, or came later
        is_new = cursor.position is None or heartbeat.event_time > cursor.position
        return is_new and cursor.next_offset <= heartbeat.after_offset + 1 <= end

    def _first_offsets_beyond(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        first: dict[TopicPartition, int] = {}
        for source in {tp.source for tp in offsets}:
            beyond = within({tp.partition: (o, None) for tp, o in offsets.items() if tp.source == source})
            found = self.lake.rows(
                f"SELECT `partition`, MIN(`offset`) FROM {{{tables.bronze(source)}}} WHERE {beyond} GROUP BY `partition`"
            )
            first |= {TopicPartition(source, partition): offset for partition, offset in found}
        return first

    def _write_late(self, batch: BatchInput) -> None:
        """Step 3."""
        plan = batch.plan
        late = (
            batch.records({source: {"value": F.col("value")} for source in self.settings.sources})
            .transform(with_position(_positions_before(plan)))
            .transform(lambda records: split_late(self.settings.merge.timeout_ms)(records).late)
            .withColumn("batch", F.lit(plan.batch).cast("bigint"))
            .select(*self.lake.schema(tables.LATE).names)
        )
        with self._pace(batch):
            self.lake.append(late, tables.LATE, batch=plan.batch)

    def _pace(self, batch: BatchInput) -> AbstractContextManager[None]:
        """Inside, Spark compiles no code for what a small batch does with its own rows."""
        return self.lake.interpreted() if batch.is_small else nullcontext()

    def _input(self, plan: BatchPlan) -> BatchInput:
        """What both steps read, once."""
        return BatchInput(self.lake, self.settings, plan, self._idle)

    def _merge(self, batch: BatchInput) -> None:
        """Step 4: the river's meeting. One exchange by partition serves position and fold together.

        The rows that change go to silver by MERGE; where the batch is large beside what is open, all rows that are not
        finished are written anew, finished ones beside them, in one pass and one commit. What is small is at hand here, and
        written from here, the open rows that it changes marked as gone.
        """
        plan = batch.plan
        if plan.reset is not None:
            self._start_afresh(plan)
            return
        sources, timeout_ms = list(self.settings.sources), self.settings.merge.timeout_ms
        if batch.changes_nothing:
            with self.lake.interpreted():
                self.lake.append_rows([], tables.SILVER, batch=plan.batch)
            return
        rows = (
            batch.records(self._parsed)
            .transform(union_with_open(batch.open_rows(), sources))
            .transform(self._by_partition)
            .transform(with_position(_positions_before(plan)))
            .transform(lambda records: split_late(timeout_ms)(records).on_time)
            .transform(not_published(self._recovered, timeout_ms))
            .transform(fold(sources, timeout_ms, plan.clocks, plan.batch))
            .transform(with_validity(self.settings.publish, sources))
        )
        if batch.rewrites_open:
            self._write_open(rows.select(*self.lake.schema(tables.SILVER).names), batch)
            return
        changed = rows.where(F.col("batch") == plan.batch)
        if batch.is_small:
            found = self.lake.collect(changed)
            if batch.marks_open:
                gone = found.filter(found["updates_open"]).select(["partition", "merge_key"])
                self.lake.update_fetched(found.drop_columns(["updates_open"]), tables.SILVER, gone=gone, batch=plan.batch)
                return
            # MERGE reads its source more than once, and knows best what to do with one that is small and at hand.
            changed = self.lake.frame(found, changed.schema)
        columns: dict[str, str | Column] = {name: f"changed.`{name}`" for name in self.lake.schema(tables.SILVER).names}
        is_its_open_row = (
            "silver.status = 'open' AND changed.updates_open "
            "AND silver.partition = changed.partition AND silver.merge_key = changed.merge_key"
        )
        merge = (
            self.lake.delta(tables.SILVER)
            .alias("silver")
            .merge(changed.alias("changed"), is_its_open_row)
            .whenMatchedUpdate(set=columns)
            .whenNotMatchedInsert(values=columns)
        )
        with self.lake.once(tables.SILVER, plan.batch, merge_materializeSource="none" if batch.is_small else "all"):
            merge.execute()

    def _write_open(self, rows: DataFrame, batch: BatchInput) -> None:
        """`rows`, and the open ones that they leave as they are, take the place of all that are open."""
        others = batch.other_open_rows
        if others is None:
            self.lake.replace(rows, tables.SILVER, batch=batch.plan.batch)
            return
        everything = pa.concat_tables([self.lake.collect(rows).cast(others.schema), others])
        self.lake.replace_fetched(everything, tables.SILVER, batch=batch.plan.batch)

    def _start_afresh(self, plan: BatchPlan) -> None:
        """A reset's place of step 4: what is open is closed unpublished, and the decision is kept in `resets`.

        Where the jump goes back, what was made of the records that come again goes: those parts leave their merge records and
        those late records leave `late`. A message that held one of them stays published, and `recovered` remembers it.
        """
        back: dict[str, dict[int, int]] = {source: {} for source in self.settings.sources}
        for tp, jump in plan.ranges.items():
            if jump.until_offset < jump.from_offset:
                back[tp.source][tp.partition] = jump.until_offset
        comes_again = {source: by_partition(offsets) for source, offsets in back.items() if offsets}
        if comes_again:
            self._forget_late(plan, comes_again)
            self._remember_published(plan, comes_again)
        now, sources = wall_clock_ms(), self.settings.sources
        jumps = [
            (tp.source, sources[tp.source].topic, tp.partition, jump.from_offset, jump.until_offset, now, plan.reset)
            for tp, jump in plan.ranges.items()
        ]
        if not self._has(tables.RESETS, plan):
            self.lake.append_rows(jumps, tables.RESETS, batch=plan.batch)
        self._close_open(plan, comes_again)

    def _forget_late(self, plan: BatchPlan, comes_again: Mapping[str, Column]) -> None:
        if self._has(tables.LATE, plan):
            return
        gone = [(F.col("source") == source) & (F.col("offset") >= since) for source, since in comes_again.items()]
        with self.lake.once(tables.LATE, plan.batch):
            self.lake.delta(tables.LATE).delete(reduce(Column.__or__, gone))

    def _remember_published(self, plan: BatchPlan, comes_again: Mapping[str, Column]) -> None:
        if self._has(tables.RECOVERED, plan):
            return
        last = F.max_by(F.struct("last_event_time", "last_key"), "last_seq").alias("last")
        tails = self.lake.read(tables.PUBLISHED).groupBy("partition").agg(last)
        is_out = F.struct("event_time", "merge_key") <= F.struct("last.last_event_time", "last.last_key")
        messages = (
            self.lake.read(tables.SILVER)
            .where(F.col("valid") & _has_part_of(comes_again))
            .join(tails, "partition")
            .where(is_out)
            .select("partition", "merge_key", "event_time", F.lit(datetime.now(timezone.utc)).alias("recovered_at"))
        )
        self.lake.append(messages, tables.RECOVERED, batch=plan.batch)

    def _close_open(self, plan: BatchPlan, comes_again: Mapping[str, Column]) -> None:
        """One statement: rows that lose parts keep the others, or go with the last; all that it leaves behind is closed."""
        kept = {s: F.filter(s, _stays(since)) for s, since in comes_again.items()}
        times = F.concat(*[F.transform(kept.get(s, F.col(s)), lambda part: part["event_time"]) for s in self.settings.sources])
        closed: dict[str, str | Column] = {
            "status": F.lit("timed_out"),
            "valid": F.lit(False),
            "invalid_reason": F.lit("reset"),
            "batch": F.lit(plan.batch).cast("bigint"),
            "event_time": F.array_min(times),
            "last_event_time": F.array_max(times),
            **kept,
        }
        is_touched = F.col("status") == "open"
        if comes_again:
            is_touched = is_touched | _has_part_of(comes_again)
        everything = self.lake.spark.range(1).select(F.lit(True).alias("reset"))
        merge = (
            self.lake.delta(tables.SILVER)
            .merge(everything, is_touched)
            .whenMatchedDelete(F.size(times) == 0)
            .whenMatchedUpdate(set=closed)
        )
        with self.lake.once(tables.SILVER, plan.batch):
            merge.execute()

    def _by_partition(self, rows: DataFrame) -> DataFrame:
        """All rows of a partition in one task: one task each while they are few, else so many that the cores are even."""
        tasks = 2 * self.lake.spark.sparkContext.defaultParallelism
        if self.partitions <= tasks:
            return rows.repartitionById(self.partitions, "partition")
        return rows.repartition(tasks, "partition")

    @cached_property
    def _parsed(self) -> dict[str, dict[str, Column]]:
        """A column for each source, so that their types may differ."""
        return {name: {f"value_{name}": parsed_value(F.col("value"), s.value_type)} for name, s in self.settings.sources.items()}


def _has_part_of(comes_again: Mapping[str, Column]) -> Column:
    return reduce(Column.__or__, [F.exists(source, _comes_again(since)) for source, since in comes_again.items()])


def _comes_again(since: Column) -> Callable[[Column], Column]:
    return lambda part: part["offset"] >= since


def _stays(since: Column) -> Callable[[Column], Column]:
    return lambda part: F.coalesce(part["offset"] < since, F.lit(True))


def _positions_before(plan: BatchPlan) -> dict[TopicPartition, int | None]:
    return {tp: done.position_before for tp, done in plan.ranges.items()}
