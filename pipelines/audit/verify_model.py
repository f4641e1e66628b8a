"""Check 5 of `verify`: silver and late are what the merge model makes of bronze's records, for a sample of keys or for all."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from pipelines.audit.problems import Findings, different
from pipelines.audit.verify_eras import Era
from pipelines.audit.verify_evidence import DECISION, Log, Outcome, Partition, Read, place
from pipelines.core.inputs import input_of, source_of, topic_of
from pipelines.core.model import ALL, MergeRecord, MergeRules, Part, PartitionMerge, PublishedRecord, Record
from pipelines.core.plan import Stretch, TopicPartition
from pipelines.core.recovery import Told
from pipelines.core.window import Window

PUBLISHED = "published before"
"""The outcome of a record that a message read back from the sink holds already."""

Arrived = Sequence[Mapping[str, list[tuple[int, Record]]]]
"""By era and input, positions (ms) and records."""

Message = tuple[int, str, int, "int | None", "int | None", "str | None"]
"""The era that a message read back begins with, its key, event time, due and closed_at (ms), and tenant."""


def check_model(partition: Partition, model: Iterable[Outcome], erasing: Set[tuple[str, str]], findings: Findings) -> None:
    """Every merge record, waiting record and late one with a sampled key is the model's, and none of the model's is missing; but
    for keys, by tenant, that `forget` has begun to erase.
    """
    is_sampled, here = partition.evidence.is_sampled, [*(row.outcome for row in partition.rows), *partition.late]
    found = (outcome for outcome in here if is_sampled(outcome.key) and (outcome.tenant, outcome.key) not in erasing)
    right = (outcome for outcome in model if is_sampled(outcome.key) and outcome.status != PUBLISHED)
    for (key, tenant), *sides in different(found, right, lambda outcome: (outcome.key, outcome.tenant)):
        tables_have, model_has = ("; ".join(map(str, sorted(side)[:3])) or "nothing" for side in sides)
        time = min(outcome.event_time for side in sides for outcome in side)
        findings.add(
            f"the tables have {tables_have}, and the merge model {model_has}", place(partition.number, key, time, tenant)
        )


class Expected(NamedTuple):
    """What the merge model says: what became of records, and of each row of silver (by the index of the row) the clock of its
    tenant by which it was open, waiting or closed, where there are tenants.
    """

    outcomes: list[Outcome]
    clocks: Mapping[int, int]


def expected(partition: Partition) -> Expected:
    """What the merge model makes of the records with sampled keys.

    What it decides for a key depends on nothing but the positions of the key's records and the clock, so these are given to it.
    Where there are tenants, on their clocks too: then it is given all records, those with other keys as heartbeats.
    """
    settings, eras = partition.evidence.settings, partition.evidence.eras
    logs = {tp.source: log for tp, log in partition.logs.items()}
    arrived: Arrived = [{source: [] for source in logs} for _ in eras]
    for tp, log in partition.logs.items():
        for waiting, era, read in zip(arrived, eras, log.reads, strict=True):
            given = _of_all(tp.source, read, log) if settings.merge.has_tenants else _of_sample(tp, read, log, era)
            waiting[tp.source].extend(given)
    found, before, clocks = [], _open_before(partition), dict[int, int]()
    told = {part[:2]: part for parts in before.values() for part in parts}
    lived = partition.evidence.lived.get(partition.number)
    asked = _asked(partition) if settings.merge.has_tenants else {}

    def hear(era: int, epoch: int, model: PartitionMerge) -> None:
        """Tenants' clocks at the end of an epoch, and before."""
        for number, tenant, clock in asked.get((era, epoch), ()):
            clocks[number] = model.tenant_clock(tenant, clock)

    life = outcomes(
        tuple(settings.inputs),
        eras,
        partition.number,
        arrived,
        partition.recovered,
        before,
        lived,
        partition.evidence.since.get(partition.number),
        hear,
    )
    for row in life:
        value = 2 if row.status == "late" else 3
        parts = (told.get(part[:2]) or (*part, logs[part[0]].sampled[part[1]][value]) for part in row.parts)
        found.append(row._replace(parts=tuple(parts)))
    return Expected(found, clocks)


def _of_sample(tp: TopicPartition, read: Read, log: Log, era: Era) -> Iterator[tuple[int, Record]]:
    offsets, positions, *_ = read.keyed(era.until.get(tp, 0))
    for offset, position in zip(offsets.tolist(), positions.tolist(), strict=True):
        if offset in log.sampled:
            key, time, *_ = log.sampled[offset]
            yield position, Record(tp.source, offset, time, key)


def _of_all(source: str, read: Read, log: Log) -> Iterator[tuple[int, Record]]:
    columns = read.offset.tolist(), read.position.tolist(), read.kind.tolist()
    for offset, position, kind, (time, tenant, told) in zip(*columns, read.whose, strict=True):
        key = log.sampled[offset][0] if kind != DECISION and offset in log.sampled else None
        yield position, Record(source, offset, time, key, tenant, told)


def _asked(partition: Partition) -> Mapping[tuple[int, int], list[tuple[int, str, int]]]:
    """By era and epoch, for which rows of silver the clock of their tenant is wanted, and at which clock."""
    asked = defaultdict(list)
    for number, row in enumerate(partition.rows):
        era, epoch, clock = partition.judged_in(row)
        if clock is not None:
            asked[era, epoch.number].append((number, row.outcome.tenant, clock))
    return asked


def _open_before(partition: Partition) -> dict[str, list[tuple[Any, ...]]]:
    """By sampled key, the parts of its merge record that was open when the partition's history began, as silver has them."""
    found = {}
    for key, parts in ((r.outcome.key, r.outcome.parts) for r in partition.rows if partition.evidence.is_sampled(r.outcome.key)):
        if before := [part for part in parts if not partition.is_judged(*part[:2])]:
            found[key] = before
    return found


def _nothing(*_: Any) -> None:
    pass


def outcomes(
    inputs: tuple[str, ...],
    eras: Sequence[Era],
    partition: int,
    arrived: Arrived,
    recovered: Iterable[Message],
    before: Mapping[str, Sequence[tuple[Any, ...]]] = MappingProxyType({}),
    lived: Told | None = None,
    passed_over_before: int | None = None,
    hear: Callable[[int, int, PartitionMerge], None] = _nothing,
) -> list[Outcome]:
    """The model's answer. A reset closes what is open; what comes again after a jump back leaves its merge record, of which the
    rest is closed. `before`: by key the parts of what was open when the last era's history begins. `lived`: what the first era
    merges again of a lost lake's; `passed_over_before`: up to which position (ms) of their tenant its records are not. `hear`
    hears of the model at the end of each era's epochs.
    """
    found: list[Outcome] = []
    for i, era in enumerate(eras):
        messages: dict[str, list[PublishedRecord]] = defaultdict(list)
        for since, key, event_time, due, closed_at, tenant in recovered:
            if since <= i:
                messages[key].append(PublishedRecord(event_time, due, closed_at, tenant or ALL))
        first = era.epochs[0][0].settings.merge
        sources = tuple(dict.fromkeys(map(source_of, inputs)))
        topics = inputs if inputs != sources else ()
        rules = MergeRules(sources, first.window.gap_ms, first.window.max_ms, first.tenant_max_lag_ms, topics)
        model, left = PartitionMerge(rules, recovered=messages), dict(arrived[i])
        if i == 0 and passed_over_before is not None:
            model.since = passed_over_before
        for key, mine in before.items() if era.ended_at is None else ():
            times, opened = [time for _, _, time, *_ in mine], {source: list[Part]() for source in sources}
            for source, offset, time, *_ in mine:
                opened[source_of(source)].append(Part(time, offset, topic_of(source)))
            model.open[ALL, key] = MergeRecord(key, min(times), max(times), opened)
        told = lived if i == 0 else None
        model.horizon, model.is_plain = (None, not first.has_due) if told is None else (told.horizon, told.is_plain)
        for step, model.ahead in _steps(era, partition, inputs, () if told is None else told.stretches):
            model.begin_epoch(step.window.gap_ms, step.window.max_ms, step.lag_ms)
            if step.lag_ms is None:
                reached = {s: [one for one in waits if one[1].offset < step.untils[s]] for s, waits in left.items()}
                left = {s: [one for one in waits if one[1].offset >= step.untils[s]] for s, waits in left.items()}
                model.advance_to(dict.fromkeys(inputs, step.clock), reached)
            else:
                left = {s: _arrive(model, waits, step, s) for s, waits in left.items()}
                model.advance()
            hear(i, step.epoch, model)
        found += _outcomes(model, is_open=era.ended_at is None)
        if era.ended_at is not None:
            begin = {tp.source: offset for tp, offset in eras[i + 1].begin.items() if tp.partition == partition}
            again = {s: since for s, since in begin.items() if since < era.until[TopicPartition(s, partition)]}
            found = [rest for row in found if (rest := _without(row, again)) is not None]
    return found


def _outcomes(model: PartitionMerge, *, is_open: bool) -> Iterator[Outcome]:
    """All that the model has; `is_open`: no reset has closed what it left open."""
    alone: list[tuple[str, Record, int, int | None]] = [("late", late.record, late.position, None) for late in model.late]
    alone += [(PUBLISHED, record, record.event_time, None) for record in model.already_published]
    # A reset closes what waits, too, each record as a merge record of its own.
    alone += [("waiting" if is_open else "reset", r, r.event_time, v if is_open else None) for v, r in model.waiting]
    for status, r, last, position in alone:
        part = r.source, r.offset, r.event_time
        yield Outcome(r.key or "", status, r.event_time, last, (part,), tenant=r.tenant or ALL, position=position)
    merged = [("timed_out", row) for row in model.timed_out]
    merged += [("open" if is_open else "reset", row) for row in model.open.values()]
    for status, row in merged:
        parts = tuple(
            (input_of(s, part.topic), part.offset, part.event_time) for s, mine in row.parts.items() for part in sorted(mine)
        )
        due = model.rules.due(row.event_time, row.last_event_time) if status == "open" and not model.is_plain else row.due
        yield Outcome(row.key, status, row.event_time, row.last_event_time, parts, due, row.closed_at, row.tenant)


class Step(NamedTuple):
    """What a partition merged under one set of rules in an era: the epoch, its window and lag (ms), and the clock (ms) and the
    exclusive end offsets at its end, and the heads (ms) that its last batch considered.
    """

    epoch: int
    window: Window
    lag_ms: int | None
    clock: int
    untils: Mapping[str, int]
    heads: Mapping[str, int]


def _arrive(model: PartitionMerge, waits: list[tuple[int, Record]], step: Step, source: str) -> list[tuple[int, Record]]:
    """Gives the model what a source has up to the end of a step: what was passed, and where more was known then, the record that
    waited. Returns what comes later, with that record, which is there already if the model's head is its position.
    """
    passed = bisect_left(waits, step.untils[source], key=lambda each: each[1].offset)
    passed = min(passed, bisect_right(waits, step.clock, key=itemgetter(0)))
    known = passed + (step.heads.get(source, step.clock) > step.clock)
    is_there = len(model.unread().get(source, ()))
    model.arrive(*(record for _, record in waits[is_there:known]))
    return waits[passed:]


def _steps(
    era: Era, partition: int, sources: Sequence[str], again: Sequence[Stretch]
) -> Iterator[tuple[Step, Sequence[tuple[int, int]]]]:
    """What a partition went through in an era; and of a lost lake's stretches that were merged again, those from there on
    (`PartitionMerge.ahead`).
    """
    last, here = era.clocks.get(partition), {s: era.until.get(TopicPartition(s, partition), 0) for s in sources}
    for n, stretch in enumerate(again):
        ahead = [(each.window.gap_ms, each.clock) for each in again[n:]]
        first = era.epochs[0][0].number
        if last is not None and not stretch.is_past(last, here):
            yield Step(first, stretch.window, None, last, here, {}), ahead
        if not stretch.is_past(last, here):
            return
        yield Step(first, stretch.window, None, stretch.clock, stretch.offsets or {}, {}), ahead
    for epoch, end in era.epochs:
        told = era if end is None else end
        clock, merge = told.clocks.get(partition), epoch.settings.merge
        if clock is not None and (end is None or not again or clock >= again[-1].clock):
            untils = {s: told.until.get(TopicPartition(s, partition), 0) for s in sources}
            heads = {s: told.heads[tp] for s in sources if (tp := TopicPartition(s, partition)) in told.heads}
            yield Step(epoch.number, merge.window, merge.tenant_max_lag_ms, clock, untils, heads), ()


def _without(row: Outcome, again: Mapping[str, int]) -> Outcome | None:
    """What a jump back leaves of an outcome; `again`: by source the offset from which its records come again."""
    left = tuple(part for part in row.parts if part[0] not in again or part[1] < again[part[0]])
    if left == row.parts:
        return row
    times = [time for _, _, time in left]
    return Outcome(row.key, "reset", min(times), max(times), left, tenant=row.tenant) if left else None
