"""The rows of every table that `verify` compares, by partition. A group of partitions is read at a
time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit.evidence import (
    NULL,
    PROGRESS_COLUMNS,
    Evidence,
    Ints,
    numbers,
    read_table,
)
from watersmeet.audit.verify_values import as_kept, packed
from watersmeet.core.input_columns import part_topics
from watersmeet.core.inputs import InputId
from watersmeet.core.model import NO_TENANT
from watersmeet.core.plan import TopicPartition
from watersmeet.core.repeated import ID, RECORD_IDS
from watersmeet.core.sequence import CORRECTED, MERGED, Place
from watersmeet.core.types import DUE, TENANT
from watersmeet.lake import tables
from watersmeet.lake.epochs import Epoch
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.retention_bounds import History
from watersmeet.lake.table_reader import Condition

GROUPS = 16
"""About how many groups of partitions tables are read in.

One partition is in memory at a time, or that fraction of the lake.
"""


LATE: Final = "late"
DUPLICATE: Final = "duplicate"
EXCESS: Final = "excess"
PASSED: Final = "passed"
"""Outcomes of records that are not merged, as silver's `status` has them."""


def repeated(record_id: str, of_offset: int) -> str:
    """Return what a duplicate has in place of a value: its id, and the offset of the part."""
    return f"the id {record_id!r} of offset {of_offset}"


class Outcome(NamedTuple):
    """The outcome of records with a key.

    - `status`: of a merge record `open`, `timed_out`, or `reset` (closed by a jump); of a record
      `waiting` for its tenant's clock, LATE, DUPLICATE, EXCESS, or PASSED.
    - `event_time` and `last` (ms): `last` is the last event time, or the position of a record that
      is late or passed.
    - `parts`: of each its source, offset, event time and value, as its text, or as JSON of the
      fields of a schema. Of a duplicate, `repeated` stands for the value, and what is passed or
      excess has none.
    - `due` and `closed_at` (ms): of a merge record; `closed_at` where it has timed out. Of a late
      record, `due` is its `u`.
    - `position` (ms): of a waiting record.
    """

    key: str
    status: str
    event_time: int
    last: int
    parts: tuple[tuple[Any, ...], ...]
    due: int | None = None
    closed_at: int | None = None
    tenant: str = NO_TENANT
    position: int | None = None

    def described(self, names: Mapping[InputId, str]) -> str:
        """Return the outcome for a sentence; `names`: those of the inputs."""
        parts = []
        for input_id, offset, *values in self.parts[:5]:
            texts = ", ".join(str(value)[:40] for value in values)
            parts.append(f"{names.get(input_id, input_id.topic)}@{offset} ({texts})")
        optional = {"due": self.due, "closed at": self.closed_at, "position": self.position}
        times = "".join(f", {name} {time}" for name, time in optional.items() if time is not None)
        return (
            f"{self.status} from {self.event_time} to {self.last}{times} of "
            f"{', '.join(parts)}{', ...' * (len(self.parts) > 5)}"
        )

    @property
    def place(self) -> Place:
        """The place in the order of publication, with NULL for a time that is null."""
        due, closed_at = (NULL if time is None else time for time in (self.due, self.closed_at))
        row = {"closed_at": closed_at, "tenant": self.tenant, "due": due, "merge_key": self.key}
        return MERGED.place(row)


class Row(NamedTuple):
    """A row of silver.

    `refusal`: why the user's predicate refuses it, None where it does not. `value`: that of its
    message. `ids`: of each part with an id its input, offset, event time (ms) and id, and of each
    duplicate the offset of the part instead of the id.
    """

    outcome: Outcome
    batch: int
    valid: bool | None
    invalid_reason: str | None
    refusal: str | None
    value: bytes | None
    ids: tuple[tuple[InputId, int, int, str | int], ...] = ()

    @property
    def key(self) -> str:
        """The key of the merge record."""
        return self.outcome.key

    @property
    def tenant(self) -> str:
        """The tenant of the merge record; empty without tenants."""
        return self.outcome.tenant

    @property
    def is_finished(self) -> bool:
        """True where the row never changes again."""
        return self.outcome.status not in ("open", "waiting")

    @property
    def has_message(self) -> bool:
        """True where the merge record has a message, or will have one."""
        return self.outcome.status == "timed_out" and bool(self.valid)

    @property
    def place(self) -> Place:
        """The place in the order of publication."""
        return self.outcome.place


class CorrectionRow(NamedTuple):
    """A row of `corrections`.

    - `columns`: by name, without the parts; times in ms.
    - `parts`: of each its source, offset, event time and value, as in `Outcome`.
    - `refusal` and `value`: as in `Row`, of the content with all parts.
    """

    columns: Mapping[str, Any]
    parts: tuple[tuple[Any, ...], ...]
    refusal: str | None
    value: bytes | None

    @property
    def key(self) -> str:
        """The key of the merge record."""
        return str(self.columns["merge_key"])

    @property
    def tenant(self) -> str:
        """The tenant of the merge record; empty without tenants."""
        return str(self.columns["tenant"])

    @property
    def has_content(self) -> bool:
        """False where the merge record has as many versions as it may: it is no correction."""
        return bool(self.columns["version"])

    @property
    def batch(self) -> int:
        """The batch of silver that has settled the late record."""
        return int(self.columns["batch"])

    @property
    def late(self) -> tuple[InputId, int]:
        """The late record that makes the correction."""
        return InputId(self.columns["source"], self.columns["topic"]), self.columns["offset"]

    @property
    def has_message(self) -> bool:
        """True where the correction has a message, or will have one."""
        return bool(self.columns["has_message"])

    @property
    def place(self) -> Place:
        """The place in the order of corrections."""
        return CORRECTED.place(self.columns)


DECISION, HEARTBEAT, KEYED = range(3)


class ReadLog(NamedTuple):
    """Records and idle decisions of a topic-partition that a generation could read, up to bronze's
    end.

    Refused records are left out.

    - `offset`: offsets in order; a decision of the idle policy has the offset that it follows.
    - `position`: positions (ms).
    - `kind`: DECISION, HEARTBEAT or KEYED.
    - `before`: the position that the topic-partition begins with.
    - `event_time`: event times (ms).
    - `tenant`: the tenant of each record; null for a heartbeat of none, and for a decision.
    - `tenant_times`: of each decision, the times (ms) that it has by tenant.
    """

    offset: Ints
    position: Ints
    kind: Ints
    before: int
    event_time: Ints
    tenant: pa.ChunkedArray
    tenant_times: Sequence[Mapping[str, int]]


class Sampled(NamedTuple):
    """A record with a sampled key: its value, and `kept`, what silver should keep of that."""

    key: str
    value: bytes
    kept: bytes
    tenant: str
    id: str | None


class Log(NamedTuple):
    """One topic-partition as bronze has it. All but `repeated`, `read` and `sampled` are offsets.

    - `begin`: the first that the generation is judged by.
    - `offset`: all, in order.
    - `repeated`: how often an offset is there, if more than once.
    - `refused`: of refused records.
    - `unread`: of records with a value that were neither read nor refused.
    - `consumed`: of records with a key that the generation has made something of.
    - `decided`: of the records that decisions follow, each with the batch that they let go on
      (NULL: none).
    - `read`: what the generation has read.
    - `sampled`: the records with sampled keys, by offset.
    - `erased`: of records that `forget` has taken key and value from.
    """

    begin: int
    offset: Ints
    repeated: Mapping[int, int]
    refused: Ints
    unread: Sequence[int]
    consumed: Ints
    decided: Sequence[tuple[int, int]]
    read: ReadLog
    sampled: Mapping[int, Sampled]
    erased: Set[int]


@dataclass(frozen=True)
class Partition:
    """All rows of one partition.

    - `rows`: merge records of the generation, and records that wait.
    - `not_merged`: its outcomes of other records, each with its batch; those of duplicates of merge
      records that no clock has closed with that of these.
    - `excess_before`: the tenant, key and event time (ms) of each record of a merge record that is
      too large, from before its history begins.
    - `late_duplicates`: of its late records that make no correction the tenant, key and place, and
      the offset of the part with its id.
    - `published`: rows of other generations that have a message.
    - `corrections`: those of the generation, and of earlier ones.
    - `late`: by input, the offsets and batches of the rows of `late` up to the generation's last
      batch, also of earlier ones.
    - `recovered`: of each message of a lost lake its key, event time, due and closed_at (ms), and
      tenant.
    - `progress`: its columns in order of batch, with NULL for a time that is null.
    """

    evidence: Evidence
    number: int
    logs: Mapping[TopicPartition, Log]
    rows: Sequence[Row]
    not_merged: Sequence[tuple[Outcome, int]]
    excess_before: Sequence[tuple[str, str, int]]
    late_duplicates: Sequence[tuple[InputId, int, str, str, int]]
    published: Sequence[Row]
    corrections: Sequence[CorrectionRow]
    late: Mapping[InputId, tuple[Ints, Ints]]
    recovered: Sequence[tuple[str, int, int, int, str]]
    progress: pa.Table

    @property
    def validated(self) -> Partition:
        """The partition without the merge records that were finished before its history begins."""
        since = self.evidence.history_of(self.number).batch
        return replace(self, rows=[r for r in self.rows if not r.is_finished or r.batch > since])

    def deciding_epoch(self, row: Row) -> tuple[Epoch, int | None]:
        """Return the epoch by whose rules a row is what it is, and the clock (ms) that decided."""
        epoch, end = self.evidence.through[-1]
        if not row.is_finished:
            return epoch, end.clocks.get(self.number)
        return self.evidence.epochs.of(row.batch), self.clocks.get(
            row.batch, end.clocks.get(self.number, NULL)
        )

    def clock_before(self, row: Row) -> int | None:
        """Return the clock (ms) after the batch before a finished row's own, by the same rules;
        None where there is none.
        """
        if not row.is_finished or self.evidence.epochs.of(row.batch).from_batch == row.batch:
            return None
        before = self.clocks.get(row.batch - 1, NULL)
        return None if before == NULL else before

    @cached_property
    def clocks(self) -> Mapping[int, int]:
        """Clocks (ms) by batch, of those that were read."""
        return dict(
            zip(*(self.progress[name].to_pylist() for name in ("batch", "clock")), strict=True)
        )

    @cached_property
    def begins(self) -> Mapping[InputId, int]:
        """The offsets at which the partition's history begins, by input; 0 where none is given."""
        return self.evidence.history_of(self.number).offsets

    def excess_of(self, row: Row) -> list[int]:
        """Return the event times (ms) of a too large merge record's records from before the
        partition's history begins.
        """
        first, last = row.outcome.event_time, row.outcome.last
        return [
            time
            for tenant, key, time in self.excess_before
            if (tenant, key) == (row.tenant, row.key) and first <= time <= last
        ]

    def is_judged(self, input_id: InputId, offset: int) -> bool:
        """Return True where a record came since the partition's history begins."""
        return offset >= self.begins.get(input_id, 0)


def place(partition: int, key: str, event_time: int | None = None, tenant: str = NO_TENANT) -> str:
    """Return a merge record's coordinates, for a sentence; event time in ms."""
    tenant_text = "" if tenant == NO_TENANT else f"tenant {tenant!r}, "
    return f"silver: partition {partition}, {tenant_text}key {key!r}" + (
        "" if event_time is None else f", event_time {event_time}"
    )


def groups(partitions: int) -> list[tuple[int, int]]:
    """Return the ranges `[first, until)` of partitions that are read together."""
    size = -(-partitions // GROUPS)
    return [(first, min(first + size, partitions)) for first in range(0, partitions, max(1, size))]


_RECORD = ("merge_key", "event_time", *TENANT.names)
_INPUT = ("source", "topic")
_JUDGED = ("batch", "valid", "invalid_reason")
_NOT_MERGED = "not merged"
_COLUMNS: Mapping[str, Sequence[str]] = {
    tables.SILVER: (*_RECORD, "last_event_time", "position", "status", *DUE.names, *_JUDGED),
    _NOT_MERGED: (
        *("status", *_RECORD, *_INPUT, "offset", "position", "value", "u", ID.name, "of_offset"),
        *("is_late", "batch"),
    ),
    tables.CORRECTIONS: (
        *("generation", *_RECORD, *_INPUT, "offset", *_JUDGED, "is_late_born", "version"),
        *("position", "u", "settled_at", *DUE.names, "first_event_time", "last_event_time"),
        *("id", "has_message"),
    ),
    tables.IDLE_HEARTBEATS: (
        *(*_INPUT, "after_offset", "event_time", "decided_at", "batch", *TENANT.names),
    ),
}
_OF_BRONZE = (*_RECORD, "offset", "heartbeat", "reason", "value")
"""Columns that are read of bronze; `has_value` is added."""
_OF_MESSAGES = ("merge_key", "event_time", *DUE.names, *TENANT.names)
_TIMES = ("head", "clock", "position")


def read_partitions(
    evidence: Evidence, evaluated: Callable[[pa.Table], pa.Table]
) -> Iterator[Partition]:
    """Yield every partition of the topics.

    `evaluated`: adds the columns `refusal` and `told` (`Row.value`) to rows of silver.
    """
    ids = [RECORD_IDS.name] if evidence.settings.has_ids else []
    parts = (*evidence.settings.sources, *ids)
    more_columns = {tables.SILVER: parts, tables.CORRECTIONS: parts}
    up_to_last: Condition = ("batch", "<=", evidence.last_batch)
    conditions: Mapping[str, Sequence[Condition]] = {
        tables.SILVER: [("status", "in", ["open", "waiting", "timed_out"])],
        _NOT_MERGED: [("status", "in", [LATE, DUPLICATE, EXCESS, PASSED]), up_to_last],
        tables.CORRECTIONS: [up_to_last],
        tables.IDLE_HEARTBEATS: [("generation", "=", evidence.generation.number)],
    }
    for first, until in groups(evidence.partitions):
        here: list[Condition] = [("partition", ">=", first), ("partition", "<", until)]
        rows: dict[str | InputId, pa.Table] = {tables.PASSED: evidence.recovered}
        for name, columns in _COLUMNS.items():
            table = tables.SILVER if name == _NOT_MERGED else name
            names = ["partition", *columns, *more_columns.get(name, ())]
            where = [[*here, *conditions[name]]]
            rows[name] = read_table(evidence.reader, evidence.settings, table, names, where)
        rows[tables.SILVER] = evaluated(rows[tables.SILVER])
        rows[tables.CORRECTIONS] = _evaluated(rows[tables.CORRECTIONS], parts, evaluated)
        rows[tables.PROGRESS] = _read_progress(evidence, here)
        for input_id in evidence.settings.inputs:
            rows[input_id] = _read_bronze(evidence, input_id, here)
        for p in range(first, until):
            yield _partition(
                evidence, p, {name: _of(table, "partition", p) for name, table in rows.items()}
            )


def _partition(evidence: Evidence, number: int, rows: dict[str | InputId, pa.Table]) -> Partition:
    """Return a partition; `rows`: by table, those of bronze by input."""
    history = evidence.history_of(number)
    progress = rows[tables.PROGRESS]
    excess = _of(rows[_NOT_MERGED], "status", EXCESS)
    not_merged = _since(rows[_NOT_MERGED], history)
    late_duplicates = not_merged.filter(not_merged["is_late"].fill_null(False))
    names = (*_INPUT, "offset", *TENANT.names, "merge_key", "of_offset", "batch")
    late = _of(not_merged, "status", LATE)
    of_inputs = {i: rows_of_input(late, i) for i in evidence.settings.inputs}
    every = list(_rows(rows[tables.SILVER], evidence))
    tps = [TopicPartition(input_id, number) for input_id in evidence.settings.inputs]
    return Partition(
        evidence,
        number,
        logs={tp: _log(evidence, tp, rows) for tp in tps},
        rows=[_closed(evidence, number, row) for row in every if evidence.is_own(row.batch)],
        not_merged=[
            each
            for each in (*_not_merged(not_merged), *_repeated(every, history))
            if evidence.is_own(each[1])
        ],
        excess_before=[*_tuples(_before(excess, history), ("tenant", "merge_key", "event_time"))],
        late_duplicates=[
            (InputId(source, topic), *values)
            for source, topic, *values, batch in _tuples(late_duplicates, names)
            if evidence.is_own(batch)
        ],
        published=[r for r in every if r.has_message and not evidence.is_own(r.batch)],
        corrections=list(_corrections(rows[tables.CORRECTIONS], evidence)),
        late={i: (numbers(r["offset"]), numbers(r["batch"])) for i, r in of_inputs.items()},
        recovered=list(_tuples(rows[tables.PASSED], _OF_MESSAGES)),
        progress=progress.filter(pc.greater(progress["batch"], history.batch)),
    )


def _not_merged(rows: pa.Table) -> Iterator[tuple[Outcome, int]]:
    """Yield what became of each record that is no part, with its batch.

    Late duplicates are left out: they are late.
    """
    for row in _tuples(rows, _COLUMNS[_NOT_MERGED]):
        status, key, time, tenant, source, topic, offset, position, value, u = row[:10]
        record_id, of_offset, is_late, batch = row[10:]
        if is_late:
            continue
        record: tuple[Any, ...] = (InputId(source, topic), offset, time)
        if status == LATE:
            record = (*record, value, record_id)
        elif status == DUPLICATE:
            record = (*record, repeated(record_id, of_offset))
        if status in (DUPLICATE, EXCESS):
            position = time
        yield Outcome(key, status, time, position, (record,), u, tenant=tenant), batch


def _repeated(rows: Iterable[Row], history: History) -> Iterator[tuple[Outcome, int]]:
    """Yield the duplicates of merge records that no clock has closed, each with the batch of its
    merge record. The others have rows of their own.
    """
    for row in rows:
        if row.outcome.closed_at is not None:
            continue
        ids = {(at, offset): text for at, offset, _, text in row.ids if isinstance(text, str)}
        for input_id, offset, time, of_offset in row.ids:
            if isinstance(of_offset, str) or offset < history.offsets.get(input_id, 0):
                continue
            text = repeated(ids.get((input_id, of_offset), ""), of_offset)
            part = input_id, offset, time, text
            yield (
                Outcome(row.key, DUPLICATE, time, time, (part,), tenant=row.tenant),
                row.batch,
            )


def as_ended(evidence: Evidence, partition: int, outcome: Outcome) -> Outcome:
    """Return an outcome as the jump that ended its generation leaves it.

    What was open, what waited, and what was finished and not out is closed.
    """
    if evidence.following is None:
        return outcome
    if outcome.status in ("open", "waiting"):
        last = outcome.event_time if outcome.status == "waiting" else outcome.last
        return outcome._replace(status="reset", last=last, due=None, closed_at=None, position=None)
    is_closed = outcome.status == "timed_out" and evidence.is_unpublished(partition, outcome.place)
    return outcome._replace(status="reset") if is_closed else outcome


def _closed(evidence: Evidence, partition: int, row: Row) -> Row:
    """Return a row of silver as it will be once what follows from a jump is complete."""
    outcome = as_ended(evidence, partition, row.outcome)
    if not evidence.is_closing or outcome == row.outcome or (row.is_finished and not row.valid):
        return row
    return row._replace(outcome=outcome, valid=False, invalid_reason="reset")


def _of(rows: pa.Table, column: str, value: Any) -> pa.Table:
    return rows.filter(pc.equal(rows[column], value))


def rows_of_input(rows: pa.Table, input_id: InputId) -> pa.Table:
    """Return the rows that are of an input."""
    return _of(_of(rows, "source", input_id.source), "topic", input_id.topic)


def _evaluated(
    corrections: pa.Table, parts: Sequence[str], evaluated: Callable[[pa.Table], pa.Table]
) -> pa.Table:
    """Return corrections with `refusal` and `told`; `publish` sees the times of all parts.

    `parts`: the columns with parts, and with their ids.
    """
    names = ["partition", "merge_key", *TENANT.names, "last_event_time", "batch", *parts]
    rows = corrections.select(names)
    rows = rows.append_column("event_time", corrections["first_event_time"])
    rows = rows.append_column("status", pa.repeat(pa.scalar("timed_out"), rows.num_rows))
    rows = evaluated(rows)
    for name in ("refusal", "told"):
        corrections = corrections.append_column(name, rows[name])
    return corrections


def _since(rows: pa.Table, history: History) -> pa.Table:
    """Return the rows of records that came since a history begins."""
    for (source, topic), since in history.offsets.items():
        is_of = pc.and_(pc.equal(rows["source"], source), pc.equal(rows["topic"], topic))
        rows = rows.filter(pc.invert(pc.and_(is_of, pc.less(rows["offset"], since))))
    return rows


def _before(rows: pa.Table, history: History) -> pa.Table:
    """Return the rows of records that came before a history begins."""
    before = [rows.slice(0, 0)]
    for (source, topic), since in history.offsets.items():
        its = rows_of_input(rows, InputId(source, topic))
        before.append(its.filter(pc.less(its["offset"], since)))
    return pa.concat_tables(before)


def _tuples(rows: pa.Table, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].to_pylist() for name in columns), strict=True)


def _read_progress(evidence: Evidence, here: Sequence[Condition]) -> pa.Table:
    """Return rows of `progress` of the generation: all, or the last ones and those of the ends of
    its epochs.
    """
    ends = evidence.progress
    others = [*here, ("batch", ">=", evidence.first_known), ("batch", "<=", evidence.last_batch)]
    rows = read_table(
        evidence.reader, evidence.settings, tables.PROGRESS, PROGRESS_COLUMNS, [others]
    )
    is_new = pc.invert(pc.is_in(ends["batch"], value_set=pc.unique(rows["batch"])))
    rows = pa.concat_tables([rows, ends.filter(is_new)]).sort_by("batch")
    return pa.table(
        [rows[n].fill_null(NULL) if n in _TIMES else rows[n] for n in PROGRESS_COLUMNS],
        list(PROGRESS_COLUMNS),
    )


def _read_bronze(evidence: Evidence, input_id: InputId, here: Sequence[Condition]) -> pa.Table:
    """Return rows of bronze, with values only of records with sampled keys."""
    has_ids = evidence.settings.has_ids
    columns = ["partition", *_OF_BRONZE, *([ID.name] if has_ids else [])]
    table = tables.bronze(input_id.source)
    where = of_topic(input_id, [here])
    rows = read_table(evidence.reader, evidence.settings, table, columns, where)
    if not has_ids:
        rows = rows.append_column(ID, pa.nulls(rows.num_rows, ID.type))
    is_sampled = pa.array(map(evidence.is_sampled, rows["merge_key"].to_pylist()), pa.bool_())
    values = pc.if_else(is_sampled, rows["value"], pa.scalar(None, pa.binary()))
    has_value = pc.is_valid(rows["value"])
    rows = rows.set_column(rows.column_names.index("value"), "value", values)
    return rows.append_column("has_value", has_value)


def _log(
    evidence: Evidence, tp: TopicPartition, partition_rows: Mapping[str | InputId, pa.Table]
) -> Log:
    since = evidence.history_of(tp.partition).offsets.get(tp.input, 0)
    rows = partition_rows[tp.input]
    rows = rows.filter(pc.greater_equal(rows["offset"], since))
    offset, firsts, counts = np.unique(
        numbers(rows["offset"]), return_index=True, return_counts=True
    )
    rows = rows.take(pa.array(firsts))
    is_heartbeat = numbers(rows["heartbeat"].fill_null(False))
    is_refused = numbers(pc.is_valid(rows["reason"]))
    # A record that is neither timed nor refused is a tombstone that was skipped.
    is_timed = numbers(pc.is_valid(rows["event_time"]))
    has_value = numbers(rows["has_value"])
    begin = max(since, evidence.generation.begin.get(tp, 0))
    is_own = offset >= begin
    is_read = is_timed & ~is_refused & is_own
    decisions = rows_of_input(partition_rows[tables.IDLE_HEARTBEATS], tp.input)
    own_decisions = decisions.filter(pc.greater_equal(decisions["after_offset"], begin - 1))
    read = _read_log(evidence, tp, rows.filter(pa.array(is_read)), own_decisions)
    keyed = offset[is_read & ~is_heartbeat]
    values = partition_rows[tables.SILVER].schema.field(tp.input.source).type.value_type
    is_sampled = pc.and_(pa.array(np.isin(offset, keyed)), pc.is_valid(rows["value"]))
    sampled = _sampled(evidence, tp, rows.filter(is_sampled), values.field("value").type)
    # Where several sources share a topic (`where`), each passes over the records of the others:
    # they have no time that it can read.
    source = tp.input.source
    unread = [
        o
        for o in offset[~is_timed & ~is_refused & has_value & is_own].tolist()
        if evidence.epoch_of(tp, o).settings.sources[source].where is None
    ]
    decided = (numbers(own_decisions[name], NULL).tolist() for name in ("after_offset", "batch"))
    return Log(
        begin=begin,
        offset=offset,
        repeated=dict(zip(offset[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True)),
        refused=offset[is_refused],
        unread=unread,
        consumed=keyed[keyed < evidence.end.until.get(tp, 0)],
        decided=list(zip(*decided, strict=True)),
        read=read,
        sampled=sampled,
        erased=frozenset(offset[is_heartbeat & ~has_value].tolist()),
    )


def _read_log(
    evidence: Evidence, tp: TopicPartition, rows: pa.Table, decisions: pa.Table
) -> ReadLog:
    """Return what a generation reads of a topic-partition: its own records, in order of offset, and
    decisions.

    A decision follows the record whose offset it bears. Among themselves, decisions are in the
    order of their rows.
    """
    position = evidence.history_of(tp.partition).positions.get(tp.input)
    before = NULL if position is None else position
    decisions, tenant_times = _decisions(decisions)
    offsets = np.append(numbers(rows["offset"]), numbers(decisions["after_offset"]))
    of_rows = np.where(numbers(rows["heartbeat"].fill_null(False)), HEARTBEAT, KEYED)
    kinds = np.append(of_rows, np.full(len(decisions), DECISION))
    order = np.lexsort((kinds == DECISION, offsets))
    times = np.append(numbers(rows["event_time"]), numbers(decisions["event_time"]))[order]
    tenants = pa.chunked_array([*rows["tenant"].chunks, pa.nulls(len(decisions), pa.string())])
    return ReadLog(
        offsets[order],
        np.maximum.accumulate(np.append(before, times))[1:],
        kinds[order],
        before,
        times,
        tenants.take(pa.array(order)),
        tenant_times,
    )


def _sampled(
    evidence: Evidence, tp: TopicPartition, rows: pa.Table, kept: pa.DataType
) -> dict[int, Sampled]:
    """Return records with sampled keys; `kept`: the type of silver's values."""
    source = tp.input.source
    decoders = [
        schemas[source].decoder_of_accepted() if source in schemas else None
        for schemas in evidence.avro
    ]
    sampled = {}
    names = ("offset", "merge_key", "value", "tenant", ID.name)
    columns = (rows[name].to_pylist() for name in names)
    for o, key, value, tenant, record_id in zip(*columns, strict=True):
        epoch = evidence.epoch_of(tp, o)
        decode = decoders[epoch.number]
        content = value if decode is None else decode(value, tp.partition, o)
        read_type = epoch.settings.sources[source].read_type
        sampled[o] = Sampled(key, value, as_kept(content, read_type, kept), tenant, record_id)
    return sampled


def _decisions(rows: pa.Table) -> tuple[pa.Table, list[dict[str, int]]]:
    """Return the idle policy's decisions in their order, and of each the times (ms) by tenant."""
    rows = rows.sort_by([("after_offset", "ascending"), ("event_time", "ascending")])
    tenant_times: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for row in rows.filter(pc.is_valid(rows["tenant"])).to_pylist():
        tenant_times[row["after_offset"], row["decided_at"]][row["tenant"]] = row["event_time"]
    decisions = rows.filter(pc.is_null(rows["tenant"]))
    places = zip(
        *(decisions[name].to_pylist() for name in ("after_offset", "decided_at")), strict=True
    )
    return decisions, [tenant_times.get(place, {}) for place in places]


def _ids(silver: pa.Table) -> Iterator[tuple[tuple[InputId, int, int, str | int], ...]]:
    """Yield the ids of each row of silver, as `Row` has them."""
    if RECORD_IDS.name not in silver.column_names:
        yield from [()] * silver.num_rows
        return
    for entries in silver[RECORD_IDS.name].to_pylist():
        yield tuple(
            (
                InputId(entry["source"], entry["topic"]),
                entry["offset"],
                round(entry["event_time"].timestamp() * 1000),
                entry["id"] if entry["of_offset"] is None else entry["of_offset"],
            )
            for entry in entries or ()
        )


def parts_by_source(rows: pa.Table, evidence: Evidence) -> list[list[list[tuple[Any, ...]]]]:
    """Return, by source and row, the parts of rows of silver or of corrections.

    A part is its input, offset, event time (ms) and value.
    """
    by_source = []
    for source in evidence.settings.sources:
        lists = rows[source].combine_chunks()
        flat = pc.list_flatten(lists)
        offsets, times, values = (
            pc.struct_field(flat, name) for name in ("offset", "event_time", "value")
        )
        times_ms = (numbers(times.cast(pa.int64())) // 1000).tolist()
        is_typed = pa.types.is_struct(values.type)
        texts = (
            map(packed, values.to_pylist()) if is_typed else values.cast(pa.binary()).to_pylist()
        )
        topics = part_topics(flat, evidence.settings.inputs, source).to_pylist()
        own = [InputId(source, topic) for topic in topics]
        flat_parts = list(zip(own, offsets.to_pylist(), times_ms, texts, strict=False))
        ends = np.cumsum(numbers(pc.list_value_length(lists), 0)).tolist()
        by_source.append([flat_parts[a:b] for a, b in zip([0, *ends], ends, strict=False)])
    return by_source


def _rows(silver: pa.Table, evidence: Evidence) -> Iterator[Row]:
    """Yield rows of silver."""
    by_source = parts_by_source(silver, evidence)
    rows = _tuples(silver, (*_COLUMNS[tables.SILVER], "refusal", "told"))
    for row, ids, *parts in zip(rows, _ids(silver), *by_source, strict=True):
        key, first, tenant, last, position, status, due, closed_at, batch, valid, reason = row[:-2]
        outcome = Outcome(
            key,
            "reset" if status == "timed_out" and reason == "reset" else status,
            first,
            last,
            tuple(chain(*parts)),
            due,
            closed_at,
            tenant,
            position,
        )
        refusal, value = row[-2:]
        yield Row(outcome, batch, valid, reason, refusal, value, ids)


def _corrections(rows: pa.Table, evidence: Evidence) -> Iterator[CorrectionRow]:
    """Yield rows of `corrections`."""
    names = _COLUMNS[tables.CORRECTIONS]
    by_source = parts_by_source(rows, evidence)
    for values, *parts in zip(_tuples(rows, (*names, "refusal", "told")), *by_source, strict=True):
        *columns, refusal, value = values
        yield CorrectionRow(
            dict(zip(names, columns, strict=True)), tuple(chain(*parts)), refusal, value
        )
