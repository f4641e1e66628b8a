"""Encoder from JSON to Avro, for values written in the JSON form that messages have."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from datetime import date, time
from decimal import Decimal
from io import BytesIO
from typing import Any, Final
from uuid import UUID

from fastavro import parse_schema, schemaless_writer

from watersmeet.core.avro_columns import UNITS_US, exact_decimal
from watersmeet.core.avro_types import AvroType, avro_type
from watersmeet.core.times import EPOCH, parse_microseconds

_RIGHT: Final = {
    "boolean": "true or false",
    "int": "a whole number of up to 32 bits",
    "long": "a whole number of up to 64 bits",
    "float": "a number",
    "double": "a number",
    "string": "a text",
    "enum": "a text, one of its symbols",
    "bytes": "a text in base64",
    "fixed": "a text in base64 of its size",
    "decimal": "a number that fits its digits",
    "date": 'a text such as "2026-01-31"',
    "time": 'a text such as "12:00:00.000"',
    "timestamp": 'a text such as "2026-01-31T12:00:00.000Z", no finer than its unit, or a whole '
    "number in its unit",
    "uuid": "a UUID as text",
    "array": "an array",
    "map": "an object",
    "record": "an object",
}
_NO_NUMBERS: Final = frozenset(["NaN", "Infinity", "-Infinity"])
_BITS: Final = {"int": 31, "long": 63}


class UnencodableError(ValueError):
    """Error for a value that does not fit the schema: what does not fit, and how to fix it."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what}; {fix}")
        self.what = what
        self.fix = fix


def encoder(text: str) -> Callable[[Any], bytes]:
    """Return the encoder of JSON values, as messages have them, as bare Avro of this schema.

    Dates, times and timestamps may also be the number that Avro has for them. Fields that are left
    out take their defaults, else null. Numbers with a fraction are exact if they are Decimal. The
    encoder raises UnencodableError.
    """
    schema = parse_schema(json.loads(text))
    top = avro_type(schema)

    def encode(value: Any) -> bytes:
        content = BytesIO()
        schemaless_writer(content, schema, _converted(top, value, "value"))
        return content.getvalue()

    return encode


def _converted(part: AvroType, value: Any, where: str) -> Any:
    if value is None and part.is_nullable:
        return None
    [part] = part.choices
    logical = "uuid" if part.schema.get("logicalType") == "uuid" else part.logical
    kind = logical.removeprefix("local-").partition("-")[0] or part.kind
    try:
        match kind:
            case "record":
                return _record(part, value, where)
            case "array":
                items = enumerate(_of_type(list, value))
                return [_converted(part.items[0], item, f"{where}[{i}]") for i, item in items]
            case "map":
                [inner] = part.items
                return {n: _converted(inner, item, f"{where}.{n}") for n, item in value.items()}
            case "date" | "time" | "timestamp":
                return _time(kind, logical, value)
        return _scalar(kind, part.schema, value)
    except UnencodableError:
        raise
    except (ValueError, TypeError, ArithmeticError, AttributeError):
        what = f"`{where}` does not fit {kind}"
        raise UnencodableError(what, f"write {_RIGHT[kind]}") from None


def _record(part: AvroType, record: Any, where: str) -> dict[str, Any]:
    fields = {field.name: field for field in part.fields}
    for name in _of_type(dict, record):
        if name not in fields:
            raise UnencodableError(
                f"`{where}.{name}` is no field of the schema", f"it has {', '.join(fields)}"
            )
    values = {}
    for name, field in fields.items():
        if name not in record and "default" in field.schema:
            values[name] = _default(field.type, field.schema["default"])
        elif name in record or field.type.is_nullable:
            values[name] = _converted(field.type, record.get(name), f"{where}.{name}")
        else:
            raise UnencodableError(f"`{where}.{name}` is missing, and has no default", "add it")
    return values


def _default(part: AvroType, value: Any) -> Any:
    # The schema spells bytes as one character for each.
    if value is None:
        return None
    [part] = part.choices
    match part.kind:
        case "bytes" | "fixed":
            return value.encode("latin-1")
        case "record":
            return {
                field.name: _default(field.type, value.get(field.name, field.schema.get("default")))
                for field in part.fields
            }
        case "array":
            return [_default(part.items[0], item) for item in value]
        case "map":
            return {name: _default(part.items[0], item) for name, item in value.items()}
    return value


def _scalar(kind: str, schema: Mapping[str, Any], value: Any) -> Any:
    match kind:
        case "boolean":
            return _of_type(bool, value)
        case "int" | "long":
            limit = 2 ** _BITS[kind]
            return _coerce(-limit <= _of_type(int, value) < limit, value)
        case "float" | "double":
            is_number = value in _NO_NUMBERS or type(value) in (int, float, Decimal)
            return float(_coerce(is_number, value))
        case "enum":
            return _coerce(value in schema["symbols"], value)
        case "bytes" | "fixed":
            content = b64decode(value, validate=True)
            return _coerce(len(content) == schema.get("size", len(content)), content)
        case "decimal":
            spelled = repr(value) if type(value) is float else value
            number = Decimal(_coerce(type(value) is not bool, spelled))
            return exact_decimal(schema["precision"], schema.get("scale", 0), number)
        case "uuid":
            return UUID(value).bytes if schema["type"] == "fixed" else str(UUID(value))
    return _of_type(str, value)


def _time(kind: str, logical_type: str, value: Any) -> int:
    if type(value) is int:
        return value
    if kind == "date":
        return (date.fromisoformat(value) - EPOCH.date()).days
    if kind == "time":
        at = time.fromisoformat(value)
        us = ((at.hour * 60 + at.minute) * 60 + at.second) * 1_000_000 + at.microsecond
    else:
        us = parse_microseconds(value)
    if logical_type.endswith("-nanos"):
        return us * 1000
    whole, rest = divmod(us, UNITS_US[logical_type.rpartition("-")[2]])
    return int(_coerce(not rest, whole))


def _of_type(kind: type, value: Any) -> Any:
    return _coerce(type(value) is kind, value)


def _coerce(is_so: object, value: Any) -> Any:
    if not is_so:
        raise ValueError
    return value
