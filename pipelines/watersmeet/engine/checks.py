"""Checks of a Spark session and its executors, before anything starts."""

from __future__ import annotations

import importlib
import re
import sys
import uuid
from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pyspark
from pyspark.errors import AnalysisException
from pyspark.sql import Row, SparkSession, is_remote
from pyspark.sql import functions as F

import watersmeet
from watersmeet.core.types import columns_ddl, schema_of
from watersmeet.errors import ConfigurationError, WatersmeetError, root_cause
from watersmeet.lake.files import Files
from watersmeet.lake.location import Lake, has_store, scheme_of
from watersmeet.lake.store import check_readable

OLDEST: Final = (4, 2)
"""The first release of Spark that Watersmeet was developed with."""

_MANY_ROWS: Final = 100_000
"""Number of rows of a range of which every core gets some."""

_WITHOUT_DELTA: Final = frozenset(
    [
        "TABLE_OR_VIEW_NOT_FOUND",
        "PARSE_SYNTAX_ERROR",
        "DELTA_CONFIGURE_SPARK_SESSION_WITH_EXTENSION_AND_CATALOG",
    ]
)
"""Error conditions of a session that does not know Delta's statements, or lacks its catalog."""


def check_session(spark: SparkSession) -> None:
    """Raise ConfigurationError for an old or another Spark than pyspark's, or no Delta Lake."""
    check_versions(spark.version, pyspark.__version__)
    try:
        spark.sql(f"DESCRIBE DETAIL delta.`file:/nowhere-{uuid.uuid4()}`")
    except AnalysisException as error:
        has_delta = error.getCondition() not in _WITHOUT_DELTA
    else:
        has_delta = True
    if not has_delta:
        raise ConfigurationError(
            "this Spark session has no Delta Lake",
            fix="start it with Delta's jar, "
            "spark.sql.extensions=io.delta.sql.DeltaSparkSessionExtension and "
            "spark.sql.catalog.spark_catalog=org.apache.spark.sql.delta.catalog.DeltaCatalog",
        )
    _check_delta_package()


def check_versions(spark: str, driver: str) -> None:
    """Raise ConfigurationError where Spark is too old, or differs from the driver's pyspark."""
    oldest = ".".join(map(str, OLDEST))
    if _release(spark) < OLDEST:
        raise ConfigurationError(
            f"this is Spark {spark}, and Watersmeet needs Spark {oldest} or newer",
            fix="use a newer one",
        )
    if _release(spark) != _release(driver):
        raise ConfigurationError(
            f"this is Spark {spark}, and the driver's pyspark is {driver}",
            fix=f"install pyspark {spark}",
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _check_delta_package() -> None:
    # It gives Delta's conflicts error classes of their own (`lake.commits`).
    try:
        importlib.import_module("delta.connect" if is_remote() else "delta.exceptions")
    except ImportError as error:
        raise ConfigurationError(
            f'the driver\'s Python lacks Delta Lake ({error}): `pip install "watersmeet[spark]"` '
            "brings it, or start Spark with --packages"
        ) from None


def number_of_tasks(spark: SparkSession) -> int:
    """Return among how many tasks Kafka's partitions are divided.

    That is `spark.sql.shuffle.partitions`, or the number of cores where that is `auto`.
    """
    setting = spark.conf.get("spark.sql.shuffle.partitions") or ""
    if setting.isdecimal():
        return int(setting)
    # Spark divides a range by its cores.
    return spark.range(_MANY_ROWS).select(F.spark_partition_id()).distinct().count()


def check_executors(spark: SparkSession, lake: Lake) -> None:
    """Raise ConfigurationError where executors cannot run tasks, or use the lake's files."""
    if (spark.conf.get("spark.master", None) or "").startswith("local") and not is_remote():
        return
    answers = ask_executors(spark, lake)
    if other := {row.version for row in answers} - {watersmeet.__version__}:
        raise _unfit(f"they have Watersmeet {', '.join(sorted(other))}")
    if not all(row.sees for row in answers):
        raise ConfigurationError(
            f"{lake.location} is a folder of this machine, and Spark's executors do not see it",
            where="lake",
            fix="name a folder that every worker mounts at this path, an object-store URI, or a "
            "schema of a catalog",
        )
    if problems := {row.problem for row in answers} - {None}:
        raise ConfigurationError(
            f"Spark's executors cannot read, make and delete files in {lake.location} "
            f"({min(problems)})",
            where="lake",
            fix="name what opens it under `storage:`, or in the environment of every executor, and "
            "let the user that they run as do so",
        )


def ask_executors(spark: SparkSession, lake: Lake) -> list[Row]:
    """Return what tasks see where they run. Raises ConfigurationError where they cannot.

    `version`: that of Watersmeet; `sees`: False where the lake is a folder, and not the driver's;
    `problem`: why they cannot work with the lake's files, or null.
    """
    is_folder = not lake.is_catalog and scheme_of(lake.location) is None
    marker = f"{lake.location}/_seen-{uuid.uuid4()}" if is_folder else None
    files = Files(lake.storage)
    if marker is not None:
        files.write_text(marker, "")
    schema = schema_of("version string, sees boolean, problem string")

    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # With all that they import.
        for name in ("watersmeet.kafka.reading", "watersmeet.engine.spark"):
            importlib.import_module(name)
        version = importlib.import_module("watersmeet").__version__
        sees = marker is None or Files({}).exists(marker)
        problem = problem_of_files(lake, marker) if sees else None
        answer = {"version": version, "sees": sees, "problem": problem}
        for _ in batches:
            yield pa.RecordBatch.from_pylist([answer], schema)

    try:
        tasks = number_of_tasks(spark)
        return spark.range(0, tasks, 1, tasks).mapInArrow(look, columns_ddl(schema)).collect()
    except Exception as error:  # whatever keeps a Python worker from running
        raise _unfit(_cause(error)) from None
    finally:
        if marker is not None:
            files.delete(marker)


def problem_of_files(lake: Lake, marker: str | None = None) -> str | None:
    """Return why files cannot be listed, read, made and deleted in a lake from here, or None.

    `marker`: a file that somebody else has made there. A lake that only Spark opens has no files.
    """
    if lake.is_catalog or not (scheme_of(lake.location) is None or has_store(lake.location)):
        return None
    files = Files(lake.storage)
    probe = f"{lake.location}/_probe-{uuid.uuid4()}"
    try:
        check_readable(lake)
        if marker is not None:
            files.read_text(marker)
        files.write_text(probe, "")
        files.read_text(probe)
        files.delete(probe)
    except WatersmeetError as error:
        return str(error)
    except OSError as error:
        return error.strerror
    return None


def _unfit(why: str) -> ConfigurationError:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ConfigurationError(
        f"Spark's executors cannot run Watersmeet's tasks: {why}",
        fix=f"give every worker Python {python} with Watersmeet {watersmeet.__version__} and its "
        "packages (docs/spark-clusters.md)",
    )


def _cause(error: Exception) -> str:
    # A Python worker's sentence, else the first cause that an executor's JVM names.
    traceback = str(error).partition("Traceback (most recent call last):")[2]
    causes = re.findall(r"^[\w.]+: (.+)$", traceback, re.MULTILINE) or re.findall(
        r"(?:\): |Caused by: )[\w.]+: (.+)", str(error)
    )
    return causes[0].strip().rstrip(".") if causes else root_cause(error)
