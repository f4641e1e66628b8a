"""What a living lake takes of a changed schema, and that records from before the change are still
read."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.avro import (
    as_text,
    decimal,
    encoded,
    enum,
    framed,
    logical,
    schema_of,
    schemas_with_values,
)
from tests.support.effort import draws
from watersmeet.core.avro_schema import AvroSchema, avro_schema
from watersmeet.core.json_text import UndecodableError
from watersmeet.core.schema_changes import refused_changes
from watersmeet.core.types import widened
from watersmeet.core.values import typed_values

pytestmark = [pytest.mark.promise("C8"), pytest.mark.fault("rules")]

law = draws(60)


def load(schema: Any) -> AvroSchema:
    return avro_schema(as_text(schema), Path("x.avsc"))


def record(*fields: Any, name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [*fields]}


def fixed(size: int, name: str = "X") -> dict[str, Any]:
    return {"type": "fixed", "name": name, "size": size}


def refused(before: Any, after: Any) -> list[str]:
    return refused_changes(json.dumps(before), json.dumps(after), is_avro="fields" in before)


A, B = {"name": "a", "type": "int"}, {"name": "b", "type": ["null", "string"], "default": None}
INNER = record(A, name="In")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (record(A), record(A, B)),
        (record(A), record({"name": "c", "type": "string", "default": ""}, A)),
        (record(A, B), record(A)),
        (record(A, B), record(B, A)),
        (schema_of("int"), schema_of("long")),
        (schema_of("float"), schema_of("double")),
        (schema_of("int"), schema_of(["null", "int"])),
        (schema_of("int"), schema_of(["long", "null"])),
        (schema_of(["null", "int"]), schema_of(["long", "null"])),
        (schema_of(["null", "int"]), schema_of(["null", "int"], default=None)),
        (schema_of("int", default=1), schema_of("int", default=2)),
        (schema_of("int", doc="old"), schema_of(logical("int", "no such type"), aliases=["g"])),
        (schema_of("string"), schema_of(logical("string", "uuid"))),
        (schema_of(enum("A")), schema_of(enum("B", "A"))),
        (schema_of(decimal(4, 0)), schema_of(logical("bytes", "decimal", precision=4))),
        (
            schema_of({"type": "array", "items": "int"}),
            schema_of({"type": "array", "items": ["null", "long"]}),
        ),
        (
            schema_of({"type": "map", "values": "float"}),
            schema_of(["null", {"type": "map", "values": "double"}]),
        ),
        (schema_of(INNER), schema_of(record(A, B, name="other.In"))),
        (
            record({"name": "f", "type": INNER}, {"name": "g", "type": "In"}),
            record({"name": "g", "type": INNER}),
        ),
        (
            {"type": "object", "properties": {"a": {"enum": ["x"]}}},
            {"type": "object", "properties": {"a": {"enum": ["y", "x"]}}},
        ),
    ],
)
def test_a_schema_may_gain_optional_fields_widen_types_and_drop_fields(
    before: Any, after: Any
) -> None:
    assert refused(before, after) == []


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (
            record(A),
            record(A, {"name": "b", "type": ["null", "int"]}),
            "$.b has no default, which records without it need; give it one",
        ),
        (
            record(A, B),
            record(A, {"name": "b", "type": ["null", "string"]}),
            "$.b has no default, which records without it need; give it one",
        ),
        (schema_of("long"), schema_of("int"), "$.f has another type"),
        (schema_of("int"), schema_of("double"), "$.f has another type"),
        (schema_of("long"), schema_of("float"), "$.f has another type"),
        (schema_of("double"), schema_of("float"), "$.f has another type"),
        (schema_of("string"), schema_of("bytes"), "$.f has another type"),
        (schema_of("string"), schema_of(enum("A")), "$.f has another type"),
        (schema_of(["null", "int"]), schema_of("int"), "$.f has another type"),
        (
            schema_of(enum("A", "B")),
            schema_of(enum("B")),
            "$.f lacks values of its enum that it had",
        ),
        (schema_of(enum("A", default="A")), schema_of(enum("A")), "$.f: `default` differs"),
        (schema_of(decimal(4, 1)), schema_of(decimal(5, 1)), "$.f: `precision` differs"),
        (schema_of(decimal(4, 1)), schema_of(decimal(4, 2)), "$.f: `scale` differs"),
        (
            schema_of("long"),
            schema_of(logical("long", "timestamp-millis")),
            "$.f: `logicalType` differs",
        ),
        (
            schema_of(logical("long", "timestamp-micros")),
            schema_of(logical("long", "timestamp-millis")),
            "$.f: `logicalType` differs",
        ),
        (schema_of(fixed(3)), schema_of(fixed(4)), "$.f: `size` differs"),
        (schema_of(INNER), schema_of(record(A, name="Out")), "$.f: `name` differs"),
        (
            schema_of(INNER),
            schema_of(record({**A, "type": "string"}, name="In")),
            "$.f.a has another type",
        ),
        (
            schema_of({"type": "array", "items": ["null", "int"]}),
            schema_of({"type": "array", "items": "int"}),
            "$.f[] has another type",
        ),
        (
            {"properties": {"a": {"enum": ["x", "y"]}}},
            {"properties": {"a": {"enum": ["y"]}}},
            "$.a lacks values of its enum that it had",
        ),
        ({"properties": {"a": {"enum": ["x"]}}}, {"properties": {"a": {}}}, "$.a: `enum` differs"),
        (
            {"properties": {"a": {"type": "integer"}}},
            {"properties": {"a": {"type": "number"}}},
            "$.a has another type",
        ),
        (
            {"properties": {"a": {"const": 1}}},
            {"properties": {"a": {"const": True}}},
            "$.a: `const` differs",
        ),
        (
            {"properties": {}},
            {"properties": {"a": {}}, "required": ["a"]},
            "$.a is required, and was not",
        ),
    ],
)
def test_any_other_change_is_refused_with_its_path(before: Any, after: Any, sentence: str) -> None:
    assert refused(before, after) == [sentence]


# -- random changes


def changed(draw: st.DrawFn, schema: Any, names: Any) -> Any:
    """A schema after some changes that a lake takes."""
    if isinstance(schema, list):
        return [each if each == "null" else changed(draw, each, names) for each in schema]
    if schema in ("int", "float"):
        return draw(st.sampled_from([schema, {"int": "long", "float": "double"}[schema]]))
    if not isinstance(schema, dict):
        return schema
    match schema["type"]:
        case "array":
            return {**schema, "items": perhaps_null(draw, changed(draw, schema["items"], names))}
        case "enum":
            return {
                **schema,
                "symbols": [*draw(st.sampled_from([[], ["new"]])), *schema["symbols"]],
            }
        case "record":
            kept = draw(
                st.lists(
                    st.sampled_from(schema["fields"]),
                    min_size=1,
                    unique_by=lambda each: str(each["name"]),
                )
            )
            fields = [
                {**each, "type": perhaps_null(draw, changed(draw, each["type"], names))}
                for each in kept
            ]
            chosen: list[list[tuple[Any, Any]]] = [
                [],
                [("long", 5)],
                [(["null", "string"], None), ("bytes", "é")],
            ]
            more = draw(st.sampled_from(chosen))
            added = [
                {"name": f"n{next(names)}", "type": kind, "default": default}
                for kind, default in more
            ]
            return {**schema, "fields": draw(st.permutations([*fields, *added]))}
    return schema


def perhaps_null(draw: st.DrawFn, schema: Any) -> Any:
    return ["null", schema] if not isinstance(schema, list) and draw(st.booleans()) else schema


def same_where_both(one: Any, other: Any) -> bool:
    """Whether two values of columns are equal in the fields that both have; a field that only the
    other has is a default."""
    if isinstance(one, dict):
        shared = one.keys() & other.keys()
        added = [value in (None, 5, b"\xe9") for name, value in other.items() if name not in shared]
        return all(added) and all(same_where_both(one[name], other[name]) for name in shared)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_where_both, one, other))
    return bool(one == other)


@law
@given(drawn=schemas_with_values(), data=st.data())
def test_what_was_read_before_a_change_is_read_after_it(
    drawn: tuple[Any, list[Any]], data: st.DataObject
) -> None:
    before, values = drawn
    after = changed(cast("st.DrawFn", data.draw), before, count())
    assert refused(before, after) == []
    old, new = load(before), load(after)
    assert widened(old.type, widened(old.type, new.type)) == widened(old.type, new.type)
    contents = [encoded(before, value) for value in values]
    expected = typed_values(pa.array(contents, pa.binary()), old.type, old.decoder()).to_pylist()
    bare = replace(new, earlier=(old,), since={3: len(values)})
    places = iter([(3, offset) for offset in range(len(values))])
    by_offset = typed_values(
        pa.array(contents, pa.binary()), new.type, bare.decoder(), places
    ).to_pylist()
    named = replace(new, earlier=(old,), writers={7: json.dumps(before)})
    by_id = typed_values(
        pa.array([framed(7, each) for each in contents], pa.binary()), new.type, named.decoder()
    ).to_pylist()
    assert by_offset == by_id
    assert all(map(same_where_both, expected, by_offset)), (expected, by_offset)


def test_from_its_first_offset_on_a_value_is_of_the_new_schema() -> None:
    old, new = (
        load(schema_of("int")),
        load(record({"name": "n", "type": "int", "default": 3}, {"name": "f", "type": "long"})),
    )
    both = replace(new, earlier=(old,), since={1: 10})
    decode = both.decoder_of_accepted()
    one, two = (
        encoded(schema_of("int"), {"f": 1}),
        encoded(
            record({"name": "n", "type": "int"}, {"name": "f", "type": "long"}), {"n": 2, "f": 1}
        ),
    )
    assert [decode(one, 1, 9), decode(two, 1, 10), decode(two, 0, 0)] == [
        {"n": 3, "f": 1},
        {"n": 2, "f": 1},
        {"n": 2, "f": 1},
    ]
    with pytest.raises(UndecodableError):
        both.decoder()(one, 1, 10)


def test_a_record_that_was_accepted_is_read_by_the_last_schema_that_can() -> None:
    """A writer may have had a field of the same name and another type, which nobody read then."""
    writer = record(
        {"name": "f", "type": "int"},
        {"name": "g", "type": "string"},
        {"name": "h", "type": "string"},
    )
    old, less = load(schema_of("int")), load(record({"name": "h", "type": "string"}))
    new = load(
        record(
            {"name": "f", "type": "int"}, {"name": "g", "type": ["null", "int"], "default": None}
        )
    )
    found = replace(new, earlier=(old, less), writers={7: json.dumps(writer)})
    value = framed(7, encoded(writer, {"f": 1, "g": "x", "h": "y"}))
    with pytest.raises(UndecodableError):
        found.decoder()(value)
    assert found.decoder_of_accepted()(value) == {"f": None, "g": None}
    assert replace(found, earlier=(old,)).decoder_of_accepted()(value) == {"f": 1, "g": None}
    with pytest.raises(UndecodableError):
        found.decoder_of_accepted()(b"garbage")
