"""Finished rows of a generation that are in no message, and how far the generation came.

Both follow from its beginning, and from that of the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import SequenceTail
from watersmeet.lake import tables
from watersmeet.lake.generations import Generation
from watersmeet.lake.order import beyond
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    by_partition,
    in_portions,
    row_count,
)
from watersmeet.lake.tenant_state import read_batch_end

_VALID: Final[Sequence[Condition]] = [("status", "=", "timed_out"), ("valid", "=", True)]


def reached(
    reader: TableReader, generation: Generation, until_batch: int
) -> dict[TopicPartition, int]:
    """Return, by topic-partition, the next offset of a generation before batch `until_batch`."""
    if until_batch <= generation.from_batch:
        return dict(generation.begin)
    cursors = read_batch_end(reader, until_batch - 1).cursors
    return {**generation.begin, **{tp: cursor.next_offset for tp, cursor in cursors.items()}}


def unpublished(
    ended: Generation, newest: Generation, closing_from: int | None
) -> Iterator[Sequence[Condition]]:
    """Yield conditions for finished, valid rows of the former generation that are in no message.

    `ended`: the generation before `newest`. Its rows sort after the tail at which the newest
    begins, or are behind the sink in their own (`behind_sink`). `closing_from`: the first batch
    whose messages say when their merge records were closed (`Epochs.closing_from`).
    """
    yield from behind_sink(ended, closing_from, newest.from_batch)
    batches: list[Condition] = [
        ("batch", ">=", ended.from_batch),
        ("batch", "<", newest.from_batch),
    ]
    partitions = {tp.partition for tp in newest.begin}
    yield from _after(newest.tails, partitions, batches, closing_from)


def _after(
    tails: Mapping[int, SequenceTail],
    partitions: Iterable[int],
    batches: Sequence[Condition],
    closing_from: int | None,
) -> Iterator[Sequence[Condition]]:
    """Yield conditions for the finished, valid rows of some batches that sort after these tails."""
    for p in sorted(partitions):
        here: list[Condition] = [*_VALID, *batches, ("partition", "=", p)]
        beyond_tail = beyond(tails.get(p), closing_from, is_after=True)
        yield from ([*here, *term] for term in beyond_tail)


def behind_sink(
    generation: Generation, closing_from: int | None, until_batch: int | None = None
) -> Iterator[Sequence[Condition]]:
    """Yield conditions for the finished, valid rows of a generation that are never published.

    They sort at or before the tail at which it began. `closing_from`: as in `unpublished`.
    `until_batch`: where it has ended, the first batch of the next one.
    """
    batches: list[Condition] = [("batch", ">=", generation.from_batch)]
    batches += [] if until_batch is None else [("batch", "<", until_batch)]
    for p, tail in sorted(generation.tails.items()):
        here: list[Condition] = [*_VALID, *batches, ("partition", "=", p)]
        yield from ([*here, *term] for term in beyond(tail, closing_from, is_after=False))


def count_behind_sink(
    reader: TableReader, generation: Generation, closing_from: int | None
) -> dict[int, int]:
    """Return, by partition, the number of finished, valid rows that are never published.

    They are those of `behind_sink`.
    """
    return _count(reader, behind_sink(generation, closing_from))


def count_to_publish(
    reader: TableReader,
    generation: Generation,
    tails: Mapping[int, SequenceTail],
    partitions: Iterable[int],
    closing_from: int | None,
) -> dict[int, int]:
    """Return, by partition, how many finished, valid rows of the newest generation are still to be
    published.

    `tails`: the last message of each of these partitions that has one.
    """
    batches: list[Condition] = [("batch", ">=", generation.from_batch)]
    last = {**generation.tails, **tails}
    return _count(reader, _after(last, partitions, batches, closing_from))


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
