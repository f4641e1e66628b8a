"""The answers of commands, which alone go to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from watersmeet.core.texts import without_controls


def answer(
    facts: dict[str, Any], as_json: bool, view: Callable[[dict[str, Any]], RenderableType]
) -> None:
    """Print the answer as one JSON document, or what `view` makes of it for people."""
    if as_json:
        print_json(facts)
    elif isinstance(shown := view(facts), str):
        print_text(shown)
    else:
        Console().print(_Harmless(shown))


class _Harmless:
    """A renderable whose text cannot control a terminal, whoever has written what is in it."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._shown, options):
            yield (
                segment
                if segment.control
                else Segment(without_controls(segment.text), segment.style)
            )


def print_text(text: str) -> None:
    """Print a line, or several."""
    sys.stdout.write(f"{without_controls(text)}\n")


def print_json(document: object) -> None:
    """Print one JSON document."""
    print_text(json.dumps(document))
