"""Check 6: the sink is silver's finished, valid records: in order, numbered without a gap, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame, Row, Window
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.kafka import Cluster, co_partitioned, spark_options
from pipelines.adapters.lake import Lake
from pipelines.audit.validate import Problem
from pipelines.audit.verify_evidence import Evidence, Findings, first_of, read
from pipelines.core.sequence import ID, SEQ
from pipelines.settings import Settings
from pipelines.transforms.message import message_value
from pipelines.transforms.ranges import by_partition

REFILL = "name a new topic in publish.topic: gold fills it from silver"

_PLACE = ("event_time", "merge_key")

Place = tuple[int, str]
"""Event time (ms) and key: what the sequence is ordered by. Keys compare as UTF-8 here, as Spark compares strings."""


@dataclass(frozen=True)
class Sink:
    """The sink topic up to where it ended when it was looked at, and by partition the last number that `published` had before."""

    messages: DataFrame | None
    bounds: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    noted: Mapping[int, int] = field(default_factory=dict)
    name: str = ""
    """The topic and Kafka's identity of it, as `published` has it: a topic made again begins anew."""


def read_sink(lake: Lake, settings: Settings, counts: Mapping[str, int]) -> Sink:
    """The sink as it is now; without messages where gold has not made it yet."""
    topic = settings.publish.topic
    if topic not in counts:
        return Sink(None)
    name = sink_name(settings)
    published = read(lake, tables.PUBLISHED).where(F.col("sink") == name)
    noted: dict[int, int] = dict(published.groupBy("partition").agg(F.max("last_seq")).collect())
    bounds = Cluster(settings.kafka).bounds(topic, co_partitioned(settings, counts))
    filled = {str(p): (first, end) for p, (first, end) in bounds.items() if first < end}
    if not filled:
        return Sink(None, bounds, noted, name)
    messages = (
        lake.spark.read.format("kafka")
        .options(**spark_options(settings.kafka))
        .option("assign", json.dumps({topic: [int(p) for p in filled]}))
        .option("startingOffsets", json.dumps({topic: {p: first for p, (first, _) in filled.items()}}))
        .option("endingOffsets", json.dumps({topic: {p: end for p, (_, end) in filled.items()}}))
        .option("includeHeaders", "true")
        .load()
    )
    named = F.split(_header(ID), "/", 3)
    rows = messages.select(
        "partition",
        "offset",
        "key",
        "value",
        F.unix_millis("timestamp").alias("timestamp"),
        _header(SEQ).cast("bigint").alias("seq"),
        _header(ID).alias("id"),
        F.get(named, 1).cast("bigint").alias("event_time"),
        F.get(named, 2).alias("merge_key"),
    )
    return Sink(_without_repeats(rows) if settings.publish.delivery == "at_least_once" else rows, bounds, noted, name)


def _header(name: str) -> Column:
    return F.get(F.filter("headers", lambda header: header["key"] == name), 0)["value"].cast("string")


def _without_repeats(messages: DataFrame) -> DataFrame:
    """`at_least_once` may say the same again: that is not told."""
    same = Window.partitionBy("partition", "seq", "id", "key", "value", "timestamp").orderBy("offset")
    return messages.withColumn("time", F.row_number().over(same)).where("time = 1").drop("time")


def sink_name(settings: Settings) -> str:
    """What `published` calls the sink topic that there is now."""
    topic = settings.publish.topic
    return f"{topic} ({Cluster(settings.kafka).topic_ids([topic])[topic]})"


def check_sink(evidence: Evidence, sink: Sink) -> Findings:
    """Along a sink partition, numbers rise by one and places rise; each message is its silver record's, and none is missing up
    to the last.

    Under `at_most_once` a failure may leave a gap. Not compared with silver is what sorts at or before the last message that a
    lost lake left, or that stood before a jump back; and nothing is missing before a reset, after which time began again.
    """
    if sink.messages is None:
        return Findings([])
    delivery = evidence.settings.publish.delivery
    rows = _beside_each_other(evidence, sink.messages).select("*", *_along(sink))
    wrong = F.array(_out_of_sequence(delivery), _unlike_silver(evidence, sink), _cut_off(delivery))
    told = rows.withColumn("wrong", F.explode(F.array_compact(wrong)))

    def describe(row: Row) -> Problem:
        where = f"{evidence.settings.publish.topic}[{row.partition}]"
        record = f"key {row.merge_key!r}, event_time {row.event_time}"
        place = f": {record}" if row.offset is None else f"@{row.offset}" + (f": seq {row.seq}, {record}" if row.is_ours else "")
        names = {**row.asDict(), "differing": " and ".join(row.differing or ())}
        return Problem(_TOLD[row.wrong].format(**names), where + place, REFILL)

    return first_of(told, ["partition", "event_time", "merge_key", "offset", "wrong"], describe)


_TOLD = {
    "foreign": "no watersmeet.seq and watersmeet.id: not ours",
    "repeat": "seq {seq} after {last_seq}: a repeat, or out of order",
    "gap": "seq {seq} after {last_seq}: a gap",
    "disorder": "{id} is not in order of event time and key",
    "unknown": "silver has no such finished and valid record",
    "missing": "silver's record is missing in the sink, which has later ones",
    "different": "{differing} not as silver's record has it",
    "cut off": "the last message has seq {seq}, and {noted_seq} was published",
}


def _beside_each_other(evidence: Evidence, messages: DataFrame) -> DataFrame:
    """Messages and silver's finished, valid records by partition, event time and key, in one row where both are there.

    Out: partition, event_time, merge_key, offset (null: no message), seq, id, is_ours, has_row, and the names of the columns
    that are `differing`.
    """
    silver = evidence.silver.where("status = 'timed_out' AND valid")
    value = message_value(silver.schema, evidence.settings.publish, list(evidence.settings.sources)).cast("binary")
    time = F.unix_millis("event_time")
    expected = F.struct(
        F.col("merge_key").cast("binary").alias("key"),
        value.alias("value"),
        F.greatest(time, F.lit(1)).alias("timestamp"),
        F.concat_ws("/", "partition", time, "merge_key").alias("id"),
    )
    records = silver.select("partition", time.alias("event_time"), "merge_key", expected.alias("expected"))
    joined = messages.join(records, ["partition", "event_time", "merge_key"], "full_outer")
    differing = [F.when(~F.col(name).eqNullSafe(F.col(f"expected.{name}")), name) for name in ("key", "value", "timestamp", "id")]
    return joined.select(
        *["partition", "event_time", "merge_key", "offset", "seq", "id"],
        (F.col("seq").isNotNull() & F.col("event_time").isNotNull() & F.col("merge_key").isNotNull()).alias("is_ours"),
        F.col("expected.id").isNotNull().alias("has_row"),
        F.array_compact(F.array(*differing)).alias("differing"),
    )


def _along(sink: Sink) -> list[Column]:
    """What a row must know of its sink partition: `last_seq` and `last_place` before it, and the partition's `first` and `last`
    place and last `end`; `noted_seq` is what was published by `published`'s word.
    """
    whole = Window.partitionBy("partition")
    before = whole.orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
    place = F.when(F.col("offset").isNotNull() & F.col("is_ours"), F.struct("event_time", "merge_key"))
    # The first message of a partition from which nothing was deleted has number 0.
    start = by_partition({p: -1 for p, (first, _) in sink.bounds.items() if first == 0})
    return [
        F.coalesce(F.max("seq").over(before), start).alias("last_seq"),
        F.max(place).over(before).alias("last_place"),
        F.min(place).over(whole).alias("first"),
        F.max(place).over(whole).alias("last"),
        F.max(F.when(F.col("is_ours"), F.col("offset"))).over(whole).alias("end"),
        by_partition(sink.noted).alias("noted_seq"),
    ]


def _out_of_sequence(delivery: str) -> Column:
    seq = F.col("seq")
    wrong = F.when(~F.col("is_ours"), "foreign").when(seq <= F.col("last_seq"), "repeat")
    if delivery != "at_most_once":
        wrong = wrong.when(seq > F.col("last_seq") + 1, "gap")
    return F.when(F.col("offset").isNotNull(), wrong.when(F.struct(*_PLACE) <= F.col("last_place"), "disorder"))


def _unlike_silver(evidence: Evidence, sink: Sink) -> Column:
    place, is_there, has_row = F.struct(*_PLACE), F.col("offset").isNotNull(), F.col("has_row")
    is_compared = _is_after(place, _latest(_before_recovery(evidence), _before_resets(evidence, sink, only_back=True)))
    begun = [p for p, (first, _) in sink.bounds.items() if first > 0]  # there retention has deleted messages
    is_due = (
        F.lit(evidence.settings.publish.delivery != "at_most_once")
        & _is_after(place, _before_resets(evidence, sink, only_back=False))
        & (~F.col("partition").isin(begun) | (place > F.col("first")))
        & (place < F.col("last"))
    )
    wrong = (
        F.when(is_there & F.col("is_ours") & ~has_row, "unknown")
        .when(has_row & ~is_there & is_due, "missing")
        .when(is_there & has_row & (F.size("differing") > 0), "different")
    )
    return F.when(is_compared, wrong)


def _cut_off(delivery: str) -> Column:
    """What `published` notes is in the sink, unless it was noted before it was sent (`at_most_once`)."""
    if delivery == "at_most_once":
        return F.lit(None).cast("string")
    return F.when((F.col("offset") == F.col("end")) & (F.col("seq") < F.col("noted_seq")), "cut off")


def _before_recovery(evidence: Evidence) -> dict[int, Place]:
    """By partition the last place in the sink that a lost lake left."""
    recovered = evidence.read(tables.RECOVERED).where("merge_key IS NOT NULL")
    last = F.max(F.struct(F.unix_millis("event_time"), "merge_key"))
    return {row[0]: (row[1][0], row[1][1]) for row in recovered.groupBy("partition").agg(last).collect()}


def _before_resets(evidence: Evidence, sink: Sink, *, only_back: bool) -> dict[int, Place]:
    """By partition the last place that was published before a reset, or before one that jumped back there."""
    places: dict[int, Place] = {}
    last = F.max_by(F.struct(F.unix_millis("last_event_time"), "last_key"), "last_seq")
    for before, reset in zip(evidence.stretches, evidence.resets, strict=False):
        back = {tp.partition for tp, offset in reset.begin.items() if offset < before.until.get(tp, 0)}
        published = evidence.read(tables.PUBLISHED).where(
            (F.col("sink") == sink.name) & (F.unix_micros("committed_at") <= reset.committed_at)
        )
        for partition, (time, key) in published.groupBy("partition").agg(last).collect():
            if partition in back or not only_back:
                places = _latest(places, {partition: (time, key)})
    return places


def _latest(*places: Mapping[int, Place]) -> dict[int, Place]:
    latest: dict[int, Place] = {}
    for partition, place in [item for each in places for item in each.items()]:
        latest[partition] = max(place, latest.get(partition, place), key=lambda p: (p[0], p[1].encode()))
    return latest


def _is_after(place: Column, places: Mapping[int, tuple[int, str]]) -> Column:
    """Whether a row's place is after that of its partition; true where there is none."""
    return F.coalesce(place > _of_partition(places), F.lit(True))


def _of_partition(places: Mapping[int, tuple[int, str]]) -> Column:
    time, key = by_partition({p: at[0] for p, at in places.items()}), by_partition({p: at[1] for p, at in places.items()})
    both = F.struct(time.alias("event_time"), key.cast("string").alias("merge_key"))
    return F.when(time.isNotNull(), both)
