"""A lake that is set back to a copy from earlier, and a second copy that runs under its name: what
its topics have more than it is said, nothing is repeated, and the later one goes on exactly; also
where both run at once."""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.faults.power import drawn
from tests.faults.wired import MODES, broken_by
from tests.support.effort import first_then_nightly
from tests.support.lives import points_reached
from tests.support.rivers import Losses, River
from watersmeet.errors import FencedError, LakeBehindError

pytestmark = [
    pytest.mark.promise("N82"),
    pytest.mark.fault("lost", oracle=True),
    pytest.mark.fault("owners", oracle=True),
    pytest.mark.long,
]


@pytest.mark.parametrize("seed", first_then_nightly(range(50)))
def test_a_lake_that_is_behind_its_topics_says_so_and_the_later_one_goes_on(
    kafka: str, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(f"copied/{seed}")
    name = f"copied-{seed}"
    more: dict[str, Any] = {
        "publish__delivery": MODES[seed % 3],
        "publish__quarantine_topic": f"{name}-bad",
    }
    river = River.make(kafka, tmp_path, name, seed=seed, **drawn(rng, name), **more)
    lake, earlier, later = (tmp_path / folder for folder in ("lake", "earlier", "later"))
    for _ in range(rng.randint(1, 3)):
        river.flow(records=rng.choice([3, 12]))
        river.finish()
    shutil.copytree(lake, earlier)
    for _ in range(rng.randint(1, 2)):
        river.flow()
        river.finish()
    for _ in range(rng.randint(1, 2)):  # in turns
        lake.rename(later)
        earlier.rename(lake)
        with pytest.raises(LakeBehindError, match="the lake was set back to an earlier copy"):
            river.finish()
        lake.rename(earlier)
        later.rename(lake)
        river.flow()
        river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []


def run_at_once(first: River, second: River, at: int, *, stands_still: bool) -> None:
    """A run of each; the second one begins when the first one reaches its n-th fault point, and
    stands still there until the second one has ended, or does not."""
    reached, failures = itertools.count(1), list[Exception]()

    def finish(river: River) -> None:
        try:
            river.finish()
        except Exception as failure:
            failures.append(failure)

    beside = threading.Thread(target=finish, args=[second])

    def begin(_: str) -> None:
        if next(reached) == at:
            beside.start()
            if stands_still:
                beside.join()

    with points_reached(begin):
        finish(first)
        if beside.ident is not None:
            beside.join()
    for failure in failures:
        assert isinstance(failure, (FencedError, LakeBehindError)), repr(failure)


@pytest.mark.parametrize("seed", first_then_nightly(range(50)))
def test_of_two_copies_that_run_at_once_one_is_refused_and_one_goes_on(
    kafka: str, tmp_path: Path, seed: int
) -> None:
    """Without transactions, nobody is fenced: then both may send the same, with the same
    numbers."""
    rng = random.Random(f"two/{seed}")
    name, mode = f"two-{seed}", MODES[seed % 3 == 2]
    more: dict[str, Any] = {
        "publish__delivery": mode,
        "publish__quarantine_topic": f"{name}-bad",
    }
    one = River.make(kafka, tmp_path / "one", name, seed=seed, **drawn(rng, name), **more)
    other = dataclasses.replace(one, folder=tmp_path / "other")
    copies = [one, other]
    for _ in range(rng.randint(1, 3)):
        one.flow(records=rng.choice([3, 12]))
        one.finish()
    shutil.copytree(one.folder, other.folder)
    for _ in range(rng.randint(1, 3)):
        one.flow(records=rng.choice([3, 12]))
        rng.shuffle(copies)
        at, stands_still = rng.randint(1, 30), rng.random() < 0.5
        run_at_once(copies[0], copies[1], at, stands_still=stands_still)
    one.flow()
    through = 0
    for river in copies:
        try:
            river.finish()
        except LakeBehindError:
            continue
        assert broken_by(river, mode) == []
        through += 1
    assert through
