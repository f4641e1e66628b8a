"""A cache that is bounded in bytes: what others send decides how large its values are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

_V = TypeVar("_V")

_OWN_BYTES: Final = 1024
"""What an entry counts beside its size."""


class Recent(Generic[_V]):
    """The values that were used last, as long as they have up to `max_bytes` bytes together."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._values: dict[Hashable, tuple[_V, int]] = {}
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], _V], size: Callable[[_V], int]) -> _V:
        """Return a key's value, made where it is missing, and kept if there is room for it."""
        with self._lock:
            if (entry := self._values.pop(key, None)) is not None:
                self._values[key] = entry
                return entry[0]
        value = make()
        entry = value, size(value) + _OWN_BYTES
        with self._lock:
            if key not in self._values:
                self._values[key] = entry
                self._left -= entry[1]
            while self._left < 0:
                oldest = next(iter(self._values))
                self._left += self._values.pop(oldest)[1]
        return value
