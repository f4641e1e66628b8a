"""Laws of corrections on arbitrary arrivals, for every kind of input, and with random limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import SOURCES, rules_of
from tests.support.effort import draws
from tests.support.inputs import record_of
from tests.support.merges import KINDS, MergeInput, begin_epoch, lives, outcome
from tests.support.strategies import cuts
from watersmeet.core.correction_model import MAX_VERSIONS, Correction, PartitionCorrections
from watersmeet.core.inputs import InputId
from watersmeet.core.model import MergeRules, PartitionMerge, Record

pytestmark = [pytest.mark.promise("R17"), pytest.mark.fault("cuts", "rules", oracle=True)]

law = draws(30)
of_every_kind = pytest.mark.parametrize("kind", KINDS)

WITHIN = st.sampled_from([0, 50, 300, 100_000, 100_000])
VERSIONS = st.sampled_from([1, 2, MAX_VERSIONS])

Limits = list[tuple[MergeRules, int | None, int, list[Record]]]
"""The rules of each epoch, how late a record may be to be corrected, how often a merge record may
be, and what arrives in it.
"""


def corrected(
    rules: MergeRules,
    within_ms: int | None,
    chunks: Iterable[Sequence[Record]],
    max_versions: int = MAX_VERSIONS,
) -> Iterator[PartitionCorrections]:
    """Yield the corrections after each piece of what arrives."""
    found = PartitionCorrections(PartitionMerge(rules), within_ms, max_versions=max_versions)
    for chunk in [*chunks, []]:
        found.merge.arrive(*chunk)
        found.merge.advance()
        found.settle()
        yield found


def last(found: Iterator[PartitionCorrections]) -> PartitionCorrections:
    *_, at_the_end = found
    return at_the_end


def at_once(
    given_input: MergeInput, within_ms: int | None, max_versions: int = MAX_VERSIONS
) -> PartitionCorrections:
    return last(corrected(given_input.rules, within_ms, [given_input.records], max_versions))


def through_epochs(data: st.DataObject, life: Limits, *, is_cut: bool) -> PartitionCorrections:
    found = PartitionCorrections(PartitionMerge(life[0][0]), None)
    for rules, within_ms, max_versions, records in life:
        begin_epoch(found.merge, rules)
        found.within_ms = within_ms
        found.max_versions = max_versions
        for chunk in data.draw(cuts(records)) if is_cut else [records]:
            found.merge.arrive(*chunk)
            found.merge.advance()
            found.settle()
    return found


def coordinates(record: Record) -> tuple[InputId, int]:
    return record.input, record.offset


def everything(found: PartitionCorrections) -> tuple[Any, ...]:
    """What the corrections say, and nothing of the way there."""
    return (
        found.corrections,
        sorted((*coordinates(each.record), each.of_offset) for each in found.duplicates),
        sorted(coordinates(late.record) for late in found.uncorrected),
        found.too_many,
        found.too_large,
        sorted((*coordinates(each.late.record), each.u) for each in found.pending),
    )


# -- a pure function of what arrives


@of_every_kind
@law
@given(data=st.data())
def test_no_cut_into_batches_changes_a_correction(kind: str, data: st.DataObject) -> None:
    given_input = data.draw(KINDS[kind])
    within_ms = data.draw(WITHIN)
    most = data.draw(VERSIONS)
    whole = everything(at_once(given_input, within_ms, most))
    for chunks in (data.draw(cuts(given_input.records)), [[each] for each in given_input.records]):
        assert everything(last(corrected(given_input.rules, within_ms, chunks, most))) == whole


@of_every_kind
@law
@given(data=st.data())
def test_no_order_of_arrival_over_inputs_changes_a_correction(
    kind: str, data: st.DataObject
) -> None:
    given_input = data.draw(KINDS[kind])
    limits = data.draw(WITHIN), data.draw(VERSIONS)
    queues = {
        name: [record for record in given_input.records if record.input == name]
        for name in given_input.rules.inputs
    }
    order = data.draw(st.permutations([record.input for record in given_input.records]))
    interleaved = replace(given_input, records=[queues[name].pop(0) for name in order])
    assert everything(at_once(interleaved, *limits)) == everything(at_once(given_input, *limits))


@of_every_kind
@law
@given(data=st.data())
def test_no_cut_within_an_epoch_changes_a_correction(kind: str, data: st.DataObject) -> None:
    life = [
        (rules, data.draw(st.none() | WITHIN), data.draw(VERSIONS), records)
        for rules, records in data.draw(lives(kind))
    ]
    whole = everything(through_epochs(data, life, is_cut=False))
    assert everything(through_epochs(data, life, is_cut=True)) == whole


# -- the sequence


@of_every_kind
@law
@given(data=st.data())
def test_corrections_are_final_once_made_and_in_order(kind: str, data: st.DataObject) -> None:
    given_input = data.draw(KINDS[kind])
    chunks = data.draw(cuts(given_input.records))
    before: list[Correction] = []
    for found in corrected(given_input.rules, data.draw(WITHIN), chunks):
        assert found.corrections[: len(before)] == before
        before = list(found.corrections)
    places = [each.place for each in before]
    assert places == sorted(places)
    assert len(set(places)) == len(places)


@of_every_kind
@law
@given(data=st.data())
def test_the_versions_of_a_merge_record_are_numbered_from_one_without_a_gap(
    kind: str, data: st.DataObject
) -> None:
    counts: Counter[tuple[Any, ...]] = Counter()
    for each in at_once(data.draw(KINDS[kind]), data.draw(WITHIN)).corrections:
        identity = each.tenant, each.key, each.event_time, each.is_late_born
        counts[identity] += 1
        assert each.version == counts[identity]


@of_every_kind
@law
@given(data=st.data())
def test_a_merge_record_has_the_first_of_its_versions_up_to_as_many_as_it_may(
    kind: str, data: st.DataObject
) -> None:
    """Where ids repeat nothing: a duplicate of what was not corrected might be corrected itself."""
    given_input = data.draw(KINDS[kind])
    records = [record._replace(id=None) for record in given_input.records]
    given_input = replace(given_input, records=records)
    within_ms = data.draw(WITHIN)
    most = data.draw(st.integers(1, 3))
    limited = at_once(given_input, within_ms, most)
    every = at_once(given_input, within_ms)
    assert limited.corrections == [each for each in every.corrections if each.version <= most]
    beyond = [each for each in every.corrections if each.version > most]
    assert [each.place for each in limited.too_many] == [each.place for each in beyond]
    for refused, each in zip(limited.too_many, beyond, strict=True):
        assert refused[2:8] == each[2:8], "the merge record that it belongs to"
        assert (refused.version, any(refused.parts.values())) == (0, False)


# -- where each record is


@of_every_kind
@law
@given(data=st.data())
def test_each_late_record_is_corrected_once_or_waits_or_repeats_or_is_too_late(
    kind: str, data: st.DataObject
) -> None:
    given_input = data.draw(KINDS[kind])
    within_ms = data.draw(WITHIN)
    found = at_once(given_input, within_ms, data.draw(VERSIONS))
    places = [coordinates(each.late.record) for each in found.corrections]
    refused = [*found.too_many, *found.too_large]
    places += [coordinates(each.late.record) for each in refused]
    places += [coordinates(each.record) for each in found.duplicates]
    places += [coordinates(each.late.record) for each in found.pending]
    places += [coordinates(late.record) for late in found.uncorrected]
    assert Counter(places) == Counter(coordinates(late.record) for late in found.merge.late)
    for late in found.uncorrected:
        assert late.record.event_time < late.position - within_ms
    ended = at_once(given_input.with_end(), within_ms)
    assert not ended.pending


@of_every_kind
@law
@given(data=st.data())
def test_main_and_newest_corrections_hold_each_record_on_time_and_each_corrected_one_once(
    kind: str, data: st.DataObject
) -> None:
    found = at_once(data.draw(KINDS[kind]).with_end(), data.draw(WITHIN))
    newest: dict[tuple[Any, ...], Any] = {}
    for row in found.merge.timed_out:
        newest[row.tenant, row.key, row.event_time, False] = row.parts
    on_time = _parts(newest.values())
    for each in found.corrections:
        newest[each.tenant, each.key, each.event_time, each.is_late_born] = each.parts
    made = Counter(coordinates(each.late.record) for each in found.corrections)
    assert _parts(newest.values()) == on_time + made
    assert set(_parts(newest.values()).values()) <= {1}


def _parts(contents: Iterable[Any]) -> Counter[tuple[InputId, int]]:
    return Counter(
        (InputId(source, part.topic), part.offset)
        for parts in contents
        for source, of_source in parts.items()
        for part in of_source
    )


@of_every_kind
@law
@given(data=st.data())
def test_corrections_change_nothing_of_the_merge(kind: str, data: st.DataObject) -> None:
    given_input = data.draw(KINDS[kind])
    found = at_once(given_input, data.draw(WITHIN))
    assert outcome(found.merge) == outcome(given_input.merged())
    if not found.merge.late:
        assert not any(everything(found))


@of_every_kind
@law
@given(data=st.data())
def test_a_correction_is_made_when_all_that_could_hold_its_record_has_closed(
    kind: str, data: st.DataObject
) -> None:
    given_input = data.draw(KINDS[kind])
    gap_ms = given_input.rules.gap_ms
    found = at_once(given_input.with_end(), data.draw(WITHIN))
    for each in found.corrections:
        time = each.late.record.event_time
        assert each.late.position <= each.place.u < each.place.settled_at
        assert each.closed_at <= each.place.settled_at
        for row in found.merge.timed_out:
            is_its = (row.tenant, row.key) == (each.tenant, each.key)
            if is_its and row.event_time <= time + gap_ms and time <= row.due:
                assert row.closed_at <= each.place.settled_at


def test_the_worked_example_of_the_rules() -> None:
    tracking, orders = SOURCES
    found = last(
        corrected(
            rules_of(SOURCES, 100),
            100_000,
            [
                [record_of(tracking, 0, 0, "A"), record_of(tracking, 1, 250)],
                [record_of(orders, 0, 250), record_of(orders, 1, 60, "A")],
                [record_of(tracking, 2, 261), record_of(orders, 2, 261)],
                [record_of(orders, 3, 40, "A"), record_of(tracking, 3, 90, "B")],
                [record_of(tracking, 4, 300), record_of(orders, 4, 300)],
            ],
        )
    )
    assert [
        (each.key, each.event_time, each.is_late_born, each.version, each.place.settled_at)
        for each in found.corrections
    ] == [("A", 0, False, 1, 261), ("A", 0, False, 2, 262), ("B", 90, True, 1, 291)]
    second = found.corrections[1].parts
    assert [part.event_time for part in second[tracking]] == [0]
    assert [part.event_time for part in second[orders]] == [40, 60]
