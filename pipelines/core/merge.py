"""The merge for any number of rows: records and open merge records in, the merge records that change out.

The rules are those of `core.model`, which is the oracle that these functions are compared with. Everything happens in event time
and per partition; rows of several partitions may come in one call. Times are numpy columns of epoch milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.idle import Decision
from pipelines.core.message import exceeds, typed_values
from pipelines.core.plan import NO_TIME, Available, BatchPlan, Cursor, Int64s, TopicPartition, positions_of
from pipelines.core.types import TIME

RECORD_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("merge_key", pa.string()),
        ("event_time", TIME),
        ("heartbeat", pa.bool_()),
        ("value", pa.binary()),
    ]
)
"""What is read of bronze, and the name of the source."""

NEVER = np.iinfo(np.int64).max
"""Stands for the event time of an open record that a key does not have; above every real time, so minima pass over it."""


@dataclass(frozen=True)
class Batch:
    """What a silver batch is, beside its rows.

    `value_types`: by source, in the order of silver's columns, the Arrow type of a value. `idle`: the idle policy's decisions by
    topic-partition. `max_bytes`: the largest value of a message; None where the value is an expression of the configuration.
    """

    plan: BatchPlan
    value_types: Mapping[str, pa.DataType]
    timeout_ms: int
    idle: Mapping[TopicPartition, Sequence[Decision]] = field(default_factory=dict)
    max_bytes: int | None = None

    @property
    def sources(self) -> list[str]:
        """The sources, in the order of silver's columns."""
        return list(self.value_types)

    def changed_schema(self) -> pa.Schema:
        """The columns of what `merge` returns: silver's, and `replaces`."""
        return silver_schema(self.value_types).append(pa.field("replaces", TIME))


def silver_schema(value_types: Mapping[str, pa.DataType]) -> pa.Schema:
    """The columns of silver; `value_types`: by source, in the order of their columns, the type of a value."""
    types = {
        source: pa.struct([("offset", pa.int64()), ("event_time", TIME), ("value", kind)]) for source, kind in value_types.items()
    }
    return pa.schema(
        [
            ("partition", pa.int32()),
            ("merge_key", pa.string()),
            ("status", pa.string()),
            ("event_time", TIME),
            ("last_event_time", TIME),
            *((source, pa.list_(part)) for source, part in types.items()),
            ("valid", pa.bool_()),
            ("invalid_reason", pa.string()),
            ("batch", pa.int64()),
        ]
    )


LATE_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("merge_key", pa.string()),
        ("event_time", TIME),
        ("position", TIME),
        ("value", pa.binary()),
        ("batch", pa.int64()),
    ]
)


def merge(records: pa.Table, open_rows: pa.Table, batch: Batch, recovered: pa.Table | None = None) -> pa.Table:
    """The merge records that a batch changes, each once, as the merge rules have them.

    `records`: the columns of `RECORD_SCHEMA` of at least every record in the batch's ranges that has a time, in any order; others
    are passed over. `open_rows`: silver's columns of at least the open records that the batch may change. `recovered`: partition,
    merge_key and event_time of messages that were read back from the sink after a lake was lost.

    Out: silver's columns, and `replaces`: the event time of the open record that the row takes the place of, null for a new one.
    A row that times out is judged: `valid` is false and `invalid_reason` is `too_large` where its message would be larger than
    `max_bytes`. Raises ValueError where a key has two open records.
    """
    wide = records.set_column(records.column_names.index("value"), "value", records["value"].cast(pa.large_binary()))
    positioned = _positioned(wide, batch)
    on_time = positioned.where(~positioned.is_late(batch.timeout_ms))
    if recovered is not None and recovered.num_rows:
        on_time = on_time.where(~_is_published(on_time, recovered, batch.timeout_ms))
    return _changed(on_time, open_rows, batch)


def late(records: pa.Table, batch: Batch) -> pa.Table:
    """The batch's late records, with their positions: the columns of `LATE_SCHEMA`. In: as for `merge`."""
    positioned = _positioned(records, batch)
    found = positioned.where(positioned.is_late(batch.timeout_ms))
    columns = found.rows.append_column("position", time_column(found.positions))
    columns = columns.append_column("batch", pa.array(np.full(columns.num_rows, batch.plan.batch)))
    return columns.select(LATE_SCHEMA.names).cast(LATE_SCHEMA)


# -- positions


class _Positioned(NamedTuple):
    """Records with a key, in order of (partition, source, offset), with their event times and positions (ms)."""

    rows: pa.Table
    times: Int64s
    positions: Int64s

    def where(self, keep: npt.NDArray[np.bool_]) -> _Positioned:
        if keep.all():
            return self
        return _Positioned(self.rows.filter(pa.array(keep)), self.times[keep], self.positions[keep])

    def is_late(self, timeout_ms: int) -> npt.NDArray[np.bool_]:
        """Rule 3."""
        return np.asarray(self.times < self.positions - timeout_ms, np.bool_)


def _positioned(records: pa.Table, batch: Batch) -> _Positioned:
    """Positions need every record of a range, heartbeats and the idle policy's decisions too; what comes out has a key."""
    partitions, offsets = int64s(records["partition"]), int64s(records["offset"])
    times = times_ms(records["event_time"])
    sources = pc.index_in(records["source"], value_set=pa.array(batch.sources)).to_numpy()
    order = np.lexsort((offsets, sources, partitions))
    begins = np.flatnonzero(np.diff(partitions[order], prepend=-1) | np.diff(sources[order], prepend=-1))
    kept, positions = [], []
    for here in np.split(order, begins[1:]) if len(order) else []:
        tp = TopicPartition(batch.sources[sources[here[0]]], int(partitions[here[0]]))
        inside = here[_is_in_range(offsets[here], times[here], batch.plan, tp)]
        if len(inside):
            kept.append(inside)
            positions.append(_positions(offsets[inside], times[inside], batch, tp))
    if not kept:
        return _Positioned(records.slice(0, 0), np.array([], np.int64), np.array([], np.int64))
    rows = np.concatenate(kept)
    keyed = ~records["heartbeat"].to_numpy()[rows]
    rows = rows[keyed]
    return _Positioned(records.take(pa.array(rows)), times[rows], np.concatenate(positions)[keyed])


def _is_in_range(offsets: Int64s, times: Int64s, plan: BatchPlan, tp: TopicPartition) -> npt.NDArray[np.bool_]:
    done = plan.ranges.get(tp)
    if done is None:
        return np.zeros(len(offsets), bool)
    return np.asarray((offsets >= done.from_offset) & (offsets < done.until_offset) & (times != NO_TIME), np.bool_)


def _positions(offsets: Int64s, times: Int64s, batch: Batch, tp: TopicPartition) -> Int64s:
    """The running maximum of event time along a range, from the position before it on."""
    done = batch.plan.ranges[tp]
    spoken = [d for d in batch.idle.get(tp, ()) if done.from_offset <= d.after_offset + 1 < done.until_offset]
    rows = Available(offsets, times).with_idle(spoken)
    positions = positions_of(Cursor(done.from_offset, done.position_before), rows)
    return positions if rows.is_idle is None else positions[~rows.is_idle]


def _is_published(records: _Positioned, recovered: pa.Table, timeout_ms: int) -> npt.NDArray[np.bool_]:
    """Whether the sink already holds a record: a message of its key with `position <= event_time + timeout` was read back.

    The latest message of a key decides: where it does not hold the record, no earlier one does.
    """
    latest: dict[tuple[int, str], int] = {}
    for partition, key, time in zip(
        recovered["partition"].to_pylist(), recovered["merge_key"].to_pylist(), times_ms(recovered["event_time"]), strict=True
    ):
        latest[partition, key] = max(int(time), latest.get((partition, key), 0))
    keys = zip(records.rows["partition"].to_pylist(), records.rows["merge_key"].to_pylist(), strict=True)
    until = np.array([latest.get(key, NO_TIME) for key in keys], np.int64)
    return records.positions <= until + timeout_ms


# -- merge records


class _Keys(NamedTuple):
    """Records and open records by key: `of_record` and `of_open` number the keys, `open_times` (ms) is by key."""

    of_record: Int64s
    of_open: Int64s
    open_times: Int64s


def _changed(records: _Positioned, open_rows: pa.Table, batch: Batch) -> pa.Table:
    open_times = times_ms(open_rows["event_time"])
    keys = _keys(records.rows, open_rows, open_times)
    nth = _nth_of_key(records, keys, batch.timeout_ms)
    # A merge record is known by its key and its number among those of the key that this batch sees.
    stride = int(nth.max(initial=0)) + 1
    of_record, of_open = keys.of_record * stride + nth, keys.of_open * stride
    changes = np.isin(of_open, of_record) | _is_timed_out(int64s(open_rows["partition"]), open_times, batch)
    open_rows, open_times = open_rows.filter(pa.array(changes)), open_times[changes]
    merged = _Merged.of(np.concatenate([of_record, of_open[changes]]), len(of_record))

    partitions = merged.first(pa.chunked_array(records.rows["partition"].chunks + open_rows["partition"].chunks, pa.int32()))
    times = merged.reduce(np.minimum, np.concatenate([records.times, open_times]))
    last_times = merged.reduce(np.maximum, np.concatenate([records.times, times_ms(open_rows["last_event_time"])]))
    timed_out = _is_timed_out(int64s(partitions), times, batch)
    replaces = np.full(merged.size, NEVER)
    replaces[merged.of_open] = open_times
    count = merged.size
    rows = pa.table(
        {
            "partition": partitions,
            "merge_key": merged.first(_both(records.rows["merge_key"], open_rows["merge_key"], pa.large_string())),
            "status": pc.if_else(pa.array(timed_out), "timed_out", "open"),
            "event_time": time_column(times),
            "last_event_time": time_column(last_times),
            **{source: _parts(source, records, open_rows, merged, batch) for source in batch.sources},
        }
    )
    too_large = _too_large(rows, timed_out, batch)
    return pa.table(
        {
            **{name: rows[name] for name in rows.column_names},
            "valid": pa.array(~too_large, mask=~timed_out),
            "invalid_reason": pa.array(np.where(too_large, "too_large", ""), pa.string(), mask=~too_large),
            "batch": pa.array(np.full(count, batch.plan.batch, np.int64)),
            "replaces": time_column(replaces, is_null=replaces == NEVER),
        }
    )


def _keys(records: pa.Table, open_rows: pa.Table, open_times: Int64s) -> _Keys:
    """Numbers every (partition, key)."""
    texts = _both(records["merge_key"], open_rows["merge_key"], pa.large_string()).combine_chunks().dictionary_encode()
    partitions = np.concatenate([int64s(records["partition"]), int64s(open_rows["partition"])])
    codes = texts.indices.to_numpy().astype(np.int64) * (int(partitions.max(initial=0)) + 1) + partitions
    known, numbers = np.unique(codes, return_inverse=True)
    of_record, of_open = numbers[: records.num_rows], numbers[records.num_rows :]
    by_key = np.full(len(known), NEVER)
    by_key[of_open] = open_times
    if len(np.unique(of_open)) != len(of_open):
        raise ValueError("a key has two open records: silver is damaged; derive it again with `watersmeet rebuild`")
    return _Keys(of_record, of_open, by_key)


def _nth_of_key(records: _Positioned, keys: _Keys, timeout_ms: int) -> Int64s:
    """Which merge record of its key each record belongs to: 0 is the key's open record, or its first new one.

    Nearly every key has one merge record in a batch, and that is known without looking at its records one by one: where even the
    largest position is within the timeout of the smallest event time, none can open a second one. For the others, rule 4 is taken
    record by record, in order of position.
    """
    nth = np.zeros(len(keys.of_record), np.int64)
    if not len(nth):
        return nth
    order = np.lexsort((records.positions, keys.of_record))
    begins = np.flatnonzero(np.diff(keys.of_record[order], prepend=-1))
    ends = np.append(begins[1:], len(order))
    open_times = keys.open_times[keys.of_record[order[begins]]]
    first_times = np.minimum(open_times, np.minimum.reduceat(records.times[order], begins))
    last_positions = records.positions[order[ends - 1]]
    for key in np.flatnonzero(last_positions - timeout_ms > first_times):
        number, time = (-1, None) if open_times[key] == NEVER else (0, int(open_times[key]))
        for row in order[begins[key] : ends[key]]:
            if time is not None and time >= records.positions[row] - timeout_ms:
                time = min(time, int(records.times[row]))
            else:
                number, time = number + 1, int(records.times[row])
            nth[row] = number
    return nth


def _is_timed_out(partitions: Int64s, times: Int64s, batch: Batch) -> npt.NDArray[np.bool_]:
    """Rule 5, for open merge records with these event times (ms)."""
    limits = {p: clock - batch.timeout_ms for p, clock in batch.plan.clocks.items()}
    known, numbers = np.unique(partitions, return_inverse=True)
    by_partition = np.array([limits.get(int(p), NO_TIME) for p in known], np.int64)
    return times < by_partition[numbers] if len(times) else np.zeros(0, bool)


class _Merged(NamedTuple):
    """The merge records that change, numbered: what each record, then each open record, belongs to."""

    size: int
    of_record: Int64s
    of_open: Int64s
    order: Int64s
    begins: Int64s

    @classmethod
    def of(cls, labels: Int64s, records: int) -> _Merged:
        """Labels that are equal are the same merge record; the first `records` of them are of records."""
        known, numbers = np.unique(labels, return_inverse=True)
        order = np.argsort(numbers, kind="stable")
        begins = np.searchsorted(numbers[order], np.arange(len(known)))
        return cls(len(known), numbers[:records], numbers[records:], order, begins)

    def reduce(self, function: np.ufunc, values: Int64s) -> Int64s:
        """By merge record, the values of all that belongs to it, reduced to one."""
        return np.asarray(function.reduceat(values[self.order], self.begins) if self.size else [], np.int64)

    def first(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        """By merge record, the value of the first that belongs to it."""
        return values.take(pa.array(self.order[self.begins] if self.size else np.array([], np.int64)))


def _parts(source: str, records: _Positioned, open_rows: pa.Table, merged: _Merged, batch: Batch) -> pa.ListArray:
    """A source's parts of each merge record, by (event time, offset): those that are there already and the new ones."""
    mine = np.flatnonzero(pc.equal(records.rows["source"], source).to_numpy())
    new = records.rows.select(["offset", "value"]).take(pa.array(mine))
    old_lists = open_rows[source].combine_chunks()
    old = old_lists.flatten()
    labels = np.concatenate([merged.of_record[mine], merged.of_open[old_lists.value_parent_indices().to_numpy()]])
    offsets = np.concatenate([int64s(new["offset"]), int64s(old.field("offset"))])
    times = np.concatenate([records.times[mine], times_ms(old.field("event_time"))])
    order = np.lexsort((offsets, times, labels))
    kind = _large(batch.value_types[source])
    values = _both(typed_values(new["value"], batch.value_types[source]), old.field("value"), kind)
    parts = pa.StructArray.from_arrays(
        [pa.array(offsets[order]), time_column(times[order]), _whole(values.take(pa.array(order)))],
        ["offset", "event_time", "value"],
    )
    return pa.ListArray.from_arrays(pa.array(np.searchsorted(labels[order], np.arange(merged.size + 1)), pa.int32()), parts)


def _too_large(rows: pa.Table, timed_out: npt.NDArray[np.bool_], batch: Batch) -> npt.NDArray[np.bool_]:
    too_large = np.zeros(len(timed_out), bool)
    if batch.max_bytes is not None and timed_out.any():
        too_large[timed_out] = exceeds(rows.filter(pa.array(timed_out)), batch.sources, batch.max_bytes).to_numpy(
            zero_copy_only=False
        )
    return too_large


# -- columns


def int64s(column: pa.Array | pa.ChunkedArray) -> Int64s:
    """A column of integers without nulls as numpy's."""
    return np.asarray(column.to_numpy(), np.int64)


def times_ms(column: pa.Array | pa.ChunkedArray) -> Int64s:
    """A column of times as epoch milliseconds, `NO_TIME` where null."""
    microseconds = column.cast(pa.int64())
    return np.asarray(pc.fill_null(pc.divide(microseconds, 1000), NO_TIME).to_numpy(), np.int64)


def time_column(times: Int64s, is_null: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """Epoch milliseconds as a column of times."""
    microseconds = np.where(is_null, 0, times) * 1000 if is_null is not None else times * 1000
    return pa.array(microseconds, pa.int64(), mask=is_null).cast(TIME)


def _both(one: Any, other: Any, kind: pa.DataType) -> pa.ChunkedArray:
    """Two columns one after the other, as a type whose offsets do not overflow."""
    chunks = [chunk for column in (one, other) for chunk in (column.chunks if isinstance(column, pa.ChunkedArray) else [column])]
    return pa.chunked_array([chunk.cast(kind) for chunk in chunks], kind)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    whole = column.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def _large(kind: pa.DataType) -> pa.DataType:
    """The same type with 64-bit offsets for texts at its top: a batch may hold more than 2 GiB of them."""
    return pa.large_string() if pa.types.is_string(kind) else kind
