"""Questions to a Kafka cluster about its topics, and the requirements for topics to be merged and
published to.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from confluent_kafka import (
    OFFSET_INVALID,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import ConfigResource, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from watersmeet.errors import (
    ConfigurationError,
    KafkaAccessError,
    KafkaRequestError,
    KafkaTransientError,
    OpenTransactionError,
    TopicChangedError,
    WatersmeetError,
    raise_first,
)
from watersmeet.kafka.failures import failure, is_passing
from watersmeet.kafka.options import ListeningAdmin
from watersmeet.settings import KafkaSettings, Settings

TIMEOUT_S = 15.0
"""Seconds that a broker may take to answer a question before it counts as unreachable."""

SETTLING_S = 15.0
"""Seconds that an open transaction of another producer may take to end."""

BESIDE_VALUES = 1024 * 1024
"""Number of bytes that are granted to key and headers."""

LARGEST_RECORD = 1_000_000_000 - BESIDE_VALUES
"""Size in bytes of the largest record that librdkafka sends, beside `BESIDE_VALUES`."""

AFTER_MAX = "message.timestamp.after.max.ms"
"""The topic setting that bounds how far ahead of a broker's clock a producer may set a
timestamp.
"""

_TRANSACTION_LOG = "__transaction_state"
_REPLICAS = "transaction.state.log.replication.factor"

SMALLER_MESSAGES = ", and make publish.max_bytes as much smaller as max.message.bytes has to be"
"""The remedy where the sink may not take messages as large as they may be."""

_UNBOUNDED = str(2**63 - 1)
_LOOK_S = 0.05
_FIRST_ATTEMPT = 0.2
_EARLIEST: Any = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
_LATEST: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
_Answer = TypeVar("_Answer")


class ExistingTopic(NamedTuple):
    """A topic that exists; `topic_id`: another one after it was deleted and created again."""

    name: str
    partitions: int
    topic_id: str

    @property
    def identified(self) -> str:
        """The name with Kafka's own identity of it."""
        return f"{self.name} ({self.topic_id})"


class Cluster:
    """Questions to one Kafka cluster.

    Each is answered within `timeout_s`. Where a question is about transactions of others, these
    first get `settling_s` to end.

    Every method raises:

    - KafkaTransientError where no broker answers in time;
    - KafkaAccessError, at once, where the login, a certificate or a permission is refused;
    - TopicChangedError for a topic that does not exist (unless the method says otherwise);
    - KafkaRequestError for any other refusal.
    """

    def __init__(
        self, kafka: KafkaSettings, timeout_s: float | None = None, settling_s: float | None = None
    ) -> None:
        self.kafka = kafka
        self.timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
        self.settling_s = SETTLING_S if settling_s is None else settling_s
        self._is_used = False
        """True once the client has been asked something."""

    def existing(self, topics: Iterable[str]) -> dict[str, ExistingTopic]:
        """Return those of these topics that exist, as one answer has them."""
        existing = {}
        for topic, description in self._described(topics).items():
            id = description.topic_id
            topic_id = f"{id.get_most_significant_bits():x}.{id.get_least_significant_bits():x}"
            existing[topic] = ExistingTopic(topic, len(description.partitions), topic_id)
        return existing

    def partition_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the number of partitions of each of these topics that exists."""
        return {name: topic.partitions for name, topic in self.existing(topics).items()}

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Return Kafka's own identity of each of these topics that exists: another one after the
        topic was deleted and created again.
        """
        return {name: topic.topic_id for name, topic in self.existing(topics).items()}

    def identified(self, topic: str) -> str:
        """Return a topic's name with Kafka's own identity of it (`missing` where there is none).

        No other topic is called so, before or after it.
        """
        existing = self.existing([topic]).get(topic)
        return f"{topic} (missing)" if existing is None else existing.identified

    def _described(self, topics: Iterable[str], timeout_s: float | None = None) -> dict[str, Any]:
        futures = self._admin.describe_topics(
            TopicCollection(sorted(set(topics))), request_timeout=timeout_s or self.timeout_s
        )
        descriptions = {}
        for topic, future in futures.items():
            with suppress(TopicChangedError):
                descriptions[topic] = self._answer(future, "DESCRIBE", topic)
        return descriptions

    def topic_settings(self, topic: str) -> dict[str, str]:
        """Return a topic's effective settings."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        [future] = self._admin.describe_configs([resource], request_timeout=self.timeout_s).values()
        entries = self._answer(future, "DESCRIBE_CONFIGS", topic)
        return {name: entry.value for name, entry in entries.items()}

    def check_transactions(self) -> None:
        """Raise KafkaRequestError where no transaction can begin: the log that Kafka keeps of them
        is to have more replicas than there are brokers.

        Where the cluster does not show its settings, nothing is raised.
        """
        with suppress(KafkaAccessError):
            if _TRANSACTION_LOG in self._described([_TRANSACTION_LOG]):
                return
            description = self._admin.describe_cluster(request_timeout=self.timeout_s)
            cluster = self._answer(description, "DESCRIBE", "the cluster")
            brokers = [node.id for node in cluster.nodes or ()]
            resource = ConfigResource(ConfigResource.Type.BROKER, str(brokers[0]))
            futures = self._admin.describe_configs([resource], request_timeout=self.timeout_s)
            [future] = futures.values()
            settings = self._answer(future, "DESCRIBE_CONFIGS", "the brokers")
            replicas = int(settings[_REPLICAS].value)
            if replicas > len(brokers):
                has = "1 broker" if len(brokers) == 1 else f"{len(brokers)} brokers"
                raise KafkaRequestError(
                    f"Kafka at {self.kafka.bootstrap_servers} can begin no transaction: its "
                    f"log of them is to have {_REPLICAS}={replicas}, and the cluster has "
                    f"{has}",
                    fix=(
                        f"set that, and transaction.state.log.min.isr, to {len(brokers)} or less "
                        "on the brokers, or start more of them"
                    ),
                )

    def create_topic(
        self, topic: str, partitions: int, settings: Mapping[str, str], way_out: str = ""
    ) -> None:
        """Create the topic and return once it can be seen; one that exists already, or comes to
        exist meanwhile, is kept.

        `way_out`: what else helps where Kafka does not take the settings, as a managed one may not.
        """
        new = NewTopic(topic, num_partitions=partitions, config=dict(settings))
        [future] = self._admin.create_topics([new], request_timeout=self.timeout_s).values()
        try:
            self._answer(future, "CREATE", topic)
        except KafkaRequestError as error:
            if topic not in self._described([topic]):
                listed = ", ".join(f"{name}={value}" for name, value in settings.items())
                by_hand = (
                    f"create it yourself, with {partitions} partitions and as far as they are "
                    f"allowed {listed}"
                )
                raise KafkaRequestError(str(error), fix=f"{by_hand}{way_out}") from None
        deadline = time.monotonic() + self.timeout_s
        while topic not in self._described([topic]) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def bounds(self, topic: str, partitions: int) -> dict[int, tuple[int, int]]:
        """Return, by partition, the first offset that Kafka still has and the exclusive end offset
        of what is committed.
        """
        return self.bounds_of(topic, range(partitions))

    def bounds_of(self, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Return `bounds` of some partitions, with two requests, however many partitions
        there are.
        """
        numbers = list(partitions)
        starts = self._offsets(topic, numbers, _EARLIEST)
        ends = self._offsets(topic, numbers, _LATEST)
        return {p: (starts[p], ends[p]) for p in numbers}

    def ends(self, topic: str, partitions: int) -> dict[int, int]:
        """Return, by partition, the exclusive end offset of what is committed."""
        return self._offsets(topic, range(partitions), _LATEST)

    def settled_bounds(self, topic: str, partitions: int) -> dict[int, tuple[int, int]]:
        """Return `bounds` once every transaction that was open at the time of the call has ended.

        Until then, committed messages behind the first message of an open transaction cannot be
        read. Raises OpenTransactionError where one is still open after `settling_s`.
        """
        ends = self._high_watermarks(topic, range(partitions))
        deadline = time.monotonic() + self.settling_s
        while True:
            bounds = self.bounds(topic, partitions)
            behind = [p for p, end in ends.items() if bounds[p][1] < end]
            if not behind:
                return bounds
            if time.monotonic() > deadline:
                raise OpenTransactionError(topic, behind[0], bounds[behind[0]][1])
            time.sleep(_LOOK_S)

    def bounds_and_unsettled(
        self, topic: str, partitions: Iterable[int]
    ) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
        """Return `bounds_of` some partitions and, by partition with an open transaction, how many
        offsets lie behind its beginning.
        """
        ends = self._high_watermarks(topic, partitions)
        bounds = self.bounds_of(topic, ends)
        return bounds, {p: end - bounds[p][1] for p, end in ends.items() if bounds[p][1] < end}

    def _high_watermarks(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Return, by partition, the exclusive end offset of everything, committed or not.

        It is asked for before the end of what is committed: where that is smaller, a transaction is
        open.
        """
        return self._offsets(topic, partitions, _LATEST, IsolationLevel.READ_UNCOMMITTED)

    def offsets_at(self, topic: str, partitions: int, timestamp_ms: int) -> dict[int, int]:
        """Return, by partition, the first offset with this Kafka timestamp or a later one; where
        there is none, the end offset.
        """
        offsets = self._offsets(topic, range(partitions), OffsetSpec.for_timestamp(timestamp_ms))
        unknown = [p for p, offset in offsets.items() if offset < 0]
        return {**offsets, **(self._offsets(topic, unknown, _LATEST) if unknown else {})}

    def _offsets(
        self,
        topic: str,
        partitions: Iterable[int],
        spec: Any,
        isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
    ) -> dict[int, int]:
        """Return an offset for each partition; ask again until our timeout, the first time early.

        A partition that was just created has no leader yet, and librdkafka asks a dead one until
        its own timeout. A new client is asked for the topic first. Otherwise its request for the
        leaders is lost now and then, with the bootstrap connection, which librdkafka drops for one
        by broker id. On a busy machine an answer now and then has no offset, and no error either.
        """
        deadline = time.monotonic() + self.timeout_s
        specs = {TopicPartition(topic, p): spec for p in partitions}
        limit_s = self.timeout_s * _FIRST_ATTEMPT
        while True:
            remaining_s = max(deadline - time.monotonic(), _LOOK_S)
            attempt_s = min(remaining_s, limit_s)
            try:
                if not self._is_used:
                    self._described([topic], attempt_s)
                futures = self._admin.list_offsets(
                    specs, isolation_level=isolation, request_timeout=attempt_s
                )
                offsets = {
                    tp.partition: self._answer(future, "DESCRIBE", topic).offset
                    for tp, future in futures.items()
                }
                if OFFSET_INVALID not in offsets.values():
                    return offsets
                unknown = KafkaError(KafkaError.OFFSET_NOT_AVAILABLE)
                raise self._failure(unknown, "DESCRIBE", f"topic {topic}")
            except KafkaTransientError:
                if time.monotonic() > deadline - _LOOK_S:
                    raise
            time.sleep(_LOOK_S)
            limit_s = self.timeout_s  # a broker that is merely slow gets the time

    @cached_property
    def _admin(self) -> ListeningAdmin:
        return ListeningAdmin(self.kafka)

    def _answer(self, future: Future[_Answer], permission: str, topic: str) -> _Answer:
        """Return the answer to a request; stop waiting as soon as Kafka refuses the
        client itself.
        """
        if self._is_used:
            # Errors from before this request do not count. A new client is not polled for them: it
            # reports only once that there is no token.
            self._admin.poll(0)
        self._is_used = True
        since = time.monotonic()
        errors = self._admin.errors
        resource = f"topic {topic}"
        while not wait([future], _LOOK_S).done:
            self._admin.poll(0)
            # Librdkafka's own timeout comes first.
            errors.check(since, self.timeout_s + 1, permission, resource)
        try:
            return future.result()
        except KafkaException as error:
            reason = error.args[0]
        if reason.code() == KafkaError._TIMED_OUT:
            self._admin.poll(0)
            reason = errors.last(since) or reason
        # No partition has a leader: a description of the topic says why.
        if reason.code() == KafkaError._NOENT:
            is_missing = topic not in self._described([topic])
            reason = KafkaError(
                KafkaError.UNKNOWN_TOPIC_OR_PART if is_missing else KafkaError.LEADER_NOT_AVAILABLE
            )
        raise self._failure(reason, permission, resource)

    def _failure(self, reason: KafkaError, permission: str, resource: str) -> WatersmeetError:
        """Return the error of a request; where it may pass, the next request makes another client.

        A client may wait without end for a broker that is gone, or ask in the name of a leader that
        is one no more.
        """
        if is_passing(reason):
            self._is_used = False
            del self._admin
        return failure(self.kafka, reason, permission, resource)


def co_partitioned(settings: Settings, counts: Mapping[str, int]) -> int:
    """Return the number of partitions that all sources share, and also the topics that are written
    to, where they exist.

    `counts`: by topic, as `Cluster.partition_counts` returns them. Raises ConfigurationError where
    a source is missing or a number differs.
    """
    raise_first(unpartitioned(settings, counts))
    return counts[settings.topics[0]]


def unpartitioned(settings: Settings, counts: Mapping[str, int]) -> Iterator[ConfigurationError]:
    """Yield an error for each topic that `co_partitioned` does not take."""
    for source, topic in settings.inputs:
        repartition = settings.sources[source].repartition
        if topic not in counts:
            how = "create it, with as many partitions as the other sources have"
            if repartition is not None:
                how = "`watersmeet repartition` creates it: start that first"
            yield ConfigurationError(
                f"there is no topic {topic} at {settings.kafka.bootstrap_servers}",
                f"sources.{source}.topic",
                how,
            )
        elif repartition is not None and counts[topic] != repartition.partitions:
            yield ConfigurationError(
                f"{topic} has {counts[topic]} partitions",
                f"sources.{source}.repartition.partitions",
                "name that number, or another topic and another lake for another number",
            )
    source_counts = {
        n: counts[i.topic] for i, n in settings.input_names.items() if i.topic in counts
    }
    if len(set(source_counts.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in source_counts.items())
        yield ConfigurationError(
            f"the topics are not co-partitioned ({listed} partitions)",
            "sources",
            "give all of them the same number, since a key must be in the same partition of "
            "every source",
        )
    partitions = next(iter(source_counts.values()), 0)
    for field, topic in written_topics(settings).items():
        if source_counts and counts.get(topic, partitions) != partitions:
            yield ConfigurationError(
                f"{topic} has {counts[topic]} partitions and the sources have {partitions}",
                f"publish.{field}",
                "give it the same number, since a message goes to the partition of its records",
            )


def topics_of(settings: Settings) -> list[str]:
    """Return the topics of all sources and those that are written to: `co_partitioned` needs their
    numbers of partitions.
    """
    return [*settings.topics, *written_topics(settings).values()]


def written_topics(settings: Settings) -> dict[str, str]:
    """Return the topics that gold writes to, by their field in `publish`: the sink, and those of
    dead letters and of corrections.
    """
    return {"topic": settings.publish.topic, **settings.publish.topics_beside_the_sink}


def after_max(settings: Settings) -> str:
    """Return how far after the broker's clock a topic should let timestamps lie (ms), where they
    vouch for event times.
    """
    return str(max(settings.merge.max_future_ms, 3_600_000))


def sink_settings(settings: Settings) -> dict[str, str]:
    """Return the topic settings that the sink needs.

    - Its messages carry event time: retention by age would delete a backfill, so there is none
      unless the configuration sets one.
    - A backlog may be published ahead of the broker's clock by `max_future`.
    - Headers and key come on top of the value.
    """
    return {
        "cleanup.policy": "delete",
        "retention.ms": str(settings.publish.retention_ms or -1),
        "message.timestamp.type": "CreateTime",
        AFTER_MAX: after_max(settings),
        "message.timestamp.before.max.ms": _UNBOUNDED,
        "max.message.bytes": str(settings.publish.max_bytes + BESIDE_VALUES),
    }


def dead_letter_settings(cluster: Cluster, settings: Settings) -> dict[str, str]:
    """Return the topic settings that a topic of dead letters needs."""
    return copy_settings(cluster, settings.topics)


def copy_settings(cluster: Cluster, topics: Iterable[str]) -> dict[str, str]:
    """Return the topic settings of a topic that takes every record that these topics take, with any
    timestamp.
    """
    largest = max(int(cluster.topic_settings(topic)["max.message.bytes"]) for topic in topics)
    return {
        "cleanup.policy": "delete",
        "message.timestamp.type": "CreateTime",
        AFTER_MAX: _UNBOUNDED,
        "message.timestamp.before.max.ms": _UNBOUNDED,
        "max.message.bytes": str(largest + BESIDE_VALUES),
    }
