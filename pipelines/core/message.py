"""Messages of the sink: from finished rows of silver, in the order of publication, to keys, values, headers and timestamps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.columns import Booleans, Int64s, times_ms
from pipelines.core.sequence import ID, SEQ, Tail, message_id
from pipelines.core.types import HEADERS
from pipelines.core.values import concatenated, joined, json_texts, largest_sizes, sizes, sums

MESSAGES: Final = pa.schema(
    [
        ("partition", pa.int32()),
        ("key", pa.binary()),
        ("value", pa.large_binary()),
        ("timestamp", pa.int64()),
        ("headers", HEADERS),
        ("seq", pa.int64()),
        ("event_time", pa.int64()),
    ]
)
"""The columns of messages; `timestamp` and `event_time` in ms since the epoch, `value` null for a message without a value."""

_ROWS = 4_096


def message_values(rows: pa.Table, sources: Sequence[str]) -> pa.ChunkedArray:
    """The default value of each row's message (large_binary): one JSON object in UTF-8 with the fields that the contract names.

    `rows` have silver's columns merge_key, event_time, last_event_time and one column of parts for each source. The values of a
    source without a schema are passed on as they came, those of another are written as their fields, nulls kept. Raises
    ValueError where a key, a list of parts or a value is null, which silver never holds.
    """
    values = [_objects(batch, sources).cast(pa.large_binary()) for batch in rows.to_batches(max_chunksize=_ROWS)]
    return pa.chunked_array(values, pa.large_binary())


def as_read(rows: pa.Table, read_types: Mapping[str, pa.DataType]) -> pa.Table:
    """Rows of silver whose values have the fields of these types, by source, alone: those of the schema of an epoch."""
    for source, kind in read_types.items():
        parts = rows.schema.field(source).type.value_type
        if pa.types.is_struct(kind) and parts.field("value").type != kind:
            fields = [pa.field("value", kind) if field.name == "value" else field for field in parts]
            rows = rows.set_column(rows.column_names.index(source), source, rows[source].cast(pa.list_(pa.struct(fields))))
    return rows


def exceeds(rows: pa.Table, sources: Sequence[str], max_bytes: int) -> pa.BooleanArray:
    """Whether the default value of each row's message takes more than `max_bytes` bytes.

    Exact, though a value is written only where an upper bound of its size does not settle it. `rows` as for `message_values`.
    """
    found: list[Booleans] = [np.empty(0, np.bool_)]
    for batch in rows.to_batches(max_chunksize=_ROWS):
        exceeding = _largest_sizes(batch, sources) > max_bytes
        if any(pa.types.is_struct(_values(batch, source).type) for source in sources):
            for row in np.flatnonzero(exceeding):  # one at a time: they are few, and large
                exceeding[row] = sizes(_objects(batch.slice(row, 1), sources))[0] > max_bytes
        found.append(exceeding)
    return pa.array(np.concatenate(found))


def messages(
    rows: pa.Table,
    values: pa.Array | pa.ChunkedArray,
    tail: Tail | None,
    extra_headers: Mapping[int, Sequence[tuple[str, bytes]]],
) -> pa.Table:
    """The messages that a partition's sink lacks, numbered on from its tail: the columns of `MESSAGES`.

    `rows` are finished rows of one partition in order of (event_time, key), with silver's columns partition, merge_key and
    event_time; `values` (string or binary, null for none) are those of their messages. A row at or before the tail is already
    in the sink and is skipped, so a repeated call gives the rest and nothing twice. Each message carries its number and its id
    as headers, then those that `extra_headers` has for its event time in ms. An event time of 0 is sent as the timestamp 1,
    since 0 means none to Kafka. Raises ValueError where the rows are not strictly in order, or are of several partitions.
    """
    if len(partitions := pc.unique(rows["partition"])) > 1:
        raise ValueError(f"messages are numbered by partition, not for {len(partitions)} at once")
    keys = rows["merge_key"].cast(pa.large_binary()).combine_chunks()
    times = times_ms(rows["event_time"])
    _check_order(times, keys)
    if tail is not None:
        is_new = pa.array(_is_after(times, keys, tail.event_time, pa.scalar(tail.key.encode(), pa.large_binary())))
        rows, values, keys = rows.filter(is_new), values.filter(is_new), keys.filter(is_new)
        times = times[is_new.to_numpy(zero_copy_only=False)]
    first = 0 if tail is None else tail.seq + 1
    seqs = range(first, first + len(times))
    columns = [
        rows["partition"].cast(pa.int32()),
        keys.cast(pa.binary()),
        values.cast(pa.large_binary()),
        pa.array(np.maximum(times, 1)),
        _headers(partitions, times, keys, seqs, extra_headers),
        pa.array(seqs, pa.int64()),
        pa.array(times),
    ]
    return pa.Table.from_arrays(columns, schema=MESSAGES)


# -- values


def _objects(rows: pa.RecordBatch, sources: Sequence[str]) -> pa.Array:
    pieces: list[pa.Array | str] = [_head(rows)]
    for source in sources:
        values = _values(rows, source)
        texts = json_texts(values) if pa.types.is_struct(values.type) else values.cast(pa.large_string())
        pieces += [f',"{source}":[', joined(rows.column(source), texts), "]"]
    return concatenated(*pieces, "}")


def _head(rows: pa.RecordBatch) -> pa.Array:
    key, first, last = (rows.column(name) for name in ("merge_key", "event_time", "last_event_time"))
    if key.null_count or first.null_count or last.null_count:
        raise ValueError("a row of silver has no key or no time")
    return concatenated(
        '{"key":', json_texts(key), ',"event_time":', _milliseconds(first), ',"last_event_time":', _milliseconds(last)
    )


def _milliseconds(times: pa.Array) -> pa.Array:
    return json_texts(pc.divide(times.cast(pa.int64()), 1000))


def _values(rows: pa.RecordBatch, source: str) -> pa.Array:
    """The values of all parts of a source, one after the other."""
    parts = rows.column(source)
    if parts.null_count:
        raise ValueError(f"a row of silver has no list of parts for {source}")
    structs = parts.flatten()
    values = structs.flatten()[structs.type.get_field_index("value")]
    if values.null_count:
        raise ValueError("a part has no value")
    return values


def _largest_sizes(rows: pa.RecordBatch, sources: Sequence[str]) -> Int64s:
    """An upper bound of the bytes of each row's value; the very number where no source has a schema."""
    largest = sizes(_head(rows)) + len("}")
    for source in sources:
        parts, values = rows.column(source), _values(rows, source)
        of_values = largest_sizes(values) if pa.types.is_struct(values.type) else sizes(values)
        commas = np.maximum(np.asarray(pc.list_value_length(parts).to_numpy(), np.int64) - 1, 0)
        largest += len(f',"{source}":[]') + commas + sums(parts, of_values)
    return largest


# -- the sequence


def _check_order(times: Int64s, keys: pa.Array) -> None:
    """Raises ValueError where a row does not come strictly after the one before: what is out cannot be put in order later."""
    if len(times) < 2:
        return
    after = _is_after(times[1:], keys[1:], times[:-1], keys[:-1])
    if not after.all():
        row = int(np.argmin(after)) + 1
        raise ValueError(f"{keys[row].as_py().decode()!r} at {times[row]} comes after a record that sorts behind it")


def _is_after(times: Int64s, keys: pa.Array, other_times: Any, other_keys: Any) -> Booleans:
    """Whether (time, key) is greater, row by row; keys are compared as UTF-8 bytes."""
    greater_key = pc.greater(keys, other_keys).to_numpy(zero_copy_only=False)
    return np.asarray((times > other_times) | ((times == other_times) & greater_key), np.bool_)


def _headers(
    partitions: pa.Array,
    times: Int64s,
    keys: pa.Array,
    seqs: range,
    extra: Mapping[int, Sequence[tuple[str, bytes]]],
) -> pa.ListArray:
    partition = partitions[0].as_py() if len(partitions) else 0
    headers: list[tuple[str, bytes]] = []
    offsets = [0]
    for seq, time, key in zip(seqs, times.tolist(), keys.to_pylist(), strict=True):
        headers += [(SEQ, b"%d" % seq), (ID, message_id(partition, time, key.decode()).encode()), *extra.get(time, ())]
        offsets.append(len(headers))
    columns = [pa.array([name for name, _ in headers], pa.string()), pa.array([content for _, content in headers], pa.binary())]
    return pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.StructArray.from_arrays(columns, fields=list(HEADERS.value_type))
    )
