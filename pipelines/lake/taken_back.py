"""The messages that a deliberate reset remembers in `recovered`, before it is decided: its commit takes them out of silver."""

from __future__ import annotations

from pipelines.lake import tables
from pipelines.lake.commits import RESETTING, last_decision
from pipelines.lake.questions import Questions, Where


def undecided_at(questions: Questions, last_batch: int) -> int | None:
    """When a reset that was never decided noted its messages (epoch ms); None where each one was.

    `last_batch`: silver's last batch, -1 before the first.
    """
    found = last_decision(questions, tables.RECOVERED, RESETTING)
    return found[1].facts["recovered_at"] if found is not None and found[1].facts["batch"] > last_batch else None


def noted_at(time_ms: int) -> Where:
    """The messages that a reset noted at a time (epoch ms)."""
    return [[("recovered_at", "=", time_ms), ("merge_key", "is not null", None)]]
