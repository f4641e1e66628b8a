"""The embedded engine: one process without a JVM, for a lake with a path. delta-rs reads and writes the tables, librdkafka reads
Kafka, and rows are Arrow tables in memory: batches are bounded, so memory is, too.

The user's SQL expressions are Spark SQL on every engine. A local Spark session starts with the first one that is asked for.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Transaction, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from pipelines.core.merge import applied
from pipelines.core.reading import RECORD_BYTES, read_records
from pipelines.core.types import has_tenants
from pipelines.engine import Function, Held, InPieces, KafkaInput, replaced_row
from pipelines.engine.polling import followed_source, followed_versions
from pipelines.engine.threads import RunningThread
from pipelines.kafka.ranges import share
from pipelines.kafka.reading import Range
from pipelines.kafka.workers import read_decoded
from pipelines.lake import tables
from pipelines.lake.by_delta_rs import DeltaRsQuestions, columns_of, sql_name, sql_where, streamed
from pipelines.lake.commits import Commit
from pipelines.lake.conditions import literal
from pipelines.lake.conflicts import suppress_conflict
from pipelines.lake.features import check_features_of
from pipelines.lake.inputs import narrowed
from pipelines.lake.location import Lake
from pipelines.lake.maintenance import FILE_BYTES
from pipelines.lake.partitioned import PartitionedFiles, by_key
from pipelines.lake.questions import VersionGoneError, Where, answer, row_count
from pipelines.lake.tables import CHANGE_DATA_FEED, STATISTICS_BYTES, Table

if TYPE_CHECKING:
    from pipelines.engine.spark import SparkEngine

FROM_KAFKA_S: Final = 0.4
"""How often bronze asks Kafka for new records: each answer is a commit, and with twice as many no message comes sooner."""

FROM_TABLES_S: Final = 0.1
"""How often a layer looks for new commits: each look asks whether a table has the file of the next one."""

BATCH_BYTES: Final = 64 * 1024 * 1024
"""About so many bytes of decoded records are read at a time: twice as much takes no less time."""

CLEAN_UP_EVERY: Final = 50
"""After so many commits to a table, the files of its log that are older than the retention are deleted."""

PIECES: Final = 4
"""So many pieces of open rows have about as many bytes as a batch may have: of each there are several copies in memory."""

_ORDER: Final = ("partition", "event_time", "offset")
"""By which columns rows are near one another once a table was rewritten as a whole."""

ROW_GROUP_BYTES: Final = 32 * 1024 * 1024
"""So many bytes of large rows, as they are in memory, go into a row group of a file."""

_ROWS_AT_ONCE: Final = 8_192
"""So many rows readers unpack at a time: DataFusion's default."""

_WRITER: Final = WriterProperties(compression="SNAPPY", statistics_truncate_length=STATISTICS_BYTES)  # as Spark writes them


class EmbeddedEngine:
    """`Engine` in this process. `expressions` opens the engine that answers SQL expressions, at the first that is asked for.
    `questions`: those of the lake, where another engine has them.
    """

    compact_every = 20
    merge_bytes = 64 * 1024 * 1024  # a merge costs little by itself

    def __init__(self, lake: Lake, expressions: Callable[[], SparkEngine], questions: DeltaRsQuestions | None = None) -> None:
        # What Arrow's own allocators keep for later made a fifth of the memory of a run.
        pa.set_memory_pool(pa.system_memory_pool())
        self.lake, self._open_expressions = lake, expressions
        self.questions = questions or DeltaRsQuestions(lake)

    # -- reading

    def read(
        self,
        table: str,
        columns: Sequence[str],
        where: Where = (),
        *,
        constants: Mapping[str, str] | None = None,
        version: int | None = None,
    ) -> pa.Table:
        """See `Engine.read`."""
        found = self.questions.rows(table, columns, where, version)
        for name, value in (constants or {}).items():
            found = found.append_column(pa.field(name, pa.string()), pa.repeat(pa.scalar(value, pa.string()), len(found)))
        return found

    def read_kafka(self, source: KafkaInput, ranges: Mapping[int, tuple[int, int]]) -> pa.Table:
        """See `Engine.read_kafka`."""
        wanted = [Range(source.topic, p, since, until) for p, (since, until) in sorted(ranges.items())]
        return self._read_ranges(source, wanted)[0]

    def _read_ranges(
        self, source: KafkaInput, ranges: Sequence[Range], max_bytes: int | None = None
    ) -> tuple[pa.Table, dict[int, int]]:
        schema = self.lake.schema(tables.bronze(source.source))
        return read_decoded(source.kafka, ranges, partial(read_records, rules=source.rules), schema, max_bytes)

    def rows(self, found: pa.Table) -> pa.Table:
        """See `Engine.rows`."""
        return found

    # -- transforming

    def per_partition(self, function: Function, inputs: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
        """See `Engine.per_partition`."""
        return function(*inputs).select(schema.names).cast(schema)

    @contextmanager
    def held(self, rows: pa.Table) -> Iterator[pa.Table]:
        """See `Engine.held`."""
        yield rows

    def summary(self, rows: pa.Table, by: Sequence[str], values: Mapping[str, tuple[str, str]]) -> pa.Table:
        """See `Engine.summary`."""
        wanted: list[Any] = [([], "count_all") if column == "*" else (column, kind) for kind, column in values.values()]
        found = rows.group_by(list(by)).aggregate(wanted)
        return answer(found.rename_columns([*by, *values]))

    def judged(self, rows: pa.Table, valid: str, value: str | None, max_bytes: int) -> pa.Table:
        """See `Engine.judged`."""
        if not rows.num_rows:
            return rows
        by_spark = self._expressions
        return by_spark.fetched(by_spark.judged(by_spark.rows(rows), valid, value, max_bytes)).cast(rows.schema)

    def fetched(self, rows: pa.Table) -> pa.Table:
        """See `Engine.fetched`."""
        return rows

    def evaluate(self, rows: pa.Table, expressions: Mapping[str, str]) -> pa.Table:
        """See `Engine.evaluate`."""
        return self._expressions.evaluate(rows, expressions)

    def expression_problem(self, text: str, columns: pa.Schema, kinds: tuple[pa.DataType, ...]) -> str | None:
        """See `Engine.expression_problem`."""
        return self._expressions.expression_problem(text, columns, kinds)

    @cached_property
    def _expressions(self) -> SparkEngine:
        return self._open_expressions()

    # -- writing

    def create(self, table: Table) -> None:
        """See `Engine.create`."""
        with suppress(CommitFailedError):  # another process makes it, too
            DeltaTable.create(
                self.questions.uri(table.name),
                table.schema,
                mode="ignore",
                partition_by=list(table.partitioned_by),
                configuration=dict(table.properties),
                storage_options=dict(self.lake.storage),
                raise_if_key_not_exists=False,  # `watersmeet.layout`
            )

    def widen(self, table: Table) -> None:
        """See `Engine.widen`."""
        write_deltalake(self.questions.opened(table.name), table.schema.empty_table(), mode="append", schema_mode="merge")

    def create_view(self, name: str, query: str) -> None:
        """See `Engine.create_view`. A lake with a path has no views."""
        raise NotImplementedError(f"{self.lake.location} is no catalog, and has no view {name} of {query}")

    def append(self, table: str, rows: pa.Table, commit: Commit | None = None) -> None:
        """See `Engine.append`."""
        schema = self.lake.schema(table)
        rows = rows.select(schema.names).cast(schema)
        self._commit(
            table,
            commit,
            lambda found, how: write_deltalake(
                found, _with_added(found, rows), mode="append", writer_properties=_writer(_size_of(rows)), **how
            ),
        )

    def merge(self, table: str, rows: pa.Table, commit: Commit, *, only_open: bool = True) -> None:
        """See `Engine.merge`."""
        schema = self.lake.layout[table].schema
        columns = {sql_name(name): f"changed.{sql_name(name)}" for name in schema.names}
        condition = replaced_row(only_open=only_open, has_tenants=has_tenants(schema))

        def write(found: DeltaTable, how: _How) -> None:
            """Merges the changed rows into the table, in one commit with these properties."""
            merge = found.merge(rows, condition, "changed", "kept", writer_properties=_writer(_size_of(rows)), **how)
            merge = merge.when_matched_delete("changed.status IS NULL").when_matched_update(columns)
            merge.when_not_matched_insert(columns, "changed.status IS NOT NULL").execute()

        self._commit(table, commit, write)

    def merge_in_pieces(
        self,
        held: Held,
        function: InPieces,
        inputs: Sequence[pa.Table],
        _: pa.Schema,
        judge: Callable[[pa.Table], pa.Table],
        commit: Commit,
    ) -> bool:
        """See `Engine.merge_in_pieces`. delta-rs's own writers, among them its MERGE, hold all rows in memory: so all rows with
        these statuses are written anew.

        Not where somebody follows the changes, who would meet rows that did not change; nor where others have added columns, or
        Spark has left deletion vectors, which delta-rs does not name where a file goes.
        """
        table, schema = tables.SILVER, self.lake.schema(tables.SILVER)
        opened = self.questions.opened(table)
        has_feed = self.questions.properties(table).get(CHANGE_DATA_FEED, "false") == "true"
        if has_feed or set(columns_of(opened).names) != set(schema.names) or _has_deletion_vectors(opened):
            return False
        [by] = self.lake.layout[table].partitioned_by
        replaced: Where = [[(by, "in", list(held.statuses))]]
        pieces = 1 + PIECES * held.size // self.merge_bytes
        batch_rows = max(1, min(_ROWS_AT_ONCE, row_count(self.questions, table, replaced) // pieces))

        def write(found: DeltaTable, how: _How) -> None:
            """Writes new files, and commits them in place of those that are there, with these properties."""
            with tempfile.TemporaryDirectory(prefix="watersmeet-") as folder:
                rows = streamed(found, schema, replaced, batch_rows)
                if has_tenants(schema):  # else a key has one row
                    rows = by_key(rows, schema, pieces, Path(folder))
                files = PartitionedFiles(schema, by, self.questions.path(table), self.questions.files_of(table), Path(folder))
                added = files.write(applied(piece, judge(changed)) for piece, changed in function(rows, *inputs))
            found.create_write_transaction([*added], "overwrite", schema, [by], [(by, "in", list(held.statuses))], **how)
            found.update_incremental()

        self._commit(table, commit, write)
        return True

    def delete(self, table: str, where: Where, commit: Commit) -> None:
        """See `Engine.delete`."""
        condition = sql_where(narrowed(table, where), self.lake.schema(table))
        writer = self._writer_of(table)
        self._commit(table, commit, lambda found, how: found.delete(condition, writer, **how))

    def update(self, table: str, where: Where, values: Mapping[str, str | bool | None], commit: Commit) -> None:
        """See `Engine.update`."""
        condition = sql_where(narrowed(table, where), self.lake.schema(table))
        updates = {sql_name(name): literal(value) for name, value in values.items()}
        writer = self._writer_of(table)
        self._commit(table, commit, lambda found, how: found.update(updates, None, condition, writer, **how))

    def _commit(self, table: str, commit: Commit | None, write: Callable[[DeltaTable, _How], Any]) -> None:
        """One commit, unless the table has seen its transaction version. Of one that another process makes meanwhile for the
        same application, delta-rs tells as of a conflict.
        """
        found = self.questions.opened(table)
        if commit is None:
            write(found, _how(found, None))
            return
        seen = found.transaction_version(commit.application)
        if seen is not None and seen >= commit.transaction_version:
            return
        once = Transaction(commit.application, commit.transaction_version)
        how = _how(found, CommitProperties({"userMetadata": commit.metadata}, app_transactions=[once]))
        before = found.version()
        with self._naming_features(table):
            write(found, how)
        if found.version() == before:  # delta-rs makes no commit where no row changes
            write_deltalake(found, _with_added(found, self.lake.schema(table).empty_table()), mode="append", **how)

    @contextmanager
    def _naming_features(self, table: str) -> Iterator[None]:
        """Inside, what delta-rs refuses because of a feature that was turned on meanwhile is told by the feature's name; its own
        class for it is that of a conflict.
        """
        try:
            yield
        except DeltaError:
            check_features_of(self.questions, self.lake, table)
            raise

    # -- following

    def follow_kafka(self, source: KafkaInput, work: Callable[[pa.Table], None], *, once: bool) -> RunningThread:
        """See `Engine.follow_kafka`."""
        position, span = dict(source.offsets), source.max_offsets_per_batch

        def take(until: Mapping[int, int]) -> bool:
            """Hands the next batch up to these end offsets to `work`, bounded in records and bytes; False where none is."""
            nonlocal span
            wanted = share({p: max(until[p] - offset, 0) for p, offset in position.items()}, span)
            if not any(wanted.values()):
                return False
            ranges = [Range(source.topic, p, offset, offset + wanted[p]) for p, offset in position.items()]
            rows, reached = self._read_ranges(source, ranges, BATCH_BYTES)
            taken = sum(reached[p] - offset for p, offset in position.items())
            # Where records are large, the next batch asks for as many as there was room for, and then for a few more each time.
            span = taken if taken < sum(wanted.values()) else min(span + span // 8 + 1, source.max_offsets_per_batch)
            work(rows)
            position.update(reached)
            return True

        return followed_source(source, take, once=once, every_s=FROM_KAFKA_S)

    def follow(self, name: str, tables: Sequence[str], work: Callable[[], None]) -> RunningThread:
        """See `Engine.follow`."""
        return followed_versions(name, lambda: [*map(self.questions.version, tables)], work, every_s=FROM_TABLES_S)

    # -- keeping

    def compact(self, table: str, file_bytes: int) -> None:
        """See `Engine.compact`."""
        with suppress_conflict(), self._naming_features(table):
            found, writer = self.questions.opened(table), self._writer_of(table)
            found.optimize.compact(target_size=file_bytes, writer_properties=writer, **_how(found, None))

    def purge(self, table: str) -> None:
        """See `Engine.purge`. Deletion vectors come from Spark alone; where it has left some, delta-rs rewrites all files."""
        found = self.questions.opened(table)
        if _has_deletion_vectors(found):
            columns = [name for name in _ORDER if name in self.lake.schema(table).names]
            writer = self._writer_of(table)
            found.optimize.z_order(columns, target_size=FILE_BYTES, writer_properties=writer, **_how(found, None))

    def _writer_of(self, table: str) -> WriterProperties:
        """How files with rows of this table are written anew, whose values the files may have packed."""
        if RECORD_BYTES.name not in self.questions.columns(table).names:
            return _WRITER
        sums = {"bytes": ("sum", RECORD_BYTES.name), "rows": ("count", RECORD_BYTES.name)}
        size = self.questions.summary(table, [], sums).to_pylist()[0]
        return _writer((size["bytes"] or 0) // max(1, size["rows"]))

    def vacuum(self, table: str) -> int:
        """See `Engine.vacuum`. delta-rs finds the files; it knows data files alone, so that it would remove deletion vectors of
        Spark's, too, which may be in use.
        """
        files = self.questions.opened(table).vacuum(dry_run=True, full=True)
        # The checksums of Hadoop's local file system go with their files.
        named = {name for name in files if not name.rpartition("/")[2].startswith(".")}
        vectors = {name for name in named if name.rpartition("/")[2].startswith("deletion_vector_")}
        if vectors and self._uses_deletion_vectors(table):
            named -= vectors
        self.questions.delete_files(table, sorted(named))
        return len(named)

    def _uses_deletion_vectors(self, table: str) -> bool:
        """Whether the table, or what it was when the retention began, has deletion vectors. Those since are young files."""
        if _has_deletion_vectors(self.questions.opened(table)):
            return True
        began = self.questions.version_at(table, time.time_ns() // 1_000_000 - self.lake.settings.retention_ms)
        oldest = self.questions.history(table)[-1].number if began is None else began
        try:
            return _has_deletion_vectors(self.questions.opened_at(table, oldest))
        except (DeltaError, VersionGoneError):
            return True

    def set_properties(self, table: str, properties: Mapping[str, str]) -> None:
        """See `Engine.set_properties`."""
        self.questions.opened(table).alter.set_table_properties(dict(properties), raise_if_not_exists=False)


def _has_deletion_vectors(found: DeltaTable) -> bool:
    return any(batch.num_rows for batch in pa.RecordBatchReader.from_stream(found.deletion_vectors()))


def _with_added(found: DeltaTable, rows: pa.Table) -> pa.Table:
    """Rows with the columns that others have added to a table, as nulls: delta-rs appends whole rows alone.

    The table is asked as it is: brought up to date now, it would no longer tell of a commit made since it was looked at.
    """
    for field in columns_of(found):
        if field.name not in rows.column_names:
            rows = rows.append_column(field.name, pa.nulls(len(rows), field.type))
    return rows


def _writer(row_bytes: int) -> WriterProperties:
    """How files with rows of this size, as they are in memory, are written: in row groups that fit into memory, since readers
    unpack up to thousands of rows of one at a time.
    """
    if row_bytes * _ROWS_AT_ONCE <= ROW_GROUP_BYTES:
        return _WRITER
    rows = max(1, ROW_GROUP_BYTES // row_bytes)
    return WriterProperties(compression="SNAPPY", statistics_truncate_length=STATISTICS_BYTES, max_row_group_size=rows)


def _size_of(rows: pa.Table) -> int:
    """How many bytes each of some rows has in memory, on average."""
    return int(rows.nbytes // max(1, rows.num_rows))


class _How(TypedDict):
    """How delta-rs makes a commit."""

    commit_properties: CommitProperties | None
    post_commithook_properties: PostCommitHookProperties


def _how(found: DeltaTable, properties: CommitProperties | None) -> _How:
    """With these properties; after some commits, what the log's retention lets go is deleted. To look for it lists the log, and
    delta-rs would do it after each commit.
    """
    is_due = (found.version() + 1) % CLEAN_UP_EVERY == 0
    return {
        "commit_properties": properties,
        "post_commithook_properties": PostCommitHookProperties(cleanup_expired_logs=None if is_due else False),
    }
