"""How much memory processes of their own take at most.

Not what `wait4` or `getrusage` say of a child: that may be what its parent had when it started it,
which Linux hands on.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


def peak_mib_of(
    process: subprocess.Popen[bytes], counts: Callable[[psutil.Process], bool] = lambda _: True
) -> float:
    """Wait for the end of a process; return the most memory (MiB) that one of it and those that it
    had started had in its life.

    `counts`: which of them are looked at.
    """
    family, peak_kib = psutil.Process(process.pid), 0
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess, OSError):
            for pid in [
                each.pid for each in (family, *family.children(recursive=True)) if counts(each)
            ]:
                peak = re.search(
                    r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
                )
                peak_kib = max(peak_kib, int(peak[1]) if peak else 0)
        time.sleep(0.05)
    return peak_kib / 1024
