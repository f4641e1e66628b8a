"""How many items a value may have: a bound on what it becomes, whatever its bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_reading import FAR, kafka_table, rules
from tests.support.avro import encoded, framed, schema_of, schemas_with_values
from tests.support.effort import draws
from tests.support.strategies import json_values
from watersmeet.core import items
from watersmeet.core.avro_schema import AvroSchema, avro_schema
from watersmeet.core.avro_types import parsed
from watersmeet.core.items import MAX_ITEMS, has_many_items
from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.reading import read_records

pytestmark = [pytest.mark.promise("R52"), pytest.mark.fault("hostile")]

LISTS = pa.struct([("a", pa.list_(pa.struct([(f"f{n}", pa.int64()) for n in range(9)])))])
"""A value of many columns: each of its items has ten."""


def few(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(items, "MAX_ITEMS", count)


def refusals(values: list[bytes], schema: Any, **how: Any) -> list[str | None]:
    found = read_records(kafka_table([(b"k", v, FAR) for v in values]), rules(schema=schema, **how))
    return list(found["detail"].to_pylist())


# -- JSON


def objects(count: int) -> bytes:
    """A value with `{`, three colons, two commas, `[`, and two items more for each object."""
    return b'{"k":"a","ts":1,"x":[{}' + b",{}" * (count - 1) + b"]}"


@pytest.mark.parametrize("schema", [None, ValueSchema('{"type":"object"}', pa.struct([]))])
@pytest.mark.parametrize("key", [("k",), ("n", "k")])
def test_a_value_has_up_to_a_million_items_whichever_way_it_is_read(
    schema: ValueSchema | None, key: tuple[str, ...]
) -> None:
    most = (MAX_ITEMS - 7 + 1) // 2
    text = b'{"s":"' + b"{}[],:" * MAX_ITEMS + b'\\\\","t":"\\",","k":"a","ts":1,"n":{"k":"b"}}'
    values = [objects(most), objects(most + 1), text]
    is_key = None if key == ("k",) else "n.k is missing"
    expected = [is_key, "has more than 1,000,000 items", None]
    assert refusals(values, schema, keys=((key,),)) == expected


@given(text=json_values(), count=st.integers(0, 60))
def test_what_begins_an_item_counts_outside_of_texts_alone(text: bytes, count: int) -> None:
    tokens = 0
    in_text = is_escaped = False
    for character in text.decode():
        if in_text:
            in_text = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_text = True
        else:
            tokens += character in "{[,:"
    with pytest.MonkeyPatch.context() as patch:
        few(patch, count)
        patch.setattr(items, "_PIECE", 3)
        assert has_many_items(text) == (tokens > count)


def test_the_columns_of_a_schema_count_for_each_item_of_a_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few(monkeypatch, 100)
    monkeypatch.setattr("watersmeet.core.json_schema.MAX_ITEMS", 100)
    schema = ValueSchema('{"type":"object"}', LISTS)
    values = [b'{"k":"a","ts":1,"a":[%s]}' % b",".join([b"{}"] * n) for n in (10, 11)]
    sentence = "does not fit the schema: has more than 1,000,000 items"
    assert refusals(values, schema) == [None, sentence]


# -- Avro


def of(schema: Any, writers: dict[int, str] | None = None) -> AvroSchema:
    return avro_schema(json.dumps(schema).encode(), Path("a.avsc"), writers)


def record(**fields: Any) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "V",
        "fields": [
            {"name": name, **(kind if "default" in kind else {"type": kind})}
            for name, kind in fields.items()
        ],
    }


INNER = {"type": "record", "name": "I", "fields": [{"name": "n", "type": "int"}]}
WIDE = {
    **INNER,
    "fields": [
        {"name": "m", "aliases": ["n"], "type": "int"},
        *({"name": f"d{n}", "type": ["null", "long"], "default": None} for n in range(8)),
    ],
}


def array(of_items: Any) -> dict[str, Any]:
    return {"type": "array", "items": of_items}


@pytest.mark.parametrize(
    ("kind", "item", "most"),
    [
        ("int", 0, MAX_ITEMS - 3),
        (["null", "string"], None, MAX_ITEMS - 3),
        (INNER, {"n": 0}, (MAX_ITEMS - 3) // 2),
        (["null", {"type": "fixed", "name": "F", "size": 1}], None, MAX_ITEMS - 3),
        (array("int"), [], MAX_ITEMS - 3),
        ({"type": "enum", "name": "E", "symbols": ["a"]}, "a", MAX_ITEMS - 3),
    ],
)
def test_an_avro_value_has_up_to_a_million_items(kind: Any, item: Any, most: int) -> None:
    schema = record(ts="long", k="string", x=array(kind))
    head = encoded(record(ts="long", k="string"), {"ts": 1, "k": "a"})
    zero = encoded(schema_of(kind), {"f": item})
    assert len(zero) == 1

    def of_items(count: int) -> bytes:
        number = encoded(schema_of("long"), {"f": count})
        return head + number + zero * count + b"\x00"

    found = refusals([of_items(most - 1), of_items(most + 1)], of(schema))
    assert found == [None, "has more than 1,000,000 items"]


def test_a_field_that_only_the_reader_has_counts_for_each_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few(monkeypatch, 100)
    written = record(ts="long", k="string", x=array(INNER))
    schema = of(record(ts="long", k="string", x=array(WIDE)), {7: json.dumps(written)})
    values = [
        framed(7, encoded(written, {"ts": 1, "k": "a", "x": [{"n": 0}] * n})) for n in (9, 10)
    ]
    assert refusals(values, schema) == [
        None,
        "has more than 1,000,000 items (written with schema 7)",
    ]


def test_what_bronze_has_accepted_is_decoded_whatever_was_added_to_the_schema_since(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few(monkeypatch, 10)
    schema = of(record(x=array("int")))
    value = encoded(record(x=array("int")), {"x": [1] * 20})
    assert schema.decoder_of_accepted()(value) == {"x": [1] * 20}


@draws(200)
@given(drawn=schemas_with_values())
def test_no_value_has_more_objects_than_are_counted_nor_fewer_bytes(
    drawn: tuple[Any, list[Any]],
) -> None:
    drawn_schema, values = drawn
    schema = record(f=drawn_schema, last=array("int"))
    for value in values:
        content = encoded(schema, {"f": value, "last": [0] * 5})
        decode = of(schema).decoder_of_accepted()
        with pytest.MonkeyPatch.context() as patch:
            few(patch, objects_in(decode(content)) - 1)
            assert counter(schema)(content)
            few(patch, most_items(schema, content))
            assert not counter(schema)(content)
            assert counter(schema)(content[:-1] + b"\x02" + b"\x00" * 2)


def counter(schema: Any) -> Any:
    of_schema = parsed(schema).type
    return items.many_items(of_schema, of_schema)


def most_items(schema: Any, content: bytes) -> int:
    """The smallest bound that a value keeps."""
    return next(count for count in range(10**6) if not _exceeds(schema, content, count))


def _exceeds(schema: Any, content: bytes, count: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        few(patch, count)
        return bool(counter(schema)(content))


def objects_in(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(objects_in, value.values()))
    return 1 + sum(map(objects_in, value)) if isinstance(value, list) else 1
