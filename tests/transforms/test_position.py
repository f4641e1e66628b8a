from __future__ import annotations

import random
from itertools import accumulate

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipelines.core.plan import TopicPartition
from pipelines.transforms.position import split_late, with_position
from tests.support.cases import SOURCES

T = 100
Log = dict[TopicPartition, list[tuple[int, int]]]
"""Per topic-partition the offsets and event times of its records, in order."""


def random_log(seed: int) -> Log:
    """Two sources with 20 partitions each: disorder, ties, holes between offsets; some have no record."""
    rng = random.Random(seed)
    log: Log = {}
    for source in SOURCES:
        for partition in range(20):
            offsets = sorted(rng.sample(range(100), rng.choice([0, 1, 5, 12])))
            log[TopicPartition(source, partition)] = [(offset, rng.randint(0, 5) * 100) for offset in offsets]
    return log


def positions(log: Log, floors: dict[TopicPartition, int | None]) -> dict[tuple[str, int, int], int]:
    """The definition, in plain Python."""
    found = {}
    for tp, records in log.items():
        floor = floors[tp]
        running = accumulate((t for _, t in records), max)
        for (offset, _), position in zip(records, running, strict=True):
            found[tp.source, tp.partition, offset] = position if floor is None else max(position, floor)
    return found


def frame(spark: SparkSession, log: Log) -> DataFrame:
    rows = [(*tp, offset, t, offset % 3 == 0) for tp, records in log.items() for offset, t in records]
    random.Random(1).shuffle(rows)
    records = spark.createDataFrame(rows, "source STRING, partition INT, offset BIGINT, t BIGINT, heartbeat BOOLEAN")
    return records.withColumn("event_time", F.timestamp_millis("t")).drop("t").withColumn("is_idle", F.lit(False)).repartition(3)


def found_positions(positioned: DataFrame) -> dict[tuple[str, int, int], int]:
    rows = positioned.select("source", "partition", "offset", F.unix_millis("position")).collect()
    return {(source, partition, offset): position for source, partition, offset, position in rows}


def test_a_position_is_the_largest_event_time_so_far_of_its_topic_partition(spark: SparkSession) -> None:
    log = random_log(1)
    floors = {tp: [None, 0, 250, 10_000][i % 4] for i, tp in enumerate(log)}
    records = frame(spark, log)
    positioned = records.transform(with_position(floors))
    assert positioned.columns == [*records.columns, "position"]
    assert positioned.schema["position"].dataType.simpleString() == "timestamp"
    found = found_positions(positioned)
    assert found == positions(log, floors)
    assert len(found) == sum(len(records) for records in log.values())


def test_no_cut_into_batches_changes_a_position(spark: SparkSession) -> None:
    log = random_log(2)
    first = {tp: records[: len(records) // 2] for tp, records in log.items()}
    second = {tp: records[len(records) // 2 :] for tp, records in log.items()}
    begun: dict[TopicPartition, int | None] = dict.fromkeys(log)
    before = found_positions(frame(spark, first).transform(with_position(begun)))
    committed: dict[TopicPartition, int | None] = {
        tp: max((w for (*place, _), w in before.items() if tuple(place) == tp), default=None) for tp in log
    }
    after = found_positions(frame(spark, second).transform(with_position(committed)))
    assert before | after == positions(log, begun)


@pytest.fixture
def positioned(spark: SparkSession) -> DataFrame:
    rows = [
        ("exactly at the limit", False, 1000 - T, 1000),
        ("one ms beyond it", False, 1000 - T - 1, 1000),
        ("sets its position itself", False, 1000, 1000),
        ("at the beginning of time", False, 0, T),
        ("a heartbeat of long ago", True, 0, 1000),
        ("a heartbeat of now", True, 1000, 1000),
        ("an open row", False, None, None),
    ]
    records = spark.createDataFrame(rows, "name STRING, heartbeat BOOLEAN, t BIGINT, w BIGINT")
    return records.withColumns({"event_time": F.timestamp_millis("t"), "position": F.timestamp_millis("w")})


def test_a_record_is_late_beyond_the_timeout_and_a_heartbeat_goes_no_further(positioned: DataFrame) -> None:
    split = split_late(T)(positioned)
    assert split.on_time.columns == split.late.columns == positioned.columns
    assert {row.name for row in split.late.collect()} == {"one ms beyond it"}
    assert {row.name for row in split.on_time.collect()} == {
        "exactly at the limit",
        "sets its position itself",
        "at the beginning of time",
        "an open row",
    }
