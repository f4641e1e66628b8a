"""A schema that its registry does not have is waited for as long as the configuration says."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.laws.conftest import QUICK, SPARK_FOLDER, MakeLake, MakeSettings, one_of
from tests.laws.test_bronze import read
from tests.support.avro import CASE_SCHEMA, as_avro, as_text, framed
from tests.support.cases import SOURCES, Case
from tests.support.hostile_registry import answering, schema, send
from tests.support.lakes import OpenSpark, engine_for
from tests.support.topics import create_topics, produce
from watersmeet.ask.status import status
from watersmeet.core.avro_schema import EXCESS, UNKNOWN
from watersmeet.core.recent import Recent
from watersmeet.engine import Engine
from watersmeet.errors import OtherWriterSchemaError, UnknownWriterSchemaError
from watersmeet.kafka import registry as asking
from watersmeet.lake import tables
from watersmeet.lake.schemas import KeptSchemas
from watersmeet.run import create_missing
from watersmeet.running import writer_schemas
from watersmeet.running.owner import Owner
from watersmeet.running.writer_schemas import ReadAgainError, WriterSchemas
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
    assert not first.is_full
    assert not any(
        "takes no" in said or "refused" in said for said in warnings_of(engine, settings)
    )
    beside = started()  # another topic of the source
    with pytest.raises(ReadAgainError) as failure:
        first.keep([9, 8, 30, 1])
    assert first.note_failure(failure.value), "it is read again at once"
    with pytest.raises(ReadAgainError):
        beside.keep([1])
    for again in (first, beside, started()):
        again.recover()
        assert again.is_full
        assert again.texts.keys() == {9, 20, 8}
        again.keep([9, 30, 1])
    kept = KeptSchemas(engine.reader, "tracking")
    assert [kept[each] for each in (9, 30)] == [f'"{"x" * 9}"', EXCESS]
    [said] = warnings_of(engine, settings)
    assert "records that were written with another one are refused" in said


class Changing(dict[int, str]):
    """A registry that has these schemas."""

    has: ClassVar[dict[int, str]] = {}

    def __init__(self, _: object, given_up: Collection[int] = ()) -> None:
        super().__init__(dict.fromkeys(given_up, UNKNOWN) | self.has)


def test_a_schema_that_was_given_up_and_is_there_has_its_records_read_again(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has read them by it or not: what bronze accepts, silver can read."""
    monkeypatch.setattr(writer_schemas, "Registry", Changing)
    monkeypatch.setattr(Changing, "has", {})
    schemas = WriterSchemas(Owner(engine), settings, "tracking")
    schemas._note({7: UNKNOWN})
    schemas.recover()
    schemas.keep([7])
    assert schemas.texts == {7: UNKNOWN}
    monkeypatch.setattr(Changing, "has", {7: "{}"})
    with pytest.raises(ReadAgainError) as failure:
        schemas.keep([7])
    assert schemas.note_failure(failure.value)
    schemas.recover()
    schemas.keep([7])
    assert schemas.texts == {7: "{}"} == {7: KeptSchemas(engine.reader, "tracking")[7]}


@pytest.mark.promise("C11")
def test_records_are_read_by_the_schema_that_the_lake_has_and_another_one_ends_the_run(
    new_lake: MakeLake, kafka: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry may lose it, be set up again, or be another one."""
    (file := tmp_path / "case.avsc").write_bytes(as_text(CASE_SCHEMA))
    fields = CASE_SCHEMA["fields"]
    other = {**CASE_SCHEMA, "fields": fields[::-1]}
    spelled = {"fields": [dict(reversed(field.items())) for field in fields], **CASE_SCHEMA}
    has: list[Any] = [CASE_SCHEMA]

    def answer(to: BaseHTTPRequestHandler) -> None:
        if to.path.endswith("/types"):
            send(to, b'["AVRO"]')
        elif has[0] is None:
            send(to, b'{"error_code": 40403}', 404)
        else:
            send(to, schema(has[0]))

    def value(n: int, written_with: Any) -> bytes:
        record = as_avro(json.dumps({"ts": n, "k": "a", "n": n}).encode(), written_with)
        return framed(1, record or b"")

    topics = {source: f"laws-kept-schema-{kind}-{source}" for source in SOURCES}
    create_topics(kafka, *topics.values(), partitions=1)
    with answering(answer, threading.Event()) as url:
        lake = new_lake(
            {0: Case({source: [] for source in SOURCES}, 100)},
            bootstrap=kafka,
            sources__orders__topic=topics["orders"],
            sources__tracking__topic=topics["tracking"],
            sources__tracking__format="avro",
            sources__tracking__schema=str(file),
            sources__tracking__registry={"url": url, "unknown_after": "1ms"},
        )

        def read_anew() -> None:
            monkeypatch.setattr(asking, "_helpers", {})
            monkeypatch.setattr(asking, "_texts", Recent(2**20))
            read(lake.owner(), lake, "tracking")

        for n, has[0] in enumerate([CASE_SCHEMA, None, spelled]):
            produce(kafka, topics["tracking"], [(0, value(n, CASE_SCHEMA))])
            read_anew()
        has[0] = other
        produce(kafka, topics["tracking"], [(0, value(3, CASE_SCHEMA))])
        with pytest.raises(OtherWriterSchemaError, match="has another schema 1 than records"):
            read_anew()
        has[0] = CASE_SCHEMA
        read_anew()
    rows = lake.reader.select(tables.bronze("tracking"), ["offset", "merge_key", "reason"])
    assert rows.sort_by("offset").to_pylist() == [
        {"offset": n, "merge_key": "a", "reason": None} for n in range(4)
    ]


def test_ids_that_no_registry_has_take_room_too(
    engine: Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_schemas, "MAX_SCHEMAS", 2)
    schemas = WriterSchemas(Owner(engine), settings, "tracking")
    named = [schemas.note_failure(UnknownWriterSchemaError("http://r", n)) for n in (7, 8, 9)]
    assert named == [False, False, True]
    schemas.recover()
    assert (schemas.is_full, schemas.texts) == (True, {})
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
