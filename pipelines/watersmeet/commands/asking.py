"""The reader with which commands ask a lake: Spark is started only where it is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from watersmeet.settings import Settings

if TYPE_CHECKING:
    from watersmeet.lake.table_reader import TableReader


def reader_of(settings: Settings, *, changes: bool = False) -> TableReader:
    """Return the reader that answers questions about the lake.

    `changes`: for a command that changes the lake. It moves aside what a power cut has left at the
    end of the tables' logs; without it, such a lake is refused.

    Raises WatersmeetError where its store cannot be read, and where an earlier version made it.
    """
    from watersmeet.lake.identity import check_layout
    from watersmeet.lake.location import Lake
    from watersmeet.lake.store import check_readable
    from watersmeet.lake.torn import check_whole, move_aside

    lake = Lake(settings)
    check_readable(lake)
    if changes:
        move_aside(lake)
    else:
        check_whole(lake)
    reader = unchecked(settings)
    check_layout(reader, lake)
    return reader


def begun_reader_of(settings: Settings, *, changes: bool = False) -> TableReader:
    """Return the reader of a lake that has begun, and has all of its tables.

    Raises ConfigurationError for another.
    """
    from watersmeet.lake.identity import check_begun
    from watersmeet.lake.location import Lake
    from watersmeet.lake.restored import check_not_deleted

    reader = reader_of(settings, changes=changes)
    check_not_deleted(reader, settings)
    check_begun(reader, Lake(settings))
    return reader


def unchecked(settings: Settings) -> TableReader:
    """Return the reader of any lake; only a question that needs Spark starts it."""
    from watersmeet.engine.choice import lake_reader

    return lake_reader(settings)
