"""A check that a schema of a catalog can hold a lake, made by doing there what a run does."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from watersmeet.engine.spark import SparkEngine
from watersmeet.errors import ConfigurationError, TableError, root_cause
from watersmeet.lake import tables
from watersmeet.lake.location import Lake

_OWN = "spark_catalog"


def check_catalog(spark: SparkSession, lake: Lake) -> None:
    """Raise ConfigurationError where the catalog is missing, forgets its tables, or refuses what a
    run does to its tables.

    An empty table like silver and a view of it are created in the schema, and dropped again. A
    schema that does not exist yet is not created, and so not tested.
    """
    name = f"probe_{uuid.uuid4().hex}"
    schema, _, _ = lake.address(name).rpartition(".")
    if (
        schema.startswith(f"`{_OWN}`")
        and spark.conf.get("spark.sql.catalogImplementation") == "in-memory"
    ):
        raise ConfigurationError(
            "Spark's own catalog forgets its tables with the session",
            where="lake.catalog",
            fix="set spark.sql.catalogImplementation to hive, with a metastore that stays, or "
            "name another catalog",
        )
    engine = SparkEngine(spark, lake)
    like_silver = replace(lake.layout[tables.SILVER], name=name)
    steps: Mapping[str, Callable[[], object]] = {
        "to make a Delta table with silver's properties": lambda: engine.create(like_silver),
        "to change a table's properties": lambda: engine.set_properties(
            name, like_silver.properties
        ),
        "VACUUM": lambda: engine.vacuum(name),
        "to make a view": lambda: engine.create_view(
            f"{name}_view", f"SELECT * FROM {lake.address(name)}"
        ),
    }
    _tried(lake, "to be asked", lambda: spark.sql(f"SHOW SCHEMAS IN {schema.rpartition('.')[0]}"))
    if not spark.catalog.databaseExists(schema):
        return
    try:
        for doing, step in steps.items():
            _tried(lake, doing, step)
    finally:
        for kind, made in (("VIEW", f"{name}_view"), ("TABLE", name)):
            with suppress(PySparkException):
                spark.sql(f"DROP {kind} IF EXISTS {lake.address(made)}")


def _tried(lake: Lake, doing: str, step: Callable[[], object]) -> object:
    try:
        return step()
    except (PySparkException, TableError) as error:
        raise ConfigurationError(
            f"the catalog refuses {doing} in {lake.location} ({root_cause(error)})",
            where="lake",
            fix="allow it, or name another catalog",
        ) from None
