"""Queries on a lake's tables by Spark, for lakes that only Spark can open.

These are tables of a catalog, and tables on file systems unknown to delta-rs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from watersmeet.core.types import columns_ddl
from watersmeet.lake.location import Lake, hadoop_path
from watersmeet.lake.table_errors import names_tables
from watersmeet.lake.table_reader import (
    NO_VERSIONS,
    NoTableError,
    QueryError,
    Question,
    TableReader,
    Version,
    VersionGoneError,
    plain_schema,
    quoted,
    row_count,
    sql_of,
    sql_of_view,
)
from watersmeet.lake.views import View, with_reads

_GONE: Final = frozenset(
    [
        "DELTA_VERSION_NOT_FOUND",
        "DELTA_UNSUPPORTED_TIME_TRAVEL_BEYOND_DELETED_FILE_RETENTION_DURATION",
        "DELTA_NO_RECREATABLE_HISTORY_FOUND",
        "DELTA_VERSIONS_NOT_CONTIGUOUS",
        "DELTA_LOG_FILE_NOT_FOUND",
        "DELTA_TRUNCATED_TRANSACTION_LOG",
    ]
)
"""Delta's error conditions for a version that cannot be read.

It was never made, or its log is gone or no longer promised.
"""


@names_tables
class SparkReader(TableReader):
    """`TableReader` by Spark. The session is requested with the first query."""

    dialect = "spark"

    def __init__(self, lake: Lake, spark: Callable[[], SparkSession]) -> None:
        self.lake = lake
        self._factory = spark

    @cached_property
    def _spark(self) -> SparkSession:
        return self._factory()

    def exists(self, table: str) -> bool:
        """See `TableReader`."""
        if self.lake.owning_lake(table).is_catalog:
            return self._spark.catalog.tableExists(self.lake.address(table))
        try:
            self._spark.sql(f"DESCRIBE DETAIL {sql_name(self.lake, table)}")
        except AnalysisException as error:
            if error.getCondition() != "DELTA_MISSING_DELTA_TABLE":
                raise
            return False
        return True

    def table_rows(self, question: Question) -> pa.Table:
        """See `TableReader`."""
        found, columns, values = self._rows(question), question.columns, question.values
        selected = (
            found.select(*map(_column, columns))
            if values is None
            else summarised(found, columns, values)
        )
        rows = self._collect(question.table, question.version, selected)
        return rows.cast(plain_schema(rows.schema))

    def functions(self) -> Collection[str]:
        """See `TableReader`."""
        return {row[0] for row in self._spark.sql("SHOW SYSTEM FUNCTIONS").collect()}

    def query(
        self, sql: str, names: Collection[str], versions: Mapping[str, int] = NO_VERSIONS
    ) -> pa.RecordBatchReader:
        """See `TableReader`. Nothing stays in the session: the tables are parts of the query."""
        stored = self.stored_tables(names)
        tables = {table: quoted(table) for table in stored}
        columns = {table: self.columns(table, versions.get(table)).names for table in stored}
        parts = {}
        for table in stored:
            version = f" VERSION AS OF {versions[table]}" if table in versions else ""
            parts[table] = f"SELECT * FROM {sql_name(self.lake, table)}{version}"
        for name in with_reads(self.lake.derived, names):
            if name in self.lake.derived:
                view = self.lake.derived[name]
                parts[name] = view.of({read: quoted(read) for read in view.reads})
            elif name in self.lake.views:
                parts[name] = _sql_of(self.lake.views[name], tables, columns)
        named = ", ".join(f"{quoted(name)} AS ({part})" for name, part in parts.items())
        beginning = f"WITH {named} (" if parts else "("
        try:
            # In brackets, nothing is a statement but a query.
            return self._spark.sql(f"{beginning}\n{sql}\n)").toArrow().to_reader()
        except PySparkException as error:
            raise _query_error(error) from None

    def history(self, table: str, limit: int | None = None) -> list[Version]:
        """See `TableReader`."""
        rows = self._described(table, "HISTORY", "" if limit is None else f" LIMIT {limit}")
        commits = rows.select(
            "version",
            F.unix_millis("timestamp").alias("at"),
            "userMetadata",
            "operation",
            "operationParameters",
        ).collect()
        return sorted((Version(*row) for row in commits), key=attrgetter("number"), reverse=True)

    def columns(self, table: str, version: int | None = None) -> pa.Schema:
        """See `TableReader`."""
        return plain_schema(self._rows(Question(table, version=version)).limit(0).toArrow().schema)

    def properties(self, table: str) -> dict[str, str]:
        """See `TableReader`."""
        return dict(self._detail(table, "properties"))

    def unknown_features(self, table: str, *, for_writing: bool) -> Sequence[str]:
        """See `TableReader`."""
        del table, for_writing  # Spark itself refuses what it does not know
        return ()

    def file_count(self, table: str) -> int:
        """See `TableReader`."""
        return int(self._detail(table, "numFiles"))

    def has_data_file(self, table: str, name: str) -> bool:
        """See `TableReader`."""
        files = map(unquote, self._rows(Question(table)).inputFiles())
        return any(file.rpartition("/")[2] == name for file in files)

    def row_bytes(self, table: str) -> int:
        """See `TableReader`."""
        rows = row_count(self, table)
        return math.ceil(self._detail(table, "sizeInBytes") / rows) if rows else 0

    def _detail(self, table: str, column: str) -> Any:
        return self._described(table, "DETAIL").select(column).collect()[0][0]

    def _described(self, table: str, what: str, limit: str = "") -> DataFrame:
        with self._translated_errors(table, None):
            return self._spark.sql(f"DESCRIBE {what} {sql_name(self.lake, table)}{limit}")

    def _rows(self, question: Question) -> DataFrame:
        table, version = question.table, question.version
        if version is not None and version < 0:
            raise VersionGoneError(table, version)
        with self._translated_errors(table, version):
            rows = table_rows(self._spark, self.lake, table, version)
            question.check(rows.columns)
            schema = self.lake.layout[table].schema
            return rows.where(sql_of(question.where, schema, self.dialect))

    @contextmanager
    def _translated_errors(self, table: str, version: int | None) -> Iterator[None]:
        try:
            yield
        except AnalysisException as error:
            if version is not None and error.getCondition() in _GONE:
                raise VersionGoneError(table, version) from None
            if not self.exists(table):
                raise NoTableError(table, self.lake.owning_lake(table).location) from None
            raise

    def _collect(self, table: str, version: int | None, rows: DataFrame) -> pa.Table:
        try:
            return rows.toArrow()
        except Exception:  # errors of a task have no class of their own in Python
            if version is not None and self._lacks_files(rows):
                raise VersionGoneError(table, version) from None
            raise

    def _lacks_files(self, rows: DataFrame) -> bool:
        try:
            self._spark.read.format("binaryFile").load(
                [unquote(file) for file in rows.inputFiles()]
            )
        except AnalysisException as error:
            return error.getCondition() == "PATH_NOT_FOUND"
        return False


def _query_error(error: PySparkException) -> QueryError:
    """Return what Spark says of a query that begins in the second line."""
    text = str(error)
    place = _QUERY_PLACE.search(text)
    said = _QUERY_PREFIX.sub("", re.split(_QUERY_END, text)[0]).strip()
    return (
        QueryError(said)
        if place is None
        else QueryError(said, int(place[1]) - 1, int(place[2]) + 1)
    )


_QUERY_PLACE: Final = re.compile(r"line (\d+),? pos (\d+)")
_QUERY_PREFIX: Final = re.compile(r"^\[[A-Z_.0-9]+\] ")
_QUERY_END: Final = re.compile(r"\.? SQLSTATE: |[;(]? ?line \d+,? pos |\n== ")


def summarised(
    rows: DataFrame, by: Sequence[str], values: Mapping[str, tuple[str, str]]
) -> DataFrame:
    """Return rows grouped `by` columns, with aggregates as in `TableReader.summary`."""
    aggregates = [
        getattr(F, kind)(F.lit(1) if column == "*" else _column(column)).alias(name)
        for name, (kind, column) in values.items()
    ]
    return (
        rows.groupBy(*map(_column, by)).agg(*aggregates)
        if aggregates
        else rows.select(*map(_column, by)).distinct()
    )


def table_rows(
    spark: SparkSession, lake: Lake, table: str, version: int | None = None
) -> DataFrame:
    """Return the rows of a table at its last commit, or at `version`."""
    as_of = "" if version is None else f" VERSION AS OF {int(version)}"
    return spark.sql(f"SELECT * FROM {sql_name(lake, table)}{as_of}")


def sql_name(lake: Lake, table: str) -> str:
    """Return what Spark SQL calls a table.

    That is its name in the catalog, or its path as Delta reads it.
    """
    address = lake.address(table)
    return (
        address if lake.owning_lake(table).is_catalog else f"delta.{quoted(hadoop_path(address))}"
    )


def view_sql(lake: Lake, name: str, columns: Mapping[str, Collection[str]] | None = None) -> str:
    """Return a view as a query in Spark SQL.

    `columns`: those that its tables have; by default what their layout says.
    """
    view = lake.views[name]
    names = {part.table: sql_name(lake, part.table) for part in view.parts}
    own = dict.fromkeys(names, view.schema.names)
    return _sql_of(view, names, own if columns is None else columns)


def _sql_of(view: View, tables: Mapping[str, str], columns: Mapping[str, Collection[str]]) -> str:
    if view.items is None:
        return sql_of_view(view, tables, columns)
    [part] = view.parts
    of_body, of_items = view.packed
    packed, each = pa.schema(of_body), ""
    if view.items:
        packed = packed.append(pa.field(view.items, pa.list_(pa.struct(of_items))))
        each = f" LATERAL VIEW EXPLODE(body.{view.items}) AS item"
    places = {field.name: "body." for field in of_body} | {f.name: "item." for f in of_items}
    selected = ", ".join(
        f"{places.get(name, '')}{quoted(name)} AS {quoted(name)}" for name in view.schema.names
    )
    return (
        f"SELECT {selected} FROM (SELECT generation, decided_at, from_json(body, "
        f"'{columns_ddl(packed)}') AS body FROM {tables[part.table]} "
        f"WHERE {sql_of([part.where], (), 'spark')}){each}"
    )


def _column(name: str) -> Column:
    return F.col(quoted(name))
