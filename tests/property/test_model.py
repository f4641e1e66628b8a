"""Laws of the merge, on arbitrary arrivals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.model import MergeRecord, MergeRules, PartitionMerge, Record
from tests.support.cases import SOURCES
from tests.support.strategies import TIMEOUT_MS, arrivals, cuts

RULES = MergeRules(SOURCES, TIMEOUT_MS)
law = settings(max_examples=200, deadline=None, derandomize=True)


def merged(pieces: Iterable[Sequence[Record]]) -> PartitionMerge:
    model = PartitionMerge(RULES)
    for piece in pieces:
        model.arrive(*piece)
        model.advance()
    return model


def outcome(model: PartitionMerge) -> tuple[object, ...]:
    """All that a merge says, and nothing of the way there."""
    return (
        model.clock,
        [row.content() for row in model.published_order()],
        sorted(row.content() for row in model.open.values()),
        sorted((late.record.source, late.record.offset, late.position) for late in model.late),
        model.unread(),
    )


def waiting_keyed(model: PartitionMerge) -> list[tuple[int, Record]]:
    return [(at, record) for source in SOURCES for at, record in model.unread().get(source, ()) if not record.is_heartbeat]


def every_row(model: PartitionMerge) -> list[MergeRecord]:
    return [*model.timed_out, *model.open.values()]


@law
@given(data=st.data(), records=arrivals())
def test_no_cut_into_batches_changes_the_outcome(data: st.DataObject, records: list[Record]) -> None:
    assert outcome(merged(data.draw(cuts(records)))) == outcome(merged([records]))


@law
@given(records=arrivals())
def test_record_by_record_gives_the_outcome_of_all_at_once(records: list[Record]) -> None:
    assert outcome(merged([record] for record in records)) == outcome(merged([records]))


@law
@given(data=st.data(), records=arrivals())
def test_only_the_order_within_a_source_matters(data: st.DataObject, records: list[Record]) -> None:
    queues = {source: [record for record in records if record.source == source] for source in SOURCES}
    order = data.draw(st.permutations([record.source for record in records]))
    interleaved = [queues[source].pop(0) for source in order]
    assert outcome(merged(data.draw(cuts(interleaved)))) == outcome(merged([records]))


@law
@given(records=arrivals())
def test_every_record_with_a_key_is_in_exactly_one_place(records: list[Record]) -> None:
    model = merged([records])
    places = Counter(
        [
            *[(source, part.offset) for row in every_row(model) for source, parts in row.parts.items() for part in parts],
            *[(late.record.source, late.record.offset) for late in model.late],
            *[
                (record.source, record.offset)
                for queue in model.unread().values()
                for _, record in queue
                if record.key is not None
            ],
        ]
    )
    assert places == Counter((record.source, record.offset) for record in records if record.key is not None)


@law
@given(records=arrivals())
def test_records_are_merged_under_their_own_key_and_time(records: list[Record]) -> None:
    known = {(record.source, record.offset): record for record in records}
    for row in every_row(merged([records])):
        parts = [(known[source, part.offset], part) for source, mine in row.parts.items() for part in mine]
        assert {record.key for record, _ in parts} == {row.key}
        assert all(record.event_time == part.event_time for record, part in parts)
        assert row.event_time == min(part.event_time for _, part in parts)
        assert row.last_event_time == max(part.event_time for _, part in parts)


@law
@given(data=st.data(), records=arrivals())
def test_at_most_one_record_of_a_key_is_open_and_key_and_event_time_are_unique(
    data: st.DataObject, records: list[Record]
) -> None:
    model = PartitionMerge(RULES)
    for piece in data.draw(cuts(records)):
        model.arrive(*piece)
        model.advance()
        assert all(key == row.key for (_, key), row in model.open.items())
        names = [(row.key, row.event_time) for row in every_row(model)]
        assert len(set(names)) == len(names)


@law
@given(records=arrivals())
def test_lateness_follows_from_a_records_own_topic_partition_alone(records: list[Record]) -> None:
    model = merged([records])
    heads: dict[str, int] = {}
    late = []
    for record in records:
        position = heads[record.source] = max(record.event_time, heads.get(record.source, 0))
        is_reached = model.clock is not None and position <= model.clock
        if is_reached and record.key is not None and record.event_time < position - TIMEOUT_MS:
            late.append((record.source, record.offset, position))
    assert sorted((each.record.source, each.record.offset, each.position) for each in model.late) == sorted(late)


@law
@given(data=st.data(), records=arrivals())
def test_the_clock_never_goes_back_and_is_the_smallest_head(data: st.DataObject, records: list[Record]) -> None:
    model, before = PartitionMerge(RULES), -1
    for piece in data.draw(cuts(records)):
        model.arrive(*piece)
        model.advance()
        if len(model.heads) < len(SOURCES):
            assert model.clock is None
        else:
            assert model.clock == min(model.heads.values())
            assert model.clock >= before
            before = model.clock
            assert all(position > model.clock for queue in model.unread().values() for position, _ in queue)
            assert all(row.event_time >= model.clock - TIMEOUT_MS for row in model.open.values())
            assert all(row.event_time < model.clock - TIMEOUT_MS for row in model.timed_out)


@law
@given(data=st.data(), records=arrivals())
def test_what_is_out_is_final_and_nothing_later_sorts_before_it(data: st.DataObject, records: list[Record]) -> None:
    model = PartitionMerge(RULES)
    out: list[Any] = []
    for piece in data.draw(cuts(records)):
        model.arrive(*piece)
        model.advance()
        published = [row.content() for row in model.published_order()]
        assert published[: len(out)] == out
        out = published


@law
@given(records=arrivals())
def test_publication_strictly_ascends(records: list[Record]) -> None:
    order = [(row.event_time, row.key.encode()) for row in merged([records]).published_order()]
    assert all(one < other for one, other in pairwise(order))


@law
@given(data=st.data(), records=arrivals())
def test_heartbeats_at_the_head_change_nothing(data: st.DataObject, records: list[Record]) -> None:
    """A heartbeat that repeats its source's head moves no position."""
    heads: dict[str, int] = {}
    doubled = []
    for record in records:
        heads[record.source] = max(record.event_time, heads.get(record.source, 0))
        doubled.append(record)
        if data.draw(st.booleans()):
            doubled.append(Record(record.source, 10_000 + record.offset, heads[record.source]))
    one, other = merged([records]), merged([doubled])
    assert outcome(one)[:4] == outcome(other)[:4]
    assert waiting_keyed(one) == waiting_keyed(other)


# -- epochs: the rules change between two batches

TIMEOUTS = st.sampled_from([1, 30, TIMEOUT_MS - 1, TIMEOUT_MS, TIMEOUT_MS + 1, 3 * TIMEOUT_MS, 1000])


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[int, list[Record]]]:
    """What arrives in each epoch, and the epoch's timeout."""
    pieces = draw(cuts(draw(arrivals())))
    return [(draw(TIMEOUTS), piece) for piece in pieces]


def lived(data: st.DataObject, life: list[tuple[int, list[Record]]], *, is_cut: bool) -> Iterator[PartitionMerge]:
    """A merge that goes through the epochs, after each batch. Each epoch begins with a look at what is there."""
    model = PartitionMerge(MergeRules(SOURCES, life[0][0]))
    for timeout_ms, records in life:
        model.begin_epoch(timeout_ms)
        for piece in data.draw(cuts(records)) if is_cut else [records]:
            model.arrive(*piece)
            model.advance()
            yield model


@law
@given(data=st.data(), life=lives())
def test_no_cut_within_epochs_changes_the_outcome(data: st.DataObject, life: list[tuple[int, list[Record]]]) -> None:
    *_, one = lived(data, life, is_cut=True)
    *_, other = lived(data, life, is_cut=False)
    assert outcome(one) == outcome(other)
    assert one.horizon == other.horizon


@law
@given(data=st.data(), life=lives())
def test_what_is_out_stays_first_in_order_through_every_epoch(data: st.DataObject, life: list[tuple[int, list[Record]]]) -> None:
    out: list[Any] = []
    for model in lived(data, life, is_cut=True):
        published = [row.content() for row in model.published_order()]
        assert published[: len(out)] == out
        out = published
        names = [(row.key, row.event_time) for row in every_row(model)]
        assert len(set(names)) == len(names)
        if model.horizon is not None:
            assert all(row.event_time >= model.horizon for row in model.open.values())


@law
@given(data=st.data(), life=lives(), others=st.lists(TIMEOUTS, max_size=4))
def test_epochs_without_a_batch_leave_no_trace(
    data: st.DataObject, life: list[tuple[int, list[Record]]], others: list[int]
) -> None:
    def through(passing: list[int]) -> PartitionMerge:
        model = PartitionMerge(MergeRules(SOURCES, life[0][0]))
        for timeout_ms, records in life:
            for other in [*passing, timeout_ms]:
                model.begin_epoch(other)
            model.arrive(*records)
            model.advance()
        return model

    one, other = through(others), through([])
    assert (outcome(one), one.horizon) == (outcome(other), other.horizon)


@law
@given(data=st.data(), records=arrivals())
def test_an_epoch_with_the_same_rules_changes_nothing(data: st.DataObject, records: list[Record]) -> None:
    pieces = data.draw(cuts(records))
    *_, one = lived(data, [(TIMEOUT_MS, piece) for piece in pieces], is_cut=False)
    assert outcome(one) == outcome(merged([records]))
