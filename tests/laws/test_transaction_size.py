"""A publication comes out, however slow the way to Kafka is: transactions that take too long are
followed by smaller ones."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from tests.kafka.messages import messages
from tests.laws.conftest import QUICK, MakeLake, one_of
from tests.support.cases import Case, expected_messages, heartbeat, keyed
from tests.support.topics import consume, create_topics, published
from watersmeet.dev import broker
from watersmeet.dev.broker import java_of_broker
from watersmeet.errors import TransactionTimeoutError, is_retriable
from watersmeet.gold import Gold
from watersmeet.kafka import publisher
from watersmeet.kafka.publisher import Publisher
from watersmeet.monitoring.events import Event, Failed
from watersmeet.running import transaction_size
from watersmeet.running.owner import Owner
from watersmeet.running.transaction_size import TARGET_S, TransactionSize
from watersmeet.settings import KafkaSettings

pytestmark = [pytest.mark.promise("N17"), pytest.mark.fault("broker")]

PARTITIONS = 2


kind = one_of([QUICK])


@pytest.mark.parametrize(
    ("seconds", "is_full", "limit"),
    [(0.1, True, 1000), (0.1, False, 100), (TARGET_S / 2, True, 200)],
)
def test_a_size_grows_while_transactions_are_full_and_quick(
    seconds: float, is_full: bool, limit: int
) -> None:
    size = TransactionSize(5000, 100)
    size.succeeded(seconds, is_full=is_full)
    assert size.limit == limit


def test_a_size_grows_to_the_largest_and_shrinks_to_one() -> None:
    size = TransactionSize(5000, 1000)
    size.succeeded(0.0, is_full=True)
    assert size.limit == 5000
    size.succeeded(10 * TARGET_S, is_full=True)
    assert size.limit == 500
    assert size.timed_out(80)
    assert size.limit == 10
    assert size.timed_out(10)
    assert size.limit == 1
    assert not size.timed_out(1), "nothing is smaller than one"


def test_a_transaction_that_takes_too_long_is_given_up_and_never_seen(
    kafka: str, topic_of_test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Publisher(KafkaSettings(bootstrap_servers=kafka), "slow", topic_of_test, 1_000_000)
    made.begin()
    monkeypatch.setattr(publisher, "LONGEST_S", -1)
    with pytest.raises(
        TransactionTimeoutError, match="its transaction was not done after 0 s; a smaller one"
    ) as error:
        made.send([messages(0, "ab")])
    assert is_retriable(error.value)
    monkeypatch.undo()
    made.begin()
    assert made.tails(1) == {}


@pytest.mark.long
def test_a_transaction_that_kafka_has_ended_for_its_age_is_no_takeover(
    kafka: str, topic_of_test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka looks for such transactions every ten seconds."""
    monkeypatch.setattr(publisher, "TRANSACTION_TIMEOUT_S", 5)
    monkeypatch.setattr(publisher, "PRODUCE_TIMEOUT_S", 4)
    made = Publisher(KafkaSettings(bootstrap_servers=kafka), "slow", topic_of_test, 1_000_000)
    made.begin()

    def slowly() -> Iterator[pa.Table]:
        yield messages(0, "a")
        time.sleep(20)
        yield messages(0, "b", first_seq=1)

    with pytest.raises(TransactionTimeoutError):
        made.send(slowly())
    assert consume(kafka, topic_of_test, 1) == []


def test_gold_publishes_in_smaller_transactions_until_one_is_in_time(
    new_lake: MakeLake,
    kafka: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = "laws-slow-gold"
    values: list[bytes | None] = [keyed(f"k{i:03d}", i) for i in range(200)]
    arrivals = ["tracking"] * 201 + ["orders"]
    case = Case(
        {"tracking": [*values, heartbeat(10**6)], "orders": [heartbeat(10**6)]}, 100, arrivals
    )
    lake = new_lake(
        dict.fromkeys(range(PARTITIONS), case), bootstrap=kafka, publish__topic=sink, name=sink
    )
    lake.arrive()
    lake.merge()
    failed: list[Event] = []

    def observe(event: Event) -> None:
        if isinstance(event, Failed):
            failed.append(event)
            if len(failed) == 2:
                monkeypatch.undo()

    monkeypatch.setattr(publisher, "LONGEST_S", -1)
    with caplog.at_level(logging.WARNING):
        made = list(Gold(Owner(lake.engine, notify=observe), lake.settings, PARTITIONS).drain())
    assert failed == [Failed("TransactionTimeoutError", is_retried=True)] * 2
    counts = [sum(p.tail.seq - p.first_seq + 1 for p in publications) for publications in made]
    expected = expected_messages(lake.cases)
    assert len(expected) == 400
    assert sum(counts) == len(expected)
    assert counts[0] == 400 // 8 // 8
    assert f"about {len(expected) // 8} messages instead of {len(expected)}" in caplog.text
    assert published(kafka, sink, PARTITIONS) == expected
    last = {
        (m.partition(), int(dict(m.headers())["watersmeet.seq"])): m
        for m in consume(kafka, sink, PARTITIONS)
    }
    ends = [last[p.partition, p.tail.seq] for publications in made for p in publications]
    assert all("watersmeet.min_offsets" in dict(message.headers()) for message in ends)


@pytest.fixture
def topic_of_test(kafka: str, request: pytest.FixtureRequest) -> str:
    create_topics(kafka, request.node.name, partitions=1)
    return str(request.node.name)


@pytest.fixture
def slow_kafka(tmp_path: Path) -> Iterator[str]:
    """A broker of the test's own that takes 150 kB/s from each client."""
    folder = tmp_path / "broker"
    servers = broker.start(folder).bootstrap_servers
    assert servers is not None
    quota = [
        "--alter",
        "--add-config",
        "producer_byte_rate=150000",
        "--entity-type",
        "clients",
        "--entity-default",
    ]
    command = [
        *java_of_broker(),
        "kafka.admin.ConfigCommand",
        "--bootstrap-server",
        servers,
        *quota,
    ]
    subprocess.run(command, check=True, env=os.environ, timeout=60)
    yield servers
    broker.stop(folder)


@pytest.mark.nightly
def test_over_a_slow_way_everything_is_published(
    new_lake: MakeLake, slow_kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "LONGEST_S", 6)
    monkeypatch.setattr(transaction_size, "TARGET_S", 2)
    values: list[bytes | None] = [keyed(f"k{i:05d}", i, text="x" * 1_400) for i in range(3_000)]
    arrivals = ["tracking"] * 3_001 + ["orders"]
    cases = {
        0: Case(
            {"tracking": [*values, heartbeat(10**6)], "orders": [heartbeat(10**6)]}, 100, arrivals
        )
    }
    lake = new_lake(cases, bootstrap=slow_kafka, publish__topic="slow-way")
    lake.arrive()
    lake.merge()
    failed: list[Event] = []
    observe = lambda event: failed.append(event) if isinstance(event, Failed) else None  # noqa: E731
    made = list(Gold(Owner(lake.engine, notify=observe), lake.settings, 1).drain())
    assert failed, "the first transaction is too large"
    assert len(made) > 3
    assert published(slow_kafka, "slow-way", 1) == expected_messages(cases)
