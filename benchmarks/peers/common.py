"""What the peers on Spark share: their arguments, a session, and the topics as one stream."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from benchmarks.peers import FETCH, JARS, RUNS_ON

TIMEOUT_MS = 600_000

_SETTINGS = {
    "spark.master": "local[*]",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.driver.extraJavaOptions": "-Duser.timezone=UTC -XX:-UsePerfData",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}


def peer_session(settings: Mapping[str, str] | None = None) -> SparkSession:
    """A local session with Delta Lake and Spark's own Kafka source, these settings, and none of
    Watersmeet's."""
    jars = [jar for name in ("spark", "benchmarks") for jar in sorted((JARS / name).glob("*.jar"))]
    if not any(jar.name.startswith("spark-sql-kafka") for jar in jars):
        sys.exit(f"Spark's Kafka source is missing: {FETCH}")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.config("spark.jars", ",".join(map(str, jars)))
    for name, value in {**_SETTINGS, **(settings or {})}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def arguments() -> tuple[str, Path, int, int | None]:
    """Where Kafka is, a folder for tables and checkpoints, the number of partitions, and the
    timeout (ms) of a program that runs on and on."""
    bootstrap_servers, folder, partitions, *timeout_ms = sys.argv[1:]
    return (
        bootstrap_servers,
        Path(folder),
        int(partitions),
        int(timeout_ms[0]) if timeout_ms else None,
    )


def kafka_stream(
    spark: SparkSession, bootstrap_servers: str, offsets_per_batch: int | None = None
) -> DataFrame:
    """Both topics from their beginning on, as Spark's Kafka source gives them; all that is there in
    one batch, unless that is bounded."""
    options = {
        "kafka.bootstrap.servers": bootstrap_servers,
        "subscribe": "tracking,orders",
        "startingOffsets": "earliest",
    }
    if offsets_per_batch is not None:
        options["maxOffsetsPerTrigger"] = str(offsets_per_batch)
    return spark.readStream.format("kafka").options(**options).load()


def parsed(kafka: DataFrame, *names: str) -> DataFrame:
    """topic, value (its text), ssid (null in a heartbeat), ts (ms), and the named columns of
    Kafka's."""
    fields = F.from_json("text", "ssid STRING, ts BIGINT")
    text = kafka.select("topic", F.col("value").cast("string").alias("text"), *names)
    return text.select("topic", F.col("text").alias("value"), fields.alias("f"), *names).select(
        "topic", "value", "f.ssid", "f.ts", *names
    )


def joined_values(parts: str) -> Column:
    """The values of an array of (ts, value), in order, as the inside of a JSON array."""
    return F.array_join(F.transform(F.array_sort(parts), lambda part: part["value"]), ",")


def run(writer: DataStreamWriter, folder: Path) -> None:
    """Everything available now goes through the stream; returns at its end."""
    _kept(writer, folder).trigger(availableNow=True).start().awaitTermination()


def run_on(writer: DataStreamWriter, folder: Path) -> None:
    """Everything goes through the stream as it comes; returns at a SIGTERM, after what has come by
    then."""
    is_over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    query = _kept(writer, folder).start()
    print(RUNS_ON, flush=True)
    while not is_over.is_set():
        query.awaitTermination(1)
    query.processAllAvailable()
    query.stop()


def _kept(writer: DataStreamWriter, folder: Path) -> DataStreamWriter:
    return writer.option("checkpointLocation", str(folder / "checkpoint"))
