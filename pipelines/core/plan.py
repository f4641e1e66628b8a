"""Plans which Kafka offsets the next silver batch merges, and the clock of each partition after it.

Lockstep comes from here. A batch takes, per topic-partition, exactly the records whose position the partition's clock has
reached: all of the slow source's, and the fast one's up to the slow one, whatever their rates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.columns import NO_TIME, Booleans, Int64s, groups, int64s, looked_up
from pipelines.core.idle import IdleDecision
from pipelines.core.window import Window


class TopicPartition(NamedTuple):
    """A partition of an input; `source` is the input's name (`core.inputs`), which mostly is that of its source."""

    source: str
    partition: int


class OpenTransaction(NamedTuple):
    """The oldest open transaction of a partition: its first offset, how many offsets there are from that one on, and Kafka's
    timestamp of its first record (ms), which its producer may have set (None: it cannot be read just now, or is no time).
    """

    offset: int
    behind: int
    since: int | None

    def as_row(self) -> dict[str, int | None]:
        """Return what answers in JSON say of it."""
        return {"since": self.since, "offset": self.offset, "behind": self.behind}


class End(NamedTuple):
    """Where a rebuild stops: the exclusive end offset, and the head (ms) then, whose record may still have been waiting."""

    until: int
    head: int | None


NOTHING: Mapping[TopicPartition, int] = {}


class Available(NamedTuple):
    """The available records of one topic-partition in offset order: offsets, and event times in ms (`NO_TIME` where refused).

    Where `is_idle`, the row is a heartbeat of the idle policy. It has no offset of its own: the offset is the next record's.
    """

    offsets: Int64s
    event_times: Int64s
    is_idle: Booleans | None = None

    def end(self, passed: int) -> int:
        """The exclusive end offset of the first `passed` records."""
        if passed < len(self.offsets):
            # Up to the first record that waits, over any hole before it: the next range must begin with that record, or
            # it might hold none and the clock would go back.
            return int(self.offsets[passed])
        is_idle = self.is_idle is not None and bool(self.is_idle[-1])
        return int(self.offsets[-1]) + (not is_idle)

    def first(self, count: int) -> Available:
        """The first `count` records."""
        return Available(self.offsets[:count], self.event_times[:count])

    def with_idle(self, heartbeats: Sequence[IdleDecision]) -> Available:
        """These records with the idle policy's heartbeats among them, each before the record that it precedes."""
        if not heartbeats:
            return self
        offsets = np.array([h.after_offset + 1 for h in heartbeats], dtype=np.int64)
        times = np.array([h.event_time for h in heartbeats], dtype=np.int64)
        of_all, is_idle = np.concatenate([offsets, self.offsets]), np.arange(len(offsets) + len(self.offsets)) < len(offsets)
        order = np.argsort(of_all, kind="stable")  # so a heartbeat comes before the record whose offset it has
        return Available(of_all[order], np.concatenate([times, self.event_times])[order], is_idle[order])


NOTHING_AVAILABLE = Available(np.array([], dtype=np.int64), np.array([], dtype=np.int64))


@dataclass(frozen=True)
class Cursor:
    """How far the merge has passed a topic-partition: the next offset, and the position (ms) of the last record before it."""

    next_offset: int = 0
    position: int | None = None


NO_HORIZONS: Mapping[tuple[int, str], int] = {}


@dataclass(frozen=True)
class Rules:
    """By which times (ms) a record is late, joins, and times out: the window, and what earlier epochs have left by partition.

    `horizons`: the largest clock - gap of the epochs before, where there is one: what timed out in them sorts before whatever is
    merged later, which is not older than that. `begun`: the clock at which this epoch began: what is closed in it is so later.
    `is_plain`: whether there never was anything but timeouts.

    `lag_ms`: how far a tenant's clock may be behind; None where there are no tenants. `tenant_horizons`: by partition and tenant,
    where it is not that of all others. `since`: by partition the position of its tenant before which a record of a lost lake that
    had tenants is passed over: what became of it was decided then.
    """

    window: Window
    horizons: Mapping[int, int] = field(default_factory=dict)
    begun: Mapping[int, int] = field(default_factory=dict)
    is_plain: bool = True
    lag_ms: int | None = None
    tenant_horizons: Mapping[tuple[int, str], int] = field(default_factory=lambda: NO_HORIZONS)
    since: Mapping[int, int] = field(default_factory=dict)

    def late_before(self, partitions: Int64s, positions: Int64s, tenants: pa.ChunkedArray | None = None) -> Int64s:
        """Per record, the event time (ms) before which it is late. `tenants`: theirs, where there are some."""
        oldest: Int64s = positions - self.window.gap_ms
        if self.horizons:
            oldest = np.maximum(oldest, looked_up(partitions, self.horizons, NO_TIME))
        if self.tenant_horizons and tenants is not None:
            known = zip(partitions.tolist(), tenants.to_pylist(), strict=True)
            oldest = np.maximum(oldest, np.array([self.tenant_horizons.get(each, NO_TIME) for each in known], np.int64))
        return oldest

    def due(self, first: Int64s, last: Int64s) -> Int64s:
        """The last moment (ms) at which merge records with these first and last event times can be joined."""
        until: Int64s = first + self.window.longest_ms
        return until if self.window.is_timeout else np.minimum(until, last + self.window.gap_ms)

    def closed_at(self, partitions: Int64s, over: Int64s) -> Int64s:
        """The first clock (ms) that closes merge records that could be joined up to this one."""
        return np.maximum(over, looked_up(partitions, self.begun, NO_TIME)) + 1 if self.begun else over + 1

    def held_until(self, event_time: int, due: int | None = None) -> int:
        """Return the last position (ms) at which a record of its key may be a part of a message that a lost lake has published,
        or of an earlier one; times in ms, `due` where the message says it.
        """
        return event_time + self.window.gap_ms if due is None else due


@dataclass(frozen=True)
class OffsetRange:
    """What one batch does with a topic-partition: the offsets `[from_offset, until_offset)`.

    `position_before` and `position` are the running maximum of event time (ms) on entering and on leaving the range; `head`
    is the position of the last record that the batch considered, whether the clock has reached it or not.
    """

    from_offset: int
    until_offset: int
    position_before: int | None
    position: int | None
    head: int | None

    @property
    def size(self) -> int:
        """How many offsets the batch passes; not all of them need to hold a record."""
        return self.until_offset - self.from_offset

    def spoken(self, decisions: Sequence[IdleDecision]) -> list[IdleDecision]:
        """Of the idle policy's decisions those in the range, and at its end."""
        return [each for each in decisions if self.from_offset <= each.after_offset + 1 <= self.until_offset]

    @property
    def is_empty(self) -> bool:
        """Whether the batch passes no offset of the topic-partition."""
        return self.size == 0


def by_topic_partition(rows: pa.Table, sources: Sequence[str], then: Int64s) -> dict[TopicPartition, Int64s]:
    """The numbers of the rows of each topic-partition of these inputs, in order of `then`; those of others are left out. The
    column `source` has the input's name.
    """
    count, of_source = len(sources), pc.index_in(rows["source"], value_set=pa.array(sources, pa.string()))
    numbers = np.flatnonzero(of_source.is_valid())
    by = int64s(rows["partition"])[numbers] * count + int64s(of_source.drop_null())
    found = groups(by, then[numbers])
    return {TopicPartition(sources[number % count], number // count): numbers[mine] for number, mine in found.items()}


@dataclass(frozen=True)
class BatchPlan:
    """One silver batch: a range for every topic-partition and a clock (ms) for every partition that has one.

    `epoch`: the number of the epoch whose rules it follows. `generation`: the generation that it belongs to. `has_late`: whether
    there may be late records.
    """

    batch: int
    ranges: Mapping[TopicPartition, OffsetRange]
    clocks: Mapping[int, int]
    has_late: bool
    generation: int = 0
    epoch: int = 0

    def cursors(self) -> dict[TopicPartition, Cursor]:
        """Where the merge stands once this batch is done."""
        return {tp: Cursor(r.until_offset, r.position) for tp, r in self.ranges.items()}


def plan_batch(
    batch: int,
    cursors: Mapping[TopicPartition, Cursor],
    available: Mapping[TopicPartition, Available],
    clocks_before: Mapping[int, int],
    rules: Rules,
    heads_beyond: Mapping[TopicPartition, int] = NOTHING,
    *,
    begins_epoch: bool = False,
) -> BatchPlan | None:
    """Plans the next batch, or returns None if nothing has changed. The clock of a partition is the smallest head considered.

    The first batch of an epoch (`begins_epoch`) is made where nothing else has changed, too: other rules may time records out.

    `cursors` names every topic-partition of every input; `available` holds rows from the cursor on, without a hole, of as
    many topic-partitions as have any: all of them or only some (the clock is then the smallest head of those).
    Refused records before a topic-partition's first position wait for no clock: a part of them alone would never give one.
    `heads_beyond`: heads (ms) of what lies beyond `available` and is known to have been considered, for a rebuild.
    """
    heads = {**heads_of(cursors, available), **heads_beyond}
    clocks = _clocks(heads)
    ranges, has_late, passed_in_all = {}, False, 0
    for tp, cursor in cursors.items():
        rows = available.get(tp, NOTHING_AVAILABLE)
        positions = positions_of(cursor, rows)
        passed = int(np.searchsorted(positions, clocks.get(tp.partition, NO_TIME), side="right"))
        until = rows.end(passed) if len(rows.offsets) else cursor.next_offset
        positions, times = positions[:passed], rows.event_times[:passed]
        oldest = rules.late_before(np.full(len(times), tp.partition), positions)
        has_late |= bool(np.any((times < oldest) & (times != NO_TIME)))
        ranges[tp] = OffsetRange(cursor.next_offset, until, cursor.position, _last(positions, cursor.position), heads[tp])
        passed_in_all += passed
    if clocks == clocks_before and not passed_in_all and not begins_epoch:
        return None
    for partition, before in clocks_before.items():
        if clocks.get(partition, NO_TIME) < before:
            raise AssertionError(f"the clock of partition {partition} would go back from {before}")
    return BatchPlan(batch, ranges, clocks, has_late)


def heads_of(
    cursors: Mapping[TopicPartition, Cursor], available: Mapping[TopicPartition, Available]
) -> dict[TopicPartition, int | None]:
    """A head (ms) is the position of the last of what is available, None while nothing has a time."""
    rows = {tp: available.get(tp, NOTHING_AVAILABLE) for tp in cursors}
    return {tp: _last(positions_of(cursor, rows[tp]), cursor.position) for tp, cursor in cursors.items()}


def positions_of(cursor: Cursor, rows: Available) -> Int64s:
    """Running maxima of event time, from the committed position on; a refused record inherits, and moves nothing."""
    running: Int64s = np.maximum.accumulate(rows.event_times)
    return running if cursor.position is None else np.maximum(running, cursor.position)


def _last(positions: Int64s, otherwise: int | None) -> int | None:
    return int(positions[-1]) if len(positions) and positions[-1] != NO_TIME else otherwise


def _clocks(heads: Mapping[TopicPartition, int | None]) -> dict[int, int]:
    """Undefined (absent) while any source has no head in the partition."""
    by_partition: dict[int, list[int | None]] = {}
    for tp, head in heads.items():
        by_partition.setdefault(tp.partition, []).append(head)
    return {p: min(h for h in hs if h is not None) for p, hs in by_partition.items() if None not in hs}
