"""Conversion of Avro schemas to column types, and of fastavro's values to column values.

int and long have one column type here, and so have float and double: a schema may widen them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

import pyarrow as pa
from fastavro import parse_schema
from fastavro.read import LOGICAL_READERS
from fastavro.schema import SchemaParseException, UnknownType

from watersmeet.core.json_schema import FORBIDDEN_IN_NAMES, UnfitError
from watersmeet.core.json_text import UndecodableError
from watersmeet.core.times import EPOCH
from watersmeet.core.types import TIME

_Convert: TypeAlias = Callable[[Any], Any]

NO_SCHEMA: Final = (
    SchemaParseException,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    RecursionError,
)
"""Exceptions, beside UnknownType, that fastavro raises for a document that is not a schema."""

_PLAIN: Final = {
    "boolean": (pa.bool_(), bool),
    "int": (pa.int64(), int),
    "long": (pa.int64(), int),
    "float": (pa.float64(), float),
    "double": (pa.float64(), float),
    "string": (pa.string(), str),
    "enum": (pa.string(), str),
    "bytes": (pa.binary(), bytes),
    "fixed": (pa.binary(), bytes),
}
"""By Avro type, the type of the column and the Python type of its values."""

MAX_DIGITS: Final = 38
"""Maximum number of digits of a decimal: as many as a table's column holds."""

LOCAL: Final = timezone(timedelta(0), "local")
"""The zone of a time that was written without one; it counts as UTC. Its identity tells it."""

_EXACT: Final = Context(prec=2 * MAX_DIGITS, traps=[Inexact, InvalidOperation])

_OWN: Final = "watersmeet-"
UNITS_US: Final = {"millis": 1000, "micros": 1}
_TIMESTAMPS: Final = frozenset(
    f"{local}timestamp-{unit}" for local in ("", "local-") for unit in ("millis", "micros", "nanos")
)
_RENAMED: Final = frozenset(["decimal", "timestamp-nanos", "local-timestamp-nanos", "uuid"])
"""Logical types that this module reads itself, under names of its own.

fastavro would round them, does not know them, or would parse them for nothing.
"""


class Parsed(NamedTuple):
    """A schema in fastavro's parsed form, and its named types by their full names."""

    schema: Any
    named: Mapping[str, Any]


def parsed(document: Any) -> Parsed:
    """Parse a JSON document as an Avro schema. Raises UnfitError where it is not one."""
    named: dict[str, Any] = {}
    try:
        return Parsed(parse_schema(_renamed(document), named), named)
    except UnknownType as error:
        raise UnfitError(
            f"names the type `{error.name}`, which it does not define", "define it in the file"
        ) from None
    except NO_SCHEMA as error:
        raise UnfitError(
            f"is no valid Avro schema ({type(error).__name__}: {error})", "correct it"
        ) from None


def _renamed(node: Any) -> Any:
    """Return the schema with the logical types of `_RENAMED` under names of their own.

    A logical type on a type that cannot have it is ignored from then on, as Avro's specification
    says. Keys that fastavro adds to a schema when it parses it (`__...`) are left out. Raises
    UnfitError for a decimal of bytes without a valid precision and scale.
    """
    if isinstance(node, list):
        return [_renamed(part) for part in node]
    if not isinstance(node, dict):
        return node
    node = {name: part for name, part in node.items() if not name.startswith("__")}
    node |= {
        name: _renamed(node[name]) for name in ("type", "fields", "items", "values") if name in node
    }
    if node.get("logicalType") in _RENAMED:
        if node["logicalType"] == "decimal" and node.get("type") in ("bytes", "fixed"):
            _check_decimal(node)
        node["logicalType"] = _OWN + node["logicalType"]
    return node


def _check_decimal(node: Mapping[str, Any]) -> None:
    precision = node.get("precision")
    scale = node.get("scale", 0)
    if (
        type(precision) is not int
        or type(scale) is not int
        or not 0 <= scale <= precision
        or not precision
    ):
        raise UnfitError(
            "has a decimal without a `precision` of 1 or more and a `scale` of at most that",
            "give it both",
        )


class Column(NamedTuple):
    """A column type, and the function that converts fastavro's values to it (None: not needed)."""

    type: pa.DataType
    convert: _Convert | None = None


def column_of(parsed: Parsed, *, is_resolved: bool = False) -> Column:
    """Return the column for the values of a record schema.

    `is_resolved`: True where the values were written with other schemas. Raises UnfitError.
    """
    schema = parsed.schema
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise UnfitError("the top level must be a record", "name its fields there")
    return _Columns(parsed.named, is_resolved).of(schema, "", ())


@dataclass(frozen=True)
class _Columns:
    """Reader of the parts of a valid schema as columns. `named`: the schema's named types.

    `is_resolved`: True where the values were written with other schemas. A value may then also be a
    field's default, as the schema spells it, or have another logical type, so every value is
    checked.
    """

    named: Mapping[str, Any]
    is_resolved: bool

    def of(self, schema: Any, where: str, inside: tuple[str, ...]) -> Column:
        """Return the column of a part at the path `where`, inside the named types `inside`."""
        if isinstance(schema, list):
            return self._of_union(schema, where, inside)
        if isinstance(schema, str):
            if schema in self.named:
                return self.of(self.named[schema], where, inside)
            schema = {"type": schema}
        kind = schema["type"]
        if (logical := _of_logical_type(schema, where)) is not None:
            return logical
        if kind in _PLAIN:
            column, python_type = _PLAIN[kind]
            return Column(column, partial(_checked, python_type) if self.is_resolved else None)
        if kind == "array":
            item = self.of(schema["items"], f"{where}[]", inside)
            return Column(pa.list_(item.type), item.convert and partial(_list, item.convert))
        if kind == "map":
            value = self.of(schema["values"], f"{where}[]", inside)
            return Column(
                pa.map_(pa.string(), value.type), value.convert and partial(_map, value.convert)
            )
        if kind in ("record", "error"):
            return self._of_record(schema, where, inside)
        if kind in self.named:
            return self.of(self.named[kind], where, inside)
        raise _refused(
            where, f"is {kind} and nothing else", "give it a type that a table column can have"
        )

    def _of_union(self, choices: list[Any], where: str, inside: tuple[str, ...]) -> Column:
        rest = [choice for choice in choices if choice not in ("null", {"type": "null"})]
        if len(rest) != 1:
            raise _refused(
                where,
                "is a union of several types, or of none but null, and a table column has one",
                "give it one",
            )
        column = self.of(rest[0], where, inside)
        if len(choices) == 1:
            return column
        return Column(column.type, column.convert and partial(_optional, column.convert))

    def _of_record(self, schema: Mapping[str, Any], where: str, inside: tuple[str, ...]) -> Column:
        if schema["name"] in inside:
            raise _refused(
                where,
                f"is a `{schema['name']}` inside of itself, and a column has an end",
                "write its levels out",
            )
        if not schema["fields"]:
            raise _refused(where, "is a record without fields", "give it one")
        spellings: dict[str, str] = {}
        columns: dict[str, Column] = {}
        for field in schema["fields"]:
            name = field["name"]
            path = f"{where}.{name}" if where else name
            if not name or not FORBIDDEN_IN_NAMES.isdisjoint(name):
                raise _refused(path, "has a name that no table column can have", "give it another")
            if name in columns:
                raise _refused(path, "is there twice", "rename one")
            if (other := spellings.setdefault(name.lower(), name)) != name:
                raise _refused(
                    path, f"differs from `{other}` only in case, which columns do not", "rename one"
                )
            columns[name] = self.of(field["type"], path, (*inside, schema["name"]))
        kind = pa.struct([(name, column.type) for name, column in columns.items()])
        if self.is_resolved:
            defaults = {
                field["name"]: field["default"] for field in schema["fields"] if "default" in field
            }
            every = {name: column.convert or _as_it_is for name, column in columns.items()}
            return Column(kind, partial(_resolved_record, every, defaults))
        converts = {name: column.convert for name, column in columns.items() if column.convert}
        return Column(kind, partial(_record, converts) if converts else None)


def _refused(where: str, what: str, fix: str) -> UnfitError:
    return UnfitError(f"field `{where}` {what}" if where else f"the top level {what}", fix)


def is_logical(schema: Mapping[str, Any]) -> bool:
    """Return True where a part of a parsed schema has a logical type that is not ignored."""
    return _of_logical_type(schema, "") is not None


def _of_logical_type(schema: Mapping[str, Any], where: str) -> Column | None:
    """Return the column of a logical type, or None where there is none on this type.

    A logical type on a type that cannot have it is ignored, as Avro's specification says.
    """
    named: str = schema.get("logicalType", "")
    match (schema["type"], named.removeprefix(_OWN)):
        case ("bytes" | "fixed", "decimal"):
            precision = schema["precision"]
            scale = schema.get("scale", 0)
            if precision > MAX_DIGITS:
                raise _refused(
                    where,
                    (
                        f"is a decimal of {precision} digits, and a table column has up to "
                        f"{MAX_DIGITS}"
                    ),
                    "use fewer",
                )
            return Column(pa.decimal128(precision, scale), partial(_decimal, precision, scale))
        case ("int", "date"):
            return Column(pa.date32(), _date)
        case (("int", "time-millis") | ("long", "time-micros")) as at:
            return Column(pa.string(), partial(_time_text, UNITS_US[at[1].rpartition("-")[2]]))
        case ("long", at) if at in _TIMESTAMPS:
            zone = LOCAL if at.startswith("local-") else timezone.utc
            return Column(TIME, partial(_timestamp, at.rpartition("-")[2], zone))
        case ("fixed", "uuid") if schema["size"] == 16:
            return Column(pa.string(), _uuid_text)
        case _:
            return None


# -- values


def _read_decimal(data: bytes, writer_schema: Any = None, _reader_schema: Any = None) -> Decimal:
    unscaled = int.from_bytes(data, "big", signed=True)
    if abs(unscaled) >= 10**MAX_DIGITS:
        raise UndecodableError(f"a decimal has more than {MAX_DIGITS} digits")
    return Decimal(f"{unscaled}E-{writer_schema.get('scale', 0)}")


def _read_nanoseconds(data: int, *_schemas: Any) -> datetime:
    return EPOCH + timedelta(microseconds=data // 1000)


LOGICAL_READERS[f"bytes-{_OWN}decimal"] = LOGICAL_READERS[f"fixed-{_OWN}decimal"] = _read_decimal
LOGICAL_READERS[f"long-{_OWN}timestamp-nanos"] = LOGICAL_READERS[
    f"long-{_OWN}local-timestamp-nanos"
] = _read_nanoseconds


def _checked(of_python: type, value: Any) -> Any:
    if type(value) is of_python:
        return value
    if of_python is float and type(value) is int:
        return float(value)
    if of_python is bytes and isinstance(value, str):
        return _default_bytes(value)
    raise UndecodableError("a field was written with another type than the schema has")


def _default_bytes(text: str) -> bytes:
    """Return the bytes of a default, which a schema spells as one character for each byte."""
    return text.encode("latin-1")


def _as_it_is(value: Any) -> Any:
    return value


def _optional(convert: _Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _list(convert: _Convert, items: list[Any]) -> list[Any]:
    return [*map(convert, items)]


def _map(convert: _Convert, entries: dict[str, Any]) -> dict[str, Any]:
    return {name: convert(value) for name, value in entries.items()}


def _record(converts: Mapping[str, _Convert], record: dict[str, Any]) -> dict[str, Any]:
    for name, convert in converts.items():
        record[name] = convert(record[name])
    return record


def _resolved_record(
    converts: Mapping[str, _Convert], defaults: Mapping[str, Any], record: dict[str, Any]
) -> dict[str, Any]:
    """Convert the fields of a record.

    A record that is itself a default may leave out fields that have a default.
    """
    return {
        name: convert(record[name] if name in record else defaults[name])
        for name, convert in converts.items()
    }


def _decimal(precision: int, scale: int, value: Decimal | bytes | str) -> Decimal:
    if not isinstance(value, Decimal):  # written without the logical type, or a default
        data = _default_bytes(value) if isinstance(value, str) else value
        value = _read_decimal(data, {"scale": scale})
    return exact_decimal(precision, scale, value)


def exact_decimal(precision: int, scale: int, number: Decimal) -> Decimal:
    """Return a number with `scale` digits of a fraction.

    Raises UndecodableError where it has more of them, or more than `precision` digits in all.
    """
    with suppress(Inexact, InvalidOperation):
        exactly = number.quantize(Decimal((0, (1,), -scale)), context=_EXACT)
        if exactly.is_finite() and len(exactly.as_tuple().digits) <= precision:
            return exactly or abs(exactly)  # a column has no -0
    raise UndecodableError(f"a decimal does not fit {precision} digits, {scale} of them a fraction")


# A number in the functions below was written without the logical type, or is a default.


def _time_text(unit_us: int, value: time | int) -> str:
    if isinstance(value, int):
        value = (EPOCH + timedelta(microseconds=_within_a_day(value * unit_us))).time()
    return value.isoformat("microseconds")


def _within_a_day(us: int) -> int:
    if not 0 <= us < 86_400_000_000:
        raise ValueError("a day has 24 hours")
    return us


def _date(value: date | int) -> date:
    return EPOCH.date() + timedelta(days=value) if isinstance(value, int) else value


def _timestamp(unit: str, zone: timezone, value: datetime | int) -> datetime:
    """Return a time, or a number in a unit since the epoch, as a time in UTC, or in `LOCAL`."""
    if isinstance(value, int):
        if unit == "nanos":
            value = _read_nanoseconds(value)
        else:
            value = EPOCH + timedelta(microseconds=value * UNITS_US[unit])
    return value if value.tzinfo is zone else value.replace(tzinfo=zone)


def _uuid_text(value: bytes | str) -> str:
    return str(UUID(bytes=_default_bytes(value) if isinstance(value, str) else value))
