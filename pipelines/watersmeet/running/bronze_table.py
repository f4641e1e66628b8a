"""Commits records to the bronze table of a source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.avro_schema import MAX_SCHEMAS
from watersmeet.core.columns import Int64s, row_values
from watersmeet.core.inputs import InputId
from watersmeet.core.reading import WRITER_SCHEMA
from watersmeet.engine import Engine, KafkaInput, Rows, Summary
from watersmeet.kafka.registry import rules_of
from watersmeet.lake import tables
from watersmeet.lake.commits import ranges_fact
from watersmeet.lake.tables import application_of
from watersmeet.monitoring.events import Counts
from watersmeet.running.owner import Owner
from watersmeet.running.writer_schemas import WriterSchemas
from watersmeet.settings import Settings


def kafka_input(
    settings: Settings,
    input_id: InputId,
    erased: Mapping[int, Int64s] = MappingProxyType({}),
    schemas: WriterSchemas | None = None,
) -> KafkaInput:
    """Return how an input is read from Kafka.

    `erased`: offsets by partition whose records are read as `forget` leaves them. `schemas`: what
    the lake knows of the schemas of records. A batch of more schemas than a source takes is read
    again, so the registry is asked for no more of them.
    """
    kept, is_full = (schemas.texts, schemas.is_full) if schemas else ({}, False)
    rules = rules_of(settings, input_id.source, kept=kept, is_full=is_full, most=MAX_SCHEMAS)
    return KafkaInput(input_id, settings.kafka, rules, dict(erased))


@dataclass(frozen=True)
class BatchCounts:
    """How many records a batch of bronze has, and where.

    `groups` has rows for each partition, reason and `heartbeat` (with a registry, for each
    `writer_schema`, too), each of some of the records, with the columns `records` (their number),
    `timed` (how many of them have an event time), and `first` and `last` (offsets).
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
    def ranges(self) -> dict[int, tuple[int, int]]:
        """The offsets `[first, last + 1)` by partition."""
        ends = self.groups.group_by("partition").aggregate([("first", "min"), ("last", "max")])
        values = row_values(ends, "partition", "first_min", "last_max")
        return {p: (first, last + 1) for p, first, last in values}

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
        }
        columns = self._engine.lake.schema(self.name).names
        by = ["partition", "reason", "heartbeat", WRITER_SCHEMA.name]
        return Summary([name for name in by if name in columns], values)

    def append(
        self,
        rows: Rows,
        counts: BatchCounts,
        reached: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Commit rows.

        `reached`: by partition, the offset where reading has ended, if that is beyond its last row:
        Kafka has no record there (the marker of a transaction, for instance).
        """
        self.schemas.keep(counts.schema_ids)
        facts: dict[str, Any] = {"ranges": ranges_fact(counts.ranges)}
        if reached:
            facts["reached"] = sorted(reached.items())
        self.owner.append(self.name, rows, application_of(self.settings, self.input), facts)

    @property
    def _engine(self) -> Engine:
        return self.owner.engine
