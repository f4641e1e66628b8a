"""Expressions that pass the gate, over values that may hurt: a part of `make hostile`.

What an expression makes of a record is that record's alone: the same bytes in another process, zone
and locale, beside other records or alone, and in a task of Spark. Nothing ends but the process that
evaluates, whose memory is bounded.
"""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import psutil
import pyarrow as pa

from tests.support.expressions import SCHEMA
from watersmeet import expressions
from watersmeet.expressions import MESSAGE, evaluate, expression_problem
from watersmeet.expressions.protocol import MEMORY_BYTES

Results: TypeAlias = list[list[bytes | str | None]]
"""By expression and row, what it gives: `!` where it fails."""

ROUND = 10
"""Number of expressions that are evaluated everywhere at a time."""

VALUES = (
    "",
    "null",
    "{}",
    "[]",
    "0",
    "-0.0",
    "1e400",
    "NaN",
    "-9223372036854775809",
    "0.1",
    '"x"',
    "'",
    '"',
    "\\",
    "%zz",
    "a&b=c&b=d",
    "2026-02-30",
    "12:30",
    "now",
    "today",
    "epoch",
    "infinity",
    "294247-01-10T04:00:54.775807Z",
    "0001-01-01 BC",
    "PT1H",
    "Europe/Berlin",
    "../../etc/passwd",
    "http://127.0.0.1:1/x",
    '<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><a>&b;</a>',
    "{'a': 1}",
    '{"a": 1, "a": 2}',
    '{"a": {"b": [1, 2.5, null, "x"]}, "é": "İı ß"}',
    '{"a": 9007199254740993, "b": 1e-400}',
    '{"\\u0000": "\\ud800"}',
    "İSTANBUL ıi ß ẞ",
    "e\u0301é",
    "👨‍👩‍👧\u202e",
    "a\x00b",
    "(a+)+$",
    "[",
    "*",
    "\\p{L}+",
    "a" * 50_000 + "b",
    "[" * 20_000,
    "[" * 5_000 + "]" * 5_000,
    '{"a":' * 2_000 + "1" + "}" * 2_000,
    "2000000000",
    "%1000000000d",
    "{:>1000000000}",
)
"""Texts that a producer may send."""


@dataclass
class Grammar:
    """Maker of expressions; each method gives one of a type."""

    rng: random.Random

    def message(self) -> str:
        kind = self.rng.choice([self.text, self.number, self.moment, self.flag, self.json])
        return f"({kind(3)})::VARCHAR"

    def text(self, depth: int) -> str:
        if depth <= 0 or self.rng.random() < 0.2:
            return self.rng.choice(
                ["merge_key", "tenant", "orders[1].value", "orders[-1].value", "'a'", "''"]
            )
        a, b, n = self.text(depth - 1), self.text(depth - 1), self.number(depth - 1)
        return self.rng.choice(
            [
                *(f"{name}({a})" for name in ONE_TEXT),
                f"{a} || {b}",
                f"{a}->>'$.a'",
                f"json_extract_string({a}, {b})",
                f"replace({a}, {b}, 'x')",
                f"regexp_extract({a}, {b})",
                f"regexp_replace({a}, '(a+)+$', {b})",
                f"substring({a}, {self.small()})",
                f"split_part({a}, {b}, {self.small()})",
                f"lpad({a}, ({n})::INT, 'xy')",
                f"repeat({a}, ({n})::INT)",
                f"format({a}, {n})",
                f"printf({a}, {n})",
                f"strftime({self.moment(depth - 1)}, '%c %j %f')",
                f"array_to_string(list_transform(orders, lambda p: p.value), {a})",
                f"coalesce({a}, {b})",
                f"CASE WHEN {self.flag(depth - 1)} THEN {a} ELSE {b} END",
                f"({n})::VARCHAR",
                f"list_sort(string_split({a}, {b}))[1]",
                f"list_reduce(list_transform(orders, lambda p: p.value), lambda x, y: x || {a})",
                f"{a} COLLATE de",
                f"from_base64({a})::VARCHAR",
                f"TRY({a})",
            ]
        )

    def number(self, depth: int) -> str:
        if depth <= 0 or self.rng.random() < 0.2:
            return self.rng.choice(
                ["partition", "len(orders)", "1", "-1", "0.5", "2000000000", "epoch_ms(event_time)"]
            )
        a, text = self.number(depth - 1), self.text(depth - 1)
        return self.rng.choice(
            [
                f"({a}) {self.rng.choice(['+', '-', '*', '/', '//', '%'])} ({self.number(0)})",
                *(f"len({text})", f"unicode({text})", f"strlen({text})", f"hash({text}) % 1000"),
                f"try_cast({text} AS {self.rng.choice(NUMBERS)})",
                f"({text})::{self.rng.choice(NUMBERS)}",
                f"levenshtein({text}, {self.text(0)})",
                f"list_sum(list_transform(orders, lambda p: p.offset * ({a})))",
                f"len(range(({a})::INT))",
                f"len(list_transform(range(({a})::BIGINT), lambda x: x || 'a'))",
                f"len(list_filter(orders, lambda p: p.value = {text}))",
                *(f"{name}({a})" for name in ONE_NUMBER),
                f"date_diff('day', {self.moment(depth - 1)}, {self.moment(0)})",
                f"json_array_length({text})",
                f"extract({self.rng.choice(UNITS)} FROM {self.moment(depth - 1)})",
            ]
        )

    def moment(self, depth: int) -> str:
        if depth <= 0 or self.rng.random() < 0.3:
            return self.rng.choice(
                ["event_time", "last_event_time", "TIMESTAMPTZ '2026-03-29 00:30:00+00'"]
            )
        text = self.text(depth - 1)
        return self.rng.choice(
            [
                f"({text})::TIMESTAMPTZ",
                f"try_cast({text} AS TIMESTAMPTZ)",
                f"date_trunc('{self.rng.choice(UNITS)}', {self.moment(depth - 1)})",
                f"{self.moment(depth - 1)} + to_seconds({self.number(depth - 1)})",
                f"strptime({text}, {self.text(0)})::TIMESTAMPTZ",
                f"timezone({text}, {self.moment(depth - 1)})::TIMESTAMPTZ",
                f"to_timestamp({self.number(depth - 1)})",
            ]
        )

    def flag(self, depth: int) -> str:
        if depth <= 0:
            return self.rng.choice(["len(orders) > 0", "merge_key < 'b'", "true"])
        a, b = self.text(depth - 1), self.text(depth - 1)
        return self.rng.choice(
            [
                f"regexp_matches({a}, {b})",
                f"{a} LIKE {b}",
                f"{a} ILIKE {b}",
                f"{a} SIMILAR TO {b}",
                f"({self.flag(depth - 1)}) AND ({self.flag(depth - 1)})",
                f"NOT ({self.flag(depth - 1)})",
                f"{self.number(depth - 1)} > {self.number(depth - 1)}",
                f"{self.moment(depth - 1)} < {self.moment(0)}",
                f"json_valid({a})",
                f"json_contains({a}, '1')",
                f"{a} IN ({b}, 'x')",
                f"list_contains(list_transform(orders, lambda p: p.value), {a})",
            ]
        )

    def json(self, depth: int) -> str:
        a, b = self.text(depth - 1), self.text(depth - 1)
        return self.rng.choice(
            [
                f"({a})::JSON",
                f"json_structure({a})",
                f"json_keys({a})",
                f"json_merge_patch({a}, {b})",
                f'json_transform({a}, \'{{"a": "INT"}}\')',
                f"json_object({a}, {b})",
                "to_json(orders)",
                "to_json(tracking)",
                f"json_pretty({a})",
                f"json_extract({a}, {b})",
            ]
        )

    def small(self) -> str:
        return str(self.rng.choice([-2, 0, 1, 3, 2_000_000_000]))


ONE_TEXT = (
    *("lower", "upper", "reverse", "trim", "md5", "url_decode", "url_encode", "strip_accents"),
    *("nfc_normalize", "json_quote", "json_type", "typeof", "hex", "bin"),
)
ONE_NUMBER = ("abs", "sqrt", "ln", "exp", "round", "factorial", "bit_count", "gamma", "sin", "even")
NUMBERS = ("INT", "BIGINT", "HUGEINT", "DOUBLE", "FLOAT", "DECIMAL(18, 3)", "UTINYINT")
UNITS = ("year", "quarter", "week", "day", "hour", "millisecond")


def rows_of(rng: random.Random, count: int) -> pa.Table:
    """Rows of silver whose texts are hostile."""

    def row() -> dict[str, Any]:
        at = rng.choice([0, 1, 1_774_744_200_000_000, 253_402_300_799_999_000])
        orders = [
            {"offset": n, "event_time": at, "value": rng.choice(VALUES)}
            for n in range(rng.choice([0, 1, 1, 2, 30]))
        ]
        value = {"page": rng.choice(VALUES), "ms": rng.choice([0.1, -0.0, 1e308]), "tags": None}
        return {
            "partition": rng.choice([0, 3, 2**31 - 1]),
            "tenant": rng.choice(["", *VALUES]),
            "merge_key": rng.choice(VALUES),
            "event_time": at,
            "last_event_time": at,
            "orders": orders,
            "tracking": [{"offset": 0, "event_time": at, "value": value}],
            "user": [],
        }

    return pa.Table.from_pylist([row() for _ in range(count)], SCHEMA)


def results(texts: Sequence[str], rows: pa.Table) -> Results:
    """What the expressions make of the rows, by this process."""
    found: Results = []
    for text in texts:
        outcome = evaluate(text, rows, MESSAGE)
        pairs = zip(outcome.values.to_pylist(), outcome.failed.to_pylist(), strict=True)
        found.append(["!" if failed else value for value, failed in pairs])
    return found


def results_elsewhere(texts: Sequence[str], rows: pa.Table) -> Results:
    """The same by another process, in another zone and locale."""
    environment = {**os.environ, "TZ": "Asia/Kathmandu", "LC_ALL": "tr_TR.UTF-8"}
    answer = subprocess.run(
        [sys.executable, "-m", __name__],
        input=pickle.dumps((texts, rows)),
        stdout=subprocess.PIPE,
        env=environment,
        check=True,
    )
    found: Results = pickle.loads(answer.stdout)
    return found


def results_of_tasks(texts: Sequence[str], rows: pa.Table) -> Results:
    """The same by a task of Spark."""
    from watersmeet.engine.session import spark_session

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.record_batch({"found": [pickle.dumps(results(texts, rows))]})

    found = spark_session({}).range(0, 1, 1, 1).mapInArrow(task, "found binary").collect()
    answer: Results = pickle.loads(bytes(found[0][0]))
    return answer


def attack(engine: str, seed: int, seconds: float) -> tuple[str, list[str]]:
    """Evaluate expressions for so long; return what was done, and what differs."""
    rng = random.Random(f"expressions {seed}")
    grammar, end = Grammar(rng), time.monotonic() + seconds
    counts = Counter[str]()
    problems: list[str] = []
    peak = 0
    while not problems and time.monotonic() < end:
        rows, texts = rows_of(rng, rng.choice([1, 7, 40])), list[str]()
        while len(texts) < ROUND:
            text = grammar.message()
            is_refused = expression_problem(text, rows.schema, MESSAGE) is not None
            counts["refused"] += is_refused
            texts += [] if is_refused else [text]
        here = results(texts, rows)
        for place, found in results_of_others(engine, texts, rows).items():
            problems += differences(texts, rows, here, found, place)
        counts["expressions"] += len(texts)
        counts["values"] += sum(map(len, here))
        counts["failures"] += sum(value == "!" for values in here for value in values)
        process = expressions._evaluator()._process
        if process is not None:
            with suppress(psutil.NoSuchProcess):
                peak = max(peak, psutil.Process(process.pid).memory_info().rss)
    if peak > MEMORY_BYTES:
        problems.append(f"the process that evaluates has {peak >> 20} MiB")
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{said}, in at most {peak >> 20} MiB", problems


def results_of_others(engine: str, texts: Sequence[str], rows: pa.Table) -> dict[str, Results]:
    """The same by others, by where that was."""
    alone = [[results([text], rows.slice(i, 1))[0][0] for i in range(len(rows))] for text in texts]
    found = {"elsewhere": results_elsewhere(texts, rows), "alone": alone}
    return {**found, "in a task": results_of_tasks(texts, rows)} if engine == "spark" else found


def differences(
    texts: Sequence[str], rows: pa.Table, here: Results, found: Results, place: str
) -> list[str]:
    """What expressions make of rows otherwise in another place, in words."""
    return [
        f"`{text}` gives {one[row]!r:.200} here, and {other[row]!r:.200} {place}, of "
        f"{rows.slice(row, 1).to_pylist()!r:.1000}"
        for text, one, other in zip(texts, here, found, strict=True)
        for row in range(len(rows))
        if one[row] != other[row]
    ]


if __name__ == "__main__":
    sys.stdout.buffer.write(pickle.dumps(results(*pickle.load(sys.stdin.buffer))))
