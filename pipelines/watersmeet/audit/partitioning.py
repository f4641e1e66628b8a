"""Checks that a key is in one partition of all sources: records of one key in two partitions never
meet.

Where a source is repartitioned, each key's partition is known: the one of Java's default
partitioner. The records of every other source must be in it, too. Elsewhere nobody but the
producers knows it, and for some of them a key in another partition is another key. So there it is
no broken promise, and only noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa

from watersmeet.audit.problems import Findings
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.repartition import murmur2
from watersmeet.core.types import NO_TENANT
from watersmeet.errors import Problem
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.settings import Settings

SAMPLED = 200
"""Number of last offsets of each topic-partition that `validate` reads."""

PARTITIONS = 32
"""About how many partitions of each source are sampled, where there are more: each is a request of
its own.
"""

ENOUGH = 10
"""Minimum number of keys shared by two sources that says how these are partitioned."""

KEYS = 100_000
"""Maximum number of keys whose places `verify` keeps."""

SPLIT_SHARE = 0.25
"""Share of these keys without a common partition above which it is no accident."""

FIX = (
    "give all sources one key and one partitioner (of librdkafka's clients `partitioner: "
    "murmur2_random` is that of Java's), or repartition those that have others "
    "(`sources.NAME.repartition`, then `watersmeet repartition`)"
)
_FIX_HOME = (
    "write it by its merge key with Java's default partitioner (murmur2), or repartition this "
    "source, too"
)


class Place(NamedTuple):
    """A record with a key, in Kafka."""

    tp: TopicPartition
    offset: int
    key: str
    tenant: str = NO_TENANT

    def __str__(self) -> str:
        return self.tp.at(self.offset)


def check_key_partition(place: Place, partitions: int, findings: Findings) -> None:
    """Report a record that is not in the partition of its key.

    For a configuration that repartitions.
    """
    if (expected_partition := murmur2(place.key.encode()) % partitions) != place.tp.partition:
        findings.add(
            f"the key {place.key!r} belongs to partition {expected_partition}: this record never "
            "meets those there",
            str(place),
            _FIX_HOME,
        )


class KeyPartitions:
    """The places in which keys were seen first: of all keys, or of a sample of up to `KEYS`."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[TopicPartition, int]] = {}
        self._split: dict[int, str] = {}
        self._one_in = 1

    def add(self, tp: TopicPartition, keys: Mapping[int, tuple[str, str]]) -> None:
        """Add the keys of a topic-partition's records, by offset, each with its tenant."""
        for offset, key in keys.items():
            number = hash(key)
            if number % self._one_in == 0:
                first, at = self._first.setdefault(number, (tp, offset))
                if first.partition != tp.partition:
                    places = f"{first.at(at)} and {tp.at(offset)}"
                    self._split.setdefault(number, places)
        while len(self._first) > KEYS:
            self._one_in *= 2
            self._first = {n: at for n, at in self._first.items() if n % self._one_in == 0}

    def note(self) -> str | None:
        """Return a note on how many keys are in more than one partition, with two records of one of
        them.

        None where no key is.
        """
        if not self._split:
            return None
        what = "keys are in more than one partition, where their records never meet"
        example = next(iter(self._split.values()))
        return f"{what}: {len(self._split):,} of those looked at, such as that of {example}; {FIX}"


def check_places(settings: Settings, partitions: int, places: Iterable[Place]) -> list[Problem]:
    """Return problems with how the sources are partitioned, judged by where some records are."""
    findings = Findings("kafka")
    if settings.repartitioned:
        for place in places:
            check_key_partition(place, partitions, findings)
        return list(findings.described())
    by_input: dict[InputId, dict[tuple[str, str], list[Place]]] = {i: {} for i in settings.inputs}
    for place in places:
        by_input[place.tp.input].setdefault((place.key, place.tenant), []).append(place)
    names = settings.input_names
    (first, of_first), *others = by_input.items()
    for other, keys in others:
        shared = sorted(keys.keys() & of_first.keys())
        split_keys = [
            key
            for key in shared
            if {place.tp.partition for place in keys[key]}.isdisjoint(
                place.tp.partition for place in of_first[key]
            )
        ]
        if len(shared) >= ENOUGH and len(split_keys) > SPLIT_SHARE * len(shared):
            example = split_keys[0]
            what = (
                f"{len(split_keys)} of {len(shared)} keys that {names[first]} and {names[other]} "
                "share are in different partitions, so that their records never meet"
            )
            where = f"key {example[0]!r}: {of_first[example][0]} and {keys[example][0]}"
            findings.add(what, where, FIX)
    return list(findings.described())


def read_sample(
    settings: Settings, partitions: int, topic: str, since: Mapping[int, int]
) -> Iterator[pa.RecordBatch]:
    """Yield the last records of some partitions of a topic; the partitions are the same for each
    topic.

    `since`: by partition, the first offset that counts.
    """
    sampled = range(0, partitions, -(-partitions // PARTITIONS))
    for p, (first, end) in Cluster(settings.kafka).bounds_of(topic, sampled).items():
        begin = max(first, end - SAMPLED, min(since.get(p, 0), end))
        yield from read_range(settings.kafka, Range(topic, p, begin, end))
