"""Topics of Avro from end to end, as their users run them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from pyspark.sql import SparkSession

from tests.support.avro import (
    BAD_BYTES,
    CASE_SCHEMA,
    as_avro,
    as_text,
    content,
    encoded,
    framed,
    other_writers,
)
from tests.support.cases import SOURCES, expected_messages
from tests.support.commands import here, without_java
from tests.support.hostile_registry import HostileGate
from tests.support.registry import TestRegistry
from tests.support.rivers import DEADLINE_S, EMBEDDED, FOLDER, River, until
from tests.support.timing import within
from tests.support.topics import published
from watersmeet.ask.status import status
from watersmeet.core.message_schema import message_schema
from watersmeet.engine.spark import SparkEngine
from watersmeet.errors import WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.location import Lake
from watersmeet.live import live
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run
from watersmeet.running import writer_schemas

pytestmark = [pytest.mark.long, pytest.mark.promise("C11")]


def avro_river(kafka: str, folder: Path, name: str, lake: str = EMBEDDED) -> River:
    """Both topics are bare Avro."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.avsc").write_bytes(as_text(CASE_SCHEMA))
    of_sources: dict[str, Any] = {
        f"sources__{source}__{name}": value for source in SOURCES for name, value in _AVRO.items()
    }
    river = River.make(kafka, folder, name, lake=lake, **of_sources)
    river.encode = as_avro
    return river


_AVRO = {"format": "avro", "schema": "case.avsc"}


def assert_whole(river: River) -> None:
    """The sink holds what the model says, and the lake keeps every promise."""
    assert content(published(river.kafka, river.sink, river.partitions)) == content(
        expected_messages(river.cases)
    )
    assert river.broken_promises() == []


@pytest.mark.nightly
def test_every_command_works_on_avro_without_java(kafka: str, tmp_path: Path) -> None:
    river = avro_river(kafka, tmp_path, "avro-embedded")
    river.flow()
    without_java(river, "validate")
    without_java(river, "run", "--once")
    river.flow()
    river.kill_at("silver.merge")
    without_java(river, "run", "--once")
    assert_whole(river)
    settings, messages = river.settings, published(kafka, river.sink, river.partitions)
    schema = message_schema(
        {name: source.value_schema for name, source in settings.sources.items()}
    )
    described = jsonschema_rs.validator_for(schema, validate_formats=True)
    assert all(described.is_valid(json.loads(message.value or b"")) for message in messages)
    message = messages[0]
    parts = json.loads(message.value or b"", parse_float=str)
    [part, *_] = parts["tracking"] + parts["orders"]
    assert [*part] == ["ts", "k", "type", "n", "price", "tags"]
    assert (part["ts"][10], part["ts"][-1], part["price"]) == ("T", "Z", f"{part['n'] / 4:.2f}")
    for command in (
        "status",
        "explain a",
        "maintain",
        "verify --full",
        "report --out page.html",
        "rebuild --into again",
    ):
        assert without_java(river, *command.split(" ")), f"{command} answers something"
    without_java(river, "verify", "--against", "again")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "predicate", ["tracking[1].value.price >= 0 AND tracking[1].value.tags['a'] = 0.5"]
)
def test_spark_reads_avro_in_its_workers_and_sql_reads_its_fields(
    spark: SparkSession,
    kafka: str,
    tmp_path: Path,
    predicate: str,
    on_spark: Callable[[River], River],
) -> None:
    river = on_spark(avro_river(kafka, tmp_path, "avro-spark", FOLDER))
    river.config["publish"]["valid"] = predicate
    river.write()
    river.flow()
    river.flow(SOURCES[0])
    river.finish()
    with_tracking = [
        m for m in expected_messages(river.cases) if json.loads(m.value or b"")["tracking"]
    ]
    found = content(published(kafka, river.sink, river.partitions))
    assert [row[1:] for row in found] == [row[1:] for row in content(with_tracking)] != []
    assert river.broken_promises() == []
    waiting = live(SparkEngine(spark, Lake(river.settings)), river.settings).where(
        "status = 'waiting'"
    )
    values = (
        waiting.selectExpr("inline(tracking)")
        .selectExpr("value.ts = event_time", "value.tags['a']")
        .distinct()
        .collect()
    )
    assert [tuple(row) for row in values] == [(True, 0.5)]


# -- with a registry


def register(registry: TestRegistry) -> dict[int, dict[str, Any]]:
    """The writers' schemas by their ids, one of them with a reference."""
    found = {}
    for number, schema in enumerate(other_writers()):
        if number == 1:
            registry.register("type", {"type": "enum", "name": "Type", "symbols": ["heartbeat"]})
            fields = [
                {**f, "type": ["null", "Type"]} if f["name"] == "type" else f
                for f in schema["fields"]
            ]
            schema_id = registry.register(
                f"writer-{number}", {**schema, "fields": fields}, [("Type", "type", 1)]
            )
        else:
            schema_id = registry.register(f"writer-{number}", schema)
        found[schema_id] = schema
    return found


def registered_river(
    kafka: str, folder: Path, name: str, registry: TestRegistry, lake: str = EMBEDDED
) -> River:
    """Every record of `tracking` is written with another schema than the one before; `orders` is
    bare."""
    river = avro_river(kafka, folder, name, lake)
    river.config["sources"]["tracking"]["registry"] = {"url": registry.url}
    river.write()
    return river


def send(river: River, schemas: dict[int, dict[str, Any]], *sources: str) -> None:
    """The next stretch of event time, of both sources or of one; `tracking` in turns by all
    writers."""
    turns = 0

    def encode(value: bytes | None) -> bytes | None:
        nonlocal turns
        turns += 1
        schema_id = [*schemas][turns % len(schemas)]
        content = as_avro(value, schemas[schema_id])
        return content if content is None or content in BAD_BYTES else framed(schema_id, content)

    for source in sources or SOURCES:
        river.encode = encode if source == "tracking" else as_avro
        river.flow(source)
        river.chunks -= 1
    river.chunks += 1


def test_many_writers_are_read_and_nothing_after_bronze_needs_the_registry(
    kafka: str, tmp_path: Path, registry: TestRegistry
) -> None:
    schemas = register(registry)
    river = registered_river(kafka, tmp_path, "avro-registry", registry)
    here(river, "validate")
    send(river, schemas)
    river.kill_at("bronze.append")
    river.finish()
    send(river, schemas)
    river.encode = lambda value: value
    river.send("tracking", 0, framed(min(schemas), b"garbage"))
    river.cases[0].values["tracking"][-1] = None  # as good as any other record that is refused
    river.finish("bronze")
    registry.kill()
    assert "sources.tracking.registry" in here(river, "validate", "--json", exit_code=2)
    river.finish("silver")
    river.finish("gold")
    assert_whole(river)
    kept = river.reader.select(tables.WRITER_SCHEMAS, ["source", "writer_schema"]).to_pylist()
    assert {(row["source"], row["writer_schema"]) for row in kept} == {
        ("tracking", schema_id) for schema_id in schemas
    }
    here(river, "rebuild", "--into", "again")
    here(river, "verify", "--against", "again")
    here(river, "explain", "a")


@pytest.mark.nightly
@pytest.mark.promise("K60")
def test_records_of_schemas_beyond_those_that_a_source_takes_are_refused_for_good(
    kafka: str, tmp_path: Path, registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_schemas, "MAX_SCHEMAS", 2)
    schemas = register(registry)
    river = registered_river(kafka, tmp_path, "avro-many", registry)
    for limit in (7, 500):
        river.config["kafka"]["max_offsets_per_batch"] = limit
        river.write()
        send(river, schemas)
        here(river, "run", "--once")
    table = tables.bronze("tracking")
    rows = river.reader.select(table, ["writer_schema", "reason", "detail"]).to_pylist()
    kept = river.reader.select(tables.WRITER_SCHEMAS, ["writer_schema", "schema"]).to_pylist()
    taken = {row["writer_schema"] for row in kept if row["schema"]}
    assert len(taken) == 2 < len(schemas)
    assert {row["writer_schema"] for row in rows} >= schemas.keys()
    for row in rows:
        if row["writer_schema"] in schemas:
            is_excess = "takes no further one" in (row["detail"] or "")
            assert is_excess == (row["writer_schema"] not in taken), row
    assert "another one are refused" in here(river, "status", "--json")
    here(river, "verify", "--full")
    here(river, "rebuild", "--into", "again")
    here(river, "verify", "--against", "again")
    here(river, "redrive", "--reason", "undecodable")


@pytest.mark.nightly
def test_sparks_workers_ask_the_registry_themselves(
    kafka: str,
    tmp_path: Path,
    registry: TestRegistry,
    on_spark: Callable[[River], River],
    caplog: pytest.LogCaptureFixture,
) -> None:
    schemas = register(registry)
    river = on_spark(registered_river(kafka, tmp_path, "avro-registry-spark", registry, FOLDER))
    send(river, schemas)
    registry.kill()
    caplog.set_level(logging.INFO, "watersmeet")
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(Run(river.settings, LAYERS, Reporter()).once)
        reason = f"the schema registry does not answer at {registry.address}"
        until(lambda: reason in caplog.text or run.done(), "the reason why it waits")
        registry.start()
        register(registry)
        run.result(DEADLINE_S)
    assert reason in caplog.text
    registry.kill()
    assert_whole(river)


@pytest.mark.nightly
def test_a_registry_that_is_away_is_waited_for(
    kafka: str, tmp_path: Path, registry: TestRegistry
) -> None:
    schemas = register(registry)
    river = registered_river(kafka, tmp_path, "avro-away", registry)
    send(river, schemas)
    registry.kill()
    run = river.run("--once")
    until(
        lambda: f"the schema registry does not answer at {registry.address}" in river.run_log,
        "the reason why it waits",
    )
    registry.start()
    assert register(registry).keys() == schemas.keys()
    assert run.wait() == 0, run.said()
    assert_whole(river)


@pytest.mark.fault("outage")
@pytest.mark.nightly
def test_an_unknown_id_stops_the_run_after_a_while_and_nothing_is_lost(
    kafka: str, tmp_path: Path, registry: TestRegistry
) -> None:
    schemas = register(registry)
    unknown = max(schemas) + 1
    river = registered_river(kafka, tmp_path, "avro-unknown", registry)
    send(river, schemas)
    river.finish()
    later = {"name": "later", "type": "int"}
    schema = {**CASE_SCHEMA, "fields": [later, *CASE_SCHEMA["fields"]]}
    river.encode = lambda _: framed(unknown, encoded(schema, {**_RECORD, "later": 7}))
    river.send("tracking", 0, b'{"ts":5000,"k":"a","n":40}')
    with pytest.raises(
        WatersmeetError,
        match=rf"schema {unknown}, which .* does not have; .* \(tried again for 1 s\)",
    ):
        Run(river.settings, LAYERS, Reporter(), patience_s=1.0).once()
    registry.register("later", schema)
    river.finish()
    assert_whole(river)


LAKES = pytest.mark.parametrize(
    "lake", [EMBEDDED, pytest.param(FOLDER, id="spark", marks=pytest.mark.nightly)]
)


@pytest.mark.promise("C62")
@pytest.mark.fault("outage")
@LAKES
def test_an_unknown_id_is_named_at_once_and_its_records_are_refused_after_a_time(
    kafka: str,
    tmp_path: Path,
    registry: TestRegistry,
    lake: str,
    on_spark: Callable[[River], River],
) -> None:
    """And it is named no longer than it is waited for, nor waited for by a later run."""
    schemas = register(registry)
    unknown = max(schemas) + 1000
    river = on_spark(registered_river(kafka, tmp_path, f"avro-given-up-{lake}", registry, lake))
    send(river, schemas)
    river.finish()
    for schema_id in (unknown, unknown + 1):
        river.encode = partial(_framed_record, schema_id)
        river.send("tracking", 0, b'{"ts":5000,"k":"a","n":40}')
    settings = river.settings
    with pytest.raises(WatersmeetError, match=f"schema {unknown}"):
        Run(settings, LAYERS, Reporter(), patience_s=1.0).once()
    [warning] = missing_schemas(river)
    assert f"does not have schema {unknown}, which a record was written with" in warning
    tracking = settings.sources["tracking"]
    assert tracking.registry is not None
    impatient = tracking.changed(registry=tracking.registry.changed(unknown_after_ms=1))
    settings = settings.changed(sources={**settings.sources, "tracking": impatient})
    Run(settings, LAYERS, Reporter(), patience_s=30.0).once()
    assert missing_schemas(river) == []
    river.send("tracking", 0, b'{"ts":5000,"k":"a","n":40}')
    impatient = tracking.changed(registry=tracking.registry.changed(unknown_after_ms=10**9))
    settings = settings.changed(sources={**settings.sources, "tracking": impatient})
    Run(settings, LAYERS, Reporter(), patience_s=1.0).once()
    refused = river.reader.select(tables.QUARANTINE, ["reason", "detail"]).to_pylist()
    said = "the registry did not have the schema that it was written with (written with schema {})"
    assert [
        [row["detail"] for row in refused].count(said.format(unknown + n)) for n in range(2)
    ] == [1, 2]
    assert river.broken_promises() == []


def missing_schemas(river: River) -> list[str]:
    """What `status` says of schemas that the registry does not have."""
    warnings = status(river.reader, river.settings).get("warnings", [])
    return [each["what"] for each in warnings if "does not have schema" in each["what"]]


@pytest.mark.nightly
@pytest.mark.promise("K60")
@pytest.mark.fault("outage")
@LAKES
def test_a_stop_is_heard_while_a_registry_trickles(
    kafka: str, tmp_path: Path, registry: TestRegistry, lake: str
) -> None:
    schemas = register(registry)
    river = registered_river(kafka, tmp_path, f"avro-trickle-{lake}", registry, lake)
    gate = HostileGate(registry, {})
    gate.mood = "trickles"
    with gate.serving() as url:
        river.config["sources"]["tracking"]["registry"]["url"] = url
        river.write()
        send(river, schemas)
        for deadline in ("no whole answer within 6 s", None):
            run = river.run()
            asked = gate.asked
            until(lambda asked=asked: gate.asked > asked, "a question")  # type: ignore[misc]
            # The first batch of a cold JVM, which is not cut in two, takes seconds.
            if lake == FOLDER:
                until(lambda: "bronze_orders" in river.run_log, "the other source")
            if deadline is not None:
                until(lambda said=deadline: said in river.run_log, "the reason why it waits")  # type: ignore[misc]
            with within(10):
                assert run.stop() == 0, run.said()
        gate.mood = None
        river.finish()
    assert_whole(river)


def _framed_record(schema_id: int, _: bytes | None) -> bytes:
    return framed(schema_id, encoded(CASE_SCHEMA, _RECORD))


_RECORD = {"ts": 5_000, "k": "a", "type": None, "n": 40, "price": Decimal(0), "tags": {}}
