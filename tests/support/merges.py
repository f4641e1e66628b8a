"""Inputs of the merge for properties: what arrives, in which order, and by which rules; and what
the merge model makes of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.support.cases import INPUTS, SOURCES, rules_of
from tests.support.inputs import record_of
from tests.support.strategies import TIMEOUT_MS, arrivals, cuts
from watersmeet.core.model import (
    MIN_TIME,
    DuplicateRecord,
    MergeRecord,
    MergeRules,
    PartitionMerge,
    Record,
)

TENANTS = ("x", "y", "é", "\U0001f600")
KEYS = ("a", "b")
END = 1_000_000


@dataclass(frozen=True)
class MergeInput:
    """What arrives, in order, and by which rules it is merged."""

    rules: MergeRules
    records: list[Record]

    @property
    def lag(self) -> int:
        """How far a tenant's clock may be behind."""
        return self.rules.lag_ms or 0

    def merged(self, chunks: Iterable[Sequence[Record]] | None = None) -> PartitionMerge:
        *_, model = self.through([self.records] if chunks is None else [*chunks, []])
        return model

    def through(self, chunks: Iterable[Sequence[Record]]) -> Iterator[PartitionMerge]:
        model = PartitionMerge(self.rules)
        for chunk in chunks:
            model.arrive(*chunk)
            model.advance()
            yield model

    def with_end(self) -> MergeInput:
        """Heartbeats for everybody at the end, so that all is closed."""
        return replace(
            self,
            records=[
                *self.records,
                *(record_of(s, 10_000, END, tenant=None) for s in self.rules.inputs),
            ],
        )


GAPS = st.sampled_from([0, 1, 30, 100])
EXTRAS = st.sampled_from([0, 0, 1, 50, 400])
LAGS = st.sampled_from([0, 1, 30, 100, 300, 1000, 100_000])


@st.composite
def tenant_inputs(
    draw: st.DrawFn, max_size: int = 40, tenants: Sequence[str] = TENANTS, *, is_calm: bool = False
) -> MergeInput:
    """Tenants with delays of their own, ties, disorder, silence, heartbeats of a tenant and of
    everybody, decisions when idle.

    `is_calm`: no tenant is more than the lag behind anywhere.
    """
    gap, lag = draw(GAPS), draw(LAGS)
    rules = rules_of(SOURCES, gap, gap + draw(EXTRAS), lag)
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
        record = record_of(source, offsets[source], event_time, key, tenant)
        if kind != "record":
            record = record._replace(key=None, tenant=tenant if kind == "heartbeat" else None)
        records.append(record)
    return MergeInput(rules, records)


def heads_by_tenant(records: Iterable[Record], lag: int) -> dict[str, dict[str | None, int]]:
    """By source and tenant its position after all these records; under None that of a tenant
    without any."""
    own: dict[str, dict[str | None, int]] = defaultdict(dict)
    for record in records:
        mine = own[record.input.source]
        mine["head"] = max(mine.get("head", MIN_TIME), record.event_time)
        if record.tenant_times is not None:
            for tenant, time in record.tenant_times.items():
                mine[tenant] = max(mine.get(tenant, MIN_TIME), time)
        else:
            mine[record.tenant] = max(mine.get(record.tenant, MIN_TIME), record.event_time)
    least = {
        source: max(mine.get(None, MIN_TIME), mine["head"] - lag) for source, mine in own.items()
    }
    found: dict[str, dict[str | None, int]] = {}
    for source, mine in own.items():
        found[source] = {
            tenant: max(at, least[source])
            for tenant, at in mine.items()
            if tenant not in ("head", None)
        }
        found[source][None] = least[source]
    return found


def idle_decision(
    records: list[Record], source: str, lag: int, *, tells_all: bool = False
) -> Record | None:
    """What the idle policy says of a source that has the smallest head, or none, while another has
    one. `tells_all`: also to tenants whose time there does not rise, as older lakes have it."""
    heads: dict[str, int] = {}
    for record in records:
        heads[record.input.source] = max(heads.get(record.input.source, 0), record.event_time)
    others = {s: head for s, head in heads.items() if s != source}
    if not others or heads.get(source, -1) >= min(others.values()):
        return None
    at = heads_by_tenant(records, lag)
    known = {tenant for s in others for tenant in at[s] if tenant is not None}
    tenant_times = {tenant: min(at[s].get(tenant, at[s][None]) for s in others) for tenant in known}
    if not tells_all:
        own = at.get(source, {})
        tenant_times = {g: time for g, time in tenant_times.items() if time > own.get(g, MIN_TIME)}
    return record_of(source, -1, min(others.values()), tenant=None, tenant_times=tenant_times)


def every_row(model: PartitionMerge) -> list[MergeRecord]:
    return [*model.timed_out, *model.open.values()]


def repeated(model: PartitionMerge) -> list[DuplicateRecord]:
    """The duplicates of all merge records; those of an open one may become excess yet."""
    return [*model.duplicates, *(each for row in model.open.values() for each in row.repeated)]


def closed(rows: Iterable[MergeRecord]) -> list[tuple[Any, ...]]:
    return [(row.tenant, row.due, row.closed_at, row.content()) for row in rows]


def outcome(model: PartitionMerge) -> tuple[object, ...]:
    """All that a merge says, and nothing of the way there."""

    def by_place(records: Iterable[tuple[int, Record]]) -> list[Any]:
        return sorted(
            (record.input.source, record.offset, position) for position, record in records
        )

    return (
        model.clock,
        closed(model.published_order()),
        sorted((row.tenant, row.content()) for row in model.open.values()),
        by_place((late.position, late.record) for late in model.late),
        sorted((each.record.input, each.record.offset, each.of_offset) for each in repeated(model)),
        sorted((record.input, record.offset) for record in model.excess),
        by_place(model.waiting),
        model.unread(),
    )


# -- the kinds of input that every law of the merge holds for


def timeout_inputs(inputs: Sequence[str] = SOURCES) -> st.SearchStrategy[MergeInput]:
    """Return what arrives where a timeout alone says how long a merge record stays open."""
    return arrivals(inputs=inputs).map(
        lambda records: MergeInput(rules_of(inputs, TIMEOUT_MS), records)
    )


@st.composite
def with_ids(draw: st.DrawFn, inputs: st.SearchStrategy[MergeInput]) -> MergeInput:
    """Some records have an id, and few ids are there, so that most repeat one."""
    drawn = draw(inputs)
    ids = st.sampled_from([None, "1", "2"])
    records = [
        record if record.is_heartbeat else record._replace(id=draw(ids)) for record in drawn.records
    ]
    return replace(drawn, records=records)


PARTS = st.sampled_from([0, 1, 2, 4, 100])
SIZES = st.sampled_from([0, 3, 6, 100])


@st.composite
def within_bounds(draw: st.DrawFn, inputs: st.SearchStrategy[MergeInput]) -> MergeInput:
    """Few records may join a merge record, with few bytes."""
    drawn = draw(inputs)
    sizes = st.sampled_from([0, 0, 1, 3])
    records = [
        record if record.is_heartbeat else record._replace(size=draw(sizes))
        for record in drawn.records
    ]
    rules = replace(drawn.rules, max_parts=draw(PARTS), max_bytes=draw(SIZES))
    return MergeInput(rules, records)


@st.composite
def window_inputs(draw: st.DrawFn) -> MergeInput:
    """A window by gap, without tenants."""
    gap = draw(GAPS)
    return MergeInput(rules_of(SOURCES, gap, gap + draw(EXTRAS)), draw(arrivals()))


KINDS = {
    "timeout": timeout_inputs(),
    "topics": timeout_inputs(INPUTS),
    "window": window_inputs(),
    "tenants": tenant_inputs(),
    "timeout with ids": with_ids(timeout_inputs()),
    "topics with ids": with_ids(timeout_inputs(INPUTS)),
    "window with ids": with_ids(window_inputs()),
    "tenants with ids": with_ids(tenant_inputs()),
    "timeout within bounds": within_bounds(with_ids(timeout_inputs())),
    "topics within bounds": within_bounds(timeout_inputs(INPUTS)),
    "window within bounds": within_bounds(with_ids(window_inputs())),
    "tenants within bounds": within_bounds(with_ids(tenant_inputs())),
}

TIMEOUTS = st.sampled_from(
    [1, 30, TIMEOUT_MS - 1, TIMEOUT_MS, TIMEOUT_MS + 1, 3 * TIMEOUT_MS, 1000]
)

Life = list[tuple[MergeRules, list[Record]]]
"""The rules of each epoch, and what arrives in it."""


@st.composite
def lives(draw: st.DrawFn, kind: str = "tenants") -> Life:
    """The rules change between two batches, as far as an epoch may change them: now and then
    several times at one clock, and a window becomes a timeout or the other way round."""
    drawn = draw(KINDS[kind])
    found = []
    for chunk in draw(cuts(drawn.records)):
        for records in [chunk, *[[]] * draw(st.sampled_from([0, 0, 0, 1, 4]))]:
            gap = draw(GAPS if kind.startswith(("window", "tenants")) else TIMEOUTS)
            is_timeout = drawn.rules.max_ms is None or draw(st.sampled_from([False, False, True]))
            rules = replace(
                drawn.rules,
                gap_ms=gap,
                max_ms=None if is_timeout else gap + draw(EXTRAS),
                lag_ms=None if drawn.rules.lag_ms is None else draw(LAGS),
            )
            if kind.endswith("within bounds"):
                rules = replace(rules, max_parts=draw(PARTS), max_bytes=draw(SIZES))
            found.append((rules, records))
    return found


def begin_epoch(model: PartitionMerge, rules: MergeRules) -> None:
    """Begin an epoch with these rules."""
    bounds = rules.max_parts, rules.max_bytes
    model.begin_epoch(rules.gap_ms, rules.max_ms, rules.lag_ms, bounds)


def through_epochs(data: st.DataObject, life: Life, *, is_cut: bool) -> Iterator[PartitionMerge]:
    """Yield the merge after each batch. Each epoch begins with a look at what is there."""
    model = PartitionMerge(life[0][0])
    for rules, records in life:
        begin_epoch(model, rules)
        for chunk in data.draw(cuts(records)) if is_cut else [records]:
            model.arrive(*chunk)
            model.advance()
            yield model
