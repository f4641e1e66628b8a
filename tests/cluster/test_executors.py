"""Executors in JVMs of their own, which are killed. (test_standalone.py does it on a real cluster,
as its page says.)"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.support.rivers import FOLDER, Losses, River
from tests.support.standalone import executors_of

pytestmark = pytest.mark.long

OWN_JVM = {
    "spark.master": "local-cluster[1,1,1024]",
    "spark.executor.memory": "700m",
    "spark.sql.shuffle.partitions": "2",
}


@pytest.mark.promise("A13")
@pytest.mark.fault("outage", oracle=True)
def test_an_executor_lost_with_the_batch_that_it_held_loses_and_repeats_nothing(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path / "river", "executors", lake=FOLDER, spark=OWN_JVM)
    for _ in range(3):
        river.flow()
    run = river.run("--once", point="bronze.append")
    run.await_held()
    [executor] = executors_of(run.family())
    executor.kill()
    psutil.wait_procs([executor], timeout=30)
    run.let_go()
    assert run.wait() == 0, run.said()
    assert river.losses() == Losses()
    assert river.broken_promises() == []
