"""`explain` on a lake of the merge model with a real sink: what it tells is the model's, also as of
a time or a version."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.audit.inputs import case_of, richest_cases, with_topics
from tests.support.cases import KEYS, SOURCES, Case, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.journals import decided
from tests.support.model_lakes import ModelLake, wall_clock_ms
from tests.support.topics import Published, consume
from watersmeet.ask.explain import explain
from watersmeet.core.idle import IdleDecision
from watersmeet.core.model import MergeRecord
from watersmeet.core.times import utc
from watersmeet.engine.choice import create_tables, open_engine
from watersmeet.errors import ConfigurationError, WatersmeetError
from watersmeet.kafka.cluster import Cluster
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.commits import Commit
from watersmeet.lake.history import epoch_body
from watersmeet.lake.journal import RULES
from watersmeet.lake.location import Lake
from watersmeet.settings import Settings

RANDOM, IDLE, HELD = range(4), 4, 5
PARTITIONS = 6
ODD = "it's {odd} `here`\\"


@dataclass
class River:
    """What was explained after the first half, when, and how it stood at the end."""

    lake: ModelLake
    version: int
    at: datetime
    told: Mapping[str, Any]

    @property
    def settings(self) -> Settings:
        return self.lake.settings


@pytest.fixture(scope="module")
def river(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> River:
    folder = tmp_path_factory.mktemp("explained")
    settings = with_topics(
        kafka, folder, "explained", PARTITIONS, publish__valid="size(tracking) > 0"
    )
    cases = dict(zip(RANDOM, richest_cases(len(RANDOM)), strict=True))
    cases[IDLE] = case_of(
        [keyed("i", t) for t in (10, 50, 200, 400)],
        [keyed("i", 20)],
        IdleDecision(0, 200),
        IdleDecision(0, 400),
    )
    cases[HELD] = case_of([keyed(ODD, 5), keyed(ODD, 900)], [heartbeat(300)])
    lake = ModelLake(settings, cases, is_valid=lambda row: bool(row["tracking"]))
    name = Cluster(settings.kafka).identified(settings.publish.topic)
    for share in (0.25, 0.5):
        lake.arrive(share)
        lake.merge()
        lake.publish(name)
    told = {key: explain(lake.reader, settings, key) for key in KEYS}
    at = wall_clock_ms()
    while wall_clock_ms() <= at:
        pass
    version = lake.reader.version(tables.SILVER)
    lake.arrive()
    lake.decide()
    lake.merge()
    lake.publish(name)
    return River(lake, version, datetime.fromtimestamp(at / 1000, timezone.utc), told)


def positions(case: Case) -> dict[tuple[str, int], int]:
    """By source and offset, the largest event time up to there."""
    found: dict[tuple[str, int], int] = {}
    largest: dict[str, int] = {}
    for record in case.records():
        largest[record.input.source] = max(
            record.event_time, largest.get(record.input.source, record.event_time)
        )
        found.setdefault((record.input.source, record.offset), largest[record.input.source])
        if not record.is_heartbeat:
            found[record.input.source, record.offset] = largest[record.input.source]
    return found


def content(record: Mapping[str, Any]) -> tuple[Any, ...]:
    parts = [
        (p["source"], p["topic"], p["partition"], p["offset"], p["event_time"], p["position"])
        for p in record["parts"]
    ]
    return (
        record["partition"],
        record["event_time"],
        record["last_event_time"],
        record["status"],
        record["valid"],
        parts,
    )


def expected(partition: int, case: Case, status: str, record: MergeRecord) -> tuple[Any, ...]:
    at = positions(case)
    parts = [
        (
            source,
            f"explained_{source}",
            partition,
            part.offset,
            part.event_time,
            at[source, part.offset],
        )
        for source, mine in record.parts.items()
        for part in sorted(mine)
    ]
    parts.sort(key=itemgetter(4))
    valid = bool(record.parts["tracking"]) if status == "timed_out" else None
    return partition, record.event_time, record.last_event_time, status, valid, parts


@pytest.mark.promise("A4")
@pytest.mark.parametrize("key", [*KEYS, "i"])
def test_what_is_told_of_a_key_is_the_merge_models(river: River, key: str) -> None:
    models = {p: case.merged() for p, case in river.lake.cases.items()}
    right = [
        expected(p, river.lake.cases[p], status, record)
        for p, model in models.items()
        for status, records in (("open", model.open.values()), ("timed_out", model.timed_out))
        for record in records
        if record.key == key
    ]
    found = explain(river.lake.reader, river.settings, key)
    assert [content(record) for record in found["records"]] == sorted(
        right, key=lambda row: row[:2]
    )
    assert right
    late = [
        (p, each.record.input.source, each.record.offset, each.record.event_time, each.position)
        for p, model in models.items()
        for each in model.late
        if each.record.key == key
    ]
    told = [
        (row["partition"], row["source"], row["offset"], row["event_time"], row["position"])
        for row in found["late"]
    ]
    assert sorted(told) == sorted(late)
    waiting = [
        (p, record.input.source, record.offset, record.event_time)
        for p, model in models.items()
        for queue in model.unread().values()
        for _, record in queue
        if record.key == key
    ]
    assert sorted(
        (row["partition"], row["source"], row["offset"], row["event_time"])
        for row in found["waiting"]
    ) == sorted(waiting)


def test_every_part_came_with_the_batch_and_version_that_merged_it(river: River) -> None:
    reader = river.lake.reader
    progress = reader.select(
        tables.PROGRESS,
        ["batch", "source", "partition", "from_offset", "until_offset", "clock"],
    ).to_pylist()
    commits = {v.number: Commit.parse(v.metadata) for v in reader.history(tables.SILVER)}
    for key in KEYS:
        for record in explain(reader, river.settings, key)["records"]:
            rules = [part["rule"] for part in record["parts"]]
            assert sorted(set(rules)) in (["joined", "opened"], ["opened"])
            assert rules.count("opened") == 1
            for part in record["parts"]:
                here = (part["batch"], part["source"], record["partition"])
                [row] = [
                    row
                    for row in progress
                    if (row["batch"], row["source"], row["partition"]) == here
                ]
                assert row["from_offset"] <= part["offset"] < row["until_offset"]
                commit = commits[part["version"]]
                assert commit is not None
                assert (commit.facts["batch"], commit.number) == (
                    part["batch"],
                    part["batch"] + 1,
                )
            if record["closed"] is not None:
                closed = record["closed"]
                mine = [
                    r
                    for r in progress
                    if r["batch"] == closed["batch"] and r["partition"] == record["partition"]
                ]
                assert {closed["clock"]} == {row["clock"] for row in mine}
                assert closed["clock"] > record["event_time"] + 100
                assert min(closed["heads"].values()) == closed["clock"]


def test_a_finished_record_is_told_with_its_place_in_the_sink(river: River) -> None:
    kafka = river.settings.kafka.bootstrap_servers
    sink = {
        dict(m.headers())["watersmeet.id"].decode(): m
        for m in consume(kafka, "explained", PARTITIONS)
    }
    seen = set()
    for key in (*KEYS, "i", ODD):
        for record in explain(river.lake.reader, river.settings, key)["records"]:
            place = record["published"]
            message = sink.get(f"{record['partition']}/{record['event_time']}/{key}")
            assert (place is None) == (message is None) == (not record["valid"])
            if message is not None:
                seq = int(dict(message.headers())["watersmeet.seq"])
                assert place == {
                    "partition": message.partition(),
                    "offset": message.offset(),
                    "seq": seq,
                }
                seen.add((message.partition(), message.offset()))
    assert len(seen) == len(sink) > 10


def test_what_sorts_before_the_messages_of_a_lost_lake_is_not_told_as_published(
    kafka: str, tmp_path: Path
) -> None:
    settings = with_topics(kafka, tmp_path, "explained_again")
    lake = ModelLake(
        settings,
        {
            0: case_of(
                [keyed("a", 0), keyed("b", 150), keyed("c", 300), heartbeat(900)], [heartbeat(900)]
            )
        },
    )
    closed = {"due": 250, "closed_at": 251, "tenant": ""}
    lake.closing[0, "0/150/b"] = {"merge_key": "b", "event_time": 150, **closed}
    lake.send([Published(0, b"b", 150, b"lost", 0, "0/150/b")])
    lake.recover([(0, "b", 150)])
    lake.arrive()
    lake.merge()
    lake.publish(Cluster(settings.kafka).identified(settings.publish.topic))
    published = [explain(lake.reader, settings, key)["records"] for key in ("a", "c")]
    assert [[record["published"] for record in records] for records in published] == [
        [None],
        [{"partition": 0, "offset": 2, "seq": 1}],
    ]


def test_without_the_broker_the_place_comes_from_the_tables(river: River) -> None:
    kafka = river.settings.kafka.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    away = river.settings.model_copy(update={"kafka": kafka})
    with_broker, without = (
        [record["published"] for record in explain(river.lake.reader, settings, KEYS[1])["records"]]
        for settings in (river.settings, away)
    )
    assert with_broker == without
    assert any(with_broker)


def as_unpublished(record: dict[str, Any]) -> dict[str, Any]:
    reason = record["reason"].removesuffix("; not published yet")
    return {**record, "published": None, "reason": reason}


@pytest.mark.promise("A4")
@pytest.mark.parametrize("key", KEYS[1:3])
def test_what_was_known_is_told_again_as_of_its_time_and_version(river: River, key: str) -> None:
    reader, told = river.lake.reader, {**river.told[key], "as_of": None}
    found = explain(reader, river.settings, key, river.at)
    assert {**found, "as_of": None} == told
    found = explain(reader, river.settings, key, river.version)
    assert found["as_of"]["version"] == river.version
    unpublished = {**told, "records": [as_unpublished(record) for record in told["records"]]}
    assert {
        **found,
        "as_of": None,
        "records": [as_unpublished(record) for record in found["records"]],
    } == unpublished
    assert explain(reader, river.settings, key) != told


def test_as_of_a_version_from_before_bronze_nothing_is_known_of_a_key(tmp_path: Path) -> None:
    engine = open_engine(settings_for(tmp_path))
    engine.create(engine.lake.layout[tables.SILVER])
    time.sleep(0.01)
    create_tables(engine)
    found = explain(engine.reader, engine.lake.settings, "a", 0)
    assert found["as_of"]["version"] == 0
    assert found["records"] == found["quarantined"] == found["waiting"] == []


class Counting(DeltaRsReader):
    """A reader that counts its questions."""

    asked = 0

    def query(self, *arguments: Any) -> pa.RecordBatchReader:
        self.asked += 1
        return super().query(*arguments)

    def table_rows(self, *arguments: Any) -> pa.Table:
        self.asked += 1
        return super().table_rows(*arguments)


def test_of_many_merge_records_no_more_is_asked_than_of_one(tmp_path: Path) -> None:
    values: dict[str, list[bytes | None]] = {
        name: [keyed("one", 5), *(keyed("many", n * 300) for n in range(30))] for name in SOURCES
    }
    lake = ModelLake(settings_for(tmp_path), {0: Case(values, 100, [*SOURCES] * 31)})
    for share in (0.3, 0.6, 1.0):
        lake.arrive(share)
        lake.merge()
    asked = {}
    for key, records in (("one", 1), ("many", 30)):
        reader = Counting(lake.lake)
        assert len(explain(reader, lake.settings, key)["records"]) == records
        asked[key] = reader.asked
    assert asked["many"] == asked["one"]


@pytest.fixture
def small(tmp_path: Path) -> ModelLake:
    """The batch of a record, which is open."""
    values: dict[str, list[bytes | None]] = {
        name: [keyed("a", 10), keyed("b", 500)] for name in SOURCES
    }
    case = Case(values, 100, [*SOURCES, *SOURCES])
    lake = ModelLake(settings_for(tmp_path), {0: case})
    lake.arrive(0.5)
    lake.merge()
    return lake


def test_an_open_record_waits_for_the_limit_of_the_rules_of_its_moment(
    small: ModelLake, tmp_path: Path
) -> None:
    longer = settings_for(tmp_path, merge__timeout="1h")
    decided(small.lake, RULES, epoch_body(small.settings, 0, 0), 1)
    small.merge()
    version = small.reader.version(tables.SILVER)
    at = wall_clock_ms()
    while wall_clock_ms() <= at:
        pass
    decided(small.lake, RULES, epoch_body(longer, 1, 2), at)
    [[then], [now]] = (
        explain(small.reader, longer, "a", as_of)["records"] for as_of in (version, None)
    )
    assert utc(10 + 100) in then["reason"]
    assert utc(10 + 3_600_000) in now["reason"]


@pytest.mark.parametrize(("by", "waiting"), [(-99, {0, 1}), (99, set())])
def test_after_a_jump_records_wait_from_the_beginning_of_the_generation(
    small: ModelLake, by: int, waiting: set[int]
) -> None:
    small.arrive()
    small.jump(by)
    found = [
        (row["source"], row["offset"])
        for key in ("a", "b")
        for row in explain(small.reader, small.settings, key)["waiting"]
    ]
    assert sorted(found) == sorted(product(SOURCES, waiting))


def test_before_the_first_batch_nothing_was_known(river: River) -> None:
    found = explain(
        river.lake.reader, river.settings, KEYS[0], datetime(2020, 1, 1, tzinfo=timezone.utc)
    )
    assert found["records"] == found["late"] == []
    assert explain(river.lake.reader, river.settings, KEYS[0], 0)["records"] == []


def test_where_silvers_log_has_forgotten_a_batch_its_version_is_null(small: ModelLake) -> None:
    small.arrive()
    small.merge()
    [told] = explain(small.reader, small.settings, "a")["records"]
    last = told["parts"][0]["version"] or 0
    DeltaTable(small.lake.address(tables.SILVER)).create_checkpoint()
    for file in (Path(small.lake.address(tables.SILVER)) / "_delta_log").glob("*.json"):
        if int(file.stem) <= last:
            file.unlink()
    [found] = explain(small.reader, small.settings, "a")["records"]
    parts = [{**part, "version": None} for part in told["parts"]]
    closed = found["closed"] and told["closed"]
    assert found == {**told, "parts": parts, "closed": closed}


def test_an_odd_key_is_found_and_its_records_wait(river: River) -> None:
    found = explain(river.lake.reader, river.settings, ODD)
    assert [part["offset"] for record in found["records"] for part in record["parts"]] == [0]
    assert [(row["source"], row["offset"], row["event_time"]) for row in found["waiting"]] == [
        ("tracking", 1, 900)
    ]


def test_an_unknown_key_says_so_and_shows_near_ones(river: River) -> None:
    found = explain(river.lake.reader, river.settings, "it's {odd} `here`")
    assert (found["records"], found["near"]) == ([], [ODD])
    assert explain(river.lake.reader, river.settings, "nothing like this")["near"] == []


def test_a_version_that_is_not_there_is_refused_in_one_sentence(
    river: River, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="silver has no version 99999 yet; the newest is"):
        explain(river.lake.reader, river.settings, "a", 99999)


def test_a_version_whose_files_are_gone_is_refused_in_one_sentence(tmp_path: Path) -> None:
    lake = ModelLake(settings_for(tmp_path), {0: richest_cases(1)[0]})
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
    for file in (tmp_path / "lake" / "silver").glob("**/*.parquet"):
        file.unlink()
    with pytest.raises(WatersmeetError, match="further back than `retention`"):
        explain(lake.reader, lake.settings, "a", 1)


@pytest.mark.parametrize("table", [tables.JOURNAL, tables.SILVER])
def test_of_a_lake_without_one_of_its_tables_nothing_is_told(tmp_path: Path, table: str) -> None:
    lake = ModelLake(settings_for(tmp_path), {0: richest_cases(1)[0]})
    lake.arrive()
    lake.merge()
    shutil.rmtree(tmp_path / "lake" / table)
    with pytest.raises(ConfigurationError, match=f"the table {table} does not exist, although"):
        explain(lake.reader, lake.settings, "a")


def test_without_a_lake_nothing_is_known(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    found = explain(DeltaRsReader(Lake(settings)), settings, "a")
    assert not any(value for name, value in found.items() if name != "key")
    assert list(tmp_path.iterdir()) == []
