"""The publication sequence of a partition: the headers of its messages, and its last one, which says where it stands.

A tombstone, by which `forget` tells consumers that a key is gone, is no part of the sequence. It repeats where the sequence
stands, so that a partition that ends with it still says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from pipelines.core.types import HEADERS

SEQ = "watersmeet.seq"
ID = "watersmeet.id"
MIN_OFFSETS = "watersmeet.min_offsets"
IDLE = "watersmeet.idle"
EPOCHS = "watersmeet.epochs"
FORGOTTEN = "watersmeet.forgotten"
"""Of a tombstone: a JSON object with `seq` and `id` of the last message before it that has them."""


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


def standing(headers: Mapping[str, Any]) -> tuple[int, int, str]:
    """Where a sequence stands after a message with these headers: number, event time (ms) and key of the last one that has a
    number. Raises ValueError where they are not those of a message of Watersmeet.
    """
    try:
        said = orjson.loads(headers[FORGOTTEN]) if FORGOTTEN in headers else {"seq": headers[SEQ], "id": headers[ID].decode()}
        return int(said["seq"]), *parse_message_id(said["id"])[1:]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no {SEQ} and {ID}: {error}") from None


def tombstones(key: str, tails: Iterable[tuple[int, Tail]]) -> pa.Table:
    """A message without a value for a key in each of these partitions, which stand where the tails say; as `Publisher` sends."""
    rows = [
        {
            "partition": p,
            "key": key.encode(),
            "value": None,
            "timestamp": 0,
            "headers": [
                (FORGOTTEN, orjson.dumps({"seq": tail.seq, "id": message_id(p, tail.event_time, tail.key)})),
            ],
        }
        for p, tail in tails
    ]
    return pa.Table.from_pylist(rows, _TOMBSTONES)


_TOMBSTONES = pa.schema(
    {"partition": pa.int32(), "key": pa.binary(), "value": pa.binary(), "timestamp": pa.int64(), "headers": HEADERS}
)
