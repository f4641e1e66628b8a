"""Recognises a Kafka that has moved: new topics that hold bronze's records at the same offsets.

Kafka's identity of a topic tells one that was deleted and created again. But copying a cluster with
its offsets (by a link between clusters) makes new topics, too. Their records tell the two cases
apart: the last ones that bronze has of each partition are compared, with Kafka's timestamps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.reading import Reason
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.identity import remade_topics
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.table_reader import TableReader, normalise
from watersmeet.settings import Settings

LAST = 5
"""Number of last offsets in bronze whose records are compared."""

_RECORD = ["offset", "kafka_timestamp", "key", "value"]
_KEPT = [*_RECORD, "reason"]


def moved_topics(
    reader: TableReader, settings: Settings, partitions: int, facts: Mapping[str, str]
) -> set[str]:
    """Return those of `facts` (`lake.identity`) that differ only because the topics have moved.

    Raises what Kafka raises.
    """
    cluster = Cluster(settings.kafka)
    moved = set[str]()
    for field, topics in remade_topics(reader, facts).items():
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

    In each partition it must have at least one record that bronze has, and none that differs.
    """
    table = tables.bronze(input_id.source)
    topic = input_id.topic
    if not reader.exists(table):
        return False
    values = {"offset": ("max", "offset")}
    last = reader.summary(table, ["partition"], values, of_topic(input_id)).to_pylist()
    bounds = cluster.bounds(topic, partitions)
    for p, offset in ((row["partition"], row["offset"]) for row in last):
        first, end = bounds.get(p, (0, 0))
        since = max(first, offset - LAST + 1)
        if not since <= offset < end:
            return False
        where = [[("partition", "=", p), ("offset", ">=", since), ("offset", "<=", offset)]]
        rows = reader.select(table, _KEPT, of_topic(input_id, where))
        read = read_range(settings.kafka, Range(topic, p, since, offset + 1))
        in_kafka = {
            row["offset"]: row
            for batch in read
            for row in normalise(pa.table(batch.select(_RECORD))).to_pylist()
        }
        pairs = [
            (row, in_kafka[row["offset"]]) for row in rows.to_pylist() if row["offset"] in in_kafka
        ]
        if not pairs or not all(_is_same(*pair) for pair in pairs):
            return False
    return bool(last)


def _is_same(kept: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Return True if a row of bronze is a record of Kafka.

    One that was forgotten, or is too large, is compared by its offset and time alone.
    """
    is_erased = kept["value"] is None and (
        kept["key"] is None or kept["reason"] == Reason.TOO_LARGE.value
    )
    return all(kept[column] == record[column] for column in (_RECORD[:2] if is_erased else _RECORD))
