"""The merge: takes records and open merge records, returns the merge records that change.

It takes any number of rows. The rules are those of `core.model`, the oracle that these functions
are compared with. Everything happens in event time and per partition. Rows of several partitions
may come in one call. Times are numpy columns of epoch milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.avro_schema import AvroSchema
from pipelines.core.columns import (
    MAX_TIME,
    NULL_TIME,
    Booleans,
    Int64s,
    both,
    in_groups,
    in_lists,
    int64s,
    lengths,
    looked_up,
    time_column,
    times_ms,
)
from pipelines.core.idle import IdleDecision
from pipelines.core.inputs import of_source, source_of, topic_of
from pipelines.core.joining import OpenRecordTimes, session_index
from pipelines.core.message import as_read, exceeds
from pipelines.core.plan import BatchPlan, Rules, TopicPartition
from pipelines.core.positions import NAMES, Positioned
from pipelines.core.reading import RECORD_BYTES
from pipelines.core.tenants import HEADS, TenantClocks
from pipelines.core.types import DUE, TENANT, TIME, schema_of
from pipelines.core.values import typed_values
from pipelines.core.waiting import found_in, gone_rows, placed, release

RECORD_SCHEMA = schema_of(
    "source string, topic string, partition int, offset bigint, merge_key string, event_time "
    "timestamp, heartbeat boolean, "
    "value binary"
)
"""The columns of bronze that are read. `source` is the name of the input (`core.inputs`)."""


def record_schema(*, has_tenants: bool = False) -> pa.Schema:
    """Return the columns of `RECORD_SCHEMA`, and with tenants that of each record's tenant."""
    return pa.schema([*RECORD_SCHEMA, *TENANT]) if has_tenants else RECORD_SCHEMA


@dataclass(frozen=True)
class Batch:
    """A batch of silver: its plan, its rules, and all else that the merge needs beside the rows.

    - `value_types`: by source, in the order of silver's columns, the Arrow type of a value.
    - `idle`: the idle policy's decisions by topic-partition.
    - `max_bytes`: the maximum size of a message in bytes; None where its value is an expression of
      the configuration.
    - `read_types`: for sources whose schema has had more fields, the types by which values are read
      and messages written.
    - `avro`: by source whose values are Avro, their schema.
    - `has_due`: True where silver has the columns `DUE`.
    - `begins_epoch`: True for the first batch of an epoch. By its rules, what waits for its tenant
      is judged again.
    - `topics`: the inputs, where a source has several topics.
    - `out`: by topic-partition, the offsets of records that are passed over.
    """

    plan: BatchPlan
    value_types: Mapping[str, pa.DataType]
    rules: Rules
    idle: Mapping[TopicPartition, Sequence[IdleDecision]] = field(default_factory=dict)
    max_bytes: int | None = None
    read_types: Mapping[str, pa.DataType] = field(default_factory=dict)
    avro: Mapping[str, AvroSchema] = field(default_factory=dict)
    has_due: bool = False
    begins_epoch: bool = False
    topics: Sequence[str] = ()
    out: Mapping[TopicPartition, Int64s] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        """The sources, in the order of silver's columns."""
        return list(self.value_types)

    @property
    def inputs(self) -> Sequence[str]:
        """The inputs, in the order of their sources."""
        return self.topics or self.sources

    @property
    def with_topics(self) -> frozenset[str]:
        """The sources that have several topics. Their parts say which topic they are from."""
        return frozenset(source_of(name) for name in self.inputs if topic_of(name))

    @property
    def has_tenants(self) -> bool:
        """True where each record belongs to a tenant, which has a clock of its own."""
        return self.rules.lag_ms is not None

    def kept(self, times: Int64s) -> Int64s:
        """Return times (ms) of merge records as silver keeps them.

        They are `NULL_TIME` as long as there has never been anything but timeouts.
        """
        return np.full(len(times), NULL_TIME) if self.rules.is_plain else times

    def changed_schema(self) -> pa.Schema:
        """Return the columns of `merge`: silver's, and those that say which rows are replaced."""
        silver = silver_schema(
            self.value_types, self.with_topics, has_due=self.has_due, has_tenants=self.has_tenants
        )
        return pa.schema(
            [
                *silver,
                *(
                    pa.field(name, TIME)
                    for name in (REPLACING if self.has_tenants else REPLACING[:1])
                ),
            ]
        )


_TOPIC = (("topic", pa.string()),)
_COORDINATES = (("offset", pa.int64()), ("event_time", TIME))

REPLACING = ("replaces", "passes")
"""Columns of a changed row that say which rows it replaces.

`replaces`: the event time of the open record of its key whose place it takes. `passes`, with
tenants: the position up to which the waiting rows of its key are gone.
"""


def silver_schema(
    value_types: Mapping[str, pa.DataType],
    with_topics: Collection[str] = (),
    *,
    has_due: bool = False,
    has_tenants: bool = False,
) -> pa.Schema:
    """Return the columns of silver.

    - `value_types`: by source, in the order of their columns, the type of a value.
    - `with_topics`: the sources that have several topics.

    The column `position` is there with tenants: that of a record which waits for its tenant's
    clock, null for a merge record. `record_bytes` is how many bytes the values of a row's records
    have in bronze, null in rows of earlier versions.
    """
    parts = [
        (
            source,
            pa.list_(
                pa.struct(
                    [*(_TOPIC if source in with_topics else ()), *_COORDINATES, ("value", kind)]
                )
            ),
        )
        for source, kind in value_types.items()
    ]
    before = schema_of(
        "partition int, merge_key string, status string, event_time timestamp, last_event_time "
        "timestamp"
    )
    after = schema_of("valid boolean, invalid_reason string, batch bigint, generation int")
    of_tenants = [*TENANT, ("position", TIME)] if has_tenants else []
    return pa.schema(
        [*before, *parts, *after, *(DUE if has_due else ()), *of_tenants, RECORD_BYTES]
    )


LATE_SCHEMA = schema_of(
    "source string, topic string, partition int, offset bigint, merge_key string, event_time "
    "timestamp, position timestamp, "
    "value binary, batch bigint, generation int"
)
"""The columns of `late` where there are no tenants."""


def late_schema(*, has_tenants: bool = False) -> pa.Schema:
    """Return the columns of `late`. With tenants, `position` is that of the record's tenant."""
    return pa.schema([*LATE_SCHEMA, *TENANT]) if has_tenants else LATE_SCHEMA


def merge(
    records: pa.Table,
    open_rows: pa.Table,
    batch: Batch,
    recovered: pa.Table | None = None,
    heads: pa.Table | None = None,
) -> pa.Table:
    """Return the merge records that a batch changes, each once, by the merge rules.

    - `records`: the columns of `RECORD_SCHEMA` of at least every record in the batch's ranges that
      has a time, in any order. Others are passed over. With tenants, the first record behind each
      range is there, too.
    - `open_rows`: silver's columns of at least the open records that the batch may change. With
      tenants, also of the rows that wait.
    - `recovered`: partition, merge_key, event_time and, where silver has them, `DUE` of messages
      that were read back from the sink after a lake was lost.
    - `heads`, with tenants: what the batch before has left (`core.tenants.HEADS`).

    With tenants, each of these has the column tenant.

    The result has silver's columns, and `replaces`: the event time of the open record whose place
    the row takes, null for a new one. With tenants, rows that wait are among them. There is also
    `passes`: in a row without a status, the position up to which the waiting rows of its key are
    gone, unless they come anew.

    A row that times out is judged: `valid` is false and `invalid_reason` is `too_large` where its
    message would be larger than `max_bytes`. Raises ValueError where a key has two open records.
    """
    clocks = _clocks(records, heads, batch, _partitions(records, open_rows))
    return _changed(_on_time(records, batch, clocks, recovered), open_rows, batch, clocks)


def merge_in_chunks(
    records: pa.Table,
    chunks: Iterable[pa.Table],
    batch: Batch,
    recovered: pa.Table | None = None,
    heads: pa.Table | None = None,
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield each piece of silver's open and waiting rows with what `merge` returns for it.

    The last pair is a table without rows, and the merge records of keys that are in no piece. In
    partitions of which `records` and `heads` have nothing, nothing is merged.

    `chunks`: silver's columns of at least all rows that were open or waited and that the batch may
    change. All rows of a key are in one piece. The other arguments are those of `merge`. Raises
    ValueError where a key of the batch has rows in two pieces.
    """
    clocks = _clocks(
        records, heads, batch, _partitions(records, *([] if heads is None else [heads]))
    )
    on_time = _on_time(records, batch, clocks, recovered)
    schema = batch.changed_schema()

    def changed(some: Positioned, chunk: pa.Table) -> pa.Table:
        """Return what these records change in a piece."""
        return _changed(some, chunk, batch, clocks).select(schema.names).cast(schema)

    is_left = np.ones(len(on_time.times), np.bool_)
    for chunk in chunks:
        of_records, of_chunk, _ = _keys(on_time.rows, chunk)
        is_here = np.isin(of_records, of_chunk)
        if (is_here & ~is_left).any():
            raise ValueError(_TWO_OPEN_RECORDS)
        is_left &= ~is_here
        yield chunk, changed(on_time.where(is_here), chunk)
    none = schema.empty_table()
    yield none, changed(on_time.where(is_left), none)


def applied(chunk: pa.Table, changed: pa.Table) -> pa.Table:
    """Return a piece of silver with a batch's changes to it (`merge_in_chunks`) applied."""
    columns = [name for name in changed.column_names if name not in REPLACING]
    new = changed.filter(changed["status"].is_valid()).select(columns)
    return pa.concat_tables([_kept(chunk, changed).select(columns), new])


def may_change(open_rows: pa.Table, keys: pa.Table, batch: Batch) -> Booleans:
    """Return True for each open row that a batch may change. Only without tenants.

    `merge` needs to know no other row. A row may change in three cases:
    - its key is among the batch's;
    - it times out;
    - it is due at another time by the present rules.

    `open_rows`: partition, merge_key, event_time, last_event_time and, if silver has it, due.
    `keys`: partition and merge_key of the batch's records.
    """
    due = OpenRecordTimes.of(open_rows, batch.rules).due
    of_keys, of_rows, _ = _keys(keys, open_rows)
    changes = np.isin(of_rows, of_keys) | _is_timed_out(open_rows, due, batch, None)
    if batch.has_due:
        changes |= times_ms(open_rows["due"]) != batch.kept(due)
    return np.asarray(changes, np.bool_)


def late(records: pa.Table, batch: Batch, heads: pa.Table | None = None) -> pa.Table:
    """Return the batch's late records with their positions: the columns of `late_schema`.

    The arguments are those of `merge`.
    """
    positioned = _positioned(records, batch, _clocks(records, heads, batch, _partitions(records)))
    found = positioned.where(
        positioned.is_late(batch.rules) & ~positioned.is_passed_over(batch.rules, batch.out)
    )
    return _late_rows(found.rows.append_column("position", time_column(found.positions)), batch)


def late_again(records: pa.Table, waiting: pa.Table, batch: Batch) -> pa.Table:
    """Return the records that waited for their tenants before an epoch and are late by its rules.

    The columns are those of `late`. `waiting`: rows of silver from before the epoch's first batch,
    which is `batch`. `records`: at least those that waited, as for `merge`.
    """
    waited = Positioned.of_waiting(waiting)
    places = placed(waited.where(waited.is_late(batch.rules)).rows, batch.sources)
    return _late_rows(found_in(records, places), batch)


def _late_rows(found: pa.Table, batch: Batch) -> pa.Table:
    schema = late_schema(has_tenants=batch.has_tenants)
    if batch.with_topics:
        sources = pa.array([source_of(name) for name in batch.inputs]).take(
            pc.index_in(found["source"], pa.array(batch.inputs))
        )
        found = found.set_column(found.column_names.index("source"), "source", sources)
    found = found.append_column("batch", pa.array(np.full(found.num_rows, batch.plan.batch)))
    found = found.append_column(
        "generation", pa.array(np.full(found.num_rows, batch.plan.generation))
    )
    return found.select(schema.names).cast(schema)


# -- records


def _clocks(
    records: pa.Table, heads: pa.Table | None, batch: Batch, partitions: Collection[int]
) -> TenantClocks | None:
    """Return the clocks of tenants in these partitions; None without tenants."""
    if batch.rules.lag_ms is None:
        return None
    known = HEADS.empty_table() if heads is None else heads
    return TenantClocks.of(records, known, batch.plan, batch.idle, batch.rules.lag_ms, partitions)


def _partitions(*tables: pa.Table) -> set[int]:
    return {p for rows in tables for p in pc.unique(rows["partition"]).to_pylist()}


def _on_time(
    records: pa.Table, batch: Batch, clocks: TenantClocks | None, recovered: pa.Table | None
) -> Positioned:
    """Return the records that a batch merges.

    They are neither late, nor passed over, nor in the sink already.
    """
    wide = records.set_column(
        records.column_names.index("value"), "value", records["value"].cast(pa.large_binary())
    )
    positioned = _positioned(wide, batch, clocks)
    on_time = positioned.where(
        ~positioned.is_late(batch.rules) & ~positioned.is_passed_over(batch.rules, batch.out)
    )
    if recovered is not None and recovered.num_rows:
        on_time = on_time.where(~_is_published(on_time, recovered, batch.rules))
    return on_time


def _positioned(records: pa.Table, batch: Batch, clocks: TenantClocks | None) -> Positioned:
    """Return the records with their positions. With tenants, these are in their tenants."""
    if clocks is None:
        return Positioned.of(records, batch.plan, batch.idle, batch.inputs)
    return Positioned.of_tenants(records, clocks)


def _is_published(records: Positioned, recovered: pa.Table, rules: Rules) -> Booleans:
    """Return True for each record that the sink already holds.

    That is so where a message of its key was read back that holds records up to its position. The
    latest message of a key decides: where it does not hold the record, no earlier one does.
    """
    of_record, of_message, count = _keys(records.rows, recovered)
    names = [name for name in ("event_time", "due") if name in recovered.column_names]
    times = [
        [None if at == NULL_TIME else at for at in times_ms(recovered[name]).tolist()]
        for name in names
    ]
    messages = zip(*times, strict=True)
    latest = np.full(count, NULL_TIME)
    np.maximum.at(
        latest, of_message, np.array([rules.held_until(*message) for message in messages], np.int64)
    )
    return np.asarray(records.positions <= latest[of_record], np.bool_)


def _keys(one: pa.Table, other: pa.Table) -> tuple[Int64s, Int64s, int]:
    """Number every (partition, key), or (partition, tenant, key), of two tables.

    Return the number for each row of the one, the number for each row of the other, and how many
    there are.
    """
    codes = np.concatenate([int64s(one["partition"]), int64s(other["partition"])])
    for name in [name for name in ("merge_key", "tenant") if name in one.column_names]:
        texts = both(one[name], other[name], pa.large_string()).combine_chunks().dictionary_encode()
        codes = codes * (len(texts.dictionary) + 1) + int64s(texts.indices)
    known, numbers = np.unique(codes, return_inverse=True)
    return numbers[: one.num_rows], numbers[one.num_rows :], len(known)


# -- merge records

_TWO_OPEN_RECORDS: Final = (
    "a key has two open records: silver is damaged; derive it again with `watersmeet rebuild`"
)


def _kept(held: pa.Table, changed: pa.Table) -> pa.Table:
    """Return the rows that are open or wait and are not replaced.

    A MERGE of a batch's changes (`merge`) would leave these of them.
    """
    of_changed, of_held, count = _keys(changed, held)
    is_replaced = np.isin(of_held, of_changed[changed["replaces"].is_valid().to_numpy()])
    if "passes" in changed.column_names:
        passes = np.full(count, NULL_TIME)
        np.maximum.at(passes, of_changed, times_ms(changed["passes"]))
        is_waiting = pc.equal(held["status"], "waiting").to_numpy()
        is_replaced = np.where(
            is_waiting, times_ms(held["position"]) <= passes[of_held], is_replaced
        )
    return held.filter(pa.array(~is_replaced))


class _Entering(NamedTuple):
    """Rows of silver that take part in a batch, beside its records.

    - `open_rows`: the open records.
    - `waited`: the waiting rows that enter the merge, or are written anew.
    - `is_waiting`: for each of the batch's records, then for each of `waited`, True where it waits.
    - `gone`: see `core.waiting.Released`.
    """

    open_rows: pa.Table
    waited: Positioned
    is_waiting: Booleans
    gone: pa.Table | None

    @classmethod
    def of(
        cls, records: Positioned, held: pa.Table, batch: Batch, clocks: TenantClocks | None
    ) -> _Entering:
        """Return what takes part of `held`, the rows of silver that are open or wait."""
        if clocks is None:
            return cls(held, Positioned.nothing(held), np.zeros(len(records.times), np.bool_), None)
        is_open = pc.equal(held["status"], "open")
        waiting = Positioned.of_waiting(held.filter(pc.invert(is_open)))
        is_late = (
            waiting.is_late(batch.rules)
            if batch.begins_epoch
            else np.zeros(len(waiting.times), np.bool_)
        )
        enters, stays, gone = release(
            waiting.rows, waiting.positions <= waiting.clocks(clocks), is_late
        )
        waited = waiting.where(enters | stays)
        is_waiting = [each.positions > each.clocks(clocks) for each in (records, waited)]
        return cls(held.filter(is_open), waited, np.concatenate(is_waiting), gone)


def _changed(
    records: Positioned, held: pa.Table, batch: Batch, clocks: TenantClocks | None
) -> pa.Table:
    open_rows, waited, is_waiting, gone = _Entering.of(records, held, batch, clocks)
    every = records.with_others(waited)
    merging = every.where(~is_waiting)
    opened = OpenRecordTimes.of(open_rows, batch.rules)
    of_merging, of_open, count = _keys(merging.rows, open_rows)
    if len(np.unique(of_open)) != len(of_open):
        raise ValueError(_TWO_OPEN_RECORDS)
    nth = session_index(merging, of_merging, opened.by_key(of_open, count), batch.rules)
    # Label a merge record by its key and its number among those of the key in this batch. A record
    # that waits has a label of its own.
    stride = int(nth.max(initial=0)) + 1
    of_every = np.empty(len(is_waiting), np.int64)
    of_open = of_open * stride
    of_every[~is_waiting] = of_merging * stride + nth
    of_every[is_waiting] = count * stride + np.arange(np.count_nonzero(is_waiting))
    changes = np.isin(of_open, of_every) | _is_timed_out(open_rows, opened.due, batch, clocks)
    if batch.has_due:  # an earlier epoch's rules may have set another one
        changes |= times_ms(open_rows["due"]) != batch.kept(opened.due)
    open_rows = open_rows.filter(pa.array(changes))
    open_times = opened.first[changes]
    open_last = opened.last[changes]
    before = pa.concat_tables([waited.rows, open_rows])
    before_bytes = pc.fill_null(before[RECORD_BYTES.name], 0)
    merged = _Merged.of(np.concatenate([of_every, of_open[changes]]), records.rows.num_rows)

    names = {name: kind for name, kind in NAMES.items() if name in every.rows.column_names}
    columns = {
        name: merged.first(both(records.rows[name], before[name], kind))
        for name, kind in names.items()
    }
    of_partitions = int64s(columns["partition"])
    waits = merged.any(np.concatenate([is_waiting, np.zeros(len(open_times), np.bool_)]))
    times = merged.reduce(np.minimum, np.concatenate([every.times, open_times]))
    last_times = merged.reduce(np.maximum, np.concatenate([every.times, open_last]))
    due = batch.rules.due(times, last_times)
    timed_out = _is_timed_out(pa.table(columns), due, batch, clocks) & ~waits
    replaces = np.full(merged.size, MAX_TIME)
    replaces[merged.of_held[len(waited.times) :]] = open_times
    columns |= {
        "status": pc.if_else(
            pa.array(timed_out), "timed_out", pc.if_else(pa.array(waits), "waiting", "open")
        ),
        "event_time": time_column(times),
        "last_event_time": time_column(last_times),
        **{source: _parts(source, records, before, merged, batch) for source in batch.sources},
    }
    too_large = _too_large(pa.table(columns), timed_out, batch)
    columns |= {
        "valid": pa.array(~too_large, mask=~timed_out),
        "invalid_reason": pa.array(
            np.where(too_large, "too_large", ""), pa.string(), mask=~too_large
        ),
        "batch": pa.array(np.full(merged.size, batch.plan.batch, np.int64)),
        "generation": pa.array(np.full(merged.size, batch.plan.generation, np.int32)),
        RECORD_BYTES.name: pa.array(
            merged.reduce(np.add, np.concatenate([_sizes(records), int64s(before_bytes)]))
        ),
        "replaces": time_column(replaces, missing=MAX_TIME),
    }
    if batch.has_due:
        over = due
        if clocks is not None:
            over = _over(pa.table(columns), due, timed_out, clocks)
        columns["due"] = time_column(np.where(waits, NULL_TIME, batch.kept(due)))
        columns["closed_at"] = time_column(
            np.where(timed_out, batch.kept(batch.rules.closed_at(of_partitions, over)), NULL_TIME)
        )
    if gone is None:
        return pa.table(columns).select(batch.changed_schema().names)
    positions = merged.reduce(
        np.maximum, np.concatenate([every.positions, np.full(len(open_times), NULL_TIME)])
    )
    columns["position"] = time_column(np.where(waits, positions, NULL_TIME))
    columns["passes"] = pa.nulls(merged.size, TIME)
    schema = batch.changed_schema()
    return pa.concat_tables(
        [pa.table(columns).select(schema.names).cast(schema), gone_rows(gone, schema)]
    )


def _sizes(records: Positioned) -> Int64s:
    """Return how many bytes the value of each record has."""
    return lengths(records.rows["value"])


def _over(rows: pa.Table, due: Int64s, timed_out: Booleans, clocks: TenantClocks) -> Int64s:
    """Return the last clock (ms) at which each merge record that has timed out was still open.

    For other merge records it is `due`.
    """
    found = due.copy()
    closed = rows.filter(pa.array(timed_out))
    passed = clocks.passed(int64s(closed["partition"]), closed["tenant"], due[timed_out])
    found[timed_out] = np.maximum(due[timed_out], passed)
    return found


def _is_timed_out(
    rows: pa.Table, due: Int64s, batch: Batch, clocks: TenantClocks | None
) -> Booleans:
    """Return True for each open merge record that has timed out (rule 5).

    `due`: the last moment at which it can be joined (ms).
    """
    partitions = int64s(rows["partition"])
    by_now = (
        looked_up(partitions, batch.plan.clocks, NULL_TIME)
        if clocks is None
        else clocks.clocks(partitions, rows["tenant"])
    )
    return np.asarray((by_now != NULL_TIME) & (due < by_now), np.bool_)


class _Merged(NamedTuple):
    """The merge records that change, numbered.

    `of_record` and `of_held`: the number of the merge record that each record, and each row of
    silver, belongs to. `order`: all of these, sorted by merge record. `begins`: where each merge
    record begins in that order.
    """

    size: int
    of_record: Int64s
    of_held: Int64s
    order: Int64s
    begins: Int64s

    @classmethod
    def of(cls, labels: Int64s, records: int) -> _Merged:
        """Number the merge records by their labels: equal labels are the same merge record.

        The first `records` labels are those of records, the others those of rows of silver.
        """
        order, begins = in_groups(labels)
        numbers = np.empty(len(labels), np.int64)
        numbers[order] = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(labels)))
        return cls(len(begins), numbers[:records], numbers[records:], order, begins)

    def reduce(self, function: np.ufunc, values: Int64s) -> Int64s:
        """Reduce the values of all that belongs to a merge record to one, for each merge record."""
        return np.asarray(
            function.reduceat(values[self.order], self.begins) if self.size else [], np.int64
        )

    def any(self, values: Booleans) -> Booleans:
        """Return the logical OR over all that belongs to a merge record, for each merge record."""
        return np.asarray(
            np.logical_or.reduceat(values[self.order], self.begins) if self.size else [], np.bool_
        )

    def first(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the value of the first that belongs to a merge record, for each merge record."""
        return values.take(
            pa.array(self.order[self.begins] if self.size else np.array([], np.int64))
        )


def _parts(
    source: str, records: Positioned, before: pa.Table, merged: _Merged, batch: Batch
) -> pa.ListArray:
    """Return a source's parts of each merge record by (event time, topic, offset), old and new."""
    inputs = of_source(batch.inputs, source)
    has_topics = source in batch.with_topics
    mine = np.flatnonzero(pc.is_in(records.rows["source"], pa.array(inputs)).to_numpy())
    new = records.rows.select(
        [*(["topic"] if has_topics else []), "partition", "offset", "value"]
    ).take(pa.array(mine))
    old_lists = before[source].combine_chunks()
    old = old_lists.flatten()
    labels = np.concatenate(
        [merged.of_record[mine], merged.of_held[old_lists.value_parent_indices().to_numpy()]]
    )
    offsets = np.concatenate([int64s(new["offset"]), int64s(old.field("offset"))])
    times = np.concatenate([records.times[mine], times_ms(old.field("event_time"))])
    topics = both(new["topic"], old.field("topic"), pa.string()) if has_topics else None
    by_topic = (
        ()
        if topics is None
        else (int64s(pc.index_in(topics, pa.array(sorted(map(topic_of, inputs))))),)
    )
    order = np.lexsort((offsets, *by_topic, times, labels))
    kind = _large(batch.value_types[source])
    decode = batch.avro[source].decoder_of_accepted() if source in batch.avro else None
    places = zip(new["partition"].to_pylist(), new["offset"].to_pylist(), strict=True)
    read = typed_values(
        new["value"], batch.read_types.get(source, batch.value_types[source]), decode, places
    )
    values = both(read, old.field("value"), kind)
    columns = {} if topics is None else {"topic": topics.take(pa.array(order)).combine_chunks()}
    columns |= {"offset": pa.array(offsets[order]), "event_time": time_column(times[order])}
    columns["value"] = values.take(pa.array(order)).combine_chunks()
    return in_lists(
        labels[order],
        pa.StructArray.from_arrays(list(columns.values()), list(columns)),
        merged.size,
    )


def _too_large(rows: pa.Table, timed_out: Booleans, batch: Batch) -> Booleans:
    too_large = np.zeros(len(timed_out), bool)
    if batch.max_bytes is not None and timed_out.any():
        finished = as_read(rows.filter(pa.array(timed_out)), batch.read_types)
        too_large[timed_out] = exceeds(finished, batch.sources, batch.max_bytes).to_numpy(
            zero_copy_only=False
        )
    return too_large


def _large(kind: pa.DataType) -> pa.DataType:
    """Return the type, with 64-bit offsets for text: a batch may hold more than 2 GiB of it."""
    return pa.large_string() if pa.types.is_string(kind) else kind
