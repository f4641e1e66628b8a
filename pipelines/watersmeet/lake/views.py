"""The views of a lake, each declared once: selections of rows of its tables, under names of their
own, and queries of these (`DerivedView`), in the SQL that DataFusion and Spark share.

A reader answers the former as it answers tables, and every query brings along those that it names
(`TableReader.query`). In a catalog they are created as SQL views.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import orjson
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
        meets them. Constants are compared by `=` alone.
        """
        terms = []
        for term in where or [()]:
            on_constants = [each for each in term if each[0] in self.constants]
            if any(operator != "=" for _, operator, _ in on_constants):
                raise ValueError(f"{on_constants} compares a constant in another way than by `=`")
            if all(self.constants[column] == value for column, _, value in on_constants):
                terms.append([*self.where, *(each for each in term if each not in on_constants)])
        return terms or None


@dataclass(frozen=True)
class View:
    """A view: its columns, and the rows that it has."""

    name: str
    schema: pa.Schema
    parts: Sequence[Part]
    items: str | None = None
    """For a view of the journal: the list in `body` that has a row of the view in each element; ""
    where `body` itself is one. Columns are those of the element, else of `body`, else of the row.
    """

    @property
    def packed(self) -> tuple[list[pa.Field], list[pa.Field]]:
        """The columns of a view of the journal that are in `body`, and in the elements there."""
        of_items = [field for field in self.schema if self.items and field.name in _OF_ITEMS]
        of_row = {"generation", "decided_at", *(field.name for field in of_items)}
        return [field for field in self.schema if field.name not in of_row], of_items

    def unpacked(self, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
        """Return the rows of a view of the journal, from that table's rows."""
        unpacked = list[dict[str, Any]]()
        for row in rows:
            body = orjson.loads(row["body"])
            items = body[self.items] if self.items else [{}]
            unpacked += [{**row, **body, **item} for item in items]
        return tables.Table(self.name, self.schema).rows_of(unpacked)

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

_OF_ITEMS: Final = frozenset(
    ["source", "topic", "partition", "start_offset", "from_offset", "to_offset"]
)
_PLACE: Final = "source string, topic string, partition int"
_OF_JOURNAL: Final = {
    tables.GENERATIONS: (
        f"generation int, from_batch bigint, {_PLACE}, start_offset bigint, kind string, "
        "decided_at timestamp, reason string, epoch int, life string",
        ["begin"],
        "starts",
    ),
    tables.RESETS: (
        f"{_PLACE}, from_offset bigint, to_offset bigint, decided_at timestamp, reason string",
        ["begin", "skip"],
        "jumps",
    ),
    tables.EPOCHS: (
        "epoch int, from_batch bigint, configuration string, decided_at timestamp",
        ["rules"],
        "",
    ),
}
"""Of each view of the journal: its columns, the kinds of decisions, and the list of its rows."""


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
        tables.MERGED: merge_records,
        tables.WAITING: pa.schema([*PASSED, RECORD_BYTES]),
        tables.LATE: pa.schema([*LATE_SCHEMA, RECORD_BYTES]),
        tables.DUPLICATES: DUPLICATE_SCHEMA,
        tables.EXCESS: EXCESS,
        tables.PASSED: _PASSED,
        tables.CORRECTIONS: corrections,
        tables.IDLE_HEARTBEATS: IDLE,
        tables.PROGRESS: BATCH,
    }
    others = {tables.PASSED: "out", tables.IDLE_HEARTBEATS: "idle", tables.PROGRESS: "batch"}
    for name, schema in of_silver.items():
        statuses = [*tables.statuses_of(name), *([others[name]] if name in others else [])]
        operator, value = ("in", statuses) if len(statuses) > 1 else ("=", statuses[0])
        yield View(name, schema, [Part(tables.SILVER, [("status", operator, value)])])
    for name, (columns, kinds, items) in _OF_JOURNAL.items():
        part = Part(tables.JOURNAL, [("kind", "in", kinds)])
        yield View(name, schema_of(columns), [part], items)
    refused = [("reason", "is not null", None)]
    yield View(
        tables.QUARANTINE,
        pa.schema([*schema_of("source string"), *tables.QUARANTINED]),
        [Part(tables.bronze(name), refused, {"source": name}) for name in settings.sources],
    )


# -- views of views


class DerivedView(NamedTuple):
    """A view, the views that it reads, and its query with `{name}` for each of them."""

    name: str
    reads: Collection[str]
    sql: str

    def of(self, names: Mapping[str, str]) -> str:
        """Return the query, with what it calls the views that it reads."""
        return self.sql.format_map(names)


def with_reads(views: Mapping[str, DerivedView], names: Iterable[str]) -> list[str]:
    """Return names of tables and views, each behind what it reads."""

    def ordered() -> Iterator[str]:
        for name in names:
            if name in views:
                yield from views[name].reads
            yield name

    return [*dict.fromkeys(ordered())]


def derived_views(settings: Settings) -> dict[str, DerivedView]:
    """Return every such view by name, as this configuration needs it.

    There is one, of finished, valid merge records with what has corrected them. It has partition,
    tenant, merge_key, first_event_time and last_event_time (of all parts), version (0: as it
    closed), and the parts by source. What a jump has closed before it was out does not count.
    """
    kept = "coalesce(invalid_reason, '') <> 'reset'"
    record = "generation, `partition`, tenant, merge_key, event_time"
    sources = ", ".join(f"`{source}`" for source in settings.sources)
    corrected = DerivedView(
        tables.CORRECTED,
        [tables.MERGED, tables.CORRECTIONS],
        f"""
        WITH versions AS (
            SELECT {record}, NULL AS late_born, 0 AS version, valid,
                event_time AS first_event_time, last_event_time, {sources}
            FROM {{merged}} WHERE status = 'timed_out' AND {kept}
            UNION ALL
            SELECT {record}, CASE WHEN is_late_born THEN id END AS late_born, version, valid,
                first_event_time, last_event_time, {sources}
            FROM {{corrections}} WHERE version > 0 AND {kept}
        ), ranked AS (
            SELECT *, row_number() OVER (
                PARTITION BY {record}, late_born ORDER BY version DESC) AS place
            FROM versions
        )
        SELECT `partition`, tenant, merge_key, first_event_time, last_event_time, version, {sources}
        FROM ranked WHERE place = 1 AND valid""",
    )
    return {corrected.name: corrected}
