"""Work of Spark's tasks: functions that its Python workers run."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from watersmeet.engine import Function, InChunks, Input, KafkaInput, Summary
from watersmeet.engine.embedded import ROW_GROUP_BYTES, EmbeddedEngine
from watersmeet.errors import LakeNotSharedError
from watersmeet.imports import leave_imports_alone
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import VersionGoneError

CHUNK_BYTES: Final = 32 * 1024 * 1024
"""Approximate number of bytes that go from a Python worker to Spark at a time."""

FILE: Final = pa.field("file", pa.string())
"""The column with the entry of a file for a commit, as JSON."""

FAILURE: Final = pa.field("failure", pa.string())
"""The trace of what a task has raised, in a row of its own: for Spark it is no failure, for which
it would kill the other tasks, so that all have ended when the batch's files are deleted."""

INPUT = "input"
"""The number of a row's input, beside the columns of `engine.spark`."""


@dataclass(frozen=True)
class FromKafka:
    """Reading of Kafka as a function for mapInArrow, whose rows are the numbers of ranges.

    What opens Kafka is in this object, and so neither in a plan nor in a command line.
    """

    source: KafkaInput
    ranges: Sequence[Range]
    schema: pa.Schema

    def __call__(self, tasks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run in a Python worker of Spark: yield the records of each range."""
        leave_imports_alone()
        for number in _numbers(tasks):
            for batch in read_range(self.source.kafka, self.ranges[number]):
                yield from _chunks(self.source.decode(batch), self.schema)


@dataclass(frozen=True)
class FromTables:
    """`Engine.from_tables` as a function for mapInArrow, whose rows are the numbers of tasks.

    What opens the lake is in this object, and so neither in a plan nor in a command line.
    """

    lake: Lake
    engine_id: str
    function: Function
    inputs: Sequence[Input]
    groups: Sequence[Sequence[int]]
    schema: pa.Schema

    def __call__(self, tasks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run in a Python worker of Spark: yield the rows of each task."""
        engine = _engine(self.lake, self.engine_id)
        for number in _numbers(tasks):
            partitions = self.groups[number]
            numbers = pa.array(partitions, pa.int32())
            inputs = [
                rows.filter(pc.is_in(rows["partition"], numbers))
                if isinstance(rows, pa.Table)
                else rows.of_partitions(partitions)
                for rows in self.inputs
            ]
            try:
                rows = engine.from_tables(self.function, inputs, partitions, self.schema)
            except VersionGoneError as error:
                raise LakeNotSharedError(
                    error.table, f"an executor does not see all of version {error.version}"
                ) from None
            yield from _chunks(rows, self.schema)


@dataclass(frozen=True)
class NewFiles:
    """How a batch's tasks make files: the beginning of their names, and the umask of the run."""

    prefix: str
    umask: int

    def made(
        self, batches: Iterator[pa.RecordBatch], schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        """Yield what a task does that makes files, and then its failure, if it fails."""
        before = os.umask(self.umask)
        try:
            yield from batches
        except Exception:
            yield pa.RecordBatch.from_pylist([{FAILURE.name: traceback.format_exc()}], schema)
        finally:
            os.umask(before)


@dataclass(frozen=True)
class ToFiles:
    """`Engine.taken` as a function for mapInArrow, whose rows are the numbers of ranges.

    A task writes the records of a range to a file of bronze, which no commit names yet. It yields
    the groups of their summary, each with the file's entry (`FILE`), or its failure (`FAILURE`).
    """

    lake: Lake
    engine_id: str
    source: KafkaInput
    ranges: Sequence[Range]
    summary: Summary
    files: NewFiles

    @property
    def schema(self) -> pa.Schema:
        """The columns of the groups."""
        schema = self.lake.schema(self._table)
        by = [schema.field(name) for name in self.summary.by]
        values = [pa.field(name, pa.int64()) for name in self.summary.values]
        return pa.schema([*by, *values, FILE, FAILURE])

    def __call__(self, tasks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run in a Python worker of Spark: yield the groups of each range."""
        leave_imports_alone()
        return self.files.made(self._groups(tasks), self.schema)

    def _groups(self, tasks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        engine = _engine(self.lake, self.engine_id)
        for number in _numbers(tasks):
            groups = list[pa.Table]()
            chunks = self._counted(self.ranges[number], groups)
            added = engine.write_file(self._table, chunks, self.files.prefix)
            if added is not None:
                entry = pa.scalar(json.dumps(asdict(added)), FILE.type)
                rows = pa.concat_tables(groups)
                rows = rows.append_column(FILE, pa.repeat(entry, len(rows)))
                rows = rows.append_column(FAILURE, pa.nulls(len(rows), FAILURE.type))
                yield from _chunks(rows, self.schema)

    def _counted(self, offset_range: Range, groups: list[pa.Table]) -> Iterator[pa.Table]:
        read = map(self.source.decode, read_range(self.source.kafka, offset_range))
        for rows in _row_groups(read, self.lake.schema(self._table)):
            groups.append(self.summary.of(rows))
            yield rows
            del rows  # not in memory while the next ones come

    @property
    def _table(self) -> str:
        return tables.bronze(self.source.input.source)


@dataclass(frozen=True)
class RowsToFiles:
    """`Engine.append` of rows that tasks have, as a function for mapInArrow.

    A task writes its rows to files, and yields their entries for a commit, or its failure.
    """

    lake: Lake
    engine_id: str
    table: str
    files: NewFiles
    schema = pa.schema([FILE, FAILURE])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run in a Python worker of Spark: yield the entries of the files."""
        return self.files.made(self._entries(batches), self.schema)

    def _entries(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        engine = _engine(self.lake, self.engine_id)
        chunks = _row_groups(map(_as_table, batches), self.lake.schema(self.table))
        added = engine.write_files(self.table, chunks, self.files.prefix)
        entries = pa.array([json.dumps(asdict(file)) for file in added], FILE.type)
        yield pa.record_batch([entries, pa.nulls(len(added), FAILURE.type)], schema=self.schema)


class _TaskReader(DeltaRsReader):
    """Reader of a task: each table at the version that the driver has seen, or not at all."""

    def __init__(self, lake: Lake) -> None:
        super().__init__(lake)
        self._tables = dict[str, DeltaTable]()

    def opened_at(self, table: str, version: int) -> DeltaTable:
        """See `DeltaRsReader.opened_at`."""
        delta_table = self._tables.pop(table, None)
        try:
            if delta_table is None:
                delta_table = DeltaTable(self.uri(table), version, self.storage(table))
            elif delta_table.version() != version:
                delta_table.load_as_version(version)
        except DeltaError:
            raise VersionGoneError(table, version) from None
        self._tables[table] = delta_table
        return delta_table


_engines: dict[str, EmbeddedEngine] = {}
"""The engine of the lake that this worker has read last. It keeps what it knows of the tables."""


def _engine(lake: Lake, engine_id: str) -> EmbeddedEngine:
    if engine_id not in _engines:
        _engines.clear()
        _engines[engine_id] = EmbeddedEngine(lake, _TaskReader(lake))
    return _engines[engine_id]


def called(
    function: Function, names: Sequence[Mapping[str, str]], schema: pa.Schema
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a pure function of several tables, named as by `engine.spark`, for mapInArrow."""

    def call(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run in a Python worker of Spark: yield the function's rows of its inputs, one group."""
        rows = list(batches)
        if not sum(batch.num_rows for batch in rows):
            return
        table = pa.Table.from_batches(rows)
        inputs = [_input_rows(table, i, columns) for i, columns in enumerate(names)]
        yield from _chunks(function(*inputs), schema)

    return call


def called_in_chunks(
    function: InChunks, names: Sequence[Mapping[str, str]], schema: pa.Schema, size: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return, as `called`, a function that takes rows in pieces of about `size` bytes.

    These rows are the last input, and come after the others, sorted by key.
    """
    *other_names, row_names = names

    def call(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run in a Python worker of Spark; hold the inputs, and a piece at a time."""
        last = len(other_names)  # the number of the input with the rows
        first = list[pa.RecordBatch]()
        batches = (batch for batch in batches if batch.num_rows)
        for batch in batches:
            first.append(batch)
            if batch[INPUT][-1].as_py() == last:
                break
        if not first:
            return
        table = pa.Table.from_batches(first)
        inputs = [_input_rows(table, i, columns) for i, columns in enumerate(other_names)]
        rest = (pa.Table.from_batches([batch]) for batch in batches)
        rows = (_input_rows(group, last, row_names) for group in chain([table], rest))
        for _, changed in function(by_sorted_key(rows, size), *inputs):
            yield from _chunks(changed, schema)

    return call


def _input_rows(table: pa.Table, number: int, names: Mapping[str, str]) -> pa.Table:
    rows = table.filter(pc.equal(table[INPUT], number))
    return rows.select([*names.values()]).rename_columns([*names])


def by_sorted_key(rows: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """Yield sorted rows in pieces of about `size` bytes, all rows of a key in one piece."""
    chunk: list[pa.Table] = []
    for group in rows:
        chunk.append(group)
        if sum(part.nbytes for part in chunk) < size:
            continue
        table = pa.concat_tables(chunk)
        last = [pc.equal(table[name], table[name][-1]) for name in ("partition", "merge_key")]
        until = pc.index(pc.and_(*last), True).as_py()
        if until:
            yield table.slice(0, until)
        chunk = [table.slice(until)]
    if chunk:
        yield pa.concat_tables(chunk)


def _as_table(batch: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([batch])


def _row_groups(parts: Iterable[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    chunk = list[pa.Table]()
    for rows in parts:
        chunk.append(rows.select(schema.names).cast(schema))
        del rows  # not in memory while the next ones come
        if sum(each.nbytes for each in chunk) >= ROW_GROUP_BYTES:
            yield pa.concat_tables(chunk)
            chunk = []
    if any(each.num_rows for each in chunk):
        yield pa.concat_tables(chunk)


def _numbers(tasks: Iterator[pa.RecordBatch]) -> Iterator[int]:
    return (number for task in tasks for number in task["id"].to_pylist())


def _chunks(rows: pa.Table, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    size = max(1, rows.num_rows * CHUNK_BYTES // max(1, rows.nbytes))
    for begin in range(0, rows.num_rows, size):
        chunk = rows.slice(begin, size).select(schema.names).cast(schema)
        yield from chunk.combine_chunks().to_batches()
