"""With a window by gap, silver on every engine is what the merge model says, and says until when
and by what it was closed."""

from __future__ import annotations

from functools import cache
from typing import Any

from tests.laws.conftest import MakeLake
from tests.support.cases import SOURCES, Case, rich_cases, rules_of
from watersmeet.core.model import PartitionMerge
from watersmeet.lake import tables

WINDOW = {"gap": "100ms", "max": "250ms"}
COLUMNS = ["partition", "merge_key", "event_time", "last_event_time", "status", "due", "closed_at"]


@cache
def cases() -> dict[int, Case]:
    return rich_cases(24)


def merged() -> dict[int, PartitionMerge]:
    found = {}
    for p, case in cases().items():
        found[p] = PartitionMerge(rules_of(SOURCES, 100, 250))
        found[p].arrive(*case.records())
        found[p].advance()
    return found


def test_silver_says_until_when_merge_records_can_be_joined_and_what_closed_them(
    new_lake: MakeLake,
) -> None:
    lake = new_lake(cases(), merge={"window": WINDOW})
    for share in (0.4, 1.0):
        lake.arrive(share)
        lake.merge()
    rows: list[tuple[Any, ...]] = []
    for p, model in merged().items():
        rows += [
            (p, r.key, r.event_time, r.last_event_time, "timed_out", r.due, r.closed_at)
            for r in model.timed_out
        ]
        opened = (
            (r, model.rules.due(r.event_time, r.last_event_time)) for r in model.open.values()
        )
        rows += [
            (p, r.key, r.event_time, r.last_event_time, "open", due, None) for r, due in opened
        ]
    found = [tuple(row.values()) for row in lake.reader.select(tables.MERGED, COLUMNS).to_pylist()]
    assert sorted(found, key=repr) == sorted(rows, key=repr)
    sessions = [row for row in rows if row[3] - row[2] > 100]
    assert len(sessions) > 10, "which no timeout would have kept together"
