"""Avro schemas of a source's values: the type of their column, and the decoder of their bytes.

Both come from one document, so every value that can be decoded fits the column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date, datetime, timezone
from decimal import Decimal
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final, TypeAlias

import orjson
import pyarrow as pa
from fastavro import parse_schema, schemaless_reader
from fastavro.read import SchemaResolutionError

from watersmeet.core.avro_columns import column_of
from watersmeet.core.avro_types import AvroType, Parsed, parsed
from watersmeet.core.items import TOO_MANY, many_items
from watersmeet.core.json_schema import UnfitError, fitting
from watersmeet.core.json_text import UndecodableError
from watersmeet.core.recent import Recent
from watersmeet.core.values import fitter, number_text

Decode: TypeAlias = Callable[..., dict[str, Any]]
"""A function from a value (bytes or None) to its fields, as the column takes them. Partition and
offset, 0 by default, are needed where a lake's schema of bare Avro has changed. Raises
UndecodableError."""

FRAME: Final = 5
"""Number of bytes before a value that say which schema it was written with."""

_NAMED: Final = frozenset(["record", "error", "enum", "fixed"])

MAX_BYTES: Final = 2**20
MAX_TYPES: Final = 2_000
MAX_DEPTH: Final = 100
"""Bounds of a writer's schema, far beyond those in use: who registers one may not be trusted."""

MAX_SCHEMAS: Final = 1_000
MAX_SCHEMAS_BYTES: Final = 16 * 2**20
"""Bounds of all schemas that the values of a source may be written with."""

UNKNOWN: Final = ""
"""Text in place of a schema that the registry does not have."""

EXCESS: Final = "-"
"""Text in place of a schema for which the source has no room any more."""

_LACKING: Final = {
    UNKNOWN: "the registry did not have the schema that it was written with",
    EXCESS: f"the source has {MAX_SCHEMAS:,} schemas, or {MAX_SCHEMAS_BYTES // 2**20} MiB of them, "
    "and takes no further one",
}

_STEPS_PER_BYTE: Final = 16
_FREE_STEPS: Final = 10_000
"""Steps that a value may take for each of its bytes, and beside them: a null takes no byte."""


@dataclass(frozen=True)
class AvroSchema:
    """An Avro schema that fits a table: `text` is the schema, `type` the struct that values become.

    - `writers`: schemas by id (`self_contained`), where a value begins with a zero byte and the
      four bytes of its writer's id. None where values are bare, and written with this very schema.
    - `earlier`: the schemas that a living lake had in place of this one, oldest first.
    - `since`: by partition, the first offset (else 0) of bare values that are written with this
      one.

    It pickles if `writers` does. Each process makes its own `decoder()`.
    """

    text: str
    type: pa.DataType
    writers: Mapping[int, str] | None = field(default=None, compare=False)
    earlier: tuple[AvroSchema, ...] = ()
    since: Mapping[int, int] = field(default_factory=dict, hash=False)

    def decoder(self, *, is_bounded: bool = True) -> Decode:
        """Return the decoder of records that were not read yet; it raises what `writers` raises.

        `is_bounded`: False for values of any number of items.
        """
        writers = self.writers
        read_as_this = partial(_decoder, read_with=self.text, is_bounded=is_bounded)
        if writers is None:
            if not self.earlier:
                return read_as_this(self.text)
            return lambda value, *place: read_as_this(self._text_at(*place))(value)

        def decode(value: bytes | None, *_: int) -> dict[str, Any]:
            if value is None:
                return read_as_this(self.text)(None)
            schema_id = schema_id_of(value)
            if schema_id is None:
                raise UndecodableError(
                    "does not begin with a zero byte and the id of the schema that it was written "
                    "with"
                )
            try:
                return read_as_this(writers[schema_id])(value[FRAME:])
            except UndecodableError as error:
                raise UndecodableError(f"{error} (written with schema {schema_id})") from None

        return decode

    def _text_at(self, partition: int = 0, offset: int = 0) -> str:
        written = (self, *reversed(self.earlier))
        return next(schema.text for schema in written if offset >= schema.since.get(partition, 0))

    def written_with(self, value: bytes, partition: int, offset: int) -> str | None:
        """Return the schema that a value was written with; None where it does not say so."""
        if self.writers is None:
            return self._text_at(partition, offset)
        schema_id = schema_id_of(value)
        return None if schema_id is None else self.writers[schema_id]

    def decoder_of_accepted(self) -> Decode:
        """Return the decoder of records that bronze has accepted, perhaps by an earlier schema.

        A value that this schema cannot read is decoded by the latest one that can, and has null for
        what does not fit the fields of this one.
        """
        decode = self.decoder(is_bounded=False)
        if not self.earlier:
            return decode
        others = [
            replace(schema, writers=self.writers, earlier=self.earlier[:i])
            for i, schema in enumerate(self.earlier)
        ]
        decoders = [other.decoder(is_bounded=False) for other in reversed(others)]
        fit = fitter(self.type)

        def decode_accepted(value: bytes | None, *place: int) -> dict[str, Any]:
            try:
                return decode(value, *place)
            except UndecodableError:
                for earlier in decoders:
                    with suppress(UndecodableError):
                        return dict(fit(earlier(value, *place)))
                raise

        return decode_accepted


def schema_id_of(value: bytes | None) -> int | None:
    """Return the id in a value of a registry's wire format; None for another format."""
    if not value or len(value) < FRAME or value[0] != 0:
        return None
    return int.from_bytes(value[1:FRAME], "big")


def avro_schema(text: bytes, path: Path, writers: Mapping[int, str] | None = None) -> AvroSchema:
    """Read an Avro schema, from the file at `path`, as the schema of a source's values.

    `writers`: see `AvroSchema`. Raises ConfigurationError where it is no Avro schema, does not give
    every field exactly one column type, or is not safe to decode values with.
    """

    def schema_of(document: Any) -> AvroSchema:
        column = column_of(parsed(document).type)
        bounded(text)
        sorted_text = orjson.dumps(document, option=orjson.OPT_SORT_KEYS).decode()
        return AvroSchema(sorted_text, column.type, writers)

    return fitting(schema_of, text, path, "an Avro schema")


def self_contained(text: str, references: Sequence[str]) -> str:
    """Return a schema with the named types that it takes from others written into it.

    `references`: those others, each after the ones that it needs. A text that is no Avro schema, or
    takes a type that none of them has, is returned unchanged.
    """
    if not references:
        return text
    named: dict[str, Any] = {}
    defined: set[str] = set()

    def written_out(node: Any) -> Any:
        # The first use of each name, and no later one, is its definition.
        if isinstance(node, list):
            return [*map(written_out, node)]
        if isinstance(node, str):
            return written_out(named[node]) if node in named and node not in defined else node
        if node["type"] in _NAMED:
            defined.add(node["name"])
        node = {name: part for name, part in node.items() if not name.startswith("__")}
        if "fields" in node:
            node["fields"] = [
                {**part, "type": written_out(part["type"])} for part in node["fields"]
            ]
        return node | {
            name: written_out(node[name]) for name in ("type", "items", "values") if name in node
        }

    try:
        *_, schema = [
            parse_schema(orjson.loads(schema_text), named) for schema_text in (*references, text)
        ]
        return orjson.dumps(written_out(schema)).decode()
    except Exception:  # a parser may raise anything; who uses the schema reports what is wrong
        return text


def is_same(text: str, other: str) -> bool:
    """Return True if two schemas are equal, however they are spelled."""
    if text == other:
        return True
    try:
        return bool(parsed(orjson.loads(text)).schema == parsed(orjson.loads(other)).schema)
    except Exception:  # a parser may raise anything
        return False


# -- values


@lru_cache(maxsize=16)
def _parsed(text: str) -> Parsed:
    return parsed(orjson.loads(text))


_decoders = Recent[Decode](MAX_SCHEMAS_BYTES)
"""Decoders by the schemas of writer and reader, and whether they are bounded."""


def _decoder(written_with: str, *, read_with: str, is_bounded: bool) -> Decode:
    # Not bounded: for values that bronze has accepted, whatever was added to the schema since.
    schemas = (written_with, read_with, is_bounded)
    return _decoders.get(schemas, lambda: _new_decoder(*schemas), lambda _: len(written_with))


def _new_decoder(written_with: str, read_with: str, is_bounded: bool) -> Decode:
    if (why := _LACKING.get(written_with)) is not None:
        return _refusing(why)
    reader = _parsed(read_with)
    try:
        writer = bounded(written_with)
    except UnsafeError as error:
        return _refusing(f"the schema that it was written with {error}")
    except Exception:  # a parser may raise anything
        return _refusing("the schema that it was written with is no Avro schema")
    # A decoder is kept, and of its schemas no more than it needs.
    written_as, is_resolved = writer.schema, writer.schema != reader.schema
    read_as = reader.schema if is_resolved else None
    convert = column_of(reader.type, is_resolved=is_resolved).convert or (lambda record: record)
    has_many_items = many_items(writer.type, reader.type) if is_bounded else None

    def decode(value: bytes | None, *_: int) -> dict[str, Any]:
        if value is None:
            raise UndecodableError("no value (tombstone)")
        if has_many_items is not None and has_many_items(value):
            raise UndecodableError(TOO_MANY)
        content: Any = _Content(value)
        try:
            document = convert(schemaless_reader(content, written_as, read_as))
        except UndecodableError:
            raise
        except Exception as error:  # a decoder may raise anything, with contents in its words
            raise UndecodableError(f"does not fit the Avro schema: {_why(error)}") from None
        if (rest := len(value) - content.tell()) > 0:
            raise UndecodableError(f"does not fit the Avro schema: {rest} bytes are left over")
        return dict(document)

    return decode


class _Content:
    """The bytes of a value. A short read raises EOFError, also where fastavro skips a field."""

    __slots__ = ("read", "tell")

    def __init__(self, value: bytes) -> None:
        content = BytesIO(value)
        read_content = content.read
        self.tell = content.tell

        def read(size: int) -> bytes:
            chunk = read_content(size)
            if len(chunk) != size:
                raise EOFError
            return chunk

        self.read = read


def _refusing(why: str) -> Decode:
    def refuse(*_: Any) -> dict[str, Any]:
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
    reasons = (reason for kind, reason in _REASONS.items() if isinstance(error, kind))
    return next(reasons, type(error).__name__)


class UnsafeError(UnfitError):
    """Error for a schema whose values are not safe to decode. The message says what it has."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "")


def bounded(text: str | bytes) -> Parsed:
    """Parse a schema that values are written with, and check its bounds.

    Raises UnsafeError where it exceeds them, or a few bytes could stand for an endless stack or
    loop; UnfitError or another error where the text is not a schema.
    """
    if len(text) > MAX_BYTES:
        raise UnsafeError(f"has more than {MAX_BYTES:,} bytes")
    schema = parsed(orjson.loads(text))
    if schema.names > MAX_TYPES:
        raise UnsafeError(f"has more than {MAX_TYPES:,} types")
    if _steps(schema.type, 0, {})[0] > _FREE_STEPS:
        raise UnsafeError("takes too many steps to read for a value of so few bytes")
    return schema


def _steps(
    part: AvroType, depth: int, measures: dict[AvroType, tuple[int, int] | None]
) -> tuple[int, int]:
    # How many steps a value may take beyond those that its bytes allow, and how many levels it has.
    # `measures`: those of records, None for one that it is inside of.
    if depth > MAX_DEPTH:
        raise UnsafeError(f"is more than {MAX_DEPTH} levels deep")
    if part.kind == "null":
        return 1, 0
    if part.kind == "record":
        return _steps_of_record(part, depth, measures)
    if part.kind not in ("union", "array", "map"):
        size = int(part.schema["size"]) if part.kind == "fixed" else 1
        return 1 - _STEPS_PER_BYTE * size, 0
    inside = [_steps(item, depth + 1, measures) for item in part.items]
    steps, levels = map(max, zip(*inside, strict=True))
    if part.kind == "union":
        return 1 - _STEPS_PER_BYTE + steps, levels + 1
    if steps > (_STEPS_PER_BYTE if part.kind == "map" else 0):  # an entry has a byte for its name
        kind = "a map" if part.kind == "map" else "an array"
        raise UnsafeError(f"has {kind} whose items take too few bytes")
    return 1 - _STEPS_PER_BYTE, levels + 1


def _steps_of_record(
    part: AvroType, depth: int, measures: dict[AvroType, tuple[int, int] | None]
) -> tuple[int, int]:
    if part not in measures:
        measures[part] = None
        inside = [_steps(field.type, depth + 1, measures) for field in part.fields]
        measures[part] = (
            1 + sum(steps for steps, _ in inside),
            1 + max((levels for _, levels in inside), default=0),
        )
    if (measure := measures[part]) is None:
        raise UnsafeError(f"has a {part.name[:100]!r} inside of itself")
    if depth + measure[1] > MAX_DEPTH:
        raise UnsafeError(f"is more than {MAX_DEPTH} levels deep")
    return measure


# -- keys and event times in a value


def as_text(value: Any) -> Any:
    """Return a scalar as a key spells it (in JSON's words, unquoted), and all else as it is."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        in_utc = value.astimezone(timezone.utc).replace(tzinfo=None)
        return in_utc.isoformat(timespec="microseconds") + "Z"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, float):
        return number_text(value)
    return str(value) if isinstance(value, int) else value
