"""The clocks of a batch: one that all records of a partition share, or one for each tenant.

Everything else asks a `Clocks` object for positions, for the clock of a row and for the time at
which a row was closed, and never which of the two it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import NULL_TIME, Booleans, Int64s, int64s, looked_up, times_ms
from watersmeet.core.idle import IdleDecision
from watersmeet.core.plan import (
    Available,
    BatchPlan,
    Cursor,
    OffsetRange,
    Rules,
    TopicPartition,
    by_topic_partition,
    positions_of,
)
from watersmeet.core.positions import Positioned
from watersmeet.core.tenants import HEADS, Cut, TenantClocks

Idle = Mapping[TopicPartition, Sequence[IdleDecision]]
"""The idle policy's decisions by topic-partition."""


class Clocks(Protocol):
    """The clocks of some partitions as a batch moves them; all times are epoch ms."""

    def positioned(self, records: pa.Table) -> Positioned:
        """Return the batch's records with a key, each with its position."""
        ...

    def at(self, partitions: Int64s, tenants: pa.ChunkedArray) -> Int64s:
        """Return the clock of each of these rows after the batch; `NULL_TIME` where none is."""
        ...

    def waits(self, records: Positioned) -> Booleans:
        """Return True for each record that was read, and that its clock has not reached yet."""
        ...

    def last_open(self, partitions: Int64s, tenants: pa.ChunkedArray, due: Int64s) -> Int64s:
        """Return the last clock of the partition at which rows that have timed out were open.

        `due`: the last moment at which each can be joined.
        """
        ...

    def may_have_late(self, records: pa.Table, rules: Rules) -> bool:
        """Return True where there may be late records that the plan of the batch has not seen.

        `records`: those that the clocks were made of.
        """
        ...

    def heads(self) -> pa.Table:
        """Return what the batch leaves to the next one (`core.tenants.HEADS`)."""
        ...

    def cuts(self) -> dict[TopicPartition, Cut]:
        """Return the cuts of tenants' clocks that the batch has moved."""
        ...

    def ahead(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """Return by partition each tenant whose position is beyond that of an unknown tenant."""
        ...


class Lookahead(NamedTuple):
    """The needs of the clocks beside the records of a batch's ranges."""

    columns: tuple[str, ...] = ()
    """Further columns."""
    records: int = 0
    """Number of offsets after each range."""


_SHARED = Lookahead()
_PER_TENANT = Lookahead(("tenant",), 1)


def lookahead(rules: Rules) -> Lookahead:
    """Return what the clocks by these rules need of bronze."""
    return _SHARED if rules.lag_ms is None else _PER_TENANT


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
    """The clock that all records of a partition share: the smallest head of its sources."""

    plan: BatchPlan
    idle: Idle

    def positioned(self, records: pa.Table) -> Positioned:
        """See `Clocks.positioned`.

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
                available = Available(offsets[rows], times[rows])
                taken.append(rows)
                positions.append(_positions(available, done, self.idle.get(tp, ())))
        numbers = np.concatenate(taken)
        is_keyed = ~records["heartbeat"].to_numpy()[numbers]
        numbers = numbers[is_keyed]
        return Positioned(
            records.take(pa.array(numbers)), times[numbers], np.concatenate(positions)[is_keyed]
        )

    def at(self, partitions: Int64s, tenants: pa.ChunkedArray) -> Int64s:  # noqa: ARG002
        """See `Clocks.at`."""
        return looked_up(partitions, self.plan.clocks, NULL_TIME)

    def waits(self, records: Positioned) -> Booleans:
        """See `Clocks.waits`. A record is read once the clock has reached it."""
        return np.zeros(len(records.times), np.bool_)

    def last_open(
        self,
        partitions: Int64s,  # noqa: ARG002
        tenants: pa.ChunkedArray,  # noqa: ARG002
        due: Int64s,
    ) -> Int64s:
        """See `Clocks.last_open`."""
        return due

    def may_have_late(self, records: pa.Table, rules: Rules) -> bool:  # noqa: ARG002
        """See `Clocks.may_have_late`. The plan has seen every position."""
        return False

    def heads(self) -> pa.Table:
        """See `Clocks.heads`. The plan has all that the next one needs."""
        return HEADS.empty_table()

    def cuts(self) -> dict[TopicPartition, Cut]:
        """See `Clocks.cuts`."""
        return {}

    def ahead(self) -> dict[int, tuple[tuple[str, int], ...]]:
        """See `Clocks.ahead`."""
        return {}


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
