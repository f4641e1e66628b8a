"""`rebuild` gives silver again from bronze alone, through resets and idle decisions, and under
another timeout; the comparison finds whatever is not the same.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from delta.tables import DeltaTable
from pyspark.sql import SparkSession

from tests.laws.conftest import QUICK, MakeLake
from tests.laws.test_idle import Clock, Quiet
from tests.support import tenants
from tests.support.cases import (
    SOURCES,
    Case,
    cases_with_ids,
    expected_silver,
    heartbeat,
    keyed,
    rich_cases,
)
from tests.support.configurations import IDS, settings_for
from tests.support.crashes import CrashError
from tests.support.inputs import tp_of
from tests.support.lakes import (
    CaseLake,
    OpenSpark,
    duplicates_of,
    engine_for,
    fill_bronze,
    late_of,
    silver_of,
)
from tests.support.tenants import merge_of
from watersmeet.audit.rebuild import rebuild, rebuilt_settings, verify_against
from watersmeet.core.idle import IdleDecision
from watersmeet.core.plan import BatchPlan
from watersmeet.core.silver import in_silver
from watersmeet.core.window import Window
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.identity import check_layout
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import decision_rows
from watersmeet.lake.table_reader import TableReader
from watersmeet.running.bronze_table import BronzeTable

RANDOM = 5
IDLE = RANDOM


def reader_of(lake: CaseLake, directory: Path) -> TableReader:
    return DeltaRsReader(Lake(rebuilt_settings(lake.settings, directory)))


def jump(lake: CaseLake) -> None:
    """In every other partition forward by two offsets, in the others to the beginning."""
    cursors = lake.start(engine=lake.quick).recover().state.cursors
    lake.jump({tp: at.next_offset + 2 if tp.partition % 2 else 0 for tp, at in cursors.items()})


@pytest.mark.promise("R13")
@pytest.mark.fault("cuts", "jumps", "silence")
@pytest.mark.long
def test_a_rebuild_is_what_silver_was_then_however_it_is_cut(
    new_lake: MakeLake, spark: SparkSession, tmp_path: Path
) -> None:
    cases = rich_cases(RANDOM, 700, refused=False)
    silent: dict[str, list[bytes | None]] = {
        "tracking": [keyed("i", t) for t in (10, 50, 200, 400, 450)],
        "orders": [keyed("i", 20)],
    }
    cases[IDLE] = Case(silent, 100, ["tracking"] * 4 + ["orders", "tracking"])
    cases = cases_with_ids(cases)
    lake = new_lake(cases, merge__max_records_per_batch=30 * 2 * len(cases), **IDS)
    lake.arrive(0.6)
    lake.merge(lake.quick)
    jump(lake)
    at = lake.start().recover().state.cursors[tp_of("orders", IDLE)]
    decided = [
        (tp_of("orders", IDLE), IdleDecision(at.next_offset - 1, time)) for time in (200, 400)
    ]
    rows = decision_rows(decided, 10**13, lake.start().recover().state.next_batch, 1)
    of_silver = in_silver(rows, "idle", lake.engine.lake.schema(tables.SILVER))
    lake.owner().append(tables.SILVER, of_silver, tables.BESIDE)
    lake.arrive(0.9)
    lake.merge(lake.quick)
    silver, late, duplicates = lake.silver(1), lake.late(1), lake.duplicates(1)

    told: list[int] = []
    merge = lake.settings.merge.model_copy(update={"max_records_per_batch": 10**6})
    again, once = tmp_path / "again", lake.settings.model_copy(update={"merge": merge})
    found = rebuild(lake.reader, once, again, notify=lambda plan: told.append(plan.batch))
    there = reader_of(lake, again)
    assert silver_of(there) == silver
    assert late_of(there) == late
    assert duplicates_of(there) == duplicates != []
    assert found["lake"] == found["rebuilt"]
    assert found["lake"]["open"] > 0 < found["lake"]["timed_out"]
    assert len(told) < lake.reader.version(tables.SILVER), "in other batches"
    assert not (again / "bronze_tracking").exists(), "from the lake's own bronze"
    was_reset = [("invalid_reason", "=", "reset")]
    resets = [
        q.select(tables.SILVER, ["merge_key"], [was_reset]).num_rows for q in (lake.reader, there)
    ]
    assert resets[0] > 0 == resets[1], "of the newest generation alone"
    assert any(row[0] == IDLE and row[2] == "timed_out" for row in silver), (
        "with the idle policy's decisions"
    )

    lake.arrive()
    assert lake.merge(lake.quick) > 0
    assert lake.silver(1) != silver
    assert verify_against(lake.reader, there, lake.settings, again) == {
        "ok": True,
        "problems": [],
    }, "as silver was then"
    broken = shutil.copytree(again, tmp_path / "broken")
    problems = break_and_compare(spark, lake, broken)
    assert problems == ["the rebuild has a different last_event_time"]


def break_and_compare(spark: SparkSession, lake: CaseLake, broken: Path) -> list[str]:
    """What the comparison with a rebuild says once a row of it is changed by hand."""
    row = (
        reader_of(lake, broken)
        .select(tables.MERGED, ["partition", "merge_key", "event_time"])
        .to_pylist()[0]
    )
    is_it = (
        "partition = {partition} AND merge_key = '{merge_key}' "
        "AND unix_millis(event_time) = {event_time}".format(**row)
    )
    DeltaTable.forPath(spark, f"{broken}/silver").update(
        is_it, {"last_event_time": "event_time + INTERVAL 1 DAY"}
    )
    found = verify_against(lake.reader, reader_of(lake, broken), lake.settings, broken)
    assert found["ok"] == (not found["problems"])
    [problem] = found["problems"]
    assert repr(row["merge_key"]) in problem["where"] or row["merge_key"] in problem["where"]
    return [problem["what"]]


@pytest.mark.promise("R13")
@pytest.mark.fault("cuts", oracle=True)
def test_under_another_timeout_it_is_what_the_model_makes_of_it(
    open_spark: OpenSpark, tmp_path: Path
) -> None:
    settings = settings_for(tmp_path)
    cases = rich_cases(5, 700, refused=False)
    lake = CaseLake(engine_for(open_spark, settings), settings, cases)
    with pytest.raises(ConfigurationError, match="silver has merged nothing yet"):
        rebuild(lake.reader, settings, tmp_path / "longer")
    lake.arrive()
    lake.merge()
    full = tmp_path / "full"
    full.mkdir()
    (full / "something").touch()
    with pytest.raises(ConfigurationError, match="is not an empty folder"):
        rebuild(lake.reader, settings, full)
    with pytest.raises(ConfigurationError, match="cannot be made"):
        rebuild(lake.reader, settings, full / "something" / "below")
    with pytest.raises(ConfigurationError, match="holds no complete rebuild"):
        verify_against(lake.reader, reader_of(lake, full), settings, full)

    longer = tmp_path / "longer"
    found = rebuild(lake.reader, settings, longer, Window(300))
    expected = {p: replace(case, timeout_ms=300) for p, case in cases.items()}
    rows = silver_of(reader_of(lake, longer))
    assert rows == expected_silver(expected) != expected_silver(cases)
    complete = [row for row in rows if all(row[5:])]
    rebuilt: dict[str, Any] = found["rebuilt"]
    assert (rebuilt["records"], rebuilt["complete"]) == (len(rows), len(complete))
    for i, source in enumerate(SOURCES):
        merged, in_complete = (sum(len(row[5 + i]) for row in these) for these in (rows, complete))  # type: ignore[arg-type,misc]
        late = sum(
            each.record.input.source == source
            for case in expected.values()
            for each in case.merged().late
        )
        assert rebuilt["sources"][source] == {
            "merged": merged,
            "in_complete_records": in_complete,
            "late": late,
        }
    with pytest.raises(ConfigurationError, match="was derived with a timeout of 300 ms"):
        verify_against(lake.reader, reader_of(lake, longer), settings, longer)


def assert_derived_again(lake: CaseLake, folder: Path) -> None:
    rebuild(lake.reader, lake.settings, folder)
    there = reader_of(lake, folder)
    assert tenants.silver_of(there) == tenants.silver_of(lake.reader)
    assert verify_against(lake.reader, there, lake.settings, folder)["ok"]


@pytest.mark.promise("T6")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("offsets", [[0, 1], [0, 2], [1, 2], [1, 3]])
@pytest.mark.parametrize("times", [[1000, 3000], [3000, 4000]], ids=["one waits", "all wait"])
def test_with_tenants_it_goes_over_holes_to_the_record_that_waits(
    new_lake: MakeLake, tmp_path: Path, offsets: list[int], times: list[int]
) -> None:
    """The markers of transactions leave them."""
    merge = merge_of((100, None, 300))
    lake = new_lake({0: Case({source: [] for source in SOURCES}, 100)}, merge=merge)
    tracking = {(0, at): keyed("a", t, g="x") for at, t in zip(offsets, times, strict=True)}
    orders = {(0, 0): keyed("a", 2000, g="x")}
    for source, values in {"tracking": tracking, "orders": orders}.items():
        fill_bronze(BronzeTable(lake.owner(), lake.settings, lake.input_of(source)), values)
    assert lake.merge() == 1
    assert_derived_again(lake, tmp_path / "again")


@pytest.mark.promise("T6")
@pytest.mark.fault("silence")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_with_tenants_it_ends_before_a_record_that_has_come_behind_the_last_decision(
    new_lake: MakeLake, tmp_path: Path
) -> None:
    tracking = [keyed("a", 1000, g="x"), keyed("b", 1990, g="x")]
    orders = [heartbeat(2000, g="x")]
    case = Case(
        {"tracking": [*tracking], "orders": [*orders]}, 100, ["tracking", "orders", "tracking"]
    )
    lake = new_lake({0: case}, merge={**merge_of((100, None, 300)), "idle_after": "10s"})
    clock = Clock()
    silver = lake.start(Quiet(lake.settings, 10_000, now_s=clock))
    lake.arrive(2 / 3)
    list(silver.drain())
    clock.now = 10.0
    assert len(list(silver.drain())) == 1, "time goes on without tracking"
    lake.arrive(1.0)  # for bronze alone
    assert_derived_again(lake, tmp_path / "again")


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_first_generation_that_has_merged_nothing_is_derived_again_as_nothing(
    new_lake: MakeLake, tmp_path: Path
) -> None:
    lake = new_lake(rich_cases(1, 700))
    lake.start()
    lake.jump({tp_of(source, 0): 0 for source in SOURCES})
    lake.arrive()
    lake.merge()
    again = tmp_path / "again"
    found = rebuild(lake.reader, lake.settings, again, generation=0)
    assert found["rebuilt"]["records"] == found["lake"]["records"] == 0
    assert verify_against(lake.reader, reader_of(lake, again), lake.settings, again, 0)["ok"]


def goes_on(_: BatchPlan) -> None:
    pass


def is_cut_short(_: BatchPlan) -> None:
    raise CrashError


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("is_complete", [True, False])
def test_a_rebuild_is_taken_for_no_lake(
    new_lake: MakeLake, kind: str, tmp_path: Path, is_complete: bool
) -> None:
    lake = new_lake(rich_cases(2, 700))
    lake.arrive()
    lake.merge()
    check_layout(lake.reader, Lake(lake.settings))
    directory = tmp_path / "again"
    with nullcontext() if is_complete else pytest.raises(CrashError):
        notify = goes_on if is_complete else is_cut_short
        rebuild(lake.reader, lake.settings, directory, notify=notify)
    settings = rebuilt_settings(lake.settings, directory)
    with pytest.raises(ConfigurationError, match=r"lake: .*/again is a rebuild"):
        check_layout(DeltaRsReader(Lake(settings)), Lake(settings))
    if not is_complete:
        with pytest.raises(ConfigurationError, match=r"/again holds no complete rebuild"):
            verify_against(lake.reader, reader_of(lake, directory), lake.settings, directory)
