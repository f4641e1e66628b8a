"""Corrections on real Delta tables are what their model makes of the same records, however the
input is cut, whatever crashes, and through changes of the rules."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from tests.laws.conftest import (
    IN_FOLDERS_OF_BOTH,
    QUICK,
    MakeLake,
    in_folders,
    in_folders_of_both,
    one_of,
)
from tests.laws.test_tenants import with_rules
from tests.support.cases import SOURCES, Case, cases_with_ids, heartbeat, keyed, rich_cases
from tests.support.configurations import IDS
from tests.support.corrections import CorrectionModels, corrections_of, late_duplicates_of
from tests.support.crashes import CrashError, dying_at
from tests.support.effort import first_then_nightly
from tests.support.lakes import CaseLake
from tests.support.tenants import Window, merge_of, tenant_cases
from watersmeet.core.correction_model import MAX_VERSIONS, PartitionCorrections
from watersmeet.core.corrections import Made, Settled, correct
from watersmeet.core.sequence import CORRECTED, Tail
from watersmeet.lake import tables
from watersmeet.lake.identity import begin_epoch
from watersmeet.lake.published import columns_of, topic_columns
from watersmeet.lake.table_reader import Where
from watersmeet.operations.evolve import preview
from watersmeet.operations.retention import expire
from watersmeet.running import correcting
from watersmeet.settings import KeepSettings, Settings

pytestmark = pytest.mark.promise("R19")

kind = one_of(IN_FOLDERS_OF_BOTH)

PARTITIONS = 16
"""Those of `DRAWN` random cases that have most late records."""
DRAWN = 40
TENANT_PARTITIONS = 8
ALL = "1d"
ALL_MS = 86_400_000


def corrections(within: str = ALL, **more: int) -> dict[str, Any]:
    return {"publish__corrections": {"topic": "merged-corrections", "within": within, **more}}


@cache
def cases() -> dict[int, Case]:
    """Each ends with heartbeats, so that most of its late records are settled."""
    drawn = rich_cases(DRAWN, wealth="late").values()
    latest = sorted(drawn, key=lambda case: -len(case.merged().late))[:PARTITIONS]
    return {p: _ended(case) for p, case in cases_with_ids(dict(enumerate(latest))).items()}


def _ended(case: Case) -> Case:
    for source, values in case.values.items():
        values.append(heartbeat(100_000))
        case.arrivals.append(source)
    return case


def merged(lake: CaseLake, models: CorrectionModels, *shares: float) -> None:
    for share in shares:
        lake.arrive(share)
        lake.merge()
    models.arrive(shares[-1])


def compared(lake: CaseLake, models: CorrectionModels) -> None:
    assert corrections_of(lake.reader) == models.rows()
    assert late_duplicates_of(lake.reader) == models.late_duplicates()


def shares(kind: str) -> tuple[float, ...]:
    return (0.2, 0.5, 0.6, 0.9, 1.0) if kind == QUICK else (0.6, 1.0)


@pytest.mark.fault("cuts", oracle=True)
def test_corrections_equal_their_model_however_the_input_is_cut(
    new_lake: MakeLake, kind: str
) -> None:
    lake = new_lake(cases(), **corrections(), **IDS)
    models = CorrectionModels(cases(), (100, None, None), ALL_MS)
    for share in shares(kind):
        merged(lake, models, share)
        compared(lake, models)
    assert len(models.rows()) > 40
    assert models.late_duplicates()
    assert {row[8] for row in models.rows()} == {True, False}
    assert max(row[9] for row in models.rows()) > 1


@pytest.mark.promise("C24")
@pytest.mark.fault("memory", oracle=True)
@pytest.mark.parametrize("size", first_then_nightly([1, 1000]))
@in_folders_of_both
def test_corrections_are_the_same_in_pieces(
    new_lake: MakeLake, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Also where the corrections of one merge record are in several."""
    monkeypatch.setattr(correcting, "CHUNK_BYTES", size)
    pieces = list[int]()

    def corrected(late: Settled, *args: Any, **options: Any) -> Made:
        pieces.append(late.rows.num_rows)
        return correct(late, *args, **options)

    monkeypatch.setattr(correcting, "correct", corrected)
    lake = new_lake(cases(), **corrections(), **IDS)
    models = CorrectionModels(cases(), (100, None, None), ALL_MS)
    for share in (0.4, 1.0):
        merged(lake, models, share)
        compared(lake, models)
    assert len(pieces) > (len(models.rows()) / 2 if size == 1 else 10)
    assert size == 1 or max(pieces) > 1


@pytest.mark.promise("C26")
@pytest.mark.fault("memory")
@in_folders
def test_a_batch_reads_no_corrections_of_the_past_since_a_partition_is_behind(
    new_lake: MakeLake, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event times of one partition pass ten times as slowly."""
    ticks, batches = 60, 6

    def case(step: int) -> Case:
        times = [time for n in range(1, ticks) for time in (step * n, step * n - 200)]
        values = [keyed("k", time) for time in times]
        return Case({source: [*values] for source in SOURCES}, 100, [*SOURCES] * len(values))

    lake = new_lake({0: case(3000), 1: case(300)}, **corrections(), **IDS)
    read = list[int]()
    rows = lake.engine.reader.rows

    def noting(table: str, *more: Any) -> Any:
        found = rows(table, *more)
        if table in (tables.LATE, tables.CORRECTIONS, tables.DUPLICATES):
            read[-1] += found.num_rows
        return found

    monkeypatch.setattr(lake.engine.reader, "rows", noting)
    for n in range(1, batches + 1):
        read.append(0)
        lake.arrive(n / batches)
        lake.merge()
    assert max(read) < ticks / 2, read
    assert len(corrections_of(lake.reader)) > 2 * ticks


@pytest.mark.parametrize("size", first_then_nightly([1, 1000, correcting.CHUNK_BYTES]))
@in_folders_of_both
def test_a_merge_record_has_no_more_versions_than_it_may(
    new_lake: MakeLake, monkeypatch: pytest.MonkeyPatch, kind: str, size: int
) -> None:
    """Late records beyond are noted, each once, whatever pieces corrections are made in."""
    monkeypatch.setattr(correcting, "CHUNK_BYTES", size)
    lake = new_lake(cases(), **corrections(max_versions=2), **IDS)
    models = CorrectionModels(cases(), (100, None, None), ALL_MS, max_versions=2)
    for share in shares(kind):
        merged(lake, models, share)
        compared(lake, models)
    versions = Counter(row[9] for row in models.rows())
    assert versions.keys() == {0, 1, 2}
    assert versions[0] > 5
    columns = ["version", "valid", "invalid_reason", "has_message", *SOURCES]
    beyond: Where = [[("version", "=", 0)]]
    found = lake.reader.select(tables.CORRECTIONS, columns, beyond).to_pylist()
    expected = [0, False, "too_many", False, *([] for _ in SOURCES)]
    assert [list(row.values()) for row in found] == [expected] * versions[0]


@in_folders
def test_with_tenants_no_late_record_beyond_is_looked_at_again(
    new_lake: MakeLake, kind: str
) -> None:
    """Its tenant's clock may be behind the partition's, so that it is read again, as corrected."""
    rules = (100, 250, 300)
    given = tenant_cases(TENANT_PARTITIONS)
    lake = new_lake(given, merge=merge_of(rules), **corrections(max_versions=1))
    models = CorrectionModels(given, rules, ALL_MS, max_versions=1)
    for share in shares(kind):
        merged(lake, models, share)
        compared(lake, models)
    assert any(row[9] == 0 for row in models.rows())


@pytest.mark.fault("cuts", oracle=True)
@in_folders
def test_with_tenants_and_windows_corrections_equal_their_model(
    new_lake: MakeLake, kind: str
) -> None:
    rules = (100, 250, 300)
    given = tenant_cases(TENANT_PARTITIONS)
    lake = new_lake(given, merge=merge_of(rules), **corrections())
    models = CorrectionModels(given, rules, ALL_MS)
    for share in shares(kind):
        merged(lake, models, share)
        compared(lake, models)
    assert len(models.rows()) > 10


def limited(settings: Settings, within: str | None, max_versions: int = MAX_VERSIONS) -> Settings:
    own = None if within is None else corrections(within, max_versions=max_versions)
    own = own and own["publish__corrections"]
    publish = type(settings.publish).model_validate(
        {"topic": settings.publish.topic, "corrections": own}, context={"folder": None}
    )
    return settings.model_copy(update={"publish": publish.after(settings.publish)})


@pytest.mark.fault("rules", oracle=True)
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_each_late_record_is_corrected_by_the_rules_of_the_epoch_in_which_it_is_late(
    new_lake: MakeLake,
) -> None:
    given = tenant_cases(TENANT_PARTITIONS)
    steps: list[tuple[float, Window, str | None, int | None, int]] = [
        (0.25, (100, None, 300), ALL, ALL_MS, MAX_VERSIONS),
        (0.5, (30, 90, 1000), "150ms", 150, 1),
        (0.7, (150, 400, 50), None, None, MAX_VERSIONS),
        (1.0, (80, None, 500), ALL, ALL_MS, 1),
    ]
    lake = new_lake(given, merge=merge_of(steps[0][1]), **corrections())
    models = CorrectionModels(given, steps[0][1], ALL_MS)
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    for number, (share, rules, within, within_ms, most) in enumerate(steps):
        if number:
            lake.settings = limited(with_rules(lake.settings, rules), within, most)
            next_batch = lake.plans[-1].batch + 1
            begin_epoch(lake.reader, lake.engine.append, lake.settings, next_batch)
            models.begin_epoch(rules, within_ms, most)
        merged(lake, models, share - 0.1, share)
        compared(lake, models)
    assert any(found.uncorrected for found in models.corrections.values())
    assert any(found.too_many for found in models.corrections.values())
    assert len(models.rows()) > 10


@pytest.mark.fault("kill", oracle=True)
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("is_made", [False, True], ids=["before", "after"])
def test_a_crash_at_the_commit_that_settles_repeats_and_loses_no_correction(
    new_lake: MakeLake, is_made: bool
) -> None:
    lake = new_lake(cases(), **corrections(), **IDS)
    models = CorrectionModels(cases(), (100, None, None), ALL_MS)
    crashes = 0
    for share in (0.3, 0.7, 1.0):
        lake.arrive(share)
        for _ in range(2):
            dying = dying_at(lake.engine, "merge", tables.SILVER, after=is_made)
            try:
                list(lake.start(engine=dying).drain())
            except CrashError:
                crashes += 1
        lake.merge()
    models.arrive(1.0)
    assert crashes >= 3
    compared(lake, models)


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.usefixtures("kind")
def test_a_late_record_is_no_duplicate_of_one_that_belongs_to_another_merge_record(
    new_lake: MakeLake,
) -> None:
    """Of two late records of one id, the first belongs to the merge record, and the second one
    opens another, to which the first would have belonged, too."""
    tracking = [keyed("a", 150), heartbeat(1000), keyed("a", 60, i="x"), keyed("a", 0, i="x")]
    given = {
        0: Case(
            {
                "tracking": [*tracking, heartbeat(2000)],
                "orders": [heartbeat(1000), heartbeat(2000)],
            },
            100,
            ["tracking", "tracking", "orders", *["tracking"] * 3, "orders"],
        )
    }
    lake = new_lake(given, **corrections(), **IDS)
    models = CorrectionModels(given, (100, None, None), ALL_MS)
    lake.arrive()
    lake.merge()
    models.arrive(1.0)
    assert len(models.rows()) == 2
    compared(lake, models)


@in_folders_of_both
@pytest.mark.usefixtures("kind")
def test_a_batch_whose_late_records_are_all_repeated_makes_no_correction(
    new_lake: MakeLake,
) -> None:
    tracking = [keyed("a", 0, i="x"), heartbeat(1000), keyed("a", 10, i="x")]
    given = {
        0: Case(
            {
                "tracking": [*tracking, heartbeat(2000)],
                "orders": [heartbeat(1000), heartbeat(2000)],
            },
            100,
            ["tracking", "tracking", "orders", "tracking", "tracking", "orders"],
        )
    }
    lake = new_lake(given, **corrections(), **IDS)
    models = CorrectionModels(given, (100, None, None), ALL_MS)
    for share in (0.5, 1.0):
        merged(lake, models, share)
        compared(lake, models)
    assert models.rows() == []
    assert len(models.late_duplicates()) == 1


@pytest.mark.fault("retention", "rules")
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.usefixtures("kind")
def test_keep_lets_nothing_go_that_a_pending_correction_of_an_earlier_epoch_needs(
    new_lake: MakeLake,
) -> None:
    """The rules of now, to which `keep` fits, are shorter than those by which a record is late."""
    tracking = [keyed("a", 800), heartbeat(1000), keyed("a", 850), heartbeat(1040)]
    given = {
        0: Case(
            {
                "tracking": [*tracking, heartbeat(2000)],
                "orders": [heartbeat(1000), heartbeat(1040), heartbeat(2000)],
            },
            100,
            [*["tracking"] * 2, "orders", *["tracking"] * 2, "orders", "tracking", "orders"],
        )
    }
    lake = new_lake(given, merge={"timeout": "100ms"}, **corrections("200ms"))
    lake.arrive(4 / 8)
    lake.merge()
    keep = KeepSettings(late_ms=30, silver_ms=30)
    merge = lake.settings.merge.model_copy(update={"timeout_ms": 5})
    lake.settings = limited(lake.settings, "1ms").model_copy(update={"keep": keep, "merge": merge})
    next_batch = lake.plans[-1].batch + 1
    begin_epoch(lake.reader, lake.engine.append, lake.settings, next_batch)
    lake.arrive(6 / 8)
    lake.merge()
    expire(lake.owner(), lake.settings, tables.SILVER)
    lake.arrive()
    lake.merge()
    [correction] = corrections_of(lake.reader)
    assert correction[9] == 1, "its version; the merge record was there"


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("table", [None, tables.SILVER], ids=["", "expired"])
def test_a_late_record_is_corrected_once_the_clock_has_passed_a_start_beyond_it(
    new_lake: MakeLake, table: str | None
) -> None:
    """Four epochs begin at 1049, the last of them starts at 1052. Nothing can hold the late record
    after 1050, but it is settled at 1053, whatever `keep` has deleted until then."""
    records = [keyed("a", 0), heartbeat(1000), keyed("a", 850), heartbeat(1049)]
    case = Case(
        {
            "tracking": [*records, heartbeat(1052), heartbeat(2000)],
            "orders": [heartbeat(1049), heartbeat(1052), heartbeat(2000)],
        },
        100,
        [*["tracking"] * 4, "orders", *["tracking", "orders"] * 2],
    )
    rules: list[Window] = [(gap, None, None) for gap in (100, 90, 100, 90, 100)]
    lake = new_lake({0: case}, merge=merge_of(rules[0]), **corrections())
    models = CorrectionModels({0: case}, rules[0], ALL_MS)
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    merged(lake, models, 5 / 9)
    for window in rules[1:]:
        lake.settings = with_rules(lake.settings, window)
        next_batch = lake.plans[-1].batch + 1
        begin_epoch(lake.reader, lake.engine.append, lake.settings, next_batch)
        models.begin_epoch(window, ALL_MS)
        merged(lake, models, 5 / 9)
    merged(lake, models, 7 / 9)
    assert models.rows() == []
    if table is not None:
        keep = lake.settings.model_copy(update={"keep": KeepSettings(late_ms=30)})
        expire(lake.owner(), keep, table)
    merged(lake, models, 1.0)
    compared(lake, models)
    assert [row[1] for row in models.rows()] == [1053]


@pytest.mark.fault("rules")
@in_folders
def test_an_epoch_that_ends_corrections_still_makes_those_that_are_pending(
    new_lake: MakeLake, kind: str
) -> None:
    """The second record is late by 850 ms; nothing can hold it once the clock has passed 1000."""
    given = {
        0: Case(
            {
                "tracking": [keyed("a", 0), heartbeat(1000), keyed("a", 50), heartbeat(2000)],
                "orders": [heartbeat(1000), heartbeat(2000)],
            },
            100,
            ["tracking", "tracking", "orders", "tracking", "tracking", "orders"],
        )
    }
    lake = new_lake(given, **corrections())
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    lake.arrive(4 / 6)
    lake.merge()
    assert corrections_of(lake.reader) == []
    lake.settings = limited(lake.settings, None)
    begin_epoch(lake.reader, lake.engine.append, lake.settings, lake.plans[-1].batch + 1)
    lake.arrive()
    lake.merge()
    [row] = corrections_of(lake.reader)
    assert row[1:6] == (1001, "", 1000, "tracking", 2)


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_the_topic_of_corrections_stays_where_it_is(new_lake: MakeLake) -> None:
    lake = new_lake({0: cases()[0]}, **corrections())
    begin_epoch(lake.reader, lake.engine.append, lake.settings, 0)
    end = columns_of(CORRECTED, Tail(0, (1, b"", 1, b"tracking", b"t", 0), 0, 1))
    noted = {**topic_columns("merged-corrections"), "partition": 0, "last_seq": 0, **end}
    published = lake.engine.lake.layout[tables.PUBLISHED]
    lake.engine.append(tables.PUBLISHED, published.rows_of([{**noted, "committed_at": 1}]))
    publish = {"topic": "merged", "corrections": {"topic": "others", "within": "1h"}}
    other = type(lake.settings.publish).model_validate(publish, context={"folder": None})
    answer = preview(lake.reader, lake.settings.model_copy(update={"publish": other}))
    assert [problem["where"] for problem in answer["problems"]] == ["publish.corrections.topic"]
    for allowed in (None, "1h"):
        assert not preview(lake.reader, limited(lake.settings, allowed))["problems"]


def test_a_lake_without_late_records_has_no_correction_and_reads_nothing_for_them(
    new_lake: MakeLake,
) -> None:
    on_time = {p: case for p, case in rich_cases(PARTITIONS).items() if not case.merged().late}
    assert len(on_time) > 3
    lake = new_lake(on_time, **corrections())
    lake.arrive()
    lake.merge()
    assert corrections_of(lake.reader) == []


def test_the_model_of_a_partition_has_nothing_to_correct_before_there_is_a_clock() -> None:
    model = CorrectionModels(cases(), (100, None, None), ALL_MS).corrections[0]
    assert isinstance(model, PartitionCorrections)
    model.settle()
    assert model.corrections == []
