"""Check of the data's promises, derived again from the tables, Kafka and the sink.

It reads only, and starts no JVM.

One generation is checked, by default the newest, as if there were no other; with `--full` all of
them, one after the other. What is not of one generation alone (the sink, dead letters, what belongs
to no partition) is checked with the newest.

Only one thing is believed of progress: how far silver is, per topic-partition, and its clock. That
is checked against bronze. The checks are numbered as in the contract:

1. *bronze* has every offset once, and lacks none that Kafka has; no table has rows of another topic
   or partition; where sources are repartitioned, keys (a sample, or all) are where they belong, and
   elsewhere a note says whether some are in two partitions;
2. every record that the merge has passed is in exactly one outcome;
3. no key of a tenant has two open rows, and no two rows share partition, tenant, key and event
   time;
4. what should have timed out has, nothing else has, nothing waits for long, and each batch's clock
   is what bronze says;
5. silver and late are what the merge model makes of bronze, for a sample of keys or for all
   (`verify_model`); rows are valid where they should be;
6. the *sink* holds silver's finished records in order, and nothing else (`verify_sink`);
7. topics of *dead letters* have each late or refused record once, as it came, in order of offset
   (`verify_dead_letters`).

Where rows have been deleted (`keep`), what came before a partition's history begins is not judged
(`lake.retention_bounds`). The merge records that were open then are taken from silver.

A running lake disturbs nothing. The ends of Kafka's topics are taken first, then versions of all
tables that belong together (`lake.snapshot`), and only what these have merged is judged. What a
batch has not noted yet is derived (`unnoted`). Only `forget` takes several commits to reach a new
state: what it has begun to erase is not judged, and while it is at work, everything is looked at
again.

A group of partitions is in memory at a time. Of `progress` and of silver's versions the last
`KNOWN_BATCHES` are read, with `--full` all.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain, count
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pipelines.audit.evidence import KNOWN_BATCHES, MAX_TIME, Evidence, Ints, numbers, read_evidence
from pipelines.audit.partitioning import KeyPartitions, Place, check_key_partition
from pipelines.audit.problems import REBUILD, Findings, answer
from pipelines.audit.verify_dead_letters import (
    DeadLetterTopic,
    check_dead_letters,
    read_dead_letter_topics,
)
from pipelines.audit.verify_evidence import (
    DECISION,
    Outcome,
    Partition,
    ReadLog,
    place,
    read_partitions,
    rows_of_input,
)
from pipelines.audit.verify_model import PUBLISHED, check_model, expected
from pipelines.audit.verify_sink import (
    Evaluate,
    Sink,
    Validator,
    check_sink,
    read_limits,
    read_sink,
)
from pipelines.core.inputs import InputId
from pipelines.core.model import NO_TENANT
from pipelines.core.plan import TopicPartition
from pipelines.kafka.cluster import TIMEOUT_S, Cluster, co_partitioned, topics_of
from pipelines.kafka.reading import Range, read_range
from pipelines.lake import tables
from pipelines.lake.commits import commit_of
from pipelines.lake.epochs import read_epochs
from pipelines.lake.generations import read_generations
from pipelines.lake.lease import SILENCE_S, change_under_way, is_dead
from pipelines.lake.snapshot import Snapshot
from pipelines.lake.table_reader import TableReader, VersionGoneError, Where
from pipelines.settings import Settings

LOOKS: Final = 5
"""Maximum number of looks at a lake whose tables never stand still together, or of which a version
is removed meanwhile.
"""

WAIT_S: Final = 0.25
"""Seconds between two looks at a command that has begun to change the lake."""

Bounds: TypeAlias = Mapping[InputId, Mapping[int, tuple[int, int]]]
"""The first offset that Kafka has, and the exclusive end offset, by input and partition."""

NEAR = 10_000
"""Distance up to which offsets are read through rather than sought one by one.

Each transaction leaves a gap.
"""


def verify(
    reader: TableReader,
    settings: Settings,
    *,
    full: bool = False,
    generation: int | None = None,
    evaluate: Evaluate | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Return the answer of `verify --json`; of each check at most `SHOWN` problems, and how many
    more there are.

    - `full`: look at every key, batch and version, not at a sample, and at every generation unless
      one is named.
    - `evaluate`: evaluates `publish.valid` and `publish.value` where they are the user's own.
      Without it, `notes` says what was not checked.

    Raises KafkaTransientError and the other errors of Kafka, and ConfigurationError where a
    source's topic is gone or there is no such generation.
    """
    for looks in count(1):
        try:
            result, snapshot = _check_once(
                reader, settings, evaluate, timeout_s, generation, is_full=full
            )
        except VersionGoneError:
            if looks >= LOOKS:
                raise
            continue
        if result["ok"] or not _is_changing(snapshot, looks):
            break
    return result


def _is_changing(snapshot: Snapshot, looks: int) -> bool:
    """Return True where the findings may be of a state in between, so that another look finds
    others.

    While a command is changing the lake, wait for it, up to `SILENCE_S`.
    """
    if not snapshot.is_exact and looks < LOOKS:
        return snapshot.is_past
    deadline = time.monotonic() + SILENCE_S
    while (change := change_under_way(snapshot)) is not None:
        if snapshot.is_past:
            return True
        if is_dead(change) or time.monotonic() > deadline:
            break
        time.sleep(WAIT_S)
    return False


def _check_once(
    reader: TableReader,
    settings: Settings,
    evaluate: Evaluate | None,
    timeout_s: float,
    generation: int | None,
    *,
    is_full: bool,
) -> tuple[dict[str, Any], Snapshot]:
    """Return the answer for one moment, and that moment."""
    settings = read_epochs(reader, settings).current.settings
    cluster = Cluster(settings.kafka, timeout_s)
    counts = cluster.partition_counts(topics_of(settings))
    partitions = co_partitioned(settings, counts)
    sink = read_sink(reader, settings, partitions) if settings.publish.topic in counts else None
    dead_letter_topics = read_dead_letter_topics(reader, settings, partitions, counts)
    bounds = {i: cluster.bounds(i.topic, partitions) for i in settings.inputs}
    snapshot = Snapshot(reader, settings)
    every = [entry.number for entry in read_generations(snapshot, settings)]
    is_every = is_full and generation is None and bool(every)
    requested: Sequence[int | None] = every if is_every else [generation]
    findings = list[Findings]()
    notes = list[str]()
    for number in requested:
        evidence = read_evidence(snapshot, settings, partitions, number, full=is_full)
        is_newest = evidence.following is None
        own_findings, own_notes = _check_generation(
            evidence,
            bounds,
            evaluate,
            sink if is_newest else None,
            dead_letter_topics if is_newest else (),
        )
        if len(evidence.generations) > 1:
            label = f"generation {evidence.generation.number}"
            own_findings = [check.of(label) for check in own_findings]
        findings += own_findings
        notes += [note for note in own_notes if note not in notes]
    return answer(findings, notes), snapshot


def _check_generation(
    evidence: Evidence,
    bounds: Bounds,
    evaluate: Evaluate | None,
    sink: Sink | None,
    dead_letter_topics: Sequence[DeadLetterTopic],
) -> tuple[list[Findings], list[str]]:
    """Return what is found in a generation, and what a reader should know.

    With the newest one, that includes what belongs to the whole lake.
    """
    settings = evidence.settings
    validator = Validator(evidence.settings, evidence.epochs, evaluate)
    limits = None if sink is None else read_limits(evidence)
    key_partitions = KeyPartitions()
    names = ["places", "keys", "bronze", "forgotten keys", "outcomes", "rows of silver", "clock"]
    names += ["the merge model", "versions of silver", "sink"]
    names += [f"dead letters of {topic.table}" for topic in dead_letter_topics]
    findings = {name: Findings(name) for name in names}
    if evidence.following is None:
        check_places(evidence, findings["places"])
    check_versions(evidence, findings["versions of silver"])
    for partition in read_partitions(evidence, validator.evaluated):
        check_offsets(partition, bounds, findings["bronze"])
        check_key_partitions(partition, key_partitions, findings["keys"])
        check_partition(partition, validator, findings)
        if sink is not None and limits is not None:
            check_sink(partition, sink, limits, validator, findings["sink"])
        for topic in dead_letter_topics:
            check_dead_letters(partition, topic, findings[f"dead letters of {topic.table}"])
    reason = "was not evaluated, because that needs Spark and `--full`"
    notes = [f"{name} {reason}" for name in validator.unevaluated]
    if not settings.repartitioned and (split_keys := key_partitions.note()) is not None:
        notes.append(split_keys)
    if evidence.is_closing:
        number = evidence.generation.number
        notes.append(
            f"a jump has ended generation {number}, and its records that are not out are not "
            "closed yet; the next start closes them, and they are judged as if it had"
        )
    return list(findings.values()), [*notes, *evidence.unnoted.notes]


def check_partition(
    partition: Partition, validator: Validator, findings: Mapping[str, Findings]
) -> None:
    """Run checks 2 to 5, which need no Kafka."""
    partition, erasing = _without_erased(partition.validated, findings["forgotten keys"])
    model = expected(partition)
    partition = _with_unnoted(partition, model.outcomes)
    outcomes = [
        outcome for outcome in model.outcomes if (outcome.tenant, outcome.key) not in erasing.keys
    ]
    check_outcomes(partition, model.outcomes, erasing, findings["outcomes"])
    check_rows(partition, model.clocks, validator, findings["rows of silver"])
    check_clock(partition, findings["clock"])
    check_model(partition, outcomes, erasing.keys, findings["the merge model"])


def _with_unnoted(partition: Partition, model: Iterable[Outcome]) -> Partition:
    """Return the partition with the late records of a batch whose notes are missing, as the model
    has them.
    """
    consumed = partition.evidence.unnoted.consumed
    late_records = {part[:2] for outcome in partition.late for part in outcome.parts}
    unnoted_late = []
    for outcome in model:
        input_id, offset = outcome.parts[0][:2]
        since, until = consumed.get(TopicPartition(input_id, partition.number), (0, 0))
        if (
            outcome.status == "late"
            and since <= offset < until
            and (input_id, offset) not in late_records
        ):
            unnoted_late.append(outcome)
    return replace(partition, late=[*partition.late, *unnoted_late]) if unnoted_late else partition


class Erasing(NamedTuple):
    """Keys that `forget` has begun to erase, by tenant.

    `parts`: what silver and late still have of them and bronze has, too, by input and offset.
    """

    keys: Set[tuple[str, str]]
    parts: Sequence[tuple[InputId, int]]


def _without_erased(partition: Partition, findings: Findings) -> tuple[Partition, Erasing]:
    """Return the partition without what holds records that bronze no longer has, and what is left
    of these.

    `forget` erases records in bronze first.
    """
    erased = {(tp.input, offset) for tp, log in partition.logs.items() for offset in log.erased}
    keys = set[tuple[str, str]]()
    parts = list[tuple[InputId, int]]()

    def stays(outcome: Outcome) -> bool:
        """Return True where none of its records is erased; else take note of the key and its other
        records.
        """
        places = [part[:2] for part in outcome.parts]
        if erased.isdisjoint(places):
            return True
        keys.add((outcome.tenant, outcome.key))
        parts.extend(part for part in places if part not in erased)
        findings.add(
            f"`forget` was cut short: {'late' if outcome.status == 'late' else 'silver'} still has "
            "a record of the key",
            place(partition.number, outcome.key, outcome.event_time, outcome.tenant),
            "call `watersmeet forget` for the key again",
        )
        return False

    if not erased:
        return partition, Erasing(keys, parts)
    rows = [row for row in partition.rows if stays(row.outcome)]
    late = [outcome for outcome in partition.late if stays(outcome)]
    return replace(partition, rows=rows, late=late), Erasing(keys, parts)


# -- check 1


def check_places(evidence: Evidence, findings: Findings) -> None:
    """Check that no row is of a partition that the topics lack, or of a source or topic that the
    configuration lacks.
    """
    settings = evidence.settings
    reader = evidence.reader
    for name, table in tables.layout(settings).items():
        by = [column for column in ("source", "topic", "partition") if column in table.schema.names]
        if "partition" not in by or not reader.exists(name):
            continue
        own_inputs = [i for i in settings.inputs if name == tables.bronze(i.source)]
        places = set()
        for input_id in own_inputs or settings.inputs:
            coordinates = input_id._asdict()
            places.add(tuple(coordinates[column] for column in by[:-1]))
        for row in reader.summary(name, by, {"rows": ("count", "*")}).to_pylist():
            *of, partition, rows = row.values()
            is_message = name in (tables.RECOVERED, tables.GENERATIONS) and set(of) == {None}
            if partition not in range(evidence.partitions) or not (
                tuple(of) in places or is_message
            ):
                where = ", ".join(f"{column} {row[column]}" for column in by)
                fix = "delete them, if this is the lake of these topics"
                findings.add(
                    f"{rows:,} rows that belong to no partition of the topics",
                    f"{name}: {where}",
                    fix,
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
        keys = {offset: (key, tenant) for offset, (key, *_, tenant) in log.sampled.items()}
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
        history = evidence.history.get(tp.partition)
        if evidence.following is None:
            last = max([last, *(log.offset[-1:] + 1).tolist()])
        begin = max(first, evidence.generation.begin.get(tp, 0))
        if history is not None:
            begin = max(begin, history.offsets[tp.input])
        kafka = evidence.settings.kafka
        for gap in gaps(log.offset, [(0, begin)], min(last, end)):
            for batch in read_range(kafka, Range(tp.input.topic, tp.partition, *gap)):
                for offset in np.setdiff1d(batch["offset"].to_numpy(), log.offset).tolist():
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


# -- check 2

_OUTCOMES = ["merge records, late and recovered", "merge records, waiting, late and recovered"]


def check_outcomes(
    partition: Partition, model: Iterable[Outcome], erasing: Erasing, findings: Findings
) -> None:
    """Check that every record that the merge has passed has exactly one outcome.

    - It is in one merge record, waiting, late, or published before a recovery.
    - A refused record is in quarantine once. It may be there before the merge has passed it.
    - A skipped tombstone is nowhere else, and only a tombstone is skipped.
    - Nothing else is there.

    Of a batch whose notes are missing, only records with sampled keys are judged: the others may be
    late.
    """
    evidence = partition.evidence
    offsets_by_input = defaultdict(list)
    published = [outcome for outcome in model if outcome.status == PUBLISHED]
    for outcome in chain((row.outcome for row in partition.rows), partition.late, published):
        for input_id, offset, *_ in outcome.parts:
            if partition.is_judged(input_id, offset):
                offsets_by_input[input_id].append(offset)
    for input_id, offset in erasing.parts:
        if partition.is_judged(input_id, offset):
            offsets_by_input[input_id].append(offset)
    for tp, log in partition.logs.items():
        table = tables.bronze(tp.input.source)
        refused = np.setdiff1d(log.refused[log.refused < evidence.end.until.get(tp, 0)], log.old)
        comparisons = {
            "quarantine": (log.quarantined, refused, log.refused),
        }
        since, until = evidence.unnoted.consumed.get(tp, (0, 0))
        not_known = (
            (log.consumed >= since)
            & (log.consumed < until)
            & ~np.isin(log.consumed, list(log.sampled))
        )
        comparisons[_OUTCOMES[evidence.settings.merge.has_tenants]] = (
            np.array(offsets_by_input[tp.input], np.int64),
            log.consumed[~not_known],
            log.consumed,
        )
        for name, (here, required, allowed) in comparisons.items():
            offsets, counts = np.unique(here, return_counts=True)
            wrong = [
                (o, f"appears {n} times")
                for o, n in zip(offsets[counts > 1], counts[counts > 1], strict=True)
            ]
            wrong += [(offset, "is missing") for offset in np.setdiff1d(required, offsets)]
            wrong += [(offset, "must not be there") for offset in np.setdiff1d(offsets, allowed)]
            fix = (
                "let quarantine hold bronze's refused rows, each once"
                if name == "quarantine"
                else REBUILD
            )
            for offset, what in wrong:
                findings.add(
                    f"{name}: the record {what}", f"{table}: {evidence.at(tp, offset)}", fix
                )
        for offset in log.unread.tolist():
            fix = (
                "give the row the event time or the reason that its value has, or start a new lake "
                "while Kafka still has it"
            )
            what = "a record with a value was neither read nor refused"
            findings.add(what, f"{table}: {evidence.at(tp, offset)}", fix)


# -- checks 3, 4, and of 5 what is valid


def check_rows(
    partition: Partition, clocks: Mapping[int, int], validator: Validator, findings: Findings
) -> None:
    """Check the rows of a partition.

    - A key of a tenant has at most one open row, and no two rows with the same event time. Rows
      that a jump closed do not count for the latter.
    - A row is open as long as it can be joined at the clock of its tenant, and no longer.
    - A record waits as long as that clock has not come to its position, and the clock of all has.
    - A finished row is valid exactly where predicate and size say so.

    `clocks`: those of tenants, by the index of a row; absent where it is the partition's.
    """
    evidence = partition.evidence
    p = partition.number
    rows: Counter[tuple[Any, ...]] = Counter()
    for i, row in enumerate(partition.rows):
        key, status, time, last, *_, tenant, position, _ = row.outcome
        epoch, now = partition.deciding_epoch(row)
        clock = clocks.get(i, now)
        clock_name = "the clock" if tenant == NO_TENANT else "its tenant's clock"
        what = ""
        has_ended = evidence.following is not None
        if status == "waiting":
            is_right = (
                clock is not None
                and now is not None
                and position is not None
                and clock < position <= now
            )
            what = (
                ""
                if is_right and not has_ended
                else f"has the position {position}, and the clock of all is {now}"
            )
        else:
            due = epoch.settings.merge.window.due(time, last)
            is_past = clock is not None and due < clock
            rows["rows with the same partition, key and event time", tenant, key, time] += (
                status != "reset"
            )
            if (status == "open" and (is_past or has_ended)) or (
                status == "timed_out" and not is_past
            ):
                what = f"can be joined until {due}"
        rows["open rows for one key", tenant, key, None] += status == "open"
        if what:
            state = f"{status.replace('_', ' ')} although {clock_name} is {clock}"
            findings.add(f"the row is {state}, and it {what}", place(p, key, time, tenant))
        is_closed = (
            status == "timed_out" and has_ended and evidence.is_unpublished(p, row.outcome.place)
        )
        right = validator.right(row, is_closed=is_closed)
        if (row.valid, row.invalid_reason) not in right:
            allowed = " or ".join(f"{valid} ({reason})" for valid, reason in right)
            findings.add(
                f"valid is {row.valid} ({row.invalid_reason}), and must be {allowed}",
                place(p, key, time, tenant),
            )
    for (what, tenant, key, time), n in rows.items():
        if n > 1:
            findings.add(f"{n} {what}", place(p, key, time, tenant))


# -- check 4


def check_clock(partition: Partition, findings: Findings) -> None:
    """Check every batch that was read: its ranges follow one another, and bronze bears out its
    times.

    The times are its positions, heads and clock. The clock is the smallest head. Every record whose
    position it has reached is passed, and no other.
    """
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
    for tp, log in partition.logs.items():
        input_rows = rows_of_input(progress, tp.input)
        columns = {name: numbers(input_rows[name]) for name in input_rows.column_names[3:]}
        for batch, what, offset in _unlike(log.read, **columns):
            topic = f"{tp.input.topic}[{tp.partition}]"
            findings.add(
                what, f"progress: batch {batch}, {topic}" if offset is None else f"{topic}@{offset}"
            )


def _unlike(
    read: ReadLog,
    batch: Ints,
    from_offset: Ints,
    until_offset: Ints,
    head: Ints,
    clock: Ints,
    position: Ints,
) -> Iterator[tuple[int, str, int | None]]:
    """Yield the first batches that bronze does not bear out: number, what is wrong, and at which
    offset.
    """
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

    def first(wrong: npt.NDArray[np.bool_]) -> Iterable[int]:
        """The index of the first true element, in a list of one; an empty list where none is
        true."""
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


def check_versions(evidence: Evidence, findings: Findings) -> None:
    """Check that the version of silver that `progress` names for a batch is the commit of that
    batch.

    Only as far as silver's history goes.
    """
    if evidence.version is None:
        return
    history = evidence.reader.history(tables.SILVER, None if evidence.is_full else KNOWN_BATCHES)
    commits = ((version.number, commit_of(tables.SILVER, version)) for version in history)
    batches = {
        number: None if commit is None or commit.is_fence else commit.facts.get("batch")
        for number, commit in commits
    }
    conditions: Where = [
        [("silver_version", ">=", min(batches)), ("batch", "<=", evidence.last_batch)]
    ]
    noted = evidence.reader.summary(
        tables.PROGRESS, ["batch", "silver_version"], {"rows": ("count", "*")}, conditions
    )
    for batch, version in sorted(
        zip(noted["batch"].to_pylist(), noted["silver_version"].to_pylist(), strict=True)
    ):
        if batches.get(version) != batch:
            fix = (
                "let progress.silver_version name the version that silver's history has for the "
                "batch"
            )
            findings.add(
                f"version {version} of silver is not the commit of this batch",
                f"progress: batch {batch}",
                fix,
            )
