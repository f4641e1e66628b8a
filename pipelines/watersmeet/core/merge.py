"""The merge: takes records and open merge records, returns what a batch changes in silver.

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

from watersmeet.core.avro_schema import AvroSchema
from watersmeet.core.clocks import Clocks, clocks_of
from watersmeet.core.columns import (
    MAX_TIME,
    NULL_TIME,
    Booleans,
    Int64s,
    both,
    filtered,
    in_groups,
    in_lists,
    int64s,
    lengths,
    numbered,
    one_chunk,
    part_topics,
    row_values,
    taken,
    time_column,
    times_ms,
)
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId, of_source, several_topics
from watersmeet.core.joining import OpenRecordTimes, session_index
from watersmeet.core.message import as_read, exceeds
from watersmeet.core.plan import BatchPlan, Rules, TopicPartition
from watersmeet.core.positions import NAMES, Positioned, late_by_now, records_at, release
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.repeated import ID, RECORD_IDS, Joined, duplicates_of, joined
from watersmeet.core.silver import OUTCOMES, PASSED, in_silver, of_batch
from watersmeet.core.tenants import HEADS
from watersmeet.core.too_large import EXCESS, RECORD_COUNT, has_no_parts, records_of
from watersmeet.core.types import DUE, PLACE, TENANT, TIME, schema_of
from watersmeet.core.values import typed_values

RECORD_SCHEMA = schema_of(
    "source string, topic string, partition int, offset bigint, merge_key string, event_time "
    "timestamp, heartbeat boolean, value binary, tenant string"
)
"""The columns of bronze that are read, and the source.

Where records may have ids, `core.repeated.ID` is read, too.
"""


@dataclass(frozen=True)
class Batch:
    """A batch of silver: its plan, its rules, and all else that the merge needs beside the rows.

    - `value_types`: by source, in the order of silver's columns, the Arrow type of a value.
    - `idle`: the idle policy's decisions by topic-partition.
    - `max_bytes`: the maximum size of a message in bytes; None where its value is an expression of
      the configuration.
    - `read_types`: for sources whose schema has had more fields, the types by which values are read
      and messages written.
    - `changed`: sources whose schema was another one before: what was read by it need not fit.
    - `avro`: by source whose values are Avro, their schema.
    - `begins_epoch`: True for the first batch of an epoch. By its rules, what waits for its tenant
      is judged again.
    - `out`: by topic-partition, the offsets of records that are passed over.
    - `has_ids`: True where records of the lake may have ids: a repeated record is no part.
    - `within_ms`: how far behind its position a late record may lie to be corrected; None: none is.
    """

    plan: BatchPlan
    value_types: Mapping[str, pa.DataType]
    rules: Rules
    idle: Mapping[TopicPartition, Sequence[IdleDecision]] = field(default_factory=dict)
    max_bytes: int | None = None
    read_types: Mapping[str, pa.DataType] = field(default_factory=dict)
    changed: Collection[str] = ()
    avro: Mapping[str, AvroSchema] = field(default_factory=dict)
    begins_epoch: bool = False
    out: Mapping[TopicPartition, Int64s] = field(default_factory=dict)
    has_ids: bool = False
    within_ms: int | None = None

    @property
    def sources(self) -> list[str]:
        """The sources, in the order of silver's columns."""
        return list(self.value_types)

    @property
    def inputs(self) -> list[InputId]:
        """The inputs, each of which has ranges in the plan."""
        return list(dict.fromkeys(tp.input for tp in self.plan.ranges))

    def record_schema(self) -> pa.Schema:
        """Return the columns of the records: `RECORD_SCHEMA`, and `ID` where they may have ids."""
        return RECORD_SCHEMA.append(ID) if self.has_ids else RECORD_SCHEMA

    def changed_schema(self) -> pa.Schema:
        """Return the columns of `merge`: silver's, and those that say which rows are replaced."""
        silver = silver_schema(self.value_types, self.inputs, has_ids=self.has_ids)
        return pa.schema([*silver, *(pa.field(name, TIME) for name in REPLACING)])


_TOPIC = (("topic", pa.string()),)
_COORDINATES = (("offset", pa.int64()), ("event_time", TIME))

REPLACING = ("replaces", "delete_up_to")
"""Columns of a changed row that say which rows it replaces.

`replaces`: the event time of the open record of its key whose place it takes. `delete_up_to`: the
position up to which the waiting rows of its key are deleted.
"""


def silver_schema(
    value_types: Mapping[str, pa.DataType],
    inputs: Iterable[InputId] = (),
    *,
    has_ids: bool = False,
) -> pa.Schema:
    """Return the columns of silver.

    - `value_types`: by source, in the order of their columns, the type of a value.
    - `inputs`: those of the merge; parts say their topic where their source has several.
    - `has_ids`: True where records may have ids.

    The columns of merge records come first, then `core.silver.OUTCOMES`. `position` is null for a
    merge record. `record_bytes` is how many bytes the values of a row's records have in bronze,
    those of repeated ones among them; 0 for a merge record that is too large.
    """
    topics = dict.fromkeys(several_topics(inputs), _TOPIC)
    parts = []
    for source, kind in value_types.items():
        part = pa.struct([*topics.get(source, ()), *_COORDINATES, ("value", kind)])
        parts.append((source, pa.list_(part)))
    before = schema_of(
        "partition int, merge_key string, status string, event_time timestamp, last_event_time "
        "timestamp"
    )
    after = schema_of("valid boolean, invalid_reason string, batch bigint, generation int")
    ids = [RECORD_IDS] if has_ids else []
    sizes = [RECORD_BYTES, RECORD_COUNT]
    others = [*after, *DUE, *TENANT, ("position", TIME), *sizes, *ids, *OUTCOMES]
    return pa.schema([*before, *parts, *others])


LATE_SCHEMA = schema_of(
    "source string, topic string, partition int, offset bigint, merge_key string, event_time "
    "timestamp, position timestamp, value binary, batch bigint, generation int, tenant string, "
    "u timestamp, id string"
)
"""The columns of `late`.

`position` is that of the record in its tenant. Once the clock of its tenant has passed `u`, every
merge record that could hold the record is closed; null for a record that is not to be corrected.
`id` is null for a record without one.
"""

MESSAGE_SCHEMA = pa.schema(
    [*schema_of("partition int, merge_key string, event_time timestamp"), *DUE, *TENANT]
)
"""The columns of messages that were read back from the sink after a lake was lost."""

NO_MESSAGES: Final = MESSAGE_SCHEMA.empty_table()
_NO_RECORDS: Final = RECORD_SCHEMA.empty_table()
_NO_HEADS: Final = HEADS.empty_table()


def merge(
    records: pa.Table,
    open_rows: pa.Table,
    batch: Batch,
    recovered: pa.Table = NO_MESSAGES,
    heads: pa.Table = _NO_HEADS,
    waited: pa.Table = _NO_RECORDS,
) -> pa.Table:
    """Return the rows of silver that a batch writes, by the merge rules: the merge records that it
    changes, each once, the records that wait, and a row for each record that is not merged.

    - `records`: the columns of `Batch.record_schema` of at least every record in the batch's ranges
      that has a time, and of those after each range that the clocks need
      (`core.clocks.lookahead`), in any order. Others are passed over.
    - `open_rows`: silver's columns of at least the open records that the batch may change, and of
      all rows that wait.
    - `recovered`: the columns of `MESSAGE_SCHEMA` of messages that were read back.
    - `heads`: what the batch before has left (`core.tenants.HEADS`).
    - `waited`: for the first batch of an epoch, at least the records that wait and are late by its
      rules, as `records`.

    The result has silver's columns, and those of `REPLACING`: in `replaces`, the event time of the
    open record whose place the row takes, null for a new one; in `delete_up_to` of a row without a
    status, the position up to which the waiting rows of its key are deleted, unless they come anew.

    A row that times out is judged: `valid` is false and `invalid_reason` is `too_large` where its
    message would be larger than `max_bytes`, or where it is too large itself. Raises ValueError
    where a key has two open records.
    """
    clocks = _clocks(records, heads, batch, _partitions(records, open_rows))
    outcomes = _Outcomes.of(records, batch, clocks, recovered)
    changed = _changed(outcomes.on_time, records["value"], open_rows, batch, clocks)
    late = _late_by_now(open_rows, waited, batch)
    return _together([changed, *late, *outcomes.not_merged(records, batch)], batch)


def merge_in_chunks(
    records: pa.Table,
    chunks: Iterable[pa.Table],
    batch: Batch,
    recovered: pa.Table = NO_MESSAGES,
    heads: pa.Table = _NO_HEADS,
    waited: pa.Table = _NO_RECORDS,
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield each chunk of silver's open and waiting rows with what `merge` returns for it.

    The first and the last pair are a table without rows, and what belongs to no chunk: the records
    that are not merged, and the merge records of other keys.

    `chunks`: silver's columns of at least all rows that were open or waited and that the batch may
    change. All rows of a key are in one chunk. The other arguments are those of `merge`. Raises
    ValueError where a key of the batch has rows in two chunks.
    """
    partitions = _partitions(records, heads)
    clocks = _clocks(records, heads, batch, partitions)
    outcomes = _Outcomes.of(records, batch, clocks, recovered)
    on_time = outcomes.on_time
    none = batch.changed_schema().empty_table()
    yield none, _together([none, *outcomes.not_merged(records, batch)], batch)
    is_remaining = np.ones(len(on_time.times), np.bool_)
    for chunk in chunks:
        record_keys, chunk_keys, _ = _keys(on_time.rows, chunk)
        is_here = np.isin(record_keys, chunk_keys)
        if (is_here & ~is_remaining).any():
            raise ValueError(_TWO_OPEN_RECORDS)
        is_remaining &= ~is_here
        if not (own := _partitions(chunk)) <= partitions:  # other rules may close its rows
            partitions |= own
            clocks = _clocks(records, heads, batch, partitions)
        changed = _changed(on_time.where(is_here), records["value"], chunk, batch, clocks)
        changed = _together([changed, *_late_by_now(chunk, waited, batch)], batch)
        yield chunk, changed
        del chunk, changed  # not in memory while the next one comes
    rest = _changed(on_time.where(is_remaining), records["value"], none, batch, clocks)
    yield none, rest


def _together(rows: Sequence[pa.Table], batch: Batch) -> pa.Table:
    schema = batch.changed_schema()
    return pa.concat_tables([each.select(schema.names).cast(schema) for each in rows])


def applied(chunk: pa.Table, changed: pa.Table) -> pa.Table:
    """Return a chunk of silver with a batch's changes to it (`merge_in_chunks`) applied."""
    new = new_rows(changed)
    return pa.concat_tables([kept(chunk, changed).select(new.column_names), new])


def new_rows(changed: pa.Table) -> pa.Table:
    """Return the rows of silver that a batch's changes (`merge`) add, in silver's columns."""
    columns = [name for name in changed.column_names if name not in REPLACING]
    return filtered(changed.select(columns), changed["status"].is_valid().to_numpy())


def replaces_rows(changed: pa.Table) -> bool:
    """Return True if a batch's changes (`merge`) may replace or delete rows of silver."""
    return any(changed[name].null_count < changed.num_rows for name in REPLACING)


def kept(unfinished: pa.Table, changed: pa.Table) -> pa.Table:
    """Return the rows that are open or wait and are not replaced.

    A MERGE of a batch's changes (`merge`) would leave these of them.
    """
    changed = filtered(
        changed.select(["partition", "tenant", "merge_key", *REPLACING]),
        np.logical_or(*(changed[name].is_valid().to_numpy() for name in REPLACING)),
    )
    keys = changed["merge_key"].cast(pa.large_string())
    has_key = pc.is_in(unfinished["merge_key"].cast(pa.large_string()), keys)
    if not pc.any(has_key).as_py():
        return unfinished
    names = ["partition", "tenant", "merge_key", "status", "position"]
    some = unfinished.select(names).filter(has_key)
    changed_keys, row_keys, count = _keys(changed, some)
    is_replaced = np.isin(row_keys, changed_keys[changed["replaces"].is_valid().to_numpy()])
    delete_up_to = np.full(count, NULL_TIME)
    np.maximum.at(delete_up_to, changed_keys, times_ms(changed["delete_up_to"]))
    is_waiting = pc.equal(some["status"], "waiting").to_numpy()
    is_deleted = times_ms(some["position"]) <= delete_up_to[row_keys]
    is_kept = np.ones(len(unfinished), np.bool_)
    is_kept[has_key.to_numpy()] = ~np.where(is_waiting, is_deleted, is_replaced)
    return filtered(unfinished, is_kept)


def released_keys(waiting: pa.Table, clocks: Clocks) -> list[str]:
    """Return the keys of the waiting rows of silver that their clocks have reached.

    `waiting`: at least partition, tenant, merge_key, event_time and position.
    """
    rows = Positioned.of_waiting(waiting)
    return list(waiting["merge_key"].filter(pa.array(~clocks.waits(rows))).to_pylist())


def _late_by_now(unfinished: pa.Table, waited: pa.Table, batch: Batch) -> Iterator[pa.Table]:
    """Yield rows of silver for the records that waited for their tenants before an epoch, and are
    late by its rules.
    """
    if not batch.begins_epoch:
        return
    is_waiting = pc.equal(unfinished["status"], "waiting").to_numpy()
    late = late_by_now(filtered(unfinished, is_waiting), batch.rules)
    if late.num_rows:
        yield _late_rows(records_at(waited, late), batch)


def _late_rows(rows: pa.Table, batch: Batch) -> pa.Table:
    rows = of_batch(rows, batch.plan.batch, batch.plan.generation)
    rows = rows.append_column("u", time_column(_settled_after(rows, batch)))
    rows = rows.append_column(RECORD_BYTES, pa.array(lengths(rows["value"])))
    names = [name for name in (*LATE_SCHEMA.names, RECORD_BYTES.name) if name in rows.column_names]
    return in_silver(rows.select(names), "late", batch.changed_schema())


def _settled_after(late_rows: pa.Table, batch: Batch) -> Int64s:
    """Return `u` of late records (ms), `NULL_TIME` for one that is not to be corrected."""
    if batch.within_ms is None:
        return np.full(late_rows.num_rows, NULL_TIME)
    times = times_ms(late_rows["event_time"])
    positions = times_ms(late_rows["position"])
    window = batch.rules.window
    closed_after = np.maximum(positions, times + window.gap_ms + window.longest_ms)
    return np.where(times < positions - batch.within_ms, NULL_TIME, closed_after)


# -- records

_ROW: Final = "_row"
_VALUE_BYTES: Final = "_value_bytes"


def without_values(records: pa.Table) -> pa.Table:
    """Return records with their row numbers and the sizes of their values instead of the values.

    So these, which may be large, are copied once: by `parts_by_source`.
    """
    sizes = pa.array(lengths(records["value"]))
    return numbered(records.drop_columns("value"), _ROW).append_column(_VALUE_BYTES, sizes)


def _gathered(values: pa.ChunkedArray, rows: Int64s) -> pa.ChunkedArray:
    return taken(values.cast(pa.large_binary()), rows)


def _clocks(
    records: pa.Table, heads: pa.Table, batch: Batch, partitions: Collection[int]
) -> Clocks:
    return clocks_of(batch.rules, batch.plan, batch.idle, records, heads, partitions)


def _partitions(*tables: pa.Table) -> set[int]:
    return {p for rows in tables for p in pc.unique(rows["partition"]).to_pylist()}


class _Outcomes(NamedTuple):
    """A batch's records with a key, without their values, by what becomes of them.

    - `on_time`: those that are merged.
    - `late`: see rule 3.
    - `passed`: a message has them, or they are copies of other records.
    """

    on_time: Positioned
    late: Positioned
    passed: Positioned

    @classmethod
    def of(cls, records: pa.Table, batch: Batch, clocks: Clocks, recovered: pa.Table) -> _Outcomes:
        """Return the outcomes of records."""
        positioned = clocks.positioned(without_values(records))
        is_passed = positioned.is_passed_over(batch.rules, batch.out)
        is_late = positioned.is_late(batch.rules) & ~is_passed
        if recovered.num_rows:
            is_passed |= ~is_late & is_published(positioned, recovered)
        return cls(*map(positioned.where, (~is_late & ~is_passed, is_late, is_passed)))

    def not_merged(self, records: pa.Table, batch: Batch) -> Iterator[pa.Table]:
        """Yield rows of silver for those that are not merged; `records` has their values."""
        if len(self.late.times):
            late = self.late.with_positions()
            values = _gathered(records["value"], int64s(late[_ROW]))
            yield _late_rows(late.append_column("value", values), batch)
        if len(self.passed.times):
            passed = self.passed.with_positions()
            passed = of_batch(passed, batch.plan.batch, batch.plan.generation)
            yield in_silver(passed.select(PASSED.names), "passed", batch.changed_schema())


def is_published(records: Positioned, recovered: pa.Table) -> Booleans:
    """Return True for each record that the sink already holds.

    That is so where a message of its key was read back that holds records up to its position. The
    latest message of a key decides: where it does not hold the record, no earlier one does.
    """
    record_keys, message_keys, count = _keys(records.rows, recovered)
    latest = np.full(count, NULL_TIME)
    np.maximum.at(latest, message_keys, times_ms(recovered["due"]))
    return np.asarray(records.positions <= latest[record_keys], np.bool_)


def _keys(one: pa.Table, other: pa.Table) -> tuple[Int64s, Int64s, int]:
    """Number every (partition, tenant, key) of two tables.

    Return the number for each row of the one, the number for each row of the other, and how many
    there are.
    """
    codes = np.concatenate([int64s(one["partition"]), int64s(other["partition"])])
    for name in ("merge_key", "tenant"):
        texts = both(one[name], other[name], pa.large_string()).combine_chunks().dictionary_encode()
        codes = codes * (len(texts.dictionary) + 1) + int64s(texts.indices)
    distinct, numbers = np.unique(codes, return_inverse=True)
    return numbers[: one.num_rows], numbers[one.num_rows :], len(distinct)


# -- merge records

_TWO_OPEN_RECORDS: Final = (
    "a key has two open records: silver is damaged; derive it again with `watersmeet rebuild`"
)


class _Entering(NamedTuple):
    """Rows of silver that take part in a batch, beside its records.

    - `open_rows`: the open records.
    - `waited`: the waiting rows that enter the merge, or are written anew.
    - `is_waiting`: for each of the batch's records, then for each of `waited`, True where it waits.
    - `deleted`: see `core.positions.Released`.
    """

    open_rows: pa.Table
    waited: Positioned
    is_waiting: Booleans
    deleted: pa.Table

    @classmethod
    def of(
        cls, records: Positioned, unfinished: pa.Table, batch: Batch, clocks: Clocks
    ) -> _Entering:
        """Return what takes part of `unfinished`, the rows of silver that are open or wait."""
        is_open = pc.equal(unfinished["status"], "open").to_numpy()
        open_rows = filtered(unfinished, is_open)
        waiting = Positioned.of_waiting(filtered(unfinished, ~is_open))
        is_late = waiting.is_late(batch.rules)  # only by the rules of a new epoch
        enters, stays, deleted = release(waiting.rows, ~clocks.waits(waiting), is_late)
        waited = waiting.where(enters | stays)
        is_waiting = np.concatenate([clocks.waits(records), clocks.waits(waited)])
        return cls(open_rows, waited, is_waiting, deleted)


def _changed(
    records: Positioned,
    values: pa.ChunkedArray,
    unfinished: pa.Table,
    batch: Batch,
    clocks: Clocks,
) -> pa.Table:
    """Return the rows of silver that merging some records with all rows of their keys gives.

    `values`: those of the batch's records.
    """
    entering = _Entering.of(records, unfinished, batch, clocks)
    every = records.with_others(entering.waited)
    labels, is_changed = _labels(every, entering, batch, clocks)
    open_rows = filtered(entering.open_rows, is_changed)
    opened = OpenRecordTimes.of(open_rows, batch.rules)
    none_waits = np.zeros(len(opened.first), np.bool_)
    before = pa.concat_tables([entering.waited.rows, open_rows])
    merged = Merged.of(labels, records.rows.num_rows)
    columns = {
        name: merged.first(both(records.rows[name], before[name], kind))
        for name, kind in NAMES.items()
    }
    partitions = int64s(columns["partition"])
    waits = merged.any(np.concatenate([entering.is_waiting, none_waits]))
    counts = [np.ones(len(records.times), np.int64), int64s(before[RECORD_COUNT.name])]
    count = merged.reduce(np.add, np.concatenate(counts))
    sizes = [value_sizes(records), int64s(before[RECORD_BYTES.name])]
    size = merged.reduce(np.add, np.concatenate(sizes))
    was_too_large = np.zeros(len(labels), np.bool_)
    was_too_large[len(every.times) :] = has_no_parts(open_rows, batch.sources)
    is_excess = merged.any(was_too_large) | (batch.rules.bounds.are_exceeded(count, size) & ~waits)
    members = merged.members(records, before, len(entering.waited.times))
    small = members.of(~is_excess)
    first = merged.reduce(np.minimum, np.concatenate([every.times, opened.first]))
    last = merged.reduce(np.maximum, np.concatenate([every.times, opened.last]))
    due = batch.rules.due(first, last)
    timed_out = _is_timed_out(pa.table(columns), due, clocks) & ~waits
    columns |= {
        "status": pc.if_else(
            pa.array(timed_out), "timed_out", pc.if_else(pa.array(waits), "waiting", "open")
        ),
        "event_time": time_column(first),
        "last_event_time": time_column(last),
    }
    if batch.has_ids:
        repeated = small.repeated()
        columns[RECORD_IDS.name] = repeated.record_ids
        small = small.without(repeated.is_record, repeated.is_row)
    columns |= parts_by_source(small, values, batch)
    too_large = _too_large(pa.table(columns), timed_out, batch) | (is_excess & timed_out)
    closed_at = np.full(merged.size, NULL_TIME)
    closed_at[timed_out] = batch.rules.closed_at(
        partitions[timed_out],
        clocks.last_open(
            partitions[timed_out], columns["tenant"].filter(pa.array(timed_out)), due[timed_out]
        ),
    )
    none_at = np.full(len(opened.first), NULL_TIME)
    positions = merged.reduce(np.maximum, np.concatenate([every.positions, none_at]))
    replaces = np.full(merged.size, MAX_TIME)
    replaces[merged.row_numbers[len(entering.waited.times) :]] = opened.first
    columns |= {
        "valid": pa.array(~too_large, mask=~timed_out),
        "invalid_reason": pa.array(
            np.where(too_large, "too_large", ""), pa.string(), mask=~too_large
        ),
        "batch": pa.array(np.full(merged.size, batch.plan.batch, np.int64)),
        "generation": pa.array(np.full(merged.size, batch.plan.generation, np.int32)),
        "due": time_column(np.where(waits, NULL_TIME, due)),
        "closed_at": time_column(closed_at),
        "position": time_column(np.where(waits, positions, NULL_TIME)),
        RECORD_BYTES.name: pa.array(np.where(is_excess, 0, size)),
        RECORD_COUNT.name: pa.array(count),
        "replaces": time_column(replaces, missing=MAX_TIME),
        "delete_up_to": pa.nulls(merged.size, TIME),
    }
    schema = batch.changed_schema()
    columns |= {kind.name: pa.nulls(merged.size, kind.type) for kind in OUTCOMES}
    if waits.any():  # each is one record
        for name, kind in PLACE.items():
            place = merged.first(both(records.rows[name], before[name], kind))
            columns[name] = pc.if_else(pa.array(waits), place, pa.scalar(None, kind))
    rows = [pa.table(columns).select(schema.names)]
    if batch.has_ids:
        names = ["partition", "merge_key", *TENANT.names, "generation", RECORD_IDS.name]
        duplicates = duplicates_of(filtered(rows[0].select(names), timed_out), batch.plan.batch)
        rows.append(in_silver(duplicates, "duplicate", schema))
    if is_excess.any():
        rows.append(_excess_rows(members.of(is_excess), batch))
    if entering.deleted.num_rows:
        rows.append(in_silver(entering.deleted, None, schema))
    return _together(rows, batch)


def _labels(
    records: Positioned, entering: _Entering, batch: Batch, clocks: Clocks
) -> tuple[Int64s, Booleans]:
    """Label the merge record that each record belongs to, and each open row that changes.

    A label stands for a key and a number among the merge records of the key in this batch. A record
    that waits has a label of its own. Return the labels, those of the records first, and True for
    each open row that changes. Raise ValueError where a key has two open records.
    """
    open_rows = entering.open_rows
    is_merged = ~entering.is_waiting
    merging = records.where(is_merged)
    opened = OpenRecordTimes.of(open_rows, batch.rules)
    merging_keys, open_keys, count = _keys(merging.rows, open_rows)
    if len(np.unique(open_keys)) != len(open_keys):
        raise ValueError(_TWO_OPEN_RECORDS)
    index = session_index(merging, merging_keys, opened.by_key(open_keys, count), batch.rules)
    stride = int(index.max(initial=0)) + 1
    labels = np.empty(len(is_merged), np.int64)
    labels[is_merged] = merging_keys * stride + index
    labels[~is_merged] = count * stride + np.arange(np.count_nonzero(~is_merged))
    open_labels = open_keys * stride
    is_changed = np.isin(open_labels, labels) | _is_timed_out(open_rows, opened.due, clocks)
    # An earlier epoch's rules may have set another time, or other bounds.
    is_changed |= times_ms(open_rows["due"]) != opened.due
    size = (int64s(open_rows[column.name]) for column in (RECORD_COUNT, RECORD_BYTES))
    is_changed |= batch.rules.bounds.are_exceeded(*size) & ~has_no_parts(open_rows, batch.sources)
    return np.concatenate([labels, open_labels[is_changed]]), is_changed


def _is_timed_out(rows: pa.Table, due: Int64s, clocks: Clocks) -> Booleans:
    """Return True for each open merge record that has timed out (rule 5).

    `due`: the last moment at which it can be joined (ms).
    """
    clock = clocks.at(int64s(rows["partition"]), rows["tenant"])
    return np.asarray((clock != NULL_TIME) & (due < clock), np.bool_)


class Merged(NamedTuple):
    """Merge records that change, numbered.

    `record_numbers` and `row_numbers`: the number of the merge record that each record, and each
    row of silver, belongs to. `order`: all of these, sorted by merge record. `begins`: where each
    merge record begins in that order.
    """

    size: int
    record_numbers: Int64s
    row_numbers: Int64s
    order: Int64s
    begins: Int64s

    @classmethod
    def of(cls, labels: Int64s, records: int) -> Merged:
        """Number the merge records by their labels: equal labels are the same merge record.

        The first `records` labels are those of records, the others those of rows of silver.
        """
        order, begins = in_groups(labels)
        numbers = np.empty(len(labels), np.int64)
        numbers[order] = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(labels)))
        return cls(len(begins), numbers[:records], numbers[records:], order, begins)

    def members(self, records: Positioned, rows: pa.Table, waited: int = 0) -> Members:
        """Return the records and rows with the numbers; see `Members`."""
        return Members(records, rows, waited, self.record_numbers, self.row_numbers, self.size)

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


class Members(NamedTuple):
    """Records and rows of silver, and the numbers of the merge records that they belong to.

    The first `waited` of the rows hold records that waited. `size`: how many merge records it is.
    """

    records: Positioned
    rows: pa.Table
    waited: int
    record_numbers: Int64s
    row_numbers: Int64s
    size: int

    def without(self, is_record: Booleans, is_row: Booleans) -> Members:
        """Return these members but for some records and rows."""
        return Members(
            self.records.where(~is_record),
            filtered(self.rows, ~is_row),
            int(np.count_nonzero(~is_row[: self.waited])),
            self.record_numbers[~is_record],
            self.row_numbers[~is_row],
            self.size,
        )

    def repeated(self) -> Joined:
        """Return which of them are repeated records, and the ids of all."""
        numbers = self.record_numbers, self.row_numbers
        return joined(self.records.rows, self.rows, self.waited, numbers, self.size)

    def of(self, is_its: Booleans) -> Members:
        """Return the members of some of the merge records."""
        return self.without(~is_its[self.record_numbers], ~is_its[self.row_numbers])


def _excess_rows(members: Members, batch: Batch) -> pa.Table:
    names = [name for name in EXCESS.names if name not in ("batch", "generation")]
    kinds = pa.schema([EXCESS.field(name) for name in names])
    records = members.records.rows, records_of(members.rows, batch.inputs)
    rows = pa.concat_tables([each.select(names).cast(kinds) for each in records])
    rows = of_batch(rows, batch.plan.batch, batch.plan.generation)
    return in_silver(rows, "excess", batch.changed_schema())


def value_sizes(records: Positioned) -> Int64s:
    """Return how many bytes the value of each of some records has (`without_values`)."""
    return int64s(records.rows[_VALUE_BYTES])


def parts_by_source(
    members: Members, values: pa.ChunkedArray, batch: Batch
) -> dict[str, pa.ListArray]:
    """Return, by source, the parts of each merge record.

    `members`: the records are rows of `without_values`. `values`: those of the table that it was
    given.
    """
    return {source: _parts(source, members, values, batch) for source in batch.sources}


def _parts(source: str, members: Members, values: pa.ChunkedArray, batch: Batch) -> pa.ListArray:
    """Return a source's parts of each merge record by (event time, topic, offset), old and new."""
    records = members.records
    source_rows = np.flatnonzero(pc.equal(records.rows["source"], source).to_numpy())
    old_lists = one_chunk(members.rows[source])
    old = old_lists.flatten()
    new = records.rows.select(["topic", "partition", "offset", _ROW]).take(pa.array(source_rows))
    old_numbers = members.row_numbers[old_lists.value_parent_indices().to_numpy()]
    labels = np.concatenate([members.record_numbers[source_rows], old_numbers])
    offsets = np.concatenate([int64s(new["offset"]), int64s(old.field("offset"))])
    times = np.concatenate([records.times[source_rows], times_ms(old.field("event_time"))])
    topics = both(new["topic"], part_topics(old, batch.inputs, source), pa.string())
    topic_names = pa.array(sorted(i.topic for i in of_source(batch.inputs, source)), pa.string())
    order = np.lexsort([offsets, int64s(pc.index_in(topics, topic_names)), times, labels])
    is_new = order < new.num_rows
    read = _read(source, new.take(pa.array(order[is_new])), values, batch)
    part_values = both(read, old.field("value"), _large(batch.value_types[source]))
    if len(old):  # the new ones are in order already
        at = order.copy()
        at[is_new] = np.arange(new.num_rows)
        part_values = taken(part_values, at)
    columns = {
        "topic": one_chunk(topics.take(pa.array(order))),
        "offset": pa.array(offsets[order]),
        "event_time": time_column(times[order]),
        "value": one_chunk(part_values),
    }
    names = old.type.names
    parts = pa.StructArray.from_arrays([columns[name] for name in names], names)
    return in_lists(labels[order], parts, members.size)


def _read(source: str, records: pa.Table, values: pa.ChunkedArray, batch: Batch) -> pa.ChunkedArray:
    decode = batch.avro[source].decoder_of_accepted() if source in batch.avro else None
    places = row_values(records, "partition", "offset")
    kind = batch.read_types.get(source, batch.value_types[source])
    taken_values = _gathered(values, int64s(records[_ROW]))
    all_fit = source not in batch.changed
    return typed_values(taken_values, kind, decode, places, all_fit=all_fit)


def _too_large(rows: pa.Table, timed_out: Booleans, batch: Batch) -> Booleans:
    too_large = np.zeros(len(timed_out), bool)
    if batch.max_bytes is not None and timed_out.any():
        finished = as_read(filtered(rows, timed_out), batch.read_types)
        flags = exceeds(finished, batch.sources, batch.max_bytes)
        too_large[timed_out] = flags.to_numpy(zero_copy_only=False)
    return too_large


def _large(kind: pa.DataType) -> pa.DataType:
    """Return the type, with 64-bit offsets for text: a batch may hold more than 2 GiB of it."""
    return pa.large_string() if pa.types.is_string(kind) else kind
