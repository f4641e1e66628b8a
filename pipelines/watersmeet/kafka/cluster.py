"""Questions to a Kafka cluster about its topics, and what topics must be like."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
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

from watersmeet.core.texts import identified
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
"""The topic setting that bounds how far ahead of a broker's clock a timestamp may be."""

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

_given_up: list[tuple[Future[Any], ListeningAdmin]] = []
"""Requests that nobody waits for any more, with their clients.

Librdkafka aborts the process where one of its threads destroys its own client, as Python's garbage
collector may while such a thread says that a request has ended. So clients are kept until then.
"""


class ExistingTopic(NamedTuple):
    """A topic that exists; `topic_id`: another one after it was deleted and created again."""

    name: str
    partitions: int
    topic_id: str

    @property
    def identified(self) -> str:
        """The name with Kafka's own identity of it."""
        return identified(self.name, self.topic_id)


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
        return {
            topic: ExistingTopic(topic, len(description.partitions), _hex(description.topic_id))
            for topic, description in self._described(topics).items()
        }

    def partition_counts(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the number of partitions of each of these topics that exists."""
        return {name: topic.partitions for name, topic in self.existing(topics).items()}

    def topic_ids(self, topics: Iterable[str]) -> dict[str, str]:
        """Return Kafka's own identity, which no other topic has, of each topic that exists."""
        return {name: topic.topic_id for name, topic in self.existing(topics).items()}

    def identified(self, topic: str) -> str:
        """Return a topic's name with Kafka's own identity of it (`missing` where there is none)."""
        existing = self.existing([topic]).get(topic)
        return identified(topic, "missing") if existing is None else existing.identified

    def _settings(self, kind: Any, name: str, resource: str) -> dict[str, str]:
        request = [ConfigResource(kind, name)]
        [future] = self._admin.describe_configs(request, request_timeout=self.timeout_s).values()
        entries = self._answer(future, "DESCRIBE_CONFIGS", resource)
        return {name: entry.value for name, entry in entries.items()}

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
        return self._settings(ConfigResource.Type.TOPIC, topic, topic)

    def check_transactions(self) -> None:
        """Raise KafkaRequestError where no transaction can begin: the log that Kafka keeps of them
        is to have more replicas than there are brokers, as far as the cluster shows its settings.
        """
        with suppress(KafkaAccessError):
            if _TRANSACTION_LOG in self._described([_TRANSACTION_LOG]):
                return
            description = self._admin.describe_cluster(request_timeout=self.timeout_s)
            cluster = self._answer(description, "DESCRIBE", "the cluster")
            brokers = [node.id for node in cluster.nodes or ()]
            kind = ConfigResource.Type.BROKER
            replicas = int(self._settings(kind, str(brokers[0]), "the brokers")[_REPLICAS])
            if replicas > len(brokers):
                has = "1 broker" if len(brokers) == 1 else f"{len(brokers)} brokers"
                raise KafkaRequestError(
                    f"Kafka at {self.kafka.bootstrap_servers} can begin no transaction: its "
                    f"log of them is to have {_REPLICAS}={replicas}, and the cluster has "
                    f"{has}",
                    fix=f"set that, and transaction.state.log.min.isr, to {len(brokers)} or less "
                    "on the brokers, or start more of them",
                )

    def create_topic(
        self, topic: str, partitions: int, settings: Mapping[str, str], way_out: str = ""
    ) -> None:
        """Create the topic, unless it exists, and return once it can be seen.

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
        """Return, by partition, the first offset and the exclusive end of what is committed."""
        return self.bounds_of(topic, range(partitions))

    def bounds_of(self, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Return `bounds` of some partitions, by two requests."""
        numbers = list(partitions)
        starts = self._offsets(topic, numbers, _EARLIEST)
        ends = self._offsets(topic, numbers, _LATEST)
        return {p: (starts[p], ends[p]) for p in numbers}

    def ends(self, topic: str, partitions: int) -> dict[int, int]:
        """Return, by partition, the exclusive end offset of what is committed."""
        return self._offsets(topic, range(partitions), _LATEST)

    def leader_epochs(self, topic: str, partitions: int) -> dict[int, int]:
        """Return, by partition, Kafka's number of its leader's term, where Kafka says it.

        Each later leader has a larger one, and what it appends bears it (`Message.leader_epoch`).
        """
        isolation = IsolationLevel.READ_COMMITTED
        listed = self._listed(topic, range(partitions), _LATEST, isolation)
        epochs = {p: info.leader_epoch for p, info in listed.items()}
        return {p: epoch for p, epoch in epochs.items() if epoch is not None and epoch >= 0}

    def settled_bounds(self, topic: str, partitions: int) -> dict[int, tuple[int, int]]:
        """Return `bounds` once every transaction that is open at the time of the call has ended.

        Until then, messages behind its first one cannot be read. Raises OpenTransactionError where
        one is still open after `settling_s`.
        """
        ends = self._high_watermarks(topic, range(partitions))
        deadline = time.monotonic() + self.settling_s
        while True:
            bounds = self.bounds(topic, partitions)
            behind = [p for p, end in ends.items() if bounds[p][1] < end]
            if not behind:
                return bounds
            if time.monotonic() > deadline:
                raise OpenTransactionError(
                    f"{topic}[{behind[0]}] has an open transaction of another producer at offset "
                    f"{bounds[behind[0]][1]}, behind which nothing can be read",
                    fix="try again when it has ended; if Kafka itself has lost its end, end it by "
                    "Kafka's `kafka-transactions.sh abort`",
                )
            time.sleep(_LOOK_S)

    def bounds_and_unsettled(
        self, topic: str, partitions: Iterable[int]
    ) -> tuple[dict[int, tuple[int, int]], dict[int, int]]:
        """Return `bounds_of`, and by partition how many offsets lie behind an open transaction."""
        ends = self._high_watermarks(topic, partitions)
        bounds = self.bounds_of(topic, ends)
        return bounds, {p: end - bounds[p][1] for p, end in ends.items() if bounds[p][1] < end}

    def _high_watermarks(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        # Also of what is not committed. It is asked for before the end of what is committed: where
        # that is smaller, a transaction is open.
        return self._offsets(topic, partitions, _LATEST, IsolationLevel.READ_UNCOMMITTED)

    def offsets_at(self, topic: str, partitions: int, timestamp_ms: int) -> dict[int, int]:
        """Return, by partition, the first offset at this Kafka timestamp or later, else the end."""
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
        # A partition that was just created has no leader yet, and librdkafka asks a dead one until
        # its own timeout: the first attempt ends early. A new client is asked for the topic first:
        # otherwise its request for the leaders is lost now and then, with the bootstrap connection.
        # On a busy machine an answer now and then has no offset, and no error either.
        listed = self._listed(topic, partitions, spec, isolation)
        return {p: info.offset for p, info in listed.items()}

    def _listed(
        self, topic: str, partitions: Iterable[int], spec: Any, isolation: IsolationLevel
    ) -> dict[int, Any]:
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
                listed = {
                    tp.partition: self._answer(future, "DESCRIBE", topic)
                    for tp, future in futures.items()
                }
                if all(info.offset != OFFSET_INVALID for info in listed.values()):
                    return listed
                unknown = KafkaError(KafkaError.OFFSET_NOT_AVAILABLE)
                raise self._failure(unknown, "DESCRIBE", f"topic {topic}")
            except KafkaTransientError:
                if time.monotonic() > deadline - _LOOK_S:
                    raise
            time.sleep(_LOOK_S)
            limit_s = self.timeout_s  # a broker that is merely slow gets the time

    @cached_property
    def _admin(self) -> ListeningAdmin:
        _given_up[:] = [(future, client) for future, client in _given_up if not future.done()]
        return ListeningAdmin(self.kafka)

    def _answer(self, future: Future[_Answer], permission: str, topic: str) -> _Answer:
        if self._is_used:
            # Errors from before this request do not count. A new client is not polled for them: it
            # reports only once that there is no token.
            self._admin.poll(0)
        self._is_used = True
        since = time.monotonic()
        errors = self._admin.errors
        resource = f"topic {topic}"
        try:
            while not wait([future], _LOOK_S).done:
                self._admin.poll(0)
                # Librdkafka's own timeout comes first.
                errors.check(since, self.timeout_s + 1, permission, resource)
        except BaseException:
            _given_up.append((future, self._admin))
            raise
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
        # A client may wait without end for a broker that is gone, or ask in the name of a leader
        # that is one no more: the next request makes another.
        if is_passing(reason):
            self._is_used = False
            del self._admin
        return failure(self.kafka, reason, permission, resource)


@dataclass(frozen=True)
class Topics:
    """Some topics of one cluster, each with so many partitions."""

    kafka: KafkaSettings
    names: Sequence[str]
    partitions: int


def ends_of(cluster: Cluster, topics: Topics) -> dict[str, dict[int, int]]:
    """Return, by topic and partition, the exclusive end offset of what is committed."""
    return {topic: cluster.ends(topic, topics.partitions) for topic in topics.names}


def _hex(topic_id: Any) -> str:
    return f"{topic_id.get_most_significant_bits():x}.{topic_id.get_least_significant_bits():x}"


def co_partitioned(settings: Settings, counts: Mapping[str, int]) -> int:
    """Return the number of partitions of all sources, and of the topics that are written to.

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
        right = "give all of them the same number"
        yield ConfigurationError(
            f"the topics are not co-partitioned ({listed} partitions)",
            "sources",
            f"{right}, since a key must be in the same partition of every source",
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
    """Return all topics whose numbers of partitions `co_partitioned` needs."""
    return [*settings.topics, *written_topics(settings).values()]


def written_topics(settings: Settings) -> dict[str, str]:
    """Return the topics that gold writes to, by their field in `publish`."""
    return {"topic": settings.publish.topic, **settings.publish.topics_beside_the_sink}


def after_max(settings: Settings) -> str:
    """Return how far (ms) ahead of the broker timestamps may be that vouch for event times."""
    return str(max(settings.merge.max_future_ms, 3_600_000))


def sink_settings(settings: Settings) -> dict[str, str]:
    """Return the topic settings that the sink needs.

    Its messages carry event time: retention by age would delete a backfill, and a backlog may be
    ahead of the broker's clock by `max_future`. Headers and key come on top of the value.
    """
    return {
        **_topic_settings(settings.publish.max_bytes),
        "retention.ms": str(settings.publish.retention_ms or -1),
        AFTER_MAX: after_max(settings),
    }


def copy_settings(cluster: Cluster, topics: Iterable[str]) -> dict[str, str]:
    """Return the topic settings with which a topic takes every record that these topics take."""
    largest = max(int(cluster.topic_settings(topic)["max.message.bytes"]) for topic in topics)
    return _topic_settings(largest)


def _topic_settings(value_bytes: int) -> dict[str, str]:
    return {
        "cleanup.policy": "delete",
        "message.timestamp.type": "CreateTime",
        AFTER_MAX: _UNBOUNDED,
        "message.timestamp.before.max.ms": _UNBOUNDED,
        "max.message.bytes": str(value_bytes + BESIDE_VALUES),
    }
