"""Tables that somebody has deleted, or restored to an earlier version while the log is complete.

A RESTORE takes one table back, and not those that were written by what it had: what bronze lacks
then would never be merged, and what silver lacks is in messages. In place of a table that is gone a
start would make an empty one. A run is refused until the table is taken forward again, or is back.
"""

from __future__ import annotations

from typing import Final

from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader, row_count, walk
from watersmeet.settings import Settings

_LASTING: Final = (
    tables.GENERATIONS,
    tables.EPOCHS,
    tables.PUBLISHED,
)
"""The tables, beside bronze and silver, whose rows nothing else has."""


def check_not_restored(reader: TableReader, lake: Lake) -> None:
    """Raise ConfigurationError where a table was restored to before a commit of the layers.

    All tables that the layers write are checked.
    """
    noted = [tables.PUBLISHED, tables.GENERATIONS, tables.RESETS]
    for table in (*filter(tables.has_records, lake.layout), *noted, tables.DEAD_LETTERS):
        if reader.exists(table):
            check_table(reader, lake, table)


def deleted_tables(reader: TableReader, settings: Settings) -> list[str]:
    """Return the tables that are gone from a lake with rows, and whose rows nothing else has.

    A start makes all of them before it writes a row.
    """
    with_rows = [*map(tables.bronze, settings.sources), tables.SILVER]
    deleted = [table for table in (*with_rows, *_LASTING) if not reader.exists(table)]
    if not deleted:
        return []
    existing = [table for table in with_rows if table not in deleted]
    return deleted if any(row_count(reader, table) for table in existing) else []


def check_not_deleted(reader: TableReader, settings: Settings) -> None:
    """Raise ConfigurationError where a table is gone from a lake with rows."""
    if deleted := deleted_tables(reader, settings):
        raise ConfigurationError(
            f"the table {deleted[0]} does not exist, although others of this lake have rows",
            where="lake",
            fix=(
                "bring it back from a copy of the lake, or begin a new lake elsewhere (with "
                "`kafka.start: sink` it takes up the sink)"
            ),
        )


def check_table(reader: TableReader, lake: Lake, table: str) -> None:
    """Raise ConfigurationError where this table was restored to before a commit of the layers."""
    undone = _undone(reader, table)
    if undone is not None:
        restore, version = undone
        address = lake.address(table)
        name = address if lake.owning_lake(table).is_catalog else f"delta.`{address}`"
        raise ConfigurationError(
            f"{table} was taken back by somebody's RESTORE (its version {restore}), and what "
            f"was written to it until its version {version} is gone: take it forward again "
            f"with RESTORE TABLE {name} TO VERSION AS OF {version}",
            where="lake",
            fix=(
                "to go back on purpose, use `watersmeet reset`, or begin a new lake elsewhere "
                "(with `kafka.start: sink` it takes up the sink)"
            ),
        )


def _undone(reader: TableReader, table: str) -> tuple[int, int] | None:
    """Return the versions of a restore and of the last owner's commit that it has undone.

    None where there is no such restore.
    """
    restore: int | None = None
    until: int | None = None
    for version in walk(reader, table):
        is_undone = until is not None and version.number > until
        commit = Commit.parse(version.metadata)
        if commit is not None and not commit.is_fence:
            return (restore, version.number) if is_undone and restore is not None else None
        if version.restored_to is not None and not is_undone:
            restore = version.number
            until = version.restored_to
    return None
