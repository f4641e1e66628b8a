"""The table of errors in docs/operations.md and the sentences in the code are the same, one way and
the other."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from watersmeet import errors
from watersmeet.errors import WatersmeetError

ROOT = Path(__file__).parent.parent.parent
FAMILIES = (
    errors.KafkaTransientError,
    errors.LakeTransientError,
    errors.StoreError,
    errors.RegistryError,
)
"""Classes that only others are made of."""
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, WatersmeetError) and kind not in FAMILIES
}
FIELD = "…: …"
"""Stands for every sentence that only names a place and passes on what is wrong with it."""


class Row(NamedTuple):
    begins: str
    kind: str
    exit_code: str
    waited_for: str
    cause: str
    helps: str


def rows_of(text: str) -> list[Row]:
    """The rows of the table; `…` in a sentence stands for what differs."""
    table = text.partition("\n| the sentence begins |")[2].split("\n\n")[0]
    cells = [re.split(r" \| ", line.strip("| ")) for line in table.splitlines()[2:]]
    return [Row(re.sub(r"^(`+) ?(.*?) ?\1$", r"\2", begins), *rest) for begins, *rest in cells]


ROWS = rows_of((ROOT / "docs" / "operations.md").read_text(encoding="utf-8"))


def sentence(node: ast.expr) -> str | None:
    """A text with `…` for what is filled in; None where it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    return (
        f"{sentence(node.left) or '…'}{sentence(node.right) or '…'}"
        if isinstance(node, ast.BinOp)
        else None
    )


def sentences(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The class and the sentence of every error that a module makes, and of every error class that
    words its own."""
    returned = {
        node.name: list(returns(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in KINDS:
            calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
            made = [
                (node.name, call) for call in calls if ast.unparse(call.func) == "super().__init__"
            ]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in KINDS.keys() - OWN_WORDS.keys()
        ):
            made = [(node.func.id, node)]
        else:
            made = []
        for kind, call in made:
            parts = facts_of(call)
            what = parts.get("what")
            worded = (
                returned.get(ast.unparse(what.func), []) if isinstance(what, ast.Call) else [what]
            )
            where = f"{sentence(parts['where']) or '…'}: " if "where" in parts else ""
            fix = f"; {sentence(parts['fix']) or '…'}" if "fix" in parts else ""
            said = [None if part is None else sentence(part) for part in worded]
            yield from ((kind, f"{where}{text or '…'}{fix}") for text in said if text or where)


def facts_of(call: ast.Call) -> dict[str, ast.expr]:
    """The arguments of an error by name; none where they are another error's."""
    if any(isinstance(arg, ast.Starred) for arg in call.args):
        return {}
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg is not None}
    return {**dict(zip(("what", "where", "fix"), call.args, strict=False)), **named}


def returns(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a function returns: where an error is made of it, these are sentences."""
    yield from (
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Return) and node.value is not None
    )


OWN_WORDS: Mapping[str, type[WatersmeetError]] = {
    name: kind
    for name, kind in KINDS.items()
    if "__init__" in vars(kind) and kind is not WatersmeetError
}
"""The classes that make their sentence from facts."""

TEXTS = [path.read_text("utf-8") for path in (ROOT / "pipelines" / "watersmeet").rglob("*.py")]
MADE = sorted(
    {
        found
        for text in TEXTS
        if any(kind in text for kind in KINDS)
        for found in sentences(ast.parse(text))
    }
)


def is_row_of(row: Row, kind: str, text: str) -> bool:
    if row.kind != kind:
        return False
    return row.begins == text if row.begins == FIELD else text.startswith(row.begins)


def passes_on(text: str) -> bool:
    """Whether the sentence is another one's, with a place before it at most."""
    return not re.search("[a-z]", text)


@pytest.mark.parametrize(
    ("kind", "text"), [(k, t) for k, t in MADE if not passes_on(t)], ids=lambda part: part[:50]
)
def test_every_sentence_has_a_row(kind: str, text: str) -> None:
    assert [row for row in ROWS if is_row_of(row, kind, text)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.begins)
def test_every_row_is_a_sentence_of_the_code(row: Row) -> None:
    assert [text for kind, text in MADE if is_row_of(row, kind, text)]
    assert row.begins.strip("… ")
    assert row.cause
    assert row.helps


def test_every_class_has_a_row() -> None:
    assert {row.kind for row in ROWS} == set(KINDS)


def example(kind: type[WatersmeetError]) -> WatersmeetError:
    """An error of a class, with facts of the right types."""
    facts = {"str": "x", "int": 1, "Mapping[int, tuple[int, int]]": {0: (1, 2)}}
    parameters = (
        list(inspect.signature(kind.__init__).parameters.values())[1:]
        if kind.__name__ in OWN_WORDS
        else []
    )
    required = [p for p in parameters if p.default is inspect.Parameter.empty]
    values: list[Any] = [facts[p.annotation] for p in required] or ["x"]
    return kind(*values)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.begins)
def test_the_exit_status_and_whether_it_is_waited_for_are_the_classes(row: Row) -> None:
    error = example(KINDS[row.kind])
    assert row.exit_code == str(error.exit_code)
    assert row.waited_for == ("yes" if error.retriable else "no")
    if row.kind in OWN_WORDS:
        assert re.match(re.escape(row.begins).replace("…", ".+"), str(error)), (
            "the sentence itself begins so"
        )


# -- the checker


def test_a_sentence_without_a_row_and_a_row_without_a_sentence_are_noticed() -> None:
    code = (
        'raise BrokerError(f"the disk {name} " "is full")\nraise ConfigurationError(f"{path}: '
        '{fault}")\nraise KeyError("x")'
    )
    made = list(sentences(ast.parse(code)))
    assert made == [("BrokerError", "the disk … is full"), ("ConfigurationError", "…: …")]
    elsewhere = (
        'def said(disk: str) -> str:\n    return f"{disk} is full"\n\nraise BrokerError(said("a"))'
    )
    assert list(sentences(ast.parse(elsewhere))) == [("BrokerError", "… is full")]
    table = (
        "\n| the sentence begins | class |\n|---|---|\n| `the disk … is` | BrokerError | 1 | no | "
        "a | b |\n"
    )
    row, quoted = rows_of(table + "| `` `…` is `` | BrokerError | 1 | no | a | b |\n\n")
    assert quoted.begins == "`…` is"
    assert [is_row_of(row, *found) for found in made] == [True, False]
    assert not is_row_of(row._replace(begins="the disk is"), *made[0])
    assert not is_row_of(row._replace(kind="KafkaAccessError"), *made[0])
    assert [passes_on(text) for _, text in made] == [False, True]
