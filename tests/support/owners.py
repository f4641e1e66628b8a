"""Two runs on one lake: the second is refused, and a first one that was only paused writes nothing
once it was replaced."""

from __future__ import annotations

from tests.support.cases import SOURCES
from tests.support.rivers import River, RunProcess
from watersmeet.lake import tables


def assert_refused(river: River) -> None:
    """A run beside the one that has the lake ends at once, with a sentence."""
    second = river.run("--once")
    assert second.wait() == 1
    assert "is being written by process" in second.said()


def wake(paused: RunProcess) -> None:
    """It goes on where it was, learns that it was replaced, and ends."""
    paused.resume()
    paused.let_go()
    assert paused.wait() == 1
    assert "fenced and writes nothing more" in paused.said()
    assert "Traceback" not in paused.said()


def assert_changes_nothing(river: River, paused: RunProcess) -> None:
    """A paused run that was replaced wakes up, and no table has a new version."""
    written = {
        name: river.reader.version(name)
        for name in (*map(tables.bronze, SOURCES), tables.SILVER, tables.PUBLISHED)
    }
    wake(paused)
    assert {name: river.reader.version(name) for name in written} == written
