"""`verify` on real lakes and a real broker: it is content with a healthy one, and finds each promise that is broken by hand."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.kafka import Cluster
from pipelines.adapters.lake import Lake
from pipelines.adapters.spark import layer_session
from pipelines.audit import verify_evidence
from pipelines.audit.verify import verify
from pipelines.audit.verify_bronze import check_outcomes
from pipelines.audit.verify_evidence import read_evidence
from pipelines.audit.verify_model import check_model, check_validity
from pipelines.audit.verify_silver import check_clock, check_time_outs, check_unique
from pipelines.audit.verify_sink import check_sink, read_sink, sink_name
from pipelines.core.plan import BatchPlan, OffsetRange
from pipelines.errors import KafkaUnreachableError
from pipelines.observability import Reporter
from pipelines.run import Run
from pipelines.settings import Settings
from pipelines.silver import Silver
from tests.support.cases import SOURCES, Case, heartbeat, keyed, random_case
from tests.support.lakes import CaseLake, settings_for
from tests.support.topics import consume, create_topics, produce, produce_transaction

PLAIN = 9
"""So many partitions have the same known records; what is broken in one of them does not disturb the others."""
RANDOM, IDLE, TRANSACTIONAL = range(PLAIN, PLAIN + 3), PLAIN + 3, PLAIN + 4
PARTITIONS = PLAIN + 5
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def plain_case() -> Case:
    """Clock 320: published are a (0), e (20), f (30) and b (60), open are c (300) and d (305), tracking@8 is late."""
    tracking = [
        *[keyed("a", 0), keyed("e", 20), keyed("f", 30), keyed("b", 60), heartbeat(55), b"{"],
        *[keyed("c", 300), keyed("d", 310), keyed("d", 150), keyed("c", 320), heartbeat(320)],
    ]
    orders = [keyed("a", 10), keyed("d", 305), keyed("d", 315), heartbeat(320)]
    return Case({"tracking": [*tracking], "orders": [*orders]}, 100)


def settings_of(kafka: str, folder: Path, sink: str = "verified", **overrides: Any) -> Settings:
    topics = {f"sources__{name}__topic": f"verify_{name}" for name in SOURCES}
    return settings_for(folder, bootstrap=kafka, publish__topic=sink, **topics, **overrides)


def run(settings: Settings, *layers: str) -> None:
    Run(settings, layers, Reporter(), threading.Event()).once()


@dataclass
class River:
    """A healthy lake and its sink."""

    spark: SparkSession
    kafka: str
    settings: Settings

    def copy(self, folder: Path) -> Lake:
        """Another lake with the same content, to break."""
        shutil.copytree(str(self.settings.lake), folder / "lake")
        return Lake(layer_session(self.spark), settings_of(self.kafka, folder))


@pytest.fixture(scope="module")
def river(root_session: SparkSession, kafka: str, tmp_path_factory: pytest.TempPathFactory) -> River:
    create_topics(kafka, *[f"verify_{name}" for name in SOURCES], partitions=PARTITIONS)
    settings = settings_of(kafka, tmp_path_factory.mktemp("verified"), merge__max_records_per_batch=20 * 2 * PARTITIONS)
    richest = sorted(
        range(200), key=lambda seed: -len(random_case(seed).merged().late) - len(random_case(seed).merged().timed_out)
    )
    cases = dict.fromkeys(range(PLAIN), plain_case()) | dict(zip(RANDOM, (random_case(seed) for seed in richest), strict=False))
    for source in SOURCES:
        produce(kafka, f"verify_{source}", [(p, value) for p, case in cases.items() for value in case.values[source]])
    produce(kafka, "verify_tracking", [(IDLE, keyed("i", t)) for t in (10, 50, 200, 400)])
    produce(kafka, "verify_orders", [(IDLE, keyed("i", 20))])
    produce(kafka, "verify_orders", [(TRANSACTIONAL, keyed("t", 5)), (TRANSACTIONAL, heartbeat(1000))])
    for values, commit in (([keyed("t", 1)], True), ([keyed("t", 2)], False), ([keyed("t", 3), heartbeat(900)], True)):
        produce_transaction(kafka, "verify_tracking", values, TRANSACTIONAL, commit=commit)
    run(settings, "bronze")
    lake = Lake(layer_session(root_session), settings)
    decisions = [("orders", "verify_orders", IDLE, 0, EPOCH + timedelta(milliseconds=t), EPOCH) for t in (200, 400)]
    lake.append(lake.spark.createDataFrame(decisions, lake.schema(tables.IDLE_HEARTBEATS)), tables.IDLE_HEARTBEATS)
    run(settings, "silver", "gold")
    return River(root_session, kafka, settings)


def problems_of(lake: Lake, settings: Settings, *, full: bool = True) -> list[tuple[str, str]]:
    found = verify(lake, settings, full=full)
    assert found["ok"] == (not found["problems"])
    assert all(problem.keys() == {"what", "where", "fix"} and problem["fix"] for problem in found["problems"])
    return sorted((problem["where"], problem["what"]) for problem in found["problems"])


def the_same(found: Sequence[tuple[str, str]], expected: Sequence[tuple[str, str]]) -> None:
    """Places exactly; of what is wrong there, the words that matter."""
    assert [where for where, _ in found] == sorted(where for where, _ in expected), found
    left = list(found)
    for where, words in expected:
        match = next((each for each in left if each[0] == where and words in each[1]), None)
        assert match is not None, (where, words, left)
        left.remove(match)


@pytest.mark.parametrize("one_in", [1, 3], ids=["all keys", "a sample"])
def test_a_healthy_lake_keeps_every_promise(river: River, monkeypatch: pytest.MonkeyPatch, one_in: int) -> None:
    lake = Lake(layer_session(river.spark), river.settings)
    rows = lake.read(tables.SILVER).groupBy("status").count().collect()
    assert {row[0]: row[1] for row in rows}.keys() == {"open", "timed_out"}
    assert lake.read(tables.SILVER).where(F.col("partition") == IDLE).count() == 3, "the idle policy's heartbeats moved the clock"
    if one_in > 1:
        monkeypatch.setattr(verify_evidence, "SAMPLED_RECORDS", 50)
        assert read_evidence(lake, river.settings, PARTITIONS, full=False).one_in > 1
    assert problems_of(lake, river.settings, full=one_in == 1) == []


def record(source: str, partition: int, offset: int) -> str:
    return f"bronze_{source}: verify_{source}[{partition}]@{offset}"


def row(partition: int, key: str, event_time: int) -> str:
    return f"silver: partition {partition}, key {key!r}, event_time {event_time}"


Break = Callable[[Lake, str], None]


def twice(table: str) -> Break:
    """The row that the condition names comes again."""

    def do(lake: Lake, condition: str) -> None:
        lake.append(lake.read(table).where(condition).localCheckpoint(), table)

    return do


def gone(table: str) -> Break:
    def do(lake: Lake, condition: str) -> None:
        lake.delta(table).delete(condition)

    return do


def altered(table: str, **columns: str) -> Break:
    def do(lake: Lake, condition: str) -> None:
        lake.delta(table).update(condition, columns)  # type: ignore[arg-type]

    return do


OTHER_VALUE = "transform(tracking, p -> named_struct('offset', p.offset, 'event_time', p.event_time, 'value', '{}'))"

BREAKS: list[tuple[Break, str, list[tuple[str, str]]]] = [
    (twice("bronze_tracking"), "partition = 0 AND offset = 4", [(record("tracking", 0, 4), "in bronze 2 times")]),
    (twice(tables.QUARANTINE), "partition = 0", [(record("tracking", 0, 5), "quarantine 2 times")]),
    (gone("bronze_tracking"), "partition = 1 AND offset = 4", [(record("tracking", 1, 4), "lacks a record that Kafka has")]),
    (
        altered(tables.SILVER, tracking=OTHER_VALUE),
        "partition = 1 AND merge_key = 'd'",
        [(row(1, "d", 305), "event time or value of tracking@7 is another")],
    ),
    (
        gone(tables.LATE),
        "partition = 2",
        [
            (record("tracking", 2, 8), "no outcome"),
            ("late: verify_tracking[2]@8, key 'd'", "the late record is missing (position 310)"),
        ],
    ),
    (
        altered(tables.SILVER, status="'timed_out'", valid="false", invalid_reason="'predicate'"),
        "partition = 2 AND merge_key = 'c'",
        [
            (row(2, "c", 300), "the row is timed out although the clock is 320"),
            (row(2, "c", 300), "status is timed_out, the model's open"),
            (row(2, "c", 300), "valid is False (predicate), and must be True (None)"),
        ],
    ),
    (
        altered(tables.SILVER, orders="slice(orders, 1, 1)"),
        "partition = 3 AND merge_key = 'd'",
        [(record("orders", 3, 2), "no outcome"), (row(3, "d", 305), "lacks orders@2")],
    ),
    (
        gone(tables.SILVER),
        "partition = 3 AND merge_key = 'e'",
        [
            (record("tracking", 3, 1), "no outcome"),
            (row(3, "e", 20), "the row is missing (tracking@1)"),
            ("verified[3]@1: seq 1, key 'e', event_time 20", "silver has no such finished and valid record"),
        ],
    ),
    (
        twice(tables.SILVER),
        "partition = 4 AND merge_key = 'c'",
        [
            (record("tracking", 4, 6), "merge record 2 times"),
            (record("tracking", 4, 9), "merge record 2 times"),
            (row(4, "c", 300), "2 open rows for one key, with event times 300, 300"),
            (row(4, "c", 300), "the model has no such row"),
        ],
    ),
    (
        altered(tables.SILVER, event_time="event_time - INTERVAL 1 MILLISECOND"),
        "partition = 4 AND merge_key = 'd'",
        [(row(4, "d", 304), "event_time is 304, the model's 305")],
    ),
    (
        altered(tables.SILVER, status="'open'", valid="NULL"),
        "partition = 5 AND merge_key = 'f'",
        [
            (row(5, "f", 30), "the row is open although the clock is 320 and the timeout 100 ms"),
            (row(5, "f", 30), "status is open, the model's timed_out"),
            ("verified[5]@2: seq 2, key 'f', event_time 30", "silver has no such finished and valid record"),
        ],
    ),
    (
        altered(tables.PROGRESS, clock="timestamp_millis(321)"),
        "partition = 6 AND clock = timestamp_millis(320)",
        [
            ("progress: verify_tracking[6]", "the clock is 321, and bronze gets to 320"),
            ("progress: verify_orders[6]", "the clock is 321, and bronze gets to 320"),
            ("progress: partition 6", "the clock is 321, and the smallest head 320"),
        ],
    ),
    (
        altered(
            tables.PROGRESS,
            until_offset="IF(source = 'orders', 3, until_offset)",
            head="IF(source = 'orders', timestamp_millis(315), head)",
            clock="timestamp_millis(315)",
        ),
        "partition = 7 AND clock = timestamp_millis(320)",
        [
            ("verify_tracking[7]@9", "passed, although its position is beyond the clock 315"),
            (row(7, "c", 300), "has tracking@9"),
        ],
    ),
]


def test_every_promise_that_is_broken_in_the_lake_is_found(river: River, tmp_path: Path) -> None:
    lake = river.copy(tmp_path)
    for do, condition, _ in BREAKS:
        do(lake, condition)
    found = problems_of(lake, river.settings)
    the_same(found, [problem for _, _, problems in BREAKS for problem in problems])


def broken_sink(messages: list[Any]) -> list[tuple[Any, ...]]:
    """A sink as (partition, key, value, timestamp, headers), with something wrong in every partition."""
    rows: list[tuple[Any, ...]] = []
    for p in range(PARTITIONS):
        mine = [(p, m.key(), m.value(), m.timestamp()[1], dict(m.headers())) for m in messages if m.partition() == p]
        rows += BROKEN_SINKS[p](mine) if p < len(BROKEN_SINKS) else mine
    return rows


def with_seq(message: tuple[Any, ...], seq: int) -> tuple[Any, ...]:
    return (*message[:4], message[4] | {"watersmeet.seq": str(seq).encode()})


BROKEN_SINKS: list[Callable[[list[Any]], list[Any]]] = [
    lambda m: [m[0], *m[2:]],
    lambda m: [m[0], m[1], m[1], *m[2:]],
    lambda m: [m[0], with_seq(m[2], 1), with_seq(m[1], 2), m[3]],
    lambda m: [m[0], (*m[1][:2], b"{}", *m[1][3:]), *m[2:]],
    lambda m: [*m, (*m[3][:4], {})],
    lambda m: m[:3],
    lambda m: [m[0], (*m[1][:3], 21, m[1][4]), *m[2:]],
    lambda m: [m[0], (*m[1][:4], m[1][4] | {"watersmeet.id": b"7/21/e"}), *m[2:]],
    lambda m: [m[0], with_seq(m[2], 1), with_seq(m[3], 2)],
]

IN_BROKEN_SINKS = [
    ("broken[0]@1: seq 2, key 'f', event_time 30", "seq 2 after 0: a gap"),
    ("broken[0]: key 'e', event_time 20", "missing in the sink"),
    ("broken[1]@2: seq 1, key 'e', event_time 20", "seq 1 after 1: a repeat"),
    ("broken[2]@2: seq 2, key 'e', event_time 20", "2/20/e is not in order"),
    ("broken[3]@1: seq 1, key 'e', event_time 20", "value not as silver's record has it"),
    ("broken[4]@4", "not ours"),
    ("broken[5]@2: seq 2, key 'f', event_time 30", "the last message has seq 2, and 3 was published"),
    ("broken[6]@1: seq 1, key 'e', event_time 20", "timestamp not as silver's record has it"),
    ("broken[7]: key 'e', event_time 20", "missing in the sink"),
    ("broken[7]@1: seq 1, key 'e', event_time 21", "silver has no such"),
    ("broken[8]: key 'e', event_time 20", "missing in the sink"),
    ("broken[8]@2: seq 2, key 'b', event_time 60", "the last message has seq 2, and 3 was published"),
]


def test_every_promise_that_is_broken_in_the_sink_is_found(river: River, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_evidence, "SHOWN", 50)
    monkeypatch.setattr("pipelines.audit.verify.SHOWN", 50)
    create_topics(river.kafka, "broken", partitions=PARTITIONS)
    producer = Producer({"bootstrap.servers": river.kafka})
    for p, key, value, timestamp, headers in broken_sink(consume(river.kafka, "verified", PARTITIONS)):
        producer.produce("broken", value, key, p, timestamp=timestamp, headers=list(headers.items()))
    assert producer.flush(30) == 0
    lake, settings = river.copy(tmp_path), settings_of(river.kafka, tmp_path, "broken")
    lake.delta(tables.PUBLISHED).update(set={"sink": F.lit(sink_name(settings))})
    the_same(problems_of(lake, settings, full=False), IN_BROKEN_SINKS)

    counts = Cluster(settings.kafka).partition_counts()
    evidence = read_evidence(lake, settings, PARTITIONS, full=False)
    for delivery, forgiven in (
        ("at_least_once", ("a repeat",)),
        ("at_most_once", ("a gap", "missing in the sink", "was published")),
    ):
        lenient = settings_of(river.kafka, tmp_path, "broken", publish__delivery=delivery)
        checked = check_sink(
            verify_evidence.Evidence(**{**evidence.__dict__, "settings": lenient}), read_sink(lake, lenient, counts)
        )
        left = [(where, words) for where, words in IN_BROKEN_SINKS if not words.endswith(forgiven)]
        the_same(sorted((problem.where, problem.what) for problem in checked.problems), left)


def test_without_kafka_nothing_is_claimed(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.adapters.kafka.TIMEOUT_S", 0.5)
    settings = settings_for(tmp_path)
    with pytest.raises(KafkaUnreachableError, match=r"127\.0\.0\.1:1"):
        verify(Lake(spark, settings), settings)


def test_a_lake_that_is_not_there_yet_breaks_nothing_and_is_not_made(river: River, tmp_path: Path) -> None:
    settings = settings_of(river.kafka, tmp_path, "nowhere", kafka__start="latest")
    found = verify(Lake(layer_session(river.spark), settings), settings)
    assert found == {"ok": True, "problems": []}
    assert list(tmp_path.iterdir()) == []


# -- resets and recoveries


def jump(lake: CaseLake, by: int) -> None:
    """Every topic-partition goes on so many offsets further, or further back."""
    silver = Silver(lake.lake, lake.settings, lake.partitions)
    at = {tp: cursor.next_offset for tp, cursor in silver.cursors.items()}
    ranges = {tp: OffsetRange(offset, max(0, offset + by), None, None, None) for tp, offset in at.items()}
    silver.commit(BatchPlan(silver.next_batch, ranges, {}, has_late=False, reset="jump"))


def test_resets_and_a_recovery_are_no_broken_promises(spark: SparkSession, tmp_path: Path) -> None:
    richest = sorted(range(100), key=lambda seed: -len(random_case(seed).merged().timed_out))
    lake = CaseLake(spark, settings_for(tmp_path), {p: random_case(seed) for p, seed in enumerate(richest[:4])})
    read_back = [
        (p, row.key, EPOCH + timedelta(milliseconds=row.event_time), None, None, EPOCH)
        for p, case in lake.cases.items()
        for row in case.merged().published_order()[:3]
    ]
    lake.lake.append(spark.createDataFrame(read_back, lake.lake.schema(tables.RECOVERED)), tables.RECOVERED)
    for share, by in ((0.4, 3), (0.8, -6), (1.0, 0)):
        lake.arrive(share)
        lake.merge()
        if by:
            lake.arrive(min(1.0, share + 0.2))  # records are passed over that bronze has
            jump(lake, by)
    evidence = read_evidence(lake.lake, lake.settings, lake.partitions, full=True)
    assert len(evidence.stretches) == 3
    assert {r[0] for r in evidence.silver.select("invalid_reason").distinct().collect()} == {None, "reset"}
    for check in (check_outcomes, check_unique, check_clock, check_time_outs, check_model, check_validity):
        assert check(evidence).problems == []
