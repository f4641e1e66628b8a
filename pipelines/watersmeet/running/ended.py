"""Completes what follows from a reset for the generation that it ended.

The rows of that generation that are not published are closed, and `resets` says what was left.

The reset itself is one commit to `generations`. All this can be derived from it, so the next
owner of silver completes what a crash has left undone, before anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from watersmeet.core.types import DUE
from watersmeet.faults import fault_point
from watersmeet.lake import tables
from watersmeet.lake.commits import RESETTING
from watersmeet.lake.generations import read_generations
from watersmeet.lake.table_reader import Where, in_portions, row_count
from watersmeet.lake.unpublished import is_complete, reached, unpublished
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings

_CLOSED: Final = {"valid": False, "invalid_reason": "reset"}


def end_earlier(owner: Owner, settings: Settings) -> None:
    """Close what the generation before the newest has left, and write the last reset to `resets`.

    Afterwards no row of an earlier generation is open, waits, or is finished, valid and
    unpublished.
    """
    reader = owner.engine.reader
    generations = read_generations(reader, settings)
    newest = generations.newest
    if len(generations) == 1 or is_complete(reader, newest):
        return
    fault_point("reset.close")
    ended = generations[-2]
    never = dict.fromkeys([*DUE.names, "position"])
    unfinished: Where = [[("status", "in", ["open", "waiting"]), *generations.batches(ended)]]
    _change(owner, unfinished, {"status": "timed_out", **_CLOSED, **never})
    for portion in in_portions(list(unpublished(ended, newest))):
        _change(owner, portion, _CLOSED)
    fault_point("reset.told")
    jumps = [
        (
            *tp.input,
            tp.partition,
            since,
            newest.begin[tp],
            newest.decided_at,
            newest.reason,
        )
        for tp, since in reached(reader, ended, newest.from_batch).items()
    ]
    owner.append(tables.RESETS, owner.engine.lake.layout[tables.RESETS].rows(jumps), RESETTING)


def _change(owner: Owner, where: Where, values: Mapping[str, Any]) -> None:
    if row_count(owner.engine.reader, tables.SILVER, where):
        owner.change(
            tables.SILVER,
            RESETTING,
            lambda commit: owner.engine.update(tables.SILVER, where, values, commit),
        )
