"""Records that were read and wait for their tenant's clock: rows of silver that hold one record
each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import Booleans, numbered

_KEY = ["partition", "tenant", "merge_key"]
_PLACE = ["source", "topic", "partition", "offset"]


class Released(NamedTuple):
    """Outcome for rows that wait."""

    enters: Booleans
    """True for each row that enters the merge."""
    stays: Booleans
    """True for each row that is written anew and waits on."""
    deleted: pa.Table
    """The position up to which a key's waiting rows are deleted, for keys with rows that leave.

    The columns are partition, tenant, merge_key and delete_up_to.
    """


def release(rows: pa.Table, is_reached: Booleans, is_late: Booleans) -> Released:
    """Decide which rows leave, among all that wait of the keys that are there.

    A row leaves where the tenant's clock has reached it, or where it is late by the rules of
    another epoch. `rows` are those of silver.
    """
    leave = is_reached | is_late
    short = numbered(rows.select([*_KEY, "position"]), "row")
    deleted = short.filter(pa.array(leave)).group_by(_KEY).aggregate([("position", "max")])
    deleted = deleted.rename_columns([*_KEY, "delete_up_to"]).select([*_KEY, "delete_up_to"])
    stays = np.zeros(rows.num_rows, np.bool_)
    if is_late.any():  # else all rows that stay come after those of their key that leave
        both = short.filter(pa.array(~leave)).join(deleted, _KEY, join_type="inner")
        stays[
            both.filter(pc.less_equal(both["position"], both["delete_up_to"]))["row"].to_numpy()
        ] = True
    return Released(is_reached & ~is_late, stays, deleted)


def records_at(records: pa.Table, waiting: pa.Table) -> pa.Table:
    """Return the records that some rows of silver hold which wait, with the positions there."""
    places = waiting.select([*_PLACE, "position"])
    short = numbered(records.select(_PLACE), "row")
    both = short.join(places, _PLACE, join_type="inner").sort_by("row")
    return records.take(both["row"]).append_column("position", both["position"])
