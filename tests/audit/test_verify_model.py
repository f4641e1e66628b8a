"""What `verify` decides in plain Python: what the model expects of a partition, gaps, and how
problems are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.configurations import settings_for
from tests.support.inputs import input_of, record_of, tp_of
from watersmeet.audit.comparison import Row
from watersmeet.audit.evidence import End
from watersmeet.audit.problems import SHOWN, Findings, answer
from watersmeet.audit.verify_bronze import gaps
from watersmeet.audit.verify_model import Base, Derivation, Message
from watersmeet.core.model import MergeRules
from watersmeet.errors import Problem
from watersmeet.lake.history import Epoch

FIRST = Epoch(0, 0, settings_for(Path(), merge__timeout="100ms"))


COLUMNS = (
    *("merge_key", "status", "source", "offset", "event_time", "last_event_time", "position"),
    *("due", "closed_at", "tracking", "orders"),
)


def row_of(status: str, *values: object, tracking: Row = (), orders: Row = ()) -> Row:
    return ("k", status, None, None, *values, tracking, orders)


def alone(status: str, source: str, offset: int, time: int, position: int) -> Row:
    return ("k", status, source, offset, time, None, position, None, None, None, None)


TRACKING = [
    (10, record_of("tracking", 0, 10, "k")),
    (200, record_of("tracking", 1, 200, "k")),
    (200, record_of("tracking", 2, 90, "k")),
]
ORDERS = [(50, record_of("orders", 0, 50, "k"))]
INPUTS = (input_of("tracking"), input_of("orders"))
TIMED_OUT = row_of(
    "timed_out", 10, 50, None, 110, 111, tracking=((0, 10, "0"),), orders=((0, 50, "0"),)
)
OPEN = row_of("open", 200, 200, None, 300, None, tracking=((1, 200, "1"),))
LATE = alone("late", "tracking", 2, 90, 200)


def out_before(source: str, offset: int, time: int) -> Row:
    """Each of them has its time as its position."""
    return alone("passed", source, offset, time, time)


def read_back(key: str, event_time: int) -> Message:
    return key, event_time, event_time + 100, event_time + 101, ""


def rows_at(clock: int | None, *recovered: Message) -> list[Row]:
    """What the model has made of all records when the one epoch ended."""
    values = {input_id: dict[int, bytes]() for input_id in INPUTS}
    rules = MergeRules(INPUTS, 100)
    base = Base(recovered=recovered)
    derived = Derivation(rules, 0, base, COLUMNS, values, lambda _, offset: str(offset))
    for input_id, records in zip(INPUTS, (TRACKING, ORDERS), strict=True):
        derived.arrive(input_id, records)
    until = {tp_of("tracking", 0): 3, tp_of("orders", 0): 1}
    derived.merge(FIRST, End(until, {}, {} if clock is None else {0: clock}))
    return in_order([*derived.finished(), *derived.unfinished()])


def in_order(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=repr)


def test_a_keys_rows_are_those_of_the_model() -> None:
    assert rows_at(200) == in_order([TIMED_OUT, OPEN, LATE])
    assert rows_at(None) == []


def test_what_was_published_before_a_recovery_is_not_merged_but_late_is_late() -> None:
    out = [out_before("tracking", 0, 10), out_before("orders", 0, 50)]
    assert rows_at(200, read_back("k", 10)) == in_order([OPEN, LATE, *out])
    out.append(out_before("tracking", 1, 200))
    assert rows_at(200, read_back("k", 10), read_back("k", 150)) == in_order([LATE, *out])


def test_gaps_are_what_lies_between_offsets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = np.array([3, 4, 9])
    assert gaps(some, 0, 10) == [(0, 9)], "near ones are read as one"
    monkeypatch.setattr("watersmeet.audit.verify_bronze.NEAR", 0)
    assert gaps(some, 0, 10) == [(0, 3), (5, 9)]
    assert gaps(some, 5, 12) == [(5, 9), (10, 12)]
    assert gaps(some, 20, 10) == gaps(some[:0], 0, 0) == []
    assert gaps(some, 0, 4) == [(0, 3)]


def test_at_most_so_many_problems_are_shown_and_the_others_counted() -> None:
    few, many = Findings("few"), Findings("check")
    for findings, count in ((few, SHOWN), (many, SHOWN + 1007)):
        for _ in range(count):
            findings.add("what", "where", "fix")
    assert list(few.described()) == [Problem("what", "where", "fix")] * SHOWN
    *shown, rest = many.described()
    assert shown == list(few.described())
    assert (rest.what, rest.where) == ("1,007 more problems like these", "check")
    assert answer([Findings("none")]) == {"ok": True, "problems": []}
    assert len(answer([few, many])["problems"]) == 2 * SHOWN + 1
