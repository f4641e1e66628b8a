"""The live view shows silver and what waits in bronze for the clock, and for whom it waits."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.decisions import write_decisions
from pipelines.core.idle import Decision
from pipelines.core.plan import TopicPartition
from pipelines.settings import CatalogLake
from tests.support.cases import SOURCES, Case, heartbeat, keyed, random_case
from tests.support.lakes import CaseLake, settings_for

RANDOM = 8


def test_it_is_silver_and_the_models_waiting_records(spark: SparkSession, tmp_path: Path) -> None:
    cases = {p: random_case(7200 + p) for p in range(RANDOM)}
    lake = CaseLake(spark, settings_for(tmp_path), cases)
    lake.arrive()
    lake.merge()
    live = tables.live(lake.lake, lake.settings)
    merged = live.where("status <> 'waiting'").drop("waits_for")
    assert merged.exceptAll(lake.lake.read(tables.SILVER)).isEmpty()
    assert merged.count() == lake.lake.read(tables.SILVER).count()
    expected: dict[tuple[int, str], tuple[dict[str, list[tuple[int, int, str]]], list[str]]] = {}
    for p, case in cases.items():
        model = case.merged()
        slowest = [s for s in SOURCES if s not in model.heads] or [s for s in SOURCES if model.heads[s] == model.clock]
        for source, queue in model.waiting.items():
            for _, record in queue:
                if record.key is not None:
                    parts = expected.setdefault((p, record.key), ({s: [] for s in SOURCES}, slowest))[0]
                    parts[source].append((record.event_time, record.offset, (case.values[source][record.offset] or b"").decode()))
    found = {
        (row.partition, row.merge_key): (
            {s: [(part.event_time.timestamp() * 1000, part.offset, part.value) for part in row[s]] for s in SOURCES},
            row.waits_for,
        )
        for row in live.where("status = 'waiting'").collect()
    }
    assert found == {at: ({s: sorted(mine) for s, mine in parts.items()}, slowest) for at, (parts, slowest) in expected.items()}
    assert len(found) > 5


def test_a_stuck_source_is_seen_and_an_idle_one_is_not(spark: SparkSession, tmp_path: Path) -> None:
    values: dict[str, list[bytes | None]] = {"tracking": [keyed("a", 10), keyed("b", 500)], "orders": [heartbeat(200)]}
    silent: dict[str, list[bytes | None]] = {"tracking": [keyed("a", 10)], "orders": []}
    cases = {p: Case(values, 100, ["tracking", "orders", "tracking"]) for p in (0, 1)} | {2: Case(silent, 100, ["tracking"])}
    lake = CaseLake(spark, settings_for(tmp_path), cases)
    lake.arrive()
    lake.merge()
    write_decisions(lake.lake, lake.settings, [(TopicPartition("orders", 1), Decision(0, 500))])
    waiting = tables.live(lake.lake, lake.settings).where("status = 'waiting'").select("partition", "merge_key", "waits_for")
    assert sorted(map(tuple, waiting.collect())) == [
        (0, "b", ["orders"]),
        (1, "b", list(SOURCES)),  # the next batch will merge it
        (2, "a", ["orders"]),
    ]
    assert lake.merge() == 1
    waiting = tables.live(lake.lake, lake.settings).where("status = 'waiting'")
    assert [row.partition for row in waiting.orderBy("partition").collect()] == [0, 2]


def test_a_catalog_has_it_as_a_view_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    spark.sql(f"CREATE SCHEMA IF NOT EXISTS live_view LOCATION '{tmp_path}/warehouse'")
    try:
        properties = {"ts": {"type": "integer"}, "k": {"type": "string"}, "a'b": {"type": "integer"}}
        schema = tmp_path / "value.json"
        schema.write_text(json.dumps({"type": "object", "properties": properties}))
        settings = settings_for(tmp_path, checkpoints=str(tmp_path / "checkpoints"), sources__orders__schema=str(schema))
        settings = settings.model_copy(update={"lake": CatalogLake(catalog="spark_catalog", schema_name="live_view")})
        orders = keyed("a", 20, **{"a'b": 7})
        values: dict[str, list[bytes | None]] = {"tracking": [keyed("a", 10)], "orders": [orders, heartbeat(30)]}
        lake = CaseLake(spark, settings, {0: Case(values, 100, ["tracking", "orders", "orders"])})
        lake.arrive()
        by_view = "SELECT merge_key, status, orders[0].value.`a'b`, waits_for FROM live_view.live ORDER BY status"
        assert [tuple(row) for row in spark.sql(by_view).collect()] == [("a", "waiting", 7, ["tracking"])]
        lake.merge()
        rows = [tuple(row) for row in spark.sql(by_view).collect()]
        assert rows == [("a", "open", None, None), ("a", "waiting", 7, ["tracking"])]
        columns = [name for name in tables.live(lake.lake, settings).columns if name not in ("waits_for", "batch")]
        same = tables.live(lake.lake, settings).select(*columns).exceptAll(spark.table("live_view.live").select(*columns))
        assert same.where(F.lit(True)).isEmpty()
    finally:
        spark.sql("DROP SCHEMA IF EXISTS live_view CASCADE")
