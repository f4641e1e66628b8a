"""Repeated records are one outcome more: derived again, and shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.audit.inputs import case_of, problems_in
from tests.audit.test_show import read
from tests.audit.test_verify import Change, altered, gone, twice
from tests.support.cases import (
    INPUTS,
    SOURCES,
    Case,
    cases_with_ids,
    heartbeat,
    keyed,
    random_case,
)
from tests.support.configurations import IDS, settings_for
from tests.support.effort import first_then_nightly
from tests.support.inputs import input_of
from tests.support.lakes import CaseLake, duplicates_of
from tests.support.model_lakes import rewrite
from tests.support.tenants import merge_of, tenant_cases
from watersmeet.ask.explain import explain
from watersmeet.ask.status import status
from watersmeet.audit.rebuild import rebuild, rebuilt_settings, verify_against
from watersmeet.audit.show import explain_view
from watersmeet.engine.choice import open_engine
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.location import Lake
from watersmeet.running.outcomes import outcomes
from watersmeet.settings import Settings

pytestmark = [pytest.mark.promise("R16"), pytest.mark.fault("cuts", "kill", "rules")]


def lake_of(folder: Path, cases: dict[int, Case], **overrides: Any) -> CaseLake:
    settings = settings_for(folder, **{**IDS, **overrides})
    return CaseLake(open_engine(settings), settings, cases)


def is_derived_again(lake: CaseLake, folder: Path) -> bool:
    found = rebuild(lake.reader, lake.settings, folder)
    assert found["lake"] == found["rebuilt"]
    there = DeltaRsReader(Lake(rebuilt_settings(lake.settings, folder)))
    answer = verify_against(lake.reader, there, lake.settings, folder)
    assert answer["problems"] == []
    inputs = lake.settings.inputs_by_name
    assert duplicates_of(there, inputs=inputs) == lake.duplicates()
    return True


# -- random cases

KINDS: dict[str, Callable[[Path, int], CaseLake]] = {
    "timeout": lambda folder, seed: lake_of(
        folder, cases_with_ids({p: random_case(seed + p) for p in range(12)})
    ),
    "topics": lambda folder, seed: lake_of(
        folder,
        cases_with_ids({p: random_case(seed + p, sources=INPUTS) for p in range(20)}),
        sources__tracking__topic=[input_of(name).topic for name in INPUTS if "/" in name],
    ),
    "tenants and a window": lambda folder, _: lake_of(
        folder, cases_with_ids(tenant_cases(14)), merge=merge_of((100, 250, 300))
    ),
}


@pytest.mark.parametrize("seed", first_then_nightly([9_360, 9_500, 9_900]))
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if n else ()) for n, kind in enumerate(KINDS)],
)
def test_what_silver_makes_of_repeated_records_is_derived_again(
    tmp_path: Path, kind: str, seed: int
) -> None:
    lake = KINDS[kind](tmp_path, seed)
    for share in (0.3, 0.6, 1.0):
        lake.arrive(share)
        lake.merge()
        assert problems_in(lake) == []
    assert len(lake.duplicates()) > 20
    assert is_derived_again(lake, tmp_path / "again")


def test_ids_may_come_change_and_go_with_an_epoch_and_a_record_keeps_the_one_that_it_was_read_with(
    tmp_path: Path,
) -> None:
    plain = settings_for(tmp_path)
    lake = CaseLake(
        open_engine(plain), plain, cases_with_ids({p: random_case(9_360 + p) for p in range(12)})
    )
    begin_epoch(lake.reader, lake.engine.append, plain, 0)
    found = []
    for number, overrides in enumerate(({}, IDS, {"sources__orders__id": "n"}, {})):
        if number:
            lake.change_rules(settings_for(tmp_path, **overrides).rules())
        lake.arrive(0.25 * number + 0.15)
        lake.merge()
        lake.arrive(0.25 * number + 0.25)
        lake.merge()
        assert problems_in(lake) == []
        rows = (
            lake.reader.select(tables.MERGED, ["status", "record_ids"]).to_pylist()
            if number
            else []
        )
        still_open = [row["record_ids"] or [] for row in rows if row["status"] == "open"]
        repeats = sum(entry["of_offset"] is not None for ids in still_open for entry in ids)
        found.append(len(lake.duplicates()) + repeats)
    assert found[0] == 0 < found[1] <= found[2] <= found[3]
    read_with = lake.reader.select(tables.bronze("orders"), ["id"])["id"].to_pylist()
    assert {None, "1"} < set(read_with)
    assert is_derived_again(lake, tmp_path / "again")


# -- a known case


def known_case() -> Case:
    """Of a, tracking@1 and orders@1 repeat; tracking@5 has its id in another merge record."""
    tracking = [
        *[keyed("a", 10, i=1), keyed("a", 60, i="1"), keyed("a", 20, i=2), keyed("a", 30)],
        *[heartbeat(290), keyed("a", 290, i=1), heartbeat(300)],
    ]
    orders = [keyed("a", 15, i=1), keyed("a", 5, i=1), keyed("b", 20, i=1), heartbeat(300)]
    return case_of(tracking, orders)


@pytest.fixture
def known(tmp_path: Path) -> CaseLake:
    lake = lake_of(tmp_path, dict.fromkeys(range(2), known_case()))
    lake.arrive()
    lake.merge()
    return lake


def test_a_repeated_record_dates_its_merge_record_and_is_no_part(known: CaseLake) -> None:
    assert problems_in(known) == []
    columns = ["status", "event_time", "last_event_time", "tracking", "orders"]
    where = [[("partition", "=", 0), ("merge_key", "=", "a")]]
    rows = known.reader.select(tables.MERGED, columns, where).to_pylist()
    assert sorted(
        (
            *(r[name] for name in ("status", "event_time", "last_event_time")),
            *([part["offset"] for part in r[source]] for source in SOURCES),
        )
        for r in rows
    ) == [("open", 290, 290, [5], []), ("timed_out", 5, 60, [0, 2, 3], [0])]
    assert [row[1:] for row in known.duplicates() if row[0] == 0] == [
        ("orders", 1, "a", 5, "1", 0),
        ("tracking", 1, "a", 60, "1", 0),
    ]


def test_explain_status_and_the_outcomes_of_a_batch_have_it(known: CaseLake) -> None:
    answer = explain(known.reader, known.settings, "a")
    first = [row for row in answer["duplicates"] if row["partition"] == 0]
    assert sorted((r["source"], r["offset"], r["id"], r["of_offset"]) for r in first) == [
        ("orders", 1, "1", 0),
        ("tracking", 1, "1", 0),
    ]
    assert first[0]["reason"].startswith("duplicate: it has the id '1' of ")
    assert "duplicates: merged, and no parts" in read(explain_view(answer))
    partitions = status(known.reader, known.settings, 0.1)["partitions"]
    assert [row["duplicates"] for row in partitions] == [2, 2]
    counts = outcomes(known.reader, known.settings, known.plans[-1])
    assert counts["tracking"] == {
        ("heartbeat", ""): 4,
        ("late", ""): 0,
        ("excess", ""): 0,
        ("duplicate", ""): 2,
        ("merged", ""): 8,
    }


TRACE = "silver: the record"
BREAKS: list[tuple[Change, list[str]]] = [
    (gone, [f"{TRACE} is missing", "model duplicate from 60 to 60 of tracking@1"]),
    (twice, [f"{TRACE} appears 2 times", "the tables have duplicate from 60 to 60 of tracking@1"]),
    (altered(of_offset=2), ["(60, the id '1' of offset 2), and the merge model"]),
    (altered(id="2"), ["(60, the id '2' of offset 0), and the merge model"]),
]


@pytest.mark.parametrize(("change", "words"), BREAKS)
def test_what_is_wrong_with_a_row_of_duplicates_is_found(
    known: CaseLake, tmp_path: Path, change: Change, words: list[str]
) -> None:
    again = tmp_path / "again"
    rebuild(known.reader, known.settings, again)
    there = DeltaRsReader(Lake(rebuilt_settings(known.settings, again)))

    def changed(row: dict[str, Any]) -> Any:
        place = row["partition"], row["source"], row["offset"]
        return change(row) if place == (0, "tracking", 1) else row

    rewrite(known.settings, tables.DUPLICATES, changed)
    problems = problems_in(known)
    assert len(problems) == len(words), problems
    assert all(any(word in problem for problem in problems) for word in words), problems
    [problem] = verify_against(known.reader, there, known.settings, again)["problems"]
    assert problem["where"] == "duplicates: tracking[0]@1"


def test_a_lake_without_ids_has_none_of_it(tmp_path: Path) -> None:
    settings: Settings = settings_for(tmp_path)
    lake = CaseLake(open_engine(settings), settings, {0: known_case()})
    lake.arrive()
    lake.merge()
    assert "record_ids" not in lake.reader.columns(tables.SILVER).names
    assert "id" not in lake.reader.columns(tables.bronze("tracking")).names
    assert lake.duplicates() == []
    assert explain(lake.reader, settings, "a")["duplicates"] == []
    assert problems_in(lake) == []
