"""Maintenance that keeps tables small: it compacts, deletes old rows, and removes old files.

`keep` says which rows are old (`watersmeet.operations.retention`), `retention` which files. The
owner of a layer does it between two batches, so nothing is ever rewritten under a writer's hands.
Compaction changes no row, and only files that no version within the retention uses are deleted. The
Delta log and the history reach back as far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from watersmeet.lake.commits import suppress_conflict

if TYPE_CHECKING:
    from watersmeet.engine import Engine

FILE_BYTES: Final = 128 * 1024 * 1024
"""Approximate size up to which compaction makes files."""

GATHERED: Final = ((64, FILE_BYTES), (8, 16 * 1024 * 1024), (1, 2 * 1024 * 1024))
"""Pairs (n, size): every n-th compaction of a run gathers files up to that size (bytes).

The first pair that fits applies. If each made the largest files, each would rewrite what those
before it have gathered, and all that stays until the retention is over.
"""

FEW_FILES: Final = 16
"""Number of files up to which a table is left as it is.

A query opens a file in a millisecond, and what compaction replaces stays until the retention is
over.
"""

VACUUM_EVERY_S: Final = 6 * 3600.0
"""Seconds between two vacuums.

Listing all files of a table costs most where there is nothing to remove.
"""


@dataclass
class Maintenance:
    """Maintenance of some tables of a lake, for their owner."""

    engine: Engine
    names: Sequence[str]
    every: int | None = None
    """Number of commits after which tables are compacted; None: the engine's `compact_every`."""
    expire: Callable[[str], None] = lambda _: None
    """Function that deletes the rows of a table that are old enough."""
    now_s: Callable[[], float] = time.monotonic
    _commits: int = 0
    _vacuumed_at_s: float | None = None

    def after_commit(self) -> None:
        """Compact the tables after every so many commits.

        Once `VACUUM_EVERY_S` have passed, delete old rows before that, and vacuum after it.
        """
        self._commits += 1
        if self._vacuumed_at_s is None:
            self._vacuumed_at_s = self.now_s()
        compacted, rest = divmod(self._commits, self.every or self.engine.compact_every)
        if rest == 0:
            file_bytes = next(size for every, size in GATHERED if compacted % every == 0)
            is_due = self.now_s() - self._vacuumed_at_s > VACUUM_EVERY_S
            for name in self.names:
                if is_due:
                    self.expire(name)
                _compact(self.engine, name, file_bytes)
            if is_due:
                for name in self.names:
                    _vacuum(self.engine, name)
                self._vacuumed_at_s = self.now_s()


def maintain(
    engine: Engine, names: Sequence[str], expire: Callable[[str], None] = lambda _: None
) -> list[dict[str, object]]:
    """Delete old rows of the tables (`expire`), compact and vacuum them.

    Returns, for each, how many files it had, how many it has now, and how many old ones were
    removed.
    """
    done: list[dict[str, object]] = []
    for name in names:
        expire(name)
        before = _compact(engine, name)
        removed = _vacuum(engine, name)
        after = engine.reader.file_count(name)
        done.append(
            {"table": name, "files_before": before, "files": after, "old_files_removed": removed}
        )
    return done


def keep_properties(engine: Engine, table: str) -> None:
    """Give the table the properties of the layout, where it was created with others.

    For the table's owner alone.
    """
    properties = engine.lake.layout[table].properties
    if properties.items() - engine.reader.properties(table).items():
        engine.set_properties(table, properties)


def _compact(engine: Engine, table: str, file_bytes: int = FILE_BYTES) -> int:
    """Compact a table that has more than `FEW_FILES` files, and return how many it had."""
    before = engine.reader.file_count(table)
    if before > FEW_FILES:
        engine.compact(table, file_bytes)
    return before


def _vacuum(engine: Engine, table: str) -> int:
    """Remove old files of a table, and return how many.

    Files of the last version that still hold deleted rows are replaced first: they are old once the
    retention is over.
    """
    keep_properties(engine, table)
    if engine.lake.layout[table].has_records:
        with suppress_conflict():
            engine.purge(table)
    return engine.vacuum(table)
