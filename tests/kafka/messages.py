"""Messages of a sink partition, as `core.message.messages` yields them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from watersmeet.core.sequence import ID, SEQ, message_id
from watersmeet.core.types import HEADERS


def messages(
    partition: int, keys: Sequence[str], *, first_seq: int = 0, value: bytes | None = b"{}"
) -> pa.Table:
    """One message for each key, a millisecond apart, numbered on from `first_seq`."""
    seqs = range(first_seq, first_seq + len(keys))
    headers = [
        [
            {"key": SEQ, "value": str(seq).encode()},
            {"key": ID, "value": message_id(partition, seq + 1, key).encode()},
        ]
        for seq, key in zip(seqs, keys, strict=True)
    ]
    return pa.table(
        {
            "partition": pa.array([partition] * len(keys), pa.int32()),
            "key": pa.array([key.encode() for key in keys], pa.binary()),
            "value": pa.array([value] * len(keys), pa.binary()),
            "timestamp": pa.array([seq + 1 for seq in seqs], pa.int64()),
            "headers": pa.array(headers, HEADERS),
            "seq": pa.array(seqs, pa.int64()),
            "event_time": pa.array([seq + 1 for seq in seqs], pa.int64()),
        }
    )
