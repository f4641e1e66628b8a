"""Limits how much goes into one transaction.

So it ends long before Kafka's timeout for it, even on a slow connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TARGET_S: Final = 60.0
"""Target duration: a transaction that takes longer makes the next one smaller. The publisher gives
one up after `kafka.publisher.LONGEST_S`.
"""

_GROWTH: Final = 10
_SHRINKING: Final = 8


@dataclass
class TransactionSize:
    """The `limit` of the next transaction, in units of its caller: from one to `largest`."""

    largest: int
    limit: int

    def succeeded(self, seconds: float, *, is_full: bool) -> None:
        """Adapt the limit to how long a transaction took.

        `is_full`: it took all that the limit allowed, and more is left.
        """
        factor = TARGET_S / max(seconds, 0.001)
        if factor < 1:
            self.limit = max(1, int(self.limit * factor))
        elif is_full:
            self.limit = min(self.largest, int(self.limit * min(factor, _GROWTH)))

    def timed_out(self, size: int) -> bool:
        """Lower the limit after a transaction of this size took too long.

        Returns False if the next one cannot be smaller.
        """
        smaller = max(1, min(size, self.limit) // _SHRINKING)
        is_smaller = smaller < self.limit
        self.limit = smaller
        return is_smaller
