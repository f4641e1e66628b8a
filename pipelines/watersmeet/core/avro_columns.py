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
from typing import Any, Final, NamedTuple, TypeAlias, cast
from uuid import UUID

import pyarrow as pa
from fastavro.read import LOGICAL_READERS

from watersmeet.core.avro_types import OWN, AvroType
from watersmeet.core.json_schema import UnfitError, name_fault
from watersmeet.core.json_text import UndecodableError
from watersmeet.core.times import EPOCH
from watersmeet.core.types import TIME

_Convert: TypeAlias = Callable[[Any], Any]

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

_OTHER_TYPE: Final = "a field was written with another type than the schema has"

UNITS_US: Final = {"millis": 1000, "micros": 1}


class Column(NamedTuple):
    """A column type, and the function that converts fastavro's values to it (None: not needed)."""

    type: pa.DataType
    convert: _Convert | None = None


def column_of(schema: AvroType, *, is_resolved: bool = False) -> Column:
    """Return the column of a record schema's values. Raises UnfitError.

    `is_resolved`: values were written with other schemas. One may then be a field's default, as the
    schema spells it, or have another logical type, so every value is checked.
    """
    if schema.schema.get("type") != "record":
        raise UnfitError("the top level must be a record", "name its fields there")
    return _Columns(is_resolved).of(schema, "", ())


@dataclass(frozen=True)
class _Columns:
    is_resolved: bool

    def of(self, part: AvroType, where: str, inside: tuple[str, ...]) -> Column:
        if part.logical:
            return _of_logical_type(part, where)
        if part.kind in _PLAIN:
            column, python_type = _PLAIN[part.kind]
            return Column(column, partial(_checked, python_type) if self.is_resolved else None)
        match part.kind:
            case "union":
                return self._of_union(part, where, inside)
            case "array":
                item = self.of(part.items[0], f"{where}[]", inside)
                return Column(pa.list_(item.type), item.convert and _list(item.convert))
            case "map":
                value = self.of(part.items[0], f"{where}[]", inside)
                kind = pa.map_(pa.string(), value.type)
                return Column(kind, value.convert and _map(value.convert))
            case "record":
                return self._of_record(part, where, inside)
        raise _refused(
            where, f"is {part.kind} and nothing else", "give it a type that a table column can have"
        )

    def _of_union(self, union: AvroType, where: str, inside: tuple[str, ...]) -> Column:
        if len(union.choices) != 1:
            what = "is a union of several types, or of none but null, and a table column has one"
            raise _refused(where, what, "give it one")
        column = self.of(union.choices[0], where, inside)
        if not union.is_nullable:
            return column
        return Column(column.type, column.convert and _optional(column.convert))

    def _of_record(self, record: AvroType, where: str, inside: tuple[str, ...]) -> Column:
        if record.name in inside:
            what = f"is a `{record.name}` inside of itself, and a column has an end"
            raise _refused(where, what, "write its levels out")
        if not record.fields:
            raise _refused(where, "is a record without fields", "give it one")
        spellings: dict[str, str] = {}
        columns: dict[str, Column] = {}
        for name, part, _ in record.fields:
            path = f"{where}.{name}" if where else name
            if fault := name_fault(name, spellings):
                raise _refused(path, *fault)
            if name in columns:
                raise _refused(path, "is there twice", "rename one")
            columns[name] = self.of(part, path, (*inside, record.name))
        kind = pa.struct([(name, column.type) for name, column in columns.items()])
        if self.is_resolved:
            defaults = {f.name: f.schema["default"] for f in record.fields if "default" in f.schema}
            every = {n: column.convert or (lambda value: value) for n, column in columns.items()}
            return Column(kind, partial(_resolved_record, every, defaults))
        converts = {name: column.convert for name, column in columns.items() if column.convert}
        return Column(kind, partial(_record, converts) if converts else None)


def _refused(where: str, what: str, fix: str) -> UnfitError:
    return UnfitError(f"field `{where}` {what}" if where else f"the top level {what}", fix)


def _of_logical_type(part: AvroType, where: str) -> Column:
    name, _, unit = part.logical.rpartition("-")
    match name or part.logical:
        case "time":
            return Column(pa.string(), partial(_time_text, UNITS_US[unit]))
        case "timestamp":
            return Column(TIME, partial(_timestamp, unit, timezone.utc))
        case "local-timestamp":
            return Column(TIME, partial(_timestamp, unit, LOCAL))
        case "date":
            return Column(pa.date32(), _date)
        case "uuid":
            return Column(pa.string(), _uuid_text)
    precision = part.schema["precision"]
    scale = part.schema.get("scale", 0)
    if precision > MAX_DIGITS:
        what = f"is a decimal of {precision} digits, and a table column has up to {MAX_DIGITS}"
        raise _refused(where, what, "use fewer")
    return Column(pa.decimal128(precision, scale), partial(_decimal, precision, scale))


# -- values


def _read_decimal(data: bytes, writer_schema: Any = None, _reader_schema: Any = None) -> Decimal:
    unscaled = int.from_bytes(data, "big", signed=True)
    if abs(unscaled) >= 10**MAX_DIGITS:
        raise UndecodableError(f"a decimal has more than {MAX_DIGITS} digits")
    return Decimal(f"{unscaled}E-{writer_schema.get('scale', 0)}")


def _read_nanoseconds(data: int, *_schemas: Any) -> datetime:
    return EPOCH + timedelta(microseconds=data // 1000)


LOGICAL_READERS[f"bytes-{OWN}decimal"] = LOGICAL_READERS[f"fixed-{OWN}decimal"] = _read_decimal
LOGICAL_READERS[f"long-{OWN}timestamp-nanos"] = LOGICAL_READERS[
    f"long-{OWN}local-timestamp-nanos"
] = _read_nanoseconds


def _checked(of_python: type, value: Any) -> Any:
    if type(value) is of_python:
        return value
    if of_python is float and type(value) is int:
        return float(value)
    if of_python is bytes and isinstance(value, str):
        return _default_bytes(value)
    raise UndecodableError(_OTHER_TYPE)


def _default_bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _optional(convert: _Convert) -> _Convert:
    return lambda value: None if value is None else convert(value)


def _list(convert: _Convert) -> _Convert:
    return lambda items: [*map(convert, items)]


def _map(convert: _Convert) -> _Convert:
    return lambda entries: {name: convert(value) for name, value in entries.items()}


def _record(converts: Mapping[str, _Convert], record: dict[str, Any]) -> dict[str, Any]:
    for name, convert in converts.items():
        record[name] = convert(record[name])
    return record


def _resolved_record(
    converts: Mapping[str, _Convert], defaults: Mapping[str, Any], record: dict[str, Any]
) -> dict[str, Any]:
    # A record that is itself a default may leave out fields that have one.
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
    """Return a number with `scale` digits of a fraction. Raises UndecodableError if it has more."""
    with suppress(Inexact, InvalidOperation):
        exactly = number.quantize(Decimal((0, (1,), -scale)), context=_EXACT)
        if exactly.is_finite() and len(exactly.as_tuple().digits) <= precision:
            return exactly or abs(exactly)  # a column has no -0
    raise UndecodableError(f"a decimal does not fit {precision} digits, {scale} of them a fraction")


# A number in the functions below was written without the logical type, or is a default.


def _time_text(unit_us: int, value: time | int) -> str:
    if isinstance(value, int):
        if not 0 <= value * unit_us < 86_400_000_000:
            raise ValueError("a day has 24 hours")
        value = (EPOCH + timedelta(microseconds=value * unit_us)).time()
    return value.isoformat("microseconds")


def _date(value: Any) -> date:
    if isinstance(value, int):
        return EPOCH.date() + timedelta(days=value)
    _refuse_time(value)
    return cast(date, value)


def _timestamp(unit: str, zone: timezone, value: Any) -> datetime:
    if isinstance(value, int):
        microseconds = value // 1000 if unit == "nanos" else value * UNITS_US[unit]
        value = EPOCH + timedelta(microseconds=microseconds)
    _refuse_time(value)
    return cast(datetime, value if value.tzinfo is zone else value.replace(tzinfo=zone))


def _refuse_time(value: date | time) -> None:
    # The writer's schema may have a time of day where this one has a day.
    if isinstance(value, time):
        raise UndecodableError(_OTHER_TYPE)


def _uuid_text(value: bytes | str) -> str:
    return str(UUID(bytes=_default_bytes(value) if isinstance(value, str) else value))
