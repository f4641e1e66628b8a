"""Plans which Kafka offsets the next silver batch merges, and the clock of each partition after it.

Lockstep comes from here. A batch takes, per topic-partition, exactly the records whose position the partition's clock has
reached: all of the slow source's, and the fast one's up to the slow one, whatever their rates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
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


class Stretch(NamedTuple):
    """What a partition merged under one window, by where it ended: at a batch that left the clock there (ms), and every source
    at these exclusive end offsets.

    A lost lake's last stretch has no offsets: whoever takes the lake up ends it with the first batch whose clock reaches `clock`.
    """

    window: Window
    clock: int
    offsets: Mapping[str, int] | None

    @property
    def horizon(self) -> int:
        """The event time (ms) before which a record was late at the end; what had timed out lies before it."""
        return self.clock - self.window.gap_ms

    def is_past(self, clock: int | None, until: Mapping[str, int]) -> bool:
        """Whether the merge, with its clock (ms) and next offsets, has come to the end of the stretch."""
        if clock is None or clock < self.clock:
            return False
        is_beyond = clock > self.clock or self.offsets is None
        return is_beyond or all(until.get(source, 0) >= offset for source, offset in (self.offsets or {}).items())

    def within(self, source: str, cursor: Cursor, rows: Available) -> Available:
        """What a batch may see of a source, so that it ends where the stretch does, and no later.

        A source whose position had come to the clock at the end is shown up to its offset there. Every other one had a record
        behind the clock then, which waits by itself. Without offsets, a source is shown up to its first record at the clock.
        """
        positions = positions_of(cursor, rows)
        if self.offsets is None:
            count = int(np.searchsorted(positions, self.clock)) + 1
        else:
            end = self.offsets.get(source, 0)
            is_in = rows.offsets < end
            if rows.is_idle is not None:  # a decision has the next record's offset
                is_in |= rows.is_idle & (rows.offsets == end) & (rows.event_times <= self.clock)
            count = int(np.count_nonzero(is_in))
            if _last(positions[:count], cursor.position) != self.clock:
                return rows
        is_idle = None if rows.is_idle is None else rows.is_idle[:count]
        return Available(rows.offsets[:count], rows.event_times[:count], is_idle)


NO_STRETCHES: Mapping[int, Sequence[Stretch]] = {}
NO_HORIZONS: Mapping[tuple[int, str], int] = {}


@dataclass(frozen=True)
class Rules:
    """By which times (ms) a record is late, joins, and times out: the window, and what earlier epochs have left by partition.

    `horizons`: the largest clock - gap of the epochs before, where there is one: what timed out in them sorts before whatever is
    merged later, which is not older than that. `begun`: the clock at which this epoch began: what is closed in it is so later.
    `ahead`: the stretches of a lost lake that are merged again; until their ends their windows hold, the first one now.
    `is_plain`: whether there never was anything but timeouts, and by partition where that is so in what is ahead.

    `lag_ms`: how far a tenant's clock may be behind; None where there are no tenants. `tenant_horizons`: by partition and tenant,
    where it is not that of all others. `since`: by partition the position of its tenant before which a record of a lost lake that
    had tenants is passed over: what became of it was decided then.
    """

    window: Window
    horizons: Mapping[int, int] = field(default_factory=dict)
    begun: Mapping[int, int] = field(default_factory=dict)
    ahead: Mapping[int, Sequence[Stretch]] = field(default_factory=lambda: NO_STRETCHES)
    is_plain: bool = True
    plain_ahead: Collection[int] = ()
    lag_ms: int | None = None
    tenant_horizons: Mapping[tuple[int, str], int] = field(default_factory=lambda: NO_HORIZONS)
    since: Mapping[int, int] = field(default_factory=dict)

    def window_in(self, partition: int) -> Window:
        """The window that holds in a partition now."""
        mine = self.ahead.get(partition)
        return mine[0].window if mine else self.window

    def late_before(self, partitions: Int64s, positions: Int64s, tenants: pa.ChunkedArray | None = None) -> Int64s:
        """Per record, the event time (ms) before which it is late. `tenants`: theirs, where there are some."""
        oldest: Int64s = positions - self._lengths(partitions, lambda window: window.gap_ms)
        if self.horizons:
            oldest = np.maximum(oldest, looked_up(partitions, self.horizons, NO_TIME))
        if self.tenant_horizons and tenants is not None:
            known = zip(partitions.tolist(), tenants.to_pylist(), strict=True)
            oldest = np.maximum(oldest, np.array([self.tenant_horizons.get(each, NO_TIME) for each in known], np.int64))
        return oldest

    def due(self, partitions: Int64s, first: Int64s, last: Int64s) -> Int64s:
        """The last moment (ms) at which merge records with these first and last event times can be joined."""
        until: Int64s = first + self._lengths(partitions, lambda window: window.longest_ms)
        if self.window.is_timeout and not self.ahead:
            return until
        return np.asarray(np.minimum(until, last + self._lengths(partitions, lambda window: window.gap_ms)), np.int64)

    def closed_at(self, partitions: Int64s, over: Int64s) -> Int64s:
        """The first clock (ms) that closes merge records that could be joined up to this one."""
        return np.maximum(over, looked_up(partitions, self.begun, NO_TIME)) + 1 if self.begun else over + 1

    def keeps_due(self, partitions: Int64s) -> Booleans:
        """Whether merge records that time out now are published in the order of when they were closed, and say so."""
        return np.asarray(~np.isin(partitions, list(self.plain_ahead)) & (not self.is_plain), np.bool_)

    def _lengths(self, partitions: Int64s, of: Callable[[Window], int]) -> Int64s | int:
        now = {p: of(mine[0].window) for p, mine in self.ahead.items() if mine}
        return looked_up(partitions, now, of(self.window)) if now else of(self.window)

    def held_until(self, partition: int, event_time: int, due: int | None = None, closed_at: int | None = None) -> int:
        """The last position (ms) at which a record of its key may be a part of a message that is out, or of an earlier one;
        `NO_TIME` where it had timed out before. Times in ms.

        All that was merged in a stretch before the one that closed the message is; then what came up to `due`. Without these two,
        a timeout closed the message in the first stretch at whose end its event time had passed. A record that was merged before
        that joined by the timeout of its own stretch, and each one after it, which may have lowered the event time, by its own.
        """
        if due is not None and closed_at is not None:
            is_before = any(stretch.clock < closed_at for stretch in self.ahead.get(partition, ())[:1])
            return closed_at - 1 if is_before else due
        if event_time < self.horizons.get(partition, NO_TIME):
            return NO_TIME
        longest = 0
        for stretch in self.ahead.get(partition, ()):
            longest = max(longest, stretch.window.gap_ms)
            if event_time < stretch.horizon:
                return event_time + longest
        return event_time + max(longest, self.window.gap_ms)


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

    `epoch`: the number of the epoch whose rules it follows. `has_late`: whether there may be late records. With `reset` (the
    reason) it merges nothing: what is open is closed, and reading goes on at `until_offset` with fresh state.
    """

    batch: int
    ranges: Mapping[TopicPartition, OffsetRange]
    clocks: Mapping[int, int]
    has_late: bool
    reset: str | None = None
    epoch: int = 0

    def cursors(self) -> dict[TopicPartition, Cursor]:
        """Where the merge stands once this batch is done."""
        return {tp: Cursor(r.until_offset, r.position) for tp, r in self.ranges.items()}


def ahead_of(
    stretches: Sequence[Stretch],
    partition: int,
    clock: int | None,
    cursors: Mapping[TopicPartition, Cursor],
    available: Mapping[TopicPartition, Available],
    window: Window,
    ends_here: int = 1,
) -> tuple[list[Stretch], dict[TopicPartition, Available]]:
    """Of a lost lake's stretches of a partition, those that have ended at its clock (ms); and what the next batch may see of it,
    so that it stops where the next one ends.

    A source stands at its first available record: what lies before that is a hole. Nothing stops at an open end after which the
    window stays as it is. Where several ended at one clock and the same offsets, each has a batch that closes what its window
    does: so of those that end where the partition stands, only the first ones are over (`ends_here`).
    """
    mine = {tp: cursor for tp, cursor in cursors.items() if tp.partition == partition}
    seen = {tp: available.get(tp, NOTHING_AVAILABLE) for tp in mine}
    until = {tp.source: int(seen[tp].offsets[0]) if len(seen[tp].offsets) else c.next_offset for tp, c in mine.items()}
    ended = list(takewhile(lambda stretch: stretch.is_past(clock, until), stretches))
    ended = ended[: sum(stretch.clock != clock for stretch in ended) + ends_here]
    for stretch in stretches[len(ended) : len(ended) + 1]:
        if stretch.offsets is not None or stretch.window != window:
            seen = {tp: stretch.within(tp.source, cursor, seen[tp]) for tp, cursor in mine.items()}
    return ended, seen


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
