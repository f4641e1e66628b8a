"""Reads rows of a table in pieces that fit into memory, however many there are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from watersmeet.core.reading import RECORD_BYTES
from watersmeet.lake.table_reader import ROW_BYTES, TableReader, Where

PIECE_BYTES: Final = 32 * 1024 * 1024
"""Maximum size of the rows of a piece, as they are in memory."""

BY_OFFSET: Final = ("partition", "offset")
"""The columns by which records of bronze are cut."""

BY_TIME: Final = ("partition", "batch", "event_time")
"""The columns by which final rows of silver are cut."""


def read_pieces(
    reader: TableReader,
    table: str,
    columns: Sequence[str],
    where: Where,
    by: Sequence[str],
    max_bytes: int | None = None,
) -> Iterator[pa.Table]:
    """Yield what `TableReader.rows` returns in pieces, in order of the columns `by` (`pieces`)."""
    for piece in pieces(reader, table, where, by, max_bytes):
        yield reader.rows(table, columns, piece)


def pieces(
    reader: TableReader,
    table: str,
    where: Where,
    by: Sequence[str],
    max_bytes: int | None = None,
) -> Iterator[Where]:
    """Yield conditions for parts of some rows, in order of the columns `by`, each of at most
    `max_bytes` (`PIECE_BYTES` by default).

    The columns have whole numbers or times, and no nulls. Rows with the same values in all of them
    are in one piece. A row counts with its `record_bytes`, and `ROW_BYTES` more.
    """
    values = {"rows": ("count", "*"), "bytes": ("sum", RECORD_BYTES.name)}
    for name in by:
        values |= {f"first {name}": ("min", name), f"last {name}": ("max", name)}
    [found] = reader.summary(table, [], values, where).to_pylist()
    if not found["rows"]:
        return
    size = (found["bytes"] or 0) + ROW_BYTES * found["rows"]
    bounds = {name: (found[f"first {name}"], found[f"last {name}"]) for name in by}
    column = next((name for name, (first, last) in bounds.items() if first < last), None)
    if column is None or size <= (max_bytes or PIECE_BYTES):
        yield where
        return
    middle = sum(bounds[column]) // 2
    for half in (column, "<=", middle), (column, ">", middle):
        yield from pieces(reader, table, [[*t, half] for t in where or [()]], by, max_bytes)
