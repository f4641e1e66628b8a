"""Reads records of a source again by offset, as they came, in chunks that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import Int64s, in_groups
from watersmeet.core.inputs import InputId
from watersmeet.core.reading import FORGOTTEN, RECORD_BYTES
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    neighbours,
    sizes_of,
)

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
    order = np.lexsort((offsets, partitions))
    for begin in range(0, len(order), CHUNK_ROWS):
        rows = order[begin : begin + CHUNK_ROWS]
        for part in np.split(
            rows, _cuts(reader, _chunk(input_id, table, partitions[rows], offsets[rows]))
        ):
            yield _chunk(input_id, table, partitions[part], offsets[part])


def _chunk(input_id: InputId, table: str, partitions: Int64s, offsets: Int64s) -> Chunk:
    by_partition, firsts = in_groups(partitions, offsets)
    partition_rows = np.split(by_partition, firsts[1:])
    return Chunk(
        input_id, table, {int(partitions[rows[0]]): offsets[rows] for rows in partition_rows}
    )


def _cuts(reader: TableReader, chunk: Chunk) -> list[int]:
    """Return the numbers of the records, in order, before which a chunk must be cut.

    Each part then has about `CHUNK_BYTES` at most.
    """
    rows = read_chunk(reader, chunk, ["partition", "offset", RECORD_BYTES.name])
    places = zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True)
    sizes = dict(zip(places, sizes_of(rows).tolist(), strict=True))
    cuts = list[int]()
    room = CHUNK_BYTES
    for number, place in enumerate(
        (p, offset) for p, offsets in chunk.offsets.items() for offset in offsets.tolist()
    ):
        size = sizes.get(place, 0)
        if size > room and room < CHUNK_BYTES:
            cuts.append(number)
            room = CHUNK_BYTES
        room -= size
    return cuts


def read_chunk(
    reader: TableReader, chunk: Chunk, columns: Sequence[str], conditions: Sequence[Condition] = ()
) -> pa.Table:
    """Return the records of a chunk that the table still has, each once. Times are epoch ms.

    All of them meet the conditions.
    """
    where = of_topic(chunk.input, [[*conditions, *terms] for terms in _near(chunk)])
    rows = reader.select(chunk.table, columns, where)
    requested = {(p, offset) for p, offsets in chunk.offsets.items() for offset in offsets.tolist()}
    places = zip(rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True)
    return rows.filter(pa.array([place in requested for place in places], pa.bool_()))


def _near(chunk: Chunk) -> Iterator[list[Condition]]:
    """Yield conditions that hold for a chunk's records, and perhaps for a few more."""
    for near in neighbours(sorted(chunk.offsets)):
        offsets = sorted(set(chain.from_iterable(chunk.offsets[p].tolist() for p in near)))
        span: list[Condition] = [
            ("partition", "in", list(near)),
            ("offset", ">=", offsets[0]),
            ("offset", "<=", offsets[-1]),
        ]
        yield [*span, ("offset", "in", offsets)]
