"""Rows and expressions whose results are recorded, and a walk through DuckDB's functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from watersmeet.expressions import MESSAGE, evaluate, expression_problem
from watersmeet.expressions.process import connect

TIME = pa.timestamp("us", "UTC")


def _parts(value: pa.DataType) -> pa.DataType:
    fields = [("offset", pa.int64()), ("event_time", TIME), ("value", value)]
    return pa.list_(pa.struct(fields))


SCHEMA = pa.schema(
    [
        ("partition", pa.int32()),
        ("tenant", pa.string()),
        ("merge_key", pa.string()),
        ("event_time", TIME),
        ("last_event_time", TIME),
        ("orders", _parts(pa.string())),
        (
            "tracking",
            _parts(
                pa.struct(
                    [("page", pa.string()), ("ms", pa.float64()), ("tags", pa.list_(pa.string()))]
                )
            ),
        ),
        ("user", _parts(pa.string())),
    ]
)
"""Columns of silver of three sources, one with a schema."""

_AMOUNTS = ["3", "2.5", '"x"', "null", "1e3", "[1, 2]", '{"a": "b"}', "9007199254740993"]


def _row(number: int) -> dict[str, Any]:
    time = 1_767_225_599_999_000 + number * 86_400_000_001
    values = [
        f'{{"amount": {_AMOUNTS[(number + i) % 8]}, '
        f'"at": "2026-0{i + 1}-0{number % 9 + 1}T10:00:00Z"}}'
        for i in range(number % 4)
    ]
    orders = [
        {"offset": number + i, "event_time": time + i, "value": value}
        for i, value in enumerate(values)
    ]
    pages = [
        {
            "offset": i,
            "event_time": time,
            "value": {"page": f"/p{i}", "ms": i / 3, "tags": ["ß", "İ", None][: i + 1]},
        }
        for i in range(number % 3)
    ]
    odd = [
        "a-1",
        "Ünïcode ß İ ı",
        "",
        "x'y\"z",
        "10",
        "-7.25",
        "true",
        "2026-02-30",
        "😀👨‍👩‍👧",
        "a,b;c",
    ]
    return {
        "partition": number % 3,
        "tenant": ["", "t1"][number % 2],
        "merge_key": odd[number % len(odd)],
        "event_time": time,
        "last_event_time": time + number * 1_000_000,
        "orders": orders,
        "tracking": pages,
        "user": [],
    }


ROWS = pa.Table.from_pylist([_row(number) for number in range(20)], SCHEMA)

GOLDEN = Path(__file__).parents[1] / "golden" / "expressions.json"
EXPRESSIONS = tuple(json.loads(GOLDEN.read_text(encoding="utf-8")))
"""Expressions that give texts, nearly all of what people need, and of what may differ."""


def answers(texts: Sequence[str]) -> dict[str, Any]:
    """What each expression makes of each of `ROWS` (`!`: it fails), or why it is refused."""
    found: dict[str, Any] = {}
    for text in texts:
        if problem := expression_problem(text, SCHEMA, MESSAGE):
            found[text] = problem
            continue
        outcome = evaluate(text, ROWS, MESSAGE)
        values = zip(outcome.values.to_pylist(), outcome.failed.to_pylist(), strict=True)
        found[text] = [
            "!" if failed else value if value is None else value.decode("utf-8", "backslashreplace")
            for value, failed in values
        ]
    return found


_WALK = r"""
import json, time, pyarrow as pa
from watersmeet.expressions import process
from watersmeet.expressions.process import connect
from watersmeet.expressions.gate import ROWS, problem, query

SAMPLES = {
    "VARCHAR": ["'12'", "'b'", "'day'"], "BLOB": ["'ab'::BLOB"], "BOOLEAN": ["true"],
    "DATE": ["DATE '2026-03-04'"], "TIME": ["TIME '05:06:07'"], "INTERVAL": ["INTERVAL 5 DAY"],
    "TIMESTAMP": ["TIMESTAMP '2026-03-04 05:06:07'"], "JSON": ["'[1]'::JSON"],
    "TIMESTAMP WITH TIME ZONE": ["TIMESTAMPTZ '2026-03-04 05:06:07+00'"],
    "TIME WITH TIME ZONE": ["TIMETZ '05:06:07+00'"], "ANY": ["'abc'", "3", "[3, 1]"],
    "ANY[]": ["[3, 1, 2]"], "T[]": ["[3, 1, 2]"], "LAMBDA": ["lambda x: x", "lambda x, y: x + y"],
    "T": ["3"], "K": ["3"], "V": ["3"], "DOUBLE": ["1.5"], "FLOAT": ["1.5"], "BIT": ["'101'::BIT"],
    "MAP(K, V)": ["MAP {3: 4}"], "UUID": ["'00000000-0000-4000-8000-000000000001'::UUID"],
}
connection = process.connect()
connection.register(ROWS, pa.table({"a": [1]}))
functions = connection.execute(
    "SELECT DISTINCT function_name, parameter_types FROM duckdb_functions() "
    "WHERE function_type IN ('scalar', 'macro') ORDER BY ALL").fetchall()
found = {}
for name, types in functions:
    for choice in range(3):
        samples = [SAMPLES.get(kind or "ANY", ["3"]) for kind in types]
        arguments = ", ".join(sample[choice % len(sample)] for sample in samples)
        called = f'"{name}"({arguments})' if name.isidentifier() else (
            f"({arguments.replace(', ', ') ' + name + ' (', 1)})")
        text = f"({called})::VARCHAR"
        what, _ = problem(connection, text, ("VARCHAR",))
        try:
            found[text] = "! " + what if what else str(connection.sql(query(text)).fetchall())
        except Exception as error:
            found[text] = "! " + type(error).__name__
for (name,) in connection.execute(
        "SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type = 'aggregate'"
        " ORDER BY 1").fetchall():
    text = f"list_aggregate(list_transform(range(20000), lambda x: x % 1000), '{name}')::VARCHAR"
    what, _ = problem(connection, text, ("VARCHAR",))
    try:
        found[text] = "! " + what if what else str(connection.sql(query(text)).fetchall())
    except Exception as error:
        found[text] = "! " + type(error).__name__
print(json.dumps(found))
"""


def functions_walk(zone: str, locale: str) -> dict[str, str]:
    """What each of DuckDB's functions gives for some arguments, by the call; `!` where it is
    refused or fails."""
    environment = {**os.environ, "TZ": zone, "LC_ALL": locale}
    walked = subprocess.run(
        [sys.executable, "-c", _WALK], env=environment, capture_output=True, text=True, check=True
    )
    found: dict[str, str] = json.loads(walked.stdout)
    return found


def recorded() -> str:
    """The text of tests/golden/expressions.json, as it is today."""
    return json.dumps(answers(EXPRESSIONS), indent=0, ensure_ascii=False) + "\n"


if __name__ == "__main__":  # a new expression is added with null, and then recorded
    GOLDEN.write_text(recorded(), encoding="utf-8")


ODD_TEXTS = {
    "VARCHAR": ("x", "", "%", "{", "$[", "(", "now", "zz", "-5", "[1]", "\\"),
    "JSON": ("x", "", "{", "[1]"),
    "DATE": ("infinity", "2020-01-01"),
    "TIMESTAMP": ("infinity", "2020-01-01"),
    "TIMESTAMP WITH TIME ZONE": ("infinity", "2020-01-01"),
    "INTERVAL": ("1 day", "-1 month"),
    "BIGINT": ("7", "-1", "0"),
    "DOUBLE": ("1.5", "-1", "nan"),
    "VARCHAR[]": ("['a']", "[]"),
}
"""Texts that become values of a type, many of which functions fail for."""


def functions_of_texts() -> list[tuple[str, list[str]]]:
    """Functions of several arguments that texts may become, each with the types of these."""
    rows = connect().execute(
        "SELECT DISTINCT function_name, parameter_types FROM duckdb_functions() "
        "WHERE function_type = 'scalar' AND len(parameter_types) BETWEEN 2 AND 4 ORDER BY ALL"
    )
    generic = {"ANY": "VARCHAR", "T": "VARCHAR", "T[]": "VARCHAR[]"}
    plain = {*ODD_TEXTS, "BOOLEAN", "BLOB", "INTEGER", "TIME", "UBIGINT", "BIT", "UUID"}
    return [
        (name, kinds)
        for name, types in rows.fetchall()
        if name.isidentifier() and plain.issuperset(kinds := [generic.get(t, t) for t in types])
    ]
