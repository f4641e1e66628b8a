"""Schemas that values were written with, as the lake keeps them beside bronze.

So silver never asks a registry.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from watersmeet.core.avro_schema import EXCESS, UNKNOWN, AvroSchema
from watersmeet.errors import WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.table_reader import Condition, TableReader
from watersmeet.settings import Settings

FULL: Final = -1
"""Id of the row that says that a source takes no further schemas."""


class _Kept(dict[int, str]):
    def __missing__(self, schema_id: int) -> str:
        if FULL in self:
            return EXCESS
        raise WatersmeetError(
            f"{tables.WRITER_SCHEMAS} lacks schema {schema_id}, which records of bronze were "
            "written with: the table is damaged",
            fix="restore an earlier version of it",
        )


def known_schemas(
    reader: TableReader, source: str, ids: Collection[int] | None = None
) -> Mapping[int, str]:
    """Return, by id, the schemas that the lake keeps of a source, or those of some ids.

    One that the registry did not have is `UNKNOWN`. Looking up any other id raises WatersmeetError,
    or returns `EXCESS` where the source takes no further schemas.
    """
    asked: list[Condition] = [] if ids is None else [("writer_schema", "in", sorted(ids))]
    rows = _rows(reader, source, ["writer_schema", "schema"], *asked)
    texts = {row["writer_schema"]: row["schema"] for row in rows if row["schema"]}
    return _Kept({row["writer_schema"]: UNKNOWN for row in rows} | texts)


def schema_ids(reader: TableReader, source: str, *conditions: Condition) -> set[int]:
    """Return the ids of the schemas that the lake has of a source, or has waited for; and `FULL`
    where it takes no further ones. Their rows meet all conditions.
    """
    return {row["writer_schema"] for row in _rows(reader, source, ["writer_schema"], *conditions)}


def unknown_schemas(reader: TableReader, source: str) -> dict[int, int]:
    """Return the ids of schemas that a source waits for, each with the time since when (epoch ms).

    The registry lacks them so far.
    """
    waiting = _rows(reader, source, ["writer_schema", "seen_at"], ("schema", "is null", None))
    over = schema_ids(reader, source, ("schema", "is not null", None)) if waiting else set[int]()
    return {
        row["writer_schema"]: row["seen_at"] for row in waiting if row["writer_schema"] not in over
    }


def given_up_schemas(reader: TableReader, source: str) -> set[int]:
    """Return the ids of schemas that a source no longer waits for.

    The registry did not have them.
    """
    known = schema_ids(reader, source, ("schema", "!=", UNKNOWN))
    return schema_ids(reader, source, ("schema", "=", UNKNOWN)) - known - {FULL}


def _rows(
    reader: TableReader, source: str, columns: Sequence[str], *conditions: Condition
) -> list[dict[str, Any]]:
    """Return rows of `writer_schemas`.

    Without a text, the registry lacks the schema, and it is waited for. With `UNKNOWN`, it no
    longer is. A later row with a text holds in any case.
    """
    if not reader.exists(tables.WRITER_SCHEMAS):
        return []
    where: list[Condition] = [("source", "=", source), *conditions]
    rows: list[dict[str, Any]] = reader.select(tables.WRITER_SCHEMAS, columns, [where]).to_pylist()
    return rows


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
