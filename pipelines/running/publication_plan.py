"""Plans how far a publication reaches.

It finds the finished, valid records that silver has beyond the sink's tails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from pipelines.core.columns import MAX_TIME, NULL_TIME, Int64s, groups, int64s, looked_up
from pipelines.core.sequence import SequenceTail, place_of
from pipelines.lake import tables
from pipelines.lake.order import Order, orders, place_columns
from pipelines.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    lexicographic,
    neighbours,
    sizes_of,
    with_sizes,
)

CHUNK_BYTES = 64 * 1024 * 1024
LIMIT_BYTES = 2 * 1024 * 1024 * 1024
"""Size limits of records, as they are in memory: of a chunk and (roughly) of a publication."""

_FINISHED = [("status", "=", "timed_out"), ("valid", "=", True)]


class TimeRange(NamedTuple):
    """The range of a partition that is published.

    `first` and `last`: the times (ms) that order its first and last record. Records of one time
    that do not fit into a chunk are in several, each alone in its chunk. `begin` and `end` are then
    the other columns of the order for the first and the last record of a chunk; None at the first
    and the last record of that time.
    """

    first: int
    last: int
    begin: Sequence[Any] | None = None
    end: Sequence[Any] | None = None


class Pending(NamedTuple):
    """The records that are published next.

    `chunks`: one chunk after the other, each by partition. `has_more`: more is pending. `order`:
    the order of publication. `records`: how many records there are. `from_batch`: the first batch
    of silver that counts.
    """

    chunks: list[dict[int, TimeRange]]
    has_more: bool
    order: Order
    records: int = 0
    from_batch: int = 0

    @property
    def extents(self) -> dict[int, TimeRange]:
        """The range that is published of each partition, all chunks together."""
        extents: dict[int, TimeRange] = {}
        for partition, extent in chain.from_iterable(chunk.items() for chunk in self.chunks):
            extents[partition] = TimeRange(extents.get(partition, extent).first, extent.last)
        return extents


def pending(
    reader: TableReader,
    tails: Mapping[int, SequenceTail],
    partitions: int,
    limit: int,
    size: int,
    clocks: Mapping[int, int] | None = None,
    limit_bytes: int = LIMIT_BYTES,
    from_batch: int = 0,
) -> Pending:
    """Return the records that sort after their partition's tail: about `limit`, in chunks of
    `size`.

    Both numbers are approximate. There are fewer records if they are large: all of them have about
    `limit_bytes`, and a chunk has `CHUNK_BYTES`.

    All records of one time are published together, in several chunks if they must. Whatever times
    out later has a later time, so a range stays the same while silver moves on. If there are more
    than `limit` records, each partition gives about an equal share of its own.

    `clocks`: by partition, the clock (ms) up to which all closed records are known; None if every
    finished record is closed at or before it. `from_batch`: the first batch of silver that counts.
    """
    *earlier, last = orders(reader)
    for order in earlier:
        since = order.since(tails, range(partitions))
        found = _pending(reader, tails, order, since, limit, size, None, limit_bytes, from_batch)
        if found.chunks:
            return found._replace(has_more=True)
    return _pending(
        reader,
        tails,
        last,
        last.since(tails, range(partitions)),
        limit,
        size,
        clocks,
        limit_bytes,
        from_batch,
    )


def _pending(
    reader: TableReader,
    tails: Mapping[int, SequenceTail],
    order: Order,
    since: Mapping[int, int],
    limit: int,
    size: int,
    clocks: Mapping[int, int] | None,
    limit_bytes: int,
    from_batch: int,
) -> Pending:
    columns = with_sizes(reader, tables.SILVER, ["partition", order.column])
    found = reader.select(tables.SILVER, columns, finished(order, since, None, from_batch))
    of_rows = int64s(found["partition"])
    times = int64s(found[order.column])
    after = looked_up(of_rows, since, MAX_TIME)
    is_tie = times == after
    tied = _with_ties(reader, tails, order, np.unique(of_rows[is_tie]).tolist(), from_batch)
    is_pending = (times > after) | (is_tie & np.isin(of_rows, tied))
    if clocks is not None and order.column == "closed_at":
        is_pending &= times <= looked_up(of_rows, clocks, NULL_TIME)
    of_rows = of_rows[is_pending]
    times = times[is_pending]
    sizes = sizes_of(reader, tables.SILVER, found)[is_pending]
    share = min(1.0, limit / max(1, len(times)), limit_bytes / max(1, int(sizes.sum())))
    chunks: list[dict[int, TimeRange]] = []
    room = room_bytes = count = 0
    for partition, rows in groups(of_rows, times).items():
        left = _first(times[rows], max(1, int(len(rows) * share)))
        sums = np.cumsum(sizes[rows])
        count += len(left)
        done = 0
        while done < len(left):
            before = int(sums[done - 1]) if done else 0
            fits = int(np.searchsorted(sums, before + room_bytes, side="right")) - done
            if room <= 0 or (fits <= 0 and chunks[-1]):
                chunks.append({})
                room = size
                room_bytes = CHUNK_BYTES
                continue
            mine = _first(left[done:], max(1, min(room, fits)))
            if len(mine) > 1 and (
                len(mine) > room + size or int(sums[done + len(mine) - 1]) - before > room_bytes
            ):
                if mine[0] < mine[-1]:
                    mine = mine[: np.searchsorted(mine, mine[-1])]
                else:
                    if not chunks[-1]:
                        chunks[-1:] = [
                            {partition: part}
                            for part in _parts(
                                reader, order, partition, int(mine[0]), size, from_batch
                            )
                        ]
                        done += len(mine)
                    room = 0
                    continue
            chunks[-1][partition] = TimeRange(int(mine[0]), int(mine[-1]))
            done += len(mine)
            room = room - len(mine)
            room_bytes = room_bytes - (int(sums[done - 1]) - before)
    return Pending(chunks, share < 1.0, order, count, from_batch)


def _parts(
    reader: TableReader, order: Order, partition: int, time: int, size: int, from_batch: int
) -> Iterator[TimeRange]:
    """Yield the records of one time of a partition, cut so that each part fits into a chunk."""
    rest = order.columns[1:]
    where = [
        [*_of_finished(order, from_batch), ("partition", "=", partition), (order.column, "=", time)]
    ]
    rows = reader.select(tables.SILVER, with_sizes(reader, tables.SILVER, rest), where)
    rows = rows.sort_by([(name, "ascending") for name in rest])
    begin = None
    room = size
    room_bytes = CHUNK_BYTES
    last = None
    places = zip(*(rows[name].to_pylist() for name in rest), strict=True)
    for place, row_bytes in zip(
        places, sizes_of(reader, tables.SILVER, rows).tolist(), strict=True
    ):
        if last is not None and (room == 0 or row_bytes > room_bytes):
            yield TimeRange(time, time, begin, last)
            begin = place
            room = size
            room_bytes = CHUNK_BYTES
        last = place
        room = room - 1
        room_bytes = room_bytes - row_bytes
    yield TimeRange(time, time, begin)


def of_chunk(order: Order, chunk: Mapping[int, TimeRange], from_batch: int) -> Where:
    """Return a condition for a chunk's finished, valid records, from a batch of silver on.

    More records may meet it if the chunk has several partitions.
    """
    firsts = {p: extent.first for p, extent in chunk.items()}
    lasts = {p: extent.last for p, extent in chunk.items()}
    where = finished(order, firsts, lasts, from_batch)
    for extent in chunk.values():
        for place, operator in ((extent.begin, ">"), (extent.end, "<")):
            if place is not None:
                bounds = lexicographic(order.columns[1:], place, operator)
                where = [[*terms, *bound] for terms in where for bound in bounds]
    return where


def _first(times: Int64s, count: int) -> Int64s:
    """Return the first `count` of these sorted times, and those that equal the last of them."""
    return times[: np.searchsorted(times, times[min(count, len(times)) - 1], side="right")]


def finished(
    order: Order,
    since: Mapping[int, int],
    until: Mapping[int, int] | None = None,
    from_batch: int = 0,
) -> Where:
    """Return a condition for an order's finished, valid records between times (ms) of partitions.

    Both times are inclusive, and without `until` there is no end. More records may meet it.
    `from_batch`: the first batch of silver that counts.
    """
    where = []
    for mine in neighbours(sorted(since, key=since.__getitem__)):
        terms = [*_of_finished(order, from_batch), ("partition", "in", sorted(mine))]
        terms.append((order.column, ">=", min(since[p] for p in mine)))
        if until is not None:
            terms.append((order.column, "<=", max(until[p] for p in mine)))
        where.append(terms)
    return where or [[("partition", "in", [])]]


def _of_finished(order: Order, from_batch: int) -> list[Condition]:
    return [*_FINISHED, *order.conditions, *([("batch", ">=", from_batch)] if from_batch else [])]


def unpublished(
    reader: TableReader, tails: Mapping[int, SequenceTail], partitions: Iterable[int]
) -> Where:
    """Return a condition for finished, valid records that may sort after their partition's tail."""
    known = list(partitions)
    return [term for order in orders(reader) for term in finished(order, order.since(tails, known))]


def _with_ties(
    reader: TableReader,
    tails: Mapping[int, SequenceTail],
    order: Order,
    partitions: Iterable[int],
    from_batch: int,
) -> list[int]:
    """Return the partitions with a record that has exactly the tail's time and sorts after it.

    Only a failure leaves such a record behind, since all records of one time are published
    together.
    """
    times = order.since({p: tails[p] for p in partitions}, partitions)
    if not times:
        return []
    same: Condition = (order.column, "in", sorted(set(times.values())))
    where = [[*_of_finished(order, from_batch), ("partition", "in", list(times)), same]]
    names = ["partition", *place_columns(reader)]
    found = reader.select(tables.SILVER, names, where)
    rows = zip(*(found[name].to_pylist() for name in names), strict=True)
    return sorted({p for p, *place in rows if p in times and place_of(*place) > tails[p].place})
