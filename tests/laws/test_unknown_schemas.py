"""A schema that its registry does not have is waited for as long as the configuration says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.laws.conftest import QUICK, SPARK_FOLDER, MakeSettings, one_of
from tests.support.lakes import OpenSpark, engine_for
from watersmeet.ask.status import status
from watersmeet.core.avro_schema import EXCESS, UNKNOWN
from watersmeet.engine import Engine
from watersmeet.errors import UnknownWriterSchemaError
from watersmeet.lake import tables
from watersmeet.lake.schemas import KeptSchemas
from watersmeet.run import create_missing
from watersmeet.running import writer_schemas
from watersmeet.running.owner import Owner
from watersmeet.running.writer_schemas import NoRoomError, WriterSchemas
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
    assert KeptSchemas(engine.reader, "tracking").waiting == {7: BEGIN_MS}
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


class Rich(dict[int, str]):
    """A registry that has every schema."""

    def __init__(self, *_: object) -> None:
        super().__init__()

    def __missing__(self, schema_id: int) -> str:
        return f'"{"x" * schema_id}"'


@pytest.mark.parametrize("bound", ["MAX_SCHEMAS", "MAX_SCHEMAS_BYTES"])
def test_a_source_takes_the_first_schemas_for_good_and_status_says_that_it_takes_no_more(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(writer_schemas, "Registry", Rich)
    monkeypatch.setattr(writer_schemas, bound, {"MAX_SCHEMAS": 3, "MAX_SCHEMAS_BYTES": 44}[bound])

    def started() -> WriterSchemas:
        schemas = WriterSchemas(Owner(engine), settings, "tracking")
        schemas.recover()
        return schemas

    first = started()
    first.keep([9])
    first.keep([20, 9])
    assert first.allowed is None
    assert not any(
        "takes no" in said or "refused" in said for said in warnings_of(engine, settings)
    )
    beside = started()  # another topic of the source
    with pytest.raises(NoRoomError) as failure:
        first.keep([9, 8, 30, 1])
    assert first.note_failure(failure.value), "it is read again at once"
    with pytest.raises(NoRoomError):
        beside.keep([1])
    for again in (first, beside, started()):
        again.recover()
        assert again.allowed == frozenset([9, 20, 8])
        again.keep([9, 30, 1])
    kept = KeptSchemas(engine.reader, "tracking")
    assert [kept[each] for each in (9, 30)] == [f'"{"x" * 9}"', EXCESS]
    [said] = warnings_of(engine, settings)
    assert "records that were written with another one are refused" in said


def test_ids_that_no_registry_has_take_room_too(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_schemas, "MAX_SCHEMAS", 2)
    schemas = WriterSchemas(Owner(engine), settings, "tracking")
    named = [schemas.note_failure(UnknownWriterSchemaError("http://r", n)) for n in (7, 8, 9)]
    assert named == [False, False, True]
    schemas.recover()
    assert schemas.allowed == frozenset()
    assert KeptSchemas(engine.reader, "tracking").waiting.keys() == {7, 8}


def warnings_of(engine: Engine, settings: Settings) -> list[str]:
    warnings = status(engine.reader, settings).get("warnings", [])
    return [each["what"] for each in warnings if each["where"] == "sources.tracking.registry"]


def test_a_given_up_schema_stays_so_whatever_the_clocks_of_hosts_say(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemas = WriterSchemas(Owner(engine), settings, "tracking")
    for now_ms, text in ((BEGIN_MS, None), (BEGIN_MS - MINUTE_MS, UNKNOWN)):
        monkeypatch.setattr(writer_schemas, "now_ms", lambda now=now_ms: now)
        schemas._note({7: text})
    assert KeptSchemas(engine.reader, "tracking").waiting == {}
    assert KeptSchemas(engine.reader, "tracking").given_up == {7}
