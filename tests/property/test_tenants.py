"""Laws of clocks by tenant and of windows by gap, on arbitrary arrivals."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.model import ALL, NEVER, MergeRecord, MergeRules, PartitionMerge, PublishedRecord, Record
from tests.support.cases import SOURCES
from tests.support.strategies import arrivals, cuts

law = settings(max_examples=300, deadline=None, derandomize=True)

TENANTS = ("x", "y", "é", "\U0001f600")
KEYS = ("a", "b")
END = 1_000_000


@dataclass(frozen=True)
class River:
    """What arrives, in order, and by which rules it is merged."""

    rules: MergeRules
    records: list[Record]

    @property
    def lag(self) -> int:
        """How far a tenant's clock may be behind."""
        return self.rules.lag_ms or 0

    def merged(self, pieces: Iterable[Sequence[Record]] | None = None) -> PartitionMerge:
        *_, model = self.through([self.records] if pieces is None else [*pieces, []])
        return model

    def through(self, pieces: Iterable[Sequence[Record]]) -> Iterator[PartitionMerge]:
        model = PartitionMerge(self.rules)
        for piece in pieces:
            model.arrive(*piece)
            model.advance()
            yield model

    def with_end(self) -> River:
        """Heartbeats for everybody at the end, so that all is closed."""
        return replace(self, records=[*self.records, *(Record(s, 10_000, END, tenant=None) for s in self.rules.sources)])


GAPS = st.sampled_from([0, 1, 30, 100])
EXTRAS = st.sampled_from([0, 0, 1, 50, 400])
LAGS = st.sampled_from([0, 1, 30, 100, 300, 1000, 100_000])


@st.composite
def rivers(draw: st.DrawFn, max_size: int = 40, tenants: Sequence[str] = TENANTS, *, is_calm: bool = False) -> River:
    """Tenants with delays of their own, ties, disorder, silence, heartbeats of a tenant and of everybody, decisions when idle.

    `is_calm`: no tenant is more than the lag behind anywhere.
    """
    gap, lag = draw(GAPS), draw(LAGS)
    rules = MergeRules(SOURCES, gap, gap + draw(EXTRAS), lag)
    delays = {tenant: draw(st.sampled_from([0, 0, 10, 100, 500, 2000])) for tenant in tenants}
    kinds = st.sampled_from([*["record"] * 6, "heartbeat", "of all", "idle"])
    row = st.tuples(
        st.sampled_from(SOURCES),
        kinds,
        st.sampled_from(tenants),
        st.sampled_from(KEYS),
        st.sampled_from([0, 0, 1, 7, 30, 100, 101, 300]),
        st.sampled_from([0, 0, 0, 1, 30, 100, 300]),
    )
    times, offsets = dict.fromkeys(SOURCES, 2500), dict.fromkeys(SOURCES, 0)
    records: list[Record] = []
    for source, kind, tenant, key, step, disorder in draw(st.lists(row, max_size=max_size)):
        times[source] += step
        if kind == "idle":
            decision = None if is_calm else idle_decision(records, source, lag)
            if decision is not None:
                records.append(decision)
            continue
        event_time = max(0, times[source] - delays[tenant] - disorder)
        if is_calm:
            event_time = max(event_time, times[source] - lag // 2)
        offsets[source] += 1
        record = Record(source, offsets[source], event_time, key, tenant)
        if kind != "record":
            record = replace(record, key=None, tenant=tenant if kind == "heartbeat" else None)
        records.append(record)
    return River(rules, records)


def heads_by_tenant(records: Iterable[Record], lag: int) -> dict[str, dict[str | None, int]]:
    """By source and tenant its position after all these records; under None that of a tenant without any."""
    own: dict[str, dict[str | None, int]] = defaultdict(dict)
    for record in records:
        mine = own[record.source]
        mine["head"] = max(mine.get("head", NEVER), record.event_time)
        if record.told is not None:
            for tenant, time in record.told.items():
                mine[tenant] = max(mine.get(tenant, NEVER), time)
        else:
            mine[record.tenant] = max(mine.get(record.tenant, NEVER), record.event_time)
    least = {source: max(mine.get(None, NEVER), mine["head"] - lag) for source, mine in own.items()}
    found: dict[str, dict[str | None, int]] = {}
    for source, mine in own.items():
        found[source] = {tenant: max(at, least[source]) for tenant, at in mine.items() if tenant not in ("head", None)}
        found[source][None] = least[source]
    return found


def idle_decision(records: list[Record], source: str, lag: int) -> Record | None:
    """What the idle policy says of a source that has the smallest head, or none, while another has one."""
    heads: dict[str, int] = {}
    for record in records:
        heads[record.source] = max(heads.get(record.source, 0), record.event_time)
    others = {s: head for s, head in heads.items() if s != source}
    if not others or heads.get(source, -1) >= min(others.values()):
        return None
    at = heads_by_tenant(records, lag)
    known = {tenant for s in others for tenant in at[s] if tenant is not None}
    told = {tenant: min(at[s].get(tenant, at[s][None]) for s in others) for tenant in known}
    return Record(source, -1, min(others.values()), tenant=None, told=told)


def every_row(model: PartitionMerge) -> list[MergeRecord]:
    return [*model.timed_out, *model.open.values()]


def closed(rows: Iterable[MergeRecord]) -> list[tuple[Any, ...]]:
    return [(row.tenant, row.due, row.closed_at, row.content()) for row in rows]


def outcome(model: PartitionMerge) -> tuple[object, ...]:
    """All that a merge says, and nothing of the way there."""

    def by_place(records: Iterable[tuple[int, Record]]) -> list[Any]:
        return sorted((record.source, record.offset, position) for position, record in records)

    return (
        model.clock,
        closed(model.published_order()),
        sorted((row.tenant, row.content()) for row in model.open.values()),
        by_place((late.position, late.record) for late in model.late),
        by_place(model.waiting),
        model.unread(),
    )


# -- determinism


@law
@given(data=st.data(), river=rivers())
def test_no_cut_into_batches_changes_the_outcome(data: st.DataObject, river: River) -> None:
    assert outcome(river.merged(data.draw(cuts(river.records)))) == outcome(river.merged())
    assert outcome(river.merged([record] for record in river.records)) == outcome(river.merged())


@law
@given(data=st.data(), river=rivers())
def test_only_the_order_within_a_source_matters(data: st.DataObject, river: River) -> None:
    queues = {source: [record for record in river.records if record.source == source] for source in SOURCES}
    order = data.draw(st.permutations([record.source for record in river.records]))
    interleaved = [queues[source].pop(0) for source in order]
    assert outcome(river.merged(data.draw(cuts(interleaved)))) == outcome(river.merged())


@law
@given(river=rivers())
def test_every_record_with_a_key_is_in_exactly_one_place(river: River) -> None:
    model = river.merged()
    places = [(source, part.offset) for row in every_row(model) for source, parts in row.parts.items() for part in parts]
    places += [(late.record.source, late.record.offset) for late in model.late]
    places += [(record.source, record.offset) for _, record in model.waiting]
    places += [(source, r.offset) for source, mine in model.unread().items() for _, r in mine if r.key is not None]
    assert Counter(places) == Counter((r.source, r.offset) for r in river.records if r.key is not None)


# -- the order of publication


@law
@given(data=st.data(), river=rivers())
def test_what_is_closed_up_to_the_clock_is_final(data: st.DataObject, river: River) -> None:
    out: list[Any] = []
    for model in river.through(data.draw(cuts(river.records))):
        clock = NEVER if model.clock is None else model.clock
        published = closed(row for row in model.published_order() if row.closed_at is not None and row.closed_at <= clock)
        assert published[: len(out)] == out
        assert len(published) == len(model.timed_out), "within an epoch nothing that has timed out is closed later"
        out = published


@law
@given(river=rivers())
def test_publication_strictly_ascends_and_names_are_unique(river: River) -> None:
    model = river.merged()
    assert all(one.place() < other.place() for one, other in pairwise(model.published_order()))
    names = Counter((row.tenant, row.key, row.event_time) for row in every_row(model))
    assert not names or max(names.values()) == 1


@law
@given(river=rivers())
def test_from_one_merge_record_of_a_key_to_the_next_due_and_event_time_grow(river: River) -> None:
    by_key: dict[tuple[str, str], list[MergeRecord]] = defaultdict(list)
    for row in river.with_end().merged().published_order():
        by_key[row.tenant, row.key].append(row)
    for rows in by_key.values():
        assert all(one.due < other.due and one.event_time < other.event_time for one, other in pairwise(rows))  # type: ignore[operator]


# -- clocks


@law
@given(data=st.data(), river=rivers())
def test_a_tenants_clock_never_goes_back_and_is_at_most_the_lag_behind(data: st.DataObject, river: River) -> None:
    before: dict[str, int] = {}
    for model in river.through(data.draw(cuts(river.records))):
        if model.clock is None:
            continue
        for tenant in TENANTS:
            clock = model.tenant_clock(tenant)
            assert model.clock - river.lag <= clock <= model.clock
            assert clock >= before.get(tenant, NEVER)
            before[tenant] = clock
            assert all(
                river.rules.due(r.event_time, r.last_event_time) >= clock for r in model.open.values() if r.tenant == tenant
            )
            assert all(clock < v <= model.clock for v, record in model.waiting if record.tenant == tenant)
            for row in model.timed_out:
                if row.tenant == tenant:
                    assert row.due is not None
                    assert row.closed_at is not None
                    assert row.due < clock
                    assert row.due + 1 <= row.closed_at <= row.due + 1 + river.lag


@law
@given(data=st.data(), river=rivers())
def test_what_a_tenants_clock_was_is_known_later(data: st.DataObject, river: River) -> None:
    seen: list[tuple[str, int, int]] = []
    for model in river.through(data.draw(cuts(river.records))):
        if model.clock is not None:
            seen += [(tenant, model.clock, model.tenant_clock(tenant)) for tenant in TENANTS]
        assert all(model.tenant_clock(tenant, clock) == found for tenant, clock, found in seen)


@law
@given(data=st.data(), river=rivers())
def test_closed_at_is_the_first_clock_at_which_the_tenants_clock_is_beyond_due(data: st.DataObject, river: River) -> None:
    """By definition: the clock is brought to each time in turn, and the merge asked what has timed out."""
    rows = river.with_end().merged().timed_out
    if not rows:
        return
    row = data.draw(st.sampled_from(rows))
    assert row.closed_at is not None
    assert row.due is not None
    for clock, is_beyond in ((row.closed_at - 1, False), (row.closed_at, True)):
        assert (_tenant_clock_at(river.with_end(), row.tenant, clock) > row.due) == is_beyond


def _tenant_clock_at(river: River, tenant: str, clock: int) -> int:
    """A tenant's clock at a clock, as the rules define it: by looking at every topic-partition up to its cut."""
    found = clock
    for source in river.rules.sources:
        cut, head = [], NEVER
        for record in (record for record in river.records if record.source == source):
            cut.append(record)
            head = max(head, record.event_time)
            if head >= clock:
                break
        at = heads_by_tenant(cut, river.lag)[source]
        found = min(found, at.get(tenant, at[None]))
    return found


@law
@given(river=rivers())
def test_nobody_is_late_because_of_others_unless_more_than_the_lag_behind(river: River) -> None:
    heads: dict[str, int] = {}
    own: dict[tuple[str, str | None], int] = {}
    positions = {}
    for record in river.records:
        heads[record.source] = max(heads.get(record.source, NEVER), record.event_time)
        for tenant, time in (record.told or {record.tenant or ALL: record.event_time}).items():
            own[record.source, tenant] = max(own.get((record.source, tenant), NEVER), time)
        of_all = own.get((record.source, ALL), NEVER)
        mine = max(own.get((record.source, record.tenant), NEVER), of_all)
        positions[record.source, record.offset] = heads[record.source], mine
    for late in river.merged().late:
        head, mine = positions[late.record.source, late.record.offset]
        is_far_behind = late.record.event_time < head - river.lag - river.rules.gap_ms
        assert is_far_behind or late.record.event_time < mine - river.rules.gap_ms


@law
@given(river=rivers(is_calm=True))
def test_a_tenant_that_is_never_more_than_the_lag_behind_is_merged_as_if_alone(river: River) -> None:
    """Before its first record a tenant is as far behind as may be, so each begins with a heartbeat of its own."""
    lag, first = river.lag, min((r.event_time for r in river.records), default=0)
    begin = [Record(s, -5, first, tenant=tenant) for s in SOURCES for tenant in TENANTS]
    river = replace(river, records=_kept_close([*begin, *river.records], lag)).with_end()
    model = river.merged()
    for tenant in TENANTS:
        alone = [record for record in river.records if record.tenant in (tenant, None)]
        of_alone = replace(river, rules=replace(river.rules, lag_ms=None), records=alone).merged()
        mine = [row for row in model.published_order() if row.tenant == tenant]
        assert sorted(r.content() for r in mine) == sorted(r.content() for r in of_alone.timed_out)
        lates = {(each.record.source, each.record.offset) for each in model.late if each.record.tenant == tenant}
        assert lates == {(each.record.source, each.record.offset) for each in of_alone.late}


def _kept_close(records: list[Record], lag: int) -> list[Record]:
    """These records, of which the first is at the time of every tenant's first heartbeat, with a heartbeat of each tenant that
    would otherwise come to be more than the lag behind.
    """
    heads: dict[str, int] = {}
    own = {(source, tenant): records[0].event_time for source in SOURCES for tenant in TENANTS}
    kept = []
    for record in records:
        heads[record.source] = max(heads.get(record.source, NEVER), record.event_time)
        for tenant in TENANTS:
            if record.tenant in (tenant, None):
                own[record.source, tenant] = max(own[record.source, tenant], record.event_time)
            elif own[record.source, tenant] < heads[record.source] - lag:
                own[record.source, tenant] = heads[record.source] - lag
                kept.append(Record(record.source, -6, heads[record.source] - lag, tenant=tenant))
        kept.append(record)
    return kept


@law
@given(river=rivers())
def test_who_lags_where_time_goes_on_is_not_late_because_a_source_was_silent(river: River) -> None:
    """A record of the silent source at the tenant's time on the other one comes in time after the decision."""
    silent, other = SOURCES
    records = [record for record in river.records if record.source == other and record.told is None]
    decision = idle_decision(records, silent, river.lag)
    if decision is None:
        return
    at = heads_by_tenant(records, river.lag)[other]
    for tenant in TENANTS:
        time = max(0, at.get(tenant, at[None]))
        model = replace(river, records=[*records, decision, Record(silent, 1, time, "a", tenant)]).with_end().merged()
        assert not [late for late in model.late if late.record.source == silent]


# -- special cases


@law
@given(river=rivers(tenants=TENANTS[:1]))
def test_one_tenant_is_equal_to_none(river: River) -> None:
    """Decisions of the idle policy are told to the tenant, where there is one: here its position is everybody's."""
    records = [r if r.told is None else replace(r, told=None) for r in river.records]
    one = replace(river, records=_all_of_one(records)).merged()
    none = replace(river, rules=replace(river.rules, lag_ms=None), records=[replace(r, tenant=ALL) for r in records]).merged()
    assert [(r.due, r.closed_at, r.content()) for r in one.published_order()] == [
        (r.due, r.closed_at, r.content()) for r in none.published_order()
    ]
    assert sorted(r.content() for r in one.open.values()) == sorted(r.content() for r in none.open.values())
    of_one, of_none = ([(late.record.offset, late.position) for late in model.late] for model in (one, none))
    assert of_one == of_none
    assert not none.waiting
    assert not one.waiting


def _all_of_one(records: list[Record]) -> list[Record]:
    return [replace(record, tenant=TENANTS[0]) for record in records]


@law
@given(river=rivers())
def test_without_a_lag_every_clock_is_the_same(river: River) -> None:
    model = replace(river, rules=replace(river.rules, lag_ms=0)).merged()
    if model.clock is not None:
        assert {model.tenant_clock(tenant) for tenant in TENANTS} == {model.clock}
    assert not model.waiting
    assert all(row.closed_at == row.due + 1 for row in model.timed_out if row.due is not None)


@law
@given(records=arrivals(), gap=GAPS)
def test_a_window_whose_gap_is_its_max_is_a_timeout(records: list[Record], gap: int) -> None:
    timeout, window = (River(MergeRules(SOURCES, gap, longest), records).merged() for longest in (None, gap))
    order = window.published_order()
    assert all(row.due == row.event_time + gap for row in order)
    for row in window.timed_out:
        row.due = row.closed_at = None
    assert outcome(window) == outcome(timeout)
    assert [row.content() for row in order] == [row.content() for row in timeout.published_order()]


# -- epochs


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[MergeRules, list[Record]]]:
    """What arrives in each epoch, and its rules."""
    river = draw(rivers())
    pieces = draw(cuts(river.records))
    found = []
    for piece in pieces:
        gap = draw(GAPS)
        found.append((MergeRules(SOURCES, gap, gap + draw(EXTRAS), draw(LAGS)), piece))
    return found


def lived(data: st.DataObject, life: list[tuple[MergeRules, list[Record]]], *, is_cut: bool) -> Iterator[PartitionMerge]:
    model = PartitionMerge(life[0][0])
    for rules, records in life:
        model.begin_epoch(rules.gap_ms, rules.max_ms, rules.lag_ms)
        for piece in data.draw(cuts(records)) if is_cut else [records]:
            model.arrive(*piece)
            model.advance()
            yield model


@law
@given(data=st.data(), life=lives())
def test_no_cut_within_epochs_changes_the_outcome(data: st.DataObject, life: list[tuple[MergeRules, list[Record]]]) -> None:
    *_, one = lived(data, life, is_cut=True)
    *_, other = lived(data, life, is_cut=False)
    assert outcome(one) == outcome(other)
    assert (one.horizon, one.horizons) == (other.horizon, other.horizons)


@law
@given(data=st.data(), life=lives())
def test_through_every_epoch_what_is_out_stays_first_in_order(
    data: st.DataObject, life: list[tuple[MergeRules, list[Record]]]
) -> None:
    out: list[Any] = []
    clocks: dict[str, int] = {}
    for model in lived(data, life, is_cut=True):
        clock = NEVER if model.clock is None else model.clock
        published = closed(row for row in model.published_order() if row.closed_at is not None and row.closed_at <= clock)
        assert published[: len(out)] == out
        out = published
        names = Counter((row.tenant, row.key, row.event_time) for row in every_row(model))
        assert not names or max(names.values()) == 1
        for tenant in TENANTS if model.clock is not None else ():
            assert model.tenant_clock(tenant) >= clocks.get(tenant, NEVER)
            clocks[tenant] = model.tenant_clock(tenant)


# -- from the sink alone


def test_a_lost_lake_is_taken_up_exactly_from_the_sink() -> None:
    """From a random message on; the others are known by their due times."""
    found: Counter[str] = Counter()

    @settings(law, max_examples=1000)
    @given(data=st.data(), river=rivers())
    def taken_up(data: st.DataObject, river: River) -> None:
        river = river.with_end() if data.draw(st.booleans()) else river
        rules, order = river.rules, river.merged().published_order()
        if not order:
            return
        out = order[: data.draw(st.integers(1, len(order)))]
        longest = rules.gap_ms if rules.max_ms is None else rules.max_ms
        assert out[-1].closed_at is not None
        since = out[-1].closed_at - 1 - river.lag - longest
        recovered: dict[str, list[PublishedRecord]] = defaultdict(list)
        for row in out:
            if row.closed_at is not None and row.closed_at > since:
                recovered[row.key].append(PublishedRecord(row.event_time, row.due, row.closed_at, row.tenant))
        model = PartitionMerge(rules, since=since, recovered=recovered)
        for source in SOURCES:
            head = NEVER
            for record in (record for record in river.records if record.source == source):
                head = max(head, record.event_time)
                if head >= since:
                    model.arrive(record)
                else:
                    found["left out"] += 1
        model.advance()
        again = [row for row in model.published_order() if row.place() > out[-1].place()]
        found["again"] += len(again)
        found["known"] += len(model.already_published)
        assert closed([*out, *again]) == closed(order)

    taken_up()
    assert min(found[each] for each in ("left out", "again", "known")) > 100, found
