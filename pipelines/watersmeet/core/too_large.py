"""Merge records that are too large: they have no parts, and each of their records is `excess`.

All or none of its records are parts: which of them come first depends on how they arrived. A merge
record that is too large stays so, and a row of silver without parts is of no other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Booleans, int64s, one_chunk, part_topics
from watersmeet.core.inputs import InputId
from watersmeet.core.repeated import RECORD_IDS
from watersmeet.core.types import PLACE, TIME, schema_of

RECORD_COUNT: Final = pa.field("record_count", pa.int64())
"""The column of silver with the number of records that have joined a merge record."""

EXCESS: Final = schema_of(
    "source string, topic string, partition int, offset bigint, tenant string, merge_key string, "
    "event_time timestamp, batch bigint, generation int"
)
"""The columns of a row `excess`: a record of a merge record that is too large. `batch` is the one
that found it too large, or merged the record since.
"""

_NAMES: Final = ("partition", "tenant", "merge_key")


def has_no_parts(rows: pa.Table, sources: Iterable[str]) -> Booleans:
    """Return True for each merge record among rows of silver that is too large."""
    parts = np.zeros(rows.num_rows, np.int64)
    for source in sources:
        parts += int64s(pc.fill_null(pc.list_value_length(rows[source]), 0))
    return np.asarray(parts == 0, np.bool_)


def records_of(
    rows: pa.Table, inputs: Collection[InputId], names: Sequence[str] = _NAMES
) -> pa.Table:
    """Return the records (source, topic, offset, event time) in merge records, with row columns."""
    kinds = [rows.schema.field(name) for name in names]
    schema = pa.schema([*PLACE.items(), ("event_time", TIME), *kinds])
    records = [schema.empty_table()]

    def add(sources: pa.Array, topics: pa.Array, entries: pa.Array, parents: pa.Array) -> None:
        places = (sources, topics, entries.field("offset"), entries.field("event_time"))
        columns = [*places, *(rows[name].take(parents) for name in names)]
        records.append(pa.table(columns, schema.names).cast(schema))

    for source in dict.fromkeys(input_id.source for input_id in inputs):
        lists = one_chunk(rows[source])
        parts = lists.flatten()
        sources = pa.repeat(pa.scalar(source), len(parts))
        add(sources, part_topics(parts, inputs, source), parts, lists.value_parent_indices())
    if RECORD_IDS.name in rows.column_names:
        lists = one_chunk(rows[RECORD_IDS.name])
        is_duplicate = lists.flatten().field("of_offset").is_valid()
        entries = lists.flatten().filter(is_duplicate)
        parents = lists.value_parent_indices().filter(is_duplicate)
        add(entries.field("source"), entries.field("topic"), entries, parents)
    return pa.concat_tables(records)
