"""Silver for people without Spark: these readers see what Spark sees, deletion vectors and all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaProtocolError
from pyspark.sql import SparkSession

from tests.support.cases import expected_silver, random_case
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake, engine_for, silver_of
from watersmeet.engine.spark import SparkEngine
from watersmeet.lake import tables
from watersmeet.lake.by_spark import SparkReader

pytestmark = pytest.mark.long

Rows = list[tuple[object, ...]]
COLUMNS = "partition, merge_key, status, event_time, last_event_time, tracking, orders"
MERGED = "WHERE status IN ('open', 'timed_out')"


def by_delta_rs(path: str) -> pa.Table:
    """The package `deltalake`, with its own SQL."""
    return pa.table(
        QueryBuilder()
        .register("silver", DeltaTable(path))
        .execute(f"SELECT {COLUMNS} FROM silver {MERGED}")
    )


def by_polars(path: str) -> pa.Table:
    """Polars reads Delta through delta-rs's log, and the files itself."""
    merged = pl.scan_delta(path).filter(pl.col("status").is_in(["open", "timed_out"]))
    return merged.select(COLUMNS.split(", ")).collect().to_arrow()


def by_duckdb_through_delta_rs(path: str) -> pa.Table:
    """DuckDB's SQL over what delta-rs reads."""
    silver = pa.table(  # noqa: F841
        QueryBuilder().register("silver", DeltaTable(path)).execute("SELECT * FROM silver")
    )
    return duckdb.sql(f"SELECT {COLUMNS} FROM silver {MERGED}").to_arrow_table()


def as_rows(found: pa.Table) -> Rows:
    """In the form of `silver_of`."""

    def plain(value: object) -> object:
        if isinstance(value, list):
            return tuple(
                (part["offset"], int(part["event_time"].timestamp() * 1000), part["value"])
                for part in value
            )
        return round(value.timestamp() * 1000) if hasattr(value, "timestamp") else value

    return sorted(
        (tuple(plain(value) for value in row.values()) for row in found.to_pylist()), key=repr
    )


@pytest.fixture(scope="module")
def lake(root_session: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> CaseLake:
    """Silver after many batches, each of them a MERGE by Spark that left deletion vectors, as large
    ones do."""
    settings = settings_for(
        tmp_path_factory.mktemp("readers"), engine="spark", merge__max_records_per_batch=200
    )
    lake = CaseLake(
        engine_for(lambda: root_session, settings),
        settings,
        {p: random_case(7300 + p) for p in range(4)},
    )
    with patch.object(SparkEngine, "here_bytes", -1):
        for share in (0.3, 0.6, 1.0):
            lake.arrive(share)
            lake.merge()
    assert list(Path(str(settings.lake), tables.SILVER).rglob("deletion_vector*.bin")), (
        "there is something to get wrong"
    )
    return lake


def test_silver_is_written_by_merges(lake: CaseLake) -> None:
    operations = [
        commit["operation"]
        for commit in DeltaTable(f"{lake.settings.lake}/{tables.SILVER}").history()
    ]
    assert len(operations) > 3
    assert set(operations) == {"CREATE TABLE", "MERGE"}


@pytest.mark.parametrize(
    "read", [DeltaTable.to_pandas, DeltaTable.to_pyarrow_table], ids=lambda read: read.__name__
)
def test_what_ignores_deletion_vectors_refuses_to_read(
    read: Callable[[DeltaTable], object], lake: CaseLake
) -> None:
    with pytest.raises(DeltaProtocolError, match="deletionVectors"):
        read(DeltaTable(f"{lake.settings.lake}/{tables.SILVER}"))


@pytest.mark.promise("R14")
@pytest.mark.parametrize(
    "read", [by_delta_rs, by_polars, by_duckdb_through_delta_rs], ids=lambda read: read.__name__
)
def test_silver_is_read_as_spark_reads_it(
    read: Callable[[str], pa.Table], root_session: SparkSession, lake: CaseLake
) -> None:
    by_spark = silver_of(SparkReader(lake.engine.lake, lambda: root_session))
    assert (
        as_rows(read(f"{lake.settings.lake}/{tables.SILVER}"))
        == by_spark
        == expected_silver(lake.cases)
    )
