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
    """Return the schema of scalar columns spelled as in DDL: `partition int, merge_key string`."""
    pairs = map(str.split, columns.split(", "))
    return pa.schema([(name, _KINDS[kind]) for name, kind in pairs])


PLACE: Final = {"source": pa.string(), "topic": pa.string(), "offset": pa.int64()}
"""The columns that say which record of its partition something is about."""

DUE = schema_of("due timestamp, closed_at timestamp")
"""When a merge record can be joined last, and the first clock that closed it (null while open)."""

TENANT = schema_of("tenant string")
"""The column with a record's tenant: empty where the merge has no tenants."""

NO_TENANT: Final = ""
"""The tenant of every record of a merge without tenants."""


def ddl(kind: pa.DataType) -> str:
    """Return a type in Spark's DDL (`ARRAY<STRUCT<offset: BIGINT>>`), or raise TypeError."""
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


def clashes(before: pa.DataType, after: pa.DataType, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path of each field that differs in case alone from another, and that one's name."""
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


def widened(before: pa.DataType, after: pa.DataType, where: str = "") -> pa.DataType:
    """Return the type of a column that holds values of both types.

    Structs have the fields of the first, then what the second adds but for `clashes`. Raises
    ValueError with the path of the first field whose types differ.
    """
    if pa.types.is_struct(before) and pa.types.is_struct(after):
        others = {field.name: field.type for field in after}
        kept = {
            f.name: widened(f.type, others.get(f.name, f.type), f"{where}.{f.name}".lstrip("."))
            for f in before
        }
        names = {name.lower() for name in kept}
        added = [field for field in after if field.name.lower() not in names]
        return pa.struct([*kept.items(), *added])
    if pa.types.is_list(before) and pa.types.is_list(after):
        return pa.list_(widened(before.value_type, after.value_type, f"{where}[]"))
    if before != after:
        kinds = f"a {ddl(before).lower()} and cannot become a {ddl(after).lower()}"
        raise ValueError(f"`{where}` is {kinds}")
    return before


def columns_ddl(columns: Iterable[pa.Field]) -> str:
    """Return the Spark DDL text of columns (`partition INT, merge_key STRING`); see `ddl`."""
    return ", ".join(f"{quoted(column.name)} {ddl(column.type)}" for column in columns)


def is_identifier(name: str) -> bool:
    """Return True where Spark's SQL takes a name as it is, without backticks."""
    return re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None


def quoted(name: str) -> str:
    """Return a name as Spark's SQL and DDL take it: in backticks unless it is an identifier."""
    return name if is_identifier(name) else "`" + name.replace("`", "``") + "`"
