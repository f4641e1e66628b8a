"""What a process has freed, the machine has back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FREED = """
import sys, time
from watersmeet.memory import limit_allocator_caches
limit_allocator_caches()
import numpy as np
import psutil
import pyarrow as pa
from deltalake import write_deltalake

def megabytes():
    return psutil.Process().memory_info().rss >> 20

pa.set_memory_pool(pa.system_memory_pool())
write_deltalake(sys.argv[1], pa.table({"n": np.arange(1000)}), mode="append")
before, numbers = megabytes(), np.random.default_rng(1).integers(0, 2**60, 6_000_000)
write_deltalake(sys.argv[1], pa.table({"n": numbers}), mode="append")
del numbers
until = time.monotonic() + 5
while megabytes() - before > 25 and time.monotonic() < until:
    time.sleep(0.1)
print(megabytes() - before)
"""

HEAPS = """
import ctypes, sys, threading
from watersmeet.memory import limit_allocator_caches
limit_allocator_caches()
libc, together = ctypes.CDLL(None), threading.Barrier(20)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p

def take():
    together.wait()
    libc.free(ctypes.c_void_p(libc.malloc(1000)))
    together.wait()

threads = [threading.Thread(target=take) for _ in range(20)]
for thread in threads: thread.start()
for thread in threads: thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(open(sys.argv[1]).read().count("<heap nr="))
"""


def told(program: str, path: Path) -> int:
    """What a program that is given a path prints, which is a number."""
    unset = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=unset,
    )
    return int(done.stdout)


def test_what_delta_rs_has_freed_the_machine_has_back_soon(tmp_path: Path) -> None:
    """Of 100 MB; with the allocators' defaults 60 MB stay."""
    assert told(FREED, tmp_path / "table") <= 25


def test_threads_share_as_many_heaps_as_there_are_cores(tmp_path: Path) -> None:
    """By default, as many as eight for each."""
    assert told(HEAPS, tmp_path / "info.xml") <= (os.cpu_count() or 1)


def test_the_command_has_not_imported_delta_rs_when_it_sets_its_allocator(tmp_path: Path) -> None:
    assert (
        told("import sys; import watersmeet.cli; print(int('deltalake' in sys.modules))", tmp_path)
        == 0
    )
