"""The merge records that were open when the history of a lake begins, from which older rows have been deleted."""

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
from pipelines.core.types import DUE, TIME, own_columns


def open_before(rows: pa.Table, ends: Mapping[TopicPartition, int], sources: Sequence[str]) -> pa.Table:
    """What merge records held of the offsets before these ends (by topic-partition), as open rows; of those that held nothing,
    nothing. `rows`: columns of silver, of merge records that were open then or opened later. Out: silver's columns.
    """
    count, (columns, is_left) = rows.num_rows, _left(rows, ends, sources)
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


def _left(rows: pa.Table, ends: Mapping[TopicPartition, int], sources: Sequence[str]) -> tuple[dict[str, Any], Booleans]:
    """Rows of silver with their parts before some offsets alone: the columns, and whether a row has such parts."""
    count = rows.num_rows
    first, last = np.full(count, NEVER), np.full(count, NO_TIME)
    columns = {name: rows[name] for name in rows.column_names}
    for source in sources:
        parts = rows[source].combine_chunks()
        kept, parents = _is_before(source, parts, rows["partition"], ends)
        parents, left = parents[kept], parts.flatten().filter(pa.array(kept))
        times = times_ms(left.field("event_time"))
        np.minimum.at(first, parents, times)
        np.maximum.at(last, parents, times)
        columns[source] = in_lists(parents, left, count)
    columns |= {"event_time": time_column(first, missing=NEVER), "last_event_time": time_column(last)}
    return columns, first < NEVER


def _is_before(
    source: str, parts: pa.ListArray, partitions: pa.ChunkedArray, ends: Mapping[TopicPartition, int]
) -> tuple[Booleans, Int64s]:
    """Of each part, whether it is before the end of its topic-partition, and the row that holds it."""
    parents, flat = int64s(parts.value_parent_indices()), parts.flatten()
    inputs, since = input_names(source, flat), np.full(len(parents), NEVER)
    for name in pc.unique(inputs).to_pylist():
        of_input = looked_up(int64s(partitions), {tp.partition: at for tp, at in ends.items() if tp.source == name}, NEVER)
        mine = pc.equal(inputs, name).to_numpy(zero_copy_only=False)
        since[mine] = of_input[parents[mine]]
    return np.asarray(int64s(flat.field("offset")) < since, np.bool_), parents
