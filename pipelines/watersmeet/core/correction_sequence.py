"""The sequence of corrections of a partition: their order, their messages, and its last message.

It is numbered and resumed as the sequence of merge records is (`core.sequence`), in a topic of its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Booleans, times_ms
from watersmeet.core.headers import header_json
from watersmeet.core.inputs import InputId
from watersmeet.core.sequence import (
    FORGOTTEN,
    ID,
    NUMBERED,
    SEQ,
    TENANT,
    header_number,
    tombstones_of,
)
from watersmeet.core.types import HEADERS

VERSION: Final = "watersmeet.version"
"""Header with the number of the correction among those of its merge record."""
LATE: Final = "watersmeet.late"
"""Header with the late record of a correction: its source, topic, partition and offset."""
SETTLED_AT: Final = "watersmeet.settled_at"
U: Final = "watersmeet.u"
"""Headers with the times (ms) by which corrections are ordered."""

_HEADER_BYTES: Final = 400
"""Maximum bytes of a correction's headers beside those of a message, except for its inputs' names:
further names, numbers and times."""

MAX_VERSIONS: Final = 1000
"""Default maximum number of versions of a merge record, beyond which late records are late alone:
each version has all parts, so that their size grows with the square of their number."""

TOO_MANY: Final = "too_many"
"""Why a late record beyond that corrects nothing: the `invalid_reason` of its row."""

ORDER: Final = ("settled_at", "tenant", "u", "source", "topic", "offset")
"""The columns that order the corrections of a partition; texts count as UTF-8 bytes."""


class CorrectionPlace(NamedTuple):
    """The place of a correction in the order of its partition; times in ms, texts as UTF-8.

    Source, topic and offset are those of the late record.
    """

    settled_at: int
    tenant: bytes
    u: int
    source: bytes
    topic: bytes
    offset: int


class CorrectionTail(NamedTuple):
    """The last correction in a partition of its topic, which the next one follows.

    `offset` is that of its message; None where it is not known.
    """

    seq: int
    place: CorrectionPlace
    offset: int | None = None


_MESSAGES: Final = pa.schema(
    [
        *NUMBERED,
        ("settled_at", pa.int64()),
        ("tenant", pa.binary()),
        ("u", pa.int64()),
        ("source", pa.binary()),
        ("topic", pa.binary()),
        ("offset", pa.int64()),
    ]
)


def places_of(rows: pa.Table) -> list[CorrectionPlace]:
    """Return the places of corrections; `rows` has the columns of `ORDER`."""
    columns = [
        times_ms(rows["settled_at"]).tolist(),
        rows["tenant"].cast(pa.binary()).to_pylist(),
        times_ms(rows["u"]).tolist(),
        *(rows[name].cast(pa.binary()).to_pylist() for name in ("source", "topic")),
        rows["offset"].to_pylist(),
    ]
    return [CorrectionPlace(*place) for place in zip(*columns, strict=True)]


def is_up_to(rows: pa.Table, places: Mapping[int, CorrectionPlace]) -> Booleans:
    """Return which corrections sort up to the place that their partition has; none without one.

    `rows` has the columns of `ORDER` and `partition`.
    """
    if not places:
        return np.zeros(rows.num_rows, np.bool_)
    partitions = rows["partition"].to_pylist()
    return np.array(
        [
            p in places and place <= places[p]
            for p, place in zip(partitions, places_of(rows), strict=True)
        ],
        np.bool_,
    )


def late_born_id(source: str, topic: str, partition: int, offset: int) -> str:
    """Return the id of the merge record that a late record opens, which no other can have.

    That of a merge record begins with the number of its partition.
    """
    return f"late/{source}/{topic}/{partition}/{offset}"


def header_bytes(inputs: Iterable[InputId]) -> int:
    """Return the maximum bytes of a correction's headers beside those of `message_bytes`.

    They name the late record, of one of these inputs, and an id may do so, too.
    """
    return _HEADER_BYTES + 2 * max(len(source) + len(topic) for source, topic in inputs)


def in_order(rows: pa.Table) -> pa.Table:
    """Return corrections of a partition in their order."""
    return rows.take(pc.sort_indices(rows, [(name, "ascending") for name in ORDER]))


def correction_messages(
    rows: pa.Table, values: pa.ChunkedArray, tail: CorrectionTail | None
) -> pa.Table:
    """Return the messages of corrections of one partition, numbered on from its tail.

    - `rows`: those after the tail, in order, with the columns of `core.corrections`.
    - `values`: the value of the message of each; that of a correction that is not valid is null.

    Columns beside those of messages (`Publisher.send`): `seq`, and those of `ORDER`.
    """
    first = 0 if tail is None else tail.seq + 1
    places = places_of(rows)
    seqs = range(first, first + rows.num_rows)
    names = ("partition", "id", "version", "tenant")
    facts = zip(seqs, places, *(rows[name].to_pylist() for name in names), strict=True)
    headers = [_headers(*row) for row in facts]
    timestamps = np.maximum(times_ms(rows["event_time"]), 1)
    columns = [
        rows["partition"].cast(pa.int32()),
        rows["merge_key"].cast(pa.binary()),
        pc.if_else(rows["valid"], values, pa.scalar(None, values.type)).cast(pa.large_binary()),
        pa.array(timestamps),
        pa.array(headers, HEADERS),
        pa.array(seqs, pa.int64()),
        *(
            pa.array([getattr(place, name) for place in places], _MESSAGES.field(name).type)
            for name in CorrectionPlace._fields
        ),
    ]
    return pa.Table.from_arrays(columns, schema=_MESSAGES)


def _headers(
    seq: int, place: CorrectionPlace, partition: int, record_id: str, version: int, tenant: str
) -> list[tuple[str, bytes]]:
    return [
        (SEQ, b"%d" % seq),
        (ID, record_id.encode()),
        (VERSION, b"%d" % version),
        (LATE, b"%s/%s/%d/%d" % (place.source, place.topic, partition, place.offset)),
        (SETTLED_AT, b"%d" % place.settled_at),
        (U, b"%d" % place.u),
        *([(TENANT, tenant.encode())] if tenant else []),
    ]


def end_of(messages: pa.Table) -> CorrectionTail:
    """Return a partition's tail after these messages, one or more; its offset is not known yet."""
    [last] = messages.slice(messages.num_rows - 1).to_pylist()
    return CorrectionTail(last["seq"], CorrectionPlace(*(last[name] for name in ORDER)))


def parse_tail(headers: Mapping[str, Any]) -> CorrectionTail:
    """Return how far a sequence of corrections has come after a message with these headers.

    The tail is without its offset. Raise ValueError where the headers are not those of a correction
    of Watersmeet, or of a tombstone among them.
    """
    try:
        if FORGOTTEN in headers:
            content = header_json(headers[FORGOTTEN])
            late = content["late"].encode()
            tenant = content["tenant"].encode()
            numbers = [content[name] for name in ("seq", "settled_at", "u")]
        else:
            late = headers[LATE]
            tenant = headers.get(TENANT, b"")
            numbers = [headers[name] for name in (SEQ, SETTLED_AT, U)]
        seq, settled_at, u = map(header_number, numbers)
        source, topic, _, offset = late.split(b"/")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no {SEQ}, {LATE}, {SETTLED_AT} and {U}: {error}") from None
    place = CorrectionPlace(settled_at, tenant, u, source, topic, header_number(offset))
    return CorrectionTail(seq, place)


def tombstones(key: str, tails: Iterable[tuple[int, CorrectionTail]]) -> pa.Table:
    """Return a message without a value for a key in each of these partitions, as `Publisher` sends.

    It repeats how far the sequence of its partition has come.
    """
    return tombstones_of(key, [(p, _sequence_place(p, tail)) for p, tail in tails])


def _sequence_place(partition: int, tail: CorrectionTail) -> dict[str, Any]:
    place = tail.place
    late = f"{place.source.decode()}/{place.topic.decode()}/{partition}/{place.offset}"
    times = {"settled_at": place.settled_at, "u": place.u, "tenant": place.tenant.decode()}
    return {"seq": tail.seq, "late": late, **times}
