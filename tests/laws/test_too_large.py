"""A merge record may be too large: all of its records are excess, and it costs no batch more than
its counters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.audit.inputs import problems_in
from tests.audit.test_show import read
from tests.laws.conftest import QUICK, SPARK_FOLDER, MakeLake, one_of
from tests.laws.test_corrections import corrections
from tests.laws.test_forget import KEY, SHARE, erase, without_key
from tests.laws.test_retention import KEEP, PARTITIONS, broken, let_go, long_case, steps
from tests.support.cases import (
    SOURCES,
    Case,
    cases_with_ids,
    expected_duplicates,
    expected_excess,
    expected_late,
    expected_silver,
    heartbeat,
    keyed,
    rich_cases,
)
from tests.support.configurations import IDS, settings_for
from tests.support.effort import first_then_nightly
from tests.support.rewrites import rewrite_open_records, rewrites_of
from watersmeet.ask.explain import explain
from watersmeet.ask.status import status
from watersmeet.audit.rebuild import rebuild, rebuilt_settings, verify_against
from watersmeet.audit.show import explain_view
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.history import read_history
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.location import Lake
from watersmeet.running.batch_rows import BatchRows
from watersmeet.running.planning import make_batch

pytestmark = pytest.mark.promise("R26")

kind = one_of([QUICK, SPARK_FOLDER])
quickly = pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")

BOUNDS = 4, 200
WITHIN = {"merge__max_parts": BOUNDS[0], "merge__max_bytes": BOUNDS[1]}


def bounded(cases: Mapping[int, Case], bounds: tuple[int, int] = BOUNDS) -> dict[int, Case]:
    return {p: replace(case, bounds=bounds) for p, case in cases.items()}


@pytest.mark.fault("cuts", oracle=True)
@pytest.mark.parametrize("first_seed", first_then_nightly([1656, 4000]))
def test_silver_and_its_excess_are_the_models_however_the_input_is_cut(
    new_lake: MakeLake, kind: str, first_seed: int, tmp_path: Path
) -> None:
    cases = bounded(cases_with_ids(rich_cases(12, first_seed, wealth="open timed_out")))
    lake = new_lake(cases, publish__valid="len(orders) > 0", **WITHIN, **IDS)
    for share in (0.2, 0.4, 0.6, 0.8, 1.0) if kind == QUICK else (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
        if kind == QUICK:
            assert problems_in(lake) == []
    assert len(lake.excess()) > 120
    assert lake.silver() == expected_silver(cases)
    assert lake.late() == expected_late(cases)
    assert lake.duplicates() == expected_duplicates(cases)
    assert lake.excess() == expected_excess(cases)
    columns = ["status", "valid", "invalid_reason", "record_bytes", "record_ids", *SOURCES]
    rows = lake.reader.select(tables.MERGED, columns).to_pylist()
    too_large = [row for row in rows if not any(row[source] for source in SOURCES)]
    assert {row["status"] for row in too_large} == {"open", "timed_out"}
    for row in too_large:
        is_open = row["status"] == "open"
        expected = (None, None) if is_open else (False, "too_large")
        assert (row["valid"], row["invalid_reason"]) == expected
        assert (row["record_bytes"], row["record_ids"]) == (0, None)
    assert problems_in(lake) == []
    again = rebuild(lake.reader, lake.settings, tmp_path / "again")
    there = DeltaRsReader(Lake(rebuilt_settings(lake.settings, tmp_path / "again")))
    assert again["lake"] == again["rebuilt"]
    answer = verify_against(lake.reader, there, lake.settings, tmp_path / "again")
    assert answer["problems"] == []


@pytest.mark.fault("rules", oracle=True)
@quickly
@pytest.mark.parametrize("bounds", first_then_nightly([((2, 10**6),), ((10**6, 300),)]))
def test_bounds_change_with_an_epoch_and_what_is_too_large_stays_so(
    new_lake: MakeLake, kind: str, tmp_path: Path, bounds: tuple[int, int]
) -> None:
    lake = new_lake(cases_with_ids(rich_cases(8, 1656, wealth="open timed_out")), **WITHIN, **IDS)
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    before: list[tuple[object, ...]] = []
    for number, (max_parts, max_bytes) in enumerate([BOUNDS, bounds, (10**6, 10**6), (1, 10**6)]):
        if number:
            more: dict[str, Any] = {"merge__max_parts": max_parts, "merge__max_bytes": max_bytes}
            lake.change_rules(settings_for(tmp_path, **more, **IDS).rules())
        for share in (0.35, 0.4):
            lake.arrive(0.2 * number + share)
            lake.merge()
            assert problems_in(lake) == []
        assert set(before) <= set(lake.excess())
        assert number == 2 or len(before) < len(lake.excess())
        before = lake.excess()


@quickly
def test_a_merge_record_that_is_too_large_is_written_anew_without_its_records(
    new_lake: MakeLake, kind: str
) -> None:
    """However many they are: a batch costs what its own records cost, and rows stay small."""
    hot = [keyed("hot", 10, i="1") for _ in range(300)]
    few = [keyed("hot", 20, i="1") for _ in range(6)]
    tracking: list[bytes | None] = [*hot, heartbeat(15), *few, heartbeat(30)]
    orders: list[bytes | None] = [heartbeat(15), heartbeat(30)]
    arrivals = ["orders", *["tracking"] * len(tracking), "orders"]
    case = Case({"tracking": tracking, "orders": orders}, 100, arrivals, bounds=(50, 10**6))
    lake = new_lake({0: case}, merge__max_parts=50, **IDS)
    for share in (0.98, 1.0):
        lake.arrive(share)
        lake.merge()
    assert len(lake.plans) == 2
    generation = read_history(lake.reader, lake.settings).generations.newest
    rows = BatchRows(lake.engine, lake.settings, generation)
    planner = lake.start().recover()
    batch = make_batch(lake.engine, lake.settings, lake.plans[-1], planner, generation)
    unfinished = rows.select_unfinished(batch, planner, 6)
    assert unfinished.size == 0
    columns = ["status", "record_count", "record_bytes", *SOURCES]
    [row] = lake.reader.select(tables.MERGED, columns).to_pylist()
    assert row == {
        "status": "open",
        "record_count": 306,
        "record_bytes": 0,
        "tracking": [],
        "orders": [],
    }
    assert len(lake.excess()) == 306
    assert status(lake.reader, lake.settings, 0)["partitions"][0]["excess"] == 306
    answer = explain(lake.reader, lake.settings, "hot")
    assert "too large: 306 records" in " ".join(read(explain_view(answer)))
    [told] = answer["records"]
    assert told["parts"] == []
    assert "too large: 306 records have joined it, and merge.max_parts is 50" in told["reason"]
    json.dumps(told)


@quickly
def test_a_late_record_of_a_merge_record_that_is_too_large_is_not_corrected(
    new_lake: MakeLake, kind: str
) -> None:
    tracking: list[bytes | None] = [keyed("a", 0, n=0), keyed("a", 0, n=1), keyed("a", 0, n=3)]
    tracking += [keyed("b", 0), heartbeat(300), keyed("a", 10, n=2), keyed("b", 10)]
    tracking += [keyed("b", 20), heartbeat(900)]
    orders: list[bytes | None] = [heartbeat(300), heartbeat(900)]
    arrivals = ["tracking"] * len(tracking) + ["orders"] * 2
    case = Case({"tracking": tracking, "orders": orders}, 100, arrivals, bounds=(2, 10**6))
    lake = new_lake({0: case}, merge__max_parts=2, **corrections())
    lake.arrive(1.0)
    lake.merge()
    assert problems_in(lake) == []
    names = ["merge_key", "offset", "version", "invalid_reason"]
    made = lake.reader.select(tables.CORRECTIONS, names).sort_by("offset").to_pylist()
    assert [tuple(row.values()) for row in made] == [
        ("a", 5, 0, "excess"),
        ("b", 6, 1, None),
        ("b", 7, 0, "excess"),
    ]
    late = explain(lake.reader, lake.settings, "a")["late"]
    assert all("is too large, or would be with it" in row["outcome"] for row in late)
    assert status(lake.reader, lake.settings, 0)["partitions"][0]["too_many"] == 2


@pytest.mark.fault("memory")
@pytest.mark.nightly
@quickly
def test_rows_that_are_written_anew_in_pieces_have_the_same(
    new_lake: MakeLake, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = bounded(cases_with_ids(rich_cases(6, 1656, wealth="open timed_out")))
    lake = new_lake(cases, **WITHIN, **IDS)
    rewrite_open_records(monkeypatch)
    for share in (0.3, 0.6, 1.0):
        lake.arrive(share)
        lake.merge()
    assert rewrites_of(lake.settings) > 1
    assert lake.silver() == expected_silver(cases)
    assert lake.duplicates() == expected_duplicates(cases)
    assert lake.excess() == expected_excess(cases)


@pytest.mark.nightly
def test_forget_erases_excess(new_lake: MakeLake, kind: str) -> None:
    """All else is as if the key's records had been heartbeats."""
    cases = bounded(cases_with_ids(rich_cases(8, 1656, wealth="late")), (2, 10**6))
    lake = new_lake(cases, merge__max_parts=2, **IDS)
    lake.arrive(SHARE)
    lake.merge(lake.quick)
    assert KEY in lake.reader.select(tables.EXCESS, ["merge_key"])["merge_key"].to_pylist()
    erase(lake)
    assert KEY not in lake.reader.select(tables.SILVER, ["merge_key"])["merge_key"].to_pylist()
    lake.arrive()
    lake.merge(lake.quick)
    left = {p: without_key(case) for p, case in cases.items()}
    assert lake.silver() == expected_silver(left)
    assert lake.excess() == expected_excess(left)
    assert problems_in(lake) == []


@pytest.mark.nightly
@pytest.mark.fault("retention", oracle=True)
@quickly
@pytest.mark.long
def test_what_keep_leaves_of_it_is_what_the_model_makes_and_can_be_derived_again(
    new_lake: MakeLake, kind: str, tmp_path: Path
) -> None:
    cases = bounded({p: long_case(100 + p) for p in range(PARTITIONS)}, (3, 10**6))
    lake = new_lake(cases, keep=KEEP, merge__max_parts=3, **IDS)
    for _ in steps(lake, kind):
        let_go(lake)
        assert broken(lake) == []
    clocks = {p: case.merged().clock or 0 for p, case in cases.items()}
    every: list[Any] = expected_excess(cases)
    kept = [row for row in every if row[4] >= clocks[row[0]] - 900]
    assert lake.excess() == kept
    assert 20 < len(kept) < len(every)
    again = rebuild(lake.reader, lake.settings, tmp_path / "again")
    assert again["lake"] == again["rebuilt"]
    there = DeltaRsReader(Lake(rebuilt_settings(lake.settings, tmp_path / "again")))
    answer = verify_against(lake.reader, there, lake.settings, tmp_path / "again")
    assert answer["problems"] == []
