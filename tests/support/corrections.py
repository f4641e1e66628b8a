"""Corrections of cases: what their model makes of them, and what the tables of a lake have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.core.correction_model import Correction, PartitionCorrections
from pipelines.lake import tables
from pipelines.lake.table_reader import TableReader
from tests.support.cases import SOURCES, Case
from tests.support.lakes import of_generation
from tests.support.tenants import TenantModels, Window

Row = tuple[Any, ...]


class CorrectionModels(TenantModels):
    """The model of the corrections of each partition, beside that of the merge."""

    def __init__(
        self,
        cases: Mapping[int, Case],
        rules: Window | tuple[int, None, None],
        within_ms: int | None,
        begins: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        super().__init__(cases, rules, begins)  # type: ignore[arg-type]
        self.corrections = {
            p: PartitionCorrections(model, within_ms) for p, model in self.models.items()
        }

    def arrive(self, share: float) -> None:
        super().arrive(share)
        for corrections in self.corrections.values():
            corrections.settle()

    def begin_epoch(self, rules: Window, within_ms: int | None = None) -> None:
        super().begin_epoch(rules)
        for corrections in self.corrections.values():
            corrections.within_ms = within_ms

    def rows(self) -> list[Row]:
        """In the form of `corrections_of`."""
        return sorted(
            self._row(p, each)
            for p, found in self.corrections.items()
            for each in found.corrections
        )

    def _row(self, p: int, each: Correction) -> Row:
        place = each.place
        parts = tuple(
            tuple(
                (part.offset, part.event_time, (self.cases[p].value(s, part) or b"").decode())
                for part in each.parts[s]
            )
            for s in SOURCES
        )
        return (
            *(p, place.settled_at, each.tenant, place.u, place.source.decode(), place.offset),
            *(each.key, each.event_time, each.is_late_born, each.version, each.due, each.closed_at),
            *(each.first_event_time, each.last_event_time, each.late.position, parts),
        )

    def late_duplicates(self) -> list[Row]:
        """In the form of `late_duplicates_of`."""
        return sorted(
            (p, each.record.input.source, each.record.offset, each.of_offset)
            for p, found in self.corrections.items()
            for each in found.duplicates
        )


_COLUMNS = [
    *("partition", "settled_at", "tenant", "u", "source", "offset", "merge_key", "event_time"),
    *("is_late_born", "version", "due", "closed_at", "first_event_time", "last_event_time"),
    "position",
]


def corrections_of(
    reader: TableReader, sources: Sequence[str] = SOURCES, generation: int | None = None
) -> list[Row]:
    """The corrections of a lake, each with its parts by source as (offset, event time, value)."""
    rows = reader.select(
        tables.CORRECTIONS, [*_COLUMNS, *sources], of_generation(generation)
    ).to_pylist()
    return sorted(
        (*(row[name] for name in _COLUMNS), tuple(_parts(row[source]) for source in sources))
        for row in rows
    )


def _parts(parts: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
    return tuple(
        (part["offset"], round(part["event_time"].timestamp() * 1000), part["value"])
        for part in parts
    )


def late_duplicates_of(reader: TableReader) -> list[Row]:
    """Late records that repeat a part: partition, source, offset, and the offset of the part."""
    columns = ["partition", "source", "offset", "of_offset"]
    rows = reader.select(tables.DUPLICATES, columns, [[("is_late", "=", True)]])
    return sorted(tuple(row.values()) for row in rows.to_pylist())
