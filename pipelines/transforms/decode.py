"""Kafka rows in, bronze rows out: each with what the merge needs to plan, or with the reason why it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import overload

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.functions import arrow_udf
from pyspark.sql.types import ArrayType, DataType, DecimalType, LongType, StructField, StructType

from pipelines.core.reading import Reader, Reading, ReadingRules, reader

_OF_KAFKA = {
    "topic": "topic",
    "partition": "partition",
    "offset": "offset",
    "kafka_timestamp": "timestamp",
    "timestamp_type": "timestampType",
    "key": "key",
    "value": "value",
    "headers": "headers",
}
"""Bronze's columns that come as they are, and what Spark's Kafka source calls them."""

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
            *[F.col(name).alias(column) for column, name in _OF_KAFKA.items()],
            "reading.merge_key",
            F.timestamp_millis("reading.event_time_ms").alias("event_time"),
            "reading.heartbeat",
            "reading.reason",
            "reading.detail",
        )

    return decoded


def decode_fetched(rules: ReadingRules) -> Callable[[pa.Table], pa.Table]:
    """The same for rows that the driver has fetched."""
    read = reader(rules)

    def decoded(kafka: pa.Table) -> pa.Table:
        times_ms = pc.divide(kafka["timestamp"].cast(pa.int64()), 1000)
        reading = _readings(read, kafka["key"], kafka["value"], times_ms)
        merge_key, event_time_ms, heartbeat, *refused = reading.flatten()
        event_time = pc.multiply(event_time_ms, 1000).cast(kafka["timestamp"].type)
        columns = [*(kafka[name] for name in _OF_KAFKA.values()), merge_key, event_time, heartbeat, *refused]
        return pa.table(columns, [*_OF_KAFKA, "merge_key", "event_time", "heartbeat", "reason", "detail"])

    return decoded


def parsed_value(value: Column, value_type: str) -> Column:
    """A value (binary) that was read and not refused, as silver keeps it: its JSON text, or the schema's struct.

    FAILFAST: only values that fit come here, so one that does not is our own defect, and stops the batch before it vanishes.
    """
    text, kept = value.cast("string"), DataType.fromDDL(value_type)
    if not isinstance(kept, StructType):
        return text
    return F.from_json(text, _with_decimals(kept), {"mode": "FAILFAST"}).cast(kept)


def value_sql(value: str, value_type: str) -> str:
    """The same in SQL."""
    text, kept = f"CAST({value} AS STRING)", DataType.fromDDL(value_type)
    if not isinstance(kept, StructType):
        return text
    schema = _ddl(_with_decimals(kept)).replace("\\", "\\\\").replace("'", "\\'")
    return f"CAST(FROM_JSON({text}, '{schema}', MAP('mode', 'FAILFAST')) AS {value_type})"


def _ddl(data_type: DataType) -> str:
    """As SQL writes the type, whatever the names of its fields are."""
    if isinstance(data_type, StructType):
        fields = [f"`{f.name.replace('`', '``')}`: {_ddl(f.dataType)}" for f in data_type.fields]
        return f"STRUCT<{', '.join(fields)}>"
    return f"ARRAY<{_ddl(data_type.elementType)}>" if isinstance(data_type, ArrayType) else data_type.simpleString()


@overload
def _with_decimals(data_type: StructType) -> StructType: ...
@overload
def _with_decimals(data_type: DataType) -> DataType: ...
def _with_decimals(data_type: DataType) -> DataType:
    """JSON Schema calls 1.0 and 1e3 integers, which Spark reads as a decimal only; the schema's bounds make the cast exact."""
    if isinstance(data_type, StructType):
        return StructType([StructField(f.name, _with_decimals(f.dataType)) for f in data_type.fields])
    if isinstance(data_type, ArrayType):
        return ArrayType(_with_decimals(data_type.elementType))
    return DecimalType(19, 0) if isinstance(data_type, LongType) else data_type


def _read_udf(rules: ReadingRules) -> Callable[..., Column]:
    """`reader(rules)` over Arrow batches; one reader (and one compiled schema) per task."""

    def read_batches(batches: Iterator[tuple[pa.Array, pa.Array, pa.Array]]) -> Iterator[pa.Array]:
        read = reader(rules)
        for batch in batches:
            yield _readings(read, *batch)

    udf: Callable[..., Column] = arrow_udf(read_batches, _READING)  # type: ignore[call-overload]
    return udf


def _readings(read: Reader, keys: pa.Array, values: pa.Array, times_ms: pa.Array) -> pa.StructArray:
    readings = map(read, keys.to_pylist(), values.to_pylist(), times_ms.to_pylist())
    columns = list(zip(*readings, strict=True)) or [()] * len(Reading._fields)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _ARROW_READING, strict=True)]
    return pa.StructArray.from_arrays(arrays, fields=list(_ARROW_READING))
