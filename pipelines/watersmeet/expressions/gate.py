"""The gate for expressions of the user: one says the same of a merge record in every run.

DuckDB itself is asked: its parser gives the tree of an expression, and its catalog the stability of
each function.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any, Final

import duckdb

from watersmeet.core.texts import printable
from watersmeet.expressions.protocol import COUNTED

ROWS: Final = "_rows"
"""The name under which a connection has the rows of a batch. No column can have it."""

OUTSIDE: Final[Mapping[str, str]] = {
    "alias": "is what a query calls its argument",
    "current_localtime": "reads the clock",
    "current_localtimestamp": "reads the clock",
    "current_setting": "reads a setting",
    "getvariable": "reads a variable of the session",
    "json_serialize_plan": "reads the catalog",
    "make_type": "reads the catalog",
    "unnest": "gives other rows",
    "vector_type": "is how a batch lies in memory",
    "version": "is DuckDB's own release",
}
"""Functions that DuckDB calls CONSISTENT, or does not list, and that read something else."""

_INTERNAL: Final = "__internal_"
"""Beginning of the names of functions that trust their arguments, as DuckDB's own plans may."""

_RANDOM_AGGREGATES: Final = frozenset(["reservoir_quantile"])
"""Aggregates that DuckDB calls CONSISTENT, and that draw a sample."""

_CLASSES: Final = frozenset(
    [
        *("BETWEEN", "CASE", "CAST", "COLLATE", "COLUMN_REF", "COMPARISON", "CONJUNCTION"),
        *("CONSTANT", "FUNCTION", "LAMBDA", "OPERATOR"),
    ]
)
"""Classes of the nodes that a tree may have."""

_REFUSED_CLASSES: Final[Mapping[str, str]] = {
    "DEFAULT": "has no default here",
    "PARAMETER": "has a parameter",
    "POSITIONAL_REFERENCE": "has a column by its number",
    "STAR": "has a star, which stands for other columns in another lake",
    "SUBQUERY": "has a subquery",
    "WINDOW": "has a window over other rows",
}
_OPERATORS_REFUSED: Final = frozenset(["GROUPING_FUNCTION"])

_LIST_AGGREGATES: Final = frozenset(
    ["aggregate", "array_aggr", "array_aggregate", "list_aggr", "list_aggregate"]
)
"""Functions that call the aggregate which they are given by its name."""

_TIME_PARTS: Final = (
    *("date_diff", "date_part", "date_sub", "date_trunc", "datediff", "datepart", "datesub"),
    *("datetrunc", "timezone"),
)
_WRITTEN_OUT: Final[Mapping[str, int]] = {
    **dict.fromkeys(_TIME_PARTS, 0),
    "json_contains": 1,
    "strftime": 1,
}
"""Functions of which an argument has to be a constant, by its number: a zone, a part of a time, a
format, the JSON that is looked for. Whether they look at it where the other argument is null or
infinite, and so may fail, depends on the other rows.
"""

_LIST: Final = "list_filter(orders, lambda p: p.offset > 5)"
_SPELLINGS: Final[Mapping[str, str]] = {
    "array_max": "list_max(x)",
    "array_min": "list_min(x)",
    "array_size": "len(x)",
    "date_format": "strftime(event_time, '%Y-%m-%d')",
    "element_at": "x[1], where the first element is 1",
    "endswith": "ends_with(x, 'b')",
    "exists": f"len({_LIST}) > 0",
    "filter": _LIST,
    "forall": "len(list_filter(orders, lambda p: NOT (p.offset > 5))) = 0",
    "from_unixtime": "to_timestamp(x)",
    "get_json_object": "value->>'$.a'",
    "isnotnull": "x IS NOT NULL",
    "isnull": "x IS NULL",
    "named_struct": "{'a': x}",
    "nvl": "coalesce(x, y)",
    "parse_json": "x::JSON",
    "rlike": "regexp_matches(x, 'a+')",
    "startswith": "starts_with(x, 'a')",
    "to_date": "x::DATE",
    "transform": "list_transform(orders, lambda p: p.value)",
    "unix_millis": "epoch_ms(event_time)",
    "unix_timestamp": "epoch(event_time)",
}
"""What DuckDB has in place of functions of Spark's."""

_OF_LISTS: Final = frozenset(["avg", "count", "first", "last", "max", "min", "sum"])
_LAMBDA: Final = f"a lambda is spelled `lambda p: ...`, as in `{_LIST}`"
_KIND_OF_ERROR: Final = re.compile(r"^[A-Z]\w+(?: \w+)* Error: ")


def problem(
    connection: duckdb.DuckDBPyConnection, text: str, kinds: tuple[str, ...]
) -> tuple[str | None, list[str]]:
    """Return what is wrong with an expression over `ROWS` that must give one of `kinds`, or None.

    Then the columns that it reads; the name begins with `COUNTED` where only the length is read.
    Raises duckdb.Error where DuckDB cannot plan it.
    """
    columns = connection.table(ROWS).columns
    try:
        tree = _tree(connection, text)
        read = set(Gate(connection, frozenset(map(str.lower, columns)), text).columns_of(tree))
        kind = str(connection.sql(query(text)).types[0])
    except RefusedError as error:
        return str(error), []
    except RecursionError:
        return "is nested too deeply", []
    except duckdb.Error as error:
        return f"is not DuckDB SQL over silver's columns: {_reason(error, text)}", []
    if kind not in kinds:
        return f"gives {kind}", []
    whole = [name for name in columns if name.lower() in read]
    counted = [name for name in columns if COUNTED + name.lower() in read]
    return None, whole + [COUNTED + name for name in counted if name not in whole]


def query(text: str) -> str:
    """Return the query that evaluates an expression for each row, as `value`."""
    return f"SELECT ({text}\n) AS value FROM {ROWS}"


class RefusedError(Exception):
    """An expression is refused; the text says why, after the expression."""


def _tree(connection: duckdb.DuckDBPyConnection, text: str) -> dict[str, Any]:
    if not all(c.isprintable() or c.isspace() for c in text):
        raise RefusedError("has characters that cannot be seen")
    nodes = [_parsed(connection, f"SELECT {spelled}\n") for spelled in (text, f"({text}\n)", "1")]
    expressions = [node.pop("select_list") for node in nodes]
    is_one = len(expressions[0]) == 1 and nodes[0] == nodes[1] == nodes[2]
    if not is_one or expressions[0] != expressions[1]:
        raise RefusedError("is not one expression")
    [tree] = expressions[0]
    if tree["alias"]:
        raise RefusedError(f"names its result {printable(tree['alias'])}")
    return dict(tree)


def _parsed(connection: duckdb.DuckDBPyConnection, sql: str) -> dict[str, Any]:
    rows = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    parsed = json.loads(rows[0][0], object_hook=_without_location)
    if parsed["error"]:
        raise RefusedError(f"is not DuckDB SQL: {parsed['error_message']}{_hint(sql)}")
    if len(parsed["statements"]) != 1 or "select_list" not in parsed["statements"][0]["node"]:
        raise RefusedError("is not one expression")
    return dict(parsed["statements"][0]["node"])


def _without_location(node: dict[str, Any]) -> dict[str, Any]:
    node.pop("query_location", None)
    return node


class _Catalog:
    """What DuckDB has, by names in lower case."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.functions = defaultdict[str, set[tuple[str, str | None]]](set)
        """Kind and stability of each that may stand in an expression."""
        self.macros = defaultdict[str, list[tuple[list[str], str]]](list)
        """Parameters and body of each macro of a name."""
        self.of_lambdas: set[str] = set()
        types = connection.execute("SELECT type_name FROM duckdb_types() WHERE internal")
        self.types = {name.lower() for (name,) in types.fetchall()}
        functions = connection.execute(
            "SELECT function_name, function_type, stability, parameters, parameter_types, "
            "macro_definition FROM duckdb_functions()"
        )
        for name, kind, stability, parameters, kinds, body in functions.fetchall():
            if kind in ("scalar", "aggregate", "macro"):
                self.functions[name.lower()].add((kind, stability))
            if kind == "macro":
                self.macros[name.lower()].append(([each.lower() for each in parameters], body))
            if "LAMBDA" in (kinds or ()):
                self.of_lambdas.add(name.lower())


@cache
def _catalog(connection: duckdb.DuckDBPyConnection) -> _Catalog:
    return _Catalog(connection)


@dataclass(frozen=True)
class Gate:
    """The checks of one expression's tree; `columns`: the names that it may read, in lower case."""

    connection: duckdb.DuckDBPyConnection
    columns: frozenset[str]
    text: str

    @property
    def _catalog(self) -> _Catalog:
        return _catalog(self.connection)

    def columns_of(
        self, node: object, scope: frozenset[str] = frozenset(), within: tuple[str, ...] = ()
    ) -> Iterator[str]:
        """Yield the columns that a tree reads; `scope`: parameters of lambdas around it.

        Raises RefusedError for what may differ from run to run. `within`: macros whose body it is.
        """
        if isinstance(node, list):
            for child in node:
                yield from self.columns_of(child, scope, within)
        elif isinstance(node, dict):
            checks = {"COLUMN_REF": self._column, "FUNCTION": self._function}
            kind = node.get("class")
            if kind is not None:
                self._check(node)
            if kind in checks:
                yield from checks[kind](node, scope, within)
            else:
                yield from self.columns_of([*node.values()], scope, within)

    def _check(self, node: Mapping[str, Any]) -> None:
        kind = node["class"]
        if kind not in _CLASSES:
            raise RefusedError(_REFUSED_CLASSES.get(kind, f"has {kind.lower()}"))
        if node["type"] in _OPERATORS_REFUSED:
            raise RefusedError("has `grouping`, which is about other rows")
        if kind == "CAST":
            self._check_type(node["cast_type"])
        if node["type"] == "ARRAY_EXTRACT":
            index = node["children"][1].get("value") or {}
            if index.get("value") == 0 and index["type"]["id"] != "VARCHAR":
                raise RefusedError("has the index 0: a list begins with 1, as in `orders[1]`")

    def _check_type(self, kind: object) -> None:
        if isinstance(kind, list):
            for part in kind:
                self._check_type(part)
        elif isinstance(kind, dict):
            if kind.get("id") == "UNBOUND":
                info = kind["type_info"]
                path = [info.get("catalog"), info.get("schema"), info["name"]]
                name = ".".join(filter(None, path))
                if name.lower() not in self._catalog.types:
                    raise RefusedError(f"has {printable(name)}, which is no type of DuckDB's own")
            self._check_type([*kind.values()])

    def _column(
        self, node: Mapping[str, Any], scope: frozenset[str], within: tuple[str, ...]
    ) -> Iterator[str]:
        name = node["column_names"][0]
        if name.lower() in scope:
            return
        if within or name.lower() not in self.columns:
            raise RefusedError(
                f"reads `{printable(name)}`, which is no column of a merge record{_hint(self.text)}"
            )
        yield name.lower()

    def _function(
        self, node: Mapping[str, Any], scope: frozenset[str], within: tuple[str, ...]
    ) -> Iterator[str]:
        name = node["function_name"].lower()
        children = node["children"]
        if node["catalog"] or node["schema"] not in ("", "main"):
            path = ".".join(filter(None, [node["catalog"], node["schema"]]))
            raise RefusedError(f"has `{printable(path)}.{name}(...)`: write `{name}({path}, ...)`")
        if node["distinct"] or node["filter"] or node["order_bys"]["orders"]:
            raise RefusedError(f"has `{name}` over other rows")
        self._check_function(name, children, within)
        has_lambda = len(children) > 1 and children[1]["class"] == "LAMBDA"
        if has_lambda and name in self._catalog.of_lambdas:
            named, body = _lambda(children[1])
            yield from self.columns_of([children[0], *children[2:]], scope, within)
            yield from self.columns_of(body, scope | named, within)
        elif name in ("len", "size") and [*map(_is_name, children)] == [True]:
            yield from (COUNTED + column for column in self.columns_of(children, scope, within))
        else:
            yield from self.columns_of(children, scope, within)

    def _check_function(
        self, name: str, children: list[dict[str, Any]], within: tuple[str, ...]
    ) -> None:
        if name in OUTSIDE:
            raise RefusedError(f"has `{name}`, which {OUTSIDE[name]}")
        if name == "age" and len(children) == 1:
            raise RefusedError("has `age` of one time, which reads the clock: give it two")
        number = _WRITTEN_OUT.get(name)
        if number is not None and len(children) > 1 and not _is_written_out(children[number]):
            place = ("first", "second")[number]
            raise RefusedError(f"has `{name}` without a constant as its {place} argument")
        if "`" in name:
            raise RefusedError('quotes a name with backticks: quote it with double quotes, "..."')
        self._check_known(name)
        self._check_aggregate(name, children)
        if name not in within:
            for parameters, body in self._catalog.macros.get(name, ()):
                tree = _parsed(self.connection, f"SELECT {body}")["select_list"]
                try:
                    list(self.columns_of(tree, frozenset(parameters), (*within, name)))
                except RefusedError as error:
                    raise RefusedError(f"has `{name}`, which {error}") from None

    def _check_known(self, name: str) -> None:
        found = self._catalog.functions.get(name, set())
        if not found or name.startswith(_INTERNAL):
            instead = f": write `{_SPELLINGS[name]}`" if name in _SPELLINGS else ""
            raise RefusedError(
                f"has `{printable(name)}`, which is no function of DuckDB's{instead}"
            )
        for kind, stability in found:
            if kind == "aggregate":
                of_lists = f": of a list it is `list_{name}`" if name in _OF_LISTS else ""
                raise RefusedError(f"has `{name}`, which is about other rows{of_lists}")
            if kind == "scalar" and stability != "CONSISTENT":
                raise RefusedError(f"has `{name}`, which gives something else in every run")

    def _check_aggregate(self, name: str, children: list[dict[str, Any]]) -> None:
        if name not in _LIST_AGGREGATES:
            return
        for child in children[1:2]:
            aggregate = str((child.get("value") or {}).get("value")).lower()
            if child["class"] == "CONSTANT" and aggregate not in _RANDOM_AGGREGATES:
                continue
            if child["class"] == "LAMBDA":
                raise RefusedError(f"has `{name}` with a lambda: write `list_reduce`")
            raise RefusedError(f"has `{name}` with another aggregate than a named one of DuckDB's")


def _is_written_out(node: Mapping[str, Any]) -> bool:
    if node["class"] == "CAST":
        return _is_written_out(node["child"])
    return bool(node["class"] == "CONSTANT")


def _is_name(node: Mapping[str, Any]) -> bool:
    return node["class"] == "COLUMN_REF" and len(node["column_names"]) == 1


def _lambda(node: Mapping[str, Any]) -> tuple[frozenset[str], object]:
    left = node["lhs"]
    named = left["children"] if left["class"] == "FUNCTION" else [left]
    if not all(map(_is_name, named)):
        raise RefusedError(f"has a lambda that DuckDB does not know: {_LAMBDA}")
    return frozenset(name["column_names"][0].lower() for name in named), node["expr"]


def _reason(error: duckdb.Error, text: str) -> str:
    line = _KIND_OF_ERROR.sub("", next(iter(str(error).splitlines()), ""))
    if "lambda arrow" in line:
        return _LAMBDA
    return f"{line}{_hint(text)}"


def _hint(text: str) -> str:
    if "`" in text:
        return '; a name is quoted with double quotes, "..."'
    words = re.findall(r"\bexists\s*(?=\()|\brlike\b", text.lower())
    spellings = (_SPELLINGS[word.strip()] for word in words)
    arrows = (_LAMBDA for _ in re.findall(r"\w\)?\s*->\s*[^'\s\d]", text))
    spelling = next(chain((f"write `{found}`" for found in spellings), arrows), None)
    return "" if spelling is None else f"; {spelling}"
