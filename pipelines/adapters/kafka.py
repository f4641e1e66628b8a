"""Kafka as the layers see it: what topics are, where they end, and the options of both clients (librdkafka and Spark's)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicCollection
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
from confluent_kafka.cimpl import NewTopic

from pipelines.errors import ConfigurationError, KafkaUnreachableError
from pipelines.settings import KafkaSettings, Settings

TIMEOUT_S = 15.0
"""How long a broker may take to answer a question about itself before it counts as unreachable."""

_UNBOUNDED = str(2**63 - 1)


def client_options(kafka: KafkaSettings) -> dict[str, Any]:
    """librdkafka's options for this cluster, with its log turned off: failures come back as errors, said once."""
    return {
        **kafka.options,
        "bootstrap.servers": kafka.bootstrap_servers,
        "log_level": 0,
        "error_cb": lambda _: None,
    }


def spark_options(kafka: KafkaSettings) -> dict[str, str]:
    """The same cluster for Spark's source: the one place where librdkafka's names become those of the Java client.

    Raises ConfigurationError for an option that has no counterpart there.
    """
    options = dict(kafka.options)
    java = {"bootstrap.servers": kafka.bootstrap_servers, "isolation.level": "read_committed"}
    username, password = options.pop("sasl.username", None), options.pop("sasl.password", None)
    mechanism = options.pop("sasl.mechanisms", None) or options.pop("sasl.mechanism", None)
    options.pop("sasl.mechanism", None)
    if mechanism:
        java["sasl.mechanism"] = mechanism
    if username is not None and password is not None:
        module = "scram.ScramLoginModule" if (mechanism or "").upper().startswith("SCRAM") else "plain.PlainLoginModule"
        java["sasl.jaas.config"] = (
            f'org.apache.kafka.common.security.{module} required username="{_quoted(username)}" password="{_quoted(password)}";'
        )
    if authority := options.pop("ssl.ca.location", None):
        java |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": authority}
    if authority := options.pop("ssl.ca.pem", None):
        java |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": authority}
    # The Java client wants a certificate and its key in one file, or as text.
    for name in ("ssl.certificate", "ssl.key"):
        if location := options.pop(f"{name}.location", None):
            options[f"{name}.pem"] = _text_of(location, f"kafka.options: {name}.location")
    if certificate := options.pop("ssl.certificate.pem", None):
        java |= {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": certificate}
    if key := options.pop("ssl.key.pem", None):
        java["ssl.keystore.key"] = key
    if password := options.pop("ssl.key.password", None):
        java["ssl.key.password"] = password
    for name, value in options.items():
        if name not in _SAME_IN_JAVA:
            raise ConfigurationError(
                f"kafka.options: {name} has no counterpart in Spark's Kafka client; known here: "
                f"{', '.join(sorted(_SAME_IN_JAVA | _TRANSLATED))}"
            )
        java[_SAME_BUT_NAMED.get(name, name)] = value
    return {f"kafka.{name}": value for name, value in java.items()}


_SAME_IN_JAVA = {
    "security.protocol",
    "client.id",
    "client.rack",
    "socket.send.buffer.bytes",
    "socket.receive.buffer.bytes",
    "fetch.min.bytes",
    "fetch.max.bytes",
    "max.partition.fetch.bytes",
    "reconnect.backoff.ms",
    "reconnect.backoff.max.ms",
    "metadata.max.age.ms",
    "connections.max.idle.ms",
    "sasl.kerberos.service.name",
}
_SAME_BUT_NAMED = {
    "socket.send.buffer.bytes": "send.buffer.bytes",
    "socket.receive.buffer.bytes": "receive.buffer.bytes",
}
_TRANSLATED = {
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.username",
    "sasl.password",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.key.location",
    "ssl.key.pem",
    "ssl.key.password",
}


def _text_of(location: str, option: str) -> str:
    try:
        return Path(location).read_text()
    except (OSError, UnicodeDecodeError):
        raise ConfigurationError(f"{option} is no PEM file that can be read; name one") from None


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


@dataclass(frozen=True)
class Cluster:
    """Questions to a Kafka cluster and its topics; every call answers within `TIMEOUT_S` or raises KafkaUnreachableError."""

    kafka: KafkaSettings

    def partition_counts(self) -> dict[str, int]:
        """Every topic's number of partitions."""
        try:
            topics = self._admin().list_topics(timeout=TIMEOUT_S).topics
        except KafkaException as error:
            raise self._unreachable(error) from None
        return {name: len(topic.partitions) for name, topic in topics.items() if topic.error is None}

    def topic_settings(self, topic: str) -> dict[str, str]:
        """A topic's effective settings."""
        admin = self._admin()  # held: a client that is collected cancels what it was asked
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        try:
            found = admin.describe_configs([resource], request_timeout=TIMEOUT_S)[resource].result()
        except KafkaException as error:
            raise self._unreachable(error) from None
        return {name: entry.value for name, entry in found.items()}

    def create_topic(self, topic: str, partitions: int, settings: Mapping[str, str]) -> None:
        """Afterwards the topic exists; a race with another creator is no error."""
        admin = self._admin()
        new = NewTopic(topic, num_partitions=partitions, config=dict(settings))
        try:
            admin.create_topics([new], request_timeout=TIMEOUT_S)[topic].result()
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise self._unreachable(error) from None

    def bounds(self, topic: str, partitions: int) -> dict[int, tuple[int, int]]:
        """Per partition the first offset that Kafka still has and the next one it will give."""
        consumer = self.consumer()
        try:
            return {p: self.bounds_of(consumer, topic, p) for p in range(partitions)}
        finally:
            consumer.close()

    def bounds_of(self, consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
        """The same of one partition, asked by a consumer that is there already."""
        try:
            first, end = consumer.get_watermark_offsets(KafkaPartition(topic, partition), timeout=TIMEOUT_S)
        except KafkaException as error:
            raise self._unreachable(error) from None
        return first, end

    def offsets_at(self, topic: str, partitions: int, timestamp_ms: int) -> dict[int, int]:
        """Per partition the first offset with this Kafka timestamp or a later one; where there is none, the next one it gives."""
        consumer = self.consumer()
        try:
            asked = [KafkaPartition(topic, p, timestamp_ms) for p in range(partitions)]
            found = consumer.offsets_for_times(asked, timeout=TIMEOUT_S)
            # librdkafka answers -1 where every record is older.
            return {
                tp.partition: tp.offset if tp.offset >= 0 else self.bounds_of(consumer, topic, tp.partition)[1] for tp in found
            }
        except KafkaException as error:
            raise self._unreachable(error) from None
        finally:
            consumer.close()

    def topic_ids(self, topics: Sequence[str]) -> dict[str, str]:
        """Kafka's own identity of each topic that exists: another one after it was deleted and made again."""
        admin = self._admin()
        asked = admin.describe_topics(TopicCollection(list(topics)), request_timeout=TIMEOUT_S)
        ids = {}
        for topic, answer in asked.items():
            try:
                found = answer.result().topic_id
                ids[topic] = f"{found.get_most_significant_bits():x}.{found.get_least_significant_bits():x}"
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise self._unreachable(error) from None
        return ids

    def consumer(self) -> Consumer:
        """A consumer of committed messages that belongs to no group and tells where a partition ends."""
        return Consumer(
            {
                **client_options(self.kafka),
                "group.id": "watersmeet",  # asked for by the client; nothing is ever committed under it
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "allow.auto.create.topics": False,
                "fetch.wait.max.ms": 20,  # the end of a partition is told by an empty answer, which waits so long
            }
        )

    def _admin(self) -> AdminClient:
        return AdminClient(client_options(self.kafka))

    def _unreachable(self, error: KafkaException) -> KafkaUnreachableError:
        reason = error.args[0]
        return KafkaUnreachableError(
            self.kafka.bootstrap_servers, reason.str() if isinstance(reason, KafkaError) else str(reason)
        )


def read_to_end(
    consumer: Consumer,
    topic: str,
    partition: int,
    offset: int = OFFSET_BEGINNING,
    *,
    until: int | None = None,
    limit: int | None = None,
) -> list[Message]:
    """The committed messages of a partition from an offset to its end, or before `until`, or the first `limit` of them.

    For short stretches: they are held in memory. Raises KafkaException where the broker reports an error or does not answer in
    time.
    """
    consumer.assign([KafkaPartition(topic, partition, offset)])
    messages: list[Message] = []
    while limit is None or len(messages) < limit:
        message = consumer.poll(TIMEOUT_S)
        if message is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{topic}[{partition}] does not answer"))
        error = message.error()
        if error is None:
            if until is not None and (message.offset() or 0) >= until:
                return messages
            messages.append(message)
        elif error.code() == KafkaError._PARTITION_EOF:
            return messages
        else:
            raise KafkaException(error)
    return messages


def read_backwards(consumer: Consumer, topic: str, partition: int) -> Iterator[Message]:
    """The committed messages of a partition from its end on backwards, read in stretches as they are asked for.

    The markers of transactions, and aborted messages, occupy offsets too.
    """
    first, end = consumer.get_watermark_offsets(KafkaPartition(topic, partition), timeout=TIMEOUT_S)
    span = 8
    while first < end:
        start = max(first, end - span)
        yield from reversed(read_to_end(consumer, topic, partition, start, until=end))
        end, span = start, min(8 * span, 20_000)


def co_partitioned(settings: Settings, counts: Mapping[str, int]) -> int:
    """The number of partitions that all sources share, and the sink where it exists; `counts`: every topic's number.

    Raises ConfigurationError where a source is missing or a number differs.
    """
    for name, source in settings.sources.items():
        if source.topic not in counts:
            raise ConfigurationError(
                f"sources.{name}.topic: there is no topic {source.topic} at {settings.kafka.bootstrap_servers}; "
                "create it, with as many partitions as the other sources have"
            )
    found = {name: counts[source.topic] for name, source in settings.sources.items()}
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} has {count}" for name, count in found.items())
        raise ConfigurationError(
            f"sources: the topics are not co-partitioned ({listed} partitions); "
            "give all of them the same number, since a key must be in the same partition of every source"
        )
    partitions, sink = next(iter(found.values())), settings.publish.topic
    if counts.get(sink, partitions) != partitions:
        raise ConfigurationError(
            f"publish.topic: {sink} has {counts[sink]} partitions and the sources have {partitions}; "
            "give it the same number, since a message goes to the partition of its records"
        )
    return partitions


def sink_settings(settings: Settings) -> dict[str, str]:
    """What the sink topic needs. Its messages carry event time, so retention by age would delete a backfill; a backlog may be
    published ahead of the broker's clock by `max_future`; and headers and key come on top of the value.
    """
    return {
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "message.timestamp.type": "CreateTime",
        "message.timestamp.after.max.ms": str(max(settings.merge.max_future_ms, 3_600_000)),
        "message.timestamp.before.max.ms": _UNBOUNDED,
        "max.message.bytes": str(settings.publish.max_bytes + 1024 * 1024),
    }
