"""SIGKILL between two steps; afterwards everything is as if nothing had happened. (`make faults` does it at every point.)"""

from __future__ import annotations

import re
from pathlib import Path

from pyspark.sql import SparkSession

from pipelines.faults import POINTS
from tests.support.rivers import Losses, River

PACKAGE = Path(__file__).parents[2] / "pipelines"


def test_every_named_point_is_in_the_code_once() -> None:
    reached = [name for file in PACKAGE.rglob("*.py") for name in re.findall(r'reach\("([a-z.]+)"\)', file.read_text())]
    assert sorted(reached) == sorted(POINTS)


def test_a_process_killed_between_two_steps_loses_and_repeats_nothing(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path
) -> None:
    """One lake, killed at one point after the other; each start has to mend what the kill before left."""
    river = River.make(kafka, tmp_path, "crashes")
    river.flow()
    for point in ("bronze.quarantine", "silver.merge", "silver.version", "publisher.commit", "publisher.committed"):
        river.flow()
        process = river.run("--once", point=point)
        process.await_held()
        process.kill()
        if point == "silver.merge":
            river.forget_checkpoints()
    river.finish()
    assert river.losses(spark) == Losses()
