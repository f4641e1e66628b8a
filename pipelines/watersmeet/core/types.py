"""Arrow types that all layers share, and how Spark's DDL spells an Arrow type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

TIME: Final = pa.timestamp("us", "UTC")
"""The type of every point in time in the tables."""

HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
"""The headers of a Kafka record, in their order; a name may come several times, a value may be
null."""

_KINDS: Final = {
    "string": pa.string(),
    "binary": pa.binary(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": TIME,
    "date": pa.date32(),
}
_DDL: Final = {kind: name.upper() for name, kind in _KINDS.items()}


def schema_of(columns: str) -> pa.Schema:
    """Return the schema of columns spelled as in DDL: `partition int, merge_key string`.

    Lists and structs are not supported.
    """
    pairs = map(str.split, columns.split(", "))
    return pa.schema([(name, _KINDS[kind]) for name, kind in pairs])


DUE = schema_of("due timestamp, closed_at timestamp")
"""Columns with the times when a merge record can be joined last, and when it was closed.

`closed_at` is the first clock that closed it, null while it is open.
"""

TENANT = schema_of("tenant string")
"""The column with a record's tenant: empty where the merge has no tenants."""

NO_TENANT: Final = ""
"""The tenant of every record of a merge without tenants."""


def ddl(kind: pa.DataType) -> str:
    """Return the Spark DDL text of an Arrow type, such as `ARRAY<STRUCT<offset: BIGINT>>`.

    Supported are string, binary, int32, int64, float64, bool, `TIME`, date32, decimal128, and
    lists, structs and maps of them. Raise TypeError for others.
    """
    if kind in _DDL:
        return _DDL[kind]
    if pa.types.is_list(kind):
        return f"ARRAY<{ddl(kind.value_type)}>"
    if pa.types.is_decimal128(kind):
        return f"DECIMAL({kind.precision}, {kind.scale})"
    if pa.types.is_map(kind):
        return f"MAP<{ddl(kind.key_type)}, {ddl(kind.item_type)}>"
    if pa.types.is_struct(kind):
        return f"STRUCT<{', '.join(f'{quoted(field.name)}: {ddl(field.type)}' for field in kind)}>"
    raise TypeError(f"no column can have the Arrow type {kind}")


def widened(before: pa.DataType, after: pa.DataType) -> pa.DataType:
    """Return the type of a column that holds values of both types.

    Structs have the fields of the first, then what the second adds, without those that no table has
    beside the first ones (`clashes`). Raise ValueError with the path of the first field whose types
    differ.
    """
    return _widened(before, after, "")


def clashes(before: pa.DataType, after: pa.DataType, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of the second type that no table has beside those of the first one: names of
    columns and fields do not differ in case alone.

    Each is its path, and the name of the other field there.
    """
    if pa.types.is_struct(before) and pa.types.is_struct(after):
        spellings = {field.name.lower(): field for field in before}
        for field in after:
            path = f"{where}.{field.name}".lstrip(".")
            other = spellings.get(field.name.lower(), field)
            if other.name != field.name:
                yield path, other.name
            else:
                yield from clashes(other.type, field.type, path)
    elif pa.types.is_list(before) and pa.types.is_list(after):
        yield from clashes(before.value_type, after.value_type, f"{where}[]")


def _widened(before: pa.DataType, after: pa.DataType, where: str) -> pa.DataType:
    if pa.types.is_struct(before) and pa.types.is_struct(after):
        names = {field.name.lower() for field in before}
        added = [field for field in after if field.name.lower() not in names]
        both = [
            (f, after.field(f.name) if after.get_field_index(f.name) >= 0 else f) for f in before
        ]
        kept = [
            (f.name, _widened(f.type, other.type, f"{where}.{f.name}".lstrip(".")))
            for f, other in both
        ]
        return pa.struct([*kept, *added])
    if pa.types.is_list(before) and pa.types.is_list(after):
        return pa.list_(_widened(before.value_type, after.value_type, f"{where}[]"))
    if before != after:
        raise ValueError(
            f"`{where}` is a {ddl(before).lower()} and cannot become a {ddl(after).lower()}"
        )
    return before


def columns_ddl(columns: Iterable[pa.Field]) -> str:
    """Return the Spark DDL text of columns, such as `partition INT, merge_key STRING`.

    `columns` is a schema, or the fields of a struct. Raise TypeError where a column has a type that
    `ddl` does not know.
    """
    return ", ".join(f"{quoted(column.name)} {ddl(column.type)}" for column in columns)


def is_identifier(name: str) -> bool:
    """Return True where Spark's SQL takes a name as it is, without backticks."""
    return re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None


def quoted(name: str) -> str:
    """Return a name as Spark's SQL and DDL take it: in backticks unless it is an identifier."""
    return name if is_identifier(name) else "`" + name.replace("`", "``") + "`"
