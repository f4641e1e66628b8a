"""A deliberate reset, as a pure function: what becomes of the merge records that it closes.

Open records are closed unpublished, and so is each record that waits for its tenant, as one of its own. Where the jump goes back,
the records that come again leave the merge records that hold them; what is left of those is closed in the same way, and a merge
record that loses its last part goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.columns import (
    NEVER,
    NO_TIME,
    Booleans,
    Int64s,
    in_lists,
    input_names,
    int64s,
    looked_up,
    time_column,
    times_ms,
)
from pipelines.core.plan import TopicPartition
from pipelines.core.sequence import Tail, place_of
from pipelines.core.types import DUE, TENANT, TIME, has_due, has_tenants, own_columns
from pipelines.core.waiting import gone_rows, leaving


def closed(rows: pa.Table, again: Mapping[TopicPartition, int], sources: Sequence[str], batch: int) -> pa.Table:
    """The merge records that a reset changes: the open ones, and those that hold a record that comes again.

    `rows`: columns of silver. `again`: by topic-partition, the offset from which its records come again. Out: silver's columns
    and which rows they take the place of (`core.merge.REPLACING`): of each key and event time that changes a row without a
    status, by which every merge record there goes, and what there is instead, as new rows. (Two merge records may share key and
    event time once an earlier reset has closed one.)
    """
    count, (columns, is_left, loses) = rows.num_rows, _left(rows, again, sources)
    waits = np.array(pc.equal(rows["status"], "waiting").to_numpy())
    touched = loses | waits | np.array(pc.equal(rows["status"], "open").to_numpy())
    columns |= {
        "status": pa.repeat(pa.scalar("timed_out"), count),
        "valid": pa.repeat(pa.scalar(False), count),
        "invalid_reason": pa.repeat(pa.scalar("reset"), count),
        "batch": pa.array(np.full(count, batch)),
        **_without_due(rows),
    }
    places = _numbers_of_places(rows)
    known, firsts = np.unique(places[touched & ~waits], return_index=True)
    gone = rows.take(pa.array(np.flatnonzero(touched & ~waits)[firsts]))
    gone = gone.set_column(gone.column_names.index("status"), "status", pa.nulls(gone.num_rows, pa.string()))
    shared = rows.filter(pa.array(np.isin(places, known) & ~touched))
    new = pa.concat_tables([pa.table(columns).filter(pa.array(touched & is_left)).cast(rows.schema), shared])
    found = pa.concat_tables([new, gone.cast(rows.schema)])
    found = found.append_column("replaces", pa.chunked_array([pa.nulls(new.num_rows, TIME), *gone["event_time"].chunks]))
    if not has_tenants(rows.schema):
        return found
    waiting, everything = rows.filter(pa.array(waits)), np.ones(np.count_nonzero(waits), np.bool_)
    found = found.append_column("passes", pa.nulls(found.num_rows, TIME))
    return pa.concat_tables([found, gone_rows(leaving(waiting, everything, ~everything).gone, found.schema)])


def open_before(rows: pa.Table, ends: Mapping[TopicPartition, int], sources: Sequence[str]) -> pa.Table:
    """What merge records held of the offsets before these ends (by topic-partition), as open rows; of those that held nothing,
    nothing. `rows`: columns of silver, of merge records that were open then or opened later. Out: silver's columns.
    """
    count, (columns, is_left, _) = rows.num_rows, _left(rows, ends, sources)
    columns |= {
        "status": pa.repeat(pa.scalar("open"), count),
        "valid": pa.nulls(count, pa.bool_()),
        "invalid_reason": pa.nulls(count, pa.string()),
        **_without_due(rows),
    }
    return pa.table(columns).filter(pa.array(is_left)).cast(rows.schema)


def _without_due(rows: pa.Table) -> dict[str, pa.Array]:
    """The columns of `DUE`, if there are any: no clock has closed these rows, and the merge sets what is due of open ones. The
    same goes for the position of what waits.
    """
    times = pa.schema([*DUE, ("position", TIME)])
    return {name: pa.nulls(rows.num_rows, TIME) for name in own_columns(rows.schema, times)}


def _left(
    rows: pa.Table, ends: Mapping[TopicPartition, int], sources: Sequence[str]
) -> tuple[dict[str, Any], Booleans, Booleans]:
    """Rows of silver with their parts before some offsets alone: the columns, whether a row has such parts, and others."""
    count = rows.num_rows
    first, last, loses = np.full(count, NEVER), np.full(count, NO_TIME), np.zeros(count, np.bool_)
    columns = {name: rows[name] for name in rows.column_names}
    for source in sources:
        parts = rows[source].combine_chunks()
        kept, parents = _kept(source, parts, rows["partition"], ends)
        loses[parents[~kept]] = True
        parents, left = parents[kept], parts.flatten().filter(pa.array(kept))
        times = times_ms(left.field("event_time"))
        np.minimum.at(first, parents, times)
        np.maximum.at(last, parents, times)
        columns[source] = in_lists(parents, left, count)
    columns |= {"event_time": time_column(first, missing=NEVER), "last_event_time": time_column(last)}
    return columns, first < NEVER, loses


def _numbers_of_places(rows: pa.Table) -> Int64s:
    """Numbers every (partition, key, event time), with tenants (partition, tenant, key, event time)."""
    names = ["merge_key", *own_columns(rows.schema, TENANT)]
    texts = [int64s(rows[name].combine_chunks().dictionary_encode().indices) for name in names]
    columns = [int64s(rows["partition"]), *texts, times_ms(rows["event_time"])]
    return np.asarray(np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1), np.int64)


def published_again(
    rows: pa.Table, again: Mapping[TopicPartition, int], tails: Mapping[int, Tail], sources: Sequence[str]
) -> pa.Table:
    """The merge records that hold a record that comes again, and whose message is out: partition, merge_key, event_time, and
    where silver has them the tenant, closed_at, and due, which is the last clock that it was open at: by another epoch's rules
    perhaps. (With tenants due stays what it was: records come by the clocks of their tenants.)

    `rows`: finished, valid rows of silver. `tails`: by partition, the last message.
    """
    touched = np.zeros(rows.num_rows, bool)
    for source in sources:
        kept, parents = _kept(source, rows[source].combine_chunks(), rows["partition"], again)
        touched[parents[~kept]] = True
    of_closing = [*own_columns(rows.schema, DUE), *own_columns(rows.schema, TENANT)]
    found = rows.select(["partition", "merge_key", "event_time", *of_closing]).filter(pa.array(touched))
    keys, times = found["merge_key"].to_pylist(), times_ms(found["event_time"]).tolist()
    closing = [_listed(found[name]) for name in of_closing]
    places = (place_of(*each) for each in zip(times, keys, *closing, strict=True))
    ends = {p: tail.place for p, tail in tails.items()}
    is_out = [p in ends and place <= ends[p] for p, place in zip(found["partition"].to_pylist(), places, strict=True)]
    if has_due(rows.schema) and not has_tenants(rows.schema):
        open_until = np.maximum(times_ms(found["due"]), times_ms(found["closed_at"]) - 1)
        was_closed = times_ms(found["closed_at"]) != NO_TIME
        found = found.set_column(found.column_names.index("due"), "due", time_column(np.where(was_closed, open_until, NO_TIME)))
    return found.filter(pa.array(is_out, pa.bool_()))


def _listed(column: pa.ChunkedArray) -> list[Any]:
    """A column as Python's values, times as ms."""
    if pa.types.is_timestamp(column.type):
        return [None if at == NO_TIME else at for at in times_ms(column).tolist()]
    return list(column.to_pylist())


def _kept(
    source: str, parts: pa.ListArray, partitions: pa.ChunkedArray, again: Mapping[TopicPartition, int]
) -> tuple[Booleans, Int64s]:
    """Of each part, whether it stays, and the row that holds it."""
    parents, flat = int64s(parts.value_parent_indices()), parts.flatten()
    inputs, since = input_names(source, flat), np.full(len(parents), NEVER)
    for name in pc.unique(inputs).to_pylist():
        of_input = looked_up(int64s(partitions), {tp.partition: at for tp, at in again.items() if tp.source == name}, NEVER)
        mine = pc.equal(inputs, name).to_numpy(zero_copy_only=False)
        since[mine] = of_input[parents[mine]]
    return np.asarray(int64s(flat.field("offset")) < since, np.bool_), parents
