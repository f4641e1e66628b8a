"""Clocks by tenant from one end to the other: kills, changes of the rules, a lost lake, and what
verify says of it all."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client import generate_latest

from tests.support.commands import here
from tests.support.metrics import Exposed
from tests.support.tenant_rivers import FIRST, TenantRiver
from tests.support.tenants import TENANTS, Window, merge_of
from tests.support.topics import consume
from watersmeet.ask.explain import explain
from watersmeet.ask.status import status
from watersmeet.monitoring.metrics import Metrics
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run
from watersmeet.running.sampling import Sampler

pytestmark = [pytest.mark.long, pytest.mark.promise("T4")]

SECOND: Window = (60, None, 800)


@pytest.mark.fault("kill", "rules", oracle=True)
def test_tenants_are_merged_by_their_own_clocks_through_kills_and_changes_of_the_rules(
    kafka: str, tmp_path: Path
) -> None:
    tenants = TenantRiver(kafka, tmp_path, "tenants-through-changes")
    river = tenants.river
    tenants.arrive(0.3)
    for point in ("silver.merge", "silver.done"):
        river.kill_at(point, "--once")
    river.finish()
    tenants.check()
    tenants.arrive(0.6)
    river.kill_at("gold.note", "--once")
    river.finish()
    river.forget_checkpoints()
    tenants.check()

    river.config["merge"] = merge_of(SECOND)
    river.write()
    here(river, "run", "--once", exit_code=2)  # until the change is recorded
    here(river, "evolve", "--apply")
    tenants.models.begin_epoch(SECOND)
    tenants.arrive(0.8)
    river.finish()
    tenants.check()
    tenants.arrive(1.0)
    river.finish()
    tenants.check()

    here(river, "rebuild", "--into", "rebuilt")
    here(river, "verify", "--against", "rebuilt")


@pytest.mark.nightly
def test_rules_change_again_while_a_clock_stands(kafka: str, tmp_path: Path) -> None:
    tenants = TenantRiver(kafka, tmp_path, "tenants-in-haste")
    river, stood = tenants.river, 0
    for number, share in enumerate((0.3, 0.32, 0.35, 1.0)):
        if number:
            rules = SECOND if number % 2 else FIRST
            river.config["merge"] = merge_of(rules)
            river.write()
            here(river, "evolve", "--apply")
            tenants.models.begin_epoch(rules)
        before = {
            p: (model.clock, len(model.waiting)) for p, model in tenants.models.models.items()
        }
        tenants.arrive(share)
        river.finish()
        tenants.check()
        stood += sum(
            (m.clock, len(m.waiting)) != before[p] and m.clock == before[p][0]
            for p, m in tenants.models.models.items()
        )
    assert stood > 0
    here(river, "rebuild", "--into", "rebuilt")
    here(river, "verify", "--against", "rebuilt")


@pytest.mark.fault("lost", oracle=True)
def test_a_lost_lake_with_tenants_is_taken_up_from_the_sink_alone(
    kafka: str, tmp_path: Path
) -> None:
    """Its dead letters are of records that the new one passes over, too."""
    late: dict[str, Any] = {"publish__late_topic": "tenants-lost-late"}
    tenants = TenantRiver(kafka, tmp_path, "tenants-lost", **late)
    river = tenants.river
    tenants.arrive(0.6)
    river.finish()
    shutil.rmtree(str(river.settings.lake))
    river.config["kafka"]["start"] = "sink"
    river.write()
    tenants.arrive(0.8)
    river.finish()
    assert tenants.sequence() == tenants.models.order()
    assert river.broken_promises() == []
    tenants.arrive(1.0)
    river.finish()
    assert tenants.sequence() == tenants.models.order()
    assert river.broken_promises() == []


@pytest.mark.promise("T7")
def test_status_metrics_and_explain_say_what_the_model_and_the_sink_do(
    kafka: str, tmp_path: Path
) -> None:
    tenants = TenantRiver(kafka, tmp_path, "tenants-watched")
    river, settings, partitions = tenants.river, tenants.river.settings, len(tenants.cases)
    metrics = Metrics(settings)
    sampler = Sampler(settings, partitions, ("silver",), river.reader, metrics)
    for share in (0.4, 0.7):
        tenants.arrive(share)
        Run(settings, LAYERS, Reporter(), observers=[metrics, sampler]).once()
    sampler.sample()
    models, seen = tenants.models.models, Exposed(generate_latest(metrics.registry).decode())
    behind = [
        (model.clock or 0) - model.tenant_clock(tenant)
        for model in models.values()
        for tenant in model.tenants()
    ]
    assert (
        seen.value("watersmeet_waiting_rows")
        == sum(len(model.waiting) for model in models.values())
        > 0
    )
    assert (
        seen.value("watersmeet_open_rows") == sum(len(model.open) for model in models.values()) > 0
    )
    assert (
        seen.value("watersmeet_tenants")
        == len({tenant for model in models.values() for tenant in model.tenants()})
        == 4
    )
    assert seen.value("watersmeet_tenant_lag_seconds") == max(behind) / 1000
    assert not set(TENANTS) & {value for _, labels, _ in seen.samples for value in labels.values()}
    for row in status(river.reader, settings)["partitions"]:
        model = models[row["partition"]]
        slowest = min(
            ((model.tenant_clock(tenant), tenant) for tenant in model.tenants()), default=None
        )
        assert (row["waiting"], row["tenants"]) == (len(model.waiting), len(model.tenants()))
        assert row["slowest"] == (
            None if slowest is None else {"tenant": slowest[1], "clock": slowest[0]}
        )
    sink = {
        dict(m.headers())["watersmeet.id"].decode(): m
        for m in consume(kafka, river.sink, partitions)
    }
    places = {}
    for key in "ab":
        for record in explain(river.reader, settings, key)["records"]:
            if record["status"] == "timed_out":
                tenant = quote(record["tenant"], safe="")
                places[f"{record['partition']}/{record['event_time']}/{tenant}/{key}"] = record[
                    "published"
                ]
    assert places == {
        id: {
            "partition": m.partition(),
            "offset": m.offset(),
            "seq": int(dict(m.headers())["watersmeet.seq"]),
        }
        for id, m in sink.items()
    }
    assert len(places) > 20
