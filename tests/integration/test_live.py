"""The live view shows silver and what waits in bronze for the clock, and for whom it waits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, Row, SparkSession

from tests.support.cases import INPUTS, SOURCES, Case, heartbeat, keyed, random_case
from tests.support.configurations import settings_for
from tests.support.inputs import tp_of
from tests.support.lakes import CaseLake, engine_for, place_of
from tests.support.tenants import TenantModels, tenant_cases
from watersmeet.core.idle import IdleDecision
from watersmeet.core.silver import in_silver
from watersmeet.engine.spark import SparkEngine
from watersmeet.lake import tables
from watersmeet.lake.by_spark import table_rows
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import Decided, decision_rows
from watersmeet.live import live
from watersmeet.running.owner import now_ms
from watersmeet.settings import Settings

pytestmark = pytest.mark.long

RANDOM = 8
MERGE_RECORDS = "status IN ('open', 'waiting', 'timed_out')"


def case_lake(spark: SparkSession, settings: Settings, cases: dict[int, Case]) -> CaseLake:
    return CaseLake(engine_for(lambda: spark, settings), settings, cases)


def live_rows(spark: SparkSession, settings: Settings) -> DataFrame:
    return live(SparkEngine(spark, Lake(settings)), settings)


def decide(lake: CaseLake, decided: Sequence[Decided]) -> None:
    """The idle policy has decided so."""
    rows = decision_rows(decided, now_ms(), None, 0)
    schema = lake.engine.lake.schema(tables.SILVER)
    lake.owner().append(tables.SILVER, in_silver(rows, "idle", schema), tables.BESIDE)


def _part(part: Row) -> tuple[float, str, int, str]:
    return (
        part.event_time.timestamp() * 1000,
        part.asDict().get("topic", ""),
        part.offset,
        part.value,
    )


@pytest.mark.parametrize(
    "inputs", [SOURCES, pytest.param(INPUTS, marks=pytest.mark.nightly)], ids=["", "topics"]
)
def test_it_is_silver_and_the_models_waiting_records(
    inputs: Sequence[str], spark: SparkSession, tmp_path: Path
) -> None:
    cases = {p: random_case(7200 + p, sources=inputs) for p in range(RANDOM)}
    topics = [name.partition("/")[2] for name in inputs if "/" in name] or "tracking"
    lake = case_lake(spark, settings_for(tmp_path, sources__tracking__topic=topics), cases)
    lake.arrive()
    lake.merge()
    view = live_rows(spark, lake.settings)
    columns = [name for name in view.columns if name != "waits_for"]
    rows = view.collect()
    merged = [[row[name] for name in columns] for row in rows if row.status != "waiting"]
    silver = table_rows(spark, lake.engine.lake, tables.SILVER).where(MERGE_RECORDS)
    found = silver.select(columns).collect()
    assert sorted(map(repr, merged)) == sorted(repr(list(row)) for row in found)
    expected: dict[
        tuple[int, str], tuple[dict[str, list[tuple[int, str, int, str]]], list[str]]
    ] = {}
    for p, case in cases.items():
        model = case.merged(inputs)
        every = lake.settings.input_names
        slowest = [name for i, name in every.items() if i not in model.heads] or [
            name for i, name in every.items() if model.heads[i] == model.clock
        ]
        for input_id, queue in model.unread().items():
            source, topic = input_id
            for _, record in queue:
                if record.key is not None:
                    parts = expected.setdefault(
                        (p, record.key), ({s: [] for s in SOURCES}, slowest)
                    )[0]
                    value = (case.values[every[input_id]][record.offset] or b"").decode()
                    said = topic if every[input_id] != source else ""
                    parts[source].append((record.event_time, said, record.offset, value))
    told = {
        (row.partition, row.merge_key): (
            {
                s: [
                    (
                        p.event_time.timestamp() * 1000,
                        p.asDict().get("topic", ""),
                        p.offset,
                        p.value,
                    )
                    for p in row[s]
                ]
                for s in SOURCES
            },
            row.waits_for,
        )
        for row in rows
        if row.status == "waiting"
    }
    assert told == {
        at: ({s: sorted(mine) for s, mine in parts.items()}, slowest)
        for at, (parts, slowest) in expected.items()
    }
    assert len(found) > 5


@pytest.mark.nightly
def test_after_a_jump_all_waits_from_its_beginning_on(spark: SparkSession, tmp_path: Path) -> None:
    """Before its first batch, and whatever the idle policy has said before it."""
    cases = {p: random_case(7300 + p) for p in range(4)}
    lake = case_lake(spark, settings_for(tmp_path), cases)
    lake.arrive()
    lake.merge()
    decided = [(tp_of(source, 1), IdleDecision(50, 10**7)) for source in SOURCES]
    decide(lake, decided)
    lake.jump(dict.fromkeys(lake.every, 3))
    waiting = live_rows(spark, lake.settings).where("status = 'waiting'").collect()
    found = {
        (row.partition, source, part.offset)
        for row in waiting
        for source in SOURCES
        for part in row[source]
    }
    assert found == {
        (p, r.input.source, r.offset)
        for p, case in cases.items()
        for r in case.records()
        if r.key and r.offset >= 3
    }
    heads = {
        s: max(r.event_time for r in cases[1].records() if r.input.source == s and r.offset >= 3)
        for s in SOURCES
    }
    assert {tuple(row.waits_for) for row in waiting if row.partition == 1} == {
        (min(heads, key=heads.__getitem__),)
    }


@pytest.mark.nightly
def test_a_stuck_source_is_seen_and_an_idle_one_is_not(spark: SparkSession, tmp_path: Path) -> None:
    values: dict[str, list[bytes | None]] = {
        "tracking": [keyed("a", 10), keyed("b", 500)],
        "orders": [heartbeat(200)],
    }
    silent: dict[str, list[bytes | None]] = {"tracking": [keyed("a", 10)], "orders": []}
    cases = {p: Case(values, 100, ["tracking", "orders", "tracking"]) for p in (0, 1)} | {
        2: Case(silent, 100, ["tracking"])
    }
    lake = case_lake(spark, settings_for(tmp_path), cases)
    lake.arrive()
    lake.merge()
    decided = [(tp_of("orders", 1), IdleDecision(0, 500))]
    decide(lake, decided)
    waiting = (
        live_rows(spark, lake.settings)
        .where("status = 'waiting'")
        .select("partition", "merge_key", "waits_for")
    )
    assert sorted(map(tuple, waiting.collect())) == [
        (0, "b", ["orders"]),
        (1, "b", list(SOURCES)),  # the next batch will merge it
        (2, "a", ["orders"]),
    ]
    assert lake.merge() == 1
    waiting = live_rows(spark, lake.settings).where("status = 'waiting'")
    assert [row.partition for row in waiting.orderBy("partition").collect()] == [0, 2]


@pytest.mark.nightly
def test_with_tenants_each_waits_for_itself(spark: SparkSession, tmp_path: Path) -> None:
    cases = tenant_cases(12)
    lake = case_lake(
        spark, settings_for(tmp_path, merge__tenant="g", merge__tenant_max_lag="300ms"), cases
    )
    lake.arrive()
    lake.merge(lake.quick)
    rows = live_rows(spark, lake.settings)
    of_silver = rows.where("waits_for IS NULL").drop("waits_for")
    silver = table_rows(spark, lake.engine.lake, tables.SILVER).where(MERGE_RECORDS)
    silver = silver.select(of_silver.columns)
    assert of_silver.exceptAll(silver).isEmpty()
    assert of_silver.count() == silver.count()
    assert of_silver.where("status = 'waiting' AND position IS NOT NULL").count() > 5
    models = TenantModels(cases, (100, None, 300))
    models.arrive(1.0)
    expected: dict[tuple[int, str | None, str], set[tuple[str, int]]] = {}
    for p, model in models.models.items():
        for source, queue in model.unread().items():
            for _, record in queue:
                if record.key is not None:
                    expected.setdefault((p, record.tenant, record.key), set()).add(
                        (source.source, record.offset)
                    )
    found = {
        (row.partition, row.tenant, row.merge_key): {
            (s, part.offset) for s in SOURCES for part in row[s]
        }
        for row in rows.where("waits_for IS NOT NULL").collect()
    }
    assert found == expected
    assert len(found) > 5


@pytest.mark.nightly
def test_a_catalog_has_it_as_a_view_of_its_own(spark: SparkSession, tmp_path: Path) -> None:
    properties = {"ts": {"type": "integer"}, "k": {"type": "string"}, "a'b": {"type": "integer"}}
    schema = tmp_path / "value.json"
    schema.write_text(json.dumps({"type": "object", "properties": properties}))
    with place_of("spark-catalog", lambda: spark, tmp_path) as place:
        settings = settings_for(tmp_path, **place, sources__orders__schema=str(schema))
        orders = keyed("a", 20, **{"a'b": 7})
        values: dict[str, list[bytes | None]] = {
            "tracking": [keyed("a", 10)],
            "orders": [orders, heartbeat(30)],
        }
        lake = case_lake(spark, settings, {0: Case(values, 100, ["tracking", "orders", "orders"])})
        view = f"spark_catalog.{place['lake']['schema']}.live"
        lake.arrive()
        by_view = f"SELECT merge_key, status, orders[0].value.`a'b` FROM {view} ORDER BY status"
        assert [tuple(row) for row in spark.sql(by_view).collect()] == [("a", "waiting", 7)]
        lake.merge()
        rows = [tuple(row) for row in spark.sql(by_view).collect()]
        assert rows == [("a", "open", None), ("a", "waiting", 7)]
        [waiting] = live_rows(spark, settings).where("status = 'waiting'").collect()
        assert waiting.waits_for == ["tracking"]
        columns = [
            name
            for name in live_rows(spark, settings).columns
            if name not in ("waits_for", "batch")
        ]
        here, there = (
            live_rows(spark, settings).select(*columns),
            spark.table(view).select(*columns),
        )
        assert here.exceptAll(there).isEmpty()
        assert here.count() == there.count()


@pytest.mark.nightly
def test_a_catalog_has_a_view_of_merge_records_as_late_ones_have_corrected_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    with place_of("spark-catalog", lambda: spark, tmp_path) as place:
        corrected = {"topic": "merged-corrections", "within": "1d"}
        settings = settings_for(tmp_path, **place, publish__corrections=corrected)
        values: dict[str, list[bytes | None]] = {
            "tracking": [keyed("a", 0), heartbeat(250), heartbeat(300)],
            "orders": [heartbeat(250), keyed("a", 60), heartbeat(300)],
        }
        arrivals = ["tracking", "tracking", "orders", "orders", "tracking", "orders"]
        lake = case_lake(spark, settings, {0: Case(values, 100, arrivals)})
        view = f"spark_catalog.{place['lake']['schema']}.corrected"
        by_view = f"SELECT merge_key, version, size(tracking), size(orders) FROM {view}"
        lake.arrive(0.5)
        lake.merge()
        assert [tuple(row) for row in spark.sql(by_view).collect()] == [("a", 0, 1, 0)]
        lake.arrive()
        lake.merge()
        assert [tuple(row) for row in spark.sql(by_view).collect()] == [("a", 1, 1, 1)]
