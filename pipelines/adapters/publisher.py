"""Publishes a partition's next messages in one Kafka transaction. Runs on the executors, one task per sink partition.

A task may be tried again, and a process may die anywhere, so nothing is assumed about what is out:

1. *settle*: `init_transactions` fences an earlier owner of the partition and settles what it left;
2. *read the tail*: the sink's last committed message says which record is out and what its number was;
3. *produce*: the records after it, numbered on, in one transaction; the last carries `watersmeet.min_offsets`;
4. *commit*.

After a failure before 4 no `read_committed` reader sees anything of it; after 4, a second attempt finds the tail moved and
publishes nothing. The transactional id is the same in every run: it is what fencing goes by.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa
from confluent_kafka import Consumer, KafkaException, Message, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from pipelines.adapters.kafka import TIMEOUT_S, Cluster, client_options, read_to_end
from pipelines.core.sequence import ID, MIN_OFFSETS, SEQ, Outgoing, Tail, message_id, parse_message_id, resume
from pipelines.errors import ForeignMessageError, PublishingError
from pipelines.settings import Settings

TRANSACTION_TIMEOUT_S = 300
"""A transaction is written at once and takes seconds; brokers allow 15 minutes at most by default."""

OUTGOING = "partition INT, event_time BIGINT, key STRING, value BINARY"


class Publication(NamedTuple):
    """What one transaction wrote; event time in ms, `committed_at` in ms of wall time."""

    partition: int
    first_seq: int
    last_seq: int
    last_event_time: int
    last_key: str
    sink_offset: int
    committed_at: int

    @classmethod
    def up_to(cls, tail: Tail, partition: int, first_seq: int) -> Publication:
        """Everything from `first_seq` up to the sink's tail, committed by now."""
        now = round(time.time() * 1000)
        return cls(partition, first_seq, tail.seq, tail.event_time, tail.key, tail.offset, now)

    @property
    def tail(self) -> Tail:
        """Where the partition's sequence stands after it."""
        return Tail(self.last_seq, self.last_event_time, self.last_key, self.sink_offset)


PUBLICATION = (
    "partition INT, first_seq BIGINT, last_seq BIGINT, last_event_time BIGINT, last_key STRING, sink_offset BIGINT, "
    "committed_at BIGINT"
)
_ARROW_PUBLICATION = pa.schema(
    [
        ("partition", pa.int32()),
        ("first_seq", pa.int64()),
        ("last_seq", pa.int64()),
        ("last_event_time", pa.int64()),
        ("last_key", pa.string()),
        ("sink_offset", pa.int64()),
        ("committed_at", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Publisher:
    """Writes to the sink of one configuration."""

    settings: Settings

    @property
    def topic(self) -> str:
        """The sink topic."""
        return self.settings.publish.topic

    def settle(self, partition: int) -> Tail | None:
        """Steps 1 and 2: fences whoever published to this partition before and tells the last message that is out."""
        self._producer(partition)
        return self.read_tail(partition)

    def read_tail(self, partition: int) -> Tail | None:
        """The last committed message of a sink partition, None where it holds none.

        Raises ForeignMessageError where that message is not ours.
        """
        consumer = Cluster(self.settings.kafka).consumer()
        try:
            message = _last_message(consumer, self.topic, partition)
        finally:
            consumer.close()
        return None if message is None else _tail(message)

    def publish_batches(
        self, min_offsets: Mapping[int, bytes], tails: Mapping[int, Tail]
    ) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """For mapInArrow: rows of `OUTGOING`, by partition and in order, become messages; out comes a `PUBLICATION` for each
        partition that had any to publish. `min_offsets`: the header of a partition's last message. `tails`: where a sequence
        stands whose messages retention has removed; what the sink holds goes before it.
        """

        def publish(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for partition, rows in groupby(_rows(batches), key=lambda row: row[0]):
                outgoing = (row for _, row in rows)
                publication = self._publish(partition, outgoing, min_offsets[partition], tails.get(partition))
                if publication is not None:
                    columns = [[value] for value in publication]
                    yield pa.RecordBatch.from_arrays(
                        [pa.array(c, f.type) for c, f in zip(columns, _ARROW_PUBLICATION, strict=True)],
                        schema=_ARROW_PUBLICATION,
                    )

        return publish

    def _publish(self, partition: int, rows: Iterable[Outgoing], min_offsets: bytes, before: Tail | None) -> Publication | None:
        producer = self._producer(partition)
        numbered = resume(rows, self.read_tail(partition) or before)
        first = next(numbered, None)
        if first is None:
            return None
        delivered = _Delivered()
        try:
            producer.begin_transaction()
            seq, row = first
            for following in numbered:
                self._produce(producer, partition, seq, row, delivered)
                seq, row = following
            self._produce(producer, partition, seq, row, delivered, [(MIN_OFFSETS, min_offsets)])
            producer.commit_transaction(TRANSACTION_TIMEOUT_S)
        except KafkaException as error:
            raise PublishingError(self.topic, partition, error.args[0].str()) from None
        tail = Tail(seq, row.event_time, row.key, delivered.last_offset)
        return Publication.up_to(tail, partition, first_seq=first[0])

    def _produce(
        self,
        producer: Producer,
        partition: int,
        seq: int,
        row: Outgoing,
        delivered: _Delivered,
        more_headers: Iterable[tuple[str, bytes]] = (),
    ) -> None:
        headers: list[tuple[str, str | bytes | None]] = [
            (SEQ, str(seq).encode()),
            (ID, message_id(partition, row.event_time, row.key).encode()),
            *more_headers,
        ]
        while True:
            try:
                producer.produce(
                    self.topic,
                    row.value,
                    row.key.encode(),
                    partition,
                    on_delivery=delivered,
                    # librdkafka takes 0 for "now"; the id has the exact event time.
                    timestamp=max(row.event_time, 1),
                    headers=headers,
                )
            except BufferError:  # the queue is full: let deliveries make room
                producer.poll(1.0)
            else:
                producer.poll(0)
                return

    def _producer(self, partition: int) -> Producer:
        """Step 1, for a producer of its own."""
        producer = Producer(
            {
                **client_options(self.settings.kafka),
                "transactional.id": f"watersmeet-{self.settings.name}-{self.topic}-{partition}",
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_S * 1000,
                "message.max.bytes": min(self.settings.publish.max_bytes + 1024 * 1024, 1_000_000_000),
                "queue.buffering.max.kbytes": 64 * 1024,
                "linger.ms": 20,
            }
        )
        try:
            producer.init_transactions(TIMEOUT_S * 2)
        except KafkaException as error:
            raise PublishingError(self.topic, partition, error.args[0].str()) from None
        return producer


class _Delivered:
    """Remembers the offset of the last message that the broker has taken. A failed delivery fails the commit."""

    last_offset = -1

    def __call__(self, error: Any, message: Message) -> None:
        if error is None:
            self.last_offset = max(self.last_offset, message.offset() or 0)


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Outgoing]]:
    for batch in batches:
        partitions, event_times, keys, values = (batch.column(i).to_pylist() for i in range(4))
        for partition, *row in zip(partitions, event_times, keys, values, strict=True):
            yield partition, Outgoing(*row)


def _last_message(consumer: Consumer, topic: str, partition: int) -> Message | None:
    """Walks back from the end: the markers of transactions, and aborted messages, occupy offsets too."""
    first, end = consumer.get_watermark_offsets(KafkaPartition(topic, partition), timeout=TIMEOUT_S)
    span = 8
    while first < end:
        start = max(first, end - span)
        messages = read_to_end(consumer, topic, partition, start)
        if messages:
            return messages[-1]
        if start == first:
            return None
        span *= 8
    return None


def _tail(message: Message) -> Tail:
    headers: dict[str, Any] = dict(message.headers() or [])
    place = message.topic() or "", message.partition() or 0, message.offset() or 0
    try:
        seq, (_, event_time, key) = int(headers[SEQ]), parse_message_id(headers[ID].decode())
    except (KeyError, ValueError):
        raise ForeignMessageError(*place) from None
    return Tail(seq, event_time, key, place[2])
