"""Lakes of each kind, filled by delta-rs: what is under test is what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, write_deltalake
from pyspark.sql import SparkSession

from tests.support.lakes import OpenSpark
from watersmeet.core.silver import in_silver
from watersmeet.core.types import columns_ddl
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.by_spark import SparkReader
from watersmeet.lake.commits import Commit
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings


def settings_for(folder: Path, **overrides: Any) -> Settings:
    """A small configuration, with the lake in a folder unless told otherwise."""
    values: dict[str, Any] = {
        "name": "test",
        "lake": str(folder / "lake"),
        "kafka": {"bootstrap_servers": "127.0.0.1:1"},
        "sources": {
            name: {"topic": name, "event_time": "ts", "key": "k"} for name in ("tracking", "orders")
        },
        "merge": {"timeout": "100ms"},
        "publish": {"topic": "merged"},
    }
    return Settings.model_validate({**values, **overrides}, context={"folder": folder})


DELTA_RS = "delta-rs folder"
SPARK_FOLDER = pytest.param("spark folder", marks=pytest.mark.long)
SPARK_CATALOG = pytest.param("spark catalog", marks=pytest.mark.nightly)
KINDS = [DELTA_RS, SPARK_FOLDER, SPARK_CATALOG]
"""Each way to ask. Questions are small, and most are asked through delta-rs: `make test-long` asks
them of Spark too."""


@dataclass
class Store:
    """A lake, its questions, and the folder that its tables are in."""

    lake: Lake
    reader: TableReader
    folder: Path
    spark: SparkSession | None

    @property
    def settings(self) -> Settings:
        return self.lake.settings

    def create(self, *names: str) -> None:
        for name in names:
            table = self.lake.layout[name]
            if self.lake.is_catalog:
                self.create_by_spark(name)
            else:
                columns, by = Schema.from_arrow(table.schema), list(table.partitioned_by)
                properties = dict(table.properties)
                DeltaTable.create(
                    self.path(name),
                    columns,
                    partition_by=by,
                    configuration=properties,
                    raise_if_key_not_exists=False,
                )

    def create_by_spark(self, name: str) -> None:
        assert self.spark is not None
        table, at = self.lake.layout[name], self.sql_name(name)
        by = f"PARTITIONED BY ({', '.join(table.partitioned_by)})" if table.partitioned_by else ""
        properties = ", ".join(f"'{key}' = '{value}'" for key, value in table.properties.items())
        self.spark.sql(
            f"CREATE TABLE {at} ({columns_ddl(table.schema)}) USING delta {by} TBLPROPERTIES "
            f"({properties})"
        )

    def sql_name(self, name: str) -> str:
        address = self.lake.address(name)
        return address if self.lake.is_catalog else "delta.`{}`".format(address.replace("`", "``"))

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def add(self, name: str, *rows: Sequence[Any], commit: Commit | None = None) -> None:
        """Appends rows of Python values in one commit; what is left out at the end of a row is
        null."""
        table = self.lake.layout[name]
        self.append(
            name,
            table.rows((*row, *[None] * (len(table.schema) - len(row))) for row in rows),
            commit,
        )

    def append_outcomes(self, status: str, rows: pa.Table) -> None:
        """Appends rows of a status to silver."""
        self.append("silver", in_silver(rows, status, self.lake.schema("silver")))

    def append(self, name: str, rows: pa.Table, commit: Commit | None = None) -> None:
        """As an engine appends: skipped where the table has seen the transaction version, or a
        larger one."""
        found = DeltaTable(self.path(name))
        if commit is None:
            write_deltalake(found, rows, mode="append")
            return
        seen = found.transaction_version(commit.application)
        if seen is None or seen < commit.transaction_version:
            said = CommitProperties(
                custom_metadata={"userMetadata": commit.metadata},
                app_transactions=[Transaction(commit.application, commit.transaction_version)],
                max_commit_retries=0,
            )
            write_deltalake(found, rows, mode="append", commit_properties=said)


@pytest.fixture
def folder_store(tmp_path: Path) -> Store:
    """A lake in a folder of an odd name, asked by delta-rs, with tables that delta-rs makes."""
    folder = tmp_path / "the `lake`, it's é"
    lake = Lake(settings_for(tmp_path, lake=str(folder)))
    return Store(lake, DeltaRsReader(lake), folder, None)


@pytest.fixture(params=[DELTA_RS, SPARK_CATALOG])
def either_store(
    request: pytest.FixtureRequest, open_spark: OpenSpark, tmp_path: Path
) -> Iterator[Store]:
    """An empty lake for each implementation, where it does not matter how a table is found."""
    yield from store_of(request.param, open_spark, tmp_path)


def store_of(kind: str, open_spark: OpenSpark, tmp_path: Path) -> Iterator[Store]:
    if kind != "spark catalog":
        folder = tmp_path / "the `lake`, it's é"
        lake = Lake(settings_for(tmp_path, lake=str(folder)))
        by_spark = kind == "spark folder"
        yield Store(
            lake,
            SparkReader(lake, open_spark) if by_spark else DeltaRsReader(lake),
            folder,
            None,
        )
        return
    spark = open_spark()
    schema = f"lake_{tmp_path.name}".replace("-", "_").lower()
    folder = tmp_path / schema
    spark.sql(f"CREATE SCHEMA spark_catalog.`{schema}` LOCATION '{folder}'")
    location = {"catalog": "spark_catalog", "schema": schema}
    lake = Lake(settings_for(tmp_path, lake=location, checkpoints=str(tmp_path / "checkpoints")))
    yield Store(lake, SparkReader(lake, lambda: spark), folder, spark)
    spark.sql(f"DROP SCHEMA spark_catalog.`{schema}` CASCADE")
