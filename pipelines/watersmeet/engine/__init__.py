"""The engine that runs the layers: it reads and writes tables, calls pure functions on rows, and
follows Kafka and tables.

A layer is written once, against `Engine`; which engine serves it decides only where its rows are.
`Rows` is the engine's own form of them (for Spark a DataFrame): a layer hands it from one call to
the next and never looks inside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Int64s
from watersmeet.core.inputs import InputId
from watersmeet.core.reading import ReadingRules, read_records
from watersmeet.kafka.cluster import Topics
from watersmeet.kafka.reading import Range
from watersmeet.lake.commits import Commit
from watersmeet.lake.erased import is_among, without_erased
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader, Where, normalise
from watersmeet.lake.tables import UNFINISHED, Table
from watersmeet.settings import KafkaSettings

Rows: TypeAlias = Any
"""Rows of a table or of a stream's batch, in the engine's own form."""

Function: TypeAlias = Callable[..., pa.Table]
"""A pure function that takes one Arrow table for each input."""

InChunks: TypeAlias = Callable[..., Iterator[tuple[pa.Table, pa.Table]]]
"""A function of rows in pieces, and of Arrow tables: yields each piece, and its changes."""


@dataclass(frozen=True)
class Selection:
    """The rows of a table (or of a `version`) that meet the conditions: some columns, and constant
    texts.

    Whoever computes with the rows reads them: with Spark, that is a Python worker.
    """

    table: str
    columns: Sequence[str]
    where: Where = ()
    constants: Mapping[str, str] = field(default_factory=dict)
    version: int | None = None

    def of_partitions(self, partitions: Sequence[int]) -> Selection:
        """Return the selection of those of the rows that are in some Kafka partitions."""
        return replace(
            self, where=[[*term, ("partition", "in", partitions)] for term in self.where or [[]]]
        )


Input: TypeAlias = "Selection | pa.Table"
"""Rows of a table, or a few rows that this process has in memory."""


@dataclass(frozen=True)
class SilverRows:
    """The rows of silver that have one of these statuses; their records have `size` bytes.

    `changing`: a condition for the rows that may change, whose records have `changing_bytes`, if
    there is one; `has_changing`: False where there is no such row.
    """

    statuses: Sequence[str]
    size: int
    changing: Where | None = None
    changing_bytes: int = 0
    has_changing: bool = True

    @property
    def every(self) -> Where:
        """The condition for all of the rows."""
        return [[("status", "in", self.statuses)]]

    @property
    def where(self) -> Where:
        """The condition for those of the rows that may change."""
        return self.every if self.changing is None else self.changing

    @property
    def where_bytes(self) -> int:
        """The size (bytes) of the records of the rows that may change."""
        return self.size if self.changing is None else self.changing_bytes


@dataclass(frozen=True)
class KafkaInput:
    """One input (`core.inputs`) as it is read from Kafka: a topic's records, in bronze's columns.

    - `erased`: offsets by partition whose records are read as `forget` leaves them.
    - `leader_epochs`: by partition, the last leader's term whose records are read (`Range`).
    - `existing`: offsets by partition whose records are left out.
    """

    input: InputId
    kafka: KafkaSettings
    rules: ReadingRules
    erased: Mapping[int, Int64s] = field(default_factory=dict)
    leader_epochs: Mapping[int, int] = field(default_factory=dict)
    existing: Mapping[int, Int64s] = field(default_factory=dict)

    def decode(self, batch: pa.RecordBatch) -> pa.Table:
        """Return records with the columns of `core.reading.KAFKA` in bronze's columns."""
        if self.existing:
            is_new = pc.invert(pa.array(is_among(batch, self.existing)))
            batch = batch.filter(is_new)
        rows = read_records(batch, rules=self.rules)
        return without_erased(rows, erased=self.erased) if self.erased else rows

    def offset_ranges(self, ranges: Mapping[int, tuple[int, int]]) -> list[Range]:
        """Return offset ranges `[from, until)` by partition as those of the topic."""
        return [
            Range(self.input.topic, p, *offsets, self.leader_epochs.get(p))
            for p, offsets in sorted(ranges.items())
        ]


@dataclass(frozen=True)
class Summary:
    """Aggregates (`values` as in `TableReader.summary`) of rows with equal values in `by`."""

    by: Sequence[str]
    values: Mapping[str, tuple[str, str]]

    def of(self, rows: pa.Table) -> pa.Table:
        """Return the aggregates of rows in this process."""
        aggregates: list[Any] = [
            ([], "count_all") if column == "*" else (column, kind)
            for kind, column in self.values.values()
        ]
        grouped = rows.group_by(list(self.by)).aggregate(aggregates)
        return normalise(grouped.rename_columns([*self.by, *self.values]))


@dataclass(frozen=True)
class Taken:
    """Records that were read from Kafka, and that no table has yet.

    `rows`: for `Engine.append`, once, while `Engine.taken` provides them. `groups`: the answer to a
    summary; a group may have several rows. `reached`: by partition, the offset where they end.
    """

    rows: Rows
    groups: pa.Table
    reached: Mapping[int, int]


class Following(Protocol):
    """Rows of silver that are written in one commit with others, and follow from these."""

    @property
    def keys(self) -> Collection[str] | None:
        """The keys whose finished rows they follow from beside the late rows; None for no rows."""

    def see(self, rows: pa.Table) -> None:
        """Take rows that are written: all late ones before any finished ones."""

    def rows(self) -> Iterator[pa.Table]:
        """Yield the rows that follow, in pieces, once all others were seen."""


class Running(Protocol):
    """Work that an engine does until it is stopped, has come to its end, or fails."""

    @property
    def is_active(self) -> bool:
        """True while the work goes on."""

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the work, if one did."""

    def stop(self) -> None:
        """End the work."""


class Engine(Protocol):
    """An engine, which reads, transforms and writes the tables of one lake.

    A write with a `Commit` is one Delta commit with its transaction version and metadata. Where the
    table has seen this version of the application, or a later one, nothing is written and nothing
    is raised: a repeated write happens once, and a write of a fenced owner never.
    """

    lake: Lake
    compact_every: int
    """Number of commits of a layer after which its tables are compacted."""
    merge_bytes: int
    """Bytes of records, in memory, in a batch of silver; the merge holds them several times."""
    few_bytes: int
    """Bytes of open records up to which reading all is as quick as choosing those to change."""

    @property
    def reader(self) -> TableReader:
        """The reader that answers questions about the lake's tables."""

    def read(self, selection: Input) -> Rows:
        """Return rows in the engine's own form: of a table, or a few that this process has."""

    def taken(
        self, source: KafkaInput, ranges: Mapping[int, tuple[int, int]], summary: Summary
    ) -> AbstractContextManager[Taken]:
        """Read the records of offset ranges `[from, until)` by partition, in bronze's columns, and
        provide them for their bronze table, with a summary.

        They end earlier where they are too large for memory. The aggregates are whole numbers.
        Until the append, the table has nothing of the records.
        """

    def from_tables(
        self,
        function: Function,
        inputs: Sequence[Input],
        partitions: Sequence[int],
        schema: pa.Schema,
        *,
        size: int | None = None,
    ) -> Rows | pa.Table:
        """Return the result of a pure function of rows of tables, called with all rows of some
        partitions at a time.

        Every input has the integer column `partition`. The function gets an Arrow table for each
        input, and returns one with the columns of `schema`. It is called where the rows, of these
        `partitions` alone, are read. `size`: the bytes of their records, where it is known; where
        it is small, the result is in this process.
        """

    def collect(self, rows: Rows) -> pa.Table:
        """Return rows, no more than memory holds, as an Arrow table in this process."""

    def create(self, table: Table) -> None:
        """Create the table, unless it exists; one that exists is left as it is."""

    def evolve_schema(self, table: Table) -> None:
        """Add to the table, which exists, every column and field that its layout has and it lacks.

        No column is lost, and new ones are null in the rows that are there.
        """

    def create_view(self, name: str, query: str) -> None:
        """Create or replace a view in the lake's catalog, which is this query in Spark SQL."""

    def append(
        self,
        table: str,
        rows: Rows | pa.Table,
        commit: Commit | None = None,
        following: Following | None = None,
    ) -> None:
        """Append rows, and what follows from them, in one commit, also where there are none."""

    def merge(
        self,
        table: str,
        rows: Rows | pa.Table,
        commit: Commit,
        *,
        only_open: bool = True,
        large: SilverRows | None = None,
        following: Following | None = None,
    ) -> None:
        """Replace or insert each of `rows`, and insert what follows from them, in one commit, once.

        `rows` have silver's columns, and `replaces`: the event time of the row with the same
        partition, tenant and merge_key whose place a row takes, null for a new one. A row with a
        null status deletes the row at `replaces`, and those of its key that wait, up to the
        position `delete_up_to`. `only_open`: of the rows that do not wait, only open ones are
        replaced or deleted; else every row of the key at `replaces`, but messages that were read
        back (`out`). `large`: the rows among which those are, where they do not fit into memory.
        """

    def merge_in_chunks(
        self,
        unfinished: SilverRows,
        function: InChunks,
        inputs: Sequence[Input],
        schema: pa.Schema,
        commit: Commit,
        following: Following,
    ) -> bool:
        """Merge what `function` changes in rows of silver, and what follows, as `merge`, in pieces.

        Memory holds a piece of the rows at a time, which has all rows of its keys. The changes have
        the columns of `schema`. Return False, and change nothing, where the engine cannot do so:
        then use `merge`.
        """

    def delete(self, table: str, where: Where, commit: Commit) -> None:
        """Delete the rows that meet the conditions, in one commit; once per commit."""

    def update(
        self, table: str, where: Where, values: Mapping[str, str | bool | None], commit: Commit
    ) -> None:
        """Give columns of the rows that meet the conditions these values, in one commit, once."""

    def follow_kafka(self, topics: Topics, work: Callable[[], None]) -> Running:
        """Call `work` once soon, and again whenever Kafka has more in one of the topics."""

    def follow_tables(
        self, tables: Sequence[str], work: Callable[[], None], follower: str
    ) -> Running:
        """Call `work` once soon, and again whenever one of the tables has new commits.

        `follower`: a name that nobody else has who follows tables of the lake at the same time.
        """

    def compact(self, table: str, file_bytes: int) -> None:
        """Rewrite small files into few of about `file_bytes`, unless another writer is quicker."""

    def purge(self, table: str) -> None:
        """Rewrite the files that hold rows which deletion vectors mark as deleted; no row changes.

        Raises the error of a conflict where another writer was quicker.
        """

    def vacuum(self, table: str) -> int:
        """Remove the files that no version within the retention uses; return how many there were.

        These are data and change files, also those that no commit names, once they are as old.
        """

    def set_properties(self, table: str, properties: Mapping[str, str]) -> None:
        """Set these properties of the table."""


def replaced_row(*, only_open: bool) -> str:
    """Return the MERGE condition, in SQL of every engine: that a row of `Engine.merge` (`changed`)
    takes the place of a row of silver (`kept`), or deletes it.
    """
    columns = ("partition", "tenant", "merge_key")
    its_key = " AND ".join(f"kept.{name} = changed.{name}" for name in columns)
    its_time = "kept.event_time = changed.replaces"
    if not only_open:
        return f"kept.status != 'out' AND {its_key} AND {its_time}"
    is_replaced = f"kept.status = 'open' AND {its_time}"
    is_deleted = "kept.status = 'waiting' AND kept.position <= changed.delete_up_to"
    is_unfinished = f"kept.status IN {tuple(UNFINISHED)}"
    return f"{is_unfinished} AND {its_key} AND (({is_replaced}) OR ({is_deleted}))"
