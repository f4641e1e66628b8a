"""Conditions for the rows of a sequence (`core.sequence`): which have a message, and which sort
after a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from watersmeet.core.sequence import Place, Sequence, Tail, clock_of
from watersmeet.lake.table_reader import Condition, Where, between, lexicographic


def with_message(sequence: Sequence) -> list[Condition]:
    """Return the condition for the rows that have a message."""
    return [(name, "=", value) for name, value in sequence.with_message.items()]


def after(sequence: Sequence, place: Place) -> Where:
    """Return the condition for the rows that sort after a place, or after all that begin so."""
    return _beside(sequence, place, ">")


def up_to(sequence: Sequence, place: Place) -> Where:
    """Return the condition for the rows that do not sort after a place, or all that begin so."""
    return _beside(sequence, place, "<=")


def beyond(sequence: Sequence, tail: Tail | None) -> Where:
    """Return the condition for the rows that sort after a tail: without one, all do."""
    return [[]] if tail is None else after(sequence, tail.place)


def may_be_beyond(
    sequence: Sequence, tails: Mapping[int, Tail], partitions: Iterable[int]
) -> Where:
    """Return a condition for rows that may sort after the tail of their partition.

    All rows that do meet it. It has few terms, however many partitions there are.
    """
    since = {p: clock_of(tails[p].place) if p in tails else -1 for p in partitions}
    return between(sequence.clock, {p: (clock, None) for p, clock in since.items()})


def _beside(sequence: Sequence, place: Place, operator: str) -> Where:
    values = sequence.values(place)
    return lexicographic(list(values), list(values.values()), operator)
