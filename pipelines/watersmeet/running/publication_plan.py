"""Plans how far a publication of a sequence reaches: the rows beyond the tails of its topic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import Int64s, cuts, groups, int64s, looked_up
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.sequence import Place, Sequence, Tail, clock_of
from watersmeet.lake.published import after, up_to, with_message
from watersmeet.lake.table_reader import (
    Aggregates,
    Condition,
    TableReader,
    Where,
    between,
    in_portions,
    sizes_of,
)

CHUNK_BYTES = 64 * 1024 * 1024
LIMIT_BYTES = 2 * 1024 * 1024 * 1024
"""Size limits of records, as they are in memory: of a chunk and (roughly) of a publication."""


class Range(NamedTuple):
    """A range of a partition's sequence: what sorts after a place (None: from its beginning on) and
    up to another. Both may be the first columns of places alone."""

    after: Place | None
    until: Place

    def of(self, sequence: Sequence, rows: pa.Table) -> pa.Table:
        """Return those of a partition's rows that are in the range, in their order."""
        is_its = ~sequence.is_after(rows, self.until)
        if self.after is not None:
            is_its &= sequence.is_after(rows, self.after)
        return sequence.in_order(rows.filter(pa.array(is_its)))


class Pending(NamedTuple):
    """The rows that are published next.

    - `chunks`: one after the other, each a range by partition.
    - `has_more`: more is pending.
    - `ends`: by partition, the times (ms) of the clock at which its first and its last row were
      finished.
    - `records`: how many rows there are.
    """

    chunks: list[dict[int, Range]]
    has_more: bool
    ends: Mapping[int, tuple[int, int]] = MappingProxyType({})
    records: int = 0


class Limits(NamedTuple):
    """Approximate limits of a publication: records in all and in a chunk, and bytes in all."""

    records: int
    chunk: int
    bytes: int = LIMIT_BYTES


@dataclass(frozen=True)
class Unpublished:
    """The rows of a sequence that count as not published, in `partitions` partitions.

    - `tails`: by partition, the last message, which they sort after.
    - `batches`: the condition for the batches of silver that count.
    - `clocks`: by partition, the clock (ms) up to which all that is finished is known; None where
      nothing is finished in advance of the clock.
    """

    reader: TableReader
    sequence: Sequence
    tails: Mapping[int, Tail]
    partitions: int
    batches: SequenceOf[Condition] = ()
    clocks: Mapping[int, int] | None = None

    def pending(self, limits: Limits) -> Pending:
        """Return the rows that are published next, in chunks, about as many as the limits say.

        There are fewer if they are large; a chunk has `CHUNK_BYTES`.

        All rows of one time of the clock are published together, in several chunks if they must.
        Whatever is finished later has a later time, so a range stays the same while the lake moves
        on. If there are more rows than the limit, each partition gives about an equal share.
        """
        rows = self._rows()
        partitions, every = int64s(rows["partition"]), int64s(rows[self.sequence.clock])
        sizes = sizes_of(rows)
        share = min(
            1.0, limits.records / max(1, len(every)), limits.bytes / max(1, int(sizes.sum()))
        )
        ends: dict[int, tuple[int, int]] = {}
        first: list[Int64s] = [np.empty(0, np.int64)]
        for partition, numbers in groups(partitions, every).items():
            times = _first(every[numbers], max(1, int(len(numbers) * share)))
            ends[partition] = int(times[0]), int(times[-1])
            first.append(numbers[: len(times)])
        taken = np.concatenate(first)
        chunks = self._chunks(partitions[taken], every[taken], sizes[taken], limits.chunk)
        return Pending([*chunks], len(taken) < len(every), ends, len(taken))

    def _chunks(
        self, partitions: Int64s, times: Int64s, sizes: Int64s, most: int
    ) -> Iterator[dict[int, Range]]:
        """Yield rows, which are in order of partition and time, in chunks of at most `CHUNK_BYTES`
        and `most` rows. The rows of one time stay together where they fit.
        """
        is_first = (np.diff(partitions, prepend=-1) != 0) | (np.diff(times, prepend=-1) != 0)
        begins = np.flatnonzero(is_first)
        counts = np.diff(np.append(begins, len(times)))
        totals = np.append(0, np.cumsum(sizes))
        sizes_of_times = totals[begins + counts] - totals[begins]
        after = {p: tail.place for p, tail in self.tails.items()}
        for begin, end in cuts(sizes_of_times, CHUNK_BYTES, most, counts):
            rows = slice(begins[begin], begins[end - 1] + counts[end - 1])
            lasts = np.flatnonzero(np.diff(partitions[rows], append=-1))
            until = zip(partitions[rows][lasts].tolist(), times[rows][lasts].tolist(), strict=True)
            chunk = {p: Range(after.get(p), (time,)) for p, time in until}
            is_large = sizes_of_times[begin] > CHUNK_BYTES and counts[begin] > 1
            if is_large or counts[begin] > most:
                [(partition, span)] = chunk.items()
                yield from ({partition: part} for part in self._parts(partition, span, most))
            else:
                yield chunk
            after |= {p: span.until for p, span in chunk.items()}

    def _parts(self, partition: int, span: Range, most: int) -> Iterator[Range]:
        """Yield the rows of one time of a partition, cut so that each part fits into a chunk."""
        sequence = self.sequence
        columns = [*sequence.order, RECORD_BYTES.name]
        rows = self.reader.select(sequence.table, columns, self.of({partition: span}))
        rows = sequence.in_order(rows)
        place = span.after
        for _, end in cuts(sizes_of(rows), CHUNK_BYTES, most):
            last = sequence.places(rows.slice(end - 1, 1))[0]
            yield Range(place, last)
            place = last

    def first(self, records: int) -> Unpublished | None:
        """Return about so many of the first rows; None if there are no more than that.

        What is read of them takes as much memory however many rows there are, unless more are of
        one time: rows far behind the others only make it narrow them down once more.
        """
        first = self._narrowed(records)
        while first is not None and (narrower := first._narrowed(records, 2 * records)) is not None:
            first = narrower
        return first

    def _narrowed(self, records: int, most: int = 0) -> Unpublished | None:
        # As many of the first rows as are asked for, if their times are spread evenly.
        bounds = {p: (since + 1, until) for p, (since, until) in self._bounds.items()}
        clock = self.sequence.clock
        values: Aggregates = {
            "rows": ("count", "*"),
            "first": ("min", clock),
            "last": ("max", clock),
        }
        where = [[*self._finished, *term] for term in between(clock, bounds)]
        spans = self.reader.summary(self.sequence.table, ["partition"], values, where).to_pylist()
        total = sum(span["rows"] for span in spans)
        if total <= max(records, most) or all(span["first"] == span["last"] for span in spans):
            return None
        clocks = {p: since for p, (since, _) in self._bounds.items()}
        for span in spans:
            length = (span["last"] - span["first"]) * records // total
            clocks[span["partition"]] = span["first"] + length
        return replace(self, clocks=clocks)

    def of(self, chunk: Mapping[int, Range]) -> Where:
        """Return the condition for a chunk's rows, which a few more may meet where it has several
        partitions."""
        if len(chunk) > 1:
            bounds = {
                p: (clock_of(span.after) if span.after else None, clock_of(span.until) + 1)
                for p, span in chunk.items()
            }
            return [[*self._finished, *term] for term in between(self.sequence.clock, bounds)]
        [(partition, span)] = chunk.items()
        begins = after(self.sequence, span.after)
        ends = up_to(self.sequence, span.until)
        here: list[Condition] = [*self._finished, ("partition", "=", partition)]
        return [[*here, *begin, *end] for begin in begins for end in ends]

    @property
    def _bounds(self) -> dict[int, tuple[int, int | None]]:
        """By partition, the clock (ms) of the last message, and the exclusive end of what counts.

        None: it has no end.
        """
        clocks, tails = self.clocks, self.tails
        return {
            p: (
                clock_of(tails[p].place) if p in tails else -1,
                None if clocks is None else clocks.get(p, -1) + 1,
            )
            for p in range(self.partitions)
        }

    @property
    def _finished(self) -> list[Condition]:
        return [*with_message(self.sequence), *self.batches]

    def _rows(self) -> pa.Table:
        """Return the rows that sort after the tails, up to the clocks: when they were finished, and
        their sizes.
        """
        rows = self._select(between(self.sequence.clock, self._bounds))
        last = {p: clock_of(tail.place) for p, tail in self.tails.items()}
        partitions, clocks = int64s(rows["partition"]), int64s(rows[self.sequence.clock])
        lasts = looked_up(partitions, last, -1)
        tied = np.unique(partitions[clocks == lasts]).tolist()
        # Only a failure leaves rows of the tail's own time behind, since all of one time are
        # published together.
        ties: Where = [
            [("partition", "=", p), (self.sequence.clock, "=", last[p]), *term]
            for p in tied
            if p in last
            for term in after(self.sequence, self.tails[p].place)
        ]
        later = rows.filter(pa.array(clocks > lasts))
        return pa.concat_tables([later, *map(self._select, in_portions(ties))])

    def _select(self, where: Where) -> pa.Table:
        columns = ["partition", self.sequence.clock, RECORD_BYTES.name]
        terms = [[*self._finished, *term] for term in where]
        return self.reader.select(self.sequence.table, columns, terms)


def _first(times: Int64s, count: int) -> Int64s:
    """Return the first `count` of these sorted times, and those that equal the last of them."""
    return times[: np.searchsorted(times, times[min(count, len(times)) - 1], side="right")]
