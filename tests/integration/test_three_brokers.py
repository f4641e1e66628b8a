"""A cluster of three brokers, one of which dies: a run goes on, and nothing is lost or sent
twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rivers import EMBEDDED, FOLDER, Losses, River, until
from tests.support.three_brokers import three_brokers
from tests.support.topics import create_topics, published

pytestmark = pytest.mark.long


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lake", "within_s"), [(EMBEDDED, 60), (FOLDER, 120)], ids=["embedded", "spark"]
)
def test_a_run_goes_on_while_one_of_three_brokers_is_dead(
    tmp_path: Path, lake: str, within_s: float
) -> None:
    with three_brokers(tmp_path / "brokers") as cluster:
        river = River.make(cluster.servers, tmp_path / "river", "three", lake=lake)
        # What is not there yet cannot be read for long.
        create_topics(river.kafka, river.sink, partitions=river.partitions)
        river.flow()
        river.flow()
        run = river.run()
        until(
            lambda: len(published(river.kafka, river.sink, river.partitions)) > 0,
            "the first messages",
            120,
        )
        before = len(published(river.kafka, river.sink, river.partitions))
        cluster.kill(2)
        river.flow(is_idempotent=True)
        river.flow(is_idempotent=True)
        until(
            lambda: len(published(river.kafka, river.sink, river.partitions)) > before,
            "messages without one broker",
            within_s,
        )
        assert run.process.poll() is None, run.said()
        cluster.start(2)
        river.flow(is_idempotent=True)
        assert run.stop() == 0, run.said()
        river.finish()
        assert river.losses() == Losses()
        assert river.broken_promises() == []
