"""What every engine promises of a lake's tables: a commit is made once and whole, never by a fenced
owner; reading is exact."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from pyarrow import parquet
from pyspark.sql import SparkSession

from tests.laws.conftest import (
    CATALOG_AT_NIGHT,
    ON_BOTH_ENGINES,
    QUICK,
    SPARK_CATALOG,
    MakeLake,
    MakeSettings,
    in_catalogs_of_spark,
    one_of,
)
from tests.support.cases import (
    SOURCES,
    cases_with_ids,
    expected_duplicates,
    expected_late,
    expected_quarantine,
    expected_silver,
    rich_cases,
)
from tests.support.configurations import IDS
from tests.support.lakes import OpenSpark, engine_for, folder_of, rows_of_silver
from watersmeet.core.merge import REPLACING
from watersmeet.core.types import TIME
from watersmeet.engine import Engine, Running, Selection, SilverRows, Summary, embedded
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.engine.spark import SparkEngine
from watersmeet.engine.tasks import by_sorted_key
from watersmeet.errors import ConstraintError, is_retriable, kind_of
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.commits import Commit, suppress_conflict
from watersmeet.lake.maintenance import FILE_BYTES
from watersmeet.lake.table_reader import Where, row_count
from watersmeet.lake.tables import layout
from watersmeet.run import create_missing, create_views
from watersmeet.running.owner import Owner

APPLICATION = "test"
DEADLINE_S = 120
CLEAN_UP_EVERY = 15
"""Of the test of it."""
NAMES = (tables.PUBLISHED, tables.SILVER, tables.ERASED)


kind = one_of(ON_BOTH_ENGINES)


@pytest.fixture(scope="module")
def engine(open_spark: OpenSpark, new_settings: MakeSettings) -> Engine:
    """A lake whose tables the laws share; each law has a partition or an application of its own."""
    engine = engine_for(open_spark, new_settings())
    assert not any(engine.reader.exists(name) for name in NAMES), "looking for a table makes none"
    create_missing(engine)
    return engine


def published(
    engine: Engine, partition: int, *seqs: int, times: Sequence[int | None] = ()
) -> pa.Table:
    rows = [
        {"partition": partition, "first_seq": seq, "last_seq": seq, "last_event_time": time}
        | {"last_key": "k", "sink_offset": seq, "committed_at": 1, "topic": "merged"}
        for seq, time in zip(seqs, times or [0] * len(seqs), strict=True)
    ]
    return engine.lake.layout[tables.PUBLISHED].rows_of(rows)


def _failing(_: pa.Table) -> pa.Table:
    raise ValueError("fails on purpose")


def seqs(engine: Engine, partition: int) -> list[int]:
    found = engine.reader.select(tables.PUBLISHED, ["last_seq"], [[("partition", "=", partition)]])
    return sorted(found["last_seq"].to_pylist())


Changed = tuple[int, str, str | None, int, int | None]
"""A row for a merge into silver: partition, key, status, event time, and the event time of the row
that goes (ms)."""


def changed(engine: Engine, *rows: Changed) -> Any:
    """Rows for a merge, in the engine's own form."""
    return engine.read(gathered(engine, *rows))


def gathered(engine: Engine, *rows: Changed) -> pa.Table:
    """Rows for a merge, in this process."""
    table = engine.lake.layout[tables.SILVER]
    values = [
        {"partition": p, "merge_key": key, "status": status, "event_time": time, "tenant": ""}
        | {"last_event_time": time, "tracking": [], "orders": [], "batch": 0, "generation": 0}
        | {"record_bytes": 0}
        for p, key, status, time, _ in rows
    ]
    replaces = pa.array(
        [None if row[-1] is None else row[-1] * 1000 for row in rows], pa.int64()
    ).cast(TIME)
    replacing = {"replaces": replaces, "delete_up_to": pa.nulls(len(rows), TIME)}
    found = table.rows_of(values)
    for name in REPLACING:
        found = found.append_column(name, replacing[name])
    return found


Form = Callable[..., Any]
"""`gathered` or `changed`."""

fresh_partitions = count(100)
"""Partitions that laws take for themselves."""


def changed_schema(engine: Engine) -> pa.Schema:
    """The columns of `changed`."""
    replacing = [pa.field(name, TIME) for name in REPLACING]
    return pa.schema([*engine.lake.layout[tables.SILVER].schema, *replacing])


def silver(engine: Engine, partition: int) -> list[tuple[Any, ...]]:
    found = engine.reader.select(
        tables.SILVER, ["merge_key", "status", "event_time"], [[("partition", "=", partition)]]
    )
    return sorted(tuple(row.values()) for row in found.to_pylist())


def read(engine: Engine, rows: Any, columns: Sequence[str]) -> list[tuple[Any, ...]]:
    distinct = Summary(columns, {}).of(engine.collect(rows))
    return sorted((tuple(row.values()) for row in distinct.to_pylist()), key=repr)


DELTAS_OWN = ("spark.databricks.delta.lastCommitVersionInSession", "spark.sql.parquet.fieldId.")
"""How the settings begin that Delta keeps in a session by itself: the latter ones at its first
write."""


def settings_of(spark: SparkSession) -> dict[str, str]:
    """A session's settings, but for what Delta itself keeps among them."""
    return {
        name: value for name, value in spark.conf.getAll.items() if not name.startswith(DELTAS_OWN)
    }


# -- tables


def test_tables_are_made_as_laid_out_and_a_second_time_left_as_they_are(engine: Engine) -> None:
    wanted = layout(engine.lake.settings)
    versions = {name: engine.reader.version(name) for name in wanted}
    for name in NAMES:
        engine.create(wanted[name])
    assert {name: engine.reader.version(name) for name in wanted} == versions
    for name, table in wanted.items():
        assert engine.reader.columns(name) == table.schema, name
        assert dict(table.properties).items() <= engine.reader.properties(name).items()
    silver = DeltaTable(f"{folder_of(engine.lake.settings)}/{tables.SILVER}")
    assert tuple(silver.metadata().partition_columns) == wanted[tables.SILVER].partitioned_by


@pytest.mark.parametrize("kind", [SPARK_CATALOG], indirect=True, scope="module")
@pytest.mark.usefixtures("kind")
def test_a_catalog_has_the_views_of_a_lake_as_the_reader_answers_them(
    new_lake: MakeLake, spark: SparkSession
) -> None:
    corrections = {"topic": "merged-corrections", "within": "36500d"}
    cases = cases_with_ids(rich_cases(4, 1656, wealth="late"))
    lake = new_lake(cases, publish__corrections=corrections, **IDS)
    lake.arrive()
    lake.merge(lake.quick)
    create_views(lake.engine)
    for name, view in lake.engine.lake.views.items():
        rows = spark.sql(f"SELECT * FROM {lake.engine.lake.own_address(name)}")
        assert rows.columns == view.schema.names
        compared = [each for each in ("partition", "offset", "batch") if each in rows.columns]
        found = sorted(map(tuple, rows.select(*compared).collect()))
        answered = lake.reader.select(name, compared or view.schema.names[:1]).to_pylist()
        assert rows.count() == len(answered), name
        assert not compared or found == sorted(tuple(row.values()) for row in answered)
    assert row_count(lake.reader, tables.CORRECTIONS) > 0
    assert row_count(lake.reader, tables.QUARANTINE) > 0


# -- appending


def test_rows_are_appended_as_they_are_in_one_commit_each(engine: Engine) -> None:
    times = [-62_135_596_800_000, -1, 0, None, 253_402_300_799_999]
    before = engine.reader.version(tables.PUBLISHED)
    engine.append(tables.PUBLISHED, published(engine, 0, *range(5), times=times))
    engine.append(tables.PUBLISHED, engine.read(published(engine, 0, 5)))
    engine.append(tables.PUBLISHED, published(engine, 0), Commit("empty", 1, 1, {"says": "é \" '"}))
    [last, *others] = engine.reader.history(tables.PUBLISHED, 3)
    assert len(others) == 2
    assert last.number == before + 3
    found = Commit.parse(last.metadata)
    assert found is not None
    assert (found.application, found.token, found.number, found.facts) == (
        "empty",
        1,
        1,
        {"says": "é \" '"},
    )
    rows = engine.reader.select(
        tables.PUBLISHED, ["last_seq", "last_event_time"], [[("partition", "=", 0)]]
    ).to_pylist()
    assert sorted(tuple(row.values()) for row in rows) == [*enumerate(times), (5, 0)]


def test_a_commit_is_appended_once_whoever_repeats_it(engine: Engine) -> None:
    for number in (1, 1, 2, 1, 2):
        engine.append(tables.PUBLISHED, published(engine, 1, number), Commit("repeats", 1, number))
    assert seqs(engine, 1) == [1, 2]
    engine.append(tables.PUBLISHED, published(engine, 1, 9), Commit("other", 1, 1))
    assert seqs(engine, 1) == [1, 2, 9]


@dataclass
class Counting:
    """Follows from the late rows, and the finished ones of their keys: a correction for each of
    these; and from nothing, a row of the batch."""

    engine: Engine
    partition: int
    follows: bool = True
    pieces: int = 1
    seen: list[tuple[str, str]] = field(default_factory=list)

    @property
    def keys(self) -> Collection[str] | None:
        if not self.follows:
            return None
        return {key for status, key in self.seen if status == "late"} | {"earlier"}

    def see(self, rows: pa.Table) -> None:
        places = zip(rows["status"].to_pylist(), rows["merge_key"].to_pylist(), strict=True)
        found = sorted(place for place in places if place[0] in ("late", "timed_out"))
        self.seen += [place for place in found if place[0] == "late"]
        keys = self.keys or ()
        self.seen += [place for place in found if place[0] != "late" and place[1] in keys]

    def rows(self) -> Iterator[pa.Table]:
        yield gathered(self.engine, (self.partition, "", "batch", 0, None))
        closed = [key for status, key in self.seen if status == "timed_out"]
        for n in range(self.pieces):
            made = [(self.partition, key, "correction", n, None) for key in sorted(closed)]
            if made:
                yield gathered(self.engine, *made)


WRITES = ("append", "merge")
"""The ways in which rows are written with what follows from them."""


@pytest.mark.promise("C24")
@pytest.mark.fault("commits")
@pytest.mark.parametrize("form", [gathered, changed], ids=["here", "the engine's own"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("size", [embedded._MERGED_BYTES, 0], ids=["few", "many"])
def test_what_follows_from_rows_is_written_with_them_in_one_commit_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, form: Form, write: str, size: int
) -> None:
    monkeypatch.setattr(embedded, "_MERGED_BYTES", size)
    p = next(fresh_partitions)
    application = f"follows {p}"
    opened = [(p, "a", "open", 10, None), (p, "b", "open", 20, None)]
    engine.append(tables.SILVER, gathered(engine, *opened), Commit(application, 1, 1))
    replaced = [10, 20] if write == "merge" else [None, None]
    rows = [(p, "a", "timed_out", 10, replaced[0]), (p, "b", "timed_out", 20, replaced[1])]
    rows += [(p, "a", "late", 1, None), (p, "earlier", "timed_out", 4, None)]
    version = engine.reader.version(tables.SILVER)
    for _ in range(2):
        following = Counting(engine, p, pieces=3)
        add = engine.append if write == "append" else engine.merge
        made = form(engine, *rows)
        add(tables.SILVER, made, Commit(application, 1, 2), following=following)
    assert engine.reader.version(tables.SILVER) == version + 1
    expected = [row[1:4] for row in rows] + [("", "batch", 0)]
    expected += [(key, "correction", n) for key in ("a", "earlier") for n in range(3)]
    expected += [row[1:4] for row in opened] if write == "append" else []
    assert silver(engine, p) == sorted(expected)
    alone = Counting(engine, p, follows=False)
    engine.append(tables.SILVER, form(engine), Commit(application, 1, 3), following=alone)
    assert silver(engine, p) == sorted([*expected, ("", "batch", 0)])


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.usefixtures("kind")
def test_what_follows_goes_on_where_files_must_not_be_written_or_rewritten(
    new_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, open_spark: OpenSpark, write: str
) -> None:
    """Others have added a constraint, and follow the changes: delta-rs itself writes all rows."""
    engine = engine_for(open_spark, new_settings(silver={"change_data_feed": True}))
    create_missing(engine)
    silver_table = DeltaTable(f"{folder_of(engine.lake.settings)}/{tables.SILVER}")
    silver_table.alter.add_constraint({"known": "status != 'odd'"})
    assert isinstance(engine, EmbeddedEngine)
    assert not engine.takes_files(tables.SILVER)
    monkeypatch.setattr(embedded, "_MERGED_BYTES", 0)
    rows = gathered(engine, (0, "earlier", "timed_out", 4, None))
    add = engine.append if write == "append" else engine.merge
    following = Counting(engine, 0, pieces=3)
    add(tables.SILVER, rows, Commit("follows", 1, 1), following=following)
    expected = [("earlier", "correction", n) for n in range(3)]
    assert silver(engine, 0) == [("", "batch", 0), *expected, ("earlier", "timed_out", 4)]
    odd = gathered(engine, (0, "b", "odd", 4, None))
    with pytest.raises(ConstraintError):
        add(tables.SILVER, odd, Commit("follows", 1, 2), following=Counting(engine, 0))


def test_of_many_who_append_the_same_commit_one_does(engine: Engine) -> None:
    def append(seq: int) -> None:
        with suppress_conflict():
            engine.append(tables.PUBLISHED, published(engine, 2, seq), Commit("race", 1, 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4)))
    assert len(seqs(engine, 2)) == 1


# -- merging and deleting


@in_catalogs_of_spark
def test_a_merge_replaces_the_open_row_of_its_key_and_time_once_and_leaves_no_setting_behind(
    engine: Engine, spark: SparkSession
) -> None:
    before = settings_of(spark)
    first = [
        (3, "a", "open", 10, None),
        (3, "b", "open", 20, None),
        (3, "c", "timed_out", 10, None),
    ]
    engine.merge(tables.SILVER, changed(engine, *first), Commit("merges", 1, 1))
    second = [(3, "a", "timed_out", 5, 10), (3, "a", "open", 90, None), (3, "c", "open", 30, None)]
    for _ in range(2):
        engine.merge(tables.SILVER, changed(engine, *second), Commit("merges", 1, 2, {"batch": 1}))
    expected = [
        ("a", "open", 90),
        ("a", "timed_out", 5),
        ("b", "open", 20),
        ("c", "open", 30),
        ("c", "timed_out", 10),
    ]
    assert silver(engine, 3) == expected
    [last] = engine.reader.history(tables.SILVER, 1)
    assert Commit.parse(last.metadata) == Commit("merges", 1, 2, {"batch": 1})
    rows = gathered(engine, *second)

    def merge() -> None:
        failing = engine.from_tables(_failing, [rows], [3], changed_schema(engine))
        engine.merge(tables.SILVER, failing, Commit("merges", 1, 3))

    with pytest.raises(Exception, match="on purpose"):  # at once, or when the rows are needed
        merge()
    assert silver(engine, 3) == expected
    assert settings_of(spark) == before
    mine, version = [[("partition", "=", 3)]], engine.reader.version(tables.SILVER) - 1
    earlier = engine.read(Selection(tables.SILVER, ["merge_key"], mine, version=version))
    assert read(engine, earlier, ["merge_key"]) == [("a",), ("b",), ("c",)], (
        "an earlier version is as it was"
    )


@in_catalogs_of_spark
def test_rows_in_this_process_and_the_engines_own_are_merged_in_turns(engine: Engine) -> None:
    others = [(7, f"k{n}", "open", n, None) for n in range(20)]
    engine.merge(tables.SILVER, changed(engine, *others), Commit("turns", 1, 1))
    for n, rows in enumerate((gathered, changed, gathered), start=1):
        news = [(7, "k0", "timed_out", n - 1, n - 1), (7, "k0", "open", n, None)]
        commit = Commit("turns", 1, n + 1)
        for _ in range(2):
            engine.merge(tables.SILVER, rows(engine, *news), commit)
    expected = [("k0", "timed_out", n) for n in range(3)] + [("k0", "open", 3)]
    expected += [(key, "open", n) for _, key, _, n, _ in others[1:]]
    assert silver(engine, 7) == sorted(expected)
    read_by_engine = engine.read(Selection(tables.SILVER, ["merge_key"], [[("partition", "=", 7)]]))
    assert engine.collect(read_by_engine).num_rows == len(expected)


def _closing(chunks: Iterator[pa.Table], news: pa.Table) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Closes partition 13, and says of each row in which piece it came; at last the news."""
    keys: set[str] = set()
    for number, chunk in enumerate(chunks, start=1):
        mine = chunk.filter(pc.equal(chunk["partition"], 13))
        found = mine["merge_key"].to_pylist()
        assert keys.isdisjoint(found), "all rows of a key come in one piece"
        keys.update(found)
        yield chunk, _as_changed(mine, "timed_out", number)
    yield news.slice(0, 0), _as_changed(news.drop_columns([*REPLACING]), "open", 0)


def _as_changed(rows: pa.Table, status: str, batch: int) -> pa.Table:
    replaces = rows["event_time"] if status == "timed_out" else pa.nulls(len(rows), TIME)
    for name, value in (("status", status), ("batch", batch)):
        number = rows.column_names.index(name)
        rows = rows.set_column(
            number, name, pa.array([value] * len(rows), rows.schema.types[number])
        )
    nothing = pa.nulls(len(rows), TIME)
    return rows.append_column("replaces", replaces).append_column("delete_up_to", nothing)


@pytest.mark.promise("C24")
@pytest.mark.fault("commits", "memory")
@pytest.mark.long
def test_rows_that_come_in_pieces_are_merged_once_in_one_commit(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watersmeet.engine.spark.CHUNK_BYTES", 1)
    opened = [(13, f"k{n}", "open", 10 + n, None) for n in range(4)]
    others = [(14, "k0", "open", 10, None), (13, "done", "timed_out", 5, None)]
    engine.merge(tables.SILVER, changed(engine, *opened, *others), Commit("pieces", 1, 1))
    news = changed(engine, (13, "new", "open", 50, None))
    schema = changed_schema(engine)
    version = engine.reader.version(tables.SILVER)
    size = 100 * engine.merge_bytes  # so that a row is a piece, whatever rows the table has
    for _ in range(2):
        assert engine.merge_in_chunks(
            SilverRows(["open"], size),
            _closing,
            [engine.collect(news)],
            schema,
            Commit("pieces", 1, 2),
            Counting(engine, 13, pieces=2),
        )
    expected = [
        ("", "batch", 0),
        ("done", "timed_out", 5),
        *((f"k{n}", "timed_out", 10 + n) for n in range(4)),
        ("new", "open", 50),
    ]
    assert silver(engine, 13) == expected
    assert silver(engine, 14) == [("k0", "open", 10)]
    where = [[("partition", "=", 13), ("merge_key", "not in", ["done", ""])]]
    chunks = {
        row["batch"] for row in engine.reader.select(tables.SILVER, ["batch"], where).to_pylist()
    }
    assert len(chunks) > 2, "more than one piece, and the news"
    assert engine.reader.version(tables.SILVER) == version + 1


def test_sorted_rows_are_cut_between_keys() -> None:
    keys = pa.table({"partition": [0] * 6 + [1] * 4, "merge_key": list("aabbbccdde")})
    for size in (1, 40, 10**6):
        for by in (1, 3, 10):
            found = list(
                by_sorted_key((keys.slice(begin, by) for begin in range(0, len(keys), by)), size)
            )
            assert pa.concat_tables(found).equals(keys)
            of_chunks = [{*zip(*chunk.to_pydict().values(), strict=True)} for chunk in found]
            assert len(set().union(*of_chunks)) == sum(map(len, of_chunks)) == 6
            assert size > 1 or by > 1 or len(found) == 6


def test_a_merge_that_changes_no_row_is_a_commit_too(engine: Engine) -> None:
    before = silver(engine, 9)
    for number, rows in enumerate(([], [(9, "nobody", None, 10, 10)]), start=1):
        engine.merge(
            tables.SILVER, changed(engine, *rows), Commit("nothing", 1, number), only_open=False
        )
        [last] = engine.reader.history(tables.SILVER, 1)
        assert Commit.parse(last.metadata) == Commit("nothing", 1, number)
    assert silver(engine, 9) == before == []


def test_a_merge_of_all_rows_replaces_finished_ones_and_takes_away_those_without_a_status(
    engine: Engine,
) -> None:
    first = [
        (4, "a", "timed_out", 10, None),
        (4, "b", "open", 20, None),
        (4, "c", "timed_out", 10, None),
    ]
    twice = [(4, "d", "timed_out", 30, None), (4, "d", "open", 30, None)]
    engine.merge(tables.SILVER, changed(engine, *first, *twice), Commit("resets", 1, 1))
    second = [
        (4, "a", "timed_out", 15, 10),
        (4, "b", None, 20, 20),
        (4, "d", None, 30, 30),
        (4, "d", "timed_out", 30, None),
    ]
    engine.merge(tables.SILVER, changed(engine, *second), Commit("resets", 1, 2), only_open=False)
    assert silver(engine, 4) == [
        ("a", "timed_out", 15),
        ("c", "timed_out", 10),
        ("d", "timed_out", 30),
    ]


@in_catalogs_of_spark
def test_rows_are_deleted_once(engine: Engine) -> None:
    rows = [("s", "t", 5, offset, time, None) for offset, time in enumerate((1000, 2000, 3000))]
    engine.append(tables.ERASED, engine.lake.layout[tables.ERASED].rows(rows))
    wanted = [
        [("partition", "=", 5), ("erased_at", "<", 1500)],
        [("partition", "=", 5), ("offset", ">=", 2)],
    ]
    for _ in range(2):
        engine.delete(tables.ERASED, wanted, Commit("deletes", 1, 1))
        engine.append(tables.ERASED, engine.lake.layout[tables.ERASED].rows(rows[:1]))
    found = engine.reader.select(tables.ERASED, ["offset"], [[("partition", "=", 5)]])
    assert sorted(found["offset"].to_pylist()) == [0, 0, 1]


NO_SQL = (
    "${env:HOME}",
    "${system:user.dir}",
    "${spark.app.name}",
    "'; --",
    "\\",
    "\\'",
    "`",
    "%(x)s",
    ":x",
    "{rows}",
    "é\n\x00",
)


@pytest.mark.promise("N31")
@pytest.mark.fault("hostile")
@in_catalogs_of_spark
def test_a_text_is_a_value_and_never_a_part_of_a_statement(engine: Engine) -> None:
    known = [*NO_SQL, os.environ["HOME"], str(Path.cwd())]
    where = [[("partition", "=", 9), ("merge_key", "in", list(NO_SQL))]]

    def keys(where: Where) -> list[str]:
        return sorted(
            row[0]
            for row in read(
                engine, engine.read(Selection(tables.SILVER, ["merge_key"], where)), ["merge_key"]
            )
        )

    engine.merge(
        tables.SILVER,
        changed(engine, *[(9, key, "open", 10, None) for key in known]),
        Commit("texts", 1, 1),
    )
    assert keys(where) == sorted(NO_SQL)
    assert keys([[("partition", "=", 9), ("merge_key", "=", key)] for key in NO_SQL]) == sorted(
        NO_SQL
    )
    engine.delete(tables.SILVER, where, Commit("texts", 1, 2))
    assert keys([[("partition", "=", 9)]]) == sorted(known[len(NO_SQL) :])


def test_what_an_earlier_owner_still_writes_changes_nothing(engine: Engine) -> None:
    engine.merge(
        tables.SILVER, changed(engine, (6, "a", "open", 10, None)), Commit("owners", 1, 50)
    )
    engine.append(
        tables.SILVER,
        engine.lake.layout[tables.SILVER].schema.empty_table(),
        Commit("owners", 2, 1),
    )
    version = engine.reader.version(tables.SILVER)
    engine.merge(
        tables.SILVER, changed(engine, (6, "a", "timed_out", 10, 10)), Commit("owners", 1, 51)
    )
    engine.append(
        tables.SILVER, changed(engine, (6, "b", "open", 10, None)), Commit("owners", 1, 52)
    )
    engine.delete(tables.SILVER, [[("partition", "=", 6)]], Commit("owners", 1, 53))
    assert silver(engine, 6) == [("a", "open", 10)]
    assert engine.reader.version(tables.SILVER) == version
    engine.merge(
        tables.SILVER, changed(engine, (6, "a", "timed_out", 10, 10)), Commit("owners", 2, 2)
    )
    assert silver(engine, 6) == [("a", "timed_out", 10)]


# -- reading and transforming


def _counted(one: pa.Table, other: pa.Table) -> pa.Table:
    """By partition, how many rows each input has, and the sum of `last_seq` of the first."""
    partitions = pc.unique(
        pa.chunked_array([*one["partition"].chunks, *other["partition"].chunks], pa.int32())
    )
    found: dict[str, list[int]] = {name: [] for name in ("partition", "ones", "others", "sum")}
    for p in partitions.to_pylist():
        mine, others = (rows.filter(pc.equal(rows["partition"], p)) for rows in (one, other))
        for name, value in zip(
            found,
            (p, mine.num_rows, others.num_rows, sum(mine["last_seq"].to_pylist())),
            strict=True,
        ):
            found[name].append(value)
    return pa.table(found)


def test_a_function_of_tables_sees_every_row_of_a_partition_where_it_is_read(
    engine: Engine,
) -> None:
    many = pa.concat_tables([published(engine, p, *range(p - 19)) for p in range(20, 60)])
    engine.append(tables.PUBLISHED, many)
    few = published(engine, 27, 1, 2).select(["partition", "topic"])
    schema = pa.schema([(name, pa.int64()) for name in ("partition", "ones", "others", "sum")])
    where: Where = [
        [("partition", "<", 40), ("partition", ">=", 20), ("last_seq", ">", 0)],
        [("partition", "=", 50), ("last_seq", "=", 3)],
    ]
    selection = Selection(tables.PUBLISHED, ["partition", "last_seq"], where)
    found = engine.from_tables(_counted, [selection, few], range(20, 60), schema)
    expected = [(p, p - 20, 2 if p == 27 else 0, sum(range(p - 19))) for p in range(21, 40)]
    assert sorted(read(engine, found, schema.names)) == [*expected, (50, 1, 0, 3)]
    none = [many.slice(0, 0), few.slice(0, 0)]
    assert read(engine, engine.from_tables(_counted, none, [27], schema), schema.names) == []
    names = Selection(tables.PUBLISHED, ["partition"], where[1:], {"source": "it's"})
    schema = pa.schema([("partition", pa.int32()), ("source", pa.string())])
    found = engine.from_tables(_as_it_is, [names], [50], schema)
    assert read(engine, found, schema.names) == [(50, "it's")]


def _as_it_is(rows: pa.Table) -> pa.Table:
    return rows


@pytest.mark.parametrize("kind", ["spark-folder"], indirect=True, scope="module")
def test_a_function_of_tables_reads_what_the_driver_has_seen_or_raises_what_is_tried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    selection = Selection(tables.PUBLISHED, ["partition", "last_seq"], [[("partition", "=", 61)]])
    schema = pa.schema([("partition", pa.int32()), ("last_seq", pa.int64())])

    def seen(version: int) -> list[tuple[Any, ...]]:
        monkeypatch.setattr(engine.reader, "version", lambda _: version)
        return read(engine, engine.from_tables(_as_it_is, [selection], [61], schema), schema.names)

    engine.append(tables.PUBLISHED, published(engine, 61, 1))
    before = engine.reader.version(tables.PUBLISHED)
    engine.append(tables.PUBLISHED, published(engine, 61, 2))
    assert seen(before) == [(61, 1)]
    assert seen(before + 1) == [(61, 1), (61, 2)]
    with pytest.raises(Exception, match="an executor does not see all of version") as raised:
        seen(before + 2)
    assert (kind_of(raised.value), is_retriable(raised.value)) == ("LakeNotSharedError", True)


@pytest.mark.promise("C20")
@pytest.mark.parametrize("kind", ["spark-folder"], indirect=True, scope="module")
def test_what_opens_the_lake_is_in_no_plan(
    engine: Engine, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    settings = engine.lake.settings.model_copy(update={"storage": {"AWS_SECRET_KEY": "hunter2"}})
    of_secret = replace(engine.lake, settings=settings)
    selection = Selection(tables.PUBLISHED, ["partition"])
    schema = pa.schema([("partition", pa.int32())])
    rows = SparkEngine(engine.spark, of_secret).from_tables(_as_it_is, [selection], [0], schema)  # type: ignore[attr-defined]
    rows.explain("extended")
    plan = capsys.readouterr().out
    assert "MapInArrow" in plan
    assert "hunter2" not in plan


def test_what_streams_append_at_once_to_one_table_is_all_there(engine: Engine) -> None:
    owner, together = Owner(engine, token=1), threading.Barrier(4)

    def append(seq: int) -> None:
        together.wait()
        owner.append(tables.PUBLISHED, published(engine, 19, seq))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4)))
    assert seqs(engine, 19) == [0, 1, 2, 3]


def test_conditions_and_constants_are_those_of_a_read(engine: Engine) -> None:
    engine.append(tables.PUBLISHED, published(engine, 8, 1, 2, 3, times=[100, 200, 300]))
    where = [[("partition", "=", 8), ("last_event_time", ">=", 200), ("last_seq", "in", [1, 2])]]
    rows = engine.read(Selection(tables.PUBLISHED, ["last_seq"], where, {"source": "it's"}))
    assert read(engine, rows, ["last_seq", "source"]) == [(2, "it's")]


def test_fetched_rows_are_those_that_were_read(
    engine: Engine,
) -> None:
    part = {"offset": 0, "event_time": -5, "value": "é"}
    rows: list[tuple[Any, ...]]
    rows = [
        (p, key, "timed_out", -5, 7, [], [part], True, None, 0, 0, 9)
        for p in range(3)
        for key in "ab"
    ]
    found = rows_of_silver(engine.lake.layout, rows)
    collect = engine.collect(engine.read(found))
    assert sorted(map(str, collect.to_pylist())) == sorted(map(str, found.to_pylist()))
    assert engine.collect(engine.read(found.slice(0, 0))).num_rows == 0


# -- following


def test_a_follower_hears_of_every_later_commit_of_each_table(engine: Engine) -> None:
    heard = threading.Semaphore(0)
    running = engine.follow_tables([tables.PUBLISHED, tables.SILVER], heard.release, "gold")

    def drain(seconds: float) -> None:
        while heard.acquire(timeout=seconds):
            pass

    try:
        assert heard.acquire(timeout=DEADLINE_S), "once at its start"
        commits: Iterable[Any] = (
            lambda: engine.append(tables.PUBLISHED, published(engine, 9, 1)),
            lambda: engine.merge(
                tables.SILVER, changed(engine, (9, "a", "open", 10, None)), Commit("follows", 1, 1)
            ),
            lambda: engine.merge(
                tables.SILVER,
                changed(engine, (9, "a", "timed_out", 10, 10)),
                Commit("follows", 1, 2),
            ),
        )
        for commit in commits:
            drain(1)
            commit()
            assert heard.acquire(timeout=DEADLINE_S)
        assert running.is_active
        assert running.failure is None
    finally:
        running.stop()
    assert not running.is_active


@pytest.mark.promise("O16")
@pytest.mark.fault("owners")
def test_each_follower_hears_of_commits_whoever_else_follows_and_begins_again(
    engine: Engine, new_settings: MakeSettings, open_spark: OpenSpark
) -> None:
    """Silver's and gold's owners are two, and lakes may share the folder of their checkpoints."""
    shared = {"checkpoints": engine.lake.settings.checkpoints}
    other = engine_for(open_spark, new_settings().model_copy(update=shared))
    create_missing(other)
    heard = {(i, name): threading.Semaphore(0) for i in range(2) for name in ("silver", "gold")}
    followers = dict[tuple[int, str], Running]()
    read = {"silver": [tables.ERASED], "gold": [tables.PUBLISHED, tables.ERASED]}

    def begin(lake: int, name: str) -> None:
        following = (engine, other)[lake]
        followers[lake, name] = following.follow_tables(read[name], heard[lake, name].release, name)
        assert heard[lake, name].acquire(timeout=DEADLINE_S), "once at its start"

    def commit() -> None:
        for calls in heard.values():
            while calls.acquire(timeout=0.5):
                pass
        for writer in (engine, other):
            writer.append(tables.ERASED, writer.lake.layout[tables.ERASED].schema.empty_table())
        for follower, calls in heard.items():
            assert calls.acquire(timeout=DEADLINE_S), (follower, followers[follower].failure)
        assert all(following.is_active for following in followers.values())

    try:
        for follower in heard:
            begin(*follower)
        commit()
        followers[0, "silver"].stop()
        begin(0, "silver")
        commit()
    finally:
        for each in followers.values():
            each.stop()


def test_compaction_and_vacuum_change_no_row(engine: Engine) -> None:
    for seq in range(3):
        engine.append(tables.PUBLISHED, published(engine, 10, seq))
    before, files = seqs(engine, 10), engine.reader.file_count(tables.PUBLISHED)
    engine.compact(tables.PUBLISHED, FILE_BYTES)
    assert engine.reader.file_count(tables.PUBLISHED) < files
    assert engine.vacuum(tables.PUBLISHED) == 0, "what lies within the retention stays"
    assert seqs(engine, 10) == before
    engine.set_properties(tables.PUBLISHED, {"delta.logRetentionDuration": "interval 9 days"})
    assert (
        engine.reader.properties(tables.PUBLISHED)["delta.logRetentionDuration"]
        == "interval 9 days"
    )


@pytest.mark.parametrize("kind", ["embedded-folder"], indirect=True)
def test_a_log_is_cleaned_up_now_and_then_and_a_reader_of_what_is_gone_reads_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "CLEAN_UP_EVERY", CLEAN_UP_EVERY)
    log = Path(folder_of(engine.lake.settings), tables.SILVER, "_delta_log")
    engine.set_properties(
        tables.SILVER,
        {
            "delta.logRetentionDuration": "interval 0 seconds",
            "delta.checkpointInterval": str(CLEAN_UP_EVERY - 1),
        },
    )
    reader = DeltaRsReader(engine.lake)
    known, lengths = reader.version(tables.SILVER), list[int]()
    for number in range(1, 2 * CLEAN_UP_EVERY + 1):
        engine.merge(
            tables.SILVER,
            changed(engine, (12, f"k{number}", "open", 10, None)),
            Commit("cleaned", 1, number),
        )
        lengths.append(len(list(log.glob("*.json"))))
    cleaned = [n for n in range(1, len(lengths)) if lengths[n] < lengths[n - 1]]
    assert 1 <= len(cleaned) <= 2
    assert not (log / f"{known:020}.json").exists()
    assert (
        reader.version(tables.SILVER)
        == engine.reader.version(tables.SILVER)
        >= known + 2 * CLEAN_UP_EVERY
    )


def test_compaction_leaves_larger_files_alone(engine: Engine) -> None:
    for seq in range(3):
        engine.append(tables.PUBLISHED, published(engine, 12, seq))
    files = engine.reader.file_count(tables.PUBLISHED)
    engine.compact(tables.PUBLISHED, 1)
    assert engine.reader.file_count(tables.PUBLISHED) == files


@pytest.mark.parametrize("few_bytes", [-1, 10**6])
def test_compaction_brings_no_deleted_row_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, few_bytes: int
) -> None:
    """Spark deletes by deletion vectors, and compacts what is more than a few bytes."""
    monkeypatch.setattr("watersmeet.engine.spark._FEW_REWRITTEN_BYTES", few_bytes)
    partition = 16 if few_bytes < 0 else 17
    for time in (10, 20, 30):
        rows: list[tuple[Any, ...]] = [
            (partition, key, "timed_out", time, time, [], [], True, None, 0, 0, 0) for key in "abc"
        ]
        engine.append(tables.SILVER, rows_of_silver(engine.lake.layout, rows))
    files = engine.reader.file_count(tables.SILVER)
    some = [[("partition", "=", partition), ("merge_key", "=", "b"), ("batch", "=", 0)]]
    engine.delete(tables.SILVER, some, Commit(f"compacts-{partition}", 1, 1))
    engine.compact(tables.SILVER, FILE_BYTES)
    assert engine.reader.file_count(tables.SILVER) < files
    left = [(key, "timed_out", time) for key in "ac" for time in (10, 20, 30)]
    assert silver(engine, partition) == left


@pytest.mark.parametrize("kind", ["spark-folder", CATALOG_AT_NIGHT], indirect=True)
def test_files_that_spark_compacts_say_which_keys_they_may_have(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question for one key then opens few of them."""
    monkeypatch.setattr("watersmeet.engine.spark._FEW_REWRITTEN_BYTES", -1)
    for time in (10, 20):
        rows: list[tuple[Any, ...]] = [
            (11, "a", "timed_out", time, time, [], [], True, None, 0, 0, 0)
        ]
        engine.append(tables.SILVER, rows_of_silver(engine.lake.layout, rows))
    engine.compact(tables.SILVER, FILE_BYTES)
    uris = DeltaTable(f"{folder_of(engine.lake.settings)}/{tables.SILVER}").file_uris()
    [file] = [unquote(uri) for uri in uris if "status=timed_out" in uri]
    group = parquet.ParquetFile(file).metadata.row_group(0)
    [key] = [
        chunk
        for n in range(group.num_columns)
        if (chunk := group.column(n)).path_in_schema == "merge_key"
    ]
    assert key.bloom_filter_length


@pytest.mark.parametrize("kind", ["spark-folder"], indirect=True, scope="module")
@pytest.mark.parametrize("here_bytes", [SparkEngine.here_bytes, -1], ids=["few", "many"])
def test_what_batches_append_to_a_folder_delta_rs_commits(
    new_lake: MakeLake, monkeypatch: pytest.MonkeyPatch, kind: str, here_bytes: int
) -> None:
    """Whatever has become of their records. Spark's tasks write the files where they are many; its
    MERGE alone, which replaces many rows of silver, commits by itself."""
    cases = cases_with_ids(rich_cases(8, 1656))
    corrections = {"topic": "merged-corrections", "within": "36500d"}
    lake = new_lake(cases, publish__corrections=corrections, **IDS)
    monkeypatch.setattr(lake.engine, "here_bytes", here_bytes)
    for share in (0.5, 1.0):
        lake.arrive(share, lake.engine)
        lake.merge()
    assert lake.silver() == expected_silver(cases)
    assert lake.late() == expected_late(cases)
    assert lake.duplicates() == expected_duplicates(cases)
    assert lake.quarantined() == expected_quarantine(cases)
    commits = {
        (name, commit["operation"], commit["engineInfo"].partition(":")[0])
        for name in lake.engine.lake.layout
        for commit in DeltaTable(f"{folder_of(lake.settings)}/{name}").history()
        if "userMetadata" in commit
    }
    appended = {*map(tables.bronze, SOURCES), tables.SILVER}
    assert appended <= {name for name, *_ in commits}
    by_spark = {commit for commit in commits if commit[2] != "delta-rs"}
    assert {commit[:2] for commit in by_spark} <= (
        {(tables.SILVER, "MERGE")} if here_bytes < 0 else set()
    )
