"""The schemas that values were written with, as the lake keeps them beside bronze: silver never asks a registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipelines.core.avro_schema import AvroSchema
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
    """By id, the schemas that the lake keeps of a source; to ask for another one raises WatersmeetError."""
    of_source = [[("source", "=", source)]]
    found = questions.select(tables.WRITER_SCHEMAS, ["writer_schema", "schema"], of_source)
    return _Kept(zip(found["writer_schema"].to_pylist(), found["schema"].to_pylist(), strict=True))


def avro_schemas(questions: Questions, settings: Settings) -> dict[str, AvroSchema]:
    """By source whose values are Avro their schema, which knows how all that is in bronze by now was written."""
    found = {name: source.avro_schema for name, source in settings.sources.items() if source.avro_schema}
    return {
        name: replace(schema, writers=known_schemas(questions, name)) if settings.sources[name].registry else schema
        for name, schema in found.items()
    }
