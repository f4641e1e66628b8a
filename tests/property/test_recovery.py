"""Laws of a lost lake: taken up from the sink alone, it publishes what it would have published had nothing been lost."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import pytest

from pipelines.core.idle import IdleDecision, decide
from pipelines.core.model import MergeRecord, MergeRules, PartitionMerge, Record
from pipelines.core.recovery import SinkState, encode_idle, encode_min_offsets, idle_header, min_offset, sink_state
from pipelines.core.sequence import IDLE, MIN_OFFSETS, Tail
from tests.support.cases import KEYS
from tests.support.sequences import by_key, in_sequence

TIMEOUT_MS = 100
ALL_SOURCES = ("tracking", "orders", "returns")
SEEDS = range(500)

Decisions = dict[str, list[IdleDecision]]
Content = tuple[str, int, int, tuple[tuple[tuple[int, int], ...], ...]]


class Message(NamedTuple):
    """A message of the sink, and what the test knows besides: the decisions that its headers stand for."""

    seq: int
    content: Content
    headers: Mapping[str, bytes]
    decisions: Decisions


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
    """What gets lost: bronze, the idle policy's decisions, silver. Gold keeps nothing but the sink."""

    rules: MergeRules
    kafka: Kafka
    state: SinkState
    bronze: dict[str, list[Record]] = field(default_factory=dict)
    decisions: Decisions = field(default_factory=dict)
    unmerged: list[Record] = field(default_factory=list)
    """Bronze and decisions in the order in which they came, as far as silver has not taken them."""

    def __post_init__(self) -> None:
        self.silver = PartitionMerge(self.rules, recovered=by_key(self.state.read_back))
        self.told = {source: list(self.state.decisions.get(source, ())) for source in self.rules.sources}
        self.heads: dict[str, int | None] = dict.fromkeys(self.rules.sources)
        for source in self.rules.sources:
            self.bronze[source], self.decisions[source] = [], list(self.told[source])
            self._take_up_decisions(source)

    def next_offset(self, source: str) -> int:
        mine = self.bronze[source]
        return mine[-1].offset + 1 if mine else self.state.begin.get(source, 0)

    def read(self, source: str, count: int) -> None:
        since = self.next_offset(source)
        for record in islice((record for record in self.kafka.written[source] if record.offset >= since), count):
            self.bronze[source].append(record)
            self._come(record)
            self._take_up_decisions(source)

    def _take_up_decisions(self, source: str) -> None:
        """Those that the sink told of, each in its place: once bronze has come to it again."""
        told = self.told[source]
        while told and told[0].after_offset < self.next_offset(source):
            self._come(Record(source, *told.pop(0)))

    def _come(self, record: Record) -> None:
        self.heads[record.source] = max(record.event_time, self.heads[record.source] or 0)
        self.unmerged.append(record)

    def decide(self, quiet: set[str]) -> Decisions:
        """Silent are those of the quiet of which bronze has everything that Kafka has."""
        silent = {s for s in quiet if not any(record.offset >= self.next_offset(s) for record in self.kafka.written[s])}
        idle = decide(self.heads, silent)
        if idle is None:
            return {}
        taken = {source: IdleDecision(self.next_offset(source) - 1, idle.event_time) for source in idle.sources}
        for source, decision in taken.items():
            self.decisions[source].append(decision)
            self._come(Record(source, *decision))
        return {source: [decision] for source, decision in taken.items()}

    def merge(self, count: int) -> None:
        self.silver.arrive(*self.unmerged[:count])
        del self.unmerged[:count]
        self.silver.advance()

    def pending(self) -> list[tuple[int, MergeRecord]]:
        finished = {(row.event_time, row.key): row for row in self.silver.published_order()}
        last = self.kafka.sink[-1] if self.kafka.sink else None
        tail = None if last is None else Tail(last.seq, last.content[1], last.content[0], 0)
        return [(seq, finished[place]) for seq, place in in_sequence(finished, tail)]

    def headers(self, event_time: int) -> dict[str, bytes]:
        offsets = {
            source: min_offset(
                ((record.offset, record.event_time) for record in self.bronze[source]),
                self.decisions[source],
                event_time,
                self.next_offset(source),
            )
            for source in self.rules.sources
        }
        idle = idle_header(self.decisions, offsets)
        return {MIN_OFFSETS: encode_min_offsets(offsets), **({IDLE: encode_idle(idle)} if idle else {})}


@dataclass
class Life:
    """One partition from beginning to end: what happened is drawn from a seed, and `losses` times everything is lost."""

    seed: int
    disorder: int = 0
    is_idling: bool = False
    is_in_transactions: bool = True
    losses: int = 0
    told: int = 0
    """Decisions that the sink told of, over all losses."""
    woken: int = 0
    recovered: int = 0
    """Records known again as already published, after the last loss."""

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.rules = MergeRules(ALL_SOURCES[: rng.choice([2, 2, 3])], TIMEOUT_MS)
        self.arrivals = {source: self._records(source) for source in self.rules.sources}
        self.kafka = Kafka({source: list(mine) for source, mine in self.arrivals.items()}, {s: [] for s in self.arrivals})
        self.lake = Lake(self.rules, self.kafka, SinkState({}, {}, ()))
        self.decisions: Decisions = {source: [] for source in self.rules.sources}
        """All that were taken, but for those that a loss made forgotten."""
        self.quiet: set[str] = set()

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
        for source in self.rules.sources:
            self.kafka.write(source, 1000)
            self.lake.read(source, 1000)
        self.lake.merge(10_000)
        while self.publish(is_cut_off=False):
            pass
        self.recovered = len(self.lake.silver.already_published)
        return self

    def step(self) -> None:
        rng, source = self.rng, self.rng.choice(self.rules.sources)
        action = rng.random()
        if action < 0.2:
            if self.is_idling and rng.random() < 0.3:
                self.quiet = {each for each in self.rules.sources if rng.random() < 0.4}
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
        decisions = {source: list(mine) for source, mine in self.decisions.items()}
        for seq, row in out:
            is_telling = seq == batch[-1][0] or (seq == batch[0][0] and not self.is_in_transactions)
            headers = self.lake.headers(row.event_time) if is_telling else {}
            self.kafka.sink.append(Message(seq, as_content(row), headers, decisions))
        if is_cut_off and self.rng.random() < 0.3:
            self.kafka.sink += self.kafka.sink[len(self.kafka.sink) - len(out) :][: self.rng.randint(0, len(out))]
        return bool(batch)

    def lose(self) -> None:
        """Everything but Kafka."""
        self.losses += 1
        sink = ((message.content[1], message.content[0], message.headers) for message in reversed(self.kafka.sink))
        state = sink_state(sink, TIMEOUT_MS)
        last = self.kafka.sink[-1].decisions if self.kafka.sink else {}
        self.decisions = {source: list(last.get(source, ())) for source in self.rules.sources}
        self.told += sum(map(len, state.decisions.values()))
        self.lake = Lake(self.rules, self.kafka, state)

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
        model = PartitionMerge(self.rules)
        for source, records in self.arrivals.items():
            beats = [Record(source, *decision) for decision in self.decisions[source]]
            # A decision comes after the record of its offset.
            model.arrive(*sorted([*records, *beats], key=lambda record: record.offset))
        model.advance()
        return list(enumerate(map(as_content, model.published_order())))


def as_content(row: MergeRecord) -> Content:
    key, first, last, parts = row.content()
    return key, first, last, tuple(tuple((part.event_time, part.offset) for part in mine) for mine in parts)


def lives(disorder: int, **how: bool) -> list[Life]:
    """One of each seed, exact every one of them."""
    found = []
    for seed in SEEDS:
        life = Life(seed, disorder, **how).live()
        assert life.published() == life.undisturbed(), f"seed {seed}, disorder {disorder}, {how}"
        found.append(life)
    assert sum(life.losses for life in found) >= 1000
    assert sum(life.recovered for life in found) >= 1000
    return found


DISORDERS = pytest.mark.parametrize("disorder", [0, TIMEOUT_MS, 4 * TIMEOUT_MS])


@DISORDERS
def test_a_lost_lake_is_taken_up_exactly(disorder: int) -> None:
    lives(disorder)


@DISORDERS
def test_a_lost_lake_is_taken_up_exactly_with_the_idle_decisions_that_published_something(disorder: int) -> None:
    found = lives(disorder, is_idling=True)
    assert sum(life.told for life in found) >= 300
    assert sum(life.woken for life in found) >= 300


@DISORDERS
def test_a_batch_that_comes_out_in_part_or_again_is_taken_up_exactly(disorder: int) -> None:
    lives(disorder, is_idling=True, is_in_transactions=False)
