"""What a record has and its source's schema lacks is found, whatever the format, at any depth, and
whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.avro import encoded, framed
from watersmeet.core.avro_schema import AvroSchema, avro_schema
from watersmeet.core.dropped_fields import (
    LONGEST_NAME,
    SHOWN,
    counted,
    dropped_fields,
    gained_fields,
)
from watersmeet.core.json_schema import ValueSchema, value_schema

HERE = Path("schema")
Document = dict[str, Any]


def json_schema(**properties: Any) -> ValueSchema:
    document = {"type": "object", "properties": properties}
    return value_schema(json.dumps(document).encode(), HERE)


def text(name: str) -> Document:
    return {"name": name, "type": ["null", "string"], "default": None}


def record(name: str, *fields: Document) -> Document:
    return {"type": "record", "name": name, "fields": [*fields]}


def reader(document: Document, **writers: Document) -> AvroSchema:
    by_id = {int(name[1:]): json.dumps(written) for name, written in writers.items()}
    return avro_schema(json.dumps(document).encode(), HERE, by_id or None)


NESTED = json_schema(
    id={"type": "integer"},
    shop={"type": "object", "properties": {"name": {"type": "string"}}},
    items={"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}}}},
    by_day={
        "type": "object",
        "additionalProperties": {"type": "object", "properties": {"n": {"type": "integer"}}},
    },
    tags={"type": "object", "additionalProperties": {"type": "string"}},
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"id": 1}, set()),
        ({"id": 1, "coupon": "x"}, {"coupon"}),
        ({"coupon": None}, {"coupon"}),
        ({"ID": 1}, {"ID"}),
        ({"coupon": {"code": "x"}}, {"coupon"}),
        ({"shop": {"name": "a", "town": "b"}}, {"shop.town"}),
        ({"shop": None}, set()),
        ({"items": [{"sku": "a"}, {"sku": "b", "price": 1}, {"price": 2}]}, {"items[].price"}),
        ({"items": []}, set()),
        ({"by_day": {"mon": {"n": 1, "m": 2}}}, {"by_day[].m"}),
        ({"tags": {"any": "thing"}}, set()),
    ],
)
def test_a_json_value_has_the_fields_that_its_schema_lacks(
    value: Document, expected: set[str]
) -> None:
    assert dropped_fields(NESTED)(json.dumps(value).encode(), 0, 0) == expected


@pytest.mark.parametrize("value", [b"{", b"[1]", b"\xff", b"", b'{"a":' * 1000])
def test_what_cannot_be_read_has_no_field(value: bytes) -> None:
    assert dropped_fields(NESTED)(value, 0, 0) == set()


READ = record("R", text("f"), {"name": "at", "type": ["null", record("In", text("n"))]})


def test_an_avro_value_has_the_fields_of_the_schema_that_it_was_written_with() -> None:
    inside = record("In", text("n"), text("town"))
    more = record("R", text("f"), text("coupon"), {"name": "at", "type": ["null", inside]})
    find = dropped_fields(reader(READ, _3=READ, _4=more))
    value = {"f": "a", "at": None}
    assert find(framed(3, encoded(READ, value)), 0, 0) == set()
    assert find(framed(4, encoded(more, {**value, "coupon": "x"})), 0, 0) == {"coupon", "at.town"}
    assert find(b"\x01 of no schema", 0, 0) == set()


def test_a_field_that_is_read_by_its_earlier_name_is_kept() -> None:
    read = record("R", {**text("total"), "aliases": ["sum"]})
    written = record("R", text("sum"))
    assert dropped_fields(reader(read, _3=written))(framed(3, b"\x00"), 0, 0) == set()


def test_items_of_lists_and_maps_and_all_choices_of_a_union_are_looked_at() -> None:
    def of(*fields: Document) -> Document:
        kinds = record("In", *fields)
        lists = {"name": "items", "type": {"type": "array", "items": kinds}}
        return record(
            "R", lists, {"name": "days", "type": {"type": "map", "values": ["null", "In"]}}
        )

    find = dropped_fields(reader(of(text("n")), _3=of(text("n"), text("m"))))
    assert find(framed(3, b"\x00"), 0, 0) == {"items[].m", "days[].m"}


def test_bare_avro_has_the_fields_of_the_schema_at_its_offset() -> None:
    [old, new] = (reader(record("R", *map(text, names))) for names in ("fg", "f"))
    schema = AvroSchema(new.text, new.type, None, (old,), {0: 10})
    find = dropped_fields(schema)
    assert find(b"\x00\x00", 0, 9) == {"g"}
    assert find(b"\x00", 0, 10) == set()


def test_a_hostile_schema_takes_no_time() -> None:
    written: Any = record("R60", text("x"))
    for n in range(59, -1, -1):
        fields = [text("x"), {"name": "a", "type": written}, {"name": "b", "type": f"R{n + 1}"}]
        written = record(f"R{n}", *fields)
    read = record("R0", {"name": "a", "type": record("R1", text("x"))})
    assert dropped_fields(reader(read, _3=written))(framed(3, b""), 0, 0) == {
        *("x", "b", "a.a", "a.b")
    }


def test_a_schema_gains_what_the_one_before_it_lacks() -> None:
    deeper = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "town": {"type": "string"}},
    }
    after = json_schema(id={"type": "integer"}, shop=deeper, coupon={"type": "string"})
    assert gained_fields(NESTED, after) == {"shop.town", "coupon"}
    before, wider = reader(READ), reader(record("R", *READ["fields"], text("coupon")))
    assert gained_fields(before, wider) == {"coupon"}
    assert gained_fields(wider, before) == set()


def test_many_made_up_names_are_a_number_and_none_is_long_or_steers_a_terminal() -> None:
    records = [
        {"coupon"},
        {"coupon", "\x1b[2J" + "x" * 1000},
        set(),
        *({f"n{n}"} for n in range(900)),
    ]
    found = counted(records)
    assert (found.records, found.having) == (903, 902)
    sentence = str(found)
    assert sentence.startswith("coupon (2), \\x1b[2Jxxx")
    assert sentence.endswith(f", and {902 - SHOWN} other fields")
    assert len(sentence) < SHOWN * (LONGEST_NAME + 10)


def test_fields_of_one_frequency_are_in_the_order_of_their_names() -> None:
    names = [f"n{n}" for n in range(9)]
    expected = ", ".join(f"{name} (2)" for name in names)
    assert str(counted([names, names[::-1]])) == expected
