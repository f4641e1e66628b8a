"""Rows of silver as the merge model derives them from bronze, a piece after the other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from watersmeet.audit.comparison import Row
from watersmeet.audit.evidence import End
from watersmeet.core.correction_model import (
    CorrectedRecord,
    Correction,
    CorrectionPlace,
    PartitionCorrections,
    Pending,
)
from watersmeet.core.inputs import InputId, of_source
from watersmeet.core.model import (
    MIN_TIME,
    NO_TENANT,
    LateRecord,
    MergeRecord,
    MergeRules,
    Part,
    PartitionMerge,
    PublishedRecord,
    Record,
    RunningMax,
    SourceState,
)
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import EXCESS, TOO_MANY
from watersmeet.core.state import State
from watersmeet.lake.history import Epoch

Arrived: TypeAlias = Iterable[tuple[int, Record]]
"""Records of an input in their order, each with its position (ms)."""

Message: TypeAlias = tuple[str, int, int, int, str]
"""A message read back: its key, event time, due and closed_at (ms), and tenant."""


class Base(NamedTuple):
    """What a partition's derivation begins with.

    - `state`: the saved state with which history begins; None: with nothing.
    - `rows`: of sampled keys, its rows of merge records that were open, of records that waited
      (each with its `value`), and of late ones that were not settled (each with `rules`, the
      settings by which it is late); and rows of silver of merge records that had closed by then,
      and of corrections, which late records may still correct.
    - `recovered`: messages that were read back from the sink of a lost lake.
    - `since`: the position (ms) in their tenant before which the lost lake's records are passed
      over; None: there is none.
    - `corrected_before`: the last correction of the lost lake.
    - `corrected_keys`: tenants and keys of the late records that are corrected; None: any may be.
    """

    state: State | None = None
    rows: Sequence[Mapping[str, Any]] = ()
    recovered: Iterable[Message] = ()
    since: int | None = None
    corrected_before: CorrectionPlace | None = None
    corrected_keys: Collection[tuple[str, str]] | None = None


@dataclass
class Derivation:
    """The merge model of one partition.

    `arrive` gives it records, `merge` goes on to the end of some batch. `finished` then returns the
    rows that were finished since, and `unfinished` those that may still change.

    - `columns`: those of the rows.
    - `values`: by input and offset, the values of records with keys, until their outcome is taken.
    - `kept`: returns what silver keeps of such a value.
    """

    rules: MergeRules
    partition: int
    base: Base
    columns: Sequence[str]
    values: Mapping[InputId, dict[int, bytes]]
    kept: Callable[[InputId, int], Any]

    def __post_init__(self) -> None:
        rules, base = self.rules, self.base
        messages: dict[str, list[PublishedRecord]] = defaultdict(list)
        for key, event_time, due, closed_at, tenant in base.recovered:
            messages[key].append(PublishedRecord(event_time, due, closed_at, tenant))
        self.model = PartitionMerge(rules, recovered=messages)
        if base.since is not None:
            self.model.since = base.since
        self.corrections = PartitionCorrections(
            self.model, None, base.corrected_before, keys=base.corrected_keys
        )
        self._kept_before: dict[tuple[InputId, int], Any] = {}
        self.has_several = {
            source: len(of_source(rules.inputs, source)) > 1 for source in rules.sources
        }
        self.out: set[tuple[InputId, int]] = set()
        self._unread: dict[InputId, list[tuple[int, Record]]] = {i: [] for i in rules.inputs}
        self._seen = dict.fromkeys(rules.inputs, 0)
        """How many of the unread records the model was given already."""
        self._epoch: int | None = None
        if base.state is not None:
            self._begin(base, base.state)

    def _begin(self, base: Base, state: State) -> None:
        model, p = self.model, self.partition
        model.clock = state.clocks.get(p)
        model.horizon = state.rules.horizons.get(p)
        tenant_horizons = state.rules.tenant_horizons.items()
        model.horizons = {tenant: at for (q, tenant), at in tenant_horizons if q == p}
        model.epoch_start = state.rules.epoch_start.get(p, MIN_TIME)
        model.ended = model.rules, model.epoch_start
        if state.epoch_from < state.next_batch:  # the epoch has merged something
            self._epoch = state.epoch
            model.has_advanced = True
            max_parts, max_bytes = state.rules.bounds
            model.rules = replace(model.rules, max_parts=max_parts, max_bytes=max_bytes)
        self._begin_clocks(state)
        corrected: dict[tuple[Any, ...], CorrectedRecord] = {}
        for row in base.rows:
            at = (row["tenant"], row["merge_key"], row["event_time"], row["is_late_born"] or False)
            status = row["status"]
            if status == "open":
                model.open[row["tenant"], row["merge_key"]] = self._merged(row)
            elif status == "waiting":
                [waiting] = self._merged(row).records
                model.waiting.append((row["position"], waiting._replace(size=row["record_bytes"])))
                if row["value"] is not None:  # it may be late by other rules
                    self.values[waiting.input][waiting.offset] = row["value"]
            elif status == "late":
                self._begin_late(row)
            elif at not in corrected or corrected[at].version < (row["version"] or 0):
                corrected[at] = self._corrected(row)
        self.corrections.begin(corrected.values())

    def _begin_late(self, row: Mapping[str, Any]) -> None:
        value, rules = row["value"] or b"", row["rules"]
        at = InputId(row["source"], row["topic"]), row["offset"], row["event_time"]
        who = row["merge_key"], row["tenant"]
        record = Record(*at, *who, id=row.get("id"), size=len(value))
        self.values[record.input][record.offset] = value
        late, gap_ms = LateRecord(record, row["position"]), rules.merge.window.gap_ms
        pending = Pending(late, row["u"], gap_ms, rules.publish.max_versions)
        self.corrections.pending.append(pending)

    def _corrected(self, row: Mapping[str, Any]) -> CorrectedRecord:
        merged = self._merged(row)
        merged.due, merged.closed_at = row["due"], row["closed_at"]
        closed = CorrectedRecord.closed(merged)
        if row["status"] != "correction":
            return closed
        return replace(
            closed,
            is_late_born=row["is_late_born"],
            version=row["version"],
            first_event_time=row["first_event_time"],
        )

    def _merged(self, row: Mapping[str, Any]) -> MergeRecord:
        who, inputs = (row["merge_key"], row["tenant"]), self.model.rules.inputs
        parts: dict[str, list[Part]] = {source: [] for source in self.has_several}
        merged = MergeRecord(who[0], row["event_time"], row["last_event_time"], parts, who[1])
        entries = row.get("record_ids") or ()
        ids = {(InputId(*at), offset): own for *at, offset, _, own, _ in entries}
        records = [
            Record(InputId(*at), offset, time, *who, id=ids[InputId(*at), of_offset])
            for *at, offset, time, _, of_offset in entries
            if of_offset is not None
        ]
        for source in parts:
            for *topic, offset, time, value in row[source] or ():
                input_id = InputId(source, *topic) if topic else of_source(inputs, source)[0]
                self._kept_before[input_id, offset] = value
                own_id = ids.get((input_id, offset))
                records.append(Record(input_id, offset, time, *who, id=own_id))
        for record in sorted(records, key=itemgetter(0, 1)):
            merged.join(record)
        # A correction has the time of its merge record as it closed, and may have earlier parts.
        merged.event_time, merged.last_event_time = row["event_time"], row["last_event_time"]
        merged.count, merged.size = row["record_count"], row["record_bytes"]
        merged.is_too_large = not any(parts.values())
        return merged

    def _begin_clocks(self, state: State) -> None:
        model, p = self.model, self.partition
        if state.rules.lag_ms is not None and model.clock is not None:
            for tp, cursor in state.cursors.items():
                if tp.partition == p:
                    model.states[tp.input] = _source_state(state, tp, cursor.position, model)
        elif model.clock is not None:
            for input_id in model.rules.inputs:
                _deliver(model, input_id, [_at_clock(input_id, model.clock)])
            if self._epoch is not None:
                model.advance()

    def arrive(self, input_id: InputId, records: Arrived) -> None:
        """Add the next records of an input. What of them is `out` is passed over."""
        self._unread[input_id].extend(records)

    def merge(self, epoch: Epoch, end: End) -> None:
        """Merge what had been reached at the end of a batch of an epoch.

        What a key's records become depends on nothing but their positions and the clock, so that
        without tenants a sample of the keys can be given.
        """
        if (clock := end.clocks.get(self.partition)) is None:
            return
        merge = epoch.settings.merge
        model = self.model
        if epoch.number != self._epoch:
            times = merge.window.gap_ms, merge.window.max_ms, merge.tenant_max_lag_ms
            model.begin_epoch(*times, merge.bounds)
            self._epoch = epoch.number
        model.out = self.out
        for input_id, records in self._unread.items():
            tp = TopicPartition(input_id, self.partition)
            until = _count_until(records, end.until.get(tp, 0), clock)
            # The first record that waits belongs to the cut at the clock.
            is_cut = merge.has_tenants and end.heads.get(tp, clock) > clock
            is_cut = is_cut and until < len(records)
            begin = self._seen[input_id]
            self._seen[input_id] = max(is_cut, begin - until)
            _deliver(model, input_id, records[begin : until + is_cut])
            del records[:until]
            if not merge.has_tenants and model.heads.get(input_id, MIN_TIME) < clock:
                # In place of the records that were left out, or came before a history.
                _deliver(model, input_id, [_at_clock(input_id, clock)])
        model.advance()
        publish = epoch.settings.publish
        self.corrections.within_ms = publish.within_ms
        self.corrections.max_versions = publish.max_versions
        self.corrections.settle()

    def finished(self) -> list[Row]:
        """Return the rows that were finished since this was last called."""
        model, corrections = self.model, self.corrections
        rows = [
            *(self._late(late.record, late.position) for late in model.late),
            *(self._alone("passed", r, position=at) for at, r in model.passed),
            *(self._alone("excess", r) for r in model.excess),
            *(self._duplicate(*each, is_late=False) for each in model.duplicates),
            *(self._duplicate(*each, is_late=True) for each in corrections.duplicates),
            *(self._merge_record("timed_out", row) for row in model.timed_out),
        ]
        reasons = (None, corrections.corrections), (TOO_MANY, corrections.too_many)
        for reason, made in (*reasons, (EXCESS, corrections.too_large)):
            rows += [self._correction(each, reason) for each in made]
        self._forget()
        return rows

    def unfinished(self) -> list[Row]:
        """Return open merge records, and records that wait."""
        return [
            *(self._merge_record("open", row) for row in self.model.open.values()),
            *(self._waiting(position, record) for position, record in self.model.waiting),
        ]

    def _forget(self) -> None:
        """Forget what is finished, but for merge records that may still be corrected."""
        model, corrections = self.model, self.corrections
        passed = [record for _, record in model.passed]
        self.out -= {(record.input, record.offset) for record in passed}
        keys = corrections.keys
        closed = (
            row.records
            for row in model.timed_out
            if keys is not None and (row.tenant, row.key) not in keys
        )
        late = (late.record for late in corrections.uncorrected)
        for record in chain(passed, model.excess, late, *closed):
            self.values[record.input].pop(record.offset, None)
        model.forget_finished()
        corrections.forget_settled()

    # -- rows of silver

    def _row(self, **values: Any) -> Row:
        return tuple(map({"partition": self.partition, **values}.get, self.columns))

    def _alone(self, status: str, record: Record, **values: Any) -> Row:
        return self._row(
            status=status,
            **record.input._asdict(),
            offset=record.offset,
            tenant=record.tenant or NO_TENANT,
            merge_key=record.key,
            event_time=record.event_time,
            **values,
        )

    def _late(self, record: Record, position: int) -> Row:
        at = record.input, record.offset
        value = self.values[record.input].get(record.offset)
        own = {"u": self.corrections.u.get(at), "id": record.id, "record_bytes": record.size}
        return self._alone("late", record, position=position, value=value, **own)

    def _duplicate(self, record: Record, of_offset: int, *, is_late: bool) -> Row:
        of = {"id": record.id, "of_offset": of_offset, "is_late": is_late}
        return self._alone("duplicate", record, **of)

    def _waiting(self, position: int, record: Record) -> Row:
        alone = MergeRecord(record.key or "", record.event_time, record.event_time, {})
        alone.parts = {source: [] for source in self.has_several}
        alone.join(record)
        kept = self._kept_of(alone) | {"tenant": record.tenant or NO_TENANT}
        place = {**record.input._asdict(), "offset": record.offset, "position": position}
        return self._row(status="waiting", **place, record_count=1, **kept)

    def _merge_record(self, status: str, row: MergeRecord) -> Row:
        due = row.due
        if status == "open":
            due = self.model.rules.due(row.event_time, row.last_event_time)
        closed_at = None if status == "open" else row.closed_at
        times = {"due": due, "closed_at": closed_at}
        return self._row(status=status, **times, record_count=row.count, **self._kept_of(row))

    def _correction(self, made: Correction, reason: str | None) -> Row:
        record = made.late.record
        return self._row(
            status="correction",
            **record.input._asdict(),
            offset=record.offset,
            is_late_born=made.is_late_born,
            version=made.version,
            position=made.late.position,
            u=made.place.u,
            settled_at=made.place.settled_at,
            due=made.due,
            closed_at=made.closed_at,
            first_event_time=made.first_event_time,
            invalid_reason=reason,
            record_count=made.records,
            **self._kept_of(made),
        )

    def _kept_of(self, row: MergeRecord | Correction) -> dict[str, Any]:
        is_too_large = isinstance(row, MergeRecord) and row.is_too_large
        return {
            "tenant": row.tenant,
            "merge_key": row.key,
            "event_time": row.event_time,
            "last_event_time": row.last_event_time,
            "record_bytes": 0 if is_too_large else row.size,
            "record_ids": _ids(row),
            **self._parts(row.parts),
        }

    def _parts(self, parts: Mapping[str, Sequence[Part]]) -> dict[str, tuple[Row, ...]]:
        return {
            source: tuple(
                (
                    *((part.topic,) if self.has_several[source] else ()),
                    *(part.offset, part.event_time),
                    self._value(InputId(source, part.topic), part.offset),
                )
                for part in sorted(of_source)
            )
            for source, of_source in parts.items()
        }

    def _value(self, input_id: InputId, offset: int) -> Any:
        at = input_id, offset
        return self._kept_before[at] if at in self._kept_before else self.kept(*at)


def _at_clock(input_id: InputId, clock: int) -> tuple[int, Record]:
    return clock, Record(input_id, -1, clock, tenant=None)


def _source_state(
    base: State, tp: TopicPartition, position: int | None, model: PartitionMerge
) -> SourceState:
    """Return what a saved state has of a topic-partition with tenants.

    Times in the cut count from before all; those after it count once the clock moves.
    """
    state = SourceState()
    state.own.update((tenant, RunningMax()) for tenant in model.horizons)
    if position is not None:
        state.head = position
        state.every.add(position, MIN_TIME)
    for head in base.heads.to_pylist():
        if head["partition"] != tp.partition or (head["source"], head["topic"]) != tp.input:
            continue
        maxima = state.whole if head["tenant"] is None else state.own[head["tenant"]]
        maxima.add(min(head["own"], head["at_cut"]), MIN_TIME)
        maxima.add(head["own"], base.clocks[tp.partition])
    return state


def _ids(row: MergeRecord | Correction) -> tuple[Row, ...] | None:
    times = {
        (InputId(source, part.topic), part.offset): part.event_time
        for source, of_source in row.parts.items()
        for part in of_source
    }
    entries: list[Row] = [
        (*input_id, offset, times[input_id, offset], record_id, None)
        for (input_id, record_id), offset in row.ids.items()
    ]
    entries += [
        (*r.input, r.offset, r.event_time, None, of_offset) for r, of_offset in row.repeated
    ]
    return tuple(sorted(entries, key=itemgetter(0, 1, 2))) or None


def _count_until(records: Sequence[tuple[int, Record]], until: int, clock: int) -> int:
    """Return how many records lie before an offset and have positions (ms) up to the clock."""
    consumed = bisect_left(records, until, key=lambda entry: entry[1].offset)
    return min(consumed, bisect_right(records, clock, key=itemgetter(0)))


def _deliver(
    model: PartitionMerge, input_id: InputId, records: Sequence[tuple[int, Record]]
) -> None:
    if records:
        state = model.states.setdefault(input_id, SourceState())
        state.head = records[-1][0]
        state.unread.extend(records)
