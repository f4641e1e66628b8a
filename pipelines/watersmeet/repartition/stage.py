"""The repartitioning of one source, transaction by transaction."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import pyarrow as pa

from watersmeet.core.repartition import (
    InputPartition,
    Lockstep,
    RepartitionProgress,
    repartition_messages,
)
from watersmeet.errors import (
    DataLossError,
    FencedError,
    KafkaTransientError,
    TransactionTimeoutError,
    WatersmeetError,
)
from watersmeet.kafka.groups import Group
from watersmeet.kafka.publisher import REPARTITION, Publisher, record_publisher
from watersmeet.monitoring.events import LagObserved, Observer, RecordsProcessed, StepDone, ignore
from watersmeet.monitoring.observability import Reporter
from watersmeet.repartition.lake_rules import LakeRules
from watersmeet.repartition.origin_topics import OriginTopics
from watersmeet.repartition.record_reader import RecordReader, Records
from watersmeet.repartition.written_topic import WrittenTopic
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet.repartition")

_LAYER: Final = "repartition"
"""The name of this stage beside the layers."""


@dataclass
class _State:
    """The state of this process, valid as long as nothing fails.

    `written`: how much is written. `offsets`: the next to read, by input. `reading`: the read under
    way.
    """

    written: RepartitionProgress
    offsets: dict[InputPartition, int]
    lockstep: Lockstep
    reading: Future[list[Records]] | None = None


@dataclass
class Repartition:
    """Repartitions the records of one source; one owner at a time, the last to start."""

    settings: Settings
    source: str
    executor: Executor
    """The executor that reads the next records while others are written."""
    reporter: Reporter = field(default_factory=Reporter)
    notify: Observer = ignore
    records: Counter[str] = field(default_factory=Counter)
    """Number of records written, by the topic that they come from."""
    is_done: bool = False
    """True where everything is written that was there at the last check."""
    _state: _State | None = None
    _is_warned: bool = False

    def __post_init__(self) -> None:
        self._origins = OriginTopics(self.settings, self.source)
        self._topic = WrittenTopic(self.settings, self.source)
        self._reader = RecordReader(self.settings, self.source, self.executor)
        self._rules = LakeRules(self.settings, self.source)

    def poll(self) -> None:
        """Record the offsets that Kafka has now, which are written next.

        Raises ConfigurationError if a topic to be read does not exist, TopicChangedError if it was
        replaced.
        """
        is_checked = self._origins.poll()
        if is_checked and self._state is not None and self._topic.was_replaced():
            self._state = None  # only the new topic says how much is written to it
        self.is_done = False

    def advance(self) -> None:
        """Write the next of the records that were there at the last check, in at most one
        transaction.

        Afterwards `is_done` says whether that was all.
        """
        # After a failure, only the topic knows what is written.
        state = self._state or self._recover()
        self._state = None
        for tp, (first, _) in self._origins.bounds.items():
            state.offsets.setdefault(tp, first)
        self._begin_reading(state)
        self._end_reading(state)
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
            self._show(state.written.offsets)

    def _write(self, rows: pa.Table, after: RepartitionProgress) -> None:
        """Send records in one transaction, and say so."""
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
        """Send messages in one transaction; if it takes too long, less is read for the next one."""
        began = time.monotonic()
        size = self._reader.size
        try:
            self._publisher.send(messages)
        except FencedError:
            self._rules.check()  # `evolve` may be the one that fenced
            raise
        except TransactionTimeoutError:
            size.timed_out(size.limit)
            raise
        size.succeeded(time.monotonic() - began, is_full=True)

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
        """Start reading the next records, unless a read is under way.

        Only inputs without waiting records are read.
        """
        waiting = state.lockstep.first_offsets()
        ends = sorted(self._origins.ends.items())
        unread = [
            (tp, since, end)
            for tp, end in ends
            if (since := state.offsets[tp]) < end and tp not in waiting
        ]
        if unread and state.reading is None:
            state.reading = self._reader.start(unread, len(ends))

    def _end_reading(self, state: _State) -> None:
        """Wait for the read under way, if there is one, and add its records.

        Raises what the read has raised.
        """
        reading = state.reading
        state.reading = None
        for rows, reached in self._reader.result(reading) if reading else ():
            state.lockstep.add(rows)
            state.offsets |= reached

    def _recover(self) -> _State:
        """Return the state that the topic tells of, once nobody else can write to it.

        A missing topic is created. Raises DataLossError where Kafka has deleted records that were
        not written, unless that is accepted.
        """
        self._rules.check()  # before anybody is fenced
        self._topic.prepare(self._origins)
        self._publisher.begin()
        self._rules.check()
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

    @cached_property
    def _group(self) -> Group:
        return Group(self.settings.kafka, f"watersmeet-{self.settings.name}-repartition")

    @cached_property
    def _publisher(self) -> Publisher:
        return record_publisher(self.settings, self._topic.name, REPARTITION)
