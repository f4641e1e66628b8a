"""The publication sequence of a partition: where it stands is read from its last message, and it goes on without a gap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

SEQ = "watersmeet.seq"
ID = "watersmeet.id"
MIN_OFFSETS = "watersmeet.min_offsets"
IDLE = "watersmeet.idle"


class Outgoing(NamedTuple):
    """A finished, valid record as it is to be published; event time in ms."""

    event_time: int
    key: str
    value: bytes | None

    @property
    def place(self) -> tuple[int, bytes]:
        """What the sequence is ordered by: event time, then the key's UTF-8 bytes."""
        return self.event_time, self.key.encode()


class Tail(NamedTuple):
    """The last message of a sink partition: what the next one follows."""

    seq: int
    event_time: int
    key: str
    offset: int | None

    @property
    def place(self) -> tuple[int, bytes]:
        """Its place in the sequence, comparable with `Outgoing.place`."""
        return self.event_time, self.key.encode()


def message_id(partition: int, event_time: int, key: str) -> str:
    """Stable for a record, and unique: no two merge records of a partition share key and event time."""
    return f"{partition}/{event_time}/{key}"


def parse_message_id(text: str) -> tuple[int, int, str]:
    """Partition, event time (ms) and key of a `message_id`. Raises ValueError where it is none."""
    partition, event_time, key = text.split("/", 2)
    return int(partition), int(event_time), key


def resume(rows: Iterable[Outgoing], tail: Tail | None) -> Iterator[tuple[int, Outgoing]]:
    """Numbers the rows that come after the tail, from its number on; what the sink already has is skipped.

    So a second attempt at the same rows, or at more of them, publishes what is missing and nothing else. The rows must come
    in order of `place`, each once; ValueError where they do not, since what is out can no longer be put in order.
    """
    seq = -1 if tail is None else tail.seq
    last = None
    for row in rows:
        if last is not None and row.place <= last:
            raise ValueError(f"{row.key!r} at {row.event_time} comes after a record that sorts behind it")
        last = row.place
        if tail is None or row.place > tail.place:
            seq += 1
            yield seq, row
