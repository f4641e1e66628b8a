"""How far a publication reaches: which finished, valid records silver has beyond the sink's tails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from pipelines.core.columns import groups, int64s, looked_up
from pipelines.core.sequence import Tail
from pipelines.lake import tables
from pipelines.lake.questions import Questions, Where, neighbours

_FINISHED = [("status", "=", "timed_out"), ("valid", "=", True)]


class Extent(NamedTuple):
    """What is published of a partition: about how many records, and the event times (ms) of the first and the last of them."""

    records: int
    first: int
    last: int


def pending(questions: Questions, tails: Mapping[int, Tail], partitions: int, limit: int) -> tuple[dict[int, Extent], bool]:
    """By partition, for those that have any: the records that sort after the tail; and whether there are more than `limit`.

    All records of one event time go together. Whatever times out later has a later event time, so that an extent stays what it
    is while silver moves on. Where there are more than `limit`, each partition gives about an equal share of its records.
    """
    found = questions.select(tables.SILVER, ["partition", "event_time"], finished_since(tails, partitions))
    of_rows, times = int64s(found["partition"]), int64s(found["event_time"])
    after = looked_up(of_rows, {p: tail.event_time for p, tail in tails.items()}, -1)
    is_tie = times == after
    is_pending = (times > after) | (is_tie & np.isin(of_rows, _with_ties(questions, tails, np.unique(of_rows[is_tie]).tolist())))
    of_rows, times = of_rows[is_pending], times[is_pending]
    share = min(1.0, limit / max(1, len(times)))
    extents = {}
    for partition, rows in groups(of_rows, times).items():
        mine = times[rows]
        last = int(mine[max(1, int(len(mine) * share)) - 1])
        extents[partition] = Extent(int(np.searchsorted(mine, last, side="right")), int(mine[0]), last)
    return extents, share < 1.0


def finished_since(tails: Mapping[int, Tail], partitions: int, extents: Mapping[int, Extent] | None = None) -> Where:
    """Finished, valid records that are no older than their partition's tail, and more; with `extents`, no later than those."""
    where = []
    for mine in neighbours(sorted(range(partitions) if extents is None else extents, key=lambda p: _time(tails, p))):
        terms = [*_FINISHED, ("partition", "in", sorted(mine)), ("event_time", ">=", min(_time(tails, p) for p in mine))]
        if extents is not None:
            terms.append(("event_time", "<=", max(extents[p].last for p in mine)))
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
