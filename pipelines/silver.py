"""Silver: the merge of the sources by event time, a pure function of bronze, kept by one Delta MERGE per batch.

Progress is in tables, never in a Spark checkpoint. A batch is committed in this order:

1. *plan*: exact offset ranges and clocks, from bronze beyond the last batch (`plan_next`; writes nothing);
2. *progress*: the plan as rows of `progress` (`write_progress`): from here on the batch is decided;
3. *late*: the batch's late records (`_write_late`);
4. *merge*: the rows that change, by MERGE (`_merge`).

A start replays the last batch of `progress` first. Each write of it carries the batch's number as Delta's transaction version,
so a table that has seen it skips it. Hence after a crash before 2 nothing is known of the batch and another plan may be made;
between 2 and 3, and between 3 and 4, the same ranges are read again and what is missing is written; after 4, nothing is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.adapters.progress import read_last_batch, write_progress
from pipelines.core.plan import NO_TIME, BatchPlan, Cursor, Rows, TopicPartition, plan_batch
from pipelines.settings import Settings
from pipelines.transforms.decode import parsed_value
from pipelines.transforms.fold import fold, union_with_open
from pipelines.transforms.message import with_validity
from pipelines.transforms.position import split_late, with_position
from pipelines.transforms.ranges import is_within


@dataclass
class Silver:
    """The merge of one lake over `partitions` Kafka partitions; one owner at a time."""

    lake: Lake
    settings: Settings
    partitions: int
    _done: BatchPlan | None = None
    _cursors: dict[TopicPartition, Cursor] = field(default_factory=dict)

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[BatchPlan]:
        """Merges, batch by batch, everything in bronze that the clock has reached; yields each batch once it is committed."""
        if not self._cursors:
            self._recover()
        while not is_stopping() and (plan := self._plan_next()) is not None:
            try:
                write_progress(self.lake, self.settings, plan)
                self._commit(plan)
            except BaseException:
                self._cursors = {}  # the batch may be decided by now: it must be completed before another is planned
                raise
            yield plan

    def _recover(self) -> None:
        """Takes up the state after the last batch in `progress`, having completed that batch where a crash cut it short."""
        every = [TopicPartition(source, p) for source in self.settings.sources for p in range(self.partitions)]
        self._cursors = dict.fromkeys(every, Cursor())
        last = read_last_batch(self.lake)
        if last is not None:
            self._commit(last)

    def _commit(self, plan: BatchPlan) -> None:
        """Steps 3 and 4: what the batch's rows of `progress` promise; a no-op where it was done before."""
        if plan.has_late:
            self._write_late(plan)
        self._merge(plan)
        self._done = plan
        self._cursors |= plan.cursors()

    def _plan_next(self) -> BatchPlan | None:
        """Step 1. Each topic-partition gets an equal share of `max_records_per_batch` to be considered in."""
        share = max(1, self.settings.merge.max_records_per_batch // len(self._cursors))
        starts = {tp: cursor.next_offset for tp, cursor in self._cursors.items()}
        available = self._read_rows(starts, share)
        plan = self._plan(available)
        if plan is None:
            # Offsets may have holes (transaction markers, compaction, a start at the latest) longer than a share.
            beyond = self._first_offsets_beyond({tp: start + share for tp, start in starts.items() if tp not in available})
            if beyond:
                plan = self._plan(available | self._read_rows(beyond, share))
        return plan

    def _plan(self, available: Mapping[TopicPartition, Rows]) -> BatchPlan | None:
        batch, clocks = (self._done.batch + 1, self._done.clocks) if self._done else (0, {})
        return plan_batch(batch, self._cursors, available, clocks, self.settings.merge.timeout_ms)

    def _read_rows(self, starts: Mapping[TopicPartition, int], share: int) -> dict[TopicPartition, Rows]:
        """The narrow columns of bronze in `[start, start + share)` of each topic-partition; absent where there are none."""
        time = F.coalesce(F.unix_millis("event_time"), F.lit(NO_TIME))
        frames = [
            self.lake.read(tables.bronze(source))
            .where(is_within({tp.partition: (o, o + share) for tp, o in starts.items() if tp.source == source}))
            .select(F.lit(source).alias("source"), "partition", "offset", time.alias("time"))
            for source in {tp.source for tp in starts}
        ]
        found = reduce(DataFrame.union, frames).toArrow()
        rows: dict[TopicPartition, Rows] = {}
        sources, partitions = found["source"].to_numpy(), found["partition"].to_numpy()
        offsets, times = found["offset"].to_numpy(), found["time"].to_numpy()
        for tp in starts:
            mine = np.flatnonzero((partitions == tp.partition) & (sources == tp.source))
            if len(mine):
                ordered = mine[np.argsort(offsets[mine], kind="stable")]
                rows[tp] = Rows(offsets[ordered], times[ordered])
        return rows

    def _first_offsets_beyond(self, offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        first: dict[TopicPartition, int] = {}
        for source in {tp.source for tp in offsets}:
            mine = {tp.partition: (o, None) for tp, o in offsets.items() if tp.source == source}
            found = self.lake.read(tables.bronze(source)).where(is_within(mine)).groupBy("partition").agg(F.min("offset"))
            first |= {TopicPartition(source, partition): offset for partition, offset in found.collect()}
        return first

    def _write_late(self, plan: BatchPlan) -> None:
        """Step 3."""
        late = (
            self._records(plan, lambda _, value: {"value": value})
            .transform(with_position(_positions_before(plan)))
            .transform(lambda records: split_late(self.settings.merge.timeout_ms)(records).late)
            .withColumn("batch", F.lit(plan.batch).cast("bigint"))
            .select(*self.lake.schema(tables.LATE).names)
        )
        self.lake.append(late, tables.LATE, plan.batch)

    def _merge(self, plan: BatchPlan) -> None:
        """Step 4: the river's meeting. One exchange by partition serves position and fold together."""
        sources, timeout_ms = list(self.settings.sources), self.settings.merge.timeout_ms
        open_rows = self.lake.read(tables.SILVER).where("status = 'open'")
        changed = (
            self._records(plan, self._parsed)
            .transform(union_with_open(open_rows, sources))
            .transform(self._by_partition)
            .transform(with_position(_positions_before(plan)))
            .transform(lambda records: split_late(timeout_ms)(records).on_time)
            .transform(fold(sources, timeout_ms, plan.clocks))
            .transform(with_validity(self.settings.publish, sources))
            .withColumn("batch", F.lit(plan.batch).cast("bigint"))
        )
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
        with self.lake.once_per_batch(plan.batch):
            merge.execute()

    def _by_partition(self, rows: DataFrame) -> DataFrame:
        """All rows of a partition in one task: one task each while they are few, else so many that the cores are even."""
        tasks = 2 * self.lake.spark.sparkContext.defaultParallelism
        if self.partitions <= tasks:
            return rows.repartitionById(self.partitions, "partition")
        return rows.repartition(tasks, "partition")

    def _records(self, plan: BatchPlan, values: Callable[[str, Column], dict[str, Column]]) -> DataFrame:
        """Every record of the batch's ranges that has a time, of all sources, with the value columns asked for."""
        frames = []
        for source in self.settings.sources:
            ranges = {
                tp.partition: (done.from_offset, done.until_offset)
                for tp, done in plan.ranges.items()
                if tp.source == source and not done.is_empty
            }
            bronze = self.lake.read(tables.bronze(source)).where(is_within(ranges) & F.col("event_time").isNotNull())
            value_columns = [value.alias(name) for name, value in values(source, F.col("value")).items()]
            frames.append(
                bronze.select(
                    F.lit(source).alias("source"),
                    "topic",
                    "partition",
                    "offset",
                    "merge_key",
                    "heartbeat",
                    "event_time",
                    *value_columns,
                )
            )
        return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)

    def _parsed(self, source: str, value: Column) -> dict[str, Column]:
        """A column for each source, so that their types may differ; a record fills its own."""
        return {f"value_{source}": parsed_value(value, self.settings.sources[source].value_type)}


def _positions_before(plan: BatchPlan) -> dict[TopicPartition, int | None]:
    return {tp: done.position_before for tp, done in plan.ranges.items()}
