"""Laws of clocks by tenant and of windows by gap, on arbitrary arrivals. Those that hold for every
merge are in test_merge.py."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cases import SOURCES, rules_of
from tests.support.effort import draws
from tests.support.inputs import record_of
from tests.support.merges import (
    TENANTS,
    MergeInput,
    closed,
    heads_by_tenant,
    idle_decision,
    tenant_inputs,
)
from tests.support.strategies import cuts
from watersmeet.core.model import (
    MIN_TIME,
    NO_TENANT,
    MergeRecord,
    PartitionMerge,
    PublishedRecord,
    Record,
)

law = draws(80)


@law
@given(river=tenant_inputs())
def test_from_one_merge_record_of_a_key_to_the_next_due_and_event_time_grow(
    river: MergeInput,
) -> None:
    by_key: dict[tuple[str, str], list[MergeRecord]] = defaultdict(list)
    for row in river.with_end().merged().published_order():
        by_key[row.tenant, row.key].append(row)
    for rows in by_key.values():
        assert all(
            one.due < other.due and one.event_time < other.event_time
            for one, other in pairwise(rows)
        )


# -- clocks


@law
@given(data=st.data(), river=tenant_inputs())
def test_a_tenants_clock_never_goes_back_and_is_at_most_the_lag_behind(
    data: st.DataObject, river: MergeInput
) -> None:
    before: dict[str, int] = {}
    for model in river.through(data.draw(cuts(river.records))):
        if model.clock is None:
            continue
        for tenant in TENANTS:
            clock = model.tenant_clock(tenant)
            assert model.clock - river.lag <= clock <= model.clock
            assert clock >= before.get(tenant, MIN_TIME)
            before[tenant] = clock
            assert all(
                river.rules.due(r.event_time, r.last_event_time) >= clock
                for r in model.open.values()
                if r.tenant == tenant
            )
            assert all(
                clock < v <= model.clock for v, record in model.waiting if record.tenant == tenant
            )
            for row in model.timed_out:
                if row.tenant == tenant:
                    assert row.due < clock
                    assert row.due + 1 <= row.closed_at <= row.due + 1 + river.lag


@law
@given(data=st.data(), river=tenant_inputs())
def test_what_a_tenants_clock_was_is_known_later(data: st.DataObject, river: MergeInput) -> None:
    seen: list[tuple[str, int, int]] = []
    for model in river.through(data.draw(cuts(river.records))):
        if model.clock is not None:
            seen += [(tenant, model.clock, model.tenant_clock(tenant)) for tenant in TENANTS]
        assert all(model.tenant_clock(tenant, clock) == found for tenant, clock, found in seen)


@law
@given(data=st.data(), river=tenant_inputs())
def test_closed_at_is_the_first_clock_at_which_the_tenants_clock_is_beyond_due(
    data: st.DataObject, river: MergeInput
) -> None:
    """By definition: the clock is brought to each time in turn, and the merge asked what has timed
    out."""
    rows = river.with_end().merged().timed_out
    if not rows:
        return
    row = data.draw(st.sampled_from(rows))
    for clock, is_beyond in ((row.closed_at - 1, False), (row.closed_at, True)):
        assert (_tenant_clock_at(river.with_end(), row.tenant, clock) > row.due) == is_beyond


def _tenant_clock_at(river: MergeInput, tenant: str, clock: int) -> int:
    """A tenant's clock at a clock, as the rules define it: by looking at every topic-partition up
    to its cut."""
    found = clock
    for source in river.rules.sources:
        cut, head = [], MIN_TIME
        for record in (record for record in river.records if record.input.source == source):
            cut.append(record)
            head = max(head, record.event_time)
            if head >= clock:
                break
        at = heads_by_tenant(cut, river.lag)[source]
        found = min(found, at.get(tenant, at[None]))
    return found


@pytest.mark.promise("T1")
@pytest.mark.fault("cuts", oracle=True)
@law
@given(river=tenant_inputs())
def test_nobody_is_late_because_of_others_unless_more_than_the_lag_behind(
    river: MergeInput,
) -> None:
    heads: dict[str, int] = {}
    own: dict[tuple[str, str | None], int] = {}
    positions = {}
    for record in river.records:
        heads[record.input.source] = max(
            heads.get(record.input.source, MIN_TIME), record.event_time
        )
        for tenant, time in (
            record.tenant_times or {record.tenant or NO_TENANT: record.event_time}
        ).items():
            own[record.input.source, tenant] = max(
                own.get((record.input.source, tenant), MIN_TIME), time
            )
        of_all = own.get((record.input.source, NO_TENANT), MIN_TIME)
        mine = max(own.get((record.input.source, record.tenant), MIN_TIME), of_all)
        positions[record.input.source, record.offset] = heads[record.input.source], mine
    for late in river.merged().late:
        head, mine = positions[late.record.input.source, late.record.offset]
        is_far_behind = late.record.event_time < head - river.lag - river.rules.gap_ms
        assert is_far_behind or late.record.event_time < mine - river.rules.gap_ms


@pytest.mark.promise("T1")
@pytest.mark.fault("cuts", oracle=True)
@law
@given(river=tenant_inputs(is_calm=True))
def test_a_tenant_that_is_never_more_than_the_lag_behind_is_merged_as_if_alone(
    river: MergeInput,
) -> None:
    """Before its first record a tenant is as far behind as may be, so each begins with a heartbeat
    of its own."""
    lag, first = river.lag, min((r.event_time for r in river.records), default=0)
    begin = [record_of(s, -5, first, tenant=tenant) for s in SOURCES for tenant in TENANTS]
    river = replace(river, records=_kept_close([*begin, *river.records], lag)).with_end()
    model = river.merged()
    for tenant in TENANTS:
        alone = [record for record in river.records if record.tenant in (tenant, None)]
        of_alone = replace(river, rules=replace(river.rules, lag_ms=None), records=alone).merged()
        mine = [row for row in model.published_order() if row.tenant == tenant]
        assert sorted(r.content() for r in mine) == sorted(r.content() for r in of_alone.timed_out)
        lates = {
            (each.record.input.source, each.record.offset)
            for each in model.late
            if each.record.tenant == tenant
        }
        assert lates == {(each.record.input.source, each.record.offset) for each in of_alone.late}


def _kept_close(records: list[Record], lag: int) -> list[Record]:
    """These records, of which the first is at the time of every tenant's first heartbeat, with a
    heartbeat of each tenant that would otherwise come to be more than the lag behind.
    """
    heads: dict[str, int] = {}
    own = {(source, tenant): records[0].event_time for source in SOURCES for tenant in TENANTS}
    kept = []
    for record in records:
        heads[record.input.source] = max(
            heads.get(record.input.source, MIN_TIME), record.event_time
        )
        for tenant in TENANTS:
            if record.tenant in (tenant, None):
                own[record.input.source, tenant] = max(
                    own[record.input.source, tenant], record.event_time
                )
            elif own[record.input.source, tenant] < heads[record.input.source] - lag:
                own[record.input.source, tenant] = heads[record.input.source] - lag
                kept.append(
                    record_of(
                        record.input.source, -6, heads[record.input.source] - lag, tenant=tenant
                    )
                )
        kept.append(record)
    return kept


@law
@given(river=tenant_inputs())
def test_who_lags_where_time_goes_on_is_not_late_because_a_source_was_silent(
    river: MergeInput,
) -> None:
    """A record of the silent source at the tenant's time on the other one comes in time after the
    decision."""
    silent, other = SOURCES
    records = [
        record
        for record in river.records
        if record.input.source == other and record.tenant_times is None
    ]
    decision = idle_decision(records, silent, river.lag)
    if decision is None:
        return
    at = heads_by_tenant(records, river.lag)[other]
    for tenant in TENANTS:
        time = max(0, at.get(tenant, at[None]))
        model = (
            replace(river, records=[*records, decision, record_of(silent, 1, time, "a", tenant)])
            .with_end()
            .merged()
        )
        assert not [late for late in model.late if late.record.input.source == silent]


def test_no_change_of_the_lag_takes_a_tenants_clock_back() -> None:
    """Not even where a heartbeat of everybody comes as the clock stands at its time."""
    tracking, orders = SOURCES
    model = PartitionMerge(rules_of(SOURCES, 10, 10, 0))
    model.arrive(record_of(tracking, 1, 107, tenant="y"), record_of(orders, 1, 100, tenant="y"))
    model.arrive(record_of(orders, 2, 100, tenant=None))
    for lag_ms in (0, 1):
        model.begin_epoch(10, 10, lag_ms)
        model.advance()
        assert model.tenant_clock("x") == model.clock == 100


# -- special cases


@law
@given(river=tenant_inputs(tenants=TENANTS[:1]))
def test_one_tenant_is_equal_to_none(river: MergeInput) -> None:
    """Decisions of the idle policy are told to the tenant, where there is one: here its position is
    everybody's."""
    records = [
        r if r.tenant_times is None else r._replace(tenant_times=None) for r in river.records
    ]
    one = replace(river, records=_all_of_one(records)).merged()
    none = replace(
        river,
        rules=replace(river.rules, lag_ms=None),
        records=[r._replace(tenant=NO_TENANT) for r in records],
    ).merged()
    assert [(r.due, r.closed_at, r.content()) for r in one.published_order()] == [
        (r.due, r.closed_at, r.content()) for r in none.published_order()
    ]
    assert sorted(r.content() for r in one.open.values()) == sorted(
        r.content() for r in none.open.values()
    )
    of_one, of_none = (
        [(late.record.offset, late.position) for late in model.late] for model in (one, none)
    )
    assert of_one == of_none
    assert not none.waiting
    assert not one.waiting


def _all_of_one(records: list[Record]) -> list[Record]:
    return [record._replace(tenant=TENANTS[0]) for record in records]


@law
@given(river=tenant_inputs())
def test_without_a_lag_every_clock_is_the_same(river: MergeInput) -> None:
    model = replace(river, rules=replace(river.rules, lag_ms=0)).merged()
    if model.clock is not None:
        assert {model.tenant_clock(tenant) for tenant in TENANTS} == {model.clock}
    assert not model.waiting
    assert all(row.closed_at == row.due + 1 for row in model.timed_out)


# -- from the sink alone


def test_a_lost_lake_is_taken_up_exactly_from_the_sink() -> None:
    """From a random message on; the others are known by their due times."""
    found: Counter[str] = Counter()

    @draws(300)
    @given(data=st.data(), river=tenant_inputs())
    def taken_up(data: st.DataObject, river: MergeInput) -> None:
        river = river.with_end() if data.draw(st.booleans()) else river
        rules, order = river.rules, river.merged().published_order()
        if not order:
            return
        out = order[: data.draw(st.integers(1, len(order)))]
        longest = rules.gap_ms if rules.max_ms is None else rules.max_ms
        since = out[-1].closed_at - 1 - river.lag - longest
        recovered: dict[str, list[PublishedRecord]] = defaultdict(list)
        for row in out:
            if row.closed_at > since:
                recovered[row.key].append(
                    PublishedRecord(row.event_time, row.due, row.closed_at, row.tenant)
                )
        model = PartitionMerge(rules, since=since, recovered=recovered)
        for source in SOURCES:
            head = MIN_TIME
            for record in (record for record in river.records if record.input.source == source):
                head = max(head, record.event_time)
                if head >= since:
                    model.arrive(record)
                else:
                    found["left out"] += 1
        model.advance()
        again = [row for row in model.published_order() if row.place() > out[-1].place()]
        found["again"] += len(again)
        found["known"] += len(model.passed)
        assert closed([*out, *again]) == closed(order)

    taken_up()
    assert min(found[each] for each in ("left out", "again", "known")) > 30, found
