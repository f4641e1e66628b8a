"""Paths in a value: the names of fields from the outermost in, and how they are written, joined by dots."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeAlias

Path: TypeAlias = tuple[str, ...]

PATH_PATTERN: Final = r"(?:[^.\\]|\\[.\\])+(?:\.(?:[^.\\]|\\[.\\])+)*"
"""How a path is written: a dot or a backslash of a name stands behind a backslash."""

_NAME: Final = re.compile(r"(?:[^.\\]|\\[.\\])+")


def parse_path(text: str) -> Path:
    """Return the path that a text, which matches `PATH_PATTERN`, stands for."""
    return tuple(re.sub(r"\\(.)", r"\1", name) for name in _NAME.findall(text))


def paths_text(paths: Iterable[Path]) -> str:
    """Return one path or several as a sentence names them."""
    return " or ".join(map(".".join, paths))
