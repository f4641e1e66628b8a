"""The schemas that values were written with, as the lake keeps them beside bronze: silver never asks a registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipelines.core.avro_schema import UNKNOWN, AvroSchema
from pipelines.core.columns import times_ms
from pipelines.errors import WatersmeetError
from pipelines.lake import tables
from pipelines.lake.questions import Questions
from pipelines.settings import Settings


class _Kept(dict[int, str]):
    def __missing__(self, schema_id: int) -> str:
        raise WatersmeetError(
            f"{tables.WRITER_SCHEMAS} lacks schema {schema_id}, which records of bronze were written with: the table is damaged; "
            "restore an earlier version of it"
        )


def known_schemas(questions: Questions, source: str) -> Mapping[int, str]:
    """By id, the schemas that the lake keeps of a source, `UNKNOWN` for one that the registry did not have.

    To ask for another one raises WatersmeetError.
    """
    of_source = [[("source", "=", source)]]
    found = questions.select(tables.WRITER_SCHEMAS, ["writer_schema", "schema"], of_source)
    rows = list(zip(found["writer_schema"].to_pylist(), found["schema"].to_pylist(), strict=True))
    return _Kept({schema_id: text or UNKNOWN for schema_id, text in sorted(rows, key=lambda row: row[1] is not None)})


def unknown_schemas(questions: Questions, source: str) -> dict[int, int]:
    """The ids of schemas that records of a source name and the registry did not have so far, and since when (epoch ms)."""
    if not questions.exists(tables.WRITER_SCHEMAS):
        return {}
    found = questions.select(tables.WRITER_SCHEMAS, ["writer_schema", "schema", "seen_at"], [[("source", "=", source)]])
    rows = list(zip(found["writer_schema"].to_pylist(), found["schema"].to_pylist(), times_ms(found["seen_at"]), strict=True))
    known = {schema_id for schema_id, text, _ in rows if text is not None}
    return {schema_id: int(at) for schema_id, _, at in sorted(rows, key=lambda row: -row[2]) if schema_id not in known}


def avro_schemas(questions: Questions, settings: Settings) -> dict[str, AvroSchema]:
    """By source whose values are Avro their schema, which knows how all that is in bronze by now was written."""
    found = {name: source.avro_schema for name, source in settings.sources.items() if source.avro_schema}
    return {
        name: replace(schema, writers=known_schemas(questions, name)) if settings.sources[name].registry else schema
        for name, schema in found.items()
    }
