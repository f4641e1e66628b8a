"""What a topic says is believed as far as the lake bears it out: a message that the lake did not
send ends a run, and holds back nothing without a word; letters of another lake are left to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_generations import FAR, fed
from tests.integration.test_lost_corrections import CorrectedLife
from tests.support.effort import first_then_nightly
from tests.support.lives import Life, killed_at, messages_in
from tests.support.topics import CheckedProducer, dead_letters, delete_records
from watersmeet.kafka.reading import headers_of

pytestmark = [pytest.mark.long, pytest.mark.promise("N38"), pytest.mark.fault("damage")]


def forge(life: Life, topic: str, headers: dict[str, Any]) -> int:
    """Somebody else's message in partition 0; answers its offset."""
    producer = CheckedProducer(life.river.kafka)
    sent = [(f"watersmeet.{name}", str(value).encode()) for name, value in headers.items()]
    producer.produce(topic, b"{}", b"k", 0, timestamp=1000, headers=sent)
    assert producer.flush(30) == 0
    offset = messages_in(life.river.kafka, topic)[-1].offset()
    assert offset is not None
    return offset


def merged(seq: int, key: str, event_time: int, due: int) -> dict[str, Any]:
    closing = {"due": due, "closed_at": due + 1}
    return {"seq": seq, "id": f"0/{event_time}/{key}", **closing}


FORGED = {
    "far ahead": merged(5, "zz", 10**9, 10**9),
    "a row with another number": merged(7, "open", 1500, 1800),
    "the last row again": merged(5, "k4", 40, 340),
    "an earlier number far ahead": merged(2, "zz", 10**9, 10**9),
    "the last number far ahead": merged(4, "zz", 10**9, 10**9),
}


@pytest.mark.parametrize("what", first_then_nightly(FORGED, 2))
def test_a_message_that_the_lake_did_not_send_ends_a_run_that_names_it(
    kafka: str, tmp_path: Path, what: str
) -> None:
    life = Life.make(kafka, tmp_path)
    fed(life)
    life.both(("open", 1500), (None, 5000))
    life.run("bronze", "silver")
    offset = forge(life, life.river.sink, FORGED[what])
    said = life.call("run", "--once", exit_code=1)
    assert f"{life.river.sink}[0] ends with a message at offset {offset} that has no" in said
    life.configure("publish.topic", f"{life.river.sink}-anew")
    life.run()
    assert life.keyed == life.sent_once()


def test_a_correction_that_the_lake_did_not_send_ends_a_run_that_names_it(
    kafka: str, tmp_path: Path
) -> None:
    life = CorrectedLife.begin(kafka, tmp_path)
    fed(life)
    life.correct(2500, ("k0", 5))
    late = {"late": f"tracking/{life.river.topic('tracking')}/0/999", "u": 10**9}
    about = {"seq": 1, "id": "0/0/k0", "version": 2, "settled_at": 10**9 + 1}
    offset = forge(life, life.topic, {**about, **late})
    said = life.call("run", "--once", exit_code=1)
    assert f"{life.topic}[0] ends with a message at offset {offset} that has no" in said


@pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once", "at_most_once"])
def test_a_copy_of_an_earlier_message_has_no_message_sent_again(
    kafka: str, tmp_path: Path, delivery: str
) -> None:
    life = Life.make(kafka, tmp_path, publish__delivery=delivery)
    fed(life)
    life.run()
    sink = life.river.sink
    sent = messages_in(kafka, sink)
    headers, producer = sent[1].headers(), CheckedProducer(kafka)
    producer.produce(sink, sent[1].value(), sent[1].key(), 0, timestamp=1, headers=headers)
    assert producer.flush(30) == 0
    life.both(("open", 1500), (None, 5000))
    life.run()
    headers_now: list[dict[str, Any]] = [dict(headers_of(m)) for m in messages_in(kafka, sink)]
    numbers = [int(each["watersmeet.seq"]) for each in headers_now]
    assert numbers == [*range(len(sent)), 1, len(sent)]


@pytest.mark.fault("kill", "lost")
@pytest.mark.parametrize("lost", first_then_nightly([True, False]), ids=["taken up", "living"])
def test_a_message_that_a_crash_kept_from_being_noted_is_the_lakes(
    kafka: str, tmp_path: Path, lost: bool
) -> None:
    life = CorrectedLife.begin(kafka, tmp_path)
    fed(life)
    if lost:
        life.lose()
        life.run()
    life.send("tracking", ("k0", 1005))
    life.both(("more", 3000), (None, FAR))
    with killed_at("gold.note"):
        life.call("run", "--once", exit_code=1)
    life.run()
    assert life.consumed() == life.keyed
    life.check()


@pytest.mark.fault("owners")
def test_a_second_lake_sends_its_own_letters_to_a_common_topic(kafka: str, tmp_path: Path) -> None:
    """Its sources have the same names; each lake goes on behind its own letters."""
    first, second = (Life.make(kafka, tmp_path / name) for name in ("first", "second"))
    topic = f"{first.river.config['name']}-letters"
    expected = set()
    for life in (first, second):
        life.configure("publish.late_topic", topic)
    for begin in (0, 3000):
        for life, late in ((first, 2), (second, 1)):
            fed(life, begin)
            for n in range(late):
                life.send("tracking", (f"late{n}", begin))
            life.both((None, begin + 1500))
            life.run()
            place = life.river.topic("tracking")
            here = [each for each in dead_letters(kafka, topic, 1) if each.source_topic == place]
            assert len(here) == late * (1 if begin == 0 else 2)
            expected |= {(each.source_topic, each.offset) for each in here}
            assert life.river.broken_promises() == []
    sent = [(each.source_topic, each.offset) for each in dead_letters(kafka, topic, 1)]
    assert sorted(sent) == sorted(expected)


@pytest.mark.nightly
@pytest.mark.fault("lost")
def test_a_lake_that_is_taken_up_goes_on_behind_its_letters(kafka: str, tmp_path: Path) -> None:
    life = Life.make(kafka, tmp_path)
    topic = f"{life.river.config['name']}-letters"
    life.configure("publish.late_topic", topic)
    fed(life)
    life.send("tracking", ("late", 0))
    life.both((None, 1500))
    life.run()
    life.lose()
    life.run()
    life.send("tracking", ("later", 0))
    life.both((None, FAR))
    life.run()
    assert len(dead_letters(kafka, topic, 1)) == 2
    delete_records(kafka, topic, 0, -1)
    life.run()
    assert dead_letters(kafka, topic, 1) == []
    life.check()
