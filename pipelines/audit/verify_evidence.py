"""What `verify` starts from: one version of silver, the eras that it was merged in, and the rows of every table by partition.

An *era* is what silver merged from one deliberate reset to the next. Tables are read a group of partitions at a time.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import chain, repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.avro_schema import AvroSchema
from pipelines.core.plan import TopicPartition
from pipelines.lake import tables
from pipelines.lake.epochs import Epoch, Epochs, read_epochs
from pipelines.lake.progress import last_batch, progress_rows
from pipelines.lake.questions import Questions, Where
from pipelines.lake.questions import answer as in_milliseconds
from pipelines.lake.schemas import avro_schemas
from pipelines.settings import Settings

SAMPLED_RECORDS = 100_000
"""About so many records are compared with the merge model where not all are wanted: seconds of work."""

KNOWN_BATCHES = 1000
"""So many of the last batches are looked at in `progress` where not all are wanted."""

GROUPS = 16
"""Tables are read in about so many groups of partitions: one partition at a time, or that part of the lake, is in memory."""

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

    `recovered`: messages read back, or left behind by a jump back, as partition, merge_key, event_time (ms), and `era`: the index
    of the first whose records are parts of them rather than merged anew. `skips`: what starts, jumps and accepted gaps passed
    over, `[since, until)`, and when that was decided (epoch ms). `progress`: its rows of the last batch, which may not be noted
    yet, and of the ends of the eras.
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

    @cached_property
    def avro(self) -> Mapping[str, AvroSchema]:
        """By source whose values are Avro, their schema."""
        return avro_schemas(self.questions, self.settings)

    def at(self, tp: TopicPartition, offset: int) -> str:
        """A record's place in Kafka, for a sentence."""
        return f"{self.settings.sources[tp.source].topic}[{tp.partition}]@{offset}"

    def era_of(self, batch: int) -> int:
        """The index of the era that a batch belongs to; a reset closes the one before it."""
        return sum(reset.batch < batch for reset in self.resets)

    def epoch_of(self, tp: TopicPartition, offset: int) -> Epoch:
        """The epoch whose rules a record was last merged by, or would be."""
        for era in reversed(self.eras):
            if era.begin.get(tp, 0) <= offset < era.until.get(tp, 0):
                return next(epoch for epoch, end in era.epochs if end is None or offset < end.until.get(tp, 0))
        return self.epochs.current

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


# -- how far silver is


def read_evidence(questions: Questions, settings: Settings, partitions: int, *, full: bool = True) -> Evidence:
    """Silver as it is now, with all that leads to it; not `full`: of keys and batches, a sample is looked at."""
    epochs = read_epochs(questions, settings)
    version, batch, progress = _silver_now(questions, settings, [end for _, end in epochs.ends()])
    noted = defaultdict(list)
    for row in progress.to_pylist():
        noted[row["batch"]].append(row)
    jumps = [(b, rows, rows[0]) for b, rows in sorted(noted.items()) if rows[0]["reason"] is not None]
    resets = [Reset(b, _by_topic_partition(rows, "until_offset"), row["committed_at"], row["reason"]) for b, rows, row in jumps]
    every = [TopicPartition(source, p) for source in settings.sources for p in range(partitions)]
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
    counts = [questions.summary(name, [], {"rows": ("count", "*")})["rows"][0].as_py() for name in bronze]
    one_in = 1 if full else max(1, sum(counts) // SAMPLED_RECORDS)
    known = read_table(questions, settings, tables.RECOVERED)
    # Messages are noted before the lake's first batch, or with a reset, whose progress is noted after them.
    messages = known.filter(pc.is_valid(known["merge_key"]))
    at, ends = numbers(messages["recovered_at"]), np.array([reset.committed_at for reset in resets], np.int64)
    era = np.minimum(1 + np.searchsorted(ends, at, side="left"), len(ends))
    era[at <= (noted[0][0]["committed_at"] if 0 in noted else NEVER)] = 0
    recovered = messages.select(["partition", "merge_key", "event_time"]).append_column("era", pa.array(era, pa.int64()))
    begun = [(row, 0, row["offset"], 0) for row in known.filter(pc.is_valid(known["source"])).to_pylist()]
    jumped = read_table(questions, settings, tables.RESETS).to_pylist()
    skips = defaultdict(list)
    for row, *skip in [*begun, *((row, row["from_offset"], row["to_offset"], row["decided_at"]) for row in jumped)]:
        skips[TopicPartition(row["source"], row["partition"])].append((skip[0], skip[1], skip[2]))
    return Evidence(
        questions, settings, partitions, version, batch, progress, resets, eras, skips, recovered, full, one_in, epochs
    )


def read_table(
    questions: Questions,
    settings: Settings,
    table: str,
    columns: Sequence[str] = (),
    where: Where = (),
    version: int | None = None,
) -> pa.Table:
    """`Questions.select`, by default of all columns of the layout; without rows where the table does not exist."""
    schema = tables.layout(settings)[table].schema
    if questions.exists(table):
        return questions.select(table, columns or schema.names, where, version=version)
    return in_milliseconds(schema.empty_table().select(columns or schema.names))


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
        noted = pa.concat_tables([noted, in_milliseconds(progress_rows(plan, settings, made, _NOT_YET))])
    return version, plan.batch, noted


def _by_topic_partition(rows: Sequence[Mapping[str, Any]], column: str) -> dict[TopicPartition, int]:
    return {TopicPartition(row["source"], row["partition"]): row[column] for row in rows}


# -- the rows of each partition


class Outcome(NamedTuple):
    """What became of records with a key: a merge record (`status` open, timed_out, or reset: closed by one), a late record, or a
    part of a message that was out before (PUBLISHED). Times in ms; `last`: the last event time, or of a late record its position.
    Of each part: source, offset, event time and value, as its text, or as the JSON of the fields of a schema.
    """

    key: str
    status: str
    event_time: int
    last: int
    parts: tuple[tuple[Any, ...], ...]

    def __str__(self) -> str:
        parts = [f"{source}@{offset} ({', '.join(str(each)[:40] for each in more)})" for source, offset, *more in self.parts[:5]]
        return f"{self.status} from {self.event_time} to {self.last} of {', '.join(parts)}{', ...' * (len(self.parts) > 5)}"


class Row(NamedTuple):
    """A row of silver. `holds`: whether the user's predicate holds, None where that is not known; `value`: of its message."""

    outcome: Outcome
    batch: int
    valid: bool | None
    invalid_reason: str | None
    holds: bool | None
    value: bytes | None


DECISION, HEARTBEAT, KEYED = range(3)


class Read(NamedTuple):
    """What an era could read of a topic-partition up to bronze's end, but for what is refused: offsets in order (of a decision
    of the idle policy that which it follows), positions (ms), and kinds (DECISION, HEARTBEAT, KEYED).
    """

    offset: Ints
    position: Ints
    kind: Ints

    def keyed(self, until: int) -> Read:
        """Of it the records with a key up to an exclusive end offset."""
        wanted = (self.kind == KEYED) & (self.offset < until)
        return Read(self.offset[wanted], self.position[wanted], self.kind[wanted])


class Log(NamedTuple):
    """One topic-partition as bronze has it: offsets in order, how often those are there that are there more than once, offsets of
    refused records, of those in quarantine, and of those with a key that silver holds an outcome of; and what each era has read.

    `sampled`: of records with sampled keys by offset the key, the event time (ms), the value, and what silver should keep of it.
    """

    offset: Ints
    repeated: Mapping[int, int]
    refused: Ints
    quarantined: Ints
    passed: Ints
    reads: Sequence[Read]
    sampled: Mapping[int, tuple[str, int, bytes, bytes]]


class Partition(NamedTuple):
    """All rows of one partition; `recovered`: the era that a message read back begins with, its key and event time (ms);
    `progress`: its columns in order of batch, NONE for a time that is null.
    """

    evidence: Evidence
    number: int
    logs: Mapping[TopicPartition, Log]
    rows: Sequence[Row]
    late: Sequence[Outcome]
    recovered: Sequence[tuple[int, str, int]]
    progress: pa.Table


def place(partition: int, key: str, event_time: int | None = None) -> str:
    """A merge record's coordinates, for a sentence; event time in ms."""
    return f"silver: partition {partition}, key {key!r}" + ("" if event_time is None else f", event_time {event_time}")


def groups(partitions: int) -> list[tuple[int, int]]:
    """Ranges `[first, until)` of partitions that are read together."""
    size = -(-partitions // GROUPS)
    return [(first, min(first + size, partitions)) for first in range(0, partitions, max(1, size))]


_COLUMNS = {
    tables.SILVER: ["merge_key", "status", "event_time", "last_event_time", "batch", "valid", "invalid_reason"],
    tables.LATE: ["merge_key", "source", "offset", "event_time", "position", "value"],
    tables.QUARANTINE: ["source", "offset"],
    tables.IDLE_HEARTBEATS: ["source", "after_offset", "event_time", "decided_at"],
    tables.RECOVERED: ["era", "merge_key", "event_time"],
}
_OF_BRONZE = ["partition", "offset", "event_time", "heartbeat", "reason", "merge_key", "value"]
_TIMES = ["head", "clock", "position"]
_OF_PROGRESS = ["partition", "source", "batch", "from_offset", "until_offset", *_TIMES]


def read_partitions(evidence: Evidence, evaluated: Callable[[pa.Table], pa.Table]) -> Iterator[Partition]:
    """Every partition of the topics. Outcomes are read before bronze, so that bronze has what they name.

    `evaluated` adds the columns `holds` and `told` (`Row.value`) to rows of silver.
    """
    sources = list(evidence.settings.sources)
    for first, until in groups(evidence.partitions):
        here, found = [("partition", ">=", first), ("partition", "<", until)], {tables.RECOVERED: evidence.recovered}
        for table in _COLUMNS.keys() - found.keys():
            columns = ["partition", *_COLUMNS[table], *(sources if table == tables.SILVER else [])]
            where = [*here, ("batch", "<=", evidence.last_batch)] if table == tables.LATE else here
            version = evidence.version if table == tables.SILVER else None
            found[table] = read_table(evidence.questions, evidence.settings, table, columns, [where], version)
        found[tables.SILVER] = evaluated(found[tables.SILVER])
        found[tables.PROGRESS] = _read_progress(evidence, here)
        bronze = {source: _read_bronze(evidence, source, here) for source in sources}
        for p in range(first, until):
            mine = {table: _of(rows, "partition", p) for table, rows in found.items()}
            tps = [TopicPartition(source, p) for source in sources]
            logs = {tp: _log(evidence, tp, _of(bronze[tp.source], "partition", p), mine) for tp in tps}
            late = [Outcome(k, "late", t, w, ((s, o, t, v),)) for k, s, o, t, w, v in _tuples(mine[tables.LATE], tables.LATE)]
            recovered = list(_tuples(mine[tables.RECOVERED], tables.RECOVERED))
            rows = list(_rows(mine[tables.SILVER], sources))
            yield Partition(evidence, p, logs, rows, late, recovered, mine[tables.PROGRESS])


def _of(rows: pa.Table, column: str, value: Any) -> pa.Table:
    return rows.filter(pc.equal(rows[column], value))


def _tuples(rows: pa.Table, table: str, *more: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].to_pylist() for name in (*_COLUMNS[table], *more)), strict=True)


def _read_progress(evidence: Evidence, here: Sequence[tuple[str, str, Any]]) -> pa.Table:
    """Rows of `progress` for batches that are no reset: all, or the last ones and the last of every era."""
    last, ends = evidence.last_batch, evidence.progress.filter(pc.is_null(evidence.progress["reason"])).select(_OF_PROGRESS)
    since = -1 if evidence.is_full else last - KNOWN_BATCHES
    others = [*here, ("reason", "is null", None), ("batch", "<", last), ("batch", ">", since)]
    found = read_table(evidence.questions, evidence.settings, tables.PROGRESS, _OF_PROGRESS, [others])
    is_new = pc.invert(pc.is_in(ends["batch"], value_set=pc.unique(found["batch"])))
    found = pa.concat_tables([found, ends.filter(is_new)]).sort_by("batch")
    return pa.table([found[n].fill_null(NONE) if n in _TIMES else found[n] for n in _OF_PROGRESS], _OF_PROGRESS)


def _read_bronze(evidence: Evidence, source: str, here: Sequence[tuple[str, str, Any]]) -> pa.Table:
    """Rows of bronze, values only of records with keys that are sampled, or were read back: the model says what was in those."""
    rows = read_table(evidence.questions, evidence.settings, tables.bronze(source), _OF_BRONZE, [here])
    recovered = set(evidence.recovered["merge_key"].to_pylist())
    is_sampled = [evidence.is_sampled(key) or key in recovered for key in rows["merge_key"].to_pylist()]
    values = pc.if_else(pa.array(is_sampled, pa.bool_()), rows["value"], pa.scalar(None, pa.binary()))
    return rows.set_column(6, "value", values)


def _log(evidence: Evidence, tp: TopicPartition, rows: pa.Table, found: Mapping[str, pa.Table]) -> Log:
    offset, firsts, counts = np.unique(numbers(rows["offset"]), return_index=True, return_counts=True)
    repeated = dict(zip(offset[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True))
    rows = rows.take(pa.array(firsts))
    time, is_refused = numbers(rows["event_time"], 0), numbers(pc.is_valid(rows["reason"]))
    kind = np.where(numbers(rows["heartbeat"].fill_null(False)), HEARTBEAT, KEYED)
    told = _of(found[tables.IDLE_HEARTBEATS], "source", tp.source)
    after, spoken_time, decided = (numbers(told[name]) for name in ("after_offset", "event_time", "decided_at"))
    reads, passed, taken_back = [], [], NEVER
    for i, era in reversed(list(enumerate(evidence.eras))):
        begin, until, ended_at = era.begin.get(tp, 0), era.until.get(tp, 0), NEVER if era.ended_at is None else era.ended_at
        is_read = ~is_refused & (offset >= begin)
        for first, end in evidence.skipped(tp, i):
            if first < until:  # what was read there came with a later jump back
                is_read &= (offset < first) | (offset >= end)
        spoken = (after >= begin - 1) & (decided < ended_at)
        at, kinds = np.append(offset[is_read], after[spoken]), np.append(kind[is_read], np.full(spoken.sum(), DECISION))
        order = np.lexsort((kinds == DECISION, at))  # a decision follows the record whose offset it bears
        positions = np.maximum.accumulate(np.append(time[is_read], spoken_time[spoken])[order])
        reads.append(Read(at[order], positions, kinds[order]))
        passed.append(reads[-1].keyed(min(until, taken_back)).offset)
        taken_back = min(taken_back, begin)
    kept = found[tables.SILVER].schema.field(tp.source).type.value_type.field("value").type
    rows = rows.filter(pc.and_(pa.array(~is_refused & (kind == KEYED)), pc.is_valid(rows["value"])))
    columns = (rows[name].to_pylist() for name in ("offset", "merge_key", "event_time", "value"))
    avro, sampled = evidence.avro.get(tp.source), {}
    decode = avro.decoder() if avro else None
    for o, key, t, value in zip(*columns, strict=True):
        read = evidence.epoch_of(tp, o).settings.sources[tp.source].read_type
        sampled[o] = (key, t, value, as_kept(value, read, kept, decode))
    quarantined = numbers(_of(found[tables.QUARANTINE], "source", tp.source)["offset"])
    return Log(offset, repeated, offset[is_refused], quarantined, np.unique(np.concatenate(passed)), reads[::-1], sampled)


def as_kept(value: bytes, read: pa.DataType, kept: pa.DataType, decode: Callable[[bytes], Any] | None = None) -> bytes:
    """What silver keeps of a record's value: its text, or the fields of the schema by which it was read, as JSON; those of other
    schemas, which silver's column has too, are null. `decode`: reads a value that is Avro.
    """
    if not pa.types.is_struct(kept):
        return value
    if decode is not None:
        return _packed(pa.scalar(decode(value), kept).as_py())
    return orjson.dumps(_field(_field(json.loads(value, parse_float=Decimal), read), kept))


def _field(value: Any, kind: pa.DataType) -> Any:
    """The fields of a type; null where a value has none, or another that a schema before this one let pass."""
    if pa.types.is_struct(kind):
        return {field.name: _field(value.get(field.name), field.type) for field in kind} if isinstance(value, dict) else None
    if pa.types.is_list(kind):
        return [_field(each, kind.value_type) for each in value] if isinstance(value, list) else None
    if pa.types.is_map(kind):  # as Arrow has it: pairs
        pairs = value.items() if isinstance(value, dict) else value if isinstance(value, tuple) else None
        return None if pairs is None else tuple((name, _field(each, kind.item_type)) for name, each in pairs)
    if pa.types.is_integer(kind):
        return int(value) if isinstance(value, (int, Decimal)) and not isinstance(value, bool) else None
    if pa.types.is_floating(kind):
        return float(value) if isinstance(value, (int, float, Decimal)) else None
    return value if isinstance(value, bool if pa.types.is_boolean(kind) else str) else None


def _packed(value: Any) -> bytes:
    """A value of a column as text: what JSON has no type for as Python writes it."""
    return orjson.dumps(value, default=str)


def _rows(silver: pa.Table, sources: Sequence[str]) -> Iterator[Row]:
    of_sources = []
    for source in sources:
        lists = silver[source].combine_chunks()
        offsets, times, values = (pc.struct_field(pc.list_flatten(lists), name) for name in ("offset", "event_time", "value"))
        times_ms = (numbers(times.cast(pa.int64())) // 1000).tolist()
        is_typed = pa.types.is_struct(values.type)
        texts = map(_packed, values.to_pylist()) if is_typed else values.cast(pa.binary()).to_pylist()
        found = list(zip(repeat(source), offsets.to_pylist(), times_ms, texts, strict=False))
        ends = np.cumsum(numbers(pc.list_value_length(lists), 0)).tolist()
        of_sources.append([found[a:b] for a, b in zip([0, *ends], ends, strict=False)])
    rows = _tuples(silver, tables.SILVER, "holds", "told")
    for (key, status, first, last, batch, valid, reason, *told), *parts in zip(rows, *of_sources, strict=True):
        status = "reset" if status == "timed_out" and reason == "reset" else status
        yield Row(Outcome(key, status, first, last, tuple(chain(*parts))), batch, valid, reason, *told)
