"""The sequence of corrections, which gold publishes to a topic of its own.

Its order is that in which late records were settled (`core.correction_sequence`). What is settled
later sorts after all that the table has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
from confluent_kafka import Message

from watersmeet.core.columns import cuts, int64s, times_ms
from watersmeet.core.correction_sequence import (
    ORDER,
    CorrectionPlace,
    CorrectionTail,
    correction_messages,
    end_of,
    in_order,
    is_up_to,
    parse_tail,
    places_of,
    tombstones,
)
from watersmeet.core.corrections import as_silver
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.kafka.publisher import sequence_tail
from watersmeet.lake import tables
from watersmeet.lake.published import last_corrected
from watersmeet.lake.table_reader import Condition, sizes_of
from watersmeet.running.lake_sequence import LakeSequence, limit_bytes
from watersmeet.running.message_rows import with_message_values
from watersmeet.running.publication_plan import CHUNK_BYTES
from watersmeet.running.transaction_size import TransactionSize

CHUNK_ROWS = 5_000
"""Number of corrections that are read into memory at a time."""


class CorrectionChunk(NamedTuple):
    """Corrections of a partition that follow each other: the places of the first and the last, and
    the offsets of all of their late records."""

    partition: int
    first: CorrectionPlace
    last: CorrectionPlace
    offsets: list[int]


class PendingCorrections(NamedTuple):
    """The corrections that are published next; `has_more`: more are pending."""

    chunks: list[CorrectionChunk]
    has_more: bool
    records: int


CorrectionTails = Mapping[int, CorrectionTail]
"""The last correction by partition."""


class CorrectedSequence(LakeSequence):
    """The corrections of one lake's newest generation, as messages of their topic."""

    _done: tuple[int, CorrectionTails] | None = None
    """A version of the table that has nothing behind these tails."""

    @property
    def topic(self) -> str:
        """The topic that the messages go to."""
        return cast(str, self.settings.publish.corrections_topic)

    def pending(self, tails: CorrectionTails, size: TransactionSize) -> PendingCorrections | None:
        """Return what follows these last messages, about as much as a transaction takes.

        None while the lake has not begun. Where nothing was pending and the table has no commit
        since, nothing is read.
        """
        if not self.has_begun():
            return None
        reader = self.engine.reader
        if self._done is not None:
            version, done = self._done
            if tails == done and not reader.has_moved(tables.CORRECTIONS, version):
                return PendingCorrections([], has_more=False, records=0)
        version = reader.version(tables.CORRECTIONS)
        rows = self._after(tails)
        self._done = None if rows.num_rows else (version, dict(tails))
        total = max(1, int(sizes_of(rows).sum()))
        share = min(1.0, size.limit / max(1, rows.num_rows), limit_bytes(size) / total)
        chunks: list[CorrectionChunk] = []
        count = 0
        partitions = int64s(rows["partition"])
        for p in np.unique(partitions).tolist():
            partition_rows = in_order(rows.filter(pa.array(partitions == p)))
            partition_rows = partition_rows.slice(0, max(1, int(partition_rows.num_rows * share)))
            chunks += _chunks(p, partition_rows)
            count += partition_rows.num_rows
        return PendingCorrections(chunks, count < rows.num_rows, count)

    def headers(self, _: PendingCorrections) -> Mapping[int, Any]:
        """Return no further headers: each message says how far its sequence has come."""
        return {}

    def messages(
        self, backlog: PendingCorrections, tails: CorrectionTails, _: Mapping[int, Any]
    ) -> Iterator[pa.Table]:
        """Yield the messages of what is pending, each table for one partition."""
        ends = dict(tails)
        for chunk in backlog.chunks:
            for rows in self._by_epoch(self._read(chunk)):
                made = correction_messages(rows, rows["value"], ends.get(chunk.partition))
                ends[chunk.partition] = end_of(made)
                yield made

    def end_of(self, messages: pa.Table) -> CorrectionTail:
        """Return a partition's tail after these messages; its offset is not known yet."""
        return end_of(messages)

    def tail(self, message: Message) -> CorrectionTail:
        """Return how far a sequence has come, as its last message says."""
        return sequence_tail(message, parse_tail)

    def first_tails(self) -> Mapping[int, CorrectionTail]:
        """Return, by partition, the message behind which the newest generation publishes."""
        return self._generations.newest.correction_tails if self.has_begun() else {}

    def noted(self, sink: str) -> dict[int, CorrectionTail]:
        """Return, by partition, how far the sequences of a topic have come, as `published` says."""
        return last_corrected(self.engine.reader, sink)

    def columns(self, tail: CorrectionTail) -> dict[str, Any]:
        """Return the columns of `published` that say what the last message of a publication was."""
        place = tail.place
        return {
            "last_settled_at": place.settled_at,
            "last_tenant": place.tenant.decode(),
            "last_u": place.u,
            "last_source": place.source.decode(),
            "last_topic": place.topic.decode(),
            "last_offset": place.offset,
        }

    def tombstones(self, key: str, tails: Iterable[tuple[int, CorrectionTail]]) -> pa.Table:
        """Return messages that tell consumers in these partitions that a key is deleted."""
        return tombstones(key, tails)

    def _after(self, tails: CorrectionTails) -> pa.Table:
        """Return the order and size of the corrections with a message that sort after the tails."""
        since = [tails[p].place.settled_at if p in tails else 0 for p in range(self.partitions)]
        where = [[*self._of_generation(), ("settled_at", ">=", min(since))]]
        columns = ["partition", *ORDER, RECORD_BYTES.name]
        rows = self.engine.reader.rows(tables.CORRECTIONS, columns, where)
        partitions = int64s(rows["partition"])
        rows = rows.filter(pa.array(times_ms(rows["settled_at"]) >= np.array(since)[partitions]))
        is_published = is_up_to(rows, {p: tail.place for p, tail in tails.items()})
        return rows.filter(pa.array(~is_published))

    def _of_generation(self) -> list[Condition]:
        return [("generation", "=", self._generations.newest.number), ("has_message", "=", True)]

    def _read(self, chunk: CorrectionChunk) -> pa.Table:
        """Return the corrections of a chunk in order."""
        where: list[Condition] = [
            *self._of_generation(),
            ("partition", "=", chunk.partition),
            ("settled_at", ">=", chunk.first.settled_at),
            ("settled_at", "<=", chunk.last.settled_at),
            ("offset", "in", chunk.offsets),
        ]
        names = self.engine.lake.schema(tables.CORRECTIONS).names
        rows = in_order(self.engine.reader.rows(tables.CORRECTIONS, names, [where]))
        is_its = [chunk.first <= place <= chunk.last for place in places_of(rows)]
        return rows.filter(pa.array(is_its, pa.bool_()))

    def _by_epoch(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Yield rows in order with the `value` of their message, by the rules that judged them."""
        numbers = self.epochs.numbers_of(int64s(rows["batch"]))
        cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), rows.num_rows]
        for begin, end in pairwise(cuts):
            some = rows.slice(begin, end - begin)
            settings = self.epochs[int(numbers[begin])].settings
            made = with_message_values(as_silver(some), settings)
            yield some.append_column("value", made["value"])


def _chunks(partition: int, rows: pa.Table) -> Iterator[CorrectionChunk]:
    """Yield corrections of a partition, in order, in chunks that fit into memory."""
    places = places_of(rows)
    for begin, end in cuts(sizes_of(rows), CHUNK_BYTES, CHUNK_ROWS):
        some = places[begin:end]
        offsets = sorted({place.offset for place in some})
        yield CorrectionChunk(partition, some[0], some[-1], offsets)
