"""Queries on a lake's tables by delta-rs, without a JVM, for lakes at a path that it can open.

Conditions become DataFusion SQL. Names and texts are quoted, and literals have the column's own
type: only then does DataFusion skip files by their statistics.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from itertools import repeat
from operator import and_, or_
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError

from watersmeet.core.columns import times_ms
from watersmeet.lake.files import Files
from watersmeet.lake.location import Lake, has_store, local_path, scheme_of
from watersmeet.lake.log_files import (
    ENTRY,
    LOG,
    actions_of,
    damaged,
    damaged_file,
    entry_name,
    entry_of,
    is_intact,
    names_in,
    version_of,
)
from watersmeet.lake.table_errors import behind, names_tables
from watersmeet.lake.table_reader import (
    NO_VERSIONS,
    Condition,
    NoTableError,
    QueryError,
    Question,
    TableReader,
    Version,
    VersionGoneError,
    Where,
    of_like_values,
    plain_schema,
    plain_type,
    quoted,
    sql_of,
    sql_of_rows,
    sql_of_view,
)
from watersmeet.lake.views import with_reads


@names_tables
class DeltaRsReader(TableReader):
    """`TableReader` by delta-rs.

    Each thread keeps what it has read of the tables' logs, and from then on reads only later
    commits.
    """

    dialect = "datafusion"

    def __init__(self, lake: Lake) -> None:
        self.lake = lake
        self._files: dict[str, Files] = {}
        self._thread_tables = threading.local()
        self._kept: dict[str, DeltaTable] = {}
        """The version of each table that was last opened by its number.

        It never changes, so all threads share it.
        """
        self._looked_at: dict[str, _LookedAt] = {}
        """By table, the version whose files were compared last."""

    def exists(self, table: str) -> bool:
        """See `TableReader`."""
        is_listed = DeltaTable.is_deltatable(self.uri(table), self.storage(table))
        return is_listed or self._has_entry(table, 0)

    def table_rows(self, question: Question) -> pa.Table:
        """See `TableReader`."""
        table, columns, where, version, values = question
        delta_table = self._at(table, version)
        schema = columns_of(delta_table)
        question.check(schema.names)
        self.check_files(table, delta_table, where)
        names = ", ".join(map(quoted, columns))
        aggregates = (
            f"{kind}({'*' if column == '*' else quoted(column)}) AS {quoted(name)}"
            for name, (kind, column) in (values or {}).items()
        )
        selected = ", ".join(filter(None, [names, *aggregates]))
        condition = f" WHERE {sql_of(where, schema, self.dialect)}" if where else ""
        grouped = f" GROUP BY {names}" if names and values is not None else ""
        sql = f"SELECT {selected} FROM t{condition}{grouped}"
        query = QueryBuilder().register("t", delta_table)
        query.execute(_UNPACK_WHAT_MATCHES)
        try:
            answer = pa.RecordBatchReader.from_stream(query.execute(sql))
            plain = plain_schema(answer.schema)
            if plain == answer.schema:
                return answer.read_all()
            # One at a time: what is cast is in memory beside what it was. As a copy: a single one
            # would keep the pages of the file that all others were cast from, with the rows that do
            # not meet the conditions.
            copied = (each.cast(plain).take(np.arange(each.num_rows)) for each in answer)
            return pa.Table.from_batches(copied, plain)
        except (DeltaError, pa.ArrowException, OSError):
            if version is not None and self._lacks_files(table, delta_table):
                raise VersionGoneError(table, version) from None
            raise

    def functions(self) -> None:
        """See `TableReader`. None of DataFusion's reaches a file or another host."""
        return

    def query(
        self, sql: str, names: Collection[str], versions: Mapping[str, int] = NO_VERSIONS
    ) -> pa.RecordBatchReader:
        """See `TableReader`. What is sorted or joined beyond a bound of memory is on disk."""
        query = QueryBuilder()
        query.execute(_UNPACK_WHAT_MATCHES)
        query.execute(f"SET datafusion.runtime.memory_limit = '{_QUERY_MEMORY}'")
        query.execute(f"SET datafusion.execution.batch_size = {_QUERY_ROWS}")
        stored = self.stored_tables(names)
        opened = {table: self._at(table, versions.get(table)) for table in stored}
        for table, delta_table in opened.items():
            query.register(table, delta_table)
        tables = {table: quoted(table) for table in opened}
        columns = {table: columns_of(delta_table).names for table, delta_table in opened.items()}
        for name in with_reads(self.lake.derived, names):
            if name in self.lake.derived:
                view = self.lake.derived[name]
                of_view = view.of({read: quoted(read) for read in view.reads})
            elif name not in self.lake.views:
                continue
            elif self.lake.views[name].items is None:
                of_view = sql_of_view(self.lake.views[name], tables, columns)
            else:  # DataFusion reads no JSON
                schema = self.lake.views[name].schema
                version = versions.get(self.lake.views[name].parts[0].table)
                rows = self.select(name, schema.names, version=version)
                of_view = sql_of_rows(rows, schema, self.dialect)
            query.execute(f"CREATE VIEW {quoted(name)} AS {of_view}")
        # In brackets, nothing is a statement but a query.
        return _answered(query, f"(\n{sql}\n)")

    def history(self, table: str, limit: int | None = None) -> list[Version]:
        """See `TableReader`."""
        for _ in self._looks(table):
            commits = self.opened(table).history(limit)
            if not commits:
                if not self._is_stored(table):
                    log = Path(self.path(table), LOG)
                    raise damaged(entry_of(log, self.opened(table).version()), "is empty or torn")
                continue
            # delta-rs numbers downwards from the version that it knows, but also lists commits that
            # came since, and may not list the last one: the numbers are right once both ends agree.
            if len(commits) == limit == 1:
                break
            oldest = commits[-1]["version"]
            lacks_some = len(commits) != limit and self._has_entry(table, oldest - 1)
            if self.opened(table).version() == commits[0]["version"] and not lacks_some:
                break
        return [
            Version(
                c["version"],
                c.get("inCommitTimestamp", c["timestamp"]),
                c.get("userMetadata"),
                c.get("operation"),
                c.get("operationParameters"),
            )
            for c in commits
        ]

    def version(self, table: str) -> int:
        """See `TableReader`."""
        return self.opened(table).version()

    def has_moved(self, table: str, version: int) -> bool:
        """See `TableReader`. Does not open the table.

        Delta numbers the files of its log and deletes the oldest first, so two look-ups by name
        suffice. An update would list the whole log, which may be long.
        """
        files = self.files_of(table)
        log = f"{self.path(table)}/{LOG}"
        return files.has_file(f"{log}/{entry_name(version + 1)}") or not files.has_file(
            f"{log}/{entry_name(version)}"
        )

    def columns(self, table: str, version: int | None = None) -> pa.Schema:
        """See `TableReader`."""
        return columns_of(self._at(table, version))

    def properties(self, table: str) -> dict[str, str]:
        """See `TableReader`."""
        return dict(self.opened(table).metadata().configuration)

    def unknown_features(self, table: str, *, for_writing: bool) -> Sequence[str]:
        """See `TableReader`. A feature counts as known once delta-rs has been tested with it."""
        protocol = self.opened(table).protocol()
        properties = self.properties(table)
        if not for_writing:
            return sorted({*(protocol.reader_features or ())} - _READABLE)
        features = {
            *(protocol.reader_features or ()),
            *(protocol.writer_features or ()),
        } - _WRITABLE
        # A table of an earlier protocol has only the mode, and the feature without the mode changes
        # nothing.
        has_mapping = properties.get("delta.columnMapping.mode", "none") != "none"
        return sorted(features | {"columnMapping"} if has_mapping else features - {"columnMapping"})

    def file_count(self, table: str) -> int:
        """See `TableReader`."""
        return len(self.opened(table).file_uris())

    def has_data_file(self, table: str, name: str) -> bool:
        """See `TableReader`."""
        paths = pa.table(self.opened(table).get_add_actions())["path"].to_pylist()
        return any(path.rpartition("/")[2] == name for path in paths)

    def check_files(
        self, table: str, delta_table: DeltaTable, where: Where = (), largest: int | None = None
    ) -> None:
        """Raise TableError where a file does not have the content that its checksum says.

        Only files in a folder have checksums. Those are looked at, once, that may have rows which
        meet the conditions, and that are not larger than `largest`. What was vacuumed meanwhile is
        left to the query.
        """
        if scheme_of(self.path(table)) is not None:
            return
        looked_at = self._looked_at.get(table)
        if looked_at is None or looked_at.version != delta_table.version():
            files = pa.table(delta_table.get_add_actions(flatten=True))
            names = files["path"].to_pylist()
            intact = set() if looked_at is None else looked_at.intact.intersection(names)
            others = files.filter(pa.array([name not in intact for name in names], pa.bool_()))
            looked_at = _LookedAt(delta_table.version(), intact, others)
            self._looked_at[table] = looked_at
        files = looked_at.others
        if looked_at.intact.issuperset(files["path"].to_pylist()):
            return
        if largest is not None:
            files = files.filter(pc.less_equal(files["size_bytes"], largest))
        for name in {*may_meet(files, where)["path"].to_pylist()} - looked_at.intact:
            if not is_intact(Path(self.path(table), name)):
                raise damaged_file(table, name)
            looked_at.intact.add(name)

    def bytes_of_files(self, table: str, largest: int) -> int:
        """Return how many bytes the files of a table have that are not larger than `largest`."""
        sizes = pa.table(self.opened(table).get_add_actions())["size_bytes"]
        return pc.sum(sizes.filter(pc.less_equal(sizes, largest))).as_py() or 0

    def bytes_rewritten(self, table: str, changed: pa.Table, *, only_open: bool) -> int:
        """Return how many bytes the files of a table have that a merge of `changed`, as
        `Engine.merge` takes it, may write anew: those that may have a replaced or deleted row.
        """
        where = list[Sequence[Condition]]()
        replaced = times_ms(changed["replaces"].drop_null())
        if len(replaced):
            of_status: list[Condition] = [("status", "=", "open")] if only_open else []
            first, last = int(replaced.min()), int(replaced.max())
            where.append([*of_status, ("event_time", ">=", first), ("event_time", "<=", last)])
        if only_open and changed["delete_up_to"].null_count < len(changed):
            where.append([("status", "=", "waiting")])
        if not where:
            return 0
        files = pa.table(self.opened(table).get_add_actions(flatten=True))
        return pc.sum(may_meet(files, where)["size_bytes"]).as_py() or 0

    def row_bytes(self, table: str) -> int:
        """See `TableReader`."""
        files = pa.table(self.opened(table).get_add_actions())
        rows = pc.sum(files["num_records"]).as_py()
        return math.ceil(pc.sum(files["size_bytes"]).as_py() / rows) if rows else 0

    def path(self, table: str) -> str:
        """Return the path or URI of a table."""
        return local_path(self.lake.address(table))

    def uri(self, table: str) -> str:
        """Return the URI of a table: delta-rs would mistake a path with a `%` for a URI."""
        path = self.path(table)
        return Path(path).absolute().as_uri() if scheme_of(path) is None else path

    def storage(self, table: str) -> dict[str, str]:
        """Return the options with which a table is opened."""
        return dict(self.lake.owning_lake(table).storage)

    def opened(self, table: str) -> DeltaTable:
        """Return the table at its last commit. Each thread has an instance of its own."""
        thread_tables: dict[str, DeltaTable] = vars(self._thread_tables)
        known = thread_tables.get(table)
        if known is not None and not self.has_moved(table, known.version()):
            return known
        for _ in self._looks(table):
            try:
                thread_tables[table].update_incremental()
            # Not read yet; or the log was cleaned up beyond what was read, or the table made again.
            except (KeyError, DeltaError):
                thread_tables[table] = self._open(table)
            if not self._has_entry(table, thread_tables[table].version() + 1):
                break
        return thread_tables[table]

    def _is_stored(self, table: str) -> bool:
        return has_store(self.path(table))

    def _has_entry(self, table: str, version: int) -> bool:
        """Return True where the log of a table in an object store has a commit, listed or not."""
        entry = f"{self.path(table)}/{LOG}/{entry_name(version)}"
        return version >= 0 and self._is_stored(table) and self.files_of(table).has_file(entry)

    def _looks(self, table: str) -> Iterator[None]:
        """Yield for each look at the list of a log.

        An object store may have a commit, and answer for a while with a list that lacks it.
        """
        if not self._is_stored(table):
            yield from repeat(None)
        for wait_s in _WAITS_S:
            time.sleep(wait_s)
            yield
        raise behind(table)

    def files_of(self, table: str) -> Files:
        """Return access to the files beside a table, with the options of the lake that holds it.

        A borrowed table may need other options than this lake's tables.
        """
        owning_lake = self.lake.owning_lake(table)
        return self._files.setdefault(owning_lake.location, Files(owning_lake.storage))

    def _open(self, table: str, version: int | None = None) -> DeltaTable:
        try:
            return DeltaTable(self.uri(table), version, self.storage(table))
        except TableNotFoundError:
            if self._has_entry(table, 0):
                raise behind(table) from None
            raise NoTableError(table, self.lake.owning_lake(table).location) from None
        except DeltaError:
            log = Path(self.path(table), LOG)
            entries = [name for name in names_in(log) if version_of(name, ENTRY) is not None]
            if version is None and entries and not actions_of((log / entries[-1]).read_bytes()):
                raise damaged(log / entries[-1], "is empty or torn") from None
            raise

    def _at(self, table: str, version: int | None) -> DeltaTable:
        return self.opened(table) if version is None else self.opened_at(table, version)

    def opened_at(self, table: str, version: int) -> DeltaTable:
        """Return the table at one of its versions.

        Raises VersionGoneError where the log does not have it.
        """
        if (kept := self._kept.get(table)) is not None and kept.version() == version:
            return kept
        thread_tables: dict[str, DeltaTable] = vars(self._thread_tables)
        is_opened = table in thread_tables and thread_tables[table].version() == version
        if is_opened or self.version(table) == version:
            delta_table = self._kept[table] = thread_tables.pop(
                table
            )  # from now on it is not updated
            return delta_table
        if not 0 <= version < thread_tables[table].version():
            raise VersionGoneError(table, version)
        try:
            delta_table = self._kept[table] = self._open(table, version)
            return delta_table
        # The store has just answered, so the log no longer reaches back so far.
        except (DeltaError, NoTableError):
            raise VersionGoneError(table, version) from None

    def _lacks_files(self, table: str, delta_table: DeltaTable) -> bool:
        files = self.files_of(table)
        path = self.path(table)
        listed = pa.table(delta_table.get_add_actions(flatten=True))["path"].to_pylist()
        return not all(files.exists(f"{path}/{name}") for name in listed)


class _LookedAt(NamedTuple):
    version: int
    intact: set[str]
    """Of its files, those whose content was that of their checksums."""
    others: pa.Table
    """Those that were not compared when the version was first met, as delta-rs lists them."""


def may_meet(files: pa.Table, where: Where) -> pa.Table:
    """Return the files, as delta-rs lists them, that may have rows which meet the conditions.

    Of these, only those count that compare numbers, times, or the column that partitions a table.
    """
    terms = [
        reduce(and_, (_may_meet_one(files.schema, *each) for each in term), pc.scalar(True))
        for term in where
    ]
    return files.filter(reduce(or_, terms)) if terms else files


def _may_meet_one(files: pa.Schema, column: str, operator: str, value: Any) -> pc.Expression:
    if isinstance(value, Mapping) and value:
        near = (
            _may_meet_any(files, "partition", "in", alike)
            & _may_meet_any(files, column, operator, [value[p] for p in alike])
            for alike in of_like_values(value)
        )
        return reduce(or_, near)
    several = operator == "in" or isinstance(value, Mapping)
    return _may_meet_any(files, column, operator, [*value] if several else [value])


def _may_meet_any(
    files: pa.Schema, column: str, operator: str, values: Sequence[Any]
) -> pc.Expression:
    if operator not in _BOUNDED:
        return pc.scalar(True)
    if not values:
        return pc.scalar(False)
    if (name := f"partition.{column}") in files.names:
        kind = files.field(name).type
        is_text = operator in ("=", "in") and pa.types.is_string(plain_type(kind))
        return pc.field(name).isin(pa.array(values, kind)) if is_text else pc.scalar(True)
    bounds = [f"min.{column}", f"max.{column}"]
    kinds = [files.field(name).type for name in bounds if name in files.names]
    least, most = map(pc.field, bounds)
    if kinds and all(map(pa.types.is_timestamp, kinds)):
        in_ms = pa.timestamp("ms", "UTC")
        least, most = (bound.cast(in_ms, safe=False).cast(pa.int64()) for bound in (least, most))
    elif not kinds or not all(map(pa.types.is_integer, kinds)):
        return pc.scalar(True)
    may = pc.scalar(True)
    if operator not in ("<", "<="):
        may &= most >= min(values)
    if operator not in (">", ">="):
        may &= least <= max(values)
    return may | least.is_null() | most.is_null()  # a file may lack statistics


_BOUNDED: Final = frozenset(["=", "in", "<", "<=", ">", ">="])


def _answered(query: QueryBuilder, sql: str) -> pa.RecordBatchReader:
    """Return the rows of a query that begins in the second line of `sql`."""

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            yield from (batch.cast(plain) for batch in answer)
        except (DeltaError, pa.ArrowException, OSError) as error:
            raise _query_error(str(error)) from None

    try:
        answer = pa.RecordBatchReader.from_stream(query.execute(sql))
    except (DeltaError, pa.ArrowException) as error:
        raise _query_error(str(error)) from None
    plain = plain_schema(answer.schema)
    return pa.RecordBatchReader.from_batches(plain, batches())


def _query_error(text: str) -> QueryError:
    place = _QUERY_PLACE.search(text)
    said = _QUERY_PLACE.sub("", text.rpartition("caused by\n")[2])
    while prefix := _QUERY_PREFIX.match(said):
        said = said[prefix.end() :]
    said = said.removesuffix('")').replace('\\"', '"').strip()
    if place is None:
        return QueryError(said)
    return QueryError(said, int(place[1]) - 1, int(place[2]))


_QUERY_PLACE: Final = re.compile(r",? at Line: (\d+), Column: (\d+)")
_QUERY_PREFIX: Final = re.compile(
    r"(?:SQL error|Schema error|Error during planning|External error|Arrow error|Cast error"
    r"|Parser error|This feature is not implemented|DataFusion error|Execution error): "
    r"|(?:ParserError|TokenizerError)\(\""
)
_QUERY_MEMORY: Final = "2G"
_QUERY_ROWS: Final = 1024
"""Number of rows that a query unpacks at a time: a row may have long lists of values."""


_UNPACK_WHAT_MATCHES: Final = "SET datafusion.execution.parquet.pushdown_filters = true"
"""The other columns are unpacked for the rows alone that meet the conditions on some. delta-rs does
so by itself, except for a table that may have deletion vectors; where a file has one, it never
does.
"""

_WRITABLE: Final = frozenset(
    [
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "deletionVectors",
        "invariants",
        "v2Checkpoint",
        "variantType",
    ]
)
"""Table features that delta-rs was tested with, reading and writing."""
_READABLE: Final = _WRITABLE | {"columnMapping"}

_WAITS_S: Final = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Seconds before each look at the list of a log that may lack its last commit."""


def columns_of(delta_table: DeltaTable) -> pa.Schema:
    """Return the columns of a table in the version that is opened."""
    return plain_schema(pa.schema(delta_table.schema().to_arrow()))


def streamed(
    delta_table: DeltaTable, schema: pa.Schema, where: Where, batch_rows: int
) -> Iterator[pa.Table]:
    """Yield the rows of an opened table that meet the conditions, one file after the other.

    At most `batch_rows` come at a time.
    """
    query = QueryBuilder().register("t", delta_table)
    # Otherwise DataFusion reads as many files at once as there are cores, and ahead of its reader.
    for setting in ("target_partitions = 1", f"batch_size = {batch_rows}"):
        query.execute(f"SET datafusion.execution.{setting}")
    names = ", ".join(map(quoted, schema.names))
    condition = sql_of(where, schema, DeltaRsReader.dialect)
    for batch in query.execute(f"SELECT {names} FROM t WHERE {condition}"):
        rows = pa.table(pa.record_batch(batch)).cast(schema)
        del batch  # not in memory beside what it was cast to
        yield rows
        del rows  # nor this while the next one comes
