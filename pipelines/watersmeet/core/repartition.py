"""Repartitioning of a topic: the order of its records, their new partitions, and their messages.

*Order*: records are written by (position, topic, partition, offset). A record's position is the
largest event time of its own partition up to itself, as in the merge. So reading goes on in the
partition that is furthest behind, and no record that is there is late among the others that was not
late in its own partition. (With tenants one may be, if its tenant is further in another partition;
no order that leaves each partition's own as it is could prevent that.)

*Place*: a record goes to the partition that Java's default partitioner gives its merge key, a
heartbeat to every partition, and a record whose key cannot be read to its own partition's number,
modulo the number of partitions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import NULL_TIME, Int64s, groups, int64s, times_ms
from watersmeet.core.dead_letters import NEXT_OFFSETS, numbers_by_name
from watersmeet.core.headers import REDRIVEN, Headers, header_lists, place_texts
from watersmeet.core.reading import KAFKA, ReadingRules, Reason, merge_keys, read_records
from watersmeet.core.sequence import MESSAGES
from watersmeet.core.types import TIME

ORIGIN = "watersmeet.origin"
"""Header with the place where a record was before: `topic/partition/offset`."""

FROM = "watersmeet.from"
"""Header with a topic that records come from and its identity; the next two headers are about it.
"""

POSITIONS = "watersmeet.positions"
"""Header with the event time (ms) up to which the topic was written, by partition, as JSON."""

ROUTED: Final = pa.schema(
    [*KAFKA, ("event_time", TIME), ("heartbeat", pa.bool_()), ("hash", pa.int64())]
)
"""Kafka's columns, and where a record goes; `hash`: that of its merge key, null without one."""

CHUNK_ROWS: Final = 10_000
"""Number of messages that are made at a time."""


class InputPartition(NamedTuple):
    """A partition of a topic that records come from."""

    topic: str
    partition: int


class Origin(NamedTuple):
    """A record's place in a topic that records come from."""

    topic: str
    partition: int
    offset: int


_PARTITIONS: Final = 2**32
"""A number larger than a topic's number of partitions."""

_SEED = 0x9747B28C
_FACTOR = 0x5BD1E995
_ALL = 0xFFFFFFFF


def murmur2(key: bytes) -> int:
    """Return the hash (31 bits) of Kafka's default partitioner: modulo partitions, a key's one."""
    h = _SEED ^ len(key)
    whole = len(key) & ~3
    for (k,) in struct.iter_unpack("<I", key[:whole]):
        k = k * _FACTOR & _ALL
        k = (k ^ k >> 24) * _FACTOR & _ALL
        h = h * _FACTOR & _ALL ^ k
    if whole < len(key):
        h = (h ^ int.from_bytes(key[whole:], "little")) * _FACTOR & _ALL
    h = (h ^ h >> 13) * _FACTOR & _ALL
    return (h ^ h >> 15) & 0x7FFFFFFF


def assign_partitions(kafka: pa.Table | pa.RecordBatch, rules: ReadingRules) -> pa.Table:
    """Return records of `KAFKA` columns with those of `ROUTED`, by the source's own rules.

    A refused record has no event time, but goes where its key says, if it has one: it may be sent
    there once more. Raise what `read_records` raises.
    """
    read = _named(read_records(kafka, replace(rules, id=None))).select(
        [*KAFKA.names, "merge_key", "event_time", "heartbeat"]
    )
    keys = read["merge_key"].combine_chunks()
    is_refused = pc.and_(pc.is_null(keys), pc.invert(pc.fill_null(read["heartbeat"], False)))
    if pc.any(is_refused).as_py():
        refused = merge_keys(read.filter(is_refused), rules)
        keys = pc.replace_with_mask(keys, is_refused.combine_chunks(), refused)
    encoded = keys.dictionary_encode()
    hashes = pa.array([murmur2(key.encode()) for key in encoded.dictionary.to_pylist()], pa.int64())
    routed = read.drop_columns("merge_key").append_column("hash", hashes.take(encoded.indices))
    return routed.cast(ROUTED)


def _named(read: pa.Table) -> pa.Table:
    # So a too large record is refused in the copy, too, whatever becomes of tombstones there.
    is_large = pc.fill_null(pc.equal(read["reason"], Reason.TOO_LARGE.value), False)
    if not pc.any(is_large).as_py():
        return read
    values = pc.if_else(is_large, read["detail"].cast(pa.binary()), read["value"])
    return read.set_column(read.schema.get_field_index("value"), read.schema.field("value"), values)


@dataclass
class Lockstep:
    """Records of some topics that were read and not yet written, and which of them come next."""

    topics: Sequence[str]
    """All topics, in ascending order."""
    heads: dict[InputPartition, int]
    """Position (ms) of the last record added, by input partition; absent where there was none."""
    _waiting: pa.Table = field(default_factory=ROUTED.empty_table)
    _positions: Int64s = field(default_factory=lambda: np.array([], np.int64))

    def add(self, rows: pa.Table) -> None:
        """Add the next rows of `ROUTED` columns, of each input partition in order of offset."""
        times = times_ms(rows["event_time"])
        positions = np.empty_like(times)
        for number, row_numbers in groups(self._numbers(rows), int64s(rows["offset"])).items():
            input_partition = self._input(number)
            positions[row_numbers] = np.maximum(
                np.maximum.accumulate(times[row_numbers]),
                self.heads.get(input_partition, NULL_TIME),
            )
            self.heads[input_partition] = int(positions[row_numbers[-1]])
        self._waiting = pa.concat_tables([self._waiting, rows])
        self._positions = np.concatenate([self._positions, positions])

    def take(self, unread: Iterable[InputPartition]) -> tuple[pa.Table, dict[InputPartition, int]]:
        """Remove and return the records that are written next, in their order.

        Also return, by input partition, the position (ms) of the last of them. `unread`: input
        partitions with more records than were added; nothing that could come after such a record is
        taken.
        """
        numbers = self._numbers(self._waiting)
        order = np.lexsort((int64s(self._waiting["offset"]), numbers, self._positions))
        places = self._positions[order], numbers[order]
        count = len(order)
        if ahead := [(self.heads.get(place, NULL_TIME), place) for place in unread]:
            head, (topic, partition) = min(ahead)
            last = self.topics.index(topic) * _PARTITIONS + partition
            count = int(np.sum((places[0] < head) | ((places[0] == head) & (places[1] <= last))))
        reached = dict(zip(places[1][:count].tolist(), places[0][:count].tolist(), strict=True))
        taken = self._waiting.take(pa.array(order[:count]))
        rest = np.sort(order[count:])
        self._waiting = self._waiting.take(pa.array(rest))
        self._positions = self._positions[rest]
        return taken, {self._input(n): at for n, at in reached.items() if at != NULL_TIME}

    def first_offsets(self) -> dict[InputPartition, int]:
        """Return by input partition the offset of the first record that waits."""
        firsts = self._waiting.group_by(["topic", "partition"]).aggregate([("offset", "min")])
        inputs = map(InputPartition, firsts["topic"].to_pylist(), firsts["partition"].to_pylist())
        return dict(zip(inputs, firsts["offset_min"].to_pylist(), strict=True))

    def _numbers(self, rows: pa.Table) -> Int64s:
        # The numbers are ordered as the input partitions are.
        topics = pc.index_in(rows["topic"], value_set=pa.array(self.topics, pa.string()))
        return int64s(topics) * _PARTITIONS + int64s(rows["partition"])

    def _input(self, number: int) -> InputPartition:
        topic, partition = divmod(number, _PARTITIONS)
        return InputPartition(self.topics[topic], partition)


@dataclass(frozen=True)
class RepartitionProgress:
    """Progress of a repartitioning, as its messages say it."""

    topics: Mapping[str, str]
    """The topics that were read: by name, the name together with the topic's identity."""
    offsets: Mapping[InputPartition, int]
    """The next offset by input partition."""
    positions: Mapping[InputPartition, int]
    """The position (ms) there by input partition, where there is one."""

    def headers(self) -> list[tuple[str, bytes]]:
        """Return the headers that say it in a message: three for each topic."""
        headers = []
        for topic, identified in sorted(self.topics.items()):
            headers.append((FROM, identified.encode()))
            for name, by_input in ((NEXT_OFFSETS, self.offsets), (POSITIONS, self.positions)):
                numbers = {tp.partition: at for tp, at in by_input.items() if tp.topic == topic}
                options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SORT_KEYS
                headers.append((name, orjson.dumps(numbers, option=options)))
        return headers


def written(headers: Headers) -> RepartitionProgress:
    """Return what a message says of how much was written, in the headers after the last `ORIGIN`.

    Raise ValueError where they say no such thing.
    """
    begin = max((i for i, (name, _) in enumerate(headers, 1) if name == ORIGIN), default=0)
    topic_headers = [headers[i : i + 3] for i in range(begin, len(headers), 3)]
    topics: dict[str, str] = {}
    offsets: dict[InputPartition, int] = {}
    positions: dict[InputPartition, int] = {}
    for values_of_topic in topic_headers or [()]:
        values: dict[str, Any] = dict(values_of_topic)
        identified = (values.get(FROM) or b"").decode()
        topic = identified.rpartition(" (")[0]
        topics[topic] = identified
        for header, by_input in ((NEXT_OFFSETS, offsets), (POSITIONS, positions)):
            for p, number in numbers_by_name(values, header).items():
                by_input[InputPartition(topic, int(p))] = number
    return RepartitionProgress(topics, offsets, positions)


def origin_of(headers: Headers) -> Origin:
    """Return the place of the record that a message is a copy of, or raise ValueError."""
    last = next((value for name, value in reversed(headers) if name == ORIGIN), None)
    topic, partition, offset = (last or b"").decode().rsplit("/", 2)
    return Origin(topic, int(partition), int(offset))


def is_redriven(headers: Headers) -> bool:
    """Return True where a redrive sent the message, which then says nothing of what was written."""
    return bool(headers) and headers[-1][0] == REDRIVEN


def repartition_messages(
    rows: pa.Table, partitions: int, after: RepartitionProgress
) -> Iterator[pa.Table]:
    """Yield the messages (`MESSAGES`) that records of `ROUTED` columns become, one chunk at a time.

    Key, value, timestamp and headers are the record's own. Then comes `ORIGIN`, and on the last
    message of each partition what was written `after` it. A timestamp of 0, which stands for none,
    becomes 1.
    """
    is_beat = rows["heartbeat"].fill_null(False).to_numpy(zero_copy_only=False).astype(bool)
    hashes = pc.coalesce(rows["hash"], rows["partition"].cast(pa.int64()))
    expected_partition = int64s(hashes) % partitions
    times = np.where(is_beat, partitions, 1)
    numbers = np.repeat(np.arange(len(expected_partition)), times)
    nth = np.arange(len(numbers)) - np.repeat(np.cumsum(times) - times, times)
    targets = np.where(is_beat[numbers], nth, expected_partition[numbers])
    is_last = np.zeros(len(targets), bool)
    is_last[len(targets) - 1 - np.unique(targets[::-1], return_index=True)[1]] = True
    progress_headers = after.headers()
    for begin in range(0, len(numbers), CHUNK_ROWS):
        in_chunk = slice(begin, begin + CHUNK_ROWS)
        chunk = rows.take(pa.array(numbers[in_chunk])).combine_chunks()
        time = pc.divide(chunk["kafka_timestamp"].cast(pa.int64()), 1000)
        sent = {
            "partition": pa.array(targets[in_chunk]),
            "key": chunk["key"],
            "value": chunk["value"],
            "timestamp": pc.if_else(pc.equal(time, 0), 1, pc.max_element_wise(time, 0)),
            "headers": header_lists(
                [(ORIGIN, place_texts(chunk))],
                dict.fromkeys(np.flatnonzero(is_last[in_chunk]).tolist(), progress_headers),
                chunk["headers"],
            ),
        }
        yield pa.table(sent).cast(MESSAGES)
