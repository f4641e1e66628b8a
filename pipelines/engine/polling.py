"""Following by polling, in a thread, for engines that have no streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pipelines.engine.threads import RunningThread


def followed(
    name: str, look: Callable[[], Any], work: Callable[[], None], *, every_s: float
) -> RunningThread:
    """Call `work` in a thread, at once and again whenever `look` returns something else, looking
    after `every_s`.
    """

    def follow(stopping: threading.Event) -> None:
        """Call `work` whenever something is new, until `stopping` is set."""
        seen = None
        while not stopping.is_set():
            current = look()
            if current == seen:
                stopping.wait(every_s)
                continue
            seen = current
            work()

    return RunningThread(name, follow)
