"""The fold: one batch's records and the open rows in, silver's rows after it out. Join, open and time-out are decided here.

Per key, records are taken in order of position. The open row's event time `E` decides for each: join while
`E >= position - timeout` (and `E` becomes the smaller of the two), else open anew. Records of one position always end in
the same merge record, so the cuts between merge records are positions, and parts are dealt out by comparing with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipelines.transforms.ranges import by_partition


def union_with_open(open_rows: DataFrame, sources: Sequence[str]) -> Callable[[DataFrame], DataFrame]:
    """Records and open rows side by side, so that one exchange by partition serves position and fold together.

    In: records (source, partition, offset, merge_key, heartbeat, event_time, value_<source> ...) and silver's open rows.
    Out: the records' columns, and for open rows: source null, open_event_time, open_batch, open_<source> (their parts).
    """
    narrow = open_rows.select(
        "partition",
        "merge_key",
        F.lit(False).alias("heartbeat"),
        F.col("event_time").alias("open_event_time"),
        F.col("batch").alias("open_batch"),
        *[F.col(source).alias(f"open_{source}") for source in sources],
    )

    def union(records: DataFrame) -> DataFrame:
        return records.unionByName(narrow, allowMissingColumns=True)

    return union


def fold(sources: Sequence[str], timeout_ms: int, clocks: Mapping[int, int], batch: int) -> Callable[[DataFrame], DataFrame]:
    """The rows that this batch changes, each once, as the merge rules have them; and the open rows that it leaves as they are.

    In: positioned on-time records and open rows (see `union_with_open`), all of a partition in one task.
    Out: partition, merge_key, status, event_time, last_event_time, one array per source, `batch` (this one where the batch
    changes the row, else the open row's own), and `updates_open` (boolean: the row replaces the key's open row; else it is
    new). `clocks`: the batch's clock (ms) per partition.
    """

    def folded(rows: DataFrame) -> DataFrame:
        columns = _columns(tuple(sources), timeout_ms)
        is_timed_out = F.unix_millis("event_time") < by_partition(clocks) - timeout_ms
        is_changed = F.col("touched") | F.coalesce(is_timed_out, F.lit(False))
        status = F.when(is_timed_out, "timed_out").otherwise("open").alias("status")
        of_batch = F.when(is_changed, F.lit(batch).cast("bigint")).otherwise(F.col("open_batch")).alias("batch")
        return (
            rows.groupBy("partition", "merge_key")
            .agg(*columns.of_key)
            .select("*", columns.stretches)
            .select("*", columns.each_stretch)
            .select(*columns.of_row)
            .select("*", *columns.times)
            .select("partition", "merge_key", status, "event_time", "last_event_time", *sources, of_batch, "updates_open")
        )

    return folded


class _Columns(NamedTuple):
    """What the fold computes of its own rows, step by step, whatever the batch."""

    of_key: Sequence[Column]
    stretches: Column
    each_stretch: Column
    of_row: Sequence[Column]
    times: Sequence[Column]


@cache  # a column is hundreds of calls to the JVM
def _columns(sources: tuple[str, ...], timeout_ms: int) -> _Columns:
    # A row is touched where it gains a part; the first stretch of a key may have none.
    touched = reduce(Column.__or__, [F.size(_new_parts(source)) > 0 for source in sources])
    # The first stretch of a key continues its open row, where it has one.
    updates_open = (F.col("index") == 0) & F.col("open_event_time").isNotNull()
    return _Columns(
        of_key=[
            F.max("open_event_time").alias("open_event_time"),
            F.max("open_batch").alias("open_batch"),
            F.min(F.unix_millis("event_time")).alias("first_time"),
            F.max(F.unix_millis("position")).alias("last_position"),
            *[F.first(f"open_{source}", ignorenulls=True).alias(f"open_{source}") for source in sources],
            *[_parts_of(source) for source in sources],
        ],
        stretches=_stretches(sources, timeout_ms).alias("stretches"),
        each_stretch=F.posexplode("stretches").alias("index", "stretch"),
        of_row=[
            F.col("partition"),
            F.col("merge_key"),
            updates_open.alias("updates_open"),
            F.col("open_batch"),
            touched.alias("touched"),
            *[_merged_parts(source, updates_open).alias(source) for source in sources],
        ],
        times=[
            _extreme(F.least, [F.get(source, 0) for source in sources]).alias("event_time"),
            _extreme(F.greatest, [F.get(source, F.size(source) - 1) for source in sources]).alias("last_event_time"),
        ],
    )


def _parts_of(source: str) -> Column:
    """New parts of a key from one source: array<struct<event_time, offset, value, position>>."""
    part = F.struct("event_time", "offset", F.col(f"value_{source}").alias("value"), "position")
    return F.collect_list(F.when(F.col("source") == source, part)).alias(f"new_{source}")


def _stretches(sources: Sequence[str], timeout_ms: int) -> Column:
    """One stretch of positions `[since, until)` per merge record of the key (null: unbounded), in order.

    Nearly every key has one stretch, known without looking at its parts: where even the last position is within the
    timeout of the first event time, no record can open anew.
    """
    open_time = F.unix_millis("open_event_time")
    whole = F.array(_stretch(F.lit(None).cast("bigint"), F.lit(None).cast("bigint")))
    is_whole = F.col("last_position").isNull() | (F.col("last_position") - timeout_ms <= F.least(open_time, F.col("first_time")))
    records = F.array_sort(
        F.concat(
            *[
                F.transform(
                    f"new_{source}",
                    lambda p: F.struct(F.unix_millis(p.position).alias("position"), F.unix_millis(p.event_time).alias("time")),
                )
                for source in sources
            ]
        )
    )
    nothing_yet = F.struct(open_time.alias("time"), F.array().cast("array<bigint>").alias("since"))

    def step(state: Column, record: Column) -> Column:
        joins = state["time"].isNotNull() & (state["time"] >= record["position"] - timeout_ms)
        joined = F.struct(F.least(state["time"], record["time"]).alias("time"), state["since"].alias("since"))
        opened = F.struct(record["time"].alias("time"), F.concat(state["since"], F.array(record["position"])).alias("since"))
        return F.when(joins, joined).otherwise(opened)

    opened_at = F.aggregate(records, nothing_yet, step)["since"]
    with_open_row = F.when(open_time.isNotNull(), F.array(F.lit(None).cast("bigint"))).otherwise(F.array().cast("array<bigint>"))
    since = F.concat(with_open_row, opened_at)
    cut = F.transform(since, lambda at, i: _stretch(at, F.get(since, i + 1)))
    return F.when(is_whole, whole).otherwise(cut)


def _stretch(since: Column, until: Column) -> Column:
    return F.struct(since.alias("since"), until.alias("until"))


def _new_parts(source: str) -> Column:
    """The source's new parts within the row's stretch."""
    since, until = F.col("stretch.since"), F.col("stretch.until")

    def is_within(part: Column) -> Column:
        position = F.unix_millis(part["position"])
        return (since.isNull() | (position >= since)) & (until.isNull() | (position < until))

    everything = since.isNull() & until.isNull()
    return F.when(everything, F.col(f"new_{source}")).otherwise(F.filter(f"new_{source}", is_within))


def _merged_parts(source: str, updates_open: Column) -> Column:
    """Old parts (where the row continues the open one) and new ones, by (event time, offset), as silver stores them."""

    def sortable(parts: Column) -> Column:
        return F.transform(parts, lambda p: F.struct(p["event_time"], p["offset"], p["value"]))

    new = sortable(_new_parts(source))
    both = F.when(updates_open, F.concat(sortable(F.col(f"open_{source}")), new)).otherwise(new)
    return F.transform(F.array_sort(both), lambda p: F.struct(p["offset"], p["event_time"], p["value"]))


def _extreme(pick: Callable[..., Column], parts: Sequence[Column]) -> Column:
    """The smallest or largest event time of some parts; least and greatest pass over nulls."""
    return pick(*[part["event_time"] for part in parts])
