"""Commits of a layer's owner: each has its fencing token and a number, and is confirmed.

Delta keeps, by table and application, the last transaction version that it has seen, and skips a
commit whose version is not larger. So a commit that is made twice happens once. Once a later owner
has committed anything, each commit of an earlier one is skipped, or ends in a conflict. An
owner reads the table after each commit to see whether it was made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from watersmeet.engine import Engine, Rows
from watersmeet.errors import CommitRepeatedError, LeaseLostError
from watersmeet.lake.commits import APPLICATION, UNREAD, Commit, last_commit, last_decision
from watersmeet.lake.conflicts import is_conflict, suppress_conflict
from watersmeet.lake.restored import check_table
from watersmeet.lake.table_reader import ReadOnce
from watersmeet.monitoring.events import Committed, Observer, StepDone, ignore

_ATTEMPTS = 20


@dataclass
class Owner:
    """The holder of a lease, which numbers its commits by table.

    It may hold none (token 0) for a lake that no other process uses. `notify` is told what the
    owner's layers do.
    """

    engine: Engine
    token: int = 0
    notify: Observer = ignore
    is_observed: bool = False
    """True where somebody wants to know the outcomes of records, which takes queries."""
    _last: dict[tuple[str, str], int] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)
    """By table, the last version that this owner has made."""
    _appending: dict[tuple[str, str], threading.Lock] = field(default_factory=dict)
    """Locks for appending, by table and application: the streams of the inputs begin at once, and
    may append to the same ones.
    """

    def next_commit(
        self, table: str, application: str = APPLICATION, facts: Mapping[str, Any] | None = None
    ) -> Commit:
        """Return the next commit to a table.

        Raises LeaseLostError if a later owner has written to it, and ConfigurationError where it
        was restored to a version without what an owner has written.
        """
        reader = self.engine.reader
        if reader.version(table) != self._versions.get(table):
            check_table(reader, self.engine.lake, table)
        # The number is known again once the commit is confirmed: after a failure, read the table.
        number = self._last.pop((table, application), None)
        number = self.last_number(table, application) if number is None else number
        return Commit(application, self.token, number + 1, facts or {})

    def last_number(self, table: str, application: str) -> int:
        """Return the number of this owner's last commit to a table, as the table says.

        It is 0 before the first. Raises LeaseLostError if a later owner has written to the table.
        """
        last = last_commit(self.engine.reader, table, application)
        if last is not None and last[1].token > self.token:
            raise LeaseLostError(self.engine.lake.location)
        return last[1].number if last is not None and last[1].token == self.token else 0

    def confirm(self, table: str, commit: Commit) -> int:
        """Return the version of the table that holds a commit of this owner.

        Raises LeaseLostError if the commit was skipped. Raises CommitRepeatedError if the table has
        another commit of its number: that of an earlier try, whose answer did not come. Its
        content may differ.
        """
        last = last_commit(self.engine.reader, table, commit.application)
        if last is None or last[1].transaction_version != commit.transaction_version:
            raise LeaseLostError(self.engine.lake.location)
        if last[1] != Commit.parse(commit.metadata):
            raise CommitRepeatedError(table, self.engine.lake.location)
        self._last[table, commit.application] = commit.number
        self._versions[table] = last[0].number
        self.notify(Committed(table))
        return last[0].number

    def append(
        self,
        table: str,
        rows: Rows | pa.Table,
        application: str = APPLICATION,
        facts: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Append rows in one commit.

        Raises LeaseLostError, and writes nothing, if a later owner has written to the table.
        """
        with self._appending.setdefault((table, application), threading.Lock()):
            commit = self.next_commit(table, application, facts)
            self.engine.append(table, rows, commit)
            self.confirm(table, commit)
        return commit

    def change(
        self, table: str, application: str, write: Callable[[Commit], None], *, attempts: int = 1
    ) -> None:
        """Make a commit by `write`, which changes existing rows; a change of no row may make none.

        If another writer of the table came first, it is tried again, `attempts` times at most in
        all. Raises LeaseLostError, and changes nothing, if a later owner has written to the table.
        Raises the conflict if another writer came first each time.
        """
        for attempt in range(1, attempts + 1):
            commit = self.next_commit(table, application)
            try:
                write(commit)
            except Exception as error:
                if not is_conflict(error):
                    raise
                self.last_number(table, application)  # raises where it was a later owner
                if attempt == attempts:
                    raise
                continue
            if self.last_number(table, application) == commit.number:
                self._last[table, application] = commit.number
                self.notify(Committed(table))
            return

    @contextmanager
    def step(self, layer: str, name: str) -> Iterator[None]:
        """Report how long the step of a batch inside the `with` block took, unless it fails."""
        since = time.monotonic()
        yield
        self.notify(StepDone(layer, name, time.monotonic() - since))

    def fence(
        self, table: str, applications: Iterable[str] = (APPLICATION,), *, is_shared: bool = False
    ) -> None:
        """Keep every earlier owner out of a table, with an empty commit under this owner's token
        for each application.

        The commit repeats the application's last decision. What earlier owners write from then on
        is skipped by Delta, or ends in a conflict. Raises LeaseLostError if a later owner has
        written to the table. If owners of several layers write to it (`is_shared`), it is not
        raised: that owner has fenced the table.
        """
        waiting = set(applications)
        for _ in range(_ATTEMPTS):
            before = ReadOnce(self.engine.reader)
            for application in sorted(waiting):
                self._append_fence(table, application, before)
            after = ReadOnce(self.engine.reader)
            for application in sorted(waiting):
                last = last_commit(after, table, application)
                if last is None or last[1].token < self.token:
                    continue
                if last[1].token == self.token:
                    self._last[table, application] = last[1].number
                elif not is_shared:
                    raise LeaseLostError(self.engine.lake.location)
                waiting.remove(application)
            if not waiting:
                return
        raise LeaseLostError(self.engine.lake.location)

    def _append_fence(self, table: str, application: str, histories: ReadOnce) -> None:
        """Append the fence of one application, unless an owner who is not earlier has committed."""
        facts = {}
        if application not in UNREAD:
            last = last_commit(histories, table, application)
            if last is not None and last[1].token >= self.token:
                return
            if (decided := last_decision(histories, table, application)) is not None:
                facts = {"decided_in": decided[0], "decided": decided[1].metadata}
        with suppress_conflict():
            nothing = self.engine.lake.schema(table).empty_table()
            self.engine.append(table, nothing, Commit(application, self.token, 0, facts))


def now_ms() -> int:
    """Return the wall clock's time in epoch ms."""
    return time.time_ns() // 1_000_000
