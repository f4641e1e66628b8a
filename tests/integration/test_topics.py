"""A source of several topics from one end to the other: speeds that differ, silence, kills, a lost
lake, and every command."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.avro import CASE_SCHEMA, as_avro, as_text
from tests.support.cases import SOURCES, expected_messages, keyed
from tests.support.commands import every_command_does_its_work, here
from tests.support.rivers import FOLDER, Losses, River, until
from tests.support.topics import add_partitions, consume, published
from watersmeet.engine.choice import open_engine
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.history import read_history
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.table_reader import row_count

pytestmark = pytest.mark.long


@pytest.fixture
def river(kafka: str, tmp_path: Path, request: pytest.FixtureRequest) -> River:
    """Of `tracking`, which has two topics, and `orders`, which has one. (The names sort other than
    they were made.)"""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[-40:]
    inputs = f"tracking/{name}.web", f"tracking/{name}.app", "orders"
    return River.make(kafka, tmp_path, name, inputs=inputs)


def test_two_topics_of_a_source_are_merged_through_kills_silence_and_the_loss_of_the_lake(
    river: River,
) -> None:
    web, app, orders = river.inputs
    river.config["publish"] |= {
        "late_topic": f"{river.sink}-late",
        "quarantine_topic": f"{river.sink}-quarantine",
    }
    river.config["merge"]["idle_after"] = "700ms"
    river.write()
    river.flow()
    for point in ("bronze.done", "silver.done"):
        river.kill_at(point, "--once")
    river.forget_checkpoints()
    river.finish()
    assert river.losses() == Losses()

    for _ in range(3):  # one topic is faster
        river.flow(web, records=30)
    river.flow(app)
    river.flow(orders)
    river.finish()
    assert river.losses() == Losses()

    run = river.run()  # the other falls silent, and is spoken for
    until(
        lambda: (
            river.topic(app)
            in river.reader.select(tables.IDLE_HEARTBEATS, ["topic"])["topic"].to_pylist()
        ),
        "a decision for the silent topic",
    )
    assert run.stop() == 0, run.said()
    river.flow(app)  # and speaks again
    river.kill_at("gold.note", "--once")
    river.forget_checkpoints()
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []

    here(river, "rebuild", "--into", "rebuilt")
    here(river, "verify", "--against", "rebuilt")

    shutil.rmtree(str(river.settings.lake))
    river.config["kafka"]["start"] = "sink"
    river.write()
    river.flow()
    river.finish()
    river.flow()
    river.finish()
    assert published(river.kafka, river.sink, river.partitions) == expected_messages(
        river.cases, river.inputs
    )
    assert river.broken_promises() == []


def answer(river: River, *words: str) -> dict[str, Any]:
    return dict(json.loads(here(river, *words, "--json")))


@pytest.mark.nightly
def test_every_command_does_its_work(river: River) -> None:
    every_command_does_its_work(river)


def test_status_and_explain_name_each_topic(river: River) -> None:
    web, app, orders = river.inputs
    for source, time in ((web, 1000), (app, 1000), (orders, 1000), (app, 1001), (orders, 1100)):
        river.send(source, 0, keyed("a", time))
    river.finish()
    [first, _] = answer(river, "status")["partitions"]
    assert first["clock"] == 1000
    assert {
        name: (at["head"], at["lag"], at["state"]) for name, at in first["sources"].items()
    } == {
        web: (1000, 0, "active"),
        app: (1001, 1, "held"),
        orders: (1100, 1, "held"),
    }
    found = answer(river, "explain", "a")
    [record] = found["records"]
    places = [
        (part["source"], part["topic"], part["offset"], part["rule"]) for part in record["parts"]
    ]
    assert places == [
        ("tracking", river.topic(app), 0, "opened"),
        ("tracking", river.topic(web), 0, "joined"),
        ("orders", river.topic("orders"), 0, "joined"),
    ]
    assert [(row["source"], row["topic"], row["offset"]) for row in found["waiting"]] == [
        ("tracking", river.topic(app), 1),
        ("orders", river.topic("orders"), 1),
    ]


@pytest.mark.nightly
def test_refused_records_go_back_to_their_own_topics(river: River) -> None:
    web, app, _ = river.inputs
    sent = {web: 2, app: 1, "orders": 0}
    for name, count in sent.items():
        for _ in range(count):
            river.send(name, 1, b"{")
    river.finish("bronze")
    for _ in range(2):
        found = answer(river, "redrive", "--reason", "undecodable", "--apply")
        assert {row["topic"]: row["after"] for row in found["records"]} == {
            river.topic(name): n for name, n in sent.items()
        }
    for name, count in sent.items():
        again = [
            m.value()
            for m in consume(river.kafka, river.topic(name), 2)
            if "watersmeet.redriven" in dict(m.headers() or [])
        ]
        assert again == [b"{"] * count, "once"


@pytest.mark.nightly
def test_a_key_is_forgotten_in_every_topic(river: River) -> None:
    for name in river.inputs:
        river.send(name, 0, keyed("alice-1234", 500))
        river.send(name, 1, b'{"k":"alice-1234"}')
    river.flow()
    river.flow()
    river.finish()
    found = answer(river, "forget", "alice-1234", "--apply")
    counts = {row["table"]: (row["before"], row["after"]) for row in found["tables"]}
    assert counts["bronze_tracking"] == (4, 0)
    assert counts["bronze_orders"] == (2, 0)
    assert counts["quarantine"] == (3, 0)
    assert counts["silver"] == (1, 0)
    of_topics = {row["where"]: row["records"] for row in found["held"]}
    assert {
        name: of_topics[f"topic {river.topic(name)}"] for name in river.inputs
    } == dict.fromkeys(river.inputs, 2)
    river.flow()
    river.finish()
    assert river.broken_promises() == []


@pytest.mark.nightly
def test_a_jump_back_takes_every_topic_back(river: River) -> None:
    for _ in range(2):
        river.flow()
        river.finish()
    out = published(river.kafka, river.sink, river.partitions)
    found = answer(river, "reset", "--to", "earliest", "--yes")
    assert {jump["source"] for jump in found["jumps"]} == set(river.inputs)
    river.flow()
    river.finish()
    messages = published(river.kafka, river.sink, river.partitions)
    assert messages == expected_messages(river.cases, river.inputs)
    assert len(messages) > len(out)
    assert river.broken_promises() == []


@pytest.mark.nightly
def test_rows_that_are_old_enough_end_in_every_topic(river: River) -> None:
    web, app, orders = river.inputs
    river.config["keep"] = {
        "bronze": "1500ms",
        "silver": "2500ms",
        "late": "1500ms",
        "quarantine": "1s",
    }
    river.write()
    for _ in range(5):
        river.flow(web, app)
        river.flow(orders)
        river.finish()
    before = rows_by_input(river)
    here(river, "maintain")
    after = rows_by_input(river)
    assert all(0 < after[name] < before[name] for name in river.inputs), (before, after)
    river.flow()
    river.finish()
    assert published(river.kafka, river.sink, river.partitions) == expected_messages(
        river.cases, river.inputs
    )
    assert river.broken_promises() == []
    here(river, "rebuild", "--into", "again")
    assert here(river, "verify", "--against", "again")


def rows_by_input(river: River) -> dict[str, int]:
    """How many rows bronze has of each input."""
    return {
        name: row_count(river.reader, tables.bronze(input_id.source), of_topic(input_id))
        for name, input_id in river.settings.inputs_by_name.items()
    }


def test_reading_begins_where_each_topic_is_told_to(river: River) -> None:
    web, app, _ = river.inputs
    for _ in range(2):
        river.flow()
    river.config["kafka"]["start"] = {"offsets": {web: {0: 5}, app: {1: 3}}}
    river.write()
    river.finish()
    begin = read_history(river.reader, river.settings).generations.newest.begin
    assert {(tp.input.topic, tp.partition): at for tp, at in begin.items() if at} == {
        (river.topic(web), 0): 5,
        (river.topic(app), 1): 3,
    }
    lowest = river.reader.summary(
        tables.bronze("tracking"), ["topic", "partition"], {"n": ("min", "offset")}
    )
    assert {tuple(row.values()) for row in lowest.to_pylist()} == {
        (river.topic(web), 0, 5),
        (river.topic(web), 1, 0),
        (river.topic(app), 0, 0),
        (river.topic(app), 1, 3),
    }
    assert river.broken_promises() == []


def test_what_cannot_be_is_refused_in_one_sentence(river: River) -> None:
    web, app, _ = river.inputs
    river.config["kafka"]["start"] = {"offsets": {"tracking": {0: 5}}}
    river.write()
    said = here(river, "run", "--once", exit_code=2)
    assert (
        f"kafka.start.offsets.tracking has several topics; name each by its topic, such as `{app}`"
        in said
    )
    del river.config["kafka"]["start"]
    river.write()
    river.finish()
    river.config["sources"]["tracking"]["topic"] = [river.topic(web)]
    river.write()
    said = here(river, "run", "--once", exit_code=2)
    assert "sources.tracking.topic: the lake was begun with" in said
    add_partitions(river.kafka, river.topic(app), 3)
    river.config["sources"]["tracking"]["topic"] = [river.topic(web), river.topic(app)]
    river.write()
    assert "the topics are not co-partitioned" in here(river, "run", "--once", exit_code=2)


@pytest.mark.nightly
def test_tenants_have_clocks_over_all_topics_through_changes_of_the_rules_and_the_loss_of_the_lake(
    river: River,
) -> None:
    rng, sent = random.Random(4), 0

    def arrive(count: int) -> None:
        nonlocal sent
        for _ in range(count):
            sent += 1
            tenant, name = rng.choice("xyz"), rng.choice(river.inputs)
            time = sent * 20 - (400 if tenant == "z" else 0) - rng.choice([0, 0, 150])
            river.send(name, rng.randrange(2), keyed(rng.choice("ab"), max(0, time), g=tenant))

    river.config["merge"] |= {"tenant": "g", "tenant_max_lag": "600ms"}
    river.write()
    arrive(60)
    river.kill_at("silver.merge", "--once")
    river.finish()
    arrive(60)
    river.finish()
    rows = river.reader.summary(tables.SILVER, ["status"], {"n": ("count", "*")}).to_pylist()
    assert {"open", "timed_out", "waiting"} <= {row["status"] for row in rows}
    assert river.broken_promises() == []
    assert answer(river, "explain", "a")["records"]
    out = published(river.kafka, river.sink, river.partitions)
    shutil.rmtree(str(river.settings.lake))
    river.config["kafka"]["start"] = "sink"
    river.write()
    arrive(60)
    river.finish()
    found = published(river.kafka, river.sink, river.partitions)
    for p in range(river.partitions):
        was, now = (
            [message for message in each if message.partition == p] for each in (out, found)
        )
        assert 0 < len(was) < len(now)
        assert now[: len(was)] == was, "what is out stays, and comes once"
    assert river.broken_promises() == []

    river.config["merge"] = {
        "window": {"gap": "100ms", "max": "400ms"},
        "tenant": "g",
        "tenant_max_lag": "300ms",
    }
    river.write()
    here(river, "evolve", "--apply")
    arrive(60)
    river.finish()
    assert river.broken_promises() == []
    here(river, "rebuild", "--into", "again")
    assert here(river, "verify", "--against", "again")


@pytest.mark.nightly
def test_spark_reads_and_merges_several_topics_too(
    kafka: str, tmp_path: Path, on_spark: Callable[[River], River]
) -> None:
    name = "topics-by-spark"
    inputs = f"tracking/{name}.web", f"tracking/{name}.app", "orders"
    letters: dict[str, Any] = {
        "publish__late_topic": f"{name}-late",
        "publish__quarantine_topic": f"{name}-quarantine",
    }
    river = on_spark(River.make(kafka, tmp_path, name, lake=FOLDER, inputs=inputs, **letters))
    river.flow()
    river.finish()
    river.flow(inputs[0])
    river.flow()
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []
    river.by_embedded()
    river.spark = None
    river.flow()
    river.finish()
    assert river.losses() == Losses()


def test_verify_finds_a_record_under_another_topic(river: River) -> None:
    web, app, _ = river.inputs
    river.flow()
    river.flow()
    river.finish()
    assert river.broken_promises() == []
    engine = open_engine(river.settings)
    inputs = river.settings.inputs_by_name
    moved = of_topic(inputs[web], [[("partition", "=", 0), ("offset", "=", 3)]])
    engine.update(
        tables.bronze("tracking"), moved, {"topic": river.topic(app)}, Commit("test", 0, 1)
    )
    said = "\n".join(river.broken_promises())
    assert f"bronze_tracking: {river.topic(web)}[0]@3" in said, "bronze lacks it"
    assert f"bronze_tracking: {river.topic(app)}[0]@3" in said, "and has it twice"
    engine.update(
        tables.bronze("tracking"),
        of_topic(inputs[web], [[("partition", "=", 1), ("offset", "=", 1)]]),
        {"topic": "another"},
        Commit("test", 0, 2),
    )
    assert "1 rows that belong to no partition of the topics" in "\n".join(river.broken_promises())


def test_avro_is_read_from_every_topic_and_its_schema_stays_where_values_do_not_name_it(
    kafka: str, tmp_path: Path
) -> None:
    name, folder = "topics-in-avro", tmp_path / "lake"
    inputs = f"tracking/{name}.web", f"tracking/{name}.app", "orders"
    folder.mkdir()
    fields: list[Any] = CASE_SCHEMA["fields"]
    more = {"name": "coupon", "type": "string", "default": ""}
    for file, schema in (
        ("case.avsc", CASE_SCHEMA),
        ("more.avsc", {**CASE_SCHEMA, "fields": [*fields, more]}),
    ):
        (folder / file).write_bytes(as_text(schema))
    of_sources = {"format": "avro", "schema": "case.avsc"}
    avro: dict[str, Any] = {
        f"sources__{source}__{field}": of for source in SOURCES for field, of in of_sources.items()
    }
    river = River.make(kafka, folder, name, inputs=inputs, **avro)
    river.encode = as_avro
    river.flow()
    river.flow()
    river.finish()
    assert river.broken_promises() == []
    silver = river.reader.select(tables.MERGED, ["tracking"])["tracking"].to_pylist()
    assert {part["topic"] for parts in silver for part in parts} == {
        name.partition("/")[2] for name in inputs[:2]
    }
    river.config["sources"]["tracking"]["schema"] = "more.avsc"
    river.write()
    said = here(river, "evolve", "--apply", exit_code=2)
    assert (
        "sources.tracking.schema: Avro without a registry does not say where in each of several "
        "topics another schema" in said
    )
