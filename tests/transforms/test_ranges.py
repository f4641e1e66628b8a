from __future__ import annotations

import random
from collections.abc import Mapping

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipelines.transforms.ranges import MAX_TERMS, UNBOUNDED, by_partition, is_within, within

Ranges = dict[int, tuple[int, int | None]]


def random_ranges(count: int, seed: int) -> Ranges:
    """Partitions with holes between them; ranges of every kind: empty, of one offset, without an end."""
    rng = random.Random(seed)
    ranges: Ranges = {}
    for partition in rng.sample(range(2 * count), count):
        since = rng.choice([0, 0, 3, 5, 10**12])
        ranges[partition] = since, rng.choice([None, since, since + 1, since + 4])
    return ranges


def is_inside(ranges: Ranges, partition: int, offset: int) -> bool:
    since, until = ranges.get(partition, (0, 0))
    return since <= offset and (until is None or offset < until)


def test_a_row_is_within_exactly_where_its_partitions_range_says_so(spark: SparkSession) -> None:
    cases: dict[str, Ranges] = {f"random_{n}": random_ranges(n, seed=n) for n in (1, MAX_TERMS, MAX_TERMS + 1, 300)}
    cases |= {"none": {}, "neighbours": dict.fromkeys(range(40), (2, 4)), "all": dict.fromkeys(range(600), (0, None))}
    offsets = [0, 1, 2, 3, 4, 5, 8, 9, 10**12 - 1, 10**12, 10**12 + 3, 10**12 + 4, UNBOUNDED - 1]
    places = [(p, o) for p in range(600) for o in offsets]
    rows = spark.createDataFrame(places, "partition INT, offset BIGINT")
    as_columns = [is_within(ranges).alias(name) for name, ranges in cases.items()]
    as_sql = [F.expr(within(ranges)).alias(f"{name}_sql") for name, ranges in cases.items()]
    found = rows.select("*", *as_columns, *as_sql).collect()
    assert len(found) == len(places)
    for name, ranges in cases.items():
        expected = {(p, o) for p, o in places if is_inside(ranges, p, o)}
        for way in (name, f"{name}_sql"):
            assert {(row.partition, row.offset) for row in found if row[way]} == expected, way


def test_a_few_partitions_are_told_by_plain_comparisons_alone(spark: SparkSession) -> None:
    """Delta skips files by comparisons with literals, and by nothing that looks into an array."""
    few = str(is_within(dict.fromkeys(range(MAX_TERMS), (0, 5))))
    many = str(is_within(dict.fromkeys(range(10 * MAX_TERMS), (0, 5))))
    assert "array" not in few
    assert few.count("partition") <= 2 * MAX_TERMS
    assert many.count("offset") <= 2 * MAX_TERMS + 2


def test_a_row_gets_the_value_of_its_partition(spark: SparkSession) -> None:
    numbers: Mapping[int, int | None] = {0: 7, 3: 2**62, 5: None, 7: -1}
    texts = {1: "one", 4: "", 6: "it's é"}
    rows = spark.createDataFrame([(p,) for p in [*range(9), None]], "partition INT")
    found = rows.select(
        "partition",
        by_partition(numbers).alias("number"),
        by_partition(texts).alias("text"),
        by_partition({}).alias("none"),
        by_partition({2: None}).alias("null"),
        F.coalesce(by_partition({p: p * p for p in range(300)}), F.lit(-1)).alias("square"),
    )
    assert [field.dataType.simpleString() for field in found.schema] == ["int", "bigint", "string", "bigint", "bigint", "bigint"]
    expected = [(p, numbers.get(p), texts.get(p), None, None, p * p) for p in range(9)]
    assert sorted(tuple(row) for row in found.where("partition IS NOT NULL").collect()) == expected
    assert [tuple(row) for row in found.where("partition IS NULL").collect()] == [(None, None, None, None, None, -1)]
