"""The publication sequence of a partition: its messages' headers, and its last message.

The last message says how far the sequence has come. A tombstone, by which `forget` tells consumers
that a key is deleted, is no part of the sequence. It repeats how far the sequence has come, so that
a partition that ends with it still says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote, unquote

import orjson
import pyarrow as pa

from watersmeet.core.headers import header_json
from watersmeet.core.types import HEADERS

SEQ = "watersmeet.seq"
ID = "watersmeet.id"
CLOSED_AT = "watersmeet.closed_at"
DUE = "watersmeet.due"
"""Headers of a merge with a window by gap or with tenants; times in ms.

`CLOSED_AT` is the first clock that closed the merge record, `DUE` the last moment at which it could
be joined.
"""
TENANT = "watersmeet.tenant"
"""Header with the merge record's tenant, where the merge has tenants.

It also says that there is a tenant in the id.
"""
MIN_OFFSETS = "watersmeet.min_offsets"
IDLE = "watersmeet.idle"
IDLE_PACKED = "watersmeet.idle.zlib"
"""Header `IDLE`, compressed with zlib where it is long, as with thousands of tenants."""
NO_RECOVERY = "watersmeet.no_recovery"
"""Header with the size in bytes that the headers for recovering a lost lake would have had.

It is more than fits into a message.
"""
RULES = "watersmeet.rules"
"""The fingerprints of the rules by which everything from `min_offsets` on was read and merged,
separated by commas."""
LIVED = "watersmeet.lived"
"""Header of a lake that has had an idle decision, other rules of reading or grouping, or a jump.

Kafka alone does not tell it.
"""
FORGOTTEN = "watersmeet.forgotten"
"""Header of a tombstone: a JSON object about the last message before it that has `seq` and `id`.

It has these two, `due` and `closed_at` of that message, and its tenant.
"""


NUMBERED: Final = (
    ("partition", pa.int32()),
    ("key", pa.binary()),
    ("value", pa.large_binary()),
    ("timestamp", pa.int64()),
    ("headers", HEADERS),
    ("seq", pa.int64()),
)
"""The columns of messages of a sequence: what `Publisher` sends, and their numbers.

`value` is null for a message without a value; `timestamp` is in ms since the epoch.
"""


class SortKey(NamedTuple):
    """The sort key of a sequence, compared as a tuple; times in ms, texts as UTF-8 bytes."""

    closed_at: int
    """The first clock that closed the merge record; `PLAIN` where the message does not say it."""
    tenant: bytes
    """The merge record's tenant; empty without tenants."""
    time: int
    """The last moment at which it could be joined; with `PLAIN`, its event time."""
    key: bytes


PLAIN = -1
"""A time (ms) before any at which a merge record can be closed."""


class MessageTime(NamedTuple):
    """The time (ms) that orders a message before its other columns do.

    It is when the merge record was closed, where the message says so, and else its event time.
    """

    time: int
    says_closing: bool


class SequenceTail(NamedTuple):
    """The last message of a sink partition, which the next one follows; times in ms.

    `due` and `closed_at` are None where the message does not say them. `tenant` is empty without
    tenants.
    """

    seq: int
    event_time: int
    key: str
    offset: int | None
    due: int | None = None
    closed_at: int | None = None
    tenant: str = ""

    @property
    def place(self) -> SortKey:
        """The message's place in the order of publication."""
        return place_of(self.event_time, self.key, self.due, self.closed_at, self.tenant)


def place_of(
    event_time: int,
    key: str,
    due: int | None = None,
    closed_at: int | None = None,
    tenant: str | None = None,
) -> SortKey:
    """Return the place of a merge record; times in ms.

    Without tenants, `tenant` is None or empty.
    """
    if due is None or closed_at is None:
        return SortKey(PLAIN, b"", event_time, key.encode())
    return SortKey(closed_at, (tenant or "").encode(), due, key.encode())


def message_id(partition: int, event_time: int, key: str, tenant: str = "") -> str:
    """Return the id of a merge record, which is stable and unique.

    No two merge records of a partition share tenant, key and event time. In a tenant, everything
    but ASCII letters, digits and `_.-~` is percent-encoded, so that it ends at the next slash.
    """
    return f"{partition}/{event_time}/{quote(tenant, safe='') + '/' if tenant else ''}{key}"


def parse_message_id(text: str, *, has_tenant: bool = False) -> tuple[int, int, str, str]:
    """Return partition, event time (ms), key and tenant (empty for none) of a `message_id`.

    Raise ValueError where the text is no such id.
    """
    partition, event_time, rest = text.split("/", 2)
    tenant, key = rest.split("/", 1) if has_tenant else ("", rest)
    return int(partition), int(event_time), key, unquote(tenant)


def closing(headers: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return `due` and `closed_at` (ms) as headers say them, None without `CLOSED_AT`.

    Raise ValueError where they are no numbers, or `DUE` is missing beside it.
    """
    if CLOSED_AT not in headers:
        return None, None
    try:
        return header_number(headers[DUE], -1), header_number(headers[CLOSED_AT], -1)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no {CLOSED_AT} and {DUE}: {error}") from None


def parse_tail(headers: Mapping[str, Any]) -> SequenceTail:
    """Return how far a sequence has come after a message with these headers.

    The tail is the last message that has a number, without its offset. Raise ValueError where the
    headers are not those of a message of Watersmeet.
    """
    try:
        if FORGOTTEN not in headers:
            seq = header_number(headers[SEQ])
            identity = headers[ID].decode()
            closed = closing(headers)
            tenant = headers.get(TENANT, b"").decode()
        else:
            content = header_json(headers[FORGOTTEN])
            seq = header_number(content["seq"])
            identity = content["id"]
            due, closed_at = (
                None if content.get(name) is None else header_number(content[name], -1)
                for name in ("due", "closed_at")
            )
            closed = due, closed_at
            tenant = content.get("tenant", "")
        _, event_time, key, named = parse_message_id(identity, has_tenant=bool(tenant))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no {SEQ} and {ID}: {error}") from None
    if not 0 <= event_time < 2**63:
        raise ValueError(f"{ID} has no event time: {event_time}")
    if named != tenant:
        raise ValueError(f"{ID} and {TENANT} name two tenants: {named!r} and {tenant!r}")
    return SequenceTail(seq, event_time, key, None, *closed, tenant)


def header_number(content: Any, least: int = 0) -> int:
    """Return a number that a header says, if it fits into a column.

    Raise ValueError otherwise: a topic's writers may say anything.
    """
    number = int(content)
    if not least <= number < 2**63:
        raise ValueError(f"a number of a header is out of its bounds: {number}")
    return number


def tombstones(key: str, tails: Iterable[tuple[int, SequenceTail]]) -> pa.Table:
    """Return a message without a value for a key in each of these partitions, as `Publisher` sends.

    `tails` say how far the sequence of each partition has come.
    """
    return tombstones_of(key, [(p, _sequence_place(p, tail)) for p, tail in tails])


def tombstones_of(key: str, places: Iterable[tuple[int, Mapping[str, Any]]]) -> pa.Table:
    """Return a message without a value for a key by partition, with what `FORGOTTEN` says there."""
    rows = [
        {
            "partition": p,
            "key": key.encode(),
            "value": None,
            "timestamp": 0,
            "headers": [(FORGOTTEN, orjson.dumps(place))],
        }
        for p, place in places
    ]
    return pa.Table.from_pylist(rows, _TOMBSTONES)


def _sequence_place(partition: int, tail: SequenceTail) -> dict[str, Any]:
    place = {"seq": tail.seq, "id": message_id(partition, tail.event_time, tail.key, tail.tenant)}
    closed = {} if tail.closed_at is None else {"due": tail.due, "closed_at": tail.closed_at}
    return {**place, **closed, **({"tenant": tail.tenant} if tail.tenant else {})}


_TOMBSTONES = pa.schema(
    {
        "partition": pa.int32(),
        "key": pa.binary(),
        "value": pa.binary(),
        "timestamp": pa.int64(),
        "headers": HEADERS,
    }
)
