"""The merge as people write it by hand, tuned as the books say: one query over both topics, whose
foreachBatch appends to a bronze table, and merges into a target with Delta's MERGE.

Large batches, one row per key before MERGE, a target with deletion vectors whose open rows are a
partition of their own, small files compacted by Delta itself, adaptive execution, few shuffle
partitions. A row is closed, and published, once its event time is older than the largest event time
seen by more than the timeout. That is not exact (one clock for all partitions, whatever their order
of arrival), not ordered, and at least once.
"""

from __future__ import annotations

from delta.tables import DeltaTable
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from benchmarks.peers.common import (
    TIMEOUT_MS,
    arguments,
    joined_values,
    kafka_stream,
    parsed,
    peer_session,
    run,
    run_on,
)

TOPIC = "merged_by_merge_job"
OFFSETS_PER_BATCH = 250_000
_SETTINGS = {
    "spark.sql.adaptive.enabled": "true",
    # A batch generates more classes than the hundred that Spark keeps.
    "spark.sql.codegen.cache.maxEntries": "3000",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.databricks.delta.autoCompact.enabled": "true",
}
_BRONZE = ("topic", "partition", "offset", "timestamp", "value")
_PARTS = "ARRAY<STRUCT<ts: BIGINT, value: STRING>>"
_COLUMNS = (
    f"ssid STRING, status STRING, event_time BIGINT, last_event_time BIGINT, tracking {_PARTS}, "
    f"orders {_PARTS}"
)
_MESSAGE = '{"key":"%s","event_time":%d,"last_event_time":%d,"tracking":[%s],"orders":[%s]}'


def main() -> None:
    """Merges everything available, and ends; with a timeout, merges whatever comes until it is
    ended."""
    bootstrap_servers, folder, partitions, timeout_ms = arguments()
    spark = peer_session(_SETTINGS | {"spark.sql.shuffle.partitions": str(partitions)})
    bronze, path = str(folder / "bronze"), str(folder / "target")
    properties = "TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')"
    spark.sql(
        f"CREATE TABLE delta.`{path}` ({_COLUMNS}) USING delta PARTITIONED BY (status) {properties}"
    )
    largest = 0

    def merge(batch: DataFrame, _: int) -> None:
        nonlocal largest
        batch = batch.persist()
        try:
            batch.select(*_BRONZE).write.format("delta").mode("append").save(bronze)
            largest = max(largest, batch.agg(F.max("ts")).collect()[0][0] or 0)
            target = DeltaTable.forPath(spark, path)
            _merge(target, _folded(batch.where("ssid IS NOT NULL")))
        finally:
            batch.unpersist()
        is_over = f"status = 'open' AND event_time < {largest - (timeout_ms or TIMEOUT_MS)}"
        _publish(spark.read.format("delta").load(path).where(is_over), bootstrap_servers)
        target.update(is_over, {"status": F.lit("closed")})

    kafka = kafka_stream(spark, bootstrap_servers, OFFSETS_PER_BATCH)
    records = parsed(kafka, "partition", "offset", "timestamp")
    (run if timeout_ms is None else run_on)(records.writeStream.foreachBatch(merge), folder)
    spark.stop()


def _folded(records: DataFrame) -> DataFrame:
    """One row per key: MERGE may not meet a key twice."""
    part = F.struct("ts", "value")
    arrays = [
        F.collect_list(F.when(F.col("topic") == topic, part)).alias(topic)
        for topic in ("tracking", "orders")
    ]
    return records.groupBy("ssid").agg(
        F.min("ts").alias("event_time"), F.max("ts").alias("last_event_time"), *arrays
    )


def _merge(target: DeltaTable, folded: DataFrame) -> None:
    names = ("ssid", "event_time", "last_event_time", "tracking", "orders")
    joined: dict[str, str | Column] = {
        "event_time": F.expr("least(t.event_time, s.event_time)"),
        "last_event_time": F.expr("greatest(t.last_event_time, s.last_event_time)"),
        "tracking": F.expr("concat(t.tracking, s.tracking)"),
        "orders": F.expr("concat(t.orders, s.orders)"),
    }
    merge = (
        target.alias("t")
        .merge(folded.alias("s"), "t.status = 'open' AND t.ssid = s.ssid")
        .whenMatchedUpdate(set=joined)
    )
    merge.whenNotMatchedInsert(
        values={"status": F.lit("open"), **{name: F.col(f"s.{name}") for name in names}}
    ).execute()


def _publish(closed: DataFrame, bootstrap_servers: str) -> None:
    values = [joined_values(topic) for topic in ("tracking", "orders")]
    message = F.format_string(_MESSAGE, "ssid", "event_time", "last_event_time", *values)
    messages = closed.select(F.col("ssid").alias("key"), message.alias("value"))
    messages.write.format("kafka").option("kafka.bootstrap.servers", bootstrap_servers).option(
        "topic", TOPIC
    ).save()


if __name__ == "__main__":
    main()
