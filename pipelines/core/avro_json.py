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

from pipelines.core.avro_columns import UNITS_US, is_logical
from pipelines.core.json_exact import EPOCH, exact_decimal
from pipelines.core.times import parse_microseconds

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
    """Error for a value that does not fit the schema.

    The message says where, and what would be right.
    """


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

    def of(self, schema: Any, found: Any, where: str) -> Any:
        """Convert the JSON value at the dotted path `where` for the writer.

        Raises UnencodableError where it does not fit.
        """
        if found is None and _may_be_null(schema):
            return None
        schema = self._defined(schema)
        kind = schema["type"] if schema["type"] != "error" else "record"
        if is_logical(schema) or schema.get("logicalType") == "uuid":
            kind = schema["logicalType"].removeprefix("local-").partition("-")[0]
        try:
            return self._made(kind, schema, found, where)
        except UnencodableError:
            raise
        except (ValueError, TypeError, ArithmeticError, AttributeError):
            raise UnencodableError(f"`{where}` does not fit {kind}; write {_RIGHT[kind]}") from None

    def _made(self, kind: str, schema: Mapping[str, Any], found: Any, where: str) -> Any:
        """Convert the value of a part.

        Raises ValueError, TypeError, ArithmeticError or AttributeError where it does not fit.
        """
        match kind:
            case "record":
                return self._record(schema, found, where)
            case "array":
                return [
                    self.of(schema["items"], each, f"{where}[{i}]")
                    for i, each in enumerate(_of_type(list, found))
                ]
            case "map":
                return {
                    name: self.of(schema["values"], each, f"{where}.{name}")
                    for name, each in found.items()
                }
            case "boolean":
                return _of_type(bool, found)
            case "int" | "long":
                return _coerce(
                    -(2 ** _BITS[kind]) <= _of_type(int, found) < 2 ** _BITS[kind], found
                )
            case "float" | "double":
                return float(
                    _coerce(found in _NO_NUMBERS or type(found) in (int, float, Decimal), found)
                )
            case "string":
                return _of_type(str, found)
            case "enum":
                return _coerce(found in schema["symbols"], found)
            case "bytes" | "fixed":
                content = b64decode(found, validate=True)
                return _coerce(len(content) == schema.get("size", len(content)), content)
            case "decimal":
                number = Decimal(
                    repr(found) if type(found) is float else _coerce(type(found) is not bool, found)
                )
                return exact_decimal(schema["precision"], schema.get("scale", 0), number)
            case "uuid":
                return UUID(found).bytes if schema["type"] == "fixed" else str(UUID(found))
        if type(found) is int:  # the number that Avro has for it
            return found
        if kind == "date":
            return (date.fromisoformat(found) - EPOCH.date()).days
        if kind == "time":
            at = time.fromisoformat(found)
            us = ((at.hour * 60 + at.minute) * 60 + at.second) * 1_000_000 + at.microsecond
        else:
            us = parse_microseconds(found)
        if schema["logicalType"].endswith("-nanos"):
            return us * 1000
        whole, rest = divmod(us, UNITS_US[schema["logicalType"].rpartition("-")[2]])
        return _coerce(not rest, whole)

    def _record(self, schema: Mapping[str, Any], found: Any, where: str) -> dict[str, Any]:
        fields = {each["name"]: each for each in schema["fields"]}
        for name in _of_type(dict, found):
            if name not in fields:
                raise UnencodableError(
                    f"`{where}.{name}` is no field of the schema; it has {', '.join(fields)}"
                )
        for name, each in fields.items():
            if name not in found and "default" not in each and not _may_be_null(each["type"]):
                raise UnencodableError(f"`{where}.{name}` is missing, and has no default; add it")
        return {
            name: self.of(each["type"], found.get(name), f"{where}.{name}")
            if name in found or "default" not in each
            else self._default(each["type"], each["default"])
            for name, each in fields.items()
        }

    def _default(self, schema: Any, found: Any) -> Any:
        """Convert a default for the writer. The schema spells bytes as one character for each."""
        if found is None:
            return None
        schema = self._defined(schema)
        match schema["type"]:
            case "bytes" | "fixed":
                return found.encode("latin-1")
            case "record" | "error":
                fields = {each["name"]: each for each in schema["fields"]}
                return {
                    name: self._default(each["type"], found.get(name, each.get("default")))
                    for name, each in fields.items()
                }
            case "array":
                return [self._default(schema["items"], each) for each in found]
            case "map":
                return {name: self._default(schema["values"], each) for name, each in found.items()}
        return found

    def _defined(self, schema: Any) -> Mapping[str, Any]:
        """Return a part with its type's definition in place of a name, and without null."""
        if isinstance(schema, list):
            [schema] = [choice for choice in schema if choice not in ("null", {"type": "null"})]
        name = schema if isinstance(schema, str) else schema["type"]
        return (
            self.named[name]
            if name in self.named
            else {"type": schema}
            if isinstance(schema, str)
            else schema
        )


def _may_be_null(schema: Any) -> bool:
    return isinstance(schema, list) and any(
        choice in ("null", {"type": "null"}) for choice in schema
    )


def _of_type(kind: type, found: Any) -> Any:
    return _coerce(type(found) is kind, found)


def _coerce(is_so: object, found: Any) -> Any:
    if not is_so:
        raise ValueError
    return found
