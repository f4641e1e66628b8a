"""How much goes into one transaction, so that it ends long before Kafka's timeout for it, however slow the way to Kafka is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TARGET_S: Final = 60.0
"""A transaction that takes longer makes the next one smaller; the publisher gives one up after `kafka.publisher.LONGEST_S`."""

_GROWTH: Final = 10
_SHRINKING: Final = 8


@dataclass
class TransactionSize:
    """The `limit` of what the next transaction takes, in units of its caller: `largest` at most, and one at least."""

    largest: int
    limit: int

    def succeeded(self, seconds: float, *, is_full: bool) -> None:
        """Take note of how long a transaction took. `is_full`: it took all that the limit allowed, and more is left."""
        factor = TARGET_S / max(seconds, 0.001)
        if factor < 1:
            self.limit = max(1, int(self.limit * factor))
        elif is_full:
            self.limit = min(self.largest, int(self.limit * min(factor, _GROWTH)))

    def timed_out(self, size: int) -> bool:
        """Take note of a transaction of this size that took too long; False where the next one cannot be smaller."""
        smaller = max(1, min(size, self.limit) // _SHRINKING)
        is_smaller, self.limit = smaller < self.limit, smaller
        return is_smaller
