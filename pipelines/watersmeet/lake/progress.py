"""Progress of silver: its rows `batch` say how far each batch has merged each topic-partition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from watersmeet.core.plan import BatchPlan, OffsetRange
from watersmeet.core.silver import BATCH
from watersmeet.lake import tables
from watersmeet.lake.commits import commits
from watersmeet.lake.inputs import topic_partition
from watersmeet.lake.table_reader import Histories, TableReader, extreme
from watersmeet.lake.tables import Table


def facts_of(plan: BatchPlan, decisions: int = 0) -> dict[str, Any]:
    """Return a batch as facts of its commit to silver: its numbers, and that of the last decision
    that it follows.
    """
    numbers = {"batch": plan.batch, "epoch": plan.epoch, "generation": plan.generation}
    return {**numbers, "decisions": decisions}


def batch_rows(plan: BatchPlan, committed_at_ms: int) -> pa.Table:
    """Return a row (`core.silver.BATCH`) for every topic-partition.

    So the rows of the last batch alone have the state of all of them.
    """
    rows = []
    for tp, done in plan.ranges.items():
        offsets = (done.from_offset, done.until_offset)
        times = (done.head, plan.clocks.get(tp.partition), done.position)
        numbers = (plan.epoch, plan.generation, committed_at_ms)
        rows.append((plan.batch, *tp.input, tp.partition, *offsets, *times, *numbers))
    return Table(tables.PROGRESS, BATCH).rows(rows)


def last_batch(reader: TableReader) -> BatchPlan | None:
    """Return silver's last batch, without the positions before it; None before the first."""
    last = extreme(reader, tables.PROGRESS, "batch")
    return None if last is None else read_batches(reader, [last])[last]


def read_batches(reader: TableReader, numbers: Collection[int]) -> dict[int, BatchPlan]:
    """Return batches by their numbers, without the positions before them."""
    names = ["batch", "source", "topic", "partition", "from_offset", "until_offset", "position"]
    names += ["head", "clock", "epoch", "generation"]
    rows = reader.select(tables.PROGRESS, names, [[("batch", "in", sorted(numbers))]]).to_pylist()
    by_batch = defaultdict[int, list[dict[str, Any]]](list)
    for row in rows:
        by_batch[row["batch"]].append(row)
    return {batch: _plan_of(of_batch) for batch, of_batch in by_batch.items()}


def _plan_of(rows: Sequence[Mapping[str, Any]]) -> BatchPlan:
    ranges = {}
    for row in rows:
        offsets = (row["from_offset"], row["until_offset"])
        ranges[topic_partition(row)] = OffsetRange(*offsets, None, row["position"], row["head"])
    clocks = {row["partition"]: row["clock"] for row in rows if row["clock"] is not None}
    numbers = {name: rows[0][name] for name in ("batch", "generation", "epoch")}
    return BatchPlan(ranges=ranges, clocks=clocks, **numbers)


class BatchVersions:
    """The versions of silver that batches have made, as far back as its log goes."""

    def __init__(self, reader: Histories) -> None:
        self._older = (
            (commit.facts["batch"], version.number)
            for version, commit in commits(reader, tables.SILVER)
            if "batch" in commit.facts
        )
        self._read = dict[int, int]()

    def of(self, batch: int | None) -> int | None:
        """Return a batch's version; None for None, and where the log does not have its commit.

        The log is read back to that batch.
        """
        if batch is not None and batch not in self._read:
            for older, version in self._older:
                self._read[older] = version
                if older <= batch:
                    break
        return None if batch is None else self._read.get(batch)
