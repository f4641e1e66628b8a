"""Transactional ids: one for each publisher, and no tail is read before the transactions of earlier
ones have ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.kafka.messages import messages
from tests.support.configurations import settings_for
from tests.support.topics import create_topics
from watersmeet.core.sequence import MERGED
from watersmeet.errors import OpenTransactionError, is_retriable
from watersmeet.kafka import cluster
from watersmeet.kafka.permissions import permissions, transactional_id
from watersmeet.kafka.publisher import Publisher, record_publisher, sequence_tail, sink_publisher
from watersmeet.settings import KafkaSettings, Settings

PARTS = [
    "shop",
    "eu",
    "merged",
    "shop-eu",
    "eu-merged",
    "redrive",
    "repartition",
    "shop-redrive",
    "redrive-eu",
    "a.b",
    "a_b",
]


@contextmanager
def left_open(kafka: str, topic: str, transactional_id: str) -> Iterator[Producer]:
    """Inside, a producer of this id has a message in an open transaction in partition 0."""
    producer = Producer(
        {"bootstrap.servers": kafka, "transactional.id": transactional_id, "log_level": 0}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    [message] = messages(0, "b", first_seq=1).to_pylist()
    headers = [(header["key"], header["value"]) for header in message["headers"]]
    producer.produce(
        topic, message["value"], message["key"], 0, timestamp=message["timestamp"], headers=headers
    )
    assert producer.flush(30) == 0
    yield producer


@pytest.fixture
def sink(kafka: str, topic: str) -> str:
    create_topics(kafka, topic, partitions=1)
    return topic


def publisher(settings: KafkaSettings, name: str, topic: str) -> Publisher:
    return Publisher(settings, name, topic, 1_000_000)


def tail(made: Publisher) -> int:
    return sequence_tail(made.tails(1)[0], MERGED).seq


def test_no_two_publishers_share_an_id() -> None:
    places = list(product(PARTS, PARTS, ("", "redrive", "repartition")))
    ids = {transactional_id(name, topic, role) for name, topic, role in places}
    assert len(ids) == len(places)
    assert transactional_id("shop-eu", "merged") != transactional_id("shop", "eu-merged")


def test_an_id_that_could_never_be_shared_has_a_hyphen_for_a_slash() -> None:
    assert transactional_id("shop", "merged") == "watersmeet-shop-merged"


def test_the_permissions_of_a_configuration_are_for_the_ids_that_its_publishers_have(
    tmp_path: Path,
) -> None:
    letters = {"late_topic": "late-letters", "quarantine_topic": "refused"}
    settings: Settings = settings_for(
        tmp_path, **{f"publish__{name}": topic for name, topic in letters.items()}
    )
    allowed = {each.name for each in permissions(settings) if each.kind == "transactional id"}
    made = [
        sink_publisher(settings),
        *(record_publisher(settings, topic) for topic in letters.values()),
    ]
    assert allowed == {each.transactional_id for each in made}


def test_pipelines_whose_names_and_topics_join_to_the_same_leave_each_other_alone(
    kafka: str, settings: KafkaSettings, topic: str
) -> None:
    name, sinks = "ids", (f"eu-{topic}", topic)
    create_topics(kafka, *sinks, partitions=1)
    one, other = publisher(settings, name, sinks[0]), publisher(settings, f"{name}-eu", sinks[1])
    one.begin()
    other.begin()
    one.send([messages(0, "a")])
    other.send([messages(0, "a")])


def test_no_tail_is_read_while_a_transaction_of_another_name_is_open(
    kafka: str, settings: KafkaSettings, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SETTLING_S", 0.2)
    before, after = publisher(settings, "before", sink), publisher(settings, "after", sink)
    before.begin()
    before.send([messages(0, "a")])
    with left_open(kafka, sink, before.transactional_id) as owner:
        after.begin()
        with pytest.raises(
            OpenTransactionError,
            match=r"\[0\] has an open transaction of another producer at offset 2",
        ) as error:
            after.tails(1)
        assert is_retriable(error.value)
        owner.commit_transaction(30)
    assert tail(after) == 1
