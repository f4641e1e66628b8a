"""A value that is written as a message has it is the same value in Avro."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given

from tests.support.avro import as_text, encoded, logical, schema_of, schemas_with_values
from tests.support.effort import draws
from watersmeet.avro_json import UnencodableError, encoder
from watersmeet.core.avro_schema import avro_schema
from watersmeet.core.values import json_texts, typed_values

law = draws(50)


def decoded(schema: Any, contents: list[bytes]) -> pa.Array:
    found = avro_schema(as_text(schema), Path("x.avsc"))
    return typed_values(pa.array(contents, pa.binary()), found.type, found.decoder())


@law
@given(drawn=schemas_with_values())
def test_what_a_message_shows_becomes_the_value_that_it_shows(drawn: tuple[Any, list[Any]]) -> None:
    schema, values = drawn
    columns = decoded(schema, [encoded(schema, value) for value in values])
    encode = encoder(json.dumps(schema))
    again = [
        encode(json.loads(text, parse_float=Decimal)) for text in json_texts(columns).to_pylist()
    ]
    assert decoded(schema, again) == columns


FIXED = {"type": "fixed", "name": "X", "size": 3}
DECIMAL = logical("bytes", "decimal", precision=4, scale=1)


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        (["null", "int"], ..., None),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "A", "A"),
        (DECIMAL, 1.5, Decimal("1.5")),
        (DECIMAL, "-999.9", Decimal("-999.9")),
        (
            logical("long", "timestamp-millis"),
            "2026-01-01T01:00:00.001+01:00",
            "2026-01-01 00:00:00.001000+00:00",
        ),
        (logical("long", "timestamp-millis"), 1, "1970-01-01 00:00:00.001000+00:00"),
        (
            logical("long", "local-timestamp-nanos"),
            "2026-01-01T00:00:00.000001",
            "2026-01-01 00:00:00.000001+00:00",
        ),
        (logical("int", "date"), "2026-01-31", "2026-01-31"),
        (logical("int", "time-millis"), "01:02:03.004", "01:02:03.004000"),
        ("double", "NaN", "nan"),
        (
            {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"},
            "00000000-0000-0000-0000-000000000001",
            ...,
        ),
    ],
)
def test_a_field_may_be_left_out_and_spelled_in_every_form_that_says_the_same(
    kind: Any, written: Any, read: Any
) -> None:
    value = {} if written is ... else {"f": written}
    [found] = decoded(schema_of(kind), [encoder(json.dumps(schema_of(kind)))(value)]).to_pylist()
    expected = written if read is ... else read
    assert found["f"] == expected or str(found["f"]) == expected


@pytest.mark.parametrize(
    ("kind", "written", "sentence"),
    [
        ("int", ..., "`value.f` is missing, and has no default; add it"),
        ("int", None, "`value.f` does not fit int; write a whole number of up to 32 bits"),
        ("int", 2**31, "`value.f` does not fit int; write a whole number of up to 32 bits"),
        ("long", 2**63, "`value.f` does not fit long; write a whole number of up to 64 bits"),
        ("int", True, "`value.f` does not fit int; write a whole number of up to 32 bits"),
        (
            "int",
            Decimal("1.0"),
            "`value.f` does not fit int; write a whole number of up to 32 bits",
        ),
        (["null", "boolean"], 1, "`value.f` does not fit boolean; write true or false"),
        ("double", "1", "`value.f` does not fit double; write a number"),
        ("double", [], "`value.f` does not fit double; write a number"),
        ("string", 1, "`value.f` does not fit string; write a text"),
        ("bytes", "é", "`value.f` does not fit bytes; write a text in base64"),
        (FIXED, "AA==", "`value.f` does not fit fixed; write a text in base64 of its size"),
        (
            {"type": "enum", "name": "E", "symbols": ["A"]},
            "B",
            "`value.f` does not fit enum; write a text, one of its symbols",
        ),
        (
            DECIMAL,
            Decimal("1.55"),
            "`value.f` does not fit decimal; write a number that fits its digits",
        ),
        (DECIMAL, 1000, "`value.f` does not fit decimal; write a number that fits its digits"),
        (DECIMAL, "NaN", "`value.f` does not fit decimal; write a number that fits its digits"),
        (DECIMAL, True, "`value.f` does not fit decimal; write a number that fits its digits"),
        (
            logical("long", "timestamp-millis"),
            "2026-01-01T00:00:00.0001Z",
            '`value.f` does not fit timestamp; write a text such as "2026-01-31T12:00:00.000Z", no '
            "finer than its unit, or a whole "
            "number in its unit",
        ),
        (
            logical("int", "date"),
            "x",
            '`value.f` does not fit date; write a text such as "2026-01-31"',
        ),
        (
            {"type": "array", "items": "int"},
            [1, "x"],
            "`value.f[1]` does not fit int; write a whole number of up to 32 bits",
        ),
        (
            {"type": "map", "values": "int"},
            {"k": "x"},
            "`value.f.k` does not fit int; write a whole number of up to 32 bits",
        ),
        ({"type": "map", "values": "int"}, [], "`value.f` does not fit map; write an object"),
        (
            {"type": "record", "name": "In", "fields": []},
            {"g": 1},
            "`value.f.g` is no field of the schema; it has ",
        ),
    ],
)
def test_what_is_no_value_of_the_schema_is_refused_with_its_path(
    kind: Any, written: Any, sentence: str
) -> None:
    with pytest.raises(UnencodableError) as refused:
        encoder(json.dumps(schema_of(kind)))({} if written is ... else {"f": written})
    assert str(refused.value) == sentence


def test_what_is_left_out_is_its_default() -> None:
    inner = {
        "type": "record",
        "name": "In",
        "fields": [{"name": "b", "type": "bytes"}, {"name": "n", "type": "int", "default": 2}],
    }
    fields = [
        {"name": "in", "type": inner, "default": {"b": "\u00ff"}},
        {"name": "many", "type": {"type": "array", "items": "In"}, "default": [{"b": "a", "n": 1}]},
        {"name": "map", "type": {"type": "map", "values": "bytes"}, "default": {"k": "a"}},
        {"name": "none", "type": ["null", "In"], "default": None},
    ]
    schema = {"type": "record", "name": "R", "fields": fields}
    [found] = decoded(schema, [encoder(json.dumps(schema))({})]).to_pylist()
    expected = {
        "in": {"b": b"\xff", "n": 2},
        "many": [{"b": b"a", "n": 1}],
        "map": [("k", b"a")],
        "none": None,
    }
    assert found == expected


def test_a_value_is_an_object() -> None:
    with pytest.raises(UnencodableError, match="`value` does not fit record; write an object"):
        encoder(json.dumps(schema_of("int")))([])
