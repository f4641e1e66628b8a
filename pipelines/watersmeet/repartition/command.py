"""The command `repartition`: all sources whose topics are repartitioned, in turns, each transaction
by transaction.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import pyarrow as pa

from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.repartition import (
    ROUTED,
    InputPartition,
    Lockstep,
    RepartitionProgress,
    assign_partitions,
    repartition_messages,
)
from watersmeet.engine.choice import lake_reader
from watersmeet.engine.polling import RunningThread
from watersmeet.errors import (
    ConfigurationError,
    DataLossError,
    FencedError,
    TransactionTimeoutError,
    unknown_schema_of,
)
from watersmeet.kafka.groups import Groups
from watersmeet.kafka.options import check_options
from watersmeet.kafka.publisher import REPARTITION, Publisher, record_publisher
from watersmeet.kafka.reading import Range
from watersmeet.kafka.registry import Registry, rules_of
from watersmeet.kafka.workers import read_decoded
from watersmeet.lake.history import read_history
from watersmeet.lake.identity import check_rules
from watersmeet.lake.lease import EVOLVE, check_not_changing
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader
from watersmeet.monitoring.events import (
    LagObserved,
    Observer,
    RecordsProcessed,
    StepDone,
    all_of,
)
from watersmeet.monitoring.observability import Reporter
from watersmeet.repartition.topics import OriginTopics, WrittenTopic
from watersmeet.running.runner import Runner
from watersmeet.running.transaction_size import TransactionSize
from watersmeet.settings import Settings

EVERY_S: Final = 0.2
"""Interval at which Kafka is checked for new records."""

_LAYER: Final = "repartition"
"""The name of this stage beside the layers."""

READ_BYTES: Final = 80 * 1024 * 1024
"""Approximate size of the records that are read at a time, while as many are written."""

_SHARES: Final = 1000
"""Number of equal shares that the amount read at a time is divided into."""

Records: TypeAlias = tuple[pa.Table, dict[InputPartition, int]]
"""Records of one topic, and the offset at which reading them ended, by input."""


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

    Return a row for each source and topic that is read: `records` that were written, and by
    partition the offsets that were `read` and the `ends` of the source's own topic. Trouble with
    Kafka is waited out. Raises WatersmeetError.
    """
    longest_ms = _check(settings)
    notify = all_of(observers)
    runner = Runner(reporter, stopping, patience_s + longest_ms / 1000, notify=notify)
    groups = Groups(settings)
    with ThreadPoolExecutor(1) as executor, ExitStack() as stack:
        show = partial(groups.note, "repartition")
        stages = [
            _Stage(settings, name, executor, reporter, notify, show)
            for name in settings.repartitioned
        ]
        stack.callback(RunningThread(type(groups).__name__, groups.follow).stop)
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


def _check(settings: Settings) -> int:
    # Returns the longest time (ms) that a source waits for a schema that its registry lacks.
    if problems := check_options(settings.kafka):
        raise ConfigurationError(*problems[0])
    for name, registry in settings.registries.items():
        if name in settings.repartitioned:
            Registry(registry).check_options()
    if not settings.repartitioned:
        raise ConfigurationError(
            "none of them is repartitioned",
            where="sources",
            fix="add `repartition: {from: ..., partitions: ...}` to one",
        )
    return max(settings.sources[name].unknown_after_ms or 0 for name in settings.repartitioned)


@dataclass
class _State:
    """The state of this process, valid as long as nothing fails.

    `offsets`: the next to read, by input. `reading`: the read under way.
    """

    written: RepartitionProgress
    offsets: dict[InputPartition, int]
    lockstep: Lockstep
    reading: Future[list[Records]] | None = None


@dataclass
class _Stage:
    """Repartitions the records of one source; one owner at a time, the last to start."""

    settings: Settings
    source: str
    executor: Executor
    """The executor that reads the next records while others are written."""
    reporter: Reporter
    notify: Observer
    show: Callable[[Mapping[TopicPartition, int]], None]
    """Called with the next offsets once a transaction has written what comes before them."""
    records: Counter[str] = field(default_factory=Counter)
    """Number of records written, by the topic that they come from."""
    is_done: bool = False
    """True where everything is written that was there at the last check."""
    _size: TransactionSize = field(default_factory=lambda: TransactionSize(_SHARES, _SHARES))
    """How much a transaction can hold: as much is read at a time."""
    _given_up: set[int] = field(default_factory=set)
    """Ids of schemas that are no longer waited for."""
    _waiting_since: float | None = None
    """Time (monotonic) since which a schema is waited for that the registry does not have."""
    _state: _State | None = None

    def __post_init__(self) -> None:
        self._origins = OriginTopics(self.settings, self.source)
        self._topic = WrittenTopic(self.settings, self.source)

    def poll(self) -> None:
        """Record the offsets that Kafka has now, which are written next.

        Raises ConfigurationError if a topic does not exist, TopicChangedError if it was replaced.
        """
        is_checked = self._origins.poll()
        if is_checked and self._state is not None and self._topic.was_replaced():
            self._state = None  # only the new topic says how much is written to it
        self.is_done = False

    def advance(self) -> None:
        """Write the next records that were there at the last check, in one transaction at most.

        Afterwards `is_done` says whether that was all.
        """
        # After a failure, only the topic knows what is written.
        state = (self._state if self._publisher.has_begun else None) or self._recover()
        self._state = None
        for tp, (first, _) in self._origins.bounds.items():
            state.offsets.setdefault(tp, first)
        self._begin_reading(state)
        reading, state.reading = state.reading, None
        for rows, reached in self._result(reading) if reading else ():
            state.lockstep.add(rows)
            state.offsets |= reached
        unread = [tp for tp, end in self._origins.ends.items() if state.offsets[tp] < end]
        rows, positions = state.lockstep.take(unread)
        state.written = RepartitionProgress(
            self._origins.identities,
            state.offsets | state.lockstep.first_offsets(),
            {**state.written.positions, **positions},
        )
        self._begin_reading(state)
        if rows.num_rows:
            self._write(rows, state.written)
        self.is_done = not rows.num_rows and not unread
        self._state = state
        for topic, records in self._origins.backlog(state.written.offsets).items():
            self.notify(LagObserved(_LAYER, topic, records))
            self.reporter.left(topic, sum(records.values()))
        if rows.num_rows:
            origin = partial(InputId, self.source)
            offsets = state.written.offsets.items()
            self.show({TopicPartition(origin(t), p): offset for (t, p), offset in offsets})

    def _write(self, rows: pa.Table, after: RepartitionProgress) -> None:
        began = time.monotonic()
        self._send(repartition_messages(rows, self._topic.partitions, after))
        counts = rows["topic"].value_counts()
        topics, records = (counts.field(i).to_pylist() for i in (0, 1))
        self.records.update(dict(zip(topics, records, strict=True)))
        self.notify(StepDone(_LAYER, "write", time.monotonic() - began))
        self.notify(RecordsProcessed(_LAYER, {self._topic.name: {("copied", ""): rows.num_rows}}))
        self.reporter.notify(
            self.source,
            f"{rows.num_rows} records written to {self._topic.name}",
            records=rows.num_rows,
            topic=self._topic.name,
        )

    def _send(self, messages: Iterator[pa.Table]) -> None:
        began = time.monotonic()
        size = self._size
        try:
            self._publisher.send(messages, self._origins.check_read)
        except FencedError:
            self._check_rules()  # `evolve` may be the one that fenced
            raise
        except TransactionTimeoutError:
            size.timed_out(size.limit)
            raise
        size.succeeded(time.monotonic() - began, is_full=True)

    def described(self) -> Iterator[dict[str, Any]]:
        """Yield the command's answer for this source: a row for each topic that is read."""
        ends = {}
        offsets = dict[InputPartition, int]()
        if self._state is not None:  # else it was stopped before anything was known
            ends = self._topic.ends()
            offsets = dict(sorted(self._state.written.offsets.items()))
        for topic in self._origins.names:
            read = {tp.partition: offset for tp, offset in offsets.items() if tp.topic == topic}
            yield {
                "source": self.source,
                "from": topic,
                "topic": self._topic.name,
                "records": self.records[topic],
                "read": read,
                "ends": ends,
            }

    def _begin_reading(self, state: _State) -> None:
        waiting = state.lockstep.first_offsets()
        ends = sorted(self._origins.ends.items())
        unread = [
            (tp, since, end)
            for tp, end in ends
            if (since := state.offsets[tp]) < end and tp not in waiting
        ]
        if unread and state.reading is None:
            # Some of all inputs, in equal shares.
            offsets = self.settings.kafka.max_offsets_per_batch * self._size.limit // _SHARES
            share = max(1, offsets // len(ends))
            ranges = [Range(*tp, since, min(since + share, end)) for tp, since, end in unread]
            state.reading = self.executor.submit(self._read, ranges, len(ends))

    def _read(self, ranges: Sequence[Range], inputs: int) -> list[Records]:
        rules = rules_of(self.settings, self.source, self._given_up)
        decode = partial(assign_partitions, rules=rules)
        max_bytes = READ_BYTES * self._size.limit // _SHARES
        records = []
        for topic in dict.fromkeys(offset_range.topic for offset_range in ranges):
            topic_ranges = [offset_range for offset_range in ranges if offset_range.topic == topic]
            share = max_bytes * len(topic_ranges) // inputs
            rows, reached = read_decoded(self.settings.kafka, topic_ranges, decode, ROUTED, share)
            ends = {InputPartition(topic, p): offset for p, offset in reached.items()}
            records.append((rows, ends))
        return records

    def _result(self, reading: Future[list[Records]]) -> list[Records]:
        # A schema that the registry lacks is given up once `registry.unknown_after` has passed.
        try:
            records = reading.result()
        except Exception as failure:
            after_ms = self.settings.sources[self.source].unknown_after_ms
            schema_id = unknown_schema_of(failure)
            if after_ms is not None and schema_id is not None:
                now = time.monotonic()
                self._waiting_since = self._waiting_since or now
                if now - self._waiting_since >= after_ms / 1000:
                    self._given_up.add(schema_id)
            raise
        self._waiting_since = None
        return records

    def _recover(self) -> _State:
        self._check_rules()  # before anybody is fenced
        self._topic.prepare(self._origins)
        self._publisher.begin()
        self._check_rules()
        progress = self._topic.progress(self._origins)
        deleted: dict[str, dict[int, tuple[int, int]]] = {}
        offsets = dict(progress.offsets)
        for tp, (first, _) in self._origins.bounds.items():
            if (offset := offsets.get(tp, first)) < first:
                deleted.setdefault(tp.topic, {})[tp.partition] = offset, first
                offsets[tp] = first
        if deleted and self.settings.kafka.on_data_loss == "stop":
            topic = next(topic for topic in self._origins.names if topic in deleted)
            raise DataLossError(self.source, topic, deleted[topic])
        return _State(progress, offsets, Lockstep(self._origins.names, dict(progress.positions)))

    def _check_rules(self) -> None:
        # Raises ConfigurationError for other rules in the lake, LeaseTakenError while they change.
        check_not_changing(self._lake, Lake(self.settings), EVOLVE)
        check_rules(read_history(self._lake, self.settings).epochs, self.settings, self.source)

    @cached_property
    def _lake(self) -> TableReader:
        return lake_reader(self.settings)

    @cached_property
    def _publisher(self) -> Publisher:
        return record_publisher(self.settings, self._topic.name, REPARTITION)
