"""What a reader of the sink sees after a crash in each delivery mode."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from tests.support.cases import expected_messages
from tests.support.rivers import Losses, River, until
from tests.support.topics import published


def crash_before_the_fourth_message(river: River, *, visible: int) -> None:
    """The three before it have reached the broker, as far as the mode lets them."""
    process = river.run("gold", "--once", point="publisher.produce", count=4)
    process.await_held()
    until(lambda: len(published(river.kafka, river.sink, 1)) == visible, "what is out")
    process.kill()


def prepared(kafka: str, folder: Path, name: str, delivery: str) -> River:
    """A lake whose silver has a sequence to publish, in one partition."""
    river = River.make(kafka, folder, name, partitions=1, publish__delivery=delivery)
    for _ in range(3):
        river.flow()
    river.finish("bronze", "silver")
    return river


def test_exactly_once_shows_nothing_of_a_batch_that_was_cut_short(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path
) -> None:
    river = prepared(kafka, tmp_path, "exactly", "exactly_once")
    crash_before_the_fourth_message(river, visible=0)
    assert published(kafka, river.sink, 1) == []
    river.finish()
    assert river.losses(spark) == Losses()


def test_at_least_once_shows_a_part_of_the_batch_and_then_goes_on_without_a_gap(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path
) -> None:
    river = prepared(kafka, tmp_path, "at_least", "at_least_once")
    crash_before_the_fourth_message(river, visible=3)
    assert published(kafka, river.sink, 1) == expected_messages(river.cases)[:3]
    river.finish()
    assert river.losses(spark) == Losses()


def test_at_most_once_never_sends_again_what_it_had_noted(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path
) -> None:
    river = prepared(kafka, tmp_path, "at_most", "at_most_once")
    crash_before_the_fourth_message(river, visible=3)
    first = expected_messages(river.cases)
    assert published(kafka, river.sink, 1) == first[:3]
    river.flow()
    river.flow()
    river.finish()
    rest = expected_messages(river.cases)[len(first) :]
    assert len(rest) > 3
    assert published(kafka, river.sink, 1) == first[:3] + rest, "a gap, and no repeat"
    found = river.losses(spark, gaps_allowed=True)
    assert (found.lost, found.repeated, found.out_of_order, found.other) == (len(first) - 3, 0, 0, [])
