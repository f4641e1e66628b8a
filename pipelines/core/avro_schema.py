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
from fastavro.schema import UnknownType

from pipelines.core.avro_columns import NO_SCHEMA, UnfitError, column_of, parsed
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
        return AvroSchema(orjson.dumps(document, option=orjson.OPT_SORT_KEYS).decode(), column.type, writers)
    except orjson.JSONDecodeError as error:
        fault = f"is no JSON document ({error}); write an Avro schema"
    except UnfitError as error:
        fault = str(error)
    raise ConfigurationError(f"{path}: {fault}")


def self_contained(text: str, references: Sequence[str]) -> str:
    """A schema with the named types that it takes from others written into it; `references`: those, each after what it needs.

    What is no Avro schema, or takes a type that is in none of them, is returned as it is.
    """
    if not references:
        return text
    named: dict[str, Any] = {}
    try:
        *_, schema = [parse_schema(orjson.loads(each), named) for each in (*references, text)]
    except (UnknownType, *NO_SCHEMA):
        return text
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

    return orjson.dumps(written_out(schema)).decode()


# -- values


@lru_cache(maxsize=4096)
def _decoder(written_with: str, read_with: str) -> Decode:
    """A function of bytes without a frame, which were written with one schema and are read as another."""
    reader = parsed(orjson.loads(read_with))
    try:
        writer = parsed(orjson.loads(written_with))
        _least_size(writer.schema, writer.named)
    except (UnfitError, orjson.JSONDecodeError):
        return _refusing("the schema that it was written with is no Avro schema")
    except UndecodableError as error:
        return _refusing(str(error))
    is_resolved = writer.schema != reader.schema
    convert = column_of(reader, is_resolved=is_resolved).convert

    def decode(value: bytes | None, *_: int) -> dict[str, Any]:
        """A bare Avro value as the reader's schema has it. Raises UndecodableError where it is none."""
        if value is None:
            raise UndecodableError("no value (tombstone)")
        content = BytesIO(value)
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


def _least_size(schema: Any, named: Mapping[str, Any], inside: tuple[str, ...] = ()) -> int:
    """How many bytes a value takes at least. Raises UndecodableError for a schema whose values are not safe to decode: of a type
    inside of itself, or of arrays of nothing, a few bytes may stand for a stack, or a loop, without end.
    """
    if isinstance(schema, list):
        return 1 + min((_least_size(choice, named, inside) for choice in schema), default=0)
    kind = schema if isinstance(schema, str) else schema["type"]
    if kind in named:
        return _least_size(named[kind], named, inside)
    match kind:
        case "null":
            return 0
        case "fixed":
            return int(schema["size"])
        case "record" | "error":
            if schema["name"] in inside:
                raise UndecodableError(f"the schema that it was written with has a `{schema['name']}` inside of itself")
            return sum(_least_size(each["type"], named, (*inside, schema["name"])) for each in schema["fields"])
        case "array":
            if not _least_size(schema["items"], named, inside):
                raise UndecodableError("the schema that it was written with has an array whose items take no bytes")
        case "map":
            _least_size(schema["values"], named, inside)
    return 1


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
