"""Commits records to the bronze table of a source, and notes the refused ones in `quarantine`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.avro_schema import MAX_SCHEMAS
from watersmeet.core.columns import Int64s, int64s, numbered
from watersmeet.core.inputs import InputId
from watersmeet.core.reading import RECORD_BYTES, WRITER_SCHEMA
from watersmeet.engine import Engine, KafkaInput, Rows, Selection, Summary
from watersmeet.faults import fault_point
from watersmeet.kafka.registry import rules_of
from watersmeet.lake import tables
from watersmeet.lake.commits import (
    Commit,
    application_of,
    note_application,
    ranges_fact,
    ranges_of,
    unnoted_commit,
)
from watersmeet.lake.inputs import of_input, of_topic
from watersmeet.lake.table_reader import Where, within
from watersmeet.monitoring.events import Counts
from watersmeet.running.owner import Owner
from watersmeet.running.writer_schemas import WriterSchemas
from watersmeet.settings import Settings


def kafka_input(
    settings: Settings,
    input_id: InputId,
    given_up: Collection[int] = (),
    erased: Mapping[int, Int64s] = MappingProxyType({}),
    allowed: Collection[int] | None = None,
) -> KafkaInput:
    """Return how an input is read from Kafka.

    `given_up`, `allowed`: see `Registry`. `erased`: offsets by partition whose records are read as
    `forget` leaves them. A batch of more schemas than a source takes is read again, so the registry
    is asked for no more of them.
    """
    rules = rules_of(settings, input_id.source, given_up, allowed, most=MAX_SCHEMAS)
    return KafkaInput(input_id, settings.kafka, rules, dict(erased))


@dataclass(frozen=True)
class BatchCounts:
    """How many records a batch of bronze has, and where.

    `groups` has rows for each partition, reason and `heartbeat` (with a registry, for each
    `writer_schema`, too), each of some of the records, with the columns `records` (their number),
    `timed` (how many of them have an event time), `first` and `last` (offsets), and `bytes` (what
    they take in memory).
    """

    groups: pa.Table

    @cached_property
    def refused_groups(self) -> pa.Table:
        """The groups of refused records."""
        return self.groups.filter(pc.is_valid(self.groups["reason"]))

    @cached_property
    def records(self) -> int:
        """Number of records."""
        return sum(self.groups["records"].to_pylist())

    @cached_property
    def refused(self) -> int:
        """Number of refused records."""
        return sum(self.refused_groups["records"].to_pylist())

    @property
    def refused_bytes(self) -> int:
        """Bytes that the refused records take in memory."""
        return sum(self.refused_groups["bytes"].to_pylist())

    @property
    def ranges(self) -> dict[int, tuple[int, int]]:
        """The offsets `[first, last + 1)` by partition."""
        ends = self.groups.group_by("partition").aggregate([("first", "min"), ("last", "max")])
        columns = (ends[name].to_pylist() for name in ("partition", "first_min", "last_max"))
        return {p: (first, last + 1) for p, first, last in zip(*columns, strict=True)}

    @property
    def schema_ids(self) -> list[int]:
        """Ids of the writer schemas of the records, where the source has a registry.

        They are in the order of the offsets at which partitions name them first.
        """
        if WRITER_SCHEMA.name not in self.groups.column_names:
            return []
        named = self.groups.filter(pc.is_valid(self.groups[WRITER_SCHEMA.name]))
        firsts = named.group_by(WRITER_SCHEMA.name).aggregate([("first", "min")])
        by = [("first_min", "ascending"), (WRITER_SCHEMA.name, "ascending")]
        ids: list[int] = firsts.sort_by(by)[WRITER_SCHEMA.name].to_pylist()
        return ids

    @property
    def worst(self) -> tuple[str, int, int]:
        """The most frequent reason (by name, of equal ones), and partition and offset of its first
        record.
        """
        worst = (
            self.refused_groups.group_by("reason")
            .aggregate([("records", "sum")])
            .sort_by([("records_sum", "descending"), ("reason", "ascending")])
        )
        reason = worst["reason"][0].as_py()
        by_place = self.refused_groups.sort_by([("partition", "ascending"), ("first", "ascending")])
        first = by_place.filter(pc.equal(by_place["reason"], reason)).slice(0, 1).to_pylist()[0]
        return reason, first["partition"], first["first"]

    @property
    def outcomes(self) -> Counts:
        """The number of records by outcome: `accepted`, `heartbeat`, `skipped`, and `quarantined`
        with a reason.
        """
        counts: Counter[tuple[str, str]] = Counter()
        for row in self.groups.to_pylist():
            if row["reason"]:
                counts["quarantined", row["reason"]] += row["records"]
                continue
            counts["heartbeat" if row["heartbeat"] else "accepted", ""] += row["timed"]
            counts["skipped", ""] += row["records"] - row["timed"]
        return +counts


@dataclass
class BronzeTable:
    """The rows of one input in the bronze table of its source; one owner at a time."""

    owner: Owner
    settings: Settings
    input: InputId
    schemas: WriterSchemas = field(init=False)

    def __post_init__(self) -> None:
        """Prepare the schemas of the input's records."""
        self.schemas = WriterSchemas(self.owner, self.settings, self.input.source)

    @property
    def name(self) -> str:
        """The name of the table."""
        return tables.bronze(self.input.source)

    @property
    def summary(self) -> Summary:
        """The question whose answer is the groups of `BatchCounts`."""
        values = {
            "records": ("count", "*"),
            "timed": ("count", "event_time"),
            "first": ("min", "offset"),
            "last": ("max", "offset"),
            "bytes": ("sum", RECORD_BYTES.name),
        }
        columns = self._engine.lake.schema(self.name).names
        by = ["partition", "reason", "heartbeat", WRITER_SCHEMA.name]
        return Summary([name for name in by if name in columns], values)

    def counted(self, rows: Rows) -> BatchCounts:
        """Return how many records there are, and where."""
        return BatchCounts(self._engine.summary(rows, self.summary.by, self.summary.values))

    def append(
        self,
        rows: Rows,
        counts: BatchCounts,
        reached: Mapping[int, int] = MappingProxyType({}),
        *,
        fills: bool = False,
    ) -> Commit:
        """Commit rows and return the commit that holds them.

        `reached`: by partition, the offset where reading has ended, if that is beyond its last row:
        Kafka has no record there (the marker of a transaction, for instance). `fills`: the rows lie
        between others that are already there.
        """
        self.schemas.keep(counts.schema_ids)
        facts = {
            "ranges": ranges_fact(counts.ranges),
            "refused": counts.refused,
            "refused_bytes": counts.refused_bytes,
            "fills": fills,
        }
        if reached:
            facts["reached"] = sorted(reached.items())
        return self.owner.append(self.name, rows, application_of(self.settings, self.input), facts)

    def note(self, commit: Commit) -> None:
        """Write the refused rows of a commit to `quarantine`.

        Rows that are already written are skipped.
        """
        if not commit.facts["refused"]:
            return
        fault_point("bronze.quarantine")
        ranges = ranges_of(commit.facts["ranges"])
        refused: Where = [[*terms, ("reason", "is not null", None)] for terms in within(ranges)]
        schema = self._engine.lake.layout[tables.QUARANTINE].schema
        columns = [name for name in schema.names if name != "source"]
        where = of_topic(self.input, refused)
        inputs = [Selection(self.name, columns, where, {"source": self.input.source})]
        if commit.facts["fills"]:
            noted = of_input(self.input, within(ranges))
            inputs.append(Selection(tables.QUARANTINE, ["partition", "offset"], noted))
        to_note = partial(_to_note, ranges=ranges)
        size = commit.facts.get("refused_bytes")
        rows = self._engine.from_tables(to_note, inputs, sorted(ranges), schema, size=size)
        note = replace(commit, application=note_application(self.settings, self.input))
        self._engine.append(tables.QUARANTINE, rows, note)

    def complete(self) -> None:
        """Write the note of the last commit, if a crash prevented it."""
        if (commit := unnoted_commit(self._engine.reader, self.settings, self.input)) is not None:
            self.note(commit)

    @property
    def _engine(self) -> Engine:
        return self.owner.engine


def _to_note(
    rows: pa.Table, noted: pa.Table | None = None, *, ranges: Mapping[int, tuple[int, int]]
) -> pa.Table:
    """Return the rows in their partition's range `[from, until)` that are not among `noted`."""
    partitions, numbers = np.unique(int64s(rows["partition"]), return_inverse=True)
    ends = np.array([ranges.get(int(p), (0, 0)) for p in partitions], np.int64).reshape(-1, 2)[
        numbers
    ]
    offsets = int64s(rows["offset"])
    refused = rows.filter(pa.array((offsets >= ends[:, 0]) & (offsets < ends[:, 1])))
    return refused if noted is None else without_existing(refused, noted)


def without_existing(rows: pa.Table, existing: pa.Table) -> pa.Table:
    """Return the rows whose partition and offset are not among the existing ones."""
    place = ["partition", "offset"]
    # Only the places are joined: a join cannot carry list columns, such as headers.
    places = numbered(rows.select(place))
    new = places.join(existing.select(place), place, join_type="left anti")
    return rows.take(new["_row"].sort())
