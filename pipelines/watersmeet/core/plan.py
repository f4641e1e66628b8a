"""Plan of the next silver batch: the Kafka offsets that it merges, and the clocks after it.

Lockstep comes from here. A batch takes, per topic-partition, exactly the records whose position the
partition's clock has reached. These are all records of the slow source, and those of the fast one
up to the slow one, whatever their rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import (
    NULL_TIME,
    Booleans,
    Int64s,
    groups,
    input_numbers,
    int64s,
    looked_up,
)
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.window import BOUNDS, Bounds, Closing, Window


class TopicPartition(NamedTuple):
    """A partition of an input."""

    input: InputId
    partition: int

    def at(self, offset: int) -> str:
        """Return a record's coordinates in Kafka, for a sentence."""
        return f"{self.input.topic}[{self.partition}]@{offset}"


class OpenTransaction(NamedTuple):
    """The oldest open transaction of a partition."""

    offset: int
    """Its first offset."""
    behind: int
    """Number of offsets from its first one on."""
    since: int | None
    """Kafka's timestamp of its first record (ms), which its producer may have set.

    None where it cannot be read just now, or is no time.
    """

    def as_row(self) -> dict[str, int | None]:
        """Return the transaction as it is shown in JSON answers."""
        return {"since": self.since, "offset": self.offset, "behind": self.behind}


class End(NamedTuple):
    """The point where a rebuild stops."""

    until: int
    """The exclusive end offset."""
    head: int | None
    """The head (ms) then, whose record may still have been waiting."""


class Available(NamedTuple):
    """The available records of one topic-partition in offset order.

    Event times are in ms (`NULL_TIME` where refused). Where `is_idle`, the row is a heartbeat of
    the idle policy. It has no offset of its own: the offset is the next record's. `sizes`: of the
    records, in bytes; empty where they are not known.
    """

    offsets: Int64s
    event_times: Int64s
    is_idle: Booleans | None = None
    sizes: Int64s = np.array([], np.int64)

    def end(self, count: int) -> int:
        """Return the exclusive end offset of the first `count` records."""
        if count < len(self.offsets):
            # End at the first record that waits, after any hole before it. The next range must
            # begin with that record: it might otherwise hold none, and the clock would go back.
            return int(self.offsets[count])
        is_idle = self.is_idle is not None and bool(self.is_idle[-1])
        return int(self.offsets[-1]) + (not is_idle)

    def first(self, count: int) -> Available:
        """Return the first `count` records."""
        return Available(self.offsets[:count], self.event_times[:count], sizes=self.sizes[:count])

    def within(self, limit: int) -> Available:
        """Return the first records whose sizes are known to fit into a limit (bytes); at least one.

        There are no heartbeats among them yet.
        """
        fitting = np.searchsorted(np.cumsum(self.sizes), limit, side="right")
        return self.first(max(1, int(fitting)))

    def size_before(self, until: int) -> int:
        """Return the size (bytes) of the records before an offset."""
        return int(self.sizes[self.offsets < until].sum())

    def with_idle(self, heartbeats: Sequence[IdleDecision]) -> Available:
        """Return these records with the idle policy's heartbeats among them.

        Each heartbeat comes before the record that it precedes.
        """
        if not heartbeats:
            return self
        offsets = np.array([h.after_offset + 1 for h in heartbeats], dtype=np.int64)
        times = np.array([h.event_time for h in heartbeats], dtype=np.int64)
        all_offsets = np.concatenate([offsets, self.offsets])
        is_idle = np.arange(len(offsets) + len(self.offsets)) < len(offsets)
        # So a heartbeat comes before the record whose offset it has.
        order = np.argsort(all_offsets, kind="stable")
        sizes = self.sizes
        if len(sizes):
            sizes = np.concatenate([np.zeros_like(offsets), sizes])[order]
        all_times = np.concatenate([times, self.event_times])
        return Available(all_offsets[order], all_times[order], is_idle[order], sizes)


NOTHING_AVAILABLE = Available(np.array([], dtype=np.int64), np.array([], dtype=np.int64))


@dataclass(frozen=True)
class Cursor:
    """Progress of the merge in a topic-partition."""

    next_offset: int = 0
    """The next offset to merge."""
    position: int | None = None
    """Position (ms) of the last record before the next offset."""

    def has_consumed(self, decision: IdleDecision) -> bool:
        """Return True if a decision of the idle policy has moved the position already."""
        is_before = decision.after_offset < self.next_offset
        return is_before and self.position is not None and decision.event_time <= self.position


@dataclass(frozen=True)
class Rules:
    """The times (ms) by which a record is late, joins, and times out, and how much may join.

    They follow from the window, and from what earlier epochs have left in each partition.
    """

    window: Window
    horizons: Mapping[int, int] = field(default_factory=dict)
    """The largest clock - gap of the earlier epochs by partition, where there is one.

    What timed out in these epochs sorts before whatever is merged later, which is not older than
    that.
    """
    epoch_start: Mapping[int, int] = field(default_factory=dict)
    """Where this epoch started, by partition (`core.window.epoch_start`).

    What it closes is closed later.
    """
    lag_ms: int | None = None
    """Maximum by which a tenant's clock may be behind the global clock; None without tenants."""
    tenant_horizons: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """The horizon by partition and tenant, where it is not that of all others."""
    since: Mapping[int, int] = field(default_factory=dict)
    """The first tenant position that counts after a lost lake with tenants, by partition.

    A record before it is passed over: what became of it was decided then.
    """
    bounds: Bounds = BOUNDS
    """The bounds of a merge record."""

    @property
    def closing(self) -> Closing:
        """What decides when merge records close."""
        return Closing(self.window.gap_ms, self.window.longest_ms, self.lag_ms or 0)

    def late_before(
        self, partitions: Int64s, positions: Int64s, tenants: pa.ChunkedArray | None = None
    ) -> Int64s:
        """Return per record the event time (ms) before which it is late.

        Without `tenants`, that is the one before which it is late whatever its tenant.
        """
        horizons = looked_up(partitions, self.horizons, NULL_TIME)
        if tenants is not None and self.tenant_horizons:
            places = zip(partitions.tolist(), tenants.to_pylist(), strict=True)
            own = [self.tenant_horizons.get(place, NULL_TIME) for place in places]
            horizons = np.maximum(horizons, np.array(own, np.int64))
        return np.maximum(positions - self.window.gap_ms, horizons)

    def due(self, first: Int64s, last: Int64s) -> Int64s:
        """Return the last moment (ms) at which merge records with these event times can be joined.

        `first` and `last` are their first and last event times.
        """
        return np.minimum(first + self.window.longest_ms, last + self.window.gap_ms)

    def closed_at(self, partitions: Int64s, over: Int64s) -> Int64s:
        """Return the first clock (ms) to close merge records that were open up to clock `over`."""
        return np.maximum(over, looked_up(partitions, self.epoch_start, NULL_TIME)) + 1


@dataclass(frozen=True)
class OffsetRange:
    """The offsets `[from_offset, until_offset)` that one batch takes of a topic-partition.

    `position_before` and `position` are the running maximum of event time (ms) on entering and on
    leaving the range. `head` is the position of the last record that the batch considered, whether
    the clock has reached it or not.
    """

    from_offset: int
    until_offset: int
    position_before: int | None
    position: int | None
    head: int | None

    @property
    def size(self) -> int:
        """Number of offsets that the batch passes; not all of them need to hold a record."""
        return self.until_offset - self.from_offset

    def idle_decisions_in(self, decisions: Sequence[IdleDecision]) -> list[IdleDecision]:
        """Return those of the idle policy's decisions that are in the range, or at its end."""
        return [
            decision
            for decision in decisions
            if self.from_offset <= decision.after_offset + 1 <= self.until_offset
        ]

    @property
    def is_empty(self) -> bool:
        """True where the batch passes no offset of the topic-partition."""
        return self.size == 0


def by_topic_partition(
    rows: pa.Table, inputs: Sequence[InputId], order_by: Int64s
) -> dict[TopicPartition, Int64s]:
    """Return the row numbers of each topic-partition of these inputs, in order of `order_by`.

    `rows`: the columns source, topic and partition. Rows of other inputs are left out.
    """
    count = len(inputs)
    input_of_row = input_numbers(rows, inputs)
    numbers = np.flatnonzero(input_of_row.is_valid())
    by = int64s(rows["partition"])[numbers] * count + int64s(input_of_row.drop_null())
    row_groups = groups(by, order_by[numbers])
    return {
        TopicPartition(inputs[number % count], number // count): numbers[rows_of_group]
        for number, rows_of_group in row_groups.items()
    }


@dataclass(frozen=True)
class BatchPlan:
    """A silver batch: a range for every topic-partition, and a clock (ms) for every partition.

    A partition whose clock is undefined has none.
    """

    batch: int
    ranges: Mapping[TopicPartition, OffsetRange]
    clocks: Mapping[int, int]
    has_late: bool = False
    """True where there may be late records."""
    generation: int = 0
    """Number of the generation that the batch belongs to."""
    epoch: int = 0
    """Number of the epoch whose rules the batch follows."""

    def offsets(self) -> dict[TopicPartition, tuple[int, int]]:
        """Return, by topic-partition, the offsets `[from, until)` that the batch passes, if any."""
        ranges = ((tp, done) for tp, done in self.ranges.items() if not done.is_empty)
        return {tp: (done.from_offset, done.until_offset) for tp, done in ranges}

    def cursors(self) -> dict[TopicPartition, Cursor]:
        """Return the progress of the merge once this batch is done."""
        return {tp: Cursor(r.until_offset, r.position) for tp, r in self.ranges.items()}


def plan_batch(
    batch: int,
    cursors: Mapping[TopicPartition, Cursor],
    available: Mapping[TopicPartition, Available],
    clocks_before: Mapping[int, int],
    rules: Rules,
    heads_beyond: Mapping[TopicPartition, int] = MappingProxyType({}),
    *,
    begins_epoch: bool = False,
) -> BatchPlan | None:
    """Plan the next batch, or return None if nothing has changed.

    The clock of a partition is the smallest head considered. The first batch of an epoch
    (`begins_epoch`) is also made where nothing else has changed, since other rules may time records
    out.

    `cursors` names every topic-partition of every input. `available` has, of each topic-partition
    with available records, those from the cursor on, without a hole. It may have all of them or
    only some; the clock is then the smallest head of those. `heads_beyond` has, for a rebuild,
    heads (ms) of what lies beyond `available` and is known to have been considered.

    Refused records before a topic-partition's first position wait for no clock: a batch that
    considers only such records would never give one.
    """
    heads = {**heads_of(cursors, available), **heads_beyond}
    clocks = _clocks(heads)
    ranges = {}
    has_late = False
    consumed_in_all = 0
    for tp, cursor in cursors.items():
        rows = available.get(tp, NOTHING_AVAILABLE)
        positions = positions_of(cursor, rows)
        consumed = int(
            np.searchsorted(positions, clocks.get(tp.partition, NULL_TIME), side="right")
        )
        until = rows.end(consumed) if len(rows.offsets) else cursor.next_offset
        positions = positions[:consumed]
        times = rows.event_times[:consumed]
        oldest = rules.late_before(np.full(len(times), tp.partition), positions)
        has_late |= bool(np.any((times < oldest) & (times != NULL_TIME)))
        ranges[tp] = OffsetRange(
            cursor.next_offset, until, cursor.position, _last(positions, cursor.position), heads[tp]
        )
        consumed_in_all += consumed
    if clocks == clocks_before and not consumed_in_all and not begins_epoch:
        return None
    for partition, before in clocks_before.items():
        if clocks.get(partition, NULL_TIME) < before:
            raise AssertionError(f"the clock of partition {partition} would go back from {before}")
    return BatchPlan(batch, ranges, clocks, has_late)


def heads_of(
    cursors: Mapping[TopicPartition, Cursor], available: Mapping[TopicPartition, Available]
) -> dict[TopicPartition, int | None]:
    """Return each topic-partition's head (ms), which is the position of its last available record.

    It is None while nothing has a time.
    """
    rows = {tp: available.get(tp, NOTHING_AVAILABLE) for tp in cursors}
    return {
        tp: _last(positions_of(cursor, rows[tp]), cursor.position) for tp, cursor in cursors.items()
    }


def positions_of(cursor: Cursor, rows: Available) -> Int64s:
    """Return the running maxima of event time, from the committed position on.

    A refused record has the position before it, and moves nothing.
    """
    running: Int64s = np.maximum.accumulate(rows.event_times)
    return running if cursor.position is None else np.maximum(running, cursor.position)


def _last(positions: Int64s, otherwise: int | None) -> int | None:
    return int(positions[-1]) if len(positions) and positions[-1] != NULL_TIME else otherwise


def _clocks(heads: Mapping[TopicPartition, int | None]) -> dict[int, int]:
    """Return the clock of each partition; it is absent while any source has no head there."""
    by_partition: dict[int, list[int | None]] = {}
    for tp, head in heads.items():
        by_partition.setdefault(tp.partition, []).append(head)
    clocks = {}
    for p, partition_heads in by_partition.items():
        if None not in partition_heads:
            clocks[p] = min(head for head in partition_heads if head is not None)
    return clocks
