"""A share of `make lives`: whatever happens to a lake after whatever else, each record is in one
message or accounted for."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.lives import (
    EVENTS,
    POWERLESS,
    REPLACED,
    Points,
    Step,
    chains,
    every_pair,
    live,
    pairs_of,
    parse,
    quick_lives,
    random_life,
    shrunk,
    text_of,
    with_faults,
)
from tests.support import effort
from tests.support.lives import KilledError

SECONDS = 30
"""So long are lives begun for a submission."""

TURNS = 28
"""The pairs are shared out over a week's runs, of which there are four a day."""

A_QUARTER_OF_A_DAY_S = 6 * 3600

LIVES = chains(every_pair(), random.Random(1))


ONCE_FAILED = (
    # What `keep` had deleted was merged again, by other rules.
    "merged keep reset_back evolve_window",
    # A rebuild whose history began behind the last record of an epoch left out its idle decision.
    "ahead silence evolve_within keep",
    # What a late record had opened in one generation was compared with another one's.
    "corrected tenants read far late reset_forth reset_time",
)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with quick_lives():
        yield


def assert_well(kafka: str, folder: Path, text: str, seed: str = "1") -> list[list[str]]:
    """Which points its events have reached; or else the shortest life that fails, too."""
    told = live(kafka, folder, "embedded", text, seed)
    if told.problem is not None:
        best = shrunk(kafka, folder, "embedded", told)
        pytest.fail(
            f"`--life '{text}' --seed {seed}` fails, and so does `--life '{best.text}' --seed "
            f"{seed}`:\n{best.problem}"
        )
    return told.reached


def test_all_pairs_are_in_some_life() -> None:
    assert {pair for text in LIVES for pair in pairs_of(text)} == set(every_pair())
    assert {event for text in LIVES for event, *_ in parse(text)} == set(EVENTS)


def test_a_life_is_repeated_by_its_text() -> None:
    steps = [
        Step("merged"),
        Step("reset_back", "reset.close"),
        Step("replaced", "silver.merge", REPLACED),
        Step("late", "37", POWERLESS),
    ]
    assert text_of(steps) == "merged reset_back@reset.close replaced~silver.merge late!37"
    assert parse(text_of(steps)) == steps


def test_a_process_that_was_killed_gets_past_no_other_point() -> None:
    points = Points()
    with points.armed("silver.merge"):
        points("bronze.append")
        for point in ("silver.merge", "gold.note"):
            with pytest.raises(KilledError):
                points(point)
        assert points.reached == ["bronze.append", "silver.merge"]
    points("gold.note")


@pytest.mark.long
@pytest.mark.usefixtures("root_session")
@pytest.mark.timeout(900)
def test_what_happens_to_a_lake_one_after_the_other_loses_and_repeats_nothing(
    kafka: str, tmp_path: Path
) -> None:
    turn, end = int(time.time()) // A_QUARTER_OF_A_DAY_S % TURNS, time.monotonic() + SECONDS
    for text in LIVES[turn::TURNS]:
        assert_well(kafka, tmp_path, text)
        if time.monotonic() > end:
            break


@pytest.mark.long
@pytest.mark.parametrize("text", effort.first_then_nightly(ONCE_FAILED))
def test_a_life_that_once_failed_loses_and_repeats_nothing(
    kafka: str, tmp_path: Path, text: str
) -> None:
    assert_well(kafka, tmp_path, text)


@pytest.mark.nightly
@pytest.mark.usefixtures("root_session")
@pytest.mark.timeout(14_400)
def test_every_pair_with_every_fault_loses_and_repeats_nothing(kafka: str, tmp_path: Path) -> None:
    seed = str(effort.SEED)
    rng, faults = random.Random(effort.SEED), set()
    for text in chains(every_pair(), rng):
        for (first, second), reached in zip(
            pairs_of(text), assert_well(kafka, tmp_path, text, seed)[1:], strict=True
        ):
            faults |= set(with_faults(first, second.event, reached))
    for text in chains(sorted(faults, key=str), rng):
        assert_well(kafka, tmp_path, text, seed)


@pytest.mark.nightly
@pytest.mark.usefixtures("root_session")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", effort.seeds(4))
def test_a_random_life_loses_and_repeats_nothing(kafka: str, tmp_path: Path, seed: int) -> None:
    assert_well(kafka, tmp_path, random_life(random.Random(seed)), str(seed))
