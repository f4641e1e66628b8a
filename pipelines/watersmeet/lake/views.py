"""The views of a lake: selections of rows of its tables, under names of their own.

A reader answers them as it answers tables. In a catalog they are created as SQL views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from watersmeet.core.corrections import correction_schema
from watersmeet.core.merge import LATE_SCHEMA
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.repeated import DUPLICATE_SCHEMA
from watersmeet.core.silver import BATCH, IDLE, OUT, OUTCOMES, PASSED
from watersmeet.core.too_large import EXCESS
from watersmeet.core.types import schema_of
from watersmeet.lake import tables
from watersmeet.settings import Settings

if TYPE_CHECKING:
    from watersmeet.lake.table_reader import Where


@dataclass(frozen=True)
class Part:
    """The rows of one table that a view has: those that meet all conditions.

    `constants`: columns of the view that the table lacks, each with one text in all rows.
    """

    table: str
    where: Sequence[tuple[str, str, Any]] = ()
    constants: Mapping[str, str] = field(default_factory=dict)

    def resolved(self, where: Where) -> Where | None:
        """Return conditions on the view as conditions on the table; None where no row of this part
        meets them.
        """
        terms = []
        for term in where or [()]:
            on_constants = [each for each in term if each[0] in self.constants]
            if all(_holds(self.constants[column], *rest) for column, *rest in on_constants):
                terms.append([*self.where, *(each for each in term if each not in on_constants)])
        return terms or None


def _holds(text: str, operator: str, value: Any) -> bool:
    if operator in ("is null", "is not null"):
        return operator == "is not null"
    values = value if operator.endswith("in") else [value]
    return (text in values) != (operator in ("!=", "not in"))


@dataclass(frozen=True)
class View:
    """A view: its columns, and the rows that it has."""

    name: str
    schema: pa.Schema
    parts: Sequence[Part]

    @property
    def is_of_one_table(self) -> bool:
        """True where the view has rows of one table, with that table's own columns."""
        return len(self.parts) == 1 and not self.parts[0].constants


_PASSED: Final = pa.schema(
    [
        *schema_of("status string"),
        *PASSED,
        *(each for each in OUT if each.name not in PASSED.names),
    ]
)

NO_VIEWS: Mapping[str, View] = MappingProxyType({})


def views(settings: Settings) -> dict[str, View]:
    """Return every view of a lake by name, as this configuration needs it."""
    return {view.name: view for view in _views(settings)}


def _views(settings: Settings) -> Iterator[View]:
    silver = tables.silver_columns(settings)
    without = {*OUTCOMES.names, "position"}
    merge_records = pa.schema([each for each in silver if each.name not in without])
    types = {name: source.value_type for name, source in settings.sources.items()}
    corrections = correction_schema(types, settings.inputs, has_ids=settings.has_ids)
    of_silver = {
        tables.MERGED: (merge_records, ["open", "timed_out"]),
        tables.WAITING: (pa.schema([*PASSED, RECORD_BYTES]), ["waiting"]),
        tables.LATE: (pa.schema([*LATE_SCHEMA, RECORD_BYTES]), ["late"]),
        tables.DUPLICATES: (DUPLICATE_SCHEMA, ["duplicate"]),
        tables.EXCESS: (EXCESS, ["excess"]),
        tables.PASSED: (_PASSED, ["passed", "out"]),
        tables.CORRECTIONS: (corrections, ["correction"]),
        tables.IDLE_HEARTBEATS: (IDLE, ["idle"]),
        tables.PROGRESS: (BATCH, ["batch"]),
    }
    for name, (schema, statuses) in of_silver.items():
        operator, value = ("in", statuses) if len(statuses) > 1 else ("=", statuses[0])
        yield View(name, schema, [Part(tables.SILVER, [("status", operator, value)])])
    refused = [("reason", "is not null", None)]
    yield View(
        tables.QUARANTINE,
        pa.schema([*schema_of("source string"), *tables.QUARANTINED]),
        [Part(tables.bronze(name), refused, {"source": name}) for name in settings.sources],
    )
