"""Kafka to Kafka on a real broker and real Delta tables, compared with the merge model byte for byte."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipelines import batch_input, bronze, gold, tables
from pipelines.adapters.lake import Lake
from pipelines.adapters.spark import layer_session
from pipelines.audit.status import status
from pipelines.errors import ConfigurationError, WatersmeetError
from pipelines.observability import Reporter
from pipelines.run import LAYERS, Run
from pipelines.settings import Settings
from tests.support.cases import SOURCES, Case, expected_messages, heartbeat, keyed, random_case
from tests.support.lakes import settings_for
from tests.support.topics import consume, create_topics, produce, produce_transaction, published

PARTITIONS = 7
TIMEOUT_MS = 100


def nasty_case() -> Case:
    """Whatever bytes a topic may hold, among records that must come through: the last partition of the topics."""
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


def inputs() -> dict[int, Case]:
    """Random cases, the nasty one, and one whose tracking records came in transactions, some of them aborted."""
    richest = sorted(range(300), key=lambda seed: -len(random_case(seed, TIMEOUT_MS).merged().timed_out))
    cases = {p: random_case(seed, TIMEOUT_MS) for p, seed in enumerate(richest[: PARTITIONS - 2])}
    cases[PARTITIONS - 2] = nasty_case()
    cases[PARTITIONS - 1] = Case({"tracking": [], "orders": [keyed("t", 5), heartbeat(1000)]}, TIMEOUT_MS)
    return cases


def settle(kafka: str, folder: Path, sink: str, **overrides: Any) -> Settings:
    return settings_for(folder, bootstrap=kafka, publish__topic=sink, **overrides)


def run_once(settings: Settings, *layers: str) -> None:
    Run(settings, layers or LAYERS, Reporter(), threading.Event()).once()


@dataclass
class River:
    """One input on a broker, run through the layers twice: at once, all by Spark; and in steps so small that the driver takes
    the records, with every checkpoint deleted between them.
    """

    kafka: str
    cases: dict[int, Case]
    at_once: Settings
    in_steps: Settings


@pytest.fixture(scope="module")
def river(root_session: SparkSession, kafka: str, tmp_path_factory: pytest.TempPathFactory) -> River:
    create_topics(kafka, *SOURCES, partitions=PARTITIONS, **{"max.message.bytes": "2000000"})
    cases = inputs()
    at_once = settle(kafka, tmp_path_factory.mktemp("at_once"), "merged")
    in_steps = settle(
        kafka,
        tmp_path_factory.mktemp("in_steps"),
        "merged_in_steps",
        merge__max_records_per_batch=280,
        kafka__max_offsets_per_batch=60,
    )
    sent = {(source, p): 0 for source in SOURCES for p in cases}
    for share in (0.5, 1.0):
        for (source, p), begun in sent.items():
            values = cases[p].values[source]
            until = round(share * len(values))
            produce(kafka, source, [(p, value) for value in values[begun:until]])
            sent[source, p] = until
        if share < 1:
            run_once(in_steps)
            shutil.rmtree(in_steps.checkpoints)
    last = PARTITIONS - 1
    produce_transaction(kafka, "tracking", [keyed("t", 1)], last, commit=True)
    produce_transaction(kafka, "tracking", [keyed("t", 2)], last, commit=False)
    produce_transaction(kafka, "tracking", [keyed("t", 3), heartbeat(900)], last, commit=True)
    run_once(in_steps)
    with pytest.MonkeyPatch.context() as limits:
        for module, few in ((bronze, "FEW_RECORDS"), (batch_input, "FEW_ROWS"), (gold, "FEW_RECORDS")):
            limits.setattr(module, few, -1)
        run_once(at_once)
    return River(kafka, cases, at_once, in_steps)


def lake_of(spark: SparkSession, settings: Settings) -> Lake:
    return Lake(spark, settings)


def content(spark: SparkSession, settings: Settings) -> list[str]:
    rows = lake_of(spark, settings).read(tables.SILVER).drop("batch")
    return sorted(row[0] for row in rows.select(F.to_json(F.struct(*rows.columns), {"ignoreNullFields": "false"})).collect())


def test_what_is_published_is_the_models_sequence(river: River) -> None:
    in_model = {p: case for p, case in river.cases.items() if p < PARTITIONS - 2}
    found = [m for m in published(river.kafka, "merged", PARTITIONS) if m.partition in in_model]
    assert found == expected_messages(in_model)
    assert len(found) > 20


def test_steps_and_lost_checkpoints_publish_the_same_bytes(river: River) -> None:
    at_once = published(river.kafka, "merged", PARTITIONS)
    assert at_once == published(river.kafka, "merged_in_steps", PARTITIONS)


def test_steps_and_lost_checkpoints_give_the_same_silver(spark: SparkSession, river: River) -> None:
    assert content(spark, river.at_once) == content(spark, river.in_steps)


def test_the_sequence_has_no_gap_and_keeps_its_order(river: River) -> None:
    messages = published(river.kafka, "merged", PARTITIONS)
    for partition in range(PARTITIONS):
        mine = [message for message in messages if message.partition == partition]
        assert [message.seq for message in mine] == list(range(len(mine)))
        places = [(message.timestamp, message.key) for message in mine]
        assert places == sorted(places)


def test_the_last_message_of_every_transaction_carries_min_offsets(spark: SparkSession, river: River) -> None:
    lake = lake_of(spark, river.in_steps)
    ends = {(row.partition, row.sink_offset) for row in lake.read(tables.PUBLISHED).collect()}
    bronze = {
        (source, row.partition, row.offset): row.t
        for source in SOURCES
        for row in lake.read(tables.bronze(source))
        .select("partition", "offset", F.unix_millis("event_time").alias("t"))
        .collect()
    }
    seen = 0
    for message in consume(river.kafka, "merged_in_steps", PARTITIONS):
        headers = dict(message.headers())
        assert ("watersmeet.min_offsets" in headers) == ((message.partition(), message.offset()) in ends)
        if "watersmeet.min_offsets" not in headers:
            continue
        seen += 1
        event_time = int(headers["watersmeet.id"].decode().split("/")[1])
        for source, offset in orjson.loads(headers["watersmeet.min_offsets"]).items():
            reached = [
                o
                for (s, p, o), t in bronze.items()
                if (s, p) == (source, message.partition()) and t is not None and t >= event_time
            ]
            assert offset == min(reached)
    assert seen >= 3


def test_each_offset_is_in_bronze_once(spark: SparkSession, river: River) -> None:
    for settings in (river.at_once, river.in_steps):
        for source in SOURCES:
            rows = lake_of(spark, settings).read(tables.bronze(source)).select("partition", "offset").collect()
            assert len(set(rows)) == len(rows)
            for partition, case in river.cases.items():
                if partition < PARTITIONS - 1:
                    assert sorted(o for p, o in rows if p == partition) == list(range(len(case.values[source])))


def test_nasty_bytes_stop_nothing_and_are_kept(spark: SparkSession, river: River) -> None:
    partition = PARTITIONS - 2
    quarantine = lake_of(spark, river.at_once).read(tables.QUARANTINE).where(F.col("partition") == partition)
    reasons = {row.offset: row.reason for row in quarantine.collect()}
    undecodable = dict.fromkeys((1, 2, 3, 4, 5, 6, 11), "undecodable")
    assert reasons == undecodable | {7: "no_key", 8: "no_event_time", 9: "no_event_time", 10: "no_key"}
    kept = {row.offset: row.value for row in quarantine.collect()}
    assert all(kept[o] == value for o, value in enumerate(river.cases[partition].values["tracking"]) if o in reasons)
    keys = [m.key for m in published(river.kafka, "merged", PARTITIONS) if m.partition == partition]
    assert keys == [b"a", b"b"]


def test_records_of_aborted_transactions_are_never_read(spark: SparkSession, river: River) -> None:
    partition = PARTITIONS - 1
    [message] = [m for m in published(river.kafka, "merged", PARTITIONS) if m.partition == partition]
    assert [part["ts"] for part in orjson.loads(message.value or b"")["tracking"]] == [1, 3]


def test_status_accounts_for_everything(spark: SparkSession, river: River) -> None:
    found = {p["partition"]: p for p in status(lake_of(spark, river.at_once), river.at_once)["partitions"]}
    for partition, case in river.cases.items():
        if partition >= PARTITIONS - 2:
            continue
        model, shown = case.merged(), found[partition]
        assert shown["clock"] == model.clock
        assert (shown["open"], shown["timed_out"], shown["late"]) == (len(model.open), len(model.timed_out), len(model.late))
        assert shown["published"] == len(model.timed_out)
        for source in SOURCES:
            at = shown["sources"][source]
            assert at["head"] == model.heads.get(source)
            assert at["lead"] == (None if None in (model.clock, at["head"]) else at["head"] - model.clock)
            is_held = at["head"] is not None and (model.clock is None or at["head"] > model.clock)
            assert at["state"] == ("waiting" if at["head"] is None else "held" if is_held else "active")
    transactional = found[PARTITIONS - 1]["sources"]["tracking"]
    assert transactional["lag"] == 0, "the markers of transactions are no records"


def test_a_finished_river_stays_as_it_is(spark: SparkSession, river: River) -> None:
    before = [m.offset() for m in consume(river.kafka, "merged", PARTITIONS)]
    versions = {
        t: lake_of(spark, river.at_once).delta(t).history(1).collect()[0].version for t in (tables.SILVER, tables.PUBLISHED)
    }
    run_once(river.at_once)
    assert [m.offset() for m in consume(river.kafka, "merged", PARTITIONS)] == before
    assert versions == {t: lake_of(spark, river.at_once).delta(t).history(1).collect()[0].version for t in versions}


def test_an_unfinished_publication_is_noted_by_the_next_start(spark: SparkSession, river: River) -> None:
    lake = lake_of(spark, river.at_once)
    before = sorted(lake.read(tables.PUBLISHED).select("partition", "first_seq", "last_seq", "last_key", "sink_offset").collect())
    lake.delta(tables.PUBLISHED).delete("partition = 0")
    run_once(river.at_once, "gold")
    after = sorted(lake.read(tables.PUBLISHED).select("partition", "first_seq", "last_seq", "last_key", "sink_offset").collect())
    assert after == before


def test_only_valid_records_are_published_and_values_may_be_chosen(spark: SparkSession, river: River, tmp_path: Path) -> None:
    settings = settle(
        river.kafka,
        tmp_path,
        "chosen",
        publish__valid="size(orders) > 0 AND orders[0].value IS NOT NULL",
        publish__value="CASE WHEN merge_key <> 'a' THEN concat(merge_key, '!') END",
        publish__max_bytes=2,
    )
    run_once(settings)
    silver = lake_of(spark, settings).read(tables.SILVER)
    judged = {
        (r.status, r.has_order, r.fits): (r.valid, r.invalid_reason)
        for r in silver.select(
            "status",
            "valid",
            "invalid_reason",
            (F.size("orders") > 0).alias("has_order"),
            (F.octet_length("merge_key") == 1).alias("fits"),
        ).collect()
    }
    expected = {
        ("timed_out", True, True): (True, None),
        ("timed_out", True, False): (False, "too_large"),
        ("timed_out", False, True): (False, "predicate"),
        ("timed_out", False, False): (False, "predicate"),
    }
    assert judged == expected | {k: (None, None) for k in judged if k[0] == "open"}
    messages = published(river.kafka, "chosen", PARTITIONS)
    assert {m.key: m.value for m in messages} == {m.key: None if m.key == b"a" else m.key + b"!" for m in messages}
    assert 0 < len(messages) == silver.where("valid").count()


def test_a_start_at_the_latest_is_decided_once(spark: SparkSession, kafka: str, tmp_path: Path) -> None:
    create_topics(kafka, "early", "bird", partitions=1)
    produce(kafka, "early", [(0, keyed("skipped", 1))])
    settings = settle(
        kafka, tmp_path, "worm", kafka__start="latest", sources__tracking__topic="early", sources__orders__topic="bird"
    )
    run_once(settings, "bronze")
    produce(kafka, "early", [(0, keyed("kept", 2))])
    run_once(settings, "bronze")
    lake = lake_of(spark, settings)
    assert [row.merge_key for row in lake.read(tables.bronze("tracking")).collect()] == ["kept"]
    resets = lake.read(tables.RESETS).select("source", "from_offset", "to_offset", "reason").collect()
    assert sorted(tuple(r) for r in resets) == [("orders", 0, 0, "start: latest"), ("tracking", 0, 1, "start: latest")]


def test_a_sink_that_others_write_to_is_refused(root_session: SparkSession, kafka: str, tmp_path: Path) -> None:
    create_topics(kafka, "foreign", partitions=PARTITIONS)
    produce(kafka, "foreign", [(0, b"not ours")])
    with pytest.raises(WatersmeetError, match=r"foreign\[0\] ends with a message at offset 0 that has no watersmeet.seq"):
        run_once(settle(kafka, tmp_path, "foreign"), "gold")


def test_topics_that_do_not_fit_are_refused_before_anything_is_read(kafka: str, tmp_path: Path) -> None:
    create_topics(kafka, "narrow", partitions=1)
    with pytest.raises(ConfigurationError, match=r"not co-partitioned \(tracking has 1, orders has 7 partitions\)"):
        run_once(settle(kafka, tmp_path, "m", sources__tracking__topic="narrow"))
    with pytest.raises(ConfigurationError, match=r"sources\.orders\.topic: there is no topic nowhere"):
        run_once(settle(kafka, tmp_path, "m", sources__orders__topic="nowhere"))
    with pytest.raises(ConfigurationError, match=r"publish\.topic: narrow has 1 partitions and the sources have 7"):
        run_once(settle(kafka, tmp_path, "narrow"), "gold")


def test_every_layer_has_a_session_of_its_own(root_session: SparkSession) -> None:
    one, other = layer_session(root_session), layer_session(root_session)
    one.conf.set("spark.databricks.delta.write.txnVersion", "1")
    assert other.conf.get("spark.databricks.delta.write.txnVersion", None) is None
