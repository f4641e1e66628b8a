"""Checks 1 to 5 of `verify`: the tables are what Kafka has, and what the merge model makes of
bronze.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from watersmeet.audit.evidence import MAX_TIME, NULL, Evidence, Ints, numbers
from watersmeet.audit.partitioning import KeyPartitions, Place, check_key_partition
from watersmeet.audit.problems import Findings, different
from watersmeet.audit.verify_evidence import (
    DECISION,
    DUPLICATE,
    EXCESS,
    LATE,
    Log,
    Outcome,
    Partition,
    as_ended,
    place,
    rows_of_input,
)
from watersmeet.audit.verify_validity import Validator
from watersmeet.core.columns import NULL_TIME, times_ms
from watersmeet.core.inputs import InputId
from watersmeet.core.model import NO_TENANT
from watersmeet.core.plan import TopicPartition
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables

Bounds: TypeAlias = Mapping[InputId, Mapping[int, tuple[int, int]]]
"""The first offset that Kafka has, and the exclusive end offset, by input and partition."""

NEAR = 10_000
"""Distance up to which offsets are read through rather than sought one by one.

Each transaction leaves a gap.
"""


# -- check 1: places, keys, offsets


def check_places(evidence: Evidence, findings: Findings) -> None:
    """Check that no row is of a partition that the topics lack, or of a source or topic that the
    configuration lacks.
    """
    settings = evidence.settings
    for name, table in tables.layout(settings).items():
        by = [column for column in ("source", "topic", "partition") if column in table.schema.names]
        if "partition" not in by or not evidence.reader.exists(name):
            continue
        own_inputs = [i for i in settings.inputs if name == tables.bronze(i.source)]
        coordinates = [i._asdict() for i in own_inputs or settings.inputs]
        places = [list(map(place.__getitem__, by[:-1])) for place in coordinates]
        if name in (tables.SILVER, tables.GENERATIONS):  # there are merge records, and messages
            places.append([None] * len(by[:-1]))
        counts = evidence.reader.summary(name, by, {"rows": ("count", "*")})
        for row in counts.to_pylist():
            *of, partition, count = row.values()
            if partition not in range(evidence.partitions) or of not in places:
                where = ", ".join(f"{column} {row[column]}" for column in by)
                findings.add(
                    f"{count:,} rows that belong to no partition of the topics",
                    f"{name}: {where}",
                    "delete them, if this is the lake of these topics",
                )


def check_key_partitions(
    partition: Partition, key_partitions: KeyPartitions, findings: Findings
) -> None:
    """Check that every sampled key is where Java's default partitioner has it, if sources are
    repartitioned.

    `key_partitions` takes note of all of these keys.
    """
    evidence = partition.evidence
    for tp, log in partition.logs.items():
        keys = {offset: (record.key, record.tenant) for offset, record in log.sampled.items()}
        key_partitions.add(tp, keys)
        if evidence.settings.repartitioned:
            for offset, (key, _) in keys.items():
                name = evidence.settings.input_names[tp.input]
                place = Place(key, name, tp.input.topic, tp.partition, offset)
                check_key_partition(place, evidence.partitions, findings)


def check_offsets(partition: Partition, bounds: Bounds, findings: Findings) -> None:
    """Check that each (source, partition, offset) is in bronze once, and that Kafka lacks what
    bronze lacks.

    Compaction, retention, aborted records and the markers of transactions leave gaps in Kafka.
    """
    evidence = partition.evidence
    for tp, log in partition.logs.items():
        where = f"{tables.bronze(tp.input.source)}: "
        first, end = bounds[tp.input].get(tp.partition, (0, 0))
        for offset, rows in log.repeated.items():
            fix = "delete all but one of the rows with this offset"
            findings.add(
                f"the record is in bronze {rows} times", where + evidence.at(tp, offset), fix
            )
        last = evidence.end.until.get(tp, 0)
        if evidence.following is None:
            last = max([last, *(log.offset[-1:] + 1).tolist()])
        since = evidence.history_of(tp.partition).offsets.get(tp.input, 0)
        begin = max(first, since, evidence.generation.begin.get(tp, 0))
        kafka = evidence.settings.kafka
        # `keep` may have deleted what Kafka had before: nothing tells that it was refused.
        floor = evidence.retention_bounds.times.get((tables.QUARANTINE, tp.partition), NULL_TIME)
        for gap in gaps(log.offset, [(0, begin)], min(last, end)):
            for batch in read_range(kafka, Range(tp.input.topic, tp.partition, *gap)):
                is_kept = times_ms(batch["kafka_timestamp"]) >= floor
                there = batch["offset"].to_numpy()[is_kept]
                for offset in np.setdiff1d(there, log.offset).tolist():
                    if offset >= begin:
                        fix = "start a new lake while Kafka still has it"
                        findings.add(
                            "bronze lacks a record that Kafka has",
                            where + evidence.at(tp, offset),
                            fix,
                        )


def gaps(offsets: Ints, skipped: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """Return the ranges of `[0, end)` that hold none of some offsets, which are in order, and no
    skipped range.

    Ranges that lie near each other (`NEAR`) are returned as one.
    """
    begins = np.concatenate([offsets, [since for since, _ in skipped], [end]]).astype(np.int64)
    ends = np.concatenate([offsets + 1, [until for _, until in skipped], [end]]).astype(np.int64)
    order = np.argsort(begins, kind="stable")
    reached = np.append(0, np.maximum.accumulate(ends[order])[:-1])
    begins = np.minimum(begins[order], end)
    ranges: list[tuple[int, int]] = []
    for since, until in zip(
        reached[reached < begins].tolist(), begins[reached < begins].tolist(), strict=True
    ):
        is_near = bool(ranges) and since - ranges[-1][1] <= NEAR
        ranges.append((ranges.pop()[0] if is_near else since, until))
    return ranges


# -- check 2: each record has one outcome


class Erasing(NamedTuple):
    """Keys that `forget` has begun to erase, by tenant.

    `parts`: what silver still has of them and bronze has, too, by input and offset.
    """

    keys: Set[tuple[str, str]]
    parts: Sequence[tuple[InputId, int]]


def without_erased(partition: Partition, findings: Findings) -> tuple[Partition, Erasing]:
    """Return the partition without what holds records that bronze no longer has, and what is left
    of these.

    `forget` erases records in bronze first.
    """
    erased = {(tp.input, offset) for tp, log in partition.logs.items() for offset in log.erased}
    halves = list[Outcome]()

    def stays(outcome: Outcome) -> bool:
        """Return True where none of its records is erased; else take note of it."""
        is_whole = erased.isdisjoint(part[:2] for part in outcome.parts)
        halves.extend([] if is_whole else [outcome])
        return is_whole

    if erased:
        rows = [row for row in partition.rows if stays(row.outcome)]
        not_merged = [each for each in partition.not_merged if stays(each[0])]
        partition = replace(partition, rows=rows, not_merged=not_merged)
    for outcome in halves:
        findings.add(
            f"`forget` was cut short: silver still has a record of the key ({outcome.status})",
            place(partition.number, outcome.key, outcome.event_time, outcome.tenant),
            "call `watersmeet forget` for the key again",
        )
    parts = [part[:2] for outcome in halves for part in outcome.parts if part[:2] not in erased]
    return partition, Erasing({(outcome.tenant, outcome.key) for outcome in halves}, parts)


def check_outcomes(partition: Partition, erasing: Erasing, findings: Findings) -> None:
    """Check that every record with a key that the merge has passed has exactly one trace.

    - It is in one merge record, or has a row that waits or says why it is in none; that row is of
      the batch that has passed the record.
    - Nothing else is there.
    - A record is left unread only where it is a skipped tombstone.
    """
    evidence = partition.evidence
    offsets_by_input = defaultdict[InputId, list[int]](list)
    of_rows = (row.outcome.parts for row in partition.rows)
    of_others = (outcome.parts for outcome, _ in partition.not_merged)
    for input_id, offset, *_ in chain(*of_rows, *of_others, erasing.parts):
        if partition.is_judged(input_id, offset):
            offsets_by_input[input_id].append(offset)
    for tp, log in partition.logs.items():
        where = f"{tables.bronze(tp.input.source)}: "
        here = np.array(offsets_by_input[tp.input], np.int64)
        for offset, what in _unequal(here, log.consumed):
            findings.add(f"silver: the record {what}", where + evidence.at(tp, offset))
        for offset in log.unread:
            fix = (
                "give the row the event time or the reason that its value has, or start a new lake "
                "while Kafka still has it"
            )
            what = "a record with a value was neither read nor refused"
            findings.add(what, where + evidence.at(tp, offset), fix)
    ranges = {
        (InputId(source, topic), batch): offsets
        for source, topic, batch, *offsets in zip(
            *(partition.progress[name].to_pylist() for name in _RANGE), strict=True
        )
    }
    for outcome, batch in partition.not_merged:
        [(input_id, offset, *_)] = outcome.parts
        since, until = ranges.get((input_id, batch), (offset, MAX_TIME))
        # A record that waits for its tenant may be late by new rules. One that has joined a merge
        # record is found to be a duplicate when that closes, or excess when it is too large.
        is_new = outcome.status == LATE and evidence.epochs.of(batch).from_batch == batch
        may_come_later = outcome.status in (DUPLICATE, EXCESS)
        may_come_later |= evidence.settings.merge.has_tenants and is_new
        if offset >= until or (offset < since and not may_come_later):
            tp = TopicPartition(input_id, partition.number)
            what = f"the {outcome.status} record is of batch {batch}, which did not pass it"
            findings.add(what, f"silver: {evidence.at(tp, offset)}")


_RANGE: Final = ("source", "topic", "batch", "from_offset", "until_offset")


def _unequal(here: Ints, required: Ints) -> Iterator[tuple[int, str]]:
    """Yield offsets that are there more than once, that are missing, and that must not be there."""
    offsets, counts = np.unique(here, return_counts=True)
    for offset, count in zip(offsets[counts > 1], counts[counts > 1], strict=True):
        yield int(offset), f"appears {count} times"
    for offset in np.setdiff1d(required, offsets).tolist():
        yield offset, "is missing"
    for offset in np.setdiff1d(offsets, required).tolist():
        yield offset, "must not be there"


# -- checks 3 and 4: rows of silver and their states, and of 5 what is valid


def check_rows(
    partition: Partition,
    clocks: Mapping[int, tuple[int, int | None]],
    validator: Validator,
    findings: Findings,
) -> None:
    """Check the rows of a partition.

    - A key of a tenant has at most one open row, and no two rows with the same event time. Rows
      that a jump closed do not count for the latter.
    - A row is open as long as it can be joined at the clock of its tenant, and no longer: the batch
      that has closed it was the first to come so far.
    - A record waits as long as that clock has not come to its position, and the clock of all has.
    - A finished row is valid exactly where predicate and size say so.

    `clocks`: those of tenants, by the index of a row, and those of the batch before; absent where
    they are the partition's.
    """
    evidence = partition.evidence
    p = partition.number
    has_ended = evidence.following is not None
    counts: Counter[tuple[Any, ...]] = Counter()
    for i, row in enumerate(partition.rows):
        key, status, time, last, *_, tenant, position = row.outcome
        epoch, now = partition.deciding_epoch(row)
        clock, before = clocks.get(i, (now, partition.clock_before(row)))
        if status == "waiting":
            is_right = not has_ended and position is not None and _lies(position, clock, now)
            what = f"has the position {position}, and the clock of all is {now}"
        else:
            due = epoch.settings.merge.window.due(time, last)
            is_past = clock is not None and due < clock
            is_right = status == "reset" or is_past == (status == "timed_out")
            is_right &= status != "open" or not has_ended
            if status == "timed_out" and before is not None and due < before:
                is_right = False
                what += f", which the batch before {row.batch} has passed"
            what = f"can be joined until {due}"
            counts["rows with the same partition, key and event time", tenant, key, time] += (
                status != "reset"
            )
        counts["open rows for one key", tenant, key, None] += status == "open"
        if not is_right:
            clock_name = "the clock" if tenant == NO_TENANT else "its tenant's clock"
            state = f"{status.replace('_', ' ')} although {clock_name} is {clock}"
            findings.add(f"the row is {state}, and it {what}", place(p, key, time, tenant))
        is_closed = as_ended(evidence, p, row.outcome).status == "reset"
        right = validator.right(row, is_closed=is_closed)
        actual = row.valid, row.invalid_reason
        if actual != right:
            what = "valid is {} ({}), and must be {} ({})".format(*actual, *right)
            findings.add(what, place(p, key, time, tenant))
    for (what, tenant, key, time), n in counts.items():
        if n > 1:
            findings.add(f"{n} {what}", place(p, key, time, tenant))


def _lies(position: int, after: int | None, until: int | None) -> bool:
    return after is not None and until is not None and after < position <= until


# -- check 4: batches and their clocks


def check_batches(evidence: Evidence, findings: Findings) -> None:
    """Check that silver has rows of the generation's batches alone under its number."""
    if not evidence.reader.exists(tables.SILVER):
        return
    values = {"first": ("min", "batch"), "last": ("max", "batch")}
    own = evidence.generation
    for row in evidence.reader.summary(tables.SILVER, ["generation"], values).to_pylist():
        number, first, last = row.values()
        is_known = number in (each.number for each in evidence.generations)
        is_within = first is None or (first >= own.from_batch and last <= evidence.last_batch)
        # What a jump that is not decided has written belongs to no batch, and counts for nothing.
        if (number == own.number and not is_within) or (not is_known and first is not None):
            what = (
                f"rows are of batches from {first} to {last}, and generation {own.number} has "
                f"those from {own.from_batch} to {evidence.last_batch}"
            )
            findings.add(what, f"silver: generation {number}")


def check_clock(partition: Partition, findings: Findings) -> None:
    """Check every batch that was read: none is missing, its ranges follow one another, and bronze
    bears out its times.

    The times are its positions, heads and clock. The clock is the smallest head. Every record whose
    position it has reached is passed, and no other. A decision of the idle policy follows a record
    up to which the batch before the one that it lets go on has come.
    """
    evidence = partition.evidence
    progress = partition.progress
    by_batch = progress.group_by("batch").aggregate(
        [("head", "min"), ("clock", "min"), ("clock", "max"), ("source", "count")]
    )
    for row in by_batch.sort_by("batch").to_pylist():
        where = f"progress: batch {row['batch']}, partition {partition.number}"
        for clock in sorted({row["clock_min"], row["clock_max"]} - {row["head_min"]}):
            findings.add(f"the clock is {clock}, and the smallest head {row['head_min']}", where)
        if row["source_count"] != len(partition.logs):
            findings.add(
                f"there are {row['source_count']} rows for {len(partition.logs)} sources", where
            )
    known = sum(rows_of_input(progress, tp.input).num_rows for tp in partition.logs)
    if known != progress.num_rows:
        what = f"{progress.num_rows - known} rows are of no source of the lake"
        findings.add(what, f"progress: partition {partition.number}")
    for batch in _missing(partition):
        findings.add("it is missing", f"progress: batch {batch}, partition {partition.number}")
    numbers_of = progress.group_by(["batch", "epoch", "generation"]).aggregate([])
    for row in numbers_of.sort_by("batch").to_pylist():
        right = evidence.epochs.of(row["batch"]).number, evidence.generation.number
        if right != (row["epoch"], row["generation"]):
            what = "epoch and generation are {} and {}, and must be {} and {}"
            where = f"progress: batch {row['batch']}, partition {partition.number}"
            findings.add(what.format(row["epoch"], row["generation"], *right), where)
    for tp, log in partition.logs.items():
        input_rows = rows_of_input(progress, tp.input)
        columns = {name: numbers(input_rows[name]) for name in _OF_BATCH}
        topic = f"{tp.input.topic}[{tp.partition}]"
        for batch, what, offset in _unlike(log, _first_batch(partition), columns):
            findings.add(
                what, f"progress: batch {batch}, {topic}" if offset is None else f"{topic}@{offset}"
            )
        _check_decisions(partition, log, columns, f"idle_heartbeats: {topic}", findings)


_OF_BATCH: Final = ("batch", "from_offset", "until_offset", "head", "clock", "position")


def _first_batch(partition: Partition) -> int:
    """Return the first batch that is judged."""
    evidence = partition.evidence
    return max(evidence.history_of(partition.number).batch + 1, evidence.generation.from_batch)


def _missing(partition: Partition) -> list[int]:
    """Return the batches between those that were read of which there is nothing."""
    evidence = partition.evidence
    first = max(_first_batch(partition), evidence.first_known)
    every = np.arange(first, evidence.last_batch + 1)
    return list(np.setdiff1d(every, numbers(partition.progress["batch"])).tolist())


def _check_decisions(
    partition: Partition, log: Log, columns: Mapping[str, Ints], where: str, findings: Findings
) -> None:
    ends = [columns[name].tolist() for name in ("batch", "from_offset", "until_offset")]
    ranges = {batch: offsets for batch, *offsets in zip(*ends, strict=True)}
    evidence = partition.evidence
    for after, batch in log.decided:
        since, _ = ranges.get(batch, (after + 1, after + 1))
        is_own = _first_batch(partition) <= batch <= evidence.last_batch
        is_read_back = batch == NULL and evidence.generation.kind == "sink"
        if not (is_read_back or is_own) or after + 1 < since:
            findings.add(f"a decision after offset {after} is of batch {batch}", where)


def _unlike(
    log: Log, first_batch: int, columns: Mapping[str, Ints]
) -> Iterator[tuple[int, str, int | None]]:
    """Yield the first batches that bronze does not bear out: number, what is wrong, and at which
    offset.
    """
    read = log.read
    batch, from_offset, until_offset, head, clock, position = itemgetter(*_OF_BATCH)(columns)
    records = np.flatnonzero(read.kind != DECISION)
    offsets = np.append(read.offset[records], MAX_TIME)
    record_positions = np.append(read.position[records], MAX_TIME)
    consumed = np.searchsorted(offsets, until_offset)
    ahead = np.searchsorted(record_positions, clock, side="right")
    positions = np.append(read.before, read.position)
    # A decision that follows the last offset passed may have come before the batch or after it.
    certain = np.maximum(
        np.append(0, records + 1)[consumed], np.searchsorted(read.offset, until_offset - 1)
    )
    least = positions[certain]
    most = positions[np.searchsorted(read.offset, until_offset)]
    is_next = np.append(False, np.diff(batch) == 1)
    is_torn = np.append(False, np.diff(batch) == 0) | (
        is_next & (from_offset != np.roll(until_offset, 1))
    )
    is_torn |= (batch == first_batch) & (from_offset != log.begin)

    def first(wrong: npt.NDArray[np.bool_]) -> list[int]:
        """Return the index of the first true element; empty where none is true."""
        return [int(j) for j in np.flatnonzero(wrong)[:1]]

    for j in first(is_torn):
        yield (
            int(batch[j]),
            f"it begins at offset {from_offset[j]}, where the batch before it did not end",
            None,
        )
    for j in first(~np.isin(position, positions) | (position < least) | (position > most)):
        yield int(batch[j]), f"the position is {position[j]}, and bronze gives {least[j]}", None
    for j in first(
        ~np.isin(head, positions) | (head < position) | ((head == clock) & (position < clock))
    ):
        bronze = f"bronze has {least[j]} at offset {until_offset[j]} and gets to {positions[-1]}"
        yield int(batch[j]), f"the head is {head[j]}, and {bronze}", None
    for j in first(ahead < consumed):
        what = (
            f"passed, with the clock at {clock[j]}, although the position is "
            f"{record_positions[ahead[j]]}"
        )
        yield int(batch[j]), what, int(offsets[ahead[j]])
    for j in first(record_positions[consumed] < clock + (head != clock)):
        what = (
            f"not passed, with the clock at {clock[j]}, although the position is "
            f"{record_positions[consumed[j]]}"
        )
        yield int(batch[j]), what, int(offsets[consumed[j]])


# -- check 5: what the model makes of bronze


def check_model(
    partition: Partition,
    model: Iterable[Outcome],
    erasing: Set[tuple[str, str]],
    findings: Findings,
) -> None:
    """Check that the tables have the model's outcomes for sampled keys, and no others.

    Outcomes are merge records, and records that wait or are not merged. Keys, by tenant, that
    `forget` has begun to erase (`erasing`) do not count.
    """
    evidence = partition.evidence
    names = evidence.settings.input_names

    def compared(outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """Yield the outcomes that the check is about, as they would be at its end."""
        for outcome in outcomes:
            is_erasing = (outcome.tenant, outcome.key) in erasing
            if evidence.is_sampled(outcome.key) and not is_erasing:
                yield as_ended(evidence, partition.number, outcome)

    not_merged = (outcome for outcome, _ in partition.not_merged)
    actual = compared(chain((row.outcome for row in partition.rows), not_merged))
    right = compared(model)
    for (key, tenant), *sides in different(
        actual, right, lambda outcome: (outcome.key, outcome.tenant)
    ):
        tables_have, model_has = (_described(side, names) for side in sides)
        time = min(outcome.event_time for side in sides for outcome in side)
        findings.add(
            f"the tables have {tables_have}, and the merge model {model_has}",
            place(partition.number, key, time, tenant),
        )


def _described(side: Sequence[Outcome], names: Mapping[InputId, str]) -> str:
    """Return the first outcomes of a side for a sentence; `names`: those of the inputs."""
    texts = (outcome.described(names) for outcome in sorted(side)[:3])
    return "; ".join(texts) or "nothing"
