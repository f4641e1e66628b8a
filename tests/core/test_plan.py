from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from tests.support.inputs import tp_of
from watersmeet.core.columns import NULL_TIME
from watersmeet.core.plan import (
    Available,
    BatchPlan,
    Cursor,
    OffsetRange,
    Rules,
    TopicPartition,
    plan_batch,
)
from watersmeet.core.window import Window

pytestmark = [pytest.mark.promise("R5"), pytest.mark.fault("cuts", "hostile")]

A, B = tp_of("a", 0), tp_of("b", 0)
A1, B1 = tp_of("a", 1), tp_of("b", 1)
NEW = {A: Cursor(), B: Cursor()}
NO = NULL_TIME
T = 100


def rows(times: Sequence[int], first: int = 0, offsets: Sequence[int] | None = None) -> Available:
    at = range(first, first + len(times)) if offsets is None else offsets
    return Available(np.array(at, dtype=np.int64), np.array(times, dtype=np.int64))


def plan(
    available: Mapping[TopicPartition, Available],
    cursors: Mapping[TopicPartition, Cursor] = NEW,
    clocks: Mapping[int, int] | None = None,
    batch: int = 0,
) -> BatchPlan | None:
    return plan_batch(batch, cursors, available, clocks or {}, Rules(Window(T)))


def some(found: BatchPlan | None) -> BatchPlan:
    assert found is not None
    return found


def offsets(found: BatchPlan | None) -> dict[TopicPartition, tuple[int, int]]:
    return {tp: (done.from_offset, done.until_offset) for tp, done in some(found).ranges.items()}


# -- the clock


def test_the_clock_is_the_smallest_head_of_what_is_considered() -> None:
    found = some(plan({A: rows([10, 50, 30]), B: rows([5, 20])}))
    assert found.clocks == {0: 20}
    assert {tp: done.head for tp, done in found.ranges.items()} == {A: 50, B: 20}


def test_a_head_is_a_running_maximum_with_what_was_there_before() -> None:
    cursors = {A: Cursor(3, 70), B: Cursor(5, 60)}
    found = some(plan({A: rows([10], first=3), B: rows([90], first=5)}, cursors, {0: 60}))
    assert found.clocks == {0: 70}
    assert found.ranges[A] == OffsetRange(3, 4, 70, 70, 70)
    assert found.ranges[B] == OffsetRange(5, 5, 60, 60, 90)


def test_a_source_without_news_keeps_its_head() -> None:
    found = some(plan({A: rows([80, 95], first=3)}, {A: Cursor(3, 70), B: Cursor(5, 90)}, {0: 70}))
    assert found.clocks == {0: 90}
    assert found.ranges == {A: OffsetRange(3, 4, 70, 80, 95), B: OffsetRange(5, 5, 90, 90, 90)}


@pytest.mark.parametrize("available", [{}, {A: rows([1, 2, 3])}, {A: rows([1]), B: rows([])}])
def test_without_a_head_of_every_source_there_is_nothing_to_do(
    available: dict[TopicPartition, Available],
) -> None:
    assert plan(available) is None


def test_partitions_have_clocks_of_their_own() -> None:
    cursors = {A: Cursor(), B: Cursor(), A1: Cursor(), B1: Cursor()}
    found = some(plan({A: rows([10]), B: rows([20]), A1: rows([7])}, cursors))
    assert found.clocks == {0: 10}
    assert offsets(found) == {A: (0, 1), B: (0, 0), A1: (0, 0), B1: (0, 0)}


def test_a_clock_that_would_go_back_is_an_error() -> None:
    with pytest.raises(AssertionError, match="partition 0 would go back from 60"):
        plan({A: rows([10], first=3)}, {A: Cursor(3, 10), B: Cursor(5, 90)}, {0: 60})


def test_a_clock_that_would_vanish_is_an_error() -> None:
    with pytest.raises(AssertionError, match="partition 0 would go back from 60"):
        plan({A: rows([10])}, NEW, {0: 60})


# -- ranges


@pytest.mark.parametrize(
    ("times", "until"),
    [([19], 1), ([20], 1), ([21], 0), ([20, 20, 21], 2), ([10, 21, 5], 1), ([21, 5, 20], 0)],
)
def test_a_range_holds_exactly_the_positions_up_to_the_clock(times: list[int], until: int) -> None:
    found = plan({A: rows([*times, 99]), B: rows([20])})
    assert offsets(found) == {A: (0, until), B: (0, 1)}


def test_a_record_behind_waits_at_its_position() -> None:
    found = some(plan({A: rows([10, 60, 20]), B: rows([30])}))
    assert found.ranges[A] == OffsetRange(0, 1, None, 10, 60)


def test_refused_records_move_nothing_and_go_with_what_is_before_them() -> None:
    found = some(plan({A: rows([10, NO, NO, 40, NO]), B: rows([20, NO])}))
    assert found.clocks == {0: 20}
    assert found.ranges == {A: OffsetRange(0, 3, None, 10, 40), B: OffsetRange(0, 2, None, 20, 20)}


def test_refused_records_alone_are_passed_on() -> None:
    found = some(plan({A: rows([NO, NO], first=4)}, {A: Cursor(4, 10), B: Cursor(1, 10)}, {0: 10}))
    assert found.clocks == {0: 10}
    assert found.ranges[A] == OffsetRange(4, 6, 10, 10, 10)


def test_refused_records_before_the_first_position_wait_for_no_clock() -> None:
    """A share of them alone gives no head: were they to wait for one, nothing after them would ever
    be considered."""
    found = some(plan({A: rows([NO, NO, NO]), B: rows([NO, 5])}))
    assert found.clocks == {}
    assert not found.has_late
    assert found.ranges == {
        A: OffsetRange(0, 3, None, None, None),
        B: OffsetRange(0, 1, None, None, 5),
    }
    assert plan({B: rows([5], first=1)}, found.cursors(), found.clocks) is None


def test_a_range_goes_over_holes_up_to_the_first_record_that_waits() -> None:
    found = plan({A: rows([10, 20, 30], offsets=[5, 9, 17]), B: rows([20], offsets=[3])})
    assert offsets(found) == {A: (0, 17), B: (0, 4)}


def test_a_hole_is_passed_even_where_no_record_is() -> None:
    """Else the next part, read from before the hole on, could be empty, and the clock would go back
    to 50."""
    cursors = {A: Cursor(2, 50), B: Cursor(3, 50)}
    found = some(plan({A: rows([100], first=2), B: rows([200], offsets=[5_000])}, cursors, {0: 50}))
    assert found.clocks == {0: 100}
    assert offsets(found) == {A: (2, 3), B: (3, 5_000)}


def test_a_hole_alone_is_no_reason_for_a_batch() -> None:
    assert (
        plan({A: rows([100], offsets=[7])}, {A: Cursor(2, 50), B: Cursor(3, 50)}, {0: 50}) is None
    )


def test_cursors_go_on_where_ranges_end() -> None:
    found = some(plan({A: rows([10, 60]), B: rows([30])}))
    assert found.cursors() == {A: Cursor(1, 10), B: Cursor(1, 30)}


@pytest.mark.parametrize(("until", "is_empty"), [(3, True), (4, False)])
def test_a_range_is_empty_without_offsets(until: int, is_empty: bool) -> None:
    assert OffsetRange(3, until, None, None, None).is_empty == is_empty


# -- whether there is a batch


def test_a_batch_has_the_number_it_is_given() -> None:
    assert some(plan({A: rows([1]), B: rows([1])}, batch=7)).batch == 7


def test_the_same_again_is_no_batch() -> None:
    available = {A: rows([10, 60]), B: rows([30])}
    found = some(plan(available))
    rest = {A: rows([60], first=1)}
    assert plan(rest, found.cursors(), found.clocks) is None


def test_a_clock_that_moves_is_a_batch_without_any_record_to_merge() -> None:
    """Possible where more is considered than before: open records may time out."""
    found = some(
        plan(
            {A: rows([80], first=1), B: rows([90], first=1)},
            {A: Cursor(1, 10), B: Cursor(1, 10)},
            {0: 10},
        )
    )
    assert found.clocks == {0: 80}
    cursors = {A: Cursor(1, 50), B: Cursor(1, 50)}
    only_clock = some(plan({A: rows([80], first=1), B: rows([80], first=1)}, cursors, {0: 79}))
    assert only_clock.clocks == {0: 80}


# -- lateness


@pytest.mark.parametrize(
    ("times", "has_late"),
    [
        ([0, 100], False),
        ([100, 0], False),
        ([101, 0], True),
        ([101, NO], False),
        ([500, 400, 399], True),
        ([NO, 300, NO, 201], False),
    ],
)
def test_late_records_are_announced(times: list[int], has_late: bool) -> None:
    assert some(plan({A: rows(times), B: rows([1_000])})).has_late == has_late


def test_late_by_what_was_before_the_range() -> None:
    cursors = {A: Cursor(1, 300), B: Cursor(1, 400)}
    assert some(plan({A: rows([199], first=1)}, cursors, {0: 300})).has_late
    assert not some(plan({A: rows([200], first=1)}, cursors, {0: 300})).has_late


def test_a_late_record_that_waits_is_not_announced_yet() -> None:
    assert not some(plan({A: rows([10, 500, 0]), B: rows([20])})).has_late
