"""What the report reads from a lake, against numbers by hand or by plain loops; and Spark's answers against those without it."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.audit.report import LastBatch, PartitionCounts, arrivals, last_batch, partitions, read_report
from pipelines.audit.report_merge import (
    Column,
    MatchedIn,
    OpenIn,
    Refused,
    durations,
    matched,
    open_in,
    read_event_time,
    refused,
    sizes,
)
from pipelines.audit.report_page import page
from pipelines.audit.report_steps import Steps
from pipelines.audit.report_wall import (
    RATE_STEPS,
    STEPS,
    ClockAt,
    CountIn,
    DelayIn,
    LeadIn,
    Stretch,
    ages,
    clocks,
    delays_to_gold,
    delays_to_silver,
    held,
    idle,
    leads,
    merge_times,
    merged,
    published,
)
from pipelines.settings import Settings
from tests.support.cases import random_case
from tests.support.lakes import CaseLake, settings_for
from tests.support.report_lakes import LakeWithoutSpark, Row, columns_of, parts, river_of, write_tables

NOW = 1_768_780_800_000
"""A wall time."""

WALL = Steps(NOW, 1000, 6)
EVENT = Steps(0, 100, 5)


def lake_of(folder: Path, sources: tuple[str, ...] = ("tracking", "order"), **rows: list[Row]) -> tuple[Lake, Settings]:
    """A lake with a timeout of 100 ms and these tables; `order` is a word of SQL's own."""
    settings = settings_for(folder, sources=sources)
    write_tables(settings, rows)
    return LakeWithoutSpark(settings), settings


def progress(batch: int, after_ms: int, *places: tuple[str, int, int, int, int | None, int | None], **more: Any) -> list[Row]:
    """A batch's rows, from (source, partition, from, until, head, clock)."""
    names = ("source", "partition", "from_offset", "until_offset", "head", "clock")
    return [{"batch": batch, "committed_at": NOW + after_ms, **dict(zip(names, place, strict=True)), **more} for place in places]


def merge_record(event_time: int, lasts: int = 0, tracking: int = 1, order: int = 0, **more: Any) -> Row:
    row = {"partition": 0, "merge_key": "k", "status": "timed_out", "valid": True, "batch": 0}
    row |= {"event_time": event_time, "last_event_time": event_time + lasts}
    return row | {"tracking": parts(*range(tracking)), "order": parts(*range(order))} | more


# -- wall time


BATCHES = [
    *progress(0, 100, ("tracking", 0, 0, 5, 900, None), ("order", 0, 0, 0, None, None)),
    *progress(1, 1100, ("tracking", 0, 5, 8, 900, 300), ("order", 0, 0, 2, 300, 300)),
    *progress(2, 1900, ("tracking", 0, 8, 9, 900, 500), ("order", 0, 2, 6, 500, 500)),
    *progress(3, 4000, ("tracking", 0, 9, 10, 900, 900), ("order", 0, 6, 7, 950, 900)),
    *progress(4, 5000, ("tracking", 0, 10, 99, None, None), ("order", 0, 7, 2, None, None), reason="reset --to latest"),
]


def test_a_clock_is_that_of_a_steps_last_batch(tmp_path: Path) -> None:
    lake, _ = lake_of(tmp_path, progress=BATCHES)
    expected = [(1000, None), (2000, 500), (5000, 900), (6000, None)]
    assert clocks(lake, WALL, [0, 1]) == [ClockAt(0, NOW + at, clock) for at, clock in expected]
    assert clocks(lake, WALL, [1]) == clocks(lake, WALL, []) == []


def test_a_lead_is_the_largest_of_its_step(tmp_path: Path) -> None:
    lake, _ = lake_of(tmp_path, progress=BATCHES)
    assert leads(lake, WALL, [0]) == [
        LeadIn("order", 0, NOW + 1000, 0),
        LeadIn("order", 0, NOW + 4000, 50),
        LeadIn("tracking", 0, NOW + 1000, 600),
        LeadIn("tracking", 0, NOW + 4000, 0),
    ]


def test_held_is_who_waits_in_a_step_and_until_the_next_batch(tmp_path: Path) -> None:
    lake, _ = lake_of(tmp_path, progress=BATCHES)
    assert held(lake, WALL, [0]) == [
        Stretch("order", 0, "held", NOW + 4000, NOW + 5000),
        Stretch("tracking", 0, "held", NOW, NOW + 4000),
    ]


def test_held_for_a_part_of_a_step_does_not_go_on_after_it(tmp_path: Path) -> None:
    rows = [*progress(0, 0, ("order", 0, 0, 1, 9, 5)), *progress(1, 500, ("order", 0, 1, 2, 9, 9))]
    lake, _ = lake_of(tmp_path, progress=[*rows, *progress(2, 3000, ("order", 0, 2, 2, 9, 9))])
    assert held(lake, WALL, [0]) == [Stretch("order", 0, "held", NOW, NOW + 1000)]


def test_idle_is_where_the_policy_spoke(tmp_path: Path) -> None:
    spoken = [("order", 0, 10), ("order", 0, 900), ("order", 0, 1500), ("order", 0, 3000), ("order", 1, 3000)]
    rows = [{"source": s, "partition": p, "after_offset": 1, "event_time": 5, "decided_at": NOW + at} for s, p, at in spoken]
    lake, _ = lake_of(tmp_path, idle_heartbeats=rows)
    expected = [(0, 2000), (3000, 4000)]
    assert idle(lake, WALL, [0]) == [Stretch("order", 0, "idle", NOW + since, NOW + until) for since, until in expected]


def test_a_jump_merges_nothing(tmp_path: Path) -> None:
    lake, _ = lake_of(tmp_path, progress=BATCHES)
    expected = {"tracking": [5, 4, 0, 0, 1, 0], "order": [0, 6, 0, 0, 1, 0]}
    found = merged(lake, WALL, ["tracking", "order"])
    assert found == [CountIn(s, at, n) for s in expected for at, n in zip(WALL.starts, expected[s], strict=True)]


def test_what_is_published_is_counted_by_its_sequence(tmp_path: Path) -> None:
    seqs = [(0, 0, 9, 0), (1, 0, 0, 999), (0, 10, 12, 2000)]
    rows = [{"partition": p, "first_seq": a, "last_seq": b, "committed_at": NOW + at} for p, a, b, at in seqs]
    lake, _ = lake_of(tmp_path, published=rows)
    assert [count.total for count in published(lake, WALL)] == [11, 0, 3, 0, 0, 0]


def test_an_age_is_from_the_clock_to_the_batch(tmp_path: Path) -> None:
    rows = progress(0, 100, ("a", 0, 0, 1, 9, NOW - 900), ("a", 1, 0, 1, 9, NOW + 50), ("a", 2, 0, 1, 9, None))
    lake, _ = lake_of(tmp_path, progress=rows)
    assert ages(lake, WALL) == [DelayIn("clock", NOW, 50, 525, 1000)]


def test_a_merge_takes_from_the_decision_to_the_commit(tmp_path: Path) -> None:
    versions = [{"batch": batch, "version": batch, "committed_at": NOW + at} for batch, at in [(1, 1500), (2, 2700), (4, 5001)]]
    lake, _ = lake_of(tmp_path, progress=BATCHES, versions=versions)
    assert merge_times(lake, WALL) == [DelayIn("merge", NOW + 1000, 400, 600, 800), DelayIn("merge", NOW + 5000, 1, 1, 1)]


def test_the_delay_to_silver_is_of_the_last_record_that_a_batch_passed(tmp_path: Path) -> None:
    sent = {0: NOW - 5000, 4: NOW - 400, 7: NOW + 900, 8: NOW + 1000}
    bronze = [{"partition": 0, "offset": offset, "kafka_timestamp": at} for offset, at in sent.items()]
    lake, _ = lake_of(tmp_path, progress=BATCHES, bronze_tracking=bronze, bronze_order=[])
    found = delays_to_silver(lake, WALL, "tracking")
    assert found == [DelayIn("tracking", NOW, 500, 500, 500), DelayIn("tracking", NOW + 1000, 200, 550, 900)]
    assert delays_to_silver(lake, WALL, "order") == []


def test_the_delay_to_gold_is_of_the_last_message_of_a_transaction(tmp_path: Path) -> None:
    silver = [
        merge_record(10, batch=1),
        merge_record(20, merge_key="a", batch=2),
        merge_record(20, merge_key="b", batch=1),
        merge_record(20, merge_key="a", batch=3),  # merged once more, after a jump back
        merge_record(20, merge_key="a", batch=0, valid=False, invalid_reason="reset"),
    ]
    notes = [(10, "k", 2100), (20, "a", 2500), (20, "none", 2600)]
    rows = [{"partition": 0, "last_event_time": t, "last_key": key, "committed_at": NOW + at} for t, key, at in notes]
    lake, _ = lake_of(tmp_path, progress=BATCHES, published=rows, silver=silver)
    assert delays_to_gold(lake, WALL) == [DelayIn("silver to gold", NOW + 2000, 600, 800, 1000)]


def test_what_is_written_meanwhile_is_left_out(tmp_path: Path) -> None:
    spoken = [{"source": "order", "partition": 0, "decided_at": NOW + at} for at in (500, 4000)]
    lake, _ = lake_of(tmp_path, progress=BATCHES, idle_heartbeats=spoken)
    earlier = WALL._replace(number=2)
    assert [at.at for at in clocks(lake, earlier, [0])] == [NOW + 1000, NOW + 2000]
    assert {at.at for at in leads(lake, earlier, [0])} == {at.at for at in ages(lake, earlier)} == {NOW + 1000}
    assert {s.until for s in held(lake, earlier, [0])} == {NOW + 2000}
    assert [s.until for s in idle(lake, earlier, [0])] == [NOW + 1000]
    assert sum(count.total for count in merged(lake, earlier, ["tracking", "order"])) == 15


# -- Kafka's timestamps, event time, totals


def test_every_record_arrived_in_one_step(tmp_path: Path) -> None:
    tracking = [{"partition": 0, "offset": n, "kafka_timestamp": NOW + n * 300} for n in range(10)]
    lake, settings = lake_of(tmp_path, bronze_tracking=tracking, bronze_order=tracking[:1])
    found = arrivals(lake, settings)
    assert found is not None
    assert found.steps == Steps(NOW, 1000, 3)
    counts = {source: [at.total for at in found.records if at.of == source] for source in settings.sources}
    assert counts == {"tracking": [4, 3, 3], "order": [1, 0, 0]}


def test_open_is_counted_from_the_first_event_until_the_timeout(tmp_path: Path) -> None:
    rows = [merge_record(0), merge_record(50), merge_record(250, status="open"), merge_record(60, invalid_reason="reset")]
    lake, _ = lake_of(tmp_path, silver=rows)
    assert open_in(lake, EVENT, 100) == [OpenIn(i * 100, mean) for i, mean in enumerate([1.5, 0.5, 0.5, 0.5, 0.0])]


@pytest.mark.parametrize("seed", range(8))
def test_the_mean_of_a_step_is_what_a_look_at_every_ms_would_give(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    times = [rng.randint(0, 499) for _ in range(rng.randint(1, 60))]
    lake, _ = lake_of(tmp_path, silver=[merge_record(time) for time in times])
    timeout_ms = rng.choice([1, 30, 100, 250])
    width = rng.choice([10, 50, 100])
    steps = Steps(0, width, 500 // width)
    expected = [sum(time <= ms < time + timeout_ms for ms in range(s, s + width) for time in times) / width for s in steps.starts]
    assert [known.mean for known in open_in(lake, steps, timeout_ms)] == pytest.approx(expected)


def test_a_step_that_the_clock_is_still_in_is_not_counted(tmp_path: Path) -> None:
    lake, settings = lake_of(tmp_path, silver=[merge_record(0), merge_record(5)])
    found = read_event_time(lake, settings, [2345, 2000])
    assert found is not None
    assert found.steps == Steps(0, 10, 235)
    assert found.complete_until == 2000
    assert [found.open[0].mean, found.open[-1].at, found.open[-1].mean] == [1.5, 2330, 0.0]


def test_matched_are_those_with_parts_of_each_and_of_all(tmp_path: Path) -> None:
    rows = [
        *(merge_record(5, order=2), merge_record(10), merge_record(99, tracking=0, order=1)),
        *(merge_record(200), merge_record(201, order=1, status="open"), merge_record(202, order=1, invalid_reason="reset")),
        merge_record(203, order=1, valid=False, invalid_reason="predicate"),
    ]
    lake, _ = lake_of(tmp_path, silver=rows)
    assert matched(lake, EVENT, ["tracking", "order"]) == [MatchedIn(0, 3, (2, 2), 1), MatchedIn(200, 2, (2, 1), 1)]


def test_sizes_are_of_all_sources_together(tmp_path: Path) -> None:
    counts = [(1, 0), (1, 0), (0, 1), (2, 2), (8, 0), (8, 1), (10, 6), (17, 0)]
    rows = [merge_record(0, tracking=a, order=b) for a, b in counts]
    lake, settings = lake_of(tmp_path, silver=[*rows, merge_record(0, tracking=99, status="open")])
    found = sizes(lake, settings)
    assert [(c.least, c.most) for c in found] == [*((n, n) for n in range(1, 9)), (9, 16), (17, 32)]
    assert [c.records for c in found] == [3, 0, 0, 1, 0, 0, 0, 1, 2, 1]


def test_durations_are_from_the_first_to_the_last_event_time(tmp_path: Path) -> None:
    rows = [merge_record(1000, lasts) for lasts in (0, 0, 1, 2, 3, 80)]
    lake, _ = lake_of(tmp_path, silver=[*rows, merge_record(0, 99, status="open")])
    found = durations(lake)
    assert found[:3] == [Column(0, 0, 2), Column(1, 2, 2), Column(3, 4, 1)]
    assert found[-1] == Column(79, 80, 1)
    assert sum(column.records for column in found) == 6


def test_durations_of_nothing_but_single_parts_are_none(tmp_path: Path) -> None:
    lake, _ = lake_of(tmp_path, silver=[merge_record(5)])
    assert durations(lake) == [Column(0, 0, 1)]


def test_refused_are_told_by_reason_and_source(tmp_path: Path) -> None:
    late = [{"source": "order", "partition": p, "offset": p} for p in range(3)]
    quarantine = [{"source": "tracking", "offset": n, "reason": r} for n, r in enumerate(["no_key", "undecodable", "no_key"])]
    lake, _ = lake_of(tmp_path, late=late, quarantine=quarantine)
    expected = [("late", "order", 3), ("no_key", "tracking", 2), ("undecodable", "tracking", 1)]
    assert refused(lake) == [Refused(*row) for row in expected]


def test_every_partition_is_counted(tmp_path: Path) -> None:
    batch = progress(7, 0, ("tracking", 0, 0, 1, 900, 300), ("order", 0, 0, 1, 300, 300), ("order", 1, 0, 0, None, None))
    lake, settings = lake_of(
        tmp_path,
        progress=[*progress(6, 0, ("tracking", 0, 0, 1, 900, 100)), *batch],
        bronze_tracking=[{"partition": 0}, {"partition": 3}],
        bronze_order=[{"partition": 0}],
        silver=[merge_record(5), merge_record(6), merge_record(7, status="open")],
        late=[{"partition": 0}],
        quarantine=[{"partition": 3}],
        published=[{"partition": 0, "first_seq": 0, "last_seq": 1}],
    )
    assert partitions(lake, settings) == [
        PartitionCounts(0, 300, bronze=2, open=1, timed_out=2, late=1, published=2),
        PartitionCounts(1, None),
        PartitionCounts(3, None, bronze=1, quarantined=1),
    ]
    assert last_batch(lake) == LastBatch(7, NOW)


# -- the whole


@pytest.mark.parametrize("is_there", [False, True], ids=["no tables", "empty tables"])
def test_a_lake_without_a_row_has_a_report(tmp_path: Path, is_there: bool) -> None:
    settings = settings_for(tmp_path)
    write_tables(settings, dict.fromkeys(columns_of(settings), ()) if is_there else {})
    found = read_report(LakeWithoutSpark(settings), settings, NOW)
    assert (found.last, found.wall, found.arrivals, found.events) == (None, None, None, None)
    assert (found.partitions, found.shown, found.refused, found.sizes, found.durations) == ([], [], [], [], [])
    assert "Silver has not merged anything yet." in page(found)


def test_bronze_alone_has_a_report(tmp_path: Path) -> None:
    lake, settings = lake_of(tmp_path, bronze_tracking=[{"partition": 2, "offset": 0, "kafka_timestamp": NOW}])
    found = read_report(lake, settings, NOW)
    assert found.partitions == [PartitionCounts(2, None, bronze=1)]
    assert "chart-1" in page(found)


def test_sources_that_have_no_clock_are_held_and_have_a_page(tmp_path: Path) -> None:
    lake, settings = lake_of(tmp_path, progress=BATCHES[:2])
    found = read_report(lake, settings, NOW)
    assert found.wall is not None
    assert [s.source for s in found.wall.stretches] == ["tracking"]
    assert "No partition has a clock" in page(found)


@pytest.mark.parametrize(("sources", "seed"), [(("tracking", "orders"), 1), (("a", "b", "c"), 2)])
def test_a_river_adds_up(tmp_path: Path, sources: tuple[str, ...], seed: int) -> None:
    settings = settings_for(tmp_path, sources=sources, merge__timeout="30m")
    rows = river_of(settings, partitions=10, batches=60, seed=seed)
    write_tables(settings, rows)
    found = read_report(LakeWithoutSpark(settings), settings, NOW)
    wall, events, arrived = found.wall, found.events, found.arrivals
    assert wall is not None
    assert events is not None
    assert arrived is not None
    passed = Counter[str]()
    for row in rows[tables.PROGRESS]:
        passed[row["source"]] += row["until_offset"] - row["from_offset"]
    merged_by: Counter[str] = Counter()
    for count in wall.merged:
        merged_by[count.of] += count.total
    assert merged_by == passed
    assert Counter({s: sum(a.total for a in arrived.records if a.of == s) for s in sources}) == passed
    timed_out = [row for row in rows[tables.SILVER] if row["status"] == "timed_out"]
    assert sum(count.total for count in wall.published) == len(timed_out)
    assert sum(step.records for step in events.matched) == len(timed_out)
    assert sum(step.by_all for step in events.matched) == sum(all(row[s] for s in sources) for row in timed_out)
    assert sum(column.records for column in found.sizes) == sum(column.records for column in found.durations) == len(timed_out)
    assert sum(row.records for row in found.refused) == len(rows[tables.LATE]) + len(rows[tables.QUARANTINE])
    assert len(found.shown) == 8
    assert {at.partition for at in wall.clocks} == set(found.shown)


def test_no_chart_grows_with_the_lake(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    rng, rows = random.Random(5), []
    for batch in range(5000):
        clock = batch * 977_777
        sources = [("tracking", clock + rng.choice([0, 50])), ("orders", clock)]
        places = [(source, 0, batch, batch + 1, head, clock) for source, head in sources]
        rows += progress(batch, batch * 1_234_567, *places)
    silver = [merge_record(n * 977_777, n % 100, tracking=1 + n % 40, orders=[]) for n in range(5000)]
    publications = [{"partition": 0, "first_seq": n, "last_seq": n, "committed_at": NOW + n * 1_234_567} for n in range(5000)]
    bronze = [{"partition": 0, "offset": n, "kafka_timestamp": NOW + n * 1_000_000} for n in range(5000)]
    tables_of = {"progress": rows, "silver": silver, "published": publications}
    write_tables(settings, tables_of | {"bronze_tracking": bronze, "bronze_orders": bronze})
    found = read_report(LakeWithoutSpark(settings), settings, NOW)
    wall, events, arrived = found.wall, found.events, found.arrivals
    assert wall is not None
    assert events is not None
    assert arrived is not None
    assert RATE_STEPS / 3 < len(wall.published) <= RATE_STEPS
    assert STEPS / 3 < len(wall.clocks) <= STEPS
    assert STEPS / 3 < len(events.open) <= STEPS
    for series in (wall.merged, wall.leads, wall.to_silver, arrived.records):
        assert RATE_STEPS / 3 < len(series) / 2 <= RATE_STEPS
    assert len(wall.stretches) <= STEPS
    assert max(len(events.matched), len(wall.ages)) <= RATE_STEPS
    assert len(found.sizes) + len(found.durations) <= 32 + 41
    assert len(page(found)) < 2_000_000


def test_spark_answers_as_it_is_answered_without(spark: SparkSession, tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    cases = CaseLake(spark, settings, {p: random_case(p + 40) for p in range(10)})
    for share in (0.5, 1.0):
        cases.arrive(share)
        cases.merge()
    lake = cases.lake
    last = last_batch(lake)
    assert last is not None
    of_silver = "SELECT `partition`, merge_key, event_time FROM {silver} WHERE valid ORDER BY event_time DESC LIMIT 1"
    [(partition, key, event_time)] = lake.rows(of_silver)
    lake.append_rows([(partition, 0, 2, event_time, key, 2, last.committed_at + 500, "merged")], tables.PUBLISHED)
    lake.append_rows([("orders", "orders", 0, 3, 9, NOW)], tables.IDLE_HEARTBEATS)
    without = read_report(lake, settings, NOW)
    lake._local = None
    assert not lake.is_local
    assert read_report(lake, settings, NOW) == without
    assert without.wall is not None
    assert without.wall.to_gold
    assert without.wall.to_silver
    assert without.wall.merges
    assert without.events is not None
    assert without.events.matched
    assert without.refused
    assert len(page(without)) > 500_000
