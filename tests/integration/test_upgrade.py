"""A lake of an earlier release: what this one advises loses nothing and repeats nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.effort import first_then_nightly
from tests.support.kept import FOLDER_OF_ARCHIVES, kept_river
from tests.support.rivers import EMBEDDED, FOLDER, Losses, River
from watersmeet.lake import tables

pytestmark = pytest.mark.long

LAYOUTS = sorted(int(archive.name.partition(".")[0]) for archive in FOLDER_OF_ARCHIVES.iterdir())


def refuses(river: River, *sentence: str) -> None:
    """A run ends at once, and says so."""
    river.write()
    run = river.run("--once")
    assert run.wait() == 2
    assert all(part in run.said() for part in sentence), run.said()


def continues(river: River) -> None:
    """Merges and publishes what is there and what comes then."""
    for _ in range(2):
        river.finish()
        river.flow()
    river.finish()


FIRST_WITH_RULES = 3
"""The first layout whose messages say by which rules they were made."""


@pytest.mark.promise("C13", "C14")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "lake"),
    first_then_nightly(
        [(layout, lake) for lake in (EMBEDDED, FOLDER) for layout in reversed(LAYOUTS)]
    ),
)
def test_a_lake_of_an_earlier_layout_is_refused_and_its_sink_goes_on(
    layout: int, lake: str, tmp_path: Path, on_spark: Callable[[River], River]
) -> None:
    with kept_river(layout, tmp_path, lake) as kept:
        river = on_spark(kept)
        assert layout < tables.LAYOUT_VERSION
        refuses(river, "made by an earlier version", "kafka.start: sink")
        river.config["lake"] = str(tmp_path / "new lake")
        river.config["kafka"]["start"] = "sink"
        if layout < FIRST_WITH_RULES:
            refuses(river, "did not say by which rules", "publish to topics with other names")
            river.config["publish"]["topic"] += "-anew"
            del river.config["kafka"]["start"]
        river.write()
        continues(river)
        assert river.reader.properties(tables.SILVER)[tables.LAYOUT] == str(tables.LAYOUT_VERSION)
        losses = river.losses()
        # A lake that goes on after its sink lacks what is before.
        assert losses == Losses(other=losses.other if layout >= FIRST_WITH_RULES else [])
        assert river.broken_promises() == []
