"""What the commands that try faults for long have in common: a broker of their own, and a line for
whoever watches."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipelines.dev import broker


@contextmanager
def brokered(parent: Path | None = None) -> Iterator[tuple[str, Path]]:
    """A broker, and a folder (in `parent`, or where temporary ones are made); both are gone
    afterwards."""
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        started = broker.start(folder / "broker")
        assert started.bootstrap_servers is not None
        try:
            yield started.bootstrap_servers, folder
        finally:
            broker.stop(folder / "broker")


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
