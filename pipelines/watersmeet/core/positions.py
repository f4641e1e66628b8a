"""Records of a batch with their event times and positions, and what the rules say of them.

Records that wait for their tenant's clock are rows of silver that hold one record each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import (
    NULL_TIME,
    Booleans,
    Int64s,
    both,
    int64s,
    looked_up,
    numbered,
    time_column,
    times_ms,
)
from watersmeet.core.plan import Rules, TopicPartition, by_topic_partition

NAMES = {"partition": pa.int32(), "merge_key": pa.large_string(), "tenant": pa.large_string()}
"""The columns that identify a row's merge record, except for its time."""


class Positioned(NamedTuple):
    """Records with a key, with their event times and positions (ms)."""

    rows: pa.Table
    times: Int64s
    positions: Int64s

    @classmethod
    def of_waiting(cls, rows: pa.Table) -> Positioned:
        """Return the records in rows of silver that wait for their tenants."""
        return cls(rows, times_ms(rows["event_time"]), times_ms(rows["position"]))

    def with_positions(self) -> pa.Table:
        """Return the rows with their positions."""
        return self.rows.append_column("position", time_column(self.positions))

    def with_others(self, others: Positioned) -> Positioned:
        """Return these records, then others; the rows have at least the columns `NAMES`."""
        if not len(others.times):
            return self
        rows = pa.table(
            {name: both(self.rows[name], others.rows[name], kind) for name, kind in NAMES.items()}
        )
        times = np.concatenate([self.times, others.times])
        positions = np.concatenate([self.positions, others.positions])
        return Positioned(rows, times, positions)

    def where(self, keep: Booleans) -> Positioned:
        """Return only the rows to keep, with their times and positions."""
        if keep.all():
            return self
        return Positioned(self.rows.filter(pa.array(keep)), self.times[keep], self.positions[keep])

    def is_late(self, rules: Rules) -> Booleans:
        """Return True for each record that is late (rule 3)."""
        partitions = int64s(self.rows["partition"])
        oldest = rules.late_before(partitions, self.positions, self.rows["tenant"])
        return np.asarray(self.times < oldest, np.bool_)

    def is_passed_over(self, rules: Rules, out: Mapping[TopicPartition, Int64s]) -> Booleans:
        """Return True for records that a lost lake has decided, or that are among the `out`."""
        is_passed_over = np.zeros(len(self.positions), np.bool_)
        if rules.since:
            is_passed_over |= self.positions < looked_up(
                int64s(self.rows["partition"]), rules.since, NULL_TIME
            )
        if out:
            offsets = int64s(self.rows["offset"])
            inputs = list(dict.fromkeys(tp.input for tp in out))
            for tp, numbers in by_topic_partition(self.rows, inputs, offsets).items():
                if tp in out:
                    is_passed_over[numbers] |= np.isin(offsets[numbers], out[tp])
        return is_passed_over


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


class NotReadError(ValueError):
    """Some of the records that wait for their tenants were not read.

    `args`: their sources, how many they are, and how many were to be read.
    """


def late_by_now(waiting: pa.Table, rules: Rules) -> pa.Table:
    """Return those rows of silver that wait and are late by the rules of another epoch."""
    rows = Positioned.of_waiting(waiting)
    return rows.where(rows.is_late(rules)).rows


def records_at(records: pa.Table, waiting: pa.Table) -> pa.Table:
    """Return the records that some rows of silver hold which wait, with the positions there.

    Raises NotReadError where one of them is not among `records`.
    """
    places = waiting.select([*_PLACE, "position"])
    short = numbered(records.select(_PLACE), "row")
    both = short.join(places, _PLACE, join_type="inner").sort_by("row")
    missing = places.join(short, _PLACE, join_type="left anti")
    if missing.num_rows:
        sources = sorted(set(missing["source"].to_pylist()))
        raise NotReadError(" and ".join(sources), missing.num_rows, places.num_rows)
    return records.take(both["row"]).append_column("position", both["position"])
