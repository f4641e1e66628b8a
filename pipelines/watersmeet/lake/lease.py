"""One owner at a time for each layer of a lake, by a lease with a fencing token.

The table `leases` is a list of numbered entries; Delta lets one of two writers of the same number
through. An entry says that layers were taken, with its number as the fencing token, or released.
The owner renews a file of its own every few seconds. A newcomer that finds a layer taken watches
that file. If it changes, the newcomer is refused; if it stays the same for `SILENCE_S`, or the
owner is certainly dead, the newcomer takes over and removes the file.

The end of the wait proves nothing. So every owner fences the tables that it may write before it
reads them (`watersmeet.running.owner.Owner.fence`). An owner that was only paused learns from
`leases` that it was replaced; its token keeps out what it writes until then.

Whether an owner's process has ended is told for certain. A host name and a process id do not
suffice: two containers may share a host name but never a process table, and process ids are reused.
A boot id, a namespace of processes and the time since boot at which a process started do, and none
of them depends on a wall clock.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from watersmeet.errors import LeaseLostError, LeaseTakenError, WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.commits import Append, Commit, suppress_conflict
from watersmeet.lake.files import Files
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader

RENEWAL_S: Final = 2.0
SILENCE_S: Final = 20.0
"""Ten renewals: an owner that is silent for so long is dead, or paused for too long."""
_LOOK_S: Final = 0.25
_CHECK_EVERY: Final = 5
"""Renewals after which an owner checks `leases`, or sooner where its file is gone."""

TAKEN = "taken"
RELEASED = "released"
FORGET: Final = "forget"
EVOLVE: Final = "evolve"
_APPLICATION = "watersmeet-leases"
_ATTEMPTS = 20
_SPARK_CLASSES: Final = ("org.apache.spark.", "com.databricks.")
"""Prefixes of the main class of a JVM that runs Spark's driver."""


class Entry(NamedTuple):
    """A row of `leases` as far as a newcomer needs it; `at` in epoch ms."""

    entry: int
    layer: str
    token: int
    event: str
    host: str
    pid: int
    jvm_pid: int | None
    at: int
    holder: str = ""
    boot_id: str | None = None
    namespace: str | None = None
    started: int | None = None
    jvm_started: int | None = None

    @property
    def id(self) -> str:
        """The id of the owner, which names its file: no other lake has the same one."""
        return self.holder.rpartition(" ")[2]

    @property
    def change(self) -> str | None:
        """The command by which the owner changes the lake; None for one that works on."""
        return self.holder.partition(" ")[0] if " " in self.holder else None


def is_dead(owner: Entry) -> bool:
    """Return True where it is certain that the owner writes nothing any more.

    It was in this process table, and neither its process nor its JVM, which may finish what it was
    told to write, is left. An owner that did not say when it started is never certainly dead.
    """
    here = process_table()
    is_known = None not in (here.boot_id, here.namespace, owner.started)
    if not is_known or (owner.boot_id, owner.namespace) != here:
        return False
    is_jvm_gone = owner.jvm_pid is None or is_gone(owner.jvm_pid, owner.jvm_started)
    return is_gone(owner.pid, owner.started) and is_jvm_gone


def last_entries(reader: TableReader) -> dict[str, Entry]:
    """Return, by layer, the last entry of `leases`."""
    rows = reader.select(tables.LEASES, list(Entry._fields)).to_pylist()
    entries = sorted((Entry(**row) for row in rows), key=attrgetter("entry"))
    return {entry.layer: entry for entry in entries}


def change_under_way(reader: TableReader, change: str | None = None) -> Entry | None:
    """Return the entry of a command that changes the lake and has not released it, if any.

    `change`: only this command. It may have been cut short, too: `is_dead` knows more.
    """
    entries = last_entries(reader).values() if reader.exists(tables.LEASES) else ()
    changes = (entry for entry in entries if entry.event == TAKEN and entry.change)
    return next((entry for entry in changes if change in (None, entry.change)), None)


def check_not_changing(reader: TableReader, lake: Lake, change: str) -> None:
    """Raise LeaseTakenError while the command `change` holds layers of the lake, or was cut short.

    For a process that sends records without a lease, once it has fenced those before it. The
    command first takes the layers and then fences in turn, so of two that cross, one learns of the
    other.
    """
    entry = change_under_way(reader, change)
    if entry is not None:
        raise LeaseTakenError(entry.layer, lake.location, entry.host, entry.pid, change)


@dataclass
class Lease:
    """Lease on some layers of a lake, held by this process from `take` to `release`.

    `lost` is set where another owner took over, and `on_lost` is called then, in another thread.
    `append` writes to `leases`. Tests replace the sleep and the look at processes.
    """

    lake: Lake
    reader: TableReader
    append: Append
    layers: Sequence[str]
    change: str | None = None
    """The command that changes the lake; it takes layers by force, except from another one."""
    token: int = 0
    lost: LeaseLostError | None = None
    on_lost: Callable[[], None] = lambda: None
    renews: bool = True
    sleep_s: Callable[[float], None] = time.sleep
    is_dead: Callable[[Entry], bool] = is_dead
    _ended: threading.Event = field(default_factory=threading.Event)
    _renewing: threading.Thread | None = None
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _renewals: int = 0

    @property
    def _holder(self) -> str:
        return f"{self.change} {self._id}" if self.change else self._id

    @cached_property
    def _files(self) -> Files:
        return Files(self.lake.storage)

    def take(self, largest_known: Callable[[], int] = lambda: 0) -> None:
        """Wait until nobody else renews the layers, then take them.

        The token is larger than every earlier one, `largest_known` too, for other tables have seen
        owners, also where `leases` is gone or an earlier copy. Raises LeaseTakenError where a
        living process holds one of the layers and does not lose it to a `change`.
        """
        for _ in range(_ATTEMPTS):
            last, next_entry = self._last()
            owners = {entry.token: entry for entry in last.values() if entry.event == TAKEN}
            for owner in owners.values():
                if owner.change or not self.change:
                    self._await_silence(owner)
            entry = max(next_entry, largest_known() + 1)
            self._append(entry, TAKEN, token=entry)
            rows = self.reader.select(tables.LEASES, ["holder"], [[("entry", "=", entry)]])
            if {*rows["holder"].to_pylist()} != {self._holder}:
                continue
            self.token = entry
            self._write_renewal()
            for owner in owners.values():
                self._files.delete(self._path(owner.id))
            if self.renews:
                work = self._keep_renewing
                self._renewing = threading.Thread(target=work, name="lease", daemon=True)
                self._renewing.start()
            return
        raise WatersmeetError(
            f"the table leases of {self.lake.location} could not be written to: others write to it "
            "all the time"
        )

    def release(self) -> None:
        """Release the layers, so that the next owner need not wait.

        Where another writer of `leases` comes in between, it waits as for an owner that has died.
        """
        self._ended.set()
        if self._renewing is not None:
            self._renewing.join()
        last, next_entry = self._last()
        if all(entry.token == self.token for entry in last.values()):
            self._append(next_entry, RELEASED, self.token)
        self._files.delete(self._path(self._id))

    def check(self) -> None:
        """Raise LeaseLostError where another process has taken over."""
        others = [entry for entry in self._last()[0].values() if entry.token != self.token]
        if others:
            newest = max(others, key=attrgetter("entry"))
            self.lost = LeaseLostError(self.lake.location, newest.change)
            raise self.lost

    def renew(self) -> bool:
        """Show once more that this process lives; return False where another has taken over.

        Then `lost` is set and `on_lost` called. Whoever takes over removes the file after its entry
        is in `leases`: a renewal that makes it anew finds the entry at its next check, and removes
        it again.
        """
        is_there = self._renewal(self._id) is not None
        self._write_renewal()
        self._renewals += 1
        try:
            if not is_there or self._renewals % _CHECK_EVERY == 0:
                self.check()
        except LeaseLostError:
            self._files.delete(self._path(self._id))
            self.on_lost()
            return False
        return True

    def _last(self) -> tuple[Mapping[str, Entry], int]:
        entries = last_entries(self.reader)
        next_entry = max((entry.entry for entry in entries.values()), default=0) + 1
        return {name: entry for name, entry in entries.items() if name in self.layers}, next_entry

    def _append(self, entry: int, event: str, token: int) -> None:
        jvm_pid = _jvm_pid()
        here = {
            "holder": self._holder,
            "host": socket.gethostname(),
            "at": time.time_ns() // 1_000_000,
            **process_table()._asdict(),
            "pid": os.getpid(),
            "started": start_ticks(os.getpid()),
            "jvm_pid": jvm_pid,
            "jvm_started": None if jvm_pid is None else start_ticks(jvm_pid),
        }
        rows = self.lake.layout[tables.LEASES].rows_of(
            {"entry": entry, "layer": layer, "token": token, "event": event, **here}
            for layer in self.layers
        )
        with suppress_conflict():
            self.append(tables.LEASES, rows, Commit(_APPLICATION, token=0, number=entry))

    def _await_silence(self, owner: Entry) -> None:
        # Until the owner is certainly dead, was silent long enough, or has released.
        seen = self._renewal(owner.id)
        for _ in range(round(SILENCE_S / _LOOK_S)):
            if self.is_dead(owner):
                return
            self.sleep_s(_LOOK_S)
            now = self._renewal(owner.id)
            if now not in (seen, None):
                raise LeaseTakenError(
                    owner.layer, self.lake.location, owner.host, owner.pid, owner.change
                )
            if now != seen and self._last()[0][owner.layer] != owner:
                return

    def _keep_renewing(self) -> None:
        while not self._ended.wait(RENEWAL_S):
            # Tried again, also after a panic in a Rust library, which is no Exception; where it
            # never succeeds, the token keeps everything safe.
            with suppress(BaseException):
                if not self.renew():
                    return

    def _renewal(self, owner_id: str) -> str | None:
        return self._files.read_text(self._path(owner_id))

    def _write_renewal(self) -> None:
        self._files.write_text(self._path(self._id), f"{self._holder} {time.time_ns()}")

    def _path(self, owner_id: str) -> str:
        return f"{self.lake.settings.checkpoints}/_leases/{owner_id}"


def _jvm_pid() -> int | None:
    here = psutil.Process()
    for process in (*here.children(recursive=True), *here.parents()):
        with suppress(psutil.Error):
            words = process.cmdline() if process.name() in ("java", "java.exe") else []
            if any(word.startswith(_SPARK_CLASSES) for word in words):
                return process.pid
    return None


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
