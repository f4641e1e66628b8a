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

With `--full`, the files themselves are compared with their checksums before.

Where rows have been deleted (`keep`), what came before the saved state with which history begins is
not judged.

A running lake disturbs nothing. The ends of Kafka's topics are taken first, then versions of all
tables that belong together (`lake.snapshot`), and only what these have merged is judged. Only
`forget` takes several commits to reach a new
state: what it has begun to erase is not judged, and while it is at work, everything is looked at
again, `LOOKS` times at most.

What needs no model (2, 3, batches, and which of them a row is of) is asked of the tables
(`verify_rows`). All else is read in pieces: the batches of some partitions that fit into memory.
With each piece, bronze is read on (`verify_bronze`), the merge model goes on (`verify_model`), its
rows are compared with those of silver (`verify_silver`), and these with their messages
(`verify_topics`). Only dead letters are read by themselves (`verify_dead_letters`).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit.evidence import (
    Evidence,
    here,
    read_end,
    read_evidence,
    read_last_batch,
)
from watersmeet.audit.partitioning import KeyPartitions
from watersmeet.audit.problems import Findings, Report, answer
from watersmeet.audit.verify_bronze import (
    NO_BOUNDS,
    Bounds,
    by_partition,
    check_keys,
    check_offsets,
    check_places,
    extend_beyond,
    read_logs,
)
from watersmeet.audit.verify_dead_letters import check_dead_letters
from watersmeet.audit.verify_rows import RowChecks
from watersmeet.audit.verify_silver import (
    PartitionCheck,
    compared_columns,
    read_base,
)
from watersmeet.audit.verify_topics import KINDS, Topic, read_topics
from watersmeet.core.plan import TopicPartition
from watersmeet.errors import ConfigurationError, WatersmeetError
from watersmeet.kafka.cluster import TIMEOUT_S, Cluster, co_partitioned, topics_of
from watersmeet.lake import tables
from watersmeet.lake.history import Generation, History, read_history
from watersmeet.lake.identity import check_identity, kept_facts
from watersmeet.lake.lease import SILENCE_S, change_under_way, is_dead
from watersmeet.lake.location import Lake
from watersmeet.lake.log_files import LAST_VACUUM, LOG, damaged_file, is_intact
from watersmeet.lake.restored import deleted_tables
from watersmeet.lake.snapshot import Snapshot
from watersmeet.lake.state import check_bases
from watersmeet.lake.table_reader import Condition, TableReader, VersionGoneError
from watersmeet.lake.torn import moved_aside
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

_NEW_OBJECTS: Final = 300_000
"""Number of objects that Python makes before it looks for garbage among them."""

UNREADABLE: Final = "nothing else was judged: what damaged files say means nothing"

UNJUDGED: Final = "nothing else was judged: without its saved states a lake cannot be derived again"


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
    source's topic is gone or has more partitions, or there is no such generation. Raises
    WatersmeetError where versions of tables are removed during each look.
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
    """The topics that exist, as they were before the tables were read: bounds of those of sources,
    and those that gold writes.
    """

    bounds: Bounds
    written: Sequence[Topic]


def _read_topics(reader: TableReader, settings: Settings, timeout_s: float) -> tuple[_Topics, int]:
    cluster = Cluster(settings.kafka, timeout_s)
    counts = cluster.partition_counts(topics_of(settings))
    partitions = co_partitioned(settings, counts)
    written = read_topics(reader, settings, partitions, counts)
    bounds = {i: cluster.bounds(i.topic, partitions) for i in settings.inputs}
    return _Topics(bounds, written), partitions


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Let Python look for garbage rarely: the merge model makes millions of tuples, and no cycles,
    and looking at them took a quarter of the time.
    """
    before = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@_rarely_collected()
def _check_once(
    reader: TableReader,
    settings: Settings,
    timeout_s: float,
    generation: int | None,
    *,
    is_full: bool,
) -> tuple[dict[str, Any], Snapshot]:
    settings = read_history(reader, settings).epochs.current.settings
    if is_full and (damaged := damaged_files(reader, settings)).problems:
        return answer([damaged], [UNREADABLE]), Snapshot(reader, settings)
    topics, partitions = _read_topics(reader, settings, timeout_s)
    snapshot = Snapshot(reader, settings)
    if generation is None and not has_lake(snapshot, settings):
        note = f"there is no lake at {Lake(settings).location}: nothing was checked"
        return answer([_orphaned(topics)], [note]), snapshot
    lasting = [n for n, table in tables.layout(settings).items() if not table.is_replaceable]
    if has_lake(snapshot, settings) and not all(map(snapshot.exists, lasting)):
        missing = _missing_tables(snapshot, settings)
        return answer([missing if missing.problems else _orphaned(topics)]), snapshot
    check_identity(kept_facts(snapshot), {"partitions": str(partitions)})
    history = read_history(snapshot, settings)
    every = [entry.number for entry in history.generations]
    is_every = is_full and generation is None and bool(every)
    requested: Sequence[int | None] = every if is_every else [generation]
    if (lost := lost_bases(snapshot, history)).problems:
        return answer([lost], [UNJUDGED]), snapshot
    findings = list[Findings]()
    notes = list[str]()
    first_base = history.first_base
    if is_every and first_base is not None and first_base.generation > every[0]:
        requested = [number for number in every if number >= first_base.generation]
        notes.append(
            f"generations before {first_base.generation} are not judged: `keep` has deleted rows "
            "of them"
        )
    if first_base is not None:
        notes.append(
            f"what was final by batch {first_base.batch} is not judged: `keep` has deleted rows "
            "of it"
        )
    if aside := moved_aside(Lake(settings)):
        notes.append(
            "a power cut had left what nothing relied on, which was made again; a start has moved "
            f"it aside, and it may be deleted: {', '.join(aside)}"
        )
    for number in requested:
        evidence = read_evidence(snapshot, settings, partitions, number, full=is_full)
        report = Report()
        own_notes = _check_generation(evidence, topics, report)
        own_findings = list(report.values())
        if len(evidence.generations) > 1:
            label = f"generation {evidence.generation.number}"
            own_findings = [check.of(label) for check in own_findings]
        findings += own_findings
        notes += [note for note in own_notes if note not in notes]
    return answer(findings, notes), snapshot


def damaged_files(reader: TableReader, settings: Settings) -> Findings:
    """Find data files of the tables as they are now, and files of their logs, that do not have the
    content that was written.
    """
    findings = Findings("files")
    lake = Lake(settings)
    if lake.folder is None:
        return findings
    for table in lake.layout:
        folder = lake.folder / table
        for checksum in sorted(folder.rglob(".*.crc")):
            file = checksum.with_name(checksum.name.removeprefix(".").removesuffix(".crc"))
            # Nothing relies on the note of a vacuum, so that a power cut may tear it.
            if file.name == LAST_VACUUM or not file.exists() or is_intact(file):
                continue
            is_of_log = file.suffix != ".parquet" or LOG in file.parts
            # Spark may be about to write what no commit names yet.
            if is_of_log or reader.has_data_file(table, file.name):
                problem = damaged_file(table, str(file.relative_to(folder))).problem
                findings.add(problem.what, table, problem.fix)
    return findings


def has_lake(reader: TableReader, settings: Settings) -> bool:
    """Return True where there is any table of the lake."""
    return any(map(reader.exists, tables.layout(settings)))


def _orphaned(topics: _Topics) -> Findings:
    findings = Findings("tables")
    for each in topics.written:
        if each.table in KINDS and any(first < end for first, end in each.bounds.values()):
            findings.add(
                "it has messages, and there is no lake that has published them",
                each.name,
                "correct `lake`, or begin a new lake with `kafka.start: sink`, which takes them up",
            )
    return findings


def lost_bases(reader: TableReader, history: History) -> Findings:
    """Find a saved state whose rows are gone, without which the lake cannot be derived again."""
    findings = Findings("tables")
    try:
        check_bases(reader, history.bases)
    except ConfigurationError as error:
        findings.add(error.problem.what, tables.BASES, error.problem.fix)
    return findings


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


def _check_generation(evidence: Evidence, topics: _Topics, report: Report) -> list[str]:
    """Check a generation, with the newest one also what belongs to the whole lake, and return what
    a reader should know.
    """
    settings = evidence.settings
    is_newest = evidence.following is None
    if is_newest:
        check_places(evidence, report["places"])
    key_partitions = KeyPartitions()
    written = topics.written if is_newest else ()
    sequences = [topic for topic in written if topic.table in KINDS]
    check_tables(evidence, report, sequences, topics.bounds, key_partitions)
    for topic, p in product(written, range(evidence.partitions)):
        if topic.table not in KINDS:
            check_dead_letters(evidence, p, topic, report[f"dead letters of {topic.table}"])
    notes = list[str]()
    if not settings.repartitioned and (split_keys := key_partitions.note()) is not None:
        notes.append(split_keys)
    if evidence.is_closing:
        number = evidence.generation.number
        notes.append(
            f"a jump has ended generation {number}, and its records that are not out are not "
            "closed yet; the next start closes them, and they are judged as if it had"
        )
    return notes


def check_tables(
    evidence: Evidence,
    report: Report,
    sequences: Sequence[Topic] = (),
    bounds: Bounds = NO_BOUNDS,
    key_partitions: KeyPartitions | None = None,
) -> None:
    """Check a generation's rows of all tables, and the messages that they have in some topics.

    - `bounds`: the offsets that Kafka has; without, nothing that bronze lacks is missed.
    - `key_partitions`: takes note of sampled keys.
    """
    rows = RowChecks(evidence, report)
    rows.check()
    is_closed = evidence.generation.number <= evidence.history.closed
    if sequences and is_closed and len(evidence.generations) > 1:
        rows.check_messages()
    for partitions in evidence.groups():
        group = _Group(evidence, report, partitions, bounds, key_partitions)
        group.run(sequences, rows.erasing)


@dataclass
class _Group:
    """Check of some partitions at a time; its fields are arguments of `check_tables`."""

    evidence: Evidence
    report: Report
    partitions: range
    bounds: Bounds
    key_partitions: KeyPartitions | None

    def run(self, sequences: Sequence[Topic], erasing: Set[tuple[int, str, str]]) -> None:
        evidence = self.evidence
        self.logs = read_logs(evidence, self.partitions)
        late: list[Condition] = [("status", "=", "late"), ("u", "is not null", None)]
        late.append(("batch", ">", evidence.history_batch))
        self.checks = {
            p: PartitionCheck(
                evidence,
                p,
                {tp.input: log for tp, log in self.logs.items() if tp.partition == p},
                read_base(evidence, p, rows),
                erasing,
                sequences,
                self.report,
            )
            for p, rows in self._by_partition(_read(evidence, self.partitions, late))
        }
        if sequences and evidence.following is None:
            for generation in evidence.generations[:-1]:
                self._check_earlier(generation)
        for batches in evidence.pieces(self.partitions):
            end = read_end(evidence.reader, batches[-1])
            self._read_bronze({tp: end.until.get(tp, 0) for tp in self.logs})
            for p, own in self._by_partition(_finished(evidence, self.partitions, batches)):
                self.checks[p].check_batches(batches, end, own)
        for log in self.logs.values():
            log.is_over = True
        self._read_bronze({tp: log.end for tp, log in self.logs.items()})
        for p, own in self._by_partition(_unfinished(evidence, self.partitions)):
            self.checks[p].finish(own)

    def _by_partition(self, rows: pa.Table) -> Iterable[tuple[int, pa.Table]]:
        return by_partition(rows, self.partitions).items()

    def _check_earlier(self, generation: Generation) -> None:
        evidence = self.evidence
        last = read_last_batch(evidence.reader, evidence.generations, generation)
        earlier = replace(evidence, generation=generation, last_batch=last)
        for batches in earlier.pieces(self.partitions):
            clocks = read_end(evidence.reader, batches[-1]).clocks
            rows = _finished(earlier, self.partitions, batches)
            rows = rows.filter(pc.or_kleene(rows["valid"], rows["has_message"]).fill_null(False))
            for p, own in self._by_partition(rows):
                messages = self.checks[p].messages
                messages.check(own, clocks.get(p), generation, is_judged=False)

    def _read_bronze(self, until: Mapping[TopicPartition, int]) -> None:
        for tp, begin, records in extend_beyond(self.evidence, self.logs, until):
            self.checks[tp.partition].take(tp.input, records)
            log, bronze = self.logs[tp], self.report["bronze"]
            check_offsets(self.evidence, log, begin, records, self.bounds, bronze)
            if self.key_partitions is not None:
                self.key_partitions.add(tp, records.keys)
                check_keys(self.evidence, tp, records.keys, self.report["keys"])


_CLOSED: Final[Sequence[Condition]] = [
    ("status", "=", "timed_out"),
    ("invalid_reason", "=", "reset"),
    ("closed_at", "is null", None),
]
"""The condition for rows that a jump has closed while they could still change."""


def _finished(evidence: Evidence, partitions: range, batches: range) -> pa.Table:
    between = [("batch", ">=", batches.start), ("batch", "<", batches.stop)]
    rows = _read(evidence, partitions, [("status", "in", tables.FINISHED), *between])
    is_closed = pc.and_(pc.equal(rows["invalid_reason"], "reset"), rows["closed_at"].is_null())
    return rows.filter(pc.invert(is_closed.fill_null(False)))


def _unfinished(evidence: Evidence, partitions: range) -> pa.Table:
    """Return rows that may still change, and those that a jump has closed before that."""
    own = evidence.batches
    return _read(evidence, partitions, [tables.IS_UNFINISHED, *own], [*_CLOSED, *own])


def _read(evidence: Evidence, partitions: range, *terms: Sequence[Condition]) -> pa.Table:
    columns = ["batch", *compared_columns(evidence), *tables.JUDGED]
    where = [[*here(partitions), *term] for term in terms]
    return evidence.reader.select(tables.SILVER, columns, where)
