"""Untrusted texts, such as names of fields in a record, made safe for people to read."""

from __future__ import annotations

import re
from typing import Final

CONTROLS: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""Characters that steer a terminal instead of being seen.

They are Unicode's C0 but for tab and newline, C1, other ends of lines, and directions.
"""


def printable(text: str) -> str:
    """Return the text with escapes, such as `\\x1b`, for all that is not printable.

    So it shows where the text really ends, and cannot change direction.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def without_controls(text: str) -> str:
    """Return the text without what steers a terminal; tabs and newlines stay."""
    return CONTROLS.sub("", text)
