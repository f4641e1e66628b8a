"""A thread of this process as the engine's `Running`."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RunningThread:
    """A thread that calls `follow` once, with the event that tells it to end; what that raises is
    kept as the failure, also where it is no Exception: a panic in a Rust library is none.
    """

    def __init__(self, name: str, follow: Callable[[threading.Event], None]) -> None:
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        self._follow = follow
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Tell the thread to end, and return once it has."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._follow(self._stopping)
        except BaseException as failure:
            self.failure = failure
