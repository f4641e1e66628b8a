"""What silver plans and what gold publishes next, from the answers to a few questions."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.support.configurations import settings_for
from tests.support.inputs import input_of, tp_of
from watersmeet.core import sequence as sequences
from watersmeet.core.corrections import Settled
from watersmeet.core.merge import LATE_SCHEMA
from watersmeet.core.plan import BatchPlan, Cursor, TopicPartition
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.sequence import CORRECTED, MERGED, Tail
from watersmeet.core.state import State
from watersmeet.lake.history import Generation
from watersmeet.lake.pieces import CHUNK_BYTES, chunks_of
from watersmeet.lake.recovered import copies_of_deleted, joined, read_out
from watersmeet.lake.table_reader import Aggregates, TableReader, Where
from watersmeet.running import correcting, publication_plan
from watersmeet.running.planning import Planner
from watersmeet.running.publication_plan import Limits, Pending, Range, Unpublished
from watersmeet.settings import Settings

MERGE_BYTES = 1_000_000

COMPARE: Mapping[str, Any] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Asked:
    """Tables in memory; they answer as the lake's do, with a minimum or a count of rows."""

    def __init__(self, tables: Mapping[str, list[dict[str, Any]]]) -> None:
        self.tables = tables

    def select(self, table: str, columns: Sequence[str], where: Where = ()) -> pa.Table:
        topic = table.partition("_")[2] or "tracking"
        rows = [
            row
            for row in ({"topic": topic, **row} for row in self.tables[table])
            if any(all(_holds(row, *each) for each in term) for term in where or [[]])
        ]
        names = ["merge_key", "tenant", "source", "topic", "reason"]
        kinds = dict.fromkeys(names, pa.string())
        kinds |= dict.fromkeys(["key", "value"], pa.binary())
        return pa.table(
            {
                name: pa.array([row[name] for row in rows], kinds.get(name, pa.int64()))
                for name in columns
            }
        )

    def summary(
        self, table: str, by: Sequence[str], values: Aggregates, where: Where = ()
    ) -> pa.Table:
        columns = {column for _, column in values.values()} - {"*"}
        rows = self.select(table, [*by, *columns], where)
        aggregates: Any = [
            ([], "count_all") if column == "*" else (column, how) for how, column in values.values()
        ]
        return rows.group_by(list(by)).aggregate(aggregates).rename_columns([*by, *values])


def answering(**tables: list[dict[str, Any]]) -> TableReader:
    return Asked(tables)  # type: ignore[return-value]


def _holds(row: Mapping[str, Any], column: str, how: str, value: Any) -> bool:
    if how in ("is null", "is not null"):
        return (row[column] is None) == (how == "is null")
    if isinstance(value, Mapping):
        value = value.get(row["partition"])
        return value is not None and _holds(row, column, how, value)
    return (
        row[column] in value
        if how == "in"
        else bool(row[column] is not None and COMPARE[how](row[column], value))
    )


def read(partition: int, offset: int, time: int, size: int = 10) -> dict[str, Any]:
    """A row of bronze."""
    return {
        "partition": partition,
        "offset": offset,
        "event_time": time,
        "redriven_from": None,
        "record_bytes": size,
    }


def planner(asked: TableReader, settings: Settings, partitions: int = 1) -> Planner:
    """One that begins where its sources do."""
    places = [tp_of(source, p) for source in settings.sources for p in range(partitions)]
    begin = State(0, dict.fromkeys(places, Cursor()), {}, settings.merge.rules)
    return Planner(asked, settings, begin, MERGE_BYTES)


def test_a_plan_goes_on_behind_long_holes_in_some_of_many_partitions(tmp_path: Path) -> None:
    """The partitions behind a hole are asked for with their neighbours, which have records at the
    same offsets."""
    settings = settings_for(tmp_path, merge__max_records_per_batch=80)
    rows = [
        read(p, offset, 50 + offset) for p in range(40) for offset in ([500] if p % 2 else [0, 500])
    ]
    silver = planner(answering(bronze_tracking=rows, bronze_orders=[]), settings, 40)
    assert silver.next() is None, "no clock without the other source"
    assert silver.heads()[tp_of("tracking", 0)] == 50
    assert silver.heads()[tp_of("tracking", 1)] == 550


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
    rows = [read(0, offset, 1_000 - offset) for offset in range(20)]
    asked: Any = Arriving({"bronze_tracking": rows, "bronze_orders": [read(0, 0, 5_000)]})
    plan = planner(asked, settings).next()
    assert plan is not None
    assert plan.clocks == {0: 1_000}, "the first record has the largest event time"
    assert plan_ends(plan)[tp_of("tracking", 0)] == 4


SHAPES: dict[str, list[int]] = {
    "few large ones": [MERGE_BYTES // 7] * 60,
    "many small ones": [10] * 9_000,
    "one larger than a batch": [*[100] * 500, 5 * MERGE_BYTES, *[100] * 500],
    "ever larger ones": [n * n for n in range(700)],
}
"""Sizes of records (bytes)."""


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
@pytest.mark.parametrize("sizes", SHAPES.values(), ids=SHAPES)
def test_a_batch_has_no_more_than_fits_into_memory_and_no_record_is_left_out(
    tmp_path: Path, sizes: list[int]
) -> None:
    """Whatever shape the data has; one record of each topic-partition is always in it."""
    settings = settings_for(tmp_path)
    rows = [read(0, n, n, size) for n, size in enumerate(sizes)]
    silver = planner(answering(bronze_tracking=rows, bronze_orders=rows), settings)
    merged: dict[TopicPartition, int] = {}
    while plan := silver.next():
        taken = [sizes[done.from_offset : done.until_offset] for done in plan.ranges.values()]
        assert sum(chain.from_iterable(taken)) <= MERGE_BYTES or all(
            len(mine) <= 1 for mine in taken
        )
        assert all(done.from_offset == merged.get(tp, 0) for tp, done in plan.ranges.items())
        merged = plan_ends(plan)
        silver.done(plan)
    assert merged == {tp_of(source, 0): len(rows) for source in settings.sources}


def plan_ends(plan: BatchPlan) -> dict[TopicPartition, int]:
    return {tp: done.until_offset for tp, done in plan.ranges.items()}


TIMEOUT = 100
"""Of merge records (ms)."""


def closed(
    partition: int, at: int, due: int, key: str, time: int = 0, *, batch: int = 1
) -> dict[str, Any]:
    """A row of silver with this `closed_at`."""
    return {
        "partition": partition,
        "event_time": time,
        "merge_key": key,
        "status": "timed_out",
        "valid": True,
        "batch": batch,
        "due": due,
        "closed_at": at,
        "tenant": "",
        "record_bytes": 1,
    }


def finished(partition: int, time: int, key: str) -> dict[str, Any]:
    """A row of silver that a timeout has closed."""
    return closed(partition, time + TIMEOUT + 1, time + TIMEOUT, key, time, batch=0)


def tail(seq: int, row: Mapping[str, Any]) -> Tail:
    """A partition's last message, of a row of silver."""
    return Tail(seq, MERGED.place(row), seq, row["event_time"])


def pending(
    rows: list[dict[str, Any]],
    partitions: int,
    limits: Limits,
    tails: Mapping[int, Tail] = MappingProxyType({}),
    clocks: Mapping[int, int] | None = None,
) -> Pending:
    asked = answering(silver=rows)
    return Unpublished(asked, MERGED, tails, partitions, (), clocks).pending(limits)


def test_of_many_rows_about_as_many_of_the_first_are_looked_at_as_are_asked_for() -> None:
    rows = [finished(p, 1000 + 7 * n, f"{n}") for p in range(3) for n in range(400)]
    every = Unpublished(answering(silver=rows), MERGED, {1: tail(9, rows[599])}, 3)
    assert every.first(1_000) is None, "there are no more"
    first = every.first(100)
    assert first is not None
    found = first.pending(Limits(10**6, 10**6))
    assert 50 < found.records < 150
    assert [finished_at for finished_at, _ in found.ends.values()] == [
        MERGED.place(rows[n])[0] for n in (0, 600, 800)
    ]


@pytest.mark.parametrize("far", [10**6, 10**12])
def test_rows_far_behind_the_others_do_not_bring_all_of_them_in(far: int) -> None:
    rows = [finished(p, 1000 + 7 * n, f"{n}") for p in range(3) for n in range(400)]
    rows += [finished(0, far, "far"), *(finished(1, far + n, f"{n}") for n in range(0, 900, 300))]
    first = Unpublished(answering(silver=rows), MERGED, {}, 3).first(100)
    assert first is not None
    assert 20 < first.pending(Limits(10**6, 10**6)).records <= 200
    together = [finished(0, 1000, f"{n}") for n in range(400)]
    assert Unpublished(answering(silver=together), MERGED, {}, 1).first(100) is None, "of one time"


def test_what_sorts_after_the_tail_is_pending() -> None:
    rows = [
        *(finished(0, time, key) for time, key in ((1, "z"), (5, "a"), (5, "b"), (7, "a"))),
        *(finished(1, time, key) for time, key in ((3, "a"), (3, "b"))),
        finished(2, 4, "a"),
        {**finished(2, 9, "a"), "valid": False},
        finished(3, 0, "a"),
    ]
    tails = {0: tail(1, rows[1]), 1: tail(1, rows[5]), 2: tail(0, rows[6])}
    late = TIMEOUT + 1
    assert pending(rows, 4, Limits(100, 100), tails) == Pending(
        [{0: Range(tails[0].place, (late + 7,)), 3: Range(None, (late,))}],
        has_more=False,
        ends={0: (late + 5, late + 7), 3: (late, late)},
        records=3,
    )
    assert pending(rows, 40, Limits(100, 100)) == Pending(
        [{p: Range(None, (late + time,)) for p, time in {0: 7, 1: 3, 2: 4, 3: 0}.items()}],
        has_more=False,
        ends={
            0: (late + 1, late + 7),
            1: (late + 3, late + 3),
            2: (late + 4, late + 4),
            3: (late, late),
        },
        records=8,
    )


def test_records_of_one_time_are_published_together_and_each_partition_gives_its_share() -> None:
    rows = [finished(p, time // 3, f"k{time}") for p in range(2) for time in range(30)]
    late = TIMEOUT + 1
    assert pending(rows, 2, Limits(20, 100)) == Pending(
        [dict.fromkeys((0, 1), Range(None, (late + 3,)))],
        has_more=True,
        ends=dict.fromkeys((0, 1), (late, late + 3)),
        records=24,
    )


def test_what_is_published_is_cut_into_pieces_of_bounded_size() -> None:
    rows = [finished(p, time, key) for p in range(3) for time in range(p + 1) for key in "ab"]
    found = pending(rows, 3, Limits(100, 5))
    first, second, third = ((TIMEOUT + 1 + time,) for time in range(3))
    assert found.chunks == [
        {0: Range(None, first), 1: Range(None, first)},
        {1: Range(first, second), 2: Range(None, first)},
        {2: Range(first, third)},
    ]
    assert pending([], 3, Limits(100, 3)) == Pending([], has_more=False)


def test_what_an_epoch_closes_in_advance_waits_for_the_clock() -> None:
    rows = [closed(0, 8, 7, "a"), closed(0, 9, 7, "b"), closed(1, 8, 7, "a")]

    def at(clocks: Mapping[int, int]) -> list[dict[int, Range]]:
        return pending(rows, 2, Limits(100, 100), clocks=clocks).chunks

    assert at({}) == []
    assert at({0: 8}) == [{0: Range(None, (8,))}]
    assert at({0: 9, 1: 7}) == [{0: Range(None, (9,))}]


def pieces(
    asked: TableReader, unpublished: Unpublished, found: Pending
) -> list[list[dict[str, Any]]]:
    """The rows of each chunk, by partition and in order."""
    columns = ["partition", *unpublished.sequence.order, "record_bytes"]
    read = []
    for chunk in found.chunks:
        rows = asked.select(unpublished.sequence.table, columns, unpublished.of(chunk))
        of_chunk = []
        for p, span in sorted(chunk.items()):
            its = rows.filter(pc.equal(rows["partition"], p))
            of_chunk += span.of(unpublished.sequence, its).to_pylist()
        read.append(of_chunk)
    return read


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
@pytest.mark.parametrize("unit", [1, 10_000], ids=["small", "large"])
def test_a_piece_of_a_publication_has_no_more_than_fits_into_memory(unit: int) -> None:
    sizes = [unit * size for size in (*[100] * 300, *[90_000] * 30, *[7] * 900)]
    rows = [{**finished(n % 2, n, "a"), "record_bytes": size} for n, size in enumerate(sizes)]
    asked = answering(silver=rows)
    all_of_it = Unpublished(asked, MERGED, {}, 2)
    found = all_of_it.pending(Limits(10**6, 10**6, 10**15))
    taken = [[row["record_bytes"] for row in mine] for mine in pieces(asked, all_of_it, found)]
    assert [sorted(chain.from_iterable(taken))] == [sorted(sizes)]
    assert all(sum(mine) <= publication_plan.CHUNK_BYTES or len(mine) == 1 for mine in taken)
    few = all_of_it.pending(Limits(10**6, 10**6, sum(sizes) // 10))
    assert few.has_more
    assert few.records <= len(sizes) // 9


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
@pytest.mark.parametrize("most", [3, 1000])
def test_records_of_one_time_that_do_not_fit_into_memory_are_in_several_pieces(most: int) -> None:
    """Each record in one of them, in order, and all of them in one publication, whose ends are as
    before."""
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
    everything = Unpublished(asked, MERGED, {}, 3)
    found = everything.pending(Limits(1, most, 10**15))
    assert (found.ends, found.has_more) == ({0: (7, 7), 1: (6, 6), 2: (7, 7)}, True)
    found = everything.pending(Limits(10**6, most, 10**15))
    assert found.ends == {0: (7, 7), 1: (6, 8), 2: (7, 7)}
    read = pieces(asked, everything, found)
    for mine in read:
        size = sum(row["record_bytes"] for row in mine)
        assert len(mine) == 1 or (size <= publication_plan.CHUNK_BYTES and len(mine) <= most)
    places = [(row["partition"], *MERGED.place(row)) for mine in read for row in mine]
    assert len(places) == len({*places}) == len(ties) + len(others)
    assert places == sorted(places)


@pytest.mark.parametrize("sequence", [MERGED, CORRECTED], ids=["merged", "corrected"])
@pytest.mark.parametrize("seed", range(40))
def test_what_is_published_bit_by_bit_is_everything_once_and_in_order(
    sequence: sequences.Sequence, seed: int
) -> None:
    """Whatever the limits, the sizes, and where an attempt ends; rows may share all but the last
    column of their order."""
    rng = random.Random(seed)
    texts = ("tenant", "merge_key", "source", "topic")
    rows = {
        tuple(drawn.values()): drawn
        for _ in range(rng.randint(0, 60))
        if (
            drawn := {
                "partition": rng.randrange(3),
                **{n: rng.choice("ab") if n in texts else rng.randrange(4) for n in sequence.order},
            }
        )
    }
    facts = {"batch": 0, **sequence.with_message}
    table = [
        {**facts, **row, "record_bytes": rng.choice([1, publication_plan.CHUNK_BYTES // 3])}
        for row in rows.values()
    ]
    asked = answering(**{sequence.table: table})
    tails: dict[int, Tail] = {}
    out: dict[int, list[tuple[Any, ...]]] = {p: [] for p in range(3)}
    while True:
        limits = Limits(rng.choice([1, 5, 100]), rng.choice([1, 4, 100]))
        unpublished = Unpublished(asked, sequence, tails, 3)
        first = unpublished.first(rng.choice([1, 5, 20]))
        found = (first or unpublished).pending(limits)
        if first is not None and not found.records:
            found = unpublished.pending(limits)
        read = [row for mine in pieces(asked, unpublished, found) for row in mine]
        assert len(read) == found.records
        if not read:
            break
        # Without a transaction an attempt may end anywhere.
        for row in read[: rng.choice([1, len(read)])]:
            p, place = row["partition"], sequence.place(row)
            out[p].append(place)
            tails[p] = Tail(len(out[p]) - 1, place)
    for p, places in out.items():
        assert places == sorted(sequence.place(row) for row in table if row["partition"] == p)


class Weighed(Asked):
    """Tables that remember how many bytes each read of values had."""

    def __init__(self, tables: Mapping[str, list[dict[str, Any]]]) -> None:
        super().__init__(tables)
        self.read: list[int] = []

    def select(self, table: str, columns: Sequence[str], where: Where = ()) -> pa.Table:
        if "value" in columns:
            self.read.append(sum(super().select(table, ["record_bytes"], where)[0].to_pylist()))
        return super().select(table, columns, where)


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
def test_what_a_redriven_record_says_it_was_is_read_in_pieces_and_only_if_it_may_be_true() -> None:
    def row(offset: int, size: int, of: int | None = None, **more: Any) -> dict[str, Any]:
        own = {"key": b"k", "value": b"%d" % (offset if of is None else of), "reason": None}
        return {**read(0, offset, 1, size), **own, "redriven_from": of, **more}

    large = CHUNK_BYTES * 9 // 10
    third = CHUNK_BYTES // 3
    rows = [row(n, large) for n in range(10)]  # named by records of 50 bytes
    rows += [row(10 + n, 50, of=n) for n in range(10)]
    rows += [row(20 + n, third) for n in range(7)] + [row(27, third, reason="no_key")]
    rows += [row(30 + n, third + 40, of=20 + n) for n in range(8)]
    rows += [row(40, 50), row(41, 90, of=40), row(42, 90, of=40, value=b"another")]
    asked = Weighed({"bronze_tracking": rows, "silver": []})
    tp = tp_of("tracking", 0)
    out = read_out(asked, Generation(0, -1, {tp: 0}, {}), {tp: (10, 100)})  # type: ignore[arg-type]
    assert {tp: offsets.tolist() for tp, offsets in out.items()} == {tp: [*range(30, 37), 41]}
    assert sum(asked.read) < 15 * (third + 40)
    assert max(asked.read) <= CHUNK_BYTES


class Counted(Asked):
    """Tables that remember how many rows of silver each read had."""

    def __init__(self, tables: Mapping[str, list[dict[str, Any]]]) -> None:
        super().__init__(tables)
        self.read: list[int] = []

    def select(self, table: str, columns: Sequence[str], where: Where = ()) -> pa.Table:
        found = super().select(table, columns, where)
        self.read += [found.num_rows] if table == "silver" else []
        return found


def test_of_all_that_was_passed_over_the_copies_of_deleted_records_alone_are_read() -> None:
    passed = {"status": "passed", "generation": 0, "source": "tracking"}
    silver = [{**passed, "partition": p, "offset": n} for p in (0, 1) for n in range(1_000)]
    originals = {(0, 600): 499, (0, 601): 500, (0, 2_000): 1, (1, 7): 3, (1, 8): 2}
    bronze = [
        {**read(p, n, 1), "redriven_from": original} for (p, n), original in originals.items()
    ]
    asked = Counted({"bronze_tracking": [*bronze, read(0, 5, 1)], "silver": silver})
    first, second = tp_of("tracking", 0), tp_of("tracking", 1)
    generation = Generation(0, 0, {}, {})
    copies = copies_of_deleted(asked, generation, {first: 500, second: 3})  # type: ignore[arg-type]
    assert {tp: o.tolist() for tp, o in joined(copies).items()} == {first: [600], second: [8]}
    assert sum(asked.read) < 10


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
def test_records_that_are_read_again_come_in_pieces_that_fit_into_memory() -> None:
    sizes = [*[10] * 20, CHUNK_BYTES, *[CHUNK_BYTES // 3] * 7, 5]
    rows = [{"partition": n % 2, "offset": n, "record_bytes": size} for n, size in enumerate(sizes)]
    partitions, offsets = (
        np.array([row[name] for row in rows], np.int64) for name in ("partition", "offset")
    )
    found = list(
        chunks_of(
            answering(quarantine=rows), input_of("tracking"), "quarantine", partitions, offsets
        )
    )
    taken = [
        [offset for mine in chunk.offsets.values() for offset in mine.tolist()] for chunk in found
    ]
    assert sorted(chain.from_iterable(taken)) == list(range(len(sizes)))
    assert all(sum(sizes[n] for n in mine) <= CHUNK_BYTES or len(mine) == 1 for mine in taken)
    assert len(found) < 8


@pytest.mark.promise("C24")
@pytest.mark.fault("memory")
def test_late_records_that_pack_well_come_in_pieces_that_fit_into_memory() -> None:
    sizes = [*[10] * 20, correcting.CHUNK_BYTES, *[correcting.CHUNK_BYTES // 3] * 7, 5]
    places = [
        {"source": "tracking", "partition": n % 2, "offset": n, RECORD_BYTES.name: size}
        for n, size in enumerate(sizes)
    ]
    schema = pa.schema([*LATE_SCHEMA, RECORD_BYTES])
    late = Settled(pa.Table.from_pylist(places, schema), np.arange(len(sizes)))
    shares = [*correcting._shares(late)]
    offsets = [share.rows["offset"].to_pylist() for share in shares]
    assert [*chain(*offsets)] == [*range(len(sizes))]
    assert all(
        sum(sizes[n] for n in mine) <= correcting.CHUNK_BYTES or len(mine) == 1 for mine in offsets
    )
    assert len(offsets) < 8
    assert [share.settled_at.tolist() for share in shares] == offsets
