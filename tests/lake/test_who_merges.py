"""Spark merges rows where delta-rs would write much anew, however few they are; but none that its
JVM could not hold several of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.laws.test_engine import Changed, gathered
from tests.support.configurations import settings_for
from watersmeet.engine import Selection, SilverRows, spark
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.engine.spark import SparkEngine
from watersmeet.engine.spark_writer import SparkWriter
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.location import Lake
from watersmeet.run import create_missing

EARLY = [(0, f"e{n}", "open", 10 + n, None) for n in range(50)]
LATE = [(0, f"l{n}", "open", 1000 + n, None) for n in range(50)]
WAITING = [(0, f"w{n}", "waiting", 2000 + n, None) for n in range(50)]
COMMIT = Commit("test", 0, 1)
FINISHED = [(0, f"f{n}", "timed_out", 10 + n, None) for n in range(50)]


@pytest.fixture
def engine(tmp_path: Path) -> EmbeddedEngine:
    """Silver with a file of each kind of rows."""
    lake = Lake(settings_for(tmp_path, engine="spark"))
    engine = EmbeddedEngine(lake)
    create_missing(engine)
    for rows in (EARLY, LATE, WAITING, FINISHED):
        engine.append(tables.SILVER, gathered(engine, *rows))
    return engine


def sizes(engine: EmbeddedEngine) -> dict[str, int]:
    files = pa.table(DeltaTable(engine.reader.uri(tables.SILVER)).get_add_actions()).to_pylist()
    return {file["path"]: file["size_bytes"] for file in files}


CASES: list[tuple[Sequence[Changed], bool, int]] = [
    ([(0, "e3", "open", 13, 13)], True, 1),
    ([(0, "l3", "open", 1003, 1003), (0, "new", "open", 5000, None)], True, 1),
    ([(0, "e3", "open", 13, 13), (0, "l3", "open", 1003, 1003)], True, 2),
    ([(0, "new", "open", 5000, None)], True, 0),
    ([(0, "f3", "timed_out", 13, 13)], False, 2),
]


@pytest.mark.parametrize(("rows", "only_open", "files"), CASES)
def test_what_a_merge_may_rewrite_is_known_before_by_the_files_statistics(
    engine: EmbeddedEngine, rows: Sequence[Changed], only_open: bool, files: int
) -> None:
    changed = gathered(engine, *rows)
    expected = engine.reader.bytes_rewritten(tables.SILVER, changed, only_open=only_open)
    before = sizes(engine)
    assert (expected > 0) == (files > 0)
    engine.merge(tables.SILVER, changed, Commit("test", 0, 1), only_open=only_open)
    removed = sum(size for path, size in before.items() if path not in sizes(engine))
    assert 0 <= expected - removed <= (max(before.values()) if files == 2 else 0)


def test_rows_that_delete_waiting_ones_may_rewrite_the_files_of_those(
    engine: EmbeddedEngine,
) -> None:
    changed = gathered(engine, (0, "w3", None, 0, None))
    at = changed.column_names.index("delete_up_to")
    changed = changed.set_column(at, changed.field(at), pa.array([2003], changed.field(at).type))
    [size] = [size for path, size in sizes(engine).items() if "waiting" in path]
    assert engine.reader.bytes_rewritten(tables.SILVER, changed, only_open=True) == size


def test_few_rows_beside_many_that_would_be_rewritten_are_merged_by_spark(
    engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = list[str]()
    session: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda *_: "2"))
    by_spark = SparkEngine(session, engine.lake)
    monkeypatch.setattr(SparkEngine, "merge_by_spark", lambda *_, **__: merged.append("Spark"))
    monkeypatch.setattr(EmbeddedEngine, "merge", lambda *_, **__: merged.append("delta-rs"))
    monkeypatch.setattr(spark, "_FEW_REWRITTEN_BYTES", max(sizes(engine).values()))
    for rows, only_open, files in CASES:
        by_spark.merge(
            tables.SILVER, gathered(engine, *rows), Commit("test", 0, 1), only_open=only_open
        )
        assert merged.pop() == ("Spark" if files > 1 else "delta-rs"), rows


class NothingFollows:
    """As `Following`."""

    keys = None

    def see(self, rows: pa.Table) -> None:
        raise AssertionError(rows)

    def rows(self) -> Iterator[pa.Table]:
        yield from ()


FOLLOWING = NothingFollows()


class BySparkError(Exception):
    """Raised where Spark would do what is asked."""


def by_spark(*_: Any, **__: Any) -> None:
    raise BySparkError


@pytest.fixture
def who(engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Says who does something for an engine that finds much in whatever it is asked for."""
    session: Any = SimpleNamespace(conf=SimpleNamespace(get=lambda *_: "2"), range=by_spark)
    monkeypatch.setattr(spark, "_FEW_REWRITTEN_BYTES", -1)
    for owner, name in (
        (SparkEngine, "merge_by_spark"),
        (SparkEngine, "read"),
        (SparkWriter, "compact"),
    ):
        monkeypatch.setattr(owner, name, by_spark)
    for name in ("merge", "from_tables", "compact", "merge_in_chunks"):
        monkeypatch.setattr(EmbeddedEngine, name, lambda *_, **__: True)
    asked = SparkEngine(session, engine.lake)

    def does(work: str, *arguments: Any, **named: Any) -> str:
        try:
            getattr(asked, work)(*arguments, **named)
        except BySparkError:
            return "Spark"
        return "delta-rs"

    return does


@pytest.mark.parametrize("excess", [0, 1])
def test_the_jvm_gets_no_row_that_is_too_large_for_it(
    engine: EmbeddedEngine, who: Callable[..., str], excess: int
) -> None:
    """What a batch reads, changes, or rewrites beside that; all others Spark gets."""
    row = gathered(engine, (0, "large", "open", 5000, None))
    at = row.column_names.index("record_bytes")
    size = pa.array([spark._LARGE_ROW_BYTES + excess])
    row = row.set_column(at, row.field(at), size)
    engine.append(tables.SILVER, row)
    its = Selection(tables.SILVER, ["partition"], [[("merge_key", "=", "large")]])
    others = replace(its, where=[[("merge_key", "!=", "large")]])
    every = SilverRows(["open", "waiting"], 10**9)
    small = gathered(engine, (0, "e3", "open", 13, 13))
    merge = partial(who, "merge", tables.SILVER, commit=COMMIT)
    compute = partial(who, "from_tables", max, partitions=[0], schema=small.schema, size=10**9)
    assert [
        merge(row),
        merge(row, large=every),
        merge(small),
        compute([others, its]),
        who("merge_in_chunks", every, max, [others], small.schema, COMMIT, FOLLOWING),
        who("compact", tables.SILVER, 10**9),
    ] == ["delta-rs" if excess else "Spark"] * 6
    assert compute([others]) == "Spark"


def test_what_delta_rs_cannot_rewrite_in_chunks_spark_does_however_large_it_is(
    engine: EmbeddedEngine, who: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark, "_LARGE_ROW_BYTES", -1)
    monkeypatch.setattr(EmbeddedEngine, "merge_in_chunks", lambda *_, **__: False)
    every = SilverRows(["open"], 10**9)
    schema = gathered(engine, *EARLY).schema
    assert who("merge_in_chunks", every, max, [], schema, COMMIT, FOLLOWING) == "Spark"
