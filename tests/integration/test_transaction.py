"""The laws of commits that Spark's writers have no part in: what is in the table afterwards, for every reader, whoever wrote
before, and that of two writers one is found out.
"""

from __future__ import annotations

import random
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.adapters.transaction import Transactions, knows_delta
from pipelines.errors import LeaseLostError, WatersmeetError
from tests.support.cases import SOURCES
from tests.support.lakes import settings_for

AT = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Lake:
    return lake_in(spark, tmp_path)


def lake_in(spark: SparkSession, folder: Path, token: int = 0) -> Lake:
    lake = Lake(spark, settings_for(folder / "a lake, é"), token)
    lake.create_missing()
    return lake


def rows(lake: Lake, *found: tuple[str, str, int]) -> pa.Table:
    """Rows of silver: key, status, batch; each key in the partition of its length."""
    schema = to_arrow_schema(lake.schema(tables.SILVER), timezone="UTC")
    values: list[tuple[Any, ...]] = [
        (len(key), key, status, AT, AT, *[[] for _ in SOURCES], None, None, batch) for key, status, batch in found
    ]
    return pa.Table.from_pylist([dict(zip(schema.names, value, strict=True)) for value in values], schema=schema)


def keys(lake: Lake, *found: str) -> pa.Table:
    return rows(lake, *[(key, "open", 0) for key in found]).select(["partition", "merge_key"])


def held(lake: Lake) -> set[tuple[str, str, int]]:
    """What the table has, as Spark reads it; delta-rs must agree, also where statistics let it skip files."""
    columns = ("merge_key", "status", "batch")
    found = [tuple(row) for row in lake.read(tables.SILVER).select(*columns).collect()]
    assert len(set(found)) == len(found)
    answers = QueryBuilder().register("silver", DeltaTable(f"{lake.place}/{tables.SILVER}"))

    def answer(where: str) -> list[tuple[Any, ...]]:
        rows = pa.table(answers.execute(f"SELECT {', '.join(columns)} FROM silver WHERE {where}").read_all())
        return list(zip(*(rows[name].to_pylist() for name in columns), strict=True))

    assert sorted(answer("TRUE")) == sorted(found)
    assert [answer(f"merge_key = '{row[0]}' AND batch = {row[2]}") for row in found] == [[row] for row in found]
    longest = max(found)
    assert lake.read(tables.SILVER).where(F.col("merge_key") == longest[0]).count() == 1
    return set(found)


def test_this_delta_is_known(spark: SparkSession) -> None:
    """Or all of it would go the long way, unseen."""
    assert knows_delta(spark)


def test_rows_come_and_go_in_one_commit_each(lake: Lake) -> None:
    long = "k" * 40
    lake.replace_fetched(
        rows(lake, ("a", "open", 0), ("b", "open", 0), (long, "open", 0), ("c", "timed_out", 0)), tables.SILVER, batch=0
    )
    assert held(lake) == {("a", "open", 0), ("b", "open", 0), (long, "open", 0), ("c", "timed_out", 0)}
    lake.update_fetched(rows(lake, ("a", "timed_out", 1), ("d", "open", 1)), tables.SILVER, gone=keys(lake, "a"), batch=1)
    assert held(lake) == {("a", "timed_out", 1), ("b", "open", 0), (long, "open", 0), ("c", "timed_out", 0), ("d", "open", 1)}
    lake.append_rows([], tables.SILVER, batch=2)
    lake.update_fetched(rows(lake, (long, "open", 3)), tables.SILVER, gone=keys(lake, long, "d"), batch=3)
    assert held(lake) == {("a", "timed_out", 1), ("b", "open", 0), (long, "open", 3), ("c", "timed_out", 0)}
    lake.update_fetched(rows(lake), tables.SILVER, gone=keys(lake, "b"), batch=4)
    assert held(lake) == {("a", "timed_out", 1), (long, "open", 3), ("c", "timed_out", 0)}
    lake.replace_fetched(rows(lake, ("e", "open", 5)), tables.SILVER, batch=5)
    assert held(lake) == {("a", "timed_out", 1), ("c", "timed_out", 0), ("e", "open", 5)}
    history = lake.history(tables.SILVER, 10)
    assert [version.number for version in history] == [6, 5, 4, 3, 2, 1, 0]
    times = [version.committed_at for version in history]
    assert times == sorted(set(times), reverse=True)


def test_a_batch_that_the_table_has_is_not_written_again(lake: Lake) -> None:
    lake.replace_fetched(rows(lake, ("a", "open", 7)), tables.SILVER, batch=7)
    lake.replace_fetched(rows(lake, ("b", "open", 7)), tables.SILVER, batch=7)
    lake.update_fetched(rows(lake, ("c", "open", 6)), tables.SILVER, gone=keys(lake, "a"), batch=6)
    lake.append_rows([], tables.SILVER, batch=7)
    assert held(lake) == {("a", "open", 7)}
    assert lake.version_of(tables.SILVER) == 1


def test_a_row_to_update_that_is_not_there_stops_the_batch(lake: Lake) -> None:
    lake.replace_fetched(rows(lake, ("a", "open", 0), ("b", "timed_out", 0)), tables.SILVER, batch=0)
    for missing in ("x", "b"):
        with pytest.raises(WatersmeetError, match="of 2 rows that a batch updates, 1 were found"):
            lake.update_fetched(rows(lake, ("a", "open", 1)), tables.SILVER, gone=keys(lake, "a", missing), batch=1)
    lake.update_fetched(rows(lake, ("a", "open", 1)), tables.SILVER, gone=keys(lake, "a"), batch=1)
    assert held(lake) == {("a", "open", 1), ("b", "timed_out", 0)}


def test_any_writers_follow_one_another(spark: SparkSession, tmp_path: Path) -> None:
    """Two processes in turns, Spark's own MERGE, DELETE and OPTIMIZE among them."""
    choice = random.Random(1)
    lakes = [lake_in(spark, tmp_path), lake_in(spark, tmp_path)]
    expected: dict[str, tuple[str, int]] = {}
    for batch in range(24):
        lake = choice.choice(lakes)
        opened = [key for key, (status, _) in expected.items() if status == "open"]
        touched = choice.sample(opened, min(len(opened), 3))
        coming = {key: (choice.choice(["open", "timed_out"]), batch) for key in [*touched, f"new{batch}", f"other{batch}"]}
        how = choice.choice(["replace", "update", "update", "update", "spark"])
        if how == "replace":
            coming |= {key: expected[key] for key in opened if key not in touched}
        found = rows(lake, *[(key, *row) for key, row in coming.items()])
        if how == "replace":
            lake.replace_fetched(found, tables.SILVER, batch=batch)
        elif how == "update":
            lake.update_fetched(found, tables.SILVER, gone=keys(lake, *touched), batch=batch)
        else:
            lake.frame(found, lake.schema(tables.SILVER)).createOrReplaceTempView("coming")
            lake.spark.sql(
                f"MERGE INTO {lake.identifier(tables.SILVER)} s USING coming c ON s.merge_key = c.merge_key "
                "WHEN MATCHED THEN UPDATE SET * WHEN NOT MATCHED THEN INSERT *"
            )
            if batch % 2:
                lake.compact(tables.SILVER)
        expected |= coming
    assert held(lakes[0]) == {(key, *row) for key, row in expected.items()}


def test_of_two_who_commit_at_once_the_later_is_found_out(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = lake_in(spark, tmp_path, token=1), lake_in(spark, tmp_path, token=2)
    before.replace_fetched(rows(before, ("a", "open", 0)), tables.SILVER, batch=0)
    begin = Transactions._begin

    def overtaken(own: Transactions, application: str, number: int) -> Any:
        transaction = begin(own, application, number)
        monkeypatch.setattr(Transactions, "_begin", begin)
        after.fence(tables.SILVER)
        return transaction

    monkeypatch.setattr(Transactions, "_begin", overtaken)
    with pytest.raises(Exception, match="Concurrent"):
        before.update_fetched(rows(before, ("a", "open", 1)), tables.SILVER, gone=keys(before, "a"), batch=1)
    with pytest.raises(LeaseLostError):
        before.update_fetched(rows(before, ("a", "open", 1)), tables.SILVER, gone=keys(before, "a"), batch=1)
    after.update_fetched(rows(after, ("a", "timed_out", 1)), tables.SILVER, gone=keys(after, "a"), batch=1)
    assert held(after) == {("a", "timed_out", 1)}
