"""SIGKILL between two steps; afterwards everything is as if nothing had happened. (`make faults` does it at every point.)"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelines.faults import POINTS
from tests.support.rivers import CATALOG, FOLDER, Losses, River

PACKAGE = Path(__file__).parents[2] / "pipelines"

KILLS = {
    FOLDER: [
        "bronze.append",
        "bronze.quarantine",
        "silver.merge",
        "silver.notes",
        "silver.progress",
        "gold.publish",
        "publisher.commit",
        "publisher.committed",
        "gold.done",
    ],
    CATALOG: [
        "bronze.quarantine",
        "bronze.done",
        "silver.notes",
        "silver.done",
        "publisher.begin",
        "publisher.produce",
        "gold.note",
        "idle.decide",
    ],
}
"""Each point on one kind of lake; on both, those at which a start reads from the history of a table what to complete."""


def test_every_named_point_is_in_the_code_once() -> None:
    reached = [name for file in PACKAGE.rglob("*.py") for name in re.findall(r'reach\("([a-z.]+)"\)', file.read_text())]
    assert sorted(reached) == sorted(POINTS)


def test_a_process_is_killed_at_every_point_on_some_lake() -> None:
    assert {point for points in KILLS.values() for point in points} == set(POINTS)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("lake", KILLS)
def test_a_process_killed_between_two_steps_loses_and_repeats_nothing(lake: str, kafka: str, tmp_path: Path) -> None:
    """One lake, killed at one point after the other; each start has to complete what the kill before left."""
    river = River.make(kafka, tmp_path, f"crashes-{lake}", lake=lake, merge__idle_after="3s")
    river.flow()
    for point in KILLS[lake]:
        if point == "idle.decide":
            river.flow("tracking")
            river.kill_at(point)
            continue
        river.flow()
        river.kill_at(point, "--once")
        if point in ("silver.merge", "bronze.done"):
            river.forget_checkpoints()
    river.flow()
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []
