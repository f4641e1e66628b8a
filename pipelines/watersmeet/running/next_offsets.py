"""Compares Kafka with what bronze has read: the offsets that are read next of an input, those
that Kafka no longer has, and whether its records are still the ones that were read.

A partition may lose its end and be filled again, by an unclean election of a leader, a power cut or
a restored cluster. What is gone from Kafka, or was erased from bronze, cannot be compared.

Kafka's identity of a topic tells one that was deleted and created again. But copying a cluster with
its offsets (by a link between clusters) makes new topics, too. Their records tell the two cases
apart: the last ones that bronze has of each partition are compared, with Kafka's timestamps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from confluent_kafka import Message

from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.reading import Reason
from watersmeet.errors import (
    ConfigurationError,
    DataLossError,
    KafkaAccessError,
    RecordsReplacedError,
    TopicChangedError,
)
from watersmeet.kafka.cluster import Cluster, topics_of
from watersmeet.kafka.reading import first_messages, timestamp_ms
from watersmeet.lake import tables
from watersmeet.lake.commits import last_decision
from watersmeet.lake.history import Generation, History, read_history
from watersmeet.lake.identity import identity, kept_facts, kept_topic_ids, remade_topics
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.journal import SKIP
from watersmeet.lake.newest import row_ends
from watersmeet.lake.progress import last_batch
from watersmeet.lake.table_reader import TableReader, extremes, in_portions, within
from watersmeet.lake.tables import application_of
from watersmeet.running.owner import Owner
from watersmeet.settings import KafkaSettings, Settings

log = logging.getLogger("watersmeet.bronze")

Bounds = Mapping[int, tuple[int, int]]
"""Offsets `[from, until)` by partition, such as those that Kafka has."""

LAST = 5
"""Number of last offsets in bronze whose records are compared where a topic may have moved."""


@dataclass
class NextOffsets:
    """The offsets that bronze reads next, of the inputs of a lake that has begun.

    Each input has `partitions` Kafka partitions. Without an `owner`, nothing is written.
    """

    reader: TableReader
    settings: Settings
    partitions: int
    owner: Owner | None = None

    def of(
        self,
        input_id: InputId,
        generation: Generation | None = None,
        beyond: Mapping[int, int] | None = None,
    ) -> dict[int, int]:
        """Return, by partition, the offset that is read next.

        It is the largest of: the offset after bronze's last row, or where reading has ended behind
        it; the first of the newest generation; and the end of an accepted gap. `generation`: the
        newest one, if it is known; `beyond`: what `beyond_rows` returns, if it is known.
        """
        history = self._history()
        newest = generation or history.generations.newest
        offsets = newest.offsets_of(input_id)
        last = last_batch(self.reader)
        ranges = {} if last is None else last.ranges
        consumed = {
            tp.partition: done.until_offset
            for tp, done in ranges.items()
            if tp.input == input_id and done.until_offset
        }
        for p, offset in [
            *consumed.items(),
            *row_ends(self.reader, input_id, consumed).items(),
            *(self.beyond_rows(input_id) if beyond is None else beyond).items(),
            *((s.tp.partition, s.to_offset) for s in history.skips if s.tp.input == input_id),
        ]:
            offsets[p] = max(offset, offsets.get(p, 0))
        return {p: offsets.get(p, 0) for p in range(self.partitions)}

    def beyond_rows(self, input_id: InputId) -> dict[int, int]:
        """Return, by partition, where reading has ended beyond bronze's last row, as bronze's last
        commit says.

        Once Kafka has deleted what it has there, nobody could tell that it was no record.
        """
        table = tables.bronze(input_id.source)
        if not self.reader.exists(table):
            return {}
        last = last_decision(self.reader, table, application_of(self.settings, input_id))
        return {} if last is None else dict(last[1].facts.get("reached", ()))

    def checked(self, input_id: InputId, beyond: Mapping[int, int] | None = None) -> dict[int, int]:
        """Return, by partition, the offset that is read next and that Kafka has.

        A gap that is accepted is decided. Raises DataLossError if Kafka has deleted
        offsets that were not read, or RecordsReplacedError if it has other records at offsets that
        were, and `on_data_loss` is `stop`.
        """
        bounds = self.bounds(input_id)
        offsets = self.of(input_id, beyond=beyond)
        lost = self.lost(input_id, offsets, bounds)
        replaced = self.replaced(input_id, offsets, bounds)
        if gaps := [
            {**input_id._asdict(), "partition": p, "from_offset": since, "to_offset": until}
            for p, (since, until) in [*lost.items(), *replaced.items()]
        ]:
            if self.owner is None:
                raise ValueError("a gap can only be accepted by the owner of bronze")
            self.owner.decide(SKIP, {"jumps": gaps, "reason": "on_data_loss: continue"})
        return {p: max(offset, bounds[p][0]) for p, offset in offsets.items()}

    def bounds(self, input_id: InputId) -> Bounds:
        """Return the first offset that Kafka has of an input and the end, by partition."""
        return self._cluster.bounds(input_id.topic, self.partitions)

    def leader_epochs(self, input_id: InputId) -> dict[int, int]:
        """Return `Cluster.leader_epochs` of an input."""
        return self._cluster.leader_epochs(input_id.topic, self.partitions)

    def check_topic(self, input_id: InputId) -> None:
        """Raise TopicChangedError where an input's topic is not the one that the lake has.

        Only what was read before is of that one: a topic that was made again goes on at the offset
        of the one before as if nothing had happened.
        """
        topic = input_id.topic
        if topic in self._topic_ids:
            now = self._cluster.topic_ids([topic]).get(topic)
            if now not in (None, self._topic_ids[topic]):
                raise TopicChangedError(
                    f"{topic} was deleted and made again while it was being read"
                )

    def lost(
        self, input_id: InputId, offsets: Mapping[int, int], bounds: Bounds
    ) -> dict[int, tuple[int, int]]:
        """Return, by partition, the offsets to be read that Kafka has deleted, if that is accepted.

        Raises DataLossError if it is not, and ConfigurationError if an offset is beyond Kafka's
        end.
        """
        topic = input_id.topic
        lost = dict[int, tuple[int, int]]()
        for p, offset in offsets.items():
            first, end = bounds[p]
            if offset > end:
                raise ConfigurationError(
                    f"{topic}[{p}] ends at offset {end}, and {offset} is to be read next: it "
                    "is not the topic that this lake has read, or has lost its end",
                    where=f"sources.{input_id.source}.topic",
                    fix="use another lake for another topic",
                )
            if offset < first:
                lost[p] = offset, first
        if lost and self.settings.kafka.on_data_loss == "stop":
            raise DataLossError(self.settings.input_names[input_id], topic, lost)
        return lost

    def replaced(
        self, input_id: InputId, offsets: Mapping[int, int], bounds: Bounds
    ) -> dict[int, tuple[int, int]]:
        """Return, by partition, the offsets before those that are read next at which Kafka has
        other records than bronze, if that is accepted.

        Raises RecordsReplacedError if it is not. What lies before an accepted gap is not compared.
        """
        ranges = {p: (bounds[p][0], offset) for p, offset in offsets.items()}
        for skip in self._history().skips:
            p = skip.tp.partition
            if skip.tp.input == input_id and p in ranges:
                ranges[p] = max(ranges[p][0], skip.to_offset), offsets[p]
        firsts = replaced_from(self.reader, self.settings.kafka, input_id, ranges)
        replaced = {p: (first, offsets[p]) for p, first in firsts.items()}
        if not replaced:
            return {}
        error = RecordsReplacedError(self.settings.input_names[input_id], input_id.topic, replaced)
        if self.settings.kafka.on_data_loss == "stop":
            raise error
        log.warning("%s", error.problem.what)
        return replaced

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self.settings.kafka)

    @cached_property
    def _topic_ids(self) -> Mapping[str, str]:
        return kept_topic_ids(self.reader)

    def _history(self) -> History:
        if self.owner is None:
            return read_history(self.reader, self.settings)
        return self.owner.history(self.settings)


# -- the records that bronze has read


def replaced_from(
    reader: TableReader, kafka: KafkaSettings, input_id: InputId, ranges: Bounds
) -> dict[int, int]:
    """Return, by partition, the offset from which on Kafka has other records than bronze.

    Only partitions with such records are included. `ranges`: offsets that Kafka has.
    """

    def different(ranges: Bounds) -> dict[int, int]:
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
    reader: TableReader, kafka: KafkaSettings, input_id: InputId, ranges: Bounds
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
    # One that was forgotten, or is too large, is compared by its time alone.
    if row["kafka_timestamp"] != timestamp_ms(message):
        return False
    content = row["key"], row["value"]
    is_erased = content == (None, None) or row["reason"] == Reason.TOO_LARGE.value
    return is_erased or content == (message.key(), message.value())


def _last_rows(
    reader: TableReader, input_id: InputId, ranges: Bounds
) -> dict[int, Mapping[str, Any]]:
    """Return the last row of bronze in each range that has one: mostly it is at its end."""
    table = tables.bronze(input_id.source)
    left = {p: span for p, span in ranges.items() if span[0] < span[1]}
    lasts = dict[int, int]()
    size = 1
    while left and reader.exists(table):
        ends = {p: (max(since, until - size), until) for p, (since, until) in left.items()}
        near = of_topic(input_id, within(ends))
        lasts |= extremes(reader, table, "offset", near)
        left = {p: s for p, s in left.items() if p not in lasts and s[1] - size > s[0]}
        size *= 64
    if not lasts:
        return {}
    columns = ["partition", "offset", "kafka_timestamp", "key", "value", "reason"]
    where = within({p: (offset, offset + 1) for p, offset in lasts.items()})
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


def read_facts(
    reader: TableReader, settings: Settings, partitions: int
) -> tuple[dict[str, str], set[str]]:
    """Return the facts of a lake (`lake.identity`) as they are now, and the names of those that
    differ from what the lake keeps only because topics have moved.

    Raises what Kafka raises.
    """
    cluster = Cluster(settings.kafka)
    facts = identity(settings, partitions, cluster.topic_ids(topics_of(settings)))
    moved = set[str]()
    for field, topics in remade_topics(kept_facts(reader), facts).items():
        inputs = [
            input_id
            for input_id in of_source(settings.inputs, field.split(".")[1])
            if input_id.topic in topics
        ]
        if all(_has_the_records(reader, settings, cluster, i, partitions) for i in inputs):
            moved.add(field)
    return facts, moved


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
