"""Keeps the tables small: compaction, and the removal of what lies further back than `retention`.

The owner of a layer does it between two batches, so nothing is ever rewritten under a writer's hands. What the merge still
needs is never removed: compaction moves rows to other files and changes none, and only files that no version within the
retention uses are deleted. The Delta log and the history reach back as far.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pipelines.adapters.lake import Lake

COMPACT_EVERY: Final = 50
"""Commits between two compactions: each makes a few small files, and a merge opens every file of open rows."""

VACUUM_EVERY_S: Final = 6 * 3600.0
"""Listing all files of a table costs most where there is nothing to remove."""


@dataclass
class Maintenance:
    """Looks after some tables of a lake for their owner."""

    lake: Lake
    names: Sequence[str]
    every: int = COMPACT_EVERY
    now: Callable[[], float] = time.monotonic
    _commits: int = 0
    _vacuumed_at: float | None = None

    def after_commit(self) -> None:
        """Compacts after every so many commits, and vacuums after some hours."""
        self._commits += 1
        if self._vacuumed_at is None:
            self._vacuumed_at = self.now()
        if self._commits % self.every == 0:
            for name in self.names:
                self.lake.compact(name)
            if self.now() - self._vacuumed_at > VACUUM_EVERY_S:
                for name in self.names:
                    vacuum(self.lake, name)
                self._vacuumed_at = self.now()


def maintain(lake: Lake, names: Sequence[str]) -> list[dict[str, object]]:
    """Compacts and vacuums the tables; tells of each how many files it had, has now, and how many old ones were removed."""
    done: list[dict[str, object]] = []
    for name in names:
        before = files(lake, name)
        lake.compact(name)
        lake.keep_properties(name)
        removed = len(lake.spark.sql(f"VACUUM {lake.identifier(name)} DRY RUN").collect())
        vacuum(lake, name)
        done.append({"table": name, "files_before": before, "files": files(lake, name), "old_files_removed": removed})
    return done


def files(lake: Lake, table: str) -> int:
    """How many files the table's present version has."""
    return int(lake.delta(table).detail().select("numFiles").collect()[0][0])


def vacuum(lake: Lake, table: str) -> None:
    """Removes the files that no version within the retention uses."""
    lake.keep_properties(table)
    lake.spark.sql(f"VACUUM {lake.identifier(table)}").collect()
