"""The progress of a run: a progress line on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status

log = logging.getLogger("watersmeet")


def set_up_logging(*, verbose: bool = False) -> None:
    """Logs go to standard error, so that standard output holds the answer alone."""
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    log.setLevel(logging.DEBUG if verbose else logging.INFO)


class Reporter:
    """Reports the progress of each layer; safe to call from the threads of several streams."""

    def __init__(self, status: Status | None = None) -> None:
        self._status = status
        self.latest: dict[str, str] = {}
        self._lock = threading.Lock()

    def tell(self, layer: str, news: str) -> None:
        """Replaces the last news of a layer on the progress line; writes one more line to a log."""
        with self._lock:
            self.latest[layer] = news
            if self._status is None:
                log.info("%s: %s", layer, news)
            else:
                self._status.update(" · ".join(f"[bold]{name}[/] {text}" for name, text in self.latest.items()))


@contextmanager
def reporting() -> Iterator[Reporter]:
    """A progress line where standard error is a terminal, else log lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Reporter()
        return
    with console.status("starting Spark ...") as status:
        yield Reporter(status)
