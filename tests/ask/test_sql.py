"""`watersmeet sql`: every table and view of a lake, as of one moment, on both engines; it reads and
never writes."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import QueryBuilder

from tests.support.cases import random_case
from tests.support.configurations import settings_for
from tests.support.lakes import OpenSpark, write_configuration
from tests.support.model_lakes import ModelLake, rewrite
from watersmeet import cli
from watersmeet.ask import answers
from watersmeet.ask.answers import literal
from watersmeet.ask.explain import Topics, explain
from watersmeet.ask.sql import as_document, as_table, ask, write_csv
from watersmeet.audit import problems
from watersmeet.audit.evidence import read_evidence
from watersmeet.audit.problems import Report
from watersmeet.audit.verify_rows import RowChecks
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.by_spark import SparkReader
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import QueryError, TableReader
from watersmeet.settings import Settings

ENGINES = ["delta-rs", pytest.param("spark", marks=pytest.mark.long)]


@pytest.fixture
def lake(tmp_path: Path) -> ModelLake:
    """A lake of two batches with records of every source."""
    lake = ModelLake(settings_for(tmp_path), {p: random_case(p) for p in range(4)})
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
    return lake


@pytest.fixture(params=ENGINES)
def reader_of(
    request: pytest.FixtureRequest, open_spark: OpenSpark
) -> Callable[[Settings], TableReader]:
    """What opens a lake by each engine."""

    def by_engine(settings: Settings) -> TableReader:
        lake = Lake(settings)
        return DeltaRsReader(lake) if request.param == "delta-rs" else SparkReader(lake, open_spark)

    return by_engine


def rows(reader: TableReader, settings: Settings, query: str, at: Any = None) -> list[Any]:
    return list(ask(reader, settings, query, at).read_all().to_pylist())


def test_every_table_and_view_is_there_with_its_own_rows(
    lake: ModelLake, reader_of: Callable[[Settings], TableReader]
) -> None:
    reader = reader_of(lake.settings)
    every = (*lake.lake.layout, *lake.lake.views)
    some = ("merged", "generations")
    for name in every if reader.dialect == "datafusion" else some:
        [counted] = rows(reader, lake.settings, f"SELECT count(*) AS n FROM {name}")
        stored = lake.lake.schema(name).names[:1]
        assert counted == {"n": lake.reader.select(name, stored).num_rows}, name
        columns = ask(reader, lake.settings, f"SELECT * FROM {name}").schema.names
        assert columns == lake.lake.schema(name).names, name


@pytest.mark.long
@pytest.mark.parametrize(
    "query",
    [
        "SELECT status, count(*) AS n FROM silver GROUP BY status ORDER BY status",
        "SELECT p.source, p.partition, p.until_offset, p.clock FROM progress p "
        "WHERE p.batch = (SELECT max(batch) FROM progress) ORDER BY p.source, p.partition",
        "SELECT merge_key, event_time, tracking, orders FROM merged "
        "ORDER BY partition, merge_key, event_time",
        "WITH late AS (SELECT p.source, p.partition AS at FROM progress p) "
        "SELECT * FROM late ORDER BY source, at",
        "SELECT q.source, q.reason, q.offset, q.value FROM quarantine q "
        "ORDER BY q.source, q.partition, q.offset",
    ],
)
def test_both_engines_give_the_same_rows(
    lake: ModelLake, open_spark: OpenSpark, query: str
) -> None:
    by_delta_rs = rows(DeltaRsReader(lake.lake), lake.settings, query)
    assert by_delta_rs == rows(SparkReader(lake.lake, open_spark), lake.settings, query)
    assert by_delta_rs


@pytest.mark.parametrize(
    "text", ["", "plain-1.2", "it's \\", "x FROM users", "${a} ms(1)", "a\0b", "\U0001f600 é"]
)
def test_a_text_in_a_query_is_itself_whatever_is_in_it(
    lake: ModelLake, reader_of: Callable[[Settings], TableReader], text: str
) -> None:
    assert answers.rows(reader_of(lake.settings), f"SELECT {literal(text)} AS text") == [
        {"text": text}
    ]


@pytest.mark.nightly
def test_both_engines_tell_the_same_of_a_key(
    lake: ModelLake, open_spark: OpenSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = dict.fromkeys(lake.cases, 1000)
    monkeypatch.setattr(lake, "send", lambda _: sent)
    monkeypatch.setattr(Topics, "numbers_of", lambda *arguments: (arguments[-1], True))
    lake.publish("merged (id)")
    published = 0
    for key in ("a", "é", "no such 'key\\"):
        by_delta_rs = explain(DeltaRsReader(lake.lake), lake.settings, key)
        assert by_delta_rs == explain(SparkReader(lake.lake, open_spark), lake.settings, key)
        published += sum(record["published"] is not None for record in by_delta_rs["records"])
    assert published


@pytest.mark.long
def test_both_engines_find_the_same_wrong_rows(
    lake: ModelLake, open_spark: OpenSpark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(problems, "SHOWN", 10_000)
    rewrite(lake.settings, tables.MERGED, lambda row: [row, row] if row["partition"] else None)
    rewrite(lake.settings, tables.LATE, lambda row: {**row, "batch": 1 - row["batch"]})
    rewrite(lake.settings, tables.PROGRESS, lambda row: {**row, "clock": 0})
    found = []
    for reader in (DeltaRsReader(lake.lake), SparkReader(lake.lake, open_spark)):
        report = Report()
        checks = RowChecks(read_evidence(reader, lake.settings, 4), report)
        checks.check()
        checks.check_messages()
        found.append({name: sorted(each.described()) for name, each in report.items()})
    assert found[0] == found[1]
    assert found[0].keys() == {"batches", "outcomes", "rows of silver", "sink"}


def test_corrected_has_each_valid_merge_record_once(
    lake: ModelLake, reader_of: Callable[[Settings], TableReader]
) -> None:
    [counted] = rows(reader_of(lake.settings), lake.settings, "SELECT count(*) AS n FROM corrected")
    valid = lake.reader.select("merged", ["valid"])["valid"].to_pylist().count(True)
    assert counted == {"n": valid}


def test_an_order_of_rows_is_kept(
    lake: ModelLake, reader_of: Callable[[Settings], TableReader]
) -> None:
    found = rows(
        reader_of(lake.settings),
        lake.settings,
        "SELECT b.offset AS at FROM bronze_orders b ORDER BY b.offset DESC -- the last first",
    )
    assert [row["at"] for row in found] == sorted((row["at"] for row in found), reverse=True)


def test_it_is_asked_as_of_a_version_or_a_time(
    lake: ModelLake, reader_of: Callable[[Settings], TableReader]
) -> None:
    reader = reader_of(lake.settings)
    query = "SELECT count(DISTINCT batch) AS n FROM progress"
    newest = lake.reader.version("silver")
    # Spark takes the times of the log's files, delta-rs those that the commits say.
    commits = {commit.number: commit for commit in reader.history("silver")}
    assert rows(reader, lake.settings, query) == [{"n": 2}]
    assert rows(reader, lake.settings, query, newest - 1) == [{"n": 1}]
    before = datetime.fromtimestamp(commits[newest].committed_at_ms / 1000 - 0.001, timezone.utc)
    assert rows(reader, lake.settings, query, before) == [{"n": 1}]
    with pytest.raises(ConfigurationError, match="--at: silver has no version 99 yet"):
        rows(reader, lake.settings, query, 99)
    with pytest.raises(ConfigurationError, match="did not exist then"):
        rows(reader, lake.settings, query, datetime(2000, 1, 1, tzinfo=timezone.utc))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT\n  event_tim\nFROM merged", "QUERY, line 2, column 3.*event_tim.*did you mean"),
        ("SELECT nosuch(1)", "QUERY, line 1, column 8.*nosuch"),
        ("SELECT * FROM late WHERE", "QUERY, line 1, column"),
    ],
)
def test_an_error_points_into_the_query(
    lake: ModelLake, reader_of: Callable[[Settings], TableReader], query: str, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said) as refused:
        rows(reader_of(lake.settings), lake.settings, query)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("SELECT", "the query has no end"),
        ('SELECT status FROM merged WHERE status = "open"', "stands between single quotes"),
    ],
)
def test_what_beginners_write_is_told_with_what_is_right(
    lake: ModelLake, query: str, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        rows(lake.reader, lake.settings, query)


def test_what_fails_for_a_row_is_told_in_one_sentence(lake: ModelLake) -> None:
    with pytest.raises(QueryError) as failed:
        rows(lake.reader, lake.settings, "SELECT CAST(topic AS int) FROM progress")
    assert failed.value.exit_code == 2
    assert "\n" not in str(failed.value)


def test_no_statement_but_a_query_can_come_out_of_brackets() -> None:
    """Behind the gate stands this: whatever else it lets through is no query in brackets."""
    reader = DeltaRsReader(Lake(settings_for(Path("nowhere"))))
    for statement in ("CREATE TABLE x AS SELECT 1", "COPY (SELECT 1) TO 'x.csv'", "SET a.b = 1"):
        with pytest.raises(QueryError):
            reader.query(statement, [])
    for statement in ("SELECT 1) ; (SELECT 2", "EXPLAIN SELECT 1"):
        with pytest.raises(QueryError):
            reader.query(statement, [])


def _files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "query", ["SELECT * FROM silver", "SELECT 1; DROP TABLE silver", "COPY (SELECT 1) TO 'x.csv'"]
)
def test_it_writes_nothing(
    lake: ModelLake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = _files(tmp_path)
    with suppress(ConfigurationError):
        rows(lake.reader, lake.settings, query)
    assert _files(tmp_path) == before


VALUES = pa.RecordBatchReader.from_stream(
    QueryBuilder().execute(
        "SELECT 1 AS n, 'a,\"b\"' AS text, CAST(NULL AS bigint) AS nothing, X'ff41' AS bytes, "
        "arrow_cast(1001, 'Timestamp(Millisecond, Some(\"UTC\"))') AS at, true AS yes, "
        "named_struct('a', make_array(1, 2)) AS nested, 0.5 AS half"
    )
).read_all()


def test_json_has_times_in_ms_and_bytes_as_text() -> None:
    assert as_document(VALUES.to_reader()) == {
        "columns": VALUES.column_names,
        "rows": [
            {
                "n": 1,
                "text": 'a,"b"',
                "nothing": None,
                "bytes": "\\xffA",
                "at": 1001,
                "yes": True,
                "nested": {"a": [1, 2]},
                "half": 0.5,
            }
        ],
    }
    assert as_table(VALUES.slice(0, 0).to_reader()) == "no row"


def selected(columns: str) -> pa.Table:
    found: pa.Table = pa.RecordBatchReader.from_stream(
        QueryBuilder().execute(f"SELECT {columns}")
    ).read_all()
    return found


def test_every_time_is_shown_however_fine_and_however_far_away() -> None:
    """Kafka's timestamps may be any, and `now()` has nanoseconds: Python has neither."""
    fine = "arrow_cast(1001000001, 'Timestamp(Nanosecond, Some(\"UTC\"))')"
    ms = 253_402_300_800_000
    far = f"arrow_cast({ms * 1000}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
    rows = selected(
        f"{fine} AS fine, {far} AS far, "
        "arrow_cast(-1, 'Timestamp(Millisecond, None)') AS before, "
        f"arrow_cast({-ms}, 'Timestamp(Millisecond, None)') AS long_before, "
        f"arrow_cast({10**17}, 'Duration(Millisecond)') AS long, "
        "arrow_cast(1001000001, 'Duration(Nanosecond)') AS short, "
        "arrow_cast(99999999, 'Date32') AS day, arrow_cast(NULL, 'Timestamp(Nanosecond, None)') "
        f"AS nothing, named_struct('a', make_array({far}), 'b', {fine}) AS nested, now() AS now"
    )
    [row] = as_document(rows.to_reader())["rows"]
    assert isinstance(row.pop("now"), int)
    assert row == {
        "fine": 1001,
        "far": ms,
        "before": -1,
        "long_before": -ms,
        "long": 10**17,
        "short": 1001,
        "day": "<value out of range: 99999999>",
        "nothing": None,
        "nested": {"a": [ms], "b": 1001},
    }
    table = as_table(rows.to_reader())
    assert not isinstance(table, str)
    shown = {str(column.header): [*column.cells] for column in table.columns}
    assert shown["fine"] == ["1970-01-01 00:00:01.001Z"]
    assert shown["far"] == [f"{ms} ms (out of range)"]
    assert shown["short"] == ["1001 ms"]
    assert shown["before"] == ["1969-12-31 23:59:59.999Z"]
    assert shown["long_before"] == [f"{-ms} ms (out of range)"]


def test_an_interval_is_its_length_in_ms_on_both_engines_and_one_of_months_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def asked(value: str) -> pa.Table:
        return pa.table(QueryBuilder().execute(f"SELECT {value} AS x").read_all())

    by_spark = pa.table({"x": pa.array([86_400_000_123, -1_999], pa.duration("us"))})
    by_delta_rs = pa.concat_tables(
        [asked("INTERVAL '1 day 0.000123 seconds'"), asked("INTERVAL '-0.001999' SECOND")]
    )
    for rows in (by_delta_rs, by_spark):
        found = as_document(rows.to_reader())["rows"]
        assert found == [{"x": 86_400_000}, {"x": -1}]
        write_csv(rows.to_reader())
        assert capsys.readouterr().out == "x\n86400000 ms\n-1 ms\n"
    inside = asked("named_struct('all', make_array(INTERVAL '3' SECOND, NULL))")
    assert as_document(inside.to_reader())["rows"] == [{"x": {"all": [3000, None]}}]
    for months in ("INTERVAL '1' MONTH", "make_array(INTERVAL '2 years 1 day')"):
        with pytest.raises(QueryError, match="interval of months"):
            as_document(asked(months).to_reader())


def test_times_that_are_keys_of_a_map_are_ms_as_all_times() -> None:
    kind = pa.map_(pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC"))
    rows = pa.table({"x": pa.array([[(5_000, 7_000)]], kind)})
    assert as_document(rows.to_reader())["rows"] == [{"x": [[5, 7]]}]


def test_two_columns_of_one_name_are_no_json() -> None:
    """An object would have the last of them alone."""
    rows = selected("1 AS a, 2 AS b").rename_columns(["a", "a"])
    with pytest.raises(ConfigurationError, match="2 columns have the name `a`"):
        as_document(rows.to_reader())
    assert as_table(rows.to_reader()) != "no row"


def test_csv_has_escapes_for_what_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["ab", "a\0b", "\x1b[31mred", "new\nline", "tab\t", "ключ"]
    write_csv(pa.table({"key": keys}).to_reader())
    found = [*csv.reader(io.StringIO(capsys.readouterr().out))]
    assert found == [["key"], ["ab"], ["a\\x00b"], ["\\x1b[31mred"], *([key] for key in keys[3:])]


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setattr("watersmeet.lake.identity.check_layout", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["watersmeet", "sql", *arguments])
    cli.main()
    return capsys.readouterr().out


def test_the_command_prints_a_table_json_or_csv(
    lake: ModelLake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_configuration(lake.settings, tmp_path)
    query = "SELECT merge_key, event_time, tracking FROM merged ORDER BY partition, event_time"
    document = json.loads(run(monkeypatch, capsys, query, "--json"))
    assert len(document["rows"]) == lake.reader.select("merged", ["batch"]).num_rows
    lines = [*csv.reader(io.StringIO(run(monkeypatch, capsys, query, "--csv")))]
    assert lines[0] == document["columns"]
    assert [line[0] for line in lines[1:]] == [row["merge_key"] for row in document["rows"]]
    table = run(monkeypatch, capsys, query).splitlines()
    assert len(table) == len(lines), "an item is one line, however long"
    assert table[0].split() == document["columns"]


@pytest.mark.parametrize(
    "arguments", [["SELECT 1 +"], ["SELECT 1", "--csv", "--json"], ["SELECT 1", "--at", "x"]]
)
def test_bad_usage_is_one_sentence(
    lake: ModelLake,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_configuration(lake.settings, tmp_path)
    monkeypatch.setattr("sys.argv", ["watersmeet", "sql", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
