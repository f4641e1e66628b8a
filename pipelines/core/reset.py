"""A deliberate reset, as a pure function: what becomes of the merge records that it closes.

Open records are closed unpublished. Where the jump goes back, the records that come again leave the merge records that hold them;
what is left of those is closed in the same way, and a merge record that loses its last part goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.columns import NEVER, Booleans, Int64s, int64s, time_column, times_ms
from pipelines.core.plan import TopicPartition

NOTHING_AGAIN = np.iinfo(np.int64).max
"""The offset from which records come again, where none do."""


def closed(rows: pa.Table, again: Mapping[TopicPartition, int], sources: Sequence[str], batch: int) -> pa.Table:
    """The merge records that a reset changes: the open ones, and those that hold a record that comes again.

    `rows`: columns of silver. `again`: by topic-partition, the offset from which its records come again. Out: silver's columns
    and `replaces`: of each key and event time that changes a row without a status, by which every merge record there goes, and
    what there is instead, as new rows. (Two merge records may share key and event time once an earlier reset has closed one.)
    """
    before, replaced = rows, times_ms(rows["event_time"])
    first, last = np.full(rows.num_rows, NEVER), np.full(rows.num_rows, -1)
    touched = np.array(pc.equal(rows["status"], "open").to_numpy())
    for source in sources:
        parts = rows[source].combine_chunks()
        kept, parents = _kept(source, parts, rows["partition"], again)
        times = times_ms(parts.flatten().field("event_time"))
        touched[parents[~kept]] = True
        np.minimum.at(first, parents[kept], times[kept])
        np.maximum.at(last, parents[kept], times[kept])
        begins = np.searchsorted(parents[kept], np.arange(rows.num_rows + 1))
        lists = pa.ListArray.from_arrays(pa.array(begins, pa.int32()), parts.flatten().filter(pa.array(kept)))
        rows = rows.set_column(rows.column_names.index(source), source, lists)
    is_gone = first == NEVER
    count = rows.num_rows
    columns = {
        "status": pa.array(np.full(count, "timed_out"), pa.string(), mask=is_gone),
        "event_time": time_column(np.where(is_gone, replaced, first)),
        "last_event_time": time_column(np.where(is_gone, replaced, last)),
        "valid": pa.array(np.zeros(count, bool)),
        "invalid_reason": pa.array(np.full(count, "reset"), pa.string()),
        "batch": pa.array(np.full(count, batch, np.int64)),
    }
    for name, column in columns.items():
        rows = rows.set_column(rows.column_names.index(name), name, column)
    places = _numbers_of_places(before, replaced)
    known, firsts = np.unique(places[touched], return_index=True)
    gone = before.take(pa.array(np.flatnonzero(touched)[firsts]))
    gone = gone.set_column(gone.column_names.index("status"), "status", pa.nulls(gone.num_rows, pa.string()))
    shared = before.filter(pa.array(np.isin(places, known) & ~touched))
    found = pa.concat_tables([rows.filter(pa.array(touched & ~is_gone)), shared.cast(rows.schema), gone.cast(rows.schema)])
    times = np.concatenate([np.full(found.num_rows - len(known), NEVER), times_ms(gone["event_time"])])
    return found.append_column("replaces", time_column(times, missing=NEVER))


def _numbers_of_places(rows: pa.Table, times: Int64s) -> Int64s:
    """Numbers every (partition, key, event time)."""
    keys = rows["merge_key"].combine_chunks().dictionary_encode().indices.to_numpy()
    _, numbers = np.unique(np.stack([int64s(rows["partition"]), keys, times]), axis=1, return_inverse=True)
    return np.asarray(numbers.reshape(-1), np.int64)


def published_again(
    rows: pa.Table, again: Mapping[TopicPartition, int], tails: Mapping[int, tuple[int, str]], sources: Sequence[str]
) -> pa.Table:
    """The merge records that hold a record that comes again, and whose message is out: partition, merge_key, event_time.

    `rows`: finished, valid rows of silver. `tails`: by partition, event time (ms) and key of the last message.
    """
    touched = np.zeros(rows.num_rows, bool)
    for source in sources:
        kept, parents = _kept(source, rows[source].combine_chunks(), rows["partition"], again)
        touched[parents[~kept]] = True
    found = rows.select(["partition", "merge_key", "event_time"]).filter(pa.array(touched))
    places = zip(found["partition"].to_pylist(), times_ms(found["event_time"]), found["merge_key"].to_pylist(), strict=True)
    ends = {p: (time, key.encode()) for p, (time, key) in tails.items()}
    return found.filter(pa.array([p in ends and (int(time), key.encode()) <= ends[p] for p, time, key in places], pa.bool_()))


def _kept(
    source: str, parts: pa.ListArray, partitions: pa.ChunkedArray, again: Mapping[TopicPartition, int]
) -> tuple[Booleans, Int64s]:
    """Of each part, whether it stays, and the row that holds it."""
    parents = np.asarray(parts.value_parent_indices().to_numpy(), np.int64)
    of_rows = int64s(partitions)
    known, numbers = np.unique(of_rows, return_inverse=True)
    since = np.array([again.get(TopicPartition(source, int(p)), NOTHING_AGAIN) for p in known], np.int64)
    return int64s(parts.flatten().field("offset")) < since[numbers][parents], parents
