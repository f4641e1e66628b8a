"""Who writes the layers of a lake: each has one owner at a time, by a lease with a fencing token.

The table `leases` is a list of entries, numbered without a gap; Delta lets one of two writers of the same number through. An
entry says that layers were taken, with its number as the fencing token, or released, or given up in the midst of something.
The owner renews a file of its token every few seconds. Whoever finds a layer taken watches that file: if it changes, the owner
lives and the newcomer is refused; if not for `SILENCE_S`, it takes over. (An owner that ran on this machine and is no process
any more is dead, and needs no watching.) The newcomer removes the file when it takes over, so that an owner that was only
paused learns of it.

What a woken owner tries to write until then is kept out by its token: see `Lake.fence`.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import psutil

from pipelines import tables
from pipelines.adapters.lake import Lake, suppress_conflict, wall_clock_ms
from pipelines.errors import LeaseLostError, LeaseTakenError, WatersmeetError
from pipelines.settings import Settings

RENEWAL_S: Final = 2.0
SILENCE_S: Final = 20.0
"""Ten renewals: an owner that is silent for so long is dead, or paused for longer than anyone should wait for it."""

TAKEN, RELEASED, GIVEN_UP = "taken", "released", "given up"
_APPLICATION = "watersmeet-leases"
_ATTEMPTS = 20


@dataclass
class Lease:
    """Some layers of a lake, held by this process from `take` to `release`; `lost` is set where another owner took over."""

    lake: Lake
    settings: Settings
    layers: Sequence[str]
    token: int = 0
    must_mend: bool = True
    """Whether the owner before did not say that it was done."""
    must_fence: bool = False
    """Whether the owner before may still wake up."""
    lost: LeaseLostError | None = None
    on_lost: Callable[[], None] = lambda: None
    _ended: threading.Event = field(default_factory=threading.Event)
    _renewing: threading.Thread | None = None
    _holder: str = field(default_factory=lambda: uuid.uuid4().hex)

    def take(self, largest_known: Callable[[], int] = lambda: 0) -> None:
        """Waits until it is certain who holds the layers; the token is larger than every one before.

        `largest_known` is asked where `leases` is empty: other tables may have seen owners. Raises LeaseTakenError where somebody
        holds one of the layers.
        """
        for _ in range(_ATTEMPTS):
            last, next_entry = self._last()
            taken = {layer: entry for layer, entry in last.items() if entry.event == TAKEN}
            owners = {entry.token: entry for entry in taken.values()}
            paused = [token for token, owner in owners.items() if not self._is_dead(owner)]
            if self._claim(max(next_entry, largest_known() + 1) if next_entry == 1 else next_entry):
                self.must_mend = [entry.event for entry in last.values()] != [RELEASED] * len(self.layers)
                self.must_fence = bool(paused)
                self._renew()
                for entry in taken.values():
                    self.lake.files.delete(self._path(entry.token))
                self._renewing = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
                self._renewing.start()
                return
        raise WatersmeetError(f"the table leases of {self.lake.place} could not be written to: others write to it all the time")

    def release(self, *, complete: bool = True) -> None:
        """The next owner need neither wait nor fence, nor, where everything of this one is `complete`, mend.

        Where another writer of `leases` comes in between, nothing is said, and the next owner finds out by itself.
        """
        self.abandon()
        last, next_entry = self._last()
        if all(entry.token == self.token for entry in last.values()):
            self._append(next_entry, RELEASED if complete else GIVEN_UP, self.token)
        self.lake.files.delete(self._path(self.token))

    def check(self) -> None:
        """Before a step that would itself shut another owner out. Raises LeaseLostError where another process has taken over."""
        if self._is_taken_over():
            self.lost = LeaseLostError(self.lake.place)
            raise self.lost

    def abandon(self) -> None:
        """Stops renewing without a word, as after a failure: the next owner sees to what is not complete."""
        self._ended.set()
        if self._renewing is not None:
            self._renewing.join()

    def _last(self) -> tuple[Mapping[str, _Entry], int]:
        """The last entry of each of the layers, and the number of the next one."""
        columns = ", ".join(f"`{name}`" for name in _Entry._fields)
        entries = [_Entry(*row) for row in self.lake.rows(f"SELECT {columns} FROM {{leases}} ORDER BY entry")]
        return {e.layer: e for e in entries if e.layer in self.layers}, max((e.entry for e in entries), default=0) + 1

    def _claim(self, entry: int) -> bool:
        """Whether it was this process that wrote the entry of that number, and so took the layers."""
        self._append(entry, TAKEN, token=entry)
        if self.lake.rows(f"SELECT DISTINCT holder FROM {{leases}} WHERE entry = {entry}") != [(self._holder,)]:
            return False
        self.token = entry
        return True

    def _append(self, entry: int, event: str, token: int) -> None:
        here = (self._holder, socket.gethostname(), os.getpid(), self._jvm_pid(), wall_clock_ms())
        rows = [(entry, layer, token, event, *here) for layer in self.layers]
        with suppress_conflict():
            self.lake.append_once(rows, tables.LEASES, _APPLICATION, entry)

    def _is_dead(self, owner: _Entry) -> bool:
        """Whether it is certain that the owner writes nothing any more; else it has been silent for long enough.

        Raises LeaseTakenError where it is alive.
        """
        if owner.host == socket.gethostname() and not any(_is_alive(pid, owner.at) for pid in (owner.pid, owner.jvm_pid)):
            return True
        seen, since = self._renewal(owner.token), time.monotonic()
        while time.monotonic() - since < SILENCE_S:
            time.sleep(RENEWAL_S / 10)
            if self._renewal(owner.token) not in (seen, None):
                raise LeaseTakenError(owner.layer, self.lake.place, owner.host, owner.pid)
        return False

    def _keep_renewing(self) -> None:
        while not self._ended.wait(RENEWAL_S):
            try:
                if self._renewal(self.token) is None and self._is_taken_over():
                    self.lost = LeaseLostError(self.lake.place)
                    self.on_lost()
                    return
                self._renew()
            except Exception:
                continue  # tried again; where it never succeeds, the token keeps everything safe

    def _is_taken_over(self) -> bool:
        return any(entry.token != self.token for entry in self._last()[0].values())

    def _renewal(self, token: int) -> str | None:
        return self.lake.files.read_text(self._path(token))

    def _renew(self) -> None:
        self.lake.files.write_text(self._path(self.token), f"{self._holder} {time.time_ns()}")

    def _jvm_pid(self) -> int:
        """Spark's process, which may outlive this one for a moment and finish what it was told to write."""
        jvm: Any = self.lake.spark._jvm
        return int(jvm.java.lang.ProcessHandle.current().pid())

    def _path(self, token: int) -> str:
        return f"{self.settings.checkpoints}/_leases/{token}"


class _Entry(NamedTuple):
    """A row of `leases`."""

    entry: int
    layer: str
    token: int
    event: str
    host: str
    pid: int
    jvm_pid: int
    at: int


def _is_alive(pid: int, since_ms: int) -> bool:
    """Whether the process that took the lease then is still there, and not another one with its number."""
    try:
        return psutil.Process(pid).create_time() * 1000 <= since_ms
    except psutil.NoSuchProcess:
        return False
