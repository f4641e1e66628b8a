"""The topics of a repartition: those that records come from, and the one that they are written to.

The latter itself says how much of the others it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import pyarrow as pa
from confluent_kafka import Message

from watersmeet.core.columns import times_ms
from watersmeet.core.dead_letters import NEXT_OFFSETS
from watersmeet.core.headers import Headers
from watersmeet.core.reading import KAFKA
from watersmeet.core.repartition import (
    ORIGIN,
    InputPartition,
    Origin,
    RepartitionProgress,
    is_redriven,
    origin_of,
    written,
)
from watersmeet.errors import ConfigurationError, ForeignMessageError, TopicChangedError
from watersmeet.kafka.cluster import Cluster, ExistingTopic, copy_settings
from watersmeet.kafka.reading import Range, headers_of, read_range, read_tails
from watersmeet.settings import Settings

_T = TypeVar("_T")

CHECK_EVERY_S: Final = 5.0
"""Interval at which the topics are checked for a new identity or new partitions."""


@dataclass
class OriginTopics:
    """The topics that the records of one source come from, at the last `poll`."""

    settings: Settings
    source: str
    bounds: Mapping[InputPartition, tuple[int, int]] = field(default_factory=dict)
    """The first offset that Kafka has and the exclusive end offset, by input."""
    identities: Mapping[str, str] = field(default_factory=dict)
    """Each topic's name together with Kafka's own identity of it, by the name."""
    _counts: Mapping[str, int] = field(default_factory=dict)
    _checked_at_s: float | None = None

    def __post_init__(self) -> None:
        self.names = self.settings.repartitioned[self.source].from_topics
        self._cluster = Cluster(self.settings.kafka)
        self._missing: Collection[str] = self.names
        """The topics that the last answer did not have; all before the first one."""

    @property
    def ends(self) -> dict[InputPartition, int]:
        """The exclusive end offset by input."""
        return {tp: end for tp, (_, end) in self.bounds.items()}

    def poll(self) -> bool:
        """Ask for the bounds, and now and then for the topics themselves (then return True).

        Raises ConfigurationError for one that does not exist, or is missing twice in a row, and
        TopicChangedError for one that was replaced.
        """
        now = time.monotonic()
        is_due = self._checked_at_s is None or now - self._checked_at_s > CHECK_EVERY_S
        if is_due:
            self._check()
            self._checked_at_s = now
        self.bounds = {
            InputPartition(topic, p): bounds
            for topic in self.names
            for p, bounds in self._cluster.bounds(topic, self._counts[topic]).items()
        }
        return is_due

    def _check(self) -> None:
        existing = self._cluster.existing(self.names)
        missing = [name for name in self.names if name not in existing]
        if nowhere := [name for name in missing if name in self._missing]:
            raise ConfigurationError(
                f"there is no topic {nowhere[0]} at {self.settings.kafka.bootstrap_servers}",
                where=f"sources.{self.source}.repartition.from",
                fix="create it, or name the one that has the records",
            )
        self._missing = missing
        if missing:  # a broker that has just come back may not know of it yet
            return
        self._counts = {name: topic.partitions for name, topic in existing.items()}
        self._check_identities(existing)
        self.identities = {name: topic.identified for name, topic in existing.items()}

    def check_read(self, _: object) -> None:
        """Raise TopicChangedError where a topic was replaced since the last `poll`: what was read
        since may be the new one's, from the offset on at which the old one was.
        """
        self._check_identities(self._cluster.existing(self.names))

    def _check_identities(self, existing: Mapping[str, ExistingTopic]) -> None:
        for name, topic in existing.items():
            if self.identities.get(name, topic.identified) != topic.identified:
                raise TopicChangedError(
                    f"{name} was deleted and made again while it was being repartitioned"
                )

    def backlog(self, offsets: Mapping[InputPartition, int]) -> dict[str, dict[int, int]]:
        """Return how many offsets lie between these and the ends, by topic and partition."""
        backlog: dict[str, dict[int, int]] = {topic: {} for topic in self.names}
        for tp, (first, end) in self.bounds.items():
            backlog[tp.topic][tp.partition] = max(0, end - max(first, offsets[tp]))
        return backlog


class WrittenTopic:
    """The topic of one source, which its records are written to."""

    def __init__(self, settings: Settings, source: str) -> None:
        [self.name] = settings.sources[source].topics
        self.partitions = settings.repartitioned[source].partitions
        self._settings = settings
        self._source = source
        self._cluster = Cluster(settings.kafka)
        self._identified = ""

    def prepare(self, origins: OriginTopics) -> None:
        """Create the topic if it is missing; remember its identity. Raises ConfigurationError."""
        counts = self._cluster.partition_counts([self.name])
        if self.name not in counts:
            topic_settings = {**copy_settings(self._cluster, origins.names), "retention.ms": "-1"}
            self._cluster.create_topic(self.name, self.partitions, topic_settings)
        elif counts[self.name] != self.partitions:
            raise ConfigurationError(
                f"{self.name} has {counts[self.name]} partitions",
                where=f"sources.{self._source}.repartition.partitions",
                fix="name that number, or another topic and another lake for another number",
            )
        self._identified = self._cluster.identified(self.name)

    def was_replaced(self) -> bool:
        """Return True if the topic is no longer the one that was prepared."""
        return self._cluster.identified(self.name) != self._identified

    def ends(self) -> dict[int, int]:
        """Return the exclusive end offset by partition."""
        bounds = self._cluster.settled_bounds(self.name, self.partitions)
        return {p: end for p, (_, end) in bounds.items()}

    def progress(self, origins: OriginTopics) -> RepartitionProgress:
        """Return the largest progress that a last message carries: what is written only grows.

        Every transaction must have ended, also that of a redrive. Raises TopicChangedError, for a
        foreign message ForeignMessageError, and for records of other topics ConfigurationError.
        """
        bounds = self._cluster.settled_bounds(self.name, self.partitions)
        tails = read_tails(
            self._settings.kafka,
            self.name,
            self.partitions,
            bounds,
            lambda message: not is_redriven(headers_of(message)),
        )
        for p, (first, _) in bounds.items():
            if p not in tails and first > 0:
                raise TopicChangedError(
                    f"{self.name}[{p}] ends at offset {bounds[p][1]} and holds no message "
                    "any more, so that nobody knows how much of "
                    f"{' and '.join(origins.names)} was written: its retention must keep the "
                    "last messages",
                    fix="name another topic and another lake",
                )
        progress = [_parsed(message, written, NEXT_OFFSETS) for message in tails.values()]
        copies = [(_parsed(message, origin_of, ORIGIN), message) for message in tails.values()]
        for topic, identified in {item for each in progress for item in each.topics.items()}:
            identity = origins.identities.get(topic)
            if identified != identity and not (
                identity and self._has_the_records(origins, topic, copies)
            ):
                raise ConfigurationError(
                    f"{self.name} was written from {identified}, and `from` names "
                    f"{identity or ' and '.join(origins.names)}",
                    where=f"sources.{self._source}.repartition.from",
                    fix="name that topic, too, or write to another one with another lake",
                )
        return max(
            progress,
            key=lambda each: sum(each.offsets.values()),
            default=RepartitionProgress(origins.identities, {}, {}),
        )

    def _has_the_records(
        self, origins: OriginTopics, topic: str, copies: Sequence[tuple[Origin, Message]]
    ) -> bool:
        # So it is after a move of the cluster with its offsets: at least one record of which these
        # messages are copies is there, and none differs.
        are_there = {self._is_copy(origins, *each) for each in copies if each[0].topic == topic}
        return True in are_there and False not in are_there

    def _is_copy(self, origins: OriginTopics, origin: Origin, message: Message) -> bool | None:
        # None where Kafka has deleted the record.
        first, end = origins.bounds.get(InputPartition(origin.topic, origin.partition), (0, 0))
        if origin.offset < first:
            return None
        if origin.offset >= end:
            return False
        there = read_range(self._settings.kafka, Range(*origin, origin.offset + 1))
        rows = pa.Table.from_batches(there, KAFKA)
        sent = message.timestamp()[1]
        # As `repartition_messages` writes them.
        kafka_times = times_ms(rows["kafka_timestamp"]).tolist()
        times = [sent if kafka_time < 0 else max(1, kafka_time) for kafka_time in kafka_times]
        records = zip(rows["key"].to_pylist(), rows["value"].to_pylist(), times, strict=True)
        return (message.key(), message.value(), sent) in records


def _parsed(message: Message, parse: Callable[[Headers], _T], header: str) -> _T:
    try:
        return parse(headers_of(message))
    except ValueError:
        place = message.topic() or "", message.partition() or 0, message.offset() or 0
        raise ForeignMessageError(*place, header) from None
