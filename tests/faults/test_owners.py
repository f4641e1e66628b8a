"""One owner at a time: a second run is refused, and a first one that was only paused cannot write
once it was replaced.

(What a lease is made of is in tests/lake. Spark's own catalog lets one process in at a time, so
these lakes are folders.)
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cases import expected_messages
from tests.support.effort import first_then_nightly
from tests.support.owners import assert_changes_nothing, assert_refused, wake
from tests.support.rivers import EMBEDDED, FOLDER, Losses, River, until
from tests.support.topics import create_topics, published
from watersmeet.run import LAYERS

pytestmark = pytest.mark.fault("owners", oracle=True)


@pytest.mark.promise("O4")
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_second_run_is_refused_and_a_woken_publisher_is_fenced(
    kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "owners", partitions=1)
    for _ in range(3):
        river.flow()
    first = river.run(point="publisher.commit")
    first.await_held()

    assert_refused(river)

    first.pause()
    assert published(kafka, river.sink, 1) == [], "the first one's transaction is open"
    river.finish()
    after = published(kafka, river.sink, 1)
    assert after

    wake(first)
    assert published(kafka, river.sink, 1) == after
    river.flow()
    river.finish()
    assert river.losses() == Losses()


@pytest.mark.nightly
@pytest.mark.promise("O16")
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_owners_of_single_layers_go_on_side_by_side_whatever_files_spark_has_by_default(
    kafka: str, tmp_path: Path
) -> None:
    """Each follows the tables of the one before. A folder is one of this machine, though Spark's
    default file system is another, which nobody can reach."""
    spark = {
        "spark.hadoop.fs.defaultFS": "hdfs://127.0.0.1:1",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "700m",
    }
    river = River.make(kafka, tmp_path, "side-by-side", lake=FOLDER, partitions=1, spark=spark)
    create_topics(kafka, river.sink, partitions=1, **{"retention.ms": "-1"})
    river.flow()
    runs = [river.run(layer) for layer in LAYERS]

    def is_all_out() -> bool:
        assert all(run.process.poll() is None for run in runs), river.run_log[-3000:]
        expected = expected_messages(river.cases, river.inputs)
        return len(published(kafka, river.sink, 1)) >= len(expected)

    for _ in range(3):
        until(is_all_out, "what is finished")
        river.flow()
    until(is_all_out, "what is finished")
    assert [run.stop() for run in runs] == [0, 0, 0]
    assert river.losses() == Losses()


@pytest.mark.promise("O5")
@pytest.mark.timeout(1200)
@pytest.mark.long
@pytest.mark.parametrize("lake", first_then_nightly([EMBEDDED, FOLDER]))
def test_a_woken_merge_changes_nothing(lake: str, kafka: str, tmp_path: Path) -> None:
    """The paused owner's plan is an older one than its successor's, which may have another engine:
    it knows fewer records.

    (That Spark's own commits are fenced is a law: tests/laws/test_restarts.py.)
    """
    river = River.make(kafka, tmp_path, f"zombie-{lake}", lake=lake, partitions=1)
    river.flow()
    first = river.run("--once", point="silver.merge")
    first.await_held()
    first.pause()
    river.flow()
    river.by_embedded()
    river.finish()
    assert_changes_nothing(river, first)
    assert river.losses() == Losses()
    assert river.broken_promises() == []
