"""Work that goes on beside a test: watching a process, sending records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(work: Callable[[], object], pause_s: float) -> Iterator[None]:
    """Inside, another thread does `work` at once and then again after each pause, in seconds; at the end it has stopped."""
    is_over = threading.Event()

    def repeat() -> None:
        work()
        while not is_over.wait(pause_s):
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
