"""What the peers share: their arguments, the topics as one stream, and the topic that they write to."""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.readwriter import DataStreamWriter

from pipelines.adapters.kafka import Cluster
from pipelines.settings import KafkaSettings

TIMEOUT_MS = 600_000


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
    return text.select("topic", F.col("text").alias("value"), fields.alias("f")).select("topic", "value", "f.ssid", "f.ts")


def joined_values(parts: str) -> Column:
    """The values of an array of (ts, value), in order, as the inside of a JSON array."""
    return F.array_join(F.transform(F.array_sort(parts), lambda part: part["value"]), ",")


def make_topic(bootstrap_servers: str, topic: str, partitions: int) -> None:
    """The topic exists afterwards, and keeps what is written to it."""
    Cluster(KafkaSettings(bootstrap_servers=bootstrap_servers)).create_topic(topic, partitions, {"retention.ms": "-1"})


def run(writer: DataStreamWriter, folder: Path) -> None:
    """Everything available now goes through the stream; returns at its end."""
    checkpoint = str(folder / "checkpoint")
    writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
