"""The table `erased`: places of records that `forget` has erased.

So reading Kafka again does not bring them back.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Booleans, Int64s, groups, int64s
from watersmeet.core.inputs import InputId
from watersmeet.core.reading import FORGOTTEN
from watersmeet.lake import tables
from watersmeet.lake.inputs import of_input
from watersmeet.lake.table_reader import TableReader, within


def read_erased(
    reader: TableReader, input_id: InputId, since: Mapping[int, int]
) -> dict[int, Int64s]:
    """Return, by partition, the offsets from `since` on at which records of an input were erased.

    Only partitions with such offsets are included.
    """
    if not reader.exists(tables.ERASED):
        return {}
    where = of_input(input_id, within({p: (offset, None) for p, offset in since.items()}))
    places = reader.select(tables.ERASED, ["partition", "offset"], where)
    offsets = int64s(places["offset"])
    by_partition = groups(int64s(places["partition"]))
    return {p: np.unique(offsets[rows]) for p, rows in by_partition.items()}


def is_among(rows: pa.Table | pa.RecordBatch, places: Mapping[int, Int64s]) -> Booleans:
    """Return which rows have one of these offsets, which are by partition."""
    offsets = int64s(rows["offset"])
    found = np.zeros(rows.num_rows, np.bool_)
    for p, partition_rows in groups(int64s(rows["partition"])).items():
        if p in places:
            found[partition_rows] = np.isin(offsets[partition_rows], places[p])
    return found


def without_erased(rows: pa.Table, *, erased: Mapping[int, Int64s]) -> pa.Table:
    """Return rows of bronze as `forget` leaves them; `erased`: offsets by partition.

    At erased offsets, key, value, headers and id are null; places, times and tenants stay. A record
    that had a key becomes a heartbeat, since its time still moves the position. The detail of a
    refused record is `FORGOTTEN`.
    """
    is_erased = is_among(rows, erased)
    if not is_erased.any():
        return rows
    erased_mask = pa.array(is_erased)
    was_keyed = pc.is_valid(rows["merge_key"])
    is_refused = pc.is_valid(rows["reason"])
    changed = {
        **tables.emptied(rows.column_names),
        "heartbeat": pc.or_(rows["heartbeat"], pc.and_(erased_mask, was_keyed)),
        "detail": pc.if_else(pc.and_(erased_mask, is_refused), FORGOTTEN, rows["detail"]),
    }
    for name, column in changed.items():
        number = rows.column_names.index(name)
        kind = rows.schema.field(name).type
        if column is None:
            column = pc.if_else(erased_mask, pa.scalar(None, kind), rows[name])
        rows = rows.set_column(number, rows.schema.field(name), column.cast(kind))
    return rows
