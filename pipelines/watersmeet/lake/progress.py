"""Progress of silver: a batch's plan as facts of its commit, as rows of `progress`, and back.

The commit decides. `progress` follows from it, and keeps for good what the log forgets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from watersmeet.core.plan import BatchPlan, OffsetRange, TopicPartition
from watersmeet.lake import tables
from watersmeet.lake.commits import APPLICATION, Commit, last_decision
from watersmeet.lake.inputs import topic_partition
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings


def facts_of(plan: BatchPlan, settings: Settings) -> dict[str, Any]:
    """Return a batch as facts of its commit to silver.

    - `batch`, `epoch` and `generation`: numbers.
    - `offsets`: by the input's name, `[partition, from, until, position_before, position, head]`
      for each of its partitions.
    - `clocks`: `[partition, clock]`.
    - `since`: epoch ms. All other times are ms after it, or null.
    - `has_late`: as in the plan.
    - `configuration`: a digest.
    """
    times = [
        time
        for done in plan.ranges.values()
        for time in (done.position_before, done.position, done.head)
    ]
    since = min((time for time in [*times, *plan.clocks.values()] if time is not None), default=0)

    def after(time: int | None) -> int | None:
        """Return a time (ms) as its distance from the plan's smallest; None stays None."""
        return None if time is None else time - since

    offsets: dict[str, list[list[int | None]]] = {}
    for tp, done in plan.ranges.items():
        row_times = map(after, (done.position_before, done.position, done.head))
        offsets.setdefault(settings.input_names[tp.input], []).append(
            [tp.partition, done.from_offset, done.until_offset, *row_times]
        )
    clocks = [[partition, clock - since] for partition, clock in plan.clocks.items()]
    return {
        "batch": plan.batch,
        "epoch": plan.epoch,
        "generation": plan.generation,
        "since": since,
        "offsets": offsets,
        "clocks": clocks,
        "has_late": plan.has_late,
        "configuration": settings.digest,
    }


def plan_of(facts: Mapping[str, Any], settings: Settings) -> BatchPlan:
    """Return the batch from which `facts_of` made the facts."""
    since = facts["since"]

    def time(after: int | None) -> int | None:
        """Return a time (epoch ms) from its distance to the plan's smallest; None stays None."""
        return None if after is None else since + after

    inputs = settings.inputs_by_name
    ranges = {
        TopicPartition(inputs[name], partition): OffsetRange(
            begin, until, time(before), time(position), time(head)
        )
        for name, rows in facts["offsets"].items()
        for partition, begin, until, before, position, head in rows
    }
    clocks = {partition: since + after for partition, after in facts["clocks"]}
    return BatchPlan(
        facts["batch"],
        ranges,
        clocks,
        facts["has_late"],
        facts.get("generation", 0),
        facts.get("epoch", 0),
    )


def progress_rows(
    plan: BatchPlan, settings: Settings, silver_version: int, committed_at_ms: int
) -> pa.Table:
    """Return a row of `progress` for every topic-partition.

    So the rows of the last batch alone have the state of all of them.
    """
    rows = []
    for tp, done in plan.ranges.items():
        batch_values = (
            committed_at_ms,
            done.position,
            None,
            silver_version,
            plan.epoch,
            plan.generation,
        )
        range_values = (
            done.from_offset,
            done.until_offset,
            done.head,
            plan.clocks.get(tp.partition),
        )
        rows.append((plan.batch, *tp.input, tp.partition, *range_values, *batch_values))
    return tables.layout(settings)[tables.PROGRESS].rows(rows)


LastBatch: TypeAlias = tuple[BatchPlan, int, Commit]
"""A batch, the version of silver that holds it, and the commit that decided it."""


def last_batch(reader: TableReader, settings: Settings) -> LastBatch | None:
    """Return silver's last batch, the version of silver that holds it, and the deciding commit.

    None before the first. Where the log has forgotten that commit, `progress` has the batch. Then
    its notes were written, the plan says that there may be late records, and the commit has neither
    token nor facts.
    """
    decision = last_decision(reader, tables.SILVER, APPLICATION)
    if decision is None:
        return _last_noted(reader)
    version, commit = decision
    return plan_of(commit.facts, settings), version, commit


def _last_noted(reader: TableReader) -> tuple[BatchPlan, int, Commit] | None:
    last = reader.summary(tables.PROGRESS, [], {"batch": ("max", "batch")})["batch"][0].as_py()
    if last is None:
        return None
    columns = ["source", "topic", "partition", "position", "generation"]
    before = reader.select(tables.PROGRESS, columns, [[("batch", "=", last - 1)]]).to_pylist()
    columns += ["from_offset", "until_offset", "head", "clock", "silver_version"]
    rows = reader.select(tables.PROGRESS, columns, [[("batch", "=", last)]]).to_pylist()
    positions = {
        topic_partition(row): row["position"]
        for row in before
        if row["generation"] == rows[0]["generation"]
    }
    ranges = {}
    for row in rows:
        tp = topic_partition(row)
        ranges[tp] = OffsetRange(
            row["from_offset"], row["until_offset"], positions.get(tp), row["position"], row["head"]
        )
    clocks = {row["partition"]: row["clock"] for row in rows if row["clock"] is not None}
    plan = BatchPlan(last, ranges, clocks, has_late=True, generation=rows[0]["generation"])
    return plan, rows[0]["silver_version"], Commit(APPLICATION, token=0, number=last + 1)
