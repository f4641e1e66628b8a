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
            "reason": plan.reset,
        }
        for tp, done in plan.ranges.items()
    ]
    frame = lake.spark.createDataFrame(rows, lake.schema(tables.PROGRESS)).coalesce(1)
    lake.append(frame, tables.PROGRESS, batch=plan.batch)


def read_last_batch(lake: Lake, settings: Settings, partitions: int | None = None) -> BatchPlan | None:
    """The last batch that `progress` knows, as it was planned; whether it has late records is not kept, so: perhaps.

    `partitions`: how many there are, where that is known.
    """
    if partitions is None:
        partitions = 1 + (lake.read(tables.PROGRESS).agg(F.max("partition")).collect()[0][0] or 0)
    times = [F.unix_millis(name).alias(name) for name in ("head", "clock", "position")]
    of_two_batches = 2 * len(settings.sources) * partitions
    rows = (
        lake.read(tables.PROGRESS)
        .select("batch", "source", "partition", "from_offset", "until_offset", "reason", *times)
        .orderBy(F.desc("batch"))
        .limit(of_two_batches)
        .collect()
    )
    if not rows:
        return None
    last = rows[0].batch
    before = {TopicPartition(r.source, r.partition): r.position for r in rows if r.batch == last - 1}
    ranges, clocks, reset = {}, {}, None
    for row in rows:
        if row.batch == last:
            reset = row.reason
            tp = TopicPartition(row.source, row.partition)
            ranges[tp] = OffsetRange(row.from_offset, row.until_offset, before.get(tp), row.position, row.head)
            if row.clock is not None:
                clocks[row.partition] = row.clock
    return BatchPlan(last, ranges, clocks, has_late=True, reset=reset)


def _timestamp(ms: int | None) -> datetime | None:
    return None if ms is None else _EPOCH + timedelta(milliseconds=ms)
