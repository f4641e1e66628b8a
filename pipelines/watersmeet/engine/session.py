"""The Spark session that the layers work in.

A session that exists already (a notebook's, a Databricks job's, one made by `spark-submit`) is
never changed: the layers work in a copy of it, with its cluster and catalogs, and settings of their
own. Without one, a local session is made, with the settings under `spark:`. With `spark.remote`
among them, or SPARK_REMOTE, it is one of Spark Connect.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, is_remote
from pyspark.sql.types import StructType

from watersmeet.engine.checks import check_session
from watersmeet.engine.jvm import SPARK_JAVA_OPTIONS, start_jvm
from watersmeet.errors import ConfigurationError
from watersmeet.jvm.artifacts import SPARK, jars
from watersmeet.jvm.class_archive import java_options
from watersmeet.kafka.workers import SAFE_PATH
from watersmeet.lake.location import hadoop_path
from watersmeet.lake.tables import STATISTICS_BYTES

JAVA_OPTIONS = "WATERSMEET_JAVA_OPTIONS"
"""The environment variable with further options for the JVM of a local session."""

CONNECT_PORT = 15002
"""The port of a server of Spark Connect whose address names none."""

CONNECT_TIMEOUT_S = 10.0

_REMOTE = "spark.remote"
_COLLECTOR = re.compile(r"-XX:\+Use\w+GC\b")

LAYER_SETTINGS: Mapping[str, str] = {
    # `${...}` in a key is text, and not a variable of this machine.
    "spark.sql.variable.substitute": "false",
    # A TIMESTAMP of the tables is a point in time, whatever the session takes one for.
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    # What a query of the layers cannot compute is null.
    "spark.sql.ansi.enabled": "false",
    # Records of a file that is gone, or that cannot be read, would be merged as if they had never
    # come.
    "spark.sql.files.ignoreMissingFiles": "false",
    "spark.sql.files.ignoreCorruptFiles": "false",
    # delta-rs does not say in a file which calendar its times are of: there is one.
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    # Batches are small and their shape is known: planning again between stages costs more than it
    # saves.
    "spark.sql.adaptive.enabled": "false",
    # MERGE reads its source twice; without this the whole merge would run twice.
    "spark.databricks.delta.merge.materializeSource": "all",
    "spark.databricks.delta.snapshotPartitions": "1",
    # Spark's default is a type of twelve bytes that other readers call deprecated.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A batch of bronze is kept for as long as it takes to write it: packing it costs more than it
    # saves.
    "spark.sql.inMemoryColumnarStorage.compressed": "false",
    # Nearly all values differ, and so do keys: looking for repetitions costs a tenth of a backlog.
    "parquet.enable.dictionary#value": "false",
    "parquet.enable.dictionary#merge_key": "false",
    "parquet.statistics.truncate.length": str(STATISTICS_BYTES),
    # VACUUM lists files in as many tasks: ten thousand by default, which takes minutes for a table
    # of a few files.
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "8",
}

CHANGING_VALUES = (
    "spark.sql.ansi.",
    "spark.sql.defaultPath",
    "spark.sql.function",
    "spark.sql.legacy.",
    "spark.sql.mapKeyDedupPolicy",
    "spark.sql.parser.",
    "spark.sql.path.",
    "spark.sql.session.collation.",
)
"""Beginnings of the names of settings that may change what a query gives.

In a session of the layers, those that `LAYER_SETTINGS` does not name have Spark's own defaults,
whatever a cluster, a notebook or the configuration says.
"""

LAYER_DEFAULTS: Mapping[str, str] = {
    # The vectorised reader unpacks 4,096 rows at a time, however large they are. With records of
    # 900 kB that pack well, that is more than a heap of 2 GiB holds. The other reader takes no
    # longer (docs/performance.md).
    "spark.sql.parquet.enableVectorizedReader": "false",
    # Rows go to Python in batches bounded by their number alone. With Spark's default, a bound in
    # bytes, the size is computed after every row, in time that grows with the rows whose lists are
    # null: every record.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "200",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
}
"""Settings of the layers that those under `spark:` may change."""

_OWN_JAVA_OPTIONS = (
    # In any other zone, Delta reads the whole log again after each commit, to compare its own
    # statistics with it.
    "-Duser.timezone=UTC",
    "-XX:-UsePerfData",
    # Most code runs only a few times. With Java's own thresholds, optimising it took a third of all
    # processor time of a small run; these are ten times as high.
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)

_FEW_CORES = 4
"""Number of cores up to which one thread collects garbage: a backlog of a million records then
takes 2.8 GiB of memory, where G1 takes 3.5 GiB, and no more time.
"""

_OWN_SETTINGS = {
    "spark.master": "local[*]",
    "spark.app.name": "watersmeet",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": str(min(os.cpu_count() or 1, 16) * 2),
    # A cycle of the layers generates more classes than the hundred that Spark keeps: each was
    # compiled again in every cycle.
    "spark.sql.codegen.cache.maxEntries": "3000",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def spark_session(settings: Mapping[str, str]) -> SparkSession:
    """Return a session for the layers; `settings` are those of a session that is made here.

    Raises ArtifactsError where the JVM artifacts of a local session cannot be had, and
    ConfigurationError where the layers cannot work in a session.
    """
    # Python workers must be this Python, or they start one from PATH that lacks the packages.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if _REMOTE in settings:
        os.environ.setdefault("SPARK_REMOTE", settings[_REMOTE])
    given = SparkSession.getActiveSession()
    if given is None and "PYSPARK_GATEWAY_PORT" in os.environ:
        # The session of spark-submit: before it is asked for, its settings cannot be seen.
        given = SparkSession.builder.getOrCreate()
    is_own = given is None and "SPARK_REMOTE" not in os.environ
    if is_own:
        session = _own_session(settings)
    else:
        session = _remote_session(os.environ["SPARK_REMOTE"]) if given is None else _copy_of(given)
        if given is not None and not is_remote():
            _given[session] = given
    for name in session.conf.getAll:
        if name.startswith(CHANGING_VALUES) and session.conf.isModifiable(name):
            session.conf.unset(name)
    defaults = {
        name: value for name, value in LAYER_DEFAULTS.items() if not is_own or name not in settings
    }
    for name, value in {**defaults, **LAYER_SETTINGS}.items():
        session.conf.set(name, value)
    return session


def create_rows(
    spark: SparkSession, rows: pa.Table | Sequence[object], schema: StructType | str
) -> DataFrame:
    """Return rows in memory as those of a session of the layers.

    createDataFrame makes its session the active one, with which a notebook would go on: so the
    session that was given is made the active one again.
    """
    created = spark.createDataFrame(rows, schema)
    if (given := _given.get(spark)) is not None:
        given.createDataFrame([], "none INT")
    return created


@cache
def struct_type(spark: SparkSession, ddl: str) -> StructType:
    """Return the type that a session of the layers makes of DDL.

    Spark itself asks the active session: a TIMESTAMP may be another type there.
    """
    return create_rows(spark, [], ddl).schema


@contextmanager
def session_with(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """Provide a session like `spark` with further settings, for one statement at a time.

    It is another session than `spark`, which works meanwhile and never has these settings.
    """
    with _opening:
        beside = _beside.setdefault(spark, _Beside())
    with beside.lock:
        if beside.session is None:
            beside.session = _copy_of(spark)
            if is_remote():
                atexit.register(beside.session.stop)
        session = beside.session
        for name, value in settings.items():
            session.conf.set(name, value)
        try:
            yield session
        finally:
            for name in settings:
                former = spark.conf.get(name) if name in LAYER_DEFAULTS else None
                if former is None:
                    session.conf.unset(name)
                else:
                    session.conf.set(name, former)


@dataclass
class _Beside:
    """A session beside another one, made when it is first needed."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    session: SparkSession | None = None


_given: dict[SparkSession, SparkSession] = {}
"""The session of which one of the layers is a copy."""

_beside: dict[SparkSession, _Beside] = {}
_opening = threading.Lock()


def _remote_session(remote: str) -> SparkSession:
    # One that is left open may keep the process from ending.
    _check_reachable(remote)
    try:
        session = SparkSession.builder.getOrCreate()
    except ImportError as error:
        raise ConfigurationError(
            f"the client of Spark Connect lacks a package ({error}): `pip install "
            '"watersmeet[connect]"` brings it'
        ) from None
    atexit.register(session.stop)
    check_session(session)
    return session


def _check_reachable(remote: str) -> None:
    # The client itself would go on trying for minutes.
    server = urlsplit(remote)  # a token may follow the port
    host = server.hostname or ""
    port = server.port or CONNECT_PORT
    try:
        with socket.create_connection((host, port), CONNECT_TIMEOUT_S):
            return
    except OSError as error:
        raise ConfigurationError(
            f"no server of Spark Connect answers at {host}:{port} ({error})",
            fix="start it, or correct SPARK_REMOTE",
        ) from None


def _own_session(settings: Mapping[str, str]) -> SparkSession:
    log4j = Path(__file__).with_name("log4j2.properties")
    user_options = [os.environ.get(JAVA_OPTIONS, ""), settings.get(SPARK_JAVA_OPTIONS, "")]
    is_small = (os.cpu_count() or 1) <= _FEW_CORES
    is_given = _COLLECTOR.search(" ".join(user_options))
    collector = ["-XX:+UseSerialGC"] if is_small and not is_given else []
    # The user's options come last, and so win. But of two collectors, Java takes neither.
    options = [
        f"-Dlog4j2.configurationFile={log4j.as_uri()}",
        *_OWN_JAVA_OPTIONS,
        *map(shlex.quote, java_options()),
        *collector,
        *user_options,
    ]
    own = {
        **_OWN_SETTINGS,
        "spark.jars": ",".join(map(str, jars(SPARK))),
        # Hadoop gives files its own permissions, whatever the process has.
        "spark.hadoop.fs.permissions.umask-mode": f"{umask():03o}",
    }
    used = {**own, **settings, SPARK_JAVA_OPTIONS: " ".join(filter(None, options))}
    # For Spark's Python workers, which start in the current folder.
    os.environ.setdefault(*SAFE_PATH)
    start_jvm(used)  # first: a session that starts one puts its settings on the command line
    builder = SparkSession.builder
    for name, value in used.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def _copy_of(given: SparkSession) -> SparkSession:
    # Spark runs each stream in a copy of the session, and hands it to foreachBatch: so this is that
    # of a stream of one batch. (Spark Connect, where that runs on the server, has a call of its
    # own.)
    check_session(given)
    if is_remote():
        copy = cast(Any, given).cloneSession()
        # A clone of pyspark 4.2 lacks it, and then cannot be stopped.
        copy.release_session_on_close = True
        return cast(SparkSession, copy)
    sessions: list[SparkSession] = []
    stream_one_batch(given, lambda batch: sessions.append(batch.sparkSession))
    return sessions[0]


def stream_one_batch(spark: SparkSession, function: Callable[[DataFrame], object]) -> None:
    """Call a function with the one batch of a stream, which has a copy of the session."""

    def call(batch: DataFrame, _: int) -> None:
        function(batch)

    with tempfile.TemporaryDirectory(prefix="watersmeet-", ignore_cleanup_errors=True) as folder:
        stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
        query = (
            stream.writeStream.foreachBatch(call)
            .trigger(availableNow=True)
            .option("checkpointLocation", hadoop_path(folder))
            .start()
        )
        query.awaitTermination()


def umask() -> int:
    """Return the umask of this process, which the system only tells by setting another one.

    For that moment the files of other threads are for their user alone.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
