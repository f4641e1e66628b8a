"""Choice of the engine that queries a lake's tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def reader(lake: Lake, spark: Callable[[], SparkSession]) -> TableReader:
    """Return `TableReader` by delta-rs where it can open every table, else by Spark.

    Spark's session starts with the first query.
    """
    if lake.needs_spark:
        from watersmeet.lake.by_spark import SparkReader

        return SparkReader(lake, spark)
    return DeltaRsReader(lake)
