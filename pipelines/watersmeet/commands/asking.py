"""The reader with which commands ask a lake: Spark is imported and started only where it
is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from watersmeet.settings import Settings

if TYPE_CHECKING:
    from watersmeet.lake.table_reader import TableReader


def reader_of(settings: Settings) -> TableReader:
    """Return the reader that answers questions about the lake.

    Raises WatersmeetError where its object store cannot be read, and where an earlier version made
    the lake.
    """
    from watersmeet.lake.identity import check_layout
    from watersmeet.lake.location import Lake
    from watersmeet.lake.store import check_readable

    check_readable(Lake(settings))
    reader = unchecked(settings)
    check_layout(reader, Lake(settings))
    return reader


def begun_reader_of(settings: Settings) -> TableReader:
    """Return the reader of a lake that has begun, for a command that has nothing to do in another.

    Raises ConfigurationError where none has begun, before anything is created there.
    """
    from watersmeet.lake.identity import check_begun
    from watersmeet.lake.location import Lake

    reader = reader_of(settings)
    check_begun(reader, Lake(settings))
    return reader


def unchecked(settings: Settings) -> TableReader:
    """Return the reader that answers questions about any lake.

    Spark is started by the first question, and only for a lake that needs it.
    """
    from watersmeet.lake.choice import reader
    from watersmeet.lake.location import Lake

    def spark() -> Any:
        """Return the Spark session of the configuration, imported and started only where it is
        needed.
        """
        from watersmeet.engine.session import spark_session

        return spark_session(settings.spark)

    return reader(Lake(settings), spark)
