"""Fields of records that their source's schema lacks: the typed column drops them.

A field is named by its path, such as `shop.coupon`; `[]` stands for the items of a list or a map.
Below a field that is dropped nothing is named. Names are shown to people, contents never.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import orjson
import pyarrow as pa

from watersmeet.core.avro_columns import Parsed, parsed
from watersmeet.core.avro_schema import AvroSchema, bounded
from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.json_text import UndecodableError, parse_object
from watersmeet.core.texts import printable

SHOWN: Final = 20
"""Maximum number of fields that are named, the most frequent ones: a producer may make up names."""

LONGEST_NAME: Final = 60
"""Maximum characters of a field that is named."""

COLUMNS: Final = ("value", "partition", "offset")
"""The columns of a record that tell its fields."""

Find: TypeAlias = Callable[[bytes, int, int], frozenset[str]]
"""A function from a record's value, partition and offset to its fields that a schema lacks."""

_Kept: TypeAlias = "dict[str, _Kept] | tuple[_Kept] | None"
"""The fields that a schema keeps: of an object by name, of each item of a list or a map (a tuple of
one); None for a value without fields.
"""

_NONE: Final = frozenset[str]()


class DroppedFields(NamedTuple):
    """Fields that a schema lacks, counted over some records.

    `records`: how many were looked at; `having`: how many have such a field; `counts`: the number
    of records that have it, by field.
    """

    records: int
    having: int
    counts: Counter[str]

    @property
    def by_frequency(self) -> list[tuple[str, int]]:
        """The fields, each with the number of its records, the most frequent ones first."""
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))

    @property
    def most_frequent(self) -> list[tuple[str, int]]:
        """Those of them that are named."""
        return self.by_frequency[:SHOWN]

    def __str__(self) -> str:
        """Return the most frequent fields, each with the number of records that have it."""
        first = self.most_frequent
        names = [f"{shown(name)} ({count:,})" for name, count in first]
        others = len(self.counts) - len(first)
        return ", ".join([*names, *([f"and {others:,} other fields"] if others else [])])


def shown(field: str) -> str:
    """Return a field as it is safe to show."""
    name = printable(field)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3]}..."


def fields_in(rows: pa.Table, find: Find) -> list[frozenset[str]]:
    """Return the fields that a function finds in each record (`value`, `partition`, `offset`)."""
    columns = (rows[name].to_pylist() for name in COLUMNS)
    return [find(*record) for record in zip(*columns, strict=True)]


def counted(fields: Iterable[Iterable[str]]) -> DroppedFields:
    """Return how often fields are dropped, from those of each record."""
    counts = Counter[str]()
    records = having = 0
    for names in fields:
        before = counts.total()
        counts.update(names)
        records += 1
        having += counts.total() > before
    return DroppedFields(records, having, counts)


def dropped_fields(schema: ValueSchema | AvroSchema) -> Find:
    """Return the function that finds the fields of a value that a schema lacks.

    Of Avro, a value has the fields of the schema that it was written with. A value that cannot be
    read has none. The function raises what `AvroSchema.writers` raises for an id.
    """
    kept = _kept_fields(schema)
    if isinstance(schema, AvroSchema):
        return _finder_in_avro(schema, kept)

    def find(value: bytes, *_: int) -> frozenset[str]:
        """Return the fields of a JSON value that the schema lacks."""
        with suppress(UndecodableError):
            return frozenset(_beyond(parse_object(value, None), kept, ""))
        return _NONE

    return find


def _finder_in_avro(schema: AvroSchema, kept: _Kept) -> Find:
    @lru_cache(maxsize=4096)
    def beyond(text: str) -> frozenset[str]:
        """Return the fields of a writer's schema that the schema lacks."""
        with suppress(Exception):  # a parser may raise anything; such values are refused
            return frozenset(_beyond_in_avro(bounded(text), kept))
        return _NONE

    def find(value: bytes, partition: int, offset: int) -> frozenset[str]:
        """Return the fields that an Avro value was written with and the schema lacks."""
        text = schema.written_with(value, partition, offset)
        return _NONE if text is None else beyond(text)

    return find


def gained_fields(
    before: ValueSchema | AvroSchema, after: ValueSchema | AvroSchema
) -> frozenset[str]:
    """Return the fields that a schema has and the one before it lacks."""
    kept = _kept_fields(before)
    if isinstance(after, AvroSchema):
        return frozenset(_beyond_in_avro(bounded(after.text), kept))
    return frozenset(_beyond(_kept_fields(after), kept, ""))


def _beyond(value: Any, kept: _Kept, prefix: str) -> Iterator[str]:
    """Yield the fields of a JSON value, or of another schema, that `kept` lacks; some repeatedly.

    `prefix`: the path of the value with a dot behind it, or nothing.
    """
    if isinstance(kept, dict):
        for name, inner in value.items() if isinstance(value, dict) else ():
            if name not in kept:
                yield prefix + name
            elif kept[name] is not None:
                yield from _beyond(inner, kept[name], f"{prefix}{name}.")
    elif kept is not None:
        items = value.values() if isinstance(value, dict) else value
        for item in items if isinstance(value, (dict, list, tuple)) else ():
            yield from _beyond(item, kept[0], f"{prefix[:-1]}[].")


def _beyond_in_avro(written: Parsed, kept: _Kept) -> Iterator[str]:
    """Yield the fields of an Avro schema that `kept` lacks; some repeatedly.

    A union has the fields of all its choices. Each of its types is looked at once for each place
    in `kept`, since whoever registers a schema may not be trusted.
    """
    seen = set[tuple[int, int]]()
    parts: list[tuple[Any, _Kept, str]] = [(written.schema, kept, "")]
    while parts:
        schema, kept, prefix = parts.pop()
        if kept is None or (id(schema), id(kept)) in seen:
            continue
        seen.add((id(schema), id(kept)))
        if isinstance(schema, list):
            parts += [(choice, kept, prefix) for choice in schema]
        elif isinstance(schema, str):
            parts += [(written.named[schema], kept, prefix)] if schema in written.named else []
        elif schema["type"] in ("record", "error") and isinstance(kept, dict):
            for field in schema["fields"]:
                name = field["name"]
                if name in kept:
                    parts.append((field["type"], kept[name], f"{prefix}{name}."))
                else:
                    yield prefix + name
        elif schema["type"] in ("array", "map") and isinstance(kept, tuple):
            items = schema["items" if schema["type"] == "array" else "values"]
            parts.append((items, kept[0], f"{prefix[:-1]}[]."))
        elif not isinstance(schema["type"], str):
            parts.append((schema["type"], kept, prefix))


# -- what a schema keeps


def _kept_fields(schema: ValueSchema | AvroSchema) -> _Kept:
    if isinstance(schema, ValueSchema):
        return _kept_by_type(schema.type)
    reader = parsed(orjson.loads(schema.text))
    return _kept_by_avro(reader.schema, reader)


def _kept_by_type(kind: pa.DataType) -> _Kept:
    if pa.types.is_struct(kind):
        return {field.name: _kept_by_type(field.type) for field in kind}
    if pa.types.is_list(kind):
        return _each(_kept_by_type(kind.value_type))
    return _each(_kept_by_type(kind.item_type)) if pa.types.is_map(kind) else None


def _kept_by_avro(schema: Any, reader: Parsed) -> _Kept:
    """Return the fields of a reader's schema, each also by its aliases."""
    if isinstance(schema, list):  # a column has one type beside null
        choices = [_kept_by_avro(choice, reader) for choice in schema]
        return next((kept for kept in choices if kept is not None), None)
    if isinstance(schema, str):
        return _kept_by_avro(reader.named[schema], reader) if schema in reader.named else None
    match schema["type"]:
        case "record" | "error":
            return {
                name: _kept_by_avro(field["type"], reader)
                for field in schema["fields"]
                for name in (field["name"], *field.get("aliases", ()))
            }
        case "array":
            return _each(_kept_by_avro(schema["items"], reader))
        case "map":
            return _each(_kept_by_avro(schema["values"], reader))
        case str():
            return None
        case kind:
            return _kept_by_avro(kind, reader)


def _each(kept: _Kept) -> _Kept:
    return None if kept is None else (kept,)
