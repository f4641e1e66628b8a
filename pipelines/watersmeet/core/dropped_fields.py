"""Fields of records that their source's schema lacks: the typed column drops them.

A field is named by its path, such as `shop.coupon`; `[]` stands for the items of a list or a map.
Below a dropped field nothing is named. Names are shown to people, contents never.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias

import orjson
import pyarrow as pa

from watersmeet.core.avro_schema import AvroSchema, bounded
from watersmeet.core.avro_types import AvroType, parsed
from watersmeet.core.columns import row_values
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
"""Fields that a schema keeps: by name, or of each item (a tuple of one); None for none."""

_NONE: Final = frozenset[str]()


class DroppedFields(NamedTuple):
    """Fields that a schema lacks (`counts`) in some `records`, of which `having` have any."""

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
    return [find(*record) for record in row_values(rows, *COLUMNS)]


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
        with suppress(UndecodableError):
            return frozenset(_beyond(parse_object(value, None), kept, ""))
        return _NONE

    return find


def _finder_in_avro(schema: AvroSchema, kept: _Kept) -> Find:
    @lru_cache(maxsize=4096)
    def beyond(text: str) -> frozenset[str]:
        with suppress(Exception):  # a parser may raise anything; such values are refused
            return frozenset(_beyond_in_avro(bounded(text).type, kept))
        return _NONE

    def find(value: bytes, partition: int, offset: int) -> frozenset[str]:
        text = schema.written_with(value, partition, offset)
        return _NONE if text is None else beyond(text)

    return find


def gained_fields(
    before: ValueSchema | AvroSchema, after: ValueSchema | AvroSchema
) -> frozenset[str]:
    """Return the fields that a schema has and the one before it lacks."""
    return frozenset(_beyond(_kept_by_type(after.type), _kept_fields(before), ""))


def _beyond(value: Any, kept: _Kept, prefix: str) -> Iterator[str]:
    # Some fields come repeatedly. `prefix`: the path of the value with a dot behind it, or nothing.
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


def _beyond_in_avro(written: AvroType, kept: _Kept) -> Iterator[str]:
    # A union has the fields of all its choices. Each of its types is looked at once for each place
    # in `kept`, since whoever registers a schema may not be trusted.
    seen = set[tuple[AvroType, int]]()
    parts: list[tuple[AvroType, _Kept, str]] = [(written, kept, "")]
    while parts:
        part, kept, prefix = parts.pop()
        if kept is None or (part, id(kept)) in seen:
            continue
        seen.add((part, id(kept)))
        if part.kind == "union":
            parts += [(choice, kept, prefix) for choice in part.items]
        elif isinstance(kept, dict):
            for name, inside, _ in part.fields:
                if name in kept:
                    parts.append((inside, kept[name], f"{prefix}{name}."))
                else:
                    yield prefix + name
        else:
            parts += [(item, kept[0], f"{prefix[:-1]}[].") for item in part.items]


# -- what a schema keeps


def _kept_fields(schema: ValueSchema | AvroSchema) -> _Kept:
    if isinstance(schema, ValueSchema):
        return _kept_by_type(schema.type)
    return _kept_by_avro(parsed(orjson.loads(schema.text)).type)


def _kept_by_type(kind: pa.DataType) -> _Kept:
    if pa.types.is_struct(kind):
        return {field.name: _kept_by_type(field.type) for field in kind}
    if pa.types.is_list(kind):
        return _each(_kept_by_type(kind.value_type))
    return _each(_kept_by_type(kind.item_type)) if pa.types.is_map(kind) else None


def _kept_by_avro(part: AvroType) -> _Kept:
    if part.kind == "record":
        return {
            name: _kept_by_avro(field.type)
            for field in part.fields
            for name in (field.name, *field.schema.get("aliases", ()))
        }
    choices = [_kept_by_avro(item) for item in part.items]
    kept = next((choice for choice in choices if choice is not None), None)
    return kept if part.kind == "union" else _each(kept)  # of a union, one choice is not null


def _each(kept: _Kept) -> _Kept:
    return None if kept is None else (kept,)
