"""Repartition: writes a source's records to the topic that bronze reads.

They come from topics with any key and any number of partitions. They are written in the order and
to the partitions of `core.repartition`, each once, by one transactional producer. The topic itself
says how much is written: in a transaction, the last message of each partition says up to which
offset of every input (a partition of a topic that is read) the records were written. The message
with the largest offsets is the latest. For each source:

1. its rules are compared with the lake's, if there is a lake. An earlier repartition is fenced and
   its open transaction aborted, so that from here on nobody else writes. While `evolve` changes the
   lake's rules, nothing is written at all, and `evolve` fences a repartition that began before it;
2. *tails*: what was written is read from the last messages;
3. *read*: the next records are read from the inputs that have no waiting records. This begins while
   the previous records are written;
4. *transaction*: the records that may be written are sent, all of them or none.

After a crash, or any other failure, everything starts again with step 1. Of the lake, only the
rules are read.
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
from pipelines.core.dead_letters import NEXT_OFFSETS
from pipelines.core.reading import KAFKA
from pipelines.core.repartition import (
    ROUTED,
    InputPartition,
    Lockstep,
    Origin,
    RepartitionProgress,
    assign_partitions,
    is_redriven,
    origin_of,
    repartition_messages,
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
from pipelines.lake.choice import reader
from pipelines.lake.epochs import check_repartition_rules, read_epochs
from pipelines.lake.lease import EVOLVE, check_not_changing
from pipelines.lake.location import Lake
from pipelines.lake.table_reader import TableReader
from pipelines.monitoring.events import (
    LagObserved,
    Observer,
    RecordsProcessed,
    StepDone,
    all_of,
    ignore,
)
from pipelines.monitoring.observability import Reporter
from pipelines.running.runner import Runner
from pipelines.running.transaction_size import TransactionSize
from pipelines.settings import Settings

log = logging.getLogger("watersmeet.repartition")

_LAYER: Final = "repartition"
"""The name of this stage beside the layers."""

EVERY_S: Final = 0.2
"""Interval at which Kafka is checked for new records."""

LOOK_EVERY_S: Final = 5.0
"""Interval at which the topics that are read are checked for a new identity or new partitions."""

_SHARES: Final = 1000
"""Number of equal shares that the amount read at a time is divided into."""

READ_BYTES: Final = 80 * 1024 * 1024
"""Approximate size of the records that are read at a time, while as many are written."""


def repartition(
    settings: Settings,
    reporter: Reporter,
    stopping: threading.Event,
    observers: Sequence[Observer] = (),
    *,
    once: bool,
    patience_s: float = 120.0,
) -> list[dict[str, Any]]:
    """Repartition every configured source: what there is now (`once`), or until `stopping` is set.

    Return a row for each source and topic that is read. `records`: how many of its records were
    written. `read`: the offset up to which each of its partitions was written. `ends`: the offset
    at which each partition of the source's own topic ends.

    `observers` are told of each transaction and of failures. `patience_s`: how long trouble with
    Kafka is waited out. Raises WatersmeetError.
    """
    if problems := check_options(settings.kafka):
        raise ConfigurationError(*problems[0])
    used = [settings.sources[name].registry for name in settings.repartitioned]
    registries = [registry for registry in used if registry is not None]
    for registry in registries:
        Registry(registry).check_options()
    notify = all_of(observers)
    if not settings.repartitioned:
        raise ConfigurationError(
            "none of them is repartitioned",
            where="sources",
            fix="add `repartition: {from: ..., partitions: ...}` to one",
        )
    longest_ms = max((registry.unknown_after_ms or 0 for registry in registries), default=0)
    runner = Runner(reporter, stopping, patience_s + longest_ms / 1000, notify=notify)
    with ThreadPoolExecutor(1) as reader:
        stages = [
            Repartition(settings, name, reader, reporter, notify) for name in settings.repartitioned
        ]
        for stage in stages:
            runner.retry(stage.poll)
        while not stopping.is_set():
            for stage in stages:
                runner.retry(stage.advance)
            is_idle = all(stage.is_done for stage in stages)
            if is_idle and (once or stopping.wait(EVERY_S)):
                break
            for stage in stages:
                if not once and stage.is_done:
                    runner.retry(stage.poll)
        return [described for stage in stages for described in stage.described()]


_Read: TypeAlias = tuple[pa.Table, dict[InputPartition, int]]
"""Records of one topic, and the offset at which reading them ended, by input."""


@dataclass
class _State:
    """The state of this process, valid as long as nothing fails.

    `written`: how much is written. `offsets`: the next to read, by input. `reading`: the read under
    way.
    """

    written: RepartitionProgress
    offsets: dict[InputPartition, int]
    lockstep: Lockstep
    reading: Future[list[_Read]] | None = None


@dataclass
class Repartition:
    """Repartitions the records of one source; one owner at a time, the last to start."""

    settings: Settings
    source: str
    reader: Executor
    """The executor that reads the next records while others are written."""
    reporter: Reporter = field(default_factory=Reporter)
    notify: Observer = ignore
    records: Counter[str] = field(default_factory=Counter)
    """Number of records written, by the topic that they come from."""
    is_done: bool = False
    """True where everything is written that was there at the last check."""
    _bounds: Mapping[InputPartition, tuple[int, int]] = field(default_factory=dict)
    _state: _State | None = None
    _checked_at_s: float | None = None
    _identities: Mapping[str, str] = field(default_factory=dict)
    _written_to: str = ""
    _counts: Mapping[str, int] = field(default_factory=dict)
    _is_warned: bool = False
    _size: TransactionSize = field(default_factory=lambda: TransactionSize(_SHARES, _SHARES))
    _given_up: set[int] = field(default_factory=set)
    """Ids of schemas that are no longer waited for."""
    _waiting_since: float | None = None
    """Time (monotonic) since which a schema is waited for that the registry does not have."""

    @property
    def _offsets_at_once(self) -> int:
        return max(
            1, self.settings.kafka.max_offsets_per_batch * self._size.limit // self._size.largest
        )

    def __post_init__(self) -> None:
        kept = self.settings.repartitioned[self.source]
        self.origins = kept.from_topics
        self.topic = self.settings.inputs[self.source]
        self.partitions = kept.partitions
        self._cluster = Cluster(self.settings.kafka)

    def poll(self) -> None:
        """Record the offsets that Kafka has now, which are written next.

        Raises ConfigurationError if a topic to be read does not exist, TopicChangedError if it was
        replaced.
        """
        now = time.monotonic()
        if self._checked_at_s is None or now - self._checked_at_s > LOOK_EVERY_S:
            self._check_topics()
            self._checked_at_s = now
        self._bounds = {
            InputPartition(topic, p): bounds
            for topic in self.origins
            for p, bounds in self._cluster.bounds(topic, self._counts[topic]).items()
        }
        self.is_done = False

    def _check_topics(self) -> None:
        self._counts = self._cluster.partition_counts(self.origins)
        if missing := [topic for topic in self.origins if topic not in self._counts]:
            raise ConfigurationError(
                f"there is no topic {missing[0]} at {self.settings.kafka.bootstrap_servers}",
                where=f"sources.{self.source}.repartition.from",
                fix="create it, or name the one that has the records",
            )
        identities = {topic: self._cluster.identified(topic) for topic in self.origins}
        for topic, before in self._identities.items():
            if identities[topic] != before:
                raise TopicChangedError(
                    f"{topic} was deleted and made again while it was being repartitioned"
                )
        self._identities = identities
        if self._state is not None and self._cluster.identified(self.topic) != self._written_to:
            self._state = None  # only the new topic says how much is written to it

    def advance(self) -> None:
        """Write the next of the records that were there at the last check, in at most one
        transaction.

        Afterwards `is_done` says whether that was all.
        """
        # After a failure, only the topic knows what is written.
        state = self._state or self._recover()
        self._state = None
        ends = {tp: end for tp, (_, end) in self._bounds.items()}
        for tp, (first, _) in self._bounds.items():
            state.offsets.setdefault(tp, first)
        self._begin_reading(state)
        self._end_reading(state)
        taken, positions = state.lockstep.take(
            tp for tp, end in ends.items() if state.offsets[tp] < end
        )
        state.written = RepartitionProgress(
            self._identities,
            state.offsets | state.lockstep.first_offsets(),
            {**state.written.positions, **positions},
        )
        self._begin_reading(state)
        if taken.num_rows:
            began = time.monotonic()
            self._write(repartition_messages(taken, self.partitions, state.written))
            counts = taken["topic"].value_counts()
            topics, records = (counts.field(i).to_pylist() for i in (0, 1))
            self.records.update(dict(zip(topics, records, strict=True)))
            self.notify(StepDone(_LAYER, "write", time.monotonic() - began))
            self.notify(RecordsProcessed(_LAYER, {self.topic: {("copied", ""): taken.num_rows}}))
            self.reporter.notify(
                self.source,
                f"{taken.num_rows} records written to {self.topic}",
                records=taken.num_rows,
                topic=self.topic,
            )
        self.is_done = not taken.num_rows and all(
            state.offsets[tp] >= end for tp, end in ends.items()
        )
        self._state = state
        backlog = {
            tp: max(0, end - max(first, state.written.offsets[tp]))
            for tp, (first, end) in self._bounds.items()
        }
        for topic in self.origins:
            self.notify(
                LagObserved(
                    _LAYER,
                    topic,
                    {tp.partition: records for tp, records in backlog.items() if tp.topic == topic},
                )
            )
        if taken.num_rows:
            self._show(state.written.offsets)

    def _write(self, messages: Iterator[pa.Table]) -> None:
        """Send messages in one transaction; if it takes too long, less is read for the next one."""
        began = time.monotonic()
        try:
            self._publisher.send(messages)
        except FencedError:
            self._check_lake()  # `evolve` may be the one that fenced
            raise
        except TransactionTimeoutError:
            self._size.timed_out(self._size.limit)
            raise
        self._size.succeeded(time.monotonic() - began, is_full=True)

    def _show(self, offsets: Mapping[InputPartition, int]) -> None:
        """Commit offsets to a consumer group, so that Kafka's own tools show the lag.

        A failure to do so stops nothing.
        """
        try:
            self._group.commit({(tp.topic, tp.partition): offset for tp, offset in offsets.items()})
        except KafkaTransientError:  # the next step reports it
            return
        except WatersmeetError as error:
            if not self._is_warned:
                log.warning("%s; Kafka's own tools do not show the lag of %s", error, self.source)
            self._is_warned = True

    def described(self) -> Iterator[dict[str, Any]]:
        """Yield the command's answer for this source: a row for each topic that is read."""
        ends = {}
        offsets = dict[InputPartition, int]()
        if self._state is not None:  # else it was stopped before anything was known
            ends = {
                p: end
                for p, (_, end) in self._cluster.settled_bounds(self.topic, self.partitions).items()
            }
            offsets = dict(sorted(self._state.written.offsets.items()))
        for topic in self.origins:
            read = {tp.partition: offset for tp, offset in offsets.items() if tp.topic == topic}
            row = {
                "source": self.source,
                "from": topic,
                "topic": self.topic,
                "records": self.records[topic],
            }
            yield {**row, "read": read, "ends": ends}

    def _begin_reading(self, state: _State) -> None:
        """Start reading the next records, unless a read is under way.

        Only inputs without waiting records are read, an equal share of each.
        """
        waiting = state.lockstep.first_offsets()
        share = max(1, self._offsets_at_once // len(self._bounds))
        ranges = [
            Range(*tp, since, min(since + share, end))
            for tp, (_, end) in sorted(self._bounds.items())
            if (since := state.offsets[tp]) < end and tp not in waiting
        ]
        if ranges and state.reading is None:
            state.reading = self.reader.submit(self._read, ranges)

    def _end_reading(self, state: _State) -> None:
        """Wait for the read under way, if there is one, and take its records.

        Raises what the read has raised.
        """
        reading = state.reading
        state.reading = None
        try:
            results = reading.result() if reading else ()
        except Exception as failure:
            self._note_unknown_schema(failure)
            raise
        self._waiting_since = None
        for rows, reached in results:
            state.lockstep.add(rows)
            state.offsets |= reached

    def _note_unknown_schema(self, failure: Exception) -> None:
        """Give up a schema that the registry lacks, once `registry.unknown_after` has passed."""
        registry = self.settings.sources[self.source].registry
        schema_id = unknown_schema_of(failure)
        if registry is None or registry.unknown_after_ms is None or schema_id is None:
            return
        now = time.monotonic()
        self._waiting_since = self._waiting_since or now
        if now - self._waiting_since >= registry.unknown_after_ms / 1000:
            self._given_up.add(schema_id)

    def _read(self, ranges: Sequence[Range]) -> list[_Read]:
        """Return the records of ranges, topic by topic, as far as there is room for them."""
        decode = partial(
            assign_partitions, rules=rules_of(self.settings, self.source, self._given_up)
        )
        results = []
        for topic in self.origins:
            topic_ranges = [offset_range for offset_range in ranges if offset_range.topic == topic]
            max_bytes = READ_BYTES * self._size.limit // self._size.largest
            share = max_bytes * len(topic_ranges) // len(self._bounds)
            rows, reached = read_decoded(self.settings.kafka, topic_ranges, decode, ROUTED, share)
            ends = {InputPartition(topic, p): offset for p, offset in reached.items()}
            results.append((rows, ends))
        return results

    # -- what is written

    def _check_lake(self) -> None:
        """Raise ConfigurationError if the lake has other rules for the source.

        Raises LeaseTakenError while the lake gets other rules.
        """
        check_not_changing(self._reader, self._lake, EVOLVE)
        check_repartition_rules(
            read_epochs(self._reader, self.settings), self.settings, self.source
        )

    def _recover(self) -> _State:
        """Return the state of the topic, once nobody else can write to it.

        A missing topic is created.
        """
        self._check_lake()  # before anybody is fenced
        counts = self._cluster.partition_counts([self.topic])
        if self.topic not in counts:
            topic_settings = {**copy_settings(self._cluster, self.origins), "retention.ms": "-1"}
            self._cluster.create_topic(self.topic, self.partitions, topic_settings)
        elif counts[self.topic] != self.partitions:
            raise ConfigurationError(
                f"{self.topic} has {counts[self.topic]} partitions",
                where=f"sources.{self.source}.repartition.partitions",
                fix="name that number, or another topic and another lake for another number",
            )
        self._written_to = self._cluster.identified(self.topic)
        self._publisher.begin()
        self._check_lake()
        progress = self._written()
        offsets = dict(progress.offsets)
        lost = {
            tp: (at, first)
            for tp, at in offsets.items()
            if at < (first := self._bounds.get(tp, (0, 0))[0])
        }
        for topic in self.origins if self.settings.kafka.on_data_loss == "stop" else ():
            if lost_offsets := {
                tp.partition: places for tp, places in lost.items() if tp.topic == topic
            }:
                raise DataLossError(self.source, topic, lost_offsets)
        offsets |= {tp: first for tp, (_, first) in lost.items()}
        return _State(progress, offsets, Lockstep(self.origins, dict(progress.positions)))

    def _written(self) -> RepartitionProgress:
        """Return the largest state that a last message of the topic carries: what is written only
        grows.

        Every transaction must have ended, including that of a redrive: nothing behind an open one
        can be read.
        """
        bounds = self._cluster.settled_bounds(self.topic, self.partitions)
        tails = read_tails(
            self.settings.kafka,
            self.topic,
            self.partitions,
            bounds,
            lambda message: not is_redriven(headers_of(message)),
        )
        for p, (first, end) in bounds.items():
            if p not in tails and first > 0:
                raise TopicChangedError(
                    f"{self.topic}[{p}] ends at offset {end} and holds no message any more, "
                    f"so that nobody knows how much of {' and '.join(self.origins)} was "
                    "written: its retention must keep the last messages",
                    fix="name another topic and another lake",
                )
        states = [_progress_of(message) for message in tails.values()]
        identities = {item for progress in states for item in progress.topics.items()}
        for topic, identified in identities:
            identity = self._identities.get(topic)
            if identified != identity and not (
                identity and self._has_the_records(topic, tails.values())
            ):
                raise ConfigurationError(
                    f"{self.topic} was written from {identified}, and `from` names "
                    f"{identity or ' and '.join(self.origins)}",
                    where=f"sources.{self.source}.repartition.from",
                    fix="name that topic, too, or write to another one with another lake",
                )
        return max(
            states,
            key=lambda progress: sum(progress.offsets.values()),
            default=RepartitionProgress(self._identities, {}, {}),
        )

    def _has_the_records(self, topic: str, messages: Iterable[Message]) -> bool:
        """Return True if a topic to be read has the records of which these messages are copies.

        It has them after a move of the cluster with its offsets. At least one record must be there,
        and none may differ.
        """
        copied = [
            (place, message)
            for message in messages
            if (place := origin_of(headers_of(message))).topic == topic
        ]
        return bool(copied) and all(self._is_copy(place, message) for place, message in copied)

    def _is_copy(self, place: Origin, message: Message) -> bool:
        first, end = self._bounds.get(InputPartition(place.topic, place.partition), (0, 0))
        if not first <= place.offset < end:
            return False
        there = read_range(self.settings.kafka, Range(*place, place.offset + 1))
        rows = pa.Table.from_batches(there, KAFKA)
        sent = message.timestamp()[1]
        # As `repartition_messages` writes them.
        times = [
            sent if time < 0 else max(1, time)
            for time in times_ms(rows["kafka_timestamp"]).tolist()
        ]
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
    def _reader(self) -> TableReader:
        def spark() -> Any:
            """Return the session that reads a catalog's tables."""
            from pipelines.engine.session import spark_session

            return spark_session(self.settings.spark)

        return reader(self._lake, spark)


def _progress_of(message: Message) -> RepartitionProgress:
    try:
        return written(headers_of(message))
    except ValueError:
        place = message.topic() or "", message.partition() or 0, message.offset() or 0
        raise ForeignMessageError(*place, NEXT_OFFSETS) from None
