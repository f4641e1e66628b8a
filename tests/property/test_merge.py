"""Laws of the merge on arbitrary arrivals, for every kind of input: a timeout, several topics of a
source, tenants."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import INPUTS, SOURCES, rules_of
from tests.support.effort import draws
from tests.support.inputs import input_of, record_of
from tests.support.merges import (
    KINDS,
    TIMEOUTS,
    MergeInput,
    closed,
    every_row,
    lives,
    outcome,
    repeated,
    through_epochs,
    timeout_inputs,
)
from tests.support.strategies import TIMEOUT_MS, arrivals, cuts
from watersmeet.core.inputs import InputId
from watersmeet.core.model import MIN_TIME, MergeRules, PartitionMerge, Record

pytestmark = [pytest.mark.promise("R1"), pytest.mark.fault("cuts", oracle=True)]

law = draws(40)
of_every_kind = pytest.mark.parametrize("kind", KINDS)


def named(model: PartitionMerge) -> list[tuple[str, str, int]]:
    return [(row.tenant, row.key, row.event_time) for row in every_row(model)]


def final(model: PartitionMerge) -> list[tuple[Any, ...]]:
    """What may be published: what has timed out and was closed up to the clock."""
    clock = MIN_TIME if model.clock is None else model.clock
    return closed(row for row in model.published_order() if row.closed_at <= clock)


# -- any cut, any order of arrival


@of_every_kind
@law
@given(data=st.data())
def test_no_cut_into_batches_changes_the_outcome(kind: str, data: st.DataObject) -> None:
    given_input = data.draw(KINDS[kind])
    at_once = outcome(given_input.merged())
    assert outcome(given_input.merged(data.draw(cuts(given_input.records)))) == at_once
    assert outcome(given_input.merged([record] for record in given_input.records)) == at_once


@of_every_kind
@law
@given(data=st.data())
def test_only_the_order_within_an_input_matters(kind: str, data: st.DataObject) -> None:
    given_input = data.draw(KINDS[kind])
    records = given_input.records
    queues = {
        name: [record for record in records if record.input == name]
        for name in given_input.rules.inputs
    }
    order = data.draw(st.permutations([record.input for record in records]))
    interleaved = [queues[name].pop(0) for name in order]
    assert outcome(given_input.merged(data.draw(cuts(interleaved)))) == outcome(
        given_input.merged()
    )


# -- where each record is


@of_every_kind
@law
@given(data=st.data())
def test_every_record_with_a_key_is_in_exactly_one_place(kind: str, data: st.DataObject) -> None:
    given_input = data.draw(KINDS[kind])
    model = given_input.merged()

    def names(records: Iterable[Record]) -> list[tuple[InputId, int]]:
        return [(record.input, record.offset) for record in records if record.key is not None]

    places = [
        (InputId(source, part.topic), part.offset)
        for row in every_row(model)
        for source, parts in row.parts.items()
        for part in parts
    ]
    places += names(late.record for late in model.late)
    places += names(each.record for each in repeated(model))
    places += names(model.excess)
    places += names(record for _, record in model.waiting)
    for queue in model.unread().values():
        places += names(record for _, record in queue)
    assert Counter(places) == Counter(names(given_input.records))


@of_every_kind
@law
@given(data=st.data())
def test_records_are_merged_under_their_own_tenant_key_and_time(
    kind: str, data: st.DataObject
) -> None:
    given_input = data.draw(KINDS[kind])
    known = {(record.input, record.offset): record for record in given_input.records}
    model = given_input.merged()
    duplicates: dict[tuple[InputId, int], list[Record]] = defaultdict(list)
    for each in repeated(model):
        duplicates[each.record.input, each.of_offset].append(each.record)
    for row in every_row(model):
        if row.is_too_large:
            continue
        parts = [
            (known[InputId(source, part.topic), part.offset], part)
            for source, of_source in row.parts.items()
            for part in of_source
        ]
        assert {(record.tenant, record.key) for record, _ in parts} == {(row.tenant, row.key)}
        assert all(record.event_time == part.event_time for record, part in parts)
        joined = [record for record, _ in parts]
        joined += [
            repeated
            for record, _ in parts
            for repeated in duplicates.get((record.input, record.offset), ())
        ]
        assert row.event_time == min(record.event_time for record in joined)
        assert row.last_event_time == max(record.event_time for record in joined)


# -- repeated records


def without_ids(records: Iterable[Record]) -> list[Record]:
    return [record._replace(id=None) for record in records]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("with ids")])
@law
@given(data=st.data())
def test_an_id_changes_nothing_but_which_records_of_a_merge_record_are_parts(
    kind: str, data: st.DataObject
) -> None:
    given_input = data.draw(KINDS[kind])
    one = given_input.merged()
    other = replace(given_input, records=without_ids(given_input.records)).merged()
    assert one.clock == other.clock
    assert [(r.record.offset, r.position) for r in one.late] == [
        (r.record.offset, r.position) for r in other.late
    ]
    for mine, theirs in (
        (one.timed_out, other.timed_out),
        ([*one.open.values()], [*other.open.values()]),
    ):
        for row, whole in zip(mine, theirs, strict=True):
            assert row.content()[:3] == whole.content()[:3]
            assert row.place() == whole.place()
            for source, parts in row.parts.items():
                assert set(parts) <= set(whole.parts[source])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("with ids")])
@law
@given(data=st.data())
def test_of_the_records_of_an_input_with_one_id_the_first_by_offset_is_a_part(
    kind: str, data: st.DataObject
) -> None:
    given_input = data.draw(KINDS[kind])
    model = given_input.merged()
    whole = replace(given_input, records=without_ids(given_input.records)).merged()
    known = {(record.input, record.offset): record for record in given_input.records}
    expected: dict[tuple[InputId, int], int] = {}
    for row in every_row(whole):
        first: dict[tuple[InputId, str], int] = {}
        records = [
            known[InputId(source, part.topic), part.offset]
            for source, of_source in row.parts.items()
            for part in of_source
        ]
        for record in sorted(records, key=lambda each: (each.input, each.offset)):
            if record.id is not None:
                of = first.setdefault((record.input, record.id), record.offset)
                if of != record.offset:
                    expected[record.input, record.offset] = of
    assert {
        (each.record.input, each.record.offset): each.of_offset for each in repeated(model)
    } == expected


@of_every_kind
@law
@given(data=st.data())
def test_a_key_has_one_open_record_at_most_and_key_and_event_time_are_unique(
    kind: str, data: st.DataObject
) -> None:
    given_input = data.draw(KINDS[kind])
    for model in given_input.through(data.draw(cuts(given_input.records))):
        assert all(
            (tenant, key) == (row.tenant, row.key) for (tenant, key), row in model.open.items()
        )
        assert len(set(named(model))) == len(named(model))


# -- the order of publication


@of_every_kind
@law
@given(data=st.data())
def test_what_is_out_is_final_and_nothing_later_sorts_before_it(
    kind: str, data: st.DataObject
) -> None:
    given_input = data.draw(KINDS[kind])
    out: list[Any] = []
    for model in given_input.through(data.draw(cuts(given_input.records))):
        published = final(model)
        assert published[: len(out)] == out
        assert len(published) == len(model.timed_out), (
            "within an epoch nothing that has timed out is closed later"
        )
        out = published


@of_every_kind
@law
@given(data=st.data())
def test_publication_strictly_ascends(kind: str, data: st.DataObject) -> None:
    order = data.draw(KINDS[kind]).merged().published_order()
    assert all(one.place() < other.place() for one, other in pairwise(order))


# -- epochs: the rules change between two batches


@of_every_kind
@law
@given(data=st.data())
def test_no_cut_within_epochs_changes_the_outcome(kind: str, data: st.DataObject) -> None:
    life = data.draw(lives(kind))
    *_, one = through_epochs(data, life, is_cut=True)
    *_, other = through_epochs(data, life, is_cut=False)
    assert outcome(one) == outcome(other)
    assert (one.horizon, one.horizons) == (other.horizon, other.horizons)


@pytest.mark.promise("C6")
@pytest.mark.fault("rules", oracle=True)
@of_every_kind
@law
@given(data=st.data())
def test_what_is_out_stays_first_in_order_through_every_epoch(
    kind: str, data: st.DataObject
) -> None:
    out: list[Any] = []
    clocks: dict[str, int] = {}
    for model in through_epochs(data, data.draw(lives(kind)), is_cut=True):
        published = final(model)
        assert published[: len(out)] == out
        out = published
        assert len(set(named(model))) == len(named(model))
        for tenant in {row.tenant for row in every_row(model)} if model.clock is not None else ():
            assert model.tenant_clock(tenant) >= clocks.get(tenant, MIN_TIME)
            clocks[tenant] = model.tenant_clock(tenant)
        if kind.startswith(("timeout", "topics")) and model.horizon is not None:
            assert all(row.event_time >= model.horizon for row in model.open.values())


@law
@given(data=st.data(), life=lives("timeout"))
def test_timeouts_publish_in_order_of_event_time_and_key_through_every_epoch(
    data: st.DataObject, life: Any
) -> None:
    for model in through_epochs(data, life, is_cut=True):
        rows = model.published_order()
        order = [(row.event_time, row.key.encode()) for row in rows]
        assert order == sorted(order)
        closed_at = [row.closed_at for row in rows]
        assert closed_at == sorted(closed_at)


def test_timeouts_publish_in_that_order_where_the_clock_stands_through_several_epochs() -> None:
    model = PartitionMerge(rules_of(SOURCES, 300))
    model.arrive(record_of("tracking", 0, 850, "a"), record_of("tracking", 1, 910, "b"))
    model.arrive(*[record_of(source, 2, 1000) for source in SOURCES])
    for timeout_ms in (300, 100, 30):
        model.begin_epoch(timeout_ms)
        model.advance()
    assert [row.key for row in model.published_order()] == ["a", "b"]


@law
@given(data=st.data(), life=lives("timeout"), others=st.lists(TIMEOUTS, max_size=4))
def test_epochs_without_a_batch_leave_no_trace(
    data: st.DataObject, life: Any, others: list[int]
) -> None:
    def through(passing: list[int]) -> PartitionMerge:
        model = PartitionMerge(life[0][0])
        for rules, records in life:
            for timeout_ms in [*passing, rules.gap_ms]:
                model.begin_epoch(timeout_ms)
            model.arrive(*records)
            model.advance()
        return model

    one, other = through(others), through([])
    assert (outcome(one), one.horizon) == (outcome(other), other.horizon)


@law
@given(data=st.data(), given_input=timeout_inputs())
def test_an_epoch_with_the_same_rules_changes_nothing(
    data: st.DataObject, given_input: MergeInput
) -> None:
    chunks = data.draw(cuts(given_input.records))
    *_, one = through_epochs(data, [(given_input.rules, chunk) for chunk in chunks], is_cut=False)
    assert outcome(one) == outcome(given_input.merged())


# -- what a timeout alone says


@law
@given(given_input=timeout_inputs())
def test_lateness_follows_from_a_records_own_topic_partition_alone(given_input: MergeInput) -> None:
    model = given_input.merged()
    heads: dict[str, int] = {}
    late = []
    for record in given_input.records:
        position = heads[record.input.source] = max(
            record.event_time, heads.get(record.input.source, 0)
        )
        is_reached = model.clock is not None and position <= model.clock
        if is_reached and record.key is not None and record.event_time < position - TIMEOUT_MS:
            late.append((record.input.source, record.offset, position))
    assert sorted(
        (each.record.input.source, each.record.offset, each.position) for each in model.late
    ) == sorted(late)


@law
@given(data=st.data(), given_input=timeout_inputs())
def test_the_clock_never_goes_back_and_is_the_smallest_head(
    data: st.DataObject, given_input: MergeInput
) -> None:
    before = -1
    for model in given_input.through(data.draw(cuts(given_input.records))):
        if len(model.heads) < len(SOURCES):
            assert model.clock is None
        else:
            assert model.clock == min(model.heads.values())
            assert model.clock >= before
            before = model.clock
            assert all(
                position > model.clock for queue in model.unread().values() for position, _ in queue
            )
            assert all(row.event_time >= model.clock - TIMEOUT_MS for row in model.open.values())
            assert all(row.event_time < model.clock - TIMEOUT_MS for row in model.timed_out)


@law
@given(data=st.data(), given_input=timeout_inputs())
def test_heartbeats_at_the_head_change_nothing(
    data: st.DataObject, given_input: MergeInput
) -> None:
    """A heartbeat that repeats its source's head moves no position."""
    heads: dict[str, int] = {}
    doubled = []
    for record in given_input.records:
        heads[record.input.source] = max(record.event_time, heads.get(record.input.source, 0))
        doubled.append(record)
        if data.draw(st.booleans()):
            doubled.append(
                record_of(record.input.source, 10_000 + record.offset, heads[record.input.source])
            )
    one, other = given_input.merged(), replace(given_input, records=doubled).merged()
    *merged, unread = outcome(one)
    *merged_with_heartbeats, unread_with_heartbeats = outcome(other)
    assert merged == merged_with_heartbeats
    assert with_keys(unread) == with_keys(unread_with_heartbeats)


def with_keys(unread: Any) -> list[tuple[int, Record]]:
    return [
        (position, record)
        for name in SOURCES
        for position, record in unread.get(name, ())
        if record.key is not None
    ]


# -- special cases


@law
@given(records=arrivals(), gap=TIMEOUTS)
def test_a_window_whose_gap_is_its_max_is_a_timeout(records: list[Record], gap: int) -> None:
    timeout, window = (
        MergeInput(rules_of(SOURCES, gap, longest), records).merged() for longest in (None, gap)
    )
    assert outcome(window) == outcome(timeout)
    assert all(row.due == row.event_time + gap == row.closed_at - 1 for row in window.timed_out)


SEPARATE = {input_of(name): input_of(name.replace("/", "_")) for name in INPUTS}
"""By input the one that it would be if it were of a source of its own."""


@law
@given(records=arrivals(inputs=INPUTS))
def test_topics_are_merged_as_sources_are_whose_parts_stand_together_by_time_topic_and_offset(
    records: list[Record],
) -> None:
    one = MergeInput(rules_of(INPUTS, TIMEOUT_MS), records).merged()
    separate = [record._replace(input=SEPARATE[record.input]) for record in records]
    other = MergeInput(MergeRules(tuple(SEPARATE.values()), TIMEOUT_MS), separate).merged()
    assert (one.clock, [late.position for late in one.late]) == (
        other.clock,
        [late.position for late in other.late],
    )
    for mine, theirs in (
        (one.timed_out, other.timed_out),
        ([*one.open.values()], [*other.open.values()]),
    ):
        assert [(row.key, row.event_time, row.last_event_time) for row in mine] == [
            (row.key, row.event_time, row.last_event_time) for row in theirs
        ]
        for row, apart in zip(mine, theirs, strict=True):
            expected: dict[str, list[tuple[int, str, int]]] = {source: [] for source in SOURCES}
            for (source, topic), alone in SEPARATE.items():
                expected[source] += [
                    (part.event_time, topic, part.offset) for part in apart.parts[alone.source]
                ]
            parts = zip(row.parts, row.content()[3], strict=True)
            found = {
                source: [(part.event_time, part.topic, part.offset) for part in of_source]
                for source, of_source in parts
            }
            assert found == {source: sorted(of_source) for source, of_source in expected.items()}
