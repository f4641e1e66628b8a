"""The real silver code on real Delta tables against the merge model: hundreds of random cases, a partition each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipelines import batch_input, tables
from pipelines.adapters import transaction
from pipelines.adapters.spark import layer_session
from pipelines.batch_input import BatchInput
from pipelines.silver import Silver
from tests.support.cases import SOURCES, Case, expected_late, expected_quarantine, expected_silver, random_case
from tests.support.lakes import CaseLake, late_of, quarantined_of, settings_for

CASES = 250


def cases(first_seed: int, count: int, sources: tuple[str, ...] = SOURCES) -> dict[int, Case]:
    return {partition: random_case(first_seed + partition, sources=sources) for partition in range(count)}


@pytest.fixture(scope="module")
def merged_at_once(root_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> CaseLake:
    folder: Path = tmp_path_factory.mktemp("at_once")
    lake = CaseLake(layer_session(root_session), settings_for(folder), cases(0, CASES))
    lake.arrive()
    assert lake.merge() == 1
    return lake


def test_random_cases_cover_every_rule(merged_at_once: CaseLake) -> None:
    models = [case.merged() for case in merged_at_once.cases.values()]
    assert sum(len(model.timed_out) for model in models) > 100
    assert sum(len(model.open) for model in models) > 100
    assert sum(len(model.late) for model in models) > 20
    assert any(model.clock is None for model in models)
    assert sum(len(queue) for model in models for queue in model.waiting.values()) > 100
    reopened = [m for m in models if len({r.key for r in m.timed_out}) < len(m.timed_out)]
    assert len(reopened) > 10


def test_silver_equals_the_merge_model(merged_at_once: CaseLake) -> None:
    assert merged_at_once.silver() == expected_silver(merged_at_once.cases)


def test_late_equals_the_merge_model(merged_at_once: CaseLake) -> None:
    assert late_of(merged_at_once.lake) == expected_late(merged_at_once.cases)


def test_quarantine_holds_every_refused_record_once(merged_at_once: CaseLake) -> None:
    assert quarantined_of(merged_at_once.lake) == expected_quarantine(merged_at_once.cases)


def test_every_bronze_record_ends_in_exactly_one_outcome_or_waits(merged_at_once: CaseLake) -> None:
    lake = merged_at_once.lake
    until = {(r.source, r.partition): r.until_offset for r in lake.read(tables.PROGRESS).collect()}
    for source in merged_at_once.settings.sources:
        kept = lake.read(tables.SILVER).select("partition", F.explode(source).alias("part")).select("partition", "part.offset")
        others = [
            lake.read(t).where(F.col("source") == source).select("partition", "offset") for t in (tables.LATE, tables.QUARANTINE)
        ]
        bronze = lake.read(tables.bronze(source))
        outcomes = [kept, *others, bronze.where("heartbeat").select("partition", "offset")]
        ended = [tuple(row) for outcome in outcomes for row in outcome.collect()]
        passed = [
            (row.partition, row.offset)
            for row in bronze.select("partition", "offset", "reason", "heartbeat").collect()
            if row.offset < until[source, row.partition] or row.reason or row.heartbeat
        ]
        assert sorted(ended) == sorted(passed)


@pytest.mark.parametrize(
    ("arrivals", "max_records"),
    [((0.2, 0.5, 1.0), 1_000_000), ((1.0,), 960)],
    ids=["three arrivals", "small batches"],
)
def test_silver_does_not_depend_on_how_the_input_is_cut(
    spark: SparkSession, tmp_path: Path, arrivals: tuple[float, ...], max_records: int
) -> None:
    settings = settings_for(tmp_path, merge__max_records_per_batch=max_records)
    lake = CaseLake(spark, settings, cases(1000, 40))
    batches = 0
    for share in arrivals:
        lake.arrive(share)
        batches += lake.merge()
    assert batches >= 3
    assert lake.silver() == expected_silver(lake.cases)
    assert late_of(lake.lake) == expected_late(lake.cases)


def test_three_sources_merge_as_two_do(spark: SparkSession, tmp_path: Path) -> None:
    sources = ("tracking", "orders", "returns")
    lake = CaseLake(spark, settings_for(tmp_path, sources=sources), cases(2000, 40, sources))
    lake.arrive()
    lake.merge()
    assert lake.silver() == expected_silver(lake.cases, sources)


def test_a_batch_is_one_commit_and_a_drained_lake_gets_none(spark: SparkSession, tmp_path: Path) -> None:
    lake = CaseLake(spark, settings_for(tmp_path), cases(3000, 5))
    lake.arrive()
    batches = lake.merge()
    operations = [row.operation for row in lake.lake.delta(tables.SILVER).history().collect()]
    assert operations == ["WRITE"] * batches + ["CREATE TABLE"]
    assert lake.merge() == 0
    assert [row.operation for row in lake.lake.delta(tables.SILVER).history().collect()] == operations


WAYS: dict[str, dict[str, int]] = {
    "few rows, open ones marked as gone": {},
    "few rows, open ones marked as gone or written anew, in turns": {"FEW_FILES": 2},
    "few rows, another Delta, open ones written anew": {},
    "few rows, another Delta, MERGE": {"FEW_OPEN": -1},
    "many rows, open ones written anew": {"FEW_ROWS": -1, "OPEN_PER_OFFSET": 1000},
    "many rows, MERGE": {"FEW_ROWS": -1, "OPEN_PER_OFFSET": -1},
}


@pytest.mark.parametrize("way", WAYS)
def test_silver_equals_the_merge_model_whichever_way_a_batch_is_written(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(batch_input, name, value)
    if "another Delta" in way:
        monkeypatch.setattr(transaction, "DELTA", "0.0.0")
    lake = CaseLake(spark, settings_for(tmp_path), cases(6000, 30))
    for share in (0.2, 0.4, 0.6, 0.8, 1.0) if "marked" in way else (0.4, 0.7, 1.0):
        lake.arrive(share)
        lake.merge()
    assert lake.silver() == expected_silver(lake.cases)
    assert late_of(lake.lake) == expected_late(lake.cases)
    written = {row.operation for row in lake.lake.delta(tables.SILVER).history().collect()} - {"CREATE TABLE"}
    assert written == {"MERGE" if "MERGE" in way else "WRITE"}
    marks = list(Path(str(lake.settings.lake), tables.SILVER).glob("deletion_vector_*.bin"))
    assert bool(marks) == ("marked" in way or "MERGE" in way)


def test_the_change_data_feed_tells_each_change_with_its_batch(spark: SparkSession, tmp_path: Path) -> None:
    lake = CaseLake(spark, settings_for(tmp_path, silver={"change_data_feed": True}), cases(7000, 20))
    for share in (0.5, 0.8, 1.0):
        lake.arrive(share)
        lake.merge()
    columns = ["partition", "merge_key", "event_time", "status", "batch"]
    feed = spark.read.option("readChangeFeed", "true").option("startingVersion", 0).table(lake.lake.identifier(tables.SILVER))
    changes = feed.select("_change_type", *columns, "_commit_version").orderBy("_commit_version").collect()
    after = Counter(row[1:6] for row in changes if row._change_type in ("insert", "update_postimage"))
    before = Counter(row[1:6] for row in changes if row._change_type in ("delete", "update_preimage"))
    assert after - before == Counter(map(tuple, lake.lake.read(tables.SILVER).select(*columns).collect()))
    assert {row._change_type for row in changes} == {"insert", "update_preimage", "update_postimage"}
    made = dict(lake.lake.rows("SELECT version, batch FROM {versions}"))
    assert all(row.batch == made[row._commit_version] for row in changes if row._change_type != "update_preimage")
    assert lake.silver() == expected_silver(lake.cases)


def test_a_start_completes_the_batch_that_a_crash_cut_short(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = CaseLake(spark, settings_for(tmp_path), cases(4000, 30))
    lake.arrive(0.5)
    lake.merge()
    lake.arrive()
    cut_short = Silver(lake.lake, lake.settings, lake.partitions)

    def crash(batch: BatchInput) -> None:
        raise RuntimeError(f"crash in batch {batch.plan.batch}")

    monkeypatch.setattr(cut_short, "_merge", crash)
    with pytest.raises(RuntimeError, match="crash"):
        next(cut_short.drain())
    assert lake.silver() != expected_silver(lake.cases)
    lake.merge()
    assert lake.silver() == expected_silver(lake.cases)
    assert late_of(lake.lake) == expected_late(lake.cases)
