"""Redrive: sends refused records to their source topic again, as they came, each once.

A record that is sent says which one it was (`watersmeet.redriven`), so the source topic itself
tells what was redriven: bronze has the headers of what was read, and Kafka those of what was not.
No other state is kept that could disagree. Any producer may write that header. It counts only if
key, value and the headers before it are those of the refused record. For each source:

1. an earlier redrive is fenced, and its open transaction aborted: from here on nobody else sends.
   While `forget` erases a key, nothing is sent at all, and `forget` fences a redrive that began
   before;
2. what was redriven is read;
3. what is left is sent, in transactions: a crash leaves a transaction whole or not at all. Where
   nobody can be sure of one, all this is done again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import Int64s, int64s, row_values
from watersmeet.core.dead_letters import redrive_messages
from watersmeet.core.headers import fingerprint, redriven_offset
from watersmeet.core.inputs import InputId
from watersmeet.core.reading import KEYED_BY, REDRIVEN_FROM, Reason, merge_keys
from watersmeet.core.repartition import murmur2
from watersmeet.errors import ConfigurationError, TransactionTimeoutError
from watersmeet.kafka.cluster import Cluster, co_partitioned, topics_of
from watersmeet.kafka.publisher import REDRIVE, Publisher, record_publisher
from watersmeet.kafka.reading import Range, read_range
from watersmeet.kafka.registry import rules_of
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.identity import differences
from watersmeet.lake.inputs import of_input, of_topic
from watersmeet.lake.lease import FORGET, check_not_changing
from watersmeet.lake.location import Lake
from watersmeet.lake.pieces import (
    BY_OFFSET,
    CHUNKS,
    NOT_FORGOTTEN,
    RECORD,
    Chunk,
    chunks_of,
    places_of,
    read_chunk,
    read_pieces,
    records_at,
)
from watersmeet.lake.table_reader import Condition, TableReader, within
from watersmeet.running.next_offsets import NextOffsets, read_facts
from watersmeet.running.transaction_size import TransactionSize
from watersmeet.settings import Settings

_WHOLE = ["partition", "offset", *KEYED_BY]


@dataclass
class Redrive:
    """Redrives the records that were refused for a `reason`.

    `since_ms`: only those with a Kafka timestamp (epoch ms) from this one on.
    """

    reader: TableReader
    settings: Settings
    reason: str
    since_ms: int | None = None

    def __post_init__(self) -> None:
        """Check the reason, and Kafka's topics.

        Raises ConfigurationError for an unknown reason, or if a topic is not the one that the lake
        has read.
        """
        if self.reason not in (reasons := [reason.value for reason in Reason]):
            raise ConfigurationError(
                f"no record is refused as `{self.reason}`",
                where="--reason",
                fix=f"use {', '.join(reasons)}",
            )
        if self.reason == Reason.TOO_LARGE.value:
            raise ConfigurationError(
                "the values of records that are `too_large` are not kept, so that they "
                "cannot be sent again",
                where="--reason",
                fix="raise kafka.max_record_bytes, and have their producers send them",
            )
        for name in self.settings.repartitioned:
            if (
                self.reason in (Reason.UNDECODABLE, Reason.NO_KEY)
                and self.settings.sources[name].key is not None
            ):
                origins = " or ".join(self.settings.repartitioned[name].from_topics)
                raise ConfigurationError(
                    f"{name} is repartitioned, and no key says where its records belong that "
                    f"are refused as `{self.reason}`",
                    where="--reason",
                    fix=f"send them to {origins}, with the key that they lack",
                )
        topics = topics_of(self.settings)
        self.partitions = co_partitioned(self.settings, self._cluster.partition_counts(topics))
        facts, moved = read_facts(self.reader, self.settings, self.partitions)
        topics_of_lake = {
            name: fact
            for name, fact in facts.items()
            if name not in moved and (name.endswith(".topic") or name in ("name", "partitions"))
        }
        if changed := differences(self.reader, topics_of_lake):
            raise ConfigurationError(*changed[0])

    def run(self, *, apply: bool) -> dict[str, Any]:
        """Send what is left, or (without `apply`) only say what it is.

        Returns `records`, among others. By source, it says how many `quarantine` has (`found`), how
        many were redriven `before`, and how many are `after`.
        """
        records = [self._redrive(input_id, apply=apply) for input_id in self.settings.inputs]
        sent = sum(row["after"] - row["before"] for row in records)
        return {
            "reason": self.reason,
            "since": self.since_ms,
            "applied": apply,
            "sent": sent,
            "records": records,
        }

    def _redrive(self, input_id: InputId, *, apply: bool) -> dict[str, Any]:
        publisher = record_publisher(self.settings, input_id.topic, REDRIVE)
        size = TransactionSize(CHUNKS, CHUNKS)
        found, chunks = self._left(input_id, publisher if apply else None)
        before = found - sum(len(at) for chunk in chunks for at in chunk.offsets.values())
        durable = Lake(self.settings).durable
        sent = 0
        while apply and chunks:
            if not publisher.has_begun:  # another redrive may have sent some of them meanwhile
                found, chunks = self._left(input_id, publisher)
            durable.rely_on(map(tables.bronze, self.settings.sources))
            counts = list[int]()
            try:
                publisher.send(self._messages(input_id, chunks[: size.limit], counts))
            except TransactionTimeoutError:
                if not size.timed_out(len(chunks)):
                    raise
                continue
            sent += sum(counts)
            del chunks[: len(counts)]
        return {
            "table": tables.QUARANTINE,
            **input_id._asdict(),
            "found": found,
            "before": before,
            "after": before + sent,
        }

    def _left(self, input_id: InputId, publisher: Publisher | None) -> tuple[int, list[Chunk]]:
        """Return how many refused records there are, and those that are left to be sent.

        `publisher`: it begins first, where something is to be sent.
        """
        partitions, offsets = self._refused(input_id)
        if publisher is not None and len(offsets):
            publisher.begin()
            check_not_changing(self.reader, Lake(self.settings), FORGET)
            partitions, offsets = self._refused(input_id)  # one may have been forgotten meanwhile
        if not len(offsets):
            return 0, []
        first = {int(p): int(offsets[partitions == p].min()) for p in np.unique(partitions)}
        redriven = set(self._redriven(input_id, first, is_settled=publisher is not None))
        places = zip(partitions.tolist(), offsets.tolist(), strict=True)
        is_left = np.array([place not in redriven for place in places], np.bool_)
        left = partitions[is_left], offsets[is_left]
        chunks = list(chunks_of(self.reader, input_id, tables.QUARANTINE, *left))
        self._check_partitions(input_id, chunks)
        return len(offsets), chunks

    def _messages(
        self, input_id: InputId, chunks: Iterable[Chunk], counts: list[int]
    ) -> Iterator[pa.Table]:
        """Yield each chunk's messages when they are sent, and count them: memory holds one at a
        time.
        """
        for chunk in chunks:
            rows = read_chunk(self.reader, chunk, RECORD, _of(input_id))
            counts.append(rows.num_rows)
            yield redrive_messages(
                rows.sort_by([("partition", "ascending"), ("offset", "ascending")])
            )

    def _check_partitions(self, input_id: InputId, chunks: Iterable[Chunk]) -> None:
        # A record that was written by its old key would never meet the others of its key.
        source = input_id.source
        if (
            source not in self.settings.repartitioned
            or len(read_history(self.reader, self.settings).epochs) == 1
        ):
            return
        rules = rules_of(self.settings, source)
        origins = self.settings.repartitioned[source].from_topics
        for chunk in chunks:
            rows = read_chunk(self.reader, chunk, _WHOLE, _of(input_id))
            keys = merge_keys(rows, rules).to_pylist()
            for (p, offset), key in zip(places_of(rows), keys, strict=True):
                if key is not None and murmur2(key.encode()) % self.partitions != p:
                    raise ConfigurationError(
                        f"{input_id.topic}[{p}]@{offset} was refused before "
                        f"the rules of {source} changed, and its key belongs to another "
                        "partition now",
                        where="--reason",
                        fix=f"send such records to {' or '.join(origins)}",
                    )

    def _refused(self, input_id: InputId) -> tuple[Int64s, Int64s]:
        conditions: list[Condition] = [("reason", "=", self.reason), NOT_FORGOTTEN]
        if self.since_ms is not None:
            conditions.append(("kafka_timestamp", ">=", self.since_ms))
        where = of_input(input_id, [conditions])
        rows = self.reader.select(tables.QUARANTINE, ["partition", "offset"], where)
        return int64s(rows["partition"]), int64s(rows["offset"])

    # -- what was redriven

    def _redriven(
        self, input_id: InputId, first: Mapping[int, int], *, is_settled: bool
    ) -> Iterator[tuple[int, int]]:
        """Yield the (partition, offset) of each record that was redriven.

        `first`: by partition, the first record to redrive. Later records tell it: those in bronze,
        those not in bronze yet, and those that a reset skipped and that are still in Kafka.
        """
        topic = input_id.topic
        until = 2**63 - 1
        bounds = (self._cluster.settled_bounds if is_settled else self._cluster.bounds)(
            topic, self.partitions
        )
        unread = NextOffsets(self.reader, self.settings, self.partitions).of(input_id)
        bronze_ranges = {p: (at + 1, until) for p, at in first.items()}
        for p, _, offset in redriven_in_bronze(self.reader, input_id, bronze_ranges):
            yield p, offset
        ranges = [(p, unread[p], bounds[p][1]) for p in first]
        ranges += [
            (skip.tp.partition, skip.from_offset, skip.to_offset)
            for skip in read_history(self.reader, self.settings).skips
            if skip.tp.input == input_id
        ]
        for p, since, until in ranges:
            if p in first:
                begin = max(since, first[p] + 1, bounds[p][0])
                for batch in read_range(
                    self.settings.kafka, Range(topic, p, begin, min(until, bounds[p][1]))
                ):
                    rows = pa.Table.from_batches([batch])
                    for _, _, offset in _confirmed(self.reader, input_id, rows):
                        yield p, offset

    @cached_property
    def _cluster(self) -> Cluster:
        return Cluster(self.settings.kafka)


def _of(input_id: InputId) -> list[Condition]:
    return [("source", "=", input_id.source), NOT_FORGOTTEN]


def _confirmed(
    reader: TableReader, input_id: InputId, rows: pa.Table
) -> Iterator[tuple[int, int, int]]:
    """Yield those of these whole records of an input's topic that were redriven: `quarantine` has
    the refused record.

    Each is given as partition, offset, and the offset of the record that it was.
    """
    claims = list[tuple[int, int, int, int]]()  # and how many headers the refused record had
    for p, at, headers in row_values(rows, "partition", "offset", "headers"):
        pairs = [(header["key"], header["value"]) for header in headers or ()]
        if (claim := redriven_offset(input_id.topic, p, at, pairs)) is not None:
            claims.append((p, at, *claim))
    claimed = {(p, offset) for p, _, offset, _ in claims}
    refused = {
        (row["partition"], row["offset"]): _fingerprint(row)
        for some in records_at(reader, input_id, tables.QUARANTINE, claimed, _WHOLE, _of(input_id))
        for row in some.to_pylist()
    }
    # Not all columns: Python has no such times as Kafka's timestamps may be.
    whole = rows.select(_WHOLE).to_pylist() if claims else []
    records = {(row["partition"], row["offset"]): row for row in whole}
    for p, at, offset, count in claims:
        if refused.get((p, offset)) == _fingerprint(records[p, at], count):
            yield p, at, offset


def _fingerprint(row: Mapping[str, Any], count: int | None = None) -> bytes:
    headers = [(header["key"], header["value"]) for header in row["headers"] or ()]
    return fingerprint(row["key"], row["value"], headers[:count])


def redriven_in_bronze(
    reader: TableReader, input_id: InputId, ranges: Mapping[int, tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Yield the redriven records that bronze has in ranges `[from, until)`, by partition.

    A few more may come. Each is given as its partition, its own offset and that of the refused
    record that it was. Whole records are read only where they say that they were redriven.
    """
    table = tables.bronze(input_id.source)
    if not ranges or not reader.exists(table):
        return
    says_so: Condition = (REDRIVEN_FROM.name, "is not null", None)
    where = of_topic(input_id, [[*terms, says_so] for terms in within(ranges)])
    for rows in read_pieces(reader, table, _WHOLE, where, BY_OFFSET):
        yield from _confirmed(reader, input_id, rows)
