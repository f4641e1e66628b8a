"""Reads records of a source again by offset, as they came, in chunks that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.core.columns import Int64s, in_groups
from pipelines.core.reading import FORGOTTEN
from pipelines.lake.questions import Condition, Questions, Where, neighbours, sizes_of, with_sizes

PIECE_ROWS = 5_000
"""Number of records that are read at a time: each is asked for by its offset."""

PIECE_BYTES = 64 * 1024 * 1024
"""Approximate maximum size of these records, as they are in memory."""

PIECES = 20
"""Number of chunks in one transaction."""

RECORD = ("topic", "partition", "offset", "kafka_timestamp", "key", "value", "headers")
"""The columns of a record as it came."""


NOT_FORGOTTEN: Condition = ("detail", "!=", FORGOTTEN)


class Piece(NamedTuple):
    """Records of one source in a table: their offsets in order, by partition."""

    source: str
    table: str
    offsets: dict[int, Int64s]


def pieces_of(
    asked: Questions, source: str, table: str, partitions: Int64s, offsets: Int64s
) -> Iterator[Piece]:
    """Yield some records of a source, which a table has, in chunks by (partition, offset)."""
    order = np.lexsort((offsets, partitions))
    for begin in range(0, len(order), PIECE_ROWS):
        rows = order[begin : begin + PIECE_ROWS]
        for some in np.split(
            rows, _cuts(asked, _piece(source, table, partitions[rows], offsets[rows]))
        ):
            yield _piece(source, table, partitions[some], offsets[some])


def _piece(source: str, table: str, partitions: Int64s, offsets: Int64s) -> Piece:
    by_partition, firsts = in_groups(partitions, offsets)
    of_partitions = np.split(by_partition, firsts[1:])
    return Piece(source, table, {int(partitions[mine[0]]): offsets[mine] for mine in of_partitions})


def _cuts(asked: Questions, piece: Piece) -> list[int]:
    """Return the numbers of the records, in order, before which a chunk must be cut.

    Each part then has about `PIECE_BYTES` at most.
    """
    found = read_piece(asked, piece, with_sizes(asked, piece.table, ["partition", "offset"]))
    places = zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True)
    sizes = dict(zip(places, sizes_of(asked, piece.table, found).tolist(), strict=True))
    cuts = list[int]()
    room = PIECE_BYTES
    for number, place in enumerate(
        (p, offset) for p, mine in piece.offsets.items() for offset in mine.tolist()
    ):
        size = sizes.get(place, 0)
        if size > room and room < PIECE_BYTES:
            cuts.append(number)
            room = PIECE_BYTES
        room -= size
    return cuts


def read_piece(
    asked: Questions, piece: Piece, columns: Sequence[str], conditions: Sequence[Condition] = ()
) -> pa.Table:
    """Return the records of a chunk that the table still has, each once. Times are epoch ms.

    All of them meet the conditions.
    """
    where: Where = [[*conditions, *terms] for terms in _near(piece)]
    found = asked.select(piece.table, columns, where)
    wanted = {(p, offset) for p, offsets in piece.offsets.items() for offset in offsets.tolist()}
    places = zip(found["partition"].to_pylist(), found["offset"].to_pylist(), strict=True)
    return found.filter(pa.array([place in wanted for place in places], pa.bool_()))


def _near(piece: Piece) -> Iterator[list[Condition]]:
    """Yield conditions that hold for a chunk's records, and perhaps for a few more."""
    for near in neighbours(sorted(piece.offsets)):
        offsets = sorted(set(chain.from_iterable(piece.offsets[p].tolist() for p in near)))
        span: list[Condition] = [
            ("partition", "in", list(near)),
            ("offset", ">=", offsets[0]),
            ("offset", "<=", offsets[-1]),
        ]
        yield [*span, ("offset", "in", offsets)]
