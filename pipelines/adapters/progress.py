"""The `progress` table: how far silver is, and the plan of its last batch, so that a start can complete it."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

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


def read_last_batch(lake: Lake) -> BatchPlan | None:
    """The last batch that `progress` knows, as it was planned; whether it has late records is not kept, so: perhaps."""
    rows = lake.rows(
        "SELECT batch, source, `partition`, from_offset, until_offset, position, head, clock, reason FROM {progress} "
        "WHERE batch >= (SELECT MAX(batch) FROM {progress}) - 1 ORDER BY batch"
    )
    if not rows:
        return None
    last = rows[-1][0]
    before, ranges, clocks, reset = {}, {}, {}, None
    for batch, source, partition, since, until, position, head, clock, reason in rows:
        tp = TopicPartition(source, partition)
        if batch < last:
            before[tp] = position
            continue
        ranges[tp] = OffsetRange(since, until, before.get(tp), position, head)
        if clock is not None:
            clocks[partition] = clock
        reset = reason
    return BatchPlan(last, ranges, clocks, has_late=True, reset=reset)


def _timestamp(ms: int | None) -> datetime | None:
    return None if ms is None else _EPOCH + timedelta(milliseconds=ms)
