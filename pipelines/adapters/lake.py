"""The Delta tables of a lake, wherever it is: folders under a directory or object store, or tables of a catalog's schema."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from delta.tables import DeltaTable
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema, to_arrow_type
from pyspark.sql.types import DataType, StructType, TimestampType

from pipelines.adapters.files import Files
from pipelines.adapters.local import NOW, At, DataFile, LocalTables, Version
from pipelines.adapters.spark import layer_session, spark_session, will_be_plain
from pipelines.adapters.transaction import Transactions, knows_delta
from pipelines.errors import LeaseLostError
from pipelines.live import live_sql
from pipelines.settings import CatalogLake, Settings
from pipelines.tables import Table, inputs_of, layout

APPLICATION = "watersmeet"
"""Delta keeps, per table and application, the last transaction version it has seen: token and number of our last commit."""

_NUMBERS = 1 << 32

COMPACTED_BYTES = 64 * 1024 * 1024
"""Compaction leaves files of this size alone."""

_FINDS_KEYS = {"parquet.bloom.filter.enabled#merge_key": "true", "parquet.bloom.filter.adaptive.enabled": "true"}
"""Compacted files say which keys they may have, so that whoever looks for one key opens few of them. (In small files that
would take more than it saves.)
"""

Rows = Sequence[Sequence[Any]]


def bronze_application(source: str | None = None) -> str:
    """The application of bronze, or of one source's bronze, in tables that have more writers than it."""
    return f"{APPLICATION}-{source or 'bronze'}"


class Commit(NamedTuple):
    """What names a commit of an owner: its fencing token, and a number from 1 on that rises with each (a batch's: one more than
    the batch; 0: none yet).
    """

    token: int
    number: int


class Lake:
    """Reads and writes the tables of one configuration with one session: `spark`, or one that is made once it is needed.

    `token` is the fencing token of the lease that this process holds; 0 where it writes without one. With `inputs`, what the
    merge reads and never writes is that lake's.
    """

    def __init__(self, spark: SparkSession | None, settings: Settings, token: int = 0, inputs: Lake | None = None) -> None:
        self._spark = spark
        self.token = token
        self._settings = settings
        self._location = settings.lake
        self._tables = layout(settings)
        self._inputs = inputs
        self._borrowed: frozenset[str] = frozenset() if inputs is None else inputs_of(settings)
        self._local = self._local_tables(settings.lake)
        self._transactions: dict[str, Transactions] = {}

    @property
    def spark(self) -> SparkSession:
        """The session; small questions to a local lake need none."""
        if self._spark is None:
            self._spark = layer_session(spark_session())
        return self._spark

    @property
    def files(self) -> Files:
        """Small files beside the tables."""
        return Files(self.spark)

    def _local_tables(self, location: str | CatalogLake) -> LocalTables | None:
        """Where all tables are in folders of this machine, these."""
        if isinstance(location, CatalogLake):
            return None
        is_plain = self._spark is None and Path(location).is_absolute() and will_be_plain()
        folder = location if is_plain else self.files.local_path(location)
        if folder is None or self._inputs is None:
            return None if folder is None else LocalTables(folder)
        inputs = self._inputs._local
        return None if inputs is None else LocalTables(folder, dict.fromkeys(self._borrowed, inputs.folder))

    @property
    def place(self) -> str:
        """Where the lake is, for a sentence."""
        if isinstance(self._location, CatalogLake):
            return f"{self._location.catalog}.{self._location.schema_name}"
        return self._location

    def identifier(self, table: str) -> str:
        """What SQL calls the table."""
        if self._inputs is not None and table in self._borrowed:
            return self._inputs.identifier(table)
        if isinstance(self._location, CatalogLake):
            return f"`{self._location.catalog}`.`{self._location.schema_name}`.`{table}`"
        return "delta.`{}`".format(self._path(table).replace("`", "``"))

    def create_missing(self) -> None:
        """Afterwards every table of the layout exists; those that did are left as they were. A catalog gets the live view."""
        for table in self._tables.values():
            if table.name not in self._borrowed and not self.exists(table.name):
                self._create(table)
        if isinstance(self._location, CatalogLake):
            self.spark.sql(f"CREATE OR REPLACE VIEW {self.identifier('live')} AS {live_sql(self._settings, self.identifier)}")

    def keep_properties(self, table: str) -> None:
        """Afterwards the table has the properties of the layout, whatever it was made with. For its owner alone."""
        wanted = self._tables[table].properties
        if wanted.items() - self._properties(table).items():
            properties = ", ".join(f"'{name}' = '{value}'" for name, value in wanted.items())
            self.spark.sql(f"ALTER TABLE {self.identifier(table)} SET TBLPROPERTIES ({properties})")

    def _properties(self, table: str) -> Mapping[str, str]:
        if self._local is not None:
            return self._local.properties(table)
        return {row.key: row.value for row in self.spark.sql(f"SHOW TBLPROPERTIES {self.identifier(table)}").collect()}

    def exists(self, table: str) -> bool:
        """Whether the table is there, without creating anything."""
        if self._local is not None:
            return self._local.exists(table)
        if isinstance(self._location, CatalogLake):
            return self.spark.catalog.tableExists(self.identifier(table))
        if self._inputs is not None and table in self._borrowed:
            return self._inputs.exists(table)
        return DeltaTable.isDeltaTable(self.spark, self._path(table))

    def stored_schema(self, table: str) -> StructType:
        """The columns that the stored table has."""
        return self.read(table).schema if self._local is None else self._local.schema(table)

    def schema(self, table: str) -> StructType:
        """The columns as this configuration lays them out (the stored table may have more)."""
        return _columns(self._tables[table].ddl)

    def read(self, table: str, at: int | datetime | None = None) -> DataFrame:
        """The table as it is now, or one of its versions, or as it was at a time (before its first commit: as that left it)."""
        if at is None:
            return self.spark.read.table(self.identifier(table))
        version = at if isinstance(at, int) else self._version_at(table, at)
        return self.spark.sql(f"SELECT * FROM {self.identifier(table)} VERSION AS OF {version}")

    def _version_at(self, table: str, time: datetime) -> int:
        """Spark itself takes no time after the last commit."""
        commits = self.delta(table).history().select("version", (F.col("timestamp") <= time).alias("is_made"))
        return int(commits.agg(F.coalesce(F.max(F.when(F.col("is_made"), F.col("version"))), F.min("version"))).collect()[0][0])

    def query(self, sql: str, at: At = NOW) -> pa.Table:
        """The answer to a small question about the tables as they are now (those that `at` names: as they were), without
        Spark where the lake is a folder here.

        Tables stand in braces and odd names in backticks, as in ``SELECT MAX(`offset`) FROM {late}``; a time is what
        `time_literal` says, and a text of unknown origin what `text_literal` says. Nothing but the SQL that Spark and DataFusion
        share may be used. Times are answered in epoch ms.
        """
        found = self._answer(sql, at)
        return pa.table([_in_ms(column) for column in found.columns], found.column_names)

    def rows(self, sql: str, at: At = NOW) -> list[tuple[Any, ...]]:
        """The same as Python's values, row by row."""
        return list(zip(*(column.to_pylist() for column in self.query(sql, at).columns), strict=True))

    def rows_if_any(self, sql: str) -> list[tuple[Any, ...]]:
        """The same; none where a table is not there yet."""
        return self.rows(sql) if all(map(self.exists, _names_in(sql))) else []

    def fetch(self, sql: str, schema: StructType) -> pa.Table:
        """The answer with the types of these columns, times too, so that a DataFrame can be made of it."""
        return self._answer(sql).cast(to_arrow_schema(schema, timezone="UTC"))

    def frame(self, rows: pa.Table, schema: StructType) -> DataFrame:
        """Fetched rows as a DataFrame."""
        # An Arrow table without a chunk has no types that Spark could look at.
        return self.spark.createDataFrame(rows if rows.num_rows else [], schema)

    @property
    def is_local(self) -> bool:
        """Whether questions are answered without Spark."""
        return self._local is not None

    def _answer(self, sql: str, at: At = NOW) -> pa.Table:
        names = _names_in(sql)
        if self._local is not None:
            return self._local.query(sql, names, at)
        frames: dict[str, Any] = {name: self.read(name, at.get(name)) for name in names}
        return self.spark.sql(sql, **frames).toArrow()

    def time_literal(self, ms: int) -> str:
        """A point in time (epoch ms) in the SQL of `query`."""
        return f"timestamp_millis({ms})" if self._local is None else self._local.time_literal(ms)

    def in_ms(self, column: str) -> str:
        """A time column as epoch ms in the SQL of `query`, so that arithmetic can be done with it."""
        return f"unix_millis({column})" if self._local is None else self._local.in_ms(column)

    def text_literal(self, text: str) -> str:
        """Any text in the SQL of `query`."""
        if self._local is not None:
            return "'{}'".format(text.replace("'", "''").replace("{", "{{").replace("}", "}}"))
        return f"decode(unhex('{text.encode().hex()}'), 'UTF-8')"

    def history(self, table: str, limit: int) -> list[Version]:
        """The last commits that the log still knows, latest first."""
        if self._local is not None:
            return self._local.history(table, limit)
        rows = self.delta(table).history(limit).select("version", "timestamp", "userMetadata").collect()
        return [Version(row.version, round(row.timestamp.timestamp() * 1000), row.userMetadata) for row in rows]

    def follow(self, table: str) -> DataFrame:
        """A stream with something in it for every later commit to the table; its rows mean nothing (updates repeat them)."""
        version = self.version_of(table)
        stream = self.spark.readStream.format("delta").option("startingVersion", version).option("ignoreChanges", "true")
        if isinstance(self._location, CatalogLake):
            return stream.table(self.identifier(table))
        return stream.load(self._path(table))

    def version_of(self, table: str) -> int:
        """The number of the table's last commit."""
        if self._local is not None:
            return self._local.version(table)
        return self.history(table, 1)[0].number

    def has_version(self, table: str, number: int) -> bool:
        """Whether a local lake's table has the commit of this number, where it has the one before: at next to no cost."""
        assert self._local is not None
        return self._local.has_version(table, number)

    def delta(self, table: str) -> DeltaTable:
        """The table for MERGE and history."""
        return DeltaTable.forName(self.spark, self.identifier(table))

    def append(self, rows: DataFrame, table: str, *, batch: int | None = None, application: str = APPLICATION) -> None:
        """Appends in one commit; with `batch`, as the commit of that batch: where the table has it, nothing happens.

        Raises LeaseLostError where a later owner has written to the table: nothing was written then.
        """
        self._append_numbered(table, batch, application, lambda version: self._append(rows, table, application, version))

    def append_fetched(self, rows: pa.Table, table: str, *, apart: str) -> None:
        """The same on a local lake for rows that Spark has handed over, a file for each value of the (integer) column `apart`."""
        local = self._local
        assert local is not None
        self._append_numbered(
            table, None, APPLICATION, lambda version: local.append_apart(rows, table, APPLICATION, version, column=apart)
        )

    def replace(self, rows: DataFrame, table: str, *, batch: int) -> None:
        """In one commit, all rows of the table's changing partition go, and these, of any kind, come; once per batch."""
        column, value = self._changing(table)
        writer = rows.select(*self.schema(table).names).write.format("delta").mode("overwrite")
        # Delta would refuse rows of another partition, which a session setting alone can allow.
        with self.once(table, batch, replaceWhere_constraintCheck_enabled="false"):
            self._save(writer.option("replaceWhere", f"{column} = '{value}'"), table)

    def replace_fetched(self, rows: pa.Table, table: str, *, batch: int) -> None:
        """The same on a local lake for rows that Spark has handed over."""
        own = self._own(table)
        if own is None:
            self.replace(self.frame(rows, self.schema(table)), table, batch=batch)
            return
        own.replace(APPLICATION, self._version(batch + 1), self._written(rows, own))
        self._check_written(table, batch + 1, APPLICATION)

    def can_update(self, table: str) -> bool:
        """Whether `update_fetched` may be called."""
        return self._own(table) is not None

    def update_fetched(self, rows: pa.Table, table: str, *, gone: pa.Table, batch: int) -> None:
        """In one commit, the rows of the changing partition with these keys go, and these rows, of any kind, come; once per
        batch. `gone`: columns of texts and numbers, the most telling one last.
        """
        own = self._own(table)
        assert own is not None
        own.update(APPLICATION, self._version(batch + 1), self._written(rows, own), gone)
        self._check_written(table, batch + 1, APPLICATION)

    def changing_files(self, table: str) -> int:
        """How many files the changing partition of a local lake's table has."""
        assert self._local is not None
        return self._local.file_count(table, *self._changing(table))

    def _changing(self, table: str) -> tuple[str, str]:
        found = self._tables[table].changing
        assert found is not None
        return found

    def _written(self, rows: pa.Table, own: Transactions) -> list[DataFile]:
        return own.local.write(rows, own.table, apart=own.changing[0])

    def compact(self, table: str) -> None:
        """Rewrites small files into few; no row changes. Where another writer was quicker, it is left for the next time."""
        local = self._local_writer(table)
        with suppress_conflict():
            if local is not None:
                local.compact(table, COMPACTED_BYTES)
            else:
                with self._set(_FINDS_KEYS):
                    self.spark.sql(f"OPTIMIZE {self.identifier(table)}").collect()

    def append_rows(self, rows: Rows, table: str, *, batch: int | None = None, application: str = APPLICATION) -> None:
        """The same for a few rows that the driver has: values in the order of the layout's columns, times in epoch ms."""
        self._append_numbered(table, batch, application, lambda version: self.append_once(rows, table, application, version))

    def _append_numbered(self, table: str, batch: int | None, application: str, append: Callable[[int | None], None]) -> None:
        number = self._next_number(table, application) if batch is None else batch + 1
        append(None if number is None else self._version(number))
        if number is not None:
            self._check_written(table, number, application)

    def _next_number(self, table: str, application: str) -> int | None:
        """Of an owner's commits, each has the next number; who has no lease does not count."""
        if not self.token:
            return None
        last = self.last_commit(table, application)
        if last is not None and last.token > self.token:
            raise LeaseLostError(self.place)
        return last.number + 1 if last is not None and last.token == self.token else 1

    def append_once(self, rows: Rows, table: str, application: str, version: int | None) -> None:
        """Appends in one commit, unless the table has seen this version, or a larger one, of the application."""
        values, local = _as_arrow(rows, self.schema(table)), self._local_writer(table)
        own = None if rows or version is None else self._own(table)
        if local is not None:
            local.append(values, table, application, version)
        elif own is not None and version is not None:
            own.commit(application, version, [])
        else:
            self._append(self.frame(values, self.schema(table)).coalesce(1), table, application, version)

    def _own(self, table: str) -> Transactions | None:
        """Who commits to a table that only Spark can write, and is quicker; None where that is not known to work."""
        own, changing = self._transactions.get(table), self._tables[table].changing
        if own is None and self._local is not None and changing is not None and knows_delta(self.spark):
            own = self._transactions[table] = Transactions(self.spark, self._local, table, self.delta(table), changing)
        return own

    def _local_writer(self, table: str) -> LocalTables | None:
        """Who writes few rows to the table without Spark; None where only Spark can."""
        return None if self._tables[table].needs_spark else self._local

    def _append(self, rows: DataFrame, table: str, application: str, version: int | None) -> None:
        writer = rows.write.format("delta").mode("append")
        if version is not None:
            writer = writer.options(txnAppId=application, txnVersion=str(version))
        self._save(writer, table)

    def _save(self, writer: DataFrameWriter, table: str) -> None:
        if isinstance(self._location, CatalogLake):
            writer.saveAsTable(self.identifier(table))
        else:
            writer.save(self._path(table))

    @contextmanager
    def once(self, table: str, batch: int, **further: str) -> Iterator[None]:
        """Inside, one statement on `table` is the commit of that batch, as with `append`. MERGE has no options, so this is a
        session setting, and one that leaked would swallow later writes. `further` settings of Delta's hold inside, too.
        """
        settings = {f"spark.databricks.delta.{name.replace('_', '.')}": value for name, value in further.items()} | {
            "spark.databricks.delta.write.txnAppId": APPLICATION,
            "spark.databricks.delta.write.txnVersion": str(self._version(batch + 1)),
        }
        with self._set(settings):
            yield
        self._check_written(table, batch + 1, APPLICATION)

    @contextmanager
    def saying(self, metadata: str) -> Iterator[None]:
        """Inside, what Spark commits bears this text in the table's history."""
        with self._set({"spark.databricks.delta.commitInfo.userMetadata": metadata}):
            yield

    @contextmanager
    def interpreted(self) -> Iterator[None]:
        """Inside, Spark compiles no code for a query: a small one is done before its code would be, and the JVM's compilers
        have enough to do.
        """
        with self._set({"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}):
            yield

    def collect(self, rows: DataFrame) -> pa.Table:
        """The rows of a small query, `interpreted`."""
        with self.interpreted():
            return rows.toArrow()

    @contextmanager
    def _set(self, settings: Mapping[str, str]) -> Iterator[None]:
        before = {name: self.spark.conf.get(name, None) for name in settings}
        for name, value in settings.items():
            self.spark.conf.set(name, value)
        try:
            yield
        finally:
            for name, value_before in before.items():
                if value_before is None:
                    self.spark.conf.unset(name)
                else:
                    self.spark.conf.set(name, value_before)

    def has_batch(self, table: str, batch: int) -> bool:
        """Whether the table has the commit of that batch."""
        last = self.last_commit(table)
        return last is not None and last.number > batch

    def last_commit(self, table: str, application: str = APPLICATION) -> Commit | None:
        """The last commit that owners have made to the table; what is asked is Delta's own word, not the rows."""
        version = self._recorded(table, application)
        return None if version is None else Commit(*divmod(version, _NUMBERS))

    def fence(self, table: str, application: str = APPLICATION) -> None:
        """Keeps every earlier owner out, with an empty commit under this owner's token: Delta skips what they write from now
        on, or finds it in conflict. The number of the last commit stays what it was.
        """
        for _ in range(20):
            last = self.last_commit(table, application)
            if last is not None and last.token >= self.token:
                break
            version = self._version(0 if last is None else last.number)
            with suppress_conflict():
                self.append_once([], table, application, version)
        self._check_written(table, None, application)

    def _version(self, number: int) -> int:
        return self.token * _NUMBERS + number

    def _check_written(self, table: str, number: int | None, application: str) -> None:
        last = self.last_commit(table, application)
        if self.token and last is not None and (last.token > self.token or number not in (None, last.number)):
            raise LeaseLostError(self.place)

    def _recorded(self, table: str, application: str) -> int | None:
        """Delta's transaction version for the application, from the checksum of the last commit where there is one."""
        if self._local is not None:
            return self._local.transaction_version(table, application)
        jvm: Any = self.spark._jvm
        jvm.org.apache.spark.sql.SparkSession.setActiveSession(self.spark._jsparkSession)
        nothing = jvm.scala.Option.empty()
        snapshot = self.delta(table)._jdt.deltaLog().update(False, nothing, nothing)
        checksum = snapshot.checksumOpt()
        known: Any = checksum.get().setTransactions() if checksum.isDefined() else nothing
        if known.isDefined():
            return next((int(t.version()) for t in _each(known.get()) if t.appId() == application), None)
        found = snapshot.transactions().get(application)
        return int(found.get()) if found.isDefined() else None

    def _path(self, table: str) -> str:
        return f"{self._location}/{table}"

    def _create(self, table: Table) -> None:
        """By SQL: Delta's builder knows no names of three parts, and does not quote a path."""
        local = self._local_writer(table.name)
        if local is not None:
            local.create(table.name, _columns(table.ddl), table.properties)
            return
        partitioned = f" PARTITIONED BY ({', '.join(table.partitioned_by)})" if table.partitioned_by else ""
        properties = ", ".join(f"'{name}' = '{value}'" for name, value in table.properties.items())
        kept = f" TBLPROPERTIES ({properties})" if properties else ""
        self.spark.sql(f"CREATE TABLE IF NOT EXISTS {self.identifier(table.name)} ({table.ddl}) USING delta{partitioned}{kept}")


def wall_clock_ms() -> int:
    """Now, as a time for `append_rows`."""
    return time.time_ns() // 1_000_000


@contextmanager
def suppress_conflict() -> Iterator[None]:
    """Another writer came first; whoever asks for this looks again and tries once more."""
    try:
        yield
    except Exception as error:
        if "Concurrent" not in str(error):
            raise


def _names_in(sql: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(sql) if name}


def _in_ms(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.divide(column.cast(pa.int64()), 1000) if pa.types.is_timestamp(column.type) else column


def _as_arrow(rows: Rows, schema: StructType) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.table({field.name: _column(values, field.dataType) for field, values in zip(schema, columns, strict=True)})


def _column(values: Sequence[Any], data_type: DataType) -> pa.Array:
    if isinstance(data_type, TimestampType):
        microseconds = [None if ms is None else ms * 1000 for ms in values]
        return pa.array(microseconds, pa.int64()).cast(pa.timestamp("us", "UTC"))
    return pa.array(values, to_arrow_type(data_type, timezone="UTC"))


def _each(sequence: Any) -> Iterator[Any]:
    for i in range(sequence.length()):
        yield sequence.apply(i)


@cache  # Spark parses it, and every append and every batch asks
def _columns(ddl: str) -> StructType:
    columns = StructType.fromDDL(ddl)
    assert isinstance(columns, StructType)
    return columns
