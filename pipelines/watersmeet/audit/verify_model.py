"""Check 5 of `verify`: silver is what the merge model makes of bronze, for a sample of keys or for
all."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from watersmeet.audit.evidence import End, Evidence
from watersmeet.audit.verify_evidence import (
    DECISION,
    DUPLICATE,
    EXCESS,
    KEYED,
    LATE,
    PASSED,
    Log,
    Outcome,
    Partition,
    repeated,
)
from watersmeet.core.correction_model import CorrectionPlace, PartitionCorrections
from watersmeet.core.inputs import InputId
from watersmeet.core.model import (
    MIN_TIME,
    NO_TENANT,
    DuplicateRecord,
    MergeRecord,
    MergeRules,
    Part,
    PartitionMerge,
    PublishedRecord,
    Record,
    SourceState,
)
from watersmeet.core.plan import TopicPartition
from watersmeet.lake.epochs import Epoch

Arrived = Mapping[InputId, list[tuple[int, Record]]]
"""Positions (ms) and records, by input."""

Message = tuple[str, int, int, int, str]
"""A message read back: its key, event time, due and closed_at (ms), and tenant."""

Opened = Mapping[tuple[str, str], MergeRecord]
"""Open merge records, by tenant and key."""


class Expected(NamedTuple):
    """Expectations of the merge model.

    `outcomes`: what became of records. `clocks`: by the index of a row of silver, the clock (ms) of
    its tenant by which it was open, waiting or closed, and that of the batch before; absent where
    they are the partition's.
    `corrections`: those of late records; None where the partition has no clock.
    """

    outcomes: list[Outcome]
    clocks: Mapping[int, tuple[int, int | None]]
    corrections: PartitionCorrections | None


def expected(partition: Partition) -> Expected:
    """Return what the merge model makes of the records with sampled keys.

    What it decides for a key depends on nothing but the positions of the key's records and the
    clock, so only these are given to it. With tenants it depends on their clocks, too: then the
    model is given all records, those with other keys as heartbeats.
    """
    evidence = partition.evidence
    logs = partition.logs
    opened, parts_before = _open_before(partition)
    clock_requests = _clock_requests(partition) if evidence.settings.merge.has_tenants else {}
    clocks = dict[int, tuple[int, int | None]]()
    before = evidence.generation.corrected_before.get(partition.number)
    corrected_before = None if before is None else CorrectionPlace._make(before)
    model: PartitionMerge | None = None
    corrections: PartitionCorrections | None = None
    for epoch, model in merged_through(
        evidence.through,
        partition.number,
        {tp.input: _arrivals(evidence, tp, log) for tp, log in partition.logs.items()},
        recovered=partition.recovered,
        open_before=opened,
        out=[(tp.input, o) for tp in logs for o in evidence.out.get(tp, np.array([])).tolist()],
        passed_over_before=evidence.since.get(partition.number),
    ):
        for number, tenant, clock, clock_before in clock_requests.get(epoch, ()):
            of_before = None if clock_before is None else model.tenant_clock(tenant, clock_before)
            clocks[number] = model.tenant_clock(tenant, clock), of_before
        corrections = corrections or PartitionCorrections(model, None, corrected_before)
        publish = evidence.epochs[epoch].settings.publish
        corrections.within_ms = publish.within_ms
        corrections.max_versions = publish.max_versions
        corrections.settle()
    model_outcomes = []
    for outcome in outcomes(model) if model is not None else ():
        parts = list[tuple[Any, ...]]()
        for part in outcome.parts:
            if (part_before := parts_before.get(part[:2])) is not None:
                parts.append(part_before)
            elif outcome.status in (DUPLICATE, EXCESS, PASSED):
                parts.append(part)
            else:
                record = logs[TopicPartition(part[0], partition.number)].sampled[part[1]]
                is_late = outcome.status == LATE
                parts.append((*part, *((record.value, record.id) if is_late else (record.kept,))))
        if outcome.status == LATE and corrections is not None:
            outcome = outcome._replace(due=corrections.u.get(outcome.parts[0][:2]))
        model_outcomes.append(outcome._replace(parts=tuple(parts)))
    return Expected(model_outcomes, clocks, corrections)


def _arrivals(evidence: Evidence, tp: TopicPartition, log: Log) -> list[tuple[int, Record]]:
    """Return the records of a topic-partition that the model is given, each with its position (ms).

    Without tenants, these are the records with sampled keys; with them, all records.
    """
    read = log.read
    has_key = (read.kind == KEYED) & np.isin(read.offset, np.fromiter(log.sampled, np.int64))
    is_given = has_key | evidence.settings.merge.has_tenants
    numbers = (read.offset, read.position, read.event_time, read.kind, has_key)
    columns = (column[is_given].tolist() for column in numbers)
    tenants = read.tenant.filter(pa.array(is_given)).to_pylist()
    decided = iter(read.tenant_times)
    records = []
    for offset, position, time, kind, is_keyed, tenant in zip(*columns, tenants, strict=True):
        sampled = log.sampled[offset] if is_keyed else None
        key, record_id = (None, None) if sampled is None else (sampled.key, sampled.id)
        size = 0 if sampled is None else len(sampled.value)
        tenant_times = next(decided) if kind == DECISION else None
        record = Record(tp.input, offset, time, key, tenant, tenant_times, record_id, size)
        records.append((position, record))
    return records


def _clock_requests(partition: Partition) -> Mapping[int, list[tuple[int, str, int, int | None]]]:
    """Return, by epoch, the rows of silver for which the clock of their tenant is wanted, and at
    which clock, and at which one of the batch before.
    """
    requests = defaultdict(list)
    for number, row in enumerate(partition.rows):
        epoch, clock = partition.deciding_epoch(row)
        if clock is not None:
            before = partition.clock_before(row)
            requests[epoch.number].append((number, row.outcome.tenant, clock, before))
    return requests


def _open_before(
    partition: Partition,
) -> tuple[Opened, Mapping[tuple[InputId, int], tuple[Any, ...]]]:
    """Return, of sampled keys, the merge records that were open when the partition's history began,
    and their parts (as in `Outcome`) by input and offset, as silver has them.

    How many bytes they had then is not known; they count for none.
    """
    evidence = partition.evidence
    records = dict[tuple[str, str], MergeRecord]()
    every = dict[tuple[InputId, int], tuple[Any, ...]]()
    for row in partition.rows:
        of_row = [part for part in row.outcome.parts if not partition.is_judged(*part[:2])]
        ids = [entry for entry in row.ids if not partition.is_judged(*entry[:2])]
        is_too_large = not row.outcome.parts
        excess = partition.excess_of(row) if is_too_large else []
        if not evidence.is_sampled(row.key) or not (of_row or ids or excess):
            continue
        times = [*excess, *(time for _, _, time, *_ in [*of_row, *ids])]
        parts = {source: list[Part]() for source in evidence.settings.sources}
        for part in of_row:
            (source, topic), offset, time, *_ = part
            parts[source].append(Part(time, offset, topic))
            every[part[:2]] = part
        record = MergeRecord(row.key, min(times), max(times), parts, row.tenant)
        record.is_too_large = is_too_large
        for input_id, offset, _, record_id in ids:
            if isinstance(record_id, str):
                record.ids[input_id, record_id] = offset
        record.count = len(of_row) + len(ids) - len(record.ids)
        records[row.tenant, row.key] = record
    return records, every


def merged_through(
    through: Sequence[tuple[Epoch, End]],
    partition: int,
    arrived: Arrived,
    *,
    recovered: Iterable[Message] = (),
    open_before: Opened = MappingProxyType({}),
    out: Collection[tuple[InputId, int]] = (),
    passed_over_before: int | None = None,
) -> Iterator[tuple[int, PartitionMerge]]:
    """Yield the number of each epoch in which a partition had a clock, and the model at its end.

    It is the same model each time.

    - `recovered`: messages that were read back from the sink.
    - `open_before`: what was open when the partition's history begins.
    - `out`: the records that the generation passes over.
    - `passed_over_before`: the position (ms) in their tenant before which a lost lake's records are
      passed over.
    """
    messages: dict[str, list[PublishedRecord]] = defaultdict(list)
    for key, event_time, due, closed_at, tenant in recovered:
        messages[key].append(PublishedRecord(event_time, due, closed_at, tenant))
    first = through[0][0].settings.merge
    inputs = tuple(arrived)
    rules = MergeRules(inputs, first.window.gap_ms, first.window.max_ms, first.tenant_max_lag_ms)
    model = PartitionMerge(rules, recovered=messages, out=frozenset(out))
    if passed_over_before is not None:
        model.since = passed_over_before
    model.open |= open_before
    delivered = dict.fromkeys(inputs, 0)
    for epoch, end in through:
        if (clock := end.clocks.get(partition)) is None:
            continue
        merge = epoch.settings.merge
        times = merge.window.gap_ms, merge.window.max_ms, merge.tenant_max_lag_ms
        model.begin_epoch(*times, merge.bounds)
        for input_id, records in arrived.items():
            tp = TopicPartition(input_id, partition)
            until = _count_until(records, end.until.get(tp, 0), clock)
            if merge.has_tenants:
                until += end.heads.get(tp, clock) > clock  # the first one that waits
            _deliver(model, input_id, records[delivered[input_id] : until])
            delivered[input_id] = max(until, delivered[input_id])
            if not merge.has_tenants and model.heads.get(input_id, MIN_TIME) < clock:
                # In place of the records that were left out, or came before a history.
                _deliver(model, input_id, [(clock, Record(input_id, -1, clock, tenant=None))])
        model.advance()
        yield epoch.number, model


def outcomes(model: PartitionMerge) -> Iterator[Outcome]:
    """Yield what became of the records that the model was given and has read."""
    alone: list[tuple[str, Record, int, int | None]] = [
        *((LATE, late.record, late.position, None) for late in model.late),
        *((PASSED, record, position, None) for position, record in model.passed),
        *(("waiting", record, record.event_time, position) for position, record in model.waiting),
    ]
    for status, r, last, position in alone:
        part = r.input, r.offset, r.event_time
        yield Outcome(
            r.key or "",
            status,
            r.event_time,
            last,
            (part,),
            tenant=r.tenant or NO_TENANT,
            position=position,
        )
    yield from map(_duplicate, model.duplicates)
    yield from map(_excess, model.excess)
    for open_row in model.open.values():
        yield from map(_duplicate, open_row.repeated)
    for status, row in [
        *(("timed_out", row) for row in model.timed_out),
        *(("open", row) for row in model.open.values()),
    ]:
        parts = tuple(
            (InputId(source, part.topic), part.offset, part.event_time)
            for source, source_parts in row.parts.items()
            for part in sorted(source_parts)
        )
        is_open = status == "open"
        yield Outcome(
            row.key,
            status,
            row.event_time,
            row.last_event_time,
            parts,
            model.rules.due(row.event_time, row.last_event_time) if is_open else row.due,
            None if is_open else row.closed_at,
            row.tenant,
        )


def _duplicate(duplicate: DuplicateRecord) -> Outcome:
    """Return the outcome of a repeated record."""
    record, of_offset = duplicate
    time = record.event_time
    part = record.input, record.offset, time, repeated(record.id or "", of_offset)
    tenant = record.tenant or NO_TENANT
    return Outcome(record.key or "", DUPLICATE, time, time, (part,), tenant=tenant)


def _excess(record: Record) -> Outcome:
    """Return the outcome of a record of a merge record that is too large."""
    time = record.event_time
    part = record.input, record.offset, time
    tenant = record.tenant or NO_TENANT
    return Outcome(record.key or "", EXCESS, time, time, (part,), tenant=tenant)


def _count_until(records: Sequence[tuple[int, Record]], until: int, clock: int) -> int:
    """Return how many records lie before an offset and have positions (ms) up to the clock."""
    consumed = bisect_left(records, until, key=lambda entry: entry[1].offset)
    return min(consumed, bisect_right(records, clock, key=itemgetter(0)))


def _deliver(
    model: PartitionMerge, input_id: InputId, records: Sequence[tuple[int, Record]]
) -> None:
    """Give the model records of an input, with the positions that they have among all records."""
    if records:
        state = model.states.setdefault(input_id, SourceState())
        state.head = records[-1][0]
        state.unread.extend(records)
