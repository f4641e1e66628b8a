"""Random elections of leaders that lack what was read or published: refused, or exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.elections import play
from tests.kafka.messages import messages
from tests.support import effort
from tests.support.topics import consume, create_topics, settings_of
from tests.support.truncated import truncated
from watersmeet.core.sequence import MERGED
from watersmeet.kafka import cluster
from watersmeet.kafka.publisher import Publisher, sequence_tail

pytestmark = [
    pytest.mark.long,
    pytest.mark.promise("C52"),
    pytest.mark.timeout(1200),
]


@pytest.mark.fault("broker")
def test_of_a_transaction_whose_end_a_broker_has_lost_nothing_is_seen_and_all_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "SETTLING_S", 0.5)
    topic = "cut"
    with truncated(tmp_path / "broker") as own:
        kafka = own.bootstrap_servers
        create_topics(kafka, topic, partitions=2)
        for keys, first_seq in (("ab", 0), ("cd", 2)):
            made = Publisher(settings_of(kafka), topic, topic, 100_000)
            made.begin()
            made.send([messages(p, keys, first_seq=first_seq) for p in range(2)])
        made.begin()  # as soon as Kafka's coordinator knows that the last one has ended
        # Of one partition only the end is lost, of the other one the messages, too.
        assert own.lose({(topic, 0): 5, (topic, 1): 3}) == {(topic, 0): 5, (topic, 1): 3}
        made = Publisher(settings_of(kafka), topic, topic, 100_000)
        made.begin()
        tails = {p: sequence_tail(message, MERGED).seq for p, message in made.tails(2).items()}
        assert tails == {0: 1, 1: 1}
        made.send([messages(p, "cd", first_seq=2) for p in range(2)])
        seen = [(m.partition(), m.key().decode()) for m in consume(kafka, topic, 2)]
        assert seen == [(p, key) for p in range(2) for key in "abcd"]


@pytest.mark.nightly
@pytest.mark.fault("broker", oracle=True)
def test_what_a_broker_has_lost_is_told_or_costs_nothing(tmp_path: Path) -> None:
    with truncated(tmp_path / "broker") as own:
        broken = play(own, tmp_path, effort.seeds(3))
    assert not any(broken.values()), broken
