"""Sequences of messages: how gold asks for them, follows them, and notes them in `published`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

import pyarrow as pa
from confluent_kafka import Message

from watersmeet.core.sequence import SequenceTail
from watersmeet.running.transaction_size import TransactionSize

Tails: TypeAlias = Mapping[int, SequenceTail]
"""The last message by partition."""


class Publication(NamedTuple):
    """The messages of a partition in one transaction: from `first_seq` up to `tail`.

    The offset of `tail` is None if it is not known.
    """

    partition: int
    first_seq: int
    tail: Any

    def row(self) -> dict[str, Any]:
        """Return a row of `published`, without what else it says of the last message."""
        return {
            "partition": self.partition,
            "first_seq": self.first_seq,
            "last_seq": self.tail.seq,
            "sink_offset": self.tail.offset,
        }


class Sequence(Protocol):
    """The messages of one topic, as gold publishes them: what they are, and how far they are.

    A tail is what the last message of a partition says: its number `seq`, its `offset` in the
    topic, and its place in the order.
    """

    @property
    def topic(self) -> str:
        """The topic that the messages go to."""
        ...

    def pending(self, tails: Mapping[int, Any], size: TransactionSize) -> Any:
        """Return what follows these last messages, about as much as a transaction takes.

        It has `chunks`, the number of `records`, and `has_more`: True where more is pending. None
        while the lake has not begun.
        """
        ...

    def headers(self, backlog: Any) -> Mapping[int, Any]:
        """Return further headers of the messages of what is pending, by partition."""
        ...

    def messages(
        self, backlog: Any, tails: Mapping[int, Any], headers: Mapping[int, Any]
    ) -> Iterator[pa.Table]:
        """Yield the messages of what is pending, each table for one partition."""
        ...

    def end_of(self, messages: pa.Table) -> Any:
        """Return a partition's tail after these messages; its offset is not known yet."""
        ...

    def tail(self, message: Message) -> Any:
        """Return how far a sequence has come, as its last message says.

        Raises ForeignMessageError if the message is not Watersmeet's.
        """
        ...

    def first_tails(self) -> Mapping[int, Any]:
        """Return, by partition, the message behind which the newest generation publishes."""
        ...

    def noted(self, sink: str) -> dict[int, Any]:
        """Return, by partition, how far the sequences of a topic have come, as `published` says."""
        ...

    def columns(self, tail: Any) -> dict[str, Any]:
        """Return the columns of `published` that say what the last message of a publication was."""
        ...

    def tombstones(self, key: str, tails: Iterable[tuple[int, Any]]) -> pa.Table:
        """Return messages that tell consumers in these partitions that a key is deleted."""
        ...


def publications_of(ends: Mapping[int, Any], tails: Mapping[int, Any]) -> list[Publication]:
    """Return what was published by partition, after these tails and up to these ends."""
    return [
        Publication(p, tails[p].seq + 1 if p in tails else 0, end)
        for p, end in sorted(ends.items())
    ]


def followed(
    chunks: Iterable[pa.Table], ends: dict[int, Any], tail_after: Callable[[pa.Table], Any]
) -> Iterator[pa.Table]:
    """Yield the chunks, each of one partition; put each partition's tail after them into `ends`.

    `tail_after`: returns it for the messages of a chunk.
    """
    for chunk in chunks:
        ends[chunk["partition"][0].as_py()] = tail_after(chunk)
        yield chunk


def end_of(messages: pa.Table) -> SequenceTail:
    """Return a partition's tail after these messages (one or more); its offset is not known yet."""
    [last] = messages.slice(messages.num_rows - 1).to_pylist()
    closed = last["due"], last["closed_at"], last["tenant"] or ""
    return SequenceTail(last["seq"], last["event_time"], last["key"].decode(), None, *closed)
