"""How much memory a process keeps that it has freed.

A batch takes hundreds of megabytes for a second, and several libraries with allocators of their own take turns at it: what each
keeps for its next batch, the others cannot use. By their defaults that was a sixth of the memory of a run.
"""

from __future__ import annotations

import ctypes
import os

_M_ARENA_MAX = -8
"""The parameter of glibc's `mallopt` (its manual page, mallopt(3)) that bounds how many heaps the threads share."""


def keep_little() -> None:
    """Sets the allocators of this process and of all that it starts: a heap for each core instead of eight, and delta-rs's, which
    is jemalloc, returns pages after half a second instead of ten. What the environment says already holds.

    To be called before `deltalake` is imported, since jemalloc reads its settings once. Elsewhere than on Linux with glibc, the
    first does nothing.
    """
    cores = os.cpu_count() or 1
    of_jemalloc = f"narenas:{cores},dirty_decay_ms:500,muzzy_decay_ms:0,background_thread:true"
    os.environ.setdefault("_RJEM_MALLOC_CONF", of_jemalloc)  # jemalloc's variable under the prefix that Rust gives it
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    os.environ["MALLOC_ARENA_MAX"] = str(cores)  # for what is started from here on: glibc reads it when a process begins
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, cores)
