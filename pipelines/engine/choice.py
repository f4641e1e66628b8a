"""Opens the engine that the configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pipelines.engine import Engine
from pipelines.errors import ConfigurationError
from pipelines.lake.location import Lake
from pipelines.settings import Settings

if TYPE_CHECKING:
    from pipelines.engine.spark import SparkEngine


def open_engine(settings: Settings, borrowed: Mapping[str, Lake] | None = None) -> Engine:
    """The engine for the lake of a configuration; the tables in `borrowed` are another lake's, which is only read.

    Raises WatersmeetError where it cannot start, or where the lake is one that it cannot open.
    """
    lake = Lake(settings, borrowed or {})
    if settings.engine == "spark":
        return _spark_engine(lake)
    if lake.needs_spark:
        raise ConfigurationError(
            f"engine: embedded cannot open {lake.location}; name a folder or an object-store URI (s3:, abfss:, "
            "gs:) as the lake, or engine: spark"
        )
    from pipelines.engine.embedded import EmbeddedEngine

    return EmbeddedEngine(lake, lambda: _spark_engine(lake))


def _spark_engine(lake: Lake) -> SparkEngine:
    from pipelines.engine.session import check_folder, spark_session
    from pipelines.engine.spark import SparkEngine

    spark = spark_session(lake.settings.spark)
    check_folder(spark, lake)
    return SparkEngine(spark, lake)
