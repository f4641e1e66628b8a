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

from watersmeet.core.avro_columns import Parsed, column_of, parsed
from watersmeet.core.items import TOO_MANY, AvroItems
from watersmeet.core.json_schema import UnfitError
from watersmeet.core.json_text import UndecodableError
from watersmeet.core.recent import recently_made
from watersmeet.core.values import coerce, number_text
from watersmeet.errors import ConfigurationError

Decode: TypeAlias = Callable[..., dict[str, Any]]
"""A function from a record's value (bytes or None), partition and offset to its fields.

The fields are as the column takes them. Partition and offset are 0 by default: they are needed
where a lake's schema of bare Avro has changed. Raises UndecodableError.
"""

FRAME: Final = 5
"""Number of bytes before a value that say which schema it was written with."""

_NAMED: Final = frozenset(["record", "error", "enum", "fixed"])
_UNNAMED: Final = frozenset(
    ["boolean", "int", "long", "float", "double", "bytes", "string", "enum"]
)
"""Names that always mean Avro's own types, even where a schema gives them to others."""

MAX_BYTES: Final = 2**20
MAX_TYPES: Final = 2_000
MAX_DEPTH: Final = 100
"""Bounds of a schema that values are written with, far beyond those in use.

Whoever may register a schema may not be trusted.
"""

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
"""Steps that reading a value may take for each of its bytes, and in addition for the whole value.

A null and a record take a step and no byte, so a few bytes could stand for any number of them.
"""


@dataclass(frozen=True)
class AvroSchema:
    """An Avro schema that fits a table: `text` is the schema, `type` the struct that values become.

    - `writers`: None where values are bare and written with this very schema. Otherwise a value
      begins with a zero byte and the four bytes of the id of its writer's schema, and these are the
      schemas by id, as `self_contained` returns them.
    - `earlier`: the schemas that a living lake had in place of this one, oldest first.
    - `since`: by partition, the first offset of bare values that are written with this schema (0
      where missing). Those before it are written with an earlier one.

    It pickles if `writers` does, so it can be sent to worker processes. Each makes its own
    `decoder()`.
    """

    text: str
    type: pa.DataType
    writers: Mapping[int, str] | None = field(default=None, compare=False)
    earlier: tuple[AvroSchema, ...] = ()
    since: Mapping[int, int] = field(default_factory=dict, hash=False)

    def decoder(self, *, is_bounded: bool = True) -> Decode:
        """Return the decoder of records that have not been read yet.

        It raises what `writers` raises for an id. `is_bounded`: False for values of any number of
        items.
        """
        writers = self.writers
        read_as_this = partial(_decoder, read_with=self.text, is_bounded=is_bounded)
        if writers is None:
            return self._of_bare_values(read_as_this) if self.earlier else read_as_this(self.text)

        def decode(value: bytes | None, *_: int) -> dict[str, Any]:
            """Decode a value, with its writer's schema id before it, as the reader's schema has it.

            Raises UndecodableError where it is not such a value.
            """
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

    def _of_bare_values(self, read_as_this: Callable[[str], Decode]) -> Decode:
        written = [
            (schema.since, read_as_this(schema.text)) for schema in (self, *reversed(self.earlier))
        ]

        def decode(value: bytes | None, partition: int = 0, offset: int = 0) -> dict[str, Any]:
            """Decode a bare value by the schema that values were written with at its offset.

            Raises UndecodableError.
            """
            return next(read for since, read in written if offset >= since.get(partition, 0))(value)

        return decode

    def written_with(self, value: bytes, partition: int, offset: int) -> str | None:
        """Return the schema that the value of a record was written with, or None where it does not
        say so. Raises what `writers` raises for an id.
        """
        if self.writers is not None:
            schema_id = schema_id_of(value)
            return None if schema_id is None else self.writers[schema_id]
        written = (self, *reversed(self.earlier))
        return next(schema.text for schema in written if offset >= schema.since.get(partition, 0))

    def decoder_of_accepted(self) -> Decode:
        """Return the decoder of records that bronze has accepted, perhaps by an earlier schema.

        A value that this schema cannot read is decoded by the latest schema that can. It is
        returned in the fields of this schema, with null for what does not fit them.
        """
        decode = self.decoder(is_bounded=False)
        if not self.earlier:
            return decode
        others = [
            replace(schema, writers=self.writers, earlier=self.earlier[:i])
            for i, schema in enumerate(self.earlier)
        ]
        decoders = [other.decoder(is_bounded=False) for other in reversed(others)]

        def decode_accepted(value: bytes | None, *place: int) -> dict[str, Any]:
            """Decode a value by the first schema that can read it, from the present one backwards.

            Raises UndecodableError where none can.
            """
            try:
                return decode(value, *place)
            except UndecodableError:
                for earlier in decoders:
                    with suppress(UndecodableError):
                        return dict(coerce(earlier(value, *place), self.type))
                raise

        return decode_accepted


def schema_id_of(value: bytes | None) -> int | None:
    """Return the id of the schema that a value in a registry's wire format was written with.

    None where the value has another format.
    """
    if not value or len(value) < FRAME or value[0] != 0:
        return None
    return int.from_bytes(value[1:FRAME], "big")


def avro_schema(text: bytes, path: Path, writers: Mapping[int, str] | None = None) -> AvroSchema:
    """Read an Avro schema as the schema of a source's values.

    `path`: the file that it comes from. `writers`: see `AvroSchema`. Raises ConfigurationError with
    one sentence where the text is not an Avro schema, does not give every field exactly one column
    type, or is not safe to decode values with.
    """
    try:
        document = orjson.loads(text)
        column = column_of(parsed(document))
        bounded(text)
        return AvroSchema(
            orjson.dumps(document, option=orjson.OPT_SORT_KEYS).decode(), column.type, writers
        )
    except orjson.JSONDecodeError as error:
        unfit = UnfitError(f"is no JSON document ({error})", "write an Avro schema")
    except UnfitError as error:
        unfit = error
    except UnsafeError as error:
        unfit = UnfitError(str(error), "")
    raise ConfigurationError(f"{path}: {unfit.what}", fix=unfit.fix)


def self_contained(text: str, references: Sequence[str]) -> str:
    """Return a schema with the named types that it takes from others written into it.

    `references`: those other schemas, each after the ones that it needs. A text is returned
    unchanged where it is not an Avro schema, or takes a type that none of them has.
    """
    if not references:
        return text
    named: dict[str, Any] = {}
    defined: set[str] = set()

    def written_out(node: Any) -> Any:
        """Return a node where the first use of each name, and no later one, is its definition."""
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


# -- values


@lru_cache(maxsize=16)
def _parsed(text: str) -> Parsed:
    return parsed(orjson.loads(text))


@recently_made(MAX_SCHEMAS_BYTES)
def _decoder(written_with: str, read_with: str, *, is_bounded: bool = True) -> Decode:
    """Return the decoder of values without a frame, written with one schema and read as another.

    `is_bounded`: False for values that bronze has accepted, whatever was added to the schema since.
    """
    if (why := _LACKING.get(written_with)) is not None:
        return _refusing(why)
    reader = _parsed(read_with)
    try:
        writer = bounded(written_with)
    except UnsafeError as error:
        return _refusing(f"the schema that it was written with {error}")
    except Exception:  # a parser may raise anything
        return _refusing("the schema that it was written with is no Avro schema")
    is_resolved = writer.schema != reader.schema
    convert = column_of(reader, is_resolved=is_resolved).convert
    items = AvroItems(writer.named, reader.named)
    has_many_items = items.of(writer.schema, reader.schema) if is_bounded else None

    def decode(value: bytes | None, *_: int) -> dict[str, Any]:
        """Decode a bare Avro value as the reader's schema has it.

        Raises UndecodableError where it is not one.
        """
        value = _decodable(value, has_many_items)
        content: Any = _Content(value)
        try:
            document: Any = schemaless_reader(
                content, writer.schema, reader.schema if is_resolved else None
            )
            if convert is not None:
                document = convert(document)
        except UndecodableError:
            raise
        except Exception as error:  # a decoder may raise anything
            raise UndecodableError(f"does not fit the Avro schema: {_why(error)}") from None
        if (rest := len(value) - content.tell()) > 0:
            raise UndecodableError(f"does not fit the Avro schema: {rest} bytes are left over")
        return dict(document)

    return decode


def _decodable(value: bytes | None, has_many_items: Callable[[bytes], bool] | None) -> bytes:
    if value is None:
        raise UndecodableError("no value (tombstone)")
    if has_many_items is not None and has_many_items(value):
        raise UndecodableError(TOO_MANY)
    return value


class _Content:
    """The bytes of a value. A read that finds fewer bytes than it asks for raises EOFError.

    fastavro itself does not check that where it skips a field.
    """

    __slots__ = ("read", "tell")

    def __init__(self, value: bytes) -> None:
        content = BytesIO(value)
        read_content = content.read
        self.tell = content.tell

        def read(size: int) -> bytes:
            """Return the next bytes. Raises EOFError where there are fewer."""
            chunk = read_content(size)
            if len(chunk) != size:
                raise EOFError
            return chunk

        self.read = read


def _refusing(why: str) -> Decode:
    def refuse(*_: Any) -> dict[str, Any]:
        """Raise UndecodableError with the reason why no value of this schema can be read."""
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
    """Return the reason of an error in words of our own, since a decoder's may hold contents."""
    return next(
        (reason for kind, reason in _REASONS.items() if isinstance(error, kind)),
        type(error).__name__,
    )


class UnsafeError(Exception):
    """Error for a schema whose values are not safe to decode. The message says what it has."""


def bounded(text: str | bytes) -> Parsed:
    """Parse a schema that values are written with, and check its bounds.

    Raises UnsafeError where it exceeds the bounds, or where a few bytes could stand for an endless
    stack or loop: types inside themselves, or arrays of nothing. Raises UnfitError or another error
    where the text is not a schema.
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
    """Counter of the steps that reading a value may take beyond those that its bytes allow.

    Each named type is looked at once.
    """

    named: Mapping[str, Any]
    measures: dict[str, tuple[int, int] | None] = field(default_factory=dict)

    def of(self, schema: Any, depth: int) -> tuple[int, int]:
        """Return how many steps too many a value of a part may take, and the number of its levels.

        `depth`: the level of the part itself. Raises UnsafeError, and any error that a part causes
        which is not a schema.
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
        if name in self.measures:
            measure = self.measures[name]
            if measure is None:
                raise UnsafeError(f"has a {name[:100]!r} inside of itself")
            if depth + measure[1] > MAX_DEPTH:
                raise UnsafeError(f"is more than {MAX_DEPTH} levels deep")
            return measure
        self.measures[name] = None
        schema = self.named[name]
        if schema["type"] in ("record", "error"):
            fields = [self.of(part["type"], depth + 1) for part in schema["fields"]]
            measure = (
                1 + sum(steps for steps, _ in fields),
                1 + max((levels for _, levels in fields), default=0),
            )
        else:
            measure = self.of(schema, depth)
        self.measures[name] = measure
        return measure

    def _of_items(self, kind: str, schema: Any, least_bytes: int, depth: int) -> tuple[int, int]:
        """Return what `of` does, for an array or a map.

        Raises UnsafeError where an item may take fewer bytes than its steps need.
        """
        steps, levels = self.of(schema, depth + 1)
        if steps > _STEPS_PER_BYTE * least_bytes:
            raise UnsafeError(f"has {kind} whose items take too few bytes")
        return 1 - _STEPS_PER_BYTE, levels + 1


# -- keys and event times in a value


def as_text(value: Any) -> Any:
    """Return what a value has as a key: scalars are spelled as in a message's JSON, without quotes.

    Text, and anything else that is not a scalar, is returned as it is.
    """
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
