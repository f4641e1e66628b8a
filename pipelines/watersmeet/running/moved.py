"""Recognises a Kafka that has moved: new topics that hold bronze's records at the same offsets.

Kafka's identity of a topic tells one that was deleted and created again. But copying a cluster with
its offsets (by a link between clusters) makes new topics, too. Their records tell the two cases
apart: the last ones that bronze has of each partition are compared, with Kafka's timestamps.
"""

from __future__ import annotations

from collections.abc import Mapping

from watersmeet.core.inputs import InputId, of_source
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.identity import remade_topics
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.table_reader import TableReader, extremes
from watersmeet.running.next_offsets import NextOffsets
from watersmeet.running.same_records import compare
from watersmeet.settings import Settings

LAST = 5
"""Number of last offsets in bronze whose records are compared."""


def moved_topics(
    reader: TableReader,
    settings: Settings,
    partitions: int,
    kept: Mapping[str, str],
    facts: Mapping[str, str],
) -> set[str]:
    """Return those of `facts` (`lake.identity`) that differ from what the lake keeps only because
    the topics have moved.

    Raises what Kafka raises.
    """
    cluster = Cluster(settings.kafka)
    moved = set[str]()
    for field, topics in remade_topics(kept, facts).items():
        inputs = [
            input_id
            for input_id in of_source(settings.inputs, field.split(".")[1])
            if input_id.topic in topics
        ]
        if all(_has_the_records(reader, settings, cluster, i, partitions) for i in inputs):
            moved.add(field)
    return moved


def _has_the_records(
    reader: TableReader, settings: Settings, cluster: Cluster, input_id: InputId, partitions: int
) -> bool:
    """Return True if an input's topic has the records of bronze.

    In each partition it must have at least one record that bronze has, and none that differs. Any
    topic will do where nothing of it was read yet.
    """
    table = tables.bronze(input_id.source)
    if not reader.exists(table):
        return False
    last = extremes(reader, table, "offset", of_topic(input_id))
    if not last:
        newest = read_history(reader, settings).newest
        return not any(NextOffsets(reader, settings, partitions).of(input_id, newest).values())
    bounds = cluster.bounds(input_id.topic, partitions)
    within = {p: bounds[p] for p, offset in last.items() if p in bounds and offset < bounds[p][1]}
    found: dict[int, set[bool | None]] = {p: set() for p in last}
    for nth in range(LAST):
        ranges = {
            p: (max(first, last[p] - LAST + 1), last[p] + 1 - nth)
            for p, (first, _) in within.items()
        }
        for p, (_, is_same) in compare(reader, settings.kafka, input_id, ranges).items():
            found[p].add(is_same)
    return all(True in each and False not in each for each in found.values())
