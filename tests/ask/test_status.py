"""`status` on lakes of the merge model: what it says is the model's, with and without a broker,
fast and without a JVM."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.cases import SOURCES, Case, heartbeat, keyed, random_case
from tests.support.configurations import settings_for
from tests.support.inputs import record_of
from tests.support.model_lakes import ModelLake
from tests.support.tenants import TenantModels, case_of_records, tenant_case
from tests.support.timing import within
from tests.support.topics import create_topics, produce
from watersmeet.ask.status import status
from watersmeet.audit.show import status_view
from watersmeet.core.idle import IdleDecision
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
from watersmeet.lake.published import topic_columns

AWAY_S = 0.5


def merged_lake(folder: Path, cases: dict[int, Case], **overrides: object) -> ModelLake:
    lake = ModelLake(settings_for(folder, **overrides), cases)  # type: ignore[arg-type]
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
    return lake


@pytest.mark.parametrize(
    "seeds", [range(6), range(20, 40)], ids=["few partitions", "more than one condition holds"]
)
def test_what_it_says_is_the_models(tmp_path: Path, seeds: range) -> None:
    cases = {p: random_case(seed) for p, seed in enumerate(seeds)}
    lake = merged_lake(tmp_path, cases)
    noted = {
        "first_seq": 0,
        "last_seq": 6,
        "last_event_time": 1,
        "last_key": "a",
        "last_due": 101,
        "last_closed_at": 102,
        "last_tenant": "",
        "committed_at": 2,
        **topic_columns("merged (1.2)"),
    }
    lake.write(tables.PUBLISHED, [{"partition": 2, **noted}])
    found = {p["partition"]: p for p in status(lake.reader, lake.settings, AWAY_S)["partitions"]}
    for partition, case in cases.items():
        model, shown = case.merged(), found[partition]
        assert shown["clock"] == model.clock
        assert (shown["open"], shown["timed_out"], shown["late"]) == (
            len(model.open),
            len(model.timed_out),
            len(model.late),
        )
        assert shown["published"] == (7 if partition == 2 else 0)
        refused = sum(
            1
            for row in lake.reader.select("quarantine", ["partition"])["partition"].to_pylist()
            if row == partition
        )
        assert shown["quarantined"] == refused
        heads = {input_id.source: head for input_id, head in model.heads.items()}
        unread = {input_id.source: records for input_id, records in model.unread().items()}
        for source in SOURCES:
            at = shown["sources"][source]
            assert at["head"] == heads.get(source)
            assert at["lead"] == (
                None if model.clock is None or at["head"] is None else at["head"] - model.clock
            )
            is_held = bool(unread.get(source)) and (
                model.clock is None or heads[source] > model.clock
            )
            assert at["state"] == (
                "waiting" if at["head"] is None else "held" if is_held else "active"
            )
            passed = [
                offset
                for offset in range(len(case.values[source]))
                if offset >= lake.until[lake.tp_of(source, partition)]
            ]
            assert at["lag"] == len(passed)


def test_before_anything_is_merged_what_waits_in_bronze_is_told(tmp_path: Path) -> None:
    lake = ModelLake(
        settings_for(tmp_path),
        {
            0: Case(
                {"tracking": [keyed("a", 5), keyed("a", 9)], "orders": []}, 100, ["tracking"] * 2
            )
        },
    )
    lake.arrive()
    [partition] = status(lake.reader, lake.settings, AWAY_S)["partitions"]
    assert partition["clock"] is None
    assert partition["sources"] == {
        "tracking": {"head": 9, "lead": None, "lag": 2, "state": "held"},
        "orders": {"head": None, "lead": None, "lag": 0, "state": "waiting"},
    }


def test_where_the_idle_policy_has_spoken_last_the_source_is_idle(tmp_path: Path) -> None:
    values = {"tracking": [keyed("i", t) for t in (10, 50, 200, 400)], "orders": [keyed("i", 20)]}
    case = Case(
        values,  # type: ignore[arg-type]
        100,
        ["tracking"] * 4 + ["orders"],
        {"orders": [IdleDecision(0, 200), IdleDecision(0, 400)]},
    )
    lake = ModelLake(settings_for(tmp_path), {0: case})
    lake.arrive()
    lake.decide()
    lake.merge()
    [partition] = status(lake.reader, lake.settings, AWAY_S)["partitions"]
    assert (partition["clock"], partition["sources"]["orders"]["state"]) == (400, "idle")
    assert partition["sources"]["orders"]["head"] == 400


def test_what_kafka_has_beyond_bronze_lags(kafka: str, tmp_path: Path) -> None:
    topics = {f"sources__{name}__topic": f"status_{name}" for name in SOURCES}
    create_topics(kafka, *topics.values(), partitions=2)
    cases = {
        0: Case(
            {"tracking": [keyed("a", 5)], "orders": [heartbeat(7)]}, 100, ["tracking", "orders"]
        )
    }
    lake = merged_lake(tmp_path, cases, bootstrap=kafka, **topics)
    produce(kafka, "status_tracking", [(0, keyed("a", 5)), (0, keyed("b", 6)), (1, keyed("c", 6))])
    produce(kafka, "status_orders", [(0, heartbeat(7))])
    first, second = status(lake.reader, lake.settings)["partitions"]
    assert first["sources"]["tracking"] == {"head": 5, "lead": 0, "lag": 1, "state": "active"}
    assert first["sources"]["orders"] == {"head": 7, "lead": 2, "lag": 1, "state": "held"}
    assert second["sources"]["tracking"] == {
        "head": None,
        "lead": None,
        "lag": 1,
        "state": "waiting",
    }


def test_without_a_lake_and_a_broker_there_is_nothing_to_say(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_for(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert status(DeltaRsReader(Lake(settings)), settings, AWAY_S) == {
            "partitions": [],
            "quality": [],
        }
    assert "records that are not in bronze yet are not counted" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_without_the_broker_it_answers_within_four_seconds(tmp_path: Path) -> None:
    lake = merged_lake(tmp_path, {0: random_case(3)})
    with within(4):
        status(lake.reader, lake.settings)


@pytest.mark.parametrize(
    "module",
    ["ask.status", "ask.sql", "ask.explain", "audit.verify", "audit.rebuild", "audit.show"],
)
def test_nothing_of_spark_is_imported(module: str) -> None:
    foreign = "{'pyspark', 'py4j', 'delta'} & {name.split('.')[0] for name in sys.modules}"
    code = f"import sys, watersmeet.{module}; sys.exit(bool({foreign}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- tenants


def test_of_tenants_it_says_who_is_behind_and_who_is_ahead(tmp_path: Path) -> None:
    """The worked example of the rules, before its end; and a partition of which nothing is known
    yet."""
    arrivals = [
        *[
            record_of("tracking", 0, 5000, "A", "x"),
            record_of("orders", 0, 4400, "B", "y"),
            record_of("orders", 0, 5010, "A", "x"),
        ],
        *[
            record_of("tracking", 0, 4420, "B", "y"),
            record_of("tracking", 0, 5300, None, "x"),
            record_of("orders", 0, 4600, None, "y"),
        ],
        *[
            record_of("orders", 0, 5350, None, "x"),
            record_of("tracking", 0, 4525, "C", "y"),
            record_of("tracking", 0, 4250, "D", "z"),
        ],
    ]
    cases = {0: case_of_records(arrivals), 1: case_of_records([])}
    lake = merged_lake(tmp_path, cases, merge__tenant="g", merge__tenant_max_lag="1s")
    first, second = status(lake.reader, lake.settings, AWAY_S)["partitions"]
    assert (first["clock"], first["open"], first["waiting"], first["timed_out"]) == (5300, 2, 1, 1)
    assert (first["tenants"], first["slowest"]) == (2, {"tenant": "z", "clock": 4300})
    assert first["leading"] == {"tenant": "x", "source": "orders", "head": 5350}
    assert (second["waiting"], second["tenants"], second["slowest"], second["leading"]) == (
        0,
        0,
        None,
        None,
    )
    console = Console(width=200, record=True)
    console.print(status_view(status(lake.reader, lake.settings, AWAY_S)))
    shown = console.export_text()
    assert "open 2 · waiting 1 · timed out 1" in shown
    assert "tenants 2 · slowest 'z' 1s behind the clock · leading 'x' 50ms ahead on orders" in shown


@pytest.mark.promise("T7")
@pytest.mark.parametrize("seed", range(3))
def test_the_slowest_tenant_is_the_models(tmp_path: Path, seed: int) -> None:
    cases = {p: tenant_case(100 * seed + p) for p in range(12)}
    lake, models = (
        ModelLake(settings_for(tmp_path, merge__tenant="g", merge__tenant_max_lag="300ms"), cases),
        TenantModels(cases, (100, None, 300)),
    )
    for share in (0.4, 1.0):
        lake.arrive(share)
        lake.merge()
        models.arrive(share)
        for row in status(lake.reader, lake.settings, AWAY_S)["partitions"]:
            model = models.models[row["partition"]]
            tenants = model.tenants()
            assert (row["tenants"], row["waiting"]) == (len(tenants), len(model.waiting))
            slowest = min(
                ((model.tenant_clock(tenant), tenant) for tenant in tenants), default=None
            )
            assert row["slowest"] == (
                None if slowest is None else {"tenant": slowest[1], "clock": slowest[0]}
            )


def test_who_leads_is_nobody_where_the_idle_policy_or_a_heartbeat_of_all_does(
    tmp_path: Path,
) -> None:
    of_all = [
        record_of("tracking", 0, 50, "k", "x"),
        record_of("tracking", 0, 90, None, None),
        record_of("orders", 0, 60, None, "x"),
    ]
    decided = [
        record_of("tracking", 0, 50, "k", "x"),
        record_of("orders", -1, 50, None, None, {"x": 50}),
    ]
    lake = merged_lake(
        tmp_path,
        {0: case_of_records(of_all), 1: case_of_records(decided)},
        merge__tenant="g",
        merge__tenant_max_lag="1s",
    )
    lake.decide()
    lake.merge()
    first, second = status(lake.reader, lake.settings, AWAY_S)["partitions"]
    assert first["leading"] == {"tenant": None, "source": "tracking", "head": 90}
    assert second["leading"] == {"tenant": "x", "source": "tracking", "head": 50}
