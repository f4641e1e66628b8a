"""Hypothesis strategies: JSON as it may stand in Kafka, records as the merge model takes them,
bronze as a plan sees it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.support.cases import KEYS, SOURCES
from tests.support.inputs import record_of
from watersmeet.core.model import Record

TIMEOUT_MS = 100


# -- JSON texts

_NAMES = st.sampled_from(["k", "ts", "type", "n", "s", ":", "\u00e9", ""]) | st.text(max_size=5)
_LEAVES = st.one_of(
    st.sampled_from(
        [
            *[
                "null",
                "true",
                "false",
                "-0",
                "1.0",
                "1e3",
                "1e999",
                "1e-400",
                "253402300799999",
                "253402300800000",
            ],
            *[
                '"heartbeat"',
                '"1"',
                '"2026-01-01"',
                '"2026-01-01T00:00:00+01:00"',
                '"a:b"',
                '"\\u003a"',
                '"\\ud83d\\ude00"',
            ],
        ]
    ),
    st.integers().map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.text(max_size=10).map(json.dumps),
    st.text(max_size=10).map(lambda text: json.dumps(text, ensure_ascii=False)),
)


def _members(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Objects as text, so that a name may come twice."""
    member = st.tuples(_NAMES.map(json.dumps), st.sampled_from([":", " : "]), values).map("".join)
    return st.lists(member, max_size=5).map(lambda members: "{" + ",".join(members) + "}")


def json_values() -> st.SearchStrategy[bytes]:
    """Strict JSON objects in every spelling, with the names that the tests' rules look for among
    others."""
    inner = st.recursive(
        _LEAVES,
        lambda values: (
            _members(values)
            | st.lists(values, max_size=4).map(lambda items: "[" + ", ".join(items) + "]")
        ),
        max_leaves=8,
    )
    return _members(inner).map(str.encode)


# -- records

_STEPS = st.sampled_from([0, 0, 1, 7, 30, 50, TIMEOUT_MS, TIMEOUT_MS + 1, 3 * TIMEOUT_MS])
_DELAYS = st.sampled_from(
    [0, 0, 0, 1, 30, TIMEOUT_MS - 1, TIMEOUT_MS, TIMEOUT_MS + 1, 3 * TIMEOUT_MS]
)


@st.composite
def arrivals(draw: st.DrawFn, max_size: int = 40, inputs: Sequence[str] = SOURCES) -> list[Record]:
    """Records of all inputs in the order of arrival: ties, disorder, silence, lateness, heartbeats,
    holes between offsets."""
    keys = st.sampled_from([*KEYS, None])
    row = st.tuples(st.sampled_from(inputs), keys, _STEPS, _DELAYS, st.sampled_from([1, 1, 2]))
    times, offsets = dict.fromkeys(inputs, 0), dict.fromkeys(inputs, -1)
    records = []
    for source, key, step, delay, hop in draw(st.lists(row, max_size=max_size)):
        times[source] += step
        offsets[source] += hop
        records.append(record_of(source, offsets[source], max(0, times[source] - delay), key))
    return records


@st.composite
def cuts(draw: st.DrawFn, items: list[Any]) -> list[list[Any]]:
    """The same items in the same order, in pieces (some of them empty)."""
    marks = sorted(draw(st.lists(st.integers(0, len(items)), max_size=8)))
    return [
        items[since:until] for since, until in zip([0, *marks], [*marks, len(items)], strict=True)
    ]


# -- bronze


@dataclass(frozen=True)
class BronzeRow:
    """A row of bronze, as far as planning and merging go; `event_time` None: refused; `key` None: a
    heartbeat."""

    offset: int
    event_time: int | None
    key: str | None = None


@st.composite
def topic_partitions(draw: st.DrawFn, max_size: int = 15) -> list[BronzeRow]:
    """One topic-partition's rows in offset order, from any first offset on, with holes and refused
    rows."""
    keys = st.sampled_from([*KEYS, None])
    row = st.tuples(
        st.booleans() | st.just(True), keys, _STEPS, _DELAYS, st.sampled_from([1, 1, 1, 2, 9])
    )
    time, offset = 0, draw(st.sampled_from([-1, -1, 40]))
    rows = []
    for is_read, key, step, delay, hop in draw(st.lists(row, max_size=max_size)):
        time, offset = time + step, offset + hop
        rows.append(
            BronzeRow(offset, max(0, time - delay), key) if is_read else BronzeRow(offset, None)
        )
    return rows
