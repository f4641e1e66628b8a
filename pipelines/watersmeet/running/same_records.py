"""Compares the last rows of bronze with the records that Kafka has at their offsets.

A partition may lose its end and be filled again, by an unclean election of a leader, a power cut or
a restored cluster. What is gone from Kafka, or was erased from bronze, cannot be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import Message

from watersmeet.core.inputs import InputId
from watersmeet.core.reading import Reason
from watersmeet.errors import KafkaAccessError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import first_messages, timestamp_ms
from watersmeet.lake import tables
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.table_reader import TableReader, exactly, extremes, in_portions
from watersmeet.settings import KafkaSettings

Ranges = Mapping[int, tuple[int, int]]
"""Offsets `[from, until)` by partition."""


def replaced_from(
    reader: TableReader, kafka: KafkaSettings, input_id: InputId, ranges: Ranges
) -> dict[int, int]:
    """Return, by partition, the offset from which on Kafka has other records than bronze.

    Only partitions with such records are included. `ranges`: offsets that Kafka has.
    """

    def different(ranges: Ranges) -> dict[int, int]:
        """Return, by partition, the offset of the last row in a range if that differs."""
        compared = compare(reader, kafka, input_id, ranges)
        return {p: offset for p, (offset, is_same) in compared.items() if is_same is False}

    replaced = different(ranges)
    for p, offset in replaced.items():
        since = ranges[p][0]
        while since < offset:  # what is before `since` is the same
            middle = (since + offset) // 2
            earlier = different({p: (since, middle + 1)})
            since = since if earlier else middle + 1
            offset = earlier.get(p, offset)
        replaced[p] = offset
    return replaced


def compare(
    reader: TableReader, kafka: KafkaSettings, input_id: InputId, ranges: Ranges
) -> dict[int, tuple[int, bool | None]]:
    """Return, by partition, the offset of bronze's last row in a range, if there is one, and
    whether Kafka has the same record; None where it may have deleted that.
    """
    compared = dict[int, tuple[int, bool | None]]()
    for portion in in_portions(sorted(ranges.items())):
        rows = _last_rows(reader, input_id, dict(portion))
        offsets = {p: row["offset"] for p, row in rows.items()}
        found = first_messages(kafka, input_id.topic, offsets)
        there = {p: each for p, each in found.items() if each.offset() == offsets[p]}
        compared |= {p: (offset, False) for p, offset in offsets.items()}
        compared |= {p: (offsets[p], _is_same(rows[p], each)) for p, each in there.items()}
        absent = {p: offset for p, offset in offsets.items() if p not in there}
        compared |= {p: (offsets[p], None) for p in _deleted(kafka, input_id.topic, absent)}
    return compared


def _is_same(row: Mapping[str, Any], message: Message) -> bool:
    """Return True if a row of bronze is a record of Kafka.

    One that was forgotten, or is too large, is compared by its time alone.
    """
    if row["kafka_timestamp"] != timestamp_ms(message):
        return False
    content = row["key"], row["value"]
    is_erased = content == (None, None) or row["reason"] == Reason.TOO_LARGE.value
    return is_erased or content == (message.key(), message.value())


def _last_rows(
    reader: TableReader, input_id: InputId, ranges: Ranges
) -> dict[int, Mapping[str, Any]]:
    """Return the last row of bronze in each range that has one: mostly it is at its end."""
    table = tables.bronze(input_id.source)
    left = {p: span for p, span in ranges.items() if span[0] < span[1]}
    lasts = dict[int, int]()
    size = 1
    while left and reader.exists(table):
        ends = {p: (max(since, until - size), until) for p, (since, until) in left.items()}
        near = of_topic(input_id, exactly("offset", ends))
        lasts |= extremes(reader, table, "offset", near)
        left = {p: s for p, s in left.items() if p not in lasts and s[1] - size > s[0]}
        size *= 64
    if not lasts:
        return {}
    columns = ["partition", "offset", "kafka_timestamp", "key", "value", "reason"]
    where = exactly("offset", {p: (offset, offset + 1) for p, offset in lasts.items()})
    rows = reader.select(table, columns, of_topic(input_id, where)).to_pylist()
    return {row["partition"]: row for row in rows}


def _deleted(kafka: KafkaSettings, topic: str, offsets: Mapping[int, int]) -> set[int]:
    """Return the partitions of which Kafka may have deleted the record at an offset: by retention,
    or, unless it says that there is none, by compaction.
    """
    if not offsets:
        return set()
    cluster = Cluster(kafka)
    firsts = cluster.bounds_of(topic, offsets)
    is_compacted = True
    with suppress(KafkaAccessError):
        is_compacted = "compact" in cluster.topic_settings(topic)["cleanup.policy"]
    return {p for p, offset in offsets.items() if is_compacted or offset < firsts[p][0]}
