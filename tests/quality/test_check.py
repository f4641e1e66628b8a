"""A check looks at each row once, goes on where the last one ended, and keeps what it found."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from tests.support.cases import Case, cases_with_ids, heartbeat, keyed, rich_cases
from tests.support.configurations import IDS
from tests.support.corrections import corrections_of, late_duplicates_of
from tests.support.lakes import KAFKA_TIME_US, CaseLake
from tests.support.quality import NOW_MS, QualityLake, expected, suite_file
from watersmeet.audit.show import check_view
from watersmeet.core.sequence import MERGED, Tail
from watersmeet.dev.init import schemas_directory
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.progress import last_batch
from watersmeet.lake.published import columns_of, topic_columns
from watersmeet.lake.quality import Checked, last_results, last_versions
from watersmeet.lake.table_reader import VersionGoneError, row_count
from watersmeet.quality import rows
from watersmeet.quality.check import batch_after
from watersmeet.quality.suites import PROMISES, checked_views
from watersmeet.settings import Settings

BRONZE = {"bronze_tracking": 6, "bronze_orders": 3}


def with_suites(lake: QualityLake, *files: str) -> None:
    kept = Settings.model_validate(
        {**lake.settings.model_dump(), "quality": {"suites": list(files)}}
    )
    lake.settings = lake.settings.model_copy(update={"quality": kept.quality})


@pytest.mark.long
@pytest.mark.promise("A7")
@pytest.mark.fault("owners")
def test_every_row_is_looked_at_once(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path, cases=rich_cases(6))
    seen: dict[str, int] = {}
    for share in (0.4, 0.4, 1.0):
        lake.flow(share)
        for table, count in lake.looked_at(lake.check()).items():
            seen[table] = seen.get(table, 0) + count
    passed = lake.engine.reader.summary(
        tables.PROGRESS, ["source", "partition"], {"end": ("max", "until_offset")}
    ).to_pylist()
    for source in lake.settings.sources:
        merged = sum(row["end"] for row in passed if row["source"] == source)
        assert seen[tables.bronze(source)] == merged > 0
    assert seen[tables.LATE] == len(lake.lake.late()) > 0
    # A record that a later batch changed is looked at again.
    assert seen[tables.MERGED] >= len(lake.lake.silver()) > 0


@pytest.mark.long
def test_where_nothing_is_new_the_check_says_so_and_is_met(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    before = lake.check()
    assert (before.version, before.results, before.ok) == (None, [], True)
    lake.flow()
    assert lake.looked_at(lake.check()) == {**BRONZE, "merged": 5, "late": 1}
    again = lake.check()
    assert again.ok
    assert again.results == []
    assert again.nothing_new == ["bronze_orders", "bronze_tracking", "late", "merged", "sink"]
    assert again.document()["nothing_new"] == again.nothing_new
    assert "nothing new since the last check" in str(check_view(again.document()).renderables)


@pytest.mark.long
def test_a_check_since_a_version_looks_at_all_batches_after_it(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    lake.flow(0.5)
    first = lake.check()
    lake.flow()
    lake.check()
    assert first.version is not None
    since_first, since_all = lake.check(since=first.version), lake.check(since=0)
    assert lake.looked_at(since_all)["bronze_tracking"] == 6
    assert (
        lake.looked_at(since_first)["bronze_tracking"]
        == 6 - lake.looked_at(first)["bronze_tracking"]
    )
    assert {result.version for result in since_all.results if result.table != "sink"} == {
        since_all.version
    }
    assert lake.check().results == [], "an older version does not move the check back"
    with pytest.raises(
        ConfigurationError, match=r"--since: silver has no version 99; name one from 0 to \d+"
    ):
        lake.check(since=99)


def test_what_was_found_is_in_the_table(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    few = expected(
        "expect_column_values_to_be_between", "few parts", column="tracking_parts", max_value=0
    )
    count = expected("expect_table_row_count_to_be_between", "many rows", min_value=100)
    with_suites(lake, suite_file(tmp_path, "mine", "merged", few, count))
    lake.flow()
    done = lake.check()
    assert not done.ok
    names = list(Checked._fields)
    found = lake.engine.reader.select(tables.QUALITY, names).to_pylist()
    assert sorted(tuple(row.values()) for row in found) == sorted(done.checked())
    mine = {row["expectation"]: row for row in found if row["suite"] == "mine"}
    assert {(row["success"], row["unexpected"], row["total"]) for row in mine.values()} == {
        (False, 3, 5),
        (False, None, 5),
    }
    assert {row["checked_at"] for row in found} == {NOW_MS}
    [mine_last] = [row for row in last_results(lake.engine.reader) if row["suite"] == "mine"]
    told = {"checked_at": NOW_MS, "success": False, "expectations": 2, "failed": 2}
    assert mine_last == {"suite": "mine", "table": "merged", "version": done.version, **told}


@pytest.mark.long
def test_a_suite_that_is_added_later_begins_with_the_first_batch(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    lake.flow(0.5)
    lake.check()
    lake.flow()
    some = expected("expect_table_row_count_to_be_between", "some rows", min_value=1)
    with_suites(lake, suite_file(tmp_path, "mine", "bronze_tracking", some))
    seen = {
        result.suite: result.rows
        for result in lake.check().results
        if result.table == "bronze_tracking"
    }
    assert seen["mine"] == 6 > seen["bronze_promises"]


@pytest.mark.long
def test_pieces_give_what_the_whole_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = QualityLake(tmp_path)
    few = expected(
        "expect_column_values_to_be_between", "few parts", column="tracking_parts", max_value=0
    )
    with_suites(lake, suite_file(tmp_path, "mine", "merged", few))
    for share in (0.3, 0.6, 1.0):
        lake.flow(share)
    whole = lake.check().document()
    monkeypatch.setattr(rows, "CHUNK_OFFSETS", 1)
    batches = rows.read_batches(lake.engine.reader, -1)
    assert len(list(batches.chunks(rows.Span(-1, batches.last), 1))) == batches.last + 1 > 1
    assert lake.check(since=0).document() == whole


def test_progress_is_looked_at_as_it_stands_each_time(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    young = expected(
        "expect_column_values_to_be_between", "young", column="minutes_since_batch", max_value=60
    )
    with_suites(lake, suite_file(tmp_path, "age", "progress", young))
    assert lake.check().results == [], "before the first batch there is nothing to look at"
    lake.flow()
    committed = lake.engine.reader.summary(tables.PROGRESS, [], {"at": ("max", "committed_at")})[
        "at"
    ][0].as_py()
    assert lake.check(committed + 3_600_000).ok
    assert not lake.check(committed + 3_601_000).ok
    assert lake.check(committed).ok


def test_bytes_that_are_no_text_are_null_and_stop_nothing(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    lake.lake.cases[0].values["tracking"][2] = b"\xff\xfe"
    text = expected("expect_column_values_to_not_be_null", "values are text", column="value")
    with_suites(lake, suite_file(tmp_path, "mine", "bronze_tracking", text))
    lake.flow()
    [result] = [result for result in lake.check().results if result.suite == "mine"]
    assert [outcome.unexpected for outcome in result.failed] == [1]


@pytest.mark.promise("A7")
@pytest.mark.fault("hostile")
def test_what_senders_wrote_is_never_shown(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    nothing = [
        expected("expect_column_values_to_be_null", "no value", column="value"),
        expected("expect_column_values_to_be_null", "no detail", column="detail"),
    ]
    parts = expected("expect_column_values_to_be_null", "no parts", column="tracking")
    with_suites(
        lake,
        suite_file(tmp_path, "mine", "bronze_tracking", *nothing),
        suite_file(tmp_path, "parts", "merged", parts),
    )
    lake.flow()
    found = {
        outcome.expectation: outcome for result in lake.check().results for outcome in result.failed
    }
    assert found["no value"].examples[0] == {
        "partition": "0",
        "offset": "0",
        "value": "(19 characters, not shown)",
    }
    assert "not shown" in found["no detail"].examples[0]["detail"]
    assert "parts, not shown" in found["no parts"].examples[0]["tracking"]


def test_a_check_that_is_to_stop_leaves_the_rest_for_the_next_one(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    lake.flow()
    asked = iter([False, True, True])
    done = lake.check(is_stopping=lambda: next(asked))
    assert [result.table for result in done.results] == ["bronze_tracking"]
    assert set(lake.looked_at(lake.check())) == {"bronze_orders", "merged", "late"}


@pytest.mark.promise("A7")
@pytest.mark.fault("owners")
def test_checks_that_end_at_once_all_keep_their_results(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    table = lake.engine.lake.layout[tables.QUALITY]
    results = [
        [Checked(NOW_MS + n, f"suite{n}", "silver", n, "holds", True, 0, 1)] for n in range(6)
    ]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda mine: lake.engine.append(table.name, table.rows(mine)), results))
    assert last_versions(lake.engine.reader) == {(f"suite{n}", "silver"): n for n in range(6)}


def test_a_suite_that_great_expectations_does_not_take_ends_the_check_before_it_looks(
    tmp_path: Path,
) -> None:
    lake = QualityLake(tmp_path)
    with_suites(lake, suite_file(tmp_path, "mine", "silver", {"type": "expect_much", "kwargs": {}}))
    lake.flow()
    with pytest.raises(ConfigurationError, match="expect_much"):
        lake.check()
    assert last_versions(lake.engine.reader) == {}


def test_a_check_says_nothing_beside_its_answer(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    lake = QualityLake(tmp_path)
    lake.flow()
    done = lake.check()
    assert json.loads(json.dumps(done.document()))["ok"]
    assert {result.suite for result in done.results} == set(PROMISES) - {
        "sink_promises",  # gold has published nothing
        "waiting_promises",
    }
    assert capfd.readouterr() == ("", "")
    assert [
        record for record in caplog.records if record.name.startswith("great_expectations")
    ] == []
    assert list(here.iterdir()) == [], "no file is left in the current folder"


def test_the_view_names_what_is_not_met() -> None:
    row: dict[str, Any] = {
        "suite": "mine",
        "table": "silver",
        "expectation": "few [parts]",
        "success": False,
        "total": 4,
    }
    row |= {"unexpected": 3, "observed": None, "trouble": None}
    found = {"results": [row], "skipped": {"sink": "away"}, "nothing_new": []}
    told = "\n".join(part for part in check_view(found).renderables if isinstance(part, str))
    assert r"silver: few \[parts] (3 of 4 rows are against it)" in told
    assert "sink: away" in told


def test_rows_that_are_never_published_hold_no_check_of_the_sink_back(tmp_path: Path) -> None:
    """They sort before the message behind which their generation began."""
    lake = QualityLake(tmp_path, cases=rich_cases(6))
    lake.flow(0.4)
    behind = Tail(99, (10**9, b"", 10**9, b"z"), 99, 10**9)
    lake.lake.jump(dict.fromkeys(lake.lake.every, 0), dict.fromkeys(range(6), behind))
    lake.flow(1.0)
    reader = lake.engine.reader
    last = last_batch(reader)
    assert last is not None
    finished = [("status", "=", "timed_out"), ("generation", "=", 1)]
    assert row_count(reader, tables.SILVER, [finished]) > 0
    assert rows.published_until(reader, lake.settings, last.batch) == last.batch


def test_a_sink_that_is_configured_anew_has_nothing_to_check_until_something_is_out(
    tmp_path: Path,
) -> None:
    lake = QualityLake(tmp_path, cases=rich_cases(6))
    lake.flow(1.0)
    reader, last = lake.engine.reader, last_batch(lake.engine.reader)
    assert last is not None
    end = columns_of(MERGED, Tail(0, (10**9, b"", 10**9, b"z"), 0, 10**9))
    noted = {**topic_columns(lake.settings.publish.topic), "committed_at": 1, "last_seq": 0, **end}
    layout = lake.engine.lake.layout[tables.PUBLISHED]
    lake.engine.append(
        tables.PUBLISHED, layout.rows_of([{"partition": p, **noted} for p in range(6)])
    )
    assert rows.published_until(reader, lake.settings, last.batch) == last.batch
    publish = lake.settings.publish.model_copy(update={"topic": "another"})
    settings = lake.settings.model_copy(update={"publish": publish})
    assert rows.published_until(reader, settings, last.batch) < last.batch


@pytest.mark.promise("A18")
@pytest.mark.parametrize(
    ("head", "unit_ms", "failed"),
    [("", 1, []), ("other ", 1, ["sources_met"]), ("", 1000, ["days_from_kafka"])],
    ids=["as it should be", "nothing meets", "seconds"],
)
def test_the_suites_of_init_say_that_nothing_meets_and_that_event_times_are_of_another_unit(
    tmp_path: Path, head: str, unit_ms: int, failed: list[str]
) -> None:
    lake, names = QualityLake(tmp_path), ("completeness", "event_times")
    files = [schemas_directory() / "expectations" / f"{name}.json" for name in names]
    with_suites(lake, *map(str, files))
    begin = KAFKA_TIME_US // 1000 // unit_ms
    values: dict[str, list[bytes | None]] = {
        source: [*(keyed(f"{before}{n}", begin + n) for n in range(5)), heartbeat(begin + 10**6)]
        for source, before in (("tracking", ""), ("orders", head))
    }
    lake.lake = CaseLake(
        lake.engine,
        lake.settings,
        {0: Case(values, 100, [source for source, mine in values.items() for _ in mine])},
    )
    lake.flow()
    columns = {
        each["description"]: each["kwargs"]["column"]
        for file in files
        for each in json.loads(file.read_text())["expectations"]
    }
    outcomes = [
        one for result in lake.check().results if result.suite in names for one in result.failed
    ]
    assert {columns[one.expectation] for one in outcomes} - {"tracking_parts"} == {*failed}


@pytest.mark.promise("A18")
@pytest.mark.parametrize("fields", [0, 2])
def test_the_suites_of_init_say_that_records_have_fields_which_their_schema_lacks(
    tmp_path: Path, fields: int
) -> None:
    properties = {name: {"type": kind} for name, kind in (("ts", "integer"), ("k", "string"))}
    schema = json.dumps({"type": "object", "properties": properties})
    (tmp_path / "orders.json").write_text(schema)
    suites = {"suites": [str(schemas_directory() / "expectations" / "fields.json")]}
    lake = QualityLake(tmp_path, sources__orders__schema="orders.json", quality=suites)
    more = {f"secret{n}": "s3cret" for n in range(fields)}
    values: dict[str, list[bytes | None]] = {
        "tracking": [keyed("a", 1, any=1), heartbeat(10**6)],
        "orders": [b"{", *(keyed("a", n, **more) for n in range(5)), heartbeat(10**6)],
    }
    arrivals = [source for source, mine in values.items() for _ in mine]
    lake.lake = CaseLake(lake.engine, lake.settings, {0: Case(values, 100, arrivals)})
    lake.flow()
    found = lake.check()
    failed = {result.table: one.unexpected for result in found.results for one in result.failed}
    assert failed == ({"bronze_orders": 5} if fields else {})
    assert "s3cret" not in json.dumps(found.document())


def test_a_suite_may_be_about_corrections_and_about_duplicates(tmp_path: Path) -> None:
    cases = cases_with_ids(rich_cases(6))
    for case in cases.values():
        for source, values in case.values.items():
            values.append(heartbeat(100_000))
            case.arrivals.append(source)
    corrections = {"topic": "merged-corrections", "within": "1d"}
    lake = QualityLake(tmp_path, cases=cases, publish__corrections=corrections, **IDS)
    met = expected("expect_column_values_to_be_between", "parts", column=rows.MET, min_value=1)
    late = expected("expect_column_values_to_be_in_set", "on time", column="is_late", value_set=[0])
    with_suites(
        lake,
        suite_file(tmp_path, "mine", tables.CORRECTIONS, met),
        suite_file(tmp_path, "other", tables.DUPLICATES, late),
    )
    seen: dict[str, int] = {}
    not_met = 0
    for share in (0.5, 1.0):
        lake.flow(share)
        done = lake.check()
        for table, count in lake.looked_at(done).items():
            seen[table] = seen.get(table, 0) + count
        failed = [result for result in done.results if result.failed]
        assert {result.suite for result in failed} <= {"other"}
        not_met += sum(outcome.unexpected or 0 for result in failed for outcome in result.failed)
    reader = lake.engine.reader
    assert seen[tables.CORRECTIONS] == len(corrections_of(reader)) > 0
    assert seen[tables.DUPLICATES] == row_count(reader, tables.DUPLICATES)
    assert not_met == len(late_duplicates_of(reader)) > 0


def test_a_suite_may_be_about_silver_and_about_each_view(tmp_path: Path) -> None:
    lake = QualityLake(tmp_path)
    some = expected("expect_table_row_count_to_be_between", "some rows", min_value=0)
    names = [tables.SILVER, *checked_views(lake.settings)]
    with_suites(lake, *[suite_file(tmp_path, f"of_{name}", name, some) for name in names])
    lake.flow()
    reader = lake.engine.reader
    found = lake.looked_at(lake.check())
    assert {name: found[name] for name in names if name != tables.PROGRESS} == {
        name: row_count(reader, name) for name in names if name != tables.PROGRESS
    }
    assert found[tables.QUARANTINE] == found[tables.LATE] == 1


def test_where_silvers_log_has_forgotten_the_last_version_all_is_looked_at_again(
    tmp_path: Path,
) -> None:
    lake = QualityLake(tmp_path)
    lake.flow(0.5)
    first = lake.check()
    lake.flow()
    DeltaTable(str(tmp_path / "lake" / "silver")).create_checkpoint()
    for file in (tmp_path / "lake" / "silver" / "_delta_log").glob("*.json"):
        if int(file.stem.partition(".")[0]) <= (first.version or 0):
            file.unlink()
    reader = DeltaRsReader(lake.engine.lake)
    assert first.version is not None
    assert batch_after(reader, first.version) == -1
    with pytest.raises(VersionGoneError, match=f"version {first.version} of .* cannot be read"):
        rows.batch_at(reader, first.version)
    assert rows.batch_at(reader, reader.version(tables.SILVER)) == 1
