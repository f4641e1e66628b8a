"""Tables that somebody has deleted, restored to an earlier version while the log is complete, or
replaced by an earlier copy.

Each takes one table back, and not those that were written by what it had: what bronze lacks then
would never be merged, and what silver lacks is in messages. In place of a table that is gone a
start would make an empty one. A run is refused until the table is taken forward again, or is back.
"""

from __future__ import annotations

from typing import Final

from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.commits import WRITES, Commit
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader, row_count, walk
from watersmeet.settings import Settings

_FIX: Final = (
    "bring it back from a copy of the lake, or begin a new lake elsewhere (with `kafka.start: "
    "sink` it takes up the sink)"
)

_REPLACEABLE: Final = (tables.QUALITY, tables.LEASES, tables.WRITER_SCHEMAS)
"""The tables that a start may make anew, since something else says what they had: checks of the
past decide nothing, other tables have the owners' tokens, and a registry its schemas.
"""


def check_not_restored(reader: TableReader, lake: Lake) -> None:
    """Raise ConfigurationError where a table was restored to before something that a run, or a
    command, has written to it.
    """
    for table in lake.layout:
        if table != tables.QUALITY and reader.exists(table):
            check_table(reader, lake, table)


def deleted_tables(reader: TableReader, settings: Settings) -> list[str]:
    """Return the tables that are gone from a lake with rows, and whose rows nothing else has.

    A start makes all of them before it writes a row.
    """
    lasting = [table for table in tables.layout(settings) if table not in _REPLACEABLE]
    deleted = [table for table in lasting if not reader.exists(table)]
    if not deleted:
        return []
    existing = [table for table in lasting if tables.has_records(table) and table not in deleted]
    return deleted if any(row_count(reader, table) for table in existing) else []


def check_not_deleted(reader: TableReader, settings: Settings) -> None:
    """Raise ConfigurationError where a table is gone from a lake with rows."""
    if deleted := deleted_tables(reader, settings):
        raise ConfigurationError(
            f"the table {deleted[0]} does not exist, although others of this lake have rows",
            where="lake",
            fix=_FIX,
        )


def check_not_behind(reader: TableReader) -> None:
    """Raise ConfigurationError where silver has batches of an epoch or a generation that the lake
    does not know: the table that says what these are was replaced by an earlier copy.
    """
    if not reader.exists(tables.SILVER):
        return
    named = {"epoch": tables.EPOCHS, "generation": tables.GENERATIONS}
    last = {column: ("max", column) for column in named}
    [batches] = reader.summary(tables.PROGRESS, [], last).to_pylist()
    for column, table in named.items():
        used = batches[column] or 0
        known = reader.summary(table, [], {column: last[column]})[column][0].as_py() or 0
        if known < used:
            raise ConfigurationError(
                f"the table {table} ends at {column} {known}, although silver has batches of "
                f"{column} {used}: an earlier copy of it was put in its place",
                where="lake",
                fix=_FIX,
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
        # Nobody else writes to the others, to some of them without a token.
        is_own = not tables.has_records(table) and version.operation in WRITES
        if is_own if commit is None else not commit.is_fence:
            return (restore, version.number) if is_undone and restore is not None else None
        if version.restored_to is not None and not is_undone:
            restore = version.number
            until = version.restored_to
    return None
