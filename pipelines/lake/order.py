"""In which order silver's finished records are published: by which of its columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from pipelines.core.sequence import PLAIN, Tail
from pipelines.core.types import DUE
from pipelines.lake import tables
from pipelines.lake.questions import Condition, Questions


class Order(NamedTuple):
    """By which columns of silver records are published, of which the first is a time; and what holds for these records."""

    columns: Sequence[str]
    conditions: Sequence[Condition] = ()

    @property
    def column(self) -> str:
        """The time."""
        return self.columns[0]

    def since(self, tails: Mapping[int, Tail], partitions: Iterable[int]) -> dict[int, int]:
        """By partition, the time (ms) of the tail, or -1; without those whose tail is behind all records of this order."""
        times = {p: (-1, -1) if p not in tails else tails[p].place[:2] for p in partitions}
        if self.column == "closed_at":
            return {p: closed_at for p, (closed_at, _) in times.items()}
        return {p: time for p, (closed_at, time) in times.items() if closed_at == PLAIN}


BY_EVENT_TIME: Final = Order(["event_time", "merge_key"])
"""Where merge records are closed by a timeout alone."""

BY_CLOSING: Final = Order(["closed_at", "due", "merge_key"])
"""Where there is a window by gap."""


def due_columns(questions: Questions) -> list[str]:
    """The columns of `DUE` that silver has: both, or none."""
    return [name for name in DUE.names if name in questions.columns(tables.SILVER).names]


def orders(questions: Questions) -> list[Order]:
    """In which orders silver is published, one after the other: what a timeout closed before there was a window comes first."""
    if not due_columns(questions):
        return [BY_EVENT_TIME]
    return [BY_EVENT_TIME._replace(conditions=[("closed_at", "is null", None)]), BY_CLOSING]
