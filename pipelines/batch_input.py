"""What a silver batch reads: the records of its ranges, and the open rows that they or the clock may change.

A large batch leaves both to Spark, file by file. For a small one the driver fetches them (`Lake.fetch`): of many open rows
only those of its own keys, and those that time out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, BooleanType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.core.idle import Decision
from pipelines.core.plan import BatchPlan, TopicPartition
from pipelines.settings import Settings
from pipelines.transforms.ranges import case, is_within, within

FEW_ROWS = 50_000
FEW_BYTES = 64 * 1024 * 1024
"""Up to so many offsets, rows that time out, and bytes in all of them, a batch is small: the driver holds it with ease."""

FEW_OPEN = 40_000
FEW_OPEN_BYTES = 16 * 1024 * 1024
"""Up to so many open rows and bytes in them are written anew with a small batch in less time than MERGE's small jobs take."""

FEW_FILES = 8
"""In up to so many files, the open rows that a small batch changes are marked as gone instead (where that can be done)."""

OPEN_PER_OFFSET = 2
"""A large batch writes all open rows anew up to so many for each offset that it passes."""

_RECORD = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("merge_key", StringType()),
        StructField("heartbeat", BooleanType()),
        StructField("event_time", TimestampType()),
        StructField("value", BinaryType()),
    ]
)
"""What is read of bronze."""

_COLUMNS = StructType([*_RECORD, StructField("source", StringType()), StructField("is_idle", BooleanType())])
_BUT_VALUE = [name for name in _COLUMNS.names if name != "value"]
_IDLE_COLUMNS = StructType([_COLUMNS[name] for name in ("source", "partition", "offset", "heartbeat", "event_time", "is_idle")])


class _Fetched(NamedTuple):
    """A small batch: its records by source, the open rows that it may change, and the other ones where they are few."""

    records: dict[str, pa.Table]
    open_rows: pa.Table
    others: pa.Table | None

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        return sum(rows.nbytes for rows in (*self.records.values(), self.open_rows))


@dataclass(frozen=True)
class BatchInput:
    """The input of one planned batch; `idle`: what the idle policy has decided around its ranges."""

    lake: Lake
    settings: Settings
    plan: BatchPlan
    idle: Mapping[TopicPartition, Sequence[Decision]]

    @property
    def changes_nothing(self) -> bool:
        """Whether the batch only moves the clock: it has no record with a key, and no open row times out."""
        return self._offsets <= FEW_ROWS and not self._keyed and not self._timing_out

    @property
    def is_small(self) -> bool:
        """Whether its rows were fetched."""
        return self._fetched is not None

    @property
    def marks_open(self) -> bool:
        """Whether the open rows that change are marked as gone, without MERGE (where not all of them are written anew)."""
        return self.is_small and self._can_mark

    @cached_property
    def rewrites_open(self) -> bool:
        """Whether all open rows are written anew with the batch, being few."""
        if self._fetched is not None:
            return self._fetched.others is not None
        return not self._feeds_changes and self._open <= OPEN_PER_OFFSET * self._offsets

    @property
    def _feeds_changes(self) -> bool:
        """Whether silver has a change data feed: it would call each row that is written anew changed, and none updated."""
        return self.settings.silver.change_data_feed

    @cached_property
    def _can_mark(self) -> bool:
        return not self._feeds_changes and self.lake.can_update(tables.SILVER)

    @property
    def _takes_all_open(self) -> bool:
        """Whether a small batch should write all open rows anew, if they are small too."""
        if self._feeds_changes or self._open > FEW_OPEN:
            return False
        return not self._can_mark or self.lake.changing_files(tables.SILVER) > FEW_FILES

    def records(self, values: Mapping[str, Mapping[str, Column]]) -> DataFrame:
        """Every record of the ranges that has a time, of all sources, and the idle policy's heartbeats in them. `values`: of each
        source, columns (of its `value`) by name.
        """
        idle = self._idle_rows()
        if self._fetched is not None:
            found = [_of_source(rows, source) for source, rows in self._fetched.records.items()]
            rows = pa.concat_tables([*found, idle], promote_options="default").select(_COLUMNS.names)
            return self.lake.frame(rows, _COLUMNS).select(*_BUT_VALUE, *_of_each_source(values))
        frames = [self.lake.frame(idle, _IDLE_COLUMNS)] if idle.num_rows else []
        for source in self.settings.sources:
            own = [column.alias(name) for name, column in values[source].items()]
            bronze = self._bronze(source).withColumns({"source": F.lit(source), "is_idle": F.lit(False)})
            frames.append(bronze.select(*_BUT_VALUE, *own))
        return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)

    def open_rows(self) -> DataFrame:
        """Open rows of silver: at least those that the batch changes."""
        if self._fetched is not None:
            return self.lake.frame(self._fetched.open_rows, self.lake.schema(tables.SILVER))
        return self.lake.read(tables.SILVER).where("status = 'open'")

    @property
    def other_open_rows(self) -> pa.Table | None:
        """Of a small batch that `rewrites_open`, the open rows that are not among `open_rows`; None: there is no such row."""
        return None if self._fetched is None else self._fetched.others

    def _bronze(self, source: str) -> DataFrame:
        rows = self.lake.read(tables.bronze(source))
        return rows.where(is_within(self._ranges(source)) & F.col("event_time").isNotNull())

    @cached_property
    def _fetched(self) -> _Fetched | None:
        """None where the batch is large, or where Spark would have to read the rows anyhow."""
        if not self.lake.is_local or self._offsets > FEW_ROWS or self._timing_out > FEW_ROWS:
            return None
        records = {source: self._fetch_records(source) for source in self.settings.sources}
        fetched = _Fetched(records, *self._fetch_open())
        return fetched if fetched.nbytes <= FEW_BYTES else None

    def _fetch_records(self, source: str) -> pa.Table:
        columns = ", ".join(f"`{name}`" for name in _RECORD.names)
        return self.lake.fetch(f"SELECT {columns} FROM {{{tables.bronze(source)}}} WHERE {self._timed_in(source)}", _RECORD)

    def _fetch_open(self) -> tuple[pa.Table, pa.Table | None]:
        """The open rows of the batch's keys and those that time out if nothing joins them; and the others."""
        schema = self.lake.schema(tables.SILVER)
        keys = " UNION ".join(
            f"SELECT `partition`, merge_key FROM {{{tables.bronze(source)}}} WHERE {self._keyed_in(source)}"
            for source in self.settings.sources
        )
        is_affected = f"(touched.merge_key IS NOT NULL OR COALESCE({self._is_old('silver.')}, FALSE))"
        takes_all = self._takes_all_open
        found = self.lake.fetch(
            f"SELECT {', '.join(f'silver.`{name}`' for name in schema.names)}, {is_affected} AS is_affected "
            "FROM {silver} AS silver "
            f"LEFT JOIN ({keys}) AS touched ON silver.`partition` = touched.`partition` AND silver.merge_key = touched.merge_key "
            f"WHERE silver.status = 'open' AND {'TRUE' if takes_all else is_affected}",
            StructType([*schema, StructField("is_affected", BooleanType())]),
        )
        may_change, rows = found["is_affected"], found.drop_columns(["is_affected"])
        others = rows.filter(pc.invert(may_change))
        return rows.filter(may_change), others if takes_all and others.nbytes <= FEW_OPEN_BYTES else None

    @cached_property
    def _offsets(self) -> int:
        return sum(done.until_offset - done.from_offset for done in self.plan.ranges.values())

    @cached_property
    def _open(self) -> int:
        return int(self.lake.rows("SELECT COUNT(*) FROM {silver} WHERE status = 'open'")[0][0])

    @cached_property
    def _timing_out(self) -> int:
        """How many open rows do, unless a record joins them first."""
        return int(self.lake.rows(f"SELECT COUNT(*) FROM {{silver}} WHERE status = 'open' AND {self._is_old()}")[0][0])

    @cached_property
    def _keyed(self) -> int:
        return sum(
            self.lake.rows(f"SELECT COUNT(*) FROM {{{tables.bronze(source)}}} WHERE {self._keyed_in(source)}")[0][0]
            for source in self.settings.sources
        )

    def _timed_in(self, source: str) -> str:
        return f"({within(self._ranges(source))}) AND event_time IS NOT NULL"

    def _keyed_in(self, source: str) -> str:
        return f"{self._timed_in(source)} AND NOT heartbeat"

    def _is_old(self, table: str = "") -> str:
        """Whether an open row is older than the clock of its partition allows."""
        timeout_ms = self.settings.merge.timeout_ms
        oldest = {p: self.lake.time_literal(clock - timeout_ms) for p, clock in self.plan.clocks.items()}
        return f"{table}event_time < {case(oldest, table)}" if oldest else "FALSE"

    def _ranges(self, source: str) -> dict[int, tuple[int, int | None]]:
        return {
            tp.partition: (done.from_offset, done.until_offset)
            for tp, done in self.plan.ranges.items()
            if tp.source == source and not done.is_empty
        }

    def _idle_rows(self) -> pa.Table:
        """The idle policy's heartbeats within the batch's ranges. One that stands at the end of a range moves nothing in it."""
        rows = [
            (tp.source, tp.partition, h.after_offset, True, h.event_time * 1000, True)
            for tp, heartbeats in self.idle.items()
            for h in heartbeats
            if (done := self.plan.ranges[tp]).from_offset <= h.after_offset + 1 < done.until_offset
        ]
        columns = list(zip(*rows, strict=True)) or [()] * len(_IDLE_COLUMNS)
        types = to_arrow_schema(_IDLE_COLUMNS, timezone="UTC")
        return pa.table([pa.array(column, field.type) for column, field in zip(columns, types, strict=True)], schema=types)


def _of_source(rows: pa.Table, source: str) -> pa.Table:
    """Fetched records of a source, with what tells them from others."""
    count = rows.num_rows
    return rows.append_column("source", pa.repeat(source, count)).append_column("is_idle", pa.repeat(False, count))


def _of_each_source(values: Mapping[str, Mapping[str, Column]]) -> list[Column]:
    """The value columns where the records of all sources are rows of one frame: each source fills its own."""
    of_name: dict[str, list[Column]] = {}
    for source, columns in values.items():
        for name, column in columns.items():
            of_name.setdefault(name, []).append(F.when(F.col("source") == source, column))
    return [F.coalesce(*columns).alias(name) for name, columns in of_name.items()]
