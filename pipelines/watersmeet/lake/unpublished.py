"""Finished rows of a generation that are in no message, and how far the generation came.

Both follow from its beginning, and from that of the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import MERGED, Tail
from watersmeet.lake import tables
from watersmeet.lake.generations import Generation
from watersmeet.lake.order import beyond, up_to, with_message
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    by_partition,
    in_portions,
    row_count,
)
from watersmeet.lake.tenant_state import read_batch_end

_VALID: Final[Sequence[Condition]] = with_message(MERGED)


def reached(
    reader: TableReader, generation: Generation, until_batch: int
) -> dict[TopicPartition, int]:
    """Return, by topic-partition, the next offset of a generation before batch `until_batch`."""
    if until_batch <= generation.from_batch:
        return dict(generation.begin)
    cursors = read_batch_end(reader, until_batch - 1).cursors
    return {**generation.begin, **{tp: cursor.next_offset for tp, cursor in cursors.items()}}


def unpublished(ended: Generation, newest: Generation) -> Iterator[Sequence[Condition]]:
    """Yield conditions for finished, valid rows of the former generation that are in no message.

    `ended`: the generation before `newest`. Its rows sort after the tail at which the newest
    begins, or are behind the sink in their own (`behind_sink`).
    """
    yield from behind_sink(ended, newest.from_batch)
    batches: list[Condition] = [
        ("batch", ">=", ended.from_batch),
        ("batch", "<", newest.from_batch),
    ]
    partitions = {tp.partition for tp in newest.begin}
    yield from _after(newest.tails, partitions, batches)


def _after(
    tails: Mapping[int, Tail], partitions: Iterable[int], batches: Sequence[Condition]
) -> Iterator[Sequence[Condition]]:
    """Yield conditions for the finished, valid rows of some batches that sort after these tails."""
    for p in sorted(partitions):
        here: list[Condition] = [*_VALID, *batches, ("partition", "=", p)]
        yield from ([*here, *term] for term in beyond(MERGED, tails.get(p)))


def behind_sink(
    generation: Generation, until_batch: int | None = None
) -> Iterator[Sequence[Condition]]:
    """Yield conditions for the finished, valid rows of a generation that are never published.

    They sort at or before the tail at which it began. `until_batch`: where it has ended, the first
    batch of the next one.
    """
    batches: list[Condition] = [("batch", ">=", generation.from_batch)]
    batches += [] if until_batch is None else [("batch", "<", until_batch)]
    for p, tail in sorted(generation.tails.items()):
        here: list[Condition] = [*_VALID, *batches, ("partition", "=", p)]
        yield from ([*here, *term] for term in up_to(MERGED, tail.place))


def count_behind_sink(reader: TableReader, generation: Generation) -> dict[int, int]:
    """Return, by partition, the number of finished, valid rows that are never published.

    They are those of `behind_sink`.
    """
    return _count(reader, behind_sink(generation))


def count_to_publish(
    reader: TableReader,
    generation: Generation,
    tails: Mapping[int, Tail],
    partitions: Iterable[int],
) -> dict[int, int]:
    """Return, by partition, how many finished, valid rows of the newest generation are still to be
    published.

    `tails`: the last message of each of these partitions that has one.
    """
    batches: list[Condition] = [("batch", ">=", generation.from_batch)]
    last = {**generation.tails, **tails}
    return _count(reader, _after(last, partitions, batches))


def _count(reader: TableReader, where: Iterable[Sequence[Condition]]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for portion in in_portions(list(where)):
        rows = reader.summary(tables.SILVER, ["partition"], {"rows": ("count", "*")}, portion)
        counts.update(by_partition(rows, "rows"))
    return dict(counts)


def is_complete(reader: TableReader, generation: Generation) -> bool:
    """Return True where everything is done that follows from the jump that began a generation."""
    decided: Where = [
        [("decided_at", "=", generation.decided_at), ("reason", "=", generation.reason)]
    ]
    return row_count(reader, tables.RESETS, decided) > 0
