"""What runs the layers: an engine reads and writes tables, calls pure functions on rows, and follows Kafka and tables.

A layer is written once, against `Engine`; which engine serves it decides nothing but where its rows are while they are worked
on. `Rows` is whatever an engine works with (for Spark a DataFrame): a layer hands it from one call to the next and never looks
inside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from pipelines.core.reading import ReadingRules
from pipelines.lake.commits import Commit
from pipelines.lake.location import Lake
from pipelines.lake.questions import Condition, Questions, Where
from pipelines.lake.tables import Table
from pipelines.settings import KafkaSettings

Rows: TypeAlias = Any
"""Rows of a table or of a stream's batch, in the engine's own form."""

Function: TypeAlias = Callable[..., pa.Table]
"""A pure function of one Arrow table for each input."""

InPieces: TypeAlias = Callable[..., Iterator[tuple[pa.Table, pa.Table]]]
"""A pure function of rows that come in pieces, and of one Arrow table for each input: each piece, and what changes in it."""


@dataclass(frozen=True)
class Held:
    """Rows of silver with one of these statuses, whose records have so many bytes; `keys`: where they are given, no row of
    another key changes.
    """

    statuses: Sequence[str]
    size: int
    keys: Sequence[str] | None = None

    @property
    def where(self) -> Where:
        """Those of them that may change."""
        keys: list[Condition] = [] if self.keys is None else [("merge_key", "in", self.keys)]
        return [[("status", "in", self.statuses), *keys]]


@dataclass(frozen=True)
class KafkaInput:
    """One input (`core.inputs`) as it is read from Kafka: committed records of a topic, read by `rules` into bronze's columns.

    `offsets`: by partition, where reading begins; these partitions and no others. A batch spans about `max_offsets_per_batch`.
    """

    source: str
    kafka: KafkaSettings
    topic: str
    offsets: Mapping[int, int]
    max_offsets_per_batch: int
    rules: ReadingRules

    @property
    def identifier(self) -> str:
        """The input's name in letters, digits and underscores alone."""
        return re.sub("[^A-Za-z0-9_]", lambda found: f"_{ord(found[0]):x}_", self.source)


class Running(Protocol):
    """Something that an engine does until it is stopped, has come to its end, or fails."""

    @property
    def is_active(self) -> bool:
        """Whether it still runs."""
        ...

    @property
    def failure(self) -> Exception | None:
        """What has ended it, where something did."""
        ...

    def stop(self) -> None:
        """Ends it."""
        ...


class Engine(Protocol):
    """Reads, transforms and writes the tables of one lake.

    A write with a `Commit` is one Delta commit that carries its transaction version and metadata. Where the table has already
    seen this version of the application, or a later one, nothing is written and nothing is raised: so a repeated write happens
    once, and a write of a fenced owner never.
    """

    lake: Lake
    compact_every: int
    """After so many commits of a layer its tables are compacted: each makes a few small files, and whatever is read next opens
    most of them.
    """
    merge_bytes: int
    """So many bytes of records, as they are in memory, go into a batch of silver. The merge holds them several times."""

    @property
    def questions(self) -> Questions:
        """What may be asked about the lake's tables."""
        ...

    def read(
        self,
        table: str,
        columns: Sequence[str],
        where: Where = (),
        *,
        constants: Mapping[str, str] | None = None,
        version: int | None = None,
    ) -> Rows:
        """Rows of a table, or of one of its versions, with these columns, and `constants`: columns of one text each."""
        ...

    def read_kafka(self, source: KafkaInput, ranges: Mapping[int, tuple[int, int]]) -> Rows:
        """The records of offset ranges `[from, until)` by partition, in bronze's columns."""
        ...

    def rows(self, found: pa.Table) -> Rows:
        """A small Arrow table as rows."""
        ...

    def per_partition(self, function: Function, inputs: Sequence[Rows], schema: pa.Schema) -> Rows:
        """What a pure function makes of its inputs, called with all rows of some Kafka partitions at a time.

        Every input has the integer column `partition`. The function gets an Arrow table for each input, and returns one with the
        columns of `schema`.
        """
        ...

    def held(self, rows: Rows) -> AbstractContextManager[Rows]:
        """Inside, the rows are computed at most once."""
        ...

    def summary(self, rows: Rows, by: Sequence[str], values: Mapping[str, tuple[str, str]]) -> pa.Table:
        """Rows grouped `by` columns; `values` as in `Questions.summary`."""
        ...

    def judged(self, rows: Rows, valid: str, value: str | None, max_bytes: int) -> Rows:
        """Rows of silver whose finished ones are judged by the user's expressions (Spark SQL over silver's columns).

        A finished row for which `valid` is not true gets `valid` false and the reason `predicate`; else one whose `value` (where
        it is given) has more than `max_bytes` bytes gets the reason `too_large`.
        """
        ...

    def fetched(self, rows: Rows) -> pa.Table:
        """Rows, no more than memory holds, in this process."""
        ...

    def evaluate(self, rows: pa.Table, expressions: Mapping[str, str]) -> pa.Table:
        """The user's SQL expressions, by the name of their column, over some rows of silver: a row for each, in their order."""
        ...

    def expression_problem(self, text: str, columns: pa.Schema, kinds: tuple[pa.DataType, ...]) -> str | None:
        """What is wrong with an SQL expression of the user over these columns, which must give one of `kinds`; None: nothing."""
        ...

    def create(self, table: Table) -> None:
        """Afterwards the table exists; one that did is left as it is."""
        ...

    def widen(self, table: Table) -> None:
        """Afterwards the table, which exists, has every column and every field of a struct that its layout has; none is lost, and
        what is new is null in the rows that are there.
        """
        ...

    def create_view(self, name: str, query: str) -> None:
        """Afterwards the lake's catalog has a view of that name, which is this query in Spark SQL."""
        ...

    def append(self, table: str, rows: Rows | pa.Table, commit: Commit | None = None) -> None:
        """Appends rows in one commit; no rows make a commit too."""
        ...

    def merge(self, table: str, rows: Rows, commit: Commit, *, only_open: bool = True) -> None:
        """In one commit, each of `rows` takes the place of the row that it replaces, or is new; once per commit.

        `rows` have silver's columns, and `replaces`: the event time of the row with the same partition and merge_key that goes,
        null for a new row. By a row whose status is null, all rows there go; with tenants also those of its key that wait, up to
        the position `passes`. `only_open`: of the others, only open rows go.
        """
        ...

    def merge_in_pieces(
        self,
        held: Held,
        function: InPieces,
        inputs: Sequence[Rows],
        schema: pa.Schema,
        judge: Callable[[Rows], Rows],
        commit: Commit,
    ) -> bool:
        """In one commit, once per commit, merge what `function` gives of silver's rows, as `merge` does, with the columns of
        `schema`; memory holds a piece of the rows at a time, and all of a key are in one. `judge` is called with what changes.
        False, and nothing is changed, where the engine cannot do so: `merge` is to be used.
        """
        ...

    def delete(self, table: str, where: Where, commit: Commit) -> None:
        """Deletes rows in one commit; once per commit."""
        ...

    def update(self, table: str, where: Where, values: Mapping[str, str | bool | None], commit: Commit) -> None:
        """Gives columns of some rows these values, in one commit; once per commit."""
        ...

    def follow_kafka(self, source: KafkaInput, work: Callable[[Rows], None], *, once: bool) -> Running:
        """Calls `work` with batches of new records in bronze's columns: up to what Kafka has now (`once`), or without end."""
        ...

    def follow(self, name: str, tables: Sequence[str], work: Callable[[], None]) -> Running:
        """Calls `work` once soon, and again whenever one of the tables has new commits."""
        ...

    def compact(self, table: str, file_bytes: int) -> None:
        """Rewrites smaller files into few of up to about this size; no row changes. Where another writer was quicker, it is left
        for the next time.
        """
        ...

    def purge(self, table: str) -> None:
        """Rewrites the files in which rows still stand that deletion vectors mark as deleted; no row changes. Afterwards only
        older versions have files with such rows. Raises what a conflict raises where another writer was quicker.
        """
        ...

    def vacuum(self, table: str) -> int:
        """Removes the files that no version within the retention uses, and says how many there were: data and change files,
        also those that no commit names, once they are as old.
        """
        ...

    def set_properties(self, table: str, properties: Mapping[str, str]) -> None:
        """Afterwards the table has these properties."""
        ...


def replaced_row(*, only_open: bool, has_tenants: bool = False) -> str:
    """Which row of silver, as `kept`, one of the rows of `Engine.merge`, as `changed`, replaces: SQL of every engine."""
    its_key = "kept.partition = changed.partition AND kept.merge_key = changed.merge_key"
    if not has_tenants:
        its_row = f"{its_key} AND kept.event_time = changed.replaces"
        return f"kept.status = 'open' AND {its_row}" if only_open else its_row
    merged, waiting = "kept.event_time = changed.replaces", "kept.status = 'waiting' AND kept.position <= changed.passes"
    merged = f"kept.status = 'open' AND {merged}" if only_open else f"kept.status != 'waiting' AND {merged}"
    its_row = f"{its_key} AND kept.tenant = changed.tenant AND (({merged}) OR ({waiting}))"
    return f"kept.status IN ('open', 'waiting') AND {its_row}" if only_open else its_row
