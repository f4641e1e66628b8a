"""Messages of the sink: keys, values, headers and timestamps, made of finished rows of silver.

The rows come in the order of publication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Booleans, Int64s, lengths, one_chunk, times_ms
from watersmeet.core.sequence import (
    CLOSED_AT,
    DUE,
    ID,
    NUMBERED,
    PLAIN,
    SEQ,
    TENANT,
    MessageTime,
    SequenceTail,
    SortKey,
    message_id,
)
from watersmeet.core.types import HEADERS, NO_TENANT
from watersmeet.core.values import concatenated, joined, json_texts, largest_sizes, sizes, sums

MESSAGES: Final = pa.schema(
    [
        *NUMBERED,
        ("event_time", pa.int64()),
        ("due", pa.int64()),
        ("closed_at", pa.int64()),
        ("tenant", pa.string()),
    ]
)
"""Schema of the messages; times are in ms since the epoch.

`due` and `closed_at` are null for a message that
does not say them; `tenant` is empty without tenants.
"""

SAYS_CLOSING: Final = "_says_closing"
"""A column of finished rows: true where the message says when its merge record was closed.

It does with tenants and with a window by gap, and wherever there was either before. No source can
have the column's name.
"""

HEADER_BYTES: Final = 200
"""Maximum bytes of a message's headers beside a key and a tenant: names, numbers and times."""

_N = TypeVar("_N", int, Any)
_ROWS = 4_096


def message_values(rows: pa.Table, sources: Sequence[str]) -> pa.ChunkedArray:
    """Return the default value of each row's message (large_binary): one JSON object in UTF-8.

    The object has the fields that the contract names; `tenant` only where it is not empty. `rows`
    has silver's columns merge_key, event_time, last_event_time and tenant, and one column of parts
    for each source. Values of a source without a schema are passed on as they came. Those of a
    source with a schema are written as their fields, nulls kept. Raise ValueError where a key, a
    tenant, a time, a list of parts or a value is null, which never happens in a merge record of
    silver.
    """
    values = [
        _objects(batch, sources).cast(pa.large_binary())
        for batch in rows.to_batches(max_chunksize=_ROWS)
    ]
    return pa.chunked_array(values, pa.large_binary())


def as_read(rows: pa.Table, read_types: Mapping[str, pa.DataType]) -> pa.Table:
    """Return rows of silver whose values have only the fields of `read_types`.

    `read_types` has, by source, the type of a value in the schema of an epoch.
    """
    for source, kind in read_types.items():
        parts = rows.schema.field(source).type.value_type
        if pa.types.is_struct(kind) and parts.field("value").type != kind:
            fields = [
                pa.field("value", kind) if field.name == "value" else field for field in parts
            ]
            rows = rows.set_column(
                rows.column_names.index(source),
                source,
                rows[source].cast(pa.list_(pa.struct(fields))),
            )
    return rows


def message_bytes(value: _N, key: _N, tenant: _N) -> _N:
    """Return the size in bytes of a message, from the sizes of its value, key and tenant.

    The headers count, except for those from which a lost lake is recovered. The id holds the key
    once more, and the tenant percent-encoded. `HEADER_BYTES` are enough for everything else.
    """
    return value + 2 * key + 4 * tenant + HEADER_BYTES


def exceeds(rows: pa.Table, sources: Sequence[str], max_bytes: int) -> pa.BooleanArray:
    """Return True for each row whose message takes more than `max_bytes` bytes.

    This is about the message with the default value, and its `message_bytes`. The result is exact,
    though a value is written only where an upper bound of its size does not settle it. `rows` is as
    for `message_values`.
    """
    flags: list[Booleans] = [np.empty(0, np.bool_)]
    for batch in rows.to_batches(max_chunksize=_ROWS):
        names = lengths(batch.column("merge_key")), lengths(batch.column("tenant"))
        beside = message_bytes(0, *names)
        exceeding = _largest_sizes(batch, sources) + beside > max_bytes
        if any(pa.types.is_struct(_values(batch, source).type) for source in sources):
            for row in np.flatnonzero(exceeding):  # one at a time: they are few, and large
                exceeding[row] = (
                    sizes(_objects(batch.slice(row, 1), sources))[0] + beside[row] > max_bytes
                )
        flags.append(exceeding)
    return pa.array(np.concatenate(flags))


def messages(
    rows: pa.Table,
    values: pa.Array | pa.ChunkedArray,
    tail: SequenceTail | None,
    extra_headers: Mapping[MessageTime, Sequence[tuple[str, bytes]]],
) -> pa.Table:
    """Return the messages that a partition's sink lacks, numbered on from its tail (`MESSAGES`).

    `rows` are finished rows of one partition in the order of publication, with silver's columns
    partition, merge_key, event_time, due, closed_at and tenant, and with `SAYS_CLOSING`. `values`
    (string or binary, null for none) are the values of their messages.

    A row at or before the tail is already in the sink and is skipped. So a repeated call returns
    the rest, and nothing twice.

    Each message has as headers its number and its id, then closed_at and due where it says them,
    the tenant where it is not empty, and those that `extra_headers` has for its time. An event
    time of 0 is sent as the timestamp 1, since 0 means none to Kafka.

    Raise ValueError where the rows are not strictly in order, or belong to several partitions.
    """
    if len(partitions := pc.unique(rows["partition"])) > 1:
        raise ValueError(f"messages are numbered by partition, not for {len(partitions)} at once")
    places = _Places.of(rows)
    places.check_order()
    if tail is not None:
        is_new = places.is_after(_Places.at(tail.place))
        rows = rows.filter(pa.array(is_new))
        values = values.filter(pa.array(is_new))
        places = places.where(is_new)
    first = 0 if tail is None else tail.seq + 1
    seqs = range(first, first + rows.num_rows)
    times = times_ms(rows["event_time"])
    is_plain = places.closed_at == PLAIN
    columns = [
        rows["partition"].cast(pa.int32()),
        places.keys.cast(pa.binary()),
        values.cast(pa.large_binary()),
        pa.array(np.maximum(times, 1)),
        _headers(partitions, times, places, seqs, extra_headers),
        pa.array(seqs, pa.int64()),
        pa.array(times),
        pa.array(places.times, mask=is_plain),
        pa.array(places.closed_at, mask=is_plain),
        places.tenants.cast(pa.string()),
    ]
    return pa.Table.from_arrays(columns, schema=MESSAGES)


def in_message_order(rows: pa.Table) -> pa.Table:
    """Return finished rows of silver, with `SAYS_CLOSING`, in the order of their messages.

    That is the order of `sequence.SortKey`; texts are compared as UTF-8 bytes.
    """
    says_closing = rows[SAYS_CLOSING]
    times = {
        "_message_time": pc.if_else(says_closing, rows["closed_at"], rows["event_time"]),
        "_message_due": pc.if_else(says_closing, rows["due"], rows["event_time"]),
    }
    timed = rows
    for name, column in times.items():
        timed = timed.append_column(name, column)
    keys = [SAYS_CLOSING, "_message_time", "tenant", "_message_due", "merge_key"]
    order = pc.sort_indices(timed, [(name, "ascending") for name in keys])
    return rows.take(order)


# -- values


def _objects(rows: pa.RecordBatch, sources: Sequence[str]) -> pa.Array:
    fragments: list[pa.Array | str] = [_head(rows)]
    for source in sources:
        values = _values(rows, source)
        texts = (
            json_texts(values)
            if pa.types.is_struct(values.type)
            else values.cast(pa.large_string())
        )
        fragments += [f',"{source}":[', joined(rows.column(source), texts), "]"]
    return concatenated(*fragments, "}")


def _head(rows: pa.RecordBatch) -> pa.Array:
    key, first, last = (
        rows.column(name) for name in ("merge_key", "event_time", "last_event_time")
    )
    tenant = rows.column("tenant")
    if any(column.null_count for column in (key, first, last, tenant)):
        raise ValueError("a row of silver has no key, no tenant or no time")
    times = [',"event_time":', _milliseconds(first), ',"last_event_time":', _milliseconds(last)]
    return concatenated('{"key":', json_texts(key), *_tenant_field(tenant), *times)


def _tenant_field(tenant: pa.Array) -> list[pa.Array | str]:
    """Return the field of the tenants in a message's value; nothing where all are empty."""
    is_empty = pc.equal(tenant, NO_TENANT)
    if is_empty.true_count == len(tenant):
        return []
    return [pc.if_else(is_empty, "", concatenated(',"tenant":', json_texts(tenant)))]


def _milliseconds(times: pa.Array) -> pa.Array:
    return json_texts(pc.divide(times.cast(pa.int64()), 1000))


def _values(rows: pa.RecordBatch, source: str) -> pa.Array:
    """Return the values of all parts of a source, one after the other."""
    parts = rows.column(source)
    if parts.null_count:
        raise ValueError(f"a row of silver has no list of parts for {source}")
    structs = parts.flatten()
    values = structs.flatten()[structs.type.get_field_index("value")]
    if values.null_count:
        raise ValueError("a part has no value")
    return values


def _largest_sizes(rows: pa.RecordBatch, sources: Sequence[str]) -> Int64s:
    """Return an upper bound of the bytes of each row's value.

    It is exact where no source has a schema.
    """
    largest = sizes(_head(rows)) + len("}")
    for source in sources:
        parts = rows.column(source)
        values = _values(rows, source)
        value_sizes = largest_sizes(values) if pa.types.is_struct(values.type) else sizes(values)
        commas = np.maximum(np.asarray(pc.list_value_length(parts).to_numpy(), np.int64) - 1, 0)
        largest += len(f',"{source}":[]') + commas + sums(parts, value_sizes)
    return largest


# -- the sequence


class _Places(NamedTuple):
    """Places in the order of publication as messages say them (`sequence.SortKey`), by row.

    They order rows as their own columns do.
    """

    closed_at: Int64s
    tenants: Any
    times: Int64s
    keys: Any

    @classmethod
    def of(cls, rows: pa.Table) -> _Places:
        """Return the places of rows of silver."""
        says_closing = _flags(rows[SAYS_CLOSING])
        times = np.where(says_closing, times_ms(rows["due"]), times_ms(rows["event_time"]))
        closed_at = np.where(says_closing, times_ms(rows["closed_at"]), PLAIN)
        return cls(closed_at, _texts(rows["tenant"]), times, _texts(rows["merge_key"]))

    @classmethod
    def at(cls, place: SortKey) -> _Places:
        """Return one place that all rows can be compared with."""
        tenant, key = (pa.scalar(text, pa.large_binary()) for text in (place.tenant, place.key))
        return cls(np.array(place.closed_at), tenant, np.array(place.time), key)

    def where(self, keep: Booleans) -> _Places:
        """Return only the places to keep."""
        tenants, keys = (texts.filter(pa.array(keep)) for texts in (self.tenants, self.keys))
        return _Places(self.closed_at[keep], tenants, self.times[keep], keys)

    def is_after(self, other: _Places) -> Booleans:
        """Return True, row by row, where a place sorts after the other one.

        Texts are compared as UTF-8 bytes.
        """
        is_after = _flags(pc.greater(self.keys, other.keys))
        is_after = (self.times > other.times) | ((self.times == other.times) & is_after)
        is_equal = _flags(pc.equal(self.tenants, other.tenants))
        is_after = _flags(pc.greater(self.tenants, other.tenants)) | (is_equal & is_after)
        is_after = (self.closed_at > other.closed_at) | (
            (self.closed_at == other.closed_at) & is_after
        )
        return np.asarray(is_after, np.bool_)

    def check_order(self) -> None:
        """Raise ValueError where a row does not sort strictly after the one before it.

        What is published cannot be put in order later.
        """
        if len(self.times) < 2:
            return
        behind, before = (self._at(rows) for rows in (slice(1, None), slice(None, -1)))
        after = behind.is_after(before)
        if not after.all():
            row = int(np.argmin(after)) + 1
            raise ValueError(
                f"{self.keys[row].as_py().decode()!r} at {self.times[row]} comes after a record "
                "that sorts behind it"
            )

    def _at(self, rows: slice) -> _Places:
        return _Places(self.closed_at[rows], self.tenants[rows], self.times[rows], self.keys[rows])


def _texts(column: pa.ChunkedArray) -> pa.Array:
    """Return texts as UTF-8 bytes."""
    return one_chunk(column.cast(pa.large_binary()))


def _flags(column: pa.Array) -> Booleans:
    return np.asarray(column.to_numpy(zero_copy_only=False), np.bool_)


def _headers(
    partitions: pa.Array,
    times: Int64s,
    places: _Places,
    seqs: range,
    extra: Mapping[MessageTime, Sequence[tuple[str, bytes]]],
) -> pa.ListArray:
    partition = partitions[0].as_py() if len(partitions) else 0
    headers: list[tuple[str, bytes]] = []
    offsets = [0]
    tenants = places.tenants.to_pylist()
    closings = zip(places.closed_at.tolist(), places.times.tolist(), tenants, strict=True)
    for seq, time, key, (closed_at, due, tenant) in zip(
        seqs, times.tolist(), places.keys.to_pylist(), closings, strict=True
    ):
        headers += [
            (SEQ, b"%d" % seq),
            (ID, message_id(partition, time, key.decode(), tenant.decode()).encode()),
        ]
        says_closing = closed_at != PLAIN
        if says_closing:
            headers += [(CLOSED_AT, b"%d" % closed_at), (DUE, b"%d" % due)]
        headers += [(TENANT, tenant)] if tenant else []
        at = MessageTime(closed_at if says_closing else time, says_closing)
        headers += extra.get(at, ())
        offsets.append(len(headers))
    columns = [
        pa.array([name for name, _ in headers], pa.string()),
        pa.array([content for _, content in headers], pa.binary()),
    ]
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()),
        pa.StructArray.from_arrays(columns, fields=list(HEADERS.value_type)),
    )
