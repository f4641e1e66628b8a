"""How far a publication reaches: which finished, valid records silver has beyond the sink's tails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np

from pipelines.core.columns import Int64s, groups, int64s, looked_up
from pipelines.core.sequence import Tail
from pipelines.lake import tables
from pipelines.lake.questions import Questions, Where, bytes_of, neighbours

PIECE_BYTES, LIMIT_BYTES = 16 * 1024 * 1024, 512 * 1024 * 1024
"""About so much of silver's files goes into a piece, and into a publication, where their rows are large."""

_FINISHED = [("status", "=", "timed_out"), ("valid", "=", True)]


class Extent(NamedTuple):
    """What is published of a partition: the event times (ms) of the first and the last of the records."""

    first: int
    last: int


class Pending(NamedTuple):
    """What is published next: one piece after the other, each by partition; and whether there is more."""

    pieces: list[dict[int, Extent]]
    has_more: bool

    @property
    def extents(self) -> dict[int, Extent]:
        """What is published of each partition, all pieces together."""
        extents: dict[int, Extent] = {}
        for partition, extent in chain.from_iterable(piece.items() for piece in self.pieces):
            extents[partition] = Extent(extents.get(partition, extent).first, extent.last)
        return extents


def pending(questions: Questions, tails: Mapping[int, Tail], partitions: int, limit: int, size: int) -> Pending:
    """The records that sort after their partition's tail: about `limit` of them, in pieces of about `size` records,
    and fewer where records are large.

    All records of one event time go together. Whatever times out later has a later event time, so that an extent stays what it
    is while silver moves on. Where there are more than `limit`, each partition gives about an equal share of its records.
    """
    since = {p: _time(tails, p) for p in range(partitions)}
    found = questions.select(tables.SILVER, ["partition", "event_time"], finished(since))
    of_rows, times = int64s(found["partition"]), int64s(found["event_time"])
    after = looked_up(of_rows, since, -1)
    is_tie = times == after
    is_pending = (times > after) | (is_tie & np.isin(of_rows, _with_ties(questions, tails, np.unique(of_rows[is_tie]).tolist())))
    of_rows, times = of_rows[is_pending], times[is_pending]
    if in_all := bytes_of(questions, {tables.SILVER: len(times)}):
        size = max(1, min(size, len(times) * PIECE_BYTES // in_all))
        limit = max(1, min(limit, len(times) * LIMIT_BYTES // in_all))
    share = min(1.0, limit / max(1, len(times)))
    pieces: list[dict[int, Extent]] = []
    room = 0
    for partition, rows in groups(of_rows, times).items():
        left = _first(times[rows], max(1, int(len(rows) * share)))
        while len(left):
            if room <= 0:
                pieces.append({})
                room = size
            mine = _first(left, room)
            pieces[-1][partition] = Extent(int(mine[0]), int(mine[-1]))
            left, room = left[len(mine) :], room - len(mine)
    return Pending(pieces, share < 1.0)


def _first(times: Int64s, count: int) -> Int64s:
    """The first `count` of these times in order, and those that equal the last of them."""
    return times[: np.searchsorted(times, times[min(count, len(times)) - 1], side="right")]


def finished(since: Mapping[int, int], until: Mapping[int, int] | None = None) -> Where:
    """Finished, valid records of these partitions from an event time (ms) on, up to another one (inclusive); and more of them."""
    where = []
    for mine in neighbours(sorted(since, key=since.__getitem__)):
        terms = [*_FINISHED, ("partition", "in", sorted(mine)), ("event_time", ">=", min(since[p] for p in mine))]
        if until is not None:
            terms.append(("event_time", "<=", max(until[p] for p in mine)))
        where.append(terms)
    return where


def _time(tails: Mapping[int, Tail], partition: int) -> int:
    """The event time (ms) of a partition's tail, -1 where it has none."""
    return tails[partition].event_time if partition in tails else -1


def _with_ties(questions: Questions, tails: Mapping[int, Tail], partitions: Iterable[int]) -> list[int]:
    """The partitions that have a record of the tail's very event time that sorts after it, by its key as UTF-8 bytes.

    Only a failure leaves such a record behind, since all records of one event time are published together.
    """
    times = {p: tails[p].event_time for p in partitions}
    if not times:
        return []
    where = [[*_FINISHED, ("partition", "in", list(times)), ("event_time", "in", sorted(set(times.values())))]]
    names = ["partition", "event_time", "merge_key"]
    found = questions.select(tables.SILVER, names, where)
    rows = zip(*(found[name].to_pylist() for name in names), strict=True)
    return sorted({p for p, time, key in rows if times.get(p) == time and key.encode() > tails[p].key.encode()})
