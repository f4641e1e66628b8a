"""Check 5 of `verify`: silver and late are what the merge model makes of bronze's records, for a
sample of keys or for all."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from pipelines.audit.evidence import End
from pipelines.audit.problems import Findings, different
from pipelines.audit.verify_evidence import DECISION, Log, Outcome, Partition, ReadLog, place
from pipelines.core.inputs import InputId
from pipelines.core.model import (
    NO_TENANT,
    MergeRecord,
    MergeRules,
    Part,
    PartitionMerge,
    PublishedRecord,
    Record,
)
from pipelines.core.plan import TopicPartition
from pipelines.core.window import Window
from pipelines.lake.epochs import Epoch

PUBLISHED = "published before"
"""The outcome of a record that a message read back from the sink holds already."""

Arrived = Mapping[InputId, list[tuple[int, Record]]]
"""Positions (ms) and records, by input."""

Message = tuple[str, int, "int | None", "int | None", str]
"""A message read back: its key, event time, due and closed_at (ms; None where it does not say
them), and tenant.
"""

OpenParts = Mapping[tuple[str, str], Sequence[tuple[Any, ...]]]
"""Parts of open merge records (as in `Outcome`), by tenant and key."""


def check_model(
    partition: Partition,
    model: Iterable[Outcome],
    erasing: Set[tuple[str, str]],
    findings: Findings,
) -> None:
    """Check that the tables have the model's outcomes for sampled keys, and no others.

    Outcomes are merge records, waiting records and late ones. Keys, by tenant, that `forget` has
    begun to erase (`erasing`) do not count.
    """
    is_sampled = partition.evidence.is_sampled
    has_closing = partition.evidence.epochs.closing_from is not None
    here = [*(row.outcome for row in partition.rows), *partition.late]
    sampled = (
        outcome
        for outcome in here
        if is_sampled(outcome.key) and (outcome.tenant, outcome.key) not in erasing
    )
    actual = (_as_ended(partition, outcome) for outcome in sampled)
    right = (
        _as_ended(partition, outcome)
        for outcome in model
        if is_sampled(outcome.key) and outcome.status != PUBLISHED
    )
    for (key, tenant), *sides in different(
        actual, right, lambda outcome: (outcome.key, outcome.tenant)
    ):
        names = partition.evidence.settings.input_names
        tables_have, model_has = (
            _described(side, names, with_closing=has_closing) for side in sides
        )
        if tables_have == model_has:
            tables_have, model_has = (_described(side, names, with_closing=True) for side in sides)
        time = min(outcome.event_time for side in sides for outcome in side)
        findings.add(
            f"the tables have {tables_have}, and the merge model {model_has}",
            place(partition.number, key, time, tenant),
        )


def _described(side: Sequence[Outcome], names: Mapping[InputId, str], *, with_closing: bool) -> str:
    """Return the first outcomes of a side for a sentence; `names`: those of the inputs.

    Where no message says when its merge record was closed, `with_closing` is False unless nothing
    else differs.
    """
    texts = (outcome.described(names, with_closing=with_closing) for outcome in sorted(side)[:3])
    return "; ".join(texts) or "nothing"


def _as_ended(partition: Partition, outcome: Outcome) -> Outcome:
    """Return an outcome as the jump that ended its generation left it.

    What was open, what waited, and what was finished and not out is closed.
    """
    if partition.evidence.following is None:
        return outcome
    if outcome.status in ("open", "waiting"):
        last = outcome.event_time if outcome.status == "waiting" else outcome.last
        return outcome._replace(last=last).closed_by_reset()
    is_closed = outcome.status == "timed_out" and partition.evidence.is_unpublished(
        partition.number, outcome.place
    )
    return outcome._replace(status="reset") if is_closed else outcome


class Expected(NamedTuple):
    """Expectations of the merge model.

    `outcomes`: what became of records. `clocks`: by the index of a row of silver, the clock (ms) of
    its tenant by which it was open, waiting or closed; absent where that is the partition's.
    """

    outcomes: list[Outcome]
    clocks: Mapping[int, int]


def expected(partition: Partition) -> Expected:
    """Return what the merge model makes of the records with sampled keys.

    What it decides for a key depends on nothing but the positions of the key's records and the
    clock, so only these are given to it. With tenants it depends on their clocks, too: then the
    model is given all records, those with other keys as heartbeats.
    """
    settings = partition.evidence.settings
    end = partition.evidence.end
    has_tenants = settings.merge.has_tenants
    logs = {tp.input: log for tp, log in partition.logs.items()}
    arrived = {
        tp.input: list(
            _all_records(tp.input, log.read, log)
            if has_tenants
            else _sampled_records(tp, log, end.until.get(tp, 0))
        )
        for tp, log in partition.logs.items()
    }
    model_outcomes = []
    before = _open_before(partition)
    clocks = dict[int, int]()
    parts_before = {part[:2]: part for parts in before.values() for part in parts}
    clock_requests = _clock_requests(partition) if has_tenants else {}

    def on_epoch_end(epoch: int, model: PartitionMerge) -> None:
        """Take note of tenants' clocks at the end of an epoch, and before."""
        for number, tenant, clock in clock_requests.get(epoch, ()):
            clocks[number] = model.tenant_clock(tenant, clock)

    inherited = Inherited(
        partition.recovered, before, partition.evidence.since.get(partition.number)
    )
    inputs = settings.inputs
    through = partition.evidence.through
    for row in outcomes(inputs, through, partition.number, arrived, inherited, on_epoch_end):
        value = 2 if row.status == "late" else 3
        parts = (
            parts_before.get(part[:2]) or (*part, logs[part[0]].sampled[part[1]][value])
            for part in row.parts
        )
        model_outcomes.append(row._replace(parts=tuple(parts)))
    return Expected(model_outcomes, clocks)


def _sampled_records(tp: TopicPartition, log: Log, until: int) -> Iterator[tuple[int, Record]]:
    offsets, positions = log.read.keyed(until)
    for offset, position in zip(offsets.tolist(), positions.tolist(), strict=True):
        if offset in log.sampled:
            key, time, *_, tenant = log.sampled[offset]
            yield position, Record(tp.input, offset, time, key, tenant)


def _all_records(input_id: InputId, read: ReadLog, log: Log) -> Iterator[tuple[int, Record]]:
    numbers = (read.offset, read.position, read.kind, read.event_time)
    columns = (*(column.tolist() for column in numbers), read.tenant.to_pylist())
    for i, (offset, position, kind, time, tenant) in enumerate(zip(*columns, strict=True)):
        key = log.sampled[offset][0] if kind != DECISION and offset in log.sampled else None
        yield position, Record(input_id, offset, time, key, tenant, read.tenant_times.get(i))


def _clock_requests(partition: Partition) -> Mapping[int, list[tuple[int, str, int]]]:
    """Return, by epoch, the rows of silver for which the clock of their tenant is wanted, and at
    which clock.
    """
    requests = defaultdict(list)
    for number, row in enumerate(partition.rows):
        epoch, clock = partition.deciding_epoch(row)
        if clock is not None:
            requests[epoch.number].append((number, row.outcome.tenant, clock))
    return requests


def _open_before(partition: Partition) -> OpenParts:
    """Return, by tenant and sampled key, what was open when the partition's history began.

    These are the parts of the key's merge record that was open then, as silver has them.
    """
    open_parts = {}
    for outcome in (row.outcome for row in partition.rows):
        if partition.evidence.is_sampled(outcome.key):
            before = [part for part in outcome.parts if not partition.is_judged(*part[:2])]
            if before:
                open_parts[outcome.tenant, outcome.key] = before
    return open_parts


def _nothing(*_: Any) -> None:
    pass


class Inherited(NamedTuple):
    """State that a generation has of the time before its first record.

    - `recovered`: messages that were read back from the sink.
    - `before`: the parts of what was open when the partition's history begins.
    - `passed_over_before`: the position (ms) in their tenant before which a lost lake's records are
      passed over.
    """

    recovered: Iterable[Message] = ()
    before: OpenParts = MappingProxyType({})
    passed_over_before: int | None = None


NOTHING_INHERITED = Inherited()


def outcomes(
    inputs: tuple[InputId, ...],
    through: Sequence[tuple[Epoch, End]],
    partition: int,
    arrived: Arrived,
    inherited: Inherited = NOTHING_INHERITED,
    on_epoch_end: Callable[[int, PartitionMerge], None] = _nothing,
) -> Iterator[Outcome]:
    """Yield the model's outcomes for a generation that went `through` these epochs.

    `on_epoch_end`: is called with the model at the end of each epoch.
    """
    messages: dict[str, list[PublishedRecord]] = defaultdict(list)
    for key, event_time, due, closed_at, tenant in inherited.recovered:
        messages[key].append(PublishedRecord(event_time, due, closed_at, tenant))
    first = through[0][0].settings.merge
    rules = MergeRules(inputs, first.window.gap_ms, first.window.max_ms, first.tenant_max_lag_ms)
    model = PartitionMerge(rules, recovered=messages)
    remaining = dict(arrived)
    if inherited.passed_over_before is not None:
        model.since = inherited.passed_over_before
    for (tenant, key), open_parts in inherited.before.items():
        times = [time for _, _, time, *_ in open_parts]
        opened = {source: list[Part]() for source in rules.sources}
        for (source, topic), offset, time, *_ in open_parts:
            opened[source].append(Part(time, offset, topic))
        model.open[tenant, key] = MergeRecord(key, min(times), max(times), opened, tenant)
    for step in _steps(through, partition, inputs):
        model.is_plain &= not step.says_closing
        model.begin_epoch(step.window.gap_ms, step.window.max_ms, step.lag_ms)
        if step.lag_ms is None:
            reached: dict[InputId, list[tuple[int, Record]]] = {}
            for input_id, records in remaining.items():
                until = step.untils[input_id]
                reached[input_id] = [r for r in records if r[1].offset < until]
                remaining[input_id] = [r for r in records if r[1].offset >= until]
            model.advance_to(dict.fromkeys(inputs, step.clock), reached)
        else:
            remaining = {i: _arrive(model, records, step, i) for i, records in remaining.items()}
            model.advance()
        on_epoch_end(step.epoch, model)
    alone: list[tuple[str, Record, int, int | None]] = [
        ("late", late.record, late.position, None) for late in model.late
    ]
    alone += [(PUBLISHED, record, record.event_time, None) for record in model.already_published]
    alone += [
        ("waiting", record, record.event_time, position) for position, record in model.waiting
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
            says_closing=row.says_closing,
        )


class Step(NamedTuple):
    """One set of rules under which a partition was merged, and how far.

    `epoch`, `window` and `lag_ms` are the rules. `clock` (ms) and `untils`, the exclusive end
    offsets, are those at the end. `heads` (ms) are those that the last batch considered.
    `says_closing` does not follow from `window`: an epoch before may have had a window by gap and
    no batch.
    """

    epoch: int
    window: Window
    lag_ms: int | None
    clock: int
    untils: Mapping[InputId, int]
    heads: Mapping[InputId, int]
    says_closing: bool


def _arrive(
    model: PartitionMerge, records: list[tuple[int, Record]], step: Step, input_id: InputId
) -> list[tuple[int, Record]]:
    """Give the model an input's records up to the end of a step, and return those that come later.

    The model gets what was passed. Where more was known then, it also gets the record that waited.
    That one is returned, too; it is there already if the model's head is its position.
    """
    consumed = bisect_left(records, step.untils[input_id], key=lambda entry: entry[1].offset)
    consumed = min(consumed, bisect_right(records, step.clock, key=itemgetter(0)))
    delivered = consumed + (step.heads.get(input_id, step.clock) > step.clock)
    already_there = len(model.unread().get(input_id, ()))
    model.arrive(*(record for _, record in records[already_there:delivered]))
    return records[consumed:]


def _steps(
    through: Sequence[tuple[Epoch, End]], partition: int, inputs: Sequence[InputId]
) -> Iterator[Step]:
    """Yield the steps that a partition went through, as far as it had a clock."""
    tps = {s: TopicPartition(s, partition) for s in inputs}
    for epoch, end in through:
        clock = end.clocks.get(partition)
        merge = epoch.settings.merge
        if clock is not None:
            untils = {s: end.until.get(tp, 0) for s, tp in tps.items()}
            heads = {s: end.heads[tp] for s, tp in tps.items() if tp in end.heads}
            yield Step(
                epoch.number,
                merge.window,
                merge.tenant_max_lag_ms,
                clock,
                untils,
                heads,
                merge.says_closing,
            )
