"""Pieces of rows, and rows that are picked out."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from watersmeet.core.columns import cuts, filtered, taken

SIZES = st.lists(st.integers(0, 12))


@given(SIZES, st.integers(1, 20), st.none() | st.integers(1, 5), st.booleans(), st.data())
def test_pieces_are_as_long_as_their_bytes_and_rows_allow(
    sizes: list[int], max_bytes: int, max_rows: int | None, has_counts: bool, data: st.DataObject
) -> None:
    counts = [data.draw(st.integers(1, 4)) if has_counts else 1 for _ in sizes]
    given_counts = np.array(counts, np.int64) if has_counts else None
    pieces = [*cuts(sizes, max_bytes, max_rows, given_counts)]
    assert [row for piece in pieces for row in range(*piece)] == [*range(len(sizes))]

    def fits(begin: int, end: int) -> bool:
        is_short = max_rows is None or sum(counts[begin:end]) <= max_rows
        return end - begin == 1 or (is_short and sum(sizes[begin:end]) <= max_bytes)

    assert all(fits(*piece) for piece in pieces)
    assert not any(fits(begin, end + 1) for begin, end in pieces if end < len(sizes))


@pytest.mark.parametrize("large_bytes", [-1, 2**20], ids=["large", "small"])
@given(st.lists(st.lists(st.tuples(st.text(max_size=3) | st.none(), st.booleans()))), st.data())
def test_rows_that_are_large_are_picked_out_as_others_are(
    large_bytes: int, chunks: list[list[tuple[str | None, bool]]], data: st.DataObject
) -> None:
    of_chunks = [pa.array([value for value, _ in chunk], pa.string()) for chunk in chunks]
    values = pa.chunked_array(of_chunks, pa.string())
    keep = np.array([is_kept for chunk in chunks for _, is_kept in chunk], np.bool_)
    numbers = st.lists(st.integers(0, len(values) - 1)) if len(values) else st.just([])
    rows = np.array(data.draw(numbers), np.int64)
    with patch("watersmeet.core.columns._LARGE_BYTES", large_bytes):
        kept = filtered(pa.table({"value": values}), keep)
        some = taken(values, rows)
    every = values.to_pylist()
    assert kept["value"].to_pylist() == [every[n] for n in np.flatnonzero(keep)]
    assert some.to_pylist() == [every[n] for n in rows]
    assert (kept.schema, some.type) == (pa.schema({"value": pa.string()}), values.type)
