"""Reading of ranges of Kafka offsets as Arrow batches, and of the last messages of partitions.

Only committed messages are read. Transaction markers, aborted messages and those that compaction
removed occupy offsets too, so a range ends where a message beyond it comes, or where Kafka says
that the partition ends there.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import add, methodcaller
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from watersmeet.core.plan import OpenTransaction
from watersmeet.core.reading import KAFKA
from watersmeet.core.times import LAST_EVENT_TIME_MS
from watersmeet.core.types import HEADERS, TIME
from watersmeet.errors import (
    DataLossError,
    KafkaTransientError,
    NewLeaderError,
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

SMALLEST_SPLIT = 20_000
"""Smallest part of a range that is split: of a smaller one, the task would cost more."""

BATCH_BYTES: Final = 16 * 1024 * 1024
"""About how many bytes go into an Arrow batch, unpacked, and come from the client at once."""

_FIRST_COUNT: Final = 1
"""Number of messages that are taken first, while nobody knows how large they are."""


_ENDS: Final = {KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET}
"""Errors that say that a partition has no record at an offset, or behind it."""

_Headers: TypeAlias = "list[tuple[str, Any]]"
Partition = TypeVar("Partition", str, int)


@dataclass(frozen=True)
class Range:
    """The offsets `[from_offset, until_offset)` of a topic-partition."""

    topic: str
    partition: int
    from_offset: int
    until_offset: int
    leader_epoch: int | None = None
    """The last leader's term whose records are read (`Cluster.leader_epochs`); None for any."""

    @property
    def size(self) -> int:
        """Number of offsets that the range spans; not all of them need to hold a record."""
        return max(self.until_offset - self.from_offset, 0)


def share(backlog: Mapping[Partition, int], limit: int) -> dict[Partition, int]:
    """Return how many offsets of each partition a batch of about `limit` takes.

    They are in proportion to the backlog; every partition with one gets at least one offset.
    """
    least = {p: min(waiting, 1) for p, waiting in backlog.items()}
    rest = sum(backlog.values()) - sum(least.values())
    room = min(max(limit - sum(least.values()), 0), rest)
    return {
        p: least[p] + (waiting - least[p]) * room // max(rest, 1) for p, waiting in backlog.items()
    }


def split_ranges(ranges: Sequence[Range], parallelism: int) -> list[Range]:
    """Return the ranges that are not empty, large ones cut so that `parallelism` tasks have work.

    No part of a cut range has fewer than `SMALLEST_SPLIT` offsets.
    """
    share_of_task = max(sum(whole.size for whole in ranges) / max(parallelism, 1), 1)
    parts = []
    for whole in ranges:
        if whole.size == 0:
            continue
        count = max(min(math.ceil(whole.size / share_of_task), whole.size // SMALLEST_SPLIT), 1)
        cuts = [whole.from_offset + whole.size * i // count for i in range(count + 1)]
        parts += [
            replace(whole, from_offset=since, until_offset=until) for since, until in pairwise(cuts)
        ]
    return parts


def read_range(
    kafka: KafkaSettings,
    offset_range: Range,
    max_records: int = 10_000,
    timeout_s: float = TIMEOUT_S,
) -> Generator[pa.RecordBatch]:
    """Yield the committed records of a range in offset order, as batches with the columns of
    `KAFKA`.

    A batch has at most `max_records` records, and about `BATCH_BYTES` at most. A range without
    records yields nothing. Raises:

    - UnreadableRecordsError where the client cannot unpack records;
    - DataLossError where Kafka has deleted offsets of the range;
    - TopicChangedError where the partition ends before the range begins;
    - NewLeaderError where a later leader has appended records (`leader_epoch`), or the partition
      has lost its end meanwhile and was filled again;
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
        sizes += map(add, chunk_sizes, map(_header_bytes, chunk_headers))
        while count := _filling(sizes, max_records):
            del sizes[:count]
            yield _batch(offset_range, _taken(messages, count), _taken(headers, count))
    if messages:
        yield _batch(offset_range, messages, headers)


def _header_bytes(headers: _Headers) -> int:
    return sum(len(name) + len(value or b"") for name, value in headers)


def _taken(items: list[Any], count: int) -> list[Any]:
    taken = items[:count]
    del items[:count]
    return taken


def _filling(sizes: Sequence[int], max_records: int) -> int:
    # 0 where they do not fill a batch.
    totals = list(accumulate(sizes[:max_records]))
    count = bisect_right(totals, BATCH_BYTES)
    if count < len(totals):
        return max(1, count)
    return max_records if count == max_records else 0


def _messages(
    kafka: KafkaSettings, offset_range: Range, max_records: int, timeout_s: float
) -> Iterator[tuple[list[Message], list[int]]]:
    # At most `max_records` at once, fewer where they are large; with the bytes of key and value.
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
                _check_leader(offset_range, position, messages[-1])
                position = (messages[-1].offset() or 0) + 1
                sizes = [len(each) + len(each.key() or b"") for each in messages]
                count = min(
                    max_records, 4 * count, max(1, len(sizes) * BATCH_BYTES // max(1, sum(sizes)))
                )
                until = offset_range.until_offset
                if position > until:
                    messages = [each for each in messages if (each.offset() or 0) < until]
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
        raise UnreadableRecordsError(
            f"{offset_range.topic}[{offset_range.partition}] cannot be read at offset {position}: "
            f"unpacked, what was sent together there (offsets {position} to {end - 1}) has more "
            "bytes than receive.message.max.bytes, or it is damaged",
            fix="set that to 2147483647 in kafka.options, or give these records up: delete what "
            f"is before offset {end} from Kafka, and set kafka.on_data_loss: continue",
        )
    raise failure(kafka, error, "READ", f"topic {offset_range.topic}")


def _check_leader(offset_range: Range, position: int, message: Message) -> None:
    # Of later leaders' records, those that come last are the latest's.
    latest = offset_range.leader_epoch
    if latest is not None and (message.leader_epoch() or 0) > latest:
        raise NewLeaderError(offset_range.topic, offset_range.partition, position)


def _lost(kafka: KafkaSettings, offset_range: Range, position: int) -> WatersmeetError:
    topic = offset_range.topic
    partition = offset_range.partition
    first, end = Cluster(kafka).bounds_of(topic, [partition])[partition]
    if first > position:
        missing = {partition: (position, min(first, offset_range.until_offset))}
        return DataLossError(topic, topic, missing)
    if end >= position:  # as librdkafka has found, and what was read before may be another's
        return NewLeaderError(topic, partition, position)
    return TopicChangedError(
        f"{topic}[{partition}] ends at offset {end}, and {position} is to be read next: it "
        "was deleted and created again, or has lost its end",
        fix="use another lake for another topic",
    )


def _end_of_unreadable(
    kafka: KafkaSettings, offset_range: Range, position: int, first: int | None
) -> int:
    # The end of records that were sent together from `first` on, and cannot be unpacked.
    topic = offset_range.topic
    partition = offset_range.partition

    def is_among_them(offset: int) -> bool:
        deadline = time.monotonic() + TIMEOUT_S
        consumer.assign([TopicPartition(topic, partition, offset)])
        while time.monotonic() < deadline:
            for event in consumer.consume(1, _POLL_S):
                is_unreadable = (error := event.error()) and (
                    error.code() == KafkaError._BAD_COMPRESSION
                )
                return bool(is_unreadable) and event.offset() == first
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
    limit_ms = _LARGEST_TIMESTAMP_MS
    times_us = np.clip(np.array(times, np.int64), -limit_ms, limit_ms) * 1000
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
    if len(values) != 1 or (value := values[0]) is None:
        return pa.array(values, pa.binary())
    offsets = pa.py_buffer(np.array([0, len(value)], np.int32))
    return pa.BinaryArray.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(value)])


def _header_column(headers: Sequence[_Headers]) -> pa.Array:
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

    Of such a name, which any producer may send, the client makes a UnicodeDecodeError, perhaps in a
    SystemError. Ask once for the headers of a message: the second call returns a list with holes,
    which ends the process.
    """
    try:
        headers: Any = _headers(message)
    except (UnicodeDecodeError, SystemError) as error:
        if not isinstance(error.__cause__ or error, UnicodeDecodeError):
            raise
        return []
    return headers or []


def first_messages(
    kafka: KafkaSettings,
    topic: str,
    offsets: Mapping[int, int],
    timeout_s: float = TIMEOUT_S,
    **own: str,
) -> dict[int, Message]:
    """Return, by partition, the first message at or behind an offset, if there is one.

    Raises what `read_range` raises where Kafka does not answer.
    """
    first = dict[int, Message | None]()
    if not offsets:
        return {}
    with _borrowed(kafka, topic, **own) as consumer:
        consumer.assign([TopicPartition(topic, p, offset) for p, offset in offsets.items()])
        since = time.monotonic()
        while len(first) < len(offsets):
            for event in consumer.consume(1_000, _POLL_S):
                error = event.error()
                if error is None or error.code() in _ENDS:
                    first.setdefault(event.partition() or 0, None if error else event)
            consumer.errors.check(since, timeout_s, "READ", f"topic {topic}")
    return {p: message for p, message in first.items() if message is not None}


def timestamp_ms(message: Message) -> int:
    """Return a message's timestamp (ms), or the nearest that microseconds can hold."""
    return max(-_LARGEST_TIMESTAMP_MS, min(message.timestamp()[1], _LARGEST_TIMESTAMP_MS))


# -- consumers are kept: Python workers of Spark serve many tasks, and a connection costs more than
# a small range

_idle: dict[tuple[int, str, str], list[ListeningConsumer]] = {}
"""Consumers that are not in use, by process (a client does not survive a fork) and options."""


@contextlib.contextmanager
def _borrowed(kafka: KafkaSettings, topic: str, **own: str) -> Iterator[ListeningConsumer]:
    # Nobody else in this process uses the consumer meanwhile, and it knows the topic's leaders.
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
    """Yield a partition's committed messages from its end (`bounds`) backwards, in growing chunks.

    Raises what `read_range` raises.
    """
    first, end = bounds or Cluster(kafka).bounds_of(topic, [partition])[partition]
    span = _FIRST_SPAN
    while first < end:
        start = max(first, end - span)
        chunks = list(_messages(kafka, Range(topic, partition, start, end), span, TIMEOUT_S))
        size = sum(sum(sizes) for _, sizes in chunks) // (end - start)
        while chunks:
            chunk, _ = chunks.pop()
            while chunk:
                yield chunk.pop()
        end = start
        span = max(1, min(8 * span, _LARGEST_SPAN, BATCH_BYTES // max(1, size)))


def read_tails(
    kafka: KafkaSettings,
    topic: str,
    partitions: int,
    bounds: Mapping[int, tuple[int, int]] | None = None,
    is_wanted: Callable[[Message], bool] = lambda _: True,
) -> dict[int, Message]:
    """Return the last wanted committed message of every partition that holds one.

    `bounds`: those of the partitions, if known. Raises what `read_range` raises.
    """
    within = Cluster(kafka).bounds(topic, partitions) if bounds is None else bounds

    def last(p: int) -> Message | None:
        return next(filter(is_wanted, read_backwards(kafka, topic, p, within[p])), None)

    with ThreadPoolExecutor(_KEPT_CONSUMERS) as pool:
        tails = dict(zip(within, pool.map(last, within), strict=True))
    return {p: message for p, message in tails.items() if message is not None}


def open_transactions(
    cluster: Cluster, topic: str, partitions: Iterable[int]
) -> tuple[dict[int, tuple[int, int]], dict[int, OpenTransaction]]:
    """Return `Cluster.bounds_of` partitions, and the oldest open transaction of each with one."""
    bounds, behind = cluster.bounds_and_unsettled(topic, partitions)
    firsts = {p: bounds[p][1] for p in behind}
    messages = dict[int, Message]()
    with contextlib.suppress(KafkaTransientError):
        messages = first_messages(
            cluster.kafka, topic, firsts, cluster.timeout_s, isolation_level="read_uncommitted"
        )
    times = {p: message.timestamp()[1] for p, message in messages.items()}
    valid_times = {p: time_ms for p, time_ms in times.items() if 0 <= time_ms <= LAST_EVENT_TIME_MS}
    return bounds, {p: OpenTransaction(firsts[p], behind[p], valid_times.get(p)) for p in behind}
