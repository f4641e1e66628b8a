"""The window of a merge: how long a merge record can be joined."""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """A merge record can be joined for `gap_ms` after its last part, but no longer than `max_ms` after its first (event time).

    Without `max_ms` it is a timeout: `gap_ms` after its first part, whatever comes then.
    """

    gap_ms: int
    max_ms: int | None = None

    def __str__(self) -> str:
        return f"{self.gap_ms} ms" if self.max_ms is None else f"{self.gap_ms} ms, at most {self.max_ms} ms"

    @property
    def is_timeout(self) -> bool:
        """Whether merge records are finished in the order of their event times, so that no other time has to be kept."""
        return self.max_ms is None

    @property
    def longest_ms(self) -> int:
        """How long after its first part a merge record can be joined at most."""
        return self.gap_ms if self.max_ms is None else self.max_ms

    def due(self, first: int, last: int) -> int:
        """The last moment (ms) at which a merge record with these first and last event times can be joined."""
        return min(first + self.longest_ms, last + self.gap_ms)
