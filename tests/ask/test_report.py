"""What the report reads from a lake, against numbers by hand or by plain loops; no test starts a
JVM."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from deltalake import write_deltalake

from tests.audit.test_newest import bronze_of
from tests.audit.test_verify_tenants import known_case
from tests.audit.test_verify_tenants import settings_of as settings_with_tenants
from tests.support.cases import keyed
from tests.support.configurations import settings_for as lake_settings_for
from tests.support.journals import decided, decisions_of, journal_rows
from tests.support.model_lakes import ModelLake
from tests.support.report_tables import Row, parts, river_of, settings_for, write_tables
from watersmeet.ask import report as reading
from watersmeet.ask.charts import Figure, Steps
from watersmeet.ask.report import (
    AHEAD_MS,
    ALL_SOURCES,
    SHOWN_PARTITIONS,
    STEPS,
    Report,
    read_report,
)
from watersmeet.ask.report_page import page
from watersmeet.core.times import LAST_EVENT_TIME_MS
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.history import Generation, epoch_body
from watersmeet.lake.journal import RULES
from watersmeet.lake.location import Lake
from watersmeet.lake.published import topic_columns
from watersmeet.lake.tables import JOURNAL, LATE, PROGRESS, QUARANTINE, SILVER
from watersmeet.settings import Settings

NOW = 1_768_780_800_000
"""A wall time."""

LATER = NOW + 100 * 86_400_000
"""When a report is made."""

BOTH = ("tracking", "order")
"""`order` is a word of SQL's own."""

CLOCKS, COUNTS, REFUSED = "Clock of each partition", "Clocks and counts", "Late and refused records"
MERGED, PUBLISHED, ARRIVED = (
    "Silver: offsets merged per second",
    "Gold: messages published per second",
    "Bronze: records per second",
)
DELAYS = "Delay behind event time"
OPEN, MATCHED, SIZES, DURATIONS = (
    "Open merge records",
    "Match rate",
    "Size of merge records",
    "Duration of merge records",
)


def report_of(folder: Path, sources: tuple[str, ...] = BOTH, **rows: list[Row]) -> Report:
    """The report of a lake with a timeout of 100 ms and these rows."""
    settings = settings_for(folder, sources)
    write_tables(settings, {**dict.fromkeys(Lake(settings).layout, ()), **rows})
    return read(settings)


def read(settings: Settings) -> Report:
    return read_report(DeltaRsReader(Lake(settings)), settings, LATER)


def figure(report: Report, title: str) -> Figure:
    [found] = [
        figure for section in report.sections for figure in section.figures if figure.title == title
    ]
    return found


def rows(report: Report, title: str) -> Sequence[Row]:
    return figure(report, title).rows


def rates(report: Report, title: str) -> dict[str, list[float]]:
    """By name how many a second in each step; what the chart repeats at the end of the last one is
    left out."""
    found: dict[str, list[float]] = {}
    for row in rows(report, title):
        *_, number = row.values()
        found.setdefault(row["of"], []).append(number)
    return {of: numbers[:-1] for of, numbers in found.items()}


def progress(
    batch: int,
    after_ms: int,
    *places: tuple[str, int, int, int, int | None, int | None],
    **more: Any,
) -> list[Row]:
    """A batch's rows, from (source, partition, from, until, head, clock)."""
    names = ("source", "partition", "from_offset", "until_offset", "head", "clock")
    known = {"batch": batch, "committed_at": NOW + after_ms, **more}
    return [
        {**known, "topic": place[0], **dict(zip(names, place, strict=True))} for place in places
    ]


def merge_record(
    event_time: int, lasts: int = 0, tracking: int = 1, order: int = 0, **more: Any
) -> Row:
    row = {"partition": 0, "merge_key": "k", "status": "timed_out", "valid": True, "batch": 0}
    row |= {"event_time": event_time, "last_event_time": event_time + lasts}
    row |= {"due": event_time + 100, "tenant": ""}
    return row | {"tracking": parts(*range(tracking)), "order": parts(*range(order))} | more


def publication(
    after_ms: int, first: int = 0, last: int = 0, partition: int = 0, last_event_time: int = 0
) -> Row:
    seqs = {"partition": partition, "first_seq": first, "last_seq": last}
    closed_at = last_event_time + 100
    tail = {"last_event_time": last_event_time, "last_key": "k", "last_closed_at": closed_at}
    tail |= {"last_due": closed_at - 1, "last_tenant": "", **topic_columns("merged (1)")}
    return {**seqs, **tail, "committed_at": NOW + after_ms}


def publication_of_corrections(after_ms: int, first: int = 0, last: int = 0) -> Row:
    tail = {"last_settled_at": 9, "last_tenant": "", "last_u": 8, "last_source": "order"}
    seqs = {"partition": 0, "first_seq": first, "last_seq": last}
    return {**seqs, **tail, "last_topic": "order", "last_offset": 0, "committed_at": NOW + after_ms}


# After a jump.
BATCHES = [
    *progress(0, 100, ("tracking", 0, 0, 5, 900, None), ("order", 0, 0, 0, None, None)),
    *progress(1, 1100, ("tracking", 0, 5, 8, 900, 300), ("order", 0, 0, 2, 300, 300)),
    *progress(2, 1900, ("tracking", 0, 8, 9, 900, 500), ("order", 0, 2, 6, 500, 500)),
    *progress(3, 4000, ("tracking", 0, 9, 10, 900, 900), ("order", 0, 6, 7, 950, 900)),
    *progress(4, 5000, ("tracking", 0, 99, 99, None, None), ("order", 0, 2, 2, None, None)),
]


@pytest.fixture
def few_batches_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many would be."""
    monkeypatch.setattr(reading, "FEWEST_STEPS", 1)


# -- the order of things


def test_it_begins_with_event_time_and_the_match_rate(tmp_path: Path) -> None:
    found = report_of(
        tmp_path,
        progress=BATCHES,
        silver=[merge_record(5, order=1), merge_record(9), merge_record(10)],
    )
    assert [section.title for section in found.sections] == [
        "Event time",
        "Partitions",
        "Kafka's timestamps",
        "Wall time",
    ]
    assert [each.title for each in found.sections[0].figures] == [
        MATCHED,
        SIZES,
        DURATIONS,
        OPEN,
        REFUSED,
    ]
    assert figure(found, MATCHED).caption.startswith(
        "Only 33.3% of the merge records have parts of all sources."
    )


@pytest.mark.parametrize("steps", [1, reading.FEWEST_STEPS - 1, reading.FEWEST_STEPS])
def test_wall_time_is_drawn_where_there_are_batches_enough(tmp_path: Path, steps: int) -> None:
    batches = [
        row
        for n in range(20)
        for row in progress(n, n * steps // 20 * 1000, ("order", 0, n, n + 1, 9, n))
    ]
    [*_, wall] = report_of(tmp_path, progress=batches, published=[publication(0)]).sections
    if steps < reading.FEWEST_STEPS:
        [batches_alone] = wall.figures
        assert (batches_alone.chart, batches_alone.rows) == (None, [])
        assert batches_alone.caption.startswith("20 batches of silver")
    else:
        assert [each.title for each in wall.figures if each.chart] == [
            *(CLOCKS, "Lead of order over the clock", MERGED, PUBLISHED, DELAYS)
        ]


# -- wall time


def test_a_clock_is_that_of_a_steps_last_batch(tmp_path: Path) -> None:
    batches = [
        row for n in range(10) for row in progress(n, n * 60_000 + 3, ("order", 0, n, n + 1, 9, n))
    ]
    later = progress(10, 9 * 60_000 + 4, ("order", 0, 10, 11, 99, 77))
    after_a_jump = progress(11, 10 * 60_000, ("order", 0, 12, 12, None, None))
    found = rows(report_of(tmp_path, progress=[*after_a_jump, *later, *batches]), CLOCKS)
    assert [row["clock"] for row in found] == [*range(9), 77, None]


@pytest.mark.usefixtures("few_batches_are_drawn")
def test_a_lead_is_the_largest_of_its_step_and_holds_to_the_end(tmp_path: Path) -> None:
    found = report_of(tmp_path, progress=BATCHES)
    leads = {
        of: [(row["at"] - NOW, row["lead"]) for row in rows(found, f"Lead of {of} over the clock")]
        for of in BOTH
    }
    assert leads == {
        "tracking": [(1000, 600), (4000, 0), (6000, 0)],
        "order": [(1000, 0), (4000, 50), (6000, 50)],
    }


@pytest.mark.usefixtures("few_batches_are_drawn")
def test_idle_is_where_the_policy_spoke(tmp_path: Path) -> None:
    decisions = [("order", 0, 10), ("order", 0, 900), ("order", 1, 239_000)]
    idle = [
        {
            "source": s,
            "topic": s,
            "partition": p,
            "after_offset": 1,
            "event_time": 5,
            "decided_at": NOW + at,
        }
        for s, p, at in decisions
    ]
    progressed = [row for p in range(2) for row in progress(0, 0, ("order", p, 0, 1, 9, 5))]
    found = report_of(tmp_path, progress=progressed, idle_heartbeats=idle)
    chart = figure(found, "Lead of order over the clock").chart
    assert chart is not None
    assert chart["layer"][0]["data"]["values"] == [
        {"of": "order", "partition": 0, "at": NOW, "until": NOW + 1000},
        {"of": "order", "partition": 1, "at": NOW + 239_000, "until": NOW + 240_000},
    ]


@pytest.mark.usefixtures("few_batches_are_drawn")
def test_a_jump_merges_nothing(tmp_path: Path) -> None:
    assert rates(report_of(tmp_path, progress=BATCHES), MERGED) == {
        "tracking": [5, 4, 0, 0, 1, 0],
        "order": [0, 6, 0, 0, 1, 0],
    }


@pytest.mark.usefixtures("few_batches_are_drawn")
def test_what_is_published_is_counted_by_its_sequence(tmp_path: Path) -> None:
    published = [
        publication(0, 0, 9),
        publication(999, 0, 0, partition=1),
        publication(2000, 10, 12),
    ]
    assert rates(report_of(tmp_path, published=published), PUBLISHED) == {
        "gold, all sources": [11, 0, 3]
    }


@pytest.mark.usefixtures("few_batches_are_drawn")
def test_publications_of_corrections_are_no_messages_of_the_sink(tmp_path: Path) -> None:
    own = [publication(100, 0, 9), publication(2000, 10, 11)]
    alone = report_of(tmp_path / "alone", progress=BATCHES, published=own)
    both = [*own, publication_of_corrections(300, 0, 40)]
    beside = report_of(tmp_path / "beside", progress=BATCHES, published=both)
    for title in (PUBLISHED, DELAYS, COUNTS):
        assert rows(beside, title) == rows(alone, title)


@pytest.mark.usefixtures("few_batches_are_drawn")
def test_a_delay_is_from_the_head_or_the_end_of_the_timeout_to_the_commit(tmp_path: Path) -> None:
    batch = progress(
        0,
        100,
        ("order", 0, 0, 1, NOW - 900, 1),
        ("order", 1, 0, 1, NOW + 50, 1),
        ("order", 2, 0, 1, None, None),
    )
    published = [
        publication(500, last_event_time=NOW + 300),
        publication(900, last_event_time=NOW - 200),
    ]
    found = rows(report_of(tmp_path, progress=batch, published=published), DELAYS)
    assert found == [
        {"of": "order", "at": NOW, "least": 0.05, "mean": 0.525, "most": 1.0},
        {"of": "gold, all sources", "at": NOW, "least": 0.1, "mean": 0.55, "most": 1.0},
    ]


def test_of_a_long_progress_the_latest_batches_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "LATEST_ROWS", 20)
    batches = [
        row
        for n in range(100)
        for row in progress(n, n * 1000, *((of, 0, n, n + 1, n, n) for of in BOTH))
    ]
    found = report_of(
        tmp_path, progress=batches, published=[publication(n * 1000, n, n) for n in range(100)]
    )
    assert sum(map(sum, rates(found, MERGED).values())) == 20
    assert sum(map(sum, rates(found, PUBLISHED).values())) == 10
    assert found.facts["last batch of silver"].startswith("99, committed at")
    assert "Only the latest batches" in page(found)


@pytest.mark.usefixtures("few_batches_are_drawn")
def test_the_partitions_that_are_furthest_behind_are_shown(tmp_path: Path) -> None:
    clocks = {p: None if p == 3 else 1000 - p for p in range(20)}
    found = report_of(
        tmp_path,
        progress=progress(0, 0, *(("order", p, 0, 1, 5000, clock) for p, clock in clocks.items())),
    )
    for title in (CLOCKS, "Lead of order over the clock"):
        assert {row["partition"] for row in rows(found, title)} == set(range(12, 20))


# -- Kafka's timestamps, event time, totals


@pytest.mark.usefixtures("few_batches_are_drawn")
@pytest.mark.parametrize("partitions", [SHOWN_PARTITIONS, SHOWN_PARTITIONS + 1])
def test_that_some_partitions_are_not_shown_is_said_where_it_is_so(
    tmp_path: Path, partitions: int
) -> None:
    every = (
        (source, p, 0, 1, 900, 500 + p)
        for p in range(partitions)
        for source in ("tracking", "order")
    )
    found = report_of(tmp_path, progress=progress(0, 0, *every))
    for title in (CLOCKS, "Lead of tracking over the clock"):
        said = "Shown are the 8 partitions" in figure(found, title).caption
        assert said == (partitions > SHOWN_PARTITIONS)


@pytest.mark.usefixtures("few_batches_are_drawn")
def test_a_source_has_one_colour_in_every_chart_of_throughput(tmp_path: Path) -> None:
    record = {"partition": 0, "offset": 0, "kafka_timestamp": NOW}
    for settled in (BATCHES, BATCHES[1:2]):  # whichever the query names first
        found = report_of(
            tmp_path / str(len(settled)),
            progress=settled,
            bronze_tracking=[record],
            bronze_order=[record],
        )
        for title in (MERGED, ARRIVED):
            chart = figure(found, title).chart
            assert chart is not None
            assert chart["layer"][0]["encoding"]["color"]["scale"]["domain"] == [*BOTH]


def test_a_rate_is_drawn_however_small_it_is(tmp_path: Path) -> None:
    day = 86_400_000  # in steps of half of one
    bronze = [{"partition": 0, "offset": n, "kafka_timestamp": NOW + n * 7 * day} for n in (0, 9)]
    found = rates(report_of(tmp_path, bronze_tracking=bronze), ARRIVED)["tracking"]
    assert [rate for rate in found if rate] == [pytest.approx(2 * 1000 / day, rel=0.001)] * 2


def test_a_timestamp_far_ahead_is_counted_and_leaves_the_others_their_room(tmp_path: Path) -> None:
    times = (NOW, NOW + 1000, LATER + AHEAD_MS + 1, LAST_EVENT_TIME_MS)
    bronze = [{"partition": 0, "offset": n, "kafka_timestamp": t} for n, t in enumerate(times)]
    found = report_of(tmp_path, bronze_tracking=bronze)
    assert rates(found, ARRIVED)["tracking"] == [1, 1]
    said = (
        " 2 records have a timestamp of Kafka's that is more than a day ahead, and are not drawn."
    )
    assert figure(found, ARRIVED).caption.endswith(said)


def test_every_record_arrived_in_one_step(tmp_path: Path) -> None:
    tracking = [
        {"partition": 0, "offset": n, "kafka_timestamp": NOW + n // 2 * 600} for n in range(10)
    ]
    found = report_of(tmp_path, bronze_tracking=tracking, bronze_order=tracking[:1])
    assert rates(found, ARRIVED) == {"tracking": [4, 4, 2], "order": [1, 0, 0]}


@pytest.mark.parametrize("seed", range(6))
def test_the_mean_of_a_step_is_what_a_look_at_every_ms_would_give(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    times = [rng.randint(0, 4999) for _ in range(rng.randint(1, 60))]
    jumped = merge_record(70, invalid_reason="reset", valid=False)
    silver = [*map(merge_record, times), jumped]
    found = rows(
        report_of(tmp_path, silver=silver, progress=progress(0, 0, ("order", 0, 0, 1, 9999, 6000))),
        OPEN,
    )
    end = max([70, *times]) + 100
    width = Steps.over([min(times), 70, min(end, 6000)], STEPS).width
    for row in found[:-1]:
        expected = (
            sum(
                time <= ms < time + 100
                for ms in range(row["at"], row["at"] + width)
                for time in times
            )
            / width
        )
        assert row["open"] == pytest.approx(expected, abs=0.001)


def test_a_step_that_the_clock_is_still_in_is_not_counted(tmp_path: Path) -> None:
    clocks = [("order", 0, 0, 0, 9, 2345), ("order", 1, 0, 0, 9, 2000)]
    found = rows(
        report_of(
            tmp_path,
            silver=[merge_record(0), merge_record(5), merge_record(2300, status="open")],
            progress=progress(0, 0, *clocks),
        ),
        OPEN,
    )
    assert [(row["at"], row["open"]) for row in (found[0], *found[-2:])] == [
        (0, 1.5),
        (2330, 1),
        (2345, 1),
    ]


@pytest.mark.parametrize("clock", [60, 2_000, 10**9])
def test_an_axis_ends_where_nothing_more_is_to_be_drawn_however_far_the_clock_is(
    tmp_path: Path, clock: int
) -> None:
    silver = [merge_record(n, order=1) for n in range(60)]
    of_clock = progress(0, 0, ("order", 0, 0, 9, clock, clock))
    found = report_of(tmp_path, silver=silver, progress=of_clock)
    ends = {}
    for title in (MATCHED, OPEN):
        chart = figure(found, title).chart
        assert chart is not None
        ends[title] = chart["layer"][0]["encoding"]["x"]["scale"]["domain"][1]
    assert ends[MATCHED] == 60
    assert ends[OPEN] == min(clock, 159) + 1
    assert rows(found, OPEN)[-1]["at"] == min(clock, 160)
    said = "Nothing is open from then on; the largest clock is " in figure(found, OPEN).caption
    assert said == (clock > 160)


def apart(count: int) -> list[Row]:
    """Merge records of one source each, of keys that the other one has in another partition."""
    return [
        merge_record(
            5,
            tracking=n % 2,
            order=1 - n % 2,
            merge_key=f"k{n // 2}",
            partition=n % 2,
            last_event_time=5,
        )
        for n in range(count)
    ]


def test_of_a_low_match_rate_it_is_said_why_records_may_not_match(tmp_path: Path) -> None:
    silver = [
        *(merge_record(5, order=1, merge_key=f"both{n}") for n in range(9)),
        *apart(40),
        *(merge_record(5, merge_key=f"alone{n}") for n in range(5)),
        merge_record(5, merge_key="K"),
        merge_record(5, tracking=0, order=1, merge_key="k"),
    ]
    found = report_of(tmp_path, silver=silver)
    assert figure(found, MATCHED).caption.startswith("Only 16.1% of the merge records have parts")
    reasons = rows(found, "Why merge records lack a source")
    assert [(row["why"], row["merge records"]) for row in reasons] == [
        ("another source has the key in another partition", 40),
        ("another source has the key, but for capital letters", 2),
        ("no other source has the key, of those that were looked at", 5),
    ]
    assert "repartition" in reasons[0]["what helps"]


def test_of_a_good_match_rate_nothing_more_is_said(tmp_path: Path) -> None:
    both = [merge_record(5, order=1, merge_key=f"b{n}") for n in range(50)]
    found = report_of(tmp_path, silver=[*both, *apart(40)])
    assert not any("Why" in each.title for section in found.sections for each in section.figures)


def test_what_looks_wrong_comes_first(tmp_path: Path) -> None:
    keys = [f"key {n}" for n in range(40)]
    values: dict[int, dict[str, list[bytes | None]]] = {
        p: {
            "tracking": [keyed(key, n) for n, key in enumerate(keys) if n % 2 == p],
            "orders": [keyed(key, n) for n, key in enumerate(keys) if n % 2 != p],
        }
        for p in range(2)
    }
    lake = bronze_of(lake_settings_for(tmp_path), values)
    found = read_report(lake.reader, lake.settings, NOW)
    [warning] = found.sections[0].figures[0].rows
    assert warning["what"].startswith("40 of 40 keys that tracking and orders share are in")
    assert "murmur2_random" in warning["what helps"]
    assert '<td class="prose">40 of 40 keys' in page(found)


def test_matched_are_those_with_parts_of_each_and_of_all(tmp_path: Path) -> None:
    silver = [
        *(
            merge_record(5, order=2),
            merge_record(5),
            merge_record(5, tracking=0, order=1),
            merge_record(5),
        ),
        *(
            merge_record(9000, order=1, status="open"),
            merge_record(9000, order=1, valid=False, invalid_reason="reset"),
        ),
        merge_record(9900, order=1, valid=False, invalid_reason="predicate"),
    ]
    found = report_of(tmp_path, silver=silver)
    shares = {
        of: [row["share"] for row in rows(found, MATCHED) if row["of"] == of]
        for of in (ALL_SOURCES, *BOTH)
    }
    assert {of: [share for share in each if share is not None] for of, each in shares.items()} == {
        ALL_SOURCES: [0.25, 1.0],
        "tracking": [0.75, 1.0],
        "order": [0.5, 1.0],
    }
    assert {len(each) for each in shares.values()} == {20}  # a step without records is a gap
    assert (
        "Of all 5 that have timed out (without those that a jump closed)."
        in figure(found, MATCHED).caption
    )


def test_of_many_merge_records_those_in_the_first_part_of_every_step_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "SAMPLED_RECORDS", 600)
    found = report_of(tmp_path, silver=[merge_record(n, order=n % 2) for n in range(12_000)])
    sampled = sum(row["merge records"] for row in rows(found, SIZES))
    assert 500 <= sampled <= 1300
    assert [row["of"] for row in rows(found, MATCHED)].count("order") == 60, (
        "about ten of those that are read in each"
    )
    assert f"Of {sampled:,} of the 12,000 that have timed out" in figure(found, SIZES).caption


def test_sizes_are_of_all_sources_together(tmp_path: Path) -> None:
    counts = [(1, 0), (1, 0), (0, 1), (2, 2), (8, 0), (8, 1), (10, 6), (17, 0)]
    silver = [merge_record(0, tracking=a, order=b) for a, b in counts]
    found = rows(
        report_of(tmp_path, silver=[*silver, merge_record(0, tracking=99, status="open")]), SIZES
    )
    assert [row["up to"] for row in found] == [*map(str, range(1, 9)), "16", "32"]
    assert [row["merge records"] for row in found] == [3, 0, 0, 1, 0, 0, 0, 1, 2, 1]


def test_durations_are_from_the_first_to_the_last_event_time(tmp_path: Path) -> None:
    silver = [merge_record(1000, lasts) for lasts in (0, 0, 1, 2, 3, 5, 1001)]
    found = rows(
        report_of(tmp_path, silver=[*silver, merge_record(0, 9999, status="open")]), DURATIONS
    )
    counts = {row["up to"]: row["merge records"] for row in found}
    assert {label: count for label, count in counts.items() if count} == {
        "0": 2,
        "1ms": 1,
        "2ms": 1,
        "5ms": 2,
        "2s": 1,
    }


def test_refused_are_told_by_reason_and_source(tmp_path: Path) -> None:
    late = [{"source": "order", "topic": "order", "partition": p, "offset": p} for p in range(3)]
    reasons = ["no_key", "undecodable", "no_key"]
    quarantine = [
        {"source": "tracking", "topic": "tracking", "partition": n, "offset": n, "reason": reason}
        for n, reason in enumerate(reasons)
    ]
    found = rows(report_of(tmp_path, late=late, quarantine=quarantine), REFUSED)
    expected = [("late", "order", 3), ("no_key", "tracking", 2), ("undecodable", "tracking", 1)]
    assert [tuple(row.values()) for row in found] == expected


def test_every_partition_is_counted(tmp_path: Path) -> None:
    batch = progress(
        7,
        0,
        ("tracking", 0, 0, 1, 900, 300),
        ("order", 0, 0, 1, 300, 300),
        ("order", 1, 0, 0, None, None),
    )
    found = report_of(
        tmp_path,
        progress=[*batch, *progress(6, 0, ("tracking", 0, 0, 1, 900, 100))],
        bronze_tracking=[{"partition": p, "offset": 0, "kafka_timestamp": NOW} for p in (0, 3)],
        bronze_order=[{"partition": 0, "offset": 0, "kafka_timestamp": NOW}],
        silver=[
            merge_record(5),
            merge_record(6, valid=False, invalid_reason="predicate"),
            merge_record(7, status="open", valid=None),
        ],
        late=[{"source": "order", "topic": "order", "partition": 0}],
        quarantine=[
            {"source": "order", "topic": "order", "partition": 3, "offset": 0, "reason": "no_key"}
        ],
        published=[publication(0, 0, 1)],
    )
    clock = "1970-01-01 00:00:00.300Z"
    assert [tuple(row.values()) for row in rows(found, COUNTS)] == [
        ("all", clock, 4, 1, 2, 1, 1, 0, 1, 2),
        ("0", clock, 2, 1, 2, 1, 1, 0, 0, 2),
        ("1", "-", 0, 0, 0, 0, 0, 0, 0, 0),
        ("3", "-", 2, 0, 0, 0, 0, 0, 1, 0),
    ]


def test_a_clock_is_of_the_newest_generation(tmp_path: Path) -> None:
    batch = progress(7, 0, ("tracking", 0, 0, 1, 900, 300), ("order", 0, 0, 1, 300, 300))
    generations = [
        Generation(number, first, {}, {}, kind="reset", decided_at=NOW)
        for number, first in enumerate((0, 8))
    ]
    settings = settings_for(tmp_path, BOTH)
    write_deltalake(
        Lake(settings).address(JOURNAL), journal_rows(decisions_of(generations)), mode="append"
    )
    found = report_of(tmp_path, progress=batch)
    assert [row["clock (UTC)"] for row in rows(found, COUNTS)] == ["-", "-"]
    again = progress(8, 0, ("tracking", 0, 0, 1, 200, 100), ("order", 0, 0, 1, 100, 100))
    found = report_of(tmp_path, progress=again)
    assert {row["clock (UTC)"] for row in rows(found, COUNTS)} == {"1970-01-01 00:00:00.100Z"}


def test_the_window_is_that_of_the_lake_and_not_of_an_edited_file(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    decided(Lake(settings), RULES, epoch_body(settings, 0, 0), NOW)
    assert read(settings_for(tmp_path, timeout="7s")).facts["timeout"] == "100ms"


# -- the whole


@pytest.mark.parametrize("is_there", [False, True], ids=["no tables", "empty tables"])
def test_a_lake_without_a_row_has_a_report(tmp_path: Path, is_there: bool) -> None:
    settings = settings_for(tmp_path)
    write_tables(settings, dict.fromkeys(river_of(settings, batches=1), ()) if is_there else {})
    found = read(settings)
    assert not any(
        figure.rows or figure.chart for section in found.sections for figure in section.figures
    )
    text = page(found)
    for sentence in (
        *(
            "The lake has no record yet.",
            "No record came late, and none was quarantined.",
            "none yet",
        ),
        *(
            "Silver has not merged anything yet.",
            "Bronze has no record yet.",
            "Silver has no merge record yet.",
        ),
    ):
        assert sentence in text


def test_bronze_alone_has_a_report(tmp_path: Path) -> None:
    found = report_of(
        tmp_path, bronze_tracking=[{"partition": 2, "offset": 0, "kafka_timestamp": NOW}]
    )
    assert [row["in bronze"] for row in rows(found, COUNTS)] == [1, 1]
    assert "chart-1" in page(found)


@pytest.mark.usefixtures("few_batches_are_drawn")
def test_sources_without_a_clock_have_a_page(tmp_path: Path) -> None:
    assert "No partition has a clock" in page(report_of(tmp_path, progress=BATCHES[:2]))


def test_merge_records_that_are_all_open_have_a_page(tmp_path: Path) -> None:
    assert "No merge record has timed out yet." in page(
        report_of(tmp_path, silver=[merge_record(5, status="open", valid=None)])
    )


@pytest.mark.parametrize(("sources", "seed"), [(("tracking", "orders"), 1), (("a", "b", "c"), 2)])
def test_a_river_adds_up(tmp_path: Path, sources: tuple[str, ...], seed: int) -> None:
    settings = settings_for(tmp_path, sources, timeout="30m")
    lake = river_of(settings, partitions=10, batches=60, seed=seed)
    write_tables(settings, lake)
    found = read(settings)
    passed = Counter[str]()
    for row in lake[PROGRESS]:
        passed[row["source"]] += row["until_offset"] - row["from_offset"]
    for title in (MERGED, ARRIVED):
        width = rows(found, title)[1]["at"] - rows(found, title)[0]["at"]
        totals = {
            of: round(sum(numbers) * width / 1000) for of, numbers in rates(found, title).items()
        }
        assert totals == pytest.approx(passed, abs=20)
    timed_out = [row for row in lake[SILVER] if row["status"] == "timed_out"]
    for title in (SIZES, DURATIONS):
        assert sum(row["merge records"] for row in rows(found, title)) == len(timed_out)
    assert rows(found, COUNTS)[0]["published"] == len(timed_out)
    assert sum(row["records"] for row in rows(found, REFUSED)) == len(lake[LATE]) + len(
        lake[QUARANTINE]
    )
    assert len({row["partition"] for row in rows(found, CLOCKS)}) == 8


def test_no_chart_grows_with_the_lake(tmp_path: Path) -> None:
    rng, batches = random.Random(5), []
    for batch in range(5000):
        clock = batch * 977_777
        sources = [("tracking", clock + rng.choice([0, 50])), ("order", clock)]
        batches += progress(
            batch,
            batch * 1_234_567,
            *((s, 0, batch, batch + 1, head, clock) for s, head in sources),
        )
    silver = [merge_record(n * 977_777, n % 100, tracking=1 + n % 40) for n in range(5000)]
    published = [
        publication(n * 1_234_567, n, n, last_event_time=(n - 1) * 977_777) for n in range(1, 5000)
    ]
    bronze = [
        {"partition": 0, "offset": n, "kafka_timestamp": NOW + n * 1_000_000} for n in range(5000)
    ]
    lake = {
        "progress": batches,
        "silver": silver,
        "published": published,
        "bronze_tracking": bronze,
        "bronze_order": bronze,
    }
    found = report_of(tmp_path, BOTH, **lake)
    most = dict.fromkeys((CLOCKS, OPEN, PUBLISHED), STEPS) | dict.fromkeys(
        (MERGED, ARRIVED), 2 * STEPS
    )
    most |= dict.fromkeys((DELAYS, MATCHED), 3 * STEPS)
    for title, limit in most.items():
        assert limit / 3 < len(rows(found, title)) <= limit + 2
    assert len(rows(found, SIZES)) + len(rows(found, DURATIONS)) <= 32 + 36
    assert len(page(found)) < 2_000_000


# -- tenants


def tenants_report(folder: Path, shares: float = 1.0) -> Report:
    """Of the known case of tenants, up to a share of what arrives."""
    lake = ModelLake(settings_with_tenants(folder), {0: known_case(), 1: known_case()})
    lake.arrive(shares)
    lake.merge()
    return read_report(lake.reader, lake.settings, NOW)


def test_of_tenants_it_says_who_is_furthest_behind(tmp_path: Path) -> None:
    report = tenants_report(tmp_path)
    assert report.facts["tenant_max_lag"] == "1s"
    every, first, _ = rows(report, COUNTS)
    names = ("open", "waiting", "timed out", "late")
    assert [first[name] for name in names] == [2, 1, 1, 1]
    assert [every[name] for name in names] == [4, 2, 2, 2]
    slowest = rows(report, "Slowest tenants")
    assert [tuple(row.values()) for row in slowest] == [
        ("z", 0, "1970-01-01 00:00:04.300Z", "1s", 1, 0),
        ("z", 1, "1970-01-01 00:00:04.300Z", "1s", 1, 0),
        ("y", 0, "1970-01-01 00:00:04.420Z", "880ms", 1, 1),
        ("y", 1, "1970-01-01 00:00:04.420Z", "880ms", 1, 1),
    ]
    assert figure(report, "Slowest tenants").caption.endswith(
        "of 4 with something open or waiting."
    )
    assert "Slowest tenants" in page(report)


def test_what_waits_for_its_tenant_is_no_merge_record_yet(tmp_path: Path) -> None:
    """At this share, one record of each partition waits and nothing is merged."""
    report = tenants_report(tmp_path, 0.2)
    assert [row["waiting"] for row in rows(report, COUNTS)] == [2, 1, 1]
    assert figure(report, "Merge records").caption == "Silver has no merge record yet."


def test_a_lake_without_tenants_says_nothing_of_them(tmp_path: Path) -> None:
    report = report_of(tmp_path)
    assert "tenant_max_lag" not in report.facts
    assert "Slowest tenants" not in [
        figure.title for section in report.sections for figure in section.figures
    ]
