"""What the peers share: their arguments, the topics as one stream, and the topic that they write
to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from pipelines.kafka.cluster import Cluster
from pipelines.settings import KafkaSettings

TIMEOUT_MS = 600_000

JARS = Path(sys.prefix, "jars")
"""Where `bin/fetch-jars` puts Delta Lake (`spark`), and Spark's own Kafka source (`benchmarks`)."""

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


def peer_session() -> SparkSession:
    """A local session with Delta Lake and Spark's own Kafka source, and none of Watersmeet's
    settings."""
    jars = [jar for name in ("spark", "benchmarks") for jar in sorted((JARS / name).glob("*.jar"))]
    if not any(jar.name.startswith("spark-sql-kafka") for jar in jars):
        sys.exit(
            "Spark's Kafka source is missing: run `make bench`, or `python bin/fetch-jars "
            "benchmarks/ivy.xml`"
        )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.config("spark.jars", ",".join(map(str, jars)))
    for name, value in _SETTINGS.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def arguments() -> tuple[str, Path, int]:
    """Where Kafka is, a folder for tables and checkpoints, and the number of partitions."""
    bootstrap_servers, folder, partitions = sys.argv[1:]
    return bootstrap_servers, Path(folder), int(partitions)


def kafka_stream(spark: SparkSession, bootstrap_servers: str, offsets_per_batch: int) -> DataFrame:
    """Both topics from their beginning on, as Spark's Kafka source gives them."""
    return (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", bootstrap_servers)
        .option("subscribe", "tracking,orders")
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", offsets_per_batch)
        .load()
    )


def parsed(kafka: DataFrame) -> DataFrame:
    """topic, value (its text), ssid (null in a heartbeat) and ts (ms)."""
    fields = F.from_json("text", "ssid STRING, ts BIGINT")
    text = kafka.select("topic", F.col("value").cast("string").alias("text"))
    return text.select("topic", F.col("text").alias("value"), fields.alias("f")).select(
        "topic", "value", "f.ssid", "f.ts"
    )


def joined_values(parts: str) -> Column:
    """The values of an array of (ts, value), in order, as the inside of a JSON array."""
    return F.array_join(F.transform(F.array_sort(parts), lambda part: part["value"]), ",")


def make_topic(bootstrap_servers: str, topic: str, partitions: int) -> None:
    """The topic exists afterwards, and keeps what is written to it."""
    Cluster(KafkaSettings(bootstrap_servers=bootstrap_servers)).create_topic(
        topic, partitions, {"retention.ms": "-1"}
    )


def run(writer: DataStreamWriter, folder: Path) -> None:
    """Everything available now goes through the stream; returns at its end."""
    checkpoint = str(folder / "checkpoint")
    writer.option("checkpointLocation", checkpoint).trigger(
        availableNow=True
    ).start().awaitTermination()
