"""Schemas that values were written with, as the lake keeps them beside bronze.

So silver never asks a registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from watersmeet.core.avro_schema import UNKNOWN, AvroSchema
from watersmeet.errors import WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings


class _Kept(dict[int, str]):
    def __missing__(self, schema_id: int) -> str:
        raise WatersmeetError(
            f"{tables.WRITER_SCHEMAS} lacks schema {schema_id}, which records of bronze were "
            "written with: the table is damaged",
            fix="restore an earlier version of it",
        )


def known_schemas(reader: TableReader, source: str) -> Mapping[int, str]:
    """Return, by id, the schemas that the lake keeps of a source.

    One that the registry did not have is `UNKNOWN`. Looking up any other id raises WatersmeetError.
    """
    return _Kept(
        {schema_id: text or UNKNOWN for schema_id, (text, _) in _rows(reader, source).items()}
    )


def unknown_schemas(reader: TableReader, source: str) -> dict[int, int]:
    """Return the ids of schemas that a source waits for, each with the time since when (epoch ms).

    The registry lacks them so far.
    """
    return {
        schema_id: since
        for schema_id, (text, since) in _rows(reader, source).items()
        if text is None
    }


def given_up_schemas(reader: TableReader, source: str) -> set[int]:
    """Return the ids of schemas that a source no longer waits for.

    The registry did not have them.
    """
    return {schema_id for schema_id, (text, _) in _rows(reader, source).items() if text == UNKNOWN}


def _rows(reader: TableReader, source: str) -> dict[int, tuple[str | None, int]]:
    """Return, by id, a schema and when it was seen (epoch ms).

    A schema that the registry lacks is None while it is waited for, then `UNKNOWN`.
    """
    if not reader.exists(tables.WRITER_SCHEMAS):
        return {}
    entries = reader.select(
        tables.WRITER_SCHEMAS, ["writer_schema", "schema", "seen_at"], [[("source", "=", source)]]
    )
    columns = (
        entries["writer_schema"].to_pylist(),
        entries["schema"].to_pylist(),
        entries["seen_at"].to_pylist(),
    )
    rows = sorted(
        zip(*columns, strict=True), key=lambda row: (bool(row[1]), row[2], row[1] is not None)
    )
    return {schema_id: (text, at) for schema_id, text, at in rows}


def avro_schemas(reader: TableReader, settings: Settings) -> dict[str, AvroSchema]:
    """Return the schema of each source whose values are Avro.

    It knows how everything that is in bronze by now was written.
    """
    schemas = {
        name: source.avro_schema for name, source in settings.sources.items() if source.avro_schema
    }
    return {
        name: replace(schema, writers=known_schemas(reader, name))
        if name in settings.registries
        else schema
        for name, schema in schemas.items()
    }
