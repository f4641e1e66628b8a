"""Limits how much freed memory a process keeps.

A batch takes hundreds of megabytes for a second, by several libraries with allocators of their own.
What one keeps for its next batch, the others cannot use: a sixth of the memory of a run.
"""

from __future__ import annotations

import ctypes
import os

_M_ARENA_MAX = -8
"""The parameter of glibc's `mallopt` that bounds how many heaps the threads share: mallopt(3)."""


def limit_allocator_caches() -> None:
    """Limit the allocators of this process and of every process that it starts.

    glibc gets one heap per core instead of eight; jemalloc, delta-rs's, returns pages after half a
    second instead of ten. What the environment already has is kept. Call this before `deltalake` is
    imported. Without glibc, the first limit has no effect.
    """
    cores = os.cpu_count() or 1
    jemalloc = f"narenas:{cores},dirty_decay_ms:500,muzzy_decay_ms:0,background_thread:true"
    # Jemalloc's variable under the prefix that Rust gives it.
    os.environ.setdefault("_RJEM_MALLOC_CONF", jemalloc)
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    # For child processes: glibc reads it when a process starts.
    os.environ["MALLOC_ARENA_MAX"] = str(cores)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, cores)
