"""An Avro schema as two things: the type of the column that holds a source's values, and the reader of their bytes.

Both come from one document, so whatever can be read fits the column. fastavro decodes; what it makes of a value is then brought
to what the column takes. Integers of either size are one type here, and so are numbers with a fraction: a schema may widen them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta, timezone
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias
from uuid import UUID

import orjson
import pyarrow as pa
from fastavro import parse_schema, schemaless_reader
from fastavro.read import LOGICAL_READERS, SchemaResolutionError
from fastavro.schema import SchemaParseException, UnknownType

from pipelines.core.json_schema import FORBIDDEN_IN_NAMES
from pipelines.core.json_text import UndecodableError
from pipelines.core.times import LAST_EVENT_TIME_MS
from pipelines.core.types import TIME
from pipelines.core.values import number_text
from pipelines.errors import ConfigurationError

MAX_DIGITS: Final = 38
"""Of a decimal: as many as a table's column holds."""

Decode: TypeAlias = Callable[["bytes | None"], dict[str, Any]]
"""A function of a record's value: its fields, as the column takes them. Raises UndecodableError."""

_Convert: TypeAlias = Callable[[Any], Any]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)
_EXACT: Final = Context(prec=2 * MAX_DIGITS, traps=[Inexact, InvalidOperation])
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
"""By Avro type the type of the column, and what Python has for it."""

_OWN: Final = "watersmeet-"
_RENAMED: Final = frozenset(["decimal", "timestamp-nanos", "local-timestamp-nanos", "uuid"])
"""Logical types that fastavro rounds, does not know, or takes apart for nothing; under names of their own they are read here."""


@dataclass(frozen=True)
class AvroSchema:
    """An Avro schema that fits a table: `text` is the schema, `type` the struct that values become.

    It pickles, so it can be sent to worker processes; each makes its own `decoder()`.
    """

    text: str
    type: pa.DataType

    def decoder(self) -> Decode:
        """A function of the bytes of a value that was written with this very schema."""
        return _decoder(_parsed(orjson.loads(self.text)))


class _UnfitError(Exception):
    """A schema fits no table; the message says why, and what would help."""


def avro_schema(text: bytes, path: Path) -> AvroSchema:
    """Reads an Avro schema as the schema of a source's values; `path`: where it was found.

    Raises ConfigurationError with one sentence where the text is no Avro schema, or does not give every field exactly one column
    type.
    """
    try:
        document = orjson.loads(text)
        column = _column(_parsed(document))
        return AvroSchema(orjson.dumps(document, option=orjson.OPT_SORT_KEYS).decode(), column.type)
    except orjson.JSONDecodeError as error:
        fault = f"is no JSON document ({error}); write an Avro schema"
    except _UnfitError as error:
        fault = str(error)
    raise ConfigurationError(f"{path}: {fault}")


# -- schemas


class _Parsed(NamedTuple):
    """A schema as fastavro takes it, and its named types by their full names."""

    schema: Any
    named: Mapping[str, Any]


def _parsed(document: Any) -> _Parsed:
    named: dict[str, Any] = {}
    try:
        return _Parsed(parse_schema(_renamed(document), named), named)
    except UnknownType as error:
        raise _UnfitError(f"names the type `{error.name}`, which it does not define; define it in the file") from None
    except (SchemaParseException, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _UnfitError(f"is no valid Avro schema ({type(error).__name__}: {error}); correct it") from None


def _renamed(node: Any) -> Any:
    """The schema with some logical types under names of their own; one that does not stand where it may is left out, as Avro's
    specification has it.
    """
    if isinstance(node, list):
        return [_renamed(each) for each in node]
    if not isinstance(node, dict):
        return node
    node = {name: _renamed(each) if name in ("type", "fields", "items", "values") else each for name, each in node.items()}
    if node.get("logicalType") in _RENAMED:
        if node["logicalType"] == "decimal":
            _check_decimal(node)
        node["logicalType"] = _OWN + node["logicalType"]
    return node


def _check_decimal(node: Mapping[str, Any]) -> None:
    precision, scale = node.get("precision"), node.get("scale", 0)
    if type(precision) is not int or type(scale) is not int or not 0 <= scale <= precision or not precision:
        raise _UnfitError("has a decimal without a `precision` of 1 or more and a `scale` of at most that; give it both")


class _Column(NamedTuple):
    """The type of a column, and what brings fastavro's values to what it takes; None: nothing needs to."""

    type: pa.DataType
    convert: _Convert | None = None


def _column(parsed: _Parsed) -> _Column:
    schema = parsed.schema
    if not isinstance(schema, dict) or schema.get("type") != "record":
        raise _UnfitError("the top level must be a record; name its fields there")
    return _Columns(parsed.named).of(schema, "", ())


@dataclass(frozen=True)
class _Columns:
    """Reads the parts of a valid schema as columns; `named`: its named types."""

    named: Mapping[str, Any] = field(default_factory=dict)

    def of(self, schema: Any, where: str, inside: tuple[str, ...]) -> _Column:
        """The column of a part at the path `where`, inside of the named types `inside`."""
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
            return _Column(_PLAIN[kind][0])
        if kind == "array":
            item = self.of(schema["items"], f"{where}[]", inside)
            return _Column(pa.list_(item.type), item.convert and partial(_list, item.convert))
        if kind == "map":
            value = self.of(schema["values"], f"{where}[]", inside)
            return _Column(pa.map_(pa.string(), value.type), value.convert and partial(_map, value.convert))
        if kind in ("record", "error"):
            return self._of_record(schema, where, inside)
        if kind in self.named:
            return self.of(self.named[kind], where, inside)
        raise _refused(where, f"is {kind} and nothing else; give it a type that a table column can have")

    def _of_union(self, choices: list[Any], where: str, inside: tuple[str, ...]) -> _Column:
        rest = [choice for choice in choices if choice not in ("null", {"type": "null"})]
        if len(rest) != 1:
            raise _refused(where, "is a union of several types, or of none but null, and a table column has one; give it one")
        column = self.of(rest[0], where, inside)
        return _Column(column.type, column.convert and partial(_optional, column.convert)) if len(choices) > 1 else column

    def _of_record(self, schema: Mapping[str, Any], where: str, inside: tuple[str, ...]) -> _Column:
        if schema["name"] in inside:
            raise _refused(where, f"is a `{schema['name']}` inside of itself, and a column has an end; write its levels out")
        if not schema["fields"]:
            raise _refused(where, "is a record without fields; give it one")
        spellings: dict[str, str] = {}
        columns: dict[str, _Column] = {}
        for each in schema["fields"]:
            name = each["name"]
            path = f"{where}.{name}" if where else name
            if not name or not FORBIDDEN_IN_NAMES.isdisjoint(name):
                raise _refused(path, "has a name that no table column can have; give it another")
            if name in columns:
                raise _refused(path, "is there twice; rename one")
            if (other := spellings.setdefault(name.lower(), name)) != name:
                raise _refused(path, f"differs from `{other}` only in case, which columns do not; rename one")
            columns[name] = self.of(each["type"], path, (*inside, schema["name"]))
        converts = {name: column.convert for name, column in columns.items() if column.convert}
        kind = pa.struct([(name, column.type) for name, column in columns.items()])
        return _Column(kind, partial(_record, converts) if converts else None)


def _refused(where: str, what: str) -> _UnfitError:
    return _UnfitError(f"field `{where}` {what}" if where else f"the top level {what}")


def _of_logical_type(schema: Mapping[str, Any], where: str) -> _Column | None:
    """The column of a logical type that stands where it may; another one is ignored, as Avro's specification has it."""
    named: str = schema.get("logicalType", "")
    match (schema["type"], named.removeprefix(_OWN)):
        case ("bytes" | "fixed", "decimal"):
            precision, scale = schema["precision"], schema.get("scale", 0)
            if precision > MAX_DIGITS:
                raise _refused(where, f"is a decimal of {precision} digits, and a table column has up to {MAX_DIGITS}; use fewer")
            return _Column(pa.decimal128(precision, scale), partial(_decimal, precision, scale))
        case ("int", "date"):
            return _Column(pa.date32())
        case ("int", "time-millis") | ("long", "time-micros"):
            return _Column(pa.string(), _time_text)
        case ("long", "timestamp-millis" | "timestamp-micros" | "timestamp-nanos"):
            return _Column(TIME)
        case ("long", "local-timestamp-millis" | "local-timestamp-micros" | "local-timestamp-nanos"):
            return _Column(TIME, _in_utc)
        case ("string", "uuid"):
            return _Column(pa.string())
        case ("fixed", "uuid") if schema["size"] == 16:
            return _Column(pa.string(), _uuid_text)
        case _:
            return None


# -- values


def _decoder(written: _Parsed) -> Decode:
    convert = _column(written).convert

    def decode(value: bytes | None) -> dict[str, Any]:
        if value is None:
            raise UndecodableError("no value (tombstone)")
        content = BytesIO(value)
        try:
            document: Any = schemaless_reader(content, written.schema, None)
            if convert is not None:
                document = convert(document)
        except UndecodableError:
            raise
        except Exception as error:  # whatever bytes may make of a decoder
            raise UndecodableError(f"does not fit the Avro schema: {_why(error)}") from None
        if (left := len(value) - content.tell()) > 0:
            raise UndecodableError(f"does not fit the Avro schema: {left} bytes are left over")
        return dict(document)

    return decode


_REASONS: Final[Mapping[type[Exception], str]] = {
    EOFError: "it ends too early",
    UnicodeDecodeError: "a text in it is not UTF-8",
    IndexError: "it has a choice of a union or a symbol of an enum that the schema has not",
    OverflowError: "a date or time in it lies before the year 1 or after the year 9999",
    ValueError: "a date or time in it is none",
    SchemaResolutionError: "the schema that it was written with does not resolve to this one",
}


def _why(error: Exception) -> str:
    """In words of our own: a decoder's may hold contents."""
    return next((reason for kind, reason in _REASONS.items() if isinstance(error, kind)), type(error).__name__)


def _read_decimal(data: bytes, writer_schema: Any = None, reader_schema: Any = None) -> Decimal:  # noqa: ARG001
    unscaled = int.from_bytes(data, "big", signed=True)
    if abs(unscaled) >= 10**MAX_DIGITS:
        raise UndecodableError(f"a decimal has more than {MAX_DIGITS} digits")
    return Decimal(f"{unscaled}E-{writer_schema.get('scale', 0)}")


def _read_nanoseconds(data: int, writer_schema: Any = None, reader_schema: Any = None) -> datetime:  # noqa: ARG001
    return _EPOCH + timedelta(microseconds=data // 1000)


LOGICAL_READERS[f"bytes-{_OWN}decimal"] = LOGICAL_READERS[f"fixed-{_OWN}decimal"] = _read_decimal
LOGICAL_READERS[f"long-{_OWN}timestamp-nanos"] = LOGICAL_READERS[f"long-{_OWN}local-timestamp-nanos"] = _read_nanoseconds


def _optional(convert: _Convert, found: Any) -> Any:
    return None if found is None else convert(found)


def _list(convert: _Convert, found: list[Any]) -> list[Any]:
    return [*map(convert, found)]


def _map(convert: _Convert, found: dict[str, Any]) -> dict[str, Any]:
    return {name: convert(each) for name, each in found.items()}


def _record(converts: Mapping[str, _Convert], found: dict[str, Any]) -> dict[str, Any]:
    for name, convert in converts.items():
        found[name] = convert(found[name])
    return found


def _decimal(precision: int, scale: int, found: Decimal) -> Decimal:
    with suppress(Inexact, InvalidOperation):
        exact = found.quantize(Decimal((0, (1,), -scale)), context=_EXACT)
        if len(exact.as_tuple().digits) <= precision:
            return exact
    raise UndecodableError(f"a decimal does not fit {precision} digits, {scale} of them a fraction")


def _time_text(found: time) -> str:
    return found.isoformat("microseconds")


def _uuid_text(found: bytes) -> str:
    return str(UUID(bytes=found))


def _in_utc(found: datetime) -> datetime:
    return found.replace(tzinfo=timezone.utc)


# -- what a key and an event time are in a value


def as_milliseconds(found: Any) -> Any:
    """What stands in a value as an event time: a time and a number as epoch ms, with fractions cut off; else as it is.

    A number below 0 comes out as -1, one that is too late as one more than the last event time.
    """
    if isinstance(found, datetime):
        return (found - _EPOCH) // timedelta(milliseconds=1)
    if isinstance(found, date):
        return (found - _EPOCH.date()) // timedelta(milliseconds=1)
    if not isinstance(found, (float, Decimal)):
        return found
    if found != found:  # not a number
        return as_text(found)
    return -1 if found < 0 else int(min(found, LAST_EVENT_TIME_MS + 1))


def as_text(found: Any) -> Any:
    """What stands in a value as a key: a scalar that is no text as a message's JSON has it, without quotes; else as it is."""
    if isinstance(found, bool):
        return "true" if found else "false"
    if isinstance(found, datetime):
        return found.astimezone(timezone.utc).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
    if isinstance(found, date):
        return found.isoformat()
    if isinstance(found, Decimal):
        return f"{found:f}"
    if isinstance(found, float):
        return number_text(found)
    return str(found) if isinstance(found, int) else found
