"""What is known of one generation of a lake: one version of silver, how far it was merged, and by which rules."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.audit.unnoted import Unnoted, read_unnoted
from pipelines.core.avro_schema import AvroSchema
from pipelines.core.inputs import source_of
from pipelines.core.plan import TopicPartition
from pipelines.core.sequence import Place
from pipelines.core.types import DUE, TENANT
from pipelines.errors import ConfigurationError
from pipelines.lake import tables
from pipelines.lake.epochs import Epoch, Epochs, read_epochs
from pipelines.lake.floors import Floors, History, read_floors, read_history
from pipelines.lake.generations import Generation, Generations, read_generations
from pipelines.lake.inputs import named
from pipelines.lake.order import due_columns
from pipelines.lake.progress import last_batch, progress_rows
from pipelines.lake.questions import Condition, Questions, Where, row_count
from pipelines.lake.questions import answer as in_milliseconds
from pipelines.lake.recovered import MESSAGES, read_out, read_since
from pipelines.lake.schemas import avro_schemas
from pipelines.lake.unpublished import is_complete, reached
from pipelines.settings import Settings

OF_PROGRESS: Final = ("partition", "source", "batch", "from_offset", "until_offset", "head", "clock", "position")
"""What is read of `progress`."""

SAMPLED_RECORDS = 100_000
"""About so many records are compared with the merge model where not all are wanted: seconds of work."""

KNOWN_BATCHES = 1000
"""So many of the last batches are looked at in `progress` where not all are wanted."""

NONE = -1
"""Stands for a time that is null, in columns of times."""

Ints: TypeAlias = npt.NDArray[np.int64]
NEVER = int(np.iinfo(np.int64).max)


class End(NamedTuple):
    """Where an epoch ended within a generation, or the generation itself: exclusive end offsets and heads (ms) by
    topic-partition, clocks (ms) by partition.
    """

    until: Mapping[TopicPartition, int]
    heads: Mapping[TopicPartition, int]
    clocks: Mapping[int, int]


@dataclass(frozen=True)
class Evidence:
    """A generation in one version of silver (None: there is none), up to its last batch, and how many keys are sampled.

    `following`: the generation that ended it; `is_closing`: what follows from that jump is not complete, and taken for complete.
    `epochs`: those of the lake; `through`: those that the generation went through, each with its end. `progress`: its rows of
    these ends, of which the last may not be noted yet. `recovered`: messages of a lost lake, as partition, merge_key, event_time
    (ms), due, closed_at and tenant; `since`: by partition, the position (ms) of their tenant before which its records were passed
    over. `out`: by topic-partition the offsets of parts of messages of earlier generations. `again`: by topic-partition the
    offsets `[since, until)` that a jump back has led to once more. `history`: where rows have been deleted, by partition from
    where on the generation is judged; nothing before it is. `unnoted`: what the notes of the last commits lack.
    """

    questions: Questions
    settings: Settings
    partitions: int
    generations: Generations
    generation: Generation
    version: int | None
    last_batch: int
    progress: pa.Table
    through: Sequence[tuple[Epoch, End]]
    recovered: pa.Table
    since: Mapping[int, int]
    out: Mapping[TopicPartition, Ints]
    is_full: bool
    one_in: int
    epochs: Epochs
    floors: Floors
    history: Mapping[int, History]
    unnoted: Unnoted

    @property
    def has_tenants(self) -> bool:
        """Whether every tenant has a clock of its own."""
        return self.settings.merge.has_tenants

    @property
    def end(self) -> End:
        """How far the generation was merged."""
        return self.through[-1][1]

    @property
    def following(self) -> Generation | None:
        """The generation that ended this one; None of the newest."""
        return self.generations.after(self.generation)

    @cached_property
    def is_closing(self) -> bool:
        """Whether what follows for this generation from the jump that ended it is not complete."""
        return self.following is not None and not is_complete(self.questions, self.following)

    @cached_property
    def again(self) -> Mapping[TopicPartition, Sequence[tuple[int, int]]]:
        """By topic-partition, the offsets `[since, until)` to which jumps back have led once more."""
        found, furthest = defaultdict[TopicPartition, list[tuple[int, int]]](list), dict[TopicPartition, int]()
        for ended, jump in pairwise(self.generations):
            for tp, at in reached(self.questions, ended, jump.from_batch).items():
                furthest[tp] = max(at, ended.begin.get(tp, 0), furthest.get(tp, 0))
                found[tp].append((jump.begin.get(tp, 0), furthest[tp]))
        return found

    @cached_property
    def further_columns(self) -> Sequence[str]:
        """The columns of silver that say when merge records were closed, and whose they are, if it has them."""
        of_tenants = [*TENANT.names, "position"] if self.has_tenants else []
        return [*due_columns(self.questions), *of_tenants] if self.questions.exists(tables.SILVER) else []

    @cached_property
    def avro(self) -> Sequence[Mapping[str, AvroSchema]]:
        """By the number of an epoch and by source whose values are Avro, their schema."""
        return [avro_schemas(self.questions, epoch.settings) for epoch in self.epochs]

    def at(self, tp: TopicPartition, offset: int) -> str:
        """A record's place in Kafka, for a sentence."""
        return f"{self.settings.inputs[tp.source]}[{tp.partition}]@{offset}"

    @property
    def batches(self) -> Sequence[Condition]:
        """The batches of the generation, as a condition."""
        return [("batch", ">=", self.generation.from_batch), ("batch", "<=", self.last_batch)]

    def is_own(self, batch: int) -> bool:
        """Whether a batch of silver belongs to this generation."""
        return self.generation.from_batch <= batch <= self.last_batch

    def epoch_of(self, tp: TopicPartition, offset: int) -> Epoch:
        """The epoch whose rules a record was merged by, or would be."""
        return next((epoch for epoch, end in self.through if offset < end.until.get(tp, 0)), self.through[-1][0])

    def is_sampled(self, key: str | None) -> bool:
        """Whether a key belongs to the sample, which is another one after every batch; a null never does."""
        return key is not None and zlib.crc32(key.encode(), max(0, self.last_batch)) % self.one_in == 0

    def is_unpublished(self, partition: int, place: Place) -> bool:
        """Whether a finished record with this place in the order of publication is in no message, since it sorts at or before the
        tail behind which the generation began, or after the one at which it ended.
        """
        tail, last = self.generation.tails.get(partition), None if self.following is None else self.following.tails.get(partition)
        is_behind = tail is not None and place <= tail.place
        return is_behind or (self.following is not None and (last is None or place > last.place))


def numbers(column: pa.Array | pa.ChunkedArray, null: int | None = None) -> npt.NDArray[Any]:
    """A column of integers (as int64) or booleans as numpy, with `null` in the place of nulls."""
    found = np.asarray(column if null is None else column.fill_null(null))
    return found.astype(np.int64 if found.dtype.kind in "iu" else bool)


def read_evidence(
    questions: Questions, settings: Settings, partitions: int, generation: int | None = None, *, full: bool = True
) -> Evidence:
    """A generation, by default the newest, as it is now, with all that leads to it; not `full`: of keys and batches, a sample is
    looked at. Raises ConfigurationError where there is no such generation.
    """
    epochs, generations = read_epochs(questions, settings), read_generations(questions, settings)
    if not generations:
        every = [TopicPartition(source, p) for source in settings.inputs for p in range(partitions)]
        generations = Generations([Generation(0, 0, dict.fromkeys(every, 0), {})])
    one = chosen(generations, generation)
    version, batch, progress = _silver_now(questions, settings, generations, one, [end for _, end in epochs.ends()])
    noted = defaultdict(list)
    for row in progress.to_pylist():
        noted[row["batch"]].append(row)
    passed = [(epoch, _end_of(noted.get(end, []))) for epoch, end in epochs.ends() if one.from_batch <= end < batch]
    end = _end_of(noted.get(batch, []) if batch >= one.from_batch else [])
    through = [*passed, (epochs.of(max(batch, one.from_batch)), end._replace(until={**one.begin, **end.until}))]
    bronze = [name for name in map(tables.bronze, settings.sources) if questions.exists(name)]
    counts = [row_count(questions, name) for name in bronze]
    one_in = 1 if full else max(1, sum(counts) // SAMPLED_RECORDS)
    found = (
        generations,
        one,
        version,
        batch,
        progress,
        through,
        _read_messages(questions, settings, one),
        read_since(questions, one) if questions.exists(tables.RECOVERED) else {},
        read_out(questions, one) if questions.exists(tables.RECOVERED) and len(bronze) == len(settings.sources) else {},
        full,
        one_in,
        epochs,
        read_floors(questions),
        read_history(questions, settings, partitions, one, batch),
        read_unnoted(questions, settings, one),
    )
    return Evidence(questions, settings, partitions, *found)


def chosen(generations: Generations, number: int | None) -> Generation:
    """The generation with a number, by default the newest. Raises ConfigurationError where there is none."""
    found = generations.newest if number is None else next((each for each in generations if each.number == number), None)
    if found is None:
        newest = generations.newest.number
        raise ConfigurationError(f"--generation: this lake has no generation {number}; the newest is {newest}")
    return found


def read_table(
    questions: Questions,
    settings: Settings,
    table: str,
    columns: Sequence[str],
    where: Where = (),
    version: int | None = None,
) -> pa.Table:
    """`Questions.select`; without rows where the table does not exist."""
    if questions.exists(table):
        return questions.select(table, columns, where, version=version)
    schema = tables.layout(settings)[source_of(table)].schema
    return in_milliseconds(schema.empty_table().select(list(columns)))


def _read_messages(questions: Questions, settings: Settings, generation: Generation) -> pa.Table:
    """The messages of a lost lake that a generation knows, with the columns that the table lacks, null."""
    names = ["partition", "merge_key", "event_time"]
    kinds = {**dict.fromkeys(DUE.names, pa.int64()), **{field.name: field.type for field in TENANT}}
    is_there = questions.exists(tables.RECOVERED)
    own = [name for name in kinds if is_there and name in questions.columns(tables.RECOVERED).names]
    where = MESSAGES if generation.number == 0 else [[("partition", "in", [])]]
    found = read_table(questions, settings, tables.RECOVERED, [*names, *own], where)
    for name, kind in kinds.items():
        if name not in found.column_names:
            found = found.append_column(name, pa.nulls(found.num_rows, kind))
    return found.select([*names, *kinds])


def _end_of(rows: Sequence[Mapping[str, Any]]) -> End:
    clocks = {row["partition"]: row["clock"] for row in rows if row["clock"] is not None}
    heads = _by_topic_partition([row for row in rows if row["head"] is not None], "head")
    return End(_by_topic_partition(rows, "until_offset"), heads, clocks)


def _silver_now(
    questions: Questions, settings: Settings, generations: Generations, generation: Generation, ends: Sequence[int]
) -> tuple[int | None, int, pa.Table]:
    """A version of silver, a generation's last batch (the one before its first: none), and the rows of `progress` of the batches
    in `ends` and of that one, which may not be noted yet.
    """
    version, last = None, None
    while questions.exists(tables.SILVER) and questions.exists(tables.PROGRESS):
        version, last = questions.version(tables.SILVER), last_batch(questions)
        if questions.version(tables.SILVER) == version:  # else another batch came between the questions
            break
    following, first = generations.after(generation), generation.from_batch
    batch = max(first - 1, -1 if last is None else last[0].batch) if following is None else following.from_batch - 1
    wanted = sorted({end for end in [*ends, batch] if first <= end <= batch})
    noted = read_table(questions, settings, tables.PROGRESS, OF_PROGRESS, [[("batch", "in", wanted)]])
    if last is not None and last[0].batch == batch >= first and not pc.any(pc.equal(noted["batch"], batch)).as_py():
        now = in_milliseconds(progress_rows(last[0], settings, last[1], 0))
        noted = pa.concat_tables([noted, named(now, noted.column_names, settings.with_topics)])
    return version, batch, noted


def _by_topic_partition(rows: Sequence[Mapping[str, Any]], column: str) -> dict[TopicPartition, int]:
    return {TopicPartition(row["source"], row["partition"]): row[column] for row in rows}
