"""A real cluster, in short: executors in JVMs of their own, which are killed. (`make cluster-test`
does more of it.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rivers import FOLDER, Losses, River
from tests.support.standalone import StandaloneCluster
from tests.support.submitting import Submission

pytestmark = pytest.mark.nightly


@pytest.mark.promise("A13")
@pytest.mark.fault("outage", oracle=True)
@pytest.mark.timeout(900)
def test_executors_lost_with_the_batch_that_they_held_lose_and_repeat_nothing(
    kafka: str, tmp_path: Path
) -> None:
    (tmp_path / "submission").mkdir()
    submission = Submission.build(tmp_path / "submission")
    river = River.make(kafka, tmp_path / "river", "standalone", lake=FOLDER)
    for _ in range(3):
        river.flow()
    with StandaloneCluster(tmp_path) as cluster:
        river.program, river.environment = (
            submission.command(cluster.master),
            submission.environment,
        )
        run = river.run("--once", point="bronze.append")
        run.await_held()
        assert cluster.lose_executors() == 2
        run.let_go()
        assert run.wait() == 0, run.said()
    assert river.losses() == Losses()
    assert river.broken_promises() == []
