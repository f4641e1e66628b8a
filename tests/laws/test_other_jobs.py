"""Other people's jobs on the tables of a lake: what is safe is tried again, and what is not ends in
a sentence that names the table, the cause and the remedy."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, QueryBuilder

from tests.laws.conftest import QUICK, MakeLake, in_folders_of_both, one_of
from tests.support.cases import Case, expected_silver, rich_cases
from tests.support.lakes import CaseLake, folder_of
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.engine.spark import SparkEngine
from watersmeet.engine.spark_writer import SparkWriter
from watersmeet.errors import (
    ConfigurationError,
    ConstraintError,
    LeaseLostError,
    MissingFileError,
    TableConflictError,
    TableError,
)
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.by_spark import SparkReader
from watersmeet.lake.table_reader import Where, row_count
from watersmeet.lake.tables import DELETING
from watersmeet.monitoring.observability import Reporter
from watersmeet.running import runner as runners
from watersmeet.running.runner import Runner

pytestmark = [pytest.mark.promise("N35"), pytest.mark.fault("commits", oracle=True)]

kind = one_of([QUICK])

SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)


def cases() -> dict[int, Case]:
    return rich_cases(4, 1600)


class Told(Reporter):
    """Keeps the lines that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def notify(self, layer: str, news: str, **_: int | str | None) -> None:
        self.lines.append(f"{layer}: {news}")


def opened(lake: CaseLake, table: str) -> DeltaTable:
    """A table as another job opens it."""
    return DeltaTable(Path(folder_of(lake.settings), table).absolute().as_uri())


def compact(lake: CaseLake) -> None:
    """Rewrites all files of silver, as OPTIMIZE does with ZORDER; no row changes."""
    opened(lake, tables.SILVER).optimize.z_order(["event_time"])


def merge(lake: CaseLake, limit_s: float = 60.0) -> list[str]:
    """Silver as a run calls it; returns what was told of trouble."""
    told = Told()
    Runner(told, threading.Event(), limit_s).retry(lake.merge)
    return told.lines


def beside(
    monkeypatch: pytest.MonkeyPatch,
    table: str,
    job: Callable[[], object],
    *,
    before: str = "a write",
    times: int = 1,
) -> list[str]:
    """Lets another job do its work so many times, each between the moment when the table was opened
    and a write or a read of it; returns what counts the times."""
    kind, method = {
        "a write": (DeltaTable, "transaction_version"),
        "a read": (QueryBuilder, "register"),
    }[before]
    real = getattr(kind, method)
    done: list[str] = []

    def meanwhile(*args: Any) -> Any:
        [delta_table] = [each for each in args if isinstance(each, DeltaTable)]
        if delta_table.table_uri.rstrip("/").endswith(f"/{table}") and len(done) < times:
            done.append(table)
            job()
        return real(*args)

    monkeypatch.setattr(kind, method, meanwhile)
    monkeypatch.setattr(runners, "RETRY_S", 0.001)
    return done


@pytest.fixture
def lake(new_lake: MakeLake) -> CaseLake:
    """With some small files in each table."""
    lake = new_lake(cases())
    for share in SHARES[:2]:
        lake.arrive(share)
        lake.merge()
    return lake


@pytest.mark.parametrize(
    "is_large",
    [
        pytest.param(False, id="a merge"),
        pytest.param(True, id="rows written anew", marks=pytest.mark.nightly),
    ],
)
@in_folders_of_both
def test_a_job_that_compacts_delays_a_batch_and_changes_nothing(
    lake: CaseLake, kind: str, monkeypatch: pytest.MonkeyPatch, *, is_large: bool
) -> None:
    if is_large and kind != QUICK:
        pytest.skip("Spark merges large rows by its own MERGE")
    if is_large:
        monkeypatch.setattr(lake.engine, "merge_bytes", 1)
    for share in SHARES[2:]:
        lake.arrive(share)
        with monkeypatch.context() as patched:
            done = beside(patched, tables.SILVER, partial(compact, lake))
            told = merge(lake)
            assert done
            assert told[-1] == "lake: goes on"
    assert lake.silver() == expected_silver(lake.cases)


def test_a_conflict_is_told_with_the_table_and_what_the_other_job_did(
    lake: CaseLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.arrive()
    silver = lake.start()
    plan = silver.recover().next()
    assert plan is not None
    beside(monkeypatch, tables.SILVER, partial(compact, lake))
    with pytest.raises(
        TableConflictError,
        match=r"^silver: the commit of another job came first \(OPTIMIZE, version \d+\); try again",
    ) as conflict:
        silver.commit(plan)
    assert conflict.value.retriable


def test_a_batch_is_not_tried_again_where_a_later_owner_came_first(
    lake: CaseLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.arrive()
    silver = lake.start()
    version = lake.reader.version(tables.SILVER)

    def take_over() -> None:
        lake.token += 1
        lake.owner(lake.quick).fence(tables.SILVER)

    silver.recover()
    beside(monkeypatch, tables.SILVER, take_over)
    with pytest.raises(LeaseLostError):
        Runner(Told(), threading.Event(), 60.0).retry(lambda: list(silver.drain()))
    assert lake.reader.version(tables.SILVER) == version + 1, "the fence"


@in_folders_of_both
def test_a_vacuum_that_keeps_nothing_delays_a_batch(
    lake: CaseLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vacuum() -> None:
        other = opened(lake, tables.bronze("orders"))
        other.optimize.compact()
        other.vacuum(0, dry_run=False, enforce_retention_duration=False)

    lake.arrive()
    done = beside(monkeypatch, tables.bronze("orders"), vacuum, before="a read")
    told = merge(lake)
    assert done
    assert told[-1] == "lake: goes on"
    assert lake.silver() == expected_silver(lake.cases)


def test_a_file_that_is_needed_and_gone_is_named(lake: CaseLake) -> None:
    table = tables.bronze("orders")
    lake.arrive()
    files = [*Path(folder_of(lake.settings), table).glob("*.parquet")]
    for file in files:
        file.unlink()
    with pytest.raises(MissingFileError) as missing:
        merge(lake)
    names = "|".join(re.escape(file.name) for file in files)
    assert re.match(f"{table}: its file ({names}) was deleted by somebody else", str(missing.value))
    assert "put it back from a copy" in str(missing.value)


@in_folders_of_both
def test_a_constraint_that_somebody_has_added_is_named_at_each_start_until_it_is_dropped(
    new_lake: MakeLake,
) -> None:
    lake = new_lake(cases())
    lake.arrive()
    opened(lake, tables.SILVER).alter.add_constraint({"few": "partition < 1"})
    said = r"^silver: rows do not meet a CHECK constraint .* \(few: partition < 1\); drop it"
    for _ in range(2):
        with pytest.raises(ConstraintError, match=said):
            merge(lake)
    opened(lake, tables.SILVER).alter.drop_constraint("few")
    merge(lake)
    assert lake.silver() == expected_silver(lake.cases)


def test_what_bronze_appends_meets_constraints_of_others_too(new_lake: MakeLake) -> None:
    lake = new_lake(cases())
    table = tables.bronze("orders")
    opened(lake, table).alter.add_constraint({"few": "partition < 1"})
    with pytest.raises(ConstraintError, match=rf"^{table}: .* \(few: partition < 1\)"):
        lake.arrive()


def test_a_table_whose_rows_nobody_may_change_is_named_where_rows_are_deleted(
    lake: CaseLake,
) -> None:
    table = tables.bronze("orders")
    opened(lake, table).alter.set_table_properties({"delta.appendOnly": "true"})
    all_rows: Where = [[("offset", ">=", 0)]]

    def delete() -> None:
        delete = partial(lake.engine.delete, table, all_rows)
        lake.owner().change(table, DELETING, delete, attempts=2)

    said = rf"^lake: {table} has delta\.appendOnly=true.*; ALTER TABLE .* UNSET TBLPROPERTIES"
    with pytest.raises(ConfigurationError, match=said):
        delete()
    lake.arrive(SHARES[2])
    opened(lake, table).alter.set_table_properties({"delta.appendOnly": "false"})
    delete()
    assert row_count(lake.reader, table, all_rows) == 0


def test_no_error_of_a_library_is_told_without_the_table(lake: CaseLake) -> None:
    lake.arrive()
    folder = Path(folder_of(lake.settings), tables.SILVER)
    for file in folder.rglob("*.parquet"):
        file.write_bytes(b"PAR1 no Parquet file PAR1")
    with pytest.raises(TableError, match=r"^silver: "):
        merge(lake)


@pytest.mark.parametrize(
    "kind_of_class", [DeltaRsReader, SparkReader, EmbeddedEngine, SparkWriter, SparkEngine]
)
def test_whatever_is_done_with_a_table_names_it_in_its_errors(kind_of_class: type) -> None:
    methods = [
        method
        for name, method in vars(kind_of_class).items()
        if inspect.isfunction(method) and not name.startswith("_") and is_about_a_table(method)
    ]
    assert len(methods) > 4
    assert [method for method in methods if not hasattr(method, "__wrapped__")] == []


def is_about_a_table(method: Callable[..., Any]) -> bool:
    return [*inspect.signature(method).parameters][1:2] == ["table"]
