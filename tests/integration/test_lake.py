"""The laws of the tables hold wherever the lake is: in a folder of any name, or in a schema of a catalog."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.lake import Lake, suppress_conflict
from pipelines.adapters.spark import layer_session
from pipelines.errors import LeaseLostError
from pipelines.settings import Settings
from tests.support.cases import SOURCES, expected_silver, random_case
from tests.support.lakes import CaseLake, settings_for

TRANSACTION_SETTINGS = ("spark.databricks.delta.write.txnAppId", "spark.databricks.delta.write.txnVersion")


def settings_of(kind: str, spark: SparkSession, folder: Path) -> tuple[Settings, str | None]:
    """A configuration, and the schema that has to be dropped afterwards."""
    if kind == "folder":
        return settings_for(folder / "the `lake`, é"), None
    schema = f"lake_{folder.name}".replace("-", "_")
    spark.sql(f"CREATE SCHEMA spark_catalog.`{schema}` LOCATION '{folder / schema}'")
    location = {"catalog": "spark_catalog", "schema": schema}
    return settings_for(folder, lake=location, checkpoints=str(folder / "checkpoints")), schema


@pytest.fixture(params=["folder", "catalog"])
def settings(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[Settings]:
    found, schema = settings_of(request.param, spark, tmp_path)
    yield found
    if schema is not None:
        spark.sql(f"DROP SCHEMA spark_catalog.`{schema}` CASCADE")


@pytest.fixture
def lake(spark: SparkSession, settings: Settings) -> Lake:
    lake = Lake(spark, settings)
    lake.create_missing()
    return lake


def types(rows: DataFrame) -> list[tuple[str, str]]:
    return [(field.name, field.dataType.simpleString()) for field in rows.schema]


def published(lake: Lake, *seqs: int) -> DataFrame:
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    rows = [(0, seq, seq, now, "k", seq, now, "merged") for seq in seqs]
    return lake.spark.createDataFrame(rows, lake.schema(tables.PUBLISHED)).coalesce(1)


def silver_rows(lake: Lake, *rows: tuple[str, str]) -> DataFrame:
    at = datetime(2026, 1, 1, tzinfo=timezone.utc)
    values: list[tuple[Any, ...]] = [(0, key, status, at, at, *[[] for _ in SOURCES], None, None, 0) for key, status in rows]
    return lake.spark.createDataFrame(values, lake.schema(tables.SILVER))


def seqs(lake: Lake) -> list[int]:
    return sorted(row.last_seq for row in lake.read(tables.PUBLISHED).select("last_seq").collect())


def versions(lake: Lake, table: str) -> int:
    return lake.delta(table).history().count()


def test_tables_are_made_as_laid_out_and_a_second_time_left_as_they_are(lake: Lake, settings: Settings) -> None:
    lake.append(published(lake, 0), tables.PUBLISHED)
    Lake(lake.spark, settings).create_missing()
    for name, table in tables.layout(settings).items():
        assert lake.exists(name)
        assert types(lake.read(name)) == [(field.name, field.dataType.simpleString()) for field in lake.schema(name)]
        detail = lake.delta(name).detail().collect()[0]
        assert tuple(detail.partitionColumns) == table.partitioned_by
        assert {key: detail.properties.get(key) for key in table.properties} == dict(table.properties)
        assert versions(lake, name) == (2 if name == tables.PUBLISHED else 1)
    assert seqs(lake) == [0]


def test_a_lake_holds_what_the_contract_promises(spark: SparkSession, tmp_path: Path) -> None:
    lake = Lake(spark, settings_for(tmp_path))
    parts = "array<struct<offset:bigint,event_time:timestamp,value:string>>"
    headers = "array<struct<key:string,value:binary>>"
    place = "topic string, partition int, offset bigint"
    promised = {
        "bronze_orders": f"{place}, kafka_timestamp timestamp, timestamp_type int, key binary, value binary, headers {headers}, "
        "merge_key string, event_time timestamp, heartbeat boolean",
        "silver": "partition int, merge_key string, status string, event_time timestamp, last_event_time timestamp, "
        f"tracking {parts}, orders {parts}, valid boolean, invalid_reason string, batch bigint",
        "late": f"source string, {place}, merge_key string, event_time timestamp, position timestamp, value binary, batch bigint",
        "quarantine": f"source string, {place}, kafka_timestamp timestamp, key binary, value binary, headers {headers}, "
        "reason string, detail string",
        "resets": "source string, topic string, partition int, from_offset bigint, to_offset bigint, decided_at timestamp, "
        "reason string",
        "published": "partition int, first_seq bigint, last_seq bigint, last_event_time timestamp, last_key string, "
        "sink_offset bigint, committed_at timestamp",
        "progress": "batch bigint, source string, topic string, partition int, from_offset bigint, until_offset bigint, "
        "head timestamp, clock timestamp, committed_at timestamp",
    }
    for name, columns in promised.items():
        found = {f"{field.name} {field.dataType.simpleString()}" for field in lake.schema(name)}
        assert set(columns.split(", ")) <= found, name


def test_looking_for_a_table_makes_none(spark: SparkSession, settings: Settings) -> None:
    lake = Lake(spark, settings)
    assert not any(lake.exists(name) for name in tables.layout(settings))
    assert not isinstance(settings.lake, str) or not Path(settings.lake).exists()


def test_a_batch_is_appended_once(lake: Lake) -> None:
    for batch in (0, 0, 1, 0, 1):
        lake.append(published(lake, batch), tables.PUBLISHED, batch=batch)
    assert seqs(lake) == [0, 1]
    for _ in range(2):
        lake.append(published(lake, 9), tables.PUBLISHED)
    assert seqs(lake) == [0, 1, 9, 9]


def a_row(seq: int, time_ms: int | None = 0) -> tuple[Any, ...]:
    return 0, seq, seq, time_ms, "k", seq, 1, "merged"


def test_rows_of_the_driver_are_appended_as_any_others_are(lake: Lake) -> None:
    times = [-62_135_596_800_000, -1, 0, None, 253_402_300_799_999]
    lake.append_rows([a_row(seq, time) for seq, time in enumerate(times)], tables.PUBLISHED, batch=0)
    lake.append_rows([a_row(9)], tables.PUBLISHED, batch=0)
    found = lake.read(tables.PUBLISHED).select("last_seq", F.unix_millis("last_event_time"), F.unix_millis("committed_at"))
    assert sorted(map(tuple, found.collect())) == [(seq, time, 1) for seq, time in enumerate(times)]
    lake.append(published(lake, 5), tables.PUBLISHED, batch=1)
    for batch in (1, 2, 0):
        lake.append_rows([a_row(6)], tables.PUBLISHED, batch=batch)
    assert seqs(lake) == [0, 1, 2, 3, 4, 5, 6]
    assert lake.has_batch(tables.PUBLISHED, 2)
    lake.append_rows([], tables.PUBLISHED, batch=3)
    assert lake.has_batch(tables.PUBLISHED, 3), "a batch may have no rows"
    for _ in range(2):
        lake.append_rows([a_row(7)], tables.PUBLISHED)
    assert seqs(lake)[-2:] == [7, 7]


def test_of_many_who_append_the_same_commit_one_does(lake: Lake) -> None:
    def append(seq: int) -> None:
        with suppress_conflict():
            lake.append_once([a_row(seq)], tables.PUBLISHED, "race", 1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(append, range(8)))
    assert len(seqs(lake)) == 1


def test_a_question_is_answered_from_the_last_commit_with_times_in_ms(lake: Lake) -> None:
    question = "SELECT `partition`, MAX(last_seq), MAX(last_event_time), MAX(sink) FROM {published} GROUP BY `partition`"
    assert lake.rows(question) == []
    lake.append_rows([a_row(1, -5), a_row(2, -7)], tables.PUBLISHED)
    assert lake.rows(question) == [(0, 2, -5, "merged")]
    with lake.once(tables.PUBLISHED, 0):
        lake.delta(tables.PUBLISHED).delete("last_seq = 2")
    since = lake.time_literal(-5)
    assert lake.rows(f"SELECT last_seq FROM {{published}} WHERE last_event_time >= {since}") == [(1,)]
    assert lake.rows("SELECT a.last_seq FROM {published} AS a JOIN {late} AS b ON a.`partition` = b.`partition`") == []


def merge(lake: Lake, seq: int) -> None:
    target, rows = lake.delta(tables.PUBLISHED).alias("old"), published(lake, seq).alias("new")
    target.merge(rows, "false").whenNotMatchedInsertAll().execute()


def test_a_merge_is_done_once_per_batch_and_no_setting_stays_behind(lake: Lake) -> None:
    def left_behind() -> list[Any]:
        return [lake.spark.conf.get(name, None) for name in TRANSACTION_SETTINGS]

    for batch, seq in ((5, 50), (5, 51), (6, 60), (5, 52)):
        with lake.once(tables.PUBLISHED, batch):
            merge(lake, seq)
        assert left_behind() == [None, None]
    assert seqs(lake) == [50, 60]
    with pytest.raises(AnalysisException), lake.once(tables.PUBLISHED, 6):
        lake.read("no_such_table")
    assert left_behind() == [None, None]
    merge(lake, 61)
    assert seqs(lake) == [50, 60, 61]


def test_open_rows_are_replaced_by_rows_of_any_kind_once_per_batch_and_no_setting_stays_behind(lake: Lake) -> None:
    lake.append(silver_rows(lake, ("a", "open"), ("b", "open"), ("c", "timed_out")), tables.SILVER)
    after = silver_rows(lake, ("a", "timed_out"), ("d", "open"))
    for _ in range(2):
        lake.replace(after, tables.SILVER, batch=0)
    found = lake.read(tables.SILVER).orderBy("merge_key").select("merge_key", "status").collect()
    assert [tuple(row) for row in found] == [("a", "timed_out"), ("c", "timed_out"), ("d", "open")]
    assert lake.has_batch(tables.SILVER, 0)
    assert not lake.has_batch(tables.SILVER, 1)
    for setting in (*TRANSACTION_SETTINGS, "spark.databricks.delta.replaceWhere.constraintCheck.enabled"):
        assert lake.spark.conf.get(setting, None) in (None, "true")


def test_an_owner_before_writes_nothing_once_it_is_fenced(lake: Lake, settings: Settings) -> None:
    before, after = Lake(lake.spark, settings, token=1), Lake(lake.spark, settings, token=2)
    before.append(published(lake, 0), tables.PUBLISHED)
    with before.once(tables.PUBLISHED, 7):
        merge(before, 1)
    after.fence(tables.PUBLISHED)
    assert after.has_batch(tables.PUBLISHED, 7), "what was done stays known"
    assert not after.has_batch(tables.PUBLISHED, 8)
    after.fence(tables.LATE)
    assert not after.has_batch(tables.LATE, 0), "a fence is no batch"
    with pytest.raises(LeaseLostError, match="another process has taken"):
        before.append(published(lake, 2), tables.PUBLISHED)
    with pytest.raises(LeaseLostError):
        before.append(published(lake, 3), tables.PUBLISHED, batch=8)
    with pytest.raises(LeaseLostError):
        merge_once(before, 8, 4)
    with pytest.raises(LeaseLostError):
        before.append_rows([a_row(3)], tables.PUBLISHED, batch=8)
    with pytest.raises(LeaseLostError):
        before.append_rows([a_row(3)], tables.PUBLISHED)
    assert seqs(lake) == [0, 1]
    after.append(published(lake, 5), tables.PUBLISHED, batch=8)
    after.append(published(lake, 6), tables.PUBLISHED)
    assert seqs(lake) == [0, 1, 5, 6]


def merge_once(lake: Lake, batch: int, seq: int) -> None:
    with lake.once(tables.PUBLISHED, batch):
        merge(lake, seq)


def test_the_last_commit_is_known_by_table_and_application(lake: Lake) -> None:
    lake.append(published(lake, 0), tables.PUBLISHED, batch=3)
    assert lake.last_commit(tables.PUBLISHED) == (0, 4)
    assert lake.last_commit(tables.PUBLISHED, "another") is None
    assert lake.last_commit(tables.LATE) is None


def test_a_follower_hears_of_every_later_commit(lake: Lake, tmp_path: Path) -> None:
    heard: list[int] = []

    def listen() -> None:
        query = (
            lake.follow(tables.PUBLISHED)
            .writeStream.option("checkpointLocation", str(tmp_path / "follower"))
            .trigger(availableNow=True)
            .foreachBatch(lambda rows, _: heard.append(rows.count()))
            .start()
        )
        assert query.awaitTermination(120)

    lake.append(published(lake, 0), tables.PUBLISHED)
    listen()
    before = sum(heard)
    lake.append(published(lake, 1), tables.PUBLISHED)
    listen()
    appended = sum(heard)
    assert appended > before
    with lake.once(tables.PUBLISHED, 0):
        merge(lake, 2)
    listen()
    assert sum(heard) > appended


def test_silver_in_a_catalog_equals_the_merge_model(root_session: SparkSession, tmp_path: Path) -> None:
    spark = layer_session(root_session)
    settings, schema = settings_of("catalog", spark, tmp_path)
    try:
        lake = CaseLake(spark, settings, {p: random_case(700 + p) for p in range(8)})
        lake.arrive(0.6)
        lake.merge()
        lake.arrive()
        lake.merge()
        expected = expected_silver(lake.cases, SOURCES)
        assert lake.silver() == expected
        assert {row[2] for row in expected} == {"open", "timed_out"}
        places = lake.lake.spark.sql(f"SHOW TABLES IN spark_catalog.`{schema}`").select(F.collect_set("tableName")).first()
        assert places is not None
        assert set(places[0]) == {*tables.layout(settings), "live"}
    finally:
        spark.sql(f"DROP SCHEMA spark_catalog.`{schema}` CASCADE")
