"""Positions: the running maximum of event time along a topic-partition, and the two things that follow from it."""

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

    In: source, partition, offset, event_time of *every* record of the batch's ranges that has a time, heartbeats too.
    Out: the same and `position` (timestamp). `positions_before`: the running maximum (ms) at the start of each range.
    """
    running = F.max("event_time").over(
        Window.partitionBy("partition", "source").orderBy("offset").rowsBetween(Window.unboundedPreceding, 0)
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
