"""Finished rows of a generation that are in no message, and how far the generation came.

Both follow from its beginning, and from that of the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from pipelines.core.plan import TopicPartition
from pipelines.core.sequence import PLAIN, SequenceTail
from pipelines.lake import tables
from pipelines.lake.generations import Generation
from pipelines.lake.order import Order, orders
from pipelines.lake.table_reader import Condition, TableReader, Where, in_portions, row_count

_VALID: Final[Sequence[Condition]] = [("status", "=", "timed_out"), ("valid", "=", True)]


def reached(
    reader: TableReader, generation: Generation, until_batch: int
) -> dict[TopicPartition, int]:
    """Return, by topic-partition, the next offset of a generation before batch `until_batch`."""
    where: Where = [[("batch", "=", until_batch - 1), ("batch", ">=", generation.from_batch)]]
    rows = reader.select(
        tables.PROGRESS, ["source", "partition", "until_offset"], where
    ).to_pylist()
    return {
        **generation.begin,
        **{TopicPartition(row["source"], row["partition"]): row["until_offset"] for row in rows},
    }


def unpublished(
    reader: TableReader, ended: Generation, newest: Generation
) -> Iterator[Sequence[Condition]]:
    """Yield conditions for finished, valid rows of the former generation that are in no message.

    `ended`: the generation before `newest`. Its rows sort after the tail at which the newest
    begins, or are behind the sink in their own (`behind_sink`).
    """
    yield from behind_sink(reader, ended, newest.from_batch)
    batches: list[Condition] = [
        ("batch", ">=", ended.from_batch),
        ("batch", "<", newest.from_batch),
    ]
    partitions = sorted({tp.partition for tp in newest.begin})
    for order in orders(reader):
        finished = [*_VALID, *batches, *order.conditions]
        for p in partitions:
            conditions: list[Condition] = [*finished, ("partition", "=", p)]
            beyond = _beyond(order, newest.tails.get(p), is_after=True)
            yield from ([*conditions, *term] for term in beyond)


def behind_sink(
    reader: TableReader, generation: Generation, until_batch: int | None = None
) -> Iterator[Sequence[Condition]]:
    """Yield conditions for the finished, valid rows of a generation that are never published.

    They sort at or before the tail at which it began. `until_batch`: where it has ended, the first
    batch of the next one.
    """
    batches: list[Condition] = [("batch", ">=", generation.from_batch)]
    batches += [] if until_batch is None else [("batch", "<", until_batch)]
    for order in orders(reader) if generation.tails else ():
        for p, tail in sorted(generation.tails.items()):
            conditions: list[Condition] = [
                *_VALID,
                *batches,
                *order.conditions,
                ("partition", "=", p),
            ]
            yield from ([*conditions, *term] for term in _beyond(order, tail, is_after=False))


def count_behind_sink(reader: TableReader, generation: Generation) -> dict[int, int]:
    """Return, by partition, the number of finished, valid rows that are never published.

    They are those of `behind_sink`.
    """
    counts: Counter[int] = Counter()
    for portion in in_portions(list(behind_sink(reader, generation))):
        rows = reader.summary(tables.SILVER, ["partition"], {"rows": ("count", "*")}, portion)
        counts.update(
            dict(zip(rows["partition"].to_pylist(), rows["rows"].to_pylist(), strict=True))
        )
    return dict(counts)


def _beyond(
    order: Order, tail: SequenceTail | None, *, is_after: bool
) -> Iterator[Sequence[Condition]]:
    """Yield conditions for the rows of an order that come after a tail, or else at or before it."""
    if tail is None:
        yield from ([[]] if is_after else [])
        return
    is_plain = order.column != "closed_at"
    # What a timeout alone has closed comes before everything else.
    if is_plain != (tail.place.closed_at == PLAIN):
        yield from ([[(order.column, "is not null", None)]] if is_after != is_plain else [])
        return
    place: Mapping[str, Any] = {
        "event_time": tail.event_time,
        "merge_key": tail.key,
        "closed_at": tail.closed_at,
        "due": tail.due,
        "tenant": tail.tenant,
    }
    values = [(column, place[column]) for column in order.columns]
    operators = [">" if is_after else "<"] * len(values)
    operators[-1] = ">" if is_after else "<="
    for number, ((column, value), operator) in enumerate(zip(values, operators, strict=True)):
        equal = [(before, "=", same) for before, same in values[:number]]
        yield [*equal, (column, operator, value)]


def is_complete(reader: TableReader, generation: Generation) -> bool:
    """Return True where everything is done that follows from the jump that began a generation."""
    decided: Where = [
        [("decided_at", "=", generation.decided_at), ("reason", "=", generation.reason)]
    ]
    return row_count(reader, tables.RESETS, decided) > 0
