"""Laws of generations: whatever jumps there are, no record is in two messages, and each has one
fate in the newest generation."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.cases import KEYS, SOURCES, rules_of
from tests.support.effort import seeds
from tests.support.inputs import input_of, record_of
from watersmeet.core.model import PartitionMerge, Record
from watersmeet.core.window import Window

pytestmark = pytest.mark.promise("B120")

TIMEOUT_MS = 100
WINDOWS = {"timeout": Window(TIMEOUT_MS), "window": Window(40, 150)}

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
    jumps: int = 0
    passed_over: int = 0

    @classmethod
    def drawn(cls, seed: int, window: Window) -> Life:
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
        return cls(rng, window, records)

    def generation(self) -> PartitionMerge:
        """The merge of what has arrived from the newest beginning on."""
        model = PartitionMerge(
            rules_of(SOURCES, *self.window),
            out=frozenset((input_of(source), offset) for source, offset in self.out),
        )
        for source in SOURCES:
            model.arrive(*self.records[source][self.begin[source] : self.arrived[source]])
        model.advance()
        return model

    def publish(self) -> None:
        """Some of what sorts behind the last message."""
        last = self.sink[-1][0] if self.sink else None
        rows = [
            row for row in self.generation().published_order() if last is None or row.place() > last
        ]
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

    def step(self) -> None:
        for source in SOURCES:
            self.arrived[source] = min(
                len(self.records[source]), self.arrived[source] + self.rng.randint(0, 12)
            )
        self.publish()
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
        fates.update((record.input.source, record.offset) for record in model.already_published)
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
        self.passed_over += len(model.already_published)


@pytest.mark.parametrize("window", WINDOWS)
def test_whatever_jumps_there_are_each_record_is_in_one_message_at_most(window: str) -> None:
    lives = []
    for seed in seeds(100):
        life = Life.drawn(seed, WINDOWS[window])
        for _ in range(12):
            life.step()
            life.check()
        lives.append(life)
    assert sum(life.jumps for life in lives) > 2 * len(lives)
    assert sum(life.passed_over for life in lives) > 5 * len(lives)
    assert sum(len(life.sink) for life in lives) > 5 * len(lives)
