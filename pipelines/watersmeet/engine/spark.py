"""The Spark engine: any Spark that has Delta Lake, and any lake that it can reach. Rows are
DataFrames, or Arrow tables where they are few.

Wherever delta-rs can open the lake, it creates the tables and makes every commit that appends, in
hundredths of a second, where Spark takes a whole one. This process does the work of a small batch,
as the embedded engine does, and of one with large rows, a few of which would fill the JVM. Of a
large batch Spark's tasks read, compute, and write the files. Spark itself merges many rows, and
rewrites many files. No table is written by both at once (`changing`): on S3, two processes cannot
both make the same commit with delta-rs, while Spark looks whether there is a commit of that number,
and then writes its own.

Only documented calls are used.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.transaction import AddAction
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.types import columns_ddl
from watersmeet.engine import (
    Following,
    Function,
    InChunks,
    Input,
    KafkaInput,
    Running,
    Selection,
    SilverRows,
    Summary,
    Taken,
)
from watersmeet.engine.checks import number_of_tasks
from watersmeet.engine.embedded import FEW_BYTES, EmbeddedEngine, WrittenFiles
from watersmeet.engine.polling import Polling
from watersmeet.engine.session import struct_type, umask
from watersmeet.engine.spark_writer import SparkWriter
from watersmeet.engine.tasks import (
    CHUNK_BYTES,
    FAILURE,
    FILE,
    INPUT,
    FromKafka,
    FromTables,
    NewFiles,
    RowsToFiles,
    ToFiles,
    called,
    called_in_chunks,
)
from watersmeet.kafka.reading import split_ranges
from watersmeet.kafka.workers import FEW_OFFSETS
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.by_spark import summarised, table_rows
from watersmeet.lake.commits import Commit
from watersmeet.lake.data_file import FILES
from watersmeet.lake.files import Files
from watersmeet.lake.location import Lake, hadoop_path
from watersmeet.lake.store import reader
from watersmeet.lake.table_errors import names_tables, naming
from watersmeet.lake.table_reader import normalise, row_count, sql_of
from watersmeet.lake.tables import Table

LOOK_EVERY = "200 milliseconds"
"""Interval between two looks of a query for new commits: each look lists a folder."""

_ARROW_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_ROW_GROUP_ROWS = "parquet.block.row.count.limit"

_FEW_REWRITTEN_BYTES = 64 * 1024 * 1024
"""Bytes of files that delta-rs rewrites here in a second; Spark distributes more."""

_LARGE_ROW_BYTES = 4 * 1024 * 1024
"""Bytes of a row up to which the JVM, whose tasks hold up to 200 rows, gets it."""


@names_tables
class SparkEngine(Polling, SparkWriter):
    """`Engine` on a Spark session whose settings are the layers' own (`engine.session`)."""

    here_bytes = 16 * 1024 * 1024
    """Bytes of records up to which this process computes with them: more take Spark less time."""
    here_offsets = FEW_OFFSETS
    """Number of offsets of Kafka up to which this process reads them."""
    compact_every = 50
    merge_bytes = 128 * 1024 * 1024
    from_kafka_s = EmbeddedEngine.from_kafka_s

    def __init__(self, spark: SparkSession, lake: Lake) -> None:
        super().__init__(spark, lake)
        self.reader = reader(lake, lambda: spark)
        self._id = uuid.uuid4().hex
        by_delta_rs = isinstance(self.reader, DeltaRsReader)
        self.few_bytes = FEW_BYTES if by_delta_rs else self.merge_bytes
        self._tasks = number_of_tasks(spark)
        self._umask = umask()

    # -- reading

    def read(self, selection: Input) -> DataFrame:
        """See `Engine.read`."""
        if isinstance(selection, pa.Table):
            return self.rows(selection)
        table, where = selection.table, selection.where
        if (view := self.lake.views.get(table)) is not None:
            [part] = view.parts
            table = part.table
            where = part.resolved(where) or ()
        condition = sql_of(where, self.lake.schema(table), "spark")
        rows = table_rows(self.spark, self.lake, table, selection.version).where(condition)
        texts = [F.lit(value).alias(name) for name, value in selection.constants.items()]
        return rows.select(*selection.columns, *texts)

    def _range(self, tasks: int) -> DataFrame:
        return self.spark.range(0, tasks, 1, max(1, tasks))

    @contextmanager
    def taken(
        self, source: KafkaInput, ranges: Mapping[int, tuple[int, int]], summary: Summary
    ) -> Iterator[Taken]:
        """See `Engine.taken`. Where delta-rs can write the table, the tasks write the files."""
        table = tables.bronze(source.input.source)
        offsets = sum(until - since for since, until in ranges.values())
        if (here := self._here) is not None and offsets <= self.here_offsets:
            with here.taken(source, ranges, summary) as few:
                yield few
            return
        parts = split_ranges(source.offset_ranges(ranges), self._tasks)
        numbers = self._range(len(parts))
        reached = {p: until for p, (_, until) in ranges.items()}
        writer = self._by_delta_rs(table)
        if writer is not None and writer.takes_files(table):
            tasks = ToFiles(self.lake, self._id, source, parts, summary, self._new_files())
            with self._writing(writer, table, tasks, numbers) as (files, groups):
                yield Taken(files, groups.drop_columns([FILE.name, FAILURE.name]), reached)
            return
        schema = self.lake.schema(table)
        read = FromKafka(source, parts, schema)
        rows = numbers.mapInArrow(read, self._type(schema)).persist()
        try:
            groups = self.collect(summarised(rows, summary.by, summary.values))
            yield Taken(rows, normalise(groups), reached)
        finally:
            rows.unpersist()

    def _new_files(self) -> NewFiles:
        return NewFiles(f"{FILES}{uuid.uuid4().hex}-", self._umask)

    @contextmanager
    def _writing(
        self, writer: EmbeddedEngine, table: str, tasks: ToFiles | RowsToFiles, rows: DataFrame
    ) -> Iterator[tuple[WrittenFiles, pa.Table]]:
        # Unless a commit was to name the files that tasks write, they are deleted.
        files = WrittenFiles(writer, [])
        try:
            described = rows.mapInArrow(tasks, self._type(tasks.schema)).toArrow()
            for failure in described[FAILURE.name].drop_null().to_pylist():
                raise PythonException(failure)
            entries = described[FILE.name].unique().to_pylist()
            files.entries = [AddAction(**json.loads(entry)) for entry in entries]
            files.check(table)
            yield files, described
        finally:
            if not files.are_offered:
                with suppress(Exception):  # vacuum comes later; this must not hide what failed
                    its_files = writer.reader.files_of(table)
                    its_files.delete_beginning(writer.reader.path(table), tasks.files.prefix)

    # -- transforming

    def from_tables(
        self,
        function: Function,
        inputs: Sequence[Input],
        partitions: Sequence[int],
        schema: pa.Schema,
        *,
        size: int | None = None,
    ) -> DataFrame | pa.Table:
        """See `Engine.from_tables`. Where delta-rs can open the lake, each task reads its rows by
        it, of the versions that this process sees: no plan over Delta's log, and no exchange.
        Elsewhere one exchange brings together a partition's rows of all inputs.
        """
        is_small = size is not None and size <= self.here_bytes
        if (here := self._here) is None:
            every = [*map(self.read, inputs)]
            names = _numbered(every)
            rows = self._together(every, names).mapInArrow(
                called(function, names, schema), self._type(schema)
            )
            return self.collect(rows) if is_small else rows
        if is_small or (size is not None and self._has_large(*inputs)):
            return here.from_tables(function, inputs, partitions, schema)
        count = min(self._tasks, len(partitions))
        groups = [partitions[number::count] for number in range(count)]
        read = [
            rows
            if isinstance(rows, pa.Table)
            else replace(rows, version=self.reader.version(rows.table))
            for rows in inputs
        ]
        tasks = FromTables(self.lake, self._id, function, read, groups, schema)
        return self._range(count).mapInArrow(tasks, self._type(schema))

    def _has_large(self, *inputs: Input) -> bool:
        name = RECORD_BYTES.name
        large = (name, ">", _LARGE_ROW_BYTES)
        for rows in inputs:
            if isinstance(rows, pa.Table):
                sizes = rows[name] if name in rows.column_names else pa.nulls(0, pa.int64())
                if (pc.max(sizes).as_py() or 0) > _LARGE_ROW_BYTES:
                    return True
            elif name in self.lake.schema(rows.table).names:
                where = [[*term, large] for term in rows.where or [[]]]
                if row_count(self.reader, rows.table, where):
                    return True
        return False

    def _type(self, schema: pa.Schema) -> StructType:
        return struct_type(self.spark, columns_ddl(schema))

    def _together(
        self, inputs: Sequence[DataFrame], names: Sequence[Mapping[str, str]]
    ) -> DataFrame:
        tagged = [
            rows.select(
                F.lit(i).alias(INPUT),
                *(F.col(f"`{name}`").alias(number) for name, number in names[i].items()),
            )
            for i, rows in enumerate(inputs)
        ]
        rows = reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), tagged)
        partition = F.col(names[0]["partition"])
        return rows.repartitionById(self._tasks, (partition % self._tasks).cast("int"))

    def collect(self, rows: DataFrame) -> pa.Table:
        """See `Engine.collect`."""
        # Not toLocalIterator: since Spark 4.2 the driver keeps what it has handed over, for as long
        # as it lives.
        with naming(self.reader, self.lake.location):
            return rows.toArrow().combine_chunks()

    # -- writing

    @property
    def _here(self) -> EmbeddedEngine | None:
        # The engine that works in this process, where delta-rs can open the lake.
        reader = self.reader
        if not isinstance(reader, DeltaRsReader):
            return None
        return EmbeddedEngine(self.lake, reader)

    def _by_delta_rs(self, table: str) -> EmbeddedEngine | None:
        # The one that writes what this process has in memory; None where delta-rs cannot open the
        # lake, or lacks a feature that somebody has turned on.
        reader = self.reader
        is_unknown = reader.exists(table) and reader.unknown_features(table, for_writing=True)
        return None if is_unknown else self._here

    def create(self, table: Table) -> None:
        """See `Engine.create`."""
        if (by_delta_rs := self._by_delta_rs(table.name)) is not None:
            by_delta_rs.create(table)
        else:
            super().create(table)

    def append(
        self,
        table: str,
        rows: DataFrame | pa.Table | WrittenFiles,
        commit: Commit | None = None,
        following: Following | None = None,
    ) -> None:
        """See `Engine.append`. Where delta-rs can write the table, it makes the commit."""
        by_delta_rs = self._by_delta_rs(table)
        if by_delta_rs is not None and isinstance(rows, pa.Table | WrittenFiles):
            with self.changing(table):
                by_delta_rs.append(table, rows, commit, following)
        elif by_delta_rs is not None and by_delta_rs.takes_files(table):
            tasks = RowsToFiles(self.lake, self._id, table, self._new_files())
            with self.followed(rows, following) as every:
                every = every.select(*self.lake.schema(table).names)
                with self._writing(by_delta_rs, table, tasks, every) as (files, _):
                    self.append(table, files, commit)
        else:
            super().append(table, rows, commit, following)

    def merge(
        self,
        table: str,
        rows: DataFrame | pa.Table,
        commit: Commit,
        *,
        only_open: bool = True,
        large: SilverRows | None = None,
        following: Following | None = None,
    ) -> None:
        """See `Engine.merge`. delta-rs merges rows of this process where it can, unless it would
        have to read or rewrite much: Spark marks the rows that go, and uses the disk. What is too
        large for the JVM never goes there.
        """
        by_delta_rs = self._by_delta_rs(table)
        if by_delta_rs is not None and isinstance(rows, pa.Table):
            reader = by_delta_rs.reader
            is_little = (
                large is None
                and reader.bytes_rewritten(table, rows, only_open=only_open) <= _FEW_REWRITTEN_BYTES
            )
            replaced = Selection(table, [], [[tables.IS_UNFINISHED]] if only_open else [])
            if is_little or self._has_large(rows, replaced):
                with self.changing(table):
                    by_delta_rs.merge(
                        table, rows, commit, only_open=only_open, large=large, following=following
                    )
                return
        self.merge_by_spark(table, rows, commit, only_open=only_open, following=following)

    def merge_in_chunks(
        self,
        unfinished: SilverRows,
        function: InChunks,
        inputs: Sequence[Input],
        schema: pa.Schema,
        commit: Commit,
        following: Following,
    ) -> bool:
        """See `Engine.merge_in_chunks`. A Python worker gets the rows of each key together, after
        the other inputs; Spark's MERGE and sorting use the disk.

        Row groups fit into the memory of readers that unpack thousands of rows at a time. Where
        rows are too large for the JVM, delta-rs rewrites all of them, if it can.
        """
        by_delta_rs = self._by_delta_rs(tables.SILVER)
        every = Selection(tables.SILVER, [], unfinished.every)
        if by_delta_rs is not None and self._has_large(*inputs, every):
            with self.changing(tables.SILVER):
                if by_delta_rs.merge_in_chunks(
                    unfinished, function, inputs, schema, commit, following
                ):
                    return True
        columns = self.lake.schema(tables.SILVER).names
        rows = [
            *map(self.read, inputs),
            self.read(Selection(tables.SILVER, columns, unfinished.where)),
        ]
        names = _numbered(rows)
        together = self._together(rows, names)
        key = [F.col(names[-1][name]) for name in ("partition", "merge_key")]
        changed = together.sortWithinPartitions(F.col(INPUT), *key).mapInArrow(
            called_in_chunks(function, names, schema, CHUNK_BYTES), self._type(schema)
        )
        count = row_count(self.reader, tables.SILVER, unfinished.every)
        settings = {
            _ARROW_BYTES: str(CHUNK_BYTES),
            _ROW_GROUP_ROWS: str(max(1, CHUNK_BYTES * count // max(1, unfinished.size))),
        }
        self.merge_by_spark(tables.SILVER, changed, commit, settings=settings, following=following)
        return True

    # -- following

    def follow_tables(
        self, tables: Sequence[str], work: Callable[[], None], follower: str
    ) -> Running:
        """See `Engine.follow_tables`. The streams' rows are not looked at.

        Spark insists on a checkpoint, so it gets one, which is never read again. Followers of
        several lakes may share the folder: each deletes what its own predecessors have left.
        """
        news = reduce(DataFrame.union, [self._commits_of(table) for table in tables])
        lake = hashlib.sha256(self.lake.location.encode()).hexdigest()[:16]
        folder = f"{self.lake.settings.checkpoints}/_streams/{lake}/{follower}"
        Files(self.lake.storage).delete(folder)
        checkpoint = hadoop_path(f"{folder}/{uuid.uuid4()}")
        writer = news.writeStream.queryName(f"watersmeet {follower} of {lake}")
        writer = writer.option("checkpointLocation", checkpoint).trigger(processingTime=LOOK_EVERY)
        return _Query(writer.foreachBatch(lambda *_: work()).start())

    def _commits_of(self, table: str) -> DataFrame:
        options = {"startingVersion": str(self.reader.version(table)), "ignoreChanges": "true"}
        stream = self.spark.readStream.format("delta").options(**options)
        address = self.lake.address(table)
        rows = stream.table(address) if self.lake.is_catalog else stream.load(hadoop_path(address))
        return rows.select(F.lit(1).alias("news"))

    # -- keeping

    def compact(self, table: str, file_bytes: int) -> None:
        """See `Engine.compact`. Files of at least half that size are left alone.

        delta-rs gathers the few bytes of the last batches sooner, and rows too large for the JVM.
        """
        by_delta_rs = self._by_delta_rs(table)
        if by_delta_rs is not None and (
            not self._has_records(table)
            or by_delta_rs.reader.bytes_of_files(table, file_bytes) <= _FEW_REWRITTEN_BYTES
            or self._has_large(Selection(table, []))
        ):
            with self.changing(table):
                by_delta_rs.compact(table, file_bytes)
        else:
            super().compact(table, file_bytes)

    def _has_records(self, table: str) -> bool:
        layout = self.lake.layout.get(table)  # a table that is tried in a catalog has none
        return layout is None or layout.has_records

    def purge(self, table: str) -> None:
        """See `Engine.purge`."""
        if not self._has_records(table) and (by_delta_rs := self._by_delta_rs(table)) is not None:
            with self.changing(table):
                by_delta_rs.purge(table)
        else:
            super().purge(table)

    def vacuum(self, table: str) -> int:
        """See `Engine.vacuum`."""
        if not self._has_records(table) and (by_delta_rs := self._by_delta_rs(table)) is not None:
            return by_delta_rs.vacuum(table)
        return super().vacuum(table)


class _Query:
    """A streaming query as the engine's `Running`."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query

    @property
    def is_active(self) -> bool:
        return self._query.isActive

    @property
    def failure(self) -> Exception | None:
        return self._query.exception()

    def stop(self) -> None:
        self._query.stop()


def _numbered(inputs: Sequence[DataFrame]) -> list[dict[str, str]]:
    # By input, a numbered name for each column, the same one where name and type are the same: so
    # columns of several inputs cannot be mistaken for one another, whatever the sources are called.
    numbers: dict[tuple[str, str], str] = {}

    def numbered(rows: DataFrame) -> dict[str, str]:
        columns = [(field.name, field.dataType.simpleString()) for field in rows.schema]
        return {column[0]: numbers.setdefault(column, f"c{len(numbers)}") for column in columns}

    return [numbered(rows) for rows in inputs]


class ConnectEngine(SparkEngine):
    """`Engine` on a session of Spark Connect."""

    from_tables_s = 0.5
    follow_tables = Polling.follow_tables

    def _run_on_rows(
        self, session: SparkSession, statement: Callable[[str], str], rows: DataFrame
    ) -> None:
        # On Spark Connect a statement takes the rows' plan along.
        with_braces = statement("\0").replace("{", "{{").replace("}", "}}")
        session.sql(with_braces.replace("\0", "{changed}"), changed=rows)

    @contextmanager
    def _in_session(self, _: SparkSession, rows: DataFrame) -> Iterator[DataFrame]:
        # On Spark Connect a view is its session's own.
        yield rows
