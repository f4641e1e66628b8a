"""Corrections and jumps: what is not out when a lake jumps is closed and judged anew, what is out
stays out, and a topic that is made again gets what all generations have published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.test_generations import FAR
from tests.integration.test_lost_corrections import CorrectedLife
from tests.support.lives import killed_at
from tests.support.topics import delete_topic

pytestmark = [pytest.mark.long, pytest.mark.promise("R20"), pytest.mark.fault("jumps")]


def unpublished(kafka: str, folder: Path) -> tuple[CorrectedLife, set[int]]:
    """A lake with a correction that is not out, and a late record that is not settled."""
    life = CorrectedLife.begin(kafka, folder)
    numbers = life.both(("a", 0), (None, 1000))
    life.run()
    numbers += life.send("tracking", ("a", 100))
    life.both((None, 2000))
    numbers += life.send("tracking", ("b", 1600))
    life.run("bronze", "silver")
    return life, set(numbers)


def jumped(life: CorrectedLife, to: str) -> None:
    """A jump, which says before what it closes."""
    said = json.loads(life.call("reset", "--to", to, "--json"))
    assert (said["corrections_closed"], said["late_records_closed"]) == (1, 1)
    shown = life.call("reset", "--to", to, "--yes")
    assert "and 1 correction were closed unpublished" in shown
    assert "and 1 late record was corrected no more" in shown
    [partition] = json.loads(life.call("status", "--json"))["partitions"]
    assert (partition["corrections"], partition["corrections_closed"]) == (0, 1)
    explained = json.loads(life.call("explain", "a", "--json"))
    [late] = explained["late"]
    assert late["outcome"].endswith("; closed unpublished by a deliberate reset")


@pytest.mark.promise("B123")
def test_what_a_jump_back_finds_unpublished_is_corrected_anew(kafka: str, tmp_path: Path) -> None:
    life, numbers = unpublished(kafka, tmp_path)
    jumped(life, "earliest")
    life.check()
    life.run()
    life.both((None, FAR))
    life.run()
    life.corrections()
    assert life.consumed() == numbers
    life.check()


@pytest.mark.nightly
@pytest.mark.promise("B123")
def test_what_a_jump_on_finds_unpublished_stays_closed(kafka: str, tmp_path: Path) -> None:
    life, numbers = unpublished(kafka, tmp_path)
    on_time, new = life.numbers(), life.sent
    jumped(life, "latest")
    life.both(("c", 5000), (None, FAR))
    life.run()
    assert life.corrections() == []
    assert life.consumed() == {*on_time, *(n for n in life.keyed if n >= new)}
    assert numbers - life.consumed(), "two late records"
    life.check()
    for number in ("0", "1"):
        into = str(tmp_path / f"of-{number}")
        life.call("rebuild", "--into", into, "--generation", number)
        life.call("verify", "--against", into)


@pytest.mark.nightly
@pytest.mark.promise("N18")
@pytest.mark.fault("topics")
def test_a_topic_of_corrections_made_again_gets_what_all_generations_have_published(
    kafka: str, tmp_path: Path
) -> None:
    """In their order and numbered from 0 on, also where a crash cuts it short."""
    life, numbers = unpublished(kafka, tmp_path)
    life.run()
    life.both((None, 3000))
    life.run()
    for begin in (4000, 8000):
        life.call("reset", "--to", "earliest" if begin == 4000 else "latest", "--yes")
        numbers |= set(life.both(("a", begin), (None, begin + 1000)))
        life.run()
        numbers |= set(life.correct(begin + 2000, ("a", begin + 100), ("d", begin + 50)))
    before = life.corrections()
    assert len(before) == 6
    delete_topic(kafka, life.topic)
    with killed_at("gold.note"):
        life.call("run", "--once", exit_code=1)
    life.run()
    assert life.corrections() == before
    assert life.consumed() == numbers
    life.check()
    numbers |= set(life.correct(20_000, ("d", 8060)))
    assert life.consumed() == numbers
    life.check()


@pytest.mark.nightly
def test_a_jump_back_of_a_lake_that_corrects_no_more_repeats_no_correction(
    kafka: str, tmp_path: Path
) -> None:
    life = CorrectedLife.begin(kafka, tmp_path)
    numbers = life.both(("a", 0), (None, 1000))
    life.run()
    numbers += life.correct(1100, ("a", 100), ("b", 50))
    assert len(life.corrections()) == 2
    life.evolve("publish.corrections", None)
    assert json.loads(life.call("reset", "--to", "earliest", "--json"))["corrections_closed"] == 0
    life.call("reset", "--to", "earliest", "--yes")
    life.both((None, FAR))
    life.run()
    assert life.consumed() == set(numbers)
    life.check()


@pytest.mark.nightly
@pytest.mark.promise("B123")
@pytest.mark.fault("topics")
@pytest.mark.parametrize("which", ["sink", "corrections"])
def test_a_lake_whose_topic_was_made_again_jumps_once_that_has_what_was_published(
    kafka: str, tmp_path: Path, which: str
) -> None:
    life = CorrectedLife.begin(kafka, tmp_path)
    numbers = life.both(("a", 0), (None, 1000))
    life.run()
    numbers += life.correct(1100, ("a", 100), ("b", 50))
    life.call("reset", "--to", "latest", "--yes")
    topic = life.river.sink if which == "sink" else life.topic
    delete_topic(kafka, topic)
    for more in ([], ["--yes"]):
        said = life.call("reset", "--to", "earliest", *more, exit_code=2)
        assert f"{topic}[0] does not have yet all that this lake has published" in said
    life.run()
    life.call("reset", "--to", "earliest", "--yes")
    life.both((None, FAR))
    life.run()
    assert life.consumed() == set(numbers)
    life.check()
