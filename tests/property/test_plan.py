"""Laws of the batch plan: however bronze is cut into batches, the same is merged, at the same
time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import SOURCES, rules_of
from tests.support.effort import draws
from tests.support.inputs import record_of, tp_of
from tests.support.merges import outcome
from tests.support.strategies import TIMEOUT_MS, BronzeRow, topic_partitions
from watersmeet.core.columns import NULL_TIME
from watersmeet.core.model import PartitionMerge
from watersmeet.core.plan import Available, BatchPlan, Cursor, Rules, TopicPartition, plan_batch
from watersmeet.core.window import Window

pytestmark = [pytest.mark.promise("C17"), pytest.mark.fault("cuts", oracle=True)]

Bronze = Mapping[TopicPartition, list[BronzeRow]]
Cursors = Mapping[TopicPartition, Cursor]

EVERY = [tp_of(source, partition) for source in SOURCES for partition in (0, 1)]
RULES = Rules(Window(TIMEOUT_MS))
NEW: Cursors = dict.fromkeys(EVERY, Cursor())
law = draws(50)


def bronzes() -> st.SearchStrategy[Bronze]:
    return st.fixed_dictionaries({tp: topic_partitions() for tp in EVERY})


def considered(
    bronze: Bronze, cursors: Cursors, share: int | None = None
) -> dict[TopicPartition, Available]:
    """The rows from the cursors on, a share of each topic-partition at most."""
    found = {}
    for tp, cursor in cursors.items():
        mine = [row for row in bronze[tp] if row.offset >= cursor.next_offset][:share]
        if mine:
            times = [NULL_TIME if row.event_time is None else row.event_time for row in mine]
            found[tp] = Available(
                np.array([row.offset for row in mine]), np.array(times, dtype=np.int64)
            )
    return found


def drain(
    bronze: Bronze, share: Callable[[], int | None], plans: list[BatchPlan] | None = None
) -> Iterator[BatchPlan]:
    """Batch after batch, until there is nothing to do; goes on after `plans`."""
    last = plans[-1] if plans else None
    cursors, clocks, batch = (last.cursors(), last.clocks, last.batch + 1) if last else (NEW, {}, 0)
    while True:
        plan = plan_batch(batch, cursors, considered(bronze, cursors, share()), clocks, RULES)
        if plan is None:
            return
        assert batch <= 2 * sum(map(len, bronze.values())), "the drain does not end"
        yield plan
        cursors, clocks, batch = plan.cursors(), plan.clocks, batch + 1


def shares(data: st.DataObject) -> Callable[[], int]:
    return lambda: data.draw(st.integers(1, 6), label="share")


def drained(data: st.DataObject, bronze: Bronze) -> list[BatchPlan]:
    """In shares of any size."""
    return list(drain(bronze, shares(data)))


def drained_at_once(bronze: Bronze) -> list[BatchPlan]:
    return list(drain(bronze, lambda: None))


def positions(bronze: Bronze, tp: TopicPartition) -> list[tuple[BronzeRow, int | None]]:
    """By the definition: the largest event time so far; None before the first."""
    head: int | None = None
    found = []
    for row in bronze[tp]:
        if row.event_time is not None:
            head = row.event_time if head is None else max(head, row.event_time)
        found.append((row, head))
    return found


def in_ranges(
    bronze: Bronze, plan: BatchPlan
) -> list[tuple[TopicPartition, BronzeRow, int | None]]:
    return [
        (tp, row, position)
        for tp, done in plan.ranges.items()
        for row, position in positions(bronze, tp)
        if done.from_offset <= row.offset < done.until_offset
    ]


def stand(
    bronze: Bronze, plans: list[BatchPlan]
) -> dict[TopicPartition, tuple[list[int], int | None]]:
    """What is left in the end, and the position before it. (A cursor itself may be at either end of
    a hole.)"""
    cursors = plans[-1].cursors() if plans else NEW
    return {
        tp: ([row.offset for row in bronze[tp] if row.offset >= at.next_offset], at.position)
        for tp, at in cursors.items()
    }


@law
@given(data=st.data(), bronze=bronzes())
def test_every_drain_ends_where_one_plan_over_everything_does(
    data: st.DataObject, bronze: Bronze
) -> None:
    in_shares, at_once = drained(data, bronze), drained_at_once(bronze)
    assert len(at_once) <= 1
    if not at_once:
        assert in_shares == []
        return
    assert stand(bronze, in_shares) == stand(bronze, at_once)
    assert in_shares[-1].clocks == at_once[-1].clocks
    assert any(plan.has_late for plan in in_shares) == at_once[-1].has_late


def drained_in_windows(bronze: Bronze, width: Callable[[], int]) -> list[BatchPlan]:
    """As silver reads: windows of offsets, and beyond a hole only where there is nothing to do
    before it."""
    plans: list[BatchPlan] = []
    cursors: Cursors = NEW
    clocks: Mapping[int, int] = {}
    while True:
        share = width()
        near = {
            tp: [row for row in rows if row.offset < cursors[tp].next_offset + share]
            for tp, rows in bronze.items()
        }
        available = considered(near, cursors)
        plan = plan_batch(len(plans), cursors, available, clocks, RULES)
        if plan is None:
            available = considered(bronze, cursors, share) | available
            plan = plan_batch(len(plans), cursors, available, clocks, RULES)
        if plan is None:
            return plans
        plans.append(plan)
        cursors, clocks = plan.cursors(), plan.clocks


@law
@given(data=st.data(), bronze=bronzes())
def test_no_hole_between_offsets_stops_or_misleads_a_drain(
    data: st.DataObject, bronze: Bronze
) -> None:
    plans, at_once = drained_in_windows(bronze, shares(data)), drained_at_once(bronze)
    assert stand(bronze, plans) == stand(bronze, at_once)
    assert [plan.clocks for plan in plans[-1:]] == [plan.clocks for plan in at_once]


@law
@given(data=st.data(), bronze=bronzes())
def test_ranges_join_without_gap_or_overlap(data: st.DataObject, bronze: Bronze) -> None:
    plans = drained(data, bronze)
    assert [plan.batch for plan in plans] == list(range(len(plans)))
    for plan in plans[:1]:
        assert all(
            (done.from_offset, done.position_before) == (0, None) for done in plan.ranges.values()
        )
    for one, other in pairwise(plans):
        for tp in EVERY:
            assert (other.ranges[tp].from_offset, other.ranges[tp].position_before) == (
                one.ranges[tp].until_offset,
                one.ranges[tp].position,
            )
    for plan in plans:
        assert list(plan.ranges) == EVERY
        assert all(done.from_offset <= done.until_offset for done in plan.ranges.values())


@pytest.mark.promise("R5")
@law
@given(data=st.data(), bronze=bronzes())
def test_a_batch_merges_exactly_what_the_clock_has_reached(
    data: st.DataObject, bronze: Bronze
) -> None:
    cursors, share = NEW, 0

    def drawn() -> int:
        nonlocal share
        share = shares(data)()
        return share

    for plan in drain(bronze, drawn):
        rows = considered(bronze, cursors, share)
        for tp in EVERY:
            clock = plan.clocks.get(tp.partition)
            taken = {row.offset for at, row, _ in in_ranges(bronze, plan) if at == tp}
            looked_at = [
                pair
                for pair in positions(bronze, tp)
                if tp in rows and pair[0].offset in rows[tp].offsets
            ]
            reached = {
                row.offset
                for row, at in looked_at
                if at is None or (clock is not None and at <= clock)
            }
            assert taken == reached
        assert len(in_ranges(bronze, plan)) <= share * len(EVERY)
        cursors = plan.cursors()


@law
@given(data=st.data(), bronze=bronzes())
def test_positions_and_heads_are_those_of_the_definition(
    data: st.DataObject, bronze: Bronze
) -> None:
    for plan in drained(data, bronze):
        for tp, done in plan.ranges.items():
            before = [at for row, at in positions(bronze, tp) if row.offset < done.from_offset]
            until = [at for row, at in positions(bronze, tp) if row.offset < done.until_offset]
            assert done.position_before == (before[-1] if before else None)
            assert done.position == (until[-1] if until else None)
            assert done.head in {
                done.position,
                *[at for row, at in positions(bronze, tp) if row.offset >= done.until_offset],
            }
        for partition, clock in plan.clocks.items():
            assert clock == min(
                done.head
                for tp, done in plan.ranges.items()
                if tp.partition == partition and done.head is not None
            )
        without = {tp.partition for tp, done in plan.ranges.items() if done.head is None}
        assert set(plan.clocks) == {0, 1} - without


@pytest.mark.promise("R5")
@law
@given(data=st.data(), bronze=bronzes())
def test_clocks_never_go_back(data: st.DataObject, bronze: Bronze) -> None:
    for one, other in pairwise(drained(data, bronze)):
        assert all(other.clocks[partition] >= clock for partition, clock in one.clocks.items())


@law
@given(data=st.data(), bronze=bronzes())
def test_late_records_are_announced_exactly(data: st.DataObject, bronze: Bronze) -> None:
    """Heartbeats among them: a plan does not see keys, and an announcement too many costs only a
    look."""
    for plan in drained(data, bronze):
        behind = [
            row
            for _, row, position in in_ranges(bronze, plan)
            if row.event_time is not None
            and position is not None
            and row.event_time < position - TIMEOUT_MS
        ]
        assert plan.has_late == bool(behind)


@law
@given(data=st.data(), bronze=bronzes())
def test_what_comes_later_is_taken_up_as_if_it_had_always_been_there(
    data: st.DataObject, bronze: Bronze
) -> None:
    first = {tp: rows[: data.draw(st.integers(0, len(rows)))] for tp, rows in bronze.items()}
    plans = drained(data, first)
    plans += drain(bronze, shares(data), plans)
    at_once = drained_at_once(bronze)
    assert stand(bronze, plans) == stand(bronze, at_once)
    assert [plan.clocks for plan in plans[-1:]] == [plan.clocks for plan in at_once]


@pytest.mark.promise("R6")
@law
@given(data=st.data(), bronze=bronzes())
def test_merging_batch_by_batch_is_merging_at_once(data: st.DataObject, bronze: Bronze) -> None:
    """Plan and model together: the records of the ranges, at the clocks of the plans, give the
    one-shot model's answer.

    The model reckons its own clock from heads. So each batch ends with a heartbeat of every source
    at the plan's clock, which changes no position: what a source has beyond its range lies beyond
    the clock.
    """
    rules = rules_of(SOURCES, TIMEOUT_MS)
    in_batches, at_once = (
        {p: PartitionMerge(rules) for p in (0, 1)},
        {p: PartitionMerge(rules) for p in (0, 1)},
    )
    plans = drained(data, bronze)
    for plan in plans:
        for tp, row, _ in in_ranges(bronze, plan):
            if row.event_time is not None:
                in_batches[tp.partition].arrive(
                    record_of(tp.input.source, row.offset, row.event_time, row.key)
                )
        for partition, clock in plan.clocks.items():
            in_batches[partition].arrive(*[record_of(source, -1, clock) for source in SOURCES])
            in_batches[partition].advance()
            assert in_batches[partition].clock == clock
    for tp, rows in bronze.items():
        read = [
            record_of(tp.input.source, row.offset, row.event_time, row.key)
            for row in rows
            if row.event_time is not None
        ]
        at_once[tp.partition].arrive(*read)
    for partition in (0, 1):
        at_once[partition].advance()
        assert outcome(in_batches[partition])[:4] == outcome(at_once[partition])[:4]
        merged_up_to = (
            {
                tp.input: done.until_offset
                for tp, done in plans[-1].ranges.items()
                if tp.partition == partition
            }
            if plans
            else {}
        )
        for source, queue in at_once[partition].unread().items():
            assert all(record.offset >= merged_up_to.get(source, 0) for _, record in queue)
