"""Check of the data's promises, derived again from the tables, Kafka and the sink.

It reads only, and starts no JVM.

One generation is checked, by default the newest, as if there were no other; with `--full` all of
them, one after the other. What is not of one generation alone (the sink, dead letters, what belongs
to no partition) is checked with the newest.

The checks are numbered as in the contract:

1. *bronze* has every offset once, and lacks none that Kafka has; no table has rows of another topic
   or partition; where sources are repartitioned, keys (a sample, or all) are where they belong, and
   elsewhere a note says whether some are in two partitions;
2. every record that the merge has passed has exactly one trace in silver: it is in a merge record,
   or has a row of its own;
3. no key of a tenant has two open rows, and no two rows share partition, tenant, key and event
   time;
4. what should have timed out has, nothing else has, nothing waits for long, no batch is missing,
   and how far each came, and its clocks, are what bronze says;
5. silver is what the merge model makes of bronze, for a sample of keys or for all, and corrections
   what their model makes of it; rows are valid where they should be;
6. the *sink* holds silver's finished records in order, and nothing else, and the topic of
   corrections those;
7. topics of *dead letters* have each late or refused record once, as it came, in order of offset.

Where rows have been deleted (`keep`), what came before a partition's history begins is not judged
(`lake.retention_bounds`). The merge records that were open then are taken from silver.

A running lake disturbs nothing. The ends of Kafka's topics are taken first, then versions of all
tables that belong together (`lake.snapshot`), and only what these have merged is judged. Only
`forget` takes several commits to reach a new
state: what it has begun to erase is not judged, and while it is at work, everything is looked at
again, `LOOKS` times at most.

For each partition the order is: read its rows of all tables (`verify_evidence`), derive from bronze
by the merge model what they should be (`verify_model`), compare tables and topics with that
(`verify_tables`, `verify_corrections`, `verify_sequence`, `verify_dead_letters`), and report.

A group of partitions is in memory at a time. Of `progress` the last `KNOWN_BATCHES` are read, with
`--full` all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from watersmeet.audit.evidence import Evidence, read_evidence
from watersmeet.audit.partitioning import KeyPartitions
from watersmeet.audit.problems import Findings, answer
from watersmeet.audit.verify_corrections import check_corrections
from watersmeet.audit.verify_dead_letters import (
    DeadLetterTopic,
    check_dead_letters,
    read_dead_letter_topics,
)
from watersmeet.audit.verify_evidence import Partition, read_partitions
from watersmeet.audit.verify_model import expected
from watersmeet.audit.verify_sequence import (
    CORRECTIONS,
    SINK,
    TopicEnds,
    check_sequence,
    read_ends,
)
from watersmeet.audit.verify_tables import (
    Bounds,
    check_batches,
    check_clock,
    check_key_partitions,
    check_model,
    check_offsets,
    check_outcomes,
    check_places,
    check_rows,
    without_erased,
)
from watersmeet.audit.verify_validity import Validator
from watersmeet.errors import WatersmeetError
from watersmeet.kafka.cluster import TIMEOUT_S, Cluster, co_partitioned, topics_of
from watersmeet.lake import tables
from watersmeet.lake.epochs import read_epochs
from watersmeet.lake.generations import read_generations
from watersmeet.lake.lease import SILENCE_S, change_under_way, is_dead
from watersmeet.lake.location import Lake
from watersmeet.lake.restored import deleted_tables
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.table_reader import TableReader, VersionGoneError
from watersmeet.settings import Settings

LOOKS: Final = 10
"""Maximum number of looks at a lake that does not stand still: whose tables never stand still
together, of which a version is removed meanwhile, or which a command is changing.
"""

WAIT_S: Final = 0.25
"""Seconds between two looks at a command that has begun to change the lake."""

MOVING: Final = (
    "the lake was changed during each look at it, so that problems may be of a state in between; "
    "verify again once `forget`, `evolve` or `keep` has ended"
)


def verify(
    reader: TableReader,
    settings: Settings,
    *,
    full: bool = False,
    generation: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, Any]:
    """Return the answer of `verify --json`; of each check at most `SHOWN` problems, and how many
    more there are.

    - `full`: look at every key, batch and version, not at a sample, and at every generation unless
      one is named.

    A lake that does not stand still is looked at `LOOKS` times at most; then `notes` says so.

    Raises KafkaTransientError and the other errors of Kafka, and ConfigurationError where a
    source's topic is gone or there is no such generation. Raises WatersmeetError where versions of
    tables are removed during each look.
    """
    for looks in range(1, LOOKS + 1):
        try:
            result, snapshot = _check_once(reader, settings, timeout_s, generation, is_full=full)
        except VersionGoneError as error:
            if looks == LOOKS:
                raise WatersmeetError(
                    f"versions of its tables were removed during each of {LOOKS} looks at them",
                    where=Lake(settings).location,
                    fix="let `retention` be longer than `verify` takes, and verify again",
                ) from error
            continue
        if result["ok"] or not _is_changing(snapshot):
            return result
    return {**result, "notes": [*result.get("notes", ()), MOVING]}


def _is_changing(snapshot: Snapshot) -> bool:
    """Return True where the findings may be of a state in between, so that another look finds
    others.

    While a command is changing the lake, wait for it, up to `SILENCE_S`.
    """
    if not snapshot.is_exact:
        return snapshot.is_past
    deadline = time.monotonic() + SILENCE_S
    while (change := change_under_way(snapshot)) is not None:
        if snapshot.is_past:
            return True
        if is_dead(change) or time.monotonic() > deadline:
            break
        time.sleep(WAIT_S)
    return False


class _Topics(NamedTuple):
    """The topics that exist, as they were before the tables were read."""

    bounds: Bounds
    sequences: Sequence[TopicEnds]
    dead_letters: Sequence[DeadLetterTopic]

    @property
    def sources_alone(self) -> _Topics:
        """The topics without those that are not of one generation alone."""
        return self._replace(sequences=(), dead_letters=())


def _read_topics(reader: TableReader, settings: Settings, timeout_s: float) -> tuple[_Topics, int]:
    """Return the topics as they are now, and the number of their partitions."""
    cluster = Cluster(settings.kafka, timeout_s)
    counts = cluster.partition_counts(topics_of(settings))
    partitions = co_partitioned(settings, counts)
    publish = settings.publish
    sequences = [
        read_ends(reader, settings, kind, topic, partitions)
        for kind, topic in ((SINK, publish.topic), (CORRECTIONS, publish.corrections_topic))
        if topic is not None and topic in counts
    ]
    dead_letters = read_dead_letter_topics(reader, settings, partitions, counts)
    bounds = {i: cluster.bounds(i.topic, partitions) for i in settings.inputs}
    return _Topics(bounds, sequences, dead_letters), partitions


def _check_once(
    reader: TableReader,
    settings: Settings,
    timeout_s: float,
    generation: int | None,
    *,
    is_full: bool,
) -> tuple[dict[str, Any], Snapshot]:
    """Return the answer for one moment, and that moment."""
    settings = read_epochs(reader, settings).current.settings
    topics, partitions = _read_topics(reader, settings, timeout_s)
    snapshot = Snapshot(reader, settings)
    every = [entry.number for entry in read_generations(snapshot, settings)]
    is_every = is_full and generation is None and bool(every)
    requested: Sequence[int | None] = every if is_every else [generation]
    findings = [_missing_tables(snapshot, settings)]
    notes = list[str]()
    if not any(map(snapshot.exists, tables.layout(settings))):
        notes.append(f"there is no lake at {Lake(settings).location}")
    for number in requested:
        evidence = read_evidence(snapshot, settings, partitions, number, full=is_full)
        own_findings, own_notes = _check_generation(
            evidence, topics if evidence.following is None else topics.sources_alone
        )
        if len(evidence.generations) > 1:
            label = f"generation {evidence.generation.number}"
            own_findings = [check.of(label) for check in own_findings]
        findings += own_findings
        notes += [note for note in own_notes if note not in notes]
    return answer(findings, notes), snapshot


def _missing_tables(snapshot: Snapshot, settings: Settings) -> Findings:
    """Find tables without which most of a lake with rows would be judged as not there yet."""
    findings = Findings("tables")
    for name in deleted_tables(snapshot, settings):
        findings.add(
            "the table does not exist, and without it the rows of this lake cannot be judged",
            name,
            "bring it back from a copy of the lake, or begin a new lake with `kafka.start: sink`",
        )
    return findings


def _check_generation(evidence: Evidence, topics: _Topics) -> tuple[list[Findings], list[str]]:
    """Return what is found in a generation, and what a reader should know.

    With the newest one, that includes what belongs to the whole lake.
    """
    settings = evidence.settings
    validator = Validator(evidence.epochs)
    key_partitions = KeyPartitions()
    names = ["places", "keys", "bronze", "forgotten keys", "outcomes", "rows of silver", "batches"]
    names += ["the merge model", "corrections"]
    names += [ends.kind.topic for ends in topics.sequences]
    names += [f"dead letters of {topic.table}" for topic in topics.dead_letters]
    findings = {name: Findings(name) for name in names}
    if evidence.following is None:
        check_places(evidence, findings["places"])
    check_batches(evidence, findings["batches"])
    for partition in read_partitions(evidence, validator.evaluated):
        check_offsets(partition, topics.bounds, findings["bronze"])
        check_key_partitions(partition, key_partitions, findings["keys"])
        check_partition(partition, validator, findings)
        for ends in topics.sequences:
            check_sequence(partition, ends, findings[ends.kind.topic])
        for topic in topics.dead_letters:
            check_dead_letters(partition, topic, findings[f"dead letters of {topic.table}"])
    notes = list[str]()
    if not settings.repartitioned and (split_keys := key_partitions.note()) is not None:
        notes.append(split_keys)
    if evidence.is_closing:
        number = evidence.generation.number
        notes.append(
            f"a jump has ended generation {number}, and its records that are not out are not "
            "closed yet; the next start closes them, and they are judged as if it had"
        )
    return list(findings.values()), notes


def check_partition(
    partition: Partition, validator: Validator, findings: Mapping[str, Findings]
) -> None:
    """Derive what the tables should have of a partition, and compare: checks 2 to 5, which need no
    Kafka.
    """
    partition, erasing = without_erased(partition.validated, findings["forgotten keys"])
    model = expected(partition)
    check_outcomes(partition, erasing, findings["outcomes"])
    check_rows(partition, model.clocks, validator, findings["rows of silver"])
    check_clock(partition, findings["batches"])
    check_model(partition, model.outcomes, erasing.keys, findings["the merge model"])
    check_corrections(
        partition, model.corrections, erasing.keys, validator, findings["corrections"]
    )
