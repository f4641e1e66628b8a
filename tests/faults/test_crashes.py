"""SIGKILL between two steps; afterwards everything is as if nothing had happened. (`make faults`
does it at every point.)"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.configurations import IDS
from tests.support.fault_points import IN_EVOLVE, IN_FORGET, IN_RESET, POINTS
from tests.support.rivers import CATALOG, EMBEDDED, FOLDER, Losses, River

PACKAGE = Path(__file__).parents[2] / "pipelines" / "watersmeet"

KILLS = [
    pytest.param(
        EMBEDDED,
        ["bronze.append", "bronze.done", "silver.merge", "silver.done", "publisher.commit"],
        id="a commit of each layer",
    ),
    pytest.param(EMBEDDED, POINTS, id="every point", marks=pytest.mark.nightly),
    pytest.param(FOLDER, ["silver.merge"], id="spark-folder", marks=pytest.mark.long),
    pytest.param(
        FOLDER,
        ["silver.merge", "gold.note"],
        id="spark-folder, more points",
        marks=pytest.mark.nightly,
    ),
    pytest.param(
        CATALOG, ["silver.done", "gold.note"], id="spark-catalog", marks=pytest.mark.nightly
    ),
]
"""Every point where a start takes a second; with Spark some around its commits. (In a catalog
test_catalogs.py has another.)"""


@pytest.mark.promise("N15")
def test_every_named_point_is_in_the_code_once() -> None:
    reached = [
        name
        for file in PACKAGE.rglob("*.py")
        for name in re.findall(r'fault_point\("([a-z.]+)"\)', file.read_text())
    ]
    assert sorted(reached) == sorted({*POINTS, *IN_EVOLVE, *IN_RESET, IN_FORGET})


@pytest.mark.promise("N1")
@pytest.mark.fault("kill", "lost", oracle=True)
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("lake", "points"), KILLS)
def test_a_process_killed_between_two_steps_loses_and_repeats_nothing(
    lake: str, points: Sequence[str], kafka: str, tmp_path: Path
) -> None:
    """One lake, killed at one point after the other; each start goes on where the kill before
    left the lake, the last one without Spark.
    """
    name = f"crashes-{lake}-{len(points)}"
    topics = ("late", "quarantine") if lake == EMBEDDED else ()
    letters: dict[str, Any] = {f"publish__{table}_topic": f"{name}-{table}" for table in topics}
    topic = {"topic": f"{name}-corrected", "within": "1d"}
    more = {**letters, **IDS, "merge__idle_after": "3s", "publish__corrections": topic}
    river = River.make(kafka, tmp_path, name, lake=lake, **more)
    river.flow()
    for point in points:
        if point == "idle.decide":
            river.flow("tracking")
            river.kill_at(point)
            continue
        river.flow()
        river.kill_at(point, "--once")
        if point == "silver.merge":
            river.forget_checkpoints()
    river.flow()
    river.by_embedded()
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []
