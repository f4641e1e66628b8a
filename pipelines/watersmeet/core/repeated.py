"""Repeated records: of the records of an input with one id in a merge record, the first is a part.

The others join their merge record like any other, and are its duplicates. A merge record keeps the
ids of its parts, so that no later batch needs anything else to find what is repeated, and which
records repeat them: until it closes, these may still become excess (`core.too_large`). Records of a
topic-partition are merged in order of offset; so the first one stays the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Booleans, Int64s, both, in_lists, int64s
from watersmeet.core.types import PLACE, TENANT, TIME, schema_of

ID: Final = pa.field("id", pa.string())
"""The column of bronze with a record's id, where records have one.

Null for a record without one, and for one without a key.
"""

_ENTRY: Final = pa.struct(
    [*PLACE.items(), ("event_time", TIME), ("id", pa.string()), ("of_offset", pa.int64())]
)

RECORD_IDS: Final = pa.field("record_ids", pa.list_(_ENTRY))
"""The column of silver with each record of a merge record that has an id, part or duplicate.

They are in order of source, topic and offset. A part has its `id`; a duplicate has `of_offset`, the
offset of the part with its id, instead. The column is null where no record has an id.
"""

DUPLICATE_SCHEMA: Final = schema_of(
    "source string, topic string, partition int, offset bigint, merge_key string, event_time "
    "timestamp, id string, of_offset bigint, is_late boolean, batch bigint, generation int, "
    "tenant string"
)
"""The columns of `duplicates`. `of_offset`: the offset of the part that counts."""


class Joined(NamedTuple):
    """Ids of the records of merge records (`record_ids`), by which repeated ones were found.

    `is_record`: by record of the batch, and `is_row`: by row of silver with a waiting record,
    whether it is a duplicate now.
    """

    is_record: Booleans
    is_row: Booleans
    record_ids: pa.ChunkedArray


def joined(
    records: pa.Table, rows: pa.Table, waited: int, numbers: tuple[Int64s, Int64s], count: int
) -> Joined:
    """Find the repeated records of `count` merge records.

    `records`: source, topic, offset, event_time and id of those that join. `rows`: silver's rows of
    the merge records before, the first `waited` of them with records that waited. `numbers`: those
    of the merge records that the records, and the rows, belong to.
    """
    with_id = np.flatnonzero(records[ID.name].is_valid().to_numpy())
    new = records.select(["source", "topic", "offset", "event_time", ID.name]).take(
        pa.array(with_id)
    )
    lists = rows[RECORD_IDS.name].combine_chunks()
    parents = int64s(lists.value_parent_indices())
    old = lists.flatten()
    columns = {
        name: both(new[name], old.field(name), kind)
        for name, kind in (*PLACE.items(), ("event_time", TIME), ("id", pa.large_string()))
    }
    labels = np.concatenate([numbers[0][with_id], numbers[1][parents]])
    offsets = int64s(columns["offset"])
    inputs = [_codes(columns[name]) for name in ("topic", "source")]
    old_offsets = pc.coalesce(old.field("of_offset"), old.field("offset"))
    of_offsets = np.concatenate([offsets[: len(with_id)], int64s(old_offsets)])
    has_id = np.flatnonzero(columns["id"].is_valid().to_numpy())
    ids = _codes(columns["id"].take(pa.array(has_id)))
    likeness = [ids, *(codes[has_id] for codes in (*inputs, labels))]
    of_offsets[has_id] = _first_offsets(offsets[has_id], likeness)
    is_duplicate = np.asarray(of_offsets != offsets, np.bool_)

    is_record = np.zeros(records.num_rows, np.bool_)
    is_record[with_id] = is_duplicate[: len(with_id)]
    is_row = np.zeros(rows.num_rows, np.bool_)
    is_row[parents] = is_duplicate[len(with_id) :]
    is_row[waited:] = False
    columns["of_offset"] = pa.array(of_offsets, mask=~is_duplicate)
    columns["id"] = pc.if_else(pa.array(is_duplicate), None, columns["id"])
    order = np.lexsort([offsets, *inputs, labels])
    return Joined(is_record, is_row, _as_lists(columns, labels, order, count))


def _codes(texts: pa.ChunkedArray) -> Int64s:
    encoded = texts.combine_chunks().dictionary_encode()
    ranks = np.empty(len(encoded.dictionary), np.int64)
    ranks[int64s(pc.sort_indices(encoded.dictionary))] = np.arange(len(ranks))
    return ranks[int64s(encoded.indices)]


def _first_offsets(offsets: Int64s, keys: Sequence[Int64s]) -> Int64s:
    order = np.lexsort([offsets, *keys])
    begins = np.zeros(len(order), np.bool_)
    begins[:1] = True
    for key in keys:
        begins[1:] |= np.diff(key[order]) != 0
    first = np.empty(len(order), np.int64)
    first[order] = offsets[order][np.flatnonzero(begins)][np.cumsum(begins) - 1]
    return first


def _as_lists(
    columns: dict[str, Any], labels: Int64s, order: Int64s, count: int
) -> pa.ChunkedArray:
    taken = pa.table(columns).take(pa.array(order)).combine_chunks()
    entries = pa.StructArray.from_arrays(
        [taken[kind.name].cast(kind.type).combine_chunks() for kind in _ENTRY],
        fields=list(_ENTRY),
    )
    lists = in_lists(labels[order], entries, count)
    is_empty = pc.equal(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return pa.chunked_array([lists.take(pa.array(np.arange(count), mask=is_empty))])


def duplicates_of(rows: pa.Table, batch: int) -> pa.Table:
    """Return the duplicates (`DUPLICATE_SCHEMA`) of the merge records that a batch closes."""
    lists = rows[RECORD_IDS.name].combine_chunks()
    entries = lists.flatten()
    columns = {kind.name: entries.field(kind.name) for kind in _ENTRY}
    columns["row"] = lists.value_parent_indices().cast(pa.int64())
    every = pa.table(columns)
    is_duplicate = every["of_offset"].is_valid()
    repeated = every.filter(is_duplicate).drop_columns("id")
    parts = every.filter(pc.invert(is_duplicate)).select(["row", "source", "topic", "offset", "id"])
    part = ["row", "source", "topic", "of_offset"]
    repeated = repeated.join(parts, part, [*part[:-1], "offset"], join_type="inner")
    names = ("partition", "merge_key", *TENANT.names, "generation")
    for name in names:
        repeated = repeated.append_column(name, rows[name].take(repeated["row"]))
    repeated = repeated.append_column("is_late", pa.repeat(pa.scalar(False), len(repeated)))
    repeated = repeated.append_column("batch", pa.array(np.full(len(repeated), batch)))
    duplicates = repeated.select(DUPLICATE_SCHEMA.names).cast(DUPLICATE_SCHEMA)
    return duplicates.sort_by(
        [(name, "ascending") for name in ("source", "topic", "partition", "offset")]
    )
