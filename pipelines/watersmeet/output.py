"""The answers of commands, which alone go to standard output.

On a terminal they fit its width; elsewhere an item is one line of plain text. JSON is ASCII, so
that it is the same document in every encoding.
"""

from __future__ import annotations

import codecs
import io
import json
import sys
from collections.abc import Callable
from typing import Any, Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment

from watersmeet.core.texts import without_controls

UNLIMITED: Final = 2**31
"""Width, in characters, within which every line fits."""


def answer(
    facts: dict[str, Any], as_json: bool, view: Callable[[dict[str, Any]], RenderableType]
) -> None:
    """Print the answer as one JSON document, or what `view` makes of it for people."""
    if as_json:
        print_json(facts)
    elif isinstance(shown := view(facts), str):
        print_text(shown)
    else:
        print_view(shown)


def print_view(shown: RenderableType) -> None:
    """Print what a view returns."""
    if sys.stdout.isatty():
        Console(emoji=False).print(_Harmless(shown))
        return
    lines = io.StringIO()
    Console(file=lines, force_terminal=False, width=UNLIMITED, emoji=False).print(shown)
    print_text("\n".join(line.rstrip() for line in lines.getvalue().removesuffix("\n").split("\n")))


class _Harmless:
    """A renderable whose text cannot control a terminal, whoever has written what is in it."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self._shown, options):
            yield Segment(text if control else without_controls(text), style, control)


def print_text(text: str) -> None:
    """Print a line, or several."""
    sys.stdout.write(f"{without_controls(text)}\n")
    sys.stdout.flush()


def print_json(document: object) -> None:
    """Print one JSON document."""
    print_text(json.dumps(document))


def write_in_any_encoding() -> None:
    """Write what a standard stream's encoding lacks as escapes, and the dot as a dash."""
    codecs.register_error("watersmeet", _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="watersmeet")


def _spelled(error: UnicodeError) -> tuple[str | bytes, int]:
    escapes, end = codecs.backslashreplace_errors(error)
    return str(escapes).replace("\\xb7", "-"), end
