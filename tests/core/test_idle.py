"""Each rule of the idle policy's decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from tests.support.inputs import input_of, name_of
from watersmeet.core.idle import decide

pytestmark = [pytest.mark.promise("C2"), pytest.mark.fault("silence")]


def decided(
    heads: Mapping[str, int | None], silent: Collection[str]
) -> tuple[list[str], int] | None:
    """The decision, by the names of inputs."""
    idle = decide({input_of(name): head for name, head in heads.items()}, {*map(input_of, silent)})
    return None if idle is None else ([name_of(input_id) for input_id in idle.inputs], idle[1])


@pytest.mark.parametrize(
    ("heads", "silent", "idle"),
    [
        ({"tracking": 50, "orders": 10}, {"orders"}, (["orders"], 50)),
        ({"tracking": 50, "orders": None}, {"orders"}, (["orders"], 50)),
        ({"tracking": 50, "orders": 10}, {"tracking", "orders"}, (["orders"], 50)),
        ({"a": 50, "b": 10, "c": 30}, {"b"}, (["b"], 30)),
        ({"a": 50, "b": 10, "c": 10}, {"b", "c"}, (["b", "c"], 50)),
        ({"a": 50, "b": None, "c": 10}, {"b"}, (["b"], 10)),
        ({"a": None, "b": None, "c": 0}, {"a", "b", "c"}, (["a", "b"], 0)),
    ],
)
def test_silent_laggards_come_to_the_smallest_head_of_the_others(
    heads: Mapping[str, int | None], silent: set[str], idle: tuple[list[str], int]
) -> None:
    assert decided(heads, silent) == idle


@pytest.mark.parametrize(
    ("heads", "silent"),
    [
        ({"tracking": 50, "orders": 10}, set()),
        ({"a": 50, "b": 10, "c": 10}, {"b"}),
        ({"a": 50, "b": None, "c": None}, {"b"}),
    ],
)
def test_one_laggard_that_is_not_silent_stops_the_clock(
    heads: Mapping[str, int | None], silent: set[str]
) -> None:
    assert decided(heads, silent) is None


@pytest.mark.parametrize(
    "heads",
    [
        {"tracking": 50, "orders": 10},
        {"tracking": 50, "orders": None},
        {"a": 50, "tracking": 20, "c": 10},
    ],
)
def test_a_source_that_is_ahead_or_held_back_is_never_idle(heads: Mapping[str, int | None]) -> None:
    assert decided(heads, {"tracking", "a"}) is None


@pytest.mark.parametrize(
    "heads",
    [
        {},
        {"a": 10},
        {"a": None},
        {"a": 10, "b": 10},
        {"a": None, "b": None},
        {"a": 10, "b": 10, "c": 10},
    ],
)
def test_where_no_source_is_ahead_nobody_is_idle(heads: Mapping[str, int | None]) -> None:
    assert decided(heads, set(heads)) is None


def test_a_decision_is_not_taken_twice() -> None:
    heads: dict[str, int | None] = {"a": 50, "b": None, "c": 10}
    idle = decided(heads, set(heads))
    assert idle is not None
    heads.update(dict.fromkeys(*idle))
    assert decided(heads, set(heads)) == (["b", "c"], 50)
    assert decided({**heads, "b": 50, "c": 50}, set(heads)) is None
