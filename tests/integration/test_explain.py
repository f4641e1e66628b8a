"""`explain` on a real lake, sink and broker: what it tells is the merge model's, and what was known once is told again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from pipelines import tables
from pipelines.adapters.decisions import write_decisions
from pipelines.adapters.lake import Lake
from pipelines.adapters.spark import layer_session
from pipelines.audit.explain import explain
from pipelines.cli import app, parse_as_of
from pipelines.core.idle import Decision
from pipelines.core.model import MergeRecord
from pipelines.core.plan import TopicPartition
from pipelines.errors import ConfigurationError
from pipelines.observability import Reporter
from pipelines.run import Run
from pipelines.settings import Settings
from tests.support.cases import KEYS, SOURCES, Case, heartbeat, keyed, random_case
from tests.support.lakes import settings_for, write_configuration
from tests.support.topics import consume, create_topics, produce

RANDOM, IDLE, HELD = range(8), 8, 9
PARTITIONS = 10
ODD = "it's {odd} `here`\\"
IDLE_CASE = Case({"tracking": [keyed("i", t) for t in (10, 50, 200, 400)], "orders": [keyed("i", 20)]}, 100)


@dataclass
class River:
    """What was explained after the first half, when, and how it stood at the end."""

    settings: Settings
    cases: Mapping[int, Case]
    version: int
    at: datetime
    told: Mapping[str, Any]


def run(settings: Settings) -> None:
    Run(settings, ("bronze", "silver", "gold"), Reporter(), threading.Event()).once()


def half(case: Case, source: str, *, first: bool) -> list[bytes | None]:
    until = case.arrivals[: len(case.arrivals) // 2].count(source)
    return case.values[source][:until] if first else case.values[source][until:]


@pytest.fixture(scope="module")
def river(root_session: SparkSession, kafka: str, tmp_path_factory: pytest.TempPathFactory) -> River:
    names = {f"sources__{name}__topic": f"explain_{name}" for name in SOURCES}
    settings = settings_for(
        tmp_path_factory.mktemp("explained"),
        bootstrap=kafka,
        publish__topic="explained",
        publish__valid="size(tracking) > 0",
        merge__max_records_per_batch=20 * 2 * PARTITIONS,
        **names,
    )
    create_topics(kafka, *names.values(), partitions=PARTITIONS)
    richest = sorted(
        range(200), key=lambda seed: -len(random_case(seed).merged().late) - len(random_case(seed).merged().timed_out)
    )
    cases = dict(zip(RANDOM, (random_case(seed) for seed in richest), strict=False))
    for source in SOURCES:
        produce(kafka, f"explain_{source}", [(p, v) for p, case in cases.items() for v in half(case, source, first=True)])
    run(settings)
    lake = Lake(layer_session(root_session), settings)
    told = {key: explain(lake, settings, key) for key in KEYS}
    version, at = lake.history(tables.SILVER, 1)[0].number, datetime.now(timezone.utc)
    time.sleep(0.01)  # the clock of the machine goes on: `at` lies before whatever is committed from here on
    for source in SOURCES:
        rest = [(p, v) for p, case in cases.items() for v in half(case, source, first=False)]
        produce(kafka, f"explain_{source}", rest + [(IDLE, v) for v in IDLE_CASE.values[source]])
    produce(kafka, "explain_tracking", [(HELD, keyed(ODD, 5)), (HELD, keyed(ODD, 900))])
    produce(kafka, "explain_orders", [(HELD, heartbeat(300))])
    Run(settings, ("bronze",), Reporter(), threading.Event()).once()
    decided = [Decision(0, t) for t in (200, 400)]
    write_decisions(lake, settings, [(TopicPartition("orders", IDLE), decision) for decision in decided])
    run(settings)
    idle = Case(IDLE_CASE.values, 100, ["tracking"] * 4 + ["orders"], {"orders": decided})
    return River(settings, {**cases, IDLE: idle}, version, at, told)


@pytest.fixture
def lake(spark: SparkSession, river: River) -> Lake:
    return Lake(spark, river.settings)


def positions(case: Case) -> dict[tuple[str, int], int]:
    """By source and offset, the largest event time up to there."""
    found: dict[tuple[str, int], int] = {}
    largest: dict[str, int] = {}
    for record in case.records():
        largest[record.source] = max(record.event_time, largest.get(record.source, record.event_time))
        found.setdefault((record.source, record.offset), largest[record.source])
        if not record.is_heartbeat:
            found[record.source, record.offset] = largest[record.source]
    return found


def content(record: Mapping[str, Any]) -> tuple[Any, ...]:
    parts = [(p["source"], p["topic"], p["partition"], p["offset"], p["event_time"], p["position"]) for p in record["parts"]]
    return record["partition"], record["event_time"], record["last_event_time"], record["status"], record["valid"], parts


def expected(partition: int, case: Case, status: str, record: MergeRecord) -> tuple[Any, ...]:
    at = positions(case)
    parts = [
        (source, f"explain_{source}", partition, part.offset, part.event_time, at[source, part.offset])
        for source, mine in record.parts.items()
        for part in sorted(mine)
    ]
    valid = bool(record.parts["tracking"]) if status == "timed_out" else None
    return partition, record.event_time, record.last_event_time, status, valid, parts


@pytest.mark.parametrize("key", [*KEYS, "i"])
def test_what_is_told_of_a_key_is_the_merge_models(lake: Lake, river: River, key: str) -> None:
    models = {p: case.merged() for p, case in river.cases.items()}
    right = [
        expected(p, river.cases[p], status, record)
        for p, model in models.items()
        for status, records in (("open", model.open.values()), ("timed_out", model.timed_out))
        for record in records
        if record.key == key
    ]
    found = explain(lake, river.settings, key)
    assert [content(record) for record in found["records"]] == sorted(right, key=lambda row: row[:2])
    assert right
    late = [
        (p, each.record.source, each.record.offset, each.record.event_time, each.position)
        for p, model in models.items()
        for each in model.late
        if each.record.key == key
    ]
    told = [(row["partition"], row["source"], row["offset"], row["event_time"], row["position"]) for row in found["late"]]
    assert sorted(told) == sorted(late)
    waiting = [
        (p, source, record.offset, record.event_time)
        for p, model in models.items()
        for source, queue in model.waiting.items()
        for _, record in queue
        if record.key == key
    ]
    assert sorted((row["partition"], row["source"], row["offset"], row["event_time"]) for row in found["waiting"]) == sorted(
        waiting
    )


def test_every_part_came_with_the_batch_and_version_that_merged_it(lake: Lake, river: River) -> None:
    progress = lake.rows("SELECT batch, source, `partition`, from_offset, until_offset, clock FROM {progress}")
    versions = dict(lake.rows("SELECT batch, version FROM {versions}"))
    assert len(versions) > 2
    for key in KEYS:
        for record in explain(lake, river.settings, key)["records"]:
            rules = [part["rule"] for part in record["parts"]]
            assert sorted(set(rules)) in (["joined", "opened"], ["opened"])
            assert rules.count("opened") == 1
            for part in record["parts"]:
                here = (part["batch"], part["source"], record["partition"])
                [(since, until)] = [row[3:5] for row in progress if row[:3] == here]
                assert since <= part["offset"] < until
                assert part["version"] == versions[part["batch"]]
                before = lake.rows(
                    f"SELECT COUNT(*) FROM {{silver}} WHERE batch >= {part['batch']}", {"silver": part["version"] - 1}
                )
                assert before == [(0,)], "the version before knew nothing of the batch"
            if record["closed"] is not None:
                clocks = {row[5] for row in progress if row[0] == record["closed"]["batch"] and row[2] == record["partition"]}
                assert {record["closed"]["clock"]} == clocks
                assert record["closed"]["clock"] > record["event_time"] + 100
                assert min(record["closed"]["heads"].values()) == record["closed"]["clock"]


def test_a_finished_record_is_told_with_its_place_in_the_sink(lake: Lake, river: River) -> None:
    kafka = river.settings.kafka.bootstrap_servers
    sink = {dict(m.headers())["watersmeet.id"].decode(): m for m in consume(kafka, "explained", PARTITIONS)}
    seen = set()
    for key in (*KEYS, "i", ODD):
        for record in explain(lake, river.settings, key)["records"]:
            place = record["published"]
            message = sink.get(f"{record['partition']}/{record['event_time']}/{key}")
            assert (place is None) == (message is None) == (not record["valid"])
            if message is not None:
                seq = int(dict(message.headers())["watersmeet.seq"])
                assert place == {"partition": message.partition(), "offset": message.offset(), "seq": seq}
                seen.add((message.partition(), message.offset()))
    assert len(seen) == len(sink) > 10


def test_without_the_broker_the_place_comes_from_the_tables(lake: Lake, river: River) -> None:
    away = river.settings.model_copy(
        update={"kafka": river.settings.kafka.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})}
    )
    for key in KEYS[:2]:
        with_broker, without = (
            [record["published"] for record in explain(lake, settings, key)["records"]] for settings in (river.settings, away)
        )
        assert with_broker == without
        assert any(with_broker)


@pytest.mark.parametrize("key", KEYS)
def test_what_was_known_is_told_again_as_of_its_time_and_version(lake: Lake, river: River, key: str) -> None:
    told = {**river.told[key], "as_of": None}
    assert explain(lake, river.settings, key, river.at) == {
        **told,
        "as_of": explain(lake, river.settings, key, river.at)["as_of"],
    }
    found = explain(lake, river.settings, key, river.version)
    assert found["as_of"]["version"] == river.version
    unpublished = {**told, "records": [{**record, "published": None} for record in told["records"]]}
    assert {**found, "as_of": None, "records": [{**r, "published": None} for r in found["records"]]} == unpublished
    assert explain(lake, river.settings, key) != told


def test_spark_tells_the_same_where_the_lake_is_elsewhere(
    spark: SparkSession, river: River, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = Lake(spark, river.settings), Lake(spark, river.settings)
    monkeypatch.setattr(elsewhere, "_local", None)
    late = next(row["merge_key"] for row in here.read(tables.LATE).collect())
    assert explain(elsewhere, river.settings, late, river.at) == explain(here, river.settings, late, river.at)
    assert explain(elsewhere, river.settings, ODD[:-1]) == explain(here, river.settings, ODD[:-1])


def test_before_the_first_batch_nothing_was_known(lake: Lake, river: River) -> None:
    found = explain(lake, river.settings, KEYS[0], datetime(2020, 1, 1, tzinfo=timezone.utc))
    assert found["records"] == found["late"] == []
    assert explain(lake, river.settings, KEYS[0], 0)["records"] == []


def test_an_odd_key_is_found_and_its_records_wait(lake: Lake, river: River) -> None:
    found = explain(lake, river.settings, ODD)
    assert [part["offset"] for record in found["records"] for part in record["parts"]] == [0]
    assert [(row["source"], row["offset"], row["event_time"]) for row in found["waiting"]] == [("tracking", 1, 900)]


def test_an_unknown_key_says_so_and_shows_near_ones(lake: Lake, river: River) -> None:
    found = explain(lake, river.settings, "it's {odd} `here`")
    assert (found["records"], found["near"]) == ([], [ODD])
    assert explain(lake, river.settings, "nothing like this")["near"] == []


def test_a_version_that_is_not_there_is_refused_in_one_sentence(lake: Lake, river: River) -> None:
    with pytest.raises(ConfigurationError, match="silver has no version 99999 yet; the newest is"):
        explain(lake, river.settings, "a", 99999)
    with pytest.raises(ConfigurationError, match="--as-of: `yesterday` is neither a version of silver nor a time"):
        parse_as_of("yesterday")
    assert parse_as_of("17") == 17
    assert parse_as_of("2026-01-01T00:00:00Z") == datetime(2026, 1, 1, tzinfo=timezone.utc)


def test_history_says_what_each_commit_of_silver_holds(lake: Lake, river: River) -> None:
    told = [json.loads(version.said) for version in lake.history(tables.SILVER, 1000) if version.said]
    progress = lake.rows("SELECT batch, source, `partition`, from_offset, until_offset, clock FROM {progress}")
    assert [said["batch"] for said in told] == sorted({row[0] for row in progress}, reverse=True)
    for said in told:
        mine = [row for row in progress if row[0] == said["batch"]]
        assert {(s, p): [since, until] for _, s, p, since, until, _ in mine} == {
            (s, int(p)): offsets for s, by_partition in said["offsets"].items() for p, offsets in by_partition.items()
        }
        clocks = {p: clock for _, _, p, _, _, clock in mine if clock is not None}
        assert {int(p): clock for p, clock in said["clocks"].items()} == clocks
        assert said["configuration"] == river.settings.digest
        assert said["code_version"]
    kept = lake.rows("SELECT batch, version, configuration, code_version FROM {versions} ORDER BY batch DESC")
    of_log = [(v.number, json.loads(v.said)["batch"]) for v in lake.history(tables.SILVER, 1000) if v.said]
    assert [(version, batch) for batch, version, _, _ in kept] == of_log
    assert {row[2] for row in kept} == {river.settings.digest}


def test_versions_bear_the_time_of_their_commit(lake: Lake) -> None:
    """Also where the files of the log are copied or touched: the time stands in the commit."""
    properties = {row.key: row.value for row in lake.spark.sql(f"SHOW TBLPROPERTIES {lake.identifier(tables.SILVER)}").collect()}
    assert properties["delta.enableInCommitTimestamps"] == "true"
    by_spark = {row.version: row.timestamp for row in lake.delta(tables.SILVER).history().collect()}
    for version, committed_at in lake.rows("SELECT version, committed_at FROM {versions}"):
        assert by_spark[version].timestamp() * 1000 == pytest.approx(committed_at, abs=1)


@pytest.fixture
def config(river: River, tmp_path: Path) -> Path:
    return write_configuration(river.settings, tmp_path)


def test_the_command_tells_it(config: Path) -> None:
    runner = CliRunner()
    found = runner.invoke(app, ["explain", "é", "--json", "-c", str(config)])
    document = json.loads(found.stdout)
    assert (found.exit_code, document["key"]) == (0, "é")
    assert document["records"]
    shown = runner.invoke(app, ["explain", "é", "-c", str(config)])
    assert shown.exit_code == 0
    assert f"'é': {len(document['records'])} merge records" in shown.stdout
    unknown = runner.invoke(app, ["explain", "nobody", "-c", str(config)])
    assert (unknown.exit_code, unknown.stdout) == (0, "nothing is known of the key 'nobody'\n")
    refused = runner.invoke(app, ["explain", "é", "--as-of", "yesterday", "-c", str(config)])
    assert isinstance(refused.exception, ConfigurationError)


def test_the_command_writes_the_report(config: Path, tmp_path: Path) -> None:
    runner, page = CliRunner(), tmp_path / "page.html"
    written = runner.invoke(app, ["report", "--out", str(page), "--json", "-c", str(config)])
    assert (written.exit_code, json.loads(written.stdout)) == (0, {"written": str(page)})
    assert "<html" in page.read_text()
    nowhere = runner.invoke(app, ["report", "--out", str(tmp_path / "missing" / "page.html"), "-c", str(config)])
    assert isinstance(nowhere.exception, ConfigurationError)
