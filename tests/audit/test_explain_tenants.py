"""`explain` on lakes with tenants: whose each record is, where it stands in its tenant, and why it
waits or is late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.audit.test_verify_tenants import KNOWN, settings_of
from tests.support.cases import SOURCES, Case, as_record
from tests.support.configurations import settings_for
from tests.support.inputs import record_of
from tests.support.merges import heads_by_tenant
from tests.support.model_lakes import ModelLake
from tests.support.tenants import TenantModels, case_of_records, tenant_case
from watersmeet.ask.explain import explain
from watersmeet.audit.show import explain_view
from watersmeet.errors import ConfigurationError

pytestmark = pytest.mark.promise("T7")


KEYS = ("a", "b")


def merged_lake(
    folder: Path, cases: dict[int, Case], *shares: float, lag_ms: int = 1000, **overrides: Any
) -> ModelLake:
    lake = ModelLake(settings_of(folder, lag_ms=lag_ms, **overrides), cases)
    lake.decide()
    for share in shares or (1.0,):
        lake.arrive(share)
        lake.merge()
    return lake


def positions(case: Case, lag_ms: int) -> dict[tuple[str, int], int]:
    """By source and offset where a record stands in its tenant, by definition."""
    found = {}
    for source in SOURCES:
        records = [
            as_record(source, offset, value) for offset, value in enumerate(case.values[source])
        ]
        for i, record in enumerate(records):
            at = heads_by_tenant([each for each in records[: i + 1] if each is not None], lag_ms)[
                source
            ]
            found[source, i] = at.get(record.tenant, at[None]) if record is not None else -1
    return found


@pytest.mark.long
def test_what_is_told_of_a_key_is_the_merge_models(tmp_path: Path) -> None:
    cases = {p: tenant_case(p) for p in range(5)}
    lake = merged_lake(tmp_path, cases, 0.3, 0.7, 1.0, lag_ms=300)
    models = TenantModels(cases, (100, None, 300))
    models.arrive(1.0)
    at = {p: positions(case, 300) for p, case in cases.items()}
    told = {key: explain(lake.reader, lake.settings, key) for key in KEYS}
    records: list[tuple[Any, ...]] = []
    late: list[tuple[Any, ...]] = []
    waiting: list[tuple[Any, ...]] = []
    for p, model in models.models.items():
        for status, rows in (("open", model.open.values()), ("timed_out", model.timed_out)):
            for r in rows:
                due = model.rules.due(r.event_time, r.last_event_time)
                closed_at = None if status == "open" else r.closed_at
                in_order = [(s, part) for s, mine in r.parts.items() for part in sorted(mine)]
                in_order.sort(key=lambda named: named[1].event_time)
                parts = [(s, part.offset, at[p][s, part.offset]) for s, part in in_order]
                records.append((r.key, p, r.event_time, r.tenant, status, due, closed_at, parts))
        late += [
            (e.record.key, p, e.record.input.source, e.record.offset, e.record.tenant, e.position)
            for e in model.late
        ]
        waiting += [(r.key, p, r.input.source, r.offset, r.tenant, v) for v, r in model.waiting]
        waiting += [
            (r.key, p, s.source, r.offset, r.tenant, None)
            for s, mine in model.unread().items()
            for _, r in mine
            if r.key
        ]
    found = [
        (
            key,
            r["partition"],
            r["event_time"],
            r["tenant"],
            r["status"],
            r["due"],
            r["closed_at"],
            parts,
        )
        for key in KEYS
        for r in told[key]["records"]
        for parts in [[(part["source"], part["offset"], part["position"]) for part in r["parts"]]]
    ]
    assert found == sorted(records, key=lambda row: row[:4])
    assert _places(told, "late") == sorted(late, key=repr)
    assert _places(told, "waiting") == sorted(waiting, key=repr)
    assert min(len(found), len(late), len(waiting)) > 10


def _places(told: dict[str, dict[str, Any]], name: str) -> list[tuple[Any, ...]]:
    columns = ("partition", "source", "offset", "tenant", "position")
    return sorted(
        ((key, *(row[c] for c in columns)) for key in KEYS for row in told[key][name]), key=repr
    )


@pytest.mark.nightly
@pytest.mark.long
def test_of_one_tenant_alone_there_is_nothing_of_others(tmp_path: Path) -> None:
    lake = merged_lake(tmp_path, {p: tenant_case(p) for p in range(12)}, lag_ms=300)
    everything = explain(lake.reader, lake.settings, "a")
    tenants = {row["tenant"] for name in ("records", "late", "waiting") for row in everything[name]}
    for tenant in tenants:
        found = explain(lake.reader, lake.settings, "a", tenant=tenant)
        for name in ("records", "late", "waiting"):
            assert found[name] == [row for row in everything[name] if row["tenant"] == tenant]
    assert len(tenants) == 4
    assert explain(lake.reader, lake.settings, "a", tenant="nobody")["records"] == []


def test_a_tenant_where_there_are_none_is_a_clear_error(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    lake = ModelLake(settings, {0: case_of_records([])})
    with pytest.raises(ConfigurationError, match="--tenant: this lake has no tenants"):
        explain(lake.reader, settings, "a", tenant="x")


def time(ms: int) -> str:
    return f"1970-01-01 00:00:{ms / 1000:06.3f}Z"


def test_it_says_why_a_record_waits_is_open_closed_or_late(tmp_path: Path) -> None:
    more = [("tracking", 4150, "F", "q"), ("orders", 6000, "G", "x"), ("orders", 4700, "C", "y")]
    arrivals = [
        record_of(source, 0, at, key, tenant) for source, at, key, tenant in [*KNOWN, *more]
    ]
    lake = merged_lake(tmp_path, {0: case_of_records(arrivals)})

    def told(key: str, name: str) -> list[str]:
        return [row["reason"] for row in explain(lake.reader, lake.settings, key)[name]]

    behind = f"{time(4420)}, held by tracking; the clock of all is {time(5300)}"
    assert told("B", "records") == [
        "open: times out once the clock of tenant 'y' has passed event time + timeout "
        f"({time(4500)}); it is {behind}"
    ]
    assert told("D", "records") == [
        "open: times out once the clock of tenant 'z' has passed event time + timeout "
        f"({time(4350)}); "
        f"it is {time(4300)}, held by orders and tracking; the clock of all is {time(5300)}"
    ]
    assert told("A", "records") == [
        f"timed out in batch 0, at the clock {time(5300)}: the clock of tenant 'x' passed event "
        f"time + timeout ({time(5100)}) "
        f"when the clock of all came to {time(5101)}; not published yet"
    ]
    assert told("C", "waiting") == [
        f"read at {time(4525)} of tenant 'y', whose clock is {behind}",
        "the clock of all has not come to it",
    ]
    assert told("E", "late") == [
        f"late: before {time(4425)}, which is the position of tenant 'y', {time(4525)}, less the "
        "timeout"
    ]
    assert told("F", "late") == [
        f"late: before {time(4200)}, which is the position of tenant 'q', {time(4300)}, less the "
        "timeout; "
        f"that is as far behind the position of all, {time(5300)}, as merge.tenant_max_lag lets it "
        "be"
    ]
    assert told("G", "waiting") == ["the clock of all has not come to it"]
    console = Console(width=300, record=True)
    for key in "BCF":
        console.print(explain_view(explain(lake.reader, lake.settings, key)))
    shown = console.export_text()
    assert "partition 0 · tenant 'y' · 1970-01-01 00:00:04.400Z to" in shown
    assert f"tracking[0]@3: read at {time(4525)} of tenant 'y'" in shown
    assert "tracking[0]@6: late: before" in shown


def test_as_of_a_version_it_is_as_it_was_then(tmp_path: Path) -> None:
    arrivals = [record_of(source, 0, at, key, tenant) for source, at, key, tenant in KNOWN]
    ends = [record_of(source, 0, 9000, None, None) for source in SOURCES]
    lake = merged_lake(tmp_path, {0: case_of_records([*arrivals, *ends])}, 10 / 12, 1.0)
    now = explain(lake.reader, lake.settings, "C")
    then = explain(lake.reader, lake.settings, "C", lake.reader.version("silver") - 1)
    assert [row["status"] for row in now["records"]] == ["timed_out"]
    assert now["waiting"] == then["records"] == []
    assert then["waiting"][0]["reason"].startswith(
        f"read at {time(4525)} of tenant 'y', whose clock is {time(4420)}, held by tracking"
    )


def test_positions_are_those_after_an_idle_decision(tmp_path: Path) -> None:
    """What a decision told a tenant is its own; any other is as far behind as may be."""
    decision = record_of("orders", -1, 5300, None, None, {"x": 5300, "y": 5000})
    arrivals = [
        record_of("orders", 0, 3000, "k", "y"),
        record_of("tracking", 0, 5000, "k", "y"),
        record_of("tracking", 0, 5300, "k", "x"),
    ]
    later = [
        record_of("orders", 0, 4960, "k", "y"),
        record_of("orders", 0, 4960, "k", "z"),
        record_of("tracking", 0, 5400, None, "x"),
    ]
    lake = merged_lake(tmp_path, {0: case_of_records([*arrivals, decision, *later])}, 0.5, 1.0)
    found = explain(lake.reader, lake.settings, "k")
    at = {
        (row["tenant"], p["source"], p["offset"]): p["position"]
        for row in found["records"]
        for p in row["parts"]
    }
    at |= {
        (row["tenant"], row["source"], row["offset"]): row["position"] for row in found["waiting"]
    }
    assert at["y", "orders", 1] == 5000
    assert at["z", "orders", 2] == 4960
    assert at["x", "tracking", 1] == 5300
