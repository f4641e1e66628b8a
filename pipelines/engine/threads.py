"""What runs in a thread of this process, as the engine's `Running`."""

from __future__ import annotations

import threading
from collections.abc import Callable


class RunningThread:
    """Calls `follow` once, in a thread, with the event that tells it to end; what it raises is kept as the failure."""

    def __init__(self, name: str, follow: Callable[[threading.Event], None]) -> None:
        self.failure: Exception | None = None
        self._stopping, self._follow = threading.Event(), follow
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """Whether it still runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Tells it to end, and returns once it has."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._follow(self._stopping)
        except Exception as failure:
            self.failure = failure
