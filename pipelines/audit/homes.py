"""Whether a key lives in one partition of all sources: records with one key in two partitions never meet.

Where a source is repartitioned, each key's partition is known: that of Java's default partitioner, which the records of every
other source must be in, too. Elsewhere nobody but the producers knows it, and some mean a key to be another one in each
partition: so there it is no broken promise, and is only told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.audit.problems import Findings, Problem
from pipelines.core.columns import Int64s
from pipelines.core.inputs import source_of
from pipelines.core.plan import TopicPartition
from pipelines.core.reading import read_records
from pipelines.core.repartition import murmur2
from pipelines.core.types import TENANT
from pipelines.kafka.cluster import Cluster
from pipelines.kafka.reading import Range, read_range
from pipelines.kafka.registry import rules_of
from pipelines.settings import Settings

SAMPLED = 200
"""So many of the last offsets of each topic-partition are looked at by `validate`."""

PARTITIONS = 32
"""In about so many partitions of each source, where there are more: each is a request of its own."""

ENOUGH = 10
"""So many keys that two sources share say how they are partitioned."""

APART = 0.25
"""A larger share of them with no partition in common is no accident."""

FIX = "give all sources one key and one partitioner, or repartition those that have others (`sources.NAME.repartition`)"
_FIX_HOME = "write it by its merge key with Java's default partitioner (murmur2), or repartition this source, too"


class Place(NamedTuple):
    """A record with a key, in Kafka; `tenant`: whose the key is, where there are tenants."""

    key: str
    source: str
    topic: str
    partition: int
    offset: int
    tenant: str | None = None

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def check_home(place: Place, partitions: int, findings: Findings) -> None:
    """A record of a configuration that repartitions is in the partition of its key."""
    if (home := murmur2(place.key.encode()) % partitions) != place.partition:
        findings.add(
            f"the key {place.key!r} belongs to partition {home}: this record never meets those there", str(place), _FIX_HOME
        )


@dataclass
class Homes:
    """In which partitions keys are: three numbers for a key of a topic-partition."""

    _topic_partitions: list[TopicPartition] = field(default_factory=list)
    _found: list[tuple[Int64s, Int64s]] = field(default_factory=list)
    """By topic-partition, the hashes of its keys and the offsets of their first records."""

    def add(self, tp: TopicPartition, keys: Mapping[int, tuple[str, str | None]]) -> None:
        """Takes note of the keys of a topic-partition's records, by offset, with their tenants, where there are some."""
        hashes, firsts = np.unique(np.fromiter(map(hash, keys.values()), np.int64), return_index=True)
        self._topic_partitions.append(tp)
        self._found.append((hashes, np.fromiter(keys, np.int64)[firsts]))

    def note(self, settings: Settings) -> str | None:
        """How many keys are in more than one partition, with two records of one of them; None where none is."""
        nothing = np.array([], np.int64)
        numbers = np.repeat(np.arange(len(self._found)), [len(hashes) for hashes, _ in self._found])
        hashes = np.concatenate([nothing, *(hashes for hashes, _ in self._found)])
        offsets = np.concatenate([nothing, *(offsets for _, offsets in self._found)])
        partitions = np.array([tp.partition for tp in self._topic_partitions], np.int64)[numbers]
        order = np.lexsort((partitions, hashes))
        hashes, partitions = hashes[order], partitions[order]
        apart = np.flatnonzero((hashes[1:] == hashes[:-1]) & (partitions[1:] != partitions[:-1]))
        if not len(apart):
            return None
        places = []
        for row in order[apart[0] : apart[0] + 2]:
            tp = self._topic_partitions[numbers[row]]
            places.append(f"{settings.inputs[tp.source]}[{tp.partition}]@{offsets[row]}")
        count = len(np.unique(hashes[apart]))
        what = "keys are in more than one partition, where their records never meet"
        return f"{what}: {count:,} of those looked at, such as that of {' and '.join(places)}; {FIX}"


def check_sample(settings: Settings, partitions: int, since: Callable[[str], Mapping[int, int]] = lambda _: {}) -> list[Problem]:
    """What the last records of some partitions say of how the sources are partitioned. Raises what Kafka raises.

    `since`: of an input, by partition the first offset whose record the settings' rules are for; absent: every one.
    """
    findings, found = Findings("kafka"), list(_sampled(settings, partitions, since))
    if settings.repartitioned:
        for place in found:
            check_home(place, partitions, findings)
        return list(findings.told())
    by_source: dict[str, dict[tuple[str, str], list[Place]]] = {name: {} for name in settings.inputs}
    for place in found:
        by_source[place.source].setdefault((place.key, place.tenant or ""), []).append(place)
    first, *others = by_source.items()
    for name, keys in others:
        shared = sorted(keys.keys() & first[1].keys())
        apart = [key for key in shared if not _partitions(keys[key]) & _partitions(first[1][key])]
        if len(shared) >= ENOUGH and len(apart) > APART * len(shared):
            example = apart[0]
            what = f"{len(apart)} of {len(shared)} keys that {first[0]} and {name} share are in different partitions"
            where = f"key {example[0]!r}: {first[1][example][0]} and {keys[example][0]}"
            findings.add(f"{what}, so that their records never meet", where, FIX)
    return list(findings.told())


def _partitions(places: Iterable[Place]) -> set[int]:
    return {place.partition for place in places}


def read_sample(settings: Settings, partitions: int, name: str, since: Mapping[int, int]) -> Iterator[pa.RecordBatch]:
    """The last records of some partitions of an input, of each input the same; `since` as in `check_sample`."""
    wanted, topic = range(0, partitions, -(-partitions // PARTITIONS)), settings.inputs[name]
    for p, (first, end) in Cluster(settings.kafka).bounds_of(topic, wanted).items():
        begin = max(first, end - SAMPLED, min(since.get(p, 0), end))
        yield from read_range(settings.kafka, Range(topic, p, begin, end))


def _sampled(settings: Settings, partitions: int, since: Callable[[str], Mapping[int, int]]) -> Iterator[Place]:
    """The records with a key in a sample of each input."""
    names = ["merge_key", "partition", "offset", *(TENANT.names if settings.merge.has_tenants else [])]
    for name, topic in settings.inputs.items():
        rules = rules_of(settings, source_of(name))
        for batch in read_sample(settings, partitions, name, since(name)):
            read = read_records(batch, rules)
            for key, p, offset, *tenant in zip(*(read[column].to_pylist() for column in names), strict=True):
                if key is not None:
                    yield Place(key, name, topic, p, offset, *tenant)
