"""Records that were read and wait for their tenant's clock: rows of silver that hold one record each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.columns import Booleans, input_names
from pipelines.core.types import TIME

_KEY = ["partition", "tenant", "merge_key"]


class Leaving(NamedTuple):
    """What becomes of rows that wait, by row: whether a row enters the merge; whether it is written anew, and waits on. And of
    each key of which some leave, `gone`: up to which position its rows that wait are gone (partition, tenant, merge_key, passes).
    """

    enters: Booleans
    stays: Booleans
    gone: pa.Table


def leaving(rows: pa.Table, is_reached: Booleans, is_late: Booleans) -> Leaving:
    """Rows leave where the tenant's clock has reached them, or where they are late by the rules of another epoch.

    `rows`: of silver, all that wait of the keys that are there.
    """
    leave = is_reached | is_late
    short = rows.select([*_KEY, "position"]).append_column("row", pa.array(np.arange(rows.num_rows)))
    gone = short.filter(pa.array(leave)).group_by(_KEY).aggregate([("position", "max")])
    gone = gone.rename_columns([*_KEY, "passes"]).select([*_KEY, "passes"])
    stays = np.zeros(rows.num_rows, np.bool_)
    if is_late.any():  # else each that stays lies behind all of its key that leave
        both = short.filter(pa.array(~leave)).join(gone, _KEY, join_type="inner")
        stays[both.filter(pc.less_equal(both["position"], both["passes"]))["row"].to_numpy()] = True
    return Leaving(is_reached & ~is_late, stays, gone)


def gone_rows(gone: pa.Table, schema: pa.Schema) -> pa.Table:
    """What is gone as rows of a batch's changes (`core.merge.merge`): without a status, and without anything else."""
    columns = {name: gone[name] for name in gone.column_names}
    nothing = {name: pa.nulls(gone.num_rows, kind) for name, kind in zip(schema.names, schema.types, strict=True)}
    return pa.table(nothing | columns).select(schema.names).cast(schema)


def placed(rows: pa.Table, sources: Sequence[str]) -> pa.Table:
    """Where rows that wait come from: source (the input), partition, offset, and the position of the record in its tenant."""
    places = []
    for source in sources:
        mine = rows.filter(pc.greater(pc.list_value_length(rows[source]), 0))
        parts = mine[source].combine_chunks().flatten()
        columns = [input_names(source, parts), mine["partition"], parts.field("offset"), mine["position"].cast(TIME)]
        places.append(pa.table(columns, ["source", "partition", "offset", "position"]))
    return pa.concat_tables(places)


def found_in(records: pa.Table, places: pa.Table) -> pa.Table:
    """The records at these places (`placed`), with their positions."""
    at = ["source", "partition", "offset"]
    short = records.select(at).append_column("row", pa.array(np.arange(records.num_rows)))
    both = short.join(places, at, join_type="inner").sort_by("row")
    return records.take(both["row"]).append_column("position", both["position"])
