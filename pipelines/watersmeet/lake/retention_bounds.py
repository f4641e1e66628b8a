"""The table `retention_bounds`: where the history of each table begins, once `keep` has deleted old
rows.

A floor is written before the rows below it are deleted, so a reader that knows it misses nothing
above it. Bronze's floor is the end of a batch of silver: every record before its offsets that was
not refused is deleted. Other rows have a time. Those before it are deleted: merge records
(`silver`) and `corrections` by last event time, `late` and `passed` by position, `duplicates` and
`excess` by event time, `quarantine` by Kafka's timestamp.

What is left can be derived again from the end of a batch on, if no row that it touches has been
deleted: there its *history* begins. The merge records that were open then are those rows of silver
that changed later or are still open, with the parts that came before.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Final, NamedTuple

from watersmeet.core.inputs import InputId
from watersmeet.core.plan import Cursor, TopicPartition
from watersmeet.lake import tables
from watersmeet.lake.epochs import read_epochs
from watersmeet.lake.generations import Generation
from watersmeet.lake.inputs import topic_partition
from watersmeet.lake.table_reader import Condition, TableReader, Where
from watersmeet.lake.tenant_state import BatchEnd, read_batch_end
from watersmeet.settings import Settings

_JOINED: Final = (tables.SILVER, tables.DUPLICATES, tables.EXCESS, tables.CORRECTIONS)
"""The tables of records that have joined a merge record, or a corrected one."""


class RetentionBounds(NamedTuple):
    """Beginnings of tables after deletions.

    - `batches`: by partition, the batch at whose end bronze begins.
    - `times`: by table and partition, the time (epoch ms) at which another table begins.
    """

    batches: Mapping[int, int]
    times: Mapping[tuple[str, int], int]

    def last_of(self, *names: str) -> dict[int, int]:
        """Return, by partition, the last time (epoch ms) at which one of these tables begins."""
        last: dict[int, int] = {}
        for (table, p), time in self.times.items():
            if table in names:
                last[p] = max(time, last.get(p, time))
        return last


class History(NamedTuple):
    """State of a partition at the end of a batch (-1: before the first).

    - `offsets`: by input, the next offset.
    - `positions`: by input, in ms (None: none yet).
    - `clock`: in ms.
    """

    batch: int
    offsets: Mapping[InputId, int]
    positions: Mapping[InputId, int | None]
    clock: int | None


def read_retention_bounds(reader: TableReader) -> RetentionBounds:
    """Return all floors."""
    if not reader.exists(tables.FLOORS):
        return RetentionBounds({}, {})
    values = {"batch": ("max", "batch"), "time": ("max", "time")}
    rows = reader.summary(tables.FLOORS, ["table", "partition"], values).to_pylist()
    batches: dict[int, int] = {}
    for row in rows:  # for a moment, one source may be ahead of the others
        if row["batch"] is not None:
            batches[row["partition"]] = max(row["batch"], batches.get(row["partition"], -1))
    return RetentionBounds(
        batches,
        {(row["table"], row["partition"]): row["time"] for row in rows if row["time"] is not None},
    )


def read_history(
    reader: TableReader,
    settings: Settings,
    partitions: int,
    generation: Generation,
    last_batch: int,
    retention_bounds: RetentionBounds,
) -> dict[int, History]:
    """Return, by partition, where the history of a generation begins.

    What is left from there up to `last_batch` can be derived again. Empty where nothing was
    deleted.
    """
    deleted_until = {
        place: time
        for place, time in retention_bounds.times.items()
        if place[0] in (tables.LATE, tables.PASSED, *_JOINED)
    }
    # Quarantine's floor does not count: refused records need no history.
    if not retention_bounds.batches and not deleted_until:
        return {}
    noted = reader.summary(
        tables.PROGRESS, [], {"last": ("max", "batch")}, [[("batch", "<=", last_batch)]]
    )["last"][0].as_py()
    longest_ms = max(
        epoch.settings.merge.window.longest_ms for epoch in read_epochs(reader, settings)
    )
    read_end = cache(partial(read_batch_end, reader))  # partitions share batches
    histories = {}
    for p in range(partitions):
        batch = max(min(retention_bounds.batches.get(p, -1), last_batch), generation.from_batch - 1)
        # No merge record is open for longer than `longest_ms`. So one that was open at a clock has
        # its event times at most that long before it, those of duplicates among them.
        times = [
            time + (longest_ms if table in _JOINED else 0)
            for (table, q), time in deleted_until.items()
            if q == p
        ]
        if times:
            first = max(batch, generation.from_batch)
            batch = max(batch, _first_batch(reader, settings, p, first, max(times), noted))
        histories[p] = (
            _history_at_end(read_end(batch), settings, p, batch)
            if batch >= generation.from_batch
            else _history_at_start(generation, p)
        )
    return histories


def _history_at_start(generation: Generation, partition: int) -> History:
    begin = {
        tp.input: offset for tp, offset in generation.begin.items() if tp.partition == partition
    }
    return History(generation.from_batch - 1, begin, dict.fromkeys(begin), None)


def _first_batch(
    reader: TableReader, settings: Settings, partition: int, since: int, time_ms: int, last: int
) -> int:
    """Return the first batch at whose end every source of a partition has at least this position.

    Without such a batch, it is the last one that is noted.
    """
    beyond: list[Condition] = [("partition", "=", partition), ("position", ">=", time_ms)]
    beyond += [("batch", ">=", since), ("batch", "<=", last)]
    by = ["source", "topic"]
    rows = reader.summary(tables.PROGRESS, by, {"first": ("min", "batch")}, [beyond]).to_pylist()
    first_batches = {InputId(row["source"], row["topic"]): row["first"] for row in rows}
    return max(first_batches.values()) if first_batches.keys() == {*settings.inputs} else last


def _history_at_end(end: BatchEnd, settings: Settings, partition: int, batch: int) -> History:
    cursors = {i: end.cursors.get(TopicPartition(i, partition), Cursor()) for i in settings.inputs}
    offsets = {i: cursor.next_offset for i, cursor in cursors.items()}
    positions = {i: cursor.position for i, cursor in cursors.items()}
    return History(batch, offsets, positions, end.clocks.get(partition))


def batch_ends(reader: TableReader, partitions: Mapping[int, int]) -> dict[TopicPartition, int]:
    """Return the next offset of each source after a batch.

    `partitions`: by partition, the batch.
    """
    where: Where = [
        [("batch", "in", sorted(set(partitions.values()))), ("partition", "in", sorted(partitions))]
    ]
    rows = reader.select(
        tables.PROGRESS, ["source", "topic", "partition", "batch", "until_offset"], where
    ).to_pylist()
    return {
        topic_partition(row): row["until_offset"]
        for row in rows
        if partitions[row["partition"]] == row["batch"]
    }
