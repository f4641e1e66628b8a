"""A schema that its registry does not have is waited for as long as the configuration says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.laws.conftest import QUICK, SPARK_FOLDER, MakeSettings, one_of
from tests.support.lakes import OpenSpark, engine_for
from watersmeet.audit.status import status
from watersmeet.engine import Engine
from watersmeet.errors import UnknownWriterSchemaError
from watersmeet.lake import tables
from watersmeet.lake.schemas import unknown_schemas
from watersmeet.run import create_missing
from watersmeet.running import writer_schemas
from watersmeet.running.owner import Owner
from watersmeet.running.writer_schemas import WriterSchemas
from watersmeet.settings import Settings

kind = one_of([QUICK, SPARK_FOLDER])

BEGIN_MS = 1_767_225_600_000
MINUTE_MS = 60_000
SCHEMA = {
    "type": "record",
    "name": "tracked",
    "fields": [{"name": "k", "type": "string"}, {"name": "ts", "type": "long"}],
}
LACKING = UnknownWriterSchemaError("http://registry", 7)


@pytest.fixture
def settings(new_settings: MakeSettings, tmp_path: Path) -> Settings:
    file = tmp_path / "tracked.avsc"
    file.write_text(json.dumps(SCHEMA))
    registry = {"url": "http://127.0.0.1:1", "unknown_after": "10m"}
    return new_settings(
        sources__tracking={
            "topic": "tracking",
            "key": "k",
            "event_time": "ts",
            "format": "avro",
            "schema": str(file),
            "registry": registry,
        }
    )


@pytest.fixture
def engine(open_spark: OpenSpark, settings: Settings) -> Engine:
    engine = engine_for(open_spark, settings)
    create_missing(engine)
    return engine


def test_a_schema_is_waited_for_through_restarts_and_given_up_once_the_time_is_over(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked_at(minutes: float, schemas: WriterSchemas) -> bool:
        """Whether the schema is given up where it is missed so long after the first time."""
        now_ms = BEGIN_MS + round(minutes * MINUTE_MS)
        monkeypatch.setattr(writer_schemas, "now_ms", lambda: now_ms)
        return schemas.note_failure(LACKING)

    def started() -> WriterSchemas:
        schemas = WriterSchemas(Owner(engine), settings, "tracking")
        schemas.recover()
        return schemas

    first = started()
    assert [asked_at(minutes, first) for minutes in (0, 0.02, 5)] == [False, False, False]
    assert unknown_schemas(engine.reader, "tracking") == {7: BEGIN_MS}
    assert engine.reader.select(tables.WRITER_SCHEMAS, ["writer_schema"]).num_rows == 1
    [warning] = [
        each["what"]
        for each in status(engine.reader, settings)["warnings"]
        if "does not have schema" in each["what"]
    ]
    assert warning.startswith("since 2026-01-01 00:00:00")
    second = started()
    assert [asked_at(minutes, second) for minutes in (9, 9.99)] == [False, False]
    assert asked_at(10, second)
    assert started().given_up == {7}
