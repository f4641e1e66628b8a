"""Laws of generations: whatever jumps there are, no record is in two messages, and each has one
fate in the newest generation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.cases import KEYS, SOURCES, rules_of
from tests.support.effort import seeds
from tests.support.inputs import input_of, record_of
from watersmeet.core.model import MergeRecord, PartitionMerge, Record
from watersmeet.core.window import Window

pytestmark = [pytest.mark.promise("B120"), pytest.mark.fault("jumps", oracle=True)]

TIMEOUT_MS = 100
WINDOWS = {"timeout": Window(TIMEOUT_MS), "window": Window(40, 150)}
OTHERS = {
    "timeout": [Window(TIMEOUT_MS), Window(0), Window(1), Window(30), Window(300)],
    "window": [Window(40, 150), Window(0, 0), Window(1, 2), Window(30, 30), Window(100, 300)],
}
MOST_AT_ONCE = 5

SortKey = tuple[Any, ...]
Places = frozenset[tuple[str, int]]
"""Records by source and offset."""


@dataclass
class Life:
    """One partition whose generations begin anywhere, and its sink: the place of each message, and
    the records that it holds."""

    rng: random.Random
    window: Window
    records: dict[str, list[Record]]
    arrived: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    begin: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SOURCES, 0))
    sink: list[tuple[SortKey, Places]] = field(default_factory=list)
    out: set[tuple[str, int]] = field(default_factory=set)
    """What the newest generation passes over."""
    others: list[Window] = field(default_factory=list)
    """Windows that the rules change to, several times while the clock stands."""
    changes: list[tuple[dict[str, int], Window]] = field(default_factory=list)
    """Those of this generation: how much had arrived, and the window from then on."""
    known: list[SortKey] = field(default_factory=list)
    """What this generation has closed up to its clock, in order."""
    beyond: int = 0
    jumps: int = 0
    passed_over: int = 0

    @classmethod
    def drawn(cls, seed: int, window: Window, others: Sequence[Window] = ()) -> Life:
        rng, records = random.Random(seed), dict[str, list[Record]]()
        for source in SOURCES:
            time, mine = 0, list[Record]()
            for offset in range(rng.randint(20, 60)):
                time += rng.choice([0, rng.randint(0, 30), rng.randint(0, 60)])
                key = rng.choice([*KEYS[:3], None])
                mine.append(
                    record_of(
                        source, offset, max(0, time - rng.choice([0, 0, rng.randint(0, 250)])), key
                    )
                )
            records[source] = mine
        return cls(rng, window, records, others=list(others))

    def generation(self) -> PartitionMerge:
        """The merge of what has arrived from the newest beginning on."""
        model = PartitionMerge(
            rules_of(SOURCES, *self.window),
            out=frozenset((input_of(source), offset) for source, offset in self.out),
        )
        since = self.begin
        for until, window in self.changes:
            self._advance(model, since, until)
            since = until
            model.begin_epoch(*window)
        self._advance(model, since, self.arrived)
        return model

    def _advance(self, model: PartitionMerge, since: dict[str, int], until: dict[str, int]) -> None:
        for source in SOURCES:
            model.arrive(*self.records[source][since[source] : until[source]])
        model.advance()

    def closed(self) -> list[MergeRecord]:
        """What has been closed up to the clock, in the order of publication."""
        model = self.generation()
        return [row for row in model.published_order() if row.closed_at <= (model.clock or 0)]

    def change(self) -> None:
        for _ in range(self.rng.randint(1, MOST_AT_ONCE)):
            self.changes.append((dict(self.arrived), self.rng.choice(self.others)))
        model = self.generation()
        self.beyond += model.clock is not None and model.epoch_start > model.clock

    def publish(self) -> None:
        """Some of what sorts behind the last message."""
        last = self.sink[-1][0] if self.sink else None
        closed = self.closed()
        places = [row.place() for row in closed]
        assert places[: len(self.known)] == self.known, "what is closed is final"
        self.known = places
        rows = [row for row in closed if last is None or row.place() > last]
        for row in rows[: self.rng.choice([1, 2, len(rows)])]:
            parts = frozenset(
                (source, part.offset) for source, mine in row.parts.items() for part in mine
            )
            self.sink.append((row.place(), parts))

    def jump(self) -> None:
        """Forth, back, or to where it is; what is out by then is passed over."""
        self.jumps += 1
        self.out = {place for _, parts in self.sink for place in parts}
        self.begin = {source: self.rng.randint(0, self.arrived[source]) for source in SOURCES}
        self.window = self.changes[-1][1] if self.changes else self.window
        self.changes, self.known = [], []

    def step(self) -> None:
        for source in SOURCES:
            self.arrived[source] = min(
                len(self.records[source]), self.arrived[source] + self.rng.randint(0, 12)
            )
        self.publish()
        if self.others and self.rng.random() < 0.5:
            self.change()
        if self.rng.random() < 0.3:
            self.jump()

    def check(self) -> None:
        places = [place for place, _ in self.sink]
        assert places == sorted(set(places)), "in order, each once"
        counts = Counter(place for _, parts in self.sink for place in parts)
        assert set(counts.values()) <= {1}, "no record is in two messages"
        model = self.generation()
        rows = [*model.open.values(), *model.timed_out]
        fates = Counter(
            (source, part.offset)
            for row in rows
            for source, mine in row.parts.items()
            for part in mine
        )
        fates.update((each.record.input.source, each.record.offset) for each in model.late)
        fates.update((record.input.source, record.offset) for _, record in model.passed)
        fates.update(
            (record.input.source, record.offset)
            for mine in model.unread().values()
            for _, record in mine
            if record.key
        )
        keyed = {
            (source, record.offset)
            for source in SOURCES
            for record in self.records[source][self.begin[source] : self.arrived[source]]
            if record.key is not None
        }
        assert fates == Counter(keyed), "each record has one fate"
        self.passed_over += len(model.passed)


def lives_of(window: str, others: Sequence[Window] = ()) -> list[Life]:
    lives = []
    for seed in seeds(100):
        life = Life.drawn(seed, WINDOWS[window], others)
        for _ in range(12):
            life.step()
            life.check()
        lives.append(life)
    return lives


@pytest.mark.parametrize("window", WINDOWS)
def test_in_each_generation_what_is_closed_is_final_where_clocks_stand_through_changes(
    window: str,
) -> None:
    lives = lives_of(window, OTHERS[window])
    assert sum(life.jumps for life in lives) > 2 * len(lives)
    assert sum(life.beyond for life in lives) > len(lives)
    assert sum(len(life.sink) for life in lives) > 5 * len(lives)


@pytest.mark.parametrize("window", WINDOWS)
def test_whatever_jumps_there_are_each_record_is_in_one_message_at_most(window: str) -> None:
    lives = lives_of(window)
    assert sum(life.jumps for life in lives) > 2 * len(lives)
    assert sum(life.passed_over for life in lives) > 5 * len(lives)
    assert sum(len(life.sink) for life in lives) > 5 * len(lives)
