"""Inputs: what the merge reads, each with offsets, positions and a head of its own.

An input is one topic of one source. Where a source has one topic, the input has the source's name, and where it has several,
`source/topic`. No name of a source or a topic has a slash in it. So an input's name also says which part of a table it is: the
rows of one topic in the table of a source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

SEPARATOR: Final = "/"


class InputPlace(NamedTuple):
    """An input as tables have it: their columns `source` and `topic`."""

    source: str
    topic: str


def input_of(source: str, topic: str) -> str:
    """The name of an input; `topic` is empty where the source has one."""
    return f"{source}{SEPARATOR}{topic}" if topic else source


def source_of(name: str) -> str:
    """The source of an input, or the table of a part of it."""
    return name.partition(SEPARATOR)[0]


def topic_of(name: str) -> str:
    """The topic of an input, where its source has several; empty where it has one."""
    return name.partition(SEPARATOR)[2]


def of_source(inputs: Iterable[str], source: str) -> Sequence[str]:
    """The inputs of a source."""
    return [name for name in inputs if source_of(name) == source]
