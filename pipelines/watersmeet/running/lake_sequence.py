"""A sequence of one lake: what of it is pending, and its messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from operator import attrgetter
from time import monotonic
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import Message

from watersmeet.core.columns import both, groups, int64s, numbered
from watersmeet.core.corrections import as_silver
from watersmeet.core.message import as_read, message_values
from watersmeet.core.recovery import life_headers, text_of
from watersmeet.core.sequence import (
    CORRECTED,
    LIFE,
    MERGED,
    Headers,
    Sequence,
    Tail,
    clock_of,
)
from watersmeet.core.times import time_text
from watersmeet.engine import Engine
from watersmeet.errors import ForeignMessageError, LakeBehindError, WatersmeetError
from watersmeet.expressions.publish import Expressions, warn
from watersmeet.kafka.publisher import sequence_tail
from watersmeet.kafka.reading import headers_of
from watersmeet.lake.history import Epochs, Generation, Generations
from watersmeet.lake.progress import last_batch
from watersmeet.lake.published import topic_of
from watersmeet.lake.table_reader import Condition, row_count
from watersmeet.running.owner import Owner
from watersmeet.running.publication_plan import LIMIT_BYTES, Limits, Pending, Range, Unpublished
from watersmeet.running.recovery_headers import RecoveryHeaders, left_behind
from watersmeet.running.transaction_size import TransactionSize
from watersmeet.settings import Settings

MAX_PER_CHUNK = 50_000
"""Approximate number of rows that are read into memory at a time, and in the first transaction."""

_CORRECTIONS_PER_CHUNK = 5_000

_MANY = 4
"""Of so many times the rows of a transaction the first ones are planned alone."""

RECENT_S = 30.0
"""Time for which, once few rows were pending, all that batches add to them are planned at once."""


class Publication(NamedTuple):
    """The messages of a partition in one transaction: from `first_seq` up to `tail`.

    The offset of `tail` is None if it is not known. `failed_values`: for how many of them
    `publish.value` failed; None if the messages were read from the topic, which does not say.
    """

    partition: int
    first_seq: int
    tail: Tail
    failed_values: int | None = None


@dataclass
class LakeSequence:
    """A sequence of one lake's newest generation, in `partitions` partitions of a topic."""

    owner: Owner
    settings: Settings
    partitions: int
    sequence: Sequence = MERGED
    until: Mapping[int, int] | None = None
    """By partition, the clock (ms) up to which rows are published; None: whatever is finished."""
    _publishing: Generation | None = None
    """The one whose messages are pending."""
    now_s: Callable[[], float] = monotonic
    _few_until_s: float = -inf
    """Until then (`now_s`), few rows are pending beside those that batches have made recently."""
    _done: tuple[int, Mapping[int, Tail]] | None = None
    """A version of the table that has nothing behind these tails."""

    @property
    def topic(self) -> str:
        """The topic that the messages go to."""
        return cast(str, topic_of(self.settings, self.sequence))

    def pending(self, tails: Mapping[int, Tail], size: TransactionSize) -> Pending | None:
        """Return what follows these last messages, about as much as a transaction takes.

        None while the lake has not begun. Where no correction was pending and their table has no
        commit since, nothing is read.
        """
        if not self.has_begun():
            return None
        reader = self.engine.reader
        if self._done is not None:
            seen, done = self._done
            if tails == done and not reader.has_moved(self.sequence.table, seen):
                return Pending([], has_more=False)
        # Silver has a commit in each cycle: asking for its version would be in vain.
        version = None if self.sequence is MERGED else reader.version(self.sequence.table)
        clocks, now_s = self._clocks(), self.now_s()
        per_chunk = MAX_PER_CHUNK if self.sequence is MERGED else _CORRECTIONS_PER_CHUNK
        limits = Limits(size.limit, per_chunk, max(1, LIMIT_BYTES * size.limit // size.largest))
        for generation in self._beyond(tails):
            self._publishing = generation
            is_newest = generation is self._generations.newest
            unpublished = self._unpublished(generation, tails, clocks if is_newest else None)
            first = unpublished.first(_MANY * limits.records) if now_s > self._few_until_s else None
            backlog = (first or unpublished).pending(limits)
            if first is not None and not backlog.records:
                backlog = unpublished.pending(limits)
            is_last = is_newest and first is None
            backlog = backlog._replace(has_more=backlog.has_more or not is_last)
            if backlog.records:
                break
        self._few_until_s = -inf if backlog.has_more else now_s + RECENT_S
        # What waits for the clock is let go by a note of it, and not by a commit to the table.
        is_done = not backlog.records and clocks is None
        self._done = (version, dict(tails)) if is_done and version is not None else None
        return backlog

    def headers(self, backlog: Pending) -> Mapping[int, tuple[Headers, Headers]]:
        """Return, by partition, further headers of the first and of the last message of what is
        pending: from these a lost lake would be taken up.
        """
        if self.sequence is MERGED:
            return self._recovery_headers.of(backlog.ends)
        headers = dict[int, tuple[Headers, Headers]]()
        for p in backlog.ends:
            left = left_behind(self._generations, self.settings, p)
            its = life_headers(self._generations.newest.life, left=left)
            headers[p] = its, its
        return headers

    def messages(
        self,
        backlog: Pending,
        tails: Mapping[int, Tail],
        headers: Mapping[int, tuple[Headers, Headers]],
        made: dict[int, Publication],
    ) -> Iterator[pa.Table]:
        """Yield the messages of what is pending, each table for one partition.

        `tails`: the last message of each partition; put into `made`, by partition, are the messages
        so far, whose offset is not known yet. `headers`: as `headers` returns them.
        """
        last_chunks = {p: number for number, chunk in enumerate(backlog.chunks) for p in chunk}
        finished = self._unpublished(self._publishing or self._generations.newest, {}, None)
        for number, chunk in enumerate(backlog.chunks):
            rows = self.engine.reader.rows(self.sequence.table, self._columns, finished.of(chunk))
            places = numbered(rows.select([*self.sequence.order]))
            by_partition = groups(int64s(rows["partition"]))
            for p in sorted(chunk.keys() & by_partition.keys()):
                here = places.take(pa.array(by_partition[p]))
                its = rows.take(chunk[p].of(self.sequence, here)["_row"])
                if not its.num_rows:
                    continue
                values, failed = values_of(self.sequence, its, self.epochs)
                first, last = headers.get(p, ([], []))
                further = {} if p in made else {0: first}
                further |= {its.num_rows - 1: last} if number == last_chunks[p] else {}
                before, tail = made.get(p), tails.get(p)
                first_seq = 0 if tail is None else tail.seq + 1
                if before is not None:
                    first_seq, tail = before.first_seq, before.tail
                    failed += before.failed_values or 0
                messages, tail = self.sequence.messages(its, values, tail, further)
                made[p] = Publication(p, first_seq, tail, failed)
                yield messages

    def tail(self, message: Message) -> Tail:
        """Return how far a sequence has come, as its last message says.

        Raises ForeignMessageError if the message is not Watersmeet's.
        """
        return sequence_tail(message, self.sequence, self.epochs.first_timeout_ms)

    def first_tails(self, sink: str) -> Mapping[int, Tail]:
        """Return, by partition, the message behind which the newest generation publishes.

        None where the topic is another one now than when it began; `sink`: as `published` names it.
        """
        if not self.has_begun():
            return {}
        newest = self._generations.newest
        is_its = newest.topics.get(self.sequence.table, sink) == sink
        return newest.tails_of(self.sequence) if is_its else {}

    def bears_out(self, partition: int, tail: Tail, noted: Tail | None) -> bool:
        """Return True if the lake has what the last message of a partition says, with its number.

        `noted`: the last one that `published` has of the topic. Beyond it, the message must be that
        of a finished row, and every row up to there must have one.
        """
        if not self.has_begun():
            return True
        if noted is not None and tail.seq <= noted.seq:
            is_noted = tail.seq == noted.seq
            return tail.place == noted.place if is_noted else tail.place < noted.place
        begun = self._generations.newest.tails_of(self.sequence).get(partition)
        if noted is None and begun is not None and tail[:2] == begun[:2]:
            return True
        return any(
            self._leads_to(partition, last, tail)
            for last in ((begun, None) if noted is None else (noted,))
        )

    def refusal(self, partition: int, tail: Tail, message: Message) -> WatersmeetError:
        """Return the error for the last message of a partition that the lake does not bear out."""
        newest, last = self._generations.newest, last_batch(self.engine.reader)
        clocks = last.clocks if last is not None and last.generation == newest.number else {}
        clock, closed_at = clocks.get(partition), clock_of(tail.place)
        is_own = text_of(dict(headers_of(message)), LIFE) == newest.life
        if is_own and (clock is None or clock < closed_at):
            end = "nothing" if clock is None else time_text(clock)
            return LakeBehindError(f"{self.topic}[{partition}]", time_text(closed_at), end)
        return ForeignMessageError(self.topic, partition, tail.offset or 0)

    def _leads_to(self, partition: int, last: Tail | None, tail: Tail) -> bool:
        """Return True if the rows after one message end at another, and are as many as it says."""
        seq = -1 if last is None else last.seq
        if tail.seq <= seq or (last is not None and tail.place <= last.place):
            return False
        here: list[Condition] = [
            (name, "=", value) for name, value in self.sequence.values(tail.place).items()
        ]
        tails = {} if last is None else {partition: last}
        count = last_count = 0
        for generation in self._beyond(tails, [partition]):
            its = self._unpublished(generation, tails, None)
            behind = its.tails.get(partition)
            if behind is not None and behind.place >= tail.place:
                continue
            span = Range(None if behind is None else behind.place, tail.place)
            where = its.of({partition: span})
            count += row_count(self.engine.reader, self.sequence.table, where)
            where = [[*term, *here] for term in where]
            last_count += row_count(self.engine.reader, self.sequence.table, where)
        return count == tail.seq - seq and last_count == 1

    def has_begun(self) -> bool:
        """Return True where the lake says where its newest generation begins."""
        return bool(self._generations)

    @property
    def epochs(self) -> Epochs:
        """The epochs of the lake."""
        return self.owner.history(self.settings).epochs

    @property
    def engine(self) -> Engine:
        """The engine of the lake."""
        return self.owner.engine

    @property
    def _generations(self) -> Generations:
        return self.owner.history(self.settings).generations

    @property
    def _columns(self) -> list[str]:
        if self.sequence is CORRECTED:
            return list(self.engine.lake.schema(self.sequence.table).names)
        beside = ["partition", "batch", "event_time", "last_event_time"]
        return [*beside, *self.sequence.order, *self.settings.sources]

    def _beyond(
        self, tails: Mapping[int, Tail], partitions: Collection[int] | None = None
    ) -> tuple[Generation, ...]:
        """Return, in order, the generations that have messages beyond these tails.

        All of them where the topic was made again since the newest began.
        """
        newest = self._generations.newest
        is_behind = any(
            (p not in tails or tails[p].place < tail.place)
            and (partitions is None or p in partitions)
            for p, tail in newest.tails_of(self.sequence).items()
        )
        return self._generations if is_behind else (newest,)

    def _unpublished(
        self,
        generation: Generation,
        tails: Mapping[int, Tail],
        clocks: Mapping[int, int] | None,
    ) -> Unpublished:
        begun = generation.tails_of(self.sequence)
        later = {
            p: max((each[p] for each in (begun, tails) if p in each), key=attrgetter("place"))
            for p in begun.keys() | tails.keys()
        }
        batches = self._generations.batches(generation)
        reader = self.engine.reader
        return Unpublished(reader, self.sequence, later, self.partitions, batches, clocks)

    def _clocks(self) -> Mapping[int, int] | None:
        """Return the clock (ms) of each partition if there were several epochs; else None.

        An epoch may finish rows in advance, with the time at which it begins. Nothing of them is
        published before the clock is there.
        """
        if self.until is not None:
            return self.until
        return None if len(self.epochs) == 1 else self.reached()

    def reached(self) -> Mapping[int, int]:
        """Return the clock (ms) of each partition after the last batch."""
        last = last_batch(self.engine.reader)
        return {} if last is None else last.clocks

    @cached_property
    def _recovery_headers(self) -> RecoveryHeaders:
        return RecoveryHeaders(
            self.engine.reader, self.settings, self.partitions, self.epochs, self._generations
        )


Values: TypeAlias = tuple[pa.ChunkedArray, int]
"""The value of each message (large_binary), and for how many of them `publish.value` failed."""


def values_of(sequence: Sequence, rows: pa.Table, epochs: Epochs) -> Values:
    """Return the values of the messages of rows, null for one without a value.

    It follows the rules of the epoch whose batch finished the row: an earlier epoch than the
    current one knew fewer fields of the sources' values, so its messages have only those.
    """
    of_epochs = groups(epochs.numbers_of(int64s(rows["batch"])))
    if len(of_epochs) == 1:
        [number] = of_epochs
        return values_under(epochs[number].settings, sequence, rows)
    values, failed = pa.chunked_array([], pa.large_binary()), 0
    for number, its in of_epochs.items():
        of_epoch = rows.take(pa.array(its))
        under, failed_under = values_under(epochs[number].settings, sequence, of_epoch)
        values, failed = both(values, under, pa.large_binary()), failed + failed_under
    order = np.argsort(np.concatenate([*of_epochs.values(), np.empty(0, np.int64)]))
    return values.take(pa.array(order)), failed


def values_under(settings: Settings, sequence: Sequence, rows: pa.Table) -> Values:
    """Return the values of the messages of rows by the rules of one epoch."""
    content = rows if sequence is MERGED else as_silver(rows)
    sources = settings.sources
    expressions = Expressions.of(settings)
    if expressions.value is None:
        read = as_read(content, {name: source.read_type for name, source in sources.items()})
        values, failed = message_values(read, list(sources)), 0
    else:
        read = as_read(content, {name: source.value_type for name, source in sources.items()})
        outcome = expressions.messages(read)
        is_failed = outcome.failed
        if sequence is CORRECTED:  # one that is not valid any more has none
            is_failed = pc.and_(is_failed, rows["valid"])
        values, failed = outcome.values, pc.sum(is_failed).as_py() or 0
        warn("publish.value", failed, rows.num_rows, outcome.error)
    if sequence is MERGED:
        return values, failed
    values = pc.if_else(rows["valid"], values, pa.scalar(None, values.type))
    return values.cast(pa.large_binary()), failed
