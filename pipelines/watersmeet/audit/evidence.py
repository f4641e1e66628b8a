"""Evidence about one generation of a lake: how far it was merged, and by which rules."""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from watersmeet.core.avro_schema import AvroSchema
from watersmeet.core.columns import cuts, row_values
from watersmeet.core.plan import BatchPlan, Cursor, TopicPartition
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.sequence import Place
from watersmeet.core.sequence import Sequence as Order
from watersmeet.core.state import State
from watersmeet.core.types import DUE, TENANT
from watersmeet.errors import ConfigurationError
from watersmeet.lake import pieces, tables
from watersmeet.lake.history import (
    Epoch,
    Epochs,
    Generation,
    Generations,
    History,
    needed_ms,
    read_history,
)
from watersmeet.lake.progress import last_batch, read_batches
from watersmeet.lake.published import reached
from watersmeet.lake.recovered import (
    MESSAGES,
    copies_of_deleted,
    joined,
    read_out,
    read_since,
)
from watersmeet.lake.schemas import avro_schemas
from watersmeet.lake.state import read_state
from watersmeet.lake.table_reader import Condition, TableReader, Where, row_count
from watersmeet.settings import Settings

SAMPLED_RECORDS = 100_000
"""About how many records are compared with the merge model where not all are requested: seconds of
work.
"""

MODEL_BYTES: Final = 1_000
"""Approximate size of a record in the merge model, without its value."""

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

    @classmethod
    def of(cls, batch: BatchPlan | None) -> End:
        """Return the end of a batch (None: of one that made nothing)."""
        ranges = {} if batch is None else batch.ranges
        heads = {tp: done.head for tp, done in ranges.items() if done.head is not None}
        clocks = {} if batch is None else batch.clocks
        return cls({tp: done.until_offset for tp, done in ranges.items()}, heads, clocks)


@dataclass(frozen=True)
class Evidence:
    """A generation up to its last batch, with everything that it is judged by.

    - `through`: the epochs that the generation went through, each with its end.
    - `one_in`: one key in so many is sampled.
    - `base`: where rows have been deleted, the saved state from which on the generation is judged;
      nothing before it is.
    """

    reader: TableReader
    settings: Settings
    partitions: int
    history: History
    generations: Generations
    generation: Generation
    last_batch: int
    through: Sequence[tuple[Epoch, End]]
    one_in: int
    base: State | None

    @property
    def epochs(self) -> Epochs:
        """All epochs of the lake."""
        return self.history.epochs

    @property
    def end(self) -> End:
        """The end up to which the generation was merged."""
        return self.through[-1][1]

    @property
    def following(self) -> Generation | None:
        """The generation that ended this one; None for the newest."""
        return self.generations.after(self.generation)

    @cached_property
    def recovered(self) -> pa.Table:
        """The messages of a lost lake: partition, merge_key, event_time (ms), due, closed_at,
        tenant.
        """
        columns = ["partition", "merge_key", "event_time", *DUE.names, *TENANT.names]
        where = [[("partition", "in", [])]] if self.generation.number else MESSAGES
        return self.reader.select(tables.SILVER, columns, where)

    @cached_property
    def since(self) -> Mapping[int, int]:
        """By partition, the position (ms) in their tenant before which the lost lake's records are
        passed over.
        """
        return read_since(self.reader, self.generation)

    @cached_property
    def out(self) -> Mapping[TopicPartition, Ints]:
        """By topic-partition, the offsets that the generation passes over: parts of messages of
        earlier generations, and redriven copies of these, or of records that it has, or had before
        `keep`.
        """
        found = read_out(self.reader, self.generation)
        floors = dict(self.generation.begin)
        if self.base is not None:
            floors |= {tp: cursor.next_offset for tp, cursor in self.base.cursors.items()}
        deleted = copies_of_deleted(self.reader, self.generation, floors)
        return joined([*found.items(), *deleted])

    @cached_property
    def is_closing(self) -> bool:
        """True where the jump that ended this generation has consequences for it that are not
        complete yet.

        They are judged as if they were complete.
        """
        return self.following is not None and self.following.number > self.history.closed

    @cached_property
    def reread_ranges(self) -> Mapping[TopicPartition, Sequence[tuple[int, int]]]:
        """Offset ranges `[since, until)` that jumps back led to once more, by topic-partition."""
        ranges = defaultdict[TopicPartition, list[tuple[int, int]]](list)
        furthest = dict[TopicPartition, int]()
        for ended, jump in itertools.pairwise(self.generations):
            for tp, at in reached(self.reader, ended, jump.from_batch).items():
                furthest[tp] = max(at, ended.begin.get(tp, 0), furthest.get(tp, 0))
                ranges[tp].append((jump.begin.get(tp, 0), furthest[tp]))
        return ranges

    @cached_property
    def forgotten(self) -> Set[tuple[int, int]]:
        """Partition and timestamp (ms) of messages of merge records that `forget` has erased."""
        names = ["partition", "event_time"]
        rows = self.reader.select(tables.ERASED, names, [[("source", "is null", None)]])
        return {(p, timestamp_of(time)) for p, time in row_values(rows, *names)}

    @cached_property
    def avro(self) -> Sequence[Mapping[str, AvroSchema]]:
        """Schemas of sources whose values are Avro: by the number of an epoch, then by source."""
        return [avro_schemas(self.reader, epoch.settings) for epoch in self.epochs]

    @property
    def batches(self) -> Sequence[Condition]:
        """Conditions that select the batches of the generation."""
        return [("batch", ">=", self.generation.from_batch), ("batch", "<=", self.last_batch)]

    @property
    def own_batches(self) -> range:
        """The batches of the generation."""
        return range(self.generation.from_batch, self.last_batch + 1)

    @property
    def history_batch(self) -> int:
        """The batch with which history begins; -1 if it begins with the generation."""
        return -1 if self.base is None else self.base.next_batch - 1

    @property
    def saved(self) -> list[Condition]:
        """Conditions that select the rows of `bases` that the saved state has."""
        number = self.history.floors.base
        return [("_base", "=", number), ("status", "in", [*tables.UNFINISHED, "late"])]

    def closed_before(self, partition: int) -> list[Condition]:
        """Return conditions that select the merge records of a partition, and their corrections,
        that were final when history begins and that late records may still correct.
        """
        cursors = {} if self.base is None else self.base.cursors
        at = min((c.position or 0 for tp, c in cursors.items() if tp.partition == partition))
        return [
            ("partition", "=", partition),
            ("status", "in", ["timed_out", "correction"]),
            ("batch", ">=", self.generation.from_batch),
            ("batch", "<=", self.history_batch),
            ("closed_at", "is not null", None),
            ("last_event_time", ">=", at - needed_ms(self.epochs)),
        ]

    def cursor_of(self, tp: TopicPartition) -> Cursor:
        """Return where the history of a topic-partition begins: at 0, if nothing was deleted."""
        return Cursor() if self.base is None else self.base.cursors[tp]

    def begin_of(self, tp: TopicPartition) -> int:
        """Return the first offset of a topic-partition by which the generation is judged."""
        return max(self.cursor_of(tp).next_offset, self.generation.begin.get(tp, 0))

    @cached_property
    def piece_records(self) -> int:
        """Number of records that are looked at together."""
        sums = {"rows": ("count", "*"), "bytes": ("sum", RECORD_BYTES.name)}
        bronze = map(tables.bronze, self.settings.sources)
        [*found] = (self.reader.summary(name, [], sums).to_pylist()[0] for name in bronze)
        rows = sum(each["rows"] for each in found)
        size = sum(each["bytes"] or 0 for each in found)
        return int(max(1, pieces.PIECE_BYTES // (MODEL_BYTES + size // max(1, rows))))

    def groups(self) -> Iterator[range]:
        """Yield the partitions that are looked at together: one, or several with few records."""
        counts = np.zeros(self.partitions, np.int64)
        for tp, until in self.end.until.items():
            if tp.partition < self.partitions:
                counts[tp.partition] += until - self.generation.begin.get(tp, 0)
        return itertools.starmap(range, cuts(counts, self.piece_records))

    def pieces(self, partitions: range) -> Iterator[range]:
        """Yield the batches that are looked at together in some partitions.

        Each epoch, and history, begins with a piece of its own.
        """
        where: Where = [[*here(partitions), *self.batches]]
        sums = {"since": ("sum", "from_offset"), "until": ("sum", "until_offset")}
        counts = np.zeros(max(0, self.last_batch + 1 - self.generation.from_batch), np.int64)
        rows = self.reader.summary(tables.PROGRESS, ["batch"], sums, where)
        at = numbers(rows["batch"]) - self.generation.from_batch
        counts[at] = numbers(rows["until"]) - numbers(rows["since"])
        begins = {epoch.from_batch for epoch in self.epochs}
        begins.add(self.history_batch + 1)
        first = self.generation.from_batch
        bounds = sorted({first, *(b for b in begins if first < b <= self.last_batch)})
        for since, until in itertools.pairwise([*bounds, self.last_batch + 1]):
            for begin, end in cuts(counts[since - first : until - first], self.piece_records):
                yield range(since + begin, since + end)

    def epoch_of(self, tp: TopicPartition, offset: int) -> Epoch:
        """Return the epoch by whose rules a record was merged, or would be merged."""
        for epoch, end in self.through[:-1]:
            if offset < end.until.get(tp, 0):
                return epoch
        return self.through[-1][0]

    def is_sampled(self, key: str | None) -> bool:
        """Return True where a key belongs to the sample; a null never does.

        After every batch the sample is another one.
        """
        if key is None or self.one_in == 1:
            return key is not None
        return zlib.crc32(key.encode(), max(0, self.last_batch)) % self.one_in == 0

    def is_unpublished(self, sequence: Order, partition: int, place: Place) -> bool:
        """Return True where a row with this place in the order of a sequence is in no message.

        It then sorts at or before the tail behind which the generation began, or after the tail at
        which the generation ended.
        """
        tail = self.generation.unsent_until(sequence).get(partition)
        last = None if self.following is None else self.following.tails_of(sequence).get(partition)
        is_behind = tail is not None and place <= tail.place
        return is_behind or (self.following is not None and (last is None or place > last.place))


def here(partitions: range) -> list[Condition]:
    """Return the condition for rows of some partitions."""
    return [("partition", ">=", partitions.start), ("partition", "<", partitions.stop)]


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

    Unless `full`, only a sample of keys and batches is looked at. All tables that have rows must be
    there. Raises ConfigurationError where there is no such generation.
    """
    decided = read_history(reader, settings)
    epochs, generations = decided.epochs, decided.generations
    if not generations:
        every = [TopicPartition(i, p) for i in settings.inputs for p in range(partitions)]
        generations = Generations([Generation(0, 0, dict.fromkeys(every, 0), {})])
    selected = find_generation(generations, generation)
    first = selected.from_batch
    batch = read_last_batch(reader, generations, selected)
    ended = [(epoch, end) for epoch, end in epochs.ends() if first <= end < batch]
    ends = [*(end for _, end in ended), *([batch] if first <= batch else [])]
    noted = read_batches(reader, ends)
    last = End.of(noted.get(batch))
    through = [(epoch, End.of(noted.get(end))) for epoch, end in ended]
    through.append(
        (epochs.of(max(batch, first)), last._replace(until={**selected.begin, **last.until}))
    )
    counts = [row_count(reader, tables.bronze(name)) for name in settings.sources]
    one_in = 1 if full else max(1, sum(counts) // SAMPLED_RECORDS)
    first_base, base = decided.first_base, None
    if first_base is not None and first_base.generation > selected.number:
        raise ConfigurationError(
            f"`keep` has deleted rows without which generation {selected.number} cannot be judged",
            where="--generation",
            fix=f"generation {first_base.generation} is the first that can",
        )
    if first_base is not None and first_base.generation == selected.number:
        base = read_state(reader, epochs, first_base)
        through = [(epoch, end) for epoch, end in through if epoch.number >= base.epoch]
    return Evidence(
        reader, settings, partitions, decided, generations, selected, batch, through, one_in, base
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


def read_end(reader: TableReader, batch: int) -> End:
    """Return the end of a batch."""
    return End.of(read_batches(reader, [batch]).get(batch))


def read_last_batch(reader: TableReader, generations: Generations, generation: Generation) -> int:
    """Return a generation's last batch: the one before its first where it has none."""
    following = generations.after(generation)
    if following is not None:
        return following.from_batch - 1
    last = last_batch(reader)
    return max(generation.from_batch - 1, -1 if last is None else last.batch)
