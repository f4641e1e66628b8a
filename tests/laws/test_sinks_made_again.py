"""A sink that is deleted and made again begins with the first message, also while a run goes on."""

from __future__ import annotations

import pytest

from tests.laws.conftest import QUICK, MakeLake, one_of
from tests.support.cases import Case, expected_messages, expected_quarantine, heartbeat, keyed
from tests.support.lakes import CaseLake
from tests.support.topics import create_topics, dead_letters, delete_topic, published
from watersmeet import gold as gold_module
from watersmeet.errors import SinkReplacedError, is_retriable
from watersmeet.lake import tables
from watersmeet.running.dead_letters import DeadLetters

pytestmark = [pytest.mark.promise("N18"), pytest.mark.fault("topics")]

PARTITIONS = 2


kind = one_of([QUICK])


def cases() -> dict[int, Case]:
    """Of every partition, two records are finished after a half has arrived, and two more at the
    end."""
    half = (
        [keyed("a", 1), keyed("b", 2), b"{", heartbeat(1_000)],
        [keyed("c", 2_000), keyed("d", 2_001), b"{", heartbeat(3_000)],
    )
    orders = [heartbeat(1_000), heartbeat(3_000)]
    arrivals = [*["tracking"] * 4, "orders"] * 2
    return {
        p: Case({"tracking": [*half[0], *half[1]], "orders": [*orders]}, 100, arrivals)
        for p in range(PARTITIONS)
    }


def lake_of(new_lake: MakeLake, kafka: str, sink: str, **overrides: object) -> CaseLake:
    lake = new_lake(cases(), bootstrap=kafka, publish__topic=sink, name=sink, **overrides)
    lake.arrive(0.5)
    lake.merge()
    return lake


@pytest.mark.parametrize("is_made", [False, True], ids=["deleted", "made-again"])
def test_between_two_publications(new_lake: MakeLake, kafka: str, is_made: bool) -> None:
    sink = f"laws-again-{is_made}".lower()
    lake = lake_of(new_lake, kafka, sink)
    gold = lake.gold()
    assert list(gold.drain())
    delete_topic(kafka, sink)
    if is_made:
        create_topics(kafka, sink, partitions=PARTITIONS)
    lake.arrive()
    lake.merge()
    list(gold.drain())
    assert lake.messages() == expected_messages(lake.cases)


def test_within_a_publication(
    new_lake: MakeLake, kafka: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = "laws-again-within"
    lake = lake_of(new_lake, kafka, sink)
    gold = lake.gold()
    assert list(gold.drain())
    lake.arrive()
    lake.merge()

    def make_again(point: str) -> None:
        if point == "gold.publish":
            delete_topic(kafka, sink)
            create_topics(kafka, sink, partitions=PARTITIONS)

    monkeypatch.setattr(gold_module, "fault_point", make_again)
    with pytest.raises(SinkReplacedError) as replaced:
        list(gold.drain())
    assert is_retriable(replaced.value)
    assert published(kafka, sink, PARTITIONS) == []
    monkeypatch.undo()
    list(gold.drain())
    assert lake.messages() == expected_messages(lake.cases)


def test_a_topic_of_dead_letters_too(new_lake: MakeLake, kafka: str) -> None:
    letters = "laws-again-letters"
    topics = {f"sources__{name}__topic": f"laws-again-{name}" for name in ("tracking", "orders")}
    create_topics(kafka, *topics.values(), partitions=PARTITIONS)
    lake = new_lake(
        cases(),
        bootstrap=kafka,
        name="laws-again-letters",
        publish__quarantine_topic=letters,
        **topics,
    )
    lake.arrive(0.5)
    dead = DeadLetters(lake.owner(), lake.settings, PARTITIONS, tables.QUARANTINE)
    assert list(dead.drain())
    delete_topic(kafka, letters)
    lake.arrive()
    assert list(dead.drain())
    sent = [
        (one.partition, one.offset, one.value) for one in dead_letters(kafka, letters, PARTITIONS)
    ]
    assert sorted(sent, key=repr) == sorted(
        ((row[0], row[2], row[-1]) for row in expected_quarantine(lake.cases)), key=repr
    )
