"""Corrections in plain Python: the executable form of their rules, beside `core.model`.

A late record is never merged. For each one that is not too late, a correction has the whole merge
record with the late record in it, once no merge record that could hold it is open any more. How
arrivals are split over calls does not change the corrections.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from watersmeet.core.inputs import InputId
from watersmeet.core.model import DuplicateRecord, LateRecord, MergeRecord, Part, PartitionMerge

MAX_VERSIONS: Final = 1000
"""Default maximum number of versions of a merge record, beyond which late records are late alone:
each version has all parts, so that their size grows with the square of their number."""


class CorrectionPlace(NamedTuple):
    """The place of a correction in the order of its partition; times in ms, texts as UTF-8.

    Source, topic and offset are those of the late record.
    """

    settled_at: int
    tenant: bytes
    u: int
    source: bytes
    topic: bytes
    offset: int


@dataclass
class CorrectedRecord:
    """A merge record as it closed, or one that a late record has opened, with what corrected it."""

    tenant: str
    key: str
    event_time: int
    due: int
    closed_at: int
    is_late_born: bool
    first_event_time: int
    last_event_time: int
    parts: dict[str, list[Part]]
    ids: dict[tuple[InputId, str], int]
    repeated: list[DuplicateRecord]
    version: int = 0
    """The number of its corrections."""
    records: int = 0
    """Number of the records that have joined it, and of those that have corrected it."""
    size: int = 0
    """Number of bytes in the values of these."""
    is_too_large: bool = False

    @classmethod
    def closed(cls, row: MergeRecord) -> CorrectedRecord:
        """Return a merge record that has timed out, before any correction."""
        return cls(
            row.tenant,
            row.key,
            row.event_time,
            row.due,
            row.closed_at,
            is_late_born=False,
            first_event_time=row.event_time,
            last_event_time=row.last_event_time,
            parts={source: list(parts) for source, parts in row.parts.items()},
            ids=dict(row.ids),
            repeated=row.repeated,
            records=row.count,
            size=row.size,
            is_too_large=row.is_too_large,
        )


class Correction(NamedTuple):
    """A correction: the merge record that it is about, and its content with the late record.

    Version 0 is none: the merge record has as many versions as it may, or is too large, or would
    be with the late record; and there is no content.
    """

    place: CorrectionPlace
    late: LateRecord
    tenant: str
    key: str
    event_time: int
    due: int
    closed_at: int
    is_late_born: bool
    version: int
    first_event_time: int
    last_event_time: int
    parts: dict[str, tuple[Part, ...]]
    ids: dict[tuple[InputId, str], int]
    repeated: tuple[DuplicateRecord, ...]
    records: int = 0
    """Number of the records in it, and of those that repeat one."""
    size: int = 0
    """Number of bytes in the values of these."""


class Pending(NamedTuple):
    """A late record that is to be corrected, with its `u`, and what its epoch says: the gap (ms),
    and how many versions a merge record may have.
    """

    late: LateRecord
    u: int
    gap_ms: int
    max_versions: int


@dataclass
class PartitionCorrections:
    """The corrections of a partition's late records. `settle` follows each `merge.advance`.

    `within_ms`: how far a late record may lie behind its position and still be corrected; None: no
    late record is. `max_versions`: as many corrections a merge record may have. Both may change
    whenever an epoch begins. `corrected_before`: the last correction
    of a lost lake; a late record that sorts up to there may be in one that is out, so that it opens
    a merge record which takes no other. A merge record that was closed by then may have versions
    that are out, so that it takes no late record.
    """

    merge: PartitionMerge
    within_ms: int | None
    corrected_before: CorrectionPlace | None = None
    corrections: list[Correction] = field(default_factory=list)
    """All corrections so far, in their order."""
    duplicates: list[DuplicateRecord] = field(default_factory=list)
    """Late records that make no correction, since their merge record has a part with their id."""
    uncorrected: list[LateRecord] = field(default_factory=list)
    """Late records that are not to be corrected."""
    too_many: list[Correction] = field(default_factory=list)
    """What is not corrected since its merge record has as many versions as it may, in order."""
    too_large: list[Correction] = field(default_factory=list)
    """What is not corrected since its merge record is too large, or would be with it, in order."""
    max_versions: int = MAX_VERSIONS
    pending: list[Pending] = field(default_factory=list)
    u: dict[tuple[InputId, int], int] = field(default_factory=dict)
    """`u` (ms) of each late record that is to be corrected, by input and offset."""
    keys: Container[tuple[str, str]] | None = None
    """Tenants and keys that late records may have; None: any."""
    _records: dict[tuple[str, str], list[CorrectedRecord]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _late: int = 0
    _closed: int = 0

    def begin(self, records: Iterable[CorrectedRecord]) -> None:
        """Begin with merge records that closed before, as their last corrections left them."""
        for record in records:
            self._records[record.tenant, record.key].append(record)

    def settle(self) -> None:
        """Take what the merge has found late and closed, and make the corrections that are due."""
        self._judge()
        before = self.corrected_before
        for row in self.merge.timed_out[self._closed :]:
            if before is not None and row.closed_at <= before.settled_at:
                continue
            if self.keys is not None and (row.tenant, row.key) not in self.keys:
                continue
            self._records[row.tenant, row.key].append(CorrectedRecord.closed(row))
        self._closed = len(self.merge.timed_out)
        if self.merge.clock is None:
            return
        settled = list[tuple[CorrectionPlace, Pending]]()
        pending = list[Pending]()
        for each in self.pending:
            settled_at = self.merge.first_clock_past(each.late.record.tenant or "", each.u)
            if settled_at <= self.merge.clock:
                settled.append((_place(each, int(settled_at)), each))
            else:
                pending.append(each)
        self.pending = pending
        for place, each in sorted(settled, key=lambda pair: pair[0]):
            self._correct(place, each)

    def forget_settled(self) -> None:
        """Forget what is settled, and that anything was late or closed, once somebody has taken it
        and the merge has forgotten it.
        """
        for settled in (self.corrections, self.duplicates, self.uncorrected, self.too_many):
            settled.clear()
        self.too_large.clear()
        self.u.clear()
        self._late = self._closed = 0

    def _judge(self) -> None:
        """Give each new late record its `u`, by the rules of the epoch in which it is late."""
        rules = self.merge.rules
        for late in self.merge.late[self._late :]:
            event_time = late.record.event_time
            if self.within_ms is None or event_time < late.position - self.within_ms:
                self.uncorrected.append(late)
                continue
            u = max(late.position, event_time + rules.gap_ms + rules.longest_ms)
            self.u[late.record.input, late.record.offset] = u
            self.pending.append(Pending(late, u, rules.gap_ms, self.max_versions))
        self._late = len(self.merge.late)

    def _correct(self, place: CorrectionPlace, settled: Pending) -> None:
        late = settled.late
        record = late.record
        is_out = self.corrected_before is not None and place <= self.corrected_before
        row = None if is_out else self._merge_record_of(place, settled)
        if row is None:
            row = CorrectedRecord(
                record.tenant or "",
                record.key or "",
                record.event_time,
                record.event_time + settled.gap_ms,
                place.settled_at,
                is_late_born=True,
                first_event_time=record.event_time,
                last_event_time=record.event_time,
                parts={source: [] for source in self.merge.rules.sources},
                ids={},
                repeated=[],
            )
            is_too_large = self.merge.rules.is_too_large(1, record.size)
            if not is_out and not is_too_large:
                self._records[row.tenant, row.key].append(row)
        if record.id is not None and (record.input, record.id) in row.ids:
            of_offset = row.ids[record.input, record.id]
            self.duplicates.append(DuplicateRecord(record, of_offset))
            return
        about = row.tenant, row.key, row.event_time, row.due, row.closed_at, row.is_late_born
        times = record.event_time, record.event_time
        none = Correction(place, late, *about, 0, *times, dict.fromkeys(row.parts, ()), {}, ())
        size = row.records + 1, row.size + record.size
        if row.is_too_large or self.merge.rules.is_too_large(*size):
            self.too_large.append(none)
            return
        if row.version >= settled.max_versions:
            self.too_many.append(none)
            return
        row.records, row.size = size
        if record.id is not None:
            row.ids[record.input, record.id] = record.offset
        row.version += 1
        row.first_event_time = min(row.first_event_time, record.event_time)
        row.last_event_time = max(row.last_event_time, record.event_time)
        row.parts[record.input.source].append(record.part)
        times = row.first_event_time, row.last_event_time
        parts = {source: tuple(sorted(of_source)) for source, of_source in row.parts.items()}
        ids = dict(row.ids), tuple(row.repeated)
        self.corrections.append(
            Correction(place, late, *about, row.version, *times, parts, *ids, *size)
        )

    def _merge_record_of(self, place: CorrectionPlace, settled: Pending) -> CorrectedRecord | None:
        """Return the merge record that a late record belongs to; None where it opens one."""
        time = settled.late.record.event_time
        key = settled.late.record.tenant or "", settled.late.record.key or ""
        closed = [row for row in self._records[key] if row.closed_at <= place.settled_at]
        covering = [row for row in closed if row.event_time <= time <= row.due]
        if covering:
            # A longer window may have merged a record that begins where a late one was opened.
            return max(covering, key=lambda row: (row.event_time, not row.is_late_born))
        following = [row for row in closed if time < row.event_time <= time + settled.gap_ms]
        return min(following, key=lambda row: (row.event_time, row.is_late_born), default=None)


def _place(settled: Pending, settled_at: int) -> CorrectionPlace:
    record = settled.late.record
    source, topic = (name.encode() for name in record.input)
    tenant = (record.tenant or "").encode()
    return CorrectionPlace(settled_at, tenant, settled.u, source, topic, record.offset)
