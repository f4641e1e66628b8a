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
from watersmeet.core.values import concatenated, joined, json_texts, largest_sizes, sizes, sums

HEADER_BYTES: Final = 200
"""Maximum bytes of a message's headers beside a key and a tenant: names, numbers and times."""

_CORRECTION_BYTES: Final = 400
"""Maximum bytes of a correction's headers beside those, except for its inputs' names: further
names, numbers and times."""

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


def correction_header_bytes(inputs: Iterable[InputId]) -> int:
    """Return the maximum bytes of a correction's headers beside those of `message_bytes`.

    They name the late record, of one of these inputs, and an id may do so, too.
    """
    return _CORRECTION_BYTES + 2 * max(len(source) + len(topic) for source, topic in inputs)


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
