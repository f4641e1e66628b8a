"""Laws of the order of closing where the rules change several times while the clock stands."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import SOURCES, rules_of
from tests.support.effort import draws
from tests.support.inputs import record_of
from tests.support.merges import (
    EXTRAS,
    GAPS,
    KINDS,
    LAGS,
    TIMEOUTS,
    Life,
    outcome,
)
from tests.support.strategies import cuts
from watersmeet.core.correction_model import PartitionCorrections
from watersmeet.core.model import MIN_TIME, MergeRecord, MergeRules, PartitionMerge

pytestmark = [pytest.mark.promise("C6"), pytest.mark.fault("rules", oracle=True)]

law = draws(40)
MOST_CHANGES = 5
of_every_kind = pytest.mark.parametrize("kind", KINDS)


@st.composite
def lives(draw: st.DrawFn, kind: str) -> Life:
    """Before each piece of what arrives the rules change up to five times, each set of them for a
    batch."""
    drawn = draw(KINDS[kind])
    rules = drawn.rules
    life: Life = [(rules, [])]
    for chunk in draw(cuts(drawn.records)):
        *changes, last = draw(st.lists(others(rules), min_size=1, max_size=MOST_CHANGES))
        life += [*((each, []) for each in changes), (last, chunk)]
    return life


@st.composite
def others(draw: st.DrawFn, rules: MergeRules) -> MergeRules:
    """Rules of the same kind."""
    if rules.max_ms is None and rules.lag_ms is None:
        return replace(rules, gap_ms=draw(TIMEOUTS))
    gap = draw(GAPS)
    lag = None if rules.lag_ms is None else draw(LAGS)
    return replace(rules, gap_ms=gap, max_ms=gap + draw(EXTRAS), lag_ms=lag)


def through(life: Life) -> Iterator[PartitionMerge]:
    """Yield the merge after each epoch."""
    model = PartitionMerge(life[0][0])
    for rules, records in life:
        model.begin_epoch(rules.gap_ms, rules.max_ms, rules.lag_ms)
        model.arrive(*records)
        model.advance()
        yield model


@of_every_kind
@law
@given(data=st.data())
def test_nothing_that_is_closed_later_sorts_before_what_the_clock_has_reached(
    kind: str, data: st.DataObject
) -> None:
    out: list[Any] = []
    for model in through(data.draw(lives(kind))):
        clock = MIN_TIME if model.clock is None else model.clock
        known = sorted((row.place(), row.content()) for row in model.timed_out)
        published = [one for one in known if one[0][0] <= clock]
        assert published[: len(out)] == out
        assert all(one[0] < other[0] for one, other in pairwise(known))
        out = published


@of_every_kind
@law
@given(data=st.data())
def test_what_other_rules_close_is_closed_later(kind: str, data: st.DataObject) -> None:
    """So no two sets of rules close at one time, and each has an order of its own."""
    count, before, last, of_rules = 0, MIN_TIME, MIN_TIME, None
    for model in through(data.draw(lives(kind))):
        rules = model.rules.closing()
        if of_rules not in (None, rules):
            before = last
        times = [row.closed_at for row in model.timed_out[count:]]
        assert all(time > before for time in times)
        if model.clock is not None:
            of_rules = rules
        count, last = len(model.timed_out), max([last, *times])


@pytest.mark.parametrize("kind", ["timeout", "topics with ids"])
@draws(400)
@given(data=st.data())
def test_timeouts_close_in_order_of_event_time_and_key(kind: str, data: st.DataObject) -> None:
    *_, model = through(data.draw(lives(kind)))
    by_closing = sorted(model.timed_out, key=MergeRecord.place)
    assert by_closing == sorted(model.timed_out, key=lambda row: (row.event_time, row.key.encode()))


@of_every_kind
@law
@given(data=st.data())
def test_an_epoch_by_which_records_close_as_before_begins_nothing(
    kind: str, data: st.DataObject
) -> None:
    """Also where the one before it starts beyond the clock."""
    life = data.draw(lives(kind))
    again = [
        each
        for rules, records in life
        for each in [(rules, records), *[(rules, [])] * data.draw(st.integers(0, 2))]
    ]
    *_, one = through(life)
    *_, other = through(again)
    assert (outcome(one), one.epoch_start) == (outcome(other), other.epoch_start)


@of_every_kind
@law
@given(data=st.data())
def test_the_order_of_corrections_is_final(kind: str, data: st.DataObject) -> None:
    corrections: PartitionCorrections | None = None
    out: list[Any] = []
    for model in through(data.draw(lives(kind))):
        corrections = corrections or PartitionCorrections(model, 100_000)
        corrections.settle()
        places = [each.place for each in corrections.corrections]
        assert places[: len(out)] == out
        assert places == sorted(places)
        out = places


def test_where_the_clock_stands_each_change_starts_a_millisecond_later() -> None:
    """The order would otherwise be that of `due`: b, which the shorter timeout closes, is due
    first."""
    model = PartitionMerge(rules_of(SOURCES, 300))
    model.arrive(record_of("tracking", 0, 850, "a"), record_of("tracking", 1, 910, "b"))
    model.arrive(*[record_of(source, 2, 1000) for source in SOURCES])
    for timeout_ms in (300, 300, 100, 100, 30):
        model.begin_epoch(timeout_ms)
        model.advance()
    closed = [
        (row.key, row.closed_at, row.due) for row in sorted(model.timed_out, key=MergeRecord.place)
    ]
    assert closed == [("a", 1001, 950), ("b", 1002, 940)]
