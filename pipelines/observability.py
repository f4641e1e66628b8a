"""What a run says while it works: a progress line for a person who looks on, plain log lines for everybody else."""

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
    """Tells how each layer gets on; safe to call from the threads of several streams."""

    def __init__(self, status: Status | None = None) -> None:
        self._status = status
        self.latest: dict[str, str] = {}
        self._lock = threading.Lock()

    def tell(self, layer: str, news: str) -> None:
        """The latest news of a layer replaces its last on the progress line; in a log it is one more line."""
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
