"""Topics of any key and number of partitions, and what must come of them when they are
repartitioned."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from confluent_kafka import Producer

from tests.support.avro import BAD_BYTES
from tests.support.cases import BAD_VALUES, SOURCES, Case, as_record, heartbeat, keyed
from tests.support.rivers import TIMEOUT_MS, River
from tests.support.topics import Access, client_options, consume, create_topics
from watersmeet.core.columns import NULL_TIME

KAFKA_TIME_MS = 1_000_000


class SortKey(NamedTuple):
    """Where a record was."""

    topic: str
    partition: int
    offset: int


class Copy(NamedTuple):
    """A message of a repartitioned topic, without its offset: that differs where transactions are
    cut differently."""

    origin: SortKey
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp: int


@dataclass
class Raw:
    """A topic that is filled without regard to keys, and all that it holds: by partition the
    values, in order of offset."""

    kafka: Access
    topic: str
    values: dict[int, list[bytes | None]]
    encode: Callable[[bytes | None], bytes | None] = lambda value: value
    """What is sent for a value."""
    sent: dict[SortKey, bytes | None] = field(default_factory=dict)

    @classmethod
    def of(cls, kafka: Access, topic: str, partitions: int) -> Raw:
        """Of a topic that exists and is empty."""
        return cls(kafka, topic, {p: [] for p in range(partitions)})

    def send(self, records: Iterable[tuple[int, bytes | None]]) -> None:
        """Sends (partition, value) pairs, each with a key that says nothing and a header."""
        producer = Producer(client_options(self.kafka))
        for partition, value in records:
            offset = len(self.values[partition])
            headers: list[tuple[str, str | bytes | None]] = [
                ("n", str(offset).encode()),
                ("none", None),
            ]
            content = self.sent[SortKey(self.topic, partition, offset)] = self.encode(value)
            producer.produce(
                self.topic,
                content,
                b"any",
                partition,
                timestamp=KAFKA_TIME_MS + offset,
                headers=headers,
            )
            self.values[partition].append(value)
        assert producer.flush(30) == 0

    def flow(self, seed: int, begin: int, records: int = 30) -> None:
        """Sends a second of event time to every partition: keys anywhere, disorder, late and bad
        records, heartbeats."""
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
                    value = keyed(
                        f"key {rng.randrange(12)}",
                        max(0, time_ms - late_by),
                        n=rng.randrange(10**6),
                    )
                sent.append((partition, value))
            sent.append((partition, heartbeat(begin + 1000)))
        rng.shuffle(sent)
        self.send(sent)


class Raws(list[Raw]):
    """All topics that the records of a source come from."""

    def flow(self, seed: int, begin: int, records: int = 30) -> None:
        """Sends a second of event time to every partition of each."""
        for raw in self:
            raw.flow(seed, begin, records)

    def send(self, records: Iterable[tuple[int, bytes | None]]) -> None:
        """Sends the records to the one topic."""
        [raw] = self
        raw.send(records)

    def beat(self, time_ms: int) -> None:
        """Sends a heartbeat to every partition of each."""
        for raw in self:
            raw.send((p, heartbeat(time_ms)) for p in raw.values)

    def expected(self, partitions: int) -> dict[int, list[Copy]]:
        """What a topic of so many partitions gets of them, by partition in order."""
        return expected_of(self, partitions)

    @property
    def sizes(self) -> dict[str, dict[int, int]]:
        """By topic and partition, how many records there are."""
        return {raw.topic: {p: len(values) for p, values in raw.values.items()} for raw in self}


def expected_of(raws: Sequence[Raw], partitions: int) -> dict[int, list[Copy]]:
    """What a topic of so many partitions gets of these topics, by partition in order: the lockstep
    of a few lines of Python."""
    found: dict[int, list[Copy]] = {p: [] for p in range(partitions)}
    inputs = {(raw.topic, p): values for raw in raws for p, values in raw.values.items()}
    sent = {place: content for raw in raws for place, content in raw.sent.items()}
    passed, heads = dict.fromkeys(inputs, 0), dict.fromkeys(inputs, NULL_TIME)
    while ahead := [of for of, values in inputs.items() if passed[of] < len(values)]:
        records = {of: as_record("", passed[of], inputs[of][passed[of]]) for of in ahead}
        positions = {
            of: heads[of] if (r := records[of]) is None else max(heads[of], r.event_time)
            for of in ahead
        }
        of = min(ahead, key=lambda of: (positions[of], of))
        offset, value, record = passed[of], inputs[of][passed[of]], records[of]
        own = (("n", str(offset).encode()), ("none", None))
        place = SortKey(*of, offset)
        copy = Copy(place, b"any", sent[place], own, KAFKA_TIME_MS + offset)
        if record is not None and record.key is None:
            targets = list(found)
        else:
            key = key_of(value, sent[place]) if record is None else record.key
            targets = [
                of[1] % partitions if key is None else expected_partition(key.encode(), partitions)
            ]
        for target in targets:
            found[target].append(copy)
        passed[of], heads[of] = offset + 1, positions[of]
    return found


def key_of(value: bytes | None, sent: bytes | None) -> str | None:
    """The key that a bad value has all the same, as it was sent."""
    if sent in BAD_BYTES:
        return None
    try:
        document: Any = orjson.loads(value or b"")
    except orjson.JSONDecodeError:
        return None
    return document.get("k") if isinstance(document, dict) else None


def expected_partition(key: bytes, partitions: int) -> int:
    """The partition of Java's default partitioner, in numbers of 32 bits with a sign, as Java has
    them."""

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


def copied(kafka: Access, topic: str, partitions: int) -> dict[int, list[Copy]]:
    """What a repartitioned topic holds, by partition in order."""
    return {
        p: [*copies.values()] for p, copies in copies_by_offset(kafka, topic, partitions).items()
    }


def copies_by_offset(kafka: Access, topic: str, partitions: int) -> dict[int, dict[int, Copy]]:
    """By partition and offset, what a repartitioned topic holds."""
    found: dict[int, dict[int, Copy]] = {p: {} for p in range(partitions)}
    for message in consume(kafka, topic, partitions):
        own = [one for one in message.headers() if not one[0].startswith("watersmeet.")]
        of_topic, partition, offset = (
            dict(message.headers())["watersmeet.origin"].decode().rsplit("/", 2)
        )
        place = SortKey(of_topic, int(partition), int(offset))
        copy = Copy(place, message.key(), message.value(), tuple(own), message.timestamp()[1])
        found[message.partition()][message.offset()] = copy
    return found


Counts = Sequence[int | Sequence[int]]
"""By source the number of partitions of the topic that its records come from, or those of
several."""


def confluence(
    kafka: Access, folder: Path, name: str, counts: Counts, partitions: int, **overrides: Any
) -> River:
    """A river whose topics come of others, with these numbers of partitions, and do not exist
    yet."""
    river = River.make(kafka, folder, f"{name}-old", partitions=partitions)
    for source, count in zip(SOURCES, counts, strict=True):
        numbers = [count] if isinstance(count, int) else count
        origins = [f"{name}-raw-{source}-{n}" for n in range(len(numbers))]
        for topic, number in zip(origins, numbers, strict=True):
            create_topics(kafka, topic, partitions=number)
        origin = origins[0] if isinstance(count, int) else origins[::-1]
        more = {
            "topic": f"{name}-{source}",
            "repartition": {"from": origin, "partitions": partitions},
        }
        river.config["sources"][source] |= more
    river.config |= {"name": name, "publish": {"topic": f"{name}-merged"}}
    river.config["kafka"] |= overrides
    river.write()
    return river


def raws(river: River, counts: Counts) -> dict[str, Raws]:
    """By source the topics that its records come from, which are empty."""
    found = {}
    for source, count in zip(SOURCES, counts, strict=True):
        topics = river.settings.repartitioned[source].from_topics
        numbers = [count] if isinstance(count, int) else count
        found[source] = Raws(
            Raw.of(river.kafka, topic, number)
            for topic, number in zip(topics, numbers, strict=True)
        )
    return found


def as_cases(
    kafka: Access, topics: Mapping[str, str], raws: Mapping[str, Raws], partitions: int
) -> dict[int, Case]:
    """What bronze reads of repartitioned topics, as the merge model takes it; an offset without a
    record is one that cannot be read.
    """
    cases = {p: Case({source: [] for source in SOURCES}, TIMEOUT_MS) for p in range(partitions)}
    for source, topic in topics.items():
        values = {raw.topic: raw.values for raw in raws[source]}
        for p, copies in copies_by_offset(kafka, topic, partitions).items():
            by_offset = {
                o: values[at.topic][at.partition][at.offset]
                for o, copy in copies.items()
                if (at := copy.origin)
            }
            cases[p].values[source] = [
                by_offset.get(offset) for offset in range(max(by_offset, default=-1) + 1)
            ]
            cases[p].arrivals += [source] * len(cases[p].values[source])
    return cases
