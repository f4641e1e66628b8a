"""How far a publication reaches: which finished, valid records silver has beyond the sink's tails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from pipelines.core.columns import NEVER, NO_TIME, Int64s, groups, int64s, looked_up
from pipelines.core.sequence import Tail, place_of
from pipelines.lake import tables
from pipelines.lake.order import Order, orders, place_columns
from pipelines.lake.questions import Condition, Questions, Where, lexicographic, neighbours, sizes_of, with_sizes

PIECE_BYTES, LIMIT_BYTES = 64 * 1024 * 1024, 2 * 1024 * 1024 * 1024
"""So many bytes of records, as they are in memory, go into a piece, and about so many into a publication."""

_FINISHED = [("status", "=", "timed_out"), ("valid", "=", True)]


class Extent(NamedTuple):
    """What is published of a partition: the times (ms) by which they are ordered of the first and the last of the records.

    Where the records of one time do not fit into a piece, they are in several, each alone in its piece: `begin` and `end` are
    then what else orders the first and the last record of a piece; None at the first and the last record of that time.
    """

    first: int
    last: int
    begin: Sequence[Any] | None = None
    end: Sequence[Any] | None = None


class Pending(NamedTuple):
    """What is published next: one piece after the other, each by partition; whether there is more; in which order; how many
    records they are; and from which batch of silver on.
    """

    pieces: list[dict[int, Extent]]
    has_more: bool
    order: Order
    records: int = 0
    from_batch: int = 0

    @property
    def extents(self) -> dict[int, Extent]:
        """What is published of each partition, all pieces together."""
        extents: dict[int, Extent] = {}
        for partition, extent in chain.from_iterable(piece.items() for piece in self.pieces):
            extents[partition] = Extent(extents.get(partition, extent).first, extent.last)
        return extents


def pending(
    questions: Questions,
    tails: Mapping[int, Tail],
    partitions: int,
    limit: int,
    size: int,
    clocks: Mapping[int, int] | None = None,
    limit_bytes: int = LIMIT_BYTES,
    from_batch: int = 0,
) -> Pending:
    """The records that sort after their partition's tail: about `limit` of them, in pieces of about `size` records,
    and fewer where records are large, so that they have about `limit_bytes`, and a piece `PIECE_BYTES`.

    All records of one time go together, in several pieces if they must. Whatever times out later has a later one, so that an
    extent stays what it is while silver moves on. Where there are more than `limit`, each partition gives about an equal share of
    its records. `clocks`: by partition the clock (ms) up to which all that is closed is known; None where every finished record
    is closed at or before it.
    `from_batch`: the first batch of silver that counts.
    """
    *earlier, last = orders(questions)
    for order in earlier:
        since = order.since(tails, range(partitions))
        found = _pending(questions, tails, order, since, limit, size, None, limit_bytes, from_batch)
        if found.pieces:
            return found._replace(has_more=True)
    return _pending(questions, tails, last, last.since(tails, range(partitions)), limit, size, clocks, limit_bytes, from_batch)


def _pending(
    questions: Questions,
    tails: Mapping[int, Tail],
    order: Order,
    since: Mapping[int, int],
    limit: int,
    size: int,
    clocks: Mapping[int, int] | None,
    limit_bytes: int,
    from_batch: int,
) -> Pending:
    columns = with_sizes(questions, tables.SILVER, ["partition", order.column])
    found = questions.select(tables.SILVER, columns, finished(order, since, None, from_batch))
    of_rows, times = int64s(found["partition"]), int64s(found[order.column])
    after = looked_up(of_rows, since, NEVER)
    is_tie = times == after
    tied = _with_ties(questions, tails, order, np.unique(of_rows[is_tie]).tolist(), from_batch)
    is_pending = (times > after) | (is_tie & np.isin(of_rows, tied))
    if clocks is not None and order.column == "closed_at":
        is_pending &= times <= looked_up(of_rows, clocks, NO_TIME)
    of_rows, times, sizes = of_rows[is_pending], times[is_pending], sizes_of(questions, tables.SILVER, found)[is_pending]
    share = min(1.0, limit / max(1, len(times)), limit_bytes / max(1, int(sizes.sum())))
    pieces: list[dict[int, Extent]] = []
    room = room_bytes = count = 0
    for partition, rows in groups(of_rows, times).items():
        left = _first(times[rows], max(1, int(len(rows) * share)))
        sums = np.cumsum(sizes[rows])
        count += len(left)
        done = 0
        while done < len(left):
            before = int(sums[done - 1]) if done else 0
            fits = int(np.searchsorted(sums, before + room_bytes, side="right")) - done
            if room <= 0 or (fits <= 0 and pieces[-1]):
                pieces.append({})
                room, room_bytes = size, PIECE_BYTES
                continue
            mine = _first(left[done:], max(1, min(room, fits)))
            if len(mine) > 1 and (len(mine) > room + size or int(sums[done + len(mine) - 1]) - before > room_bytes):
                if mine[0] < mine[-1]:
                    mine = mine[: np.searchsorted(mine, mine[-1])]
                else:
                    if not pieces[-1]:
                        pieces[-1:] = [
                            {partition: part} for part in _parts(questions, order, partition, int(mine[0]), size, from_batch)
                        ]
                        done += len(mine)
                    room = 0
                    continue
            pieces[-1][partition] = Extent(int(mine[0]), int(mine[-1]))
            done += len(mine)
            room, room_bytes = room - len(mine), room_bytes - (int(sums[done - 1]) - before)
    return Pending(pieces, share < 1.0, order, count, from_batch)


def _parts(questions: Questions, order: Order, partition: int, time: int, size: int, from_batch: int) -> Iterator[Extent]:
    """The records of one time of a partition, cut so that each part fits into a piece."""
    rest = order.columns[1:]
    where = [[*_of_finished(order, from_batch), ("partition", "=", partition), (order.column, "=", time)]]
    rows = questions.select(tables.SILVER, with_sizes(questions, tables.SILVER, rest), where)
    rows = rows.sort_by([(name, "ascending") for name in rest])
    begin, room, room_bytes, last = None, size, PIECE_BYTES, None
    places = zip(*(rows[name].to_pylist() for name in rest), strict=True)
    for place, row_bytes in zip(places, sizes_of(questions, tables.SILVER, rows).tolist(), strict=True):
        if last is not None and (room == 0 or row_bytes > room_bytes):
            yield Extent(time, time, begin, last)
            begin, room, room_bytes = place, size, PIECE_BYTES
        last, room, room_bytes = place, room - 1, room_bytes - row_bytes
    yield Extent(time, time, begin)


def of_piece(order: Order, piece: Mapping[int, Extent], from_batch: int) -> Where:
    """The finished, valid records of a piece, and more where it has several partitions; from a batch of silver on."""
    firsts, lasts = {p: extent.first for p, extent in piece.items()}, {p: extent.last for p, extent in piece.items()}
    where = finished(order, firsts, lasts, from_batch)
    for extent in piece.values():
        for place, operator in ((extent.begin, ">"), (extent.end, "<")):
            if place is not None:
                bounds = lexicographic(order.columns[1:], place, operator)
                where = [[*terms, *bound] for terms in where for bound in bounds]
    return where


def _first(times: Int64s, count: int) -> Int64s:
    """The first `count` of these times in order, and those that equal the last of them."""
    return times[: np.searchsorted(times, times[min(count, len(times)) - 1], side="right")]


def finished(order: Order, since: Mapping[int, int], until: Mapping[int, int] | None = None, from_batch: int = 0) -> Where:
    """Finished, valid records of an order and these partitions from a time (ms) on, up to another one (inclusive), and more; from
    a batch of silver on.
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


def not_out(questions: Questions, tails: Mapping[int, Tail], partitions: Iterable[int]) -> Where:
    """Finished, valid records that may sort after their partition's tail."""
    known = list(partitions)
    return [term for order in orders(questions) for term in finished(order, order.since(tails, known))]


def _with_ties(
    questions: Questions, tails: Mapping[int, Tail], order: Order, partitions: Iterable[int], from_batch: int
) -> list[int]:
    """The partitions that have a record of the tail's very time that sorts after it.

    Only a failure leaves such a record behind, since all records of one time are published together.
    """
    times = order.since({p: tails[p] for p in partitions}, partitions)
    if not times:
        return []
    same: Condition = (order.column, "in", sorted(set(times.values())))
    where = [[*_of_finished(order, from_batch), ("partition", "in", list(times)), same]]
    names = ["partition", *place_columns(questions)]
    found = questions.select(tables.SILVER, names, where)
    rows = zip(*(found[name].to_pylist() for name in names), strict=True)
    return sorted({p for p, *place in rows if p in times and place_of(*place) > tails[p].place})
