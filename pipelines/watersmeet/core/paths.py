"""Paths in a value: the names of fields from the outermost in, written with dots between them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeAlias

Path: TypeAlias = tuple[str, ...]

PATH_PATTERN: Final = r"(?:[^.\\]|\\[.\\])+(?:\.(?:[^.\\]|\\[.\\])+)*"
"""Pattern of a written path; a dot or a backslash in a name is escaped by a backslash."""

_NAME: Final = re.compile(r"(?:[^.\\]|\\[.\\])+")


def parse_path(text: str) -> Path:
    """Return the path that a text spells, which matches `PATH_PATTERN`."""
    return tuple(re.sub(r"\\(.)", r"\1", name) for name in _NAME.findall(text))


def paths_text(paths: Iterable[Path]) -> str:
    """Return one path or several in the form that a sentence names them."""
    return " or ".join(map(".".join, paths))
