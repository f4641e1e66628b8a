"""The Delta tables of a lake, wherever it is: folders under a directory or object store, or tables of a catalog's schema."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from delta.tables import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from pipelines.settings import CatalogLake, Settings
from pipelines.tables import Table, layout

_APPLICATION = "watersmeet"
"""Delta keeps, per table and application, the last transaction version it has seen: our batch number."""


class Lake:
    """Reads and writes the tables of one configuration with one session."""

    def __init__(self, spark: SparkSession, settings: Settings) -> None:
        self.spark = spark
        self._location = settings.lake
        self._tables = layout(settings)

    def identifier(self, table: str) -> str:
        """What SQL calls the table."""
        if isinstance(self._location, CatalogLake):
            return f"`{self._location.catalog}`.`{self._location.schema_name}`.`{table}`"
        return "delta.`{}`".format(self._path(table).replace("`", "``"))

    def create_missing(self) -> None:
        """Afterwards every table of the layout exists; those that did are left as they were."""
        for table in self._tables.values():
            self._create(table)

    def exists(self, table: str) -> bool:
        """Whether the table is there, without creating anything."""
        if isinstance(self._location, CatalogLake):
            return self.spark.catalog.tableExists(self.identifier(table))
        return DeltaTable.isDeltaTable(self.spark, self._path(table))

    def schema(self, table: str) -> StructType:
        """The columns as this configuration lays them out (the stored table may have more)."""
        return _columns(self._tables[table])

    def read(self, table: str) -> DataFrame:
        """The table as it is now."""
        return self.spark.read.table(self.identifier(table))

    def follow(self, table: str) -> DataFrame:
        """A stream with something in it for every later commit to the table; its rows mean nothing (updates repeat them)."""
        version = self.delta(table).history(1).select("version").collect()[0][0]
        stream = self.spark.readStream.format("delta").option("startingVersion", version).option("ignoreChanges", "true")
        if isinstance(self._location, CatalogLake):
            return stream.table(self.identifier(table))
        return stream.load(self._path(table))

    def delta(self, table: str) -> DeltaTable:
        """The table for MERGE and history."""
        return DeltaTable.forName(self.spark, self.identifier(table))

    def append(self, rows: DataFrame, table: str, batch: int | None = None) -> None:
        """Appends in one commit; with `batch`, a replay of that batch is a no-op (Delta has seen its number)."""
        writer = rows.write.format("delta").mode("append")
        if batch is not None:
            writer = writer.option("txnAppId", _APPLICATION).option("txnVersion", batch)
        if isinstance(self._location, CatalogLake):
            writer.saveAsTable(self.identifier(table))
        else:
            writer.save(self._path(table))

    @contextmanager
    def once_per_batch(self, batch: int) -> Iterator[None]:
        """Inside, a statement of a batch that its table has already seen is skipped. For one statement: MERGE has no options,
        so this is a session setting, and one that leaked would swallow later writes.
        """
        settings = {
            "spark.databricks.delta.write.txnAppId": _APPLICATION,
            "spark.databricks.delta.write.txnVersion": str(batch),
        }
        for name, value in settings.items():
            self.spark.conf.set(name, value)
        try:
            yield
        finally:
            for name in settings:
                self.spark.conf.unset(name)

    def _path(self, table: str) -> str:
        return f"{self._location}/{table}"

    def _create(self, table: Table) -> None:
        """By SQL: Delta's builder knows no names of three parts, and does not quote a path."""
        partitioned = f" PARTITIONED BY ({', '.join(table.partitioned_by)})" if table.partitioned_by else ""
        properties = ", ".join(f"'{name}' = '{value}'" for name, value in table.properties.items())
        kept = f" TBLPROPERTIES ({properties})" if properties else ""
        self.spark.sql(f"CREATE TABLE IF NOT EXISTS {self.identifier(table.name)} ({table.ddl}) USING delta{partitioned}{kept}")


def _columns(table: Table) -> StructType:
    columns = StructType.fromDDL(table.ddl)
    assert isinstance(columns, StructType)
    return columns
