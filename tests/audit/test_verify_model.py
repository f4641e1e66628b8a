"""What `verify` decides in plain Python: what the model expects of a partition, gaps, and how
problems are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.configurations import settings_for
from tests.support.inputs import input_of, record_of, tp_of
from watersmeet.audit.evidence import End
from watersmeet.audit.problems import SHOWN, Findings, answer
from watersmeet.audit.verify_evidence import PASSED, Outcome
from watersmeet.audit.verify_model import Arrived, Message, merged_through, outcomes
from watersmeet.audit.verify_tables import gaps
from watersmeet.errors import Problem
from watersmeet.lake.epochs import Epoch

FIRST = Epoch(0, 0, settings_for(Path(), merge__timeout="100ms"))


def through(clock: int | None) -> list[tuple[Epoch, End]]:
    """One epoch that ended at a clock, having merged all records."""
    until = {tp_of("tracking", 0): 3, tp_of("orders", 0): 1}
    return [(FIRST, End(until, {}, {} if clock is None else {0: clock}))]


TRACKING = [
    (10, record_of("tracking", 0, 10, "k")),
    (200, record_of("tracking", 1, 200, "k")),
    (200, record_of("tracking", 2, 90, "k")),
]
ORDERS = [(50, record_of("orders", 0, 50, "k"))]
INPUTS = (input_of("tracking"), input_of("orders"))
ARRIVED: Arrived = dict(zip(INPUTS, (TRACKING, ORDERS), strict=True))
TIMED_OUT = Outcome("k", "timed_out", 10, 50, ((INPUTS[0], 0, 10), (INPUTS[1], 0, 50)), 110, 111)
OPEN = Outcome("k", "open", 200, 200, ((INPUTS[0], 1, 200),), 300)
LATE = Outcome("k", "late", 90, 200, ((INPUTS[0], 2, 90),))


def out_before(source: str, offset: int, time: int) -> Outcome:
    """Each of them has its time as its position."""
    return Outcome("k", PASSED, time, time, ((input_of(source), offset, time),))


def read_back(key: str, event_time: int) -> Message:
    return key, event_time, event_time + 100, event_time + 101, ""


def outcomes_at(clock: int | None, *recovered: Message) -> list[Outcome]:
    """What the model has made of all records when the one epoch ended."""
    ends = [model for _, model in merged_through(through(clock), 0, ARRIVED, recovered=recovered)]
    return sorted(outcome for model in ends for outcome in outcomes(model))


def test_a_keys_outcomes_are_those_of_the_model() -> None:
    assert outcomes_at(200) == sorted([TIMED_OUT, OPEN, LATE])
    assert outcomes_at(None) == []


def test_what_was_published_before_a_recovery_is_not_merged_but_late_is_late() -> None:
    out = [out_before("tracking", 0, 10), out_before("orders", 0, 50)]
    assert outcomes_at(200, read_back("k", 10)) == sorted([OPEN, LATE, *out])
    out.append(out_before("tracking", 1, 200))
    assert outcomes_at(200, read_back("k", 10), read_back("k", 150)) == sorted([LATE, *out])


def test_gaps_are_what_lies_between_offsets_and_skipped_ranges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = np.array([3, 4, 9])
    assert gaps(some, [], 10) == [(0, 9)], "near ones are read as one"
    monkeypatch.setattr("watersmeet.audit.verify_tables.NEAR", 0)
    assert gaps(some, [], 10) == [(0, 3), (5, 9)]
    assert gaps(some, [(0, 3), (6, 7)], 12) == [(5, 6), (7, 9), (10, 12)]
    assert gaps(some, [(0, 20)], 10) == gaps(some[:0], [], 0) == []
    assert gaps(some, [], 4) == [(0, 3)]


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
