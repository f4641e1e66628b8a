"""What looks wrong although every rule is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest

from tests.support.configurations import settings_for
from watersmeet.audit.doubts import (
    APART_IN_PARTITION,
    APART_IN_TIME,
    UNLIKE,
    Appearance,
    lonely,
    odd_times,
    why_unmet,
)
from watersmeet.core.reading import KAFKA, ReadingRules
from watersmeet.core.times import utc
from watersmeet.errors import Problem

NOW_MS = 1_767_225_600_000
YEAR_MS = 365 * 86_400_000


def records(times: list[Any], taken_ms: int = NOW_MS) -> pa.Table:
    rows = [
        {
            "topic": "t",
            "partition": 0,
            "offset": n,
            "kafka_timestamp": taken_ms * 1000,
            "timestamp_type": 0,
        }
        | {"key": b"k", "value": orjson.dumps({"ts": time}), "headers": []}
        for n, time in enumerate(times)
    ]
    return pa.Table.from_pylist(rows, KAFKA)


def odd(folder: Path, times: list[Any], unit: str = "ms", taken_ms: int = NOW_MS) -> list[Problem]:
    rules = ReadingRules((("ts",),), 86_400_000, unit=unit)
    return [*odd_times(settings_for(folder), "orders", records(times, taken_ms), rules)]


PER_UNIT = {"s": 1000, "ms": 1, "us": 1 / 1000, "ns": 1 / 1_000_000}


@pytest.mark.parametrize("configured", PER_UNIT)
@pytest.mark.parametrize("meant", PER_UNIT)
def test_the_unit_that_fits_is_named_whatever_is_configured(
    tmp_path: Path, configured: str, meant: str
) -> None:
    found = odd(tmp_path, [int(NOW_MS / PER_UNIT[meant]) + n for n in range(20)], configured)
    assert len(found) == (configured != meant)
    for what, where, fix in found:
        assert what.startswith("20 of the last 20 records have event times decades from")
        assert what.endswith(f"where Kafka has {utc(NOW_MS)}")
        is_refused = PER_UNIT[configured] > PER_UNIT[meant]  # it would be after the year 9999
        assert ("or none: no event time" in what) == is_refused
        assert where == "sources.orders.event_time"
        assert fix.startswith(f"`unit: {meant}` would fit")


@pytest.mark.parametrize(
    ("times", "count"),
    [
        ([5, NOW_MS, NOW_MS], None),  # most are what they should be
        ([NOW_MS - 19 * YEAR_MS] * 3, None),  # old, and not by decades
        ([NOW_MS + YEAR_MS] * 3, None),  # refused, since in the future, and not by decades
        ([NOW_MS + 30 * YEAR_MS] * 3, 3),
        ([NOW_MS - 30 * YEAR_MS] * 3, 3),  # perhaps they are so old: no unit fits
        (["1970-01-21"] * 3, 3),  # a text has no unit
        (["soon"] * 3, 3),
        ([], None),
    ],
)
def test_where_no_unit_fits_none_is_named(
    tmp_path: Path, times: list[Any], count: int | None
) -> None:
    found = odd(tmp_path, times)
    assert [problem.what.split(" of the last ")[0] for problem in found] == [str(count)] * bool(
        count
    )
    assert not any("would fit" in problem.fix for problem in found)


def test_what_kafka_gave_no_time_or_was_refused_for_something_else_does_not_count(
    tmp_path: Path,
) -> None:
    assert odd(tmp_path, [5] * 20, taken_ms=-1) == []
    undecodable = records([5] * 20).set_column(6, "value", pa.array([b"{"] * 20))
    rules = ReadingRules((("ts",),), 86_400_000)
    assert [*odd_times(settings_for(tmp_path), "orders", undecodable, rules)] == []


# -- what never meets


@pytest.mark.parametrize(
    ("groups", "counts", "is_every_one"),
    [
        ([["a"]] * 10 + [["b"]] * 10, {"a": 10, "b": 10}, True),
        ([["a"]] * 10 + [["b"]] * 9, {"a": 10}, True),
        ([["a"]] * 10 + [["a", "b"]], {}, False),
        ([["a", "b"]] * 10 + [["c"]] * 10, {"c": 10}, False),
        ([], {}, True),
    ],
)
def test_a_source_that_was_found_often_and_never_with_another_is_lonely(
    groups: list[list[str]], counts: dict[str, int], is_every_one: bool
) -> None:
    assert lonely(groups) == (counts, is_every_one)


def at(source: str, key: str, partition: int = 0, time: int = 0) -> Appearance:
    return Appearance(source, partition, "", key, time, time)


WIRE = "\x00\x00\x00\x00\x07"


@pytest.mark.parametrize(
    ("tracking", "orders", "what"),
    [
        (at("tracking", "a", time=0), at("orders", "a", time=9), APART_IN_TIME),
        (at("tracking", "a", 0), at("orders", "a", 1), APART_IN_PARTITION),
        (
            at("tracking", "a", 0),
            at("orders", WIRE + "\x02a", 1),
            "a schema id at the beginning of the key",
        ),
        (
            at("tracking", WIRE + "\x02a"),
            at("orders", "\x00\x00\x00\x00\x09\x02a"),
            "a schema id at the beginning of the key",
        ),
        (
            at("tracking", WIRE + "long"),
            at("orders", "long"),
            "a schema id at the beginning of the key",
        ),
        (at("tracking", '"a"'), at("orders", "a"), "quotes around the key"),
        (at("tracking", "a "), at("orders", "a"), "white space around the key"),
        (at("tracking", "A"), at("orders", "a"), "capital letters"),
        (at("tracking", "007"), at("orders", "7"), "zeros at the beginning of the key"),
        (at("tracking", "ab-c"), at("orders", "abc"), "hyphens in the key"),
        (at("tracking", "a"), at("orders", "b"), UNLIKE),
    ],
)
def test_why_two_do_not_meet_is_named_with_both(
    tracking: Appearance, orders: Appearance, what: str
) -> None:
    noise = [at("tracking", "x1", 2), at("orders", "y1", 2)] if what != UNLIKE else []
    found = why_unmet([*noise, tracking, orders])
    assert found is not None
    assert found.what.startswith(what)
    assert (found.one, found.other) == (tracking, orders)


def test_of_the_same_key_the_nearest_two_are_named() -> None:
    found = why_unmet(
        [
            at("tracking", "a", time=0),
            at("tracking", "b", time=0),
            at("orders", "b", time=50),
            at("orders", "a", time=90),
        ]
    )
    assert found is not None
    assert (found.one.key, found.other.last) == ("b", 50)


def test_of_one_source_nothing_is_said() -> None:
    assert why_unmet([at("tracking", "a"), at("tracking", "b")]) is None
    assert why_unmet([]) is None
