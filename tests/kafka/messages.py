"""Messages of a sink partition, as `core.sequence` makes them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from tests.support.sequences import merged_tail
from watersmeet.core.sequence import CLOSED_AT, DUE, ID, MESSAGES, SEQ, Tail, closing_of, message_id

TIMEOUT_MS = 100


def messages(
    partition: int, keys: Sequence[str], *, first_seq: int = 0, value: bytes | None = b"{}"
) -> pa.Table:
    """One message for each key, a millisecond apart, numbered on from `first_seq`."""
    rows = [
        {
            "partition": partition,
            "key": key.encode(),
            "value": value,
            "timestamp": seq + 1,
            "headers": headers(partition, seq, key),
        }
        for seq, key in enumerate(keys, first_seq)
    ]
    return pa.Table.from_pylist(rows, MESSAGES)


def headers(partition: int, seq: int, key: str) -> list[tuple[str, bytes]]:
    """What each of these messages says."""
    due, closed_at = closing_of(seq + 1, TIMEOUT_MS)
    said = {SEQ: seq, ID: message_id(partition, seq + 1, key), CLOSED_AT: closed_at, DUE: due}
    return [(name, str(content).encode()) for name, content in said.items()]


def tail(seq: int, key: str, offset: int) -> Tail:
    """The last one of these messages in its partition."""
    return merged_tail(seq, seq + 1, key, *closing_of(seq + 1, TIMEOUT_MS), offset=offset)
