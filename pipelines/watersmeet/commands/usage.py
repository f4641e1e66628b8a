"""How commands are called: their help, and the sentence about a wrong call, in plain text."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import typer
from typer.core import TyperGroup

from watersmeet.output import UNLIMITED, print_text

LOOK: Final = "Look at a lake"
RUN: Final = "Run the streams"
CHANGE: Final = "Change a lake"
TRY: Final = "Begin, and try things"
"""The groups of commands in the help, in this order."""

_WIDEST_TEXT: Final = 100


class GroupedCommands(TyperGroup):
    """A group whose help has a section for each help panel of its commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the sections, in the order in which their panels come first."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or "Commands"
            row = (name, command.get_short_help_str(UNLIMITED))
            sections.setdefault(panel, []).append(row)
        for panel, rows in sections.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


def new_app(**settings: Any) -> typer.Typer:
    """Return an application, or a group of commands in one, with this help."""
    return typer.Typer(
        cls=GroupedCommands,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        **settings,
    )


def show_help_alone(context: typer.Context) -> None:
    """Show the help where no command is named, which is bad usage."""
    if context.invoked_subcommand is None:
        print_text(context.get_help())
        raise typer.Exit(2)


def call(app: typer.Typer) -> int:
    """Call the command that the arguments name; return its exit status. Raises TyperException."""
    is_terminal = sys.stdout.isatty()
    width = {"max_content_width": _WIDEST_TEXT} if is_terminal else {"terminal_width": UNLIMITED}
    return app(standalone_mode=False, **width) or 0


def usage_sentence(error: typer.TyperException) -> str:
    """Return what is wrong with the arguments, and where to read what would be right."""
    what = " ".join(error.format_message().split()).rstrip(".?").replace("Value error, ", "")
    what = re.sub(r"\. Did you mean (.*)$", r" (did you mean \1?)", what)
    what = re.sub(r"Input should be (.*?)(?:, unable to .*)?$", r"it should be \1", what)
    sentence = f"{what[:1].lower()}{what[1:]}"
    context = getattr(error, "ctx", None)
    if context is None:
        return sentence
    arguments = {parameter.name for parameter in context.command.params}
    if "key" in arguments and hasattr(error, "option_name"):
        sentence += "; a key that begins with a dash comes behind `--`"
    return f"{sentence}; see `{context.command_path} --help`"
