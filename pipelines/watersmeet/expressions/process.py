"""The process that evaluates expressions of the user: DuckDB, apart from the memory of a run.

It reads requests from its standard input, answers on its standard output, and ends with whoever
started it. DuckDB's one connection reaches nothing outside and is locked. What it cannot answer
within its limits ends it.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.expressions.gate import ROWS, problem, query
from watersmeet.expressions.protocol import MEMORY_BYTES, RESULT_BYTES, ROW_S, ROWS_S, read, write

_SETTINGS: Final = {
    "threads": "1",
    "memory_limit": f"{MEMORY_BYTES // 2}B",
    "temp_directory": "",
    "autoload_known_extensions": "false",
    "autoinstall_known_extensions": "false",
    "allow_community_extensions": "false",
    "enable_external_access": "false",
    "Calendar": "gregorian",
    "TimeZone": "UTC",
    "default_collation": "",
    "default_null_order": "NULLS_LAST",
    "default_order": "ASC",
    "ieee_floating_point_ops": "true",
    "integer_division": "false",
    "lambda_syntax": "DISABLE_SINGLE_ARROW",
    "max_expression_depth": "250",
    "old_implicit_casting": "false",
    "order_by_non_integer_literal": "false",
    "scalar_subquery_error_on_multiple_rows": "true",
}
"""Settings that bound what DuckDB takes and reaches, then those that change what an expression is.

The latter have DuckDB's defaults, except for the syntax of lambdas (the other one is an operator of
JSON, too) and for the depth.
"""

_TAINTING: Final = (
    duckdb.OutOfMemoryException,
    duckdb.InternalException,
    duckdb.FatalException,
    duckdb.InterruptException,
    MemoryError,
    pa.ArrowMemoryError,
)
"""Errors after which the process is not to be relied on."""


def connect() -> duckdb.DuckDBPyConnection:
    """Return a connection that reads nothing but the rows that it is given."""
    connection = duckdb.connect(":memory:")
    connection.execute("CREATE MACRO size(list) AS len(list)")
    for name, value in _SETTINGS.items():
        connection.execute(f"SET {name} = '{value}'")
    connection.execute("SET lock_configuration = true")
    return connection


def serve(connection: duckdb.DuckDBPyConnection) -> None:
    """Answer requests until there are no more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints
    while (request := read(requests)) is not None:
        try:
            answer, rows = _answer(connection, *request)
        except _TAINTING:
            os.abort()
        write(answers, answer, rows)


_NOTHING: Final = pa.table({})
_ANSWER: Final = {"answer": True, "error": None}
_NO_ANSWER: Final = {"answer": False}

_FEW_ROWS: Final = 128
"""Number of rows that are evaluated one by one in one request."""


def _answer(
    connection: duckdb.DuckDBPyConnection, request: dict[str, Any], rows: pa.Table
) -> tuple[dict[str, Any], pa.Table]:
    connection.register(ROWS, rows)
    try:
        with _within(ROW_S if len(rows) <= 1 else ROWS_S):
            if "kinds" in request:
                what, columns = problem(connection, request["text"], tuple(request["kinds"]))
                return {"problem": what, "columns": columns}, _NOTHING
            return _evaluated(connection, request["text"], rows)
    finally:
        connection.unregister(ROWS)


def _evaluated(
    connection: duckdb.DuckDBPyConnection, text: str, rows: pa.Table
) -> tuple[dict[str, Any], pa.Table]:
    try:
        values = _values(connection, query(text))
        return _ANSWER, pa.table({"value": values, "failed": pa.repeat(False, len(values))})
    except _TAINTING:
        raise
    except (duckdb.Error, TooLargeError) as error:
        if len(rows) == 1:
            head = {**_ANSWER, "error": _harmless(str(error))}
            return head, pa.table({"value": pa.nulls(1), "failed": [True]})
        if isinstance(error, TooLargeError):
            return _NO_ANSWER, _NOTHING
    return _tried(connection, text, rows)


def _tried(
    connection: duckdb.DuckDBPyConnection, text: str, rows: pa.Table
) -> tuple[dict[str, Any], pa.Table]:
    # DuckDB can try most expressions: then it gives null for what fails, and else a struct.
    try:
        tried = _values(connection, query(f"TRY(struct_pack(value := ({text}\n)))"))
        values = pc.struct_field(tried.combine_chunks(), "value")
        return _ANSWER, pa.table({"value": values, "failed": tried.is_null()})
    except _TAINTING:
        raise
    except (duckdb.Error, TooLargeError):
        if len(rows) > _FEW_ROWS:
            return _NO_ANSWER, _NOTHING
    answers = []
    for number in range(len(rows)):
        connection.register(ROWS, rows.slice(number, 1))
        answers.append(_evaluated(connection, text, rows.slice(number, 1))[1])
    return _ANSWER, pa.concat_tables(answers, promote_options="default")


class TooLargeError(Exception):
    """The results are larger than `RESULT_BYTES`."""


def _values(connection: duckdb.DuckDBPyConnection, sql: str) -> pa.ChunkedArray:
    values = connection.sql(sql).to_arrow_table()["value"]
    if values.nbytes > RESULT_BYTES:
        raise TooLargeError(f"its result has more than {RESULT_BYTES // 1024**2} MiB")
    return values


def _harmless(error: str) -> str:
    # From a quote, a bracket or a colon on, DuckDB's sentence may have a value of a record.
    kind, is_typed, rest = error.partition(": ")
    line = re.split(r"['\"(\[{:\n]", rest if is_typed else kind)[0].strip()
    return f"{kind}: {line}" if is_typed else line


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
