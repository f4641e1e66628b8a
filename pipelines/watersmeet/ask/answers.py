"""Questions of Watersmeet's own to a lake, in the SQL that DataFusion and Spark share.

Names are quoted in backquotes. Three functions are spelled for the engine: `ms(time)` is a time in
epoch ms, `at(ms)` the time of a number, and `each(list)` a row for each element.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

import pyarrow as pa

from watersmeet.lake.table_reader import (
    NO_VERSIONS,
    SPELLED,
    Condition,
    NoTableError,
    TableReader,
    normalise,
    sql_of,
    within,
)
from watersmeet.lake.table_reader import literal as sql_literal
from watersmeet.lake.table_reader import quoted as quoted

Row = dict[str, Any]

_READS: Final = re.compile(r"\b(?:FROM|JOIN) `?(\w+)`?")
_OWN: Final = re.compile(r"(?:WITH|,) `?(\w+)`? AS \(")


def answer(reader: TableReader, sql: str, versions: Mapping[str, int] = NO_VERSIONS) -> pa.Table:
    """Return the rows of a query, with times in epoch ms.

    `versions`: those of tables that are not read at their last ones.
    Raises NoTableError where a table of it does not exist.
    """
    names = {*_READS.findall(sql)} - {*_OWN.findall(sql)}
    for function, spelled in SPELLED[reader.dialect].items():
        sql = re.sub(rf"\b{function}\(([^()]*)\)", spelled, sql)
    return normalise(reader.query(sql, sorted(names), versions).read_all())


def rows(reader: TableReader, sql: str) -> list[Row]:
    """Return the rows of a query by column; none where a table of it does not exist yet."""
    try:
        found = answer(reader, sql)
    except NoTableError:
        return []
    return list(found.to_pylist())


def queries(file: str) -> dict[str, str]:
    """Return the queries in a file of this folder, by the names above them."""
    text = files(__package__).joinpath(file).read_text(encoding="utf-8")
    [_, *parts] = re.split(r"^-- (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], map(str.strip, parts[1::2]), strict=True))


def literal(value: int | str | None) -> str:
    """Return a value as SQL of both engines; a null is a whole number."""
    return "CAST(NULL AS BIGINT)" if value is None else sql_literal(value)


def values(names: Sequence[str], found: Iterable[Iterable[int | str | None]]) -> str:
    """Return one or more rows as a query with these columns."""
    listed = ", ".join(f"({', '.join(map(literal, row))})" for row in found)
    return f"SELECT * FROM (VALUES {listed}) AS given({', '.join(map(quoted, names))})"


def follows(columns: Sequence[str], others: Sequence[str], operator: str) -> str:
    """Return the condition for columns that compare with others, in SQL, as the operator says
    (`>`, `>=`, `<=`): the first column counts first.
    """
    [(column, other), *rest] = zip(columns, others, strict=True)
    if not rest:
        return f"{column} {operator} {other}"
    further = follows(columns[1:], others[1:], operator)
    return f"({column} {operator[0]} {other} OR ({column} = {other} AND {further}))"


def beyond(begins: Mapping[int, int]) -> str:
    """Return the condition for rows of a bronze table from the offset of their partition on; of
    other partitions, all rows meet it.
    """
    if not begins:
        return "TRUE"
    others: list[Condition] = [("partition", "not in", sorted(begins))]
    from_begins = within({p: (begin, None) for p, begin in begins.items()})
    return f"({sql_of([*from_begins, others], (), '')})"
