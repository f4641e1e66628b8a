"""Plans how far a publication reaches.

It finds the finished, valid records that silver has beyond the sink's tails.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from watersmeet.core.columns import MAX_TIME, NULL_TIME, Booleans, Int64s, groups, int64s, looked_up
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.sequence import MessageTime, SequenceTail
from watersmeet.lake import tables
from watersmeet.lake.order import COLUMNS, PLAIN_COLUMNS, beyond, may_be_beyond
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    in_portions,
    lexicographic,
    neighbours,
    sizes_of,
)

CHUNK_BYTES = 64 * 1024 * 1024
LIMIT_BYTES = 2 * 1024 * 1024 * 1024
"""Size limits of records, as they are in memory: of a chunk and (roughly) of a publication."""

_FINISHED = [("status", "=", "timed_out"), ("valid", "=", True)]


class TimeRange(NamedTuple):
    """The range of a partition that is published.

    `first` and `last`: the times (ms) of its first and its last message. Records of one time that
    do not fit into a chunk are in several, each alone in its chunk. `begin` and `end` are then the
    other columns of the order for the first and the last record of a chunk; None at the first and
    the last record of that time. `says_closing`: see `core.sequence.MessageTime`.
    """

    first: int
    last: int
    begin: Sequence[Any] | None = None
    end: Sequence[Any] | None = None
    says_closing: bool = False

    @property
    def columns(self) -> Sequence[str]:
        """The columns that order the records; the first one is the time."""
        return COLUMNS if self.says_closing else PLAIN_COLUMNS


class Ends(NamedTuple):
    """The times of the first and of the last message of a partition in a publication."""

    first: MessageTime
    last: MessageTime


class Pending(NamedTuple):
    """The records that are published next.

    `chunks`: one chunk after the other, each by partition. `has_more`: more is pending. `ends`: the
    times of messages, by partition. `records`: how many records there are.
    """

    chunks: list[dict[int, TimeRange]]
    has_more: bool
    ends: Mapping[int, Ends] = MappingProxyType({})
    records: int = 0


class Limits(NamedTuple):
    """Approximate limits of a publication: records in all and in a chunk, and bytes in all."""

    records: int
    chunk: int
    bytes: int = LIMIT_BYTES


class Unpublished(NamedTuple):
    """The records that count as not published.

    `tails`: the last message of each partition that has one, which they sort after. `partitions`:
    the number of partitions. `from_batch`: the first batch of silver that counts. `closing_from`:
    the first batch whose messages say when their merge records were closed. `clocks`: by partition,
    the clock (ms) up to which all closed records are known; None if every finished record is closed
    at or before it.
    """

    tails: Mapping[int, SequenceTail]
    partitions: int
    from_batch: int = 0
    closing_from: int | None = None
    clocks: Mapping[int, int] | None = None

    def where(self) -> Where:
        """Return a condition for these records that a few more may meet."""
        beyond_tails = may_be_beyond(self.tails, range(self.partitions), self.closing_from)
        return [[*self._finished(), *terms] for terms in beyond_tails]

    def of_kind(self, *, says_closing: bool) -> list[Condition]:
        """Return the condition for finished records whose messages say when they were closed, or
        do not.
        """
        if self.closing_from is None:
            return [*self._finished(), *([("batch", "<", 0)] if says_closing else [])]
        return [*self._finished(), ("batch", ">=" if says_closing else "<", self.closing_from)]

    def of_chunk(self, chunk: Mapping[int, TimeRange]) -> Where:
        """Return a condition for a chunk's records, which more may meet in several partitions."""
        where: list[list[Condition]] = []
        for says_closing in (False, True):
            partitions = [p for p, r in chunk.items() if r.says_closing == says_closing]
            for near in neighbours(sorted(partitions, key=lambda p: chunk[p].first)):
                if not near:
                    continue
                column = chunk[near[0]].columns[0]
                first = min(chunk[p].first for p in near)
                last = max(chunk[p].last for p in near)
                bounds = [(column, ">=", first), (column, "<=", last)]
                kind = self.of_kind(says_closing=says_closing)
                where.append([*kind, ("partition", "in", sorted(near)), *bounds])
        for time_range in chunk.values():
            for place, operator in ((time_range.begin, ">="), (time_range.end, "<=")):
                if place is not None:
                    bounds_of_place = lexicographic(time_range.columns[1:], place, operator)
                    where = [[*terms, *bound] for terms in where for bound in bounds_of_place]
        return where

    def _finished(self) -> list[Condition]:
        from_batch: list[Condition] = [("batch", ">=", self.from_batch)] if self.from_batch else []
        return [*_FINISHED, *from_batch]


def pending(reader: TableReader, unpublished: Unpublished, limits: Limits) -> Pending:
    """Return the records that are published next, in chunks, about as many as the limits say.

    There are fewer records if they are large; a chunk has `CHUNK_BYTES`.

    All records of one time are published together, in several chunks if they must. Whatever times
    out later has a later time, so a range stays the same while silver moves on. If there are more
    records than the limit, each partition gives about an equal share of its own.
    """
    rows = _Rows.of(reader, unpublished)
    total_bytes = max(1, int(rows.sizes.sum()))
    share = min(1.0, limits.records / max(1, len(rows.times)), limits.bytes / total_bytes)
    chunking = _Chunking(reader, unpublished, limits.chunk)
    ends: dict[int, Ends] = {}
    count = 0
    for partition, numbers in groups(rows.partitions, rows.times).items():
        room = max(1, int(len(numbers) * share))
        says_closing = rows.says_closing[numbers]
        # What does not say when it was closed comes first.
        for kind in (False, True):
            kind_numbers = numbers[says_closing == kind]
            if room <= 0 or not len(kind_numbers):
                continue
            taken = _first(rows.times[kind_numbers], room)
            room -= len(taken) if len(taken) == len(kind_numbers) else room
            chunking.add(partition, taken, np.cumsum(rows.sizes[kind_numbers]), says_closing=kind)
            first, last = (MessageTime(int(taken[i]), kind) for i in (0, -1))
            ends[partition] = Ends(ends[partition].first if partition in ends else first, last)
            count += len(taken)
    return Pending(chunking.chunks, share < 1.0, ends, count)


class _Rows(NamedTuple):
    """Rows of silver that are not published; `times` (ms) of their messages, `sizes` in bytes."""

    partitions: Int64s
    times: Int64s
    says_closing: Booleans
    sizes: Int64s

    @classmethod
    def of(cls, reader: TableReader, unpublished: Unpublished) -> _Rows:
        """Read them."""
        columns = ["partition", "closed_at", "event_time", "batch", RECORD_BYTES.name]
        read = reader.select(tables.SILVER, columns, unpublished.where())
        closing_from = unpublished.closing_from
        says_closing = int64s(read["batch"]) >= (MAX_TIME if closing_from is None else closing_from)
        times = np.where(says_closing, int64s(read["closed_at"]), int64s(read["event_time"]))
        rows = cls(int64s(read["partition"]), times, says_closing, sizes_of(read))
        is_pending = rows.is_after(reader, unpublished)
        if unpublished.clocks is not None:
            clocks = looked_up(rows.partitions, unpublished.clocks, NULL_TIME)
            is_pending &= ~says_closing | (times <= clocks)
        return cls(
            rows.partitions[is_pending],
            times[is_pending],
            says_closing[is_pending],
            rows.sizes[is_pending],
        )

    def is_after(self, reader: TableReader, unpublished: Unpublished) -> Booleans:
        """Return True for each row that sorts after the tail of its partition.

        Only a failure leaves rows behind that have exactly the tail's time and sort after it, since
        all records of one time are published together.
        """
        tails = unpublished.tails
        tail_closings = {p: int(tail.closed_at is not None) for p, tail in tails.items()}
        tail_times = {p: _time_of(tail) for p, tail in tails.items()}
        closing = looked_up(self.partitions, tail_closings, -1)
        time = looked_up(self.partitions, tail_times, NULL_TIME)
        is_same_kind = self.says_closing == closing
        is_after = (self.says_closing > closing) | (is_same_kind & (self.times > time))
        is_tie = is_same_kind & (self.times == time)
        tied = _with_ties(reader, unpublished, np.unique(self.partitions[is_tie]).tolist())
        return np.asarray(is_after | (is_tie & np.isin(self.partitions, tied)), np.bool_)


def _time_of(tail: SequenceTail) -> int:
    """Return the time (ms) of a partition's last message."""
    return tail.event_time if tail.closed_at is None else tail.closed_at


@dataclass
class _Chunking:
    """Cuts the records of a publication into chunks of so many records and `CHUNK_BYTES`."""

    reader: TableReader
    unpublished: Unpublished
    size: int
    chunks: list[dict[int, TimeRange]] = field(default_factory=list)
    _room: int = 0
    _room_bytes: int = 0

    def add(self, partition: int, times: Int64s, sums: Int64s, *, says_closing: bool) -> None:
        """Add records of a partition in order, with the running total of their sizes."""
        if self.chunks and partition in self.chunks[-1]:
            self._room = 0
        done = 0
        while done < len(times):
            before = int(sums[done - 1]) if done else 0
            fits = int(np.searchsorted(sums, before + self._room_bytes, side="right")) - done
            if self._room <= 0 or (fits <= 0 and self.chunks[-1]):
                self._begin()
                continue
            taken = _first(times[done:], max(1, min(self._room, fits)))
            if self._is_too_much(taken, int(sums[done + len(taken) - 1]) - before):
                if taken[0] == taken[-1]:
                    done += self._add_parts(partition, taken, says_closing=says_closing)
                    continue
                taken = taken[: np.searchsorted(taken, taken[-1])]
            time_range = TimeRange(int(taken[0]), int(taken[-1]), says_closing=says_closing)
            self.chunks[-1][partition] = time_range
            done += len(taken)
            self._room -= len(taken)
            self._room_bytes -= int(sums[done - 1]) - before

    def _begin(self) -> None:
        self.chunks.append({})
        self._room = self.size
        self._room_bytes = CHUNK_BYTES

    def _is_too_much(self, taken: Int64s, taken_bytes: int) -> bool:
        """Return True where records, of which the last share a time, do not fit into the chunk."""
        is_beyond = len(taken) > self._room + self.size or taken_bytes > self._room_bytes
        return len(taken) > 1 and is_beyond

    def _add_parts(self, partition: int, taken: Int64s, *, says_closing: bool) -> int:
        """Add records of one time in chunks of their own, unless a chunk has begun; it ends then.

        Return how many were added.
        """
        self._room = 0
        if self.chunks[-1]:
            return 0
        time = int(taken[0])
        at = TimeRange(time, time, says_closing=says_closing)
        self.chunks[-1:] = [{partition: part} for part in self._parts(partition, at)]
        return len(taken)

    def _parts(self, partition: int, at: TimeRange) -> Iterator[TimeRange]:
        """Yield the records of one time of a partition, cut so that each part fits into a chunk."""
        columns = at.columns[1:]
        where = self.unpublished.of_chunk({partition: at})
        rows = self.reader.select(tables.SILVER, [*columns, RECORD_BYTES.name], where)
        rows = rows.sort_by([(name, "ascending") for name in columns])
        begin = None
        room = self.size
        room_bytes = CHUNK_BYTES
        last = None
        places = zip(*(rows[name].to_pylist() for name in columns), strict=True)
        for place, row_bytes in zip(places, sizes_of(rows).tolist(), strict=True):
            if last is not None and (room == 0 or row_bytes > room_bytes):
                yield at._replace(begin=begin, end=last)
                begin = place
                room = self.size
                room_bytes = CHUNK_BYTES
            last = place
            room -= 1
            room_bytes -= row_bytes
        yield at._replace(begin=begin)


def _first(times: Int64s, count: int) -> Int64s:
    """Return the first `count` of these sorted times, and those that equal the last of them."""
    return times[: np.searchsorted(times, times[min(count, len(times)) - 1], side="right")]


def _with_ties(
    reader: TableReader, unpublished: Unpublished, partitions: Sequence[int]
) -> list[int]:
    """Return the partitions with a record that has exactly the tail's time and sorts after it."""
    where: Where = [
        [*_kind_of(unpublished, p), ("partition", "=", p), *terms]
        for p in partitions
        for terms in _at_time_after(unpublished.tails[p])
    ]
    tied = set[int]()
    for portion in in_portions(where):
        rows = reader.summary(tables.SILVER, ["partition"], {"rows": ("count", "*")}, portion)
        tied.update(rows["partition"].to_pylist())
    return sorted(tied)


def _kind_of(unpublished: Unpublished, partition: int) -> list[Condition]:
    return unpublished.of_kind(says_closing=unpublished.tails[partition].closed_at is not None)


def _at_time_after(tail: SequenceTail) -> Where:
    """Return a condition for the rows of a tail's kind that have its time and sort after it."""
    _, *ties = beyond(tail, None, is_after=True)
    return ties
