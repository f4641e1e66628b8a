"""What silver plans and what gold publishes next, from the answers to a few questions."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.core.plan import BatchPlan, Cursor, TopicPartition
from pipelines.core.sequence import SequenceTail
from pipelines.lake.order import BY_CLOSING, BY_EVENT_TIME
from pipelines.lake.table_reader import PACKED, Aggregates, TableReader, Where
from pipelines.running import chunks, publication_plan
from pipelines.running.chunks import chunks_of
from pipelines.running.planning import Planner
from pipelines.running.publication_plan import Pending, TimeRange, of_chunk, pending
from tests.support.configurations import settings_for

MERGE_BYTES = 1_000_000

COMPARE: Mapping[str, Any] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Asked:
    """Tables in memory; they answer as the lake's do, minima being the only aggregates."""

    def __init__(self, tables: Mapping[str, list[dict[str, Any]]], row_bytes: int = 1) -> None:
        self.tables, self._row_bytes = tables, row_bytes

    def row_bytes(self, _: str) -> int:
        return self._row_bytes

    def columns(self, table: str) -> pa.Schema:
        """Those of the first row."""
        return pa.schema([(name, pa.null()) for name in (*self.tables[table], {})[0]])

    def select(self, table: str, columns: Sequence[str], where: Where = ()) -> pa.Table:
        rows = [
            row
            for row in self.tables[table]
            if any(all(_holds(row, *each) for each in term) for term in where or [[]])
        ]
        kinds = {"merge_key": pa.string()}
        return pa.table(
            {
                name: pa.array([row[name] for row in rows], kinds.get(name, pa.int64()))
                for name in columns
            }
        )

    def summary(
        self, table: str, by: Sequence[str], values: Aggregates, where: Where = ()
    ) -> pa.Table:
        [(name, (_, column))] = values.items()
        found = (
            self.select(table, [*by, column], where).group_by(list(by)).aggregate([(column, "min")])
        )
        return found.rename_columns([*by, name])


def answering(row_bytes: int = 1, **tables: list[dict[str, Any]]) -> TableReader:
    return Asked(tables, row_bytes)  # type: ignore[return-value]


def _holds(row: Mapping[str, Any], column: str, how: str, value: Any) -> bool:
    if how == "is null":
        return row[column] is None
    return (
        row[column] in value
        if how == "in"
        else bool(row[column] is not None and COMPARE[how](row[column], value))
    )


def test_a_plan_goes_on_behind_long_holes_in_some_of_many_partitions(tmp_path: Path) -> None:
    """The partitions behind a hole are asked for with their neighbours, which have records at the
    same offsets."""
    settings = settings_for(tmp_path, merge__max_records_per_batch=80)
    cursors = {
        TopicPartition(source, p): Cursor() for source in settings.sources for p in range(40)
    }
    rows = [
        {"partition": p, "offset": offset, "event_time": 50 + offset}
        for p in range(40)
        for offset in ([500] if p % 2 else [0, 500])
    ]
    silver = Planner(
        answering(bronze_tracking=rows, bronze_orders=[]), settings, 0, cursors, {}, {}, MERGE_BYTES
    )
    assert silver.next() is None, "no clock without the other source"
    assert silver.heads()[TopicPartition("tracking", 0)] == 50
    assert silver.heads()[TopicPartition("tracking", 1)] == 550


class Arriving(Asked):
    """Nothing of tracking is there yet at the first question about it."""

    _is_there = False

    def select(self, table: str, columns: Sequence[str], where: Where = ()) -> pa.Table:
        found = super().select(table, columns, where)
        if table != "bronze_tracking" or self._is_there:
            return found
        self._is_there = True
        return found.slice(0, 0)


def test_records_that_arrive_while_a_batch_is_planned_are_no_hole(tmp_path: Path) -> None:
    """More of them than a topic-partition's share: the first ones must not be passed over."""
    settings = settings_for(tmp_path, merge__max_records_per_batch=8)
    tracking, orders = (TopicPartition(source, 0) for source in settings.sources)
    rows = [
        {"partition": 0, "offset": offset, "event_time": 1_000 - offset} for offset in range(20)
    ]
    asked: Any = Arriving(
        {
            "bronze_tracking": rows,
            "bronze_orders": [{"partition": 0, "offset": 0, "event_time": 5_000}],
        }
    )
    silver = Planner(
        asked, settings, 0, {tracking: Cursor(), orders: Cursor()}, {}, {}, MERGE_BYTES
    )
    plan = silver.next()
    assert plan is not None
    assert plan.clocks == {0: 1_000}, "the first record has the largest event time"
    assert plan_ends(plan)[tracking] == 4


SHAPES: dict[str, list[int | None]] = {
    "few large ones": [MERGE_BYTES // 7] * 60,
    "many small ones": [10] * 9_000,
    "one larger than a batch": [*[100] * 500, 5 * MERGE_BYTES, *[100] * 500],
    "ever larger ones": [n * n for n in range(700)],
    "of an earlier version": [None] * 900,
}
"""Sizes of records (bytes)."""


@pytest.mark.promise("C24")
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_a_batch_has_no_more_than_fits_into_memory_and_no_record_is_left_out(
    tmp_path: Path, sizes: list[int | None]
) -> None:
    """Whatever shape the data has; one record of each topic-partition is always in it."""
    settings = settings_for(tmp_path)
    rows = [
        {"partition": 0, "offset": n, "event_time": n, "record_bytes": size}
        for n, size in enumerate(sizes)
    ]
    in_files = MERGE_BYTES // 500
    asked = answering(in_files, bronze_tracking=rows, bronze_orders=rows)
    cursors = {TopicPartition(source, 0): Cursor() for source in settings.sources}
    silver = Planner(asked, settings, 0, cursors, {}, {}, MERGE_BYTES)
    merged: dict[TopicPartition, int] = {}
    while plan := silver.next():
        taken = [sizes[done.from_offset : done.until_offset] for done in plan.ranges.values()]
        in_all = sum(PACKED * in_files if size is None else size for mine in taken for size in mine)
        assert in_all <= MERGE_BYTES or all(len(mine) <= 1 for mine in taken)
        assert all(done.from_offset == merged.get(tp, 0) for tp, done in plan.ranges.items())
        merged = plan_ends(plan)
        silver.done(plan)
    assert merged == {TopicPartition(source, 0): len(rows) for source in settings.sources}


def plan_ends(plan: BatchPlan) -> dict[TopicPartition, int]:
    return {tp: done.until_offset for tp, done in plan.ranges.items()}


def finished(partition: int, time: int, key: str, *, valid: bool = True) -> dict[str, Any]:
    return {
        "partition": partition,
        "event_time": time,
        "merge_key": key,
        "status": "timed_out",
        "valid": valid,
    }


def test_what_sorts_after_the_tail_is_pending() -> None:
    rows = [
        *(finished(0, time, key) for time, key in ((1, "z"), (5, "a"), (5, "b"), (7, "a"))),
        *(finished(1, time, key) for time, key in ((3, "a"), (3, "b"))),
        finished(2, 4, "a"),
        finished(2, 9, "a", valid=False),
        finished(3, 0, "a"),
    ]
    asked = answering(silver=rows)
    tails = {
        0: SequenceTail(1, 5, "a", 1),
        1: SequenceTail(1, 3, "b", 1),
        2: SequenceTail(0, 4, "a", 0),
    }
    assert pending(asked, tails, 4, 100, 100) == Pending(
        [{0: TimeRange(5, 7), 3: TimeRange(0, 0)}], has_more=False, order=BY_EVENT_TIME, records=4
    )
    everything = {0: TimeRange(1, 7), 1: TimeRange(3, 3), 2: TimeRange(4, 4), 3: TimeRange(0, 0)}
    assert pending(asked, {}, 40, 100, 100) == Pending(
        [everything], has_more=False, order=BY_EVENT_TIME, records=8
    )


def test_records_of_one_event_time_are_published_together_and_each_partition_gives_its_share() -> (
    None
):
    rows = [finished(p, time // 3, f"k{time}") for p in range(2) for time in range(30)]
    assert pending(answering(silver=rows), {}, 2, 20, 100) == Pending(
        [{0: TimeRange(0, 3), 1: TimeRange(0, 3)}], has_more=True, order=BY_EVENT_TIME, records=24
    )


def test_what_is_published_is_cut_into_pieces_of_bounded_size() -> None:
    rows = [finished(p, time, key) for p in range(3) for time in range(p + 1) for key in "ab"]
    found = pending(answering(silver=rows), {}, 3, 100, 3)
    assert found.chunks == [
        {0: TimeRange(0, 0), 1: TimeRange(0, 0)},
        {1: TimeRange(1, 1), 2: TimeRange(0, 0)},
        {2: TimeRange(1, 2)},
    ]
    assert found.extents == {0: TimeRange(0, 0), 1: TimeRange(0, 1), 2: TimeRange(0, 2)}
    assert pending(answering(silver=[]), {}, 3, 100, 3) == Pending(
        [], has_more=False, order=BY_EVENT_TIME
    )


def closed(partition: int, at: int, due: int, key: str) -> dict[str, Any]:
    return {**finished(partition, due - 1, key), "due": due, "closed_at": at}


def test_what_timeouts_closed_before_there_was_a_window_is_published_first() -> None:
    plain = [{**finished(0, time, "a"), "due": None, "closed_at": None} for time in (5, 9)]
    asked = answering(
        silver=[
            *plain,
            closed(0, 7, 6, "a"),
            closed(1, 8, 7, "b"),
            closed(1, 8, 7, "c"),
            closed(1, 9, 7, "a"),
        ]
    )
    first = pending(asked, {0: SequenceTail(3, 5, "a", 3)}, 2, 100, 100)
    assert (first.extents, first.has_more, first.order.column) == (
        {0: TimeRange(9, 9)},
        True,
        "event_time",
    )
    tails = {0: SequenceTail(4, 9, "a", 4), 1: SequenceTail(0, 6, "b", 0, 7, 8)}
    assert pending(asked, tails, 2, 100, 100) == Pending(
        [{0: TimeRange(7, 7), 1: TimeRange(8, 9)}], has_more=False, order=BY_CLOSING, records=4
    )
    tails[1] = SequenceTail(1, 6, "c", 1, 7, 8)
    assert pending(asked, tails, 2, 100, 100).extents == {0: TimeRange(7, 7), 1: TimeRange(9, 9)}


def test_what_an_epoch_closes_in_advance_waits_for_the_clock() -> None:
    asked = answering(silver=[closed(0, 8, 7, "a"), closed(0, 9, 7, "b"), closed(1, 8, 7, "a")])
    assert pending(asked, {}, 2, 100, 100, {0: 8}).extents == {0: TimeRange(8, 8)}
    assert pending(asked, {}, 2, 100, 100, {0: 9, 1: 7}).extents == {0: TimeRange(8, 9)}


@pytest.mark.promise("C24")
@pytest.mark.parametrize("unit", [1, 10_000], ids=["small", "large"])
def test_a_piece_of_a_publication_has_no_more_than_fits_into_memory(unit: int) -> None:
    sizes = [unit * size for size in (*[100] * 300, *[90_000] * 30, *[7] * 900)]
    rows = [{**finished(n % 2, n, "a"), "record_bytes": size} for n, size in enumerate(sizes)]
    found = pending(answering(silver=rows), {}, 2, 10**6, 10**6, limit_bytes=10**15)
    taken = [
        [
            size
            for n, size in enumerate(sizes)
            if n % 2 in chunk and chunk[n % 2].first <= n <= chunk[n % 2].last
        ]
        for chunk in found.chunks
    ]
    assert [sorted(chain.from_iterable(taken))] == [sorted(sizes)]
    assert all(sum(mine) <= publication_plan.CHUNK_BYTES or len(mine) == 1 for mine in taken)
    few = pending(answering(silver=rows), {}, 2, 10**6, 10**6, limit_bytes=sum(sizes) // 10)
    assert few.has_more
    assert few.records <= len(sizes) // 9


@pytest.mark.promise("C24")
def test_records_of_one_time_that_do_not_fit_into_memory_are_in_several_pieces() -> None:
    """Each record in one of them, in order, and all of them in one publication, whose extents are
    as before."""
    sizes = [
        publication_plan.CHUNK_BYTES * size // 100 for size in (30, 30, 60, 5, 120, 1, 1, 98, 3, 90)
    ]
    ties = [
        {**closed(1, 7, 100 + n % 3, f"k{n}"), "record_bytes": size} for n, size in enumerate(sizes)
    ]
    others = [
        {**closed(p, at, 50, "a"), "record_bytes": 1} for p, at in ((0, 7), (1, 6), (1, 8), (2, 7))
    ]
    asked = answering(silver=[*ties, *others])
    found = pending(asked, {}, 3, 1, 1000, limit_bytes=10**15)
    assert (found.extents, found.has_more) == (
        {0: TimeRange(7, 7), 1: TimeRange(6, 6), 2: TimeRange(7, 7)},
        True,
    )
    found = pending(asked, {}, 3, 10**6, 1000, limit_bytes=10**15)
    assert found.extents == {0: TimeRange(7, 7), 1: TimeRange(6, 8), 2: TimeRange(7, 7)}
    seen: list[tuple[int, int, int, str]] = []
    for chunk in found.chunks:
        rows = asked.select(
            "silver",
            ["closed_at", "due", "merge_key", "partition", "record_bytes"],
            of_chunk(found.order, chunk, 0),
        )
        mine = [row for row in rows.to_pylist() if row["partition"] in chunk]
        assert (
            len(mine) == 1
            or sum(row["record_bytes"] for row in mine) <= publication_plan.CHUNK_BYTES
        )
        seen += sorted(
            (row["partition"], row["closed_at"], row["due"], row["merge_key"]) for row in mine
        )
    everything = sorted(
        (row["partition"], row["closed_at"], row["due"], row["merge_key"])
        for row in (*ties, *others)
    )
    assert seen == everything
    by_number = pending(
        asked, {1: SequenceTail(0, 49, "a", 0, 50, 6)}, 3, 10**6, 3, limit_bytes=10**15
    )
    assert len(by_number.chunks) >= len(found.chunks)


@pytest.mark.promise("C24")
def test_records_that_are_read_again_come_in_pieces_that_fit_into_memory() -> None:
    """Of a table whose rows say their sizes."""
    sizes = [*[10] * 20, chunks.CHUNK_BYTES, *[chunks.CHUNK_BYTES // 3] * 7, 5]
    rows = [{"partition": n % 2, "offset": n, "record_bytes": size} for n, size in enumerate(sizes)]
    partitions, offsets = (
        np.array([row[name] for row in rows], np.int64) for name in ("partition", "offset")
    )
    found = list(
        chunks_of(answering(quarantine=rows), "tracking", "quarantine", partitions, offsets)
    )
    taken = [
        [offset for mine in chunk.offsets.values() for offset in mine.tolist()] for chunk in found
    ]
    assert sorted(chain.from_iterable(taken)) == list(range(len(sizes)))
    assert all(
        sum(sizes[n] for n in mine) <= chunks.CHUNK_BYTES or len(mine) == 1 for mine in taken
    )
    assert len(found) < 8
