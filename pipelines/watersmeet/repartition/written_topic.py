"""The topic that is written, which itself says how much of the other topics it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
from confluent_kafka import Message

from watersmeet.core.columns import times_ms
from watersmeet.core.dead_letters import NEXT_OFFSETS
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
from watersmeet.kafka.cluster import Cluster, copy_settings
from watersmeet.kafka.reading import Range, headers_of, read_range, read_tails
from watersmeet.repartition.origin_topics import OriginTopics
from watersmeet.settings import Settings


class _Tail(NamedTuple):
    """A last message, which says how much was written."""

    message: Message
    origin: Origin
    progress: RepartitionProgress


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
        """Create the topic where it is missing, and remember its identity.

        Raises ConfigurationError if it has another number of partitions.
        """
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

        Every transaction must have ended, including that of a redrive: nothing behind an open one
        can be read. Raises TopicChangedError where a partition may have said more,
        ForeignMessageError for a message of somebody else, ConfigurationError where the records
        come from other topics.
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
        parsed = [_parsed(message) for message in tails.values()]
        self._check_origins(origins, parsed)
        return max(
            (tail.progress for tail in parsed),
            key=lambda progress: sum(progress.offsets.values()),
            default=RepartitionProgress(origins.identities, {}, {}),
        )

    def _check_origins(self, origins: OriginTopics, tails: Sequence[_Tail]) -> None:
        """Raise ConfigurationError if the records come from another topic than is read now."""
        identities = {item for tail in tails for item in tail.progress.topics.items()}
        for topic, identified in identities:
            identity = origins.identities.get(topic)
            if identified != identity and not (
                identity and self._has_the_records(origins, topic, tails)
            ):
                raise ConfigurationError(
                    f"{self.name} was written from {identified}, and `from` names "
                    f"{identity or ' and '.join(origins.names)}",
                    where=f"sources.{self._source}.repartition.from",
                    fix="name that topic, too, or write to another one with another lake",
                )

    def _has_the_records(self, origins: OriginTopics, topic: str, tails: Sequence[_Tail]) -> bool:
        """Return True if a topic to be read has the records of which these messages are copies.

        It has them after a move of the cluster with its offsets. At least one record must be there,
        and none may differ.
        """
        copied = [tail for tail in tails if tail.origin.topic == topic]
        return bool(copied) and all(self._is_copy(origins, tail) for tail in copied)

    def _is_copy(self, origins: OriginTopics, tail: _Tail) -> bool:
        origin = tail.origin
        first, end = origins.bounds.get(InputPartition(origin.topic, origin.partition), (0, 0))
        if not first <= origin.offset < end:
            return False
        there = read_range(self._settings.kafka, Range(*origin, origin.offset + 1))
        rows = pa.Table.from_batches(there, KAFKA)
        sent = tail.message.timestamp()[1]
        # As `repartition_messages` writes them.
        times = [
            sent if time < 0 else max(1, time)
            for time in times_ms(rows["kafka_timestamp"]).tolist()
        ]
        records = zip(rows["key"].to_pylist(), rows["value"].to_pylist(), times, strict=True)
        return (tail.message.key(), tail.message.value(), sent) in records


def _parsed(message: Message) -> _Tail:
    """Return a message with what its headers say. Raises ForeignMessageError."""
    headers = headers_of(message)
    place = message.topic() or "", message.partition() or 0, message.offset() or 0
    try:
        progress = written(headers)
    except ValueError:
        raise ForeignMessageError(*place, NEXT_OFFSETS) from None
    try:
        return _Tail(message, origin_of(headers), progress)
    except ValueError:
        raise ForeignMessageError(*place, ORIGIN) from None
