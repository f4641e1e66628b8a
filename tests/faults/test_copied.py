"""A lake that is set back to a copy from earlier, and a second copy that runs under its name: what
its topics have more than it is said, nothing is repeated, and the later one goes on exactly."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.faults.power import drawn
from tests.support.effort import first_then_nightly
from tests.support.rivers import Losses, River
from watersmeet.errors import LakeBehindError

MODES = ("exactly_once", "at_least_once", "at_most_once")

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
