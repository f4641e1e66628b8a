"""The merge, in plain Python: the executable form of the merge rules and the oracle that the pipeline is compared with.

Everything happens per partition and in event time (ms). A `PartitionMerge` is told which records have arrived (`arrive`) and
when to look at them (`advance`); how arrivals are cut into calls of `advance` does not change what comes out. Between two of
them the rules may change (`begin_epoch`). Without tenants every record is of the one tenant `ALL`, and each clock is the same.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipelines.core.inputs import source_of, topic_of

ALL = ""
"""The tenant of every record where the merge has no tenants."""

NEVER = -(2**62)
"""Before any time."""


@dataclass(frozen=True)
class MergeRules:
    """What a merge is: its sources, in the order of their columns, once and for all, and its window in ms of event time.

    A merge record is open for `gap_ms` after its last part, and for `max_ms` after its first (None: `gap_ms` too, which is a
    timeout). `lag_ms`: how far a tenant's clock may be behind the clock of all; None where there are no tenants. `topics`: the
    inputs (`core.inputs`), where a source has several topics.
    """

    sources: tuple[str, ...]
    gap_ms: int
    max_ms: int | None = None
    lag_ms: int | None = None
    topics: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[str, ...]:
        """What is read, each with positions and a head of its own."""
        return self.topics or self.sources

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a window by gap nor a tenant: merge records close in order of event time."""
        return self.max_ms is None and self.lag_ms is None

    def due(self, event_time: int, last_event_time: int) -> int:
        """The last moment at which a merge record with these event times can be joined."""
        return min(last_event_time + self.gap_ms, event_time + (self.gap_ms if self.max_ms is None else self.max_ms))


@dataclass(frozen=True)
class Record:
    """One record of a topic-partition as the merge sees it; `source` is its input. A heartbeat is a record without a key.

    A heartbeat of the tenant None speaks for the whole topic-partition. A decision of the idle policy is a heartbeat with `told`:
    it speaks in full for no tenant but these, to each of which it gives a time.
    """

    source: str
    offset: int
    event_time: int
    key: str | None = None
    tenant: str | None = ALL
    told: Mapping[str, int] | None = None

    @property
    def is_heartbeat(self) -> bool:
        """Whether the record only moves the head."""
        return self.key is None

    @property
    def part(self) -> Part:
        """What it is inside a merge record."""
        return Part(self.event_time, self.offset, topic_of(self.source))


@dataclass(frozen=True)
class Part:
    """A record inside a merge record; parts of a source sort by (event time, topic, offset).

    `topic` is empty where the source has one topic.
    """

    event_time: int
    offset: int
    topic: str = ""

    def __lt__(self, other: Part) -> bool:
        return (self.event_time, self.topic, self.offset) < (other.event_time, other.topic, other.offset)


@dataclass(frozen=True)
class LateRecord:
    """A record that came after its time: never merged, kept with its position, which is that of its tenant."""

    record: Record
    position: int


class PublishedRecord(NamedTuple):
    """A message of the sink that the merge must know again: its event time, where it says them `due` and `closed_at`, and its
    tenant.
    """

    event_time: int
    due: int | None = None
    closed_at: int | None = None
    tenant: str = ALL


@dataclass
class MergeRecord:
    """Everything merged for one key of a tenant while it was open, by source.

    `due` and `closed_at` are set when it times out: until when it could be joined, and the first clock at which that was over.
    They stay unset as long as all rules have been plain: then the event time decides where it is published.
    """

    key: str
    event_time: int
    last_event_time: int
    parts: dict[str, list[Part]]
    tenant: str = ALL
    due: int | None = None
    closed_at: int | None = None

    def join(self, record: Record) -> None:
        """A joined record can only lower `event_time` and raise `last_event_time`."""
        self.event_time = min(self.event_time, record.event_time)
        self.last_event_time = max(self.last_event_time, record.event_time)
        self.parts[source_of(record.source)].append(record.part)

    def content(self) -> tuple[str, int, int, tuple[tuple[Part, ...], ...]]:
        """Equal for equal content: key, event time, last event time, the sorted parts of each source in the rules' order."""
        return self.key, self.event_time, self.last_event_time, tuple(tuple(sorted(p)) for p in self.parts.values())

    def place(self) -> tuple[int, bytes, int, bytes]:
        """The order of publication: closed at, tenant, due, key, texts as UTF-8 bytes. Without these: event time, key."""
        if self.due is None or self.closed_at is None:
            return NEVER, b"", self.event_time, self.key.encode()
        return self.closed_at, self.tenant.encode(), self.due, self.key.encode()


@dataclass
class Rises:
    """A running maximum along a topic-partition: each value it rose to, and the position just before the record that did it."""

    values: list[int] = field(default_factory=list)
    befores: list[int] = field(default_factory=list)

    def add(self, value: int, before: int) -> None:
        """Takes the next value, which may be no rise."""
        if value > self.last():
            self.values.append(value)
            self.befores.append(before)

    def last(self) -> int:
        """The maximum so far."""
        return self.values[-1] if self.values else NEVER

    def at_cut(self, clock: int) -> int:
        """The maximum up to and including the first record that has come to the clock."""
        found = bisect_left(self.befores, clock)
        return self.values[found - 1] if found else NEVER

    def before_passing(self, time: int) -> float:
        """The position just before the maximum rose above a time; infinite where it has not yet."""
        found = bisect_right(self.values, time)
        return self.befores[found] if found < len(self.values) else float("inf")


@dataclass
class Reading:
    """One topic-partition: what has arrived and waits to be read, and what each tenant has there.

    `every`: positions. `whole`: heartbeats that speak for all tenants. `own`: by tenant, its records and heartbeats.
    """

    head: int = NEVER
    unread: deque[tuple[int, Record]] = field(default_factory=deque)
    every: Rises = field(default_factory=Rises)
    whole: Rises = field(default_factory=Rises)
    own: dict[str, Rises] = field(default_factory=lambda: defaultdict(Rises))

    def arrive(self, record: Record) -> None:
        """A record's position is the largest event time of its topic-partition so far."""
        self.head = max(record.event_time, self.head)
        self.unread.append((self.head, record))

    def read(self, clock: int, lag: int) -> Iterator[tuple[int, Record]]:
        """The records that the clock has reached, each with its tenant's position; afterwards the cut at the clock is known."""
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
        """Once more changes nothing: the record of a cut may still be unread."""
        self.every.add(position, before)
        if record.told is not None:
            for tenant, time in record.told.items():
                self.own[tenant].add(time, before)
        elif record.tenant is None:
            self.whole.add(record.event_time, before)
        else:
            self.own[record.tenant].add(record.event_time, before)

    def position(self, tenant: str | None, lag: int) -> int:
        """A tenant's position: its own records and heartbeats, those of everybody, and never more than `lag` behind."""
        own = self.own[tenant].last() if tenant in self.own else NEVER
        return max(own, self.whole.last(), self.every.last() - lag)

    def position_at_cut(self, tenant: str | None, clock: int, lag: int) -> int:
        """A tenant's position at the end of the cut at a clock: up to and including the first record that has come to it."""
        own = self.own[tenant].at_cut(clock) if tenant in self.own else NEVER
        return max(own, self.whole.at_cut(clock), self.every.at_cut(clock) - lag)

    def before_passing(self, tenant: str, time: int, lag: int) -> float:
        """The position just before the record that took a tenant's position past a time."""
        own = self.own[tenant].before_passing(time) if tenant in self.own else float("inf")
        return min(own, self.whole.before_passing(time), self.every.before_passing(time + lag))

    def keep_behind(self, lag: int) -> None:
        """What every tenant has at the least under this lag, it keeps under another one."""
        if self.every.values:
            self.whole.add(self.every.last() - lag, self.every.befores[-1])


@dataclass
class PartitionMerge:
    """The state of one partition: what is unread, what waits for its tenant's clock, what is open, what is finished."""

    rules: MergeRules
    clock: int | None = None
    sources: dict[str, Reading] = field(default_factory=dict)
    """By input."""
    waiting: list[tuple[int, Record]] = field(default_factory=list)
    """What was read and its tenant's clock has not reached, with the tenant's position there; none without tenants."""
    open: dict[tuple[str, str], MergeRecord] = field(default_factory=dict)
    """By tenant and key."""
    timed_out: list[MergeRecord] = field(default_factory=list)
    late: list[LateRecord] = field(default_factory=list)
    horizon: int | None = None
    """The largest tenant clock - gap at the ends of the epochs before, for tenants that none of them had met: all that timed out
    in them lies before it, and nothing else does."""
    horizons: dict[str, int] = field(default_factory=dict)
    """The same for the other tenants."""
    begun_at: int = NEVER
    """The clock at which this epoch began: what times out in it does so later."""
    is_plain: bool = True
    """Whether the rules of this epoch and of all before it are plain."""
    has_advanced: bool = False
    """Whether this epoch has looked at anything; one that has not leaves no trace in the horizon."""
    recovered: Mapping[str, Sequence[PublishedRecord]] = field(default_factory=dict)
    """After a lost lake: by key, the messages read back from the sink (`core.recovery`)."""
    out: Collection[tuple[str, int]] = ()
    """By input and offset, the parts of messages of earlier generations: they are passed over, and still move positions."""
    since: int = NEVER
    """After a lost lake with tenants: a record whose tenant's position is before this one is published, was rejected, or is
    late, and is passed over."""
    already_published: list[Record] = field(default_factory=list)
    """What the sink holds, and what was passed over."""

    @property
    def heads(self) -> dict[str, int]:
        """By input, the position of its last record; only inputs that have some."""
        return {source: reading.head for source, reading in self.sources.items()}

    def arrive(self, *records: Record) -> None:
        """A record waits in its topic-partition until the clock has come to its position."""
        for record in records:
            self.sources.setdefault(record.source, Reading()).arrive(record)

    def __post_init__(self) -> None:
        self.is_plain = self.rules.is_plain

    def begin_epoch(self, gap_ms: int, max_ms: int | None = None, lag_ms: int | None = None) -> None:
        """From now on the window and the lag are others. What was late stays late, so that what is out stays first in order."""
        if self.has_advanced and self.clock is not None:
            seen = {tenant for reading in self.sources.values() for tenant in reading.own}
            self.horizons = {tenant: self._horizon_after(tenant) for tenant in seen}
            self.horizon = self._horizon_after(None)
            self.begun_at = self.clock
            if lag_ms != self.rules.lag_ms:
                for reading in self.sources.values():
                    reading.keep_behind(self._lag)
        self.rules = replace(self.rules, gap_ms=gap_ms, max_ms=max_ms, lag_ms=lag_ms)
        self.is_plain &= self.rules.is_plain
        self.has_advanced = False

    def advance(self) -> None:
        """Reads everything that the clock has reached, merges what its tenant's clock has reached, times out what is too old."""
        is_first, self.has_advanced = not self.has_advanced, True
        if len(self.sources) < len(self.rules.inputs):
            return  # the clock is undefined while an input has no record
        self.clock = min(reading.head for reading in self.sources.values())
        if is_first:
            was_waiting, self.waiting = self.waiting, []
            self._judge(was_waiting)
        for reading in self.sources.values():
            self._judge(reading.read(self.clock, self._lag))
        clocks = {tenant: self.tenant_clock(tenant) for tenant in self.tenants()}
        reached = [each for each in self.waiting if each[0] <= clocks[_tenant(each[1])]]
        self.waiting = [each for each in self.waiting if each[0] > clocks[_tenant(each[1])]]
        for position, record in sorted(reached, key=lambda waiting: waiting[0]):
            self._merge(position, record)
        for row in [row for row in self.open.values() if self._due(row) < clocks[row.tenant]]:
            self._time_out(row)

    def advance_to(self, heads: Mapping[str, int], records: Mapping[str, Sequence[tuple[int, Record]]]) -> None:
        """Advances to what a lake without tenants has seen: heads by source, some of the records up to there, with positions."""
        for source, head in heads.items():
            reading = self.sources.setdefault(source, Reading())
            told = Record(source, 0, head, tenant=None)  # by what is left out
            reading.head, reading.unread = head, deque([*records.get(source, ()), (head, told)])
        self.advance()

    def tenants(self) -> set[str]:
        """The tenants that have something open or waiting."""
        return {tenant for tenant, _ in self.open} | {_tenant(record) for _, record in self.waiting}

    def tenant_clock(self, tenant: str | None, clock: int | None = None) -> int:
        """A tenant's clock, now or at an earlier clock of this epoch; None: of a tenant that nothing is known of. Without tenants
        it is the clock.

        Raises ValueError while a source has no record.
        """
        now = self.clock if clock is None else clock
        if now is None:
            raise ValueError("the clock is undefined")
        return min(now, *(each.position_at_cut(tenant, now, self._lag) for each in self.sources.values()))

    def published_order(self) -> list[MergeRecord]:
        """Finished records in the order of publication."""
        return sorted(self.timed_out, key=MergeRecord.place)

    def unread(self) -> dict[str, list[tuple[int, Record]]]:
        """By input, what the clock has not reached, with positions; only inputs that have some."""
        return {source: list(reading.unread) for source, reading in self.sources.items() if reading.unread}

    def _judge(self, records: Iterator[tuple[int, Record]] | list[tuple[int, Record]]) -> None:
        """The time at a record is its own position in its tenant, nothing else."""
        for position, record in records:
            if record.is_heartbeat:
                continue
            if position < self.since or (record.source, record.offset) in self.out:
                self.already_published.append(record)
                continue
            horizon = self.horizons.get(_tenant(record), self.horizon)
            oldest = position - self.rules.gap_ms
            if record.event_time < (oldest if horizon is None else max(oldest, horizon)):
                self.late.append(LateRecord(record, position))
            else:
                self.waiting.append((position, record))

    def _merge(self, position: int, record: Record) -> None:
        key, tenant = record.key or "", _tenant(record)
        known = [message for message in self.recovered.get(key, ()) if message.tenant == tenant]
        if any(self._is_held(position, message) for message in known):
            self.already_published.append(record)  # a part of that message, or of an earlier one of its key
            return
        row = self.open.get((tenant, key))
        if row is not None and self._due(row) >= position:
            row.join(record)
            return
        if row is not None:
            self._time_out(row)
        parts: dict[str, list[Part]] = {source: [] for source in self.rules.sources}
        parts[source_of(record.source)].append(record.part)
        self.open[tenant, key] = MergeRecord(key, record.event_time, record.event_time, parts, tenant)

    def _is_held(self, position: int, message: PublishedRecord) -> bool:
        """Whether a message that was read back, or an earlier one of its key, holds the key's record at a position."""
        return position <= (message.event_time + self.rules.gap_ms if message.due is None else message.due)

    def _due(self, row: MergeRecord) -> int:
        return self.rules.due(row.event_time, row.last_event_time)

    def _time_out(self, row: MergeRecord) -> None:
        if not self.is_plain:
            row.due = due = self._due(row)
            passed = [reading.before_passing(row.tenant, due, self._lag) for reading in self.sources.values()]
            row.closed_at = 1 + int(max(due, self.begun_at, *passed))
        self.timed_out.append(self.open.pop((row.tenant, row.key)))

    @property
    def _lag(self) -> int:
        return self.rules.lag_ms or 0

    def _horizon_after(self, tenant: str | None) -> int:
        before = self.horizon if tenant is None else self.horizons.get(tenant, self.horizon)
        return horizon_after(before, self.tenant_clock(tenant), self.rules.gap_ms)


def horizon_after(before: int | None, clock: int, timeout_ms: int) -> int:
    """The horizon (ms) after an epoch with this timeout that ended at this clock; `before`: that of the epochs before it."""
    return clock - timeout_ms if before is None else max(before, clock - timeout_ms)


def _tenant(record: Record) -> str:
    """Of a record with a key; only a heartbeat may have no tenant."""
    return ALL if record.tenant is None else record.tenant
