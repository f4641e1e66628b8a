"""With clocks by tenant, silver on every engine is what the merge model says, through restarts and
changes of the rules."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.laws.conftest import QUICK, MakeLake
from tests.laws.test_idle import Clock, Quiet
from tests.laws.test_touched import Forgetful
from tests.support.cases import Case, heartbeat, keyed, rich_cases
from tests.support.crashes import CrashError, dying_at
from tests.support.inputs import record_of
from tests.support.lakes import CaseLake, decisions_of
from tests.support.tenants import TenantModels, Window, late_of, merge_of, silver_of, tenant_cases
from watersmeet.core.idle import IdleDecision
from watersmeet.core.sequence import message_id
from watersmeet.errors import MissingRecordsError
from watersmeet.lake import tables
from watersmeet.lake.identity import begin_epoch
from watersmeet.settings import Settings

pytestmark = pytest.mark.promise("T3")

CASES = tenant_cases(10)


def with_rules(settings: Settings, rules: Window) -> Settings:
    values = merge_of(rules)
    return settings.model_copy(
        update={"merge": type(settings.merge).model_validate(values, context={"folder": None})}
    )


def change_rules(lake: CaseLake, models: TenantModels, rules: Window) -> None:
    """An epoch begins, for the lake and for the models."""
    lake.settings = with_rules(lake.settings, rules)
    begin_epoch(lake.reader, lake.engine.append, lake.settings, lake.plans[-1].batch + 1)
    models.begin_epoch(rules)


def merged(lake: CaseLake, models: TenantModels, *shares: float) -> None:
    for share in shares:
        lake.arrive(share)
        lake.merge()
    models.arrive(shares[-1])


@pytest.mark.fault("cuts", oracle=True)
def test_silver_is_what_the_model_makes_of_tenants_and_what_waits_is_a_row(
    new_lake: MakeLake, kind: str
) -> None:
    rules = (100, 250, 300)
    lake, models = new_lake(CASES, merge=merge_of(rules)), TenantModels(CASES, rules)
    for share in (0.1, 0.3, 0.35, 0.7, 1.0) if kind == QUICK else (0.4, 1.0):
        merged(lake, models, share)
        assert silver_of(lake.reader) == models.silver()
        assert late_of(lake.reader) == models.late()
    assert sum(row[3] == "waiting" for row in models.silver()) > 10
    assert len(models.late()) > 10


@pytest.mark.fault("rules", oracle=True)
def test_a_change_of_window_and_lag_judges_again_what_waits(new_lake: MakeLake, kind: str) -> None:
    steps: list[tuple[float, Window]] = [
        (0.3, (100, None, 300)),
        (0.6, (30, 90, 1000)),
        (0.8, (150, 400, 50)),
        (1.0, (80, None, 500)),
    ]
    lake, models = new_lake(CASES, merge=merge_of(steps[0][1])), TenantModels(CASES, steps[0][1])
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    for number, (share, rules) in enumerate(steps if kind == QUICK else steps[:2]):
        if number:
            change_rules(lake, models, rules)
        merged(lake, models, share - 0.1, share)
        assert late_of(lake.reader) == models.late()
        assert silver_of(lake.reader) == models.silver()
    assert lake.reader.exists(tables.LATE)


STANDING: dict[str, list[Window]] = {
    "timeouts": [(gap, None, None) for gap in (100, 300, 30, 1, 99, 40, 10, 1, 200)],
    "windows": [
        *((100, 100, None), (30, 400, None), (100, 150, None), (1, 2, None), (30, 30, None)),
        *((60, 90, None), (10, 90, None), (1, 2, None), (100, 300, None)),
    ],
    "tenants": [
        *((100, None, 300), (30, 90, 1000), (150, 400, 50), (80, None, 500), (1, 2, 0)),
        *((100, 150, 100), (30, 90, 100), (30, 90, 30), (80, None, 300)),
    ],
}


@pytest.mark.promise("C6")
@pytest.mark.fault("rules", oracle=True)
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("name", STANDING)
def test_silver_and_the_order_of_messages_are_the_models_where_clocks_stand_through_changes(
    new_lake: MakeLake, kafka: str, name: str
) -> None:
    """Each change has a batch, twice four at one clock, and what can be published is published
    after each."""
    windows = STANDING[name]
    cases = CASES if name == "tenants" else rich_cases(30)
    cases = {p: ended(case) for p, case in cases.items()}
    topic = f"laws-standing-{name}"
    own = {"bootstrap": kafka, "publish__topic": topic, "name": topic}
    lake = new_lake(cases, merge=merge_of(windows[0]), **own)
    models = TenantModels(cases, windows[0])
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    merged(lake, models, 0.4)
    beyond = 0
    for number, window in enumerate(windows[1:], start=1):
        before = lake.settings.merge
        lake.settings = with_rules(lake.settings, window)
        lake.settings = lake.settings.model_copy(
            update={"merge": lake.settings.merge.after(before)}
        )
        begin_epoch(lake.reader, lake.engine.append, lake.settings, lake.plans[-1].batch + 1)
        models.begin_epoch(window)
        share = 0.4 if number < 5 else 0.7
        merged(lake, models, share)
        beyond += sum(m.epoch_start > (m.clock or 0) for m in models.models.values())
        assert silver_of(lake.reader) == models.silver()
        assert late_of(lake.reader) == models.late()
        lake.publish()
    merged(lake, models, 1.0)
    lake.publish()
    assert beyond > 10
    sent = lake.messages()
    for p, model in models.models.items():
        order = sorted(
            model.timed_out, key=lambda r: (r.closed_at, r.tenant.encode(), r.due, r.key.encode())
        )
        assert [message.id for message in sent if message.partition == p] == [
            message_id(p, row.event_time, row.key, row.tenant) for row in order
        ]


def ended(case: Case) -> Case:
    """A case after which heartbeats close all that is open."""
    values = {source: [*mine, heartbeat(100_000)] for source, mine in case.values.items()}
    return replace(case, values=values, arrivals=[*case.arrivals, *values])


@pytest.mark.promise("N34")
@pytest.mark.fault("kill", "rules")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("is_made", [False, True], ids=["before", "after"])
def test_what_waited_and_is_late_is_told_once_although_no_older_version_is_left(
    new_lake: MakeLake, is_made: bool
) -> None:
    """A crash before or after the first batch of an epoch, and then a vacuum that leaves the last
    versions alone."""
    before, after = (100, None, 300), (30, 90, 50)
    lake, models = new_lake(CASES, merge=merge_of(before)), TenantModels(CASES, before)
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    merged(lake, models, 0.5)
    known = len(models.late())
    change_rules(lake, models, after)
    lake.arrive(0.55)
    for _ in range(1 if is_made else 2):
        dying = dying_at(lake.engine, "merge", tables.SILVER, after=is_made)
        with pytest.raises(CrashError):
            lake.start(engine=dying).drain().__next__()
        DeltaTable(lake.engine.lake.address(tables.SILVER)).vacuum(
            0, dry_run=False, enforce_retention_duration=False
        )
    lake.merge()
    models.arrive(0.55)
    assert late_of(lake.reader) == models.late()
    assert silver_of(lake.reader) == models.silver()
    assert len(models.late()) > known
    merged(lake, models, 1.0)
    assert late_of(lake.reader) == models.late()


@pytest.mark.fault("rules", oracle=True)
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("merge_bytes", [64 * 2**20, 1], ids=["at once", "in chunks"])
@pytest.mark.parametrize("lag", [0, 1])
def test_other_rules_alone_close_rows_of_a_partition_that_has_no_new_records(
    new_lake: MakeLake, lag: int, merge_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [keyed("a", 1000, g="x"), heartbeat(1050, g="x")]
    case = Case({"tracking": [*both], "orders": [*both]}, 100, ["tracking", "orders"] * 2)
    lake = new_lake({0: case}, merge=merge_of((100, None, lag)))
    models = TenantModels({0: case}, (100, None, lag))
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    merged(lake, models, 1.0)
    assert [row[3] for row in silver_of(lake.reader)] == ["open"]
    change_rules(lake, models, (10, None, lag))
    models.arrive(1.0)
    monkeypatch.setattr(lake.engine, "merge_bytes", merge_bytes)
    assert lake.merge() == 1
    assert [row[3] for row in silver_of(lake.reader)] == ["timed_out"]
    assert silver_of(lake.reader) == models.silver()


@pytest.mark.fault("rules", "silence", oracle=True)
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_what_waited_behind_a_decision_and_is_late_by_other_rules_is_told(
    new_lake: MakeLake,
) -> None:
    """No record has the time of its position."""
    tracking = [keyed("a", 5000, g="y"), heartbeat(6000, g="x"), keyed("b", 5900, g="y")]
    orders = [keyed("c", 4500, g="y"), keyed("k", 5850, g="y")]
    arrivals = ["orders", *["tracking"] * 3, "orders"]
    case = Case({"tracking": [*tracking], "orders": [*orders]}, 100, arrivals)
    before, after = (100, None, 1000), (30, None, 1000)
    lake = new_lake({0: case}, merge={**merge_of(before), "idle_after": "10s"})
    models, clock = TenantModels({0: case}, before), Clock()
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    silver = lake.start(Quiet(lake.settings, 10_000, now_s=clock))
    lake.arrive(4 / 5)
    lake.plans += silver.drain()
    clock.now = 10.0
    lake.plans += silver.drain()
    [decision] = decisions_of(lake.reader)["orders", 0]
    told = dict(decision.tenant_times)
    models.arrive(4 / 5)
    models.models[0].arrive(record_of("orders", -1, 6000, tenant=None, tenant_times=told))
    models.models[0].advance()
    merged(lake, models, 1.0)
    assert silver_of(lake.reader) == models.silver()
    assert [row[3] for row in models.silver() if row[2] == "k"] == ["waiting"]
    change_rules(lake, models, after)
    merged(lake, models, 1.0)
    assert late_of(lake.reader) == models.late()
    assert silver_of(lake.reader) == models.silver()


@pytest.mark.fault("rules", "commits", oracle=True)
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_of_what_waits_an_epoch_reads_again_what_is_late_by_its_rules_alone(
    new_lake: MakeLake,
) -> None:
    """And merges nothing where it is gone."""
    slow = [keyed(key, time, g="y") for key, time in (("a", 1050), ("b", 1000), ("c", 1060))]
    tracking = [*slow, *(keyed("a", time, g="x") for time in range(2000, 8001, 100))]
    orders, arrivals = [heartbeat(8000, g="x")], [*["tracking"] * len(tracking), "orders"]
    case = Case({"tracking": [*tracking], "orders": [*orders]}, 100, arrivals)
    before, after = (100, None, 10_000), (30, None, 10_000)
    lake, models = new_lake({0: case}, merge=merge_of(before)), TenantModels({0: case}, before)
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    merged(lake, models, 1.0)
    assert sum(row[3] == "waiting" for row in silver_of(lake.reader)) == 3
    change_rules(lake, models, after)
    models.arrive(1.0)
    what = "bronze of tracking has lost records: 1 of 1 that wait"
    with pytest.raises(MissingRecordsError, match=what):
        lake.merge(Forgetful(lake.engine, lambda _, rows: rows.slice(0, 0)))
    read = []

    def noting(_: str, rows: pa.Table) -> pa.Table:
        read.extend(rows["offset"].to_pylist())
        return rows

    lake.merge(Forgetful(lake.engine, noting))
    assert read == [1]
    assert late_of(lake.reader) == models.late()
    assert silver_of(lake.reader) == models.silver()


@pytest.mark.fault("jumps")
def test_a_jump_closes_what_is_open_and_what_waits_and_begins_with_fresh_clocks(
    new_lake: MakeLake, kind: str
) -> None:
    """Forward in some partitions, back to the beginning in others."""
    rules = (100, 250, 300)
    lake, before = new_lake(CASES, merge=merge_of(rules)), TenantModels(CASES, rules)
    merged(lake, before, 0.5)
    cursors = lake.start().recover().state.cursors
    to = {tp: 0 if tp.partition % 2 else at.next_offset + 1 for tp, at in cursors.items()}
    lake.jump(to)
    closed = [
        (*row[:3], "timed_out", *row[4:6], None, None, None, row[9])
        for row in before.silver()
        if row[3] != "timed_out"
    ]
    kept = [row for row in before.silver() if row[3] == "timed_out"]
    assert sorted(silver_of(lake.reader), key=repr) == sorted(closed + kept, key=repr)

    merged(lake, before, 1.0)
    anew = TenantModels(
        CASES, rules, {(tp.input.source, tp.partition): offset for tp, offset in to.items()}
    )
    anew.arrive(1.0)
    assert silver_of(lake.reader) == sorted(closed + kept + anew.silver(), key=repr)


@pytest.mark.fault("silence")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_decision_about_a_silent_source_tells_each_tenant_its_own_time(
    new_lake: MakeLake,
) -> None:
    """One source falls silent; a tenant that is behind on the other one is not late when its
    records of the first come."""
    tracking: list[bytes | None] = [
        keyed("a", 5000, g="x"),
        keyed("a", 4800, g="y"),
        heartbeat(6000, g="x"),
        keyed("b", 5100, g="y"),
    ]
    orders: list[bytes | None] = [
        keyed("a", 4900, g="x"),
        *(keyed(key, time, g="y") for key, time in (("a", 4850), ("b", 5050))),
    ]
    case = Case(
        {"tracking": tracking, "orders": orders},
        100,
        [*["orders"], *["tracking"] * 4, *["orders"] * 2],
    )
    rules = (100, None, 2000)
    lake, models = (
        new_lake({0: case}, merge={**merge_of(rules), "idle_after": "10s"}),
        TenantModels({0: case}, rules),
    )
    clock = Clock()
    silver = lake.start(Quiet(lake.settings, 10_000, now_s=clock))
    lake.arrive(5 / 7)
    list(silver.drain())
    clock.now = 10.0
    list(silver.drain())
    [decision] = decisions_of(lake.reader)["orders", 0]
    assert decision == IdleDecision(0, 6000, (("x", 6000), ("y", 5100)))
    models.arrive(5 / 7)
    models.models[0].arrive(
        record_of("orders", -1, 6000, tenant=None, tenant_times=dict(decision.tenant_times))
    )
    models.models[0].advance()
    assert silver_of(lake.reader) == models.silver()
    merged(lake, models, 1.0)
    assert silver_of(lake.reader) == models.silver()
    assert (
        [row[4:] for row in late_of(lake.reader)]
        == [row[4:] for row in models.late()]
        == [("a", 4850, 5100)]
    )


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_decision_is_written_for_tenants_whose_time_it_raises_alone(new_lake: MakeLake) -> None:
    """A source that is silent for long would have each of its tenants again in every decision."""
    beats = [keyed("a", 5000, g="x"), keyed("a", 5000, g="y"), heartbeat(6000, g="x")]
    beats += [heartbeat(7000, g="y"), heartbeat(8000, g="y")]
    case = Case(
        {"tracking": [*beats], "orders": [keyed("a", 4900, g="x")]},
        100,
        ["orders", *["tracking"] * len(beats)],
    )
    rules = (100, None, 10_000)
    lake, clock = new_lake({0: case}, merge={**merge_of(rules), "idle_after": "10s"}), Clock()
    silver = lake.start(Quiet(lake.settings, 10_000, now_s=clock))
    for share in (4, 5, 6):
        lake.arrive(share / 6)
        for _ in range(2):
            list(silver.drain())
            clock.now += 10
    list(silver.drain())
    assert decisions_of(lake.reader)["orders", 0] == [
        IdleDecision(0, 6000, (("x", 6000), ("y", 5000))),
        IdleDecision(0, 7000, (("y", 7000),)),
        IdleDecision(0, 8000, (("y", 8000),)),
    ]
    there, again = silver.recover().state, lake.start().recover().state
    heads = (sorted(each.heads.to_pylist(), key=repr) for each in (there, again))
    assert next(heads) == next(heads), "a start finds what the run has in memory"
    assert again.clocks == there.clocks == {0: 8000}
    model = TenantModels({0: case}, rules)
    model.arrive(1.0)
    for decision in decisions_of(lake.reader)["orders", 0]:
        told = dict(decision.tenant_times)
        model.models[0].arrive(
            record_of("orders", 0, decision.event_time, tenant=None, tenant_times=told)
        )
    model.models[0].advance()
    assert silver_of(lake.reader) == model.silver()
