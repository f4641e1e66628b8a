"""Checks beside a run that goes on, and `watersmeet check` as people call it, on a real broker."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import here
from tests.support.configurations import settings_for
from tests.support.metrics import scrape
from tests.support.panics import PanicException
from tests.support.quality import expected, suite_file
from tests.support.rivers import Losses, River, until
from tests.support.topics import published
from watersmeet.ask.status import status
from watersmeet.dev.processes import free_port
from watersmeet.lake.quality import last_results
from watersmeet.monitoring.observability import Reporter
from watersmeet.quality import beside
from watersmeet.quality.beside import Checker
from watersmeet.quality.page import check_lake

pytestmark = pytest.mark.long

NEVER = expected(
    "expect_table_row_count_to_be_between", "more rows than there are", min_value=10**9
)


def results(river: River) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["suite"], row["table"]): row for row in last_results(river.reader)}


@pytest.mark.promise("A8")
@pytest.mark.fault("owners")
def test_a_suite_that_is_not_met_beside_a_run_is_told_and_stops_nothing(
    kafka: str, tmp_path: Path
) -> None:
    port, file = free_port(), suite_file(tmp_path, "greedy", "silver", NEVER)
    river = River.make(
        kafka,
        tmp_path / "river",
        "beside",
        quality={"suites": [file], "every": 1},
        metrics={"port": port},
    )
    river.flow()
    run = river.run()
    try:
        until(lambda: ("greedy", "silver") in results(river), "the first check", 120)
        first = results(river)["greedy", "silver"]
        assert (first["success"], first["failed"]) == (False, 1)
        river.flow()
        river.flow()
        until(
            lambda: results(river)["greedy", "silver"]["version"] > first["version"],
            "a later check",
            120,
        )
        until(lambda: ("sink_promises", "sink") in results(river), "a check of the sink", 120)
        seen = scrape(port)
        assert seen is not None
        assert seen.value("watersmeet_quality_failed", suite="greedy", table="silver") == 1
        assert seen.value("watersmeet_quality_failed", suite="silver_promises", table="merged") == 0
        assert run.process.poll() is None, run.said()
    finally:
        assert run.stop() == 0, run.said()
    assert "silver: the suite greedy is not met: more rows than there are" in river.run_log
    assert river.losses() == Losses()
    told = {
        (row["suite"], row["table"]): row for row in status(river.reader, river.settings)["quality"]
    }
    assert told == results(river)


def test_a_panic_in_a_rust_library_ends_no_checks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = threading.Event()

    class Panicking:
        @property
        def reader(self) -> None:
            stopping.set()
            raise PanicException("no thread")

    monkeypatch.setattr(beside, "LOOK_EVERY_S", 0)
    engine: Any = Panicking()
    checker = Checker(engine, settings_for(tmp_path), 1, Reporter(), lambda _: None)
    with caplog.at_level(logging.WARNING):
        checker.follow(stopping)
    assert "the data is not checked: PanicException: no thread" in caplog.text


def test_a_suite_that_is_wrong_refuses_the_run(kafka: str, tmp_path: Path) -> None:
    file = suite_file(tmp_path, "wrong", None, {"type": "expect_much", "kwargs": {}})
    river = River.make(
        kafka, tmp_path / "river", "wrong-suite", quality={"suites": [file], "every": 5}
    )
    run = river.run("--once")
    assert run.wait() == 2
    assert f"{file}: expectations[0], expect_much: " in run.said()


@pytest.mark.nightly
def test_each_message_is_looked_at_once(kafka: str, tmp_path: Path) -> None:
    river, looked_at = River.make(kafka, tmp_path / "river", "checked"), 0
    for _ in range(3):
        river.flow()
        river.finish()
        done = check_lake(river.settings, None, None)
        assert done.ok
        assert done.skipped == {}
        looked_at += sum(result.rows for result in done.results if result.table == "sink")
    assert looked_at == len(published(kafka, river.sink, river.partitions)) > 0
    assert check_lake(river.settings, None, None).results == []
    [again] = [
        result for result in check_lake(river.settings, 0, None).results if result.table == "sink"
    ]
    assert again.rows == looked_at


def test_the_exit_status_says_what_a_check_has_found(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path / "river", "exits")
    river.flow()
    river.finish()
    page = tmp_path / "quality.html"
    assert "every expectation is met" in here(river, "check", "--html", str(page))
    assert "The data is as expected" in page.read_text(encoding="utf-8")
    assert "--since: silver has no version 999" in here(
        river, "check", "--since", "999", exit_code=2
    )
    assert "--html: " in here(
        river, "check", "--html", str(tmp_path / "none" / "page.html"), exit_code=2
    )

    river.config["quality"] = {"suites": [suite_file(tmp_path, "greedy", "bronze", NEVER)]}
    river.write()
    found = json.loads(here(river, "check", "--json", exit_code=3))
    assert [(row["table"], row["success"]) for row in found["results"]] == [
        ("bronze_tracking", False),
        ("bronze_orders", False),
    ]
    assert found["nothing_new"] == ["bronze_orders", "bronze_tracking", "late", "merged", "sink"]
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    river.config["quality"] = {"suites": [str(bad)]}
    river.write()
    assert f"{bad}: is not JSON" in here(river, "check", exit_code=2)
    assert (
        f"{bad}: is not JSON"
        in json.loads(here(river, "validate", "--json", exit_code=2))["problems"][0]["what"]
    )


@pytest.mark.nightly
def test_where_kafka_is_away_all_but_the_sink_is_looked_at(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path / "river", "away")
    river.flow()
    river.flow()
    river.finish()
    river.config["kafka"] = {"bootstrap_servers": "127.0.0.1:1"}
    river.write()
    found = json.loads(here(river, "check", "--json", exit_code=1))
    assert found["ok"]
    assert "no Kafka broker answers" in found["skipped"]["sink"]
    assert {row["table"] for row in found["results"]} == {
        "bronze_tracking",
        "bronze_orders",
        "silver",
        "merged",
        "late",
    }
