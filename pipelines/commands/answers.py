"""Answers of commands go to standard output, and nothing else does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType


def answer(found: dict[str, Any], as_json: bool, view: Callable[[dict[str, Any]], RenderableType]) -> None:
    """Prints the answer as one JSON document, or what `view` makes of it for people."""
    if as_json:
        print_json(found)
    elif isinstance(shown := view(found), str):
        print_text(shown)
    else:
        Console().print(shown)


def print_text(text: str) -> None:
    """Prints a line."""
    sys.stdout.write(f"{text}\n")


def print_json(document: object) -> None:
    """Prints one JSON document."""
    print_text(json.dumps(document))
