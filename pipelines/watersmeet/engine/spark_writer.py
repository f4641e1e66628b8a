"""Changes of a lake's tables by Spark: any table that it can reach.

MERGE, DELETE and UPDATE take a commit's transaction version and metadata from a session's settings.
So they run in a session beside the layers' own, one at a time, and no other statement meets what is
set there. An append takes them as options.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

from watersmeet.core.types import columns_ddl
from watersmeet.engine import Following, replaced_row
from watersmeet.engine.session import create_rows, session_with
from watersmeet.lake.by_spark import sql_name
from watersmeet.lake.commits import Commit, suppress_conflict
from watersmeet.lake.durable import durably
from watersmeet.lake.location import Lake, hadoop_path
from watersmeet.lake.maintenance import FILE_BYTES
from watersmeet.lake.table_errors import names_tables
from watersmeet.lake.table_reader import Where, literal, sql_of
from watersmeet.lake.tables import Table

_MIN_FILE_SIZE = "spark.databricks.delta.optimize.minFileSize"
_MAX_FILE_SIZE = "spark.databricks.delta.optimize.maxFileSize"

_FINDS_KEYS = {
    "parquet.bloom.filter.enabled#merge_key": "true",
    "parquet.bloom.filter.adaptive.enabled": "true",
}
"""Give compacted files a Bloom filter of keys, which takes more than it saves in small ones."""


@names_tables
class SparkWriter:
    """The part of `Engine` that changes tables, on a Spark session of `engine.session`."""

    def __init__(self, spark: SparkSession, lake: Lake) -> None:
        self.spark = spark
        self.lake = lake
        self._creates_schema = threading.Lock()
        self._changes = dict[str, threading.RLock]()

    @contextmanager
    def changing(self, table: str) -> Iterator[None]:
        """Let no other thread change a table inside the `with` block, by whichever writer.

        What has changed is durable afterwards.
        """
        changing = self._changes.setdefault(table, threading.RLock())
        with changing, self.lake.durable.committing(table):
            yield

    def rows(self, table: pa.Table) -> DataFrame:
        """Return a few Arrow rows as rows of the session."""
        return _rows_in(self.spark, table)

    @durably
    def create(self, table: Table) -> None:
        """See `Engine.create`. A schema that is missing is created too; to look for it takes a
        right.
        """
        by = ", ".join(table.partitioned_by)
        name = sql_name(self.lake, table.name)
        statement = (
            f"CREATE TABLE IF NOT EXISTS {name} ({columns_ddl(table.schema)}) USING delta "
            f"{f'PARTITIONED BY ({by})' if by else ''} "
            f"TBLPROPERTIES ({_as_properties(table.properties)})"
        )
        try:
            self.spark.sql(statement)
        except AnalysisException as error:
            if error.getCondition() != "SCHEMA_NOT_FOUND":
                raise
            self._create_schema(name.rpartition(".")[0])
            self.spark.sql(statement)

    def _create_schema(self, name: str) -> None:
        with self._creates_schema:
            try:
                self.spark.sql(f"CREATE SCHEMA IF NOT EXISTS {name}")
            except PySparkException:
                if not self.spark.catalog.databaseExists(name):
                    raise

    def evolve_schema(self, table: Table) -> None:
        """See `Engine.evolve_schema`."""
        nothing = self.rows(table.schema.empty_table())
        self._append(table.name, nothing, {"mergeSchema": "true"})

    def create_view(self, name: str, query: str) -> None:
        """See `Engine.create_view`."""
        statement = f"CREATE OR REPLACE VIEW {self.lake.own_address(name)} AS {query}"
        try:
            self.spark.sql(statement)
        except PySparkException:  # another process has made it meanwhile, perhaps: then replace it
            self.spark.sql(statement)

    def append(
        self,
        table: str,
        rows: DataFrame | pa.Table,
        commit: Commit | None = None,
        following: Following | None = None,
    ) -> None:
        """See `Engine.append`."""
        options = {}
        if commit is not None:
            options = {
                "txnAppId": commit.application,
                "txnVersion": str(commit.transaction_version),
                "userMetadata": commit.metadata,
            }
        with self.followed(rows, following) as every:
            if isinstance(every, pa.Table):
                every = self.rows(every).coalesce(1)
            self._append(table, every.select(*self.lake.schema(table).names), options)

    def _append(self, table: str, rows: DataFrame, options: Mapping[str, str]) -> None:
        writer: DataFrameWriter = rows.write.format("delta").mode("append").options(**options)
        address = self.lake.address(table)
        with self.changing(table):
            if self.lake.is_catalog:
                writer.saveAsTable(address)
            else:
                writer.save(hadoop_path(address))

    @contextmanager
    def followed(
        self, rows: DataFrame | pa.Table, following: Following | None
    ) -> Iterator[DataFrame | pa.Table]:
        """Provide rows together with what follows from them."""
        if following is None:
            yield rows
            return
        if isinstance(rows, pa.Table):
            if following.keys is not None:
                following.see(rows)
            yield pa.concat_tables([rows, *(each.cast(rows.schema) for each in following.rows())])
            return
        is_cached = following.keys is not None
        rows = rows.persist() if is_cached else rows
        try:
            if is_cached:
                self._let_see(rows, following)
            every = rows
            if more := [each for each in following.rows() if each.num_rows]:
                # One task, so that a few rows do not become a file each.
                added = _rows_in(rows.sparkSession, pa.concat_tables(more)).coalesce(1)
                every = rows.unionByName(added)
            yield every
        finally:
            if is_cached:
                rows.unpersist()

    def _let_see(self, rows: DataFrame, following: Following) -> None:
        following.see(rows.where("status = 'late'").toArrow())
        keys = pa.table({"merge_key": pa.array(sorted(following.keys or ()), pa.string())})
        closed = rows.where("status = 'timed_out'")
        requested = _rows_in(rows.sparkSession, keys)
        following.see(closed.join(requested, "merge_key", "leftsemi").toArrow())

    def merge_by_spark(
        self,
        table: str,
        rows: DataFrame | pa.Table,
        commit: Commit,
        *,
        only_open: bool = True,
        settings: Mapping[str, str] = MappingProxyType({}),
        following: Following | None = None,
    ) -> None:
        """Merge rows as `Engine.merge` does, by MERGE in a session with these further settings.

        The rows are computed in that session, too, also those that are kept for what follows.
        """
        schema = self.lake.layout[table].schema
        columns = [f"`{name}`" for name in schema.names]
        condition = replaced_row(only_open=only_open)
        values = [f"changed.{name}" for name in columns]

        def statement(changed: str) -> str:
            return (
                f"MERGE INTO {sql_name(self.lake, table)} kept USING {changed} changed ON "
                f"{condition} "
                "WHEN MATCHED AND changed.status IS NULL THEN DELETE "
                "WHEN MATCHED THEN UPDATE SET "
                f"{', '.join(map(' = '.join, zip(columns, values, strict=True)))} "
                "WHEN NOT MATCHED AND changed.status IS NOT NULL "
                f"THEN INSERT ({', '.join(columns)}) VALUES ({', '.join(values)})"
            )

        with (
            self.changing(table),
            self._committing(commit, settings) as session,
            self._followed_in(session, rows, following) as every,
        ):
            every = self.rows(every) if isinstance(every, pa.Table) else every
            self._run_on_rows(session, statement, every)

    def _run_on_rows(
        self, session: SparkSession, statement: Callable[[str], str], rows: DataFrame
    ) -> None:
        # The rows may be another session's.
        with self._viewed(rows) as name:
            session.sql(statement(name))

    @contextmanager
    def _in_session(self, session: SparkSession, rows: DataFrame) -> Iterator[DataFrame]:
        with self._viewed(rows) as name:
            yield session.table(name)

    @contextmanager
    def _followed_in(
        self, session: SparkSession, rows: DataFrame | pa.Table, following: Following | None
    ) -> Iterator[DataFrame | pa.Table]:
        if isinstance(rows, pa.Table):
            with self.followed(rows, following) as every:
                yield every
            return
        with self._in_session(session, rows) as own, self.followed(own, following) as every:
            yield every

    @contextmanager
    def _viewed(self, rows: DataFrame) -> Iterator[str]:
        # The name of a global view of rows, which sessions share.
        name = f"watersmeet_{uuid.uuid4().hex}"
        rows.createGlobalTempView(name)
        try:
            yield f"{self.spark.conf.get('spark.sql.globalTempDatabase')}.{name}"
        finally:
            self.spark.catalog.dropGlobalTempView(name)

    def delete(self, table: str, where: Where, commit: Commit) -> None:
        """See `Engine.delete`."""
        self._run(f"DELETE FROM {sql_name(self.lake, table)}", table, where, commit)

    def update(
        self, table: str, where: Where, values: Mapping[str, str | bool | None], commit: Commit
    ) -> None:
        """See `Engine.update`."""
        changes = ", ".join(f"`{name}` = {literal(value)}" for name, value in values.items())
        self._run(f"UPDATE {sql_name(self.lake, table)} SET {changes}", table, where, commit)

    def _run(self, statement: str, table: str, where: Where, commit: Commit) -> None:
        condition = sql_of(where, self.lake.schema(table), "spark")
        with self.changing(table), self._committing(commit) as session:
            session.sql(f"{statement} WHERE {condition}")

    def _committing(
        self, commit: Commit, more: Mapping[str, str] = MappingProxyType({})
    ) -> AbstractContextManager[SparkSession]:
        # A session in which one statement is this commit.
        settings = {
            "spark.databricks.delta.write.txnAppId": commit.application,
            "spark.databricks.delta.write.txnVersion": str(commit.transaction_version),
            "spark.databricks.delta.commitInfo.userMetadata": commit.metadata,
        }
        return session_with(self.spark, {**settings, **more})

    def compact(self, table: str, file_bytes: int) -> None:
        """See `Engine.compact`."""
        with suppress_conflict(), self._rewriting(table, file_bytes) as session:
            session.sql(f"OPTIMIZE {sql_name(self.lake, table)}")

    def purge(self, table: str) -> None:
        """See `Engine.purge`."""
        with self._rewriting(table, FILE_BYTES) as session:
            session.sql(f"REORG TABLE {sql_name(self.lake, table)} APPLY (PURGE)")

    @contextmanager
    def _rewriting(self, table: str, file_bytes: int) -> Iterator[SparkSession]:
        has_keys = "merge_key" in self.lake.schema(table).names
        sizes = {_MIN_FILE_SIZE: str(file_bytes // 2), _MAX_FILE_SIZE: str(file_bytes)}
        settings = sizes | (_FINDS_KEYS if has_keys else {})
        with self.changing(table), session_with(self.spark, settings) as session:
            yield session

    def vacuum(self, table: str) -> int:
        """See `Engine.vacuum`."""
        name = sql_name(self.lake, table)
        before = self.spark.sql(f"VACUUM {name} DRY RUN").count()
        with self.changing(table):  # it may say in the log that it begins, and that it has ended
            self.spark.sql(f"VACUUM {name}")
        return before

    def set_properties(self, table: str, properties: Mapping[str, str]) -> None:
        """See `Engine.set_properties`."""
        statement = f"ALTER TABLE {sql_name(self.lake, table)} SET TBLPROPERTIES "
        with self.changing(table):
            self.spark.sql(f"{statement}({_as_properties(properties)})")


def _rows_in(spark: SparkSession, table: pa.Table) -> DataFrame:
    # Spark infers no types from an Arrow table without a chunk, and loses the rows behind a chunk
    # that is empty.
    rows = table.combine_chunks() if table.num_rows else []
    return create_rows(spark, rows, columns_ddl(table.schema))


def _as_properties(properties: Mapping[str, str]) -> str:
    return ", ".join(f"'{name}' = '{value}'" for name, value in properties.items())
