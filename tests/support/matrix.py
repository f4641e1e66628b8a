"""The matrix of docs/guarantees.md: which promise is tried under which kind of fault, as the marks
of the tests say.

`make format` writes it anew. Marks are read from the source: nothing is imported, and nothing
collected.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
HEADING: Final = "\n## Promise by fault\n"

KINDS: Final = {
    "cuts": "the input comes in other batches: other sizes, other moments, repeated starts",
    "kill": "a process is killed, or ends at a named point, by an error or by a signal",
    "power": "the power goes, and with it what was not synced",
    "disk": "a disk is full, a bit of it has flipped, or a process may open no more files",
    "wire": "the wire to Kafka delays, loses and repeats requests and answers",
    "broker": "the broker is killed, stands still, is slow, is another one, or cannot do a thing",
    "outage": "an object store, a registry, a worker of Spark, a login or a permission is gone",
    "store": "an object store lies: 503, 412 after success, no answer, half a body, a short list",
    "owners": "another owner or another command at the same time; one that stood still and wakes",
    "commits": "others commit to the tables; a commit meets one, or its answer does not come",
    "lost": "the lake, a table, notes or checkpoints are gone, or an earlier copy is put back",
    "retention": "Kafka has deleted records, or `keep` and `forget` rows",
    "topics": "a topic is deleted, made again, moved, added to, or is not what it should be",
    "jumps": "`reset`",
    "rules": "`evolve`, or another configuration",
    "silence": "a source is silent, or holds a transaction open",
    "hostile": "records, headers, names, clients and expressions that are made to hurt",
    "damage": "tables or topics are changed by hand",
    "memory": "more than fits into memory, or than is worth reading",
    "engines": "both engines in turns, or one after the other on the same",
    "clock": "the wall clock is set",
}
"""The kinds of fault that a mark `fault` may name."""

TESTED, BY_MODEL = "tested", "oracle"

Test = tuple[str, str | None]
"""A file of tests and a test in it; None: the whole file."""


class Marks(NamedTuple):
    """What a test, or a file of tests, says of itself by marks."""

    promises: frozenset[str] = frozenset()
    faults: Mapping[str, str] = {}
    """By kind what is in the cells of its promises."""
    is_nightly: bool = False

    @classmethod
    def of(cls, decorators: Sequence[ast.expr]) -> Marks:
        promises, faults, is_nightly = set[str](), dict[str, str](), False
        for decorator in decorators:
            call = decorator if isinstance(decorator, ast.Call) else ast.Call(decorator, [], [])
            given = [ast.literal_eval(each) for each in call.args if isinstance(each, ast.Constant)]
            match ast.unparse(call.func).removeprefix("pytest.mark."):
                case "promise":
                    promises |= set(given)
                case "fault":
                    assert KINDS.keys() >= set(given), f"no kind of fault: {given}"
                    faults |= dict.fromkeys(given, BY_MODEL if call.keywords else TESTED)
                case "nightly":
                    is_nightly = True
        return cls(frozenset(promises), faults, is_nightly)

    def within(self, of_file: Marks) -> Marks:
        """What holds for a test in a file with these."""
        return Marks(
            self.promises | of_file.promises,
            {**of_file.faults, **self.faults},
            self.is_nightly or of_file.is_nightly,
        )


@cache
def marked_tests() -> Mapping[Test, Marks]:
    """Every test and every file of tests, with the marks of its own."""
    found: dict[Test, Marks] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if "pytest.mark." not in (text := file.read_text(encoding="utf-8")):
            continue
        path = str(file.relative_to(ROOT))
        for node in ast.parse(text).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                marks = node.value
                found[path, None] = Marks.of(marks.elts if isinstance(marks, ast.List) else [marks])
            elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[path, node.name] = Marks.of(node.decorator_list)
    return found


def with_matrix(page: str) -> str:
    """Return the page with its matrix, the last section, as the marks of the tests say."""
    above = page.partition(HEADING)[0]
    return f"{above}{HEADING}\n" + "\n".join(_section(above)) + "\n"


def _section(page: str) -> Iterator[str]:
    yield f"""\
Made by `make format` from the marks of the tests (`promise` and `fault`). *{TESTED}*: a test shows
the promise under this fault. *{BY_MODEL}*: by input that is drawn at random, and the merge model
says what must come of it. Where a cell is empty, no test shows the promise under this fault."""
    yield ""
    yield "| fault | what happens |"
    yield "|---|---|"
    yield from (f"| {kind} | {what} |" for kind, what in KINDS.items())
    cells = _cells()
    yield ""
    yield f"| promise | {' | '.join(KINDS)} |"
    yield "|---" * (len(KINDS) + 1) + "|"
    for line in page.splitlines():
        promise = line.removeprefix("| ").partition(" |")[0]
        if promise in cells:
            yield f"| `{promise}` | {' | '.join(cells[promise].get(kind, '') for kind in KINDS)} |"


def _cells() -> dict[str, dict[str, str]]:
    """By promise and kind what is in the cell."""
    found: dict[str, dict[str, str]] = {}
    for (path, test), own in marked_tests().items():
        marks = own.within(marked_tests().get((path, None), Marks())) if test else own
        for promise in marks.promises:
            cells = found.setdefault(promise, {})
            cells |= {
                kind: how for kind, how in marks.faults.items() if cells.get(kind) != BY_MODEL
            }
    return found
