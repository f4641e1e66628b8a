"""Identity of a process: tells for certain whether an owner's process has ended.

A host name and a process id do not suffice: two containers may share a host name but never a
process table, and process ids are reused. A boot id, a namespace of processes and the time since
boot at which a process started do, and none of them depends on a wall clock.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class ProcessTable(NamedTuple):
    """The table of processes that this process is in; None where the system does not tell."""

    boot_id: str | None
    namespace: str | None


def process_table() -> ProcessTable:
    """Return the process table of this process, as Linux names it.

    Where `/proc` shows the processes of another namespace than this one's, no number in it can be
    trusted, and both fields are None.
    """
    with suppress(OSError):
        me = Path("/proc/self")
        if str(me.readlink()) == str(os.getpid()):
            boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            kinds = [
                me / "ns" / kind for kind in ("pid", "time") if (me / "ns" / kind).is_symlink()
            ]
            return ProcessTable(boot_id, " ".join(str(kind.readlink()) for kind in kinds) or None)
    return ProcessTable(None, None)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot.

    None where the system does not tell.
    """
    with suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The name of the program, in parentheses, may hold anything.
        return int(stat.rpartition(")")[2].split()[19])
    return None


def is_gone(pid: int, started: int | None) -> bool:
    """Return True where this process table has no process of that number.

    A process that started at another time is another one.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # it is another user's, so it is there
    now = start_ticks(pid)
    return None not in (now, started) and now != started


def umask() -> int:
    """Return the umask of this process, which the system only tells by setting another one.

    For that moment the files of other threads are for their user alone.
    """
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
