"""A lost lake with tenants is taken up exactly from what messages say, as that is written and
read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tests.support.cases import SOURCES, rules_of
from tests.support.effort import seeds
from tests.support.inputs import input_of, record_of
from tests.support.merges import KEYS, TENANTS, MergeInput, closed, idle_decision
from tests.support.recoveries import idle_header
from tests.support.sequences import by_key, merged_tail
from watersmeet.core.idle import IdleDecision
from watersmeet.core.model import (
    MIN_TIME,
    MergeRecord,
    MergeRules,
    PartitionMerge,
    Record,
)
from watersmeet.core.recovery import (
    CloseTimeRange,
    SinkState,
    encode_idle,
    encode_min_offsets,
    min_offset,
    parsed,
    read_again_from,
    sink_state,
)
from watersmeet.core.sequence import IDLE, MIN_OFFSETS, RULES, Tail
from watersmeet.core.window import Closing, Window
from watersmeet.running.recovery_headers import Fingerprints, decides_until

Decisions = Mapping[str, Sequence[IdleDecision]]


@dataclass(frozen=True)
class Lost:
    """What Kafka had of the sources when the last message was sent, what the idle policy had
    decided, and what came later."""

    river: MergeInput
    decisions: Decisions
    later: list[Record]

    @property
    def window(self) -> Window:
        return Window(self.river.rules.gap_ms, self.river.rules.max_ms)

    def order(self) -> list[MergeRecord]:
        """What was closed then, in the order of publication."""
        return self.among(self.decisions, [], since={}).merged().published_order()

    def headers(self, closings: CloseTimeRange) -> dict[str, bytes | None]:
        """Those of a message that was closed at the first of these times."""
        since = read_again_from(closings.first, self.window.longest_ms + closings.lag_ms)
        offsets = {}
        for source in SOURCES:
            mine = [
                (r.offset, r.event_time) for r in self.river.records if r.input.source == source
            ]
            offsets[source] = min_offset(mine, self.decisions[source], since, next_offset=0)
        idle = idle_header(self.decisions, offsets, closings)
        return {
            MIN_OFFSETS: encode_min_offsets(offsets),
            **({IDLE: encode_idle(idle)} if idle else {}),
            RULES: b"11111111",
        }

    def among(
        self, decisions: Decisions, later: Sequence[Record], since: Mapping[str, int]
    ) -> MergeInput:
        """All records of Kafka from these offsets on, with decisions among them."""
        records: list[Record] = []
        for source in SOURCES:
            mine = [
                record for record in (*self.river.records, *later) if record.input.source == source
            ]
            beats = [
                record_of(
                    source,
                    each.after_offset,
                    each.event_time,
                    tenant=None,
                    tenant_times=dict(each.tenant_times),
                )
                for each in decisions.get(source, ())
            ]
            # A decision comes after the record of its offset.
            records += sorted(
                [*(r for r in mine if r.offset >= since.get(source, 0)), *beats],
                key=lambda r: (r.offset, r.tenant_times is not None),
            )
        return replace(self.river, records=records)


def loss(seed: int) -> Lost:
    """Sources fall silent in turn, and then the idle policy speaks again and again while the other
    goes on."""
    rng = random.Random(seed)
    gap, lag = rng.choice([0, 1, 30, 100]), rng.choice([0, 1, 30, 100, 300, 1000, 100_000])
    delays = {tenant: rng.choice([0, 0, 10, 100, 500, 2000]) for tenant in TENANTS}
    idling, ticking = rng.choice([0, 0.2, 0.6]), rng.choice([0.05, 0.3])
    time, offsets, silent = 2500, dict.fromkeys(SOURCES, -1), ""
    known, decisions = list[Record](), {source: list[IdleDecision]() for source in SOURCES}
    later: list[Record] = []
    until = rng.randint(5, 60)
    for step in range(until + rng.randint(0, 20)):
        if rng.random() < 0.1:
            silent = "" if silent else rng.choice(SOURCES)
        source = rng.choice([each for each in SOURCES if each != silent])
        time += rng.choice([0, 0, 1, 7, 30, 100, 101, 300])
        offsets[source] += rng.choice([1, 1, 1, 3])
        tenant = rng.choice(TENANTS)
        at = max(0, time - rng.choice([0, 0, 0, 1, 30, 100, 300]) - delays[tenant])
        record = record_of(source, offsets[source], at, rng.choice(KEYS), tenant)
        if rng.random() < ticking:
            record = record._replace(key=None, tenant=rng.choice([None, tenant]))
        (known if step < until else later).append(record)
        idle = (
            [(s, idle_decision(known, s, lag, tells_all=seed % 2 == 0)) for s in SOURCES]
            if step < until and rng.random() < idling
            else []
        )
        for idle_source, decision in idle:
            if decision is not None:
                known.append(decision)
                tenant_times = tuple(sorted((decision.tenant_times or {}).items()))
                decisions[idle_source].append(
                    IdleDecision(offsets[idle_source], decision.event_time, tenant_times)
                )
    rules = rules_of(SOURCES, gap, gap + rng.choice([0, 0, 1, 50, 400]), lag)
    return Lost(
        MergeInput(rules, [record for record in known if record.tenant_times is None]),
        decisions,
        later,
    )


def as_one_after(decisions: Decisions, last: int) -> Decisions:
    """Of the decisions after one offset, those that can have closed nothing that was out by then,
    as one."""
    found: dict[str, list[IdleDecision]] = {}
    for source, mine in decisions.items():
        found[source], position, passed = [], -1, -1
        for decision in sorted(mine):
            if position >= last and passed == decision.after_offset:
                tenant_times = dict(found[source].pop().tenant_times)
                tenant_times |= {
                    tenant: max(time, tenant_times.get(tenant, time))
                    for tenant, time in decision.tenant_times
                }
                decision = decision._replace(tenant_times=tuple(sorted(tenant_times.items())))
            passed = decision.after_offset if position >= last else -1
            position = decision.event_time
            found[source].append(decision)
    return found


def said(row: MergeRecord) -> Tail:
    return merged_tail(0, row.event_time, row.key, row.due, row.closed_at, row.tenant)


def taken_up(lost: Lost, state: SinkState, later: Sequence[Record]) -> PartitionMerge:
    model = PartitionMerge(
        lost.river.rules,
        since=MIN_TIME if state.since is None else state.since,
        recovered=by_key(state.read_back),
    )
    model.arrive(*lost.among(state.decisions, later, state.begin).records)
    model.advance()
    return model


def test_a_lost_lake_is_taken_up_exactly_with_the_decisions_that_published_something() -> None:
    """Whether a publication comes out whole, and its last message says it, or a part of it, and the
    first one does."""
    found: Counter[str] = Counter()
    drawn = [*seeds(400), 5917]
    for seed in drawn:
        lost, rng = loss(seed), random.Random(seed)
        order = lost.order()
        if not order:
            continue
        first = rng.randrange(len(order))
        until = rng.choice([first, rng.randrange(first, len(order))])
        out = order[: rng.randint(first, until) + 1]
        times = [row.closed_at for row in order]
        headers = lost.headers(CloseTimeRange(times[first], times[until], lost.river.lag))
        sink = [(said(row), headers if row is order[first] else {}) for row in out]
        state = sink_state(reversed(sink), lost.window, lost.river.lag)
        later = [*lost.later, *(record_of(s, 10_000, 1_000_000, tenant=None) for s in SOURCES)]
        expected = (
            lost.among(as_one_after(lost.decisions, times[until]), later, since={})
            .merged()
            .published_order()
        )
        assert closed(expected)[: until + 1] == closed(order)[: until + 1], (
            "nothing else has closed what is out"
        )
        model = taken_up(lost, state, later)
        again = [row for row in model.published_order() if row.place() > out[-1].place()]
        assert closed([*out, *again]) == closed(expected), seed
        found["told"] += sum(map(len, state.decisions.values()))
        found["fewer"] += sum(map(len, lost.decisions.values())) - sum(
            map(len, state.decisions.values())
        )
        found["several"] += sum(
            len(mine) - len({each.after_offset for each in mine})
            for mine in state.decisions.values()
        )
        found["again"] += len(again)
        found["known"] += len(model.passed)
    assert (
        min(found[each] for each in ("told", "fewer", "several", "again", "known")) > len(drawn) / 3
    ), found


@dataclass(frozen=True)
class Changed:
    """A lake whose rules change once or several times while its clock stands, after some of its
    records, and that is lost later."""

    river: MergeInput
    before: Sequence[MergeRules]
    records: Sequence[Record]
    """What arrived before the change."""
    later: Sequence[Record]

    def merged(self, later: Sequence[Record] = ()) -> tuple[PartitionMerge, Fingerprints]:
        """Without a loss, and what its messages name then."""
        rules, model = self.river.rules, PartitionMerge(self.before[0])
        model.arrive(*self.records)
        model.advance()
        ended = []
        for before, after in pairwise([*self.before, rules]):
            model.begin_epoch(after.gap_ms, after.max_ms, after.lag_ms)
            if model.clock is not None:
                head = max(model.heads.values())
                start, now = model.epoch_start, Closing(*rules.closing())
                until = decides_until(model.clock, head, start, Closing(*before.closing()), now)
                ended.append((str(before.closing()), until))
            model.advance()
        model.arrive(*self.river.records[len(self.records) :], *later)
        model.advance()
        return model, Fingerprints(str(rules.closing()), {0: ended}, ())


MOST_AT_ONCE = 5


def _rules(rng: random.Random) -> MergeRules:
    gap = rng.choice([0, 1, 30, 100])
    lag = rng.choice([0, 1, 30, 100, 300, 1000])
    return rules_of(SOURCES, gap, gap + rng.choice([0, 0, 1, 50, 400]), lag)


def change(seed: int) -> Changed:
    lost, rng = loss(seed), random.Random(-seed)
    before = [_rules(rng) for _ in range(rng.choice([1, 1, 2, MOST_AT_ONCE]))]
    small = replace(lost.river.rules, lag_ms=rng.choice([0, 1, 30, 100, 300, 1000]))
    river = replace(lost.river, rules=small)
    return Changed(river, before, river.records[: rng.randint(0, len(river.records))], lost.later)


def test_a_lost_lake_whose_rules_changed_resumes_where_its_last_message_names_the_last_alone() -> (
    None
):
    found: Counter[str] = Counter()
    drawn = seeds(600)
    for seed in drawn:
        changed, rng = change(seed), random.Random(seed)
        model, fingerprints = changed.merged()
        order = [row for row in model.published_order() if row.closed_at <= (model.clock or 0)]
        if not order:
            continue
        out = order[: rng.randint(1, len(order))]
        lost = Lost(changed.river, {source: [] for source in SOURCES}, list(changed.later))
        closings = CloseTimeRange(out[-1].closed_at, out[-1].closed_at, lost.river.lag)
        position = read_again_from(closings.first, lost.window.longest_ms + closings.lag_ms)
        headers = lost.headers(closings)
        named = parsed(headers, MIN_OFFSETS)
        begins = {input_of(name): offset for name, offset in named.items()}
        if len(fingerprints.of(0, begins, position)) > 1:
            found["refused"] += 1
            continue
        state = sink_state(
            reversed([(said(row), headers if row is out[-1] else {}) for row in out]),
            lost.window,
            lost.river.lag,
        )
        later = [*changed.later, *(record_of(s, 10_000, 1_000_000, tenant=None) for s in SOURCES)]
        expected, _ = changed.merged(later)
        again = [
            row
            for row in taken_up(lost, state, later).published_order()
            if row.place() > out[-1].place()
        ]
        assert closed([*out, *again]) == closed(expected.published_order()), seed
        found["taken up"] += 1
        found["far"] += bool(changed.records)
        found["beyond"] += len(changed.before) > 1
    assert (
        min(found[each] for each in ("refused", "taken up", "far", "beyond")) > len(drawn) / 10
    ), found


def test_a_loss_amid_what_closes_at_the_start_of_an_epoch_beyond_the_clock_is_refused() -> None:
    """Both keys are due at 102 and closed at 104, since the clock stood at 100 through four
    changes. A lake that was lost after the first message reads from 102 on, behind that clock, and
    would miss the other key."""
    rules = [rules_of(SOURCES, gap, gap, 0) for gap in (1, 0, 1, 0, 1)]
    first = [record_of(source, 0, 100, tenant="x") for source in SOURCES]
    then = [record_of("tracking", 1 + n, 101, key, "x") for n, key in enumerate(KEYS)]
    last = [record_of(source, 9, 110, tenant=None) for source in SOURCES]
    changed = Changed(MergeInput(rules[-1], [*first, *then, *last]), rules[:-1], first, [])
    model, fingerprints = changed.merged()
    order = model.published_order()
    assert [(row.due, row.closed_at) for row in order] == [(102, 104)] * 2
    position = read_again_from(order[0].closed_at, 1)
    assert position == 102
    begins = {input_of(source): 9 for source in SOURCES}
    assert len(fingerprints.of(0, begins, position)) > 1
    assert len(fingerprints.of(0, begins, position + 2)) == 1
