"""Repartition of Avro, with a real registry: the bytes stay as they are, and the key is found with
each writer's own schema."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.support.avro import (
    BAD_BYTES,
    CASE_SCHEMA,
    as_avro,
    as_text,
    content,
    framed,
    other_writers,
)
from tests.support.cases import SOURCES, expected_messages, keyed
from tests.support.commands import here
from tests.support.registry import TestRegistry
from tests.support.repartitioning import Raws, as_cases, confluence, copied, raws
from tests.support.rivers import River, until
from tests.support.topics import published
from watersmeet.errors import WatersmeetError
from watersmeet.lake import tables
from watersmeet.monitoring.observability import Reporter
from watersmeet.repartition.command import repartition

pytestmark = [pytest.mark.long, pytest.mark.promise("N4"), pytest.mark.fault("hostile")]

COUNTS = ((2, 1), 3)
PARTITIONS = 4


def register(registry: TestRegistry) -> dict[int, dict[str, Any]]:
    """The schemas of `tracking`'s writers, by their ids."""
    return {
        registry.register(f"writer-{n}", schema): schema for n, schema in enumerate(other_writers())
    }


def avro_confluence(
    kafka: str, folder: Path, name: str, registry: TestRegistry, **overrides: Any
) -> River:
    """`tracking` comes from two topics, of many writers; `orders` is bare Avro, from one."""
    river = confluence(
        kafka, folder / "river", name, COUNTS, PARTITIONS, max_offsets_per_batch=60, **overrides
    )
    (river.folder / "case.avsc").write_bytes(as_text(CASE_SCHEMA))
    for source in SOURCES:
        river.config["sources"][source] |= {"format": "avro", "schema": "case.avsc"}
    river.config["sources"]["tracking"]["registry"] = {"url": registry.url}
    river.write()
    return river


def inputs_of(river: River, schemas: Mapping[int, dict[str, Any]]) -> dict[str, Raws]:
    """The topics; each record of `tracking` is written with another schema than the one before."""
    found, ids = raws(river, COUNTS), cycle(schemas)

    def by_turns(value: bytes | None) -> bytes | None:
        schema_id = next(ids)
        written = as_avro(value, schemas[schema_id])
        return written if written is None or written in BAD_BYTES else framed(schema_id, written)

    for source, encode in (("tracking", by_turns), ("orders", as_avro)):
        for raw in found[source]:
            raw.encode = encode
    return found


def assert_written(river: River, inputs: Mapping[str, Raws]) -> None:
    for source, raw in inputs.items():
        assert copied(
            river.kafka, river.settings.inputs_by_name[source].topic, PARTITIONS
        ) == raw.expected(PARTITIONS)


@pytest.mark.nightly
def test_values_of_many_writers_are_written_as_they_came_and_merged_by_their_own_schemas(
    kafka: str, tmp_path: Path, registry: TestRegistry
) -> None:
    schemas = register(registry)
    river = avro_confluence(kafka, tmp_path, "repartition-avro", registry, quarantine_limit="100%")
    inputs = inputs_of(river, schemas)
    for raw in inputs.values():
        raw.flow(1, 0)
    for point, count in (
        ("publisher.produce", 2),
        ("publisher.commit", 1),
        ("publisher.committed", 2),
    ):
        process = river.run("--once", point=point, count=count, command="repartition")
        process.await_held()
        process.kill()
    here(river, "repartition", "--once")
    assert_written(river, inputs)
    for raw in inputs.values():
        raw.flow(2, 1000)
        raw.beat(5000)
    river.finish_repartition()
    here(river, "validate")
    river.finish()
    cases = as_cases(
        kafka,
        {source: river.settings.inputs_by_name[source].topic for source in SOURCES},
        inputs,
        PARTITIONS,
    )
    expected = content(expected_messages(cases))
    assert len(expected) > 20
    assert content(published(kafka, river.sink, PARTITIONS)) == expected
    assert river.broken_promises() == []
    kept = river.reader.select(tables.WRITER_SCHEMAS, ["source", "writer_schema"]).to_pylist()
    assert {(row["source"], row["writer_schema"]) for row in kept} == {
        ("tracking", schema_id) for schema_id in schemas
    }


@pytest.mark.nightly
def test_a_registry_that_is_away_is_waited_for(
    kafka: str, tmp_path: Path, registry: TestRegistry
) -> None:
    schemas = register(registry)
    river = avro_confluence(kafka, tmp_path, "repartition-avro-away", registry)
    inputs = inputs_of(river, schemas)
    for raw in inputs.values():
        raw.flow(1, 0)
    registry.kill()
    process = river.run("--once", command="repartition")
    until(
        lambda: f"the schema registry does not answer at {registry.address}" in river.run_log,
        "the reason why it waits",
    )
    registry.start()
    assert register(registry).keys() == schemas.keys()
    assert process.wait() == 0, process.said()
    assert_written(river, inputs)


@pytest.mark.nightly
def test_an_unknown_id_stops_it_after_a_while_and_nothing_is_lost(
    kafka: str, tmp_path: Path, registry: TestRegistry
) -> None:
    schemas = register(registry)
    river = avro_confluence(kafka, tmp_path, "repartition-avro-unknown", registry)
    inputs = inputs_of(river, schemas)
    for raw in inputs.values():
        raw.flow(1, 0)
    river.finish_repartition()
    later = {
        **CASE_SCHEMA,
        "fields": [{"name": "later", "type": "int", "default": 0}, *CASE_SCHEMA["fields"]],
    }
    unknown = max(schemas) + 1
    last = inputs["tracking"][0]
    last.encode = lambda value: framed(unknown, as_avro(value, later) or b"")
    last.send([(0, keyed("a", 5000))])
    with pytest.raises(
        WatersmeetError,
        match=rf"schema {unknown}, which .* does not have; .* \(tried again for 1 s\)",
    ):
        repartition(river.settings, Reporter(), threading.Event(), once=True, patience_s=1.0)
    registry.register("later", later)
    river.finish_repartition()
    assert_written(river, inputs)


@pytest.mark.promise("C62")
@pytest.mark.fault("outage")
def test_records_of_an_unknown_id_go_on_once_it_was_waited_for(
    kafka: str, tmp_path: Path, registry: TestRegistry
) -> None:
    """Several such ids; in the copy, bronze refuses them."""
    schemas = register(registry)
    river = avro_confluence(kafka, tmp_path, "repartition-avro-given-up", registry)
    river.config["sources"]["tracking"]["registry"]["unknown_after"] = "1s"
    river.write()
    inputs = inputs_of(river, schemas)
    for raw in inputs.values():
        raw.flow(1, 0)
    last, unknown = inputs["tracking"][0], max(schemas) + 1000
    for schema_id in (unknown, unknown + 1):
        last.encode = lambda _, schema_id=schema_id: framed(schema_id, b"anything")  # type: ignore[misc]
        last.send([(0, None)])
    repartition(river.settings, Reporter(), threading.Event(), once=True, patience_s=5.0)
    assert_written(river, inputs)
