"""Reading whose a record is, where the merge has tenants: under the same rules as its key, after it
and before its event time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_reading import FAR, Input, kafka_table, rules
from tests.support.avro import as_text, encoded, framed
from tests.support.effort import draws
from tests.support.strategies import json_values
from watersmeet.core.avro_schema import avro_schema
from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.reading import (
    BRONZE,
    KAFKA,
    RECORD_BYTES,
    REDRIVEN_FROM,
    WRITER_SCHEMA,
    bronze_schema,
    read_records,
)
from watersmeet.core.types import NO_TENANT

law = draws(50)

SCHEMA = ValueSchema('{"properties": {"n": {"type": "integer"}}}', pa.struct([("n", pa.int64())]))
CLICK = (("type",), "click")


class Found(NamedTuple):
    """What was read from a record, and whose it is."""

    tenant: str | None = None
    merge_key: str | None = None
    event_time: int | None = None
    heartbeat: bool = False
    reason: str | None = None
    detail: str | None = None


def all_of(inputs: list[Input], **how: Any) -> list[Found]:
    bronze = read_records(kafka_table(inputs), rules(**{"tenant": ("g",), **how}))
    times_ms = [time and time // 1000 for time in bronze["event_time"].cast(pa.int64()).to_pylist()]
    columns = {name: bronze[name].to_pylist() for name in Found._fields if name != "event_time"}
    return [
        Found(**{name: columns[name][i] for name in columns}, event_time=times_ms[i])
        for i in range(len(inputs))
    ]


def read(value: Any, *, kafka_key: bytes | None = None, kafka_time: int = FAR, **how: Any) -> Found:
    content = value if isinstance(value, bytes) or value is None else orjson.dumps(value)
    [found] = all_of([(kafka_key, content, kafka_time)], **how)
    return found


# -- records


@pytest.mark.parametrize(
    ("spelled", "tenant"),
    [
        ('"x"', "x"),
        ('" "', " "),
        ('"a/b%"', "a/b%"),
        ('"\\u00e9\\ud83d\\ude00"', "é\U0001f600"),
        ("0", "0"),
        ("-0", "-0"),
        ("7", "7"),
        ("1.10", "1.10"),
        ("1E+03", "1E+03"),
        ("18446744073709551616", "18446744073709551616"),
        ("true", "true"),
        ("false", "false"),
    ],
)
def test_a_tenant_counts_as_its_json_text(spelled: str, tenant: str) -> None:
    read_so = Found(tenant, "a", 1)
    assert read(f'{{"ts":1,"k":"a","g":{spelled}}}'.encode()) == read_so
    assert read(f'{{"ts":1,"k":"a","g":{spelled},"n":5}}'.encode(), schema=SCHEMA) == read_so
    assert (
        read(f'{{"ts":1,"k":"a","o":{{"g": {spelled} }}}}'.encode(), tenant=("o", "g")) == read_so
    )
    assert read(f'{{"ts":1,"k":{spelled}}}'.encode(), tenant=("k",)) == Found(tenant, tenant, 1), (
        "as a key would"
    )


@pytest.mark.parametrize(
    ("spelled", "is_"),
    [
        ("null", "null"),
        ('""', "an empty string"),
        ("{}", "an object"),
        ('{"g":"x"}', "an object"),
        ("[]", "an array"),
        ('["x"]', "an array"),
    ],
)
@pytest.mark.parametrize("schema", [None, SCHEMA])
def test_what_cannot_be_a_tenant_is_no_tenant(
    spelled: str, is_: str, schema: ValueSchema | None
) -> None:
    found = read(f'{{"ts":1,"k":"a","g":{spelled}}}'.encode(), schema=schema)
    assert found == Found(reason="no_tenant", detail=f"g is {is_}")


@pytest.mark.parametrize(
    "value", [{}, {"o": 1}, {"o": None}, {"o": [{"g": "x"}]}, {"o": {}}, {"o.g": "x"}, {"o": "g"}]
)
def test_a_path_that_leads_nowhere_is_no_tenant(value: dict[str, Any]) -> None:
    found = read({"ts": 1, "k": "a", **value}, tenant=("o", "g"))
    assert found == Found(reason="no_tenant", detail="o.g is missing")


def test_a_tenant_is_read_where_kafka_has_the_key() -> None:
    assert read({"ts": 1, "g": "x"}, key=None, kafka_key=b"b") == Found("x", "b", 1)
    assert read({"ts": 1}, key=None, kafka_key=b"b").reason == "no_tenant"


def test_the_reason_comes_after_no_key_and_before_no_event_time() -> None:
    assert read({"n": "x"}, schema=SCHEMA).reason == "undecodable"
    assert read({}).reason == "no_key"
    assert read({"k": "a"}).reason == "no_tenant"
    assert read({"k": "a", "ts": 5_000}, kafka_time=1).reason == "no_tenant"
    assert read({"k": "a", "g": "x"}).reason == "no_event_time"
    assert read({"k": "a", "g": "x", "ts": 5_000}, kafka_time=1).reason == "event_time_in_future"


def test_a_refused_record_has_no_tenant() -> None:
    for refused in ({"g": "x"}, {"g": "x", "k": "a"}, {"g": "x", "k": "", "ts": 1}):
        assert read(refused)[:4] == (None, None, None, False)
    assert read({"g": "x", "k": "a", "ts": 5_000}, kafka_time=1)[:4] == (None, None, None, False)


def test_a_tombstone_that_is_skipped_has_no_tenant() -> None:
    assert read(None, skips_tombstones=True) == Found()


# -- heartbeats


@pytest.mark.parametrize("beside", [{}, {"g": None}, {"g": ""}, {"g": {}}, {"g": []}])
def test_a_heartbeat_may_be_nobodys(beside: dict[str, Any]) -> None:
    assert read({"ts": 1, "type": "heartbeat", **beside}) == Found(None, None, 1, heartbeat=True)


@pytest.mark.parametrize(("given_", "tenant"), [("x", "x"), (7, "7"), (False, "false")])
def test_a_heartbeat_of_a_tenant_speaks_for_it(given_: Any, tenant: str) -> None:
    assert read({"ts": 1, "type": "heartbeat", "g": given_}) == Found(
        tenant, None, 1, heartbeat=True
    )


# -- the sources of one topic


def test_another_sources_record_is_a_heartbeat_of_its_tenant() -> None:
    assert read({"ts": 1, "k": "a", "g": "x", "type": "order"}, where=CLICK) == Found(
        "x", None, 1, heartbeat=True
    )


@pytest.mark.parametrize("beside", [{}, {"g": None}, {"g": ""}, {"g": {}}])
def test_another_sources_record_without_a_tenant_moves_nobodys_clock(
    beside: dict[str, Any],
) -> None:
    assert read({"ts": 1, "k": "a", "type": "order", **beside}, where=CLICK) == Found()
    assert read({"ts": 1, "type": "heartbeat", **beside}, where=CLICK) == Found(
        None, None, 1, heartbeat=True
    )
    assert read({"ts": 1, "k": "a", "type": "click", **beside}, where=CLICK).reason == "no_tenant"


# -- Avro


def avro(kind: Any, value: Any, **how: Any) -> Found:
    fields = [
        {"name": "ts", "type": "long"},
        {"name": "k", "type": "string"},
        {"name": "g", "type": kind},
    ]
    fields.append({"name": "type", "type": "string"})
    schema = {"type": "record", "name": "R", "fields": fields}
    of_type = "heartbeat" if how.pop("is_heartbeat", False) else "click"
    content = encoded(schema, {"ts": 1, "k": "a", "g": value, "type": of_type})
    return read(content, schema=avro_schema(as_text(schema), Path("x.avsc")), **how)


@pytest.mark.parametrize(
    ("kind", "value", "tenant"),
    [
        ("string", "é", "é"),
        ("long", 0, "0"),
        ("double", 1e-4, "1.0E-4"),
        ("boolean", False, "false"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "A", "A"),
    ],
)
def test_in_avro_a_tenant_is_the_text_that_a_message_has_for_it(
    kind: Any, value: Any, tenant: str
) -> None:
    assert avro(kind, value) == Found(tenant, "a", 1)
    assert avro(kind, value, is_heartbeat=True) == Found(tenant, None, 1, heartbeat=True)


@pytest.mark.parametrize(
    ("kind", "value", "is_"),
    [
        ("string", "", "an empty string"),
        (["null", "string"], None, "null"),
        ("bytes", b"a", "bytes"),
        ({"type": "map", "values": "int"}, {}, "an object"),
        ({"type": "array", "items": "int"}, [], "an array"),
    ],
)
def test_in_avro_too_some_values_are_no_tenant(kind: Any, value: Any, is_: str) -> None:
    assert avro(kind, value) == Found(reason="no_tenant", detail=f"g is {is_}")
    assert avro(kind, value, is_heartbeat=True) == Found(None, None, 1, heartbeat=True)


# -- tables


def test_the_column_is_there_with_tenants_and_without_and_comes_behind_what_was_read() -> None:
    kafka = kafka_table([(None, b'{"ts":1,"k":"a","g":"x"}', FAR)])
    assert bronze_schema().names == [
        *BRONZE.names,
        "tenant",
        REDRIVEN_FROM.name,
        RECORD_BYTES.name,
    ]
    for how in (rules(), rules(tenant=("g",))):
        assert read_records(kafka, how).schema == bronze_schema()
        assert read_records(KAFKA.empty_table(), how) == bronze_schema().empty_table()


def test_the_column_comes_after_the_writers_schema() -> None:
    schema = as_text(
        {
            "type": "record",
            "name": "R",
            "fields": [{"name": "ts", "type": "long"}, {"name": "g", "type": "string"}],
        }
    )
    how = rules(
        schema=avro_schema(schema, Path("x.avsc"), {7: schema.decode()}), key=None, tenant=("g",)
    )
    value = framed(7, encoded(json.loads(schema), {"ts": 1, "g": "x"}))
    bronze = read_records(kafka_table([(b"a", value, FAR)]), how)
    assert bronze.schema == bronze_schema(has_registry=True)
    assert bronze.schema.names == [
        *BRONZE.names,
        WRITER_SCHEMA.name,
        "tenant",
        REDRIVEN_FROM.name,
        RECORD_BYTES.name,
    ]
    assert bronze.select([WRITER_SCHEMA.name, "tenant"]).to_pylist() == [
        {WRITER_SCHEMA.name: 7, "tenant": "x"}
    ]


@law
@given(
    value=json_values() | st.binary(),
    kafka_key=st.none() | st.binary(),
    where=st.sampled_from([None, CLICK]),
)
def test_who_has_a_key_has_a_tenant(value: bytes, kafka_key: bytes | None, where: Any) -> None:
    for key in (None, ("k",)):
        found = read(value, kafka_key=kafka_key, tenant=("ts",), key=key, where=where)
        assert found.merge_key is None or found.tenant
        assert found.tenant is None or (found.reason is None and found.event_time is not None)
        alone = read_records(kafka_table([(kafka_key, value, FAR)]), rules(key=key, where=where))
        assert alone["tenant"].to_pylist() == [
            None if each is None else NO_TENANT for each in alone["merge_key"].to_pylist()
        ], "without tenants all who have a key have the same one"
        if found.reason != "no_tenant" and where is None:
            assert alone["merge_key"].to_pylist() == [found.merge_key], (
                "the rest is read as without tenants"
            )
            assert alone["reason"].to_pylist() == [found.reason]
