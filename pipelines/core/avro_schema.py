"""An Avro schema as two things: the type of the column that holds a source's values, and the reader of their bytes.

Both come from one document, so whatever can be read fits the column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson
import pyarrow as pa
from fastavro import parse_schema, schemaless_reader
from fastavro.read import SchemaResolutionError

from pipelines.core.avro_columns import Parsed, UnfitError, column_of, parsed
from pipelines.core.json_exact import EPOCH
from pipelines.core.json_text import UndecodableError
from pipelines.core.times import LAST_EVENT_TIME_MS
from pipelines.core.values import fitting, number_text
from pipelines.errors import ConfigurationError

Decode: TypeAlias = Callable[..., dict[str, Any]]
"""A function of a record's value (bytes, or None), its partition and its offset: its fields, as the column takes them. The place
is needed where a lake's schema of bare Avro has changed; 0 by default. Raises UndecodableError.
"""

_FRAME: Final = 5
"""Bytes before a value that say which schema it was written with."""

_NAMED: Final = frozenset(["record", "error", "enum", "fixed"])
_UNNAMED: Final = frozenset(["boolean", "int", "long", "float", "double", "bytes", "string", "enum"])
"""Types that are these alone, also where a schema gives their names to others."""

MAX_BYTES: Final = 2**20
MAX_TYPES: Final = 2_000
MAX_DEPTH: Final = 100
"""Bounds of a schema that values are written with, far beyond those in use: whoever may register one may not be trusted."""

UNKNOWN: Final = ""
"""Stands for a schema that nobody has."""

_STEPS_PER_BYTE: Final = 16
_FREE_STEPS: Final = 10_000
"""How many steps reading a value may take for each of its bytes, and how many more for a value as a whole. A null and a record
take a step and no byte, so a few bytes could stand for as many of them as one likes.
"""


@dataclass(frozen=True)
class AvroSchema:
    """An Avro schema that fits a table: `text` is the schema, `type` the struct that values become.

    `writers`: None where values are bare and written with this very schema. Else they begin with the id of the schema that they
    were written with (a zero byte and four bytes), and this is where the schemas are by their ids, as `self_contained` makes
    them.

    `earlier`: the schemas that a living lake has had in its place, the oldest first. Bare values are written with this one from
    the offsets `since` on, by partition (0 where none is said), and with an earlier one before.

    It pickles if `writers` does, so it can be sent to worker processes; each makes its own `decoder()`.
    """

    text: str
    type: pa.DataType
    writers: Mapping[int, str] | None = field(default=None, compare=False)
    earlier: tuple[AvroSchema, ...] = ()
    since: Mapping[int, int] = field(default_factory=dict, hash=False)

    def decoder(self) -> Decode:
        """A function of the bytes of a value, for records that nobody has read yet. It raises what `writers` raises for an id."""
        writers = self.writers
        if writers is None:
            return self._of_bare_values() if self.earlier else _decoder(self.text, self.text)

        def decode(value: bytes | None, *_: int) -> dict[str, Any]:
            """A value with its writer's id before it, as the reader's schema has it. Raises UndecodableError where it is none."""
            if value is None:
                return _decoder(self.text, self.text)(None)
            schema_id = schema_id_of(value)
            if schema_id is None:
                raise UndecodableError("does not begin with a zero byte and the id of the schema that it was written with")
            try:
                return _decoder(writers[schema_id], self.text)(value[_FRAME:])
            except UndecodableError as error:
                raise UndecodableError(f"{error} (written with schema {schema_id})") from None

        return decode

    def _of_bare_values(self) -> Decode:
        written = [(each.since, _decoder(each.text, self.text)) for each in (self, *reversed(self.earlier))]

        def decode(value: bytes | None, partition: int = 0, offset: int = 0) -> dict[str, Any]:
            """The value at an offset, by the schema that values were written with then. Raises UndecodableError."""
            return next(read for since, read in written if offset >= since.get(partition, 0))(value)

        return decode

    def decoder_of_accepted(self) -> Decode:
        """`decoder` for records that bronze has accepted, perhaps by an earlier schema: one that this schema cannot read is what
        the last schema that can makes of it, in the fields of this one; what does not fit them is null.
        """
        decode = self.decoder()
        if not self.earlier:
            return decode
        others = [replace(each, writers=self.writers, earlier=self.earlier[:i]) for i, each in enumerate(self.earlier)]
        decoders = [other.decoder() for other in reversed(others)]

        def decode_accepted(value: bytes | None, *place: int) -> dict[str, Any]:
            """A value that bronze has accepted, by the first of the schemas that can read it, the present one first."""
            try:
                return decode(value, *place)
            except UndecodableError:
                for earlier in decoders:
                    with suppress(UndecodableError):
                        return dict(fitting(earlier(value, *place), self.type))
                raise

        return decode_accepted


def schema_id_of(value: bytes | None) -> int | None:
    """The id of the schema that a value was written with, in the wire format of a registry; None where it has another format."""
    return int.from_bytes(value[1:_FRAME], "big") if value and len(value) >= _FRAME and value[0] == 0 else None


def avro_schema(text: bytes, path: Path, writers: Mapping[int, str] | None = None) -> AvroSchema:
    """Reads an Avro schema as the schema of a source's values; `path`: where it was found; `writers`: see `AvroSchema`.

    Raises ConfigurationError with one sentence where the text is no Avro schema, or does not give every field exactly one column
    type.
    """
    try:
        document = orjson.loads(text)
        column = column_of(parsed(document))
        _bounded(text)
        return AvroSchema(orjson.dumps(document, option=orjson.OPT_SORT_KEYS).decode(), column.type, writers)
    except orjson.JSONDecodeError as error:
        fault = f"is no JSON document ({error}); write an Avro schema"
    except (UnfitError, UnsafeError) as error:
        fault = str(error)
    raise ConfigurationError(f"{path}: {fault}")


def self_contained(text: str, references: Sequence[str]) -> str:
    """A schema with the named types that it takes from others written into it; `references`: those, each after what it needs.

    What is no Avro schema, or takes a type that is in none of them, is returned as it is.
    """
    if not references:
        return text
    named: dict[str, Any] = {}
    defined: set[str] = set()

    def written_out(node: Any) -> Any:
        """A node of the schema in which the first use of each name is its definition, and no later one is."""
        if isinstance(node, list):
            return [*map(written_out, node)]
        if isinstance(node, str):
            return written_out(named[node]) if node in named and node not in defined else node
        if node["type"] in _NAMED:
            defined.add(node["name"])
        node = {name: each for name, each in node.items() if not name.startswith("__")}
        if "fields" in node:
            node["fields"] = [{**each, "type": written_out(each["type"])} for each in node["fields"]]
        return node | {name: written_out(node[name]) for name in ("type", "items", "values") if name in node}

    try:
        *_, schema = [parse_schema(orjson.loads(each), named) for each in (*references, text)]
        return orjson.dumps(written_out(schema)).decode()
    except Exception:  # whatever a schema may make of its parser: what is wrong with it is found out later
        return text


# -- values


@lru_cache(maxsize=4096)
def _decoder(written_with: str, read_with: str) -> Decode:
    """A function of bytes without a frame, which were written with one schema and are read as another."""
    reader = parsed(orjson.loads(read_with))
    if written_with == UNKNOWN:
        return _refusing("the registry did not have the schema that it was written with")
    try:
        writer = _bounded(written_with)
    except UnsafeError as error:
        return _refusing(f"the schema that it was written with {error}")
    except Exception:  # whatever a schema may make of its parser
        return _refusing("the schema that it was written with is no Avro schema")
    is_resolved = writer.schema != reader.schema
    convert = column_of(reader, is_resolved=is_resolved).convert

    def decode(value: bytes | None, *_: int) -> dict[str, Any]:
        """A bare Avro value as the reader's schema has it. Raises UndecodableError where it is none."""
        if value is None:
            raise UndecodableError("no value (tombstone)")
        content: Any = _Content(value)
        try:
            document: Any = schemaless_reader(content, writer.schema, reader.schema if is_resolved else None)
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


class _Content:
    """The bytes of a value, of which a read that finds fewer than it asks for raises EOFError: fastavro does not look where it
    skips a field.
    """

    __slots__ = ("read", "tell")

    def __init__(self, value: bytes) -> None:
        content = BytesIO(value)
        found_at, self.tell = content.read, content.tell

        def read(size: int) -> bytes:
            """The next bytes. Raises EOFError where there are not so many."""
            found = found_at(size)
            if len(found) != size:
                raise EOFError
            return found

        self.read = read


def _refusing(why: str) -> Decode:
    def refuse(*_: Any) -> dict[str, Any]:
        """Raises UndecodableError, with the reason for which no value of this writer's schema can be read."""
        raise UndecodableError(why)

    return refuse


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


class UnsafeError(Exception):
    """Values of a schema are not safe to decode; the message says what it has."""


def _bounded(text: str | bytes) -> Parsed:
    """Return the schema that is written here.

    Raises UnsafeError where it is larger than the bounds, or where a few bytes may stand for a stack, or a loop, without end:
    types inside of themselves, or arrays of nothing. For what is no schema it raises UnfitError or another error.
    """
    if len(text) > MAX_BYTES:
        raise UnsafeError(f"has more than {MAX_BYTES:,} bytes")
    schema = parsed(orjson.loads(text))
    if len(schema.named) > MAX_TYPES:
        raise UnsafeError(f"has more than {MAX_TYPES:,} types")
    if _Steps(schema.named).of(schema.schema, 0)[0] > _FREE_STEPS:
        raise UnsafeError("takes too many steps to read for a value of so few bytes")
    return schema


@dataclass(frozen=True)
class _Steps:
    """Counts the steps that reading a value may take beyond those that its bytes allow; each named type is looked at once."""

    named: Mapping[str, Any]
    known: dict[str, tuple[int, int] | None] = field(default_factory=dict)

    def of(self, schema: Any, depth: int) -> tuple[int, int]:
        """How many steps too many a value of a part at this depth may take, and how many levels the part has.

        Raises UnsafeError, and whatever a part makes of it that is no schema.
        """
        if depth > MAX_DEPTH:
            raise UnsafeError(f"is more than {MAX_DEPTH} levels deep")
        if isinstance(schema, list):
            choices = [self.of(choice, depth + 1) for choice in schema]
            steps, levels = map(max, zip(*choices, strict=True))
            return 1 - _STEPS_PER_BYTE + steps, levels + 1
        match kind := schema if isinstance(schema, str) else schema["type"]:
            case "null":
                return 1, 0
            case "fixed":
                return 1 - _STEPS_PER_BYTE * int(schema["size"]), 0
            case "record" | "error":
                return self._of_named(schema["name"], depth)
            case "array":
                return self._of_items("an array", schema["items"], 0, depth)
            case "map":
                return self._of_items("a map", schema["values"], 1, depth)
        if kind in self.named and kind not in _UNNAMED:
            return self._of_named(kind, depth)
        return 1 - _STEPS_PER_BYTE, 0

    def _of_named(self, name: str, depth: int) -> tuple[int, int]:
        if name in self.known:
            found = self.known[name]
            if found is None:
                raise UnsafeError(f"has a {name[:100]!r} inside of itself")
            if depth + found[1] > MAX_DEPTH:
                raise UnsafeError(f"is more than {MAX_DEPTH} levels deep")
            return found
        self.known[name] = None
        schema = self.named[name]
        if schema["type"] in ("record", "error"):
            fields = [self.of(each["type"], depth + 1) for each in schema["fields"]]
            found = 1 + sum(steps for steps, _ in fields), 1 + max((levels for _, levels in fields), default=0)
        else:
            found = self.of(schema, depth)
        self.known[name] = found
        return found

    def _of_items(self, kind: str, schema: Any, least_bytes: int, depth: int) -> tuple[int, int]:
        """As `of`, of an array or a map: each item must take the bytes that its steps need."""
        steps, levels = self.of(schema, depth + 1)
        if steps > _STEPS_PER_BYTE * least_bytes:
            raise UnsafeError(f"has {kind} whose items take too few bytes")
        return 1 - _STEPS_PER_BYTE, levels + 1


# -- what a key and an event time are in a value


def as_milliseconds(found: Any) -> Any:
    """What stands in a value as an event time: a time and a number as epoch ms, with fractions cut off; else as it is.

    A number below 0 comes out as -1, one that is too late as one more than the last event time.
    """
    if isinstance(found, datetime):
        return (found - EPOCH) // timedelta(milliseconds=1)
    if isinstance(found, date):
        return (found - EPOCH.date()) // timedelta(milliseconds=1)
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
