from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from pipelines import tables
from pipelines.core.json_schema import load_value_schema
from pipelines.core.reading import ReadingRules, reader
from pipelines.transforms.decode import decode, decode_fetched
from tests.support.cases import BAD_VALUES, heartbeat, keyed
from tests.support.lakes import KAFKA_ROW, settings_for

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
DAY_MS = 86_400_000
VALUES = [
    *BAD_VALUES,
    keyed("a", 5),
    keyed("é", 1_700_000_000_123),
    heartbeat(7),
    heartbeat(-1),
    b'{"ts":"2026-01-01T00:00:00.123456+01:00","k":12345678901234567890}',
    b'{"ts":1.9,"k":1.0}',
    b'{"ts":253402300799999,"k":true}',
    b'{"ts":253402300800000,"k":"after the year 9999"}',
    b'{"ts":3,"k":""}',
    b'{"ts":3,"k":null,"n":[1,{"a":null}]}',
    b'{"ts":3,"k":"a","n":"no number"}',
    b"x" * 300,
]
KEYS = [None, b"", b"key", "clé".encode(), b"\xff"]
# -1 ms is what Spark makes of a record without a timestamp.
KAFKA_TIMES = [-1, 0, 1_000, 4_000_000_000_000]


@pytest.fixture(scope="module")
def schema_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("schema") / "value.json"
    properties = {"ts": {"type": "integer"}, "n": {"type": "integer"}, "k": {"type": "string"}}
    path.write_text(json.dumps({"type": "object", "properties": properties}))
    return path


@pytest.mark.parametrize("kind", ["key in the value", "kafka key", "with a schema"])
def test_a_row_is_read_as_the_core_reads_it(spark: SparkSession, schema_file: Path, kind: str) -> None:
    rules = ReadingRules(
        event_time=("ts",),
        max_future_ms=DAY_MS,
        key=None if kind == "kafka key" else ("k",),
        heartbeat=(("type",), "heartbeat"),
        schema=load_value_schema(schema_file) if kind == "with a schema" else None,
    )
    inputs = [(key, value, at) for key in KEYS for value in VALUES for at in KAFKA_TIMES]
    headers = [("h", b"\x00"), ("h", None)]
    rows = [
        ("topic", i % 5, i, EPOCH + timedelta(milliseconds=at), i % 2, key, value, headers)
        for i, (key, value, at) in enumerate(inputs)
    ]
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "7")  # so that a task sees many Arrow batches
    kafka = spark.createDataFrame(rows, KAFKA_ROW)
    decoded = kafka.transform(decode(rules))
    millis = {name: F.unix_millis(name) for name in ("kafka_timestamp", "event_time")}
    found = [tuple(row) for row in decoded.withColumns(millis).orderBy("offset").collect()]
    read = reader(rules)
    expected = []
    for (topic, partition, offset, _, kind_of_time, *_), (key, value, at) in zip(rows, inputs, strict=True):
        said = read(key, value, at)
        merge = (said.merge_key, said.event_time, said.heartbeat, said.reason, said.detail)
        expected.append((topic, partition, offset, at, kind_of_time, key, value, headers, *merge))
    assert found == expected
    assert decode_fetched(rules)(kafka.toArrow()).to_pylist() == decoded.toArrow().to_pylist()
    reasons = {row[11] for row in found}
    assert reasons == {None, "undecodable", "no_key", "no_event_time", "event_time_in_future"}
    assert any(row[10] for row in found)


def test_what_comes_out_are_bronzes_columns_even_of_nothing(spark: SparkSession, tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    decoded = spark.createDataFrame([], KAFKA_ROW).transform(decode(settings.sources["orders"].reading_rules(0)))
    bronze = StructType.fromDDL(tables.layout(settings)[tables.bronze("orders")].ddl)
    assert isinstance(bronze, StructType)
    assert [(f.name, f.dataType.simpleString()) for f in decoded.schema] == [(f.name, f.dataType.simpleString()) for f in bronze]
    assert decoded.collect() == []
