from __future__ import annotations

import json
import pickle
from base64 import b64decode
from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.avro import (
    as_text,
    decoded,
    encoded,
    in_a_column,
    logical,
    same,
    schemas_with_values,
)
from tests.support.effort import draws
from watersmeet.core.avro_schema import AvroSchema, avro_schema
from watersmeet.core.json_text import UndecodableError
from watersmeet.core.types import TIME, columns_ddl
from watersmeet.core.values import json_texts, largest_sizes, typed_values
from watersmeet.errors import ConfigurationError

law = draws(60)
FILE = Path("x.avsc")


def load(schema: Any) -> AvroSchema:
    return avro_schema(as_text(schema), FILE)


def record(*fields: tuple[str, Any], name: str = "R") -> dict[str, Any]:
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": field, "type": kind} for field, kind in fields],
    }


def decimal(precision: Any, scale: Any = 0, **more: Any) -> dict[str, Any]:
    return {
        "type": "bytes",
        "logicalType": "decimal",
        "precision": precision,
        "scale": scale,
        **more,
    }


def refusal(schema: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        avro_schema(schema if isinstance(schema, bytes) else as_text(schema), FILE)
    message = str(caught.value)
    assert message.startswith("x.avsc: ")
    assert "\n" not in message
    return message.removeprefix("x.avsc: ")


def undecodable(schema: Any, content: bytes | None) -> str:
    with pytest.raises(UndecodableError) as caught:
        load(schema).decoder()(content)
    return str(caught.value)


# -- columns


@pytest.mark.parametrize(
    ("schema", "column"),
    [
        ("boolean", "BOOLEAN"),
        ("int", "BIGINT"),
        ("long", "BIGINT"),
        ("float", "DOUBLE"),
        ("double", "DOUBLE"),
        ("string", "STRING"),
        ("bytes", "BINARY"),
        ({"type": "fixed", "name": "F", "size": 3}, "BINARY"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "STRING"),
        (["null", "int"], "BIGINT"),
        (["int", "null"], "BIGINT"),
        (["int"], "BIGINT"),
        ({"type": "string"}, "STRING"),
        ({"type": "array", "items": ["null", "string"]}, "ARRAY<STRING>"),
        (
            {"type": "map", "values": {"type": "array", "items": "long"}},
            "MAP<STRING, ARRAY<BIGINT>>",
        ),
        (record(("aid", "int"), name="In"), "STRUCT<aid: BIGINT>"),
        (
            ["null", record(("order", "string"), ("é ü".replace(" ", "-"), "int"), name="In")],
            "STRUCT<order: STRING, `é-ü`: BIGINT>",
        ),
        (decimal(10, 2), "DECIMAL(10, 2)"),
        (decimal(38, 38), "DECIMAL(38, 38)"),
        (logical("int", "date"), "DATE"),
        (logical("long", "timestamp-millis"), "TIMESTAMP"),
        (logical("long", "timestamp-micros"), "TIMESTAMP"),
        (logical("long", "timestamp-nanos"), "TIMESTAMP"),
        (logical("long", "local-timestamp-millis"), "TIMESTAMP"),
        (logical("long", "local-timestamp-nanos"), "TIMESTAMP"),
        (logical("int", "time-millis"), "STRING"),
        (logical("long", "time-micros"), "STRING"),
        (logical("string", "uuid"), "STRING"),
        ({"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}, "STRING"),
        ({"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}, "BINARY"),
        (logical("string", "decimal"), "STRING"),
        (logical("int", "timestamp-millis"), "BIGINT"),
        (logical("string", "date"), "STRING"),
        (logical("long", "mine"), "BIGINT"),
    ],
)
def test_every_field_is_one_column(schema: Any, column: str) -> None:
    assert columns_ddl(load(record(("meta", schema))).type) == f"meta {column}"


def test_a_named_type_may_be_used_again() -> None:
    inner = record(("x", "int"), name="ns.In")
    found = load({**record(("a", inner), ("b", "In"), ("c", ["null", "ns.In"])), "namespace": "ns"})
    assert (
        columns_ddl(found.type) == "a STRUCT<x: BIGINT>, b STRUCT<x: BIGINT>, c STRUCT<x: BIGINT>"
    )


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        (b"{", "is no JSON document"),
        ("string", "the top level must be a record; name its fields there"),
        (["null", record(("a", "int"))], "the top level must be a record"),
        (record(("a", "int"), ("a", "int")), "field `a` is there twice; rename one"),
        ({"type": "record", "fields": []}, "is no valid Avro schema"),
        (
            record(("a", "Other")),
            "names the type `Other`, which it does not define; define it in the file",
        ),
        (
            record(("a", ["string", "int"])),
            "field `a` is a union of several types, or of none but null, and a table column has "
            "one",
        ),
        (record(("a", ["null"])), "field `a` is a union of several types, or of none but null"),
        (record(("a", "null")), "field `a` is null and nothing else; give it a type"),
        (record(("a", {"type": "array", "items": "null"})), "field `a[]` is null and nothing else"),
        (record(("a", record(name="In"))), "field `a` is a record without fields"),
        (record(), "the top level is a record without fields"),
        (
            record(("a", record(("b", ["null", "R"]), name="In"))),
            "field `a.b` is a `R` inside of itself, and a column has an end",
        ),
        (
            record(("a", {"type": "map", "values": ["null", "R"]})),
            "field `a[]` is a `R` inside of itself",
        ),
        (
            record(("a b", "int")),
            "field `a b` has a name that no table column can have; give it another",
        ),
        (
            record(("m", record(("a=b", "int"), name="In"))),
            "field `m.a=b` has a name that no table column can have",
        ),
        (
            record(("aid", "int"), ("Aid", "int")),
            "field `Aid` differs from `aid` only in case, which columns do not; rename one",
        ),
        (
            record(("a", decimal(39, 2))),
            "field `a` is a decimal of 39 digits, and a table column has up to 38; use fewer",
        ),
        (
            record(("a", decimal(2, 3))),
            "has a decimal without a `precision` of 1 or more and a `scale` of at most that",
        ),
        (record(("a", decimal("2"))), "has a decimal without a `precision`"),
    ],
)
def test_what_fits_no_table_is_refused_with_its_path(schema: Any, sentence: str) -> None:
    assert refusal(schema).startswith(sentence)


# -- values


@law
@given(drawn=schemas_with_values())
def test_a_value_is_what_fastavros_own_reader_says(drawn: tuple[Any, list[Any]]) -> None:
    schema, values = drawn
    contents = [encoded(schema, value) for value in values]
    found = pickle.loads(pickle.dumps(load(schema)))
    columns = typed_values(pa.array([*contents, None], pa.binary()), found.type, found.decoder())
    assert columns.type == found.type
    *rows, last = columns.to_pylist()
    assert last is None
    for row, content in zip(rows, contents, strict=True):
        assert same(row, in_a_column(decoded(schema, content))), (row, decoded(schema, content))


@law
@given(drawn=schemas_with_values())
def test_the_json_of_a_value_says_the_same_within_its_bound(drawn: tuple[Any, list[Any]]) -> None:
    schema, values = drawn
    found = load(schema)
    columns = typed_values(
        pa.array([encoded(schema, value) for value in values], pa.binary()),
        found.type,
        found.decoder(),
    )
    texts = json_texts(columns).to_pylist()
    for text, value, bound in zip(texts, columns, largest_sizes(columns), strict=True):
        assert as_column(json.loads(text, parse_float=Decimal), found.type) == value
        assert len(text.encode()) <= bound
    assert json_texts(columns[1:3]).to_pylist() == texts[1:3], "of a slice, too"


def as_column(document: Any, kind: pa.DataType) -> pa.Scalar:
    """A parsed message's value, read as docs/messages.md says, as a scalar of its column."""
    return pa.scalar(_read(document, kind), kind)


def _read(document: Any, kind: pa.DataType) -> Any:
    if document is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: _read(document[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(name, _read(each, kind.item_type)) for name, each in document.items()]
    if pa.types.is_list(kind):
        return [_read(each, kind.value_type) for each in document]
    if kind == TIME:
        return datetime.strptime(document, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
    if pa.types.is_date32(kind):
        return date.fromisoformat(document)
    if pa.types.is_binary(kind):
        return b64decode(document, validate=True)
    return (
        float(document)
        if pa.types.is_floating(kind)
        else Decimal(document)
        if pa.types.is_decimal(kind)
        else document
    )


@pytest.mark.parametrize(
    ("kind", "content", "text"),
    [
        (decimal(10, 2), b"\x02\x0f", "0.15"),
        (decimal(10, 0), b"\x02\x0f", "15"),
        (decimal(38, 20), b"\x02\x01", "0.00000000000000000001"),
        (decimal(10, 2), b"\x00", "0.00"),
        ("bytes", b"\x04\xff\xfe", '"//4="'),
        (logical("int", "date"), b"\x00", '"1970-01-01"'),
        (logical("long", "timestamp-millis"), b"\x01", '"1969-12-31T23:59:59.999000Z"'),
        (logical("long", "timestamp-micros"), b"\x02", '"1970-01-01T00:00:00.000001Z"'),
        (logical("long", "local-timestamp-millis"), b"\x02", '"1970-01-01T00:00:00.001000Z"'),
        (logical("long", "timestamp-nanos"), b"\x01", '"1969-12-31T23:59:59.999999Z"'),
        (logical("int", "time-millis"), b"\x02", '"00:00:00.001000"'),
        ("double", b"\x00\x00\x00\x00\x00\x00\xf8\x7f", '"NaN"'),
        ("double", b"\x00\x00\x00\x00\x00\x00\xf0\x7f", '"Infinity"'),
        ("float", b"\x00\x00\x80\xff", '"-Infinity"'),
        ("float", b"\xcd\xcc\xcc\x3d", "0.10000000149011612"),
        ({"type": "map", "values": "int"}, b'\x04\x02z\x02\x02"\x04\x00', '{"z":1,"\\"":2}'),
        ({"type": "map", "values": "int"}, b"\x04\x02a\x02\x02a\x04\x00", '{"a":2}'),
        ({"type": "map", "values": "int"}, b"\x00", "{}"),
    ],
)
def test_what_json_has_no_type_for_is_spelled_out(kind: Any, content: bytes, text: str) -> None:
    found = load(record(("f", kind)))
    [row] = json_texts(
        typed_values(pa.array([content], pa.binary()), found.type, found.decoder())
    ).to_pylist()
    assert row == f'{{"f":{text}}}'


@pytest.mark.parametrize(
    ("kind", "content", "sentence"),
    [
        ("string", None, "no value (tombstone)"),
        ("string", b"", "does not fit the Avro schema: it ends too early"),
        ("string", b"\x06ab", "does not fit the Avro schema: it ends too early"),
        ("string", b"\x02ab", "does not fit the Avro schema: 1 bytes are left over"),
        ("string", b"\x01ab", "does not fit the Avro schema: it ends too early"),
        ("string", b"\x02\xff", "does not fit the Avro schema: a text in it is not UTF-8"),
        (
            ["null", "int"],
            b"\x04",
            "does not fit the Avro schema: it has a choice of a union or a symbol of an enum that "
            "the schema has not",
        ),
        (
            {"type": "enum", "name": "E", "symbols": ["A"]},
            b"\x02",
            "does not fit the Avro schema: it has a choice of a union",
        ),
        (
            {"type": "array", "items": "int"},
            b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01\x02",
            "does not fit the Avro schema: it ends too early",
        ),
        (
            logical("long", "timestamp-millis"),
            b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            "does not fit the Avro schema: a date or time in it lies before the year 1 or after "
            "the year 9999",
        ),
        (
            logical("int", "date"),
            b"\xfe\xff\xff\xff\x0f",
            "does not fit the Avro schema: a date or time in it",
        ),
        (
            logical("int", "time-millis"),
            b"\xfe\xff\xff\xff\x0f",
            "does not fit the Avro schema: a date or time in it is none",
        ),
        (decimal(3, 1), b"\x04\x03\xe8", "a decimal does not fit 3 digits, 1 of them a fraction"),
        (decimal(38, 1), b"\x40" + b"\x7f" * 32, "a decimal has more than 38 digits"),
    ],
)
def test_bytes_that_do_not_fit_are_refused_in_words_without_contents(
    kind: Any, content: bytes | None, sentence: str
) -> None:
    assert undecodable(record(("f", kind)), content).startswith(sentence)


@law
@given(drawn=schemas_with_values(), content=st.binary(max_size=12))
def test_no_bytes_break_the_reader_and_what_it_reads_fits_the_column(
    drawn: tuple[Any, list[Any]], content: bytes
) -> None:
    found = load(drawn[0])
    try:
        value = found.decoder()(content)
    except UndecodableError:
        return
    assert pa.array([value], found.type).is_valid().to_pylist() == [True]
