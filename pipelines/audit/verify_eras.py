"""How far silver is: one version of it, and the eras and epochs that it was merged in.

An *era* is what silver merged from one deliberate reset to the next.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.audit.unnoted import Unnoted, read_unnoted
from pipelines.core.avro_schema import AvroSchema
from pipelines.core.inputs import source_of
from pipelines.core.plan import Stretch, TopicPartition
from pipelines.core.recovery import Told
from pipelines.core.types import DUE, TENANT
from pipelines.lake import tables
from pipelines.lake.epochs import Epoch, Epochs, read_epochs
from pipelines.lake.floors import Floors, History, read_floors, read_history
from pipelines.lake.inputs import named
from pipelines.lake.order import due_columns
from pipelines.lake.progress import last_batch, progress_rows
from pipelines.lake.questions import Questions, Where, row_count
from pipelines.lake.questions import answer as in_milliseconds
from pipelines.lake.schemas import avro_schemas
from pipelines.lake.stretches import read_lived
from pipelines.lake.taken_back import undecided_at
from pipelines.settings import Settings

SAMPLED_RECORDS = 100_000
"""About so many records are compared with the merge model where not all are wanted: seconds of work."""

KNOWN_BATCHES = 1000
"""So many of the last batches are looked at in `progress` where not all are wanted."""

NONE = -1
"""Stands for a time that is null, in columns of times."""

Ints: TypeAlias = npt.NDArray[np.int64]
NEVER = int(np.iinfo(np.int64).max)
_NOT_YET = 2**53
"""When something will have been noted (epoch ms)."""


class Reset(NamedTuple):
    """A batch that merged nothing: where each topic-partition goes on, when it was noted (epoch ms), and what for."""

    batch: int
    begin: Mapping[TopicPartition, int]
    committed_at: int
    reason: str


class EpochEnd(NamedTuple):
    """Where an epoch ended within an era: exclusive end offsets and heads (ms) by topic-partition, clocks (ms) by partition."""

    until: Mapping[TopicPartition, int]
    heads: Mapping[TopicPartition, int]
    clocks: Mapping[int, int]


class Era(NamedTuple):
    """What silver merged from one reset to the next: `[begin, until)` of every topic-partition, by partition the clock (ms) at
    its end, and the heads (ms) that its last batch considered. `ended_at`: the time (epoch ms) of the reset that ended it.
    `epochs`: those that it went through, each with its end, which the last one lacks.
    """

    begin: Mapping[TopicPartition, int]
    until: Mapping[TopicPartition, int]
    clocks: Mapping[int, int]
    heads: Mapping[TopicPartition, int]
    ended_at: int | None
    epochs: Sequence[tuple[Epoch, EpochEnd | None]]


@dataclass(frozen=True)
class Evidence:
    """One version of a lake's silver (None: there is none), its last batch (-1: none) and eras, and how many keys are sampled.

    `recovered`: messages read back, or left behind by a jump back, as partition, merge_key, tenant, event_time (ms), and `era`:
    the index of the first whose records are parts of them rather than merged anew. `since`: by partition, the position (ms) of
    their tenant before which a lost lake's records were passed over. `skips`: what starts, jumps and accepted gaps passed over,
    `[since, until)`, and when that was decided (epoch ms). `progress`: its rows of the last batch, which may not be noted
    yet, and of the ends of the eras. `history`: where rows have been deleted, by partition from where on the last era is judged;
    nothing before it is. `lived`: by partition, what the first era has merged again under a lost lake's timeouts. `unnoted`: what
    the notes of the last commits lack.
    """

    questions: Questions
    settings: Settings
    partitions: int
    version: int | None
    last_batch: int
    progress: pa.Table
    resets: Sequence[Reset]
    eras: Sequence[Era]
    skips: Mapping[TopicPartition, Sequence[tuple[int, int, int]]]
    recovered: pa.Table
    is_full: bool
    one_in: int
    epochs: Epochs
    floors: Floors
    history: Mapping[int, History]
    lived: Mapping[int, Told]
    since: Mapping[int, int]
    unnoted: Unnoted

    @property
    def has_tenants(self) -> bool:
        """Whether every tenant has a clock of its own."""
        return self.settings.merge.has_tenants

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

    def era_of(self, batch: int) -> int:
        """The index of the era that a batch belongs to; a reset closes the one before it."""
        return sum(reset.batch < batch for reset in self.resets)

    def epoch_of(self, tp: TopicPartition, offset: int) -> Epoch:
        """The epoch whose rules a record was last merged by, or would be."""
        for era in reversed(self.eras):
            if era.begin.get(tp, 0) <= offset < era.until.get(tp, 0):
                return next(epoch for epoch, end in era.epochs if end is None or offset < end.until.get(tp, 0))
        return self.epochs.current

    def stretches(self, partition: int, era: int) -> Sequence[Stretch]:
        """What an era of a partition has merged again of a lost lake's, or has still to."""
        return self.lived[partition].stretches if era == 0 and partition in self.lived else ()

    def is_sampled(self, key: str | None) -> bool:
        """Whether a key belongs to the sample, which is another one after every batch; a null never does."""
        return key is not None and zlib.crc32(key.encode(), max(0, self.last_batch)) % self.one_in == 0

    def skipped(self, tp: TopicPartition, era: int) -> list[tuple[int, int]]:
        """What had been passed over of a topic-partition up to an era; where a jump goes back, nothing is from there on."""
        found, ended_at = [], self.eras[era].ended_at
        for since, until, decided_at in self.skips.get(tp, ()):
            begins = [reset.begin.get(tp, NEVER) for reset in self.resets[:era] if decided_at <= reset.committed_at]
            if ended_at is None or decided_at <= ended_at:
                found.append((since, min([until, *begins])))
        return [(since, until) for since, until in found if since < until]


def numbers(column: pa.Array | pa.ChunkedArray, null: int | None = None) -> npt.NDArray[Any]:
    """A column of integers (as int64) or booleans as numpy, with `null` in the place of nulls."""
    found = np.asarray(column if null is None else column.fill_null(null))
    return found.astype(np.int64 if found.dtype.kind in "iu" else bool)


def read_evidence(questions: Questions, settings: Settings, partitions: int, *, full: bool = True) -> Evidence:
    """Silver as it is now, with all that leads to it; not `full`: of keys and batches, a sample is looked at."""
    epochs = read_epochs(questions, settings)
    version, batch, progress = _silver_now(questions, settings, [end for _, end in epochs.ends()])
    noted = defaultdict(list)
    for row in progress.to_pylist():
        noted[row["batch"]].append(row)
    jumps = [(b, rows, rows[0]) for b, rows in sorted(noted.items()) if rows[0]["reason"] is not None]
    resets = [Reset(b, _by_topic_partition(rows, "until_offset"), row["committed_at"], row["reason"]) for b, rows, row in jumps]
    every = [TopicPartition(source, p) for source in settings.inputs for p in range(partitions)]
    begin = dict.fromkeys(every, 0)
    eras: list[Era] = []
    for ended in [*resets, None]:
        rows = noted.get(batch if ended is None else ended.batch - 1, [])
        rows = [row for row in rows if row["reason"] is None]  # else one reset followed another
        clocks = {row["partition"]: row["clock"] for row in rows if row["clock"] is not None}
        heads = _by_topic_partition([row for row in rows if row["head"] is not None], "head")
        until = begin | _by_topic_partition(rows, "until_offset")
        first, last = resets[len(eras) - 1].batch + 1 if eras else 0, batch if ended is None else ended.batch - 1
        passed = [(epoch, _end_of(noted, end)) for epoch, end in epochs.ends() if first <= end < last]
        through = [*passed, (epochs.of(max(last, 0)), None)]
        eras.append(Era(begin, until, clocks, heads, None if ended is None else ended.committed_at, through))
        begin = begin if ended is None else dict.fromkeys(every, 0) | dict(ended.begin)
    bronze = [name for name in map(tables.bronze, settings.sources) if questions.exists(name)]
    counts = [row_count(questions, name) for name in bronze]
    one_in = 1 if full else max(1, sum(counts) // SAMPLED_RECORDS)
    known = _read_recovered(questions, settings, batch)
    # Messages are noted before the lake's first batch, or with a reset, whose progress is noted after them.
    messages = known.filter(pc.is_valid(known["merge_key"]))
    at, ends = numbers(messages["recovered_at"]), np.array([reset.committed_at for reset in resets], np.int64)
    era = np.minimum(1 + np.searchsorted(ends, at, side="left"), len(ends))
    era[at <= (noted[0][0]["committed_at"] if 0 in noted else NEVER)] = 0
    recovered = messages.select(["partition", "merge_key", "event_time", *DUE.names, *TENANT.names])
    recovered = recovered.append_column("era", pa.array(era, pa.int64()))
    begun = [(row, 0, row["offset"], 0) for row in known.filter(pc.is_valid(known["source"])).to_pylist()]
    jumped = read_table(questions, settings, tables.RESETS).to_pylist()
    skips = defaultdict(list)
    for row, *skip in [*begun, *((row, row["from_offset"], row["to_offset"], row["decided_at"]) for row in jumped)]:
        skips[TopicPartition(row["source"], row["partition"])].append((skip[0], skip[1], skip[2]))
    begins = known.filter(pc.is_valid(known["since"])).select(["partition", "since"]).to_pylist()
    floors, history = read_floors(questions), read_history(questions, settings, partitions, batch)
    found = (
        version,
        batch,
        progress,
        resets,
        eras,
        skips,
        recovered,
        full,
        one_in,
        epochs,
        floors,
        history,
        read_lived(questions),
        {row["partition"]: row["since"] for row in begins},
        read_unnoted(questions, settings),
    )
    return Evidence(questions, settings, partitions, *found)


def read_table(
    questions: Questions,
    settings: Settings,
    table: str,
    columns: Sequence[str] = (),
    where: Where = (),
    version: int | None = None,
) -> pa.Table:
    """`Questions.select`, by default of all columns of the layout but the topic, so that `source` is the input; without rows
    where the table does not exist.
    """
    schema = tables.layout(settings)[source_of(table)].schema
    columns = columns or _without_topic(schema.names)
    if questions.exists(table):
        return questions.select(table, columns, where, version=version)
    return in_milliseconds(schema.empty_table().select(columns))


def _without_topic(names: Iterable[str]) -> list[str]:
    return [name for name in names if name != "topic"]


def _read_recovered(questions: Questions, settings: Settings, last_batch: int) -> pa.Table:
    """All of `recovered`, with the columns that it lacks, null; without what a reset noted that was not decided by this batch."""
    is_there = questions.exists(tables.RECOVERED)
    columns = _without_topic(questions.columns(tables.RECOVERED).names) if is_there else ()
    found = read_table(questions, settings, tables.RECOVERED, columns)
    if is_there and (at := undecided_at(questions, last_batch)) is not None:
        is_noted = pc.and_(pc.equal(found["recovered_at"], at), pc.is_valid(found["merge_key"]))
        found = found.filter(pc.invert(is_noted.fill_null(False)))
    for name, kind in [*dict.fromkeys([*DUE.names, "since"], pa.int64()).items(), *((f.name, f.type) for f in TENANT)]:
        if name not in found.column_names:
            found = found.append_column(name, pa.nulls(found.num_rows, kind))
    return found


def _end_of(noted: Mapping[int, Sequence[Mapping[str, Any]]], batch: int) -> EpochEnd:
    rows = noted.get(batch, [])
    clocks = {row["partition"]: row["clock"] for row in rows if row["clock"] is not None}
    heads = _by_topic_partition([row for row in rows if row["head"] is not None], "head")
    return EpochEnd(_by_topic_partition(rows, "until_offset"), heads, clocks)


def _silver_now(questions: Questions, settings: Settings, ends: Sequence[int]) -> tuple[int | None, int, pa.Table]:
    """A version of silver, its last batch, and the rows of `progress` of the first batch, of every reset, of the batch before it,
    of the batches in `ends`, and of the last, which may not be noted yet.
    """
    version, last = None, None
    while questions.exists(tables.SILVER) and questions.exists(tables.PROGRESS):
        version, last = questions.version(tables.SILVER), last_batch(questions)
        if questions.version(tables.SILVER) == version:  # else another batch came between the questions
            break
    if last is None:
        return version, -1, read_table(questions, settings, tables.PROGRESS, where=[[("batch", "in", [])]])
    plan, made, _ = last
    is_reset: Where = [[("reason", "is not null", None), ("batch", "<=", plan.batch)]]
    resets = questions.summary(tables.PROGRESS, ["batch"], {"rows": ("count", "*")}, is_reset)["batch"].to_pylist()
    wanted = {0, plan.batch, *ends, *resets, *(batch - 1 for batch in [*resets, plan.batch])}
    noted = read_table(questions, settings, tables.PROGRESS, where=[[("batch", "in", sorted(wanted))]])
    if not pc.any(pc.equal(noted["batch"], plan.batch)).as_py():
        now = in_milliseconds(progress_rows(plan, settings, made, _NOT_YET))
        noted = pa.concat_tables([noted, named(now, noted.column_names, settings.with_topics)])
    return version, plan.batch, noted


def _by_topic_partition(rows: Sequence[Mapping[str, Any]], column: str) -> dict[TopicPartition, int]:
    return {TopicPartition(row["source"], row["partition"]): row[column] for row in rows}
