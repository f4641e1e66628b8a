"""Named points between the steps of the commits, where a test can hold a process to kill it there.

The environment variable `WATERSMEET_FAULT` arms a point, in the form `POINT:COUNT:FOLDER`: the
process that reaches it for the COUNT-th time, counted over all processes of the run, creates the
file `FOLDER/held` and waits while that file exists. An unarmed point does nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

ARMED_BY: Final = "WATERSMEET_FAULT"


class _Hold:
    """Holds the process at the n-th arrival at a point, counted by files that one can make."""

    def __init__(self, armed: str) -> None:
        self.point, count, folder = armed.split(":", 2)
        self.count = int(count)
        self.folder = Path(folder)

    def __call__(self, point: str) -> None:
        if point != self.point:
            return
        for arrival in range(1, self.count + 1):
            try:
                (self.folder / f"arrival-{arrival}").touch(exist_ok=False)
            except FileExistsError:
                continue
            if arrival == self.count:
                marker = self.folder / "held"
                marker.write_text(str(os.getpid()))
                while marker.exists():
                    time.sleep(0.02)
            return


fault_point = _Hold(os.environ[ARMED_BY]) if ARMED_BY in os.environ else lambda _: None
