"""Says which tables the owner of a layer writes to and keeps small; fences earlier owners out."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from watersmeet.core.inputs import InputId, of_source
from watersmeet.lake import tables
from watersmeet.lake.commits import (
    APPLICATION,
    DELETING,
    EVOLVING,
    RESETTING,
    application_of,
    bronze_application,
)
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings


def fence_all(owner: Owner, written: Sequence[tuple[str, str]]) -> None:
    """Fence every earlier owner out of tables, each for an application (`written_by`)."""
    by_table: dict[str, set[str]] = {}
    for table, application in written:
        by_table.setdefault(table, set()).add(application)

    def fence(table: str) -> None:
        """Fence all applications of a table."""
        owner.fence(table, by_table[table], is_shared=table == tables.EPOCHS)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fence, by_table))


def written_by(layer: str, settings: Settings) -> list[tuple[str, str]]:
    """Return the tables to which a layer's owner commits under its token, with their applications.

    Delta counts transaction versions by application: what the owner decides has one, and what it
    deletes another. An epoch belongs to all layers.
    """
    epochs = (tables.EPOCHS, EVOLVING)
    if layer == "bronze":
        read = [(tables.bronze(i.source), application_of(settings, i)) for i in settings.inputs]
        deleted = [
            (name, DELETING) for name in (*map(tables.bronze, settings.sources), tables.ERASED)
        ]
        beginnings = (tables.GENERATIONS, tables.RESETS, tables.SILVER)
        decided = [(table, bronze_application()) for table in beginnings]
        return [*read, *decided, *deleted, epochs]
    if layer == "silver":
        deleted = [(name, DELETING) for name in (tables.SILVER, tables.FORGOTTEN)]
        decided = [(tables.SILVER, APPLICATION), (tables.SILVER, RESETTING)]
        decided += [(tables.RESETS, RESETTING)]
        return [*decided, *deleted, epochs]
    return [(tables.PUBLISHED, APPLICATION), (tables.DEAD_LETTERS, APPLICATION), epochs]


def kept_by(layer: str, settings: Settings, input_id: InputId | None = None) -> list[str]:
    """Return the tables that the owner of a layer keeps small; with an input, its share.

    Each table has one keeper.
    """
    if layer == "silver":
        return [tables.SILVER, tables.RESETS, tables.QUALITY]
    if layer == "gold":
        return [tables.PUBLISHED, tables.DEAD_LETTERS]
    first = settings.inputs[0]
    shared = [
        tables.CONFIGURATION,
        tables.LEASES,
        tables.FLOORS,
    ]
    shared += [tables.GENERATIONS, tables.ERASED]
    shared += [tables.WRITER_SCHEMAS] if settings.registries else []
    if input_id is None:
        return [*map(tables.bronze, settings.sources), *shared]
    is_keeper = of_source(settings.inputs, input_id.source)[0] == input_id
    return [
        *([tables.bronze(input_id.source)] if is_keeper else []),
        *(shared if input_id == first else []),
    ]
