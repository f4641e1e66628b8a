"""Opens the engine that the configuration names."""

from __future__ import annotations

from collections.abc import Mapping

from pipelines.engine import Engine
from pipelines.lake.location import Lake
from pipelines.settings import Settings


def open_engine(settings: Settings, borrowed: Mapping[str, Lake] | None = None) -> Engine:
    """The engine for the lake of a configuration; the tables in `borrowed` are another lake's, which is only read.

    Raises WatersmeetError where it cannot start, or where the lake is a folder that its workers do not see.
    """
    from pipelines.engine.session import check_folder, spark_session
    from pipelines.engine.spark import SparkEngine

    lake = Lake(settings, borrowed or {})
    spark = spark_session(settings.spark)
    check_folder(spark, lake)
    return SparkEngine(spark, lake)
