"""The rows of every table that `verify` compares, by partition. A group of partitions is read at a
time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.audit.evidence import (
    KNOWN_BATCHES,
    NULL,
    PROGRESS_COLUMNS,
    Evidence,
    Ints,
    numbers,
    read_table,
)
from pipelines.audit.verify_values import as_kept, packed
from pipelines.core.input_columns import part_topics
from pipelines.core.inputs import InputId
from pipelines.core.model import NO_TENANT
from pipelines.core.plan import TopicPartition
from pipelines.core.sequence import SortKey, place_of
from pipelines.core.types import DUE, TENANT
from pipelines.lake import tables
from pipelines.lake.epochs import Epoch
from pipelines.lake.inputs import of_topic
from pipelines.lake.retention_bounds import History

GROUPS = 16
"""About how many groups of partitions tables are read in.

One partition is in memory at a time, or that fraction of the lake.
"""


class Outcome(NamedTuple):
    """The outcome of records with a key.

    - `status`: of a merge record `open`, `timed_out`, or `reset` (closed by a jump); `late`;
      `waiting` for its tenant's clock; or PUBLISHED, for a part of a message that was out before.
    - `event_time` and `last` (ms): `last` is the last event time, or the position of a late record.
    - `parts`: of each its source, offset, event time and value, as its text, or as JSON of the
      fields of a schema.
    - `due` and `closed_at` (ms): of a merge record; `closed_at` where it has timed out.
    - `position` (ms): of a waiting record.
    - `says_closing`: of a merge record that has timed out, True where its message says `due` and
      `closed_at`.
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
    says_closing: bool = False

    def described(self, names: Mapping[InputId, str], *, with_closing: bool) -> str:
        """Return the outcome for a sentence, with or without `due` and `closed_at`.

        `names`: those of the inputs.
        """
        parts = []
        for input_id, offset, *values in self.parts[:5]:
            texts = ", ".join(str(value)[:40] for value in values)
            parts.append(f"{names[input_id]}@{offset} ({texts})")
        closing = {"due": self.due, "closed at": self.closed_at} if with_closing else {}
        optional_times = {**closing, "position": self.position}
        times = "".join(
            f", {name} {time}" for name, time in optional_times.items() if time is not None
        )
        return (
            f"{self.status} from {self.event_time} to {self.last}{times} of "
            f"{', '.join(parts)}{', ...' * (len(self.parts) > 5)}"
        )

    def closed_by_reset(self) -> Outcome:
        """Return what is open or waits as a jump closes it."""
        return self._replace(
            status="reset", due=None, closed_at=None, position=None, says_closing=False
        )

    @property
    def place(self) -> SortKey:
        """The place in the order of publication, as the merge record's message says it."""
        due, closed_at = (self.due, self.closed_at) if self.says_closing else (None, None)
        return place_of(self.event_time, self.key, due, closed_at, self.tenant)


class Row(NamedTuple):
    """A row of silver.

    `holds`: True where the user's predicate holds, None where that is not known. `value`: that of
    its message.
    """

    outcome: Outcome
    batch: int
    valid: bool | None
    invalid_reason: str | None
    holds: bool | None
    value: bytes | None

    @property
    def is_finished(self) -> bool:
        """True where the row never changes again."""
        return self.outcome.status not in ("open", "waiting")


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
    - `tenant_times`: by index of a decision, the times (ms) that it has by tenant.
    """

    offset: Ints
    position: Ints
    kind: Ints
    before: int
    event_time: Ints
    tenant: pa.ChunkedArray
    tenant_times: Mapping[int, Mapping[str, int]]

    def keyed(self, until: int) -> tuple[Ints, Ints]:
        """Return offsets and positions of the records with a key, up to an exclusive end offset."""
        is_selected = (self.kind == KEYED) & (self.offset < until)
        return self.offset[is_selected], self.position[is_selected]


class Log(NamedTuple):
    """One topic-partition as bronze has it. All but `repeated`, `read` and `sampled` are offsets.

    - `offset`: all, in order.
    - `repeated`: how often an offset is there, if more than once.
    - `refused`: of refused records.
    - `old`: of records that are older than quarantine's floor, by Kafka's timestamp.
    - `unread`: of records with a value that were neither read nor refused.
    - `quarantined`: of records in quarantine.
    - `consumed`: of records with a key that the generation has made something of.
    - `read`: what the generation has read.
    - `sampled`: of records with sampled keys, by offset, the key, the event time (ms), the value,
      what silver should keep of it, and the tenant.
    - `erased`: of records that `forget` has taken key and value from.
    """

    offset: Ints
    repeated: Mapping[int, int]
    refused: Ints
    old: Ints
    unread: Ints
    quarantined: Ints
    consumed: Ints
    read: ReadLog
    sampled: Mapping[int, tuple[str, int, bytes, bytes, str]]
    erased: Set[int] = frozenset()


@dataclass(frozen=True)
class Partition:
    """All rows of one partition.

    - `rows` and `late`: those of the generation.
    - `published`: finished, valid rows of other generations.
    - `late_before`: the late records of earlier generations, by input and offset.
    - `recovered`: of each message of a lost lake its key, event time, due and closed_at (ms; None
      where it does not say them), and tenant.
    - `progress`: its columns in order of batch, with NULL for a time that is null.
    - `late_anew`: by input and offset, tenants' late records in the first batch of an epoch, some
      of which had waited before it.
    """

    evidence: Evidence
    number: int
    logs: Mapping[TopicPartition, Log]
    rows: Sequence[Row]
    published: Sequence[Row]
    late: Sequence[Outcome]
    late_before: Sequence[tuple[InputId, int]]
    recovered: Sequence[tuple[str, int, int | None, int | None, str]]
    progress: pa.Table
    late_anew: Set[tuple[InputId, int]]

    @property
    def validated(self) -> Partition:
        """The partition without the merge records that were finished before its history begins."""
        since = self.evidence.history.get(self.number)
        if since is None:
            return self
        return replace(
            self, rows=[r for r in self.rows if not r.is_finished or r.batch > since.batch]
        )

    def deciding_epoch(self, row: Row) -> tuple[Epoch, int | None]:
        """Return the epoch by whose rules a row is what it is, and the clock (ms) that decided."""
        epoch, end = self.evidence.through[-1]
        if not row.is_finished:
            return epoch, end.clocks.get(self.number)
        return self.evidence.epochs.of(row.batch), self._clocks.get(
            row.batch, end.clocks.get(self.number, NULL)
        )

    @cached_property
    def _clocks(self) -> Mapping[int, int]:
        """Clocks (ms) by batch."""
        return dict(
            zip(*(self.progress[name].to_pylist() for name in ("batch", "clock")), strict=True)
        )

    def is_judged(self, input_id: InputId, offset: int) -> bool:
        """Return True where a record came since the partition's history begins."""
        since = self.evidence.history.get(self.number)
        return since is None or offset >= since.offsets[input_id]


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


_COLUMNS = {
    tables.SILVER: [
        "merge_key",
        "status",
        "event_time",
        "last_event_time",
        "batch",
        "valid",
        "invalid_reason",
        *DUE.names,
        *TENANT.names,
        "position",
    ],
    tables.LATE: [
        "merge_key",
        "source",
        "topic",
        "offset",
        "event_time",
        "position",
        "value",
        "batch",
        *TENANT.names,
    ],
    tables.QUARANTINE: ["source", "topic", "offset"],
    tables.IDLE_HEARTBEATS: [
        "source",
        "topic",
        "after_offset",
        "event_time",
        "decided_at",
        *TENANT.names,
    ],
    tables.RECOVERED: ["merge_key", "event_time", *DUE.names, *TENANT.names],
}
_OF_BRONZE = [
    "partition",
    "offset",
    "event_time",
    "heartbeat",
    "reason",
    "merge_key",
    "value",
    "kafka_timestamp",
    *TENANT.names,
]
"""Columns that are read of bronze; `has_value` is added."""
_TIMES = ["head", "clock", "position"]


def read_partitions(
    evidence: Evidence, evaluated: Callable[[pa.Table], pa.Table]
) -> Iterator[Partition]:
    """Yield every partition of the topics.

    Outcomes are read before bronze, so that bronze has what they name. `evaluated`: adds the
    columns `holds` and `told` (`Row.value`) to rows of silver.
    """
    sources = list(evidence.settings.sources)
    closing_from = evidence.epochs.closing_from
    first_batches = {epoch.from_batch for epoch in evidence.epochs[1:]}
    more_conditions = {
        tables.LATE: [("batch", "<=", evidence.last_batch)],
        tables.IDLE_HEARTBEATS: [("generation", "=", evidence.generation.number)],
    }
    for first, until in groups(evidence.partitions):
        here = [("partition", ">=", first), ("partition", "<", until)]
        rows_by_table = {tables.RECOVERED: evidence.recovered}
        for table in _COLUMNS.keys() - rows_by_table.keys():
            columns = ["partition", *_COLUMNS[table]]
            columns += sources if table == tables.SILVER else []
            where = [*here, *more_conditions.get(table, ())]
            version = evidence.version if table == tables.SILVER else None
            rows_by_table[table] = read_table(
                evidence.reader, evidence.settings, table, columns, [where], version
            )
        rows_by_table[tables.SILVER] = evaluated(rows_by_table[tables.SILVER])
        rows_by_table[tables.PROGRESS] = _read_progress(evidence, here)
        bronze = {i: _read_bronze(evidence, i, here) for i in evidence.settings.inputs}
        for p in range(first, until):
            partition_rows = {
                table: _of(rows, "partition", p) for table, rows in rows_by_table.items()
            }
            if (history := evidence.history.get(p)) is not None:
                partition_rows[tables.PROGRESS] = partition_rows[tables.PROGRESS].filter(
                    pc.greater(partition_rows[tables.PROGRESS]["batch"], history.batch)
                )
                partition_rows |= {
                    table: _since(partition_rows[table], history)
                    for table in (tables.LATE, tables.QUARANTINE)
                }
            tps = [TopicPartition(input_id, p) for input_id in evidence.settings.inputs]
            logs = {
                tp: _log(evidence, tp, _of(bronze[tp.input], "partition", p), partition_rows)
                for tp in tps
            }
            late = list[Outcome]()
            late_before = list[tuple[InputId, int]]()
            late_anew = set[tuple[InputId, int]]()
            for k, source, topic, o, t, w, v, batch, tenant in _tuples(
                partition_rows[tables.LATE], tables.LATE
            ):
                input_id = InputId(source, topic)
                if not evidence.is_own(batch):
                    late_before.append((input_id, o))
                    continue
                late.append(Outcome(k, "late", t, w, ((input_id, o, t, v),), tenant=tenant))
                if tenant != NO_TENANT and batch in first_batches:
                    late_anew.add((input_id, o))
            recovered = list(_tuples(partition_rows[tables.RECOVERED], tables.RECOVERED))
            silver = partition_rows[tables.SILVER]
            every = list(_rows(silver, evidence.settings.inputs, closing_from))
            rows = [_closed(evidence, p, row) for row in every if evidence.is_own(row.batch)]
            others = [
                row
                for row in every
                if row.valid and row.is_finished and not evidence.is_own(row.batch)
            ]
            progress = partition_rows[tables.PROGRESS]
            yield Partition(
                evidence, p, logs, rows, others, late, late_before, recovered, progress, late_anew
            )


def _closed(evidence: Evidence, partition: int, row: Row) -> Row:
    """Return a row of silver as it will be once what follows from a jump is complete."""
    outcome = row.outcome
    if not evidence.is_closing:
        return row
    if not row.is_finished:
        outcome = outcome.closed_by_reset()
        return row._replace(outcome=outcome, valid=False, invalid_reason="reset")
    if row.valid and evidence.is_unpublished(partition, outcome.place):
        return row._replace(
            outcome=outcome._replace(status="reset"), valid=False, invalid_reason="reset"
        )
    return row


def _of(rows: pa.Table, column: str, value: Any) -> pa.Table:
    return rows.filter(pc.equal(rows[column], value))


def rows_of_input(rows: pa.Table, input_id: InputId) -> pa.Table:
    """Return the rows that are of an input."""
    return _of(_of(rows, "source", input_id.source), "topic", input_id.topic)


def _since(rows: pa.Table, history: History) -> pa.Table:
    """Return the rows of records that came since a history begins."""
    places = zip(*(rows[name].to_pylist() for name in ("source", "topic", "offset")), strict=True)
    is_since = [
        offset >= history.offsets.get(InputId(source, topic), 0) for source, topic, offset in places
    ]
    return rows.filter(pa.array(is_since, pa.bool_()))


def _tuples(rows: pa.Table, table: str, *more: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(rows[name].to_pylist() for name in (*_COLUMNS[table], *more)), strict=True)


def _read_progress(evidence: Evidence, here: Sequence[tuple[str, str, Any]]) -> pa.Table:
    """Return rows of `progress` of the generation: all, or the last ones and those of the ends of
    its epochs.
    """
    first = evidence.generation.from_batch
    last = evidence.last_batch
    ends = evidence.progress
    since = first if evidence.is_full else max(first, last - KNOWN_BATCHES + 1)
    others = [*here, ("batch", ">=", since), ("batch", "<=", last)]
    rows = read_table(
        evidence.reader, evidence.settings, tables.PROGRESS, PROGRESS_COLUMNS, [others]
    )
    is_new = pc.invert(pc.is_in(ends["batch"], value_set=pc.unique(rows["batch"])))
    rows = pa.concat_tables([rows, ends.filter(is_new)]).sort_by("batch")
    return pa.table(
        [rows[n].fill_null(NULL) if n in _TIMES else rows[n] for n in PROGRESS_COLUMNS],
        list(PROGRESS_COLUMNS),
    )


def _read_bronze(
    evidence: Evidence, input_id: InputId, here: Sequence[tuple[str, str, Any]]
) -> pa.Table:
    """Return rows of bronze, with values only where these are compared.

    That is: of records with keys that are sampled or were read back, and of records that may have
    been passed over. The model says what became of those.
    """
    table, where = tables.bronze(input_id.source), of_topic(input_id, [here])
    rows = read_table(evidence.reader, evidence.settings, table, _OF_BRONZE, where)
    recovered = set(evidence.recovered["merge_key"].to_pylist())
    is_sampled = pa.array(
        [evidence.is_sampled(key) or key in recovered for key in rows["merge_key"].to_pylist()],
        pa.bool_(),
    )
    if evidence.since:
        lag = max(epoch.settings.merge.tenant_max_lag_ms or 0 for epoch in evidence.epochs)
        is_sampled = pc.or_(
            is_sampled,
            pc.less(rows["event_time"], max(evidence.since.values()) + lag).fill_null(False),
        )
    values = pc.if_else(is_sampled, rows["value"], pa.scalar(None, pa.binary()))
    has_value = pc.is_valid(rows["value"])
    rows = rows.set_column(rows.column_names.index("value"), "value", values)
    return rows.append_column("has_value", has_value)


def _log(
    evidence: Evidence, tp: TopicPartition, rows: pa.Table, partition_rows: Mapping[str, pa.Table]
) -> Log:
    history = evidence.history.get(tp.partition)
    since = 0 if history is None else history.offsets[tp.input]
    before = (
        NULL
        if history is None or history.positions[tp.input] is None
        else int(history.positions[tp.input] or 0)
    )
    rows = rows.filter(pc.greater_equal(rows["offset"], since))
    offset, firsts, counts = np.unique(
        numbers(rows["offset"]), return_index=True, return_counts=True
    )
    repeated = dict(zip(offset[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True))
    rows = rows.take(pa.array(firsts))
    time = numbers(rows["event_time"], 0)
    is_refused = numbers(pc.is_valid(rows["reason"]))
    erased = frozenset(
        offset[numbers(rows["heartbeat"].fill_null(False)) & ~numbers(rows["has_value"])].tolist()
    )
    # A record that is neither timed nor refused is a tombstone that was skipped.
    is_timed = numbers(pc.is_valid(rows["event_time"]))
    kind = np.where(numbers(rows["heartbeat"].fill_null(False)), HEARTBEAT, KEYED)
    idle_rows = rows_of_input(partition_rows[tables.IDLE_HEARTBEATS], tp.input)
    decisions, tenant_times = _decisions(idle_rows)
    after, decision_time, decided = (
        numbers(decisions[name]) for name in ("after_offset", "event_time", "decided_at")
    )
    begin = max(since, evidence.generation.begin.get(tp, 0))
    end = evidence.end.until.get(tp, 0)
    is_read = is_timed & ~is_refused & (offset >= begin)
    is_in_range = after >= begin - 1
    at = np.append(offset[is_read], after[is_in_range])
    kinds = np.append(kind[is_read], np.full(is_in_range.sum(), DECISION))
    # A decision follows the record whose offset it bears.
    order = np.lexsort((kinds == DECISION, at))
    times = np.append(time[is_read], decision_time[is_in_range])[order]
    positions = np.maximum.accumulate(np.append(before, times))[1:]
    of_none = pa.nulls(int(is_in_range.sum()), pa.string())
    tenants = pa.chunked_array([*rows["tenant"].filter(pa.array(is_read)).chunks, of_none])
    kinds = kinds[order]
    # Among themselves, decisions are in the order of their rows.
    decision_keys = zip(after[is_in_range].tolist(), decided[is_in_range].tolist(), strict=True)
    decision_indices = np.flatnonzero(kinds == DECISION).tolist()
    times_by_index = {
        i: tenant_times.get(key, {}) for i, key in zip(decision_indices, decision_keys, strict=True)
    }
    read = ReadLog(
        at[order], positions, kinds, before, times, tenants.take(pa.array(order)), times_by_index
    )
    out = evidence.out.get(tp, np.array([], np.int64))
    consumed = np.setdiff1d(read.keyed(end)[0], out)
    source = tp.input.source
    old = offset[
        numbers(rows["kafka_timestamp"], 0)
        < evidence.retention_bounds.times.get((tables.QUARANTINE, tp.partition), 0)
    ]
    kept = partition_rows[tables.SILVER].schema.field(source).type.value_type.field("value").type
    unread = offset[~is_timed & ~is_refused & numbers(rows["has_value"]) & (offset >= begin)]
    # Where several sources share a topic (`where`), each passes over the records of the others:
    # they have no time that it can read.
    unread = np.array(
        [o for o in unread if evidence.epoch_of(tp, o).settings.sources[source].where is None],
        np.int64,
    )
    is_merged = is_timed & ~is_refused & (kind == KEYED) & (offset >= begin) & ~np.isin(offset, out)
    rows = rows.filter(pc.and_(pa.array(is_merged), pc.is_valid(rows["value"])))
    names = ("offset", "merge_key", "event_time", "value", "tenant")
    columns = [rows[name].to_pylist() for name in names]
    decoders = [
        schemas[source].decoder_of_accepted() if source in schemas else None
        for schemas in evidence.avro
    ]
    sampled = {}
    for o, key, t, value, tenant in zip(*columns, strict=True):
        epoch = evidence.epoch_of(tp, o)
        decode = decoders[epoch.number]
        content = value if decode is None else decode(value, tp.partition, o)
        sampled[o] = (
            key,
            t,
            value,
            as_kept(content, epoch.settings.sources[source].read_type, kept),
            tenant,
        )
    quarantined = numbers(rows_of_input(partition_rows[tables.QUARANTINE], tp.input)["offset"])
    refused = offset[is_refused]
    if tp in evidence.unnoted.refused:
        first, last = evidence.unnoted.refused[tp]
        quarantined = np.append(
            quarantined, np.setdiff1d(refused[(refused >= first) & (refused < last)], quarantined)
        )
    return Log(offset, repeated, refused, old, unread, quarantined, consumed, read, sampled, erased)


def _decisions(rows: pa.Table) -> tuple[pa.Table, Mapping[tuple[int, int], dict[str, int]]]:
    """Return the idle policy's decisions in their order, and the times (ms) that each has by
    tenant.

    The latter are by `after_offset` and `decided_at`.
    """
    rows = rows.sort_by([("after_offset", "ascending"), ("event_time", "ascending")])
    tenant_times: dict[tuple[int, int], dict[str, int]] = defaultdict(dict)
    for row in rows.filter(pc.is_valid(rows["tenant"])).to_pylist():
        tenant_times[row["after_offset"], row["decided_at"]][row["tenant"]] = row["event_time"]
    return rows.filter(pc.is_null(rows["tenant"])), tenant_times


def _rows(silver: pa.Table, inputs: Sequence[InputId], closing_from: int | None) -> Iterator[Row]:
    """Yield rows of silver.

    `closing_from`: the first batch whose messages say when their merge records were closed.
    """
    parts_by_source = []
    for source in dict.fromkeys(input_id.source for input_id in inputs):
        lists = silver[source].combine_chunks()
        flat = pc.list_flatten(lists)
        offsets, times, values = (
            pc.struct_field(flat, name) for name in ("offset", "event_time", "value")
        )
        times_ms = (numbers(times.cast(pa.int64())) // 1000).tolist()
        is_typed = pa.types.is_struct(values.type)
        texts = (
            map(packed, values.to_pylist()) if is_typed else values.cast(pa.binary()).to_pylist()
        )
        own = [InputId(source, topic) for topic in part_topics(flat, inputs, source).to_pylist()]
        flat_parts = list(zip(own, offsets.to_pylist(), times_ms, texts, strict=False))
        ends = np.cumsum(numbers(pc.list_value_length(lists), 0)).tolist()
        parts_by_source.append([flat_parts[a:b] for a, b in zip([0, *ends], ends, strict=False)])
    rows = _tuples(silver, tables.SILVER, "holds", "told")
    for (key, status, first, last, batch, valid, reason, *closing, holds, value), *parts in zip(
        rows, *parts_by_source, strict=True
    ):
        due, closed_at, tenant, position = closing
        status = "reset" if status == "timed_out" and reason == "reset" else status
        says_closing = closed_at is not None and closing_from is not None and batch >= closing_from
        outcome = Outcome(
            key,
            status,
            first,
            last,
            tuple(chain(*parts)),
            due,
            closed_at,
            tenant,
            position,
            says_closing,
        )
        yield Row(outcome, batch, valid, reason, holds, value)
