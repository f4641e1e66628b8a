"""The `progress` table: how far silver is, and the plan of its last batch, so that a start can complete it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.core.plan import BatchPlan, OffsetRange, TopicPartition
from pipelines.settings import Settings

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def write_progress(lake: Lake, settings: Settings, plan: BatchPlan) -> None:
    """One row for every topic-partition, so that the last batch alone says where all of them stand. A replay is a no-op."""
    now = datetime.now(timezone.utc)
    rows = [
        {
            "batch": plan.batch,
            "source": tp.source,
            "topic": settings.sources[tp.source].topic,
            "partition": tp.partition,
            "from_offset": done.from_offset,
            "until_offset": done.until_offset,
            "head": _timestamp(done.head),
            "clock": _timestamp(plan.clocks.get(tp.partition)),
            "committed_at": now,
            "position": _timestamp(done.position),
        }
        for tp, done in plan.ranges.items()
    ]
    frame = lake.spark.createDataFrame(rows, lake.schema(tables.PROGRESS)).coalesce(1)
    lake.append(frame, tables.PROGRESS, plan.batch)


def read_last_batch(lake: Lake) -> BatchPlan | None:
    """The last batch that `progress` knows, as it was planned; whether it has late records is not kept, so: perhaps."""
    progress = lake.read(tables.PROGRESS)
    last = progress.agg(F.max("batch")).collect()[0][0]
    if last is None:
        return None
    times = [F.unix_millis(name).alias(name) for name in ("head", "clock", "position")]
    rows = (
        progress.where(F.col("batch") >= last - 1)
        .select("batch", "source", "partition", "from_offset", "until_offset", *times)
        .collect()
    )
    before = {TopicPartition(r.source, r.partition): r.position for r in rows if r.batch < last}
    ranges, clocks = {}, {}
    for row in rows:
        if row.batch == last:
            tp = TopicPartition(row.source, row.partition)
            ranges[tp] = OffsetRange(row.from_offset, row.until_offset, before.get(tp), row.position, row.head)
            if row.clock is not None:
                clocks[row.partition] = row.clock
    return BatchPlan(last, ranges, clocks, has_late=True)


def _timestamp(ms: int | None) -> datetime | None:
    return None if ms is None else _EPOCH + timedelta(milliseconds=ms)
