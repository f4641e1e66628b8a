"""What a deliberate reset makes of merge records, as a pure function."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from pipelines.core.merge import silver_schema
from pipelines.core.plan import TopicPartition
from pipelines.core.reset import closed

SOURCES = ("tracking", "orders")
SILVER = silver_schema(dict.fromkeys(SOURCES, pa.string()))


def row(key: str, status: str, time: int, *offsets: int, reason: str | None = None) -> dict[str, Any]:
    """A merge record of tracking with parts at these offsets, all of the same event time."""
    parts = [{"offset": offset, "event_time": time * 1000, "value": "1"} for offset in offsets]
    valid = None if status == "open" else reason is None
    times = {"event_time": time * 1000, "last_event_time": time * 1000}
    own = {"partition": 0, "merge_key": key, "status": status, "valid": valid, "invalid_reason": reason, "batch": 1}
    return {**own, **times, "tracking": parts, "orders": []}


def after(again: dict[TopicPartition, int], *rows: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Silver after the reset, as an engine makes it: key, status, event time, offsets, reason, batch."""
    changed = closed(pa.Table.from_pylist(list(rows), SILVER), again, SOURCES, batch=2).to_pylist()
    gone = [(r["merge_key"], r["replaces"]) for r in changed if r["status"] is None]
    assert len(gone) == len(set(gone)), "an engine takes one row for each place"
    new = [r for r in changed if r["status"] is not None]
    assert all(r["replaces"] is None for r in new)
    known = pa.Table.from_pylist(list(rows), SILVER).to_pylist()
    left = [r for r in known if (r["merge_key"], r["event_time"]) not in gone] + new
    return sorted(
        (
            r["merge_key"],
            r["status"],
            round(r["event_time"].timestamp() * 1000),
            [p["offset"] for p in r["tracking"]],
            r["invalid_reason"],
            r["batch"],
        )
        for r in left
    )


def test_open_records_are_closed_unpublished_and_finished_ones_stay() -> None:
    found = after({}, row("a", "open", 5, 0, 1), row("b", "timed_out", 6, 2))
    assert found == [("a", "timed_out", 5, [0, 1], "reset", 2), ("b", "timed_out", 6, [2], None, 1)]


def test_records_that_come_again_leave_and_what_holds_nothing_more_goes() -> None:
    found = after({TopicPartition("tracking", 0): 2}, row("a", "timed_out", 5, 0, 2), row("b", "timed_out", 6, 2, 3))
    assert found == [("a", "timed_out", 5, [0], "reset", 2)]


def test_of_two_merge_records_of_one_key_and_time_each_goes_or_stays_for_itself() -> None:
    earlier = row("a", "timed_out", 5, 0, reason="reset")
    stays = ("a", "timed_out", 5, [0], "reset", 1)
    assert after({TopicPartition("tracking", 0): 3}, earlier, row("a", "open", 5, 3)) == [stays]
    assert after({TopicPartition("tracking", 0): 9}, earlier, row("a", "open", 5, 3)) == [
        stays,
        ("a", "timed_out", 5, [3], "reset", 2),
    ]
    assert after({TopicPartition("tracking", 0): 0}, earlier, row("a", "open", 5, 3)) == []


def test_nothing_changes_where_nothing_is_open_and_nothing_comes_again() -> None:
    assert closed(pa.Table.from_pylist([row("a", "timed_out", 5, 0)], SILVER), {}, SOURCES, 2).num_rows == 0
    assert closed(SILVER.empty_table(), {TopicPartition("tracking", 0): 0}, SOURCES, 2).num_rows == 0
