"""Avro for tests: random schemas with values that fit them, values as bytes, and records like those
of `cases`."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import count
from typing import Any
from uuid import UUID

import orjson
from fastavro import parse_schema, schemaless_reader, schemaless_writer
from hypothesis import strategies as st

from tests.support.cases import SOURCES, Case
from tests.support.topics import Published

Schema = dict[str, Any]

CASE_SCHEMA: Schema = {
    "type": "record",
    "name": "Case",
    "fields": [
        {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "k", "type": ["null", "string"], "default": None},
        {
            "name": "type",
            "type": ["null", {"type": "enum", "name": "Type", "symbols": ["heartbeat"]}],
            "default": None,
        },
        {"name": "n", "type": ["null", "int"], "default": None},
        {
            "name": "price",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2},
        },
        {"name": "tags", "type": {"type": "map", "values": "double"}},
    ],
}
"""What a value of `cases` is as Avro, with a price and tags of its own."""

BAD_BYTES = (None, b"", b"\x00", b"\xff" * 12, b"{}")
"""Values that are not of `CASE_SCHEMA`; the last but one begins with a time that no calendar
has."""


def schema_of(kind: Any, **more: Any) -> Schema:
    """A record with one field, `f`."""
    return {"type": "record", "name": "R", "fields": [{"name": "f", "type": kind, **more}]}


def logical(kind: str, name: str, **more: Any) -> Schema:
    return {"type": kind, "logicalType": name, **more}


def decimal(precision: int, scale: int) -> Schema:
    return logical("bytes", "decimal", precision=precision, scale=scale)


def enum(*symbols: str, **more: Any) -> Schema:
    return {"type": "enum", "name": "E", "symbols": [*symbols], **more}


def encoded(schema: Any, value: Any) -> bytes:
    """A value as the bytes of bare Avro."""
    content = io.BytesIO()
    schemaless_writer(content, parse_schema(schema), value)
    return content.getvalue()


def framed(schema_id: int, content: bytes) -> bytes:
    """Avro in the wire format of a registry."""
    return b"\x00" + schema_id.to_bytes(4, "big") + content


def decoded(schema: Any, content: bytes) -> Any:
    """What fastavro's own reader makes of bytes of that schema."""
    return schemaless_reader(io.BytesIO(content), parse_schema(schema), None)


def as_avro(value: bytes | None, schema: Schema = CASE_SCHEMA) -> bytes | None:
    """A JSON value of `cases` as Avro of a schema like `CASE_SCHEMA`; one that is bad becomes one
    of `BAD_BYTES`."""
    try:
        document = orjson.loads(value or b"")
        ts = timedelta(milliseconds=document["ts"])
        n = document.get("n")
        record = {
            **document,
            "ts": datetime(1970, 1, 1, tzinfo=timezone.utc) + ts,
            "price": Decimal(n or 0) / 4,
        }
        return encoded(schema, {**record, "tags": {"n": n or 0, "a": 0.5}})
    except (ValueError, TypeError, KeyError, OverflowError):
        return BAD_BYTES[len(value or b"") % len(BAD_BYTES)]


def other_writers() -> list[Schema]:
    """`CASE_SCHEMA`, and what other producers write: fields in another order and more of them,
    other units and types."""
    fields = {field["name"]: field for field in CASE_SCHEMA["fields"]}
    micros = {"name": "ts", "type": {"type": "long", "logicalType": "timestamp-micros"}}
    price = {
        "name": "price",
        "type": {"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 4},
    }
    more = {"name": "more", "type": {"type": "array", "items": "string"}, "default": []}
    floats = {"name": "tags", "type": {"type": "map", "values": "float"}}
    untyped = {
        "name": "type",
        "type": ["null", {"type": "enum", "name": "Type", "symbols": ["click", "heartbeat"]}],
    }
    writers = [
        [*fields.values()],
        [more, *reversed(fields.values())],
        [*(fields | {"ts": micros, "price": price}).values()],
    ]
    writers.append([*(fields | {"tags": floats, "type": untyped}).values(), more])
    return [{**CASE_SCHEMA, "fields": each} for each in writers]


def content(messages: Iterable[Published]) -> list[tuple[Any, ...]]:
    """Messages with what tells the values of `cases` apart: by source the number `n` of each."""
    found = []
    for message in messages:
        value = json.loads(message.value or b"")
        numbers = [[part.get("n") for part in value[source]] for source in SOURCES]
        found.append(
            (
                message._replace(value=None),
                value["key"],
                value["event_time"],
                value["last_event_time"],
                numbers,
            )
        )
    return found


def avro_case(case: Case, *sources: str) -> Case:
    """The same case with the values of these sources in Avro."""
    values = {
        source: [as_avro(value) if source in sources else value for value in mine]
        for source, mine in case.values.items()
    }
    return Case(values, case.timeout_ms, case.arrivals)


# -- random schemas and values


_DAYS = st.dates()
_TIMES = st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30))


def _leaves(names: Iterator[int]) -> Sequence[tuple[Any, st.SearchStrategy[Any]]]:
    in_utc = _TIMES.map(lambda found: found.replace(tzinfo=timezone.utc))
    in_ms = in_utc.map(lambda found: found.replace(microsecond=found.microsecond // 1000 * 1000))
    name = f"T{next(names)}"
    return [
        ("boolean", st.booleans()),
        ("int", st.integers(-(2**31), 2**31 - 1)),
        ("long", st.integers(-(2**63), 2**63 - 1)),
        ("float", st.floats(width=32, allow_nan=False, allow_infinity=False)),
        ("double", st.floats(allow_nan=False, allow_infinity=False)),
        ("bytes", st.binary(max_size=5)),
        ("string", st.text(max_size=5)),
        ({"type": "fixed", "name": name, "size": 3}, st.binary(min_size=3, max_size=3)),
        ({"type": "enum", "name": name, "symbols": ["A", "b_1"]}, st.sampled_from(["A", "b_1"])),
        ({"type": "int", "logicalType": "date"}, _DAYS),
        ({"type": "int", "logicalType": "time-millis"}, st.just(time(1, 2, 3, 4000))),
        ({"type": "long", "logicalType": "time-micros"}, st.times()),
        ({"type": "long", "logicalType": "timestamp-millis"}, in_ms),
        ({"type": "long", "logicalType": "timestamp-micros"}, in_utc),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, _TIMES),
        ({"type": "string", "logicalType": "uuid"}, st.uuids()),
        (
            {"type": "bytes", "logicalType": "decimal", "precision": 38, "scale": 9},
            _decimals(38, 9),
        ),
        (
            {
                "type": "fixed",
                "name": name,
                "size": 5,
                "logicalType": "decimal",
                "precision": 9,
                "scale": 0,
            },
            _decimals(9, 0),
        ),
        ({"type": "string", "logicalType": "no such type"}, st.text(max_size=3)),
    ]


def _decimals(precision: int, scale: int) -> st.SearchStrategy[Decimal]:
    largest = 10**precision - 1
    return st.integers(-largest, largest).map(lambda unscaled: Decimal(f"{unscaled}E-{scale}"))


@st.composite
def schemas_with_values(draw: st.DrawFn) -> tuple[Schema, list[Any]]:
    """A record schema of every kind that fits a table, and values that fit it."""
    names = count()

    def part(depth: int) -> tuple[Any, st.SearchStrategy[Any]]:
        kind = draw(
            st.sampled_from(
                ["leaf", "leaf", "optional", "array", "map", "record"] if depth else ["leaf"]
            )
        )
        if kind == "leaf":
            leaf: tuple[Any, st.SearchStrategy[Any]] = draw(st.sampled_from(_leaves(names)))
            return leaf
        if kind == "record":
            return record(depth)
        schema, values = part(depth - 1)
        if kind == "array":
            return {"type": "array", "items": schema}, st.lists(values, max_size=3)
        if kind == "map":
            return {"type": "map", "values": schema}, st.dictionaries(
                st.text(max_size=3), values, max_size=3
            )
        if isinstance(schema, list):
            return schema, values
        return draw(st.sampled_from([["null", schema], [schema, "null"]])), st.none() | values

    def record(depth: int) -> tuple[Schema, st.SearchStrategy[Any]]:
        parts = {f"f{i}": part(depth - 1) for i in range(draw(st.integers(1, 4)))}
        fields = [{"name": name, "type": schema} for name, (schema, _) in parts.items()]
        values = st.fixed_dictionaries({name: values for name, (_, values) in parts.items()})
        return {"type": "record", "name": f"R{next(names)}", "fields": fields}, values

    schema, values = record(4)
    return schema, draw(st.lists(values, max_size=4))


def in_a_column(found: Any) -> Any:
    """What fastavro's reader gives, as Arrow gives it back from a column."""
    if isinstance(found, Mapping):
        return {name: in_a_column(each) for name, each in found.items()}
    if isinstance(found, list):
        return [in_a_column(each) for each in found]
    if isinstance(found, datetime):
        return found.replace(tzinfo=timezone.utc)
    if isinstance(found, time):
        return found.isoformat("microseconds")
    return str(found) if isinstance(found, UUID) else found


def same(one: Any, other: Any) -> bool:
    """Whether a value of a column (maps as lists of pairs) is what `in_a_column` expects."""
    if isinstance(other, dict):
        return [*map(str, dict(one))] == [*other] and all(
            same(dict(one)[name], each) for name, each in other.items()
        )
    if isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other) and (type(one) is type(other) or isinstance(other, date))


def as_text(schema: Any) -> bytes:
    return json.dumps(schema).encode()
