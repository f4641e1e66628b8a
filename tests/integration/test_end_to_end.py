"""Kafka to Kafka on a real broker and real Delta tables, compared with the merge model byte for
byte."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from tests.support.cases import SOURCES, Case, expected_messages, heartbeat, keyed, random_case
from tests.support.configurations import settings_for
from tests.support.inputs import tp_of
from tests.support.lakes import KINDS, engine_for, folder_of, place_of
from tests.support.topics import consume, create_topics, produce, produce_transaction, published
from watersmeet.ask.status import status
from watersmeet.core.message import message_bytes
from watersmeet.engine.session import spark_session
from watersmeet.errors import ConfigurationError, WatersmeetError
from watersmeet.lake import tables
from watersmeet.lake.commits import last_decision
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import TableReader
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run
from watersmeet.settings import Settings

PARTITIONS = 7
TIMEOUT_MS = 100


def nasty_case() -> Case:
    """Whatever bytes a topic may hold, among records that must come through: the last partition of
    the topics."""
    good = keyed("a", 10)
    values: list[bytes | None] = [
        good,
        None,
        b"",
        b"{not json",
        b'{"ts": 20, "k": "a"} trailing',
        b'{"ts": NaN, "k": "a"}',
        b"\xff\xfe\x00",
        b'{"ts": 30}',
        b'{"k": "a"}',
        b'{"ts": "1234", "k": "a"}',
        b'{"ts": [], "k": {}}',
        b'{"ts": 40, "k": "a", "deep": ' + b"[" * 3000 + b"]" * 3000 + b"}",
        keyed("b", 50, blob="x" * 900_000),
        heartbeat(500),
    ]
    return Case({"tracking": values, "orders": [heartbeat(500)]}, TIMEOUT_MS)


@cache
def inputs() -> dict[int, Case]:
    """Random cases, the nasty one, and one whose tracking records came in transactions, some of
    them aborted."""
    richest = sorted(
        range(300), key=lambda seed: -len(random_case(seed, TIMEOUT_MS).merged().timed_out)
    )
    cases = {p: random_case(seed, TIMEOUT_MS) for p, seed in enumerate(richest[: PARTITIONS - 2])}
    cases[PARTITIONS - 2] = nasty_case()
    cases[PARTITIONS - 1] = Case(
        {"tracking": [], "orders": [keyed("t", 5), heartbeat(1000)]}, TIMEOUT_MS
    )
    return cases


def run_once(settings: Settings, *layers: str) -> None:
    Run(settings, layers or LAYERS, Reporter(), threading.Event()).once()


@dataclass
class Runs:
    """One input on a broker, run through the layers twice: at once; and, always by the embedded
    engine, in small steps by several starts, with every checkpoint deleted between them.
    """

    kafka: str
    cases: dict[int, Case]
    topics: dict[str, str]
    at_once: Settings
    in_steps: Settings

    @property
    def sink(self) -> str:
        return self.at_once.publish.topic


TOPICS = {source: f"end-to-end-{source}" for source in SOURCES}


@pytest.fixture(scope="module")
def in_steps(kafka: str, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of the run in small steps, which also brings the input to the broker."""
    create_topics(
        kafka, *TOPICS.values(), partitions=PARTITIONS, **{"max.message.bytes": "2000000"}
    )
    cases = inputs()
    small: dict[str, Any] = {
        "merge__max_records_per_batch": 280,
        "kafka__max_offsets_per_batch": 60,
    }
    settings = settings_on(
        kafka, tmp_path_factory.mktemp("in_steps"), publish__topic="merged-in-steps", **small
    )
    sent = {(source, p): 0 for source in SOURCES for p in cases}
    for share in (0.5, 1.0):
        for (source, p), begun in sent.items():
            values = cases[p].values[source]
            until = round(share * len(values))
            produce(kafka, TOPICS[source], [(p, value) for value in values[begun:until]])
            sent[source, p] = until
        if share < 1:
            run_once(settings)
            shutil.rmtree(settings.checkpoints)
    last = PARTITIONS - 1
    produce_transaction(kafka, TOPICS["tracking"], [keyed("t", 1)], last, commit=True)
    produce_transaction(kafka, TOPICS["tracking"], [keyed("t", 2)], last, commit=False)
    produce_transaction(
        kafka, TOPICS["tracking"], [keyed("t", 3), heartbeat(900)], last, commit=True
    )
    run_once(settings)
    return settings


def settings_on(kafka: str, folder: Path, **overrides: Any) -> Settings:
    """A configuration for the topics of this module."""
    topics = {f"sources__{source}__topic": topic for source, topic in TOPICS.items()}
    return settings_for(folder, bootstrap=kafka, **topics, **overrides)


@pytest.fixture(
    scope="module", params=[*KINDS[:-1], pytest.param(KINDS[-1], marks=pytest.mark.nightly)]
)
def runs(
    request: pytest.FixtureRequest,
    root_session: SparkSession,
    kafka: str,
    in_steps: Settings,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Runs]:
    """On every kind of lake. (Whole runs in a catalog are in test_catalogs.py, too.)"""
    folder = tmp_path_factory.mktemp("at_once")
    with place_of(request.param, lambda: root_session, folder) as place:
        at_once = settings_on(kafka, folder, publish__topic=f"{request.param}-merged", **place)
        run_once(at_once)
        yield Runs(kafka, inputs(), TOPICS, at_once, in_steps)


def asked(spark: SparkSession, settings: Settings) -> TableReader:
    return engine_for(lambda: spark, settings).reader


def content(spark: SparkSession, settings: Settings) -> list[str]:
    """Every column of the merge records but for the number of the batch, which depends on the
    cut."""
    names = [name for name in Lake(settings).schema(tables.MERGED).names if name != "batch"]
    return sorted(map(repr, asked(spark, settings).select(tables.MERGED, names).to_pylist()))


@pytest.mark.promise("R7")
@pytest.mark.fault("cuts", oracle=True)
def test_what_is_published_is_the_models_sequence(runs: Runs) -> None:
    in_model = {p: case for p, case in runs.cases.items() if p < PARTITIONS - 2}
    found = [m for m in published(runs.kafka, runs.sink, PARTITIONS) if m.partition in in_model]
    assert found == expected_messages(in_model)
    assert len(found) > 20


@pytest.mark.promise("R8")
@pytest.mark.fault("cuts", "lost")
def test_steps_and_lost_checkpoints_publish_the_same_bytes(runs: Runs) -> None:
    at_once = published(runs.kafka, runs.sink, PARTITIONS)
    assert at_once == published(runs.kafka, runs.in_steps.publish.topic, PARTITIONS)


@pytest.mark.promise("R6")
@pytest.mark.fault("cuts", "lost")
def test_steps_and_lost_checkpoints_give_the_same_silver(spark: SparkSession, runs: Runs) -> None:
    assert content(spark, runs.at_once) == content(spark, runs.in_steps)
    batches = asked(spark, runs.in_steps).summary(tables.PROGRESS, ["batch"], {})
    assert batches.num_rows > 2, "there were steps"


@pytest.mark.promise("R7")
@pytest.mark.fault("cuts")
def test_the_sequence_has_no_gap_and_keeps_its_order(runs: Runs) -> None:
    messages = published(runs.kafka, runs.sink, PARTITIONS)
    for partition in range(PARTITIONS):
        mine = [message for message in messages if message.partition == partition]
        assert [message.seq for message in mine] == list(range(len(mine)))
        places = [(message.timestamp, message.key) for message in mine]
        assert places == sorted(places)


def test_the_last_message_of_every_transaction_carries_min_offsets(
    spark: SparkSession, runs: Runs
) -> None:
    reader = asked(spark, runs.in_steps)
    noted = reader.select(tables.PUBLISHED, ["partition", "sink_offset"]).to_pylist()
    ends = {tuple(row.values()) for row in noted}
    times = {
        tp_of(source, p): [
            (row["offset"], row["event_time"])
            for row in reader.select(
                tables.bronze(source),
                ["offset", "event_time"],
                [[("partition", "=", p), ("event_time", "is not null", None)]],
            ).to_pylist()
        ]
        for source in SOURCES
        for p in range(PARTITIONS)
    }
    seen = 0
    for message in consume(runs.kafka, runs.in_steps.publish.topic, PARTITIONS):
        headers = dict(message.headers())
        assert (
            "watersmeet.min_offsets" in headers
            or (message.partition(), message.offset()) not in ends
        )
        if "watersmeet.min_offsets" not in headers:
            continue
        seen += 1
        event_time = int(headers["watersmeet.id"].decode().split("/")[1])
        for source, offset in orjson.loads(headers["watersmeet.min_offsets"]).items():
            reached = [o for o, t in times[tp_of(source, message.partition())] if t >= event_time]
            assert offset == min(reached)
    assert seen >= 3


def test_each_offset_is_in_bronze_once(spark: SparkSession, runs: Runs) -> None:
    for settings in (runs.at_once, runs.in_steps):
        for source in SOURCES:
            found = (
                asked(spark, settings)
                .select(tables.bronze(source), ["partition", "offset"])
                .to_pylist()
            )
            rows = [tuple(row.values()) for row in found]
            assert len(set(rows)) == len(rows)
            for partition, case in runs.cases.items():
                if partition < PARTITIONS - 1:
                    assert sorted(o for p, o in rows if p == partition) == list(
                        range(len(case.values[source]))
                    )


@pytest.mark.promise("R9")
@pytest.mark.fault("hostile")
def test_nasty_bytes_stop_nothing_and_are_kept(spark: SparkSession, runs: Runs) -> None:
    partition = PARTITIONS - 2
    columns = ["offset", "reason", "value"]
    rows = (
        asked(spark, runs.at_once)
        .select(tables.QUARANTINE, columns, [[("partition", "=", partition)]])
        .to_pylist()
    )
    reasons = {row["offset"]: row["reason"] for row in rows}
    undecodable = dict.fromkeys((1, 2, 3, 4, 5, 6, 11), "undecodable")
    assert reasons == undecodable | {
        7: "no_key",
        8: "no_event_time",
        9: "no_event_time",
        10: "no_key",
    }
    kept = {row["offset"]: row["value"] for row in rows}
    assert all(
        kept[o] == value
        for o, value in enumerate(runs.cases[partition].values["tracking"])
        if o in reasons
    )
    keys = [m.key for m in published(runs.kafka, runs.sink, PARTITIONS) if m.partition == partition]
    assert keys == [b"a", b"b"]


@pytest.mark.promise("R10")
def test_records_of_aborted_transactions_are_never_read(runs: Runs) -> None:
    partition = PARTITIONS - 1
    [message] = [
        m for m in published(runs.kafka, runs.sink, PARTITIONS) if m.partition == partition
    ]
    assert [part["ts"] for part in orjson.loads(message.value or b"")["tracking"]] == [1, 3]


def test_status_accounts_for_everything(spark: SparkSession, runs: Runs) -> None:
    found = {
        p["partition"]: p for p in status(asked(spark, runs.at_once), runs.at_once)["partitions"]
    }
    for partition, case in runs.cases.items():
        if partition >= PARTITIONS - 2:
            continue
        model, shown = case.merged(), found[partition]
        assert shown["clock"] == model.clock
        assert (shown["open"], shown["timed_out"], shown["late"]) == (
            len(model.open),
            len(model.timed_out),
            len(model.late),
        )
        assert shown["published"] == len(model.timed_out)
        heads = {input_id.source: head for input_id, head in model.heads.items()}
        for source in SOURCES:
            at = shown["sources"][source]
            assert at["head"] == heads.get(source)
            assert at["lead"] == (
                None if None in (model.clock, at["head"]) else at["head"] - model.clock
            )
            is_held = at["head"] is not None and (model.clock is None or at["head"] > model.clock)
            assert at["state"] == (
                "waiting" if at["head"] is None else "held" if is_held else "active"
            )
    transactional = found[PARTITIONS - 1]["sources"]["tracking"]
    assert transactional["lag"] == 0, "the markers of transactions are no records"


def test_a_finished_run_leaves_everything_as_it_is_and_notes_what_is_missing(
    spark: SparkSession, runs: Runs
) -> None:
    reader = asked(spark, runs.at_once)
    columns = ["partition", "first_seq", "last_seq", "last_key", "sink_offset"]

    def noted() -> list[str]:
        return sorted(map(repr, reader.select(tables.PUBLISHED, columns).to_pylist()))

    def decided(table: str) -> object:
        """The last commit that was no fence: each start makes one of those."""
        return last_decision(reader, table)

    before, batch, out = noted(), decided(tables.SILVER), consume(runs.kafka, runs.sink, PARTITIONS)
    DeltaTable(f"{folder_of(runs.at_once)}/{tables.PUBLISHED}").delete("partition = 0")
    assert noted() != before
    run_once(runs.at_once)
    assert noted() == before
    assert decided(tables.SILVER) == batch
    assert [m.offset() for m in consume(runs.kafka, runs.sink, PARTITIONS)] == [
        m.offset() for m in out
    ]
    notes = decided(tables.PUBLISHED)
    run_once(runs.at_once, "gold")
    assert decided(tables.PUBLISHED) == notes


@pytest.mark.promise("K8")
@pytest.mark.fault("hostile")
@pytest.mark.parametrize("runs", KINDS[:1], indirect=True)
def test_only_valid_records_are_published_and_values_may_be_chosen(
    spark: SparkSession, runs: Runs, tmp_path: Path
) -> None:
    sink = f"chosen-{runs.sink}"
    settings = settings_for(
        tmp_path,
        bootstrap=runs.kafka,
        engine=runs.at_once.engine,
        **{f"sources__{source}__topic": topic for source, topic in runs.topics.items()},
        publish__topic=sink,
        publish__valid="size(orders) > 0 AND orders[1].value IS NOT NULL",
        publish__value="CASE WHEN merge_key <> 'a' THEN concat(merge_key, '!') END",
        publish__max_bytes=message_bytes(2, 1, 0),
    )
    run_once(settings)
    columns = ["status", "valid", "invalid_reason", "orders", "merge_key"]
    silver = asked(spark, settings).select(tables.MERGED, columns).to_pylist()
    validated = {
        (row["status"], bool(row["orders"]), len(row["merge_key"].encode()) == 1): (
            row["valid"],
            row["invalid_reason"],
        )
        for row in silver
    }
    expected = {
        ("timed_out", True, True): (True, None),
        ("timed_out", True, False): (False, "too_large"),
        ("timed_out", False, True): (False, "predicate"),
        ("timed_out", False, False): (False, "predicate"),
    }
    assert validated == expected | {k: (None, None) for k in validated if k[0] == "open"}
    messages = published(runs.kafka, sink, PARTITIONS)
    assert {m.key: m.value for m in messages} == {
        m.key: None if m.key == b"a" else m.key + b"!" for m in messages
    }
    assert 0 < len(messages) == sum(row["valid"] is True for row in silver)


# -- small topics of their own


def settings_of(kafka: str, folder: Path, *topics: str, sink: str, **overrides: Any) -> Settings:
    chosen = {
        f"sources__{source}__topic": topic for source, topic in zip(SOURCES, topics, strict=True)
    }
    return settings_for(folder, bootstrap=kafka, publish__topic=sink, **chosen, **overrides)


@pytest.mark.promise("B1")
def test_a_start_at_the_latest_is_decided_once(
    root_session: SparkSession, kafka: str, tmp_path: Path
) -> None:
    create_topics(kafka, "early", "bird", partitions=1)
    produce(kafka, "early", [(0, keyed("skipped", 1))])
    settings = settings_of(kafka, tmp_path, "early", "bird", sink="worm", kafka__start="latest")
    run_once(settings, "bronze")
    produce(kafka, "early", [(0, keyed("kept", 2))])
    run_once(settings, "bronze")
    reader = asked(root_session, settings)
    assert reader.select(tables.bronze("tracking"), ["merge_key"])["merge_key"].to_pylist() == [
        "kept"
    ]
    begun = reader.select(tables.GENERATIONS, ["source", "start_offset", "reason"]).to_pylist()
    assert sorted(tuple(row.values()) for row in begun) == [
        ("orders", 0, "start: latest"),
        ("tracking", 1, "start: latest"),
    ]


def test_a_sink_that_others_write_to_is_refused(
    root_session: SparkSession, kafka: str, tmp_path: Path
) -> None:
    create_topics(kafka, "ours-one", "ours-other", "foreign", partitions=1)
    produce(kafka, "foreign", [(0, b"not ours")])
    with pytest.raises(
        WatersmeetError,
        match=r"foreign\[0\] ends with a message at offset 0 that has no watersmeet.seq",
    ):
        run_once(settings_of(kafka, tmp_path, "ours-one", "ours-other", sink="foreign"), "gold")


def test_topics_that_do_not_fit_are_refused_before_anything_is_read(
    kafka: str, tmp_path: Path
) -> None:
    create_topics(kafka, "narrow", "thin", partitions=1)
    create_topics(kafka, "wide", "broad", partitions=7)
    with pytest.raises(
        ConfigurationError, match=r"not co-partitioned \(tracking has 1, orders has 7 partitions\)"
    ):
        run_once(settings_of(kafka, tmp_path, "narrow", "wide", sink="m"))
    with pytest.raises(
        ConfigurationError, match=r"sources\.orders\.topic: there is no topic nowhere"
    ):
        run_once(settings_of(kafka, tmp_path, "wide", "nowhere", sink="m"))
    with pytest.raises(
        ConfigurationError, match=r"publish\.topic: thin has 1 partitions and the sources have 7"
    ):
        run_once(settings_of(kafka, tmp_path, "wide", "broad", sink="thin"), "gold")


# -- sessions


def test_a_session_that_is_given_keeps_its_own_settings(root_session: SparkSession) -> None:
    zone = "spark.sql.session.timeZone"
    before = root_session.conf.get(zone, "UTC")
    assert before is not None
    root_session.conf.set(zone, "Asia/Tokyo")
    try:
        copies = [spark_session({}), spark_session({})]
        copies[0].conf.set("spark.databricks.delta.write.txnVersion", "1")
        assert [copy.conf.get(zone) for copy in copies] == ["UTC", "UTC"]
        assert root_session.conf.get(zone) == "Asia/Tokyo"
        for session in (copies[1], root_session):
            assert session.conf.get("spark.databricks.delta.write.txnVersion", None) is None
    finally:
        root_session.conf.set(zone, before)
