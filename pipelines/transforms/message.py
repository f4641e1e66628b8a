"""Silver rows in, the message of each out; and the last check of a finished row: is it to be published at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, StructType

from pipelines.settings import PublishSettings


def with_validity(publish: PublishSettings, sources: Sequence[str]) -> Callable[[DataFrame], DataFrame]:
    """A finished row is valid where the predicate says true and its message fits; an open row is not judged yet.

    In: silver's content columns. Out: the same, and `valid` (null while open), `invalid_reason`.
    """

    def judged(rows: DataFrame) -> DataFrame:
        is_finished = F.col("status") == "timed_out"
        meets = F.coalesce(F.expr(publish.valid).cast("boolean"), F.lit(False))
        fits = F.coalesce(F.octet_length(message_value(rows.schema, publish, sources)) <= publish.max_bytes, F.lit(True))
        reason = F.when(~meets, "predicate").when(~fits, "too_large")
        return rows.withColumn("invalid_reason", F.when(is_finished, reason)).withColumn(
            "valid", F.when(is_finished, F.col("invalid_reason").isNull())
        )

    return judged


def message_value(silver: StructType, publish: PublishSettings, sources: Sequence[str]) -> Column:
    """The message's value (string or binary, null for a null message): the configured expression, or one JSON object."""
    if publish.value is not None:
        return F.expr(publish.value)
    times = [F.unix_millis(name).alias(name) for name in ("event_time", "last_event_time")]
    head = F.to_json(F.struct(F.col("merge_key").alias("key"), *times))
    pieces: list[Column] = [F.substring(head, F.lit(1), F.char_length(head) - 1)]
    for source in sources:
        pieces += [F.lit(f',"{source}":['), F.array_join(_json_values(silver, source), ","), F.lit("]")]
    return F.concat(*pieces, F.lit("}"))


def _json_values(silver: StructType, source: str) -> Column:
    """Values without a schema are passed on as they came; with one, as its fields, nulls kept."""
    parts = silver[source].dataType
    assert isinstance(parts, ArrayType)
    assert isinstance(parts.elementType, StructType)
    if isinstance(parts.elementType["value"].dataType, StructType):
        return F.transform(source, lambda part: F.to_json(part["value"], {"ignoreNullFields": "false"}))
    return F.transform(source, lambda part: part["value"])
