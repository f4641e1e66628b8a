"""The publication sequence of a partition: the headers of its messages, and its last one, which says where it stands.

A tombstone, by which `forget` tells consumers that a key is gone, is no part of the sequence. It repeats where the sequence
stands, so that a partition that ends with it still says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import orjson
import pyarrow as pa

from pipelines.core.types import HEADERS

SEQ = "watersmeet.seq"
ID = "watersmeet.id"
CLOSED_AT = "watersmeet.closed_at"
DUE = "watersmeet.due"
"""Where the merge has a window by gap, or tenants: the first clock that closed the merge record, and until when it could be
joined (ms)."""
TENANT = "watersmeet.tenant"
"""Where the merge has tenants: the merge record's. It also says that there is one in the id."""
MIN_OFFSETS = "watersmeet.min_offsets"
IDLE = "watersmeet.idle"
IDLE_PACKED = "watersmeet.idle.zlib"
"""The same as `IDLE`, compressed with zlib: where it is long, as with thousands of tenants."""
NO_RECOVERY = "watersmeet.no_recovery"
"""How many bytes the headers from which a lost lake is taken up would have had: more than fit into a message."""
RULES = "watersmeet.rules"
"""The fingerprints of the rules by which everything from `min_offsets` on was read and merged, separated by commas."""
LIVED = "watersmeet.lived"
"""Where the lake has had an idle decision, other rules of reading or grouping, or a jump: Kafka alone does not tell it."""
FORGOTTEN = "watersmeet.forgotten"
"""Of a tombstone: a JSON object with `seq` and `id` of the last message before it that has them, when that was closed, and its
tenant."""


class Place(NamedTuple):
    """What a sequence is ordered by, as tuples are: when a merge record was closed, its tenant (empty without tenants), until
    when it could be joined, and its key; times in ms, texts as UTF-8 bytes. One that a timeout closed before there was anything
    else has `PLAIN`, and its event time.
    """

    closed_at: int
    tenant: bytes
    time: int
    key: bytes


PLAIN = -1
"""Before any time (ms) at which a merge record can be closed."""


class Tail(NamedTuple):
    """The last message of a sink partition: what the next one follows. Times in ms; `due` and `closed_at` where it says them.

    `tenant` is empty where there are no tenants.
    """

    seq: int
    event_time: int
    key: str
    offset: int | None
    due: int | None = None
    closed_at: int | None = None
    tenant: str = ""

    @property
    def place(self) -> Place:
        """Where it stands in the order of publication."""
        return place_of(self.event_time, self.key, self.due, self.closed_at, self.tenant)


def place_of(event_time: int, key: str, due: int | None = None, closed_at: int | None = None, tenant: str | None = None) -> Place:
    """The place of a merge record; times in ms, no tenant (or an empty one) where there are none."""
    if due is None or closed_at is None:
        return Place(PLAIN, b"", event_time, key.encode())
    return Place(closed_at, (tenant or "").encode(), due, key.encode())


def message_id(partition: int, event_time: int, key: str, tenant: str = "") -> str:
    """Stable for a record, and unique: no two merge records of a partition share tenant, key and event time.

    A tenant is percent-encoded, whatever is no ASCII letter, digit or one of `_.-~`, so that it ends at the next slash.
    """
    return f"{partition}/{event_time}/{quote(tenant, safe='') + '/' if tenant else ''}{key}"


def parse_message_id(text: str, *, has_tenant: bool = False) -> tuple[int, int, str, str]:
    """Partition, event time (ms), key and tenant (empty for none) of a `message_id`. Raises ValueError where it is none."""
    partition, event_time, rest = text.split("/", 2)
    tenant, key = rest.split("/", 1) if has_tenant else ("", rest)
    return int(partition), int(event_time), key, unquote(tenant)


def closing(headers: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """`due` and `closed_at` (ms) as headers say them, None where they do not. Raises ValueError where they are no numbers."""
    if CLOSED_AT not in headers:
        return None, None
    try:
        return _number(headers[DUE], -1), _number(headers[CLOSED_AT], -1)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no {CLOSED_AT} and {DUE}: {error}") from None


def standing(headers: Mapping[str, Any]) -> Tail:
    """Where a sequence stands after a message with these headers: the last one that has a number, without its offset. Raises
    ValueError where they are not those of a message of Watersmeet.
    """
    try:
        if FORGOTTEN not in headers:
            seq, identity, closed = _number(headers[SEQ]), headers[ID].decode(), closing(headers)
            tenant = headers.get(TENANT, b"").decode()
        else:
            said = orjson.loads(headers[FORGOTTEN])
            seq, identity = _number(said["seq"]), said["id"]
            due, closed_at = (None if said.get(name) is None else _number(said[name], -1) for name in ("due", "closed_at"))
            closed = due, closed_at
            tenant = said.get("tenant", "")
        _, event_time, key, named = parse_message_id(identity, has_tenant=bool(tenant))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no {SEQ} and {ID}: {error}") from None
    if not 0 <= event_time < 2**63:
        raise ValueError(f"{ID} has no event time: {event_time}")
    if named != tenant:
        raise ValueError(f"{ID} and {TENANT} name two tenants: {named!r} and {tenant!r}")
    return Tail(seq, event_time, key, None, *closed, tenant)


def _number(said: Any, least: int = 0) -> int:
    """A number that a header says, and that a column can have: a topic's writers may say anything. Raises ValueError."""
    number = int(said)
    if not least <= number < 2**63:
        raise ValueError(f"a number of a header is out of its bounds: {number}")
    return number


def tombstones(key: str, tails: Iterable[tuple[int, Tail]]) -> pa.Table:
    """A message without a value for a key in each of these partitions, which stand where the tails say; as `Publisher` sends."""
    rows = [
        {
            "partition": p,
            "key": key.encode(),
            "value": None,
            "timestamp": 0,
            "headers": [(FORGOTTEN, orjson.dumps(_stands(p, tail)))],
        }
        for p, tail in tails
    ]
    return pa.Table.from_pylist(rows, _TOMBSTONES)


def _stands(partition: int, tail: Tail) -> dict[str, Any]:
    said = {"seq": tail.seq, "id": message_id(partition, tail.event_time, tail.key, tail.tenant)}
    closed = {} if tail.closed_at is None else {"due": tail.due, "closed_at": tail.closed_at}
    return {**said, **closed, **({"tenant": tail.tenant} if tail.tenant else {})}


_TOMBSTONES = pa.schema(
    {"partition": pa.int32(), "key": pa.binary(), "value": pa.binary(), "timestamp": pa.int64(), "headers": HEADERS}
)
