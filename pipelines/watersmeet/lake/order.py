"""The order in which silver's finished records are published: that of their messages.

Records whose messages do not say when they were closed come first, by event time and key; then all
others, by the time at which they were closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from watersmeet.core.sequence import SequenceTail
from watersmeet.lake.table_reader import Where, lexicographic, neighbours

COLUMNS: Final = ["closed_at", "tenant", "due", "merge_key"]
"""The columns that order records whose messages say when they were closed; the first is a time."""

PLAIN_COLUMNS: Final = ["event_time", "merge_key"]
"""The columns that order all other records.

`COLUMNS` would order them alike, but for what two epochs have closed at one clock.
"""

PLACE_COLUMNS: Final = ["event_time", "merge_key", "due", "closed_at", "tenant"]
"""The columns that `sequence.place_of` takes."""


def beyond(tail: SequenceTail | None, closing_from: int | None, *, is_after: bool) -> Where:
    """Return a condition for the rows that sort after a tail, or else at or before it.

    `closing_from`: the first batch whose messages say when their merge records were closed. Without
    a tail, all rows sort after it.
    """
    if tail is None:
        return [[]] if is_after else []
    operator = ">" if is_after else "<="
    if tail.closed_at is not None:
        values = [tail.closed_at, tail.tenant, tail.due, tail.key]
        return lexicographic(COLUMNS, values, operator)
    rows = lexicographic(PLAIN_COLUMNS, [tail.event_time, tail.key], operator)
    if closing_from is None:
        return rows
    rows = [[("batch", "<", closing_from), *terms] for terms in rows]
    return [*rows, [("batch", ">=", closing_from)]] if is_after else rows


def may_be_beyond(
    tails: Mapping[int, SequenceTail], partitions: Iterable[int], closing_from: int | None
) -> Where:
    """Return a condition for rows that may sort after the tail of their partition.

    All rows that do meet it. It has few terms, however many partitions there are.
    """
    by_closing = dict.fromkeys(partitions, -1)
    by_event_time = {}
    for p in by_closing.keys() & tails.keys():
        closed_at = tails[p].closed_at
        if closed_at is None:
            by_event_time[p] = tails[p].event_time
        else:
            by_closing[p] = closed_at
    for p in by_event_time:
        del by_closing[p]
    where = [*_since("closed_at", by_closing), *_since("event_time", by_event_time)]
    if by_event_time and closing_from is not None:
        where.append([("partition", "in", sorted(by_event_time)), ("batch", ">=", closing_from)])
    return where or [[("partition", "in", [])]]


def _since(column: str, times: Mapping[int, int]) -> Where:
    time_of = times.__getitem__
    return [
        [("partition", "in", sorted(near)), (column, ">=", min(map(time_of, near)))]
        for near in neighbours(sorted(times, key=time_of))
    ]
