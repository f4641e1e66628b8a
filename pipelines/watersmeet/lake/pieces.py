"""Reads rows of a table in portions that fit into memory, however many there are: pieces of some
rows, cut by their columns, and chunks of records that are named by their offsets.

Whatever is read beside a batch is read so: its size is that of records, and no batch counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import Int64s, cuts, groups, row_values
from watersmeet.core.inputs import InputId
from watersmeet.core.reading import FORGOTTEN, RECORD_BYTES
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.table_reader import (
    ROW_BYTES,
    Condition,
    TableReader,
    Where,
    of_like_bounds,
    sizes_of,
)

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


CHUNK_ROWS = 5_000
"""Number of records that are read at a time: each is read by its offset."""

CHUNK_BYTES = 64 * 1024 * 1024
"""Approximate maximum size of these records, as they are in memory."""

CHUNKS = 20
"""Number of chunks in one transaction."""

RECORD = ("topic", "partition", "offset", "kafka_timestamp", "key", "value", "headers")
"""The columns of a record as it came."""

NOT_FORGOTTEN: Condition = ("detail", "!=", FORGOTTEN)


class Chunk(NamedTuple):
    """Records of one input in a table: their offsets in order, by partition."""

    input: InputId
    table: str
    offsets: dict[int, Int64s]


def chunks_of(
    reader: TableReader, input_id: InputId, table: str, partitions: Int64s, offsets: Int64s
) -> Iterator[Chunk]:
    """Yield some records of an input, which a table has, in chunks by (partition, offset)."""
    for chunk in of_few_rows(input_id, table, partitions, offsets):
        rows = read_chunk(reader, chunk, [*BY_OFFSET, RECORD_BYTES.name])
        sizes = dict(zip(places_of(rows), sizes_of(rows).tolist(), strict=True))
        places = [*_places(chunk)]
        in_order = [sizes.get(place, 0) for place in places]  # the table may lack one
        for begin, end in cuts(in_order, CHUNK_BYTES):
            yield from of_few_rows(input_id, table, *np.array(places[begin:end]).T)


def records_at(
    reader: TableReader,
    input_id: InputId,
    table: str,
    places: Iterable[tuple[int, int]],
    columns: Sequence[str],
    conditions: Sequence[Condition] = (),
) -> Iterator[pa.Table]:
    """Yield the records of a table at these partitions and offsets that meet the conditions.

    They come in tables that fit into memory, whatever the columns.
    """
    in_order = np.array(sorted(place for place in places if place[1] < 2**63), np.int64)
    for chunk in chunks_of(reader, input_id, table, *in_order.reshape(-1, 2).T):
        yield read_chunk(reader, chunk, columns, conditions)


def of_few_rows(
    input_id: InputId, table: str, partitions: Int64s, offsets: Int64s
) -> Iterator[Chunk]:
    """Yield the chunks of `chunks_of`, whatever the size of the records."""
    # A view may have a record once for each generation.
    places = np.unique(np.stack([partitions, offsets]), axis=1)
    for begin in range(0, places.shape[1], CHUNK_ROWS):
        some, its_offsets = places[:, begin : begin + CHUNK_ROWS]
        by_partition = groups(some, its_offsets)
        yield Chunk(input_id, table, {p: its_offsets[rows] for p, rows in by_partition.items()})


def read_chunk(
    reader: TableReader, chunk: Chunk, columns: Sequence[str], conditions: Sequence[Condition] = ()
) -> pa.Table:
    """Return the records of a chunk that the table still has, each once. Times are epoch ms.

    All of them meet the conditions.
    """
    rows = reader.select(chunk.table, columns, near(chunk, conditions))
    requested = {*_places(chunk)}
    is_one = [place in requested for place in places_of(rows)]
    return rows.filter(pa.array(is_one, pa.bool_()))


def _places(chunk: Chunk) -> Iterator[tuple[int, int]]:
    return ((p, at) for p, offsets in chunk.offsets.items() for at in offsets.tolist())


def places_of(rows: pa.Table) -> Iterator[tuple[int, int]]:
    """Yield the partition and offset of each row."""
    return row_values(rows, *BY_OFFSET)


def near(chunk: Chunk, conditions: Sequence[Condition] = ()) -> Where:
    """Return the condition for a chunk's records, and perhaps a few more, that meet others."""
    terms = list[list[Condition]]()
    bounds = {p: (int(own[0]), int(own[-1])) for p, own in chunk.offsets.items()}
    for alike in of_like_bounds(bounds):
        offsets = sorted(set(chain.from_iterable(chunk.offsets[p].tolist() for p in alike)))
        span: list[Condition] = [
            ("partition", "in", alike),
            ("offset", ">=", offsets[0]),
            ("offset", "<=", offsets[-1]),
        ]
        terms.append([*conditions, *span, ("offset", "in", offsets)])
    return of_topic(chunk.input, terms)
