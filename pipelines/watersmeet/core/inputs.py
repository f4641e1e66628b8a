"""Inputs of the merge, each with offsets, positions and a head of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class InputId(NamedTuple):
    """An input: one topic of one source, as tables name it (`source`, `topic`).

    Users, commits and headers know it by its name (`Settings.input_names`), which has its order.
    """

    source: str
    topic: str


def names_of(inputs: Iterable[InputId]) -> dict[InputId, str]:
    """Return each input's name: its source's, or `source/topic` where that has several topics."""
    several = several_topics(inputs := list(inputs))
    return {i: "/".join(i) if i.source in several else i.source for i in inputs}


def of_source(inputs: Iterable[InputId], source: str) -> list[InputId]:
    """Return the inputs of a source."""
    return [input_id for input_id in inputs if input_id.source == source]


def several_topics(inputs: Iterable[InputId]) -> frozenset[str]:
    """Return the sources with several topics. Their parts of merge records say their topic."""
    counts = Counter(input_id.source for input_id in dict.fromkeys(inputs))
    return frozenset(source for source, count in counts.items() if count > 1)


def input_of_part(inputs: Iterable[InputId], source: str, part: Mapping[str, Any]) -> InputId:
    """Return the input of a part of a source. Parts do not say it where there is only one."""
    if "topic" in part:
        return InputId(source, part["topic"])
    [only] = of_source(inputs, source)
    return only
