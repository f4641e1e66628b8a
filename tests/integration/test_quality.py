"""The laws of silver's expectations, on a small silver as the merge makes it and on copies with one promise broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from pipelines.dev.init import schemas_directory
from pipelines.errors import WatersmeetError
from pipelines.lake import tables
from pipelines.lake.by_spark import table_rows
from pipelines.quality import SUITE_FILE, CheckResult, check_silver, silver_suite
from pipelines.settings import Settings
from tests.support.cases import Case, keyed
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake, engine_for

SOURCES = ("clicks", "orders", "refunds")
Row = dict[str, Any]


class Silver(NamedTuple):
    """Silver as stored, and its rows for tests that break some: two have timed out (one is not valid), one is open."""

    table: DataFrame
    rows: list[Row]
    settings: Settings

    def check(self, rows: list[Row]) -> list[CheckResult]:
        schema = self.table.schema
        values = [tuple(row[name] for name in schema.names) for row in rows]
        rows_in_spark = self.table.sparkSession.createDataFrame(values, schema)
        results = check_silver(rows_in_spark, self.settings)
        assert check_silver(rows_in_spark.toArrow(), self.settings) == results, "in memory it is the same"
        return results


@pytest.fixture(scope="module")
def silver(root_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Silver:
    settings = settings_for(tmp_path_factory.mktemp("quality"), sources=SOURCES, publish__valid="size(orders) > 0")
    values: dict[str, list[bytes | None]] = {
        "clicks": [keyed("a", 1_000), keyed("b", 1_010), keyed("a", 2_000)],
        "orders": [keyed("a", 1_020), keyed("a", 2_000)],
        "refunds": [keyed("a", 2_000)],
    }
    arrivals = [source for source, mine in values.items() for _ in mine]
    case_lake = CaseLake(engine_for(root_session, settings), settings, {0: Case(values, 100, arrivals)})
    case_lake.arrive()
    case_lake.merge()
    table = table_rows(root_session, case_lake.engine.lake, tables.SILVER)
    rows = [row.asDict() for row in table.orderBy("event_time").collect()]
    assert [(row["merge_key"], row["status"], row["valid"]) for row in rows] == [
        ("a", "timed_out", True),
        ("b", "timed_out", False),
        ("a", "open", None),
    ]
    return Silver(table, rows, settings)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever is checked, no file is left in the current folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []


def failed(results: list[CheckResult]) -> dict[str, int]:
    return {result.expectation: result.unexpected for result in results if not result.ok}


def test_what_the_merge_makes_meets_every_expectation(
    silver: Silver, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    results = check_silver(silver.table, silver.settings)
    assert failed(results) == {}
    assert [result.expectation for result in results] == [
        *[str(expectation.description) for expectation in silver_suite([]).expectations],
        *[sentence for source in SOURCES for sentence in (f"the column {source} exists", f"{source} is never null")],
    ]
    assert {result.unexpected for result in results} == {0}
    assert capfd.readouterr() == ("", "")
    assert [record for record in caplog.records if record.name.startswith("great_expectations")] == []
    assert silver.table.storageLevel == StorageLevel.NONE  # nothing of the table is kept in memory


def test_a_table_without_rows_meets_every_expectation(silver: Silver) -> None:
    assert failed(silver.check([])) == {}


def later(row: Row, ms: int) -> Row:
    moved = timedelta(milliseconds=ms)
    return {**row, "event_time": row["event_time"] + moved, "last_event_time": row["last_event_time"] + moved}


def before(row: Row) -> list[Row]:
    return [{**row, "last_event_time": row["event_time"] - timedelta(milliseconds=1)}]


VALID, INVALID, OPEN = 0, 1, 2
BROKEN: list[tuple[str, int, Callable[[Row], list[Row]]]] = [
    ("partition is never null", VALID, lambda row: [{**row, "partition": None}]),
    ("merge_key is never null", VALID, lambda row: [{**row, "merge_key": None}]),
    ("status is never null", VALID, lambda row: [{**row, "status": None}]),
    ("event_time is never null", VALID, lambda row: [{**row, "event_time": None}]),
    ("last_event_time is never null", VALID, lambda row: [{**row, "last_event_time": None}]),
    ("batch is never null", VALID, lambda row: [{**row, "batch": None}]),
    ("clicks is never null", VALID, lambda row: [{**row, "clicks": None}]),
    ("refunds is never null", VALID, lambda row: [{**row, "refunds": None}]),
    ("merge_key is never empty", VALID, lambda row: [{**row, "merge_key": ""}]),
    ("status is open or timed_out", VALID, lambda row: [{**row, "status": "lost"}]),
    ("event_time is never after last_event_time", VALID, before),
    ("partition, merge_key and event_time together are unique", VALID, lambda row: [row, row]),
    ("a key has at most one open record in a partition", OPEN, lambda row: [row, later(row, 1)]),
    ("valid is null while a record is open", OPEN, lambda row: [{**row, "valid": True}]),
    ("valid is known once a record has timed out", VALID, lambda row: [{**row, "valid": None}]),
    (
        "invalid_reason is null unless valid is false",
        VALID,
        lambda row: [{**row, "invalid_reason": "reset"}, {**later(row, 1), "invalid_reason": "predicate"}],
    ),
    ("invalid_reason is null unless valid is false", OPEN, lambda row: [{**row, "invalid_reason": "reset"}]),
    ("invalid_reason is given where valid is false", INVALID, lambda row: [{**row, "invalid_reason": None}]),
    ("invalid_reason is predicate, too_large or reset", INVALID, lambda row: [{**row, "invalid_reason": "because"}]),
]
"""An expectation, the kind of row it is broken in, and the rows that break it and nothing else."""


@pytest.fixture(scope="module")
def broken(silver: Silver) -> list[CheckResult]:
    """One silver in which each promise is broken, by records of a key of its own: a check takes seconds."""
    rows = list(silver.rows)
    for i, (_, kind, breaking) in enumerate(BROKEN):
        rows += breaking({**silver.rows[kind], "merge_key": f"key{i}"})
    return silver.check(rows)


@pytest.mark.parametrize("expectation", dict.fromkeys(name for name, _, _ in BROKEN))
def test_a_broken_promise_is_found_by_name_with_its_rows_and_no_others(
    silver: Silver, broken: list[CheckResult], expectation: str
) -> None:
    rows = sum(len(breaking(silver.rows[kind])) for name, kind, breaking in BROKEN if name == expectation)
    assert failed(broken)[expectation] == rows


def test_every_expectation_on_values_can_be_broken(broken: list[CheckResult]) -> None:
    never_broken = {result.expectation for result in broken if result.ok}
    assert never_broken == {
        "orders is never null",
        *[f"the column {name} exists" for name in ("partition", "merge_key", "status", "event_time")],
        *[f"the column {name} exists" for name in ("last_event_time", "valid", "invalid_reason", "batch", *SOURCES)],
    }


def test_a_missing_column_fails_what_is_said_of_it_and_no_more(silver: Silver) -> None:
    rows = [tuple(v for k, v in row.items() if k not in ("batch", "orders")) for row in silver.rows]
    schema = silver.table.drop("batch", "orders").schema
    results = check_silver(silver.table.sparkSession.createDataFrame(rows, schema), silver.settings)
    assert failed(results) == {
        "the column batch exists": 0,
        "batch is never null": 0,
        "the column orders exists": 0,
        "orders is never null": 0,
    }


def test_the_suites_file_is_as_great_expectations_writes_it() -> None:
    text = (schemas_directory() / SUITE_FILE).read_text()
    assert json.dumps(silver_suite([]).to_json_dict(), indent=2) + "\n" == text


def test_every_expectation_has_a_sentence_of_its_own() -> None:
    sentences = [expectation.description for expectation in silver_suite(SOURCES).expectations]
    assert None not in sentences
    assert len(set(sentences)) == len(sentences)


def test_an_expectation_that_is_not_understood_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads((schemas_directory() / SUITE_FILE).read_text())
    document["expectations"][0]["type"] = "expect_columns_to_sing"
    (tmp_path / SUITE_FILE).write_text(json.dumps(document))
    monkeypatch.setattr("pipelines.quality.schemas_directory", lambda: tmp_path)
    with pytest.raises(WatersmeetError, match=SUITE_FILE):
        silver_suite(SOURCES)


def test_a_missing_great_expectations_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "great_expectations", None)
    with pytest.raises(WatersmeetError, match=r"pip install 'watersmeet\[quality\]'"):
        silver_suite(SOURCES)
