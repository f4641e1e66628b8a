"""The worked example of the merge rules, and each rule on its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.cases import rules_of
from tests.support.inputs import input_of, record_of
from watersmeet.core.model import (
    NO_TENANT,
    LateRecord,
    MergeRecord,
    MergeRules,
    PartitionMerge,
    Record,
)

pytestmark = pytest.mark.promise("R1")


T = 100
RULES = rules_of(("tracking", "orders"), T)


def tracking(offset: int, event_time: int, key: str | None) -> Record:
    return record_of("tracking", offset, event_time, key)


def orders(offset: int, event_time: int, key: str | None) -> Record:
    return record_of("orders", offset, event_time, key)


def merged(*records: Record, rules: MergeRules = RULES) -> PartitionMerge:
    """Everything at once."""
    model = PartitionMerge(rules)
    model.arrive(*records)
    model.advance()
    return model


def open_now(model: PartitionMerge) -> dict[str, int]:
    return {row.key: row.event_time for row in model.open.values()}


def published(model: PartitionMerge) -> list[tuple[str, int]]:
    return [(row.key, row.event_time) for row in model.published_order()]


def waiting(model: PartitionMerge) -> list[Record]:
    return [record for queue in model.unread().values() for _, record in queue]


def content(row: MergeRecord) -> tuple[Any, ...]:
    """What a merge record holds, each part as (event time, offset)."""
    key, first, last, parts = row.content()
    places = tuple(tuple((part.event_time, part.offset) for part in mine) for mine in parts)
    return key, first, last, places


def beats(time: int) -> list[Record]:
    """A heartbeat of every source: the clock comes to that time."""
    return [tracking(98, time, None), orders(99, time, None)]


# -- the worked example

EXAMPLE = [
    # arrival, its position | clock, waiting, open, timed out, late afterwards
    (tracking(0, 0, "A"), 0, None, [1], {}, [], []),
    (orders(0, 40, "A"), 40, 0, [2], {"A": 0}, [], []),
    (tracking(1, 90, "B"), 90, 40, [3], {"A": 0}, [], []),
    (orders(1, 150, None), 150, 90, [4], {"A": 0, "B": 90}, [], []),
    (tracking(2, 101, "A"), 101, 101, [4], {"A": 101, "B": 90}, [("A", 0)], []),
    (tracking(3, 95, "B"), 101, 101, [4], {"A": 101, "B": 90}, [("A", 0)], []),
    (tracking(4, 300, None), 300, 150, [7], {"A": 101, "B": 90}, [("A", 0)], []),
    (orders(2, 180, "C"), 180, 180, [7], {"A": 101, "B": 90, "C": 180}, [("A", 0)], []),
    (orders(3, 60, "D"), 180, 180, [7], {"A": 101, "B": 90, "C": 180}, [("A", 0)], [9]),
    (orders(4, 400, None), 400, 300, [10], {}, [("A", 0), ("B", 90), ("A", 101), ("C", 180)], [9]),
]
NUMBERS = {row[0]: number for number, row in enumerate(EXAMPLE, start=1)}


@pytest.mark.parametrize("rows", range(1, len(EXAMPLE) + 1))
@pytest.mark.parametrize("is_stepwise", [True, False])
def test_the_worked_example_row_by_row(rows: int, is_stepwise: bool) -> None:
    model = PartitionMerge(RULES)
    for record, *_ in EXAMPLE[:rows]:
        model.arrive(record)
        if is_stepwise:
            model.advance()
    model.advance()
    record, position, clock, waits, still_open, timed_out, late = EXAMPLE[rows - 1]
    assert model.heads[record.input] == position
    assert model.clock == clock
    assert [NUMBERS[r] for r in waiting(model)] == waits
    assert open_now(model) == still_open
    assert published(model) == timed_out
    assert [NUMBERS[each.record] for each in model.late] == late


def test_the_worked_examples_content() -> None:
    model = merged(*[row[0] for row in EXAMPLE])
    assert [content(row) for row in model.published_order()] == [
        ("A", 0, 40, (((0, 0),), ((40, 0),))),
        ("B", 90, 95, (((90, 1), (95, 3)), ())),
        ("A", 101, 101, (((101, 2),), ())),
        ("C", 180, 180, ((), ((180, 2),))),
    ]
    assert model.late == [LateRecord(orders(3, 60, "D"), 180)]


# -- terms


def test_a_position_is_the_largest_event_time_so_far_of_its_own_source() -> None:
    model = PartitionMerge(RULES)
    model.arrive(
        tracking(0, 50, "a"),
        orders(0, 900, "a"),
        tracking(1, 20, "b"),
        tracking(2, 70, None),
        tracking(3, 60, "c"),
    )
    assert model.unread()[input_of("tracking")] == [
        (50, tracking(0, 50, "a")),
        (50, tracking(1, 20, "b")),
        (70, tracking(2, 70, None)),
        (70, tracking(3, 60, "c")),
    ]
    assert model.heads == {input_of("tracking"): 70, input_of("orders"): 900}


def test_the_clock_is_undefined_until_every_source_has_a_record() -> None:
    three = rules_of(("one", "two", "three"), T)
    model = PartitionMerge(three)
    for source in ("one", "two"):
        model.arrive(record_of(source, 0, 1_000, "a"))
        model.advance()
        assert model.clock is None
        assert model.open == {}
    model.arrive(record_of("three", 0, 1_000, "a"))
    model.advance()
    assert model.clock == 1_000
    assert open_now(model) == {"a": 1_000}


def test_a_new_partition_has_no_clock() -> None:
    model = merged()
    assert (model.clock, model.open, model.timed_out, model.late) == (None, {}, [], [])


# -- rule 1: lockstep


def test_the_fast_source_waits_for_the_slow_one() -> None:
    model = merged(*[tracking(i, 10 * i, f"k{i}") for i in range(10)], orders(0, 45, "x"))
    assert model.clock == 45
    assert sorted(row.key for row in model.open.values()) == ["k0", "k1", "k2", "k3", "k4", "x"]
    assert waiting(model) == [tracking(i, 10 * i, f"k{i}") for i in range(5, 10)]


@pytest.mark.parametrize(("position", "is_merged"), [(99, True), (100, True), (101, False)])
def test_a_record_is_merged_once_the_clock_has_reached_its_position(
    position: int, is_merged: bool
) -> None:
    model = merged(tracking(0, position, "a"), orders(0, 100, None), tracking(1, 1_000, None))
    assert ((NO_TENANT, "a") in model.open) == is_merged


def test_records_are_merged_by_position_not_by_arrival() -> None:
    # In the order of arrival the second order would find the record of 0 timed out.
    model = merged(
        orders(0, 0, "a"), orders(1, 150, "a"), tracking(0, 60, "a"), tracking(1, 150, None)
    )
    assert open_now(model) == {"a": 150}
    assert [content(row) for row in model.timed_out] == [("a", 0, 60, (((60, 0),), ((0, 0),)))]


# -- rule 2: the clock at a record


def test_the_time_at_a_record_is_its_position_however_far_the_clock_is() -> None:
    model = merged(tracking(0, 0, "a"), tracking(1, 100, "a"), *beats(10_000))
    assert [content(row) for row in model.timed_out] == [("a", 0, 100, (((0, 0), (100, 1)), ()))]
    assert model.late == []


def test_another_source_far_ahead_makes_no_record_late() -> None:
    model = merged(orders(0, 500, "a"), tracking(0, 10, "b"), tracking(1, 500, None))
    assert model.late == []
    assert published(model) == [("b", 10)]


# -- rule 3: late


@pytest.mark.parametrize(("event_time", "is_late"), [(399, True), (400, False), (401, False)])
def test_a_record_is_late_more_than_the_timeout_behind_its_position(
    event_time: int, is_late: bool
) -> None:
    record = tracking(1, event_time, "a")
    model = merged(tracking(0, 500, None), record, orders(0, 500, None))
    assert model.late == ([LateRecord(record, 500)] if is_late else [])
    assert ((NO_TENANT, "a") in model.open) != is_late


def test_a_late_record_is_never_merged_even_where_its_key_is_open() -> None:
    model = merged(tracking(0, 500, "a"), tracking(1, 399, "a"), orders(0, 500, None))
    assert open_now(model) == {"a": 500}
    assert [late.record.offset for late in model.late] == [1]


def test_a_heartbeat_is_never_late() -> None:
    model = merged(tracking(0, 500, None), tracking(1, 0, None), *beats(600))
    assert model.late == []


# -- rule 4: join or open


@pytest.mark.parametrize(("second", "joins"), [(199, True), (200, True), (201, False)])
def test_a_record_joins_while_the_open_one_is_within_the_timeout(second: int, joins: bool) -> None:
    model = merged(tracking(0, 100, "a"), orders(0, second, "a"), *beats(1_000))
    first = (((100, 0),), ((second, 0),)) if joins else (((100, 0),), ())
    assert content(model.published_order()[0])[3] == first
    assert len(model.timed_out) == (1 if joins else 2)


def test_joining_lowers_the_event_time_and_so_may_shorten_the_life() -> None:
    model = merged(
        tracking(0, 150, "a"), tracking(1, 80, "a"), tracking(2, 200, "a"), *beats(1_000)
    )
    assert published(model) == [("a", 80), ("a", 200)]


def test_joining_never_raises_the_event_time() -> None:
    model = merged(
        tracking(0, 100, "a"), tracking(1, 200, "a"), tracking(2, 201, "a"), *beats(1_000)
    )
    assert published(model) == [("a", 100), ("a", 201)]


def test_keys_do_not_meet() -> None:
    model = merged(tracking(0, 10, "a"), tracking(1, 10, "A"), orders(0, 10, "a "))
    assert open_now(model) == {"a": 10, "A": 10, "a ": 10}


def test_at_one_position_the_order_of_records_does_not_matter() -> None:
    one = merged(
        tracking(0, 0, "a"), tracking(1, 150, "a"), tracking(2, 60, "a"), orders(0, 150, "a")
    )
    other = merged(
        orders(0, 150, "a"), tracking(0, 0, "a"), tracking(1, 150, "a"), tracking(2, 60, "a")
    )
    assert open_now(one) == open_now(other) == {"a": 60}
    assert content(one.open[NO_TENANT, "a"]) == content(other.open[NO_TENANT, "a"])
    assert published(one) == published(other) == [("a", 0)]


# -- rule 5: time out


@pytest.mark.parametrize(("clock", "has_timed_out"), [(199, False), (200, False), (201, True)])
def test_an_open_record_times_out_more_than_the_timeout_behind_the_clock(
    clock: int, has_timed_out: bool
) -> None:
    model = merged(tracking(0, 100, "a"), *beats(clock))
    assert model.clock == clock
    assert published(model) == ([("a", 100)] if has_timed_out else [])
    assert open_now(model) == ({} if has_timed_out else {"a": 100})


def test_a_record_is_merged_before_anything_times_out() -> None:
    model = PartitionMerge(RULES)
    model.arrive(tracking(0, 100, "a"), orders(0, 100, None))
    model.advance()
    model.arrive(tracking(1, 200, "a"), tracking(2, 201, None), orders(1, 201, None))
    model.advance()
    assert [content(row) for row in model.timed_out] == [
        ("a", 100, 200, (((100, 0), (200, 1)), ()))
    ]


def test_what_has_timed_out_never_changes() -> None:
    model = merged(tracking(0, 100, "a"), *beats(201))
    before = [content(row) for row in model.timed_out]
    model.arrive(tracking(100, 120, "a"), tracking(101, 201, "a"), *beats(210))
    model.advance()
    assert [content(row) for row in model.timed_out] == before
    assert open_now(model) == {"a": 120}


def test_with_no_timeout_at_all_only_one_position_meets() -> None:
    model = merged(
        tracking(0, 10, "a"),
        orders(0, 10, "a"),
        tracking(1, 11, "a"),
        *beats(12),
        rules=replace(RULES, gap_ms=0),
    )
    assert published(model) == [("a", 10), ("a", 11)]


# -- rule 6: heartbeats


def test_heartbeats_move_the_clock_and_leave_nothing() -> None:
    model = merged(*beats(500))
    assert model.clock == 500
    assert (model.open, model.timed_out, model.late, waiting(model)) == ({}, [], [], [])


def test_a_heartbeat_behind_moves_nothing() -> None:
    model = merged(*beats(500), tracking(100, 10, None), orders(100, 10, None))
    assert model.clock == 500


@pytest.mark.parametrize(("key", "is_heartbeat"), [(None, True), ("a", False)])
def test_a_record_without_a_key_is_a_heartbeat(key: str | None, is_heartbeat: bool) -> None:
    assert tracking(0, 0, key).is_heartbeat == is_heartbeat


# -- rule 7: content


def test_parts_are_ordered_by_event_time_and_offset() -> None:
    model = merged(
        tracking(0, 90, "a"),
        tracking(1, 100, "a"),
        tracking(2, 90, "a"),
        tracking(3, 30, "a"),
        orders(7, 100, "a"),
    )
    assert content(model.open[NO_TENANT, "a"]) == (
        "a",
        30,
        100,
        (((30, 3), (90, 0), (90, 2), (100, 1)), ((100, 7),)),
    )


def test_the_sources_of_the_content_are_in_the_order_of_the_rules() -> None:
    model = merged(
        orders(1, 5, "a"), tracking(0, 5, "a"), rules=rules_of(("orders", "tracking"), T)
    )
    assert content(model.open[NO_TENANT, "a"])[3] == (((5, 1),), ((5, 0),))


# -- rule 8: the order of publication


def test_publication_is_by_event_time_then_by_the_keys_utf8_bytes() -> None:
    keys = ["z", "\U0001f600", "\ufb01", "é", "a", "Z", "aa"]
    model = merged(
        *[tracking(i, 50, key) for i, key in enumerate(keys)], tracking(9, 49, "zz"), *beats(1_000)
    )
    # In UTF-16, U+1F600 (d83d de00) would sort before U+FB01.
    assert [row.key for row in model.published_order()] == [
        "zz",
        "Z",
        "a",
        "aa",
        "z",
        "é",
        "\ufb01",
        "\U0001f600",
    ]
