"""Topics of Avro from end to end, as their users run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from pipelines.engine.spark import SparkEngine
from pipelines.lake.location import Lake
from pipelines.live import live
from tests.support.avro import CASE_SCHEMA, as_avro, as_text
from tests.support.cases import SOURCES, expected_messages
from tests.support.commands import without_java
from tests.support.rivers import EMBEDDED, FOLDER, River
from tests.support.topics import Published, published


def avro_river(kafka: str, folder: Path, name: str, lake: str = EMBEDDED) -> River:
    """Both topics are bare Avro."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.avsc").write_bytes(as_text(CASE_SCHEMA))
    of_sources: dict[str, Any] = {f"sources__{source}__{name}": value for source in SOURCES for name, value in _AVRO.items()}
    river = River.make(kafka, folder, name, lake=lake, **of_sources)
    river.encode = as_avro
    return river


_AVRO = {"format": "avro", "schema": "case.avsc"}


def content(messages: list[Published]) -> list[tuple[Any, ...]]:
    """Messages with what tells the values of `cases` apart: by source the number `n` of each."""
    found = []
    for message in messages:
        value = json.loads(message.value or b"")
        numbers = [[part.get("n") for part in value[source]] for source in SOURCES]
        found.append((message._replace(value=None), value["key"], value["event_time"], value["last_event_time"], numbers))
    return found


def assert_whole(river: River) -> None:
    """The sink holds what the model says, and the lake keeps every promise."""
    assert content(published(river.kafka, river.sink, river.partitions)) == content(expected_messages(river.cases))
    assert river.broken_promises() == []


def test_every_command_works_on_avro_without_java(kafka: str, tmp_path: Path) -> None:
    river = avro_river(kafka, tmp_path, "avro-embedded")
    river.flow()
    without_java(river, "validate")
    without_java(river, "run", "--once")
    river.flow()
    river.kill_at("silver.merge")
    without_java(river, "run", "--once")
    assert_whole(river)
    [message, *_] = published(kafka, river.sink, river.partitions)
    parts = json.loads(message.value or b"", parse_float=str)
    [part, *_] = parts["tracking"] + parts["orders"]
    assert [*part] == ["ts", "k", "type", "n", "price", "tags"]
    assert (part["ts"][10], part["ts"][-1], part["price"]) == ("T", "Z", f"{part['n'] / 4:.2f}")
    for command in ("status", "explain a", "maintain", "verify --full", "report --out page.html", "rebuild --into again"):
        assert without_java(river, *command.split(" ")), f"{command} answers something"
    without_java(river, "verify", "--against", "again")


@pytest.mark.parametrize("predicate", ["tracking[0].value.price >= 0 AND tracking[0].value.tags['a'] = 0.5"])
def test_spark_reads_avro_in_its_workers_and_sql_reads_its_fields(
    spark: SparkSession, kafka: str, tmp_path: Path, predicate: str
) -> None:
    river = avro_river(kafka, tmp_path, "avro-spark", FOLDER)
    river.config["publish"]["valid"] = predicate
    river.write()
    river.flow()
    river.flow(SOURCES[0])
    river.finish()
    with_tracking = [m for m in expected_messages(river.cases) if json.loads(m.value or b"")["tracking"]]
    found = content(published(kafka, river.sink, river.partitions))
    assert [row[1:] for row in found] == [row[1:] for row in content(with_tracking)] != []
    assert river.broken_promises() == []
    waiting = live(SparkEngine(spark, Lake(river.settings)), river.settings).where("status = 'waiting'")
    values = waiting.selectExpr("inline(tracking)").selectExpr("value.ts = event_time", "value.tags['a']").distinct().collect()
    assert [tuple(row) for row in values] == [(True, 0.5)]
