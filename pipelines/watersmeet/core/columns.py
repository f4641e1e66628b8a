"""Columns in Arrow and numpy: whole numbers, times as epoch milliseconds, and rows by group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.types import TIME

Int64s = npt.NDArray[np.int64]
Booleans = npt.NDArray[np.bool_]

NULL_TIME = np.iinfo(np.int64).min
"""Value in place of a missing event time, such as a refused record's.

It is below every real time, so that maxima ignore it.
"""

MAX_TIME = np.iinfo(np.int64).max
"""Value in place of an event time that is never reached.

It is above every real time, so that minima ignore it.
"""


_LARGE_BYTES = 2**20
"""Mean size of rows, or values, that are large: to copy one takes longer than a call of Python."""


def int64s(column: pa.Array | pa.ChunkedArray) -> Int64s:
    """Return a column of integers as a numpy array. Raises ValueError if there is a null."""
    if column.null_count:
        raise ValueError(f"{column.null_count} of {len(column)} integers are null")
    return np.asarray(column.to_numpy(), np.int64)


def lengths(column: pa.Array | pa.ChunkedArray) -> Int64s:
    """Return how many bytes each text or binary value has, 0 for a null."""
    return int64s(pc.fill_null(pc.binary_length(column), 0))


def times_ms(column: pa.Array | pa.ChunkedArray) -> Int64s:
    """Return a column of times as epoch milliseconds, `NULL_TIME` for a null.

    Raises TypeError for numbers, which say nothing of their unit.
    """
    if column.type != TIME:
        raise TypeError(f"times have the Arrow type {TIME}, not {column.type}")
    return int64s(pc.fill_null(pc.divide(column.cast(pa.int64()), 1000), NULL_TIME))


def time_column(times: Int64s, missing: int = NULL_TIME) -> pa.Array:
    """Return epoch milliseconds as a column of times, null where they are `missing`."""
    is_null = times == missing
    return pa.array(np.where(is_null, 0, times) * 1000, pa.int64(), mask=is_null).cast(TIME)


def both(
    one: pa.Array | pa.ChunkedArray, other: pa.Array | pa.ChunkedArray, kind: pa.DataType
) -> pa.ChunkedArray:
    """Concatenate two columns, as a type whose offsets do not overflow."""
    chunks = [
        chunk.cast(kind)
        for column in (one, other)
        for chunk in getattr(column, "chunks", [column])
        if len(chunk)
    ]
    return pa.chunked_array(chunks, kind)


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Return a column as one chunk; it is copied only where it has rows in several."""
    if isinstance(column, pa.Array):
        return column
    filled = [chunk for chunk in column.chunks if len(chunk)]
    return filled[0] if len(filled) == 1 else column.combine_chunks()


def filtered(rows: pa.Table, keep: Booleans) -> pa.Table:
    """Return the rows to keep. Large ones are not copied."""
    if keep.all():
        return rows
    if not _are_large(rows):
        return rows.filter(pa.array(keep))
    kept = [rows.slice(begin, end - begin) for begin, end in as_ranges(np.flatnonzero(keep))]
    return pa.concat_tables(kept or [rows.slice(0, 0)])


def taken(values: pa.ChunkedArray, rows: Int64s) -> pa.ChunkedArray:
    """Return the values of some rows, in the order of `rows`. Large ones are not copied."""
    if _are_large(values):
        return pa.chunked_array(
            [one_chunk(values.slice(row, 1)) for row in rows.tolist()], values.type
        )
    # `take` first copies several chunks into one: only from the first to the last row.
    first = int(rows.min(initial=len(values)))
    end = int(rows.max(initial=first - 1)) + 1
    return values.slice(first, end - first).take(pa.array(rows - first))


def _are_large(rows: pa.Table | pa.ChunkedArray) -> bool:
    return bool(rows.nbytes > _LARGE_BYTES * len(rows))


def numbered(rows: pa.Table, name: str = "_row") -> pa.Table:
    """Return rows with a further column, which has their numbers."""
    return rows.append_column(name, pa.array(np.arange(rows.num_rows)))


def in_lists(rows: Int64s, items: pa.Array, count: int) -> pa.ListArray:
    """Return a list of items for each of `count` rows; `rows`: each item's row, ascending."""
    return pa.ListArray.from_arrays(
        pa.array(np.searchsorted(rows, np.arange(count + 1)), pa.int32()), items
    )


def looked_up(keys: Int64s, values: Mapping[int, int], otherwise: int) -> Int64s:
    """Return the value of each of few different keys, or `otherwise` where it has none."""
    if not values:
        return np.full(len(keys), otherwise)
    distinct, numbers = np.unique(keys, return_inverse=True)
    return np.array([values.get(key, otherwise) for key in distinct.tolist()], np.int64)[numbers]


def in_groups(by: Int64s, order_by: Int64s | None = None) -> tuple[Int64s, Int64s]:
    """Return the row numbers in order of (`by`, `order_by`), and where each group begins there.

    A group has one value of `by`, which may not be below 0.
    """
    order = np.argsort(by, kind="stable") if order_by is None else np.lexsort((order_by, by))
    return order, np.flatnonzero(np.diff(by[order], prepend=-1))


def groups(by: Int64s, order_by: Int64s | None = None) -> dict[int, Int64s]:
    """Return row numbers by value of `by` (0 or more), in order of `order_by` or as they come."""
    order, begins = in_groups(by, order_by)
    return {int(by[rows[0]]): rows for rows in np.split(order, begins[1:]) if len(rows)}


def cuts(
    sizes: Sequence[int] | Int64s,
    max_bytes: int,
    max_rows: int | None = None,
    counts: Int64s | None = None,
) -> Iterator[tuple[int, int]]:
    """Yield where pieces of items begin and end that have at most `max_bytes` and `max_rows`, or a
    single item. `counts`: how many rows each of them has; by default one.
    """
    totals = np.cumsum(np.asarray(sizes, np.int64))
    rows = np.cumsum(np.ones_like(totals) if counts is None else counts)
    begin = size = count = 0  # where the piece begins, and what comes before it
    while begin < len(totals):
        end = int(np.searchsorted(totals, size + max_bytes, "right"))
        if max_rows is not None:
            end = min(end, int(np.searchsorted(rows, count + max_rows, "right")))
        end = max(begin + 1, end)
        yield begin, end
        begin, size, count = end, int(totals[end - 1]), int(rows[end - 1])


def as_ranges(offsets: Int64s) -> Iterator[tuple[int, int]]:
    """Yield ascending offsets as ranges `[from, until)`."""
    if len(offsets):
        ends = np.flatnonzero(np.diff(offsets) > 1)
        firsts = np.append(offsets[0], offsets[ends + 1])
        lasts = np.append(offsets[ends], offsets[-1])
        yield from zip(firsts.tolist(), (lasts + 1).tolist(), strict=True)


def row_values(rows: pa.Table | pa.RecordBatch, *names: str) -> Iterator[tuple[Any, ...]]:
    """Return an iterator over the rows, each as its values in these columns."""
    return zip(*(rows.column(name).to_pylist() for name in names), strict=True)


def input_numbers(rows: pa.Table, inputs: Iterable[InputId]) -> pa.ChunkedArray:
    """Return for each row the number of its input among `inputs`, or null for any other.

    `rows`: the columns source and topic.
    """
    numbers = pa.chunked_array([pa.nulls(rows.num_rows, pa.int64())])
    for number, input_id in enumerate(inputs):
        is_its = pc.and_(
            pc.equal(rows["source"], input_id.source), pc.equal(rows["topic"], input_id.topic)
        )
        numbers = pc.if_else(pc.fill_null(is_its, False), number, numbers)
    return numbers


def part_topics(parts: pa.StructArray, inputs: Iterable[InputId], source: str) -> pa.Array:
    """Return the topic of each part of a source. Parts do not say it where there is only one."""
    if "topic" in parts.type.names:
        return parts.field("topic")
    [only] = of_source(inputs, source)
    return pa.repeat(pa.scalar(only.topic), len(parts))
