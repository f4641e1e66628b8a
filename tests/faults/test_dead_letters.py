"""SIGKILL while dead letters are sent, and a lake that is lost: each is in its topic once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.rivers import Losses, River, in_chunks

pytestmark = pytest.mark.long

KILLS = [
    ("publisher.begin", 2),
    ("publisher.begin", 3),
    ("letters.publish", 2),
    ("publisher.produce", 4),
    ("publisher.commit", 2),
    ("publisher.committed", 3),
    ("letters.note", 1),
    ("letters.note", 2),
]
"""A point, and at which arrival: gold's own publication comes first, then late records, then
refused ones."""


@pytest.mark.nightly
@pytest.mark.promise("N3")
@pytest.mark.fault("kill", oracle=True)
def test_kills_while_dead_letters_are_sent_lose_and_repeat_none(kafka: str, tmp_path: Path) -> None:
    topics: dict[str, Any] = {
        f"publish__{table}_topic": f"letters-{table}" for table in ("late", "quarantine")
    }
    river = River.make(kafka, tmp_path, "letters", **topics)
    river.program = in_chunks(3)
    river.flow()
    river.flow()
    for n, (point, count) in enumerate(KILLS):
        river.flow(records=40)
        river.kill_at(point, "--once", count=count)
        if n % 3 == 0:
            river.forget_checkpoints()
    river.finish()
    assert river.losses() == Losses()
    assert river.broken_promises() == []

    shutil.rmtree(river.folder / "lake")
    river.config["kafka"]["start"] = "sink"
    river.write()
    river.flow()
    river.finish()
    losses = river.losses()
    assert losses == Losses(other=losses.other), "the new lake has less"
    assert not [each for each in losses.other if each.startswith("dead letters")]
