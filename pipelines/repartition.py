"""Repartition: a source's records go from a topic of any key and number of partitions to the topic that bronze reads.

They are written in the order and to the partitions of `core.repartition`, each once, by one transactional producer. The topic
itself says how much is written: the last message of each partition in a transaction says up to which offset of every partition
the records were written, and the one that says most is the last. For each source:

1. an earlier repartition is fenced, and its open transaction aborted: from here on nobody else writes;
2. *tails*: what was written is read from the last messages;
3. *read*: the next records of the partitions none of whose records wait;
4. *transaction*: those that may be written, all of them or none.

After a crash, or any other failure, all begins again with 1. Nothing of it needs the lake.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final

from confluent_kafka import Message

from pipelines.core.letters import NEXT_OFFSETS
from pipelines.core.repartition import ROUTED, Lockstep, Written, copies, is_redriven, route, written
from pipelines.errors import (
    ConfigurationError,
    DataLossError,
    ForeignMessageError,
    KafkaUnreachableError,
    TopicChangedError,
    WatersmeetError,
)
from pipelines.events import Behind, Handled, Observer, StepDone, all_of, ignore
from pipelines.kafka.cluster import Cluster, copy_settings
from pipelines.kafka.groups import Group
from pipelines.kafka.options import check_options
from pipelines.kafka.publisher import Publisher, record_publisher
from pipelines.kafka.reading import Range, read_tails
from pipelines.kafka.registry import Registry, rules_of
from pipelines.kafka.workers import read_decoded
from pipelines.observability import Reporter
from pipelines.settings import Settings
from pipelines.streams import Patience

log = logging.getLogger("watersmeet.repartition")

_LAYER: Final = "repartition"
"""What the stage is called beside the layers."""

EVERY_S: Final = 0.2
"""How often Kafka is asked for new records."""

LOOK_EVERY_S: Final = 5.0
"""How often the topic that is read is asked whether it is still the same, and has more partitions."""

READ_BYTES: Final = 160 * 1024 * 1024
"""About so many bytes of records are in memory at a time."""


def repartition(
    settings: Settings,
    reporter: Reporter,
    stopping: threading.Event,
    observers: Sequence[Observer] = (),
    *,
    once: bool,
    patience_s: float = 120.0,
) -> list[dict[str, Any]]:
    """Repartitions every source that is to be: what there is now (`once`), or on and on until `stopping` is set.

    By source: its topics, how many `records` were written, `read`: up to which offset of each partition, and `ends`: the offset
    at which each partition of its own topic ends. `observers` are told of each transaction and of failures. `patience_s`: for how
    long trouble with Kafka is waited out. Raises WatersmeetError.
    """
    if problems := check_options(settings.kafka):
        raise ConfigurationError(problems[0])
    for name in settings.repartitioned:
        if (registry := settings.sources[name].registry) is not None:
            Registry(registry).check_options()
    tell = all_of(observers)
    stages = [Repartition(settings, name, reporter, tell) for name in settings.repartitioned]
    if not stages:
        raise ConfigurationError("sources: none of them is repartitioned; add `repartition: {from: ..., partitions: ...}` to one")
    patience = Patience(reporter, stopping, patience_s, tell=tell)
    for stage in stages:
        patience.bear(stage.look)
    while not stopping.is_set():
        for stage in stages:
            patience.bear(stage.advance)
        is_idle = all(stage.is_done for stage in stages)
        if is_idle and (once or stopping.wait(EVERY_S)):
            break
        for stage in stages:
            if not once and stage.is_done:
                patience.bear(stage.look)
    return [stage.told() for stage in stages]


@dataclass
class _State:
    """What this process knows as long as nothing fails: how much is written, and by partition the next offset to read."""

    written: Written
    offsets: dict[int, int]
    lockstep: Lockstep


@dataclass
class Repartition:
    """The records of one source on their way; one owner at a time, the last that came."""

    settings: Settings
    source: str
    reporter: Reporter = field(default_factory=Reporter)
    tell: Observer = ignore
    records: int = 0
    """So many were written."""
    is_done: bool = False
    """Whether all is written that was there at the last look."""
    _bounds: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    _state: _State | None = None
    _looked: float | None = None
    _identity: str = ""
    _is_warned: bool = False

    def __post_init__(self) -> None:
        kept = self.settings.repartitioned[self.source]
        self.origin, self.topic, self.partitions = kept.from_topic, self.settings.inputs[self.source], kept.partitions
        self._cluster = Cluster(self.settings.kafka)

    def look(self) -> None:
        """Takes note of what there is: that is written next.

        Raises ConfigurationError where the topic to be read does not exist, TopicChangedError where it has become another one.
        """
        now = time.monotonic()
        if self._looked is None or now - self._looked > LOOK_EVERY_S:
            self._look_at_topic()
            self._looked = now
        self._bounds = self._cluster.bounds(self.origin, self._count)
        self.is_done = False

    def _look_at_topic(self) -> None:
        counts = self._cluster.partition_counts([self.origin])
        if self.origin not in counts:
            raise ConfigurationError(
                f"sources.{self.source}.repartition.from: there is no topic {self.origin} at "
                f"{self.settings.kafka.bootstrap_servers}; create it, or name the one that has the records"
            )
        identity = self._cluster.identified(self.origin)
        if self._identity not in ("", identity):
            raise TopicChangedError(f"{self.origin} was deleted and made again while it was being repartitioned")
        self._identity, self._count = identity, counts[self.origin]

    def advance(self) -> None:
        """Writes what comes next of what was there at the last look, in one transaction at most; then `is_done` says whether that
        was all.
        """
        state, self._state = self._state or self._taken_up(), None  # after a failure, only the topic knows what is written
        waiting, ends = state.lockstep.first_offsets(), {p: end for p, (_, end) in self._bounds.items()}
        for p, (first, _) in self._bounds.items():
            state.offsets.setdefault(p, first)
        unread = [p for p, end in ends.items() if state.offsets[p] < end and p not in waiting]
        if unread:
            self._read(state, {p: (state.offsets[p], ends[p]) for p in unread})
        taken, positions = state.lockstep.take(p for p, end in ends.items() if state.offsets[p] < end)
        state.written = Written(
            self._identity, state.offsets | state.lockstep.first_offsets(), {**state.written.positions, **positions}
        )
        if taken.num_rows:
            began = time.monotonic()
            self._publisher.send(copies(taken, self.partitions, state.written))
            self.records += taken.num_rows
            self.tell(StepDone(_LAYER, "write", time.monotonic() - began))
            self.tell(Handled(_LAYER, {self.topic: {("copied", ""): taken.num_rows}}))
            self.reporter.tell(
                self.source, f"{taken.num_rows} records written to {self.topic}", records=taken.num_rows, topic=self.topic
            )
        self.is_done = not taken.num_rows and all(state.offsets[p] >= end for p, end in ends.items())
        self._state = state
        left = {p: max(0, end - max(first, state.written.offsets.get(p, 0))) for p, (first, end) in self._bounds.items()}
        self.tell(Behind(_LAYER, self.origin, left))
        if taken.num_rows:
            self._show(state.written.offsets)

    def _show(self, offsets: Mapping[int, int]) -> None:
        """Commits offsets to a consumer group, so that Kafka's own tools show the lag; that it fails stops nothing."""
        try:
            self._group.commit({(self.origin, p): offset for p, offset in offsets.items()})
        except KafkaUnreachableError:  # the next step says so itself
            return
        except WatersmeetError as error:
            if not self._is_warned:
                log.warning("%s; Kafka's own tools do not show the lag of %s", error, self.source)
            self._is_warned = True

    def told(self) -> dict[str, Any]:
        """What the command answers of this source."""
        told = {"source": self.source, "from": self.origin, "topic": self.topic, "records": self.records, "read": {}, "ends": {}}
        if self._state is not None:  # else it was stopped before anything was known
            bounds = self._cluster.settled_bounds(self.topic, self.partitions)
            told["read"] = dict(sorted(self._state.written.offsets.items()))
            told["ends"] = {p: end for p, (_, end) in bounds.items()}
        return told

    def _read(self, state: _State, wanted: Mapping[int, tuple[int, int]]) -> None:
        """Reads the next records of some partitions, an equal share of each."""
        share = max(1, self.settings.kafka.max_offsets_per_batch // len(self._bounds))
        ranges = [Range(self.origin, p, since, min(since + share, end)) for p, (since, end) in sorted(wanted.items())]
        room = READ_BYTES * len(wanted) // len(self._bounds)
        rows, reached = read_decoded(
            self.settings.kafka, ranges, partial(route, rules=rules_of(self.settings, self.source)), ROUTED, room
        )
        state.lockstep.add(rows)
        state.offsets |= reached

    # -- what is written

    def _taken_up(self) -> _State:
        """Where the topic stands, once nobody else can write to it; the topic is made where it is missing."""
        counts = self._cluster.partition_counts([self.topic])
        if self.topic not in counts:
            wanted = {**copy_settings(self._cluster, [self.origin]), "retention.ms": "-1"}
            self._cluster.create_topic(self.topic, self.partitions, wanted)
        elif counts[self.topic] != self.partitions:
            raise ConfigurationError(
                f"sources.{self.source}.repartition.partitions: {self.topic} has {counts[self.topic]} partitions; "
                "name that number, or another topic and another lake for another number"
            )
        self._publisher.begin()
        known = self._written()
        offsets = dict(known.offsets)
        lost = {p: (at, first) for p, at in offsets.items() if at < (first := self._bounds.get(p, (0, 0))[0])}
        if lost and self.settings.kafka.on_data_loss == "stop":
            raise DataLossError(self.source, self.origin, lost)
        offsets |= {p: first for p, (_, first) in lost.items()}
        return _State(known, offsets, Lockstep(dict(known.positions)))

    def _written(self) -> Written:
        """What the messages say that say most: what was written only grows.

        Every transaction must have ended, also that of a redrive, behind which nothing can be read.
        """
        bounds = self._cluster.settled_bounds(self.topic, self.partitions)
        tails = read_tails(
            self.settings.kafka, self.topic, self.partitions, bounds, lambda message: not is_redriven(_headers(message))
        )
        for p, (first, end) in bounds.items():
            if p not in tails and first > 0:
                raise TopicChangedError(
                    f"{self.topic}[{p}] ends at offset {end} and holds no message any more, so that nobody knows how much of "
                    f"{self.origin} was written: its retention must keep the last messages; name another topic and another lake"
                )
        said = [self._stands_at(message) for message in tails.values()]
        return max(said, key=lambda each: sum(each.offsets.values()), default=Written(self._identity, {}, {}))

    def _stands_at(self, message: Message) -> Written:
        try:
            said = written(_headers(message))
        except ValueError:
            place = message.topic() or "", message.partition() or 0, message.offset() or 0
            raise ForeignMessageError(*place, NEXT_OFFSETS) from None
        if said.topic != self._identity:
            raise ConfigurationError(
                f"sources.{self.source}.repartition.from: {self.topic} was written from {said.topic}, and not from "
                f"{self._identity}; name that topic, or write to another one with another lake"
            )
        return said

    @cached_property
    def _group(self) -> Group:
        return Group(self.settings.kafka, f"watersmeet-{self.settings.name}-repartition")

    @cached_property
    def _publisher(self) -> Publisher:
        return record_publisher(self.settings, f"{self.settings.name}-repartition", self.topic)


def _headers(message: Message) -> list[tuple[str, Any]]:
    found: Any = message.headers()
    return list(found or [])
