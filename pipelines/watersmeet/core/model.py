"""The merge in plain Python: the executable form of the merge rules.

It is the oracle that the pipeline is compared with.

Everything happens per partition and in event time (ms). A `PartitionMerge` is told which records
have arrived (`arrive`) and when to process them (`advance`). How arrivals are split over calls of
`advance` does not change the result. Between two such calls the rules may change (`begin_epoch`).
Without tenants every record belongs to the one tenant `NO_TENANT`, and all clocks are the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from watersmeet.core.inputs import InputId

NO_TENANT = ""
"""The tenant of every record where the merge has no tenants."""

MIN_TIME = -(2**62)
"""A time before any other."""

MAX_PARTS = 100_000
MAX_BYTES = 256 * 2**20
"""The usual bounds of a merge record: how many records join it, and how many bytes they have."""


@dataclass(frozen=True)
class MergeRules:
    """The rules of a merge: its inputs, and its window in ms of event time."""

    inputs: tuple[InputId, ...]
    """The inputs that are read, each with positions and a head of its own.

    They come in the order of their sources' columns, which never changes.
    """
    gap_ms: int
    """Time for which a merge record stays open after its last part."""
    max_ms: int | None = None
    """Time for which it stays open after its first part; None: `gap_ms` too, which is a timeout."""
    lag_ms: int | None = None
    """Maximum by which a tenant's clock may be behind the global clock; None without tenants."""
    max_parts: int = MAX_PARTS
    """Number of records, repeated ones counted, beyond which a merge record is too large."""
    max_bytes: int = MAX_BYTES
    """Number of bytes in the values of its records beyond which it is, too."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources in the order of their columns."""
        return tuple(dict.fromkeys(input_id.source for input_id in self.inputs))

    @property
    def longest_ms(self) -> int:
        """Time for which a merge record stays open after its first part at most."""
        return self.gap_ms if self.max_ms is None else self.max_ms

    def closing(self) -> tuple[int, int, int]:
        """Return what decides when merge records close: the gap, the maximum and the lag in ms."""
        return self.gap_ms, self.longest_ms, self.lag_ms or 0

    def due(self, event_time: int, last_event_time: int) -> int:
        """Return the last moment at which a merge record with these event times can be joined."""
        return min(last_event_time + self.gap_ms, event_time + self.longest_ms)

    def is_too_large(self, records: int, size: int) -> bool:
        """Return True where a merge record of so many records, with so many bytes, has no parts."""
        return records > self.max_parts or size > self.max_bytes


class Record(NamedTuple):
    """A record of a topic-partition as the merge sees it.

    A heartbeat is a record without a key. One of the tenant None counts in full for every tenant of
    the topic-partition. A decision of the idle policy is a heartbeat with `tenant_times`: it counts
    in full only for these tenants, with the time that it gives to each.
    """

    input: InputId
    offset: int
    event_time: int
    key: str | None = None
    tenant: str | None = NO_TENANT
    tenant_times: Mapping[str, int] | None = None
    id: str | None = None
    """By which a repeated record of its input is recognised; None: it is none."""
    size: int = 0
    """Number of bytes of its value."""

    @property
    def is_heartbeat(self) -> bool:
        """True where the record only moves the head."""
        return self.key is None

    @property
    def part(self) -> Part:
        """The record as a part of a merge record."""
        return Part(self.event_time, self.input.topic, self.offset)


class Part(NamedTuple):
    """A record inside a merge record; parts of a source sort by (event time, topic, offset)."""

    event_time: int
    topic: str
    offset: int


class LateRecord(NamedTuple):
    """A late record: kept, but never merged. `position` is that of its tenant."""

    record: Record
    position: int


class DuplicateRecord(NamedTuple):
    """A record whose merge record has a part with its id, from its input: it joins, but is no part.

    `of_offset` is the offset of that part.
    """

    record: Record
    of_offset: int


class PublishedRecord(NamedTuple):
    """A message of the sink that the merge must know again.

    `due` is the last moment at which it could be joined, `closed_at` the clock that closed it.
    """

    event_time: int
    due: int
    closed_at: int
    tenant: str = NO_TENANT


@dataclass
class MergeRecord:
    """Everything merged for one key of a tenant while it was open, by source.

    One that is too large has no parts, and takes none any more; its times go on. `due` and
    `closed_at` are set when it times out. They are the last moment at which it could be joined, and
    the first clock at which that moment was over.
    """

    key: str
    event_time: int
    last_event_time: int
    parts: dict[str, list[Part]]
    tenant: str = NO_TENANT
    due: int = MIN_TIME
    closed_at: int = MIN_TIME
    ids: dict[tuple[InputId, str], int] = field(default_factory=dict)
    """The offset of the part with an id, by input and id."""
    records: list[Record] = field(default_factory=list)
    """All records that have joined it."""
    repeated: list[DuplicateRecord] = field(default_factory=list)
    """Those of them that are duplicates."""
    is_too_large: bool = False
    count: int = 0
    size: int = 0
    """Number of all records that have joined it, and of the bytes of their values."""

    def join(self, record: Record) -> None:
        """Add a record, which can only lower `event_time` and raise `last_event_time`.

        Where a part has its id, and is of the same input, the record is a duplicate, and no part.
        Records of an input are added in order of offset.
        """
        self.event_time = min(self.event_time, record.event_time)
        self.last_event_time = max(self.last_event_time, record.event_time)
        self.records.append(record)
        self.count += 1
        self.size += record.size
        if self.is_too_large:
            return
        if record.id is not None:
            of_offset = self.ids.setdefault((record.input, record.id), record.offset)
            if of_offset != record.offset:
                self.repeated.append(DuplicateRecord(record, of_offset))
                return
        self.parts[record.input.source].append(record.part)

    def content(self) -> tuple[str, int, int, tuple[tuple[Part, ...], ...]]:
        """Return a tuple that is equal for equal content.

        It has the key, the event time, the last event time, and the sorted parts of each source in
        the order of the rules.
        """
        return (
            self.key,
            self.event_time,
            self.last_event_time,
            tuple(tuple(sorted(p)) for p in self.parts.values()),
        )

    def place(self) -> tuple[int, bytes, int, bytes]:
        """Return the place in the order of publication: closed at, tenant, due, key.

        Texts are compared as UTF-8 bytes.
        """
        return self.closed_at, self.tenant.encode(), self.due, self.key.encode()


@dataclass
class RunningMax:
    """A running maximum along a topic-partition."""

    values: list[int] = field(default_factory=list)
    """Each value that it rose to."""
    befores: list[int] = field(default_factory=list)
    """The position just before the record that raised it, by value."""

    def add(self, value: int, before: int) -> None:
        """Add the next value, which counts only if it exceeds the maximum."""
        if value > self.last():
            self.values.append(value)
            self.befores.append(before)

    def last(self) -> int:
        """Return the maximum so far."""
        return self.values[-1] if self.values else MIN_TIME

    def at_cut(self, clock: int) -> int:
        """Return the maximum up to and including the first record that has come to the clock."""
        count = bisect_left(self.befores, clock)
        return self.values[count - 1] if count else MIN_TIME

    def before_passing(self, time: int) -> float:
        """Return the position just before the maximum rose above a time; infinite if it has not."""
        index = bisect_right(self.values, time)
        return self.befores[index] if index < len(self.values) else float("inf")


@dataclass
class SourceState:
    """State of a topic-partition: its records that wait to be read, and each tenant's times."""

    head: int = MIN_TIME
    unread: deque[tuple[int, Record]] = field(default_factory=deque)
    every: RunningMax = field(default_factory=RunningMax)
    """Running maximum of all event times, which is the position."""
    whole: RunningMax = field(default_factory=RunningMax)
    """Running maximum of the heartbeats that count for all tenants."""
    own: dict[str, RunningMax] = field(default_factory=lambda: defaultdict(RunningMax))
    """Running maxima of each tenant's own records and heartbeats."""
    kept: RunningMax = field(default_factory=RunningMax)
    """What every tenant had at least when the lag changed, which counts for all tenants."""

    def arrive(self, record: Record) -> None:
        """Add a record, whose position is the largest event time of its topic-partition so far."""
        self.head = max(record.event_time, self.head)
        self.unread.append((self.head, record))

    def read(self, clock: int, lag: int) -> Iterator[tuple[int, Record]]:
        """Yield the records that the clock has reached, each with its tenant's position.

        Afterwards the cut at the clock is known.
        """
        while self.unread:
            position, record = self.unread[0]
            before = self.every.last()
            if before < clock or position <= clock:
                self._note(record, position, before)
            if position > clock:
                return
            self.unread.popleft()
            yield self.position(record.tenant, lag), record

    def _note(self, record: Record, position: int, before: int) -> None:
        """Add a record to the running maxima.

        A repeated call changes nothing. It happens, since the last record of a cut may stay unread.
        """
        self.every.add(position, before)
        if record.tenant_times is not None:
            for tenant, time in record.tenant_times.items():
                self.own[tenant].add(time, before)
        elif record.tenant is None:
            self.whole.add(record.event_time, before)
        else:
            self.own[record.tenant].add(record.event_time, before)

    def position(self, tenant: str | None, lag: int) -> int:
        """Return a tenant's position, which is never more than `lag` behind that of all.

        Its own records and heartbeats count, and the heartbeats for all tenants.
        """
        own = self.own[tenant].last() if tenant in self.own else MIN_TIME
        return max(own, self.whole.last(), self.kept.last(), self.every.last() - lag)

    def position_at_cut(self, tenant: str | None, clock: int, lag: int) -> int:
        """Return a tenant's position at the end of the cut at a clock.

        The cut ends with the first record that has come to the clock.
        """
        own = self.own[tenant].at_cut(clock) if tenant in self.own else MIN_TIME
        of_all = max(self.whole.at_cut(clock), self.kept.at_cut(clock))
        return max(own, of_all, self.every.at_cut(clock) - lag)

    def before_passing(self, tenant: str, time: int, lag: int) -> float:
        """Return the position just before the record that took a tenant's position past a time.

        It is infinite where no record has yet.
        """
        own = self.own[tenant].before_passing(time) if tenant in self.own else float("inf")
        of_all = min(self.whole.before_passing(time), self.kept.before_passing(time))
        return min(own, of_all, self.every.before_passing(time + lag))

    def keep_behind(self, lag: int) -> None:
        """Keep the lower bound of every tenant's position under `lag`, before the lag changes."""
        if self.every.values:
            self.kept.add(self.every.last() - lag, self.every.befores[-1])


@dataclass
class PartitionMerge:
    """State of one partition: records that are unread or wait, merge records open or finished."""

    rules: MergeRules
    clock: int | None = None
    states: dict[InputId, SourceState] = field(default_factory=dict)
    """State of each topic-partition, by input."""
    waiting: list[tuple[int, Record]] = field(default_factory=list)
    """Records that were read, but not reached by their tenant's clock; none without tenants.

    Each comes with its tenant's position there.
    """
    open: dict[tuple[str, str], MergeRecord] = field(default_factory=dict)
    """Open merge records by tenant and key."""
    timed_out: list[MergeRecord] = field(default_factory=list)
    late: list[LateRecord] = field(default_factory=list)
    duplicates: list[DuplicateRecord] = field(default_factory=list)
    """Those of the merge records that have timed out: until then they may be excess."""
    excess: list[Record] = field(default_factory=list)
    """Records of merge records that are too large."""
    horizon: int | None = None
    """The largest tenant clock - gap at the ends of the earlier epochs.

    It is for tenants that none of these epochs had met. Everything that timed out in them lies
    before it, and nothing else does.
    """
    horizons: dict[str, int] = field(default_factory=dict)
    """The horizons of the other tenants, by tenant."""
    epoch_start: int = MIN_TIME
    """Where this epoch started; what times out in the epoch is closed later."""
    ended: tuple[MergeRules, int] | None = None
    """The rules of the last epoch before this one that merged anything, and its start."""
    has_advanced: bool = False
    """True once this epoch has processed anything; otherwise it leaves no trace in the horizon."""
    recovered: Mapping[str, Sequence[PublishedRecord]] = field(default_factory=dict)
    """Messages read back from the sink by key, after a lost lake (`core.recovery`)."""
    out: Collection[tuple[InputId, int]] = ()
    """Input and offset of the parts of messages of earlier generations.

    These records are passed over, and still move positions.
    """
    since: int = MIN_TIME
    """First position of a tenant that counts, after a lost lake with tenants.

    A record before it is passed over: it is published, was rejected, or is late.
    """
    passed: list[tuple[int, Record]] = field(default_factory=list)
    """Records that the sink holds, and others that are passed over.

    Each comes with its tenant's position there.
    """

    @property
    def heads(self) -> dict[InputId, int]:
        """Position of the last record of each input; only inputs that have records."""
        return {input_id: state.head for input_id, state in self.states.items()}

    def arrive(self, *records: Record) -> None:
        """Add records, each of which waits unread until the clock has come to its position."""
        for record in records:
            self.states.setdefault(record.input, SourceState()).arrive(record)

    def begin_epoch(
        self,
        gap_ms: int,
        max_ms: int | None = None,
        lag_ms: int | None = None,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        """Change the window and the lag from now on, and with `bounds` those of a merge record.

        What was late stays late, so that what is published stays first in order; what was too large
        stays so. An epoch whose merge records close by other rules starts strictly later than the
        one before.
        """
        if self.has_advanced and self.clock is not None:
            seen = {tenant for state in self.states.values() for tenant in state.own}
            self.horizons = {tenant: self._horizon_after(tenant) for tenant in seen}
            self.horizon = self._horizon_after(None)
            self.ended = self.rules, self.epoch_start
            if lag_ms != self.rules.lag_ms:
                for state in self.states.values():
                    state.keep_behind(self._lag)
        self.rules = replace(self.rules, gap_ms=gap_ms, max_ms=max_ms, lag_ms=lag_ms)
        if bounds is not None:
            self.rules = replace(self.rules, max_parts=bounds[0], max_bytes=bounds[1])
        if self.ended is not None and self.clock is not None:
            rules_before, start_before = self.ended
            is_same = rules_before.closing() == self.rules.closing()
            self.epoch_start = start_before if is_same else max(self.clock, start_before + 1)
        self.has_advanced = False

    def advance(self) -> None:
        """Read what the clock has reached, merge what its tenant's clock has, and time out.

        What times out are the open merge records that can no longer be joined.
        """
        is_first = not self.has_advanced
        self.has_advanced = True
        if len(self.states) < len(self.rules.inputs):
            return  # the clock is undefined while an input has no record
        self.clock = min(state.head for state in self.states.values())
        if is_first:
            was_waiting = self.waiting
            self.waiting = []
            self._judge(was_waiting)
            for row in self.open.values():
                self._measure(row)
        for state in self.states.values():
            self._judge(state.read(self.clock, self._lag))
        clocks = {tenant: self.tenant_clock(tenant) for tenant in self.tenants()}
        reached = [each for each in self.waiting if each[0] <= clocks[_tenant(each[1])]]
        self.waiting = [each for each in self.waiting if each[0] > clocks[_tenant(each[1])]]
        for position, record in sorted(reached, key=lambda waiting: waiting[0]):
            self._merge(position, record)
        for row in [row for row in self.open.values() if self._due(row) < clocks[row.tenant]]:
            self._time_out(row)

    def forget_finished(self) -> None:
        """Forget what is finished, once somebody has taken it."""
        for finished in (self.timed_out, self.late, self.duplicates, self.excess, self.passed):
            finished.clear()

    def tenants(self) -> set[str]:
        """Return the tenants that have something open or waiting."""
        return {tenant for tenant, _ in self.open} | {_tenant(record) for _, record in self.waiting}

    def tenant_clock(self, tenant: str | None, clock: int | None = None) -> int:
        """Return a tenant's clock, now or at an earlier clock of this epoch.

        The tenant None is one of which nothing is known. Without tenants it is the partition's
        clock. Raise ValueError while a source has no record.
        """
        now = self.clock if clock is None else clock
        if now is None:
            raise ValueError("the clock is undefined")
        return min(
            now, *(state.position_at_cut(tenant, now, self._lag) for state in self.states.values())
        )

    def first_clock_past(self, tenant: str, time: int) -> float:
        """Return the first clock of this epoch at which a tenant's clock was past a time.

        It is infinite where the tenant's clock has not come past it.
        """
        last_open = [
            state.before_passing(tenant, time, self._lag) for state in self.states.values()
        ]
        return 1 + max(time, self.epoch_start, *last_open)

    def published_order(self) -> list[MergeRecord]:
        """Return the finished merge records in the order of publication."""
        return sorted(self.timed_out, key=MergeRecord.place)

    def unread(self) -> dict[InputId, list[tuple[int, Record]]]:
        """Return by input the records that the clock has not reached, with their positions.

        Only inputs that have some are included.
        """
        return {
            input_id: list(state.unread) for input_id, state in self.states.items() if state.unread
        }

    def _judge(self, records: Iterator[tuple[int, Record]] | list[tuple[int, Record]]) -> None:
        """Tell late records from those that are to be merged, and drop heartbeats.

        The time at a record is its own position in its tenant, nothing else.
        """
        for position, record in records:
            if record.is_heartbeat:
                continue
            if position < self.since or (record.input, record.offset) in self.out:
                self.passed.append((position, record))
                continue
            horizon = self.horizons.get(_tenant(record), self.horizon)
            oldest = position - self.rules.gap_ms
            if record.event_time < (oldest if horizon is None else max(oldest, horizon)):
                self.late.append(LateRecord(record, position))
            elif self._is_published(position, record):
                self.passed.append((position, record))
            else:
                self.waiting.append((position, record))

    def _is_published(self, position: int, record: Record) -> bool:
        """Return True where a message that was read back, or an earlier one of its key, has it."""
        for message in self.recovered.get(record.key or "", ()):
            if message.tenant == _tenant(record) and position <= message.due:
                return True
        return False

    def _merge(self, position: int, record: Record) -> None:
        key = record.key or ""
        tenant = _tenant(record)
        row = self.open.get((tenant, key))
        if row is not None and self._due(row) < position:
            self._time_out(row)
            row = None
        if row is None:
            parts: dict[str, list[Part]] = {source: [] for source in self.rules.sources}
            row = MergeRecord(key, record.event_time, record.event_time, parts, tenant)
            self.open[tenant, key] = row
        row.join(record)
        if row.is_too_large:
            self.excess.append(record)
        else:
            self._measure(row)

    def _measure(self, row: MergeRecord) -> None:
        """Take all parts from a merge record that has become too large."""
        if row.is_too_large or not self.rules.is_too_large(row.count, row.size):
            return
        row.is_too_large = True
        row.parts = {source: [] for source in row.parts}
        row.ids = {}
        row.repeated = []
        self.excess += row.records

    def _due(self, row: MergeRecord) -> int:
        return self.rules.due(row.event_time, row.last_event_time)

    def _time_out(self, row: MergeRecord) -> None:
        row.due = self._due(row)
        row.closed_at = int(self.first_clock_past(row.tenant, row.due))
        self.duplicates += row.repeated
        self.timed_out.append(self.open.pop((row.tenant, row.key)))

    @property
    def _lag(self) -> int:
        return self.rules.lag_ms or 0

    def _horizon_after(self, tenant: str | None) -> int:
        before = self.horizon if tenant is None else self.horizons.get(tenant, self.horizon)
        horizon = self.tenant_clock(tenant) - self.rules.gap_ms
        return horizon if before is None else max(before, horizon)


def _tenant(record: Record) -> str:
    """Return the tenant of a record with a key; only a heartbeat may have no tenant."""
    return NO_TENANT if record.tenant is None else record.tenant
