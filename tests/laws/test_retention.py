"""Rows that end: what `keep` lets go is gone, nothing else is, and what is left can be verified and
derived again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.laws.conftest import QUICK, MakeLake, in_folders
from tests.laws.test_idle import Clock, Quiet
from tests.laws.test_tenants import with_rules
from tests.support.cases import (
    BAD_VALUES,
    SOURCES,
    Case,
    expected_duplicates,
    expected_silver,
    heartbeat,
    keyed,
    with_ids,
)
from tests.support.configurations import IDS
from tests.support.corrections import late_duplicates_of
from tests.support.crashes import CrashError, dying_at
from tests.support.inputs import tp_of
from tests.support.lakes import CaseLake, as_published, counted, records_of
from tests.support.lives import Life
from tests.support.tenants import merge_of, tenant_case
from tests.support.topics import CheckedProducer
from watersmeet.audit.evidence import read_evidence
from watersmeet.audit.problems import Report
from watersmeet.audit.rebuild import rebuild, rebuilt_settings, verify_against
from watersmeet.audit.verify import check_tables
from watersmeet.audit.verify_bronze import check_places
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import MERGED
from watersmeet.core.types import TIME
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.history import Floors, read_history
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.journal import FLOOR
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import last_batch
from watersmeet.lake.published import last_tails, topic_columns
from watersmeet.lake.table_reader import Where, row_count
from watersmeet.operations.retention import expire
from watersmeet.running.bronze_table import BronzeTable
from watersmeet.running.next_offsets import NextOffsets
from watersmeet.settings import WindowSettings

pytestmark = [pytest.mark.promise("C10"), pytest.mark.fault("retention")]

TIMEOUT_MS, PARTITIONS, STEPS = 100, 2, 9
WINDOW = {"window_by_gap": WindowSettings(gap_ms=60, max_ms=900)}
KEEP = {"bronze": "600ms", "silver": "900ms", "late": "700ms", "quarantine": "500ms"}


def long_case(seed: int, step_ms: int = 20) -> Case:
    """Keys that come again and again, so that merge records overlap every moment; disorder, late
    and refused records."""
    rng = random.Random(seed)
    values: dict[str, list[bytes | None]] = {source: [] for source in SOURCES}
    arrivals = []
    for now in range(0, 150 * step_ms, step_ms):
        for source in SOURCES:
            for _ in range(rng.choice([0, 1, 1, 2])):
                late_by = rng.choice([0, 0, 0, 30, 90, 250])
                value = keyed(rng.choice("abcé"), max(0, now - late_by), n=len(values[source]))
                values[source].append(rng.choice(BAD_VALUES) if rng.random() < 0.06 else value)
                arrivals.append(source)
            if now % 200 == 0:
                values[source].append(heartbeat(now))
                arrivals.append(source)
    return with_ids(Case(values, TIMEOUT_MS, arrivals), seed)


def note_published(lake: CaseLake) -> None:
    """As if gold had published everything that silver has finished."""
    noted = as_published(lake.reader, lake.engine.lake.layout, "sink (1)", 0)
    # Numbers that grow, although what is let go is no more counted.
    seqs = noted["last_closed_at"].cast(pa.int64())
    noted = noted.set_column(noted.column_names.index("last_seq"), "last_seq", seqs)
    lake.quick.append(tables.PUBLISHED, noted)


def begins_of_bronze(lake: CaseLake) -> dict[TopicPartition, int]:
    """The offsets before which bronze's records that were not refused are deleted."""
    begins = {}
    for input_id in lake.settings.inputs:
        where = [[("reason", "is null", None)]]
        table = tables.bronze(input_id.source)
        first = {"first": ("min", "offset")}
        for row in lake.reader.summary(table, ["partition"], first, where).to_pylist():
            begins[TopicPartition(input_id, row["partition"])] = row["first"]
    return begins


def floors(lake: CaseLake) -> Floors:
    return read_history(lake.reader, lake.settings).floors


def every_table(lake: CaseLake) -> list[str]:
    return [*map(tables.bronze, lake.settings.sources), tables.SILVER]


def let_go(lake: CaseLake, engine: Any = None) -> None:
    for table in every_table(lake):
        expire(lake.owner(engine), lake.settings, table)


def broken(lake: CaseLake, generation: int | None = None) -> list[str]:
    """What `verify --full` finds without Kafka."""
    evidence = read_evidence(lake.reader, lake.settings, PARTITIONS, generation)
    report = Report()
    check_places(evidence, report["places"])
    check_tables(evidence, report)
    return [
        f"{problem.where}: {problem.what}"
        for each in report.values()
        for problem in each.described()
    ]


def counts(lake: CaseLake) -> dict[str, int]:
    views = (tables.MERGED, tables.LATE, tables.DUPLICATES, tables.PROGRESS, tables.QUARANTINE)
    return {name: row_count(lake.reader, name) for name in (*every_table(lake), *views)}


def left_of(lake: CaseLake, keep_ms: int) -> list[tuple[Any, ...]]:
    """Of the model's merge records those that must still be in silver."""
    clocks = {p: case.merged().clock or 0 for p, case in lake.cases.items()}
    rows: list[Any] = expected_silver(lake.cases)
    return [row for row in rows if row[2] == "open" or row[4] >= clocks[row[0]] - keep_ms]


@pytest.fixture
def lake(new_lake: MakeLake) -> CaseLake:
    cases = {p: long_case(100 + p) for p in range(PARTITIONS)}
    return new_lake(cases, keep=KEEP, merge__timeout=f"{TIMEOUT_MS}ms", **IDS)


def steps(lake: CaseLake, kind: str, count: int = STEPS) -> Iterator[int]:
    """The lake flows on, by the quick engine: only what lets go is tried on each, with Spark at the
    end alone."""
    for step in range(1, count + 1):
        lake.arrive(step / count)
        lake.merge(lake.quick)
        note_published(lake)
        if kind == QUICK or step > count - 2:
            yield step


@pytest.mark.fault("retention", oracle=True)
@pytest.mark.long
@in_folders
def test_what_is_left_is_what_the_model_makes_and_can_be_derived_again(
    lake: CaseLake, kind: str, tmp_path: Path
) -> None:
    for _ in steps(lake, kind):
        let_go(lake)
        assert broken(lake) == []
    assert lake.silver() == left_of(lake, 900)
    assert len(lake.silver()) < len(expected_silver(lake.cases))
    ends = begins_of_bronze(lake)
    assert len(ends) == PARTITIONS * len(SOURCES)
    for tp, end in ends.items():
        assert end > 0
        mine = [("partition", "=", tp.partition)]
        rows = lake.reader.select(
            tables.bronze(tp.input.source), ["offset", "event_time"], [mine]
        ).to_pylist()
        here = [row["offset"] for row in rows if row["event_time"] is not None]
        values = lake.cases[tp.partition].values[tp.input.source]
        assert sorted(here) == [
            offset
            for offset, value in enumerate(values)
            if offset >= end and value not in BAD_VALUES
        ]
        refused = sorted(row["offset"] for row in rows if row["event_time"] is None)
        assert refused == [offset for offset, value in enumerate(values) if value in BAD_VALUES], (
            "Kafka took them in 2026"
        )
    clocks = {p: case.merged().clock or 0 for p, case in lake.cases.items()}
    late: list[Any] = lake.late()
    assert [row for row in late if row[5] < clocks[row[0]] - 700] == []
    kept = [row for row in expected_duplicates(lake.cases) if row[4] >= clocks[row[0]] - 900]  # type: ignore[index, operator]
    assert lake.duplicates() == kept
    assert len(kept) > 5
    settings = lake.settings
    found = rebuild(lake.reader, settings, tmp_path / "again")
    assert found["lake"] == found["rebuilt"]
    assert found["lake"]["timed_out"] > 10
    there = DeltaRsReader(Lake(rebuilt_settings(settings, tmp_path / "again")))
    assert verify_against(lake.reader, there, settings, tmp_path / "again") == {
        "ok": True,
        "problems": [],
    }
    before = counts(lake)
    let_go(lake)
    assert counts(lake) == before, "what is gone is gone"


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.usefixtures("kind")
def test_a_late_duplicate_of_what_is_gone_is_left_out_of_what_is_derived_again(
    new_lake: MakeLake, tmp_path: Path
) -> None:
    values: dict[str, list[bytes | None]] = {source: [] for source in SOURCES}
    arrivals = []
    for now, record in ((1000, keyed("a", 0, i="x")), (1500, keyed("b", 1100))):
        values["tracking"].append(record)
        arrivals.append("tracking")
        for source in SOURCES:
            values[source].append(heartbeat(now))
            arrivals.append(source)
    values["tracking"] += [keyed("a", 50, i="x"), heartbeat(2000)]
    values["orders"].append(heartbeat(2000))
    arrivals += ["tracking", "tracking", "orders"]
    case = Case(values, TIMEOUT_MS, arrivals)
    corrections = {"topic": "merged-corrections", "within": "1d"}
    lake = new_lake({0: case}, keep={"bronze": "50ms"}, publish__corrections=corrections, **IDS)
    for share in (1 / 3, 2 / 3, 1):
        lake.arrive(share)
        lake.merge()
        note_published(lake)
        for source in SOURCES if share < 1 else ():
            expire(lake.owner(), lake.settings, tables.bronze(source))
    assert len(late_duplicates_of(lake.reader)) == 1
    found = rebuild(lake.reader, lake.settings, tmp_path / "again")
    assert found["lake"] == found["rebuilt"]
    there = DeltaRsReader(Lake(rebuilt_settings(lake.settings, tmp_path / "again")))
    compared = verify_against(lake.reader, there, lake.settings, tmp_path / "again")
    assert compared["problems"] == []


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_run_deletes_rows_once_they_are_an_eighth_of_their_table(
    new_lake: MakeLake, kind: str
) -> None:
    cases = {p: long_case(100 + p) for p in range(PARTITIONS)}
    keep = dict.fromkeys(KEEP, "1600ms")
    lake = new_lake(cases, keep=keep, merge__timeout=f"{TIMEOUT_MS}ms", **IDS)
    deletions, steps = 0, 30
    for step in range(1, steps + 1):
        lake.arrive(step / steps)
        lake.merge()
        note_published(lake)
        before, versions = (
            counts(lake),
            {name: lake.reader.version(name) for name in every_table(lake)},
        )
        for table in every_table(lake):
            expire(lake.owner(), lake.settings, table, only_if_worthwhile=True)
        after = counts(lake)
        for name in every_table(lake):
            rows = after[name]
            if rows < before[name]:
                deletions += 1
                assert 8 * (before[name] - rows) >= before[name]
            else:
                assert lake.reader.version(name) == versions[name], "nothing is rewritten in vain"
        assert step % 10 or broken(lake) == []
    assert 8 <= deletions < 2 * steps, "of five times as many occasions"
    spared = counts(lake)
    let_go(lake)
    left = counts(lake)
    assert all(8 * (spared[name] - left[name]) < spared[name] for name in every_table(lake)), (
        "little was left to delete"
    )
    assert lake.silver() == left_of(lake, 1600)


@in_folders
def test_nothing_open_or_unpublished_goes_nor_what_silver_has_not_merged(
    lake: CaseLake, kind: str
) -> None:
    lake.arrive(0.5)
    lake.merge(lake.quick)
    before = counts(lake)
    let_go(lake)
    after = counts(lake)
    # Merge records tell what has joined them.
    told = {tables.LATE, tables.DUPLICATES, tables.SILVER}
    assert {name for name in before if after[name] < before[name]} <= told, (
        "gold has published nothing"
    )
    lake.arrive()
    note_published(lake)
    let_go(lake)
    assert counts(lake)[tables.MERGED] < before[tables.MERGED]
    lake.merge(lake.quick)
    assert broken(lake) == []
    assert {row for row in lake.silver() if row[2] == "open"} == {
        r for r in expected_silver(lake.cases) if r[2] == "open"
    }


@in_folders
def test_what_ends_in_silver_ends_in_one_commit_and_batches_stay(lake: CaseLake, kind: str) -> None:
    lake.arrive()
    lake.merge(lake.quick)
    note_published(lake)
    before, version = counts(lake), lake.reader.version(tables.SILVER)
    expire(lake.owner(), lake.settings, tables.SILVER)
    after = counts(lake)
    gone = {name for name in before if after[name] < before[name]}
    assert gone == {tables.SILVER, tables.MERGED, tables.LATE, tables.DUPLICATES}
    assert lake.reader.version(tables.SILVER) == version + 1


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.usefixtures("kind")
def test_refused_records_end_by_kafkas_time_alone_once_silver_is_beyond_them(
    new_lake: MakeLake,
) -> None:
    refused = BAD_VALUES[0]
    values = [keyed("a", 0), refused, keyed("a", 1), refused, heartbeat(2000)]
    ahead = [*values, keyed("b", 9000), refused]
    lake = new_lake(
        {0: Case({"tracking": ahead, "orders": values}, TIMEOUT_MS)},
        keep={"bronze": "500ms", "quarantine": "1s"},
    )
    for source, sent in lake.cases[0].values.items():
        tp = tp_of(source, 0)
        by_place = {(0, n): value for n, value in enumerate(sent)}
        rows = records_of(lake.settings, tp.input, by_place)
        at = [0, 999, 1001, 1001, 2000, 9000, 0][: len(sent)]
        times = pa.array([time * 1000 for time in at], pa.int64()).cast(TIME)
        number = rows.column_names.index("kafka_timestamp")
        rows = rows.set_column(number, "kafka_timestamp", times)
        BronzeTable(lake.owner(), lake.settings, tp.input).append(rows, counted(rows))
    lake.merge()
    note_published(lake)
    last = last_batch(lake.reader)
    assert last is not None
    assert last.clocks == {0: 2000}
    inputs = lake.settings.inputs
    unread = [NextOffsets(lake.reader, lake.settings, 1).of(each) for each in inputs]
    let_go(lake)
    for source, left in (("tracking", [3, 6]), ("orders", [3])):
        found = lake.reader.select(tables.QUARANTINE, ["offset"], [[("source", "=", source)]])
        assert sorted(found["offset"].to_pylist()) == left
    assert [NextOffsets(lake.reader, lake.settings, 1).of(each) for each in inputs] == unread


@pytest.mark.fault("kill")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_crash_between_a_floor_and_its_deletion_is_made_up_for(lake: CaseLake, kind: str) -> None:
    for share in (0.2, 0.4, 0.6, 0.8):
        lake.arrive(share)
        lake.merge()
    note_published(lake)
    for table in every_table(lake):
        with pytest.raises(CrashError):
            expire(lake.owner(dying_at(lake.engine, "delete", table)), lake.settings, table)
    assert broken(lake) == [], "what is below a floor counts as gone"
    lake.arrive()
    lake.merge()
    note_published(lake)
    let_go(lake)
    assert broken(lake) == []
    assert lake.silver() == left_of(lake, 900)


@pytest.mark.fault("jumps")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_after_a_jump_back_only_what_was_merged_since_is_let_go(
    lake: CaseLake, kind: str, tmp_path: Path
) -> None:
    lake.arrive(0.8)
    lake.merge()
    note_published(lake)
    lake.settings = lake.settings.model_copy(
        update={"keep": lake.settings.keep.model_copy(update={"bronze_ms": None})}
    )
    let_go(lake)
    lake.jump(
        {tp: at.next_offset // 2 for tp, at in lake.start().recover().state.cursors.items()},
        last_tails(lake.reader, MERGED),
    )
    lake.merge()
    lake.settings = lake.settings.model_copy(
        update={"keep": lake.settings.keep.model_copy(update={"bronze_ms": 600})}
    )
    lake.arrive()
    lake.merge()
    note_published(lake)
    before = counts(lake)
    let_go(lake)
    assert counts(lake)["bronze_tracking"] < before["bronze_tracking"]
    assert broken(lake) == []
    found = rebuild(lake.reader, lake.settings, tmp_path / "again")
    assert found["lake"] == found["rebuilt"]


@pytest.mark.promise("B120")
@pytest.mark.fault("jumps", "rules")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("rules", [{"timeout_ms": 400}, WINDOW])
@pytest.mark.usefixtures("kind")
def test_what_was_let_go_comes_back_by_no_jump_whatever_the_rules_are_then(
    lake: CaseLake, rules: dict[str, Any]
) -> None:
    keep = lake.settings.keep.model_copy(update={"bronze_ms": None})
    lake.settings = lake.settings.model_copy(update={"keep": keep})
    lake.arrive(0.8)
    lake.merge()
    note_published(lake)
    valid = [[("status", "=", "timed_out"), ("valid", "=", True)]]
    out = parts_of(lake, valid)
    let_go(lake)
    assert parts_of(lake, valid) < out
    lake.jump(
        dict.fromkeys(lake.start().recover().state.cursors, 0), last_tails(lake.reader, MERGED)
    )
    merge = lake.settings.merge.model_copy(update={"timeout_ms": None, **rules})
    lake.settings = lake.settings.model_copy(update={"merge": merge})
    last = last_batch(lake.reader)
    assert last is not None
    begin_epoch(lake.reader, lake.quick.append, lake.settings, last.batch + 1)
    lake.arrive()
    lake.merge()
    anew = parts_of(lake, [[("generation", "=", 1)]])
    assert anew
    assert not anew & out
    assert broken(lake) == []


def parts_of(lake: CaseLake, where: Where) -> set[tuple[str, int, int]]:
    """The coordinates of the parts of rows of silver."""
    rows = lake.reader.select(tables.MERGED, ["partition", *SOURCES], where).to_pylist()
    return {
        (source, row["partition"], part["offset"])
        for row in rows
        for source in SOURCES
        for part in row[source]
    }


@in_folders
@pytest.mark.parametrize("is_changed", [False, True], ids=["", "through epochs"])
def test_what_is_left_of_tenants_can_be_verified_and_derived_again(
    new_lake: MakeLake, kind: str, tmp_path: Path, is_changed: bool
) -> None:
    """Records of the tenants that wait are there as long as an epoch may judge them again."""
    cases = {p: tenant_case(60 + p, lengths=[200]) for p in range(PARTITIONS)}
    windows = [(100, 250, 300), (30, 90, 1000), (150, 400, 50)]
    keep = {"bronze": "800ms", "silver": "1200ms", "late": "1s"}
    lake = new_lake(cases, keep=keep, merge=merge_of(windows[0]), **IDS)
    begin_epoch(lake.reader, lake.quick.append, lake.settings, 0)
    for step in steps(lake, kind, 6):
        let_go(lake)
        assert broken(lake) == []
        last = last_batch(lake.reader)
        if is_changed and last is not None:
            lake.settings = with_rules(lake.settings, windows[step % 3])
            begin_epoch(lake.reader, lake.quick.append, lake.settings, last.batch + 1)
    evidence = read_evidence(lake.reader, lake.settings, PARTITIONS)
    assert evidence.history_batch > 0
    sent = sum(len(case.values["tracking"]) for case in cases.values())
    assert row_count(lake.reader, tables.bronze("tracking")) < sent
    assert is_derived_again(lake, tmp_path)


@pytest.mark.fault("rules")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_records_are_left_that_waited_where_what_is_left_begins(
    new_lake: MakeLake, tmp_path: Path
) -> None:
    """An epoch has judged them since, and a derivation does so again."""
    slow = [keyed("a", 1050, g="y"), keyed("b", 1000, g="y")]
    fast = [keyed("a", time, g="x") for time in (1500, 9000, 20_000)]
    arrivals = [*["tracking"] * 3, *["orders", "tracking"] * 2, "orders"]
    case = Case({"tracking": [*slow, *fast], "orders": [*fast]}, 100, arrivals)
    cases = dict.fromkeys(range(PARTITIONS), case)
    keep = {"bronze": "600ms", "silver": "20s", "late": "20s"}
    lake = new_lake(cases, keep=keep, merge=merge_of((100, None, 1000)))
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    lake.arrive(4 / 8)
    lake.merge()
    let_go(lake)
    begun = lake.plans[-1].batch
    lake.settings = with_rules(lake.settings, (30, None, 1000))
    begin_epoch(lake.reader, lake.engine.append, lake.settings, begun + 1)
    lake.arrive()
    lake.merge()
    note_published(lake)
    let_go(lake)
    base = read_history(lake.reader, lake.settings).first_base
    assert base is not None
    assert base.batch == begun
    assert [row[4] for row in lake.late()] == [1000] * PARTITIONS
    assert broken(lake) == []
    assert is_derived_again(lake, tmp_path)


@pytest.mark.fault("silence")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_decisions_count_about_a_source_that_is_silent_since_what_is_left_begins(
    new_lake: MakeLake,
) -> None:
    cases = {p: Case({source: [] for source in SOURCES}, 100) for p in range(PARTITIONS)}
    merge = {**merge_of((100, None, 300)), "idle_after": "10s"}
    lake, clock = new_lake(cases, keep=KEEP, merge=merge), Clock()
    for time in (1000, 3000, 5000, 7000, 7200):
        for case in cases.values():
            for source in SOURCES if time == 1000 else ["orders"]:
                case.values[source].append(keyed("a", time, g="x"))
                case.arrivals.append(source)
        lake.arrive()
        silver = lake.start(Quiet(lake.settings, 10_000, now_s=clock))
        list(silver.drain())
        clock.now += 10.0
        assert list(silver.drain()) or time == 1000
        note_published(lake)
        assert broken(lake) == []
        if time < 7200:
            let_go(lake)
    assert read_history(lake.reader, lake.settings).first_base is not None


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_what_is_broken_above_a_floor_is_found(lake: CaseLake, kind: str) -> None:
    for _ in steps(lake, kind):
        let_go(lake)
    newest = read_evidence(lake.reader, lake.settings, PARTITIONS).history_batch
    where = [[("status", "=", "timed_out"), ("batch", ">", newest)]]
    row = lake.reader.select(
        tables.SILVER, ["partition", "merge_key", "event_time"], where
    ).to_pylist()[0]
    is_it = [(name, "=", value) for name, value in row.items()]
    commit = replace(lake.owner().next_commit(tables.SILVER), application="test")
    lake.engine.delete(tables.SILVER, [is_it], commit)
    assert any(repr(row["merge_key"]) in problem for problem in broken(lake))


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_of_the_tables_floors_the_one_that_is_ahead_holds(lake: CaseLake, kind: str) -> None:
    for base, time in ((7, 100), (3, 200), (-1, 150)):
        lake.owner().decide(FLOOR, {"base": base, "times": [[tables.LATE, 0, time]]})
    assert floors(lake) == Floors(7, {(tables.LATE, 0): 200})


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_dead_letters_that_are_not_sent_stay(lake: CaseLake, kind: str) -> None:
    publish = lake.settings.publish.model_copy(update={"late_topic": "letters"})
    lake.settings = lake.settings.model_copy(update={"publish": publish})
    lake.arrive()
    lake.merge()
    note_published(lake)
    before = counts(lake)
    let_go(lake)
    assert counts(lake)[tables.LATE] == before[tables.LATE]
    after = begins_of_bronze(lake)
    late = lake.reader.select(tables.LATE, ["source", "partition", "offset"]).to_pylist()
    assert all(
        row["offset"] >= after.get(tp_of(row["source"], row["partition"]), 0) for row in late
    ), "bronze has what is to be sent"
    layout = lake.engine.lake.layout[tables.PUBLISHED]
    sent = [
        {
            **topic_columns("letters (id)"),
            "partition": p,
            "last_source": source,
            "last_topic": source,
        }
        | {"last_offset": 10**6, "committed_at": 0}
        for source in SOURCES
        for p in lake.cases
    ]
    lake.quick.append(tables.PUBLISHED, layout.rows_of(sent))
    let_go(lake)
    assert counts(lake)[tables.LATE] < before[tables.LATE]


@pytest.mark.fault("rules")
@pytest.mark.nightly
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("count", [8, 12])
def test_history_may_begin_in_any_epoch(
    lake: CaseLake, kind: str, count: int, tmp_path: Path
) -> None:
    changing(lake, kind, count)
    assert is_derived_again(lake, tmp_path)
    assert floors(lake).base > 0


@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_history_may_begin_in_another_epoch_in_each_partition(
    new_lake: MakeLake, kind: str, tmp_path: Path
) -> None:
    """A slow partition keeps more batches, and epochs before those that the quick one keeps close
    nothing in that one."""
    cases = {0: long_case(100), 1: long_case(101, 5)}
    lake = new_lake(cases, keep=KEEP, merge__timeout=f"{TIMEOUT_MS}ms", **IDS)
    changing(lake, kind, 8)
    progress = ["partition", "source", "batch", "from_offset", "until_offset"]
    rows = lake.reader.select(tables.PROGRESS, progress).to_pylist()
    firsts = {
        (row["source"], row["batch"])
        for row in rows
        for tp, begin in begins_of_bronze(lake).items()
        if (tp.input.source, tp.partition) == (row["source"], row["partition"])
        and row["from_offset"] <= begin < row["until_offset"]
    }
    assert len(firsts) > len(SOURCES), "each partition begins with another batch"
    assert is_derived_again(lake, tmp_path)


def changing(lake: CaseLake, kind: str, count: int) -> None:
    """An epoch of another timeout behind each batch, and what is old is let go."""
    for number, (step, timeout_ms) in enumerate(
        zip(steps(lake, kind, count), cycle([100, 30, 250]), strict=False)
    ):
        last = last_batch(lake.reader)
        merge = lake.settings.merge.model_copy(update={"timeout_ms": timeout_ms})
        if step > 1:
            lake.settings = lake.settings.model_copy(update={"merge": merge})
        from_batch = 0 if number == 0 or last is None else last.batch + 1
        begin_epoch(lake.reader, lake.quick.append, lake.settings, from_batch)
        let_go(lake)
        assert broken(lake) == []


def is_derived_again(lake: CaseLake, folder: Path) -> bool:
    found = rebuild(lake.reader, lake.settings, folder / "again")
    assert found["lake"] == found["rebuilt"]
    there = DeltaRsReader(Lake(rebuilt_settings(lake.settings, folder / "again")))
    return verify_against(lake.reader, there, lake.settings, folder / "again") == {
        "ok": True,
        "problems": [],
    }


def test_a_copy_counts_once_although_its_original_is_deleted_afterwards(
    kafka: str, tmp_path: Path
) -> None:
    """Another lake has redriven a record that this one has read."""
    within = {"topic": "corrections-of-copies", "within": "30d"}
    life = Life.make(kafka, tmp_path, keep={"bronze": "1d"}, publish__corrections=within)
    life.send("tracking", ("a", 0))
    life.both((None, 1_000))
    life.run()
    life.call("maintain")
    reader, topic = life.river.reader, life.river.topic("tracking")
    producer = CheckedProducer(life.river.kafka)
    claim: list[tuple[str, str | bytes | None]] = [("watersmeet.redriven", f"{topic}/0/0".encode())]
    producer.produce(topic, b'{"k": "a", "ts": 0, "n": 0}', partition=0, headers=claim)
    assert producer.flush() == 0
    life.both((None, 2_000))
    life.run()
    after = 3 * 86_400_000
    life.both(("z", after), (None, after + 9_000))
    life.run()
    life.call("maintain")
    original: Where = [[("topic", "=", topic), ("offset", "=", 0)]]
    assert row_count(reader, tables.bronze("tracking"), original) == 0
    assert row_count(reader, tables.PASSED, [[("source", "=", "tracking")]]) == 1
    life.check()
    assert row_count(reader, tables.LATE) == row_count(reader, tables.CORRECTIONS) == 0
