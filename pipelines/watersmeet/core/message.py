"""Values of messages, made of finished rows of silver, and how many bytes a message takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Booleans, Int64s, lengths
from watersmeet.core.inputs import InputId
from watersmeet.core.types import NO_TENANT
from watersmeet.core.values import concatenated, joined, json_texts, largest_sizes, sums

HEADER_BYTES: Final = 200
"""Maximum bytes of a message's headers beside a key and a tenant: names, numbers and times."""

_CORRECTION_BYTES: Final = 400
"""Maximum bytes of a correction's further headers, except for its inputs' names."""

_N = TypeVar("_N", int, Any)
_ROWS = 4_096


def message_values(rows: pa.Table, sources: Sequence[str]) -> pa.ChunkedArray:
    """Return the default value of each row's message (large_binary): one JSON object in UTF-8.

    `rows` has silver's columns merge_key, event_time, last_event_time and tenant, and a column of
    parts for each source. Values without a schema are passed on as they came; those with one are
    written as their fields, nulls kept. Raise ValueError where anything is null, which never
    happens in a merge record of silver.
    """
    values = [
        _objects(batch, sources).cast(pa.large_binary())
        for batch in rows.to_batches(max_chunksize=_ROWS)
    ]
    return pa.chunked_array(values, pa.large_binary())


def as_read(rows: pa.Table, read_types: Mapping[str, pa.DataType]) -> pa.Table:
    """Return rows of silver whose values have only the fields of `read_types` (by source)."""
    for source, kind in read_types.items():
        parts = rows.schema.field(source).type.value_type
        if pa.types.is_struct(kind) and parts.field("value").type != kind:
            fields = [pa.field("value", kind) if f.name == "value" else f for f in parts]
            lists = rows[source].cast(pa.list_(pa.struct(fields)))
            rows = rows.set_column(rows.column_names.index(source), source, lists)
    return rows


def message_bytes(value: _N, key: _N, tenant: _N) -> _N:
    """Return the size in bytes of a message, from the sizes of its value, key and tenant.

    The id holds the key once more, and the tenant percent-encoded. `HEADER_BYTES` are enough for
    all other headers but those from which a lost lake is recovered.
    """
    return value + 2 * key + 4 * tenant + HEADER_BYTES


def correction_header_bytes(inputs: Iterable[InputId]) -> int:
    """Return the most bytes of a correction's headers beside those of `message_bytes`."""
    return _CORRECTION_BYTES + 2 * max(len(source) + len(topic) for source, topic in inputs)


def exceeds(rows: pa.Table, sources: Sequence[str], max_bytes: int) -> pa.BooleanArray:
    """Return True for each row whose default message takes more than `max_bytes` bytes.

    It is exact, though a value is written only where an upper bound of its size does not settle it.
    `rows` is as for `message_values`.
    """
    flags: list[Booleans] = [np.empty(0, np.bool_)]
    for batch in rows.to_batches(max_chunksize=_ROWS):
        names = lengths(batch.column("merge_key")), lengths(batch.column("tenant"))
        beside = message_bytes(0, *names)
        exceeding = _largest_sizes(batch, sources) + beside > max_bytes
        if any(pa.types.is_struct(_values(batch, source).type) for source in sources):
            for row in np.flatnonzero(exceeding):  # one at a time: they are few, and large
                size = lengths(_objects(batch.slice(row, 1), sources))[0]
                exceeding[row] = size + beside[row] > max_bytes
        flags.append(exceeding)
    return pa.array(np.concatenate(flags))


# -- values


def _objects(rows: pa.RecordBatch, sources: Sequence[str]) -> pa.Array:
    fragments: list[pa.Array | str] = [_head(rows)]
    for source in sources:
        values = _values(rows, source)
        is_typed = pa.types.is_struct(values.type)
        texts = json_texts(values) if is_typed else values.cast(pa.large_string())
        fragments += [f',"{source}":[', joined(rows.column(source), texts), "]"]
    return concatenated(*fragments, "}")


def _head(rows: pa.RecordBatch) -> pa.Array:
    columns = [rows.column(n) for n in ("merge_key", "tenant", "event_time", "last_event_time")]
    if any(column.null_count for column in columns):
        raise ValueError("a row of silver has no key, no tenant or no time")
    key, tenant, first, last = columns
    head: list[pa.Array | str] = ['{"key":', json_texts(key)]
    is_empty = pc.equal(tenant, NO_TENANT)
    if is_empty.true_count < len(tenant):
        head.append(pc.if_else(is_empty, "", concatenated(',"tenant":', json_texts(tenant))))
    times = [',"event_time":', _milliseconds(first), ',"last_event_time":', _milliseconds(last)]
    return concatenated(*head, *times)


def _milliseconds(times: pa.Array) -> pa.Array:
    return json_texts(pc.divide(times.cast(pa.int64()), 1000))


def _values(rows: pa.RecordBatch, source: str) -> pa.Array:
    parts = rows.column(source)
    if parts.null_count:
        raise ValueError(f"a row of silver has no list of parts for {source}")
    structs = parts.flatten()
    values = structs.flatten()[structs.type.get_field_index("value")]
    if values.null_count:
        raise ValueError("a part has no value")
    return values


def _largest_sizes(rows: pa.RecordBatch, sources: Sequence[str]) -> Int64s:
    # An upper bound, exact where no source has a schema.
    largest = lengths(_head(rows)) + len("}")
    for source in sources:
        parts = rows.column(source)
        values = _values(rows, source)
        value_sizes = largest_sizes(values) if pa.types.is_struct(values.type) else lengths(values)
        commas = np.maximum(np.asarray(pc.list_value_length(parts).to_numpy(), np.int64) - 1, 0)
        largest += len(f',"{source}":[]') + commas + sums(parts, value_sizes)
    return largest
