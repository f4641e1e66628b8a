"""Laws of merge records that are too large: all of their records are excess, or none is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.property.test_corrections import WITHIN, at_once, coordinates
from tests.support.effort import draws
from tests.support.merges import (
    KINDS,
    MergeInput,
    begin_epoch,
    every_row,
    lives,
    repeated,
    through_epochs,
)
from watersmeet.core.model import MAX_BYTES, MAX_PARTS, PartitionMerge

pytestmark = [pytest.mark.promise("R26"), pytest.mark.fault("cuts", "rules", oracle=True)]

law = draws(80)
BOUNDED = [kind for kind in KINDS if kind.endswith("within bounds")]
of_every_bounded_kind = pytest.mark.parametrize("kind", BOUNDED)


def without_bounds(given_input: MergeInput) -> MergeInput:
    rules = replace(given_input.rules, max_parts=MAX_PARTS, max_bytes=MAX_BYTES)
    return replace(given_input, rules=rules)


@of_every_bounded_kind
@law
@given(data=st.data())
def test_all_records_of_a_merge_record_are_excess_or_none_is(
    kind: str, data: st.DataObject
) -> None:
    """They are where it has more of them than it may, repeated ones counted, or more bytes."""
    given_input = data.draw(KINDS[kind])
    model, whole = given_input.merged(), without_bounds(given_input).merged()
    assert not whole.excess
    excess = {coordinates(record) for record in model.excess}
    assert len(excess) == len(model.excess)
    expected = set()
    for row in every_row(whole):
        size = sum(record.size for record in row.records)
        if len(row.records) > given_input.rules.max_parts or size > given_input.rules.max_bytes:
            expected |= {coordinates(record) for record in row.records}
    assert excess == expected


@of_every_bounded_kind
@law
@given(data=st.data())
def test_bounds_change_nothing_but_what_is_a_part(kind: str, data: st.DataObject) -> None:
    """Times, order, late and waiting records are those of a merge without bounds."""
    given_input = data.draw(KINDS[kind])
    model, whole = given_input.merged(), without_bounds(given_input).merged()
    assert [(row.place(), row.content()[:3]) for row in model.published_order()] == [
        (row.place(), row.content()[:3]) for row in whole.published_order()
    ]
    assert [(key, row.content()[:3]) for key, row in model.open.items()] == [
        (key, row.content()[:3]) for key, row in whole.open.items()
    ]
    assert (model.clock, model.late, model.waiting) == (whole.clock, whole.late, whole.waiting)
    excess = {coordinates(record) for record in model.excess}
    for row, unbounded in zip(every_row(model), every_row(whole), strict=True):
        assert row.parts == unbounded.parts or row.is_too_large
        assert row.is_too_large == (not any(row.parts.values()))
    assert [each for each in repeated(whole) if coordinates(each.record) not in excess] == (
        repeated(model)
    )


@of_every_bounded_kind
@law
@given(data=st.data())
def test_what_is_excess_stays_so_through_every_epoch(kind: str, data: st.DataObject) -> None:
    before: set[object] = set()
    for model in through_epochs(data, data.draw(lives(kind)), is_cut=True):
        excess = [coordinates(record) for record in model.excess]
        assert len(set(excess)) == len(excess)
        assert before <= set(excess)
        before = set(excess)
        duplicates = {coordinates(each.record) for each in repeated(model)}
        assert not duplicates & before


@law
@given(data=st.data())
def test_an_epoch_with_smaller_bounds_begins_with_a_look_at_every_open_record(
    data: st.DataObject,
) -> None:
    given_input = without_bounds(data.draw(KINDS["timeout within bounds"]))
    model = PartitionMerge(given_input.rules)
    model.arrive(*given_input.records)
    model.advance()
    begin_epoch(model, replace(given_input.rules, max_parts=1))
    model.advance()
    for row in model.open.values():
        assert row.is_too_large == (len(row.records) > 1)
    assert not any(row.is_too_large for row in model.timed_out)


@of_every_bounded_kind
@law
@given(data=st.data())
def test_no_late_record_corrects_a_merge_record_that_is_too_large_or_would_be(
    kind: str, data: st.DataObject
) -> None:
    given_input = data.draw(KINDS[kind])
    found = at_once(given_input, data.draw(WITHIN))
    counts = defaultdict[tuple[object, ...], int](int)
    for row in found.merge.timed_out:
        counts[row.tenant, row.key, row.event_time, False] = len(row.records)
        assert not row.is_too_large or not any(
            (row.tenant, row.key, row.event_time, False) == _identity(each)
            for each in found.corrections
        )
    for each in found.corrections:
        counts[_identity(each)] += 1
        assert counts[_identity(each)] <= given_input.rules.max_parts
    whole = at_once(without_bounds(given_input), 10**6)
    assert not whole.too_large


def _identity(each: object) -> tuple[object, ...]:
    names = ("tenant", "key", "event_time", "is_late_born")
    return tuple(getattr(each, name) for name in names)
