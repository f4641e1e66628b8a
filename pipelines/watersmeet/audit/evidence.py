"""Evidence about one generation of a lake: how far it was merged, and by which rules."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from watersmeet.core.avro_schema import AvroSchema
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import MERGED, Place
from watersmeet.core.types import DUE, TENANT
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.epochs import Epoch, Epochs, read_epochs
from watersmeet.lake.generations import Generation, Generations, read_generations
from watersmeet.lake.inputs import topic_partition
from watersmeet.lake.location import Lake
from watersmeet.lake.progress import last_batch
from watersmeet.lake.recovered import MESSAGES, read_out, read_since
from watersmeet.lake.retention_bounds import (
    History,
    RetentionBounds,
    read_history,
    read_retention_bounds,
)
from watersmeet.lake.schemas import avro_schemas
from watersmeet.lake.table_reader import Condition, TableReader, Where, row_count
from watersmeet.lake.table_reader import normalise as in_milliseconds
from watersmeet.lake.unpublished import is_complete, reached
from watersmeet.settings import Settings

PROGRESS_COLUMNS: Final = (
    *("partition", "source", "topic", "epoch", "generation", "batch", "from_offset"),
    *("until_offset", "head", "clock", "position"),
)
"""Columns that are read of `progress`."""

SAMPLED_RECORDS = 100_000
"""About how many records are compared with the merge model where not all are requested: seconds of
work.
"""

KNOWN_BATCHES = 1000
"""Number of last batches that are read of `progress` where not all are requested."""

NULL = -1
"""Value that stands for a null in columns of times."""

Ints: TypeAlias = npt.NDArray[np.int64]
MAX_TIME = int(np.iinfo(np.int64).max)


class End(NamedTuple):
    """End of an epoch within a generation, or of the generation itself.

    Exclusive end offsets and heads (ms) are by topic-partition, clocks (ms) by partition.
    """

    until: Mapping[TopicPartition, int]
    heads: Mapping[TopicPartition, int]
    clocks: Mapping[int, int]


@dataclass(frozen=True)
class Evidence:
    """A generation up to its last batch, with everything that it is judged by.

    - `progress`: its rows for the ends in `through`.
    - `through`: the epochs that the generation went through, each with its end.
    - `recovered`: messages of a lost lake: partition, merge_key, event_time (ms), due, closed_at,
      tenant.
    - `since`: by partition, the position (ms) in their tenant before which the lost lake's records
      are passed over.
    - `out`: by topic-partition, the offsets that the generation passes over: parts of messages of
      earlier generations, and redriven copies of records that it has.
    - `one_in`: one key in so many is sampled.
    - `epochs`: all epochs of the lake.
    - `history`: where rows have been deleted, by partition the point from which on the generation
      is judged; nothing before it is.
    """

    reader: TableReader
    settings: Settings
    partitions: int
    generations: Generations
    generation: Generation
    last_batch: int
    progress: pa.Table
    through: Sequence[tuple[Epoch, End]]
    recovered: pa.Table
    since: Mapping[int, int]
    out: Mapping[TopicPartition, Ints]
    is_full: bool
    one_in: int
    epochs: Epochs
    retention_bounds: RetentionBounds
    history: Mapping[int, History]

    @property
    def end(self) -> End:
        """The end up to which the generation was merged."""
        return self.through[-1][1]

    @property
    def following(self) -> Generation | None:
        """The generation that ended this one; None for the newest."""
        return self.generations.after(self.generation)

    @cached_property
    def is_closing(self) -> bool:
        """True where the jump that ended this generation has consequences for it that are not
        complete yet.

        They are judged as if they were complete.
        """
        return self.following is not None and not is_complete(self.reader, self.following)

    @cached_property
    def reread_ranges(self) -> Mapping[TopicPartition, Sequence[tuple[int, int]]]:
        """Offset ranges `[since, until)` that jumps back led to once more, by topic-partition."""
        ranges = defaultdict[TopicPartition, list[tuple[int, int]]](list)
        furthest = dict[TopicPartition, int]()
        for ended, jump in pairwise(self.generations):
            for tp, at in reached(self.reader, ended, jump.from_batch).items():
                furthest[tp] = max(at, ended.begin.get(tp, 0), furthest.get(tp, 0))
                ranges[tp].append((jump.begin.get(tp, 0), furthest[tp]))
        return ranges

    @cached_property
    def forgotten(self) -> Set[tuple[int, int]]:
        """Partition and timestamp (ms) of messages of merge records that `forget` has erased."""
        names = ["partition", "event_time"]
        rows = read_table(self.reader, self.settings, tables.FORGOTTEN, names)
        places = zip(*(rows[name].to_pylist() for name in names), strict=True)
        return {(p, timestamp_of(time)) for p, time in places}

    @cached_property
    def avro(self) -> Sequence[Mapping[str, AvroSchema]]:
        """Schemas of sources whose values are Avro: by the number of an epoch, then by source."""
        return [avro_schemas(self.reader, epoch.settings) for epoch in self.epochs]

    def at(self, tp: TopicPartition, offset: int) -> str:
        """Return a record's coordinates in Kafka, for a sentence."""
        return f"{tp.input.topic}[{tp.partition}]@{offset}"

    @property
    def batches(self) -> Sequence[Condition]:
        """Conditions that select the batches of the generation."""
        return [("batch", ">=", self.generation.from_batch), ("batch", "<=", self.last_batch)]

    @property
    def first_known(self) -> int:
        """The first batch from which on all rows of `progress` are read."""
        first = self.generation.from_batch
        return first if self.is_full else max(first, self.last_batch - KNOWN_BATCHES + 1)

    def history_of(self, partition: int) -> History:
        """Return where a partition's history begins: before everything, if nothing was deleted."""
        return self.history.get(partition) or History(-1, {}, {}, None)

    def is_own(self, batch: int) -> bool:
        """Return True where a batch of silver belongs to this generation."""
        return self.generation.from_batch <= batch <= self.last_batch

    def epoch_of(self, tp: TopicPartition, offset: int) -> Epoch:
        """Return the epoch by whose rules a record was merged, or would be merged."""
        return next(
            (epoch for epoch, end in self.through if offset < end.until.get(tp, 0)),
            self.through[-1][0],
        )

    def is_sampled(self, key: str | None) -> bool:
        """Return True where a key belongs to the sample; a null never does.

        After every batch the sample is another one.
        """
        return (
            key is not None and zlib.crc32(key.encode(), max(0, self.last_batch)) % self.one_in == 0
        )

    def is_unpublished(self, partition: int, place: Place) -> bool:
        """Return True where a finished record with this place in the order of publication is in no
        message.

        It then sorts at or before the tail behind which the generation began, or after the tail at
        which the generation ended.
        """
        tail = self.generation.tails_of(MERGED).get(partition)
        last = None if self.following is None else self.following.tails_of(MERGED).get(partition)
        is_behind = tail is not None and place <= tail.place
        return is_behind or (self.following is not None and (last is None or place > last.place))


def timestamp_of(event_time: int) -> int:
    """Return the timestamp of a message of a merge record (ms): a time of 0 is none to Kafka."""
    return max(1, event_time)


def numbers(column: pa.Array | pa.ChunkedArray, null: int | None = None) -> npt.NDArray[Any]:
    """Return a column of integers (as int64) or booleans as a numpy array, with `null` in place of
    nulls.
    """
    values = np.asarray(column if null is None else column.fill_null(null))
    return values.astype(np.int64 if values.dtype.kind in "iu" else bool)


def read_evidence(
    reader: TableReader,
    settings: Settings,
    partitions: int,
    generation: int | None = None,
    *,
    full: bool = True,
) -> Evidence:
    """Read a generation as it is now, by default the newest, with everything that it is judged by.

    Unless `full`, only a sample of keys and batches is looked at. Raises ConfigurationError where
    there is no such generation.
    """
    epochs = read_epochs(reader, settings)
    generations = read_generations(reader, settings)
    if not generations:
        every = [TopicPartition(i, p) for i in settings.inputs for p in range(partitions)]
        generations = Generations([Generation(0, 0, dict.fromkeys(every, 0), {})])
    selected = find_generation(generations, generation)
    first = selected.from_batch
    batch = _last_batch(reader, generations, selected)
    ends = sorted({end for end in [*(end for _, end in epochs.ends()), batch] if first <= end})
    where: Where = [[("batch", "in", [end for end in ends if end <= batch])]]
    progress = read_table(reader, settings, tables.PROGRESS, PROGRESS_COLUMNS, where)
    noted = defaultdict(list)
    for row in progress.to_pylist():
        noted[row["batch"]].append(row)
    ended_epochs = [
        (epoch, _end_of(noted.get(end, []))) for epoch, end in epochs.ends() if first <= end < batch
    ]
    end = _end_of(noted.get(batch, []))
    until = {**selected.begin, **end.until}
    last_epoch = epochs.of(max(batch, first))
    through = [*ended_epochs, (last_epoch, end._replace(until=until))]
    bronze = [name for name in map(tables.bronze, settings.sources) if reader.exists(name)]
    counts = [row_count(reader, name) for name in bronze]
    one_in = 1 if full else max(1, sum(counts) // SAMPLED_RECORDS)
    bounds = read_retention_bounds(reader)
    has_silver = reader.exists(tables.SILVER)
    has_bronze = len(bronze) == len(settings.sources)
    return Evidence(
        reader,
        settings,
        partitions,
        generations,
        selected,
        batch,
        progress,
        through,
        recovered=_read_messages(reader, settings, selected),
        since=read_since(reader, selected) if has_silver else {},
        out=read_out(reader, selected) if has_silver and has_bronze else {},
        is_full=full,
        one_in=one_in,
        epochs=epochs,
        retention_bounds=bounds,
        history=read_history(reader, settings, partitions, selected, batch, bounds),
    )


def find_generation(generations: Generations, number: int | None) -> Generation:
    """Return the generation with this number, by default the newest.

    Raises ConfigurationError where there is none.
    """
    if number is None:
        return generations.newest
    for generation in generations:
        if generation.number == number:
            return generation
    newest = generations.newest.number
    raise ConfigurationError(
        f"this lake has no generation {number}", where="--generation", fix=f"the newest is {newest}"
    )


def read_table(
    reader: TableReader,
    settings: Settings,
    table: str,
    columns: Sequence[str],
    where: Where = (),
) -> pa.Table:
    """Return what `TableReader.select` returns; no rows where the table does not exist."""
    if reader.exists(table):
        return reader.select(table, columns, where)
    schema = Lake(settings).schema(table)
    return in_milliseconds(schema.empty_table().select(list(columns)))


def _read_messages(reader: TableReader, settings: Settings, generation: Generation) -> pa.Table:
    """Return the messages of a lost lake that a generation knows."""
    columns = ["partition", "merge_key", "event_time", *DUE.names, *TENANT.names]
    where = MESSAGES if generation.number == 0 else [[("partition", "in", [])]]
    return read_table(reader, settings, tables.SILVER, columns, where)


def _end_of(rows: Sequence[Mapping[str, Any]]) -> End:
    clocks = {row["partition"]: row["clock"] for row in rows if row["clock"] is not None}
    heads = _by_topic_partition([row for row in rows if row["head"] is not None], "head")
    return End(_by_topic_partition(rows, "until_offset"), heads, clocks)


def _last_batch(reader: TableReader, generations: Generations, generation: Generation) -> int:
    """Return a generation's last batch: the one before its first where it has none."""
    following = generations.after(generation)
    if following is not None:
        return following.from_batch - 1
    last = last_batch(reader) if reader.exists(tables.SILVER) else None
    return max(generation.from_batch - 1, -1 if last is None else last.batch)


def _by_topic_partition(
    rows: Sequence[Mapping[str, Any]], column: str
) -> dict[TopicPartition, int]:
    return {topic_partition(row): row[column] for row in rows}
