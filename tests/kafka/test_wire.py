"""What a wire that lies does to a publisher: answers are lost, and late copies of requests come."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

from tests.kafka.messages import messages
from tests.kafka.test_publisher import publisher
from tests.support.topics import consume, create_topics
from tests.support.wire import Wire, wire
from watersmeet.errors import FencedError, KafkaTransientError, KafkaUnsettledError

QUICK = {"socket.timeout.ms": "1000"}


@pytest.fixture
def sink(kafka: str, topic: str) -> str:
    create_topics(kafka, topic, partitions=1)
    return topic


def keys(kafka: str, topic: str) -> str:
    """What a reader of committed messages has."""
    return b"".join(message.key() for message in consume(kafka, topic, 1)).decode()


def in_its_midst(between: Wire, sink: str, seen: list[str]) -> Iterator[pa.Table]:
    """Two parts of a transaction; late copies come once the broker has the first, and a reader
    notes what it has then."""
    answers = between.answered["Produce"] + 1
    yield messages(0, "cd", first_seq=2)
    between.await_answers("Produce", answers)
    between.release()
    seen.append(keys(between.kafka, sink))
    yield messages(0, "ef", first_seq=4)


@pytest.mark.promise("N12")
@pytest.mark.fault("wire")
@pytest.mark.parametrize(
    "faults",
    ["EndTxn:1=lost", "EndTxn:1=cut", "EndTxn:1=mute:9", "EndTxn:1=slow:2"],
)
def test_a_late_copy_of_a_commit_never_commits_a_part_of_the_next_transaction(
    kafka: str, sink: str, faults: str
) -> None:
    with wire(kafka, f"{faults} EndTxn:1=again") as between:
        made = publisher(between.bootstrap_servers, sink, QUICK)
        made.begin()
        made.send([messages(0, "ab")])
        assert keys(kafka, sink) == "ab"
        if not made.has_begun:
            made.begin()
        seen: list[str] = []
        made.send(in_its_midst(between, sink, seen))
    assert seen == ["ab"]
    assert keys(kafka, sink) == "abcdef"


def test_a_publisher_goes_on_while_nothing_happens_to_its_connections(
    kafka: str, sink: str
) -> None:
    with wire(kafka, "FindCoordinator:1=slow:0.5 EndTxn:2=late:0.5") as between:
        made = publisher(f"127.0.0.1:1,{between.bootstrap_servers}", sink)
        made.begin()
        for seq in range(5):
            made.send([messages(0, "k", first_seq=seq)])
        assert made.has_begun
        assert between.asked["InitProducerId"] == 1


def test_a_publisher_begins_anew_where_a_request_may_still_be_under_way(
    kafka: str, sink: str
) -> None:
    """Not only a commit: of each request of a transaction a late copy would count for the next."""
    for faults in ("AddPartitionsToTxn:1=lost", "Produce:1=lost", "Produce:1=late:2"):
        with wire(kafka, faults) as between:
            made = publisher(between.bootstrap_servers, sink, QUICK)
            made.begin()
            made.send([messages(0, "k")])
            assert not made.has_begun, faults
            with pytest.raises(RuntimeError, match="begin"):
                made.send([messages(0, "k", first_seq=1)])


def test_a_publisher_that_its_own_late_request_has_fenced_begins_again(
    kafka: str, sink: str
) -> None:
    with wire(kafka, "InitProducerId:1=lost InitProducerId:1=again") as between:
        made = publisher(between.bootstrap_servers, sink)
        made.begin()
        between.release()
        with pytest.raises(KafkaUnsettledError, match="a late copy of this process's own request"):
            made.send([messages(0, "a")])
        made.begin()
        made._may_fence_itself_until = 0.0
        made.send([messages(0, "a")])
        publisher(kafka, sink).begin()
        with pytest.raises(FencedError):  # this was another one
            made.send([messages(0, "b", first_seq=1)])
    assert keys(kafka, sink) == "a"


def test_a_publisher_that_a_begin_has_fenced_that_it_gave_up_begins_again(
    kafka: str, sink: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher(kafka, sink).begin()  # now the coordinator is there, and nothing is tried again
    with wire(kafka, "InitProducerId:1=mute:60 InitProducerId:1=again") as between:
        made = publisher(between.bootstrap_servers, sink)
        with monkeypatch.context() as impatient:
            impatient.setattr("watersmeet.kafka.publisher.TIMEOUT_S", 0.5)
            with pytest.raises(KafkaTransientError):
                made.begin()
        made.begin()
        between.release()
        with pytest.raises(KafkaUnsettledError, match="a late copy of this process's own request"):
            made.send([messages(0, "a")])
