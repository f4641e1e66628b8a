"""Large values are parsed in turns: one at a time over all workers of a machine, on both engines.

What one of them becomes has a bound (`core.items`), but workers are as many as cores.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final

LARGE_BYTES: Final = 2**20
"""Size of values that are parsed in turns. All that are smaller fit into memory beside them."""

_PATH: Final = Path(tempfile.gettempdir(), f"watersmeet-{os.getuid()}.turn")
_AT_ONCE: Final[AbstractContextManager[None]] = nullcontext()


def in_turn(size: int) -> AbstractContextManager[None]:
    """Hold, while a value of this size (bytes) is parsed, what nobody else holds; if it is large.

    What is held ends with the process, however that ends.
    """
    return _turn() if size > LARGE_BYTES else _AT_ONCE


@contextmanager
def _turn() -> Iterator[None]:
    file = None
    with suppress(OSError):  # without a file that can be locked, as many as there are workers
        # Each opens it for itself: threads of one process take turns, too.
        file = os.open(_PATH, os.O_CREAT | os.O_NOFOLLOW | os.O_RDONLY, 0o600)
        if os.fstat(file).st_uid == os.getuid():  # else somebody else could hold it for ever
            fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if file is not None:
            os.close(file)
