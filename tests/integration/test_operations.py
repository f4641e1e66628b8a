"""What an operator does to a lake on purpose: jumps, and maintenance."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from tests.support.cases import Case, expected_messages, expected_silver, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake, OpenSpark, engine_for, silver_of
from tests.support.rivers import River
from tests.support.topics import published
from watersmeet import cli
from watersmeet.commands import arguments
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.maintenance import FEW_FILES, Maintenance, maintain
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run
from watersmeet.running.owner import kept_by

pytestmark = pytest.mark.long


def run_once(river: River, *layers: str) -> None:
    """In this process, whose Spark is there already."""
    Run(river.settings, layers or LAYERS, Reporter()).once()


@pytest.fixture
def river(root_session: SparkSession, kafka: str, tmp_path: Path) -> River:
    """One partition, some of it published, some open, some waiting."""
    found = River.make(
        kafka, tmp_path, f"jump-{tmp_path.name[-12:]}".replace("_", "-"), partitions=1
    )
    for _ in range(3):
        found.flow()
    run_once(found)
    found.flow("tracking")
    run_once(found, "bronze")
    return found


def reset(river: River, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli.app, ["reset", "-c", str(river.file), "--json", *options])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.promise("B5")
@pytest.mark.fault("jumps")
def test_a_jump_to_the_latest_says_what_it_skips_and_goes_on_with_fresh_state(river: River) -> None:
    before, out = silver_of(river.reader), published(river.kafka, river.sink, 1)
    shown = reset(river, "--to", "latest")
    assert not shown["done"]
    assert silver_of(river.reader) == before, "only said, not done"
    open_rows = [row for row in before if row[2] == "open"]
    assert shown["open_records_closed"] == len(open_rows) > 0
    skipped = {jump["source"]: jump["skipped"] for jump in shown["jumps"]}
    assert skipped["tracking"] > 0

    assert reset(river, "--to", "latest", "--yes")["done"]
    of_reset = [[("invalid_reason", "=", "reset")]]
    closed = river.reader.select(
        tables.SILVER, ["merge_key", "status", "valid"], of_reset
    ).to_pylist()
    assert {tuple(row.values()) for row in closed} == {
        (row[1], "timed_out", False) for row in open_rows
    }
    resets = river.reader.select(
        tables.RESETS, ["source", "from_offset", "to_offset", "reason"]
    ).to_pylist()
    kept = {(row["source"], row["to_offset"] - row["from_offset"], row["reason"]) for row in resets}
    assert kept == {(source, count, "reset --to latest") for source, count in skipped.items()}

    begun = {source: len(values) for source, values in river.cases[0].values.items()}
    for _ in range(3):
        river.flow()
    run_once(river)
    fresh = Case({s: v[begun[s] :] for s, v in river.cases[0].values.items()}, 300)
    fresh.arrivals = [s for s, values in fresh.values.items() for _ in values]
    last = max(int(m.id.split("/")[1]) for m in out)
    expected = [
        (m.key, m.timestamp, m.value) for m in expected_messages({0: fresh}) if m.timestamp > last
    ]
    found = published(river.kafka, river.sink, 1)
    assert found[: len(out)] == out, "what is out stays"
    assert [(m.key, m.timestamp, m.value) for m in found[len(out) :]] == expected
    assert [m.seq for m in found] == list(range(len(found)))
    assert river.broken_promises() == []


@pytest.mark.promise("B5")
@pytest.mark.fault("jumps")
def test_a_jump_back_merges_again_and_publishes_nothing_twice(river: River) -> None:
    out = published(river.kafka, river.sink, 1)
    river.flow("orders")
    shown = reset(river, "--to", "earliest", "--yes")
    assert all(jump["read_again"] > 0 and jump["skipped"] == 0 for jump in shown["jumps"])
    for _ in range(2):
        river.flow()
    run_once(river)
    found = published(river.kafka, river.sink, 1)
    assert found == expected_messages(river.cases), "nothing was lost, nothing came twice"
    assert len(found) > len(out)
    assert river.broken_promises() == []


def test_a_place_that_is_none_is_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match="--to: `yesterday` is not a time; use earliest, latest or a time such as",
    ):
        arguments.parse_target("yesterday")
    assert arguments.parse_target("1970-01-01T00:00:05Z") == 5000


# -- maintenance

BATCHES = int(os.environ.get("WATERSMEET_TEST_BATCHES", "6"))
ENGINES = ["embedded", "spark"] if BATCHES > 6 else ["embedded"]
"""A short run in the suite; `make faults` makes hundreds, on both engines."""

EVERY = 4


@pytest.mark.promise("C19")
@pytest.mark.parametrize("engine", ENGINES)
def test_files_stay_few_however_many_batches_there_are(
    open_spark: OpenSpark, tmp_path: Path, engine: str
) -> None:
    settings = settings_for(tmp_path, engine=engine)
    lake = CaseLake(
        engine_for(open_spark, settings), settings, {0: Case({"tracking": [], "orders": []}, 100)}
    )
    silver, case, asked = lake.start(), lake.cases[0], lake.reader
    keeper = Maintenance(lake.engine, kept_by("silver", settings), every=EVERY)
    most = 0
    for n in range(BATCHES):
        for source in ("tracking", "orders"):
            case.values[source] += [keyed("abc"[n % 3], 40 * n), heartbeat(40 * n + 20)]
            case.arrivals += [source] * 2
        lake.arrive()
        for _ in silver.drain():
            keeper.after_commit()
            most = max(most, asked.file_count(tables.SILVER))
    assert lake.silver() == expected_silver(lake.cases)
    assert most <= FEW_FILES + 4 * EVERY, f"{most} files in the worst of {BATCHES} batches"
    before = lake.silver()
    done = {row["table"]: row for row in maintain(lake.engine, kept_by("silver", settings))}
    assert int(str(done[tables.SILVER]["files"])) <= FEW_FILES
    assert lake.silver() == before
    assert lake.start().recover().state.cursors == silver.recover().state.cursors, (
        "silver takes up its work from what is left"
    )
    version = asked.version(tables.SILVER) - EVERY
    assert asked.select(tables.SILVER, ["merge_key"], version=version).num_rows > 0, (
        "time travel within the retention still works"
    )


@pytest.mark.promise("C19")
@pytest.mark.parametrize("chosen", ["embedded", "spark"])
def test_only_what_lies_beyond_the_retention_is_removed(
    open_spark: OpenSpark, tmp_path: Path, chosen: str
) -> None:
    settings = settings_for(tmp_path, engine=chosen).model_copy(update={"retention_ms": 1})
    engine = engine_for(open_spark, settings)
    engine.create(engine.lake.layout[tables.JOURNAL])
    for n in range(FEW_FILES + 1):
        rows = engine.lake.layout[tables.JOURNAL].rows([(n, "rules", None, "{}", None, 0)])
        engine.append(tables.JOURNAL, rows)
    [done] = maintain(engine, [tables.JOURNAL])
    assert (done["files_before"], done["files"]) == (FEW_FILES + 1, 1)
    assert int(str(done["old_files_removed"])) > FEW_FILES
    assert engine.reader.select(tables.JOURNAL, ["seq"]).num_rows == FEW_FILES + 1
    longer = engine_for(open_spark, settings_for(tmp_path, engine=chosen, retention="30d"))
    maintain(longer, [tables.JOURNAL])
    kept = longer.reader.properties(tables.JOURNAL)
    assert (
        kept["delta.logRetentionDuration"]
        == kept["delta.deletedFileRetentionDuration"]
        == "interval 2592000000 milliseconds"
    )
