"""The order in which silver's finished records are published, by columns of silver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from pipelines.core.sequence import PLAIN, SequenceTail, SortKey
from pipelines.core.types import DUE, TENANT, has_due, has_tenants, own_columns
from pipelines.lake import tables
from pipelines.lake.table_reader import Condition, TableReader

_BEFORE_ALL: Final = SortKey(PLAIN, b"", -1, b"")


class Order(NamedTuple):
    """An order of publication: columns of silver, and the conditions on its records.

    The first column is a time.
    """

    columns: Sequence[str]
    conditions: Sequence[Condition] = ()

    @property
    def column(self) -> str:
        """The first column, which is a time."""
        return self.columns[0]

    def since(self, tails: Mapping[int, SequenceTail], partitions: Iterable[int]) -> dict[int, int]:
        """Return, by partition, the time (ms) of the tail, or -1 without one.

        Partitions whose tail sorts after all records of this order are left out.
        """
        places = {p: tails[p].place if p in tails else _BEFORE_ALL for p in partitions}
        if self.column == "closed_at":
            return {p: place.closed_at for p, place in places.items()}
        return {p: place.time for p, place in places.items() if place.closed_at == PLAIN}


BY_EVENT_TIME: Final = Order(["event_time", "merge_key"])
"""Order where merge records are closed by a timeout alone."""

BY_CLOSING: Final = Order(["closed_at", "due", "merge_key"])
"""Order where there is a window by gap."""

BY_TENANT: Final = Order(["closed_at", "tenant", "due", "merge_key"])
"""Order where there are tenants."""


def due_columns(reader: TableReader) -> list[str]:
    """Return the columns of `DUE` that silver has: both, or none."""
    return own_columns(reader.columns(tables.SILVER), DUE)


def place_columns(reader: TableReader) -> list[str]:
    """Return the columns of silver that give a merge record its place in the order of publication.

    They are what `sequence.place_of` takes.
    """
    silver = reader.columns(tables.SILVER)
    return ["event_time", "merge_key", *own_columns(silver, DUE), *own_columns(silver, TENANT)]


def orders(reader: TableReader) -> list[Order]:
    """Return the orders in which silver is published, one after the other.

    What a timeout closed before there was a window comes first.
    """
    silver = reader.columns(tables.SILVER)
    if has_tenants(silver):
        return [BY_TENANT]
    if not has_due(silver):
        return [BY_EVENT_TIME]
    return [BY_EVENT_TIME._replace(conditions=[("closed_at", "is null", None)]), BY_CLOSING]
