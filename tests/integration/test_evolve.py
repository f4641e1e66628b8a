"""Rules that `evolve` takes, refuses, and lets go again: no lake ends for what it was told."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.lives import Life, killed_at, values
from tests.support.rivers import TIMEOUT_MS
from tests.support.topics import create_topics, produce
from watersmeet.core.times import utc
from watersmeet.lake.history import read_history

pytestmark = [pytest.mark.long, pytest.mark.promise("C6"), pytest.mark.fault("rules")]


@pytest.mark.parametrize("rule", ["heartbeat", "where"])
def test_a_condition_that_means_another_thing_is_another_rule(
    kafka: str, tmp_path: Path, rule: str
) -> None:
    life = Life.make(kafka, tmp_path)
    life.configure(f"sources.orders.{rule}", {"field": "flag", "equals": 1})
    life.both(("k", 1000))
    life.run()
    life.configure(f"sources.orders.{rule}", {"field": "flag", "equals": True})
    said = life.call("run", "--once", exit_code=2)
    assert f"sources.orders.{rule}: the lake has other rules than this configuration" in said
    assert f"sources.orders.{rule}" in life.call("evolve")
    life.call("evolve", "--apply")
    life.run()


DAY_MS = 86_400_000
FIELD = "publish.corrections.topic"


def corrections_in(life: Life, topic: str) -> None:
    life.configure("publish.corrections", {"topic": topic, "within": "1d"})


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "taken once"])
def test_corrections_that_evolve_brings_can_be_had_elsewhere_or_not_at_all(
    kafka: str, tmp_path: Path, *, is_refused: bool
) -> None:
    """Also in a lake whose earlier version took a topic that has messages."""
    life = Life.make(kafka, tmp_path)
    life.both(("k", 1000), (None, 1400))
    life.run()
    used = f"{life.river.config['name']}-used"
    create_topics(kafka, used, partitions=1)
    produce(kafka, used, [(0, b"somebody's")])
    corrections_in(life, used)
    if is_refused:
        for words in (["evolve"], ["evolve", "--apply"]):
            assert f"{FIELD}: {used} has messages" in life.call(*words, exit_code=2)
    else:
        with patch("watersmeet.operations.evolve.used_topic", lambda *_: ""):
            life.call("evolve", "--apply")
        life.call("run", "--once", exit_code=1)
    for topic in (f"{used}-not", None):
        life.configure("publish.corrections", topic and {"topic": topic, "within": "1d"})
        life.call("evolve", "--apply")
        life.call("run", "--once")
    life.call("reset", "--to", "latest", "--yes")


def test_corrections_that_evolve_brings_to_a_topic_that_does_not_fit_can_be_taken_back(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    life.both(("k", 1000), (None, 1400))
    life.run()
    wide = f"{life.river.config['name']}-wide"
    create_topics(kafka, wide, partitions=2)
    corrections_in(life, wide)
    said = life.call("evolve", "--apply", exit_code=2)
    assert f"{FIELD}: {wide} has 2 partitions and the sources have 1" in said
    for topic in (f"{wide}-not", None):
        life.configure("publish.corrections", topic and {"topic": topic, "within": "1d"})
        life.call("evolve", "--apply")
        life.call("run", "--once")


def test_corrections_that_are_out_stay_in_their_topic_where_a_crash_came_before_the_note(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    topic = f"{life.river.config['name']}-corrected"
    corrections_in(life, topic)
    life.both(("a", 0), (None, 1000))
    life.run()
    life.send("tracking", ("a", 100))
    life.both((None, 2000))
    life.run("bronze")
    life.run("silver")
    with killed_at("gold.note"):
        life.call("run", "gold", "--once", exit_code=1)
    corrections_in(life, f"{topic}-not")
    said = life.call("evolve", "--apply", exit_code=2)
    assert f"{FIELD}: the lake's corrections go to {topic}" in said
    corrections_in(life, topic)
    life.run()
    assert len(values(kafka, topic)) == 1
    life.check()


@pytest.mark.parametrize("keep", [None, "1s"], ids=["all", "keep"])
def test_corrections_that_evolve_brings_have_what_they_need(
    kafka: str, tmp_path: Path, keep: str | None
) -> None:
    life = Life.make(kafka, tmp_path)
    life.configure("keep", {"silver": keep})
    life.both(("a", 1000), (None, 1400))
    life.run()
    for clock in (5000, 9000, 13_000):
        life.both((f"x{clock}", clock - 500), (None, clock))
        life.run()
        life.call("maintain")
    topic = f"{life.river.config['name']}-corrected"
    late = "a", 1100
    life.configure("keep", {"silver": "2d"})
    if keep:
        corrections_in(life, topic)
        said = life.call("evolve", "--apply", exit_code=2)
        assert "`keep` has deleted rows of partition 0 that corrections may need" in said
        floor = read_history(life.river.reader, life.river.settings).floors.times["silver", 0]
        passed = floor + DAY_MS + 4 * TIMEOUT_MS
        assert f"until its clock has passed {utc(passed)}" in said
        life.configure("publish.corrections", None)
        again = floor + 6000
        life.both(("a", again), (None, passed + 1))
        life.run()
        late = "a", again + 100
    corrections_in(life, topic)
    life.call("evolve", "--apply")
    life.send("tracking", late)
    life.both((None, late[1] + DAY_MS))
    life.run()
    [value] = values(kafka, topic)
    assert len(json.loads(value)["tracking"]) == 2, "the merge record, and the late one"


def test_an_expression_that_is_not_taken_any_more_is_changed_by_evolve(
    kafka: str, tmp_path: Path
) -> None:
    life = Life.make(kafka, tmp_path)
    life.configure("publish.valid", "random() < 2")
    with patch("watersmeet.run.check_expressions", lambda _: []):  # an earlier version took it
        life.both(("k", 1000), (None, 1400))
        life.run("bronze")
    life.call("run", "--once", exit_code=2)
    life.configure("publish.valid", "true")
    life.call("evolve", "--apply")
    life.run()
    assert [message["key"] for message in life.messages()] == ["k"]
