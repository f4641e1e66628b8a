from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Message, Producer

from tests.kafka.messages import headers, messages, tail
from tests.kafka.waiting import await_end
from tests.support.configurations import SMALLEST
from tests.support.topics import consume, create_topics, produce, produce_transaction
from watersmeet.core.sequence import MERGED, Tail
from watersmeet.errors import (
    FencedError,
    ForeignMessageError,
    KafkaUnreachableError,
    PublishingError,
    TopicChangedError,
    is_retriable,
)
from watersmeet.kafka.options import ListeningProducer
from watersmeet.kafka.publisher import Publisher, sequence_tail, sink_publisher
from watersmeet.settings import KafkaSettings, Settings


def publisher(
    kafka: str, topic: str, options: Mapping[str, str] = MappingProxyType({}), **publish: Any
) -> Publisher:
    settings = Settings.model_validate(SMALLEST, context={"folder": Path("/")})
    to_sink = settings.publish.model_copy(update={"topic": topic, **publish})
    at = settings.kafka.model_copy(update={"bootstrap_servers": kafka, "options": dict(options)})
    return sink_publisher(settings.model_copy(update={"publish": to_sink, "kafka": at}))


@pytest.fixture
def begun(kafka: str, topic: str) -> Publisher:
    """A publisher that has begun, over a sink with two partitions."""
    create_topics(kafka, topic, partitions=2)
    made = publisher(kafka, topic)
    made.begin()
    return made


def keys(kafka: str, topic: str) -> dict[int, str]:
    found: dict[int, str] = {0: "", 1: ""}
    for message in consume(kafka, topic, 2):
        found[message.partition()] += message.key().decode()
    return found


def test_what_is_sent_is_out_as_it_was_given(begun: Publisher, kafka: str, topic: str) -> None:
    assert begun.tails(2) == {}
    assert begun.send([messages(0, "ab"), messages(1, "c", value=None)]) == {0: 1, 1: 0}
    assert settled(begun) == {0: tail(1, "b", 1), 1: tail(0, "c", 0)}
    first, second, third = consume(kafka, topic, 2)
    assert (first.key(), first.value(), first.timestamp()[1]) == (b"a", b"{}", 1)
    assert first.headers() == headers(0, 0, "a")
    assert (second.key(), third.key(), third.value()) == (b"b", b"c", None)


def test_an_offset_that_the_broker_does_not_say_is_unknown(
    begun: Publisher, kafka: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says none of a message that it has already, whose answer was lost on the way."""
    produce_it = ListeningProducer.produce

    def without_offset(self: ListeningProducer, *message: Any, **details: Any) -> None:
        if report := details["on_delivery"]:
            details["on_delivery"] = lambda error, sent: report(
                error, Message(topic=topic, partition=sent.partition(), offset=-1001)
            )
        produce_it(self, *message, **details)

    monkeypatch.setattr(ListeningProducer, "produce", without_offset)
    assert begun.send([messages(0, "ab"), messages(1, "c")]) == {0: None, 1: None}
    assert keys(kafka, topic) == {0: "ab", 1: "c"}


def test_one_producer_sends_again_and_again(begun: Publisher, kafka: str, topic: str) -> None:
    for seq in range(3):
        begun.send([messages(0, "abc"[seq], first_seq=seq)])
    assert begun.send([]) == begun.send([messages(0, "")]) == {}
    assert settled(begun)[0].seq == 2
    assert keys(kafka, topic) == {0: "abc", 1: ""}


@pytest.mark.promise("O4")
@pytest.mark.fault("owners")
def test_a_later_publisher_fences_an_earlier_one(begun: Publisher, kafka: str, topic: str) -> None:
    begun.send([messages(0, "a")])
    later = publisher(kafka, topic)
    later.begin()
    assert key_of(tails(later)[0]) == "a"
    with pytest.raises(FencedError) as fenced:
        begun.send([messages(0, "x", first_seq=1)])
    assert not is_retriable(fenced.value)
    later.send([messages(0, "b", first_seq=1)])
    assert key_of(settled(later)[0]) == "b"
    assert keys(kafka, topic)[0] == "ab"


def settled(made: Publisher) -> dict[int, Tail]:
    """The tails, once every message that was sent can be seen."""
    made.begin()
    return tails(made)


def tails(made: Publisher) -> dict[int, Tail]:
    return {
        partition: sequence_tail(message, MERGED) for partition, message in made.tails(2).items()
    }


def key_of(last: Tail) -> str:
    return str(MERGED.values(last.place)["merge_key"])


def failing(*before: pa.Table) -> Iterator[pa.Table]:
    yield from before
    raise ValueError("the engine failed")


@pytest.mark.promise("N12")
@pytest.mark.fault("kill")
def test_a_transaction_that_fails_is_never_seen(begun: Publisher, kafka: str, topic: str) -> None:
    with pytest.raises(ValueError, match="the engine failed"):
        begun.send(failing(messages(0, "ab"), messages(1, "c")))
    assert keys(kafka, topic) == {0: "", 1: ""}
    with pytest.raises(RuntimeError, match="begin"):
        begun.send([messages(0, "a")])
    begun.begin()
    assert begun.tails(2) == {}
    begun.send([messages(0, "a")])
    assert key_of(settled(begun)[0]) == "a"
    assert keys(kafka, topic)[0] == "a"


@pytest.mark.promise("K7")
@pytest.mark.fault("kill")
def test_a_new_owner_settles_the_transaction_that_was_left_open(
    begun: Publisher, kafka: str, topic: str
) -> None:
    left = Producer({"bootstrap.servers": kafka, "transactional.id": begun.transactional_id})
    left.init_transactions(30)
    left.begin_transaction()
    left.produce(topic, b"half a batch", partition=0)
    left.flush(30)
    begun.begin()
    begun.send([messages(0, "a")])
    # The abandoned message and its marker come before.
    assert settled(begun) == {0: tail(0, "a", 2)}


def test_the_tail_lies_before_markers_and_aborted_messages(
    begun: Publisher, kafka: str, topic: str
) -> None:
    begun.send([messages(0, "a")])
    produce_transaction(kafka, topic, [b"gone"] * 50, 0, commit=False)
    await_end(KafkaSettings(bootstrap_servers=kafka), topic, 53)
    assert settled(begun) == {0: tail(0, "a", 0)}


def test_a_sink_that_others_write_to_is_refused(begun: Publisher, kafka: str, topic: str) -> None:
    produce(kafka, topic, [(1, b"foreign")])
    with pytest.raises(ForeignMessageError, match=rf"{topic}\[1\] ends with a message at offset 0"):
        tails(begun)


@pytest.mark.parametrize("count", [1, 30_000])
def test_a_message_that_the_broker_does_not_take_is_not_tried_again(
    kafka: str, topic: str, count: int
) -> None:
    create_topics(kafka, topic, partitions=2, **{"max.message.bytes": "100000"})
    narrow = publisher(kafka, topic)
    narrow.begin()
    with pytest.raises(PublishingError, match="too large") as refused:
        narrow.send(
            [
                messages(0, "a", value=b"x" * 200_000),
                *[messages(1, ["k"] * 1000) for _ in range(count // 1000)],
            ]
        )
    assert not is_retriable(refused.value)
    assert keys(kafka, topic) == {0: "", 1: ""}


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_without_transactions_each_message_is_out_once_it_is_produced(
    begun: Publisher, kafka: str, topic: str, delivery: str
) -> None:
    other = publisher(kafka, topic, delivery=delivery)
    other.begin()
    assert other.send([messages(0, "abc")]) == {0: 2}
    with pytest.raises(ValueError, match="the engine failed"):
        other.send(failing(messages(1, "a")))
    with pytest.raises(FencedError):
        begun.send([messages(0, "x")])
    other.begin()
    assert tails(other)[0] == tail(2, "c", 2)


def test_a_large_batch_does_not_outgrow_the_producers_queue(begun: Publisher, topic: str) -> None:
    count = 150_000
    batch = messages(0, ["k"] * 10_000)
    sent = begun.send(batch for _ in range(count // 10_000))
    assert sent[0] == count - 1


def test_a_sink_that_was_deleted_is_one_sentence(kafka: str) -> None:
    gone = publisher(kafka, "no-such-sink")
    gone.begin()
    with pytest.raises(TopicChangedError, match="topic no-such-sink does not exist"):
        gone.tails(1)


def test_a_broker_that_is_away_is_worth_another_try(
    topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = publisher("127.0.0.1:1", topic, delivery="at_least_once")
    monkeypatch.setattr("watersmeet.kafka.publisher.TIMEOUT_S", 1.0)
    with pytest.raises(KafkaUnreachableError, match="refused") as error:
        away.begin()
    assert is_retriable(error.value)


@pytest.mark.promise("N19")
@pytest.mark.parametrize("queue", [None, "1000"], ids=["default", "small"])
def test_a_message_that_is_larger_than_the_queue_is_sent(
    kafka: str, topic: str, queue: str | None
) -> None:
    create_topics(kafka, topic, partitions=2, **{"max.message.bytes": "90000000"})
    options = {} if queue is None else {"queue.buffering.max.kbytes": queue}
    large = publisher(kafka, topic, options, max_bytes=80 * 2**20)
    large.begin()
    large.send(
        [
            messages(0, "ab"),
            messages(0, "c", first_seq=2, value=bytes(70 * 2**20)),
            messages(1, "d"),
        ]
    )
    sizes = [len(message.value() or b"") for message in consume(kafka, topic, 2)]
    assert sizes == [2, 2, 70 * 2**20, 2]
