"""Publishes a partition's next messages: on the executors, one task per sink partition, or in this process where they are few.

A task may be tried again, and a process may die anywhere, so nothing is assumed about what is out. `exactly_once`:

1. *settle*: `init_transactions` fences an earlier owner of the partition and settles what it left;
2. *read the tail*: the sink's last committed message says which record is out and what its number was;
3. *produce*: the records after it, numbered on, in one transaction; the last carries `watersmeet.min_offsets`;
4. *commit*.

After a failure before 4 no `read_committed` reader sees anything of it; after 4, a second attempt finds the tail moved and
publishes nothing. The transactional id is the same in every run: it is what fencing goes by.

`at_least_once` does the same without a transaction: what is produced is out, so a failure may leave a part of it, and the next
attempt goes on after that part. A message that a dying producer still had under way may come once more, with the same number.
`at_most_once` produces what `published` has noted already, numbered on from there, and never tries again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from pyspark import TaskContext

from pipelines.adapters.kafka import TIMEOUT_S, Cluster, client_options, read_backwards
from pipelines.core.sequence import ID, SEQ, Outgoing, Tail, message_id, parse_message_id, resume
from pipelines.errors import FencedError, ForeignMessageError, PublishingError, WatersmeetError
from pipelines.faults import reach
from pipelines.settings import Settings

TRANSACTION_TIMEOUT_S = 300
"""A transaction is written at once and takes seconds; brokers allow 15 minutes at most by default."""

PRODUCE_TIMEOUT_S = 120
"""How long a broker may take to acknowledge, well within the transaction's own timeout."""

MAX_KEPT = 64
"""So many producers are kept: each has threads of its own."""

Headers = dict[tuple[int, str], list[tuple[str, bytes]]]
"""What some messages of a partition, named by event time (ms) and key, say beside their number and id."""

OUTGOING = "partition INT, event_time BIGINT, key STRING, value BINARY"


class Publication(NamedTuple):
    """What one transaction wrote; event time in ms, `committed_at` in ms of wall time."""

    partition: int
    first_seq: int
    last_seq: int
    last_event_time: int
    last_key: str
    sink_offset: int | None
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
        """Steps 1 and 2: fences whoever published to this partition before and tells the last message that is out.

        In every delivery mode: an earlier run may have had another one.
        """
        self._transactional_producer(partition)
        return self.read_tail(partition)

    def read_tail(self, partition: int) -> Tail | None:
        """The last committed message of a sink partition, None where it holds none.

        Raises ForeignMessageError where that message is not ours.
        """
        consumer = Cluster(self.settings.kafka).consumer()
        try:
            message = next(read_backwards(consumer, self.topic, partition), None)
        except KafkaException as error:
            raise self._failure(partition, error) from None
        finally:
            consumer.close()
        return None if message is None else _tail(message)

    def publish_batches(
        self, headers: Mapping[int, Headers], tails: Mapping[int, Tail]
    ) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """For mapInArrow: rows of `OUTGOING`, by partition and in order, become messages; out comes a `PUBLICATION` for each
        partition that had any to publish. `tails`: where a sequence stands whose messages retention has removed; what the sink
        holds goes before it. (Under `at_most_once` it is the other way round: what was noted counts as out.)
        """

        def publish(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for publication in self.publications(batches, headers, tails, self.publish):
                columns = [[value] for value in publication]
                yield pa.RecordBatch.from_arrays(
                    [pa.array(c, f.type) for c, f in zip(columns, _ARROW_PUBLICATION, strict=True)],
                    schema=_ARROW_PUBLICATION,
                )

        return publish

    def publications(
        self,
        batches: Iterable[pa.RecordBatch],
        headers: Mapping[int, Headers],
        tails: Mapping[int, Tail],
        publish: Callable[[int, Iterable[Outgoing], Headers, Tail | None], Publication | None],
    ) -> Iterator[Publication]:
        """What `publish` makes of each partition's rows. Raises WatersmeetError for what Kafka says."""
        for partition, rows in groupby(_rows(batches), key=lambda row: row[0]):
            outgoing = (row for _, row in rows)
            try:
                publication = publish(partition, outgoing, headers[partition], tails.get(partition))
            except KafkaException as error:
                raise self._failure(partition, error) from None
            if publication is not None:
                yield publication

    def publish(self, partition: int, rows: Iterable[Outgoing], headers: Headers, before: Tail | None) -> Publication | None:
        """All steps for a partition's rows, with a producer of their own; `before`: as in `publish_batches`."""
        mode = self.settings.publish.delivery
        if mode == "at_most_once":
            task = TaskContext.get()
            if task is not None and task.attemptNumber() > 0:
                return None  # nobody knows what the first attempt has sent
            numbered = resume(rows, before)
        elif mode == "at_least_once":
            numbered = resume(rows, self.read_tail(partition) or before)
        if mode != "exactly_once":
            return self._send(self._producer({}), partition, numbered, headers)
        producer, tail = self._begin(partition)
        return self._send(producer, partition, resume(rows, tail or before), headers, in_transaction=True)

    def _begin(self, partition: int) -> tuple[Producer, Tail | None]:
        """Steps 1 and 2."""
        producer = self._transactional_producer(partition)
        reach("publisher.begin")
        return producer, self.read_tail(partition)

    def _send(
        self,
        producer: Producer,
        partition: int,
        numbered: Iterator[tuple[int, Outgoing]],
        headers: Headers,
        *,
        in_transaction: bool = False,
    ) -> Publication | None:
        """Steps 3 and 4."""
        first = next(numbered, None)
        if first is None:
            return None
        delivered = _Delivered()
        if in_transaction:
            producer.begin_transaction()
        seq, row = first
        self._produce(producer, partition, seq, row, delivered, headers)
        for seq, row in numbered:
            self._produce(producer, partition, seq, row, delivered, headers)
        if producer.flush(PRODUCE_TIMEOUT_S):
            raise PublishingError(self.topic, partition, f"the broker did not take every message within {PRODUCE_TIMEOUT_S} s")
        if delivered.error is not None:
            raise KafkaException(delivered.error)
        reach("publisher.commit")
        if in_transaction:
            producer.commit_transaction(PRODUCE_TIMEOUT_S)
        reach("publisher.committed")
        tail = Tail(seq, row.event_time, row.key, delivered.last_offset)
        return Publication.up_to(tail, partition, first_seq=first[0])

    def _produce(
        self, producer: Producer, partition: int, seq: int, row: Outgoing, delivered: _Delivered, headers: Headers
    ) -> None:
        reach("publisher.produce")
        said: list[tuple[str, str | bytes | None]] = [
            (SEQ, str(seq).encode()),
            (ID, message_id(partition, row.event_time, row.key).encode()),
            *headers.get((row.event_time, row.key), ()),
        ]
        until = time.monotonic() + PRODUCE_TIMEOUT_S
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
                    headers=said,
                )
            except BufferError:  # the queue is full: let deliveries make room
                producer.poll(1.0)
                if time.monotonic() > until:
                    raise PublishingError(
                        self.topic, partition, f"the broker took no message for {PRODUCE_TIMEOUT_S} s"
                    ) from None
            else:
                producer.poll(0)
                return

    def _transactional_producer(self, partition: int) -> Producer:
        """Step 1, for a producer of its own."""
        producer = self._producer(
            {
                "transactional.id": f"watersmeet-{self.settings.name}-{self.topic}-{partition}",
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_S * 1000,
            }
        )
        try:
            producer.init_transactions(TIMEOUT_S * 2)
        except KafkaException as error:
            raise self._failure(partition, error) from None
        return producer

    def _producer(self, options: Mapping[str, Any]) -> Producer:
        return Producer(
            {
                **client_options(self.settings.kafka),
                "enable.idempotence": True,
                "delivery.timeout.ms": PRODUCE_TIMEOUT_S * 1000,
                "message.max.bytes": min(self.settings.publish.max_bytes + 1024 * 1024, 1_000_000_000),
                "queue.buffering.max.kbytes": 64 * 1024,
                "linger.ms": 20,
                **options,
            }
        )

    def _failure(self, partition: int, error: KafkaException) -> WatersmeetError:
        reason = error.args[0]
        in_transaction = self.settings.publish.delivery == "exactly_once"
        if isinstance(reason, KafkaError) and (
            reason.code() in _FENCED or (in_transaction and reason.code() == KafkaError._FATAL)
        ):
            return FencedError(self.topic, partition)
        return PublishingError(self.topic, partition, reason.str() if isinstance(reason, KafkaError) else str(reason))


class HomePublisher:
    """Publishes few messages from this process, with a transactional producer for each partition that is kept.

    Steps 1 and 2 are done once for each: as long as nobody fences a producer, no transaction comes out beside its own; and one
    that was fenced commits nothing. Whether somebody else has written to the sink is seen by its length.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._kept: dict[int, tuple[Producer, int]] = {}
        """Each with the offset up to which the partition is known."""
        self._consumer: Consumer | None = None

    def publish(self, rows: pa.Table, headers: Mapping[int, Headers], tails: Mapping[int, Tail]) -> list[Publication]:
        """`Publisher.publish_batches` for rows at hand; `tails` holds what every earlier call has published."""
        is_transactional = self._publisher.settings.publish.delivery == "exactly_once"
        publish = self._publish if is_transactional else self._publisher.publish
        try:
            return list(self._publisher.publications(rows.to_batches(), headers, tails, publish))
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Others publish, or it is not known what is out: the next call settles each partition anew."""
        self._kept.clear()
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def _publish(self, partition: int, rows: Iterable[Outgoing], headers: Headers, before: Tail | None) -> Publication | None:
        end = self._end(partition)
        producer, known_end = self._kept.pop(partition, (None, 0))
        if producer is None or end > known_end:
            if len(self._kept) >= MAX_KEPT:
                self.forget()
            producer, tail = self._publisher._begin(partition)
            before = tail or before
        publication = self._publisher._send(producer, partition, resume(rows, before), headers, in_transaction=True)
        # After the last message stands the marker of its transaction.
        known_end = end if publication is None or publication.sink_offset is None else publication.sink_offset + 2
        self._kept[partition] = producer, known_end
        return publication

    def _end(self, partition: int) -> int:
        if self._consumer is None:
            self._consumer = Cluster(self._publisher.settings.kafka).consumer()
        of_sink = TopicPartition(self._publisher.topic, partition)
        _, end = self._consumer.get_watermark_offsets(of_sink, TIMEOUT_S)
        return int(end)


# What a producer says that was fenced, from then on as `_FATAL`. (A transaction that outlived its timeout is fenced too, by the
# broker; the next start settles it.)
_FENCED = (
    KafkaError._FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
)


class _Delivered:
    """Remembers the offset of the last message that the broker has taken, and the first failure."""

    last_offset = -1
    error: KafkaError | None = None

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.last_offset = max(self.last_offset, message.offset() or 0)
        elif self.error is None:
            self.error = error


def _rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[int, Outgoing]]:
    for batch in batches:
        partitions, event_times, keys, values = (batch.column(i).to_pylist() for i in range(4))
        for partition, *row in zip(partitions, event_times, keys, values, strict=True):
            yield partition, Outgoing(*row)


def _tail(message: Message) -> Tail:
    headers: dict[str, Any] = dict(message.headers() or [])
    place = message.topic() or "", message.partition() or 0, message.offset() or 0
    try:
        seq, (_, event_time, key) = int(headers[SEQ]), parse_message_id(headers[ID].decode())
    except (KeyError, ValueError):
        raise ForeignMessageError(*place) from None
    return Tail(seq, event_time, key, place[2])
