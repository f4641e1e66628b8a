"""What an operator does to a lake on purpose: jumps, and maintenance."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyarrow import parquet
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

from pipelines import cli, tables
from pipelines.adapters.lake import Lake
from pipelines.adapters.spark import layer_session
from pipelines.audit.verify import verify
from pipelines.errors import ConfigurationError
from pipelines.maintenance import COMPACT_EVERY, VACUUM_EVERY_S, Maintenance, files, maintain
from pipelines.run import kept_by
from pipelines.silver import Silver
from tests.support.cases import Case, expected_messages, expected_silver, heartbeat, keyed
from tests.support.lakes import CaseLake, settings_for, silver_of
from tests.support.rivers import River
from tests.support.topics import published


@pytest.fixture
def river(root_session: SparkSession, kafka: str, tmp_path: Path) -> River:
    """One partition, some of it published, some open, some waiting."""
    found = River.make(kafka, tmp_path, f"jump-{tmp_path.name[-12:]}".replace("_", "-"), partitions=1)
    for _ in range(3):
        found.flow()
    found.finish()
    found.flow("tracking")
    found.finish("bronze")
    return found


def reset(river: River, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(cli.app, ["reset", "-c", str(river.file), "--json", *options])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def of_reset(lake: Lake) -> DataFrame:
    return lake.read(tables.SILVER).where("invalid_reason = 'reset'")


def test_a_jump_to_the_latest_says_what_it_skips_and_goes_on_with_fresh_state(spark: SparkSession, river: River) -> None:
    lake = Lake(spark, river.settings)
    before, out = silver_of(lake), published(river.kafka, river.sink, 1)
    shown = reset(river, "--to", "latest")
    assert not shown["done"]
    assert silver_of(lake) == before, "only said, not done"
    open_rows = [row for row in before if row[2] == "open"]
    assert shown["open_records_closed"] == len(open_rows) > 0
    skipped = {jump["source"]: jump["skipped"] for jump in shown["jumps"]}
    assert skipped["tracking"] > 0

    assert reset(river, "--to", "latest", "--yes")["done"]
    closed = {(row.merge_key, row.status, row.valid) for row in of_reset(lake).collect()}
    assert closed == {(row[1], "timed_out", False) for row in open_rows}
    kept = {(r.source, r.to_offset - r.from_offset, r.reason) for r in lake.read(tables.RESETS).collect()}
    assert kept == {(source, count, "reset --to latest") for source, count in skipped.items()}

    begun = {source: len(values) for source, values in river.cases[0].values.items()}
    for _ in range(3):
        river.flow()
    river.finish()
    fresh = Case({s: v[begun[s] :] for s, v in river.cases[0].values.items()}, 300)
    fresh.arrivals = [s for s, values in fresh.values.items() for _ in values]
    last = max(int(m.id.split("/")[1]) for m in out)
    expected = [(m.key, m.timestamp, m.value) for m in expected_messages({0: fresh}) if m.timestamp > last]
    found = published(river.kafka, river.sink, 1)
    assert found[: len(out)] == out, "what is out stays"
    assert [(m.key, m.timestamp, m.value) for m in found[len(out) :]] == expected
    assert [m.seq for m in found] == list(range(len(found)))
    assert verify(lake, river.settings, full=True)["problems"] == []


def test_a_jump_back_merges_again_and_publishes_nothing_twice(spark: SparkSession, river: River) -> None:
    lake = Lake(spark, river.settings)
    out = published(river.kafka, river.sink, 1)
    river.flow("orders")
    shown = reset(river, "--to", "earliest", "--yes")
    assert all(jump["read_again"] > 0 and jump["skipped"] == 0 for jump in shown["jumps"])
    for _ in range(2):
        river.flow()
    river.finish()
    found = published(river.kafka, river.sink, 1)
    assert found == expected_messages(river.cases), "nothing was lost, nothing came twice"
    assert len(found) > len(out)
    problems = verify(lake, river.settings, full=True)["problems"]
    assert problems == []


def test_a_place_that_is_none_is_refused(river: River) -> None:
    with pytest.raises(ConfigurationError, match="--to: `yesterday` is no place to jump to"):
        cli.parse_target("yesterday")
    assert cli.parse_target("1970-01-01T00:00:05Z") == 5000


# -- maintenance

BATCHES = int(os.environ.get("WATERSMEET_TEST_BATCHES", "6"))
"""A short run in the suite; `make faults` makes hundreds."""

EVERY = 4


def test_files_stay_few_however_many_batches_there_are(root_session: SparkSession, tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    lake = CaseLake(layer_session(root_session), settings, {0: Case({"tracking": [], "orders": []}, 100)})
    silver, case = Silver(lake.lake, settings, 1), lake.cases[0]
    keeper = Maintenance(lake.lake, kept_by("silver", settings), every=EVERY)
    most = 0
    for n in range(BATCHES):
        for source in ("tracking", "orders"):
            case.values[source] += [keyed("abc"[n % 3], 40 * n), heartbeat(40 * n + 20)]
            case.arrivals += [source] * 2
        lake.arrive()
        for _ in silver.drain():
            keeper.after_commit()
            most = max(most, files(lake.lake, tables.SILVER))
    assert lake.silver() == expected_silver(lake.cases)
    assert most <= 4 * EVERY, f"{most} files in the worst of {BATCHES} batches"
    assert files(lake.lake, tables.PROGRESS) <= EVERY + 1
    before = lake.silver()
    done = {row["table"]: row for row in maintain(lake.lake, kept_by("silver", settings))}
    assert done[tables.SILVER]["files"] == 2, "one for what is open, one for what is finished"
    for file in DeltaTable(f"{settings.lake}/{tables.SILVER}").file_uris():
        group = parquet.ParquetFile(file).metadata.row_group(0)
        [key] = [chunk for n in range(group.num_columns) if (chunk := group.column(n)).path_in_schema == "merge_key"]
        assert key.bloom_filter_length, "a key is looked for in few files"
    assert lake.silver() == before
    assert Silver(lake.lake, settings, 1).cursors, "silver takes up its work from what is left"
    versions = lake.lake.delta(tables.SILVER).history(1).collect()[0].version
    oldest = lake.lake.spark.read.option("versionAsOf", versions - EVERY).table(lake.lake.identifier(tables.SILVER))
    assert oldest.count() > 0, "time travel within the retention still works"


def test_only_what_lies_beyond_the_retention_is_removed(spark: SparkSession, tmp_path: Path) -> None:
    settings = settings_for(tmp_path).model_copy(update={"retention_ms": 1})
    lake = Lake(spark, settings)
    lake.create_missing()
    for n in range(3):
        rows = spark.createDataFrame([("merge.timeout", str(n), None)], lake.schema(tables.CONFIGURATION))
        lake.append(rows, tables.CONFIGURATION)
    [done] = maintain(lake, [tables.CONFIGURATION])
    assert (done["files_before"], done["files"]) == (3, 1)
    assert int(str(done["old_files_removed"])) >= 3
    assert lake.read(tables.CONFIGURATION).count() == 3
    longer = settings_for(tmp_path, retention="30d")
    maintain(Lake(spark, longer), [tables.CONFIGURATION])
    kept = {row.key: row.value for row in spark.sql(f"SHOW TBLPROPERTIES {lake.identifier(tables.CONFIGURATION)}").collect()}
    assert kept["delta.logRetentionDuration"] == kept["delta.deletedFileRetentionDuration"] == "interval 2592000000 milliseconds"


def test_an_owner_vacuums_after_some_hours(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(Lake, "compact", lambda _, name: done.append(f"compact {name}"))
    monkeypatch.setattr("pipelines.maintenance.vacuum", lambda *arguments: done.append(f"vacuum {arguments[-1]}"))
    settings, now = settings_for(tmp_path), [0.0]
    keeper = Maintenance(Lake(spark, settings), ["late"], now=lambda: now[0])
    for _ in range(2 * COMPACT_EVERY):
        keeper.after_commit()
    assert done == ["compact late"] * 2
    now[0] = VACUUM_EVERY_S + 1
    for _ in range(COMPACT_EVERY):
        keeper.after_commit()
    assert done[2:] == ["compact late", "vacuum late"]
