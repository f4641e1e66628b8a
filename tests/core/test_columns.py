"""Pieces of rows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from watersmeet.core.columns import cuts

SIZES = st.lists(st.integers(0, 12))


@given(SIZES, st.integers(1, 20), st.none() | st.integers(1, 5))
def test_pieces_are_as_long_as_their_bytes_and_rows_allow(
    sizes: list[int], max_bytes: int, max_rows: int | None
) -> None:
    pieces = [*cuts(sizes, max_bytes, max_rows)]
    assert [row for piece in pieces for row in range(*piece)] == [*range(len(sizes))]

    def fits(begin: int, end: int) -> bool:
        is_short = max_rows is None or end - begin <= max_rows
        return is_short and (end - begin == 1 or sum(sizes[begin:end]) <= max_bytes)

    assert all(fits(*piece) for piece in pieces)
    assert not any(fits(begin, end + 1) for begin, end in pieces if end < len(sizes))
