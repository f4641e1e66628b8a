"""The merge, in plain Python: the executable form of the merge rules and the oracle that the pipeline is compared with.

Everything happens per partition and in event time. A `PartitionMerge` is told which records have arrived (`arrive`) and
when to look at them (`advance`); how arrivals are cut into calls of `advance` does not change what comes out. Between two of
them the rules may change (`begin_epoch`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class MergeRules:
    """What a merge is: its sources, in the order of their columns, once and for all, and the timeout in ms of event time."""

    sources: tuple[str, ...]
    timeout_ms: int


@dataclass(frozen=True)
class Record:
    """One record of a topic-partition as the merge sees it; a heartbeat is a record without a key."""

    source: str
    offset: int
    event_time: int
    key: str | None = None

    @property
    def is_heartbeat(self) -> bool:
        """Whether the record only moves the head."""
        return self.key is None


@dataclass(frozen=True, order=True)
class Part:
    """A record inside a merge record; parts of a source sort by (event time, offset)."""

    event_time: int
    offset: int


@dataclass(frozen=True)
class LateRecord:
    """A record that came after its time: never merged, kept with its position."""

    record: Record
    position: int


@dataclass
class MergeRecord:
    """Everything merged for one key while it was open, by source."""

    key: str
    event_time: int
    last_event_time: int
    parts: dict[str, list[Part]]

    def join(self, record: Record) -> None:
        """A joined record can only lower `event_time` and raise `last_event_time`."""
        self.event_time = min(self.event_time, record.event_time)
        self.last_event_time = max(self.last_event_time, record.event_time)
        self.parts[record.source].append(Part(record.event_time, record.offset))

    def content(self) -> tuple[str, int, int, tuple[tuple[Part, ...], ...]]:
        """Equal for equal content: key, event time, last event time, the sorted parts of each source in the rules' order."""
        return self.key, self.event_time, self.last_event_time, tuple(tuple(sorted(p)) for p in self.parts.values())


@dataclass
class PartitionMerge:
    """The state of one partition: what waits, what is open, what is finished."""

    rules: MergeRules
    heads: dict[str, int] = field(default_factory=dict)
    clock: int | None = None
    waiting: dict[str, deque[tuple[int, Record]]] = field(default_factory=dict)
    open: dict[str, MergeRecord] = field(default_factory=dict)
    timed_out: list[MergeRecord] = field(default_factory=list)
    late: list[LateRecord] = field(default_factory=list)
    horizon: int | None = None
    """The largest clock - timeout of the epochs before: all that timed out in them lies before it, and nothing else does."""
    has_advanced: bool = False
    """Whether this epoch has looked at anything; one that has not leaves no trace in the horizon."""
    recovered: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """After a lost lake: by key, the event times of messages read back from the sink (`core.recovery`)."""
    ahead: Sequence[tuple[int, int]] = ()
    """After a lost lake: of its epochs that are merged again, from this one on, the timeout (ms) and the clock at the end."""
    already_published: list[Record] = field(default_factory=list)

    def arrive(self, *records: Record) -> None:
        """A record's position is the largest event time of its topic-partition so far; it waits there for the clock."""
        for record in records:
            position = max(record.event_time, self.heads.get(record.source, record.event_time))
            self.heads[record.source] = position
            self.waiting.setdefault(record.source, deque()).append((position, record))

    def begin_epoch(self, timeout_ms: int) -> None:
        """From now on the timeout is another one. What was late stays late, so that what is out stays first in order."""
        if self.has_advanced and self.clock is not None:
            self.horizon = horizon_after(self.horizon, self.clock, self.rules.timeout_ms)
        self.rules, self.has_advanced = replace(self.rules, timeout_ms=timeout_ms), False

    def advance(self) -> None:
        """Merges everything that the clock has reached, in order of position, then times out what is too old."""
        self.has_advanced = True
        if len(self.heads) < len(self.rules.sources):
            return  # the clock is undefined while a source has no record
        self.clock = min(self.heads.values())
        reached = []
        for queue in self.waiting.values():
            while queue and queue[0][0] <= self.clock:
                reached.append(queue.popleft())
        for position, record in sorted(reached, key=lambda waiting: waiting[0]):
            self._merge(position, record)
        for key in [key for key, row in self.open.items() if row.event_time < self.clock - self.rules.timeout_ms]:
            self.timed_out.append(self.open.pop(key))

    def _merge(self, position: int, record: Record) -> None:
        """The time at a record is its own position, nothing else."""
        if record.key is None:
            return
        oldest = position - self.rules.timeout_ms
        if record.event_time < (oldest if self.horizon is None else max(oldest, self.horizon)):
            self.late.append(LateRecord(record, position))
            return
        if any(self._is_held(position, event_time) for event_time in self.recovered.get(record.key, ())):
            self.already_published.append(record)  # a part of that message, or of an earlier one of its key
            return
        row = self.open.get(record.key)
        if row is not None and row.event_time >= oldest:
            row.join(record)
            return
        if row is not None:
            self.timed_out.append(row)
        parts: dict[str, list[Part]] = {source: [] for source in self.rules.sources}
        parts[record.source].append(Part(record.event_time, record.offset))
        self.open[record.key] = MergeRecord(record.key, record.event_time, record.event_time, parts)

    def _is_held(self, position: int, event_time: int) -> bool:
        """Whether a message that was read back, or an earlier one of its key, holds the key's record at a position.

        It may have joined in any epoch from this one to that which timed the message out.
        """
        if self.horizon is not None and event_time < self.horizon:
            return False
        timeouts: list[int] = []
        for timeout_ms, clock in self.ahead:
            timeouts.append(timeout_ms)
            if event_time < clock - timeout_ms:
                return position <= event_time + max(timeouts)
        return position <= event_time + max([*timeouts, self.rules.timeout_ms])

    def published_order(self) -> list[MergeRecord]:
        """Finished records in the order of publication: event time, then the key's UTF-8 bytes."""
        return sorted(self.timed_out, key=lambda row: (row.event_time, row.key.encode()))


def horizon_after(before: int | None, clock: int, timeout_ms: int) -> int:
    """The horizon (ms) after an epoch with this timeout that ended at this clock; `before`: that of the epochs before it."""
    return clock - timeout_ms if before is None else max(before, clock - timeout_ms)
