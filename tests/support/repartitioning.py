"""Topics of any key and number of partitions, and what must come of them when they are repartitioned."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from confluent_kafka import Producer

from pipelines.core.columns import NO_TIME
from tests.support.cases import BAD_VALUES, as_record, heartbeat, keyed
from tests.support.topics import consume

KAFKA_TIME_MS = 1_000_000


class Place(NamedTuple):
    """Where a record was."""

    topic: str
    partition: int
    offset: int


class Copy(NamedTuple):
    """A message of a repartitioned topic, without its offset: that differs where transactions are cut differently."""

    origin: Place
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int


@dataclass
class Raw:
    """A topic that is filled without regard to keys, and all that it holds: by partition the values, in order of offset."""

    kafka: str
    topic: str
    values: dict[int, list[bytes | None]]
    headers: dict[Place, tuple[tuple[str, bytes | None], ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, kafka: str, topic: str, partitions: int) -> Raw:
        """Of a topic that exists and is empty."""
        return cls(kafka, topic, {p: [] for p in range(partitions)})

    def send(self, records: Iterable[tuple[int, bytes | None]]) -> None:
        """Sends (partition, value) pairs, each with a key that says nothing and a header."""
        producer = Producer({"bootstrap.servers": self.kafka})
        for partition, value in records:
            offset = len(self.values[partition])
            headers: list[tuple[str, str | bytes | None]] = [("n", str(offset).encode()), ("none", None)]
            producer.produce(self.topic, value, b"any", partition, timestamp=KAFKA_TIME_MS + offset, headers=headers)
            self.values[partition].append(value)
        assert producer.flush(30) == 0

    def flow(self, seed: int, begin: int, records: int = 30) -> None:
        """Sends a second of event time to every partition: keys anywhere, disorder, late and bad records, heartbeats."""
        rng, sent = random.Random(f"{self.topic}/{seed}"), []
        for partition in self.values:
            for n in range(records):
                time_ms = begin + 1000 * n // records
                roll = rng.random()
                if roll < 0.1:
                    value = rng.choice(BAD_VALUES)
                elif roll < 0.25:
                    value = heartbeat(time_ms)
                else:
                    late_by = rng.choice([0, 0, 0, 50, 900])
                    value = keyed(f"key {rng.randrange(12)}", max(0, time_ms - late_by), n=rng.randrange(10**6))
                sent.append((partition, value))
            sent.append((partition, heartbeat(begin + 1000)))
        rng.shuffle(sent)
        self.send(sent)

    def expected(self, partitions: int) -> dict[int, list[Copy]]:
        """What a topic of so many partitions gets of it, by partition in order: the lockstep of a few lines of Python."""
        found: dict[int, list[Copy]] = {p: [] for p in range(partitions)}
        passed, heads = dict.fromkeys(self.values, 0), dict.fromkeys(self.values, NO_TIME)
        while ahead := [p for p, values in self.values.items() if passed[p] < len(values)]:
            records = {p: as_record("", passed[p], self.values[p][passed[p]]) for p in ahead}
            positions = {p: heads[p] if (r := records[p]) is None else max(heads[p], r.event_time) for p in ahead}
            p = min(ahead, key=lambda p: (positions[p], p))
            offset, value, record = passed[p], self.values[p][passed[p]], records[p]
            own = (("n", str(offset).encode()), ("none", None))
            copy = Copy(Place(self.topic, p, offset), b"any", value, own, KAFKA_TIME_MS + offset)
            if record is not None and record.key is None:
                targets = list(found)
            else:
                key = key_of(value) if record is None else record.key
                targets = [p % partitions if key is None else home(key.encode(), partitions)]
            for target in targets:
                found[target].append(copy)
            passed[p], heads[p] = offset + 1, positions[p]
        return found


def key_of(value: bytes | None) -> str | None:
    """The key that a bad value has all the same."""
    try:
        document: Any = orjson.loads(value or b"")
    except orjson.JSONDecodeError:
        return None
    return document.get("k") if isinstance(document, dict) else None


def home(key: bytes, partitions: int) -> int:
    """The partition of Java's default partitioner, in numbers of 32 bits with a sign, as Java has them."""

    def int32(n: int) -> int:
        return (n + 2**31) % 2**32 - 2**31

    def shifted(n: int, by: int) -> int:
        return (n % 2**32) >> by

    m, h = 0x5BD1E995, int32(0x9747B28C ^ len(key))
    for i in range(0, len(key) - 3, 4):
        k = int32(int.from_bytes(key[i : i + 4], "little", signed=True) * m)
        h = int32(h * m) ^ int32((k ^ shifted(k, 24)) * m)
    if rest := key[len(key) & ~3 :]:
        h = int32((h ^ int.from_bytes(rest, "little")) * m)
    h = int32((h ^ shifted(h, 13)) * m)
    return ((h ^ shifted(h, 15)) & 0x7FFFFFFF) % partitions


def copied(kafka: str, topic: str, partitions: int) -> dict[int, list[Copy]]:
    """What a repartitioned topic holds, by partition in order."""
    found: dict[int, list[Copy]] = {p: [] for p in range(partitions)}
    for message in consume(kafka, topic, partitions):
        own = [one for one in message.headers() if not one[0].startswith("watersmeet.")]
        of_topic, partition, offset = dict(message.headers())["watersmeet.origin"].decode().rsplit("/", 2)
        place = Place(of_topic, int(partition), int(offset))
        found[message.partition()].append(Copy(place, message.key(), message.value(), tuple(own), message.timestamp()[1]))
    return found


def read_by(kafka: str, topic: str, partitions: int) -> Mapping[int, dict[int, bytes | None]]:
    """By partition and offset, the values of a topic's committed messages."""
    found: dict[int, dict[int, bytes | None]] = {p: {} for p in range(partitions)}
    for message in consume(kafka, topic, partitions):
        found[message.partition()][message.offset()] = message.value()
    return found
