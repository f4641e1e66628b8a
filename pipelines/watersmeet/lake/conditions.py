"""Conditions on columns as SQL, for the dialects in which lakes are queried."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from watersmeet.lake.table_reader import AFFIXES, Condition, Where


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
        """Return the conditions of a term, joined by AND."""
        return " AND ".join(_condition(times, dialect, *condition) for condition in term) or "TRUE"

    common = [condition for condition in where[0] if _in_all(condition, where)] if where else []
    rest = [_without(common, term) for term in where]
    either = " OR ".join(f"({conjunction(term)})" for term in rest) or "TRUE"
    return f"{conjunction(common)} AND ({either})" if common else either


def _in_all(condition: Condition, where: Where) -> bool:
    return all(condition in term for term in where)


def _without(common: Sequence[Condition], term: Sequence[Condition]) -> list[Condition]:
    return [condition for condition in term if condition not in common]


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
