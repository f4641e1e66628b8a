"""Check 5 of `verify`: silver and late are what the merge model makes of bronze's records, for a sample of keys or for all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pipelines.audit.problems import Findings, different
from pipelines.audit.verify_eras import NEVER, Era
from pipelines.audit.verify_evidence import Outcome, Partition, place
from pipelines.core.model import ALL, MergeRecord, MergeRules, Part, PartitionMerge, PublishedRecord, Record
from pipelines.core.plan import Stretch, TopicPartition
from pipelines.core.recovery import Told
from pipelines.core.window import Window

PUBLISHED = "published before"
"""The outcome of a record that a message read back from the sink holds already."""

Arrived = Sequence[Mapping[str, list[tuple[int, Record]]]]
"""By era and source, positions (ms) and records."""


def check_model(partition: Partition, model: Iterable[Outcome], findings: Findings) -> None:
    """Every merge record and every late one with a sampled key is the model's, and none of the model's is missing."""
    is_sampled, here = partition.evidence.is_sampled, [*(row.outcome for row in partition.rows), *partition.late]
    found = (outcome for outcome in here if is_sampled(outcome.key))
    right = (outcome for outcome in model if is_sampled(outcome.key) and outcome.status != PUBLISHED)
    for key, *sides in different(found, right, lambda outcome: outcome.key):
        tables_have, model_has = ("; ".join(map(str, sorted(side)[:3])) or "nothing" for side in sides)
        time = min(outcome.event_time for side in sides for outcome in side)
        findings.add(f"the tables have {tables_have}, and the merge model {model_has}", place(partition.number, key, time))


def expected(partition: Partition) -> list[Outcome]:
    """What the merge model makes of the records with sampled keys.

    What it decides for a key depends on nothing but the positions of the key's records and the clock, so these are given to it.
    """
    settings, eras = partition.evidence.settings, partition.evidence.eras
    logs = {tp.source: log for tp, log in partition.logs.items()}
    arrived: Arrived = [{source: [] for source in logs} for _ in eras]
    for tp, log in partition.logs.items():
        for waiting, era, read in zip(arrived, eras, log.reads, strict=True):
            offsets, positions, *_ = read.keyed(era.until.get(tp, 0))
            for offset, position in zip(offsets.tolist(), positions.tolist(), strict=True):
                if offset in log.sampled:
                    key, time, *_ = log.sampled[offset]
                    waiting[tp.source].append((position, Record(tp.source, offset, time, key)))
    found, before = [], _open_before(partition)
    told = {part[:2]: part for parts in before.values() for part in parts}
    lived = partition.evidence.lived.get(partition.number)
    for row in outcomes(tuple(settings.sources), eras, partition.number, arrived, partition.recovered, before, lived):
        value = 2 if row.status == "late" else 3
        parts = (told.get(part[:2]) or (*part, logs[part[0]].sampled[part[1]][value]) for part in row.parts)
        found.append(row._replace(parts=tuple(parts)))
    return found


def _open_before(partition: Partition) -> dict[str, list[tuple[Any, ...]]]:
    """By sampled key, the parts of its merge record that was open when the partition's history began, as silver has them."""
    found = {}
    for key, parts in ((r.outcome.key, r.outcome.parts) for r in partition.rows if partition.evidence.is_sampled(r.outcome.key)):
        if before := [part for part in parts if not partition.is_judged(*part[:2])]:
            found[key] = before
    return found


def outcomes(
    sources: tuple[str, ...],
    eras: Sequence[Era],
    partition: int,
    arrived: Arrived,
    recovered: Iterable[tuple[int, str, int, int | None, int | None]],
    before: Mapping[str, Sequence[tuple[Any, ...]]] = MappingProxyType({}),
    lived: Told | None = None,
) -> list[Outcome]:
    """The model's answer. `recovered`: the era that a message begins with, its key, event time, due and closed_at. A reset closes
    what is open; what comes again after a jump back leaves its merge record, of which the rest is closed. `before`: by key the
    parts of what was open when the last era's history begins. `lived`: what the first era merges again of a lost lake's.
    """
    found: list[Outcome] = []
    for i, era in enumerate(eras):
        messages: dict[str, list[PublishedRecord]] = defaultdict(list)
        for since, key, event_time, due, closed_at in recovered:
            if since <= i:
                messages[key].append(PublishedRecord(event_time, due, closed_at))
        first = era.epochs[0][0].settings.merge
        model, left = PartitionMerge(MergeRules(sources, *first.window), recovered=messages), dict(arrived[i])
        for key, mine in before.items() if era.ended_at is None else ():
            times, opened = [time for _, _, time, *_ in mine], {source: list[Part]() for source in sources}
            for source, offset, time, *_ in mine:
                opened[source].append(Part(time, offset))
            model.open[ALL, key] = MergeRecord(key, min(times), max(times), opened)
        told = lived if i == 0 else None
        model.horizon, model.is_plain = (None, not first.has_due) if told is None else (told.horizon, told.is_plain)
        for window, clock, untils, model.ahead in _steps(era, partition, sources, () if told is None else told.stretches):
            model.begin_epoch(*window)
            reached = {s: [one for one in waits if one[1].offset < untils[s]] for s, waits in left.items()}
            left = {s: [one for one in waits if one[1].offset >= untils[s]] for s, waits in left.items()}
            model.advance_to(dict.fromkeys(sources, clock), reached)
        alone = [("late", late.record, late.position) for late in model.late]
        alone += [(PUBLISHED, record, record.event_time) for record in model.already_published]
        for status, r, last in alone:
            found.append(Outcome(r.key or "", status, r.event_time, last, ((r.source, r.offset, r.event_time),)))
        merged = [("timed_out", row) for row in model.timed_out]
        merged += [("open" if era.ended_at is None else "reset", row) for row in model.open.values()]
        for status, row in merged:
            parts = tuple((s, part.offset, part.event_time) for s, mine in row.parts.items() for part in sorted(mine))
            due = model.rules.due(row.event_time, row.last_event_time) if status == "open" and not model.is_plain else row.due
            found.append(Outcome(row.key, status, row.event_time, row.last_event_time, parts, due, row.closed_at))
        if era.ended_at is not None:
            begin = {tp.source: offset for tp, offset in eras[i + 1].begin.items() if tp.partition == partition}
            again = {s: since for s, since in begin.items() if since < era.until[TopicPartition(s, partition)]}
            found = [rest for row in found if (rest := _without(row, again)) is not None]
    return found


def _steps(
    era: Era, partition: int, sources: Sequence[str], again: Sequence[Stretch]
) -> Iterator[tuple[Window, int, Mapping[str, int], Sequence[tuple[int, int]]]]:
    """Through which windows a partition went in an era, each with the clock (ms) and the exclusive end offsets at its end,
    and, of a lost lake's stretches that were merged again, those from there on (`PartitionMerge.ahead`).
    """
    last, here = era.clocks.get(partition), {s: era.until.get(TopicPartition(s, partition), 0) for s in sources}
    everything = dict.fromkeys(sources, NEVER)
    for n, stretch in enumerate(again):
        ahead = [(each.window.gap_ms, each.clock) for each in again[n:]]
        if last is not None and not stretch.is_past(last, here):
            yield stretch.window, last, everything, ahead
        if not stretch.is_past(last, here):
            return
        yield stretch.window, stretch.clock, stretch.offsets or {}, ahead
    for epoch, end in era.epochs:
        clock = (era if end is None else end).clocks.get(partition)
        if clock is not None and (end is None or not again or clock >= again[-1].clock):
            untils = everything if end is None else {s: end.until.get(TopicPartition(s, partition), 0) for s in sources}
            yield epoch.settings.merge.window, clock, untils, ()


def _without(row: Outcome, again: Mapping[str, int]) -> Outcome | None:
    """What a jump back leaves of an outcome; `again`: by source the offset from which its records come again."""
    left = tuple(part for part in row.parts if part[0] not in again or part[1] < again[part[0]])
    if left == row.parts:
        return row
    times = [time for _, _, time in left]
    return Outcome(row.key, "reset", min(times), max(times), left) if left else None
