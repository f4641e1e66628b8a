"""What is bounded in time, on a machine that may have more to do than it has processors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


def load() -> float:
    """How much more there is to do than there are processors, at least 1: by so much longer may
    take what is bounded in time."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@contextmanager
def within(seconds: float, why: str = "") -> Iterator[None]:
    """What is done here takes so long at most on a machine that has nothing else to do."""
    before, began = load(), time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds * max(before, load()), f"{took:.1f} s, and {seconds} at most: {why}"
