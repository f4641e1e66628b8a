"""Encoder from JSON to Avro, for values written in the JSON form that messages have."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from io import BytesIO
from typing import Any, Final
from uuid import UUID

from fastavro import parse_schema, schemaless_writer

from watersmeet.core.avro_columns import UNITS_US, exact_decimal, is_logical
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
    """Return the encoder of values, as `json.loads` gives them, as bare Avro of this schema.

    Decimals, times and bytes are written as in messages. Dates, times and timestamps may also be
    the number that Avro has for them. Fields that are left out take their defaults, else null.
    Numbers with a fraction are exact if they are Decimal. The encoder raises UnencodableError.
    """
    named: dict[str, Any] = {}
    schema = parse_schema(json.loads(text), named)

    def encode(value: Any) -> bytes:
        """Encode a JSON value as bare Avro. Raises UnencodableError where it does not fit."""
        content = BytesIO()
        schemaless_writer(content, schema, _Parts(named).of(schema, value, "value"))
        return content.getvalue()

    return encode


@dataclass(frozen=True)
class _Parts:
    """Converter of parts of a value for fastavro's writer. `named`: the schema's named types."""

    named: Mapping[str, Any]

    def of(self, schema: Any, value: Any, where: str) -> Any:
        """Convert the JSON value at the dotted path `where` for the writer.

        Raises UnencodableError where it does not fit.
        """
        if value is None and _may_be_null(schema):
            return None
        schema = self._defined(schema)
        kind = schema["type"] if schema["type"] != "error" else "record"
        if is_logical(schema) or schema.get("logicalType") == "uuid":
            kind = schema["logicalType"].removeprefix("local-").partition("-")[0]
        try:
            return self._converted(kind, schema, value, where)
        except UnencodableError:
            raise
        except (ValueError, TypeError, ArithmeticError, AttributeError):
            raise UnencodableError(
                f"`{where}` does not fit {kind}", f"write {_RIGHT[kind]}"
            ) from None

    def _converted(self, kind: str, schema: Mapping[str, Any], value: Any, where: str) -> Any:
        """Convert the value of a part.

        Raises ValueError, TypeError, ArithmeticError or AttributeError where it does not fit.
        """
        match kind:
            case "record":
                return self._record(schema, value, where)
            case "array":
                items = enumerate(_of_type(list, value))
                return [self.of(schema["items"], item, f"{where}[{i}]") for i, item in items]
            case "map":
                return {
                    name: self.of(schema["values"], item, f"{where}.{name}")
                    for name, item in value.items()
                }
            case "date" | "time" | "timestamp":
                return _time(kind, schema["logicalType"], value)
        return _scalar(kind, schema, value)

    def _record(self, schema: Mapping[str, Any], record: Any, where: str) -> dict[str, Any]:
        fields = {field["name"]: field for field in schema["fields"]}
        for name in _of_type(dict, record):
            if name not in fields:
                raise UnencodableError(
                    f"`{where}.{name}` is no field of the schema", f"it has {', '.join(fields)}"
                )
        for name, field in fields.items():
            if name not in record and "default" not in field and not _may_be_null(field["type"]):
                raise UnencodableError(f"`{where}.{name}` is missing, and has no default", "add it")
        return {
            name: self._default(field["type"], field["default"])
            if name not in record and "default" in field
            else self.of(field["type"], record.get(name), f"{where}.{name}")
            for name, field in fields.items()
        }

    def _default(self, schema: Any, value: Any) -> Any:
        """Convert a default for the writer. The schema spells bytes as one character for each."""
        if value is None:
            return None
        schema = self._defined(schema)
        match schema["type"]:
            case "bytes" | "fixed":
                return value.encode("latin-1")
            case "record" | "error":
                fields = {field["name"]: field for field in schema["fields"]}
                return {
                    name: self._default(field["type"], value.get(name, field.get("default")))
                    for name, field in fields.items()
                }
            case "array":
                return [self._default(schema["items"], item) for item in value]
            case "map":
                return {name: self._default(schema["values"], item) for name, item in value.items()}
        return value

    def _defined(self, schema: Any) -> Mapping[str, Any]:
        """Return a part with its type's definition in place of a name, and without null."""
        if isinstance(schema, list):
            [schema] = [choice for choice in schema if choice not in ("null", {"type": "null"})]
        name = schema if isinstance(schema, str) else schema["type"]
        if name in self.named:
            schema = self.named[name]
        definition: Mapping[str, Any] = {"type": schema} if isinstance(schema, str) else schema
        return definition


def _may_be_null(schema: Any) -> bool:
    return isinstance(schema, list) and any(
        choice in ("null", {"type": "null"}) for choice in schema
    )


def _scalar(kind: str, schema: Mapping[str, Any], value: Any) -> Any:
    """Convert a value that is neither a collection nor a time. Raises as `_converted` does."""
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
    """Convert a date, time or timestamp, which may be the number that Avro has for it."""
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
