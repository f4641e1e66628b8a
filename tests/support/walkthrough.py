"""The links of docs/walkthrough.md to the lines of the functions that it names.

`make format` writes them anew, and the matrix of docs/guarantees.md.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support import matrix

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "walkthrough.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w/.]+)#L\d+\)")


def linked(text: str) -> str:
    """Return the text with each link at the line where its function or class begins.

    A function that is not in its file is a ValueError.
    """
    return LINK.sub(_to_its_line, text)


def _to_its_line(link: re.Match[str]) -> str:
    name, file = link.groups()
    found: ast.AST = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    for part in name.split("."):
        found = _definition(found, part, file)
    assert isinstance(found, ast.stmt)
    return f"[`{name}`](../{file}#L{found.lineno})"


def _definition(within: ast.AST, name: str, file: str) -> ast.stmt:
    """Return the function or class of this name."""
    for node in ast.iter_child_nodes(within):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
    raise ValueError(f"{file} has no {name}, which {PAGE.name} names")


if __name__ == "__main__":
    for page, made in ((PAGE, linked), (matrix.PAGE, matrix.with_matrix)):
        page.write_text(made(page.read_text(encoding="utf-8")), encoding="utf-8")
