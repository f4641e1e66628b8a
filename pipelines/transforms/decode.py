"""Kafka rows in, bronze rows out: each with what the merge needs to plan, or with the reason why it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf

from pipelines.core.reading import Reading, ReadingRules, reader

_READING = "merge_key string, event_time_ms bigint, heartbeat boolean, reason string, detail string"
_ARROW_READING = pa.struct(
    [
        ("merge_key", pa.string()),
        ("event_time_ms", pa.int64()),
        ("heartbeat", pa.bool_()),
        ("reason", pa.string()),
        ("detail", pa.string()),
    ]
)


def decode(rules: ReadingRules) -> Callable[[DataFrame], DataFrame]:
    """Every Kafka row becomes one bronze row, whatever its bytes.

    In: topic, partition, offset, timestamp, timestampType, key, value, headers (Spark's Kafka source).
    Out: the columns of `bronze_<source>`; `merge_key`, `event_time` and `heartbeat` say nothing where `reason` is set.
    """

    def decoded(kafka: DataFrame) -> DataFrame:
        read = _read_udf(rules)(F.col("key"), F.col("value"), F.unix_millis("timestamp"))
        return kafka.withColumn("reading", read).select(
            "topic",
            "partition",
            "offset",
            F.col("timestamp").alias("kafka_timestamp"),
            F.col("timestampType").alias("timestamp_type"),
            "key",
            "value",
            "headers",
            "reading.merge_key",
            F.timestamp_millis("reading.event_time_ms").alias("event_time"),
            "reading.heartbeat",
            "reading.reason",
            "reading.detail",
        )

    return decoded


def _read_udf(rules: ReadingRules) -> Callable[..., Column]:
    """`reader(rules)` over Arrow batches; one reader (and one compiled schema) per task."""

    def read_batches(batches: Iterator[tuple[pa.Array, pa.Array, pa.Array]]) -> Iterator[pa.Array]:
        read = reader(rules)
        for keys, values, timestamps in batches:
            readings = map(read, keys.to_pylist(), values.to_pylist(), timestamps.to_pylist())
            columns = list(zip(*readings, strict=True)) or [()] * len(Reading._fields)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _ARROW_READING, strict=True)]
            yield pa.StructArray.from_arrays(arrays, fields=list(_ARROW_READING))

    udf: Callable[..., Column] = arrow_udf(read_batches, _READING)  # type: ignore[call-overload]
    return udf
