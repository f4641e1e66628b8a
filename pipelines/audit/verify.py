"""Whether the data keeps its promises, derived again from the tables, Kafka and the sink. Reads only, and starts no JVM.

Progress is believed in one thing: how far silver is, per topic-partition, and its clock; and that is checked against bronze.
The checks are numbered as in the contract:

1. *bronze* has every offset once, and lacks none that Kafka has;
2. every record that the merge has passed is in exactly one outcome;
3. no key has two open rows, and no two rows share partition, key and event time;
4. what should have timed out has, nothing else has, and the clock is what bronze says;
5. silver and late are what the merge model makes of bronze, for a sample of keys or for all; rows are valid where they should be;
6. the *sink* holds silver's finished records in order, and nothing else (`verify_sink`).

A running lake disturbs nothing: the ends of Kafka's topics are taken before silver's version, and only what that version has
merged is judged. A group of partitions is in memory at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from pipelines.audit.problems import REBUILD, Findings, answer, different
from pipelines.audit.verify_evidence import Era, Evidence, Ints, Outcome, Partition, place, read_evidence, read_partitions
from pipelines.audit.verify_sink import Evaluate, Judge, check_sink, read_limits, read_sink
from pipelines.core.model import MergeRules, PartitionMerge, Record
from pipelines.core.plan import TopicPartition
from pipelines.kafka.cluster import TIMEOUT_S, Cluster, co_partitioned, topics_of
from pipelines.kafka.reading import Range, read_range
from pipelines.lake import tables
from pipelines.lake.commits import Commit
from pipelines.lake.questions import Questions
from pipelines.settings import Settings

KNOWN_VERSIONS = 1000
"""So many of silver's last commits are compared with `progress`."""

NEAR = 10_000
"""Offsets that lie closer together are read through rather than sought one by one: each transaction leaves a gap."""

PUBLISHED = "published before"

Arrived = Sequence[Mapping[str, list[tuple[int, Record]]]]
"""By era and source, positions (ms) and records."""


def verify(
    questions: Questions,
    settings: Settings,
    *,
    full: bool = False,
    evaluate: Evaluate | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """The answer of `verify --json`; of each check at most `SHOWN` problems, and how many more there are.

    `full`: every key is compared with the merge model, not a sample. `evaluate` evaluates `publish.valid` and `publish.value`
    where they are the user's own; without it `notes` says what was not checked. Raises KafkaUnreachableError and the other
    errors of Kafka, and ConfigurationError where a source's topic is gone.
    """
    cluster = Cluster(settings.kafka, timeout_s)
    counts = cluster.partition_counts(topics_of(settings))
    partitions = co_partitioned(settings, counts)
    sink = read_sink(questions, settings, partitions) if settings.publish.topic in counts else None
    bounds = {source: cluster.bounds(kept.topic, partitions) for source, kept in settings.sources.items()}
    evidence, judge = read_evidence(questions, settings, partitions, full=full), Judge(settings, evaluate)
    limits = None if sink is None else read_limits(evidence, sink)
    names = ("bronze", "outcomes", "rows of silver", "clock", "the merge model", "versions of silver", "sink")
    findings = {name: Findings(name) for name in names}
    check_versions(evidence, findings["versions of silver"])
    for partition in read_partitions(evidence, judge.evaluated):
        check_offsets(partition, bounds, findings["bronze"])
        check_partition(partition, judge, findings)
        if sink is not None and limits is not None:
            check_sink(partition, sink, limits, judge, findings["sink"])
    return answer(findings.values(), (f"{name} was not evaluated: that takes Spark, and `--full`" for name in judge.unevaluated))


def check_partition(partition: Partition, judge: Judge, findings: Mapping[str, Findings]) -> None:
    """Checks 2 to 5, which need no Kafka."""
    model = expected(partition)
    check_outcomes(partition, model, findings["outcomes"])
    check_rows(partition, judge, findings["rows of silver"])
    check_clock(partition, findings["clock"])
    check_model(partition, model, findings["the merge model"])


# -- check 1


def check_offsets(partition: Partition, bounds: Mapping[str, Mapping[int, tuple[int, int]]], findings: Findings) -> None:
    """Each (source, partition, offset) is in bronze once, and those that are missing are missing in Kafka too.

    Compaction, retention, aborted records and the markers of transactions leave gaps in Kafka. `bounds`: by source and partition
    the first offset that Kafka has, and the exclusive end offset.
    """
    evidence = partition.evidence
    for tp, log in partition.logs.items():
        where, (first, end) = f"{tables.bronze(tp.source)}: ", bounds[tp.source].get(tp.partition, (0, 0))
        for offset, rows in log.repeated.items():
            fix = "delete all rows of this offset but one"
            findings.add(f"the record is in bronze {rows} times", where + evidence.at(tp, offset), fix)
        last = max([evidence.eras[-1].until.get(tp, 0), *(log.offset[-1:] + 1).tolist()])
        skipped = [(0, max(first, evidence.eras[0].begin.get(tp, 0))), *log.skipped]
        kafka, topic = evidence.settings.kafka, evidence.settings.sources[tp.source].topic
        for gap in gaps(log.offset, skipped, min(last, end)):
            for batch in read_range(kafka, Range(topic, tp.partition, *gap)):
                for offset in np.setdiff1d(batch["offset"].to_numpy(), log.offset).tolist():
                    if not any(since <= offset < until for since, until in skipped):
                        fix = "begin a new lake while Kafka has it"
                        findings.add("bronze lacks a record that Kafka has", where + evidence.at(tp, offset), fix)


def gaps(offsets: Ints, skipped: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """The ranges of `[0, end)` in which none of some offsets, which are in order, and no skipped range lies; near ones as one."""
    begins = np.concatenate([offsets, [since for since, _ in skipped], [end]]).astype(np.int64)
    ends = np.concatenate([offsets + 1, [until for _, until in skipped], [end]]).astype(np.int64)
    order = np.argsort(begins, kind="stable")
    reached, begins = np.append(0, np.maximum.accumulate(ends[order])[:-1]), np.minimum(begins[order], end)
    found: list[tuple[int, int]] = []
    for since, until in zip(reached[reached < begins].tolist(), begins[reached < begins].tolist(), strict=True):
        is_near = bool(found) and since - found[-1][1] <= NEAR
        found.append((found.pop()[0] if is_near else since, until))
    return found


# -- check 2


def check_outcomes(partition: Partition, model: Iterable[Outcome], findings: Findings) -> None:
    """Every record that the merge has passed is in one merge record, late, or published before a recovery; every refused one
    in quarantine once; nothing else is there. Refused ones may be there before the merge has passed them.
    """
    evidence, found = partition.evidence, defaultdict(list)
    published = [outcome for outcome in model if outcome.status == PUBLISHED]
    for outcome in chain((row.outcome for row in partition.rows), partition.late, published):
        for source, offset, *_ in outcome.parts:
            found[source].append(offset)
    for tp, log in partition.logs.items():
        until = evidence.eras[-1].until.get(tp, 0)
        must = passed = log.records[log.records < until]
        for since, end in log.skipped:
            must = must[(must < since) | (must >= end)]
        wanted = {
            "merge records, late and recovered": (np.array(found[tp.source], np.int64), must, passed),
            "quarantine": (log.quarantined, log.refused[log.refused < until], log.refused),
        }
        for name, (here, required, allowed) in wanted.items():
            offsets, counts = np.unique(here, return_counts=True)
            wrong = [(o, f"is there {n} times") for o, n in zip(offsets[counts > 1], counts[counts > 1], strict=True)]
            wrong += [(offset, "is not there") for offset in np.setdiff1d(required, offsets)]
            wrong += [(offset, "must not be there") for offset in np.setdiff1d(offsets, allowed)]
            fix = "let quarantine hold bronze's refused rows, each once" if name == "quarantine" else REBUILD
            for offset, what in wrong:
                findings.add(f"{name}: the record {what}", f"{tables.bronze(tp.source)}: {evidence.at(tp, offset)}", fix)


# -- checks 3, 4, and of 5 what is valid


def check_rows(partition: Partition, judge: Judge, findings: Findings) -> None:
    """A key has at most one open row in a partition, and no other row with the same event time; but rows that a reset closed are
    apart, and so are the eras before and after it. A row is open as long as its event time is not before clock - timeout, and no
    longer. A finished row is valid exactly where predicate and size say so.
    """
    evidence, p = partition.evidence, partition.number
    timeout_ms = evidence.settings.merge.timeout_ms
    rows: Counter[tuple[Any, ...]] = Counter()
    for row in partition.rows:
        key, status, time, *_ = row.outcome
        number = evidence.era_of(row.batch)
        era, clock = evidence.eras[number], evidence.eras[number].clocks.get(p)
        if status == "open":
            rows["open rows for one key", key, None, None] += 1
        if status != "reset":
            rows["rows with the same partition, key and event time", key, time, status != "open" and number] += 1
        is_past = clock is not None and time < clock - timeout_ms
        if (status == "open" and (is_past or era.ended_at is not None)) or (status == "timed_out" and not is_past):
            what = f"the row is {status.replace('_', ' ')} although the clock is {clock} and the timeout {timeout_ms} ms"
            findings.add(what, place(p, key, time))
        right = judge.right(row)
        if (row.valid, row.invalid_reason) not in right:
            allowed = " or ".join(f"{valid} ({reason})" for valid, reason in right)
            findings.add(f"valid is {row.valid} ({row.invalid_reason}), and must be {allowed}", place(p, key, time))
    for (what, key, time, _), n in rows.items():
        if n > 1:
            findings.add(f"{n} {what}", place(p, key, time))


# -- check 4


def check_clock(partition: Partition, findings: Findings) -> None:
    """The clock is the smallest head that the last batch considered, and bronze gets as far as each head; every record whose
    position the clock has reached is passed, and no other.
    """
    evidence, p = partition.evidence, partition.number
    for i, era in enumerate(evidence.eras):
        clock, heads = era.clocks.get(p), [era.heads.get(tp) for tp in partition.logs]
        smallest = None if None in heads else min(head for head in heads if head is not None)
        if clock != smallest:
            findings.add(f"the clock is {clock}, and the smallest head {smallest}", f"progress: partition {p}")
        for (tp, log), head in zip(partition.logs.items(), heads, strict=True):
            read, limit = log.reads[i], -1 if clock is None else clock
            known = max(read.position[-1:].tolist(), default=None)
            # What an earlier era considered beyond its end is not looked at again.
            if era.ended_at is None and head is not None and (known is None or head > known):
                where = f"progress: {evidence.settings.sources[tp.source].topic}[{p}]"
                findings.add(f"the head is {head}, and bronze gets to {known}", where)
            # At the clock's own position there may be records that the last batch did not consider yet.
            is_reached = read.position < limit + (head != clock)
            wrong = {"passed": read.is_passed & (read.position > limit), "not passed": read.is_left & is_reached}
            for state, rows in wrong.items():
                for j in np.flatnonzero(rows)[:1]:
                    what = f"{state}, with the clock at {clock}, although the position is {read.position[j]}"
                    findings.add(what, evidence.at(tp, read.offset[j]))


def check_versions(evidence: Evidence, findings: Findings) -> None:
    """The version of silver that `progress` names for a batch is the commit of that batch, for the last `KNOWN_VERSIONS`."""
    if evidence.version is None:
        return
    commits = {v.number: Commit.parse(v.metadata) for v in evidence.questions.history(tables.SILVER, KNOWN_VERSIONS)}
    where = [[("silver_version", ">=", min(commits)), ("batch", "<=", evidence.last_batch)]]
    noted = evidence.questions.summary(tables.PROGRESS, ["batch", "silver_version"], {"rows": ("count", "*")}, where)
    for batch, version in sorted(zip(noted["batch"].to_pylist(), noted["silver_version"].to_pylist(), strict=True)):
        commit = commits.get(version)
        if commit is None or commit.is_fence or commit.facts.get("batch") != batch:
            fix = "let progress.silver_version name the version that silver's history has for the batch"
            findings.add(f"version {version} of silver is not the commit of this batch", f"progress: batch {batch}", fix)


# -- check 5


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
    for source, log in logs.items():
        for waiting, (offsets, positions, is_passed, _) in zip(arrived, log.reads, strict=True):
            for offset, position in zip(offsets[is_passed].tolist(), positions[is_passed].tolist(), strict=True):
                if offset in log.sampled:
                    key, time, *_ = log.sampled[offset]
                    waiting[source].append((position, Record(source, offset, time, key)))
    rules, found = MergeRules(tuple(settings.sources), settings.merge.timeout_ms), []
    for row in outcomes(rules, eras, partition.number, arrived, partition.recovered):
        value = 2 if row.status == "late" else 3
        found.append(row._replace(parts=tuple((*part, logs[part[0]].sampled[part[1]][value]) for part in row.parts)))
    return found


def outcomes(
    rules: MergeRules, eras: Sequence[Era], partition: int, arrived: Arrived, recovered: Iterable[tuple[int, str, int]]
) -> list[Outcome]:
    """The model's answer. `recovered`: the era that a message begins with, its key and event time. A reset closes what is open;
    what comes again after a jump back leaves its merge record, of which the rest is closed.
    """
    found: list[Outcome] = []
    for i, era in enumerate(eras):
        messages: dict[str, list[int]] = defaultdict(list)
        for since, key, time in recovered:
            if since <= i:
                messages[key].append(time)
        model = PartitionMerge(rules, recovered=messages)
        if partition in era.clocks:
            model.heads = dict.fromkeys(rules.sources, era.clocks[partition])
            model.waiting = {source: deque(mine) for source, mine in arrived[i].items()}
            model.advance()
        alone = [("late", late.record, late.position) for late in model.late]
        alone += [(PUBLISHED, record, record.event_time) for record in model.already_published]
        for status, r, last in alone:
            found.append(Outcome(r.key or "", status, r.event_time, last, ((r.source, r.offset, r.event_time),)))
        merged = [("timed_out", row) for row in model.timed_out]
        merged += [("open" if era.ended_at is None else "reset", row) for row in model.open.values()]
        for status, row in merged:
            parts = tuple((s, part.offset, part.event_time) for s, mine in row.parts.items() for part in sorted(mine))
            found.append(Outcome(row.key, status, row.event_time, row.last_event_time, parts))
        if era.ended_at is not None:
            begin = {tp.source: offset for tp, offset in eras[i + 1].begin.items() if tp.partition == partition}
            again = {s: since for s, since in begin.items() if since < era.until[TopicPartition(s, partition)]}
            found = [left for row in found if (left := _without(row, again)) is not None]
    return found


def _without(row: Outcome, again: Mapping[str, int]) -> Outcome | None:
    """What a jump back leaves of an outcome; `again`: by source the offset from which its records come again."""
    left = tuple(part for part in row.parts if part[0] not in again or part[1] < again[part[0]])
    if left == row.parts:
        return row
    times = [time for _, _, time in left]
    return Outcome(row.key, "reset", min(times), max(times), left) if left else None
