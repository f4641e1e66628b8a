"""Values that name the schema that they were written with are read as the configured one, whatever
wrote them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_reading import FAR, kafka_table, rules
from tests.support.avro import (
    as_text,
    decimal,
    encoded,
    enum,
    framed,
    in_a_column,
    logical,
    same,
    schema_of,
    schemas_with_values,
)
from tests.support.effort import draws
from watersmeet.core.avro_schema import avro_schema, self_contained
from watersmeet.core.json_text import UndecodableError
from watersmeet.core.reading import WRITER_SCHEMA, read_records
from watersmeet.core.values import typed_values

pytestmark = pytest.mark.fault("hostile")

law = draws(60)
UTC = timezone.utc
AT = datetime(2026, 1, 2, 3, 4, 5, 6000, UTC)
AT_MS = (AT - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
NONE: Any = object()


def of(kind: Any, default: Any = NONE, **more: Any) -> dict[str, Any]:
    return schema_of(kind, **({} if default is NONE else {"default": default}), **more)


def inner(*fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "record", "name": "In", "fields": [*fields]}


def column(written: Any, read: Any, value: Any) -> Any:
    """What the field `f` of the schema `read` is, of a value that was written with the schema
    `written`."""
    found = avro_schema(as_text(read), Path("x.avsc"), {7: json.dumps(written)})
    [row] = typed_values(
        pa.array([framed(7, encoded(written, value))], pa.binary()), found.type, found.decoder()
    ).to_pylist()
    return row["f"]


def refused(written: Any, read: Any, value: Any) -> str:
    with pytest.raises(UndecodableError) as caught:
        column(written, read, value)
    assert str(caught.value).endswith(" (written with schema 7)")
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "read", "value", "expected"),
    [
        ("int", "long", 5, 5),
        ("long", "double", 2, 2.0),
        ("float", "double", 0.5, 0.5),
        ("string", "bytes", "é", "é".encode()),
        ("bytes", "string", b"a", "a"),
        ("int", ["null", "long"], 5, 5),
        (["null", "int"], "long", 5, 5),
        (["string", "int"], ["null", "long"], 5, 5),
        ([enum("A"), "null"], ["null", enum("A", "B")], "A", "A"),
        (enum("A", "B"), enum("A", default="A"), "B", "A"),
        (
            {"type": "array", "items": "int"},
            {"type": "array", "items": "double"},
            [1, 2],
            [1.0, 2.0],
        ),
        (
            {"type": "map", "values": "int"},
            {"type": "map", "values": ["null", "long"]},
            {"a": 1},
            [("a", 1)],
        ),
        (logical("long", "timestamp-micros"), logical("long", "timestamp-millis"), AT, AT),
        (logical("long", "timestamp-millis"), logical("long", "timestamp-nanos"), AT, AT),
        (
            logical("long", "local-timestamp-millis"),
            logical("long", "timestamp-micros"),
            AT.replace(tzinfo=None),
            AT,
        ),
        ("long", logical("long", "timestamp-millis"), AT_MS, AT),
        ("long", logical("long", "timestamp-micros"), AT_MS * 1000, AT),
        ("long", logical("long", "timestamp-nanos"), AT_MS * 1_000_000 + 7, AT),
        ("int", logical("int", "date"), 1, date(1970, 1, 2)),
        ("int", logical("int", "time-millis"), 1, "00:00:00.001000"),
        (decimal(4, 1), decimal(6, 3), Decimal("1.5"), Decimal("1.500")),
        (decimal(6, 3), decimal(4, 1), Decimal("1.500"), Decimal("1.5")),
        ("bytes", decimal(4, 1), b"\x0f", Decimal("1.5")),
        (
            inner({"name": "a", "type": "int"}, {"name": "b", "type": "string"}),
            inner({"name": "b", "type": "string"}),
            {"a": 1, "b": "x"},
            {"b": "x"},
        ),
        (
            inner({"name": "a", "type": "int"}),
            inner({"name": "n", "type": "long", "aliases": ["a"]}),
            {"a": 1},
            {"n": 1},
        ),
    ],
)
def test_what_was_written_otherwise_is_what_the_reader_calls_it(
    written: Any, read: Any, value: Any, expected: Any
) -> None:
    assert column(of(written), of(read), {"f": value}) == expected


@pytest.mark.parametrize(
    ("kind", "default", "expected"),
    [
        (["null", "string"], None, None),
        ("double", 1, 1.0),
        ("bytes", "\u00ff", b"\xff"),
        (decimal(4, 1), "\u000f", Decimal("1.5")),
        (logical("long", "timestamp-millis"), AT_MS, AT),
        (logical("int", "date"), 1, date(1970, 1, 2)),
        ({"type": "map", "values": "int"}, {"a": 1}, [("a", 1)]),
        (
            inner({"name": "a", "type": "int", "default": 3}, {"name": "b", "type": "bytes"}),
            {"b": "x"},
            {"a": 3, "b": b"x"},
        ),
    ],
)
def test_a_field_that_was_not_written_has_its_default(
    kind: Any, default: Any, expected: Any
) -> None:
    written = {"type": "record", "name": "R", "fields": [{"name": "other", "type": "int"}]}
    assert column(written, of(kind, default), {"other": 1}) == expected


@pytest.mark.parametrize(
    ("written", "read", "value", "sentence"),
    [
        (
            "string",
            "long",
            "5",
            "does not fit the Avro schema: the schema that it was written with does not resolve to "
            "this one",
        ),
        (
            ["null", "long"],
            "long",
            None,
            "does not fit the Avro schema: the schema that it was written with does not resolve",
        ),
        (
            enum("A", "B"),
            enum("A"),
            "B",
            "does not fit the Avro schema: the schema that it was written with does not resolve",
        ),
        (
            logical("long", "timestamp-millis"),
            "long",
            AT,
            "a field was written with another type than the schema has",
        ),
        (
            logical("int", "time-millis"),
            logical("int", "date"),
            AT.time(),
            "a field was written with another type than the schema has",
        ),
        (
            logical("long", "time-micros"),
            logical("long", "local-timestamp-micros"),
            AT.time(),
            "a field was written with another type than the schema has",
        ),
        (
            decimal(6, 3),
            decimal(4, 1),
            Decimal("1.501"),
            "a decimal does not fit 4 digits, 1 of them a fraction",
        ),
        (decimal(9, 0), decimal(4, 1), Decimal("1000"), "a decimal does not fit 4 digits"),
        (
            "long",
            logical("long", "timestamp-millis"),
            2**60,
            "does not fit the Avro schema: a date or time in it",
        ),
    ],
)
def test_what_does_not_resolve_is_refused_with_the_schemas_id(
    written: Any, read: Any, value: Any, sentence: str
) -> None:
    assert refused(of(written), of(read), {"f": value}).startswith(sentence)


def test_a_schema_that_bytes_could_make_endless_is_never_decoded() -> None:
    """A hundred kilobytes of a type inside of itself would overflow the decoder's stack, ten of an
    array of nulls take for ever."""
    tree = {"type": "record", "name": "T", "fields": [{"name": "t", "type": ["null", "T"]}]}
    nulls = {
        "type": "array",
        "items": {"type": "record", "name": "Z", "fields": [{"name": "z", "type": "null"}]},
    }
    for dropped, content in (
        (tree, b"\x02" * 100_000),
        (nulls, b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
    ):
        written = {
            "type": "record",
            "name": "R",
            "fields": [{"name": "d", "type": dropped}, {"name": "f", "type": "long"}],
        }
        found = avro_schema(as_text(of("long")), Path("x.avsc"), {7: json.dumps(written)})
        with pytest.raises(UndecodableError, match=r"the schema that it was written with has an? "):
            found.decoder()(framed(7, content))


def doubling(levels: int, leaf: str) -> dict[str, Any]:
    """A schema of a few kilobytes whose values have two to the power of `levels` leaves."""
    kind: Any = {"type": "record", "name": "D0", "fields": [{"name": "a", "type": leaf}]}
    for level in range(1, levels + 1):
        twice = [{"name": "a", "type": kind}, {"name": "b", "type": f"D{level - 1}"}]
        kind = {"type": "record", "name": f"D{level}", "fields": twice}
    return dropping(kind)


def dropping(kind: Any) -> dict[str, Any]:
    """A writer's schema with the field `f`, and one that the reader does not have."""
    return {
        "type": "record",
        "name": "R",
        "fields": [{"name": "f", "type": "long"}, {"name": "d", "type": kind}],
    }


def chain(levels: int, make: Any = lambda kind: kind) -> dict[str, Any]:
    """A schema of types each of which has a field of the one before."""
    kinds = [
        {
            "type": "record",
            "name": f"C{n}",
            "fields": [{"name": "c", "type": make(f"C{n - 1}" if n else "int")}],
        }
        for n in range(levels)
    ]
    return dropping(
        {
            "type": "record",
            "name": "All",
            "fields": [{"name": f"f{n}", "type": kind} for n, kind in enumerate(kinds)],
        }
    )


def nested(levels: int) -> str:
    """The text of a schema with arrays of arrays."""
    before, after = json.dumps(dropping("KIND")).split('"KIND"')
    return f"""{before}{'{"type": "array", "items": ' * levels}"int"{"}" * levels}{after}"""


EMPTY = {
    "type": "record",
    "name": "Z",
    "fields": [{"name": f"z{n}", "type": "null"} for n in range(200)],
}


@pytest.mark.promise("C60")
@pytest.mark.parametrize(
    ("written", "content", "sentence"),
    [
        (doubling(40, "int"), b"\x02", "does not fit the Avro schema"),
        (doubling(40, "null"), b"\x02", "takes too many steps to read for a value of so few bytes"),
        (
            dropping({"type": "array", "items": EMPTY}),
            b"\x02\x02\x00",
            "has an? array whose items take too few bytes",
        ),
        (
            dropping({"type": "map", "values": EMPTY}),
            b"\x02\x00",
            "has an? map whose items take too few bytes",
        ),
        (chain(400), b"\x02", "is more than 100 levels deep"),
        (
            chain(400, lambda kind: {"type": "array", "items": kind}),
            b"\x02",
            "is more than 100 levels deep",
        ),
        (nested(300), b"\x02\x00", "is more than 100 levels deep"),
        (nested(2000), b"\x02\x00", "is no Avro schema"),
        ({**of("long"), "doc": "x" * 2**20}, b"\x02", "has more than 1,048,576 bytes"),
        (
            dropping([{"type": "fixed", "name": f"F{n}", "size": 1} for n in range(2001)]),
            b"\x02\x00\x00",
            "has more than 2,000 types",
        ),
        (dropping({"type": "fixed", "name": "F", "size": "a"}), b"\x02", "is no Avro schema"),
        (
            dropping({"type": "fixed", "name": "F", "size": -1}),
            b"\x02a",
            "does not fit the Avro schema",
        ),
        (
            {**dropping("x"), "__fastavro_parsed": True, "__named_schemas": {"x": 5}},
            b"\x02",
            "is no Avro schema",
        ),
    ],
    ids=lambda case: case[:40] if isinstance(case, str) else "",
)
def test_whatever_a_writers_schema_makes_of_the_parser_is_the_records_fate(
    written: Any, content: bytes, sentence: str
) -> None:
    """In time that does not grow with what the schema stands for: of doubling types each level took
    twice as long."""
    text = written if isinstance(written, str) else json.dumps(written)
    found = avro_schema(as_text(of("long")), Path("x.avsc"), {7: text})
    since = time.process_time()
    with pytest.raises(UndecodableError, match=sentence) as caught:
        found.decoder()(framed(7, content))
    assert time.process_time() - since < 1
    assert str(caught.value).endswith(" (written with schema 7)")


def test_schemas_as_large_as_real_ones_are_read() -> None:
    """A hundred fields of records of records, each of which may be null, and thirty levels of
    them."""
    kind: Any = "string"
    for level in range(30):
        kind = [
            "null",
            {"type": "record", "name": f"L{level}", "fields": [{"name": "x", "type": kind}]},
        ]
    wide = [
        {
            "name": f"w{n}",
            "type": [
                "null",
                {
                    "type": "record",
                    "name": f"W{n}",
                    "fields": [{"name": "a", "type": {"type": "array", "items": "string"}}],
                },
            ],
        }
        for n in range(500)
    ]
    written = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "f", "type": "long"}, {"name": "d", "type": kind}, *wide],
    }
    value = {"f": 5, "d": None, **{f"w{n}": {"a": ["x"]} for n in range(500)}}
    assert column(written, of("long"), value) == 5


SKIPPED: list[tuple[Any, bytes]] = [
    ("string", b"\x0aab"),
    ("string", b"\x01abc"),
    ("bytes", b"\x0aab"),
    ("bytes", b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x7fab"),
    ({"type": "fixed", "name": "F", "size": 4}, b"ab"),
    ("double", b"ab"),
    ("float", b"ab"),
    ("boolean", b""),
    ("long", b"\x80"),
    (["null", "string"], b"\x02\x0aab"),
    ({"type": "map", "values": "string"}, b"\x02\x02"),
    ({"type": "array", "items": "double"}, b"\x02"),
    ({"type": "array", "items": "double"}, b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
    (inner({"name": "a", "type": "string"}), b"\x0aab"),
]


@pytest.mark.promise("C60")
@pytest.mark.parametrize(("kind", "content"), SKIPPED)
def test_a_value_that_is_cut_short_in_a_field_that_the_reader_skips_is_undecodable(
    kind: Any, content: bytes
) -> None:
    """The last array has so many doubles that skipping what is not there would never end."""
    found = avro_schema(as_text(of("long")), Path("x.avsc"), {7: json.dumps(dropping(kind))})
    with pytest.raises(UndecodableError, match="does not fit the Avro schema: it ends too early"):
        found.decoder()(framed(7, b"\x02" + content))


@law
@given(drawn=schemas_with_values())
def test_the_same_schema_under_an_id_reads_the_same(drawn: tuple[Any, list[Any]]) -> None:
    schema, values = drawn
    contents = [encoded(schema, value) for value in values]
    bare, by_id = (
        avro_schema(as_text(schema), Path("x.avsc")),
        avro_schema(as_text(schema), Path("x.avsc"), {7: json.dumps(schema)}),
    )
    assert [by_id.decoder()(framed(7, each)) for each in contents] == [
        bare.decoder()(each) for each in contents
    ]


@law
@given(drawn=schemas_with_values())
def test_a_value_is_the_same_beside_fields_that_were_added(drawn: tuple[Any, list[Any]]) -> None:
    """Another writer's schema: everything goes through the schemas' resolution."""
    schema, values = drawn
    more = {"name": "more", "type": {"type": "array", "items": "string"}}
    written = {**schema, "fields": [more, *schema["fields"]]}
    found = avro_schema(as_text(schema), Path("x.avsc"), {8: json.dumps(written)})
    for value in values:
        row = pa.scalar(
            found.decoder()(framed(8, encoded(written, {**value, "more": ["x"]}))), found.type
        ).as_py()
        bare = avro_schema(as_text(schema), Path("x.avsc")).decoder()(encoded(schema, value))
        assert same(row, in_a_column(bare))


@pytest.mark.parametrize("content", [b"", b"\x00\x00\x00\x00", b"\x01\x00\x00\x00\x07\x0a", b"{}"])
def test_a_value_without_a_schema_id_is_refused(content: bytes) -> None:
    found = avro_schema(as_text(of("long")), Path("x.avsc"), {7: json.dumps(of("long"))})
    with pytest.raises(
        UndecodableError, match="does not begin with a zero byte and the id of the schema"
    ):
        found.decoder()(content)


@pytest.mark.parametrize("text", ['{"type": "object"}', 'syntax = "proto3";', '"int"', "[]"])
def test_what_was_written_with_another_kind_of_schema_is_refused(text: str) -> None:
    found = avro_schema(as_text(of("long")), Path("x.avsc"), {7: text})
    with pytest.raises(UndecodableError, match=r"written with"):
        found.decoder()(framed(7, b"\x0a"))


def test_an_id_that_nobody_knows_is_no_fault_of_the_record() -> None:
    schema = avro_schema(as_text(of("long")), Path("x.avsc"), {})
    with pytest.raises(KeyError):
        read_records(
            kafka_table([(None, framed(7, b"\x0a"), FAR)]),
            rules(schema=schema, event_time=("f",), key=None),
        )


def test_bronze_says_which_schema_a_value_was_written_with() -> None:
    schema = avro_schema(
        as_text(of("long")),
        Path("x.avsc"),
        {7: json.dumps(of("long")), 2**32 - 1: json.dumps(of("int"))},
    )
    values = [framed(7, b"\x0a"), framed(2**32 - 1, b"\x0a"), framed(7, b""), b"x", None]
    read = read_records(
        kafka_table([(b"k", value, FAR) for value in values]),
        rules(schema=schema, event_time=("f",), key=None),
    )
    assert read[WRITER_SCHEMA.name].to_pylist() == [7, 2**32 - 1, 7, None, None]
    assert [reason is None for reason in read["reason"].to_pylist()] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_references_are_written_into_the_schema_that_has_them() -> None:
    city = {
        "type": "record",
        "name": "City",
        "namespace": "geo",
        "fields": [{"name": "zip", "type": "int"}],
    }
    address = {
        "type": "record",
        "name": "Address",
        "namespace": "geo",
        "fields": [{"name": "city", "type": "City"}, {"name": "was", "type": ["null", "geo.City"]}],
    }
    main = {
        "type": "record",
        "name": "R",
        "fields": [
            {"name": "f", "type": "geo.Address"},
            {"name": "g", "type": {"type": "array", "items": "geo.City"}},
        ],
    }
    text = self_contained(json.dumps(main), [json.dumps(city), json.dumps(address)])
    value = {"f": {"city": {"zip": 1}, "was": {"zip": 2}}, "g": [{"zip": 3}]}
    assert column(json.loads(text), json.loads(text), value) == value["f"]
    assert self_contained(json.dumps(city), []) == json.dumps(city)
    assert self_contained("no schema", [json.dumps(city)]) == "no schema"
    assert self_contained(json.dumps(main), [json.dumps(city)]) == json.dumps(main), (
        "a type that is missing is found out later"
    )


@law
@given(content=st.binary(max_size=12))
def test_no_bytes_under_another_schema_break_the_reader(content: bytes) -> None:
    written = of(["null", "string", {"type": "map", "values": logical("int", "date")}], other="x")
    found = avro_schema(as_text(of(["null", "string"])), Path("x.avsc"), {7: json.dumps(written)})
    try:
        value = found.decoder()(framed(7, content))
    except UndecodableError:
        return
    assert pa.array([value], found.type).is_valid().to_pylist() == [True]
