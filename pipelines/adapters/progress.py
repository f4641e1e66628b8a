"""The `progress` table: how far silver is, and the plan of its last batch, so that a start can complete it."""

from __future__ import annotations

from pipelines import tables
from pipelines.adapters.lake import Lake, wall_clock_ms
from pipelines.core.plan import BatchPlan, OffsetRange, TopicPartition
from pipelines.settings import Settings


def write_progress(lake: Lake, settings: Settings, plan: BatchPlan) -> None:
    """One row for every topic-partition, so that the last batch alone says where all of them stand. A replay is a no-op."""
    now = wall_clock_ms()
    rows = [
        (
            plan.batch,
            tp.source,
            settings.sources[tp.source].topic,
            tp.partition,
            done.from_offset,
            done.until_offset,
            done.head,
            plan.clocks.get(tp.partition),
            now,
            done.position,
            plan.reset,
        )
        for tp, done in plan.ranges.items()
    ]
    lake.append_rows(rows, tables.PROGRESS, batch=plan.batch)


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
