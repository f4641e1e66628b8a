"""Texts: paths in a value, untrusted names made safe for people to read, and topics with the
identity that Kafka gives them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, TypeAlias

CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""Characters that steer a terminal: C0 but for tab and newline, C1, ends of lines, directions."""


def printable(text: str) -> str:
    """Return the text with escapes, such as `\\x1b`, for all that is not printable."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def number_of(number: int, noun: str) -> str:
    """Return the number with the noun, which gets an `s` unless it is one of them."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def identified(topic: str, topic_id: str) -> str:
    """Return a topic with Kafka's identity of it, which a topic that was made again does not share,
    as one text.
    """
    return f"{topic} ({topic_id})"


def topic_and_id(text: str) -> tuple[str, str]:
    """Return the topic and its identity that a text spells (`identified`)."""
    topic, _, topic_id = text.partition(" ")
    return topic, topic_id.strip("()")


def without_controls(text: str) -> str:
    """Return the text without what steers a terminal; tabs and newlines stay."""
    return CONTROLS.sub("", text)


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
