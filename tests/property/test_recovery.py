"""Laws of a lost lake: taken up from the sink alone, it publishes what it would have published had nothing been lost."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pytest

from pipelines.core.idle import IdleDecision, decide
from pipelines.core.model import MergeRecord, PartitionMerge, Record
from pipelines.core.plan import (
    Available,
    Cursor,
    Rules,
    Stretch,
    TopicPartition,
    ahead_of,
    heads_of,
    plan_batch,
    positions_of,
)
from pipelines.core.recovery import (
    ReadBack,
    SinkState,
    Told,
    encode_idle,
    encode_min_offsets,
    encode_told,
    idle_header,
    min_offset,
    read_again_from,
    sink_state,
    told_of,
)
from pipelines.core.sequence import EPOCHS, IDLE, MIN_OFFSETS, Tail, place_of
from pipelines.core.window import Window
from tests.support.cases import KEYS, rules_of
from tests.support.effort import seeds
from tests.support.sequences import by_key, in_sequence

pytestmark = pytest.mark.promise("B3")


TIMEOUT_MS = 100
ALL_SOURCES = ("tracking", "orders", "returns")
ALL_INPUTS = ("tracking/web", "tracking/app", "orders", "returns")
SEEDS, FEWER_SEEDS, FEWEST_SEEDS = seeds(125), seeds(60), seeds(40)
TIMEOUTS = tuple(map(Window, (1, 30, TIMEOUT_MS - 1, TIMEOUT_MS, TIMEOUT_MS + 1, 3 * TIMEOUT_MS, 1000)))
BY_GAP = tuple(Window(gap, gap * times + more) for gap in (1, 30, TIMEOUT_MS, 300) for times, more in ((1, 0), (1, 7), (3, 0)))

Decisions = dict[str, list[IdleDecision]]
Pending = tuple[int, MergeRecord]
"""A message that is to be published: its number, and what it is made of."""
Content = tuple[str, int, int, tuple[tuple[tuple[int, str, int], ...], ...], int | None, int | None]
"""Key, first and last event time, parts by source (event time, topic, offset), due and closed_at."""


class Message(NamedTuple):
    """A message of the sink, and what the test knows besides: the decisions, stretches and window that its headers stand for."""

    seq: int
    content: Content
    headers: Mapping[str, bytes]
    decisions: Decisions
    stretches: tuple[Stretch, ...]
    window: Window

    @property
    def stands(self) -> ReadBack:
        """What its headers say."""
        key, event_time, *_, due, closed_at = self.content
        return ReadBack(event_time, key, due, closed_at)


@dataclass
class Kafka:
    """What outlives the lake: one partition of every source, written step by step, and of the sink."""

    unwritten: dict[str, list[Record]]
    written: dict[str, list[Record]]
    sink: list[Message] = field(default_factory=list)

    def write(self, source: str, count: int) -> None:
        self.written[source] += self.unwritten[source][:count]
        del self.unwritten[source][:count]


@dataclass
class Lake:
    """What gets lost: bronze, the idle policy's decisions, silver, its epochs. Gold keeps nothing but the sink."""

    sources: Sequence[str]
    window: Window
    """Of its configuration."""
    kafka: Kafka
    state: SinkState
    before: tuple[Stretch, ...] = ()
    """What the test knows besides: the stretches that ended before those that the sink tells of."""
    bronze: dict[str, list[Record]] = field(default_factory=dict)
    decisions: Decisions = field(default_factory=dict)
    ended: list[Stretch] = field(default_factory=list)
    """Those that this lake has merged to their ends."""
    clock: int | None = None
    is_begun: bool = True
    """Whether this epoch has had a batch, or none is due since it is the first one."""

    def __post_init__(self) -> None:
        lived = self.state.lived(self.window)
        self.first = self.window if lived is None else lived.first
        self.is_plain = self.window.is_timeout if lived is None else lived.is_plain
        of_lost = () if lived is None else (lived.first, lived.window, *(stretch.window for stretch in lived.stretches))
        self.windows = {self.window, *of_lost}
        self.longest_told = 0 if lived is None else lived.longest_ms or 0
        self.horizon = None if lived is None else lived.horizon
        self.ahead = [] if lived is None else list(lived.stretches)
        self.has_changed = self.state.told is not None
        self.silver = PartitionMerge(rules_of(self.sources, *self.window), recovered=by_key(self.state.read_back))
        self.silver.horizon, self.silver.is_plain = self.horizon, self.is_plain
        self.cursors = {source: Cursor() for source in self.sources}
        for source in self.sources:
            self.bronze[source], self.decisions[source] = [], list(self.state.decisions.get(source, ()))

    def next_offset(self, source: str) -> int:
        mine = self.bronze[source]
        return mine[-1].offset + 1 if mine else self.state.begin.get(source, 0)

    def read(self, source: str, count: int) -> None:
        since = self.next_offset(source)
        self.bronze[source] += islice((record for record in self.kafka.written[source] if record.offset >= since), count)

    def available(self, source: str, count: int) -> Available:
        """Bronze and decisions from the cursor on, as a plan sees them."""
        cursor, until = self.cursors[source], self.next_offset(source)
        mine = [record for record in self.bronze[source] if record.offset >= cursor.next_offset][:count]
        if len(mine) == count:
            until = mine[-1].offset
        rows = Available(np.array([r.offset for r in mine], np.int64), np.array([r.event_time for r in mine], np.int64))
        known = -1 if cursor.position is None else cursor.position
        spoken = [d for d in self.decisions[source] if cursor.next_offset <= d.after_offset + 1 <= until and d.event_time > known]
        return rows.with_idle(spoken)

    def decide(self, quiet: set[str]) -> Decisions:
        """Silent are those of the quiet of which bronze has everything that Kafka has."""
        silent = {s for s in quiet if not any(record.offset >= self.next_offset(s) for record in self.kafka.written[s])}
        rows = {TopicPartition(s, 0): self.available(s, 10_000) for s in self.sources}
        heads = heads_of({TopicPartition(s, 0): cursor for s, cursor in self.cursors.items()}, rows)
        idle = decide({tp.source: head for tp, head in heads.items()}, silent)
        if idle is None:
            return {}
        taken = {source: IdleDecision(self.next_offset(source) - 1, idle.event_time) for source in idle.sources}
        for source, decision in taken.items():
            self.decisions[source].append(decision)
        return {source: [decision] for source, decision in taken.items()}

    @property
    def window_now(self) -> Window:
        return self.ahead[0].window if self.ahead else self.window

    def end(self, window: Window) -> None:
        """A stretch has ended here."""
        until = {source: cursor.next_offset for source, cursor in self.cursors.items()}
        self.ended.append(Stretch(window, self.clock or 0, until))
        self.silver.begin_epoch(*window)
        self.silver.advance_to(dict.fromkeys(self.sources, self.clock or 0), {})
        self.silver.begin_epoch(*window)

    def evolve(self, window: Window) -> None:
        if not self.ahead and self.is_begun and self.clock is not None:
            self.end(self.window)
        self.has_changed |= window != self.window
        self.windows.add(window)
        self.window, self.is_begun = window, False

    def merge(self, count: int) -> bool:
        """One batch, which stops where a stretch of a lost lake did; whether there was something to do."""
        available = {TopicPartition(s, 0): self.available(s, count) for s in self.sources}
        cursors = {TopicPartition(s, 0): cursor for s, cursor in self.cursors.items()}
        seen, available = ahead_of(self.ahead, 0, self.clock, cursors, available, self.window)
        for stretch in seen:
            self.end(stretch.window)
        del self.ahead[: len(seen)]
        clocks = {} if self.clock is None else {0: self.clock}
        horizons = {} if self.silver.horizon is None else {0: self.silver.horizon}
        rules, begins = Rules(self.window, horizons, ahead={0: self.ahead}), bool(seen) or not self.is_begun
        plan = plan_batch(0, cursors, available, clocks, rules, begins_epoch=begins)
        if plan is None:
            return False
        self.is_begun, self.clock = True, plan.clocks.get(0)
        self.silver.begin_epoch(*self.window_now)
        self.silver.has_advanced = False
        self.silver.ahead = [(stretch.window.gap_ms, stretch.clock) for stretch in self.ahead]
        reached = {}
        for source in self.sources:
            done = plan.ranges[TopicPartition(source, 0)]
            rows = available[TopicPartition(source, 0)]
            positions = dict(zip(rows.offsets.tolist(), positions_of(self.cursors[source], rows).tolist(), strict=True))
            known = [(positions[r.offset], r) for r in self.bronze[source] if done.from_offset <= r.offset < done.until_offset]
            reached[source] = known
            self.cursors[source] = Cursor(done.until_offset, done.position)
        if self.clock is not None:
            self.silver.advance_to(dict.fromkeys(self.sources, self.clock), reached)
        self.settle()
        return True

    def settle(self) -> None:
        """Stretches that have ended with the batch are over, and what the next timeout closes does not wait for the clock."""
        cursors = {TopicPartition(s, 0): cursor for s, cursor in self.cursors.items()}
        ended, _ = ahead_of(self.ahead, 0, self.clock, cursors, {}, self.window)
        for stretch in ended:
            self.end(stretch.window)
            self.is_begun = False
        del self.ahead[: len(ended)]

    def pending(self) -> list[Pending]:
        rows = [row for row in self.silver.published_order() if row.closed_at is None or row.closed_at <= (self.clock or 0)]
        finished = {place_of(row.event_time, row.key, row.due, row.closed_at): row for row in rows}
        last = self.kafka.sink[-1] if self.kafka.sink else None
        tail = None if last is None else Tail(last.seq, last.stands.event_time, last.stands.key, 0, *last.stands[2:])
        return [(seq, finished[place]) for seq, place in in_sequence(finished, tail)]

    def stretches(self) -> tuple[Stretch, ...]:
        """All that this lake knows of, those that it has still to come to included."""
        return (*self.ended, *self.ahead)

    @property
    def window_told(self) -> Window:
        return self.ahead[-1].window if self.ahead else self.window

    def headers(self, row: MergeRecord) -> dict[str, bytes]:
        is_closed = row.closed_at is not None
        longest_ms = max([self.longest_told, *(window.longest_ms for window in self.windows)])
        position = read_again_from(row.closed_at or row.event_time, longest_ms if is_closed else None)
        offsets = {
            source: min_offset(
                ((record.offset, record.event_time) for record in self.bronze[source]),
                self.decisions[source],
                position,
                self.next_offset(source),
            )
            for source in self.sources
        }
        idle = idle_header(self.decisions, offsets)
        longest_told = None if all(window.is_timeout for window in self.windows) else longest_ms
        said, stretches = Told(self.first, self.window_told, self.horizon, (), not is_closed, longest_told), self.stretches()
        assert [*stretches] == sorted(stretches, key=lambda stretch: stretch.clock), "the clock never goes back"
        told = told_of(said, stretches, position)
        return {
            MIN_OFFSETS: encode_min_offsets(offsets),
            **({IDLE: encode_idle(idle)} if idle else {}),
            **({EPOCHS: encode_told(told)} if self.has_changed else {}),
        }


@dataclass
class Life:
    """One partition from beginning to end: what happened is drawn from a seed, and `losses` times everything is lost."""

    seed: int
    disorder: int = 0
    is_idling: bool = False
    is_in_transactions: bool = True
    is_changing: bool = False
    has_topics: bool = False
    """Whether a source has two topics."""
    windows: Sequence[Window] = TIMEOUTS
    losses: int = 0
    told: int = 0
    """Decisions that the sink told of, over all losses."""
    woken: int = 0
    recovered: int = 0
    """Records known again as already published, after the last loss."""
    changes: int = 0
    stretches: int = 0
    """Ends of epochs that the sink told of, over all losses."""

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.sources = ALL_INPUTS[: rng.choice([3, 3, 4])] if self.has_topics else ALL_SOURCES[: rng.choice([2, 2, 3])]
        self.arrivals = {source: self._records(source) for source in self.sources}
        self.kafka = Kafka({source: list(mine) for source, mine in self.arrivals.items()}, {s: [] for s in self.arrivals})
        first = Window(TIMEOUT_MS) if self.windows is TIMEOUTS else rng.choice(self.windows)
        self.lake = Lake(self.sources, first, self.kafka, SinkState({}, {}, ()))
        self.decisions: Decisions = {source: [] for source in self.sources}
        """All that were taken, but for those that a loss made forgotten."""
        self.quiet: set[str] = set()

    @classmethod
    def of(cls, content: Mapping[str, Sequence[tuple[int, str | None]]], window: Window) -> Life:
        """A life with these records (event time, key), all of them written, in which nothing happens by itself."""
        arrivals = {source: [Record(source, n, *each) for n, each in enumerate(mine)] for source, mine in content.items()}
        life = cls(0, windows=[window])
        life.sources, life.arrivals = tuple(arrivals), arrivals
        life.kafka = Kafka({source: [] for source in arrivals}, arrivals)
        life.lake = Lake(life.sources, window, life.kafka, SinkState({}, {}, ()))
        life.decisions = {source: [] for source in arrivals}
        return life

    def _records(self, source: str) -> list[Record]:
        """Ties, several keys, heartbeats, holes between offsets; lateness where there is disorder."""
        rng = self.rng
        time, offset, step = rng.randint(0, 2 * TIMEOUT_MS), rng.choice([-1, -1, 6]), rng.choice([5, 20, 50, 110])
        keys = (*KEYS[: rng.randint(1, len(KEYS))], *[None] * rng.randint(0, 2))
        records = []
        for _ in range(rng.randint(5, 45)):
            time += rng.choice([0, 0, rng.randint(0, step), rng.randint(0, step), TIMEOUT_MS])
            offset += rng.choice([1, 1, 1, 2])
            event_time = max(0, time - rng.choice([0, 0, rng.randint(0, self.disorder)]))
            records.append(Record(source, offset, event_time, rng.choice(keys)))
        return records

    def live(self) -> Life:
        """Until everything has been written, merged and published."""
        while any(self.kafka.unwritten.values()) or self.rng.random() < 0.9:
            self.step()
        while self.losses == 0:
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
        self.recovered = len(self.lake.silver.already_published)

    def step(self) -> None:
        rng, source = self.rng, self.rng.choice(self.sources)
        action = rng.random()
        if action < 0.2:
            if self.is_idling and rng.random() < 0.3:
                self.quiet = {each for each in self.sources if rng.random() < 0.4}
            if source not in self.quiet:
                self.woken += bool(self.decisions[source] and self.decisions[source][-1].after_offset == self._end(source))
                self.kafka.write(source, rng.randint(1, 5))
        elif action < 0.45:
            self.lake.read(source, rng.choice([1, 3, 100]))
        elif action < 0.65:
            self.lake.merge(rng.choice([1, 5, 100]))
        elif action < 0.75 and self.is_idling:
            for idle, taken in self.lake.decide(self.quiet).items():
                self.decisions[idle] += taken
        elif action < 0.95:
            self.publish(is_cut_off=not self.is_in_transactions and rng.random() < 0.5)
        elif action > 0.975:
            self.lose()
        elif self.is_changing:
            self.evolve()

    @property
    def is_repeating(self) -> bool:
        """Whether messages that are out come again: then they must come as they were, and the timeout has to stay."""
        return bool(self.kafka.sink) and self.kafka.sink[-1].seq < max(message.seq for message in self.kafka.sink)

    def evolve(self) -> None:
        lake = self.lake
        if self.is_repeating:
            return
        if self.windows is not TIMEOUTS:
            if not lake.is_begun or lake.clock is None:
                return  # an epoch that merges nothing still decides that messages say when they were closed
            until = {source: cursor.next_offset for source, cursor in lake.cursors.items()}
            if not lake.ahead and lake.ended and lake.ended[-1].clock == lake.clock and lake.ended[-1].offsets != until:
                return  # `evolve` refuses it: of a message that was closed then, nobody could tell in which epoch
        window = self.rng.choice(self.windows)
        self.changes += window != self.lake.window
        self.lake.evolve(window)

    def _end(self, source: str) -> int:
        written = self.kafka.written[source]
        return written[-1].offset if written else -1

    def publish(self, is_cut_off: bool) -> bool:
        """Some of what is pending; where it may be cut off, the first message too says where to begin.

        Then its messages may also come again, from a second attempt that starts over.
        """
        pending = self.lake.pending()
        batch = pending[: self.rng.choice([1, 2, 5, len(pending)])]
        out = batch[: self.rng.randint(0, len(batch))] if is_cut_off else batch
        self.send(batch, out)
        if is_cut_off and self.rng.random() < 0.3:
            self.kafka.sink += self.kafka.sink[len(self.kafka.sink) - len(out) :][: self.rng.randint(0, len(out))]
        return bool(batch)

    def send(self, batch: Sequence[Pending], out: Sequence[Pending]) -> None:
        """Of a batch of messages, those that come out."""
        decisions = {source: list(mine) for source, mine in self.decisions.items()}
        for seq, row in out:
            is_telling = seq == batch[-1][0] or (seq == batch[0][0] and not self.is_in_transactions)
            headers = self.lake.headers(row) if is_telling else {}
            stretches = (*self.lake.before, *self.lake.stretches())
            self.kafka.sink.append(Message(seq, as_content(row), headers, decisions, stretches, self.lake.window_told))

    def lose(self) -> None:
        """Everything but Kafka."""
        self.losses += 1
        sink = ((message.stands, message.headers) for message in reversed(self.kafka.sink))
        last = self.kafka.sink[-1] if self.kafka.sink else None
        wanted = self.lake.window
        if last is not None and (self.is_repeating or not any(EPOCHS in each.headers for each in self.kafka.sink)):
            wanted = last.window  # a change that no message has told of is made again, afterwards
        state = sink_state(sink, wanted)
        if wanted.is_timeout and state.had_gap:
            wanted = Window(wanted.gap_ms, wanted.gap_ms)  # a configuration with a timeout is refused
        self.decisions = {source: list(last.decisions.get(source, ()) if last else ()) for source in self.sources}
        self.told += sum(map(len, state.decisions.values()))
        # Without a word of the sink all of them had one timeout, and so their ends say nothing.
        stretches: tuple[Stretch, ...] = ()
        told: tuple[Stretch, ...] = ()
        if last is not None and state.told is not None:
            stretches, told = last.stretches, tuple(state.told.stretches)
        self.stretches += len(told)
        before = tuple(stretch for stretch in stretches if stretch.offsets is not None and stretch not in told)
        self.lake = Lake(self.sources, wanted, self.kafka, state, before=before)
        if self.is_changing and self.rng.random() < 0.3:
            self.evolve()

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
        final = self.lake.window_now
        through = (*self.lake.before, *self.lake.ended)
        first = through[0].window if through else final
        lake = PartitionMerge(rules_of(self.sources, *first))
        for source, records in self.arrivals.items():
            beats = [Record(source, *decision[:2]) for decision in self.decisions[source]]
            # A decision comes after the record of its offset.
            lake.arrive(*sorted([*records, *beats], key=lambda record: record.offset))
        if not all(source in lake.heads for source in self.sources):
            return []
        arrived, heads = lake.unread(), lake.heads
        lake.sources.clear()
        for window, clock, offsets in through:
            assert offsets is not None
            lake.begin_epoch(*window)
            reached = {s: [one for one in mine if one[1].offset < offsets[s]] for s, mine in arrived.items()}
            arrived = {s: [one for one in mine if one[1].offset >= offsets[s]] for s, mine in arrived.items()}
            lake.advance_to(dict.fromkeys(self.sources, clock), reached)
        lake.begin_epoch(*final)
        lake.advance_to(heads, arrived)
        clock = lake.clock or 0
        rows = (row for row in lake.published_order() if row.closed_at is None or row.closed_at <= clock)
        return list(enumerate(map(as_content, rows)))


def as_content(row: MergeRecord) -> Content:
    key, first, last, parts = row.content()
    of_sources = tuple(tuple((part.event_time, part.topic, part.offset) for part in mine) for mine in parts)
    return key, first, last, of_sources, row.due, row.closed_at


def lives(disorder: int, *, drawn: range = SEEDS, **how: Any) -> list[Life]:
    """One of each seed, exact every one of them."""
    found = []
    for seed in drawn:
        life = Life(seed, disorder, **how).live()
        assert life.published() == life.undisturbed(), f"seed {seed}, disorder {disorder}, {how}"
        found.append(life)
    assert sum(life.losses for life in found) >= 2 * len(drawn)
    assert sum(life.recovered for life in found) >= 1.5 * len(drawn)
    return found


DISORDERS = pytest.mark.parametrize("disorder", [0, TIMEOUT_MS, 4 * TIMEOUT_MS])


@DISORDERS
def test_a_lost_lake_is_taken_up_exactly(disorder: int) -> None:
    lives(disorder)


@DISORDERS
def test_a_lost_lake_is_taken_up_exactly_with_the_idle_decisions_that_published_something(disorder: int) -> None:
    found = lives(disorder, is_idling=True)
    assert sum(life.told for life in found) >= 0.6 * len(found)
    assert sum(life.woken for life in found) >= 0.6 * len(found)


@pytest.mark.long
@DISORDERS
def test_a_batch_that_comes_out_in_part_or_again_is_taken_up_exactly(disorder: int) -> None:
    lives(disorder, is_idling=True, is_in_transactions=False)


@pytest.mark.promise("C7")
@pytest.mark.long
@DISORDERS
@pytest.mark.parametrize(
    "how", [{}, {"is_idling": True}, {"is_idling": True, "is_in_transactions": False}], ids=["", "idle", "cut"]
)
def test_a_lost_lake_whose_timeout_changed_before_and_after_is_taken_up_exactly(disorder: int, how: dict[str, Any]) -> None:
    found = lives(disorder, is_changing=True, **how)
    assert sum(life.changes for life in found) >= 1.5 * len(found)
    assert sum(life.stretches for life in found) >= 0.4 * len(found)


@DISORDERS
@pytest.mark.parametrize(
    "how", [{}, {"is_idling": True}, {"is_idling": True, "is_in_transactions": False}], ids=["", "idle", "cut"]
)
def test_a_lost_lake_with_a_window_by_gap_is_taken_up_exactly(disorder: int, how: dict[str, Any]) -> None:
    lives(disorder, drawn=FEWER_SEEDS, windows=BY_GAP, **how)


@pytest.mark.long
@DISORDERS
@pytest.mark.parametrize(
    "how", [{}, {"is_idling": True}, {"is_idling": True, "is_in_transactions": False}], ids=["", "idle", "cut"]
)
def test_a_lost_lake_whose_window_changed_before_and_after_is_taken_up_exactly(disorder: int, how: dict[str, Any]) -> None:
    found = lives(disorder, drawn=FEWER_SEEDS, is_changing=True, windows=(*BY_GAP, *TIMEOUTS), **how)
    assert sum(life.changes for life in found) >= len(found)
    assert sum(life.stretches for life in found) >= 0.3 * len(found)


@pytest.mark.long
@DISORDERS
@pytest.mark.parametrize(
    "how", [{}, {"is_idling": True}, {"is_idling": True, "is_in_transactions": False}], ids=["", "idle", "cut"]
)
def test_a_lost_lake_with_several_topics_of_a_source_is_taken_up_exactly(disorder: int, how: dict[str, Any]) -> None:
    lives(disorder, drawn=FEWEST_SEEDS, has_topics=True, is_changing=True, **how)
    lives(disorder, drawn=FEWEST_SEEDS, has_topics=True, windows=BY_GAP, **how)
    found = lives(disorder, drawn=FEWEST_SEEDS, has_topics=True, is_changing=True, windows=(*BY_GAP, *TIMEOUTS), **how)
    assert sum(life.changes for life in found) >= len(found)
    assert sum(life.stretches for life in found) >= 0.25 * len(found)


def test_a_lake_that_is_lost_again_before_it_has_come_to_an_end_that_the_sink_tells_of_is_taken_up_exactly() -> None:
    """The last window began at that end. So it ends later, and has no horizon before: else what is out would not be known."""
    tracking = [(40, "b"), (45, "c"), (90, "b"), (150, None), (200, None)]
    life = Life.of({"tracking": tracking, "orders": [(150, None), (200, None)]}, Window(TIMEOUT_MS))

    def merged(orders: int) -> None:
        life.lake.read("tracking", 5)
        life.lake.read("orders", orders)
        life.lake.merge(100)

    merged(orders=2)
    life.lake.evolve(Window(1))
    for orders in (1, 1):
        batch = life.lake.pending()[:1]
        life.send(batch, batch)
        life.lose()
        merged(orders)
    life.finish()
    assert [message.content[:3] for message in life.kafka.sink] == [("b", 40, 90), ("c", 45, 45)]
    assert life.published() == life.undisturbed()
