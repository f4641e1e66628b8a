"""The publication sequence of a partition: the headers of its messages, and its last one, which says where it stands."""

from __future__ import annotations

from typing import NamedTuple

SEQ = "watersmeet.seq"
ID = "watersmeet.id"
MIN_OFFSETS = "watersmeet.min_offsets"
IDLE = "watersmeet.idle"
EPOCHS = "watersmeet.epochs"


class Tail(NamedTuple):
    """The last message of a sink partition: what the next one follows."""

    seq: int
    event_time: int
    key: str
    offset: int | None

    @property
    def place(self) -> tuple[int, bytes]:
        """What the sequence is ordered by: event time, then the key's UTF-8 bytes."""
        return self.event_time, self.key.encode()


def message_id(partition: int, event_time: int, key: str) -> str:
    """Stable for a record, and unique: no two merge records of a partition share key and event time."""
    return f"{partition}/{event_time}/{key}"


def parse_message_id(text: str) -> tuple[int, int, str]:
    """Partition, event time (ms) and key of a `message_id`. Raises ValueError where it is none."""
    partition, event_time, key = text.split("/", 2)
    return int(partition), int(event_time), key
