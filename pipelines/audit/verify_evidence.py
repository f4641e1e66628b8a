"""What the checks of `verify` start from: one version of silver, how far it is, and every record of bronze with its position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.audit.validate import Problem
from pipelines.core.plan import TopicPartition
from pipelines.settings import Settings
from pipelines.transforms.ranges import by_partition, is_within

SHOWN = 10
"""So many problems of a check are shown: enough to see what they have in common."""

SAMPLED_RECORDS = 100_000
"""About so many records are compared with the merge model where not all are wanted: seconds of work."""

_IDLE_FLAGS = {"is_idle": True, "heartbeat": True, "is_passed": False}

REBUILD = "derive silver again from bronze: `watersmeet rebuild --into DIR`"


class Findings(NamedTuple):
    """The first problems of a check, and how many more there are."""

    problems: list[Problem]
    more: int = 0


def first_of(problems: DataFrame, order: Sequence[str], describe: Callable[[Row], Problem]) -> Findings:
    """The first rows as problems; the others are only counted, and only where there are any."""
    rows = problems.orderBy(*order).take(SHOWN + 1)
    more = problems.count() - SHOWN if len(rows) > SHOWN else 0
    return Findings([describe(row) for row in rows[:SHOWN]], more)


class Reset(NamedTuple):
    """A batch that merged nothing: where each topic-partition goes on, when it was decided (microseconds), and what for."""

    batch: int
    begin: Mapping[TopicPartition, int]
    committed_at: int
    reason: str


class Stretch(NamedTuple):
    """What silver merged from one reset to the next: `[begin, until)` of every topic-partition, and by partition the clock (ms)
    at its end. `heads` (ms): of what its last batch considered. `ended_at`: the time (microseconds) of the reset that ended it.
    """

    begin: Mapping[TopicPartition, int]
    until: Mapping[TopicPartition, int]
    clocks: Mapping[int, int]
    heads: Mapping[TopicPartition, int]
    ended_at: int | None

    def comes_again(self, following: Stretch, source: str, partition: int) -> int | None:
        """From which offset on its records are merged again; None: the reset after it did not jump back there."""
        tp = TopicPartition(source, partition)
        return following.begin[tp] if following.begin[tp] < self.until[tp] else None


@dataclass(frozen=True)
class Evidence:
    """One version of a lake's silver, the stretches that it was merged in, and how many of the keys are looked at closely."""

    lake: Lake
    settings: Settings
    silver: DataFrame
    last_batch: int
    resets: Sequence[Reset]
    stretches: Sequence[Stretch]
    one_in: int
    _read: dict[str, DataFrame] = field(default_factory=dict)

    @property
    def until(self) -> Mapping[TopicPartition, int]:
        """How far silver is."""
        return self.stretches[-1].until

    def read(self, table: str) -> DataFrame:
        """The table as it is now, without rows where it does not exist."""
        if table not in self._read:
            self._read[table] = read(self.lake, table)
        return self._read[table]

    def at(self, source: str, partition: int, offset: int) -> str:
        """A record's coordinates."""
        return f"{self.settings.sources[source].topic}[{partition}]@{offset}"

    def stretch_of(self, batch: Column) -> Column:
        """The index of the stretch that a batch belongs to; a reset closes the one before it."""
        return reduce(Column.__add__, [(batch > r.batch).cast("int") for r in self.resets], F.lit(0))

    def recovered(self) -> DataFrame:
        """Messages read back, or left behind by a jump back: partition, merge_key, event_time (ms), and the first `stretch` whose
        records are parts of them rather than merged anew.
        """
        rows = self.read(tables.RECOVERED).where(F.col("merge_key").isNotNull())
        since = [(F.unix_micros("recovered_at") >= r.committed_at).cast("int") for r in self.resets]
        stretch = reduce(Column.__add__, since, F.lit(0)).alias("stretch")
        return rows.select("partition", "merge_key", F.unix_millis("event_time").alias("event_time"), stretch)

    def is_looked_at(self) -> Column:
        """Whether a row's (partition, merge_key) belongs to the sample, which is another one after every batch."""
        return F.pmod(F.xxhash64(F.lit(self.last_batch), "partition", "merge_key"), F.lit(self.one_in)) == 0

    def records(self, more: Callable[[str], Sequence[Column]] = lambda _: ()) -> DataFrame:
        """Every record that has an event time, with its position, derived from the first offset of its stretch on; the last
        stretch goes on to bronze's end.

        Out: stretch, source, partition, offset, is_idle, heartbeat, merge_key, event_time, position (ms), is_passed, and the
        columns that `more` gives for a source. Heartbeats of the idle policy are among them (offset: the one they come after).
        """
        frames = [self._records_of(i, stretch, more) for i, stretch in enumerate(self.stretches)]
        in_order = Window.partitionBy("stretch", "source", "partition").orderBy("offset", "is_idle")
        position = F.max("event_time").over(in_order.rowsBetween(Window.unboundedPreceding, 0))
        return union_all(frames).withColumn("position", position)

    def _records_of(self, index: int, stretch: Stretch, more: Callable[[str], Sequence[Column]]) -> DataFrame:
        is_last = index == len(self.stretches) - 1
        frames = []
        for source in self.settings.sources:
            until = {tp.partition: offset for tp, offset in stretch.until.items() if tp.source == source}
            begin = {tp.partition: offset for tp, offset in stretch.begin.items() if tp.source == source}
            bronze = self.read(tables.bronze(source)).where(F.col("reason").isNull())
            inside = is_within({p: (offset, None if is_last else until[p]) for p, offset in begin.items()})
            common: list[Column | str] = [F.lit(index).alias("stretch"), F.lit(source).alias("source"), "partition"]
            time = F.unix_millis("event_time").alias("event_time")
            is_passed = (F.col("offset") < by_partition(until)).alias("is_passed")
            frames.append(
                bronze.where(inside).select(
                    *common, "offset", F.lit(False).alias("is_idle"), "heartbeat", "merge_key", time, is_passed, *more(source)
                )
            )
            idle = self.read(tables.IDLE_HEARTBEATS).where(F.col("source") == source).withColumnRenamed("after_offset", "offset")
            inside = is_within({p: (offset - 1, None if is_last else until[p]) for p, offset in begin.items()})
            if stretch.ended_at is not None:
                inside = inside & (F.unix_micros("decided_at") < stretch.ended_at)
            flags = [F.lit(flag).alias(name) for name, flag in _IDLE_FLAGS.items()]
            frames.append(idle.where(inside).select(*common, "offset", time, *flags))
        return union_all(frames)


def read(lake: Lake, table: str) -> DataFrame:
    """The table as it is now, without rows where it does not exist."""
    return lake.read(table) if lake.exists(table) else lake.spark.createDataFrame([], lake.schema(table))


def union_all(frames: Iterable[DataFrame]) -> DataFrame:
    """All their rows; a column that a frame lacks is null there."""

    def union(one: DataFrame, other: DataFrame) -> DataFrame:
        return one.unionByName(other, allowMissingColumns=True)

    return reduce(union, frames)


def by_topic_partition(values: Mapping[TopicPartition, int]) -> Column:
    """The value that a mapping holds for the row's `source` and `partition`, else null."""
    sources = {tp.source for tp in values}
    mine = {s: by_partition({tp.partition: value for tp, value in values.items() if tp.source == s}) for s in sources}
    return F.coalesce(F.lit(None).cast("bigint"), *[F.when(F.col("source") == s, value) for s, value in mine.items()])


def read_evidence(lake: Lake, settings: Settings, partitions: int, *, full: bool) -> Evidence:
    """Silver as it is now, with all that leads to it."""
    silver, last_batch = read_silver(lake)
    every = [TopicPartition(source, p) for source in settings.sources for p in range(partitions)]
    progress = read(lake, tables.PROGRESS).where(F.col("batch") <= last_batch)
    resets = _resets(progress)
    stretches = _stretches(progress, resets, every)
    records = sum(s.until[tp] - s.begin[tp] for s in stretches for tp in every)
    one_in = 1 if full else max(1, records // SAMPLED_RECORDS)
    return Evidence(lake, settings, silver, last_batch, resets, stretches, one_in)


def read_silver(lake: Lake) -> tuple[DataFrame, int]:
    """A version of silver, and the last batch in it (-1: none)."""
    if not lake.exists(tables.SILVER):
        return read(lake, tables.SILVER), -1
    while True:
        version = lake.version_of(tables.SILVER)
        commit = lake.last_commit(tables.SILVER)
        if lake.version_of(tables.SILVER) == version:  # else another batch came between the two questions
            break
    return lake.read(tables.SILVER, version), -1 if commit is None else commit.number - 1


def _resets(progress: DataFrame) -> list[Reset]:
    rows = (
        progress.where(F.col("reason").isNotNull())
        .select("batch", "source", "partition", "until_offset", F.unix_micros("committed_at").alias("at"), "reason")
        .collect()
    )
    return [
        Reset(
            batch,
            {TopicPartition(r.source, r.partition): r.until_offset for r in rows if r.batch == batch},
            min(r["at"] for r in rows if r.batch == batch),
            next(r.reason for r in rows if r.batch == batch),
        )
        for batch in sorted({r.batch for r in rows})
    ]


def _stretches(progress: DataFrame, resets: Sequence[Reset], every: Sequence[TopicPartition]) -> list[Stretch]:
    index = reduce(Column.__add__, [(F.col("batch") > r.batch).cast("int") for r in resets], F.lit(0))
    last = F.max_by(F.struct("until_offset", F.unix_millis("head").alias("head"), F.unix_millis("clock").alias("clock")), "batch")
    merged = progress.where(F.col("reason").isNull())
    ends = merged.groupBy(index.alias("stretch"), "source", "partition").agg(last.alias("last")).collect()
    stretches = []
    for i in range(len(resets) + 1):
        begin = dict.fromkeys(every, 0) | (dict(resets[i - 1].begin) if i else {})
        here = {TopicPartition(r.source, r.partition): r["last"] for r in ends if r.stretch == i}
        stretches.append(
            Stretch(
                begin,
                begin | {tp: r.until_offset for tp, r in here.items()},
                {tp.partition: r.clock for tp, r in here.items() if r.clock is not None},
                {tp: r.head for tp, r in here.items() if r["head"] is not None},
                resets[i].committed_at if i < len(resets) else None,
            )
        )
    return stretches
