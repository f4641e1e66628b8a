"""The limits of a merge record: how long it can be joined, and how much it may have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from watersmeet.core.columns import Booleans, Int64s


class Window(NamedTuple):
    """The time, in event time, for which a merge record can be joined.

    It can be joined for `gap_ms` after its last part, but no longer than `max_ms` after its first.
    Without `max_ms` it is a timeout: `gap_ms` after its first part, whatever comes then.
    """

    gap_ms: int
    max_ms: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.gap_ms} ms"
            if self.max_ms is None
            else f"{self.gap_ms} ms, at most {self.max_ms} ms"
        )

    @property
    def is_timeout(self) -> bool:
        """True where merge records finish in the order of their event times.

        No other time has to be kept then.
        """
        return self.max_ms is None

    @property
    def longest_ms(self) -> int:
        """The longest time after its first part at which a merge record can be joined."""
        return self.gap_ms if self.max_ms is None else self.max_ms

    def due(self, first: int, last: int) -> int:
        """Return the last moment (ms) at which a merge record with these event times can be joined.

        `first` and `last` are its first and last event times.
        """
        return min(first + self.longest_ms, last + self.gap_ms)


class Closing(NamedTuple):
    """The rules that decide when merge records close, in ms of event time.

    They are the window, as its gap and its maximum, and how far a tenant's clock may be behind.
    """

    gap_ms: int
    longest_ms: int
    lag_ms: int


def epoch_start(clock: int, start_before: int, before: Closing, after: Closing) -> int:
    """Return the start (ms) of an epoch, which is before whatever the epoch closes is closed.

    An epoch by which merge records close otherwise starts strictly later than the one before, even
    where the clock stands; any other one goes on with the start of the one before.

    - `clock`: where the epoch before has ended; `start_before`: where that started.
    - `before` and `after`: the rules of the two. Epochs that merged nothing do not count.
    """
    return start_before if before == after else max(clock, start_before + 1)


class Bounds(NamedTuple):
    """The most that a merge record may have: beyond either, it is too large.

    `max_parts`: the number of its records, repeated ones counted. `max_bytes`: the size of their
    values in all.
    """

    max_parts: int = 100_000
    max_bytes: int = 256 * 2**20

    def is_exceeded(self, records: int, size: int) -> bool:
        """Return True for a merge record with so many records and bytes that is too large."""
        return records > self.max_parts or size > self.max_bytes

    def are_exceeded(self, records: Int64s, sizes: Int64s) -> Booleans:
        """Return `is_exceeded` of each of some merge records."""
        return (records > self.max_parts) | (sizes > self.max_bytes)


BOUNDS: Final = Bounds()
"""The usual bounds."""
