"""Conditions for the rows of a sequence (`core.sequence`): which have a message, which sort after a
place, and which of a generation would have a message and have none.

What is unpublished follows from the beginning of a generation, and from that of the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import MERGED, Place, Tail, clock_of
from watersmeet.core.sequence import Sequence as Order
from watersmeet.lake import tables
from watersmeet.lake.generations import Generation
from watersmeet.lake.progress import read_batches
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    between,
    by_partition,
    in_portions,
    lexicographic,
)


def reached(
    reader: TableReader, generation: Generation, until_batch: int
) -> dict[TopicPartition, int]:
    """Return, by topic-partition, the next offset of a generation before batch `until_batch`."""
    if until_batch <= generation.from_batch:
        return dict(generation.begin)
    last = until_batch - 1
    cursors = read_batches(reader, [last])[last].cursors()
    return {**generation.begin, **{tp: cursor.next_offset for tp, cursor in cursors.items()}}


def unpublished(
    sequence: Order, ended: Generation, newest: Generation
) -> Iterator[Sequence[Condition]]:
    """Yield conditions for rows of a sequence that the former generation has made and
    that are in no message.

    `ended`: the generation before `newest`. Its rows sort after the tail at which the newest
    begins, or at or before the one behind which it published itself (`Generation.unsent_until`).
    """
    batches: list[Condition] = [
        ("batch", ">=", ended.from_batch),
        ("batch", "<", newest.from_batch),
    ]
    yield from _up_to(sequence, ended.unsent_until(sequence), batches)
    partitions = {tp.partition for tp in newest.begin}
    yield from _after(sequence, newest.tails_of(sequence), partitions, batches)


def _after(
    sequence: Order,
    tails: Mapping[int, Tail],
    partitions: Iterable[int],
    batches: Sequence[Condition],
) -> Iterator[Sequence[Condition]]:
    for p in sorted(partitions):
        here: list[Condition] = [*with_message(sequence), *batches, ("partition", "=", p)]
        yield from ([*here, *term] for term in beyond(sequence, tails.get(p)))


def _up_to(
    sequence: Order, tails: Mapping[int, Tail], batches: Sequence[Condition]
) -> Iterator[Sequence[Condition]]:
    for p, tail in sorted(tails.items()):
        here: list[Condition] = [*with_message(sequence), *batches, ("partition", "=", p)]
        yield from ([*here, *term] for term in up_to(sequence, tail.place))


def count_behind_sink(
    reader: TableReader, generation: Generation, sequence: Order = MERGED
) -> dict[int, int]:
    """Return, by partition, how many rows of the newest generation would have a message and are
    never published, since they sort at or before the tail at which it began.
    """
    batches: list[Condition] = [("batch", ">=", generation.from_batch)]
    return _count(reader, _up_to(sequence, generation.tails_of(sequence), batches))


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
    return _count(reader, _to_publish(generation, tails, partitions))


def first_to_publish(
    reader: TableReader, generation: Generation, tails: Mapping[int, Tail]
) -> int | None:
    """Return the first batch with rows as `count_to_publish` counts them; None without any."""
    partitions = {tp.partition for tp in generation.begin}
    batches = [
        reader.summary(tables.SILVER, [], {"first": ("min", "batch")}, portion)["first"][0].as_py()
        for portion in in_portions([*_to_publish(generation, tails, partitions)])
    ]
    return min((batch for batch in batches if batch is not None), default=None)


def _to_publish(
    generation: Generation, tails: Mapping[int, Tail], partitions: Iterable[int]
) -> Iterator[Sequence[Condition]]:
    batches: list[Condition] = [("batch", ">=", generation.from_batch)]
    return _after(MERGED, {**generation.tails, **tails}, partitions, batches)


def _count(reader: TableReader, where: Iterable[Sequence[Condition]]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for portion in in_portions(list(where)):
        rows = reader.summary(tables.SILVER, ["partition"], {"rows": ("count", "*")}, portion)
        counts.update(by_partition(rows, "rows"))
    return dict(counts)


def with_message(sequence: Order) -> list[Condition]:
    """Return the condition for the rows that have a message."""
    return [(name, "=", value) for name, value in sequence.with_message.items()]


def after(sequence: Order, place: Place) -> Where:
    """Return the condition for the rows that sort after a place, or after all that begin so."""
    return _beside(sequence, place, ">")


def up_to(sequence: Order, place: Place) -> Where:
    """Return the condition for the rows that do not sort after a place, or all that begin so."""
    return _beside(sequence, place, "<=")


def beyond(sequence: Order, tail: Tail | None) -> Where:
    """Return the condition for the rows that sort after a tail: without one, all do."""
    return [[]] if tail is None else after(sequence, tail.place)


def may_be_beyond(sequence: Order, tails: Mapping[int, Tail], partitions: Iterable[int]) -> Where:
    """Return a condition for rows that may sort after the tail of their partition.

    All rows that do meet it. It has few terms, however many partitions there are.
    """
    since = {p: clock_of(tails[p].place) if p in tails else -1 for p in partitions}
    return between(sequence.clock, {p: (clock, None) for p, clock in since.items()})


def _beside(sequence: Order, place: Place, operator: str) -> Where:
    values = sequence.values(place)
    return lexicographic(list(values), list(values.values()), operator)
