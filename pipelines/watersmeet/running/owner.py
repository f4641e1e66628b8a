"""Commits of a layer's owner: each has its fencing token and a number, and is confirmed.

Delta keeps, by table and application, the last transaction version that it has seen, and skips a
commit whose version is not larger. So a commit that is made twice happens once. Once a later owner
has committed anything, each commit of an earlier one is skipped, or ends in a conflict. An
owner reads the table after each commit to see whether it was made.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from watersmeet.core.inputs import InputId, of_source
from watersmeet.engine import Engine, Rows
from watersmeet.errors import CommitRepeatedError, LeaseLostError
from watersmeet.lake import tables
from watersmeet.lake.commits import (
    UNREAD,
    Commit,
    is_conflict,
    last_commit,
    last_decision,
    suppress_conflict,
)
from watersmeet.lake.history import History, read_history
from watersmeet.lake.journal import OWNER, decide
from watersmeet.lake.restored import check_table
from watersmeet.lake.table_reader import ReadOnce
from watersmeet.lake.tables import APPLICATION, JOURNAL
from watersmeet.monitoring.events import Committed, Observer, StepDone, ignore
from watersmeet.settings import Settings

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
    layers: Collection[str] = ()
    """The layers that it has taken, as the journal says."""
    _history: History | None = None
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
        self._check_restored(table)
        # The number is known again once the commit is confirmed: after a failure, read the table.
        number = self._last.pop((table, application), None)
        number = self.last_number(table, application) if number is None else number
        return Commit(application, self.token, number + 1, facts or {})

    def _check_restored(self, table: str) -> None:
        reader = self.engine.reader
        if reader.version(table) != self._versions.get(table):
            check_table(reader, self.engine.lake, table)

    def take(self, layers: Collection[str]) -> None:
        """Take layers in the journal, so that no earlier owner of one decides anything afterwards.

        Raises LeaseLostError if a later owner has taken one.
        """
        self.layers = layers
        self.decide(OWNER, {"layers": [*layers]})

    def history(self, settings: Settings) -> History:
        """Return what was decided about the lake, read again until the lake has begun.

        Nobody else decides anything about the layers of an owner.
        """
        if self._history is None or not self._history.generations:
            self._history = read_history(self.engine.reader, settings)
        return self._history

    def decide(self, kind: str, body: Mapping[str, Any], generation: int | None = None) -> None:
        """Append a decision to the journal.

        Raises LeaseLostError, and decides nothing, if a later owner has taken one of the layers.
        """
        self._check_restored(JOURNAL)
        self._history = None
        decide(
            self.engine.reader,
            lambda *commit: self.engine.append(*commit),
            kind,
            lambda: body,
            generation,
            token=self.token,
            layers=self.layers,
        )
        self.notify(Committed(JOURNAL))

    def rely_on_what_was_read(self) -> None:
        """Make durable what this process has read of the lake, whoever has committed it.

        Called before something is done that follows from it, and that outlives a power cut.
        """
        lake = self.engine.lake
        lake.durable.rely_on(lake.layout.keys() - lake.external_tables.keys())

    def versions(self) -> dict[str, int]:
        """Return the version of each table with records, once it is durable."""
        layout, reader = self.engine.lake.layout, self.engine.reader
        versions = {
            name: reader.version(name)
            for name, table in layout.items()
            if table.has_records and reader.exists(name)
        }
        self.rely_on_what_was_read()
        return versions

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
            raise CommitRepeatedError(
                f"a commit to {table} of {self.engine.lake.location} was made by an earlier try, "
                "whose answer did not come",
                fix="if this goes on, look at what the store answers",
            )
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
        self,
        table: str,
        application: str,
        write: Callable[[Commit], None],
        *,
        attempts: int = 1,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        """Make a commit by `write`, which changes existing rows; a change of no row may make none.

        If another writer of the table came first, it is tried again, `attempts` times at most in
        all. Raises LeaseLostError, and changes nothing, if a later owner has written to the table.
        Raises the conflict if another writer came first each time.
        """
        for attempt in range(1, attempts + 1):
            commit = self.next_commit(table, application, facts)
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

    def fence(self, table: str, applications: Iterable[str] = (APPLICATION,)) -> None:
        """Keep every earlier owner out of a table, with an empty commit under this owner's token
        for each application.

        The commit repeats the application's last decision. What earlier owners write from then on
        is skipped by Delta, or ends in a conflict. Raises LeaseLostError if a later owner has
        written to the table.
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
                else:
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


def fence_all(owner: Owner, written: Sequence[tuple[str, str]]) -> None:
    """Fence every earlier owner out of tables, each for an application (`written_by`)."""
    by_table: dict[str, set[str]] = {}
    for table, application in written:
        by_table.setdefault(table, set()).add(application)

    def fence(table: str) -> None:
        owner.fence(table, by_table[table])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fence, by_table))


def written_by(layer: str, settings: Settings) -> list[tuple[str, str]]:
    """Return the tables to which a layer's owner commits under its token, with their applications
    (`Table.writers`).
    """
    every = tables.layout(settings).values()
    return [(table.name, name) for table in every for name in table.writers.get(layer, ())]


def kept_by(layer: str, settings: Settings, input_id: InputId | None = None) -> list[str]:
    """Return the tables that the owner of a layer keeps small (`Table.keeper`); with an input, its
    share, which is its source's table, or that and all others for the first input.
    """
    kept = [table.name for table in tables.layout(settings).values() if table.keeper == layer]
    if input_id is None:
        return kept
    of_bronze = {tables.bronze(source): source for source in settings.sources}
    firsts = {name: of_source(settings.inputs, source)[0] for name, source in of_bronze.items()}
    return [name for name in kept if firsts.get(name, settings.inputs[0]) == input_id]
