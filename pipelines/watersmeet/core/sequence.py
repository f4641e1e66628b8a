"""Sequences: how merge records and corrections follow each other in their topics, and are numbered.

Each partition of a topic is one sequence without a gap: rows of a table, in an order of columns
that is final, since nothing that is finished later sorts before what is out. The last message says
how far the sequence has come. A tombstone, by which `forget` tells consumers that a key is deleted,
is no part of it; it repeats how far the sequence has come, so that a partition that ends with it
still says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote, unquote

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Booleans, int64s, one_chunk, times_ms
from watersmeet.core.headers import HeaderColumns, header_json, header_lists
from watersmeet.core.types import HEADERS, NO_TENANT, TIME

SEQ: Final = "watersmeet.seq"
ID: Final = "watersmeet.id"
CLOSED_AT: Final = "watersmeet.closed_at"
DUE: Final = "watersmeet.due"
"""Headers of a merge record, in ms: `CLOSED_AT` is the first clock that closed it, `DUE` the last
moment at which it could be joined.
"""
TENANT: Final = "watersmeet.tenant"
"""Header with the merge record's tenant, where the merge has tenants.

It also says that there is a tenant in the id.
"""
VERSION: Final = "watersmeet.version"
"""Header with the number of a correction among those of its merge record."""
TOO_MANY: Final = "too_many"
"""Why a late record corrects nothing where its merge record has as many versions as it may: the
`invalid_reason` of its row. Each version has all parts, so that their size grows with the square of
their number."""
EXCESS: Final = "excess"
"""Why it corrects nothing where its merge record is too large, or would be with it."""
LATE: Final = "watersmeet.late"
"""Header with the late record of a correction: its source, topic, partition and offset."""
SETTLED_AT: Final = "watersmeet.settled_at"
U: Final = "watersmeet.u"
"""Headers with the times (ms) by which corrections are ordered."""
MIN_OFFSETS: Final = "watersmeet.min_offsets"
IDLE: Final = "watersmeet.idle"
IDLE_PACKED: Final = "watersmeet.idle.zlib"
"""Header `IDLE`, compressed with zlib where it is long, as with thousands of tenants."""
NO_RECOVERY: Final = "watersmeet.no_recovery"
"""Header with the size in bytes that the headers for recovering a lost lake would have had.

It is more than fits into a message.
"""
RULES: Final = "watersmeet.rules"
"""The fingerprints of the rules by which everything from `min_offsets` on was read and merged,
separated by commas."""
FROM: Final = "watersmeet.from"
"""Header with what the message's generation was made of: by input, Kafka's id of its topic, and the
offset of the message's partition at which the generation began."""
LIFE: Final = "watersmeet.life"
"""Header with the life of the lake that published the message. A lake that is taken up from its
sink is of the same life."""
JUMPED: Final = "watersmeet.jumped"
"""Header with what the lake has left behind by its last jump, where it has jumped: when the last
message before it was closed, and up to where the lake had read each source."""
CORRECTED_IN: Final = "watersmeet.corrected_in"
"""Header with the name of the topic that the lake's corrections go to, where there are any."""
FORGOTTEN: Final = "watersmeet.forgotten"
"""Header of a tombstone: a JSON object with what the last message of the sequence before it says of
how far that has come.
"""

MESSAGES: Final = pa.schema(
    {
        "partition": pa.int32(),
        "key": pa.binary(),
        "value": pa.large_binary(),
        "timestamp": pa.int64(),
        "headers": HEADERS,
    }
)
"""The schema of messages, as `Publisher` sends them.

`value` is null for a message without a value; `timestamp` is in ms since the epoch.
"""

Place: TypeAlias = tuple[int | bytes, ...]
"""The values of the columns of an order: times in ms, texts as UTF-8 bytes. Places are compared as
tuples. One with the first columns alone stands for all places that begin so.
"""


def clock_of(place: Place) -> int:
    """Return the time (ms) with which a place begins, of the clock that closed its row."""
    return int(place[0])


class Tail(NamedTuple):
    """The last message of a partition, which the next one follows.

    `offset`: its own, if known. `event_time` (ms): a merge record's; None for a correction.
    """

    seq: int
    place: Place
    offset: int | None = None
    event_time: int | None = None


Headers: TypeAlias = list[tuple[str, bytes]]
"""Headers of a message."""


@dataclass(frozen=True)
class Sequence:
    """A kind of sequence: which rows of which table it has, in which order, and what its messages
    say.

    - `table`: the table whose rows it publishes.
    - `order`: the columns by which the rows of a partition are ordered, with their types. The first
      one is the time of the partition's clock at which a row was finished. Texts are compared as
      UTF-8 bytes.
    - `with_message`: the condition for rows that have a message: columns and their values.
    """

    table: str
    order: Mapping[str, pa.DataType]
    with_message: Mapping[str, Any]
    _columns_of_headers: Callable[[pa.Table], HeaderColumns] = field(repr=False)
    _parse: Callable[[Mapping[str, Any], int | None], Tail] = field(repr=False)
    _tombstone: Callable[[int, Tail], dict[str, Any]] = field(repr=False)

    @property
    def clock(self) -> str:
        """The first column of the order: a time of the partition's clock."""
        return next(iter(self.order))

    # -- the order

    def place(self, row: Mapping[str, Any]) -> Place:
        """Return the place of a row, which has the columns of the order; times in ms."""
        values = (row[name] for name in self.order)
        return tuple(v.encode() if isinstance(v, str) else v for v in values)

    def values(self, place: Place) -> dict[str, Any]:
        """Return the values of the columns of the order at a place, by column: as `place` takes."""
        names = list(self.order)[: len(place)]
        values = (v.decode() if isinstance(v, bytes) else v for v in place)
        return dict(zip(names, values, strict=True))

    def places(self, rows: pa.Table) -> list[Place]:
        """Return the place of each row, which has the columns of the order."""
        columns = map(_listed, self._columns(rows))
        return list(zip(*columns, strict=True))

    def in_order(self, rows: pa.Table) -> pa.Table:
        """Return rows of a partition in their order."""
        return rows.take(pc.sort_indices(rows, [(name, "ascending") for name in self.order]))

    def is_after(self, rows: pa.Table, place: Place) -> Booleans:
        """Return True for each row that sorts after a place, or after all that begin so."""
        if not rows.num_rows:
            return np.zeros(0, np.bool_)
        return _is_after(self._columns(rows)[: len(place)], list(place))

    def is_up_to(self, rows: pa.Table, places: Mapping[int, Place]) -> Booleans:
        """Return True for each row that sorts up to the place, if any, that its partition has."""
        partitions = int64s(rows["partition"])
        is_its = np.zeros(rows.num_rows, np.bool_)
        ordered = rows.select([*self.order])
        for p, place in places.items():
            numbers = np.flatnonzero(partitions == p)
            is_its[numbers] = ~self.is_after(ordered.take(pa.array(numbers)), place)
        return is_its

    def _columns(self, rows: pa.Table) -> list[Any]:
        return [_comparable(rows[name]) for name in self.order]

    # -- messages

    def messages(
        self,
        rows: pa.Table,
        values: pa.Array | pa.ChunkedArray,
        tail: Tail | None,
        further: Mapping[int, Headers] = MappingProxyType({}),
    ) -> tuple[pa.Table, Tail]:
        """Return the messages (`MESSAGES`) of rows, numbered on from the tail, and the tail then.

        - `rows`: one or more of one partition, in order, all after the tail. They have the columns
          of the table, or at least `partition`, `merge_key`, `event_time`, those of the order, and
          what headers are made of.
        - `values`: the value of each message (string or binary); null for one without a value.
        - `further`: further headers of messages, by the number of their row.

        An event time of 0 is sent as the timestamp 1, since 0 means none to Kafka.

        Raise ValueError where the rows belong to several partitions, or do not sort strictly one
        after the other and after the tail: what is published cannot be put in order later.
        """
        if len(partitions := pc.unique(rows["partition"])) != 1:
            raise ValueError(
                f"messages are numbered by partition, not for {len(partitions)} at once"
            )
        self._check_order(rows, tail)
        begin = 0 if tail is None else tail.seq + 1
        seqs = np.arange(begin, begin + rows.num_rows)
        numbers = pa.array(seqs).cast(pa.string())
        headers = header_lists([(SEQ, numbers), *self._columns_of_headers(rows)], further)
        times = _comparable(rows["event_time"])
        columns = [
            rows["partition"].cast(pa.int32()),
            rows["merge_key"].cast(pa.binary()),
            values.cast(pa.large_binary()),
            pa.array(np.maximum(times, 1)),
            headers,
        ]
        made = pa.Table.from_arrays(columns, schema=MESSAGES)
        place = self.places(rows.slice(rows.num_rows - 1))[0]
        event_time = int(times[-1]) if "merge_key" in self.order else None
        return made, Tail(int(seqs[-1]), place, None, event_time)

    def parse(self, headers: Mapping[str, Any], timeout_ms: int | None = None) -> Tail:
        """Return how far a sequence has come after a message with these headers, without its
        offset.

        `timeout_ms`: that of the lake that published it; an earlier version did not say when a
        timeout closed a merge record. Raise ValueError where the headers are not Watersmeet's.
        """
        try:
            if FORGOTTEN in headers:
                content = header_json(headers[FORGOTTEN])
                headers = {f"watersmeet.{name}": value for name, value in content.items()}
            return self._parse(headers, timeout_ms)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not what a message of {self.table} says: {error}") from None

    def tombstones(self, key: str, tails: Iterable[tuple[int, Tail]]) -> pa.Table:
        """Return a message without a value for a key in each of these partitions (`MESSAGES`)."""
        rows = []
        for p, tail in tails:
            content = orjson.dumps({"seq": tail.seq} | self._tombstone(p, tail))
            headers = [(FORGOTTEN, content)]
            rows.append({"partition": p, "key": key.encode(), "timestamp": 0, "headers": headers})
        return pa.Table.from_pylist(rows, MESSAGES)

    def _check_order(self, rows: pa.Table, tail: Tail | None) -> None:
        columns = self._columns(rows)
        behind, before = ([column[part] for column in columns] for part in (_LATER, _EARLIER))
        is_after = _is_after(behind, before)
        if tail is not None:
            is_after = np.append(self.is_after(rows.slice(0, 1), tail.place), is_after)
        if not is_after.all():
            row = int(np.argmin(is_after)) + (tail is None)
            place = self.values(self.places(rows.slice(row, 1))[0])
            raise ValueError(f"{place} comes after a record that sorts behind it")


_LATER: Final = slice(1, None)
_EARLIER: Final = slice(None, -1)


# -- the two kinds


def message_id(partition: int, event_time: int, key: str, tenant: str = "") -> str:
    """Return the id of a merge record, which is stable and unique in its partition.

    In a tenant, everything but ASCII letters, digits and `_.-~` is percent-encoded, so that it ends
    at the next slash.
    """
    return f"{partition}/{event_time}/{_in_id(tenant)}{key}"


def _in_id(tenant: str) -> str:
    return quote(tenant, safe="") + "/" if tenant else ""


def parse_message_id(text: str, *, has_tenant: bool = False) -> tuple[int, int, str, str]:
    """Return partition, event time (ms), key and tenant of a `message_id`, or raise ValueError."""
    partition, event_time, rest = text.split("/", 2)
    tenant, key = rest.split("/", 1) if has_tenant else ("", rest)
    return int(partition), int(event_time), key, unquote(tenant)


def late_born_id(source: str, topic: str, partition: int, offset: int) -> str:
    """Return the id of the merge record that a late record opens, which no other can have."""
    return f"late/{source}/{topic}/{partition}/{offset}"


def closing_of(event_time: int, timeout_ms: int) -> tuple[int, int]:
    """Return until when a merge record could be joined, and the clock that closed it (ms)."""
    due = event_time + timeout_ms
    return due, due + 1


def header_number(content: Any, least: int = 0) -> int:
    """Return a number that a header says; raise ValueError where it fits into no column."""
    number = int(content)
    if not least <= number < 2**63:
        raise ValueError(f"a number of a header is out of its bounds: {number}")
    return number


def _merged_headers(rows: pa.Table) -> HeaderColumns:
    tenants = _texts(rows["tenant"])
    distinct = tenants.dictionary_encode()
    in_ids = pa.array(map(_in_id, distinct.dictionary.to_pylist()), pa.string())
    keys = pc.binary_join_element_wise(in_ids.take(distinct.indices), _texts(rows["merge_key"]), "")
    places = (_numbers(rows[name]) for name in ("partition", "event_time"))
    return [
        (ID, pc.binary_join_element_wise(*places, keys, "/")),
        (CLOSED_AT, _numbers(rows["closed_at"])),
        (DUE, _numbers(rows["due"])),
        _tenant_header(tenants),
    ]


def _correction_headers(rows: pa.Table) -> HeaderColumns:
    late = (_texts(rows[name]) for name in ("source", "topic"))
    at = (_numbers(rows[name]) for name in ("partition", "offset"))
    return [
        (ID, _texts(rows["id"])),
        (VERSION, _numbers(rows["version"])),
        (LATE, pc.binary_join_element_wise(*late, *at, "/")),
        (SETTLED_AT, _numbers(rows["settled_at"])),
        (U, _numbers(rows["u"])),
        _tenant_header(_texts(rows["tenant"])),
    ]


def _tenant_header(tenants: pa.Array) -> tuple[str, pa.Array]:
    return TENANT, pc.if_else(pc.equal(tenants, NO_TENANT), None, tenants)


def _parse_merged(headers: Mapping[str, Any], timeout_ms: int | None) -> Tail:
    tenant = _text(headers.get(TENANT, ""))
    identity = _text(headers[ID])
    _, event_time, key, named = parse_message_id(identity, has_tenant=bool(tenant))
    if not 0 <= event_time < 2**63:
        raise ValueError(f"{ID} has no event time: {event_time}")
    if named != tenant:
        raise ValueError(f"{ID} and {TENANT} name two tenants: {named!r} and {tenant!r}")
    if CLOSED_AT in headers or timeout_ms is None:
        due, closed_at = (header_number(headers[name], -1) for name in (DUE, CLOSED_AT))
    else:
        due, closed_at = closing_of(event_time, timeout_ms)
    place = MERGED.place({"closed_at": closed_at, "tenant": tenant, "due": due, "merge_key": key})
    return Tail(header_number(headers[SEQ]), place, None, event_time)


def _parse_correction(headers: Mapping[str, Any], _: int | None) -> Tail:
    source, topic, _partition, offset = _text(headers[LATE]).split("/")
    place = {
        "settled_at": header_number(headers[SETTLED_AT]),
        "tenant": _text(headers.get(TENANT, "")),
        "u": header_number(headers[U]),
        "source": source,
        "topic": topic,
        "offset": header_number(offset),
    }
    return Tail(header_number(headers[SEQ]), CORRECTED.place(place))


def _merged_tombstone(partition: int, tail: Tail) -> dict[str, Any]:
    place = MERGED.values(tail.place)
    tenant = place["tenant"]
    identity = message_id(partition, tail.event_time or 0, place["merge_key"], tenant)
    closing = {"due": place["due"], "closed_at": place["closed_at"]}
    return {"id": identity, **closing, **({"tenant": tenant} if tenant else {})}


def _correction_tombstone(partition: int, tail: Tail) -> dict[str, Any]:
    place = CORRECTED.values(tail.place)
    late = f"{place['source']}/{place['topic']}/{partition}/{place['offset']}"
    return {"late": late, **{name: place[name] for name in ("settled_at", "u", "tenant")}}


MERGED: Final = Sequence(
    "silver",
    {"closed_at": TIME, "tenant": pa.string(), "due": TIME, "merge_key": pa.string()},
    {"status": "timed_out", "valid": True},
    _merged_headers,
    _parse_merged,
    _merged_tombstone,
)
"""Merge records that have timed out, as messages of the sink: in the order in which they were
closed. With one timeout that is the order of event time and key.
"""

CORRECTED: Final = Sequence(
    "corrections",
    {
        "settled_at": TIME,
        "tenant": pa.string(),
        "u": TIME,
        "source": pa.string(),
        "topic": pa.string(),
        "offset": pa.int64(),
    },
    {"has_message": True},
    _correction_headers,
    _parse_correction,
    _correction_tombstone,
)
"""Corrections of merge records, as messages of a topic of their own: in the order in which their
late records (`source`, `topic`, `offset`) were settled.
"""


# -- columns


def _comparable(column: pa.ChunkedArray) -> Any:
    if pa.types.is_timestamp(column.type):
        return times_ms(column)
    return int64s(column) if pa.types.is_integer(column.type) else _bytes(column)


def _listed(column: Any) -> list[Any]:
    return list(column.tolist() if isinstance(column, np.ndarray) else column.to_pylist())


def _bytes(column: pa.ChunkedArray) -> pa.Array:
    return one_chunk(column.cast(pa.large_binary()))


def _texts(column: pa.ChunkedArray) -> pa.Array:
    return one_chunk(column.cast(pa.string()))


def _numbers(column: pa.ChunkedArray) -> pa.Array:
    return pa.array(_comparable(column)).cast(pa.string())


def _text(content: Any) -> str:
    return str(content.decode() if isinstance(content, bytes) else content)


def _is_after(columns: list[Any], others: list[Any]) -> Booleans:
    is_after: Any = False
    for column, other in zip(reversed(columns), reversed(others), strict=True):
        is_after = _flags("greater", column, other) | (_flags("equal", column, other) & is_after)
    return np.asarray(is_after, np.bool_)


def _flags(comparison: str, column: Any, other: Any) -> Booleans:
    if isinstance(column, np.ndarray):
        return np.asarray(getattr(np, comparison)(column, other), np.bool_)
    compared = pa.scalar(other, column.type) if isinstance(other, bytes) else other
    flags = getattr(pc, comparison)(column, compared)
    return np.asarray(flags.to_numpy(zero_copy_only=False), np.bool_)
