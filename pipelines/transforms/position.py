"""Positions: the running maximum of event time along a topic-partition, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from pipelines.core.plan import TopicPartition
from pipelines.transforms.ranges import by_partition


class Positioned(NamedTuple):
    """Records that have a key, split by the rule for lateness: each is in one of the two."""

    on_time: DataFrame
    late: DataFrame


def with_position(positions_before: Mapping[TopicPartition, int | None]) -> Callable[[DataFrame], DataFrame]:
    """A position never decreases along a topic-partition, nor from one batch to the next.

    In: source, partition, offset, event_time, is_idle of *every* record of the batch's ranges that has a time, heartbeats too,
    and of the idle policy's heartbeats (`is_idle`), whose offset is that of the record they stand after.
    Out: the same and `position` (timestamp). `positions_before`: the running maximum (ms) at the start of each range.
    """
    running = F.max("event_time").over(
        Window.partitionBy("partition", "source").orderBy("offset", "is_idle").rowsBetween(Window.unboundedPreceding, 0)
    )
    before: dict[str, dict[int, int | None]] = {}
    for tp, ms in positions_before.items():
        before.setdefault(tp.source, {})[tp.partition] = ms
    committed = F.coalesce(*[F.when(F.col("source") == s, by_partition(values)) for s, values in before.items()])

    def positioned(records: DataFrame) -> DataFrame:
        return records.withColumn("position", F.greatest(running, F.timestamp_millis(committed)))

    return positioned


def split_late(timeout_ms: int) -> Callable[[DataFrame], Positioned]:
    """A record is late where `event_time < position - timeout`; a heartbeat never is, and goes no further.

    In: heartbeat, event_time, position. Out: the same rows less the heartbeats, in two frames.
    """

    def split(records: DataFrame) -> Positioned:
        keyed = records.where(~F.col("heartbeat"))
        # An open row among the records has no position of its own, and is not late.
        is_late = F.coalesce(F.unix_millis("event_time") < F.unix_millis("position") - timeout_ms, F.lit(False))
        return Positioned(on_time=keyed.where(~is_late), late=keyed.where(is_late))

    return split


def not_published(recovered: DataFrame | None, timeout_ms: int) -> Callable[[DataFrame], DataFrame]:
    """After the loss of a lake: an on-time record at position w has been published where the sink holds a message of its key
    with `w <= event_time + timeout`; the others pass, and so do open rows.

    In: partition, merge_key, position; `recovered`: partition, merge_key, event_time of the messages read back.
    """

    def unpublished(records: DataFrame) -> DataFrame:
        if recovered is None:
            return records
        held = recovered.select(
            F.col("partition").alias("held_partition"),
            F.col("merge_key").alias("held_key"),
            F.unix_millis("event_time").alias("held"),
        )
        is_published = (
            (F.col("partition") == F.col("held_partition"))
            & (F.col("merge_key") == F.col("held_key"))
            & (F.unix_millis("position") <= F.col("held") + timeout_ms)
        )
        return records.join(F.broadcast(held), is_published, "left_anti")

    return unpublished
