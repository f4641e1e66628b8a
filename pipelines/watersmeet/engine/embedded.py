"""The embedded engine: one process without a JVM, for a lake with a path.

delta-rs reads and writes the tables, librdkafka reads Kafka, and rows are Arrow tables in memory.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, TypedDict

import pyarrow as pa
from deltalake import (
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    PostCommitHookProperties,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction

from watersmeet.core.columns import cuts
from watersmeet.core.merge import applied, kept, new_rows, replaces_rows
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.engine import (
    Following,
    Function,
    InChunks,
    Input,
    KafkaInput,
    SilverRows,
    Summary,
    Taken,
    replaced_row,
)
from watersmeet.engine.polling import Polling
from watersmeet.errors import LakeNotSharedError
from watersmeet.kafka.workers import read_decoded
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader, columns_of, streamed
from watersmeet.lake.commits import Commit, suppress_conflict
from watersmeet.lake.data_file import FILES, DataFile, PartitionedFiles, by_key
from watersmeet.lake.durable import durably
from watersmeet.lake.features import check_features
from watersmeet.lake.location import Lake
from watersmeet.lake.maintenance import FILE_BYTES
from watersmeet.lake.table_errors import names_table, names_tables
from watersmeet.lake.table_reader import (
    VersionGoneError,
    Where,
    literal,
    quoted,
    row_count,
    sizes_of,
    sql_of,
)
from watersmeet.lake.tables import CHANGE_DATA_FEED, STATISTICS_BYTES, Table

BATCH_BYTES: Final = 64 * 1024 * 1024
"""About how many bytes of records are read at a time: twice as many are no quicker."""

CLEAN_UP_EVERY: Final = 50
"""Commits to a table after which the old files of its log are deleted."""

FEW_BYTES: Final = 8 * 1024 * 1024
"""`Engine.few_bytes` where delta-rs reads."""

CHUNKS: Final = 4
"""Pieces for as many bytes of open rows as a batch may have: memory holds several copies."""

_ORDER: Final = ("partition", "event_time", "offset")
"""The columns by which rows are near one another once a table was rewritten as a whole."""
_WAITING: Final[Where] = [[("status", "=", "waiting")]]

ROW_GROUP_BYTES: Final = 32 * 1024 * 1024
"""Number of bytes of rows, as they are in memory, in a row group of a file."""

_MERGED_BYTES: Final = 128 * 1024 * 1024
"""Bytes of rows up to which delta-rs's MERGE gets them."""

_LEAST_ROW_BYTES: Final = 32
"""Number of bytes that a row counts at least: a row group has at most a million rows."""

_ASKED_AT_ONCE: Final = 16
"""Number of files whose sizes are asked for at a time."""

_ROWS_AT_ONCE: Final = 8_192
"""Number of rows that readers unpack at a time: DataFusion's default."""


@names_tables
class EmbeddedEngine(Polling):
    """`Engine` in this process; `reader`: that of the lake, where another engine has one."""

    reader: DeltaRsReader
    compact_every = 20
    merge_bytes = 64 * 1024 * 1024  # a merge costs little by itself
    few_bytes = FEW_BYTES
    from_kafka_s = 0.4
    """Each answer is a commit, and with twice as many no message comes sooner."""
    from_tables_s = 0.1
    """Each look asks whether a table has the file of the next commit."""

    def __init__(self, lake: Lake, reader: DeltaRsReader | None = None) -> None:
        # Memory that Arrow's own allocators keep for later was a fifth of all memory of a run.
        pa.set_memory_pool(pa.system_memory_pool())
        self.lake = lake
        self.reader = reader or DeltaRsReader(lake)

    # -- reading

    def read(self, selection: Input) -> pa.Table:
        """See `Engine.read`."""
        if isinstance(selection, pa.Table):
            return selection
        columns, where, version = selection.columns, selection.where, selection.version
        rows = self.reader.rows(selection.table, columns, where, version)
        for name, value in selection.constants.items():
            rows = rows.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(rows)))
        return rows

    @contextmanager
    def taken(
        self, source: KafkaInput, ranges: Mapping[int, tuple[int, int]], summary: Summary
    ) -> Iterator[Taken]:
        """See `Engine.taken`."""
        schema = self.lake.schema(tables.bronze(source.input.source))
        rows, reached = read_decoded(
            source.kafka, source.offset_ranges(ranges), source.decode, schema, BATCH_BYTES
        )
        yield Taken(rows, summary.of(rows), reached)

    # -- transforming

    def from_tables(
        self,
        function: Function,
        inputs: Sequence[Input],
        partitions: Sequence[int],  # noqa: ARG002 - all at once
        schema: pa.Schema,
        *,
        size: int | None = None,  # noqa: ARG002 - all is in this process
    ) -> pa.Table:
        """See `Engine.from_tables`."""
        return function(*map(self.read, inputs)).select(schema.names).cast(schema)

    def collect(self, rows: pa.Table) -> pa.Table:
        """See `Engine.collect`."""
        return rows

    # -- writing

    @durably
    def create(self, table: Table) -> None:
        """See `Engine.create`."""
        DeltaTable.create(
            self.reader.uri(table.name),
            table.schema,
            mode="ignore",
            partition_by=list(table.partitioned_by),
            configuration=dict(table.properties),
            storage_options=dict(self.lake.storage),
            raise_if_key_not_exists=False,  # for `watersmeet.layout`, a key of our own
        )

    @durably
    def evolve_schema(self, table: Table) -> None:
        """See `Engine.evolve_schema`."""
        write_deltalake(
            self.reader.opened(table.name),
            table.schema.empty_table(),
            mode="append",
            schema_mode="merge",
        )

    def create_view(self, name: str, query: str) -> None:
        """See `Engine.create_view`. A lake with a path has no views."""
        raise NotImplementedError(f"{self.lake.location} has no view {name} of {query}")

    def append(
        self,
        table: str,
        rows: pa.Table | WrittenFiles,
        commit: Commit | None = None,
        following: Following | None = None,
    ) -> None:
        """See `Engine.append`."""
        if isinstance(rows, WrittenFiles):
            rows.are_offered = True
            self.append_files(table, rows.entries, commit)
            return
        schema = self.lake.schema(table)
        if following is not None:
            rows, rest = _followed(rows, following)
            if rows.nbytes > _MERGED_BYTES and self.takes_files(table):
                chunks = chain(_in_row_groups(rows), rest)
                pieces = (chunk.select(schema.names).cast(schema) for chunk in chunks)
                self.append_files(table, self.write_files(table, pieces), commit)
                return
            rows = pa.concat_tables([rows, *rest])
        rows = rows.select(schema.names).cast(schema)
        writer = self._writer(table, _size_of(rows))
        self._commit(table, commit, lambda delta, kw: _append(delta, rows, writer, kw))

    def write_files(
        self, table: str, chunks: Iterable[pa.Table], prefix: str = FILES
    ) -> list[AddAction]:
        """Write rows to new files of a table, and return the files' entries for `append_files`.

        The chunks, of which memory holds one, have the columns of the table, and become a row group
        for each value of the column that partitions it. File names begin with `prefix`. After a
        failure there are none.
        """
        layout = self.lake.layout[table]
        if not layout.partitioned_by:
            return [*filter(None, [self.write_file(table, chunks, prefix)])]
        path = self.reader.path(table)
        files = PartitionedFiles(layout, path, self.reader.files_of(table), prefix)
        return files.write(chunks)

    def write_file(
        self, table: str, chunks: Iterable[pa.Table], prefix: str = FILES
    ) -> AddAction | None:
        """Do the same for a table that is not partitioned; return None where there is no chunk."""
        layout = self.lake.layout[table]
        file: DataFile | None = None
        for rows in chunks:
            file = file or DataFile(layout, layout.schema)
            file.write(rows)
            del rows  # not in memory while the next ones come
        if file is None:
            return None
        name = f"{prefix}{uuid.uuid4()}.snappy.parquet"
        return file.put(self.reader.files_of(table), self.reader.path(table), name, {})

    def takes_files(self, table: str) -> bool:
        """Return True where `write_files` can write files of a table: delta-rs checks no
        constraint.
        """
        properties = self.reader.properties(table)
        return not any(name.startswith("delta.constraints.") for name in properties)

    def append_files(self, table: str, files: Sequence[AddAction], commit: Commit | None) -> None:
        """Make files of `write_files` part of a table, as `Engine.append` does with rows."""
        by = [*self.lake.layout[table].partitioned_by]

        def write(delta_table: DeltaTable, arguments: _CommitArguments) -> None:
            delta_table.create_write_transaction(
                [*files], "append", delta_table.schema(), by, **arguments
            )
            delta_table.update_incremental()

        self._commit(table, commit, write)

    def merge(
        self,
        table: str,
        rows: pa.Table,
        commit: Commit,
        *,
        only_open: bool = True,
        large: SilverRows | None = None,
        following: Following | None = None,
    ) -> None:
        """See `Engine.merge`. delta-rs's MERGE takes several times as much memory as its rows."""
        rest: Iterator[pa.Table] = iter(())
        if following is not None:
            rows, rest = _followed(rows, following)
        if large is None and only_open and rows.nbytes > _MERGED_BYTES:
            large = SilverRows(tables.UNFINISHED, rows.nbytes)
        if large is not None and self._can_rewrite(table):

            def merged(chunks: Iterator[pa.Table]) -> Iterator[pa.Table]:
                yield from map(partial(kept, changed=rows), chunks)
                for chunk in chain(_in_row_groups(rows), rest):
                    yield new_rows(chunk)

            self._rewrite(table, large, merged, commit)
            return
        rows = pa.concat_tables([rows, *rest])
        if not replaces_rows(rows):
            self.append(table, new_rows(rows), commit)
            return
        schema = self.lake.layout[table].schema
        columns = {quoted(name): f"changed.{quoted(name)}" for name in schema.names}
        condition = replaced_row(only_open=only_open)

        def write(delta_table: DeltaTable, arguments: _CommitArguments) -> None:
            merge = delta_table.merge(
                rows,
                condition,
                "changed",
                "kept",
                writer_properties=self._writer(table, _size_of(rows)),
                **arguments,
            )
            merge = merge.when_matched_delete("changed.status IS NULL").when_matched_update(columns)
            merge.when_not_matched_insert(columns, "changed.status IS NOT NULL").execute()

        self._commit(table, commit, write, rewrites=[[tables.IS_UNFINISHED]] if only_open else ())

    def merge_in_chunks(
        self,
        unfinished: SilverRows,
        function: InChunks,
        inputs: Sequence[Input],
        _: pa.Schema,
        commit: Commit,
        following: Following,
    ) -> bool:
        """See `Engine.merge_in_chunks`."""
        table = tables.SILVER
        if not self._can_rewrite(table):
            return False
        schema = self.lake.schema(table)
        # Not later: a table that is brought up to date does not report a commit made meanwhile.
        has_waiting = row_count(self.reader, table, _WAITING) > 0

        def merged(chunks: Iterator[pa.Table]) -> Iterator[pa.Table]:
            """Yield each chunk with the changes in it, in pieces that hold all rows of a key."""
            if has_waiting:  # else a key has one row
                chunks = by_key(chunks, schema, self._chunks(unfinished))
            for chunk, changed in function(chunks, *map(self.read, inputs)):
                if following.keys is not None:
                    following.see(changed)
                yield applied(chunk, changed)
                del chunk, changed  # not in memory while the next ones come
            yield from map(new_rows, following.rows())

        self._rewrite(table, unfinished, merged, commit)
        return True

    def _can_rewrite(self, table: str) -> bool:
        # Rows that did not change may be written anew unless somebody follows the changes, others
        # have added columns, or Spark has left deletion vectors, which delta-rs does not name where
        # it removes a file.
        opened = self.reader.opened(table)
        return (
            self.reader.properties(table).get(CHANGE_DATA_FEED, "false") != "true"
            and set(columns_of(opened).names) == set(self.lake.schema(table).names)
            and not _has_deletion_vectors(opened)
        )

    def _chunks(self, rows: SilverRows) -> int:
        return 1 + CHUNKS * rows.size // self.merge_bytes

    def _rewrite(
        self,
        table: str,
        rows: SilverRows,
        merged: Callable[[Iterator[pa.Table]], Iterator[pa.Table]],
        commit: Commit,
    ) -> None:
        # Memory holds a chunk at a time; delta-rs's own writers, among them its MERGE, hold all
        # rows.
        schema = self.lake.schema(table)
        [by] = self.lake.layout[table].partitioned_by
        count = row_count(self.reader, table, rows.every)
        chunk_rows = max(1, min(_ROWS_AT_ONCE, count // self._chunks(rows)))

        def write(delta_table: DeltaTable, arguments: _CommitArguments) -> None:
            chunks = streamed(delta_table, schema, rows.every, chunk_rows)
            added = self.write_files(table, merged(chunks))
            delta_table.create_write_transaction(
                [*added], "overwrite", schema, [by], [(by, "in", list(rows.statuses))], **arguments
            )
            delta_table.update_incremental()

        self._commit(table, commit, write, rewrites=rows.every, is_next=True)

    def delete(self, table: str, where: Where, commit: Commit) -> None:
        """See `Engine.delete`."""
        condition = sql_of(where, self.lake.schema(table), self.reader.dialect)
        writer = self._writer_of(table)
        self._commit(
            table, commit, lambda delta, kw: delta.delete(condition, writer, **kw), rewrites=where
        )

    def update(
        self, table: str, where: Where, values: Mapping[str, str | bool | None], commit: Commit
    ) -> None:
        """See `Engine.update`."""
        condition = sql_of(where, self.lake.schema(table), self.reader.dialect)
        updates = {quoted(name): literal(value) for name, value in values.items()}
        writer = self._writer_of(table)
        self._commit(
            table,
            commit,
            lambda delta, kw: delta.update(updates, None, condition, writer, **kw),
            rewrites=where,
        )

    @names_table
    @durably
    def _commit(
        self,
        table: str,
        commit: Commit | None,
        write: Callable[[DeltaTable, _CommitArguments], Any],
        *,
        rewrites: Where | None = None,
        is_next: bool = False,
    ) -> None:
        # Files that may have rows that meet the conditions `rewrites` are compared before.
        # Where another process makes a commit for the same application meanwhile, delta-rs reports
        # a conflict; with `is_next` whatever the other commit is. Files that replace others need
        # that: delta-rs would commit them behind a compaction, which has all the rows in files of
        # its own.
        delta_table = self.reader.opened(table)
        if commit is None:
            write(delta_table, _commit_arguments(delta_table, None))
            return
        seen = delta_table.transaction_version(commit.application)
        if seen is not None and seen >= commit.transaction_version:
            return
        once = Transaction(commit.application, commit.transaction_version)
        arguments = _commit_arguments(
            delta_table,
            CommitProperties(
                {"userMetadata": commit.metadata},
                max_commit_retries=0 if is_next else None,
                app_transactions=[once],
            ),
        )
        before = delta_table.version()
        if rewrites is not None:
            self.reader.check_files(table, delta_table, rewrites)
        with self._naming_features(table, is_changed=rewrites is not None):
            write(delta_table, arguments)
        if delta_table.version() == before:  # delta-rs makes no commit where no row changes
            empty = self.lake.schema(table).empty_table()
            _append(delta_table, empty, self._writer(table, 0), arguments)

    @contextmanager
    def _naming_features(self, table: str, *, is_changed: bool = False) -> Iterator[None]:
        # Where a feature was turned on meanwhile that delta-rs does not have, or the table takes
        # no changes, it raises the class of a conflict: the error then says what was turned on.
        try:
            yield
        except DeltaError:
            check_features(self.reader, self.lake, [table], changed=[table] if is_changed else ())
            raise

    # -- keeping

    @durably
    def compact(self, table: str, file_bytes: int) -> None:
        """See `Engine.compact`."""
        with suppress_conflict(), self._naming_features(table):
            delta_table = self.reader.opened(table)
            self.reader.check_files(table, delta_table, largest=file_bytes)
            delta_table.optimize.compact(
                target_size=file_bytes,
                max_concurrent_tasks=1,  # each has rows in memory
                writer_properties=self._writer_of(table),
                **_commit_arguments(delta_table, None),
            )

    @durably
    def purge(self, table: str) -> None:
        """See `Engine.purge`. Where Spark left deletion vectors, all files are rewritten."""
        delta_table = self.reader.opened(table)
        if _has_deletion_vectors(delta_table):
            self.reader.check_files(table, delta_table)
            delta_table.optimize.z_order(
                [name for name in _ORDER if name in self.lake.schema(table).names],
                target_size=FILE_BYTES,
                writer_properties=self._writer_of(table),
                **_commit_arguments(delta_table, None),
            )

    def _writer_of(self, table: str) -> WriterProperties:
        # The size of a row is that of its records in memory: in the files, values may be packed.
        if RECORD_BYTES.name not in self.reader.columns(table).names:
            return self._writer(table, 0)
        sums = {"bytes": ("sum", RECORD_BYTES.name), "rows": ("count", RECORD_BYTES.name)}
        size = self.reader.summary(table, [], sums).to_pylist()[0]
        return self._writer(table, (size["bytes"] or 0) // max(1, size["rows"]))

    def _writer(self, table: str, row_bytes: int) -> WriterProperties:
        layout = self.lake.layout[table]
        columns = {
            name: ColumnProperties(
                dictionary_enabled=name in layout.repeating,
                statistics_enabled="PAGE" if name in layout.counted else "NONE",
            )
            for name in layout.schema.names
        }
        # A writer holds a row group, and readers unpack up to thousands of rows of one at a time.
        return WriterProperties(
            compression="SNAPPY",  # as Spark
            max_row_group_size=max(1, ROW_GROUP_BYTES // max(row_bytes, _LEAST_ROW_BYTES)),
            statistics_truncate_length=STATISTICS_BYTES,
            # Of what is in lists: it has no names here.
            default_column_properties=ColumnProperties(
                dictionary_enabled=layout.has_structs, statistics_enabled="NONE"
            ),
            column_properties=columns,
        )

    def vacuum(self, table: str) -> int:
        """See `Engine.vacuum`. delta-rs's list also has Spark's deletion vectors in use."""
        files = self.reader.opened(table).vacuum(dry_run=True, full=True)
        # The checksums of Hadoop's local file system go with their files.
        named = {name for name in files if not name.rpartition("/")[2].startswith(".")}
        vectors = {name for name in named if name.rpartition("/")[2].startswith("deletion_vector_")}
        if vectors and self._uses_deletion_vectors(table):
            named -= vectors
        self.reader.files_of(table).delete_files(self.reader.path(table), sorted(named))
        return len(named)

    def _uses_deletion_vectors(self, table: str) -> bool:
        # Now or when the retention began; those made since then are young files.
        if _has_deletion_vectors(self.reader.opened(table)):
            return True
        began = self.reader.version_at(
            table, time.time_ns() // 1_000_000 - self.lake.settings.retention_ms
        )
        oldest = self.reader.history(table)[-1].number if began is None else began
        try:
            return _has_deletion_vectors(self.reader.opened_at(table, oldest))
        except (DeltaError, VersionGoneError):
            return True

    @durably
    def set_properties(self, table: str, properties: Mapping[str, str]) -> None:
        """See `Engine.set_properties`."""
        self.reader.opened(table).alter.set_table_properties(
            dict(properties), raise_if_not_exists=False
        )


def _followed(rows: pa.Table, following: Following) -> tuple[pa.Table, Iterator[pa.Table]]:
    if following.keys is not None:
        following.see(rows)
    rest = following.rows()
    some = [rows]
    size = rows.nbytes
    for more in rest:
        some.append(more)
        size += more.nbytes
        if size > _MERGED_BYTES:
            break
    schema = some[-1].schema
    return pa.concat_tables([each.select(schema.names).cast(schema) for each in some]), rest


def _in_row_groups(rows: pa.Table) -> Iterator[pa.Table]:
    for begin, end in cuts(sizes_of(rows), ROW_GROUP_BYTES):
        yield rows.slice(begin, end - begin)


@dataclass
class WrittenFiles:
    """Files of a table that were written, and that no commit names yet, as rows to append."""

    writer: EmbeddedEngine
    entries: list[AddAction]
    are_offered: bool = False
    """True once a commit was to name them."""

    def check(self, table: str) -> None:
        """Raise LakeNotSharedError where a file, written elsewhere, is not here as it should be."""
        reader = self.writer.reader
        paths = [f"{reader.path(table)}/{file.path}" for file in self.entries]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            sizes = pool.map(reader.files_of(table).size, paths)
            for file, size in zip(self.entries, sizes, strict=True):
                if size != file.size:
                    has = f"its file {file.path} has {size or 0} bytes here"
                    what = f"{has}, and the executor that wrote it says {file.size}"
                    raise LakeNotSharedError(table, what)


def _has_deletion_vectors(delta_table: DeltaTable) -> bool:
    vectors = pa.RecordBatchReader.from_stream(delta_table.deletion_vectors())
    return any(batch.num_rows for batch in vectors)


def _append(
    delta_table: DeltaTable,
    rows: pa.Table,
    writer: WriterProperties,
    arguments: _CommitArguments,
) -> None:
    # delta-rs appends only whole rows: columns that others have added are null. The table is not
    # brought up to date for this: it would no longer report a commit made since.
    for field in columns_of(delta_table):
        if field.name not in rows.column_names:
            rows = rows.append_column(field.name, pa.nulls(len(rows), field.type))
    write_deltalake(delta_table, rows, mode="append", writer_properties=writer, **arguments)


def _size_of(rows: pa.Table) -> int:
    return int(rows.nbytes // max(1, rows.num_rows))


class _CommitArguments(TypedDict):
    """The arguments with which delta-rs makes a commit."""

    commit_properties: CommitProperties | None
    post_commithook_properties: PostCommitHookProperties


def _commit_arguments(
    delta_table: DeltaTable, properties: CommitProperties | None
) -> _CommitArguments:
    # Log files older than the log's retention are not deleted after each commit, as delta-rs would:
    # that lists the log.
    is_due = (delta_table.version() + 1) % CLEAN_UP_EVERY == 0
    return {
        "commit_properties": properties,
        "post_commithook_properties": PostCommitHookProperties(
            cleanup_expired_logs=None if is_due else False
        ),
    }
