"""Rules that `evolve` takes, refuses, and lets go again: no lake ends for what it was told."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from tests.support.lives import Life
from tests.support.topics import create_topics, produce

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
