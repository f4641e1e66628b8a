"""The bounds of a merge record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from watersmeet.core.columns import Booleans, Int64s


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
