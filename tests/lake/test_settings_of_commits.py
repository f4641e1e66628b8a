"""What one commit says of itself reaches no other, and is looked for among what an owner writes
alone."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from pyspark.sql import SparkSession

from tests.lake.conftest import Store
from tests.support.configurations import settings_for
from tests.support.rivers import until
from watersmeet.core.merge import REPLACING
from watersmeet.core.silver import OUTCOMES
from watersmeet.core.types import TIME
from watersmeet.engine.spark import SparkEngine
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit, last_commit, last_decision
from watersmeet.lake.location import Lake
from watersmeet.lake.tables import APPLICATION
from watersmeet.run import create_missing
from watersmeet.running.owner import Owner

pytestmark = [pytest.mark.promise("N26"), pytest.mark.fault("commits")]

ROW = ("s", "t", 0, 1, 0, None)


def test_a_decision_is_what_its_owner_wrote_whatever_took_its_metadata_along(
    folder_store: Store,
) -> None:
    table = tables.ERASED
    folder_store.create(table)
    nothing = folder_store.lake.layout[table].schema.empty_table()
    decided, here = Commit(APPLICATION, 1, 4, {"batch": 7}), folder_store.path(table)
    for number in (3, 4):
        folder_store.append(table, nothing, Commit(APPLICATION, 1, number, {"batch": 7}))
    write_deltalake(here, nothing, mode="append")
    with_metadata = CommitProperties({"userMetadata": decided.metadata})
    for _ in range(2):
        folder_store.add(table, ROW)
    DeltaTable(here).optimize.compact(commit_properties=with_metadata)
    DeltaTable(here).vacuum(
        0, dry_run=False, enforce_retention_duration=False, commit_properties=with_metadata
    )
    took = [
        v.operation
        for v in folder_store.reader.history(table)
        if v.metadata == decided.metadata and v.number > 2
    ]
    assert took == ["VACUUM END", "VACUUM START", "OPTIMIZE"]
    found = last_commit(folder_store.reader, table)
    assert found is not None
    assert (found[0].number, found[1]) == (2, decided)
    assert last_decision(folder_store.reader, table) == (2, decided)
    assert Owner(folder_store, 1).confirm(table, decided) == 2  # type: ignore[arg-type]


def test_what_decides_another_layers_batch_decides_none_here(folder_store: Store) -> None:
    bronze = tables.bronze("tracking")
    folder_store.create(bronze)
    nothing = folder_store.lake.layout[bronze].schema.empty_table()
    decided = Commit(APPLICATION, 1, 4, {"ranges": [], "refused": 0, "fills": False})
    folder_store.append(bronze, nothing, decided)
    of_silver = Commit(APPLICATION, 1, 9, {"batch": 7})
    write_deltalake(
        folder_store.path(bronze),
        nothing,
        mode="append",
        commit_properties=CommitProperties({"userMetadata": of_silver.metadata}),
    )
    assert last_decision(folder_store.reader, bronze) == (1, decided)


def open_row(key: str) -> tuple[Any, ...]:
    """A merge record as a row of silver, which other kinds of rows have more columns of."""
    own: tuple[Any, ...] = (
        *(0, key, "open", 1, 1, [], [], None, None, 0, 0),
        *(101, None, "", None, 0, 0),
    )
    return (*own, *[None] * len(OUTCOMES))


def changed_rows(silver: tables.Table) -> pa.Table:
    """A new row of silver as a batch changes it."""
    rows = silver.rows([open_row("a")])
    for name in REPLACING:
        rows = rows.append_column(name, pa.nulls(1, TIME))
    return rows


def _held(rows: pa.Table, folder: str) -> pa.Table:
    """The rows, once somebody lets them go."""
    Path(folder, "began").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.05)
    return rows


@pytest.fixture
def engine(root_session: SparkSession, tmp_path: Path) -> SparkEngine:
    engine = SparkEngine(root_session, Lake(settings_for(tmp_path, engine="spark")))
    create_missing(engine)
    return engine


@pytest.mark.long
def test_while_a_merge_runs_nothing_else_has_its_settings(
    engine: SparkEngine, tmp_path: Path
) -> None:
    silver, bronze = engine.lake.layout[tables.SILVER], tables.bronze("tracking")
    schema = changed_rows(silver).schema
    changed = changed_rows(silver)
    partitions = changed["partition"].unique().to_pylist()
    rows = engine.from_tables(partial(_held, folder=str(tmp_path)), [changed], partitions, schema)
    commit = Commit(APPLICATION, 3, 1, {"batch": 0})
    schema_of_published = engine.lake.layout[tables.PUBLISHED].schema
    published = engine.read(pa.Table.from_pylist([{"last_key": "k"}], schema_of_published))
    with ThreadPoolExecutor(1) as pool:
        merging = pool.submit(engine.merge, tables.SILVER, rows, commit)
        try:
            until((tmp_path / "began").exists, "the merge", 120)
            engine.append(tables.PUBLISHED, published)
            engine.vacuum(bronze)
            engine.set_properties(bronze, {"theirs": "yes"})
        finally:
            (tmp_path / "go").touch()
        merging.result(120)
    assert engine.reader.select(tables.PUBLISHED, ["last_key"])["last_key"].to_pylist() == ["k"]
    assert [
        v.metadata for table in (tables.PUBLISHED, bronze) for v in engine.reader.history(table)
    ] == [None for table in (tables.PUBLISHED, bronze) for _ in engine.reader.history(table)]
    said = {version.number: version.metadata for version in engine.reader.history(tables.SILVER)}
    assert said == {0: None, 1: commit.metadata}


@pytest.mark.long
def test_a_compaction_behind_a_merge_is_not_the_merge(engine: SparkEngine) -> None:
    silver = engine.lake.layout[tables.SILVER]
    engine.set_properties(tables.SILVER, {"delta.autoOptimize.autoCompact": "true"})
    for n in range(60):  # as many small files as it takes
        engine.append(tables.SILVER, silver.rows([open_row(f"k{n}")]))
    owner = Owner(engine, token=1)
    commit = owner.next_commit(tables.SILVER, facts={"batch": 0})
    engine.merge(tables.SILVER, engine.read(changed_rows(silver)), commit)
    optimize, merge, *_ = engine.reader.history(tables.SILVER)
    assert (optimize.operation, merge.operation) == ("OPTIMIZE", "MERGE")
    assert optimize.metadata == merge.metadata == commit.metadata, "Delta gives it the session's"
    assert owner.confirm(tables.SILVER, commit) == merge.number
