"""Conditions on columns as SQL, for the dialects in which lakes are queried."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from watersmeet.core.types import TIME, ddl
from watersmeet.lake.table_reader import AFFIXES, Condition, Where
from watersmeet.lake.views import View


class Dialect(NamedTuple):
    """Functions that write a dialect's column names, texts, doubles, and times from epoch ms."""

    name: Callable[[str], str]
    text: Callable[[str], str]
    double: Callable[[float], str]
    time: Callable[[int], str]


def sql_of(where: Where, times: Collection[str], dialect: Dialect) -> str:
    """Return conditions as SQL; `times`: the columns that hold timestamps.

    What all terms have in common is written once: it may be a long list. Raises ValueError for a
    value that no column can hold.
    """

    def conjunction(term: Sequence[Condition]) -> str:
        return " AND ".join(_condition(times, dialect, *condition) for condition in term) or "TRUE"

    first = where[0] if where else ()
    common = [condition for condition in first if all(condition in term for term in where)]
    rest = [[condition for condition in term if condition not in common] for term in where]
    if common and not all(rest):  # of one term, nothing is left
        return conjunction(common)
    either = " OR ".join(f"({conjunction(term)})" for term in rest) or "TRUE"
    return f"{conjunction(common)} AND ({either})" if common else either


def sql_of_view(
    view: View, tables: Mapping[str, str], columns: Mapping[str, Collection[str]], dialect: Dialect
) -> str:
    """Return a view as a query of its tables.

    `tables`: what the query calls those that exist. `columns`: the columns that each has by now; a
    view lacks what one of its tables lacks.
    """
    parts = [part for part in view.parts if part.table in tables]
    names = [
        name
        for name in view.schema.names
        if all(name in part.constants or name in columns[part.table] for part in parts)
    ]
    queries = []
    for part in parts:
        constants = {
            name: f"{dialect.text(text)} AS {dialect.name(name)}"
            for name, text in part.constants.items()
        }
        selected = ", ".join(constants.get(name, dialect.name(name)) for name in names)
        where = sql_of([part.where], (), dialect)
        queries.append(f"SELECT {selected} FROM {tables[part.table]} WHERE {where}")
    return " UNION ALL ".join(queries)


def sql_of_rows(rows: pa.Table, schema: pa.Schema, dialect: Dialect) -> str:
    """Return a few rows as a query; times are epoch ms."""
    names = [dialect.name(name) for name in schema.names]

    def literal_of(kind: pa.DataType, value: Any) -> str:
        if kind == TIME:
            return dialect.time(value or 0)
        return "NULL" if value is None else _literal(value, dialect)

    records = [row.values() for row in rows.select(schema.names).to_pylist()]
    values = (
        f"({', '.join(map(literal_of, schema.types, record))})"
        for record in records or [[None] * len(names)]
    )
    typed = (
        name if kind == TIME else f"CAST({name} AS {ddl(kind)}) AS {name}"
        for name, kind in zip(names, schema.types, strict=True)
    )
    return (
        f"SELECT {', '.join(typed)} FROM (VALUES {', '.join(values)}) "
        f"AS decided({', '.join(names)}) WHERE {'TRUE' if records else 'FALSE'}"
    )


def _condition(
    times: Collection[str], dialect: Dialect, column: str, operator: str, value: Any
) -> str:
    name = dialect.name(column)
    if operator in ("is null", "is not null"):
        return f"{name} {operator.upper()}"
    if operator in AFFIXES:
        return f"{AFFIXES[operator]}({name}, {len(value)}) = {dialect.text(value)}"

    def literal_of(element: Any) -> str:
        """Return a value in the dialect: epoch ms as a time, where the column has times."""
        return dialect.time(int(element)) if column in times else _literal(element, dialect)

    if operator in ("in", "not in"):
        return (
            f"{name} {operator.upper()} ({', '.join(map(literal_of, value))})"
            if len(value)
            else str(operator == "not in").upper()
        )
    return f"{name} {operator} {literal_of(value)}"


def _literal(value: Any, dialect: Dialect) -> str:
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, int):
        return repr(value)
    if isinstance(value, float):
        return dialect.double(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"X'{bytes(value).hex()}'"
    if isinstance(value, str):
        return dialect.text(value)
    raise ValueError(f"{value!r} is no value that a column can be compared with")


def literal(value: str | bool | None) -> str:
    """Return a value as SQL of every dialect. A text must have neither quotes nor backslashes."""
    if value is None:
        return "NULL"
    return str(value).upper() if isinstance(value, bool) else f"'{value}'"
