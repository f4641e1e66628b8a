"""The clocks of a batch: one that all records of a partition share, or one for each tenant.

Everything else asks a `Clocks` object for positions, for the clock of a row and for the time at
which a row was closed, and never which of the two it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import NULL_TIME, Booleans, Int64s, int64s, looked_up, times_ms
from watersmeet.core.idle import IdleDecision
from watersmeet.core.plan import (
    Available,
    BatchPlan,
    Cursor,
    Rules,
    TopicPartition,
    by_topic_partition,
    positions_of,
)
from watersmeet.core.positions import Positioned
from watersmeet.core.tenants import HEADS, Cut, TenantClocks

Idle = Mapping[TopicPartition, Sequence[IdleDecision]]
"""The idle policy's decisions by topic-partition."""


class Lookahead(NamedTuple):
    """The needs of the clocks beside the records of a batch's ranges."""

    columns: tuple[str, ...] = ()
    """Further columns."""
    records: int = 0
    """Number of offsets after each range."""


def lookahead(rules: Rules) -> Lookahead:
    """Return what the clocks by these rules need of bronze."""
    return Lookahead() if rules.lag_ms is None else Lookahead(("tenant",), 1)


def clocks_of(
    rules: Rules,
    plan: BatchPlan,
    idle: Idle,
    records: pa.Table,
    heads: pa.Table,
    partitions: Collection[int] | None = None,
) -> Clocks:
    """Return the clocks of a batch.

    `records` has source, topic, partition, offset, event_time and tenant of at least every record
    in the batch's ranges, and of as many after each as `lookahead` says. `heads` is what the batch
    before has left. `partitions` limits both to some partitions; without it, all are considered.
    """
    if rules.lag_ms is None:
        return SharedClock(plan, idle)
    return TenantClocks.of(records, heads, plan, idle, rules.lag_ms, partitions)


@dataclass(frozen=True)
class SharedClock:
    """The clock that all records of a partition share: the smallest head of its sources.

    What its methods return is what `TenantClocks` return, too; all times are epoch ms.
    """

    plan: BatchPlan
    idle: Idle

    def positioned(self, records: pa.Table) -> Positioned:
        """Return the batch's records with a key, each with its position.

        Positions need every record of the ranges, also heartbeats, and the idle decisions.
        """
        offsets = int64s(records["offset"])
        times = times_ms(records["event_time"])
        inputs = list(dict.fromkeys(tp.input for tp in self.plan.ranges))
        taken = [np.array([], np.int64)]
        positions = [np.array([], np.int64)]
        for tp, rows in by_topic_partition(records, inputs, offsets).items():
            if (done := self.plan.ranges.get(tp)) is not None:
                is_in = (offsets[rows] >= done.from_offset) & (offsets[rows] < done.until_offset)
                rows = rows[is_in & (times[rows] != NULL_TIME)]
                decisions = done.idle_decisions_in(self.idle.get(tp, ()))
                available = Available(offsets[rows], times[rows]).with_idle(decisions)
                at = positions_of(Cursor(done.from_offset, done.position_before), available)
                taken.append(rows)
                positions.append(at if available.is_idle is None else at[~available.is_idle])
        numbers = np.concatenate(taken)
        is_keyed = ~records["heartbeat"].to_numpy()[numbers]
        numbers = numbers[is_keyed]
        return Positioned(
            records.take(pa.array(numbers)), times[numbers], np.concatenate(positions)[is_keyed]
        )

    def at(self, partitions: Int64s, tenants: pa.ChunkedArray) -> Int64s:  # noqa: ARG002
        """Return the clock of each of these rows after the batch; `NULL_TIME` where none is."""
        return looked_up(partitions, self.plan.clocks, NULL_TIME)

    def waits(self, records: Positioned) -> Booleans:
        """Return True for each record that was read, and that its clock has not reached yet."""
        return np.zeros(len(records.times), np.bool_)  # the clock has reached all that are read

    def last_open(
        self,
        partitions: Int64s,  # noqa: ARG002
        tenants: pa.ChunkedArray,  # noqa: ARG002
        due: Int64s,
    ) -> Int64s:
        """Return the last clock of the partition at which rows that have timed out were open.

        `due`: the last moment at which each can be joined.
        """
        return due

    def may_have_late(self, records: pa.Table, rules: Rules) -> bool:  # noqa: ARG002
        """Return True where there may be late records that the plan of the batch has not seen.

        `records`: those that the clocks were made of.
        """
        return False  # the plan has seen every position

    def heads(self) -> pa.Table:
        """Return what the batch leaves to the next one (`core.tenants.HEADS`)."""
        return HEADS.empty_table()

    def cuts(self) -> dict[TopicPartition, Cut]:
        """Return the cuts of tenants' clocks that the batch has moved."""
        return {}

    def ahead(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """Return by partition each tenant whose position is beyond that of an unknown tenant."""
        return {}


Clocks: TypeAlias = SharedClock | TenantClocks
"""The clocks of some partitions as a batch moves them."""
