"""Schemas that values were written with, as the lake keeps them beside bronze.

So silver never asks a registry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from watersmeet.core.avro_schema import EXCESS, UNKNOWN, AvroSchema
from watersmeet.core.columns import row_values
from watersmeet.errors import WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

FULL: Final = -1
"""Id of the row that says that a source takes no further schemas."""


class KeptSchemas(dict[int, str]):
    """The schemas that the lake keeps of a source, by id; `UNKNOWN` for what the registry lacked.

    Looking up any other id raises WatersmeetError, or returns `EXCESS` where the source takes no
    further schemas: then it has `FULL`, too.
    """

    def __init__(self, reader: TableReader, source: str) -> None:
        rows = [*_rows(reader, source)]
        texts = {schema_id: text for schema_id, text, _ in rows if text}
        super().__init__({schema_id: UNKNOWN for schema_id, _, _ in rows} | texts)
        lacked = {schema_id for schema_id, text, _ in rows if text == UNKNOWN} - texts.keys()
        self.given_up = lacked - {FULL}
        """The ids that the source no longer waits for."""
        self.waiting = {
            schema_id: seen_at
            for schema_id, _, seen_at in rows
            if schema_id not in texts.keys() | lacked
        }
        """The ids that it waits for, each with the time since when (epoch ms)."""

    def __missing__(self, schema_id: int) -> str:
        if FULL in self:
            return EXCESS
        raise WatersmeetError(
            f"{tables.WRITER_SCHEMAS} lacks schema {schema_id}, which records of bronze were "
            "written with: the table is damaged",
            fix="restore an earlier version of it",
        )


def _rows(reader: TableReader, source: str) -> Iterator[tuple[int, str | None, int]]:
    # Without a text, the registry lacks the schema, and it is waited for. With `UNKNOWN`, it no
    # longer is. A row with a text holds in any case.
    if reader.exists(tables.WRITER_SCHEMAS):
        columns = ("writer_schema", "schema", "seen_at")
        rows = reader.select(tables.WRITER_SCHEMAS, columns, [[("source", "=", source)]])
        yield from row_values(rows, *columns)


def avro_schemas(reader: TableReader, settings: Settings) -> dict[str, AvroSchema]:
    """Return the schema of each source whose values are Avro.

    It knows how everything that is in bronze by now was written.
    """
    schemas = {
        name: source.avro_schema for name, source in settings.sources.items() if source.avro_schema
    }
    return {
        name: replace(schema, writers=KeptSchemas(reader, name))
        if name in settings.registries
        else schema
        for name, schema in schemas.items()
    }
