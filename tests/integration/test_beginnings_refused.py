"""A lake that begins over a sink goes on exactly where that ended, or is refused; and the way out
that a refusal names leads to the end: over both lives, each record is in one message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_generations import FAR, fed, pairs
from tests.integration.test_lost_corrections import CorrectedLife
from tests.support.effort import first_then_nightly
from tests.support.lives import Life
from tests.support.topics import (
    create_topics,
    delete_records,
    delete_topic,
    make_again,
)
from watersmeet.lake import tables

pytestmark = [pytest.mark.long, pytest.mark.promise("B125"), pytest.mark.fault("lost", "topics")]

ELSEWHERE = "publish to topics with other names"
JUMPED_BEFORE = "the lake jumped shortly before it was lost"


def lived(kafka: str, folder: Path, make: Callable[..., Life] = Life.make, **config: Any) -> Life:
    """A lake that has published, and merges on."""
    life = make(kafka, folder, **config)
    fed(life)
    life.both(("open", 1500))
    life.run()
    return life


def refused(life: Life, *said: str) -> None:
    """A run ends at once, says this, and leaves nothing of a lake."""
    sentence = life.call("run", "--once", exit_code=2)
    assert all(part in sentence for part in said), sentence
    assert list((life.river.folder / "lake").rglob("*.parquet")) == []


def elsewhere(life: Life) -> None:
    """What is published goes to topics that never had a message."""
    for path in ("publish.topic", "publish.corrections.topic"):
        at: Any = life.river.config
        for name in path.split("."):
            at = at.get(name) if at else None
        if at:
            life.configure(path, f"{at}-anew")


def at_the_sink(life: Life) -> None:
    life.configure("kafka.start", "sink")


def goes_on(life: Life, lost: frozenset[int] = frozenset()) -> None:
    """Over both lives, each record is in one message, but for those that Kafka has lost."""
    life.run()
    fed(life, 3000)
    life.both((None, FAR))
    life.run()
    assert life.keyed - life.sent_once() == lost
    life.check()


# -- a start that knows nothing of the sink


@pytest.mark.parametrize("way_out", first_then_nightly([at_the_sink, elsewhere]))
@pytest.mark.parametrize(
    "start",
    first_then_nightly(
        [
            "earliest",
            "latest",
            {"timestamp": "2020-01-01T00:00:00Z"},
            {"offsets": {"tracking": {0: 1}}},
        ],
        2,
    ),
    ids=["earliest", "latest", "time", "offsets"],
)
def test_only_a_start_at_the_sink_goes_on_over_a_sink(
    kafka: str, tmp_path: Path, start: Any, way_out: Callable[[Life], None]
) -> None:
    life = lived(kafka, tmp_path)
    life.lose(start)
    refused(life, f"{life.river.sink} has messages of a former life", "start at `sink`", ELSEWHERE)
    way_out(life)
    if start not in ("earliest", {"timestamp": "2020-01-01T00:00:00Z"}):
        life.configure("kafka.start", "sink")  # the others would leave records out
    goes_on(life)


@pytest.mark.fault("retention")
@pytest.mark.parametrize("start", first_then_nightly(["sink", "earliest"]))
def test_a_sink_that_retention_has_emptied_is_not_taken_for_a_new_one(
    kafka: str, tmp_path: Path, start: str
) -> None:
    life = lived(kafka, tmp_path)
    delete_records(kafka, life.river.sink, 0, -1)
    life.lose(start)
    refused(life, f"{life.river.sink}[0]", "first offset", ELSEWHERE)
    elsewhere(life)
    goes_on(life)


@pytest.mark.nightly
def test_corrections_of_a_former_life_are_not_gone_on_with_beside_a_new_sink(
    kafka: str, tmp_path: Path
) -> None:
    life = lived(kafka, tmp_path, CorrectedLife.begin)
    assert isinstance(life, CorrectedLife)
    life.correct(2500, ("k0", 5))
    assert len(life.corrections()) == 1
    topic = life.river.config["publish"]["corrections"]["topic"]
    life.configure("publish.topic", f"{life.river.sink}-anew")
    for start, has in (
        ("earliest", f"{topic} has messages of a former life"),
        ("sink", f"{topic}[0] has or had messages, and {life.river.sink}[0] has none"),
    ):
        life.lose(start)
        refused(life, has, ELSEWHERE)
        (tmp_path / "lake").mkdir(exist_ok=True)
    life.configure("publish.corrections.topic", f"{topic}-anew")
    life.run()
    life.both((None, FAR))
    life.run()
    life.check()


# -- a sink that cannot be taken up exactly


def test_a_sink_without_all_that_must_be_read_back_is_refused(kafka: str, tmp_path: Path) -> None:
    life = lived(kafka, tmp_path)
    delete_records(kafka, life.river.sink, 0, 4)
    life.lose()
    refused(life, f"retention has deleted messages of {life.river.sink}[0]", "offset is 4")
    elsewhere(life)
    goes_on(life)


@pytest.mark.fault("jumps")
def test_a_sink_with_messages_of_before_a_jump_that_must_be_read_back_is_refused(
    kafka: str, tmp_path: Path
) -> None:
    """The first message holds no record of its key that comes after the jump, although it could be
    joined then by its own clock."""
    life = Life.make(kafka, tmp_path)
    life.both(("k", 1000), (None, 1400))
    life.run()
    life.call("reset", "--to", "latest", "--yes")
    life.both(("j", 1100), ("k", 1200), (None, 1450))
    life.run()
    assert len(life.messages()) == 2
    life.lose()
    refused(life, JUMPED_BEFORE, f"the last messages of {life.river.sink}[0]")
    elsewhere(life)
    goes_on(life)


@pytest.mark.fault("jumps")
def test_a_sink_behind_which_records_of_before_a_jump_would_be_read_again_is_refused(
    kafka: str, tmp_path: Path
) -> None:
    """A record that is out would take one with it that is not: it is no longer in order, since the
    lake began behind what came before it."""
    life = Life.make(kafka, tmp_path, kafka__start="latest")
    life.both(("b", 10_000))
    life.run()
    life.both(("k", 9699), ("k", 9850), (None, 10_005))
    life.run()
    life.call("reset", "--to", "earliest", "--yes")
    life.both(("k", 10_100), (None, 10_302))
    life.run()
    assert [message["key"] for message in life.messages()] == ["k", "b"]
    life.lose()
    refused(life, JUMPED_BEFORE, f"the last messages of {life.river.sink}[0]")
    elsewhere(life)
    life.run()
    life.check()


@pytest.mark.fault("jumps")
@pytest.mark.parametrize("clock", [10_002, 10_302], ids=["correction", "message"])
def test_what_is_out_of_before_a_jump_is_corrected_by_no_lost_lake(
    kafka: str, tmp_path: Path, clock: int
) -> None:
    """Or merged, where only a correction has it; also before the sink has a message of after the
    jump."""
    life = CorrectedLife.begin(kafka, tmp_path, kafka__start="latest")
    life.both(("b", 10_000))
    life.run()
    life.both(("k", 1000), (None, 2000), ("j", 1900))
    life.run()
    life.call("reset", "--to", "earliest", "--yes")
    life.both((None, clock))
    life.run()
    assert len(life.messages()) == (1 if clock < 10_300 else 2)
    assert len(life.corrections()) == 2
    life.lose()
    refused(life, JUMPED_BEFORE)
    elsewhere(life)
    life.run()
    life.check()


@pytest.mark.nightly
def test_a_sink_without_messages_that_need_not_be_read_back_goes_on(
    kafka: str, tmp_path: Path
) -> None:
    """Its second partition never had a message."""
    life = lived(kafka, tmp_path, partitions=2, merge={"timeout": "20ms"})
    before = set(life.numbers())
    delete_records(kafka, life.river.sink, 0, 1)
    gone = before - set(life.numbers())
    life.lose()
    goes_on(life, frozenset(gone))


@pytest.mark.parametrize("change", first_then_nightly(["added", "renamed"]))
def test_a_sink_that_was_made_of_other_topics_is_refused(
    kafka: str, tmp_path: Path, change: str
) -> None:
    life = lived(kafka, tmp_path)
    topic = life.river.topic("tracking")
    create_topics(kafka, f"{topic}-other", partitions=1)
    other = f"{topic}-other"
    life.lose()
    life.configure("sources.tracking.topic", [topic, other] if change == "added" else other)
    refused(
        life,
        "were made from orders, tracking, and this configuration has"
        if change == "added"
        else f"{other} is another topic than the one",
        ELSEWHERE,
    )
    life.configure("sources.tracking.topic", topic)
    goes_on(life)


@pytest.mark.nightly
def test_a_sink_that_was_made_of_a_topic_that_was_made_again_is_refused(
    kafka: str, tmp_path: Path
) -> None:
    life = lived(kafka, tmp_path)
    topic = life.river.topic("tracking")
    make_again(kafka, topic, 1)
    life.lose()
    refused(life, f"{topic} is another topic than the one", "and was", ELSEWHERE)
    elsewhere(life)
    goes_on(life)


@pytest.mark.fault("retention")
@pytest.mark.parametrize("way_out", first_then_nightly(["continue", "elsewhere"]))
def test_a_lost_lake_whose_records_kafka_has_deleted_is_refused(
    kafka: str, tmp_path: Path, way_out: str
) -> None:
    """The record that is lost was to be merged next."""
    life = Life.make(kafka, tmp_path)
    fed(life)
    fed(life, 1500)
    new = life.both(("new", 3000))
    topic = life.river.topic("tracking")
    delete_records(kafka, topic, 0, 13)
    life.lose()
    refused(life, f"no longer has offsets of {topic}[0]", "to 12", "continue", ELSEWHERE)
    if way_out == "elsewhere":
        elsewhere(life)
        life.run()
        life.both((None, FAR))
        life.run()
        assert set(life.numbers()) >= {new[1]}
    else:
        life.configure("kafka.on_data_loss", "continue")
        goes_on(life, frozenset({new[0]}))
        gaps = life.river.reader.select(tables.RESETS, ["source", "to_offset", "reason"])
        assert gaps.to_pylist() == [
            {"source": "tracking", "to_offset": 13, "reason": "on_data_loss: continue"}
        ]
    life.check()


# -- corrections


def corrected(kafka: str, folder: Path) -> CorrectedLife:
    """A lake with a correction that is out."""
    life = CorrectedLife.begin(kafka, folder)
    life.both(*pairs(0), (None, 1000))
    life.run()
    life.correct(1100, ("k0", 5))
    assert len(life.corrections()) == 1
    return life


def ends_with_each_once(life: CorrectedLife) -> None:
    """Over both lives, a consumer of both topics has each record once."""
    life.run()
    life.correct(5000, ("k0", 7))
    assert life.consumed() == life.keyed
    life.check()


@pytest.mark.nightly
def test_corrections_of_another_life_are_refused(kafka: str, tmp_path: Path) -> None:
    other = corrected(kafka, tmp_path / "other")
    life = corrected(kafka, tmp_path / "life")
    topic = life.topic
    life.lose()
    life.configure("publish.corrections.topic", other.topic)
    refused(life, f"the last message of {other.topic}[0] is of another life", ELSEWHERE)
    life.configure("publish.corrections.topic", topic)
    ends_with_each_once(life)


@pytest.mark.nightly
@pytest.mark.parametrize("change", first_then_nightly(["none", "new"]))
def test_a_lost_lake_goes_on_with_its_corrections_or_not_at_all(
    kafka: str, tmp_path: Path, change: str
) -> None:
    life = corrected(kafka, tmp_path)
    corrections = life.river.config["publish"]["corrections"]
    life.lose()
    new = {**corrections, "topic": f"{life.topic}-other"}
    life.configure("publish.corrections", None if change == "none" else new)
    refused(life, f"{life.topic} has messages", f"set it to {life.topic}", ELSEWHERE)
    life.configure("publish.corrections", corrections)
    ends_with_each_once(life)


@pytest.mark.nightly
def test_a_lost_lake_without_its_last_corrections_is_refused(kafka: str, tmp_path: Path) -> None:
    life = corrected(kafka, tmp_path)
    delete_records(kafka, life.topic, 0, -1)
    life.lose()
    refused(life, f"retention has deleted all messages of {life.topic}[0]", ELSEWHERE)
    elsewhere(life)
    life.run()
    life.both((None, FAR))
    life.run()
    assert set(life.numbers().values()) == {1}
    life.check()


@pytest.mark.nightly
def test_a_lost_lake_goes_on_where_the_topic_of_corrections_was_deleted(
    kafka: str, tmp_path: Path
) -> None:
    life = corrected(kafka, tmp_path)
    delete_topic(kafka, life.topic)
    life.lose()
    life.run()
    life.both((None, FAR))
    life.run()
    assert set(life.numbers().values()) == {1}
    life.check()


def test_no_version_of_a_correction_comes_twice_after_a_loss(kafka: str, tmp_path: Path) -> None:
    """The merge record was not valid, is out as a correction alone, and is merged again."""
    life = CorrectedLife.begin(kafka, tmp_path, publish__valid="len(orders) > 0")
    life.both(("m", 0))
    life.send("tracking", ("a", 700))
    life.both((None, 2000))
    life.run()
    life.send("orders", ("a", 750))
    life.both((None, 2500))
    life.run()
    assert [each.version.version for each in life.corrections()] == [1]
    life.lose()
    life.run()
    life.correct(5000, ("a", 780))
    life.send("orders", ("a", 790))
    life.both((None, FAR))
    life.run()
    life.corrections()
    life.consumed()
    life.check()
