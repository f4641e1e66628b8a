"""The machine that a figure belongs to, and how much of its memory a program takes."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

_INTERVAL_S = 0.2
_AT_LEAST_EVERY_S = 1.0
_GRACE_S = 10.0


def describe() -> dict[str, str | int | float]:
    """What two figures must have in common to be compared."""
    return {
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "java": _java_version(),
    }


def _java_version() -> str:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(str(Path(home) / "bin" / "java") if home else "java")
    if java is None:
        return "none"
    said = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    return said.partition("\n")[0]


class PeakMemory:
    """Samples the memory of a process and all that it starts; `peak_bytes` is the largest sum seen.

    A page that processes share counts in each of them in proportion (PSS), so that the sum is what
    the machine needs. The kernel walks through all pages for it, which took a tenth of two cores
    where it was asked five times a second: it is asked once a second, and whenever the resident
    sizes, which cost nothing, are larger than ever.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._root = psutil.Process(pid)
        self._family = {self._root}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_looking, name="peak memory", daemon=True)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def end_family(self) -> None:
        """Ends the process and everything that it was seen to start, as far as it still runs; after
        the `with` block."""
        self._find_family()
        with suppress(psutil.NoSuchProcess):
            self._root.kill()
        # Spark's JVM ends with its Python, and clears up its folders first.
        _, left = psutil.wait_procs(self._family, timeout=_GRACE_S)
        for member in left:
            with suppress(psutil.NoSuchProcess):
                member.kill()

    def _keep_looking(self) -> None:
        largest, asked_at = 0, 0.0
        while not self._ended.wait(_INTERVAL_S):
            self._find_family()
            resident, now = self._sum(lambda member: member.memory_info().rss), time.monotonic()
            if resident > largest or now - asked_at > _AT_LEAST_EVERY_S:
                largest, asked_at = max(resident, largest), now
                self.peak_bytes = max(
                    self.peak_bytes, self._sum(lambda member: member.memory_full_info().pss)
                )

    def _sum(self, bytes_of: Callable[[psutil.Process], int]) -> int:
        total = 0
        for member in self._family:
            with suppress(psutil.Error):  # it has ended meanwhile
                total += bytes_of(member)
        return total

    def _find_family(self) -> None:
        """Whoever was seen once stays in it: a child may outlive its parent."""
        with suppress(psutil.NoSuchProcess):
            self._family |= set(self._root.children(recursive=True))
        self._family = {member for member in self._family if member.is_running()}
