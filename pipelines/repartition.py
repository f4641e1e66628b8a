"""Repartition: a source's records go from topics of any key and number of partitions to the topic that bronze reads.

They are written in the order and to the partitions of `core.repartition`, each once, by one transactional producer. The topic
itself says how much is written: the last message of each partition in a transaction says up to which offset of every input (a
partition of a topic that is read) the records were written, and the one that says most is the last. For each source:

1. its rules are compared with the lake's, where there is one; an earlier repartition is fenced, and its open
   transaction aborted: from here on nobody else writes. While `evolve` changes the lake's rules, nothing is
   written at all, and it fences a repartition that has begun before;
2. *tails*: what was written is read from the last messages;
3. *read*: the next records of the inputs none of whose records wait; this begins while the last ones are written;
4. *transaction*: those that may be written, all of them or none.

After a crash, or any other failure, all begins again with 1. The lake is only asked for its rules.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import pyarrow as pa
from confluent_kafka import Message

from pipelines.core.columns import times_ms
from pipelines.core.letters import NEXT_OFFSETS
from pipelines.core.reading import KAFKA
from pipelines.core.repartition import (
    ROUTED,
    InputPartition,
    Lockstep,
    Origin,
    Written,
    copies,
    is_redriven,
    origin_of,
    route,
    written,
)
from pipelines.errors import (
    ConfigurationError,
    DataLossError,
    FencedError,
    ForeignMessageError,
    KafkaTransientError,
    TopicChangedError,
    TransactionTimeoutError,
    WatersmeetError,
    unknown_schema_of,
)
from pipelines.kafka.cluster import Cluster, copy_settings
from pipelines.kafka.groups import Group
from pipelines.kafka.options import check_options
from pipelines.kafka.publisher import REPARTITION, Publisher, record_publisher
from pipelines.kafka.reading import Range, headers_of, read_range, read_tails
from pipelines.kafka.registry import Registry, rules_of
from pipelines.kafka.workers import read_decoded
from pipelines.lake.choice import questions
from pipelines.lake.epochs import check_repartition_rules, read_epochs
from pipelines.lake.lease import EVOLVE, check_not_changing
from pipelines.lake.location import Lake
from pipelines.lake.questions import Questions
from pipelines.monitoring.events import Behind, Handled, Observer, StepDone, all_of, ignore
from pipelines.monitoring.observability import Reporter
from pipelines.running.streams import Patience
from pipelines.running.transaction_size import TransactionSize
from pipelines.settings import Settings

log = logging.getLogger("watersmeet.repartition")

_LAYER: Final = "repartition"
"""What the stage is called beside the layers."""

EVERY_S: Final = 0.2
"""How often Kafka is asked for new records."""

LOOK_EVERY_S: Final = 5.0
"""How often the topics that are read are asked whether they are still the same, and have more partitions."""

_SHARES: Final = 1000
"""So many parts of what is read at a time make a whole."""

READ_BYTES: Final = 80 * 1024 * 1024
"""About so many bytes of records are read at a time, while about as many are written."""


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

    By source and topic that is read: how many of its `records` were written, `read`: up to which offset of each of its
    partitions, and `ends`: the offset at which each partition of the source's own topic ends. `observers` are told of each
    transaction and of failures. `patience_s`: for how long trouble with Kafka is waited out. Raises WatersmeetError.
    """
    if problems := check_options(settings.kafka):
        raise ConfigurationError(problems[0])
    registries = [of for name in settings.repartitioned if (of := settings.sources[name].registry) is not None]
    for registry in registries:
        Registry(registry).check_options()
    tell = all_of(observers)
    if not settings.repartitioned:
        raise ConfigurationError("sources: none of them is repartitioned; add `repartition: {from: ..., partitions: ...}` to one")
    longest_ms = max((registry.unknown_after_ms or 0 for registry in registries), default=0)
    patience = Patience(reporter, stopping, patience_s + longest_ms / 1000, tell=tell)
    with ThreadPoolExecutor(1) as reader:
        stages = [Repartition(settings, name, reader, reporter, tell) for name in settings.repartitioned]
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
        return [told for stage in stages for told in stage.told()]


_Read: TypeAlias = tuple[pa.Table, dict[InputPartition, int]]
"""Records of one topic, and by input the offset where reading them ended."""


@dataclass
class _State:
    """What this process knows as long as nothing fails: how much is written, by input the next offset to read, and what is being
    read.
    """

    written: Written
    offsets: dict[InputPartition, int]
    lockstep: Lockstep
    reading: Future[list[_Read]] | None = None


@dataclass
class Repartition:
    """The records of one source on their way; one owner at a time, the last that came."""

    settings: Settings
    source: str
    reader: Executor
    """Reads the next records while others are written."""
    reporter: Reporter = field(default_factory=Reporter)
    tell: Observer = ignore
    records: Counter[str] = field(default_factory=Counter)
    """So many were written, by the topic that they come from."""
    is_done: bool = False
    """Whether all is written that was there at the last look."""
    _bounds: Mapping[InputPartition, tuple[int, int]] = field(default_factory=dict)
    _state: _State | None = None
    _looked: float | None = None
    _identities: Mapping[str, str] = field(default_factory=dict)
    _written_to: str = ""
    _counts: Mapping[str, int] = field(default_factory=dict)
    _is_warned: bool = False
    _size: TransactionSize = field(default_factory=lambda: TransactionSize(_SHARES, _SHARES))
    _given_up: set[int] = field(default_factory=set)
    """The ids of schemas that are not waited for any longer."""
    _waiting_since: float | None = None
    """Since when a schema is waited for that the registry does not have (monotonic)."""

    @property
    def _offsets_at_once(self) -> int:
        return max(1, self.settings.kafka.max_offsets_per_batch * self._size.limit // self._size.largest)

    def __post_init__(self) -> None:
        kept = self.settings.repartitioned[self.source]
        self.origins, self.topic, self.partitions = kept.from_topics, self.settings.inputs[self.source], kept.partitions
        self._cluster = Cluster(self.settings.kafka)

    def look(self) -> None:
        """Takes note of what there is: that is written next.

        Raises ConfigurationError where a topic to be read does not exist, TopicChangedError where it has become another one.
        """
        now = time.monotonic()
        if self._looked is None or now - self._looked > LOOK_EVERY_S:
            self._look_at_topics()
            self._looked = now
        found = {topic: self._cluster.bounds(topic, self._counts[topic]) for topic in self.origins}
        self._bounds = {InputPartition(topic, p): bounds for topic, of_topic in found.items() for p, bounds in of_topic.items()}
        self.is_done = False

    def _look_at_topics(self) -> None:
        self._counts = self._cluster.partition_counts(self.origins)
        if missing := [topic for topic in self.origins if topic not in self._counts]:
            raise ConfigurationError(
                f"sources.{self.source}.repartition.from: there is no topic {missing[0]} at "
                f"{self.settings.kafka.bootstrap_servers}; create it, or name the one that has the records"
            )
        identities = {topic: self._cluster.identified(topic) for topic in self.origins}
        for topic, before in self._identities.items():
            if identities[topic] != before:
                raise TopicChangedError(f"{topic} was deleted and made again while it was being repartitioned")
        self._identities = identities
        if self._state is not None and self._cluster.identified(self.topic) != self._written_to:
            self._state = None  # the topic is another one now, which says how much is written

    def advance(self) -> None:
        """Writes what comes next of what was there at the last look, in one transaction at most; then `is_done` says whether that
        was all.
        """
        state, self._state = self._state or self._taken_up(), None  # after a failure, only the topic knows what is written
        ends = {of: end for of, (_, end) in self._bounds.items()}
        for of, (first, _) in self._bounds.items():
            state.offsets.setdefault(of, first)
        self._begin_reading(state)
        self._end_reading(state)
        taken, positions = state.lockstep.take(of for of, end in ends.items() if state.offsets[of] < end)
        state.written = Written(
            self._identities, state.offsets | state.lockstep.first_offsets(), {**state.written.positions, **positions}
        )
        self._begin_reading(state)
        if taken.num_rows:
            began = time.monotonic()
            self._write(copies(taken, self.partitions, state.written))
            counts = taken["topic"].value_counts()
            self.records.update(dict(zip(*(counts.field(i).to_pylist() for i in (0, 1)), strict=True)))
            self.tell(StepDone(_LAYER, "write", time.monotonic() - began))
            self.tell(Handled(_LAYER, {self.topic: {("copied", ""): taken.num_rows}}))
            self.reporter.tell(
                self.source, f"{taken.num_rows} records written to {self.topic}", records=taken.num_rows, topic=self.topic
            )
        self.is_done = not taken.num_rows and all(state.offsets[of] >= end for of, end in ends.items())
        self._state = state
        left = {of: max(0, end - max(first, state.written.offsets[of])) for of, (first, end) in self._bounds.items()}
        for topic in self.origins:
            self.tell(Behind(_LAYER, topic, {of.partition: records for of, records in left.items() if of.topic == topic}))
        if taken.num_rows:
            self._show(state.written.offsets)

    def _write(self, messages: Iterator[pa.Table]) -> None:
        """Sends messages in one transaction; where it takes too long, less is read for the next."""
        began = time.monotonic()
        try:
            self._publisher.send(messages)
        except FencedError:
            self._check_lake()  # perhaps by `evolve`
            raise
        except TransactionTimeoutError:
            self._size.timed_out(self._size.limit)
            raise
        self._size.succeeded(time.monotonic() - began, is_full=True)

    def _show(self, offsets: Mapping[InputPartition, int]) -> None:
        """Commits offsets to a consumer group, so that Kafka's own tools show the lag; that it fails stops nothing."""
        try:
            self._group.commit({(of.topic, of.partition): offset for of, offset in offsets.items()})
        except KafkaTransientError:  # the next step says so itself
            return
        except WatersmeetError as error:
            if not self._is_warned:
                log.warning("%s; Kafka's own tools do not show the lag of %s", error, self.source)
            self._is_warned = True

    def told(self) -> Iterator[dict[str, Any]]:
        """What the command answers of this source: a row for each topic that is read."""
        ends, offsets = {}, dict[InputPartition, int]()
        if self._state is not None:  # else it was stopped before anything was known
            ends = {p: end for p, (_, end) in self._cluster.settled_bounds(self.topic, self.partitions).items()}
            offsets = dict(sorted(self._state.written.offsets.items()))
        for topic in self.origins:
            read = {of.partition: offset for of, offset in offsets.items() if of.topic == topic}
            row = {"source": self.source, "from": topic, "topic": self.topic, "records": self.records[topic]}
            yield {**row, "read": read, "ends": ends}

    def _begin_reading(self, state: _State) -> None:
        """Begins to read the next records of inputs of which none waits, an equal share of each, unless that has begun."""
        waiting, share = state.lockstep.first_offsets(), max(1, self._offsets_at_once // len(self._bounds))
        ranges = [
            Range(*of, since, min(since + share, end))
            for of, (_, end) in sorted(self._bounds.items())
            if (since := state.offsets[of]) < end and of not in waiting
        ]
        if ranges and state.reading is None:
            state.reading = self.reader.submit(self._read, ranges)

    def _end_reading(self, state: _State) -> None:
        """Takes what has been read, once it has. Raises what reading it has raised."""
        reading, state.reading = state.reading, None
        try:
            found = reading.result() if reading else ()
        except Exception as failure:
            self._note_unknown_schema(failure)
            raise
        self._waiting_since = None
        for rows, reached in found:
            state.lockstep.add(rows)
            state.offsets |= reached

    def _note_unknown_schema(self, failure: Exception) -> None:
        """Gives up a schema that the registry does not have, once it was waited for as long as `registry.unknown_after` says."""
        registry, schema_id = self.settings.sources[self.source].registry, unknown_schema_of(failure)
        if registry is None or registry.unknown_after_ms is None or schema_id is None:
            return
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        if now - self._waiting_since >= registry.unknown_after_ms / 1000:
            self._given_up.add(schema_id)

    def _read(self, ranges: Sequence[Range]) -> list[_Read]:
        """The records of ranges, topic by topic, as far as there is room for them."""
        decode, found = partial(route, rules=rules_of(self.settings, self.source, self._given_up)), []
        for topic in self.origins:
            of_topic = [wanted for wanted in ranges if wanted.topic == topic]
            room = READ_BYTES * self._size.limit // self._size.largest * len(of_topic) // len(self._bounds)
            rows, reached = read_decoded(self.settings.kafka, of_topic, decode, ROUTED, room)
            found.append((rows, {InputPartition(topic, p): offset for p, offset in reached.items()}))
        return found

    # -- what is written

    def _check_lake(self) -> None:
        """Raise ConfigurationError where the lake has other rules for the source, and LeaseTakenError while it gets others."""
        check_not_changing(self._questions, self._lake, EVOLVE)
        check_repartition_rules(read_epochs(self._questions, self.settings), self.settings, self.source)

    def _taken_up(self) -> _State:
        """Where the topic stands, once nobody else can write to it; the topic is made where it is missing."""
        self._check_lake()  # before anybody is fenced
        counts = self._cluster.partition_counts([self.topic])
        if self.topic not in counts:
            wanted = {**copy_settings(self._cluster, self.origins), "retention.ms": "-1"}
            self._cluster.create_topic(self.topic, self.partitions, wanted)
        elif counts[self.topic] != self.partitions:
            raise ConfigurationError(
                f"sources.{self.source}.repartition.partitions: {self.topic} has {counts[self.topic]} partitions; "
                "name that number, or another topic and another lake for another number"
            )
        self._written_to = self._cluster.identified(self.topic)
        self._publisher.begin()
        self._check_lake()
        known = self._written()
        offsets = dict(known.offsets)
        lost = {of: (at, first) for of, at in offsets.items() if at < (first := self._bounds.get(of, (0, 0))[0])}
        for topic in self.origins if self.settings.kafka.on_data_loss == "stop" else ():
            if of_topic := {of.partition: places for of, places in lost.items() if of.topic == topic}:
                raise DataLossError(self.source, topic, of_topic)
        offsets |= {of: first for of, (_, first) in lost.items()}
        return _State(known, offsets, Lockstep(self.origins, dict(known.positions)))

    def _written(self) -> Written:
        """What the messages say that say most: what was written only grows.

        Every transaction must have ended, also that of a redrive, behind which nothing can be read.
        """
        bounds = self._cluster.settled_bounds(self.topic, self.partitions)
        tails = read_tails(
            self.settings.kafka, self.topic, self.partitions, bounds, lambda message: not is_redriven(headers_of(message))
        )
        for p, (first, end) in bounds.items():
            if p not in tails and first > 0:
                raise TopicChangedError(
                    f"{self.topic}[{p}] ends at offset {end} and holds no message any more, so that nobody knows how much of "
                    f"{' and '.join(self.origins)} was written: its retention must keep the last messages; name another topic "
                    "and another lake"
                )
        said = [_stands_at(message) for message in tails.values()]
        for topic, identified in {place for each in said for place in each.topics.items()}:
            mine = self._identities.get(topic)
            if identified != mine and not (mine and self._has_the_records(topic, tails.values())):
                raise ConfigurationError(
                    f"sources.{self.source}.repartition.from: {self.topic} was written from {identified}, and `from` names "
                    f"{mine or ' and '.join(self.origins)}; name that topic, too, or write to another one with another lake"
                )
        return max(said, key=lambda each: sum(each.offsets.values()), default=Written(self._identities, {}, {}))

    def _has_the_records(self, topic: str, messages: Iterable[Message]) -> bool:
        """Whether a topic to be read has the records of which these are copies, as after a move of the cluster with its offsets:
        at least one, and none that differs.
        """
        copied = [(place, message) for message in messages if (place := origin_of(headers_of(message))).topic == topic]
        return bool(copied) and all(self._is_copy(*each) for each in copied)

    def _is_copy(self, place: Origin, message: Message) -> bool:
        first, end = self._bounds.get(InputPartition(place.topic, place.partition), (0, 0))
        if not first <= place.offset < end:
            return False
        there = read_range(self.settings.kafka, Range(*place, place.offset + 1))
        rows = pa.Table.from_batches(there, KAFKA)
        sent = message.timestamp()[1]
        times = [sent if time < 0 else max(1, time) for time in times_ms(rows["kafka_timestamp"]).tolist()]  # as `copies` has it
        records = zip(rows["key"].to_pylist(), rows["value"].to_pylist(), times, strict=True)
        return (message.key(), message.value(), sent) in records

    @cached_property
    def _group(self) -> Group:
        return Group(self.settings.kafka, f"watersmeet-{self.settings.name}-repartition")

    @cached_property
    def _publisher(self) -> Publisher:
        return record_publisher(self.settings, self.topic, REPARTITION)

    @cached_property
    def _lake(self) -> Lake:
        return Lake(self.settings)

    @cached_property
    def _questions(self) -> Questions:
        def spark() -> Any:
            """The session that a catalog is asked by."""
            from pipelines.engine.session import spark_session

            return spark_session(self.settings.spark)

        return questions(self._lake, spark)


def _stands_at(message: Message) -> Written:
    try:
        return written(headers_of(message))
    except ValueError:
        place = message.topic() or "", message.partition() or 0, message.offset() or 0
        raise ForeignMessageError(*place, NEXT_OFFSETS) from None
