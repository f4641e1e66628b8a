"""How much memory processes of their own take at most.

Not what `wait4` or `getrusage` say of a child: that may be what its parent had when it started it,
which Linux hands on.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
import pyarrow as pa

MIB: Final = 2**20

JVM: Final = "JVM"
PYTHON: Final = "Python"


@dataclass
class Peaks:
    """The most memory (bytes) that processes had, by kind: JVMs, and Python, which is all others.

    `together`: all of a kind, each shared page counted once, as often as somebody looks;
    `largest`: one of them, at any moment.
    """

    together: Counter[str] = field(default_factory=Counter)
    largest: Counter[str] = field(default_factory=Counter)

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """Look at the processes that there are now."""
        totals = Counter[str]()
        for process in processes:
            with suppress(psutil.Error, OSError):
                kind = JVM if process.name() == "java" else PYTHON
                totals[kind] += process.memory_full_info().pss
                self.largest[kind] = max(self.largest[kind], _peak_bytes(process.pid))
        for kind, total in totals.items():
            self.together[kind] = max(self.together[kind], total)

    def problems(self, bounds: Mapping[str, int]) -> list[str]:
        """Say where they had more than these bounds (bytes) by kind."""
        return [
            f"{of} took {peaks[kind] / 2**20:.0f} MiB, and at most {bound / 2**20:.0f} were to be"
            for kind, bound in bounds.items()
            for of, peaks in (
                (f"all processes of {kind} together", self.together),
                (f"a process of {kind}", self.largest),
            )
            if peaks[kind] > bound
        ]

    def __str__(self) -> str:
        return ", ".join(
            f"{kind} at most {self.together[kind] / 2**20:.0f} MiB "
            f"(one of them {self.largest[kind] / 2**20:.0f})"
            for kind in sorted(self.together)
        )


def _peak_bytes(pid: int) -> int:
    """The most memory that a process ever had."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(peak[1]) * 1024 if peak else 0


def peak_mib_of(
    process: subprocess.Popen[bytes], counts: Callable[[psutil.Process], bool] = lambda _: True
) -> float:
    """Wait for the end of a process; return the most memory (MiB) that one of it and those that it
    had started had in its life.

    `counts`: which of them are looked at.
    """
    family, peak = psutil.Process(process.pid), 0
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess, OSError):
            members = (family, *family.children(recursive=True))
            peak = max([peak, *(_peak_bytes(each.pid) for each in members if counts(each))])
        time.sleep(0.05)
    return peak / 2**20


_pools: list[pa.MemoryPool] = []
"""They stay: what was allocated in one is given back to it."""


@contextmanager
def arrow_peak() -> Iterator[Callable[[], int]]:
    """Provide a function that returns what Arrow has allocated at most (bytes) since the `with`
    block began, beside what it had then."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    _pools.append(pool)
    pa.set_memory_pool(pool)
    try:
        yield lambda: pool.max_memory() or 0
    finally:
        pa.set_memory_pool(before)
