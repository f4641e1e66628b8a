"""What `watersmeet sql` lets through: one query that reads tables and views of the lake, and
nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Final, NamedTuple

import sqlglot
from sqlglot import Token, TokenType, exp
from sqlglot.errors import ParseError, TokenError

from watersmeet.errors import ConfigurationError

logging.getLogger("sqlglot").setLevel(logging.ERROR)  # it warns of statements that are refused here

_GRAMMARS: Final = {"datafusion": "postgres", "spark": "spark"}
"""By dialect of a reader, that of sqlglot in which a query is read."""

_REACHING: Final = frozenset(
    [
        *("reflect", "try_reflect", "java_method", "http_request", "secret", "try_secret"),
        *("list_secrets", "remote_query", "vector_search", "cloud_files", "cloud_files_state"),
        "event_log",
    ]
)
_REACHING_PREFIXES: Final = ("ai_", "read_")
"""Functions of Spark and Databricks that call code, or reach files, secrets or other hosts."""


class Query(NamedTuple):
    """A query that may run: its text without a semicolon, and the tables and views in it."""

    text: str
    names: Sequence[str]


def pass_query(
    text: str, tables: Collection[str], dialect: str, functions: Collection[str] | None
) -> Query:
    """Return the query in a text.

    `tables`: the lake's tables and views. `functions`: those that may be called (None: all).

    Raises ConfigurationError, which says where in the text, for anything but one query that reads
    these tables and calls these functions.
    """
    tokens = _tokens(text, dialect)
    if not tokens:
        raise _refused(text, None, "it is empty", _ONE)
    statement = _statement(text, tokens, dialect)
    names = [*_tables(text, statement, tables)]
    _check_functions(text, tokens, statement, functions)
    if dialect == "spark":
        _check_words(text, tokens)
    end = tokens[-1].start if tokens[-1].token_type == TokenType.SEMICOLON else len(text)
    return Query(text[:end], names)


_ONE: Final = "`sql` takes one query, which begins with SELECT, WITH or VALUES"


def place_of(text: str, name: str, dialect: str) -> str:
    """Return where a name stands first in a query, for a message; empty where it does not."""
    wanted = name.rpartition(".")[2].casefold()
    tokens = _tokens(text, dialect)
    start = next((token.start for token in tokens if token.text.casefold() == wanted), None)
    return "" if start is None else _line_and_column(text, start)


def _tokens(text: str, dialect: str) -> list[Token]:
    try:
        return sqlglot.tokenize(text, read=_GRAMMARS[dialect])
    except TokenError:
        raise _refused(text, None, "a quote or a comment has no end", "close it") from None


def _statement(text: str, tokens: Sequence[Token], dialect: str) -> exp.Expr:
    try:
        statements = sqlglot.parse(text, read=_GRAMMARS[dialect])
    except ParseError as error:
        raise _syntax_error(text, error) from None
    found = [each for each in statements if each and not isinstance(each, exp.Semicolon)]
    if len(found) > 1:
        ends = [token.start for token in tokens if token.token_type == TokenType.SEMICOLON]
        raise _refused(text, ends[0], "another statement follows", _ONE)
    kind = tokens[0].text.upper()
    changes = (exp.Into, exp.DML, exp.DDL, exp.Command, exp.QueryTransform)
    if not found or not isinstance(found[0], (exp.Query, exp.Values)):
        raise _refused(text, tokens[0].start, f"{kind} is no query", _ONE)
    for node in found[0].walk():
        if isinstance(node, changes) and not isinstance(node, exp.Query):
            raise _refused(text, _start(node), f"{node.key.upper()} does more than read", _ONE)
    return found[0]


def _syntax_error(text: str, error: ParseError) -> ConfigurationError:
    [first, *_] = error.errors or [{}]
    highlight = first.get("highlight") or ""
    start = len(first.get("start_context") or "")
    lines = text.splitlines(keepends=True)
    if (line := first.get("line")) is not None:
        start = sum(map(len, lines[: line - 1])) + first["col"] - len(highlight)
    found = f"`{highlight}`" if highlight else "this"
    return _refused(text, start, f"{found} is not understood here", "see docs/analysts.md")


def _tables(text: str, statement: exp.Expr, tables: Collection[str]) -> Iterator[str]:
    seen = set[str]()
    for table in statement.find_all(exp.Table):
        name = table.name
        if table.db or table.catalog:
            raise _refused(
                text,
                _start(table),
                f"`{table.sql()}` is outside the lake",
                "name tables and views of this lake, each by its name alone",
            )
        if not name:  # a function that yields rows
            continue
        if name in tables:
            if name not in seen:
                yield name
            seen.add(name)
        elif name not in _named_around(table):
            near = get_close_matches(name, tables, 1)
            advice = (
                f"did you mean `{near[0]}`?" if near else f"there are {', '.join(sorted(tables))}"
            )
            raise _refused(text, _start(table), f"there is no table or view `{name}`", advice)


def _check_words(text: str, tokens: Sequence[Token]) -> None:
    # What sqlglot reads otherwise than Spark.
    if "${" in text:
        raise _refused(
            text, text.index("${"), "`${` names a variable of Spark's", "write its value"
        )
    for before, token in pairwise(tokens):
        if token.token_type == TokenType.TABLE and before.token_type != TokenType.DOT:
            raise _refused(
                text,
                token.start,
                "TABLE reads a table by another way than FROM",
                "write SELECT * FROM; or, for a column of this name, `table` in backquotes",
            )


def _named_around(node: exp.Expr) -> set[str]:
    """Return the names that WITH gives to queries where a node stands: elsewhere each of them may
    be a table outside the lake.
    """
    names = set[str]()
    while (parent := node.parent) is not None:
        if isinstance(parent, exp.With):  # one that is named sees those before it
            named = parent.expressions
            own = [each is node for each in named].index(True)
            names |= {each.alias for each in named[: own + bool(parent.recursive)]}
        elif (around := parent.args.get("with_")) is not None and around is not node:
            names |= {each.alias for each in around.expressions}
        node = parent
    return names


def _check_functions(
    text: str,
    tokens: Sequence[Token],
    statement: exp.Expr,
    functions: Collection[str] | None,
) -> None:
    if functions is None:
        return
    own = {node.name.lower() for node in statement.find_all(exp.Anonymous)}
    for token, after in pairwise(tokens):
        name = token.text.lower()
        is_call = after.token_type == TokenType.L_PAREN
        reaches = name in _REACHING or name.startswith(_REACHING_PREFIXES)
        if is_call and (reaches or (name in own and name not in functions)):
            raise _refused(
                text,
                token.start,
                f"`{name}` is none of the functions that a query may call",
                "use functions of SQL that neither reach outside nor are your own",
            )


def _start(node: exp.Expr) -> int | None:
    places = (each.meta.get("start") for each in node.walk())
    return min((place for place in places if place is not None), default=None)


def _refused(text: str, start: int | None, what: str, fix: str) -> ConfigurationError:
    place = "" if start is None else f", {_line_and_column(text, start)}"
    return ConfigurationError(what, where=f"QUERY{place}", fix=fix)


def _line_and_column(text: str, start: int) -> str:
    before = text[:start]
    return f"line {before.count(chr(10)) + 1}, column {start - (before.rfind(chr(10)) + 1) + 1}"
