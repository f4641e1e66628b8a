"""The Spark session: the platform's own where there is one, else a local one made for small, quick batches."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark import SparkConf
from pyspark.sql import SparkSession

from pipelines.errors import WatersmeetError

JAVA_OPTIONS = "WATERSMEET_JAVA_OPTIONS"
"""The environment variable with further options for the JVM of a local session."""

SESSION_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # An expression of the user's that meets a value it cannot handle (orders[0] of none) gives null instead of
    # stopping the stream: a null `valid` counts as false.
    "spark.sql.ansi.enabled": "false",
    # Batches are small and their shape is known: re-planning between stages costs more than it saves.
    "spark.sql.adaptive.enabled": "false",
    # collect_list falls back to sorting after 128 keys by default; a batch has many more, and they fit.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "10000000",
    # MERGE reads its source twice; without this the whole fold would run twice.
    "spark.databricks.delta.merge.materializeSource": "all",
    "spark.databricks.delta.snapshotPartitions": "2",
    # Spark's default is a type of twelve bytes that other readers call deprecated.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # No two values are the same, and few keys: looking for repetitions costs a tenth of a backlog.
    "parquet.enable.dictionary#value": "false",
    "parquet.enable.dictionary#merge_key": "false",
    # Compaction leaves files of this size alone: by default it writes those of up to 1 GB again each time, history and all.
    "spark.databricks.delta.optimize.minFileSize": str(64 * 1024 * 1024),
    "spark.databricks.delta.optimize.maxFileSize": str(128 * 1024 * 1024),
    # VACUUM lists files in as many tasks: ten thousand by default, which takes minutes for a table of a few files.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "8",
}

_GIVEN = ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE", "SPARK_HOME", "SPARK_CONF_DIR", "HADOOP_CONF_DIR", "DATABRICKS_RUNTIME_VERSION")
"""Environment variables by which somebody else has a say in what a session is."""

_LOCAL_SETTINGS = {
    "spark.master": "local[*]",
    "spark.app.name": "watersmeet",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def spark_session() -> SparkSession:
    """The active session (a notebook's, a Databricks job's, spark-submit's), else a local one; ready for `layer_session`.

    Raises WatersmeetError where the JVM artifacts of a local session are missing.
    """
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    # Python workers must be this Python, or they start one from PATH that lacks the packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder
    submitted = SparkConf()
    settings = dict(_LOCAL_SETTINGS)
    if not submitted.contains("spark.master"):
        settings["spark.jars"] = ",".join(str(jar) for jar in _jars())
        log4j = Path(__file__).with_name("log4j2.properties")
        # In any other zone, Delta reads the whole log again after each commit to compare its own statistics with.
        own = f"-Dlog4j2.configurationFile={log4j.as_uri()} -XX:-UsePerfData -Duser.timezone=UTC"
        java_options = f"{own} {os.environ.get(JAVA_OPTIONS, '')}"
        settings["spark.driver.extraJavaOptions"] = java_options.strip()
    for name, value in settings.items():
        if not submitted.contains(name):
            builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def will_be_plain() -> bool:
    """Whether a session would be one of ours, in whose eyes a path is a folder of this machine; known without one."""
    return SparkSession.getActiveSession() is None and not any(map(os.environ.get, _GIVEN))


def layer_session(spark: SparkSession) -> SparkSession:
    """A session with the settings that the layers rely on, apart from everybody else's: no setting leaks in or out."""
    session = spark.newSession()
    for name, value in SESSION_SETTINGS.items():
        session.conf.set(name, value)
    return session


def _jars() -> list[Path]:
    jars = sorted(Path(sys.prefix, "jars", "spark").glob("*.jar"))
    if not jars:
        raise WatersmeetError(f"the JVM artifacts for Spark are missing in {sys.prefix}/jars/spark: run `make install`")
    return jars
