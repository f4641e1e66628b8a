"""Real topics for tests: made, filled and read with plain Kafka clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeAlias

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
)
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from watersmeet.errors import WatersmeetError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.failures import is_passing
from watersmeet.settings import KafkaSettings

PATIENT: Final = {"broker.session.timeout.ms": "120000"}
"""Settings of a broker that nobody kills. Where processors are scarce its heartbeats come late; its
own controller would take it for dead, and refuse each new topic."""


class Published(NamedTuple):
    """A message as a consumer sees it, without its offset: that differs where transactions are cut
    differently."""

    partition: int
    key: bytes
    timestamp: int
    value: bytes | None
    seq: int
    id: str


class Letter(NamedTuple):
    """A dead letter: where the record was, why it is there, and the record as it came."""

    partition: int
    source_topic: str
    offset: int
    reason: str
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int


Access = str | KafkaSettings
"""How a test reaches a broker: its address, where nothing else is needed."""


def settings_of(kafka: Access) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka) if isinstance(kafka, str) else kafka


def client_options(kafka: Access) -> dict[str, Any]:
    settings = settings_of(kafka)
    return {"bootstrap.servers": settings.bootstrap_servers, **settings.options}


ANY_TIME: Final = {"message.timestamp.after.max.ms": str(2**63 - 1)}
"""What topics are made with that take records of any timestamp."""


def create_topics(kafka: Access, *topics: str, partitions: int, **config: str) -> None:
    admin = AdminClient(client_options(kafka))
    new = [
        NewTopic(t, num_partitions=partitions, config={"retention.ms": "-1", **config})
        for t in topics
    ]
    for created in admin.create_topics(new).values():
        created.result()
    cluster = Cluster(settings_of(kafka))
    # Made again, a topic may be unknown for a while.
    while cluster.partition_counts(topics) != dict.fromkeys(topics, partitions):
        pass


def add_partitions(kafka: Access, topic: str, partitions: int) -> None:
    """Returns once the topic has so many."""
    admin, cluster = AdminClient(client_options(kafka)), Cluster(settings_of(kafka))
    for done in admin.create_partitions([NewPartitions(topic, partitions)]).values():
        done.result(30)
    while cluster.partition_counts([topic]) != {topic: partitions}:
        pass


def delete_records(kafka: Access, topic: str, partition: int, before: int) -> None:
    """What retention does."""
    admin = AdminClient(client_options(kafka))
    for done in admin.delete_records([KafkaPartition(topic, partition, before)]).values():
        done.result(30)


def delete_topic(kafka: Access, topic: str) -> None:
    """Returns once nobody sees the topic any more; Kafka answers before."""
    admin, cluster = AdminClient(client_options(kafka)), Cluster(settings_of(kafka))
    for done in admin.delete_topics([topic], operation_timeout=30).values():
        done.result(30)
    while cluster.partition_counts([topic]):
        pass


class CheckedProducer(Producer):
    """A producer whose `flush` fails where the broker has refused a record, for example for its
    timestamp: the client's own says how many records are left, and refused ones are not."""

    def __init__(self, kafka: Access, **options: Any) -> None:
        super().__init__({**client_options(kafka), **options})
        self.refusals: list[KafkaError] = []

    def produce(self, *record: Any, **more: Any) -> None:
        more["on_delivery"] = lambda e, _: self.refusals.append(e) if e else None
        super().produce(*record, **more)

    def flush(self, timeout_s: float = 30) -> int:
        left = int(super().flush(timeout_s))
        assert not self.refusals
        return left


def produce(
    kafka: Access,
    topic: str,
    records: Iterable[tuple[int, bytes | None]],
    *,
    codec: str = "none",
    is_idempotent: bool = False,
) -> None:
    """Each record is (partition, value), compressed by this codec; returns once the broker has them
    all. `is_idempotent`: each once, even where a broker dies meanwhile; it takes half a second to
    begin.
    """
    options = {
        "message.max.bytes": 8_000_000,
        "compression.type": codec,
        "enable.idempotence": is_idempotent,
        "topic.metadata.refresh.interval.ms": 1000,  # for the leaders of dead brokers
    }
    producer = CheckedProducer(kafka, **options)
    for partition, value in records:
        producer.produce(topic, value, partition=partition)
        producer.poll(0)
    assert producer.flush(30) == 0


def produce_transaction(
    bootstrap: str, topic: str, values: Iterable[bytes], partition: int, *, commit: bool
) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": f"test-{topic}"})
    producer.init_transactions(30)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=partition)
    producer.flush(30)
    if commit:
        producer.commit_transaction(30)
    else:
        producer.abort_transaction(30)


def consume(kafka: Access, topic: str, partitions: int) -> list[Any]:
    """Every committed message of a topic, by partition, in order."""
    consumer = Consumer(
        {
            **client_options(kafka),
            "group.id": "test",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,
            # For topics that come to exist, and leaders that are others now.
            "topic.metadata.refresh.interval.ms": 1000,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
    )
    # Else the client would look for the leaders of a topic that it has not met a second later.
    consumer.list_topics(topic, timeout=30)
    # A commit is answered before its markers are everywhere.
    with suppress(WatersmeetError):
        Cluster(settings_of(kafka), settling_s=2).settled_bounds(topic, partitions)
    messages = []
    for partition in range(partitions):
        consumer.assign([KafkaPartition(topic, partition, OFFSET_BEGINNING)])
        while True:
            message = consumer.poll(30)
            assert message is not None, f"{topic}[{partition}] does not answer"
            error = message.error()
            if error is None:
                messages.append(message)
            else:
                assert error.code() == KafkaError._PARTITION_EOF
                break
    consumer.close()
    return messages


def committed(kafka: Access, group: str, topic: str, partitions: int) -> dict[int, int]:
    """The offsets that a consumer group has of a topic, as soon as its coordinator answers: which
    one it is changes while a broker makes the topic of the groups' offsets."""
    consumer = Consumer({**client_options(kafka), "group.id": group})
    places = [KafkaPartition(topic, p) for p in range(partitions)]
    end = time.monotonic() + 30
    try:
        while True:
            try:
                return {at.partition: at.offset for at in consumer.committed(places, timeout=10)}
            except KafkaException as error:
                if not is_passing(error.args[0]) or time.monotonic() > end:
                    raise
                time.sleep(0.05)
    finally:
        consumer.close()


def published(kafka: Access, topic: str, partitions: int) -> list[Published]:
    """Every message of the sink but tombstones, by partition, in order."""
    found = []
    for message in consume(kafka, topic, partitions):
        headers = dict(message.headers())
        if "watersmeet.forgotten" in headers:
            continue
        seq, message_id = int(headers["watersmeet.seq"]), headers["watersmeet.id"].decode()
        found.append(
            Published(
                message.partition(),
                message.key(),
                message.timestamp()[1],
                message.value(),
                seq,
                message_id,
            )
        )
    return found


def dead_letters(kafka: Access, topic: str, partitions: int) -> list[Letter]:
    """Every dead letter of a topic, by partition, in order."""
    found = []
    for message in consume(kafka, topic, partitions):
        beside = ("watersmeet.life", "watersmeet.next_offsets")
        headers = [one for one in message.headers() if one[0] not in beside]
        (*own, reason, of_topic, partition, offset) = headers
        assert [name for name, _ in headers[len(own) :]] == [
            f"watersmeet.{n}" for n in ("reason", "topic", "partition", "offset")
        ]
        assert int(partition[1]) == message.partition()
        place = message.partition(), of_topic[1].decode(), int(offset[1]), reason[1].decode()
        found.append(
            Letter(*place, message.key(), message.value(), tuple(own), message.timestamp()[1])
        )
    return found


Change: TypeAlias = Callable[[Message], tuple[bytes | None, int]]
"""A record's value and timestamp (ms) instead of those that it had."""


def as_it_was(message: Message) -> tuple[bytes | None, int]:
    return message.value(), message.timestamp()[1]


def make_again(
    kafka: Access,
    topic: str,
    partitions: int,
    change: Change = as_it_was,
    config: Mapping[str, str] | None = None,
) -> None:
    """Has a topic made again with the records that it had, as that of another cluster."""
    messages = consume(kafka, topic, partitions)
    delete_topic(kafka, topic)
    create_topics(kafka, topic, partitions=partitions, **config or {})
    producer = Producer(client_options(kafka))
    for message in messages:
        value, timestamp = change(message)
        producer.produce(topic, value, message.key(), message.partition(), timestamp=timestamp)
    assert producer.flush(30) == 0
