"""Dead letters: late and refused records as they came, with headers that say why and where.

Those of one source topic-partition are in order of offset. How those of several sources mix depends
on when they were found: a refused record waits for no other source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import int64s
from watersmeet.core.headers import REDRIVEN, Natural, header_json, header_lists, place_texts
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.reading import record_bytes
from watersmeet.core.sequence import LIFE, MESSAGES

REASON = "watersmeet.reason"
TOPIC = "watersmeet.topic"
PARTITION = "watersmeet.partition"
OFFSET = "watersmeet.offset"
NEXT_OFFSETS = "watersmeet.next_offsets"

VALUE_BYTES = "watersmeet.value_bytes"
"""Header of a dead letter whose value the topic would not take: its size in bytes."""

LATE = "late"
"""Reason of a late record. A refused one has the reason of its refusal."""

CODEC: Final = "zstd"
"""Compression codec of records that are sent once more."""

_OWN_BYTES: Final = 4096
"""Number of bytes reserved for a dead letter's own headers and its frame."""


_LENGTH_BYTES: Final = 4
"""Number of bytes with which Kafka says how long a key or a value is, at most: there may be
thousands of headers without a content.
"""


class Room(NamedTuple):
    """Maximum bytes of a message that a topic takes: as it is sent (`is_packed`), or kept."""

    most_bytes: int
    is_packed: bool = True


def dead_letter_messages(
    rows: pa.Table,
    after: Mapping[TopicPartition, int],
    names: Mapping[InputId, str],
    room: Room | None = None,
    life: str = "",
) -> pa.Table:
    """Return the dead letters (`MESSAGES`) of some records, by (partition, source, offset).

    `rows`: source, topic, partition, offset, kafka_timestamp (ms), key, value, headers and reason.
    A dead letter has the record's own headers, then those that say why it is there, where it was,
    and of which `life` the lake is (if it has a name); the last one of a partition also has the
    progress `after` it. Without `room` it comes without its value, or without all of the record's
    own.
    """
    rows = rows.sort_by(
        [("partition", "ascending"), ("source", "ascending"), ("offset", "ascending")]
    )
    rows, left_out = (rows, {}) if room is None else _within_room(rows, room)
    sizes = pa.array([left_out.get(i) for i in range(rows.num_rows)], pa.int64())
    said = [
        (VALUE_BYTES, sizes.cast(pa.string())),
        (REASON, rows["reason"]),
        (TOPIC, rows["topic"]),
        (PARTITION, rows["partition"].cast(pa.string())),
        (OFFSET, rows["offset"].cast(pa.string())),
        *([(LIFE, pa.repeat(pa.scalar(life), rows.num_rows))] if life else []),
    ]
    sent = defaultdict[int, dict[str, int]](dict)
    for tp, offset in after.items():
        sent[tp.partition][names[tp.input]] = offset
    lasts = {p: row for row, p in enumerate(rows["partition"].to_pylist())}
    progress = {
        row: [(NEXT_OFFSETS, orjson.dumps(sent[p], option=orjson.OPT_SORT_KEYS))]
        for p, row in lasts.items()
    }
    columns = {
        **{name: rows[name] for name in ("partition", "key", "value")},
        "timestamp": pc.max_element_wise(rows["kafka_timestamp"], 0),
        "headers": header_lists(said, progress, rows["headers"]),
    }
    return pa.table(columns).cast(MESSAGES)


def _within_room(rows: pa.Table, room: Room) -> tuple[pa.Table, dict[int, int]]:
    codec = pa.Codec(CODEC)
    left_out = dict[int, int]()
    most_bytes = room.most_bytes - _OWN_BYTES
    counts = int64s(pc.fill_null(pc.list_value_length(rows["headers"]), 0))
    sizes = record_bytes(rows) + _LENGTH_BYTES * (2 + 2 * counts)
    kept = {name: rows[name].to_pylist() for name in ("key", "value", "headers")}

    def packed(*parts: bytes | None) -> int:
        """Return how many bytes parts of a record have, packed with a margin where that matters."""
        framed = (len(part or b"").to_bytes(_LENGTH_BYTES, "big") + (part or b"") for part in parts)
        content = b"".join(framed)
        if room.is_packed and len(content) > most_bytes:
            return len(codec.compress(content)) * 65 // 64
        return len(content)

    for i in np.flatnonzero(sizes > most_bytes).tolist():
        beside = [kept["key"][i]]
        for header in kept["headers"][i] or []:
            beside += [header["key"].encode(), header["value"]]
        value = kept["value"][i]
        if packed(value, *beside) > most_bytes:
            left_out[i] = len(value or b"")
            kept["value"][i] = None
            if packed(*beside) > most_bytes:
                kept["key"][i] = None
                kept["headers"][i] = None
    if left_out:
        for name, values in kept.items():
            at = rows.schema.get_field_index(name)
            field = rows.schema.field(at)
            rows = rows.set_column(at, field, pa.array(values, field.type))
    return rows, left_out


def next_offsets(headers: Mapping[str, Any]) -> dict[str, int]:
    """Return the next offset by name of the input, as a partition's last dead letter says it."""
    return numbers_by_name(headers, NEXT_OFFSETS)


def numbers_by_name(headers: Mapping[str, Any], header: str) -> dict[str, int]:
    """Return a header that is a JSON object of natural numbers; raises ValueError otherwise."""
    try:
        return msgspec.convert(header_json(headers[header]), dict[str, Natural])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{header} is no object of whole numbers") from None


def redrive_messages(rows: pa.Table) -> pa.Table:
    """Return the messages (`MESSAGES`) that send refused records to their source again, in order.

    `rows`: topic, partition, offset, key, value and headers of each record. A record keeps its
    headers, and gets one that says which refused record it was; its timestamp is that of sending.
    """
    columns = {
        **{name: rows[name] for name in ("partition", "key", "value")},
        "timestamp": pa.repeat(0, rows.num_rows),
        "headers": header_lists([(REDRIVEN, place_texts(rows))], own=rows["headers"]),
    }
    return pa.table(columns).cast(MESSAGES)
