"""Positions of a batch's records, on their topic-partitions or in their tenants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipelines.core.columns import NULL_TIME, Booleans, Int64s, both, int64s, looked_up, times_ms
from pipelines.core.idle import IdleDecision
from pipelines.core.plan import (
    Available,
    BatchPlan,
    Cursor,
    OffsetRange,
    Rules,
    TopicPartition,
    by_topic_partition,
    positions_of,
)
from pipelines.core.tenants import TenantClocks

NAMES = {"partition": pa.int32(), "merge_key": pa.large_string(), "tenant": pa.large_string()}
"""The columns that identify a row's merge record, except for its time.

`tenant` is only there with tenants.
"""

Idle = Mapping[TopicPartition, Sequence[IdleDecision]]


class Positioned(NamedTuple):
    """Records with a key, with their event times and positions (ms)."""

    rows: pa.Table
    times: Int64s
    positions: Int64s

    @classmethod
    def of(
        cls, records: pa.Table, plan: BatchPlan, idle: Idle, inputs: Sequence[str]
    ) -> Positioned:
        """Return the records of a batch's ranges.

        Positions need every record there, including heartbeats, and the idle policy's decisions.
        """
        offsets = int64s(records["offset"])
        times = times_ms(records["event_time"])
        kept = [np.array([], np.int64)]
        positions = [np.array([], np.int64)]
        for tp, rows in by_topic_partition(records, inputs, offsets).items():
            if (done := plan.ranges.get(tp)) is not None:
                of_range = offsets[rows]
                rows = rows[
                    (of_range >= done.from_offset)
                    & (of_range < done.until_offset)
                    & (times[rows] != NULL_TIME)
                ]
                kept.append(rows)
                positions.append(
                    _positions(Available(offsets[rows], times[rows]), done, idle.get(tp, ()))
                )
        numbers = np.concatenate(kept)
        is_keyed = ~records["heartbeat"].to_numpy()[numbers]
        numbers = numbers[is_keyed]
        return cls(
            records.take(pa.array(numbers)), times[numbers], np.concatenate(positions)[is_keyed]
        )

    @classmethod
    def of_tenants(cls, records: pa.Table, clocks: TenantClocks) -> Positioned:
        """Return the records of a batch's ranges, with their positions in their tenants.

        `clocks` must have been made of these records.
        """
        numbers = np.flatnonzero((clocks.positions != NULL_TIME) & ~records["heartbeat"].to_numpy())
        return cls(
            records.take(pa.array(numbers)),
            times_ms(records["event_time"])[numbers],
            clocks.positions[numbers],
        )

    @classmethod
    def of_waiting(cls, rows: pa.Table) -> Positioned:
        """Return the records in rows of silver that wait for their tenants."""
        return cls(rows, times_ms(rows["event_time"]), times_ms(rows["position"]))

    @classmethod
    def nothing(cls, rows: pa.Table) -> Positioned:
        """Return an empty instance with the columns of these rows."""
        return cls(rows.slice(0, 0), np.array([], np.int64), np.array([], np.int64))

    def with_others(self, others: Positioned) -> Positioned:
        """Return these records, then others; the rows have at least the columns `NAMES`."""
        if not len(others.times):
            return self
        names = {name: kind for name, kind in NAMES.items() if name in self.rows.column_names}
        rows = pa.table(
            {name: both(self.rows[name], others.rows[name], kind) for name, kind in names.items()}
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
        tenants = self.rows["tenant"] if rules.tenant_horizons else None
        return np.asarray(
            self.times < rules.late_before(int64s(self.rows["partition"]), self.positions, tenants),
            np.bool_,
        )

    def is_passed_over(self, rules: Rules, out: Mapping[TopicPartition, Int64s]) -> Booleans:
        """Return True for each record whose fate was decided before.

        A lost lake has decided it, or the record is among those that are `out`, by topic-partition
        and offset.
        """
        found = np.zeros(len(self.positions), np.bool_)
        if rules.since:
            found |= self.positions < looked_up(
                int64s(self.rows["partition"]), rules.since, NULL_TIME
            )
        if out:
            offsets = int64s(self.rows["offset"])
            inputs = list(dict.fromkeys(tp.source for tp in out))
            for tp, mine in by_topic_partition(self.rows, inputs, offsets).items():
                if tp in out:
                    found[mine] |= np.isin(offsets[mine], out[tp])
        return found

    def clocks(self, clocks: TenantClocks) -> Int64s:
        """Return the clock of each record's tenant (ms)."""
        return clocks.clocks(int64s(self.rows["partition"]), self.rows["tenant"])


def _positions(records: Available, done: OffsetRange, decisions: Sequence[IdleDecision]) -> Int64s:
    """Return the running maximum of event time along a range, from the position before it on."""
    decided = [
        decision
        for decision in decisions
        if done.from_offset <= decision.after_offset + 1 < done.until_offset
    ]
    rows = records.with_idle(decided)
    positions = positions_of(Cursor(done.from_offset, done.position_before), rows)
    return positions if rows.is_idle is None else positions[~rows.is_idle]
