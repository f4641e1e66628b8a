from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipelines.settings import PublishSettings
from pipelines.transforms.message import message_value, with_validity
from tests.support.cases import SOURCES

AWKWARD_KEYS = [
    "plain",
    'say "hi"',
    "back\\slash",
    "line\nfeed\r\ttab",
    "\x00\x1f\x7f\u2028",
    "é\U0001f600{}[],",
    "\\u0041",
    "</script>'",
    "",
]
VERBATIM = [
    '{"ts": 1.0,  "k" :"\\u00e9"}',
    '{"a":1e400,"a":2}',
    "{}",
    '{"ts":1.50,"s":"a\\nb \U0001f600"}',
    '{ "big": 12345678901234567890123 }',
]


class Row(NamedTuple):
    """A row of silver: times in ms, and per source (offset, event time, value) of its parts."""

    key: str = "k"
    status: str = "timed_out"
    event_time: int = 5
    last_event_time: int = 1_700_000_000_123
    tracking: tuple[tuple[int, int, Any], ...] = ((0, 5, '{"n":1}'),)
    orders: tuple[tuple[int, int, Any], ...] = ()


def silver(spark: SparkSession, *rows: Row, value_type: str = "STRING") -> DataFrame:
    parts = ", ".join(f"{source} ARRAY<STRUCT<offset: BIGINT, t: BIGINT, value: {value_type}>>" for source in SOURCES)
    ddl = f"merge_key STRING, status STRING, event_time BIGINT, last_event_time BIGINT, {parts}"
    times = {name: F.timestamp_millis(name) for name in ("event_time", "last_event_time")}
    arrays = {
        source: F.transform(
            source, lambda p: F.struct(p["offset"], F.timestamp_millis(p["t"]).alias("event_time"), p["value"].alias("value"))
        )
        for source in SOURCES
    }
    return spark.createDataFrame(rows, ddl).withColumn("partition", F.lit(3)).withColumns(times | arrays)


def messages(rows: DataFrame, value: str | None = None) -> list[Any]:
    publish = PublishSettings(topic="merged", value=value)
    return [row[0] for row in rows.select(message_value(rows.schema, publish, SOURCES)).collect()]


def test_the_default_message_is_one_json_object_with_its_fields_in_order(spark: SparkSession) -> None:
    row = Row(tracking=((0, 5, '{"n":1}'), (2, 7, '{"n":2}')), orders=())
    assert messages(silver(spark, row)) == [
        '{"key":"k","event_time":5,"last_event_time":1700000000123,"tracking":[{"n":1},{"n":2}],"orders":[]}'
    ]


def test_a_key_of_any_characters_comes_through(spark: SparkSession) -> None:
    rows = [Row(key=key) for key in AWKWARD_KEYS]
    assert [json.loads(message)["key"] for message in messages(silver(spark, *rows))] == AWKWARD_KEYS


def test_a_value_without_a_schema_is_passed_on_byte_for_byte(spark: SparkSession) -> None:
    parts = tuple((i, i, text) for i, text in enumerate(VERBATIM))
    [message] = messages(silver(spark, Row(orders=parts)))
    assert message.endswith(f'"orders":[{",".join(VERBATIM)}]}}')
    assert [len(json.loads(message)[source]) for source in SOURCES] == [1, len(VERBATIM)]


def test_a_value_with_a_schema_is_its_fields_and_nulls_are_kept(spark: SparkSession) -> None:
    value_type = "STRUCT<s: STRING, n: BIGINT, d: DOUBLE, b: BOOLEAN, list: ARRAY<STRUCT<x: BIGINT>>, inner: STRUCT<y: STRING>>"
    full = ('"é\n\U0001f600', 2**63 - 1, 0.1, False, [(1,), (None,), None], ("\\",))
    empty = (None, None, None, None, None, None)
    parts: tuple[tuple[int, int, Any], ...] = ((0, 1, full), (1, 2, empty), (2, 3, ("", 0, 1e300, True, [], (None,))))
    [message] = messages(silver(spark, Row(tracking=parts), value_type=value_type))
    assert json.loads(message)["tracking"] == [
        {"s": full[0], "n": 2**63 - 1, "d": 0.1, "b": False, "list": [{"x": 1}, {"x": None}, None], "inner": {"y": "\\"}},
        {"s": None, "n": None, "d": None, "b": None, "list": None, "inner": None},
        {"s": "", "n": 0, "d": 1e300, "b": True, "list": [], "inner": {"y": None}},
    ]
    assert json.loads(message)["orders"] == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("concat(merge_key, '!')", ["k!"]),
        ("to_binary('00ff', 'hex')", [b"\x00\xff"]),
        ("orders[0].value", [None]),
        ("tracking[0].value", ['{"n":1}']),
        ("CAST(NULL AS STRING)", [None]),
    ],
)
def test_a_configured_value_is_the_message(spark: SparkSession, value: str, expected: list[Any]) -> None:
    assert messages(silver(spark, Row()), value) == expected


def judged(rows: DataFrame, **publish: Any) -> list[tuple[str, Any, Any]]:
    found = rows.transform(with_validity(PublishSettings(topic="merged", **publish), SOURCES))
    assert found.columns == [*rows.columns, "invalid_reason", "valid"]
    assert [found.schema[name].dataType.simpleString() for name in ("valid", "invalid_reason")] == ["boolean", "string"]
    return sorted(((row.merge_key, row.valid, row.invalid_reason) for row in found.collect()), key=repr)


def test_a_finished_row_is_valid_where_the_predicate_is_true_and_an_open_one_is_not_judged(spark: SparkSession) -> None:
    keys = ["true", "false", "null"]
    rows = silver(spark, *[Row(key=key, status=status) for key in keys for status in ("timed_out", "open")])
    assert judged(rows, valid="CASE merge_key WHEN 'true' THEN true WHEN 'false' THEN false END") == [
        ("false", False, "predicate"),
        ("false", None, None),
        ("null", False, "predicate"),
        ("null", None, None),
        ("true", None, None),
        ("true", True, None),
    ]


def test_a_predicate_that_meets_what_is_not_there_counts_as_false(spark: SparkSession) -> None:
    rows = silver(spark, Row(key="none"), Row(key="some", orders=((0, 5, '{"n":1}'),)))
    assert judged(rows, valid="orders[0].value LIKE '%n%'") == [("none", False, "predicate"), ("some", True, None)]


def test_a_message_fits_up_to_max_bytes_exactly(spark: SparkSession) -> None:
    """Counted in bytes of UTF-8; the predicate comes first; a null message has no size."""
    rows = silver(spark, Row(key="ab"), Row(key="abc"), Row(key="é"), Row(key="éa"), Row(key="null"))
    publish = {"value": "nullif(merge_key, 'null')", "max_bytes": 2}
    too_large = (False, "too_large")
    assert judged(rows, **publish) == [
        ("ab", True, None),
        ("abc", *too_large),
        ("null", True, None),
        ("é", True, None),
        ("éa", *too_large),
    ]
    assert {reason for _, _, reason in judged(rows, valid="false", **publish)} == {"predicate"}


def test_the_default_messages_own_size_is_what_counts(spark: SparkSession) -> None:
    rows = silver(spark, Row(key="é"), Row(key="é", status="open"))
    size = len(messages(rows)[0].encode())
    assert {valid for _, valid, _ in judged(rows.where("status = 'timed_out'"), max_bytes=size)} == {True}
    assert {(valid, why) for _, valid, why in judged(rows, max_bytes=size - 1)} == {(False, "too_large"), (None, None)}
