"""Expressions of the user: which ones pass the gate, and what they make of records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, product
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.expressions import (
    EXPRESSIONS,
    ODD_TEXTS,
    ROWS,
    SCHEMA,
    TIME,
    answers,
    functions_of_texts,
    functions_walk,
)
from watersmeet import expressions
from watersmeet.core.message import message_bytes
from watersmeet.errors import ConfigurationError, WorkerEndedError
from watersmeet.expressions import MESSAGE, PREDICATE, evaluate, expression_problem, protocol
from watersmeet.expressions.gate import OUTSIDE
from watersmeet.expressions.process import connect
from watersmeet.expressions.publish import CONTENT, Expressions

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch) -> Iterator[expressions._Evaluator]:
    """An evaluator whose process nobody else uses."""
    monkeypatch.setattr(expressions, "_evaluators", {})
    yield expressions._evaluator()
    process = expressions._evaluator()._process
    if process is not None:
        process.kill()
        with process:
            pass


def problem(text: str, kinds: tuple[str, ...] = PREDICATE) -> str | None:
    return expression_problem(text, ROWS.schema, kinds)


# -- the gate


@pytest.mark.parametrize(
    "text",
    [
        "true",
        "len(orders) > 0",
        "size(orders) > 0",
        "len(list_filter(orders, lambda p: p.offset > partition)) > 0",
        "list_reduce(list_transform(orders, lambda p: p.offset), lambda a, b: a + b) > 1",
        "len([p for p in orders if p.offset > 1]) > 0",
        "orders[1].value->>'$.amount' = '3'",
        "(orders[1].value->'$.amount')::INT > 3",
        "event_time > TIMESTAMPTZ '2026-01-01 00:00:00+00'",
        "extract(hour FROM event_time) BETWEEN 8 AND 17",
        "CASE WHEN merge_key LIKE 'a%' THEN true ELSE false END",
        "merge_key IN ('a', 'b') -- one of them",
        "regexp_matches(merge_key, '^(a+)+$')",
        "list_sum([1, 2]) > 1",
        "split_part(merge_key, '-', 1) = 'a'",
        "struct_extract(tracking[1], 'value').page = '/'",
        "MERGE_KEY = 'a'",
        '"user"[1].offset > 3',
        "user[1].offset > 3",
        "merge_key COLLATE nocase = 'a'",
        "TRY(merge_key::INT) IS NULL",
        "try_cast(merge_key AS DECIMAL(10, 2)) > 1",
    ],
)
def test_an_expression_over_one_merge_record_passes(text: str) -> None:
    assert problem(text) is None


@pytest.mark.promise("R60")
@pytest.mark.fault("hostile")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("random() > 0.5", "`random`, which gives something else in every run"),
        ("now() > event_time", "`now`, which gives something else"),
        ("current_date > DATE '2026-01-01'", "reads `current_date`, which is no column"),
        ("current_timestamp > event_time", "reads `current_timestamp`"),
        ("current_localtimestamp() > TIMESTAMP '2026-01-01'", "reads the clock"),
        ("age(event_time) > INTERVAL 1 DAY", "`age` of one time, which reads the clock"),
        ("event_time AT TIME ZONE merge_key > now()", "`timezone` without a constant as its first"),
        ("date_diff(merge_key, event_time, event_time) > 1", "`date_diff` without a constant"),
        ("json_contains(merge_key, merge_key)", "`json_contains` without a constant as its second"),
        ("strftime(event_time, merge_key) = 'x'", "`strftime` without a constant as its second"),
        ("ago(INTERVAL 1 DAY) > event_time", "`ago`, which reads `current_timestamp`"),
        ("getenv('HOME') = 'x'", "no function of DuckDB's"),
        ("current_setting('threads') = '1'", "reads a setting"),
        ("getvariable('x') = 1", "reads a variable"),
        ("(SELECT true)", "a subquery"),
        ("EXISTS (SELECT 1)", "a subquery"),
        ("merge_key = ANY(['a'])", "a subquery"),
        ("merge_key IN (FROM read_csv('/etc/passwd'))", "a subquery"),
        ("true, false", "not one expression"),
        ("true; DROP TABLE x", "not DuckDB SQL"),
        ("true; SELECT 1", "not one expression"),
        ("true) OR (false", "not DuckDB SQL"),
        ("true FROM range(3)", "not DuckDB SQL"),
        ("DISTINCT true", "not DuckDB SQL"),
        ("true,", "not DuckDB SQL"),
        ("true AS yes", "not DuckDB SQL"),
        ("true /* and", "not DuckDB SQL"),
        ("", "not DuckDB SQL"),
        ("true\x00 OR random() > 0", "characters that cannot be seen"),
        ("\ufefftrue", "characters that cannot be seen"),
        ("?", "a parameter"),
        ("$1", "a parameter"),
        ("#1", "a column by its number"),
        ("*", "a star"),
        ("columns(*) > 1", "a star"),
        ("columns('orders') IS NULL", "a star"),
        ("sum(partition) > 1", "`sum`, which is about other rows: of a list it is `list_sum`"),
        ("row_number() OVER () > 1", "a window"),
        ("unnest([true])", "gives other rows"),
        ("generate_subscripts(orders, 1) > 1", "gives other rows"),
        ("rowid > 1", "reads `rowid`"),
        ("_rows IS NULL", "reads `_rows`"),
        ("session_user = 'x'", "reads `session_user`"),
        ("batch > 1", "reads `batch`"),
        ("merge_key::_rows IS NULL", "no type of DuckDB's own"),
        ("merge_key::other.kind IS NULL", "no type of DuckDB's own"),
        ("orders.len() > 0", "write `len(orders, ...)`"),
        ("system.main.len(orders) > 0", "write `len(system.main, ...)`"),
        ("vector_type(merge_key) = 'FLAT_VECTOR'", "how a batch lies in memory"),
        ("alias(merge_key) = 'x'", "what a query calls its argument"),
        ("list_aggregate([1, 2], 'reservoir_quantile', 0.5) > 1", "another aggregate"),
        ("__internal_decompress_string(1::UTINYINT) = 'a'", "no function of DuckDB's"),
        ("nextval('x') > 1", "something else in every run"),
        ("orders[0].offset > 1", "a list begins with 1"),
        ("x -> 1", "reads `x`"),
        ("merge_key", "gives VARCHAR"),
        ("1", "gives INTEGER"),
        ("len(merge_key, 1, 2) > 1", "No function matches"),
        ("NOT " * 5000 + "true", ""),
    ],
)
def test_what_looks_beyond_the_record_is_refused_with_its_reason(text: str, why: str) -> None:
    found = problem(text)
    assert found is not None
    assert why in found


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("get_json_object(orders[1].value, '$.a') = 'x'", "value->>'$.a'"),
        (
            "exists(orders, p -> p.offset > 5)",
            "len(list_filter(orders, lambda p: p.offset > 5)) > 0",
        ),
        (
            "size(filter(orders, p -> p.offset > 5)) > 0",
            "list_filter(orders, lambda p: p.offset > 5)",
        ),
        ("len(list_transform(orders, p -> p.offset)) > 0", "lambda p: ..."),
        ("len(list_transform(orders, p -> p.value->>'$.a')) > 0", "lambda p: ..."),
        ("`orders`[1].offset > 5", "double quotes"),
        ("size(`orders`) > 0", "double quotes"),
        ("merge_key rlike 'a'", "regexp_matches(x, 'a+')"),
        ("rlike(merge_key, 'a')", "regexp_matches(x, 'a+')"),
        ("nvl(merge_key, 'a') = 'a'", "coalesce(x, y)"),
    ],
)
def test_words_of_spark_are_refused_with_the_spelling_that_works(text: str, instead: str) -> None:
    found = problem(text)
    assert found is not None
    assert instead in found


def test_a_message_is_text_or_bytes() -> None:
    assert problem("merge_key", MESSAGE) is None
    assert problem("encode(merge_key)", MESSAGE) is None
    assert problem("to_json(orders)", MESSAGE) is None
    assert "gives BOOLEAN" in (problem("true", MESSAGE) or "")


@pytest.mark.promise("R60")
def test_every_function_of_this_release_was_looked_at() -> None:
    """Those that DuckDB calls CONSISTENT are recorded: a new one is to be looked at, whether it
    reads anything but its arguments, before it is recorded or joins `OUTSIDE`."""
    rows = connect().execute(
        "SELECT DISTINCT function_name FROM duckdb_functions() "
        "WHERE function_type = 'scalar' AND stability = 'CONSISTENT' ORDER BY 1"
    )
    recorded = (GOLDEN / "functions.txt").read_text(encoding="utf-8").split()
    assert [name for (name,) in rows.fetchall()] == recorded
    assert set(OUTSIDE) - {"unnest"} <= set(recorded)


@pytest.mark.promise("R15")
@pytest.mark.long
def test_what_passes_the_gate_gives_the_same_in_another_process_zone_and_locale() -> None:
    walks = [
        functions_walk(zone, locale)
        for zone, locale in (("UTC", "C"), ("Asia/Tokyo", "tr_TR.UTF-8"))
    ]
    assert walks[0] == walks[1]
    assert sum(not answer.startswith("!") for answer in walks[0].values()) > 500


# -- a record's own fate


@pytest.mark.promise("R15")
@pytest.mark.long
def test_no_function_gives_a_row_something_else_beside_others_where_an_argument_is_null() -> None:
    """DuckDB takes a value that it knows to be the same of all rows, such as that of a single row,
    for a constant, and may look at it before it looks whether there is anything to do."""
    differing = set[str]()
    asked = 0
    for name, kinds in functions_of_texts():
        columns = [f"c{number}" for number in range(len(kinds))]
        arguments = [
            f"TRY_CAST(coalesce({column}, {column}) AS {kind})"
            for column, kind in zip(columns, kinds, strict=True)
        ]
        text = f"({name}({', '.join(arguments)}))::VARCHAR"
        schema = pa.schema([(column, pa.string()) for column in columns])
        if expression_problem(text, schema, MESSAGE) is not None:
            continue
        asked += 1
        values = [ODD_TEXTS.get(kind, ("7",)) for kind in kinds]
        full = [*islice(product(*values), 5)]
        for hole in range(len(kinds)):
            lacking = (((None,) if n == hole else each) for n, each in enumerate(values))
            rows = [*islice(product(*lacking), 15), *full]
            table = pa.table([*map(pa.array, zip(*rows, strict=True))], columns).cast(schema)
            together = evaluate(text, table, MESSAGE).failed.to_pylist()
            alone = [
                evaluate(text, table.slice(row, 1), MESSAGE).failed[0].as_py()
                for row in range(len(rows))
            ]
            if alone != together:
                differing.add(name)
    assert differing == set()
    assert asked > 200


def test_a_row_that_fails_is_null_and_no_other_is() -> None:
    rows = pa.table({"merge_key": ["1", "x", None, "3"]})
    outcome = evaluate("merge_key::INT > 2", rows, PREDICATE)
    assert outcome.values.to_pylist() == [False, None, None, True]
    assert outcome.failed.to_pylist() == [False, True, False, False]
    assert outcome.error == "Conversion Error: Could not convert string"


def test_the_reason_of_a_failure_has_no_value_of_a_record() -> None:
    secrets = ["hunter2", "hunter'2", '{"a": hunter2', "hunter2 \n", "9" * 30]
    texts = ["merge_key::INT > 2", "json(merge_key) IS NULL", "merge_key::DECIMAL(3, 1) > 1"]
    errors = [
        evaluate(text, pa.table({"merge_key": [secret]}), PREDICATE).error
        for text in texts
        for secret in secrets
    ]
    assert any(errors)
    assert not [error for error in errors if error and ("hunter" in error or "99" in error)]


def test_rows_of_which_duckdb_cannot_tell_which_one_fails_are_evaluated_one_by_one() -> None:
    kind = pa.list_(pa.int64())
    rows = pa.table({"list": pa.array([[1], []] * 200, kind)})
    text = "list_reduce(list, lambda a, b: a + b) IS NOT NULL"
    outcome = evaluate(text, rows, PREDICATE)
    assert outcome.values.to_pylist() == [True, None] * 200
    assert outcome.failed.to_pylist() == [False, True] * 200


POISON = {
    "len(range(n)) > 0": "memory",
    "len(repeat('x', n)) > 0": "memory",
    "len(lpad('x', n::INT, 'y')) > 0": "memory",
    "len(printf('%' || n || 'd', 1)) > 0": "memory",
    "len(list_transform(range(n), lambda x: x || 'abc')) > 0": "memory",
    "levenshtein(repeat('ab', n // 10000), repeat('ba', n // 10000)) > 0": "1 s",
}


@pytest.mark.promise("R15")
@pytest.mark.fault("hostile", "memory")
@pytest.mark.parametrize("text", POISON)
def test_a_record_that_takes_all_memory_or_time_fails_alone(text: str) -> None:
    rows = pa.table({"n": pa.array([3, 2_000_000_000, 5], pa.int64())})
    outcome = evaluate(text, rows, PREDICATE)
    assert outcome.failed.to_pylist() == [False, True, False]
    assert outcome.values.to_pylist()[1] is None
    assert outcome.error is not None


def test_no_json_ends_more_than_its_own_row() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    rows = pa.table({"merge_key": ["[]", deep, '{"a":' * 10_000 + "1" + "}" * 10_000, "[1]"]})
    for text in (
        "json_structure(merge_key)::VARCHAR",
        "merge_key->>'$.a'",
        "json(merge_key)",
        "merge_key::JSON::INT[]::VARCHAR",
        "json_keys(merge_key)::VARCHAR",
    ):
        outcome = evaluate(text, rows, MESSAGE)
        alone = [evaluate(text, rows.slice(i, 1), MESSAGE) for i in range(4)]
        assert outcome.values.to_pylist() == [one.values[0].as_py() for one in alone]
        assert outcome.failed.to_pylist() == [one.failed[0].as_py() for one in alone]


def test_nested_quantifiers_take_time_that_grows_with_the_text_alone() -> None:
    rows = pa.table({"merge_key": ["a" * 1_000_000 + "b"]})
    outcome = evaluate("regexp_matches(merge_key, '^(a+)+$')", rows, PREDICATE)
    assert outcome.values.to_pylist() == [False]


def test_a_result_is_null_where_it_is_larger_than_a_message_may_be() -> None:
    rows = pa.table({"n": pa.array([1, 80 * 2**20], pa.int64())})
    outcome = evaluate("repeat('x', n)", rows, MESSAGE)
    assert outcome.values.to_pylist() == [b"x", None]
    assert outcome.error == "its result has more than 64 MiB"


@pytest.mark.promise("R15")
@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.sampled_from(["1", "2", "x", "", "x/y", "UTC", "{", '{"a": 1}']), max_size=300),
    st.sampled_from(
        [
            "merge_key::INT > 1",
            "list_reduce(string_split(merge_key, '/')[2:], lambda a, b: a || b) IS NOT NULL",
            "CASE WHEN len(merge_key) = 1 AND merge_key::INT > 0 THEN true END",
            "merge_key->>'$.a' = '1'",
        ]
    ),
)
def test_what_an_expression_makes_of_a_row_does_not_depend_on_the_others(
    keys: list[str], text: str
) -> None:
    rows = pa.table({"merge_key": pa.array(keys, pa.string())})
    outcome = evaluate(text, rows, PREDICATE)
    alone = {key: evaluate(text, pa.table({"merge_key": [key]}), PREDICATE) for key in {*keys}}
    assert outcome.values.to_pylist() == [alone[key].values[0].as_py() for key in keys]
    assert outcome.failed.to_pylist() == [alone[key].failed[0].as_py() for key in keys]


def test_an_expression_that_reads_no_column_is_evaluated_once_for_all_rows() -> None:
    rows = pa.table({"merge_key": ["a"] * 100_000})
    outcome = evaluate("len(range(2000000000)) > 1", rows, PREDICATE)
    assert outcome.failed.to_pylist() == [True] * 100_000


def test_no_rows_are_no_rows() -> None:
    empty = pa.table({"merge_key": pa.array([], pa.string())})
    for text, kinds in (
        ("merge_key = 'a'", PREDICATE),
        ("true", PREDICATE),
        ("merge_key", MESSAGE),
    ):
        assert len(evaluate(text, empty, kinds).values) == 0


@pytest.mark.promise("R60")
@pytest.mark.fault("hostile")
def test_an_expression_that_does_not_pass_is_not_evaluated() -> None:
    with pytest.raises(ConfigurationError, match="`random"):
        evaluate("random() > 0.5", pa.table({"merge_key": ["a"]}), PREDICATE)


# -- what is sent


@pytest.mark.parametrize(
    ("text", "is_small"),
    [
        ("len(orders) > 0", True),
        ("len(ORDERS) + size(Orders) > 1 AND merge_key != ''", True),
        ("len(list_filter([1, 2], lambda orders: orders > len(tracking))) > 0", True),
        ("len(orders) > 0 AND orders[1].value IS NULL", False),
        ("len(list_filter(orders, lambda p: len(orders) > p.offset)) > 0", False),
        ("len(orders[1].value) > 0", False),
        ("orders IS NULL OR len(orders) > 1", False),
        ("len(merge_key) > 1", True),
    ],
)
def test_of_lists_whose_length_alone_is_read_the_values_are_not_sent(
    text: str, is_small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = {"offset": 1, "event_time": 0, "value": "x" * 10_000}
    orders = pa.array([None, [], [part], [part, part]] * 2, SCHEMA.field("orders").type)
    rows = pa.table({"merge_key": [*"abcd", *"aäbc"], "orders": orders, "tracking": orders})
    rows = pa.concat_tables([rows, rows.slice(3, 4), rows.slice(0, 0)])
    sent = list[int]()

    def write(stream: Any, head: Any, request: pa.Table) -> None:
        sent.append(request.nbytes)
        protocol.write(stream, head, request)

    monkeypatch.setattr(expressions, "write", write)
    found = evaluate(text, rows, PREDICATE)
    assert (max(sent) < 10_000) == is_small
    monkeypatch.setattr(expressions, "_read", lambda rows, _: rows)
    assert found == evaluate(text, rows, PREDICATE)


# -- what becomes of merge records

NO = (False, "predicate")
FAILS = (False, "expression")


def judge(
    valid: str | None, value: str | None = None, max_bytes: int = 10**6
) -> dict[str, tuple[Any, Any]]:
    """Whether each of three finished rows and an open one is valid, and why not; `b` has orders,
    and they are of one byte."""
    rows = ROWS.slice(0, 4).drop_columns(["merge_key", "orders", "tenant"])
    part = {"offset": 0, "event_time": 0, "value": "x"}
    columns = {
        "merge_key": [*"abc", "open"],
        "tenant": [""] * 4,
        "orders": pa.array([[], [part], [], [part]], SCHEMA.field("orders").type),
        "status": ["timed_out", "timed_out", "timed_out", "open"],
        "valid": pa.nulls(4, pa.bool_()),
        "invalid_reason": pa.array([None, None, "too_large", None], pa.string()),
    }
    for name, column in columns.items():
        rows = rows.append_column(name, pa.array(column))
    names = (*CONTENT, "orders", "tracking")
    judged = Expressions(valid, value, max_bytes, names).validated(rows)
    found = judged.select(["merge_key", "valid", "invalid_reason"]).to_pylist()
    assert judged.schema == rows.schema
    return {row["merge_key"]: (row["valid"], row["invalid_reason"]) for row in found}


def test_what_is_null_counts_as_false_and_what_fails_says_so() -> None:
    assert judge("orders[1].value = 'x'") == {
        "a": NO,
        "b": (True, None),
        "c": NO,
        "open": (None, None),
    }
    found = judge("CASE WHEN len(orders) > 0 THEN true ELSE merge_key::INT > 0 END")
    assert found == {"a": FAILS, "b": (True, None), "c": FAILS, "open": (None, None)}
    assert judge("size(orders) > 0 AND try_cast(merge_key AS INT) IS NULL")["b"] == (True, None)
    assert judge("true")["c"] == (False, "too_large")


def test_a_message_with_the_value_of_an_expression_may_have_so_many_bytes() -> None:
    value = "repeat('é', 2 + 3 * size(orders))"
    found = judge("true", value, message_bytes(9, 1, 0))
    assert (found["a"], found["b"]) == ((True, None), (False, "too_large"))
    assert judge(None, value, message_bytes(10, 1, 0))["b"] == (True, None)
    for none in ("CAST(NULL AS VARCHAR)", "(merge_key::INT)::VARCHAR"):
        assert judge(None, none, message_bytes(0, 1, 0))["b"] == (True, None), "no value"
    assert judge("size(orders) = 0", "repeat('é', 9)", 9)["b"] == NO, "the predicate comes first"


def test_whoever_judges_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It may be a task of Spark."""
    judge("merge_key::INT > 0", "(merge_key::INT)::VARCHAR")
    assert caplog.records == []


@pytest.mark.parametrize(
    "text", ["position IS NULL", "due > event_time", "closed_at > due", "batch > 0", "valid"]
)
def test_an_expression_reads_the_content_of_a_merge_record_alone(text: str) -> None:
    silver = ROWS.slice(0, 0)
    for name in ("position", "due", "closed_at", "batch", "valid"):
        silver = silver.append_column(name, pa.nulls(0, pa.bool_()))
    expressions = Expressions(text, None, 1, (*CONTENT, "orders"))
    [problem] = expressions.problems(silver.schema)
    assert problem.where == "publish.valid"
    assert "no column of a merge record" in problem.what
    assert problem.fix == (
        "write an expression over partition, tenant, merge_key, event_time, last_event_time, "
        "orders that gives a boolean"
    )


# -- the recorded results


@pytest.mark.promise("R15")
def test_the_recorded_expressions_give_what_they_gave() -> None:
    """Where a release of DuckDB fails here, it becomes part of the rules' fingerprint
    (docs/decisions/0061-the-users-sql-is-duckdbs.md)."""
    recorded = json.loads((GOLDEN / "expressions.json").read_text(encoding="utf-8"))
    assert len(EXPRESSIONS) >= 200
    assert answers(EXPRESSIONS) == recorded


def test_every_expression_of_the_documentation_holds_of_a_record_that_it_is_about() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    table = text.partition("\n## Expressions\n")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    shown = [(wanted, cell.strip("`").replace("\\|", "|")) for wanted, cell in cells[1:]]
    assert len(shown) >= 20
    part = pa.struct([("offset", pa.int64()), ("event_time", TIME), ("value", pa.string())])
    time = 1_780_308_000_000_000  # 2026-06-01T10:00:00Z
    order = '{"amount": 120.5, "state": "paid", "voucher": null, "customer": {"country": "DE"}}'
    record = {
        "partition": 0,
        "tenant": "",
        "merge_key": "0123abcd",
        "event_time": time,
        "last_event_time": time + 60_000_000,
        "tracking": [{"offset": 7, "event_time": time, "value": '{"page": "/checkout"}'}],
        "orders": [{"offset": n, "event_time": time + n, "value": order} for n in (1, 2)],
    }
    sources = {name: pa.list_(part) for name in ("tracking", "orders")}
    rows = pa.Table.from_pylist(
        [record], pa.schema([*(SCHEMA.field(name) for name in CONTENT), *sources.items()])
    )
    for wanted, expression in shown:
        kinds = MESSAGE if wanted.startswith(("text", "bytes")) else PREDICATE
        assert expression_problem(expression, rows.schema, kinds) is None
        outcome = evaluate(expression, rows, kinds)
        assert outcome.failed.to_pylist() == [False]
        assert outcome.values[0].as_py(), wanted


# -- the process


def test_the_process_starts_with_the_first_expression_and_serves_all_others(
    evaluator: expressions._Evaluator,
) -> None:
    assert evaluator._process is None
    rows = pa.table({"merge_key": ["a"]})
    evaluate("merge_key = 'a'", rows, PREDICATE)
    first = evaluator._process
    evaluate("merge_key = 'b'", rows, PREDICATE)
    assert first is not None
    assert evaluator._process is first


def test_the_process_reaches_nothing_outside(evaluator: expressions._Evaluator) -> None:
    os.environ["WATERSMEET_TEST_SECRET"] = "hunter2"
    try:
        evaluate("true", pa.table({"merge_key": ["a"]}), PREDICATE)
        assert evaluator._process is not None
        process = psutil.Process(evaluator._process.pid)
        assert "WATERSMEET_TEST_SECRET" not in process.environ()
        connection = connect()
        for query in (
            "SELECT * FROM read_csv('/etc/passwd')",
            "COPY (SELECT 1) TO '/tmp/x.csv'",
            "ATTACH '/tmp/x.db'",
            "INSTALL httpfs",
            "LOAD httpfs",
            "SET enable_external_access = true",
            "SET TimeZone = 'Asia/Tokyo'",
            "RESET lock_configuration",
        ):
            with pytest.raises(Exception, match=r"Permission|locked|disabled|configuration"):
                connection.execute(query)
    finally:
        del os.environ["WATERSMEET_TEST_SECRET"]


def test_a_process_that_a_person_kills_is_started_again(evaluator: expressions._Evaluator) -> None:
    rows = pa.table({"merge_key": ["a"]})
    evaluate("merge_key = 'a'", rows, PREDICATE)
    assert evaluator._process is not None
    os.kill(evaluator._process.pid, signal.SIGKILL)
    assert evaluate("merge_key = 'a'", rows, PREDICATE).values.to_pylist() == [True]


@pytest.mark.parametrize("before_it_is_asked", [True, False])
def test_a_process_that_is_killed_again_and_again_says_nothing_of_a_record(
    evaluator: expressions._Evaluator, monkeypatch: pytest.MonkeyPatch, before_it_is_asked: bool
) -> None:
    started = expressions._started

    def killed() -> subprocess.Popen[bytes]:
        process = started()
        os.kill(process.pid, signal.SIGKILL)
        if before_it_is_asked:
            process.wait()
        return process

    monkeypatch.setattr(expressions, "_started", killed)
    with pytest.raises(WorkerEndedError):
        evaluate("merge_key = 'a'", pa.table({"merge_key": ["a"]}), PREDICATE)


def test_the_process_does_not_end_by_the_signals_that_ask_a_run_to_stop(
    evaluator: expressions._Evaluator,
) -> None:
    rows = pa.table({"merge_key": ["a"]})
    evaluate("merge_key = 'a'", rows, PREDICATE)
    process = evaluator._process
    assert process is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process.pid, number)
    evaluate("merge_key = 'b'", rows, PREDICATE)
    assert evaluator._process is process
    assert os.getpgid(process.pid) != os.getpgid(0)


def test_the_process_ends_with_its_parent_however_that_ends() -> None:
    program = (
        "import os, signal, pyarrow as pa\n"
        "from watersmeet import expressions as e\n"
        "e.evaluate('true', pa.table({'a': [1]}), e.PREDICATE)\n"
        "print(e._evaluator()._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(int(ended.stdout)).wait(timeout=20)


def test_a_python_without_duckdb_says_so(
    evaluator: expressions._Evaluator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "duckdb.py").write_text("raise ImportError('No module named duckdb')\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ConfigurationError, match="cannot start: No module named duckdb"):
        evaluate("true", pa.table({"merge_key": ["a"]}), PREDICATE)


def test_an_expression_starts_no_jvm(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tests.support.configurations import settings_for\n"
        "from watersmeet.dry_run import try_records\n"
        "own = {'publish__valid': 'len(orders) > 0', 'publish__value': 'merge_key'}\n"
        "settings = settings_for(Path(sys.argv[1]), **own)\n"
        "sent = [{'source': 'orders', 'value': {'k': 'a', 'ts': 1}}]\n"
        "[record] = try_records(settings, sent)['records']\n"
        "assert record['valid'] is True, record\n"
        "assert not {'pyspark', 'py4j'} & {*sys.modules}\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_no_duckdb_is_imported_by_who_evaluates() -> None:
    program = (
        "import sys, pyarrow as pa\n"
        "from watersmeet import expressions as e\n"
        "e.evaluate('true', pa.table({'a': [1]}), e.PREDICATE)\n"
        "assert 'duckdb' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
