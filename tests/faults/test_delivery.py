"""What a reader of the sink sees after a crash in the middle of a publication, in each delivery
mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cases import expected_messages
from tests.support.rivers import Losses, River, in_chunks, until
from tests.support.topics import published

pytestmark = [pytest.mark.long, pytest.mark.fault("kill", oracle=True)]

CHUNK = 3
"""So many messages are produced at a time."""


def crashed_after_the_first_chunk(
    kafka: str, folder: Path, name: str, delivery: str, *, visible: int
) -> River:
    """A first publication into one partition that was cut short; its first piece had reached the
    broker."""
    river = River.make(kafka, folder, name, partitions=1, publish__delivery=delivery)
    river.program = in_chunks(CHUNK)
    for _ in range(3):
        river.flow()
    process = river.run("--once", point="publisher.produce", count=2)
    process.await_held()
    until(lambda: len(published(kafka, river.sink, 1)) == visible, "what is out")
    process.kill()
    return river


@pytest.mark.promise("N12")
def test_exactly_once_shows_nothing_of_a_batch_that_was_cut_short(
    kafka: str, tmp_path: Path
) -> None:
    river = crashed_after_the_first_chunk(kafka, tmp_path, "exactly", "exactly_once", visible=0)
    assert published(kafka, river.sink, 1) == []
    river.finish()
    assert river.losses() == Losses()


@pytest.mark.promise("N13")
def test_at_least_once_shows_a_part_of_the_batch_and_then_goes_on_without_a_gap(
    kafka: str, tmp_path: Path
) -> None:
    river = crashed_after_the_first_chunk(
        kafka, tmp_path, "at_least", "at_least_once", visible=CHUNK
    )
    assert published(kafka, river.sink, 1) == expected_messages(river.cases)[:CHUNK]
    river.finish()
    assert river.losses() == Losses()


@pytest.mark.promise("N14")
def test_at_most_once_never_sends_again_what_it_had_noted(kafka: str, tmp_path: Path) -> None:
    river = crashed_after_the_first_chunk(kafka, tmp_path, "at_most", "at_most_once", visible=CHUNK)
    first = expected_messages(river.cases)
    assert published(kafka, river.sink, 1) == first[:CHUNK]
    river.flow()
    river.flow()
    river.finish()
    rest = expected_messages(river.cases)[len(first) :]
    assert len(rest) > CHUNK
    assert published(kafka, river.sink, 1) == first[:CHUNK] + rest, "a gap, and no repeat"
    found = river.losses(gaps_allowed=True)
    assert (found.lost, found.repeated, found.out_of_order, found.other) == (
        len(first) - CHUNK,
        0,
        0,
        [],
    )
