"""Laws of a lost lake: where the sink names one set of rules, it is taken up from the sink alone,
and publishes what it would have published had nothing been lost; where it names several, it is
refused.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.cases import KEYS, advance_to, rules_of
from tests.support.effort import first_then_nightly, seeds
from tests.support.inputs import input_of, name_of, record_of, tp_of
from tests.support.recoveries import idle_header
from tests.support.sequences import by_key, in_sequence, merged_tail
from watersmeet.core.columns import NULL_TIME
from watersmeet.core.idle import IdleDecision, decide
from watersmeet.core.model import MergeRecord, PartitionMerge, Record
from watersmeet.core.plan import (
    Available,
    Cursor,
    Rules,
    TopicPartition,
    heads_of,
    plan_batch,
    positions_of,
)
from watersmeet.core.recovery import (
    SinkState,
    min_offset,
    read_again_from,
    recovery_headers,
    sink_state,
)
from watersmeet.core.sequence import Place, Tail
from watersmeet.core.window import Closing, Window, epoch_start
from watersmeet.running.recovery_headers import Fingerprints, decides_until, read_spans

pytestmark = [pytest.mark.promise("B3"), pytest.mark.fault("lost", oracle=True)]


TIMEOUT_MS = 100
ALL_SOURCES = ("tracking", "orders", "returns")
ALL_INPUTS = ("tracking/web", "tracking/app", "orders", "returns")
SEEDS, FEWER_SEEDS, FEWEST_SEEDS = seeds(125), seeds(60), seeds(40)
TIMEOUTS = tuple(
    map(Window, (0, 1, 30, TIMEOUT_MS - 1, TIMEOUT_MS, TIMEOUT_MS + 1, 3 * TIMEOUT_MS, 1000))
)
BY_GAP = tuple(
    Window(gap, gap * times + more)
    for gap in (1, 30, TIMEOUT_MS, 300)
    for times, more in ((1, 0), (1, 7), (3, 0))
)
SHORT = (Window(0), Window(1), Window(1, 2), Window(30))
"""Soon after a change to one of these, nothing of what was before it counts any more."""

Decisions = dict[str, list[IdleDecision]]
Pending = tuple[int, MergeRecord]
"""A message that is to be published: its number, and what it is made of."""
Content = tuple[str, int, int, tuple[tuple[tuple[int, str, int], ...], ...], int, int]
"""Key, first and last event time, parts by source (event time, topic, offset), due, closed_at."""


class Epoch(NamedTuple):
    """The rules of a lake: its window, and one of a few ways to read a record."""

    window: Window
    reading: int = 0

    @property
    def fingerprint(self) -> str:
        """As `Settings.fingerprint` is made: a timeout has that of a window whose gap is its
        max."""
        return sha256(
            repr((self.window.gap_ms, self.window.longest_ms, self.reading)).encode()
        ).hexdigest()[:8]

    @property
    def closing(self) -> Closing:
        """What decides when its merge records close."""
        return Closing(self.window.gap_ms, self.window.longest_ms, 0)

    def read(self, record: Record) -> Record | None:
        """What bronze has of a record: as it is, under another key, or with some refused."""
        if self.reading == 1 and record.key is not None:
            return record._replace(key=KEYS[-1 - KEYS.index(record.key)])
        return None if self.reading == 2 and record.offset % 4 == 0 else record


class Past(NamedTuple):
    """An epoch that ended, by the clock then and by source its exclusive end offset."""

    epoch: Epoch
    clock: int
    offsets: Mapping[str, int]


class Message(NamedTuple):
    """A message of the sink, and what the test knows besides: what its lake had decided and lived
    through by then."""

    seq: int
    content: Content
    headers: Mapping[str, bytes | None]
    decisions: Decisions
    past: tuple[Past, ...]
    epoch: Epoch

    @property
    def tail(self) -> Tail:
        """What its headers say."""
        key, event_time, *_, due, closed_at = self.content
        return merged_tail(self.seq, event_time, key, due, closed_at)


@dataclass
class Kafka:
    """What outlives the lake: one partition of every source, written step by step, and of the
    sink."""

    unwritten: dict[str, list[Record]]
    written: dict[str, list[Record]]
    sink: list[Message] = field(default_factory=list)

    def write(self, source: str, count: int) -> None:
        self.written[source] += self.unwritten[source][:count]
        del self.unwritten[source][:count]


@dataclass
class Lake:
    """What gets lost: bronze, the idle policy's decisions, silver, its epochs. Gold keeps nothing
    but the sink."""

    sources: Sequence[str]
    epoch: Epoch
    kafka: Kafka
    state: SinkState
    past: tuple[Past, ...] = ()
    """What the test knows besides: the epochs that had ended when the lake was lost, and what
    bronze had before `state.begin`."""
    read_before: Mapping[str, Sequence[Record]] = field(default_factory=dict)
    bronze: dict[str, list[Record]] = field(default_factory=dict)
    decisions: Decisions = field(default_factory=dict)
    ended: list[Past] = field(default_factory=list)
    clock: int | None = None
    is_begun: bool = True
    """Whether this epoch has had a batch, or none is due since it is the first one."""

    def __post_init__(self) -> None:
        self.silver = PartitionMerge(
            rules_of(self.sources, *self.epoch.window), recovered=by_key(self.state.read_back)
        )
        self.cursors = {source: Cursor() for source in self.sources}
        self.next_offsets = {source: self.state.begin.get(source, 0) for source in self.sources}
        self.epochs = [self.epoch]
        self.read_since: dict[int, dict[TopicPartition, int]] = {}
        for source in self.sources:
            self.bronze[source], self.decisions[source] = (
                [],
                list(self.state.decisions.get(source, ())),
            )

    def read(self, source: str, count: int) -> None:
        """Where an epoch reads for the first time, that is noted."""
        number = len(self.epochs) - 1
        if number and number not in self.read_since:
            self.read_since[number] = {
                tp_of(s, 0): offset for s, offset in self.next_offsets.items()
            }
        for record in [
            r for r in self.kafka.written[source] if r.offset >= self.next_offsets[source]
        ][:count]:
            found = self.epoch.read(record)
            self.bronze[source] += [] if found is None else [found]
            self.next_offsets[source] = record.offset + 1

    def available(self, source: str, count: int) -> Available:
        """Bronze and decisions from the cursor on, as a plan sees them."""
        cursor, until = self.cursors[source], self.next_offsets[source]
        mine = [record for record in self.bronze[source] if record.offset >= cursor.next_offset][
            :count
        ]
        if len(mine) == count:
            until = mine[-1].offset
        rows = Available(
            np.array([r.offset for r in mine], np.int64),
            np.array([r.event_time for r in mine], np.int64),
        )
        known = -1 if cursor.position is None else cursor.position
        decided = [
            d
            for d in self.decisions[source]
            if cursor.next_offset <= d.after_offset + 1 <= until and d.event_time > known
        ]
        return rows.with_idle(decided)

    def decide(self, quiet: set[str]) -> Decisions:
        """Silent are those of the quiet of which bronze has everything that Kafka has."""
        silent = {
            s
            for s in quiet
            if not any(record.offset >= self.next_offsets[s] for record in self.kafka.written[s])
        }
        rows = {tp_of(s, 0): self.available(s, 10_000) for s in self.sources}
        heads = heads_of({tp_of(s, 0): cursor for s, cursor in self.cursors.items()}, rows)
        idle = decide({tp.input: head for tp, head in heads.items()}, {*map(input_of, silent)})
        if idle is None:
            return {}
        taken = {
            source: IdleDecision(self.next_offsets[source] - 1, idle.event_time)
            for source in map(name_of, idle.inputs)
        }
        for source, decision in taken.items():
            self.decisions[source].append(decision)
        return {source: [decision] for source, decision in taken.items()}

    def may_evolve(self, window: Window) -> bool:
        """The rules say which records are in the messages that were read back: they stay until all
        of these are past."""
        last = max((message.event_time or 0 for message in self.state.read_back), default=None)
        longest_ms = max(window.longest_ms, self.epoch.window.longest_ms)
        return last is None or (self.clock is not None and self.clock > last + longest_ms)

    def evolve(self, epoch: Epoch) -> None:
        if self.is_begun and self.clock is not None:
            until = {source: cursor.next_offset for source, cursor in self.cursors.items()}
            self.ended.append(Past(self.epoch, self.clock, until))
        self.silver.begin_epoch(*epoch.window)
        self.epoch, self.is_begun = epoch, False
        self.epochs.append(epoch)

    def merge(self, count: int) -> bool:
        """One batch; whether there was something to do."""
        available = {tp_of(s, 0): self.available(s, count) for s in self.sources}
        cursors = {tp_of(s, 0): cursor for s, cursor in self.cursors.items()}
        clocks = {} if self.clock is None else {0: self.clock}
        plan = plan_batch(
            0, cursors, available, clocks, Rules(self.epoch.window), begins_epoch=not self.is_begun
        )
        if plan is None:
            return False
        self.is_begun, self.clock = True, plan.clocks.get(0)
        reached = {}
        for source in self.sources:
            done = plan.ranges[tp_of(source, 0)]
            rows = available[tp_of(source, 0)]
            positions = dict(
                zip(
                    rows.offsets.tolist(),
                    positions_of(self.cursors[source], rows).tolist(),
                    strict=True,
                )
            )
            known = [
                (positions[r.offset], r)
                for r in self.bronze[source]
                if done.from_offset <= r.offset < done.until_offset
            ]
            reached[source] = known
            self.cursors[source] = Cursor(done.until_offset, done.position)
        if self.clock is not None:
            inputs = map(input_of, self.sources)
            reached_inputs = {input_of(source): records for source, records in reached.items()}
            advance_to(self.silver, dict.fromkeys(inputs, self.clock), reached_inputs)
        return True

    def pending(self) -> list[Pending]:
        rows = [row for row in self.silver.published_order() if row.closed_at <= (self.clock or 0)]
        finished: dict[Place, MergeRecord] = {row.place(): row for row in rows}
        tail = self.kafka.sink[-1].tail if self.kafka.sink else None
        return [(seq, finished[place]) for seq, place in in_sequence(finished, tail)]

    def fingerprints(self) -> Fingerprints:
        named = [epoch.fingerprint for epoch in self.epochs]
        ended, start, now = list[tuple[str, int]](), NULL_TIME, self.epoch.closing
        following = [*(each.epoch for each in self.ended[1:]), self.epoch]
        for (epoch, clock, _), after in zip(self.ended, following, strict=False):
            start = epoch_start(clock, start, epoch.closing, after.closing)
            until = decides_until(clock, clock, start, epoch.closing, now)
            ended.append((epoch.fingerprint, until))
        return Fingerprints(named[-1], {0: ended}, read_spans(named, self.read_since))

    def headers(self, row: MergeRecord) -> dict[str, bytes | None]:
        position = read_again_from(row.closed_at, self.epoch.window.longest_ms)
        offsets = {
            source: min_offset(
                ((record.offset, record.event_time) for record in self.bronze[source]),
                self.decisions[source],
                position,
                self.next_offsets[source],
            )
            for source in self.sources
        }
        idle = idle_header(self.decisions, offsets)
        return dict(
            recovery_headers(
                offsets,
                idle,
                self.fingerprints().of(
                    0, {input_of(source): offset for source, offset in offsets.items()}, position
                ),
            )
        )


@dataclass
class Life:
    """One partition from beginning to end: what happened is drawn from a seed, and `losses` times
    everything is lost."""

    seed: int
    disorder: int = 0
    is_idling: bool = False
    is_in_transactions: bool = True
    is_changing: bool = False
    most_at_once: int = 1
    """How often the rules may change while the clock stands."""
    has_topics: bool = False
    """Whether a source has two topics."""
    windows: Sequence[Window] = TIMEOUTS
    losses: int = 0
    refused: int = 0
    """Losses that the lake did not survive, as far as the sink can say: the test goes on as if it
    had not been lost."""
    after_changes: int = 0
    """Losses survived by a lake that had had other rules."""
    told: int = 0
    """Decisions that the sink told of, over all losses."""
    woken: int = 0
    recovered: int = 0
    """Records known again as already published, after the last loss."""
    changes: int = 0
    most_beyond: int = 0
    """How far an epoch has started beyond the clock (ms)."""

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.sources = (
            ALL_INPUTS[: rng.choice([3, 3, 4])]
            if self.has_topics
            else ALL_SOURCES[: rng.choice([2, 2, 3])]
        )
        arrivals = {source: self._records(source) for source in self.sources}
        self.kafka = Kafka(arrivals, {s: [] for s in arrivals})
        first = Window(TIMEOUT_MS) if self.windows is TIMEOUTS else rng.choice(self.windows)
        self.lake = Lake(self.sources, Epoch(first), self.kafka, SinkState({}, {}, ()))
        self.decisions: Decisions = {source: [] for source in self.sources}
        """All that were taken, but for those that a loss made forgotten."""
        self.quiet: set[str] = set()

    def _records(self, source: str) -> list[Record]:
        """Ties, several keys, heartbeats, holes between offsets; lateness where there is
        disorder."""
        rng = self.rng
        time, offset, step = (
            rng.randint(0, 2 * TIMEOUT_MS),
            rng.choice([-1, -1, 6]),
            rng.choice([5, 20, 50, 110]),
        )
        keys = (*KEYS[: rng.randint(1, len(KEYS))], *[None] * rng.randint(0, 2))
        records = []
        for _ in range(rng.randint(5, 45)):
            time += rng.choice([0, 0, rng.randint(0, step), rng.randint(0, step), TIMEOUT_MS])
            offset += rng.choice([1, 1, 1, 2])
            event_time = max(0, time - rng.choice([0, 0, rng.randint(0, self.disorder)]))
            records.append(record_of(source, offset, event_time, rng.choice(keys)))
        return records

    def live(self) -> Life:
        """Until everything has been written, merged and published."""
        while any(self.kafka.unwritten.values()) or self.rng.random() < 0.9:
            self.step()
        if self.losses + self.refused == 0:
            self.lose()
        self.finish()
        return self

    def finish(self) -> None:
        """Everything is written, merged and published."""
        for source in self.sources:
            self.kafka.write(source, 1000)
            self.lake.read(source, 1000)
        while self.lake.merge(10_000):
            pass
        while self.publish(is_cut_off=False):
            pass
        self.recovered = len(self.lake.silver.passed)

    def step(self) -> None:
        rng, source = self.rng, self.rng.choice(self.sources)
        action = rng.random()
        if action < 0.2:
            self._write(source)
        elif action < 0.45:
            self.lake.read(source, rng.choice([1, 3, 100]))
        elif action < 0.65:
            self.lake.merge(rng.choice([1, 5, 100]))
        elif action < 0.75 and self.is_idling:
            for idle, taken in self.lake.decide(self.quiet).items():
                self.decisions[idle] += taken
        elif action < 0.95:
            self.publish(is_cut_off=not self.is_in_transactions and rng.random() < 0.5)
        elif action > 0.97:
            self.lose()
        elif self.is_changing:
            most = self.most_at_once
            for _ in range(rng.randint(1, most) if most > 1 else 1):
                self.evolve()

    def _write(self, source: str) -> None:
        """Some more records of a source, unless it is silent now."""
        if self.is_idling and self.rng.random() < 0.3:
            self.quiet = {each for each in self.sources if self.rng.random() < 0.4}
        if source in self.quiet:
            return
        decisions = self.decisions[source]
        self.woken += bool(decisions and decisions[-1].after_offset == self._end(source))
        self.kafka.write(source, self.rng.randint(1, 5))

    @property
    def is_repeating(self) -> bool:
        """Whether messages that are out come again: then they must come as they were, and the rules
        have to stay."""
        return bool(self.kafka.sink) and self.kafka.sink[-1].seq < max(
            message.seq for message in self.kafka.sink
        )

    def evolve(self) -> None:
        lake, rng = self.lake, self.rng
        epoch = Epoch(
            rng.choice([lake.epoch.window, *self.windows]),
            rng.choice([lake.epoch.reading, lake.epoch.reading, 0, 1, 2]),
        )
        if epoch != lake.epoch and not self.is_repeating and lake.may_evolve(epoch.window):
            self.changes += 1
            lake.evolve(epoch)
            if self.most_at_once > 1:
                lake.merge(10_000)  # of all there is: after the first change the clock stands
                self.most_beyond = max(
                    self.most_beyond, lake.silver.epoch_start - (lake.clock or 0)
                )

    def _end(self, source: str) -> int:
        written = self.kafka.written[source]
        return written[-1].offset if written else -1

    def publish(self, is_cut_off: bool) -> bool:
        """Some of what is pending; where it may be cut off, the first message too says where to
        begin.

        Then its messages may also come again, from a second attempt that starts over.
        """
        pending = self.lake.pending()
        batch = pending[: self.rng.choice([1, 2, 5, len(pending)])]
        out = batch[: self.rng.randint(0, len(batch))] if is_cut_off else batch
        self.send(batch, out)
        if is_cut_off and self.rng.random() < 0.3:
            self.kafka.sink += self.kafka.sink[len(self.kafka.sink) - len(out) :][
                : self.rng.randint(0, len(out))
            ]
        return bool(batch)

    def send(self, batch: Sequence[Pending], out: Sequence[Pending]) -> None:
        """Of a batch of messages, those that come out."""
        decisions = {source: list(mine) for source, mine in self.decisions.items()}
        for seq, row in out:
            is_telling = seq == batch[-1][0] or (seq == batch[0][0] and not self.is_in_transactions)
            headers = self.lake.headers(row) if is_telling else {}
            past = (*self.lake.past, *self.lake.ended)
            self.kafka.sink.append(
                Message(seq, as_content(row), headers, decisions, past, self.lake.epoch)
            )

    def lose(self) -> None:
        """Everything but Kafka. What is taken up has the rules that the last messages name, if they
        name one set of them."""
        lost, last = self.lake, self.kafka.sink[-1] if self.kafka.sink else None
        if last is None:
            self.losses += 1
            self.decisions = {source: [] for source in self.sources}
            self.lake = Lake(self.sources, lost.epoch, self.kafka, SinkState({}, {}, ()))
            return
        state = sink_state(
            ((message.tail, message.headers) for message in reversed(self.kafka.sink)),
            last.epoch.window,
        )
        assert last.epoch.fingerprint in state.rules
        if len(state.rules) > 1:
            self.refused += 1
            return
        self.losses += 1
        self.after_changes += bool(last.past)
        self.decisions = {source: list(last.decisions.get(source, ())) for source in self.sources}
        self.told += sum(map(len, state.decisions.values()))
        every = {s: (*lost.read_before.get(s, ()), *lost.bronze[s]) for s in self.sources}
        read = {
            s: [record for record in mine if record.offset < state.begin[s]]
            for s, mine in every.items()
        }
        self.lake = Lake(self.sources, last.epoch, self.kafka, state, last.past, read)

    def published(self) -> list[tuple[int, Content]]:
        """Without the repeats."""
        out: list[tuple[int, Content]] = []
        for message in self.kafka.sink:
            if message.seq < len(out):
                assert out[message.seq] == (message.seq, message.content)
            else:
                out.append((message.seq, message.content))
        return out

    def undisturbed(self) -> list[tuple[int, Content]]:
        """What one merge publishes that is told everything, and never loses anything."""
        through = (*self.lake.past, *self.lake.ended)
        first = through[0].epoch if through else self.lake.epoch
        lake = PartitionMerge(rules_of(self.sources, *first.window))
        for source in self.sources:
            records = (*self.lake.read_before.get(source, ()), *self.lake.bronze[source])
            beats = [record_of(source, *decision[:2]) for decision in self.decisions[source]]
            # A decision comes after the record of its offset.
            lake.arrive(*sorted([*records, *beats], key=lambda record: record.offset))
        if not all(input_of(source) in lake.heads for source in self.sources):
            return []
        arrived, heads = lake.unread(), lake.heads
        lake.states.clear()
        for epoch, clock, offsets in through:
            lake.begin_epoch(*epoch.window)
            reached = {
                s: [one for one in mine if one[1].offset < offsets[name_of(s)]]
                for s, mine in arrived.items()
            }
            arrived = {
                s: [one for one in mine if one[1].offset >= offsets[name_of(s)]]
                for s, mine in arrived.items()
            }
            advance_to(lake, dict.fromkeys(map(input_of, self.sources), clock), reached)
        lake.begin_epoch(*self.lake.epoch.window)
        advance_to(lake, heads, arrived)
        clock = lake.clock or 0
        rows = (row for row in lake.published_order() if row.closed_at <= clock)
        return list(enumerate(map(as_content, rows)))


def as_content(row: MergeRecord) -> Content:
    key, first, last, parts = row.content()
    of_sources = tuple(
        tuple((part.event_time, part.topic, part.offset) for part in mine) for mine in parts
    )
    return key, first, last, of_sources, row.due, row.closed_at


def lives(disorder: int, *, drawn: range = SEEDS, **how: Any) -> list[Life]:
    """One of each seed, exact every one of them."""
    found = []
    for seed in drawn:
        life = Life(seed, disorder, **how).live()
        assert life.published() == life.undisturbed(), f"seed {seed}, disorder {disorder}, {how}"
        found.append(life)
    assert sum(life.losses for life in found) >= len(drawn)
    assert sum(life.recovered for life in found) >= 0.5 * len(drawn)
    return found


DISORDERS = pytest.mark.parametrize("disorder", [0, TIMEOUT_MS, 4 * TIMEOUT_MS])
HOWS: list[dict[str, Any]] = [
    {},
    {"is_idling": True},
    {"is_idling": True, "is_in_transactions": False},
]
HOW = pytest.mark.parametrize("how", HOWS, ids=["", "idle", "cut"])


@DISORDERS
def test_a_lost_lake_is_taken_up_exactly(disorder: int) -> None:
    lives(disorder)


@DISORDERS
def test_a_lost_lake_is_taken_up_exactly_with_the_idle_decisions_that_published_something(
    disorder: int,
) -> None:
    found = lives(disorder, is_idling=True)
    assert sum(life.told for life in found) >= 0.6 * len(found)
    assert sum(life.woken for life in found) >= 0.6 * len(found)


@pytest.mark.long
@DISORDERS
def test_a_batch_that_comes_out_in_part_or_again_is_taken_up_exactly(disorder: int) -> None:
    lives(disorder, is_idling=True, is_in_transactions=False)


@DISORDERS
@HOW
def test_a_lost_lake_with_a_window_by_gap_is_taken_up_exactly(
    disorder: int, how: dict[str, Any]
) -> None:
    lives(disorder, drawn=FEWER_SEEDS, windows=BY_GAP, **how)


def changed(disorder: int, drawn: range, **how: Any) -> None:
    """Where the rules change, some losses are survived, exactly, and the others refused."""
    found = lives(disorder, drawn=drawn, is_changing=True, **how)
    assert sum(life.changes for life in found) >= 0.5 * len(found)
    assert sum(life.refused for life in found) >= 0.15 * len(found)
    if how.get("windows") is SHORT and how.get("is_idling"):
        assert sum(life.after_changes for life in found) >= 0.15 * len(found)


@pytest.mark.promise("C7")
@pytest.mark.fault("lost", "rules", oracle=True)
@DISORDERS
def test_a_lost_lake_is_taken_up_exactly_where_its_last_message_names_one_set_of_rules(
    disorder: int,
) -> None:
    changed(disorder, FEWEST_SEEDS, windows=SHORT, is_idling=True)
    changed(disorder, FEWEST_SEEDS, windows=(*BY_GAP, *TIMEOUTS))


@pytest.mark.promise("C7")
@pytest.mark.fault("rules", oracle=True)
@pytest.mark.parametrize("windows", [TIMEOUTS, SHORT, (*BY_GAP, *SHORT)], ids=["", "short", "gaps"])
def test_a_lost_lake_whose_rules_changed_while_its_clock_stood_is_taken_up_exactly(
    windows: Sequence[Window],
) -> None:
    for disorder in (0, TIMEOUT_MS):
        found = lives(
            disorder, drawn=FEWEST_SEEDS, windows=windows, is_changing=True, most_at_once=5
        )
        assert sum(life.most_beyond > 1 for life in found) >= 0.15 * len(found)
        assert sum(life.refused for life in found) >= 0.15 * len(found)


@pytest.mark.promise("C7")
@pytest.mark.fault("rules", oracle=True)
@pytest.mark.long
@DISORDERS
@HOW
@pytest.mark.parametrize(
    "windows",
    first_then_nightly([((*BY_GAP, *TIMEOUTS),), (SHORT,), (TIMEOUTS,), (BY_GAP,)]),
    ids=["both", "short", "timeouts", "gaps"],
)
@pytest.mark.parametrize("has_topics", first_then_nightly([True, False]), ids=["topics", ""])
def test_a_lost_lake_whose_rules_changed_before_and_after_is_taken_up_exactly(
    disorder: int, how: dict[str, Any], windows: Sequence[Window], has_topics: bool
) -> None:
    changed(disorder, FEWER_SEEDS, windows=windows, has_topics=has_topics, **how)


@pytest.mark.long
@DISORDERS
@pytest.mark.parametrize("how", first_then_nightly(HOWS), ids=["", "idle", "cut"])
def test_a_lost_lake_with_several_topics_of_a_source_is_taken_up_exactly(
    disorder: int, how: dict[str, Any]
) -> None:
    lives(disorder, drawn=FEWEST_SEEDS, has_topics=True, **how)
    lives(disorder, drawn=FEWEST_SEEDS, has_topics=True, windows=BY_GAP, **how)
