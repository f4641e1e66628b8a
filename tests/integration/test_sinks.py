"""A sink that is made again: empty, or with its messages, as a cluster has it that was copied."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from tests.integration.test_clusters import move
from tests.support.cases import heartbeat
from tests.support.lives import Life, killed_at, messages_in
from tests.support.topics import (
    Access,
    client_options,
    consume,
    create_topics,
    delete_records,
    delete_topic,
    produce,
)
from watersmeet.core.sequence import SEQ
from watersmeet.kafka.reading import headers_of

LARGEST = "max.message.bytes"


def moved(kafka: Access, topic: str, partitions: int = 1) -> None:
    """The topic is made again with all that its messages had, as a copied cluster has it."""
    messages = consume(kafka, topic, partitions)
    delete_topic(kafka, topic)
    create_topics(kafka, topic, partitions=partitions)
    producer = Producer({**client_options(kafka), "transactional.id": f"copy-of-{topic}"})
    producer.init_transactions()
    producer.begin_transaction()
    for message, following in zip_longest(messages, messages[1:]):
        timestamp = message.timestamp()[1]
        place = (topic, message.value(), message.key(), message.partition())
        producer.produce(*place, timestamp=timestamp, headers=message.headers())
        if following is None or following.offset() != message.offset() + 1:
            producer.commit_transaction()
            producer.begin_transaction()
    producer.abort_transaction()


def numbers_in(kafka: Access, topic: str, partitions: int = 1) -> list[int]:
    messages = messages_in(kafka, topic, partitions)
    return [int(dict(headers_of(message))[SEQ]) for message in messages]


@pytest.mark.parametrize("forgets", [False, True])
def test_a_lake_goes_on_where_its_sink_moved_too(kafka: str, tmp_path: Path, forgets: bool) -> None:
    life = Life.make(kafka, tmp_path)
    life.both(("a", 0), ("b", 50), (None, 1000))
    life.run()
    if forgets:
        life.call("forget", "a", "--apply")
    move(life.river)
    moved(kafka, life.river.sink)
    life.both(("c", 2000), (None, 9000))
    life.run()
    assert numbers_in(kafka, life.river.sink) == [0, 1, 2]


def test_a_lake_goes_on_where_its_sink_moved_and_keep_has_deleted_rows(
    kafka: str, tmp_path: Path
) -> None:
    day = 86_400_000
    life = Life.make(kafka, tmp_path, keep={"silver": "1d"})
    life.both(("a", 0), (None, 1000))
    life.run()
    life.both(("b", 5 * day), (None, 5 * day + 5000))
    life.run()
    life.call("maintain")
    move(life.river)
    moved(kafka, life.river.sink)
    life.both(("c", 5 * day + 9000), (None, 5 * day + 20_000))
    life.run()
    assert numbers_in(kafka, life.river.sink) == [0, 1, 2]


def test_a_partition_goes_on_that_had_nothing_new_at_the_first_start_after_its_sink_moved(
    kafka: str, tmp_path: Path
) -> None:
    day = 86_400_000
    life = Life.make(kafka, tmp_path, partitions=2, keep={"silver": "1d"})

    def in_both(partitions: Iterable[int], *records: tuple[str | None, int]) -> None:
        for topic in map(life.river.topic, ("tracking", "orders")):
            for p in partitions:
                values = [{"k": key, "ts": time} if key else None for key, time in records]
                texts = [json.dumps(value).encode() for value in values if value]
                produce(kafka, topic, [(p, text) for text in [*texts, heartbeat(records[-1][1])]])

    in_both((0, 1), ("a", 0), (None, 1000))
    life.run()
    in_both((0, 1), ("b", 5 * day), (None, 5 * day + 5000))
    life.run()
    life.call("maintain")
    move(life.river)
    moved(kafka, life.river.sink, 2)
    for p in (0, 1):
        in_both([p], ("c", 5 * day + 9000), (None, 5 * day + 20_000))
        life.run()
    assert sorted(numbers_in(kafka, life.river.sink, 2)) == [0, 0, 1, 1, 2, 2]


def test_nothing_is_published_anew_where_the_sink_moved_and_retention_has_emptied_it(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    life.both(("a", 0), ("b", 50), (None, 1000))
    life.run()
    move(life.river)
    moved(kafka, life.river.sink)
    delete_records(kafka, life.river.sink, 0, 2)
    for number, time in (2, 2000), (3, 10_000):
        life.both(("c", time), (None, time + 5000))
        life.run()
        assert numbers_in(kafka, life.river.sink)[-1] == number
    assert numbers_in(kafka, life.river.sink) == [2, 3]


def test_no_dead_letter_is_sent_anew_where_its_topic_moved_and_retention_has_emptied_it(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    topic = f"{life.river.config['name']}-late"
    life.configure("publish.late_topic", topic)
    life.both((None, 1000))
    life.send("tracking", ("a", 0), ("b", 0))
    life.run()
    assert [message.key() for message in messages_in(kafka, topic)] == [None, None]
    move(life.river)
    moved(kafka, topic)
    delete_records(kafka, topic, 0, 2)
    life.run()
    assert messages_in(kafka, topic) == []
    life.both((None, 3000))
    life.send("tracking", ("c", 2000))
    for _ in range(2):
        life.run()
        [message] = messages_in(kafka, topic)
        assert json.loads(message.value() or b"")["k"] == "c"


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_was_noted_before_it_was_sent_is_known_where_the_sink_moved(
    kafka: str, tmp_path: Path, is_lost: bool
) -> None:
    day = 86_400_000
    life = Life.make(
        kafka, tmp_path, keep={"silver": "1d"}, publish={"topic": "x", "delivery": "at_most_once"}
    )
    life.configure("publish.topic", f"{life.river.config['name']}-merged")
    life.both(("a", 0), (None, 1000))
    life.run()
    life.both(("b", 5 * day), (None, 5 * day + 5000))
    if is_lost:
        with killed_at("publisher.produce"):
            life.call("run", "--once", exit_code=1)
    life.run()
    life.call("maintain")
    move(life.river)
    moved(kafka, life.river.sink)
    for time in (9000, 30_000):
        life.both(("c", 5 * day + time), (None, 5 * day + time + 10_000))
        life.run()
    assert numbers_in(kafka, life.river.sink) == ([0, 2, 3] if is_lost else [0, 1, 2, 3])


def test_without_transactions_nothing_is_published_anew_where_the_sink_moved(
    kafka: str, tmp_path: Path
) -> None:
    """Retention has deleted the sink's first message."""
    life = Life.make(kafka, tmp_path, publish={"topic": "x", "delivery": "at_least_once"})
    life.configure("publish.topic", f"{life.river.config['name']}-merged")
    life.both(("a", 0), ("b", 50), (None, 1000))
    life.run()
    move(life.river)
    moved(kafka, life.river.sink)
    delete_records(kafka, life.river.sink, 0, 1)
    life.both(("c", 2000), (None, 9000))
    life.run()
    assert numbers_in(kafka, life.river.sink) == [1, 2]


def test_a_crash_before_the_first_note_of_a_sink_that_is_made_again(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    life.both(("a", 0), (None, 1000))
    life.run()
    life.lose()
    life.both(("b", 2000), (None, 5000))
    life.run()
    delete_topic(kafka, life.river.sink)
    with killed_at("gold.note"):
        life.call("run", "--once", exit_code=1)
    life.both(("c", 7000), (None, 9000))
    life.run()
    assert [m["key"] for m in life.messages()] == ["b", "c"]


def with_a_message_given_up(kafka: Access, folder: Path) -> Life:
    """A lake whose sink has refused the third of four messages, as it is too large, and now takes
    it."""
    life = Life.make(kafka, folder, publish={"topic": "x", "delivery": "at_least_once"})
    sink = f"{life.river.config['name']}-merged"
    life.configure("publish.topic", sink)
    create_topics(kafka, sink, partitions=1, **{LARGEST: "1100000"})
    half = base64.b64encode(random.Random(1).randbytes(500_000)).decode()
    life.send("tracking", ("a", 0), ("b", 1), ("d", 3))
    life.send("tracking", ("c", 2), pad=half)
    life.send("orders", ("c", 2), pad=half)
    life.both((None, 1000))
    assert "MSG_SIZE_TOO_LARGE" in life.call("run", "--once", exit_code=1)
    assert numbers_in(kafka, sink) == [0, 1, 3]
    taken = ConfigEntry(LARGEST, "10000000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, sink, incremental_configs=[taken])
    admin = AdminClient(client_options(kafka))
    [done] = admin.incremental_alter_configs([resource]).values()
    done.result(30)
    return life


@pytest.mark.promise("N13")
def test_a_jump_over_a_message_that_was_given_up_waits_until_it_is_sent_again(
    kafka: str, tmp_path: Path
) -> None:
    life = with_a_message_given_up(kafka, tmp_path)
    said = life.call("reset", "--to", "earliest", "--yes", exit_code=2)
    assert "does not have yet all that this lake has published; run the lake" in said
    life.run()
    assert numbers_in(kafka, life.river.sink) == [0, 1, 3, 2, 3]
    assert life.river.broken_promises() == []
    life.call("reset", "--to", "earliest", "--yes")
    life.run()
    assert numbers_in(kafka, life.river.sink) == [0, 1, 3, 2, 3]


@pytest.mark.promise("N13")
def test_a_sink_that_lacks_a_message_is_not_taken_up(kafka: str, tmp_path: Path) -> None:
    life = with_a_message_given_up(kafka, tmp_path)
    life.lose()
    sink = life.river.sink
    said = life.call("run", "--once", exit_code=2)
    assert f"{sink}[0] lacks the message with number 2, and has later ones" in said
    life.configure("publish.topic", f"{sink}-again")
    life.configure("kafka.start", "earliest")
    life.run()
    assert numbers_in(kafka, f"{sink}-again") == [0, 1, 2, 3]
