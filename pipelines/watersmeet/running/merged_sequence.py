"""The sequence of merge records, which gold publishes to the sink.

Its order is that in which merge records were closed: (closed at, tenant, due, key). With timeouts
alone, that is (event time, key). Nothing that times out later can sort before what is published.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import pyarrow as pa
from confluent_kafka import Message

from watersmeet.core.sequence import SequenceTail, parse_tail, tombstones
from watersmeet.kafka.publisher import sequence_tail
from watersmeet.lake.progress import last_batch
from watersmeet.lake.published import last_published
from watersmeet.running.lake_sequence import LakeSequence, limit_bytes
from watersmeet.running.message_rows import Headers, MessageRows
from watersmeet.running.publication_plan import Limits, Pending, Unpublished, pending
from watersmeet.running.publications import Tails, end_of
from watersmeet.running.recovery_headers import RecoveryHeaders
from watersmeet.running.transaction_size import TransactionSize

MAX_PER_CHUNK = 50_000
"""Approximate number of rows that are read into memory at a time, and in the first transaction."""


class MergedSequence(LakeSequence):
    """The merge records of one lake's newest generation, as messages of the sink."""

    @property
    def topic(self) -> str:
        """The topic that the messages go to."""
        return self.settings.publish.topic

    def pending(self, tails: Tails, size: TransactionSize) -> Pending | None:
        """Return what follows these last messages, about as much as a transaction takes.

        None while the lake has not begun.
        """
        if not self.has_begun():
            return None
        unpublished = self._unpublished(tails)._replace(clocks=self._clocks())
        limits = Limits(size.limit, MAX_PER_CHUNK, limit_bytes(size))
        return pending(self.engine.reader, unpublished, limits)

    def headers(self, backlog: Pending) -> Mapping[int, Headers]:
        """Return, by partition, the headers from which a lost lake would be taken up."""
        is_atomic = self.settings.publish.delivery == "exactly_once"
        return self._recovery_headers.of(backlog.ends, is_atomic=is_atomic)

    def messages(
        self, backlog: Pending, tails: Tails, headers: Mapping[int, Headers]
    ) -> Iterator[pa.Table]:
        """Yield the messages of what is pending, each table for one partition."""
        return self._rows.messages(backlog, tails, headers)

    def end_of(self, messages: pa.Table) -> SequenceTail:
        """Return a partition's tail after these messages; its offset is not known yet."""
        return end_of(messages)

    def tail(self, message: Message) -> SequenceTail:
        """Return how far a sequence has come, as its last message says."""
        return sequence_tail(message, parse_tail)

    def first_tails(self) -> Mapping[int, SequenceTail]:
        """Return, by partition, the message behind which the newest generation publishes."""
        return self._generations.newest.tails if self.has_begun() else {}

    def noted(self, sink: str) -> dict[int, SequenceTail]:
        """Return, by partition, how far the sequences of a sink have come, as `published` says."""
        return last_published(self.engine.reader, sink)

    def columns(self, tail: SequenceTail) -> dict[str, Any]:
        """Return the columns of `published` that say what the last message of a publication was."""
        return {
            "last_event_time": tail.event_time,
            "last_key": tail.key,
            "last_due": tail.due,
            "last_closed_at": tail.closed_at,
            "last_tenant": tail.tenant,
        }

    def tombstones(self, key: str, tails: Iterable[tuple[int, SequenceTail]]) -> pa.Table:
        """Return messages that tell consumers in these partitions that a key is deleted."""
        return tombstones(key, tails)

    def _unpublished(self, tails: Tails) -> Unpublished:
        """Return which records count as not published."""
        from_batch = self._generations.newest.from_batch
        return Unpublished(tails, self.partitions, from_batch, self.epochs.closing_from)

    def _clocks(self) -> Mapping[int, int] | None:
        """Return the clock (ms) of each partition if there were several epochs; else None.

        An epoch may close records in advance: what it closes at the clock where it began has the
        next millisecond as its `closed_at`. Another epoch may close further records at that same
        time, so none of them is published before the clock has reached it.
        """
        if len(self.epochs) == 1:
            return None
        last = last_batch(self.engine.reader, self.settings)
        return {} if last is None else last[0].clocks

    @cached_property
    def _rows(self) -> MessageRows:
        return MessageRows(self.engine, self.settings, self.epochs, self._unpublished({}))

    @cached_property
    def _recovery_headers(self) -> RecoveryHeaders:
        return RecoveryHeaders(
            self.engine.reader, self.settings, self.partitions, self.epochs, self._generations
        )
