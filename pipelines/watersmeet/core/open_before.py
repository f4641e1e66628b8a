"""Merge records that were open where the history of a lake begins.

Older rows of such a lake have been deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import (
    MAX_TIME,
    NULL_TIME,
    Booleans,
    Int64s,
    in_lists,
    int64s,
    looked_up,
    numbered,
    one_chunk,
    time_column,
    times_ms,
)
from watersmeet.core.input_columns import part_topics
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.reading import RECORD_BYTES
from watersmeet.core.repeated import RECORD_IDS
from watersmeet.core.too_large import RECORD_COUNT, has_no_parts, records_of
from watersmeet.core.types import DUE, TIME


def open_before(
    rows: pa.Table,
    excess: pa.Table,
    ends: Mapping[TopicPartition, int],
    inputs: Sequence[InputId],
) -> pa.Table:
    """Return merge records as they were open before these ends, with silver's columns.

    - `rows`: columns of silver, of merge records that were open then or opened later.
    - `excess`: the same of rows of records that are excess.
    - `ends`: the exclusive end offset by topic-partition.

    A row keeps its parts before these, and the repeated records, and is left out where it has none,
    and no such record is excess. How many bytes they had then is not known; they count for none.
    """
    count = rows.num_rows
    columns, has_parts = _parts_before(rows, excess, ends, inputs)
    columns |= {
        "status": pa.repeat(pa.scalar("open"), count),
        "valid": pa.nulls(count, pa.bool_()),
        "invalid_reason": pa.nulls(count, pa.string()),
        # No clock has closed these rows, and the merge sets when they are due.
        **dict.fromkeys([*DUE.names, "position"], pa.nulls(count, TIME)),
    }
    return pa.table(columns).filter(pa.array(has_parts)).cast(rows.schema)


def _parts_before(
    rows: pa.Table,
    excess: pa.Table,
    ends: Mapping[TopicPartition, int],
    inputs: Sequence[InputId],
) -> tuple[dict[str, Any], Booleans]:
    """Return rows of silver with only their parts before some offsets.

    The result is the columns, and True for each row with such parts.
    """
    count = rows.num_rows
    first = np.full(count, MAX_TIME)
    last = np.full(count, NULL_TIME)
    columns = {name: rows[name] for name in rows.column_names}
    for source in dict.fromkeys(input_id.source for input_id in inputs):
        parts = one_chunk(rows[source])
        kept, parents = _is_before(source, parts, rows["partition"], ends, inputs)
        parents = parents[kept]
        kept_parts = parts.flatten().filter(pa.array(kept))
        times = times_ms(kept_parts.field("event_time"))
        np.minimum.at(first, parents, times)
        np.maximum.at(last, parents, times)
        columns[source] = in_lists(parents, kept_parts, count)
    if RECORD_IDS.name in columns:
        columns[RECORD_IDS.name], parents, times = _ids_before(rows, ends)
        np.minimum.at(first, parents, times)
        np.maximum.at(last, parents, times)
    sources = list(dict.fromkeys(input_id.source for input_id in inputs))
    for row, times in _excess_before(rows, excess, ends, sources):
        first[row], last[row] = times.min(), times.max()
    held = {name: columns[name] for name in columns if name in (*sources, RECORD_IDS.name)}
    records = records_of(numbered(pa.table({**held}), "row"), inputs, ["row"])
    columns |= {
        "event_time": time_column(first, missing=MAX_TIME),
        "last_event_time": time_column(last),
        RECORD_BYTES.name: pa.repeat(0, count),
        RECORD_COUNT.name: pa.array(np.bincount(int64s(records["row"]), minlength=count)),
    }
    return columns, first < MAX_TIME


def _excess_before(
    rows: pa.Table,
    excess: pa.Table,
    ends: Mapping[TopicPartition, int],
    sources: Sequence[str],
) -> Iterator[tuple[int, Int64s]]:
    """Yield the number of each too large merge record that had records before some offsets, and the
    event times (ms) of these.
    """
    names = ["partition", "tenant", "merge_key"]
    times = defaultdict[tuple[Any, ...], list[int]](list)
    places = (excess[name].to_pylist() for name in ("source", "topic", "partition", "offset"))
    of_key = zip(*(excess[name].to_pylist() for name in names), strict=True)
    event_times = times_ms(excess["event_time"]).tolist()
    for (source, topic, p, offset), key, time in zip(
        zip(*places, strict=True), of_key, event_times, strict=True
    ):
        if offset < ends.get(TopicPartition(InputId(source, topic), p), MAX_TIME):
            times[key].append(time)
    first, last = (times_ms(rows[name]) for name in ("event_time", "last_event_time"))
    keys = [*zip(*(rows[name].to_pylist() for name in names), strict=True)]
    for row in np.flatnonzero(has_no_parts(rows, sources)).tolist():
        of_row = np.array(times[keys[row]], np.int64)
        of_row = of_row[(first[row] <= of_row) & (of_row <= last[row])]
        if len(of_row):
            yield row, of_row


def _ids_before(
    rows: pa.Table, ends: Mapping[TopicPartition, int]
) -> tuple[pa.ListArray, Int64s, Int64s]:
    """Return the ids of the records before some offsets, as a column of silver.

    Beside it, the row and the event time (ms) of each of these records.
    """
    count = rows.num_rows
    lists = rows[RECORD_IDS.name].combine_chunks()
    parents = int64s(lists.value_parent_indices())
    flat = lists.flatten()
    partitions = int64s(rows["partition"])[parents].tolist()
    places = zip(
        *(flat.field(name).to_pylist() for name in ("source", "topic")), partitions, strict=True
    )
    until = [
        ends.get(TopicPartition(InputId(source, topic), p), MAX_TIME) for source, topic, p in places
    ]
    kept = int64s(flat.field("offset")) < np.array(until, np.int64)
    entries = flat.filter(pa.array(kept))
    parents = parents[kept]
    trimmed = in_lists(parents, entries, count)
    is_empty = np.isin(np.arange(count), parents, invert=True)
    trimmed = trimmed.take(pa.array(np.arange(count), mask=is_empty))
    return trimmed, parents, times_ms(entries.field("event_time"))


def _is_before(
    source: str,
    parts: pa.ListArray,
    partitions: pa.ChunkedArray,
    ends: Mapping[TopicPartition, int],
    inputs: Sequence[InputId],
) -> tuple[Booleans, Int64s]:
    """Return True for each part before the end of its topic-partition, and each part's row."""
    parents = int64s(parts.value_parent_indices())
    flat = parts.flatten()
    topics = part_topics(flat, inputs, source)
    since = np.full(len(parents), MAX_TIME)
    for topic in pc.unique(topics).to_pylist():
        input_id = InputId(source, topic)
        ends_of_input = {tp.partition: at for tp, at in ends.items() if tp.input == input_id}
        row_ends = looked_up(int64s(partitions), ends_of_input, MAX_TIME)
        is_from_input = pc.equal(topics, topic).to_numpy(zero_copy_only=False)
        since[is_from_input] = row_ends[parents[is_from_input]]
    return np.asarray(int64s(flat.field("offset")) < since, np.bool_), parents
