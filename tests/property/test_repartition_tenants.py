"""What repartitioning does to tenants: which orders keep their records on time, and how far the
lockstep's is from that.

All records are of one source and go to one partition, the worst case. The merge model says what is
late.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import rules_of
from tests.support.effort import draws
from tests.support.inputs import record_of
from watersmeet.core.model import PartitionMerge, Record, SourceState

GAP, LAG = 100, 2000
SOURCE = "tracking"

law = draws(80)


class Sent(NamedTuple):
    """A record of a tenant; without one, a heartbeat that speaks for everybody."""

    tenant: str | None
    time: int


class SortKey(NamedTuple):
    """Where a record is before it is repartitioned."""

    partition: int
    offset: int


Topic = Mapping[int, Sequence[Sent]]

tenants = st.sampled_from(["x", "y", None])
topics = st.dictionaries(
    st.integers(0, 2),
    st.lists(st.builds(Sent, tenants, st.integers(0, 40).map(lambda n: n * 70)), max_size=8),
    min_size=1,
    max_size=3,
)


def as_record(sent: Sent, offset: int) -> Record:
    return record_of(
        SOURCE, offset, sent.time, key=None if sent.tenant is None else "a", tenant=sent.tenant
    )


def late(topic: Topic, order: Iterable[SortKey]) -> set[SortKey]:
    """What is late in a partition that has the records in this order."""
    places = list(order)
    merge = PartitionMerge(rules_of((SOURCE,), GAP, None, LAG))
    merge.arrive(*(as_record(topic[p][offset], i) for i, (p, offset) in enumerate(places)))
    merge.advance()
    return {places[each.record.offset] for each in merge.late}


def late_at_home(topic: Topic) -> set[SortKey]:
    """What is late in its own partition."""
    return {
        place
        for p, sent in topic.items()
        for place in late(topic, [SortKey(p, i) for i in range(len(sent))])
    }


def positions(topic: Topic, order: Iterable[SortKey]) -> dict[SortKey, int]:
    """By record the position of its tenant; of a heartbeat for everybody, that of whom nothing else
    is known."""
    reading, found = SourceState(), {}
    for i, (p, offset) in enumerate(order):
        sent = topic[p][offset]
        reading.arrive(as_record(sent, i))
        [(found[SortKey(p, offset)], _)] = reading.read(reading.head, LAG)
    return found


def at_home(topic: Topic) -> dict[SortKey, int]:
    """By record the position of its tenant in its own partition."""
    return {
        place: v
        for p, sent in topic.items()
        for place, v in positions(topic, [SortKey(p, i) for i in range(len(sent))]).items()
    }


def heads(topic: Topic) -> dict[SortKey, int]:
    """By record its position: that of all in its own partition."""
    return {
        SortKey(p, i): max(each.time for each in sent[: i + 1])
        for p, sent in topic.items()
        for i in range(len(sent))
    }


def lockstep(topic: Topic) -> list[SortKey]:
    """The order in which records are written."""
    of_all = heads(topic)
    return sorted(of_all, key=lambda place: (of_all[place], place))


def interleavings(topic: Topic) -> Iterator[list[SortKey]]:
    """Every order that leaves each partition's own as it is."""
    left = {p: len(sent) for p, sent in topic.items() if sent}
    if not left:
        yield []
    for p in left:
        rest = {q: sent[:-1] if q == p else sent for q, sent in topic.items()}
        yield from ([*before, SortKey(p, left[p] - 1)] for before in interleavings(rest))


CROSSED: Topic = {0: [Sent("x", 1000), Sent("y", 0)], 1: [Sent("y", 1000), Sent("x", 0)]}
"""In each partition another tenant is behind."""


def test_tenants_that_lag_crosswise_are_late_in_every_order_that_keeps_the_partitions_own() -> None:
    assert late_at_home(CROSSED) == set()
    assert len(list(interleavings(CROSSED))) == 6
    assert all(late(CROSSED, order) for order in interleavings(CROSSED))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (1, 1, 1)], ids=str)
def test_with_fewer_records_some_order_makes_none_late(sizes: tuple[int, ...]) -> None:
    """Of two tenants, or heartbeats for everybody, at times further apart than the gap: so there is
    no smaller example."""
    any_one = [Sent(tenant, time) for tenant in ("x", "y", None) for time in (0, 1000, 2000)]
    for records in product(any_one, repeat=sum(sizes)):
        begins = [sum(sizes[:p]) for p in range(len(sizes))]
        topic = {
            p: records[begin : begin + size]
            for p, (begin, size) in enumerate(zip(begins, sizes, strict=True))
        }
        own = late_at_home(topic)
        assert any(late(topic, order) <= own for order in interleavings(topic)), topic


@pytest.mark.promise("N6")
@law
@given(topics)
def test_a_tenant_is_further_than_at_home_by_no_more_than_its_lags_in_the_partitions_differ(
    topic: Topic,
) -> None:
    """So a record that is on time by more than that stays on time; a tenant's lag is what its
    position is behind that of all."""
    of_all, own = heads(topic), at_home(topic)
    by_partition = {p: [SortKey(p, i) for i in range(len(sent))] for p, sent in topic.items()}
    for place, position in positions(topic, lockstep(topic)).items():
        tenant = topic[place.partition][place.offset].tenant
        if tenant is None:
            continue
        smallest = LAG
        for places in by_partition.values():
            for i, other in enumerate(places):
                upto = {other.partition: [*topic[other.partition][: i + 1], Sent(tenant, 0)]}
                asked = SortKey(other.partition, i + 1)
                smallest = min(
                    smallest,
                    of_all[other] - max(0, positions(upto, [*places[: i + 1], asked])[asked]),
                )
        lag = of_all[place] - own[place]
        assert own[place] <= position <= own[place] + lag - smallest


@pytest.mark.promise("N6")
@law
@given(topics)
def test_a_record_that_would_be_on_time_without_tenants_stays_on_time(topic: Topic) -> None:
    of_all = heads(topic)
    for p, offset in late(topic, lockstep(topic)):
        assert topic[p][offset].time < of_all[SortKey(p, offset)] - GAP


@law
@given(topics)
def test_only_an_order_that_lets_tenants_of_a_partition_pass_one_another_keeps_all_on_time(
    topic: Topic,
) -> None:
    """That of the tenants' own positions. It is not the one that is written: see decision 40."""
    own = at_home(topic)
    order = sorted(own, key=lambda place: (own[place], place))
    assert late(topic, order) <= late_at_home(topic)
