"""The choice of the engine that the configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from watersmeet.engine import Engine
from watersmeet.errors import missing_package
from watersmeet.lake.location import Lake
from watersmeet.lake.store import check_openable, reader
from watersmeet.lake.table_reader import TableReader
from watersmeet.lake.tables import Table
from watersmeet.settings import Settings

if TYPE_CHECKING:
    from watersmeet.engine.spark import SparkEngine


def open_engine(settings: Settings, external_tables: Mapping[str, Lake] | None = None) -> Engine:
    """Open the engine of a configuration's lake; `external_tables` are others', and only read.

    Raises MissingPackageError where Spark is not installed, and WatersmeetError where the engine
    cannot start, or cannot open the lake.
    """
    lake = Lake(settings, external_tables or {})
    if settings.engine == "spark":
        return _spark_engine(lake)
    check_openable(lake)
    from watersmeet.engine.embedded import EmbeddedEngine

    return EmbeddedEngine(lake)


def lake_reader(settings: Settings) -> TableReader:
    """Return the reader of a configuration's lake; only a question that needs Spark starts it."""

    def spark() -> Any:
        from watersmeet.engine.session import spark_session

        return spark_session(settings.spark)

    return reader(Lake(settings), spark)


def create_tables(engine: Engine) -> None:
    """Create every table of the lake's own layout that does not exist, whoever else does so."""
    lake = engine.lake

    def create(table: Table) -> None:
        try:
            engine.create(table)
        except Exception:  # each catalog has its own word for a name that is taken meanwhile
            if not engine.reader.exists(table.name):
                raise

    missing = [
        table
        for table in lake.layout.values()
        if table.name not in lake.external_tables and not engine.reader.exists(table.name)
    ]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(create, missing))


def _spark_engine(lake: Lake) -> SparkEngine:
    try:
        from pyspark.sql import is_remote
    except ImportError as error:
        instead = ", or take `engine: embedded`, which needs neither Spark nor Java"
        raise missing_package(error, instead) or error from None

    from watersmeet.engine.checks import check_executors
    from watersmeet.engine.session import spark_session

    spark = spark_session(lake.settings.spark)
    check_executors(spark, lake)
    # Only now: an older Spark, which has been refused, lacks what these import.
    if is_remote():
        from watersmeet.engine.spark import ConnectEngine

        return ConnectEngine(spark, lake)
    from watersmeet.engine.spark import SparkEngine

    return SparkEngine(spark, lake)
