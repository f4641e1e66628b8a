"""Inputs of the merge, each with offsets, positions and a head of its own.

An input is one topic of one source. Where a source has one topic, the input has the source's name.
Where it has several, the input's name is `source/topic`. Names of sources and topics contain no
slash. So an input's name also names a part of a table: the rows of one topic in a source's table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

SEPARATOR: Final = "/"


class InputPlace(NamedTuple):
    """An input as tables name it, in their columns `source` and `topic`."""

    source: str
    topic: str


def input_of(source: str, topic: str) -> str:
    """Return the name of an input. `topic` is empty where the source has only one."""
    return f"{source}{SEPARATOR}{topic}" if topic else source


def source_of(name: str) -> str:
    """Return the source of an input, or the table of which the name is a part."""
    return name.partition(SEPARATOR)[0]


def topic_of(name: str) -> str:
    """Return the topic of an input whose source has several, or an empty text where it has one."""
    return name.partition(SEPARATOR)[2]


def of_source(inputs: Iterable[str], source: str) -> Sequence[str]:
    """Return the inputs of a source."""
    return [name for name in inputs if source_of(name) == source]
