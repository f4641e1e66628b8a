"""Reading of ranges of Kafka offsets as Arrow batches, and of single messages at the ends of
partitions.

Only committed messages are read. Transaction markers, aborted messages and those that compaction
removed occupy offsets too, so a range ends where a message beyond it comes, or where Kafka says
that the partition ends there.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from operator import methodcaller
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from watersmeet.core.reading import KAFKA
from watersmeet.core.types import HEADERS, TIME
from watersmeet.errors import (
    DataLossError,
    TopicChangedError,
    UnreadableRecordsError,
    WatersmeetError,
)
from watersmeet.kafka.cluster import TIMEOUT_S, Cluster
from watersmeet.kafka.failures import failure
from watersmeet.kafka.options import ListeningConsumer
from watersmeet.settings import KafkaSettings

_LARGEST_TIMESTAMP_MS: Final = (2**63 - 1) // 1000
_POLL_S: Final = 0.02
_FIRST_LOOK_S: Final = 1.0
_KEPT_CONSUMERS: Final = 4
_FIRST_SPAN: Final = 8
_LARGEST_SPAN: Final = 20_000


BATCH_BYTES: Final = 16 * 1024 * 1024
"""Approximate number of bytes of records, unpacked, that go into an Arrow batch, and that are taken
from the client at a time.
"""

_FIRST_COUNT: Final = 1
"""Number of messages that are taken first, while nobody knows how large they are."""


_Headers: TypeAlias = "list[tuple[str, Any]]"


@dataclass(frozen=True)
class Range:
    """The offsets `[from_offset, until_offset)` of a topic-partition."""

    topic: str
    partition: int
    from_offset: int
    until_offset: int

    @property
    def size(self) -> int:
        """Number of offsets that the range spans; not all of them need to hold a record."""
        return max(self.until_offset - self.from_offset, 0)


def read_range(
    kafka: KafkaSettings,
    offset_range: Range,
    max_records: int = 10_000,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[pa.RecordBatch]:
    """Yield the committed records of a range in offset order, as batches with the columns of
    `KAFKA`.

    A batch has at most `max_records` records, and about `BATCH_BYTES` at most. A range without
    records yields nothing. Raises:

    - UnreadableRecordsError where the client cannot unpack records;
    - DataLossError where Kafka has deleted offsets of the range;
    - TopicChangedError where the partition ends before the range begins;
    - KafkaAccessError at once where the client is refused;
    - KafkaTransientError where nothing is fetched for `timeout_s` before the range has ended.
    """
    messages: list[Message] = []
    headers: list[_Headers] = []
    sizes: list[int] = []
    for chunk, chunk_sizes in _messages(kafka, offset_range, max_records, timeout_s):
        chunk_headers = [headers_of(message) for message in chunk]
        messages += chunk
        chunk.clear()  # else they would be in memory until the next ones are there
        headers += chunk_headers
        sizes += map(_with_headers, chunk_sizes, chunk_headers)
        while count := _filling(sizes, max_records):
            del sizes[:count]
            yield _batch(offset_range, _taken(messages, count), _taken(headers, count))
    if messages:
        yield _batch(offset_range, messages, headers)


def _size(message: Message) -> int:
    """Return how many bytes key and value have."""
    return len(message) + len(message.key() or b"")


def _with_headers(size: int, headers: _Headers) -> int:
    """Return how many bytes a record has whose key and value have `size`."""
    return size + sum(len(name) + len(value or b"") for name, value in headers) if headers else size


def _taken(items: list[Any], count: int) -> list[Any]:
    """Take so many of the first items out of a list, and return them."""
    taken = items[:count]
    del items[:count]
    return taken


def _filling(sizes: Sequence[int], max_records: int) -> int:
    """Return how many records of these sizes, counted from the first, fill a batch; 0 where
    they do not.
    """
    totals = list(accumulate(sizes[:max_records]))
    count = bisect_right(totals, BATCH_BYTES)
    if count < len(totals):
        return max(1, count)
    return max_records if count == max_records else 0


def _messages(
    kafka: KafkaSettings, offset_range: Range, max_records: int, timeout_s: float
) -> Iterator[tuple[list[Message], list[int]]]:
    """Yield the committed messages of a range as they come, and how many bytes key and value of
    each have: at most `max_records` at once, and fewer where they are large.
    """
    if offset_range.size == 0:
        return
    with _borrowed(kafka, offset_range.topic) as consumer:
        position = client_offset = offset_range.from_offset
        since = time.monotonic()
        is_ended = False
        count = min(max_records, _FIRST_COUNT)
        consumer.assign([TopicPartition(offset_range.topic, offset_range.partition, position)])
        while position < offset_range.until_offset and not is_ended:
            events = consumer.consume(min(count, offset_range.until_offset - position), _POLL_S)
            messages = [event for event in events if event.error() is None]
            others = [event for event in events if event.error() is not None]
            del events
            has_messages = bool(messages)
            if messages:
                since = time.monotonic()
                position = (messages[-1].offset() or 0) + 1
                sizes = list(map(_size, messages))
                count = min(
                    max_records, 4 * count, max(1, len(sizes) * BATCH_BYTES // max(1, sum(sizes)))
                )
                if position > offset_range.until_offset:
                    messages = [
                        message
                        for message in messages
                        if (message.offset() or 0) < offset_range.until_offset
                    ]
                yield messages, sizes[: len(messages)]
            if position < offset_range.until_offset:
                is_ended = any(
                    _is_end(kafka, error, event, offset_range, position)
                    for event in others
                    if (error := event.error())
                )
            if not has_messages and not is_ended:
                # Of a long aborted transaction no message comes, only the client gets on.
                before = client_offset
                client_offset = consumer.next_offset(offset_range.topic, offset_range.partition)
                if offset_range.from_offset < client_offset != before:
                    since = time.monotonic()
                consumer.errors.check(since, timeout_s, "READ", f"topic {offset_range.topic}")


def _is_end(
    kafka: KafkaSettings, error: KafkaError, event: Message, offset_range: Range, position: int
) -> bool:
    """Return True where an event says that the range holds nothing more; raise the error that it
    reports.
    """
    code = error.code()
    if code == KafkaError._PARTITION_EOF:
        return (event.offset() or 0) >= offset_range.until_offset
    # Librdkafka looks for the group's coordinator, which is not needed.
    if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
        return False
    if code == KafkaError._AUTO_OFFSET_RESET:
        raise _lost(kafka, offset_range, position)
    if code == KafkaError._BAD_COMPRESSION:
        end = _end_of_unreadable(kafka, offset_range, position, event.offset())
        raise UnreadableRecordsError(offset_range.topic, offset_range.partition, position, end)
    raise failure(kafka, error, "READ", f"topic {offset_range.topic}")


def _lost(kafka: KafkaSettings, offset_range: Range, position: int) -> WatersmeetError:
    topic = offset_range.topic
    partition = offset_range.partition
    first, end = Cluster(kafka).bounds_of(topic, [partition])[partition]
    if first > position:
        missing = {partition: (position, min(first, offset_range.until_offset))}
        return DataLossError(topic, topic, missing)
    return TopicChangedError(
        f"{topic}[{partition}] ends at offset {end}, and {position} is to be read next: it "
        "was deleted and created again, or has lost its end",
        fix="use another lake for another topic",
    )


def _end_of_unreadable(
    kafka: KafkaSettings, offset_range: Range, position: int, first: int | None
) -> int:
    """Return the end offset of the records that were sent together, cannot be unpacked and include
    `position`.

    `first`: where they begin.
    """
    topic = offset_range.topic
    partition = offset_range.partition

    def is_among_them(offset: int) -> bool:
        """Return True where a client that is to read from this offset on meets the same records.

        A client without an answer has met others.
        """
        deadline = time.monotonic() + TIMEOUT_S
        consumer.assign([TopicPartition(topic, partition, offset)])
        while time.monotonic() < deadline:
            for event in consumer.consume(1, _POLL_S):
                error = event.error()
                return (
                    error is not None
                    and error.code() == KafkaError._BAD_COMPRESSION
                    and event.offset() == first
                )
        return False

    with _borrowed(kafka, topic) as consumer:
        last_inside = position
        _, end = Cluster(kafka).bounds_of(topic, [partition])[partition]
        while end - last_inside > 1:
            middle = min(last_inside + (end - last_inside) // 2, 2 * last_inside - position + 1)
            if is_among_them(middle):
                last_inside = middle
            else:
                end = middle
    return end


def _batch(
    offset_range: Range, messages: Sequence[Message], headers: Sequence[_Headers]
) -> pa.RecordBatch:
    count = len(messages)
    kinds, times = zip(*[message.timestamp() for message in messages], strict=True)
    # A producer may send any number as a timestamp. One that microseconds cannot hold becomes the
    # nearest that they can.
    times_us = (
        np.clip(np.array(times, np.int64), -_LARGEST_TIMESTAMP_MS, _LARGEST_TIMESTAMP_MS) * 1000
    )
    # Librdkafka counts from 0 (none), Spark and Kafka from -1.
    columns = [
        pa.repeat(pa.scalar(offset_range.topic), count),
        pa.repeat(pa.scalar(offset_range.partition, pa.int32()), count),
        pa.array([message.offset() for message in messages], pa.int64()),
        pa.array(times_us).view(TIME),
        pa.array(np.array(kinds, np.int32) - 1),
        pa.array([message.key() for message in messages], pa.binary()),
        _values([message.value() for message in messages]),
        _header_column(headers),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=KAFKA)


def _values(values: Sequence[bytes | None]) -> pa.Array:
    """Return values as a column; one that is alone, as large ones are, is not copied."""
    if len(values) != 1 or (value := values[0]) is None:
        return pa.array(values, pa.binary())
    offsets = pa.py_buffer(np.array([0, len(value)], np.int32))
    return pa.BinaryArray.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(value)])


def _header_column(headers: Sequence[_Headers]) -> pa.Array:
    """Return the headers of records as a column, null where a record has none."""
    if not any(headers):
        return pa.nulls(len(headers), HEADERS)
    pairs = [each or None for each in headers]
    return pa.array(pairs, pa.map_(pa.string(), pa.binary())).cast(HEADERS)


_headers: Final = methodcaller("headers")
"""A call of `message.headers()`. Python checks for an error after every such call; after a direct
one it does so only until it has optimised the call.
"""


def headers_of(message: Message) -> _Headers:
    """Return a message's headers in their order; none where a header's name is not UTF-8.

    Any producer may send such a name. The client then gives none of the message's headers: it
    returns something while the UnicodeDecodeError is set, of which Python makes a SystemError. Ask
    for them once: of a second call it returns a list with holes, which ends the process.
    """
    try:
        headers: Any = _headers(message)
    except (UnicodeDecodeError, SystemError) as error:
        if not isinstance(error.__cause__ or error, UnicodeDecodeError):
            raise
        return []
    return headers or []


def first_times(
    kafka: KafkaSettings, topic: str, offsets: Mapping[int, int], timeout_s: float
) -> dict[int, int]:
    """Return, by partition, Kafka's timestamp (ms) of the record at an offset, committed or not, or
    of the next one.

    A partition that does not answer in time is left out. Raises what `read_range` raises where the
    client is refused.
    """
    if not offsets:
        return {}
    times: dict[int, int] = {}
    with _borrowed(kafka, topic, isolation_level="read_uncommitted") as consumer:
        consumer.assign([TopicPartition(topic, p, offset) for p, offset in offsets.items()])
        deadline = time.monotonic() + timeout_s
        while len(times) < len(offsets) and time.monotonic() < deadline:
            for message in consumer.consume(1_000, _POLL_S):
                if message.error() is None:
                    times.setdefault(message.partition() or 0, message.timestamp()[1])
    return times


# -- consumers are kept: Python workers of Spark serve many tasks, and a connection costs more than
# a small range

_idle: dict[tuple[int, str, str], list[ListeningConsumer]] = {}
"""Consumers that are not in use, by process (a client does not survive a fork) and options."""


@contextlib.contextmanager
def _borrowed(kafka: KafkaSettings, topic: str, **own: str) -> Iterator[ListeningConsumer]:
    """Provide a consumer for these options that nobody else in this process uses, and that knows
    the leaders of the topic; one that failed is not kept.
    """
    options = kafka.model_dump_json(include={"bootstrap_servers", "options"})
    consumers = _idle.setdefault((os.getpid(), options, repr(own)), [])
    try:
        consumer = consumers.pop()
        consumer.consume(1, 0)  # errors from before do not count
    except IndexError:
        consumer = ListeningConsumer(kafka, **own)
    try:
        if topic not in consumer.topics:
            # Librdkafka itself asks for the leaders of a topic that is new to it up to a second
            # later. Whoever is refused hears why while reading.
            with contextlib.suppress(KafkaException):
                consumer.list_topics(topic, timeout=_FIRST_LOOK_S)
            consumer.topics.add(topic)
        yield consumer
    except GeneratorExit:
        pass
    except BaseException:
        consumer.close()
        raise
    consumer.unassign()
    if len(consumers) < _KEPT_CONSUMERS:
        consumers.append(consumer)
    else:
        consumer.close()


# -- single messages


def read_backwards(
    kafka: KafkaSettings, topic: str, partition: int, bounds: tuple[int, int] | None = None
) -> Iterator[Message]:
    """Yield the committed messages of a partition from its end backwards, read in chunks as they
    are asked for. The chunks grow: mostly the last message is all that is needed.

    `bounds`: those of the partition, where they have been asked for. Raises what `read_range`
    raises.
    """
    first, end = bounds or Cluster(kafka).bounds_of(topic, [partition])[partition]
    span = _FIRST_SPAN
    while first < end:
        start = max(first, end - span)
        chunks = list(_messages(kafka, Range(topic, partition, start, end), span, TIMEOUT_S))
        yield from (message for chunk, _ in reversed(chunks) for message in reversed(chunk))
        end = start
        span = min(8 * span, _LARGEST_SPAN)


def read_tails(
    kafka: KafkaSettings,
    topic: str,
    partitions: int,
    bounds: Mapping[int, tuple[int, int]] | None = None,
    is_wanted: Callable[[Message], bool] = lambda _: True,
) -> dict[int, Message]:
    """Return the last wanted committed message of every partition that holds one, reading several
    partitions at a time.

    `bounds`: those of the partitions, where they have been asked for. Raises what `read_range`
    raises.
    """
    within = Cluster(kafka).bounds(topic, partitions) if bounds is None else bounds
    with ThreadPoolExecutor(_KEPT_CONSUMERS) as pool:
        last = pool.map(
            lambda p: next(filter(is_wanted, read_backwards(kafka, topic, p, within[p])), None),
            within,
        )
        return {p: message for p, message in zip(within, last, strict=True) if message is not None}
