"""The fold decides joins, openings and time-outs as the merge rules have them: each case is a partition of one frame."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pipelines.adapters.spark import layer_session
from pipelines.transforms.fold import fold, union_with_open
from tests.support.cases import SOURCES

T = 100
BATCH = 7

Part = tuple[str, int, int]
"""source, offset, event time"""


@dataclass(frozen=True)
class New:
    """A record of the batch, on time."""

    source: str
    offset: int
    event_time: int
    position: int
    key: str = "k"


@dataclass(frozen=True)
class Row:
    """A merge record: one that was open before the batch, or one that comes out of it."""

    parts: tuple[Part, ...]
    status: str = "open"
    updates_open: bool = False
    key: str = "k"

    @property
    def times(self) -> tuple[int, int]:
        return min(t for _, _, t in self.parts), max(t for _, _, t in self.parts)


@dataclass(frozen=True)
class Fold:
    """A partition: its open rows, the batch's records and clock, and the rows that change."""

    open: tuple[Row, ...]
    new: tuple[New, ...]
    clock: int | None
    expected: list[Row] = field(default_factory=list)


def tracking(offset: int, event_time: int, position: int, key: str = "k") -> New:
    return New("tracking", offset, event_time, position, key)


def orders(offset: int, event_time: int, position: int, key: str = "k") -> New:
    return New("orders", offset, event_time, position, key)


def opened(*parts: Part, key: str = "k") -> Row:
    return Row(parts, key=key)


def still_open(*parts: Part, updates_open: bool = False, key: str = "k") -> Row:
    return Row(parts, "open", updates_open, key)


def timed_out(*parts: Part, updates_open: bool = False, key: str = "k") -> Row:
    return Row(parts, "timed_out", updates_open, key)


T0: Part = ("tracking", 0, 500)
CASES = {
    "a record of a new key opens": Fold((), (tracking(1, 500, 500),), 500, [still_open(("tracking", 1, 500))]),
    "a record joins where the open row is exactly as old as allowed": Fold(
        (opened(T0),), (orders(3, 600, 600),), 600, [still_open(T0, ("orders", 3, 600), updates_open=True)]
    ),
    "a record opens anew one ms later, and the old row has timed out as it was": Fold(
        (opened(T0),), (orders(3, 601, 601),), 601, [timed_out(T0, updates_open=True), still_open(("orders", 3, 601))]
    ),
    "the position decides, not the record's own time": Fold(
        (opened(T0),), (orders(3, 510, 601),), 601, [timed_out(T0, updates_open=True), still_open(("orders", 3, 510))]
    ),
    "the same holds among new records": Fold(
        (),
        (tracking(1, 500, 500), orders(1, 600, 600), tracking(2, 601, 601)),
        601,
        [timed_out(("tracking", 1, 500), ("orders", 1, 600)), still_open(("tracking", 2, 601))],
    ),
    "a join lowers the event time, and with it what joins next": Fold(
        (opened(("tracking", 0, 550)),),
        (orders(1, 500, 600), orders(2, 601, 601)),
        601,
        [timed_out(("tracking", 0, 550), ("orders", 1, 500), updates_open=True), still_open(("orders", 2, 601))],
    ),
    "a join never raises the event time": Fold(
        (opened(T0),),
        (orders(1, 590, 600), orders(2, 601, 601)),
        601,
        [timed_out(T0, ("orders", 1, 590), updates_open=True), still_open(("orders", 2, 601))],
    ),
    "one batch may finish several rows of a key, the open one first": Fold(
        (opened(T0),),
        (tracking(1, 550, 550), orders(1, 700, 700), tracking(2, 750, 750), orders(2, 1000, 1000), orders(3, 1100, 1100)),
        1100,
        [
            timed_out(T0, ("tracking", 1, 550), updates_open=True),
            timed_out(("orders", 1, 700), ("tracking", 2, 750)),
            still_open(("orders", 2, 1000), ("orders", 3, 1100)),
        ],
    ),
    "and several of a key that had none": Fold(
        (),
        (tracking(1, 100, 100), tracking(2, 300, 300), tracking(3, 500, 500)),
        601,
        [timed_out(("tracking", 1, 100)), timed_out(("tracking", 2, 300)), timed_out(("tracking", 3, 500))],
    ),
    "records of one position stay together, whatever their own times": Fold(
        (opened(T0),),
        (tracking(7, 601, 601), tracking(8, 501, 601), tracking(9, 550, 601), orders(4, 502, 601)),
        601,
        [
            timed_out(T0, updates_open=True),
            still_open(("tracking", 7, 601), ("tracking", 8, 501), ("tracking", 9, 550), ("orders", 4, 502)),
        ],
    ),
    "records of one position all join": Fold(
        (opened(T0),),
        (tracking(7, 600, 600), orders(8, 500, 600)),
        600,
        [still_open(T0, ("tracking", 7, 600), ("orders", 8, 500), updates_open=True)],
    ),
    "arrival does not matter, position does": Fold(
        (),
        (orders(1, 700, 700), tracking(9, 500, 500), tracking(10, 590, 590)),
        700,
        [timed_out(("tracking", 9, 500), ("tracking", 10, 590)), still_open(("orders", 1, 700))],
    ),
    "an untouched open row stays unmentioned at the very limit": Fold((opened(T0),), (), 600, []),
    "an untouched open row times out one ms later": Fold((opened(T0),), (), 601, [timed_out(T0, updates_open=True)]),
    "a touched row may time out in the same batch": Fold(
        (opened(T0),), (orders(1, 520, 520),), 601, [timed_out(T0, ("orders", 1, 520), updates_open=True)]
    ),
    "nothing times out without a clock": Fold((opened(T0),), (), None, []),
    "parts are in order of event time, then offset": Fold(
        (opened(("tracking", 5, 520), ("tracking", 6, 540)),),
        (tracking(10, 520, 600), tracking(11, 520, 600), tracking(12, 510, 600), orders(2, 560, 600), orders(3, 550, 600)),
        600,
        [
            still_open(
                ("tracking", 12, 510),
                ("tracking", 5, 520),
                ("tracking", 10, 520),
                ("tracking", 11, 520),
                ("tracking", 6, 540),
                ("orders", 3, 550),
                ("orders", 2, 560),
                updates_open=True,
            )
        ],
    ),
    "keys have nothing to do with each other": Fold(
        (opened(T0, key="b"), opened(("orders", 1, 501), key="c")),
        (tracking(1, 600, 600, key="a"), tracking(2, 601, 601, key="b")),
        601,
        [
            still_open(("tracking", 1, 600), key="a"),
            timed_out(T0, updates_open=True, key="b"),
            still_open(("tracking", 2, 601), key="b"),
        ],
    ),
}


def millis(ms: Column | str) -> Column:
    return F.timestamp_millis(ms)


def records_frame(spark: SparkSession, cases: list[Fold], value_type: str = "STRING") -> DataFrame:
    rows = [
        (n.source, p, n.offset, n.key, False, n.event_time, n.position, f"{n.source} {n.offset}")
        for p, case in enumerate(cases)
        for n in case.new
    ]
    ddl = "source STRING, partition INT, offset BIGINT, merge_key STRING, heartbeat BOOLEAN, t BIGINT, w BIGINT, value STRING"
    values = {f"value_{s}": F.when(F.col("source") == s, as_value(F.col("value"), value_type)) for s in SOURCES}
    times = {"event_time": millis("t"), "position": millis("w")}
    return spark.createDataFrame(rows, ddl).withColumns(times | values).drop("t", "w", "value").repartition(3)


def as_value(text: Column, value_type: str) -> Column:
    """A value of the type wanted that says where it comes from."""
    if value_type == "STRING":
        return text
    return F.struct(text.alias("s"), F.lit(None).cast("bigint").alias("n"), F.array(text).alias("list"))


def open_frame(spark: SparkSession, cases: list[Fold], value_type: str = "STRING") -> DataFrame:
    rows = [
        (
            p,
            row.key,
            row.times[0],
            row.times[1],
            *[[(o, t, f"{s} {o}") for s, o, t in row.parts if s == mine] for mine in SOURCES],
        )
        for p, case in enumerate(cases)
        for row in case.open
    ]
    parts = ", ".join(f"{source} ARRAY<STRUCT<offset: BIGINT, t: BIGINT, value: STRING>>" for source in SOURCES)
    arrays = {
        s: F.transform(
            s,
            lambda p: F.struct(p["offset"], millis(p["t"]).alias("event_time"), as_value(p["value"], value_type).alias("value")),
        )
        for s in SOURCES
    }
    times = {"event_time": millis("event_time"), "last_event_time": millis("last_event_time")}
    frame = spark.createDataFrame(rows, f"partition INT, merge_key STRING, event_time BIGINT, last_event_time BIGINT, {parts}")
    return frame.withColumns(times | arrays | {"status": F.lit("open"), "batch": F.lit(BATCH - 1).cast("bigint")})


def folded(spark: SparkSession, cases: list[Fold], value_type: str = "STRING") -> DataFrame:
    clocks = {p: case.clock for p, case in enumerate(cases) if case.clock is not None}
    return (
        records_frame(spark, cases, value_type)
        .transform(union_with_open(open_frame(spark, cases, value_type), SOURCES))
        .repartition(4, "partition")
        .transform(fold(SOURCES, T, clocks, BATCH))
    )


Found = dict[int, list[Any]]


@pytest.fixture(scope="module")
def found(root_session: SparkSession) -> Found:
    """What comes out, by partition: the rows in order of time."""
    times = {name: F.unix_millis(name) for name in ("event_time", "last_event_time")}
    parts = {s: F.transform(s, lambda p: F.struct(p["offset"], F.unix_millis(p["event_time"]), p["value"])) for s in SOURCES}
    rows: Found = {p: [] for p in range(len(CASES))}
    changed = folded(layer_session(root_session), list(CASES.values())).where(F.col("batch") == BATCH)
    for row in changed.withColumns(times | parts).collect():
        rows[row.partition].append(row)
    return rows


@pytest.mark.parametrize("name", CASES)
def test_fold_gives_the_rows_that_change(found: Found, name: str) -> None:
    case = CASES[name]
    rows = sorted(found[list(CASES).index(name)], key=lambda row: (row.merge_key, row.event_time))
    as_rows = [
        Row(tuple((s, *part[:2]) for s in SOURCES for part in row[s]), row.status, row.updates_open, row.merge_key)
        for row in rows
    ]
    assert [(row.key, row.status, row.updates_open) for row in as_rows] == [
        (row.key, row.status, row.updates_open) for row in case.expected
    ]
    for row, kept, expected in zip(rows, as_rows, case.expected, strict=True):
        in_order = [sorted((p for p in expected.parts if p[0] == s), key=lambda p: (p[2], p[1])) for s in SOURCES]
        assert list(kept.parts) == [part for parts in in_order for part in parts]
        assert (row.event_time, row.last_event_time) == expected.times
        assert [part[2] for s in SOURCES for part in row[s]] == [f"{s} {offset}" for s, offset, _ in kept.parts]


def test_an_open_row_that_nothing_changes_comes_out_as_it_was(spark: SparkSession) -> None:
    case = Fold(
        (opened(T0, ("orders", 1, 520)), opened(T0, key="b")), (tracking(1, 600, 600, key="a"), tracking(2, 600, 600)), 600
    )
    unchanged = folded(spark, [case]).where(F.col("batch") != BATCH)
    assert [(row.merge_key, row.batch, row.updates_open) for row in unchanged.collect()] == [("b", BATCH - 1, True)]
    before = open_frame(spark, [case]).where("merge_key = 'b'")
    assert unchanged.select(before.columns).collect() == before.collect()


def test_values_with_fields_come_through_and_the_columns_are_those_of_silver(spark: SparkSession) -> None:
    value_type = "STRUCT<s: STRING, n: BIGINT, list: ARRAY<STRING>>"
    case = Fold((opened(T0),), (tracking(1, 499, 550), orders(2, 560, 560), orders(3, 601, 601)), 601)
    rows = folded(spark, [case], value_type)
    assert rows.columns == [
        "partition",
        "merge_key",
        "status",
        "event_time",
        "last_event_time",
        *SOURCES,
        "batch",
        "updates_open",
    ]
    parts = "array<struct<offset:bigint,event_time:timestamp,value:struct<s:string,n:bigint,list:array<string>>>>"
    assert [rows.schema[source].dataType.simpleString() for source in SOURCES] == [parts, parts]
    first, second = rows.orderBy("event_time").collect()
    assert [tuple(part.value) for part in first.tracking] == [
        ("tracking 1", None, ["tracking 1"]),
        ("tracking 0", None, ["tracking 0"]),
    ]
    assert [tuple(part.value) for part in first.orders] == [("orders 2", None, ["orders 2"])]
    assert (first.status, first.updates_open) == ("timed_out", True)
    assert [tuple(part.value) for part in second.orders] == [("orders 3", None, ["orders 3"])]
    assert (second.tracking, second.updates_open) == ([], False)


def test_records_and_open_rows_stand_side_by_side(spark: SparkSession) -> None:
    case = Fold((opened(T0, key="b"),), (tracking(1, 499, 550, key="a"),), 601)
    records = records_frame(spark, [case])
    both = records.transform(union_with_open(open_frame(spark, [case]), SOURCES))
    assert both.columns == [*records.columns, "open_event_time", "open_batch", *[f"open_{source}" for source in SOURCES]]
    record, open_row = both.withColumn("at", F.unix_millis("open_event_time")).orderBy("merge_key").collect()
    assert (record.source, record.at, record.open_tracking) == ("tracking", None, None)
    assert (open_row.source, open_row.offset, open_row.event_time, open_row.position) == (None, None, None, None)
    assert (open_row.at, open_row.heartbeat, open_row.open_tracking[0].value) == (500, False, "tracking 0")
