"""What `verify` decides in plain Python: what the model expects of a partition, gaps, and how problems are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.audit.problems import SHOWN, Findings, Problem, answer
from pipelines.audit.verify import gaps
from pipelines.audit.verify_eras import Era
from pipelines.audit.verify_evidence import Outcome
from pipelines.audit.verify_model import PUBLISHED, Message, outcomes
from pipelines.core.model import Record
from pipelines.core.plan import TopicPartition
from pipelines.lake.epochs import Epoch
from tests.support.cases import SOURCES
from tests.support.configurations import settings_for

FIRST, SECOND = (Epoch(i, 5 * i, settings_for(Path(), merge__timeout=timeout)) for i, timeout in enumerate(["100ms", "300ms"]))


def era(clock: int | None, begin: tuple[int, int] = (0, 0), ended_at: int | None = None) -> Era:
    tps = [TopicPartition(source, 0) for source in SOURCES]
    clocks = {} if clock is None else {0: clock}
    return Era(dict(zip(tps, begin, strict=True)), dict(zip(tps, (3, 1), strict=True)), clocks, {}, ended_at, [(FIRST, None)])


TRACKING = [
    (10, Record("tracking", 0, 10, "k")),
    (200, Record("tracking", 1, 200, "k")),
    (200, Record("tracking", 2, 90, "k")),
]
ORDERS = [(50, Record("orders", 0, 50, "k"))]
ALL = {"tracking": TRACKING, "orders": ORDERS}
TIMED_OUT = Outcome("k", "timed_out", 10, 50, (("tracking", 0, 10), ("orders", 0, 50)))
OPEN = Outcome("k", "open", 200, 200, (("tracking", 1, 200),))
LATE = Outcome("k", "late", 90, 200, (("tracking", 2, 90),))


def out_before(source: str, offset: int, time: int) -> Outcome:
    return Outcome("k", PUBLISHED, time, time, ((source, offset, time),))


def read_back(era: int, key: str, event_time: int) -> Message:
    return era, key, event_time, None, None, None


def test_a_keys_outcomes_are_those_of_the_model() -> None:
    assert sorted(outcomes(SOURCES, [era(200)], 0, [ALL], [])) == sorted([TIMED_OUT, OPEN, LATE])
    assert outcomes(SOURCES, [era(None)], 0, [ALL], []) == []


def test_what_was_published_before_a_recovery_is_not_merged_but_late_is_late() -> None:
    out = [out_before("tracking", 0, 10), out_before("orders", 0, 50)]
    assert sorted(outcomes(SOURCES, [era(200)], 0, [ALL], [read_back(0, "k", 10)])) == sorted([OPEN, LATE, *out])
    out.append(out_before("tracking", 1, 200))
    assert sorted(outcomes(SOURCES, [era(200)], 0, [ALL], [read_back(0, "k", 10), read_back(0, "k", 150)])) == sorted(
        [LATE, *out]
    )


def test_a_reset_closes_what_is_open() -> None:
    found = outcomes(SOURCES, [era(200, ended_at=1), era(None, begin=(5, 5))], 0, [ALL, {}], [])
    assert sorted(found) == sorted([TIMED_OUT, OPEN._replace(status="reset"), LATE])


def test_what_is_merged_again_after_a_jump_back_leaves_its_merge_record() -> None:
    eras, again = [era(200, ended_at=1), era(200, begin=(1, 1))], {"tracking": TRACKING[1:]}
    assert sorted(outcomes(SOURCES, eras, 0, [ALL, again], [])) == sorted([TIMED_OUT, OPEN, LATE])
    eras, again = [era(200, ended_at=1), era(60, begin=(1, 0))], {"orders": ORDERS}
    left = Outcome("k", "reset", 10, 10, (("tracking", 0, 10),))
    alone = Outcome("k", "open", 50, 50, (("orders", 0, 50),))
    assert sorted(outcomes(SOURCES, eras, 0, [ALL, again], [])) == sorted([left, alone])
    published = outcomes(SOURCES, eras, 0, [ALL, again], [read_back(1, "k", 10)])
    assert sorted(published) == sorted([left, out_before("orders", 0, 50)]), "published before the jump"


def test_gaps_are_what_lies_between_offsets_and_skipped_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    some = np.array([3, 4, 9])
    assert gaps(some, [], 10) == [(0, 9)], "near ones are read as one"
    monkeypatch.setattr("pipelines.audit.verify.NEAR", 0)
    assert gaps(some, [], 10) == [(0, 3), (5, 9)]
    assert gaps(some, [(0, 3), (6, 7)], 12) == [(5, 6), (7, 9), (10, 12)]
    assert gaps(some, [(0, 20)], 10) == gaps(some[:0], [], 0) == []
    assert gaps(some, [], 4) == [(0, 3)]


def test_at_most_so_many_problems_are_shown_and_the_others_counted() -> None:
    few, many = Findings("few"), Findings("check")
    for findings, count in ((few, SHOWN), (many, SHOWN + 1007)):
        for _ in range(count):
            findings.add("what", "where", "fix")
    assert list(few.told()) == [Problem("what", "where", "fix")] * SHOWN
    *shown, rest = many.told()
    assert shown == list(few.told())
    assert (rest.what, rest.where) == ("1,007 more problems like these", "check")
    assert answer([Findings("none")]) == {"ok": True, "problems": []}
    assert len(answer([few, many])["problems"]) == 2 * SHOWN + 1
