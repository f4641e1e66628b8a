"""Checks 3 and 4: silver's rows are unique, and time has done to them what the clock says; the clock is bronze's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import Column, DataFrame, Row
from pyspark.sql import functions as F

from pipelines.audit.validate import Problem
from pipelines.audit.verify_evidence import REBUILD, Evidence, Findings, first_of
from pipelines.core.plan import TopicPartition
from pipelines.transforms.ranges import by_partition


def place(partition: int, key: str, event_time: int | None) -> str:
    """A merge record's coordinates; event time in ms."""
    return f"silver: partition {partition}, key {key!r}" + ("" if event_time is None else f", event_time {event_time}")


# -- check 3


def check_unique(evidence: Evidence) -> Findings:
    """A key has at most one open row in a partition, and no other row with the same event time.

    Rows that a reset closed are apart: after it the same time may come again.
    """
    rows = (
        evidence.silver.where("invalid_reason IS DISTINCT FROM 'reset'")
        .withColumn("stretch", F.when(F.col("status") == "timed_out", evidence.stretch_of(F.col("batch"))))
        .withColumn("event_time", F.unix_millis("event_time"))
    )
    times = F.sort_array(F.collect_list("event_time")).alias("times")
    open_rows = rows.where("status = 'open'").groupBy("partition", "merge_key").agg(times).where(F.size("times") > 1)
    last = F.lit(len(evidence.stretches) - 1)
    by_time = rows.groupBy(F.coalesce("stretch", last).alias("stretch"), "partition", "merge_key", "event_time")
    same = by_time.agg(F.count(F.lit(1)).alias("rows"), F.count_if(F.col("status") == "open").alias("open"))
    # Two open rows with one event time are told above.
    same = same.where((F.col("rows") > 1) & (F.col("open") < 2))
    one_time = F.array("event_time").alias("times")
    same = same.select("partition", "merge_key", one_time, "rows", F.lit(False).alias("is_open"))
    both = same.union(open_rows.select("partition", "merge_key", "times", F.size("times"), F.lit(True)))

    def describe(row: Row) -> Problem:
        if row.is_open:
            what = f"{row.rows} open rows for one key, with event times {', '.join(map(str, row.times))}"
        else:
            what = f"{row.rows} rows with the same partition, key and event time"
        return Problem(what, place(row.partition, row.merge_key, row.times[0]), REBUILD)

    return first_of(both, ["partition", "merge_key", "times"], describe)


# -- check 4


def check_time_outs(evidence: Evidence) -> Findings:
    """A row is open as long as its event time is not before clock - timeout, and no longer."""
    clock = _clock_of_stretch(evidence)
    is_past = F.coalesce(F.unix_millis("event_time") < F.col("clock") - evidence.settings.merge.timeout_ms, F.lit(False))
    is_open, is_reset = F.col("status") == "open", F.coalesce(F.col("invalid_reason") == "reset", F.lit(False))
    was_left = F.col("stretch") < len(evidence.stretches) - 1
    wrong = (
        evidence.silver.withColumn("stretch", evidence.stretch_of(F.col("batch")))
        .withColumn("clock", clock)
        .where((is_open & (is_past | was_left)) | (~is_open & ~is_reset & ~is_past))
        .select("partition", "merge_key", F.unix_millis("event_time").alias("event_time"), "status", "clock", "batch")
    )

    def describe(row: Row) -> Problem:
        timeout_ms = evidence.settings.merge.timeout_ms
        limit = "has not begun" if row.clock is None else f"is {row.clock} and the timeout {timeout_ms} ms"
        state = "open" if row.status == "open" else "timed out"
        return Problem(
            f"the row is {state} although the clock {limit}", place(row.partition, row.merge_key, row.event_time), REBUILD
        )

    return first_of(wrong, ["partition", "merge_key", "event_time"], describe)


def check_clock(evidence: Evidence) -> Findings:
    """The clock is the smallest head that the last batch considered, and bronze gets as far as each head; every record whose
    position the clock has reached is passed, and no other.
    """
    found = {(r.stretch, TopicPartition(r.source, r.partition)): r for r in _extremes(evidence).collect()}
    problems = []
    for i, stretch in enumerate(evidence.stretches):
        is_last = i == len(evidence.stretches) - 1
        for tp in stretch.until:
            row, clock, head = found.get((i, tp)), stretch.clocks.get(tp.partition), stretch.heads.get(tp)
            known = None if row is None else row["head"]
            if is_last:  # what an earlier stretch considered beyond its end is not looked at again
                at = f"progress: {evidence.settings.sources[tp.source].topic}[{tp.partition}]"
                problems += _beyond_bronze({"head": head, "clock": clock}, known, at)
            if row is None:
                continue
            if row.ahead is not None:
                what = f"passed, although its position is beyond the clock {_or_none(clock)}"
                problems.append(Problem(what, evidence.at(*tp, row.ahead), REBUILD))
            # At the clock's own position there may be records that the last batch did not consider yet.
            behind = row.level if row.behind is None and head != clock else row.behind
            if behind is not None:
                what = f"not passed, although the clock {clock} has reached its position"
                problems.append(Problem(what, evidence.at(*tp, behind), REBUILD))
        problems += _clocks_that_are_no_smallest_head(evidence, i)
    return Findings(problems)


def _beyond_bronze(times: Mapping[str, int | None], known: int | None, at: str) -> list[Problem]:
    """The first time that bronze does not get to."""
    beyond = [(name, time) for name, time in times.items() if time is not None and (known is None or time > known)]
    return [Problem(f"the {name} is {time}, and bronze gets to {_or_none(known)}", at, REBUILD) for name, time in beyond[:1]]


def _clocks_that_are_no_smallest_head(evidence: Evidence, index: int) -> list[Problem]:
    stretch, problems = evidence.stretches[index], []
    for partition in {tp.partition for tp in stretch.until}:
        heads = [stretch.heads.get(TopicPartition(source, partition)) for source in evidence.settings.sources]
        smallest = None if None in heads else min(head for head in heads if head is not None)
        clock = stretch.clocks.get(partition)
        if clock != smallest:
            what = f"the clock is {_or_none(clock)}, and the smallest head {_or_none(smallest)}"
            problems.append(Problem(what, f"progress: partition {partition}", REBUILD))
    return problems


def _extremes(evidence: Evidence) -> DataFrame:
    """Per stretch and topic-partition: the head in bronze; the first offset passed beyond the clock (`ahead`), and the first that
    was not passed before it (`behind`) and at it (`level`).
    """
    is_record, is_passed = ~F.col("is_idle"), F.col("is_passed")
    position, clock = F.col("position"), F.col("clock")

    def first(condition: Column) -> Column:
        return F.min(F.when(is_record & condition, F.col("offset")))

    return (
        evidence.records()
        .withColumn("clock", _clock_of_stretch(evidence))
        .groupBy("stretch", "source", "partition")
        .agg(
            F.max("position").alias("head"),
            first(is_passed & (clock.isNull() | (position > clock))).alias("ahead"),
            first(~is_passed & (position < clock)).alias("behind"),
            first(~is_passed & (position == clock)).alias("level"),
        )
    )


def _clock_of_stretch(evidence: Evidence) -> Column:
    """The clock (ms) of the row's `stretch` and `partition`, else null."""
    clocks = [F.when(F.col("stretch") == i, by_partition(s.clocks)) for i, s in enumerate(evidence.stretches)]
    return reduce(lambda one, other: F.coalesce(one, other), clocks)


def _or_none(value: object) -> object:
    return "none" if value is None else value
