"""Work that goes on beside a test: watching a process, sending records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def repeating(work: Callable[[], object], pause_s: float) -> Iterator[None]:
    """Inside, another thread does `work` at once and then again after each pause, in seconds; at
    the end it has stopped.

    What `work` raises ends it, and is raised at the end: a watcher that has died has seen nothing.
    """
    is_over = threading.Event()

    def repeat() -> None:
        work()
        while not is_over.wait(pause_s):
            work()

    with ThreadPoolExecutor(max_workers=1) as threads:
        repeated = threads.submit(repeat)
        try:
            yield
        finally:
            is_over.set()
        repeated.result()
