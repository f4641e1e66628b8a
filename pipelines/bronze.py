"""Bronze: what Kafka said, every record once, raw, with its coordinates and what the merge needs to plan.

One stream per input (`core.inputs`), whose records arrive read (`core.reading.read_records`). Where it begins, the tables say. A
batch of which too large a share would be refused is not written at all. Any other is made in these steps:

1. *commit*: its rows to `bronze_<source>`, in one Delta commit;
2. *note*: the refused ones among them, read back from bronze, to `quarantine`.

After a crash before 1 the records are read from Kafka again. After one between 1 and 2, a start finds in bronze's last commit
which offsets it was, and completes the note; that carries the transaction version of the commit, so it is written once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.configuration.sources import RegistrySettings
from pipelines.core.avro_schema import UNKNOWN
from pipelines.core.columns import Int64s, int64s
from pipelines.core.inputs import source_of
from pipelines.core.plan import TopicPartition
from pipelines.core.reading import WRITER_SCHEMA
from pipelines.engine import Engine, KafkaInput, Rows, Running
from pipelines.errors import QuarantineLimitError, unknown_schema_of
from pipelines.faults import reach
from pipelines.kafka.registry import Registry, rules_of
from pipelines.lake import tables
from pipelines.lake.commits import (
    Commit,
    application_of,
    bronze_application,
    last_decision,
    ranges_fact,
    ranges_of,
    unnoted_commit,
)
from pipelines.lake.erased import read_erased, without_erased
from pipelines.lake.maintenance import Maintenance
from pipelines.lake.questions import Where, within
from pipelines.lake.schemas import given_up_schemas, known_schemas, unknown_schemas
from pipelines.monitoring.events import Counts, Handled, Reached
from pipelines.monitoring.observability import Reporter
from pipelines.running.owner import Owner, now_ms
from pipelines.settings import Settings

QUARANTINE_SAMPLE = 1000
"""The share of refused records is looked at once so many were read: of a few, half may well be bad."""


def kafka_input(settings: Settings, source: str, offsets: Mapping[int, int], given_up: Collection[int] = ()) -> KafkaInput:
    """What is read of an input: from these offsets on, by partition. `given_up`: schemas that are not waited for any longer."""
    kafka, rules = settings.kafka, rules_of(settings, source_of(source), given_up)
    return KafkaInput(source, kafka, settings.inputs[source], dict(offsets), kafka.max_offsets_per_batch, rules)


@dataclass
class Bronze:
    """The bronze table of one source, or of one of its topics the part (`source` is the input); one owner at a time."""

    owner: Owner
    settings: Settings
    source: str
    reporter: Reporter = field(default_factory=Reporter)
    maintenance: Maintenance | None = None
    _unjudged: tuple[int, int] = (0, 0)
    _is_unsure: bool = False
    """Whether the last batch failed, so that only the table knows whether its commit was made, and its note."""
    _kept_schemas: set[int] = field(default_factory=set)
    """The ids of schemas that `writer_schemas` surely has."""
    _running: Running | None = None
    _given_up: set[int] = field(default_factory=set)
    """The ids of schemas that are not waited for any longer."""
    _erased: Mapping[int, Int64s] = field(default_factory=dict)
    _waiting_since: int | None = None
    """Since when the source has stood still for schemas that the registry does not have (epoch ms)."""

    @property
    def table(self) -> str:
        """The name of the table, or the part."""
        return tables.bronze(self.source)

    @property
    def application(self) -> str:
        """The application of its commits to the table."""
        return application_of(self.source)

    def start(self, offsets: Mapping[int, int], guard: Callable[[Callable[[], None]], None], *, once: bool) -> Running:
        """The running stream: from the offsets given for each partition to what Kafka has now (`once`), or on and on.

        `guard` calls the work of a batch, or does not.
        """
        self.complete()
        self._tell_reached(offsets)
        self._note_unknown_schema(None if self._running is None else self._running.failure)
        self._erased = read_erased(self._engine.questions, self.source, offsets)
        source = kafka_input(self.settings, self.source, offsets, self._given_up)
        self._running = self._engine.follow_kafka(source, lambda rows: guard(lambda: self._take(rows)), once=once)
        return self._running

    def has_given_up(self, failure: Exception) -> bool:
        """Whether what was missing is a schema that is no longer waited for: reading that begins anew does without."""
        return unknown_schema_of(failure) in self._given_up

    def _note_unknown_schema(self, failure: Exception | None) -> None:
        """Notes in `writer_schemas` which schema the registry did not have where that was the failure, and since when; and gives
        it up once a source has stood still for `registry.unknown_after`. What the lake says was given up stays so.
        """
        registry = self._registry
        if registry is None:
            return
        after_ms = registry.unknown_after_ms
        if after_ms is not None:
            self._given_up |= given_up_schemas(self._engine.questions, source_of(self.source))
        schema_id = None if failure is None else unknown_schema_of(failure)
        if schema_id is None or schema_id in self._given_up:
            return
        now, since = now_ms(), unknown_schemas(self._engine.questions, source_of(self.source)).get(schema_id)
        if since is None:
            since = now
            self._note_schemas({schema_id: None})
        self._waiting_since = min(since, self._waiting_since or since)
        if after_ms is not None and now - self._waiting_since >= after_ms:
            self._given_up.add(schema_id)
            self._note_schemas({schema_id: UNKNOWN})

    def _note_schemas(self, texts: Mapping[int, str | None]) -> None:
        """Notes schemas by their ids; None: the source waits for it, `UNKNOWN`: no longer."""
        rows = [(source_of(self.source), schema_id, text, now_ms()) for schema_id, text in texts.items()]
        self._engine.append(tables.WRITER_SCHEMAS, self._engine.lake.layout[tables.WRITER_SCHEMAS].rows(rows))

    def _take(self, rows: Rows) -> None:
        try:
            self._take_batch(rows)
        except Exception as failure:  # an engine may read a batch as late as this
            self._note_unknown_schema(failure)
            raise

    def _take_batch(self, rows: Rows) -> None:
        if self._is_unsure:
            self.complete()  # of what was read again, Kafka may have lost the refused records
        with self._engine.held(self.without_erased(rows, self._erased)) as kept:
            with self.owner.step("bronze", "read"):
                found = self.counted(kept)
            records, refused = _counts(found)
            if not records:
                return
            self._check_share(found, records, refused)
            reach("bronze.append")
            with self.owner.step("bronze", "append"):
                commit = self.append(kept, found)
        with self.owner.step("bronze", "note"):
            self.note(commit)
        reach("bronze.done")
        self._tell_reached({p: until for p, (_, until) in ranges_of(commit.facts["ranges"]).items()})
        self.owner.tell(Handled("bronze", {self.settings.inputs[self.source]: _outcomes(found)}))
        self.reporter.tell(self.table, f"{records} records, {refused} refused", records=records, refused=refused)
        if self.maintenance is not None:
            self.maintenance.after_commit()
        self._is_unsure, self._waiting_since = False, None

    def without_erased(self, rows: Rows, erased: Mapping[int, Int64s]) -> Rows:
        """Rows that were read from Kafka, without what `forget` has erased of them, at these offsets by partition."""
        if not erased:
            return rows
        return self._engine.per_partition(partial(without_erased, erased=erased), [rows], self._engine.lake.schema(self.table))

    def counted(self, rows: Rows) -> pa.Table:
        """By partition, reason and whether they are heartbeats (with a registry by `writer_schema`, too): how many `records`
        there are, how many of them are `timed`, the `first` and the `last` offset.
        """
        values = {
            "records": ("count", "*"),
            "timed": ("count", "event_time"),
            "first": ("min", "offset"),
            "last": ("max", "offset"),
        }
        registered = [WRITER_SCHEMA.name] if self._registry is not None else []
        return self._engine.summary(rows, ["partition", "reason", "heartbeat", *registered], values)

    def append(self, rows: Rows, found: pa.Table, *, fills: bool = False) -> Commit:
        """Step 1. `found`: the rows as `counted`. `fills`: the rows lie between others that are there already.

        After a failure only the table knows whether the commit was made, and what is read again may lack records:
        Kafka has compacted or deleted them meanwhile. Every offset below the end of the last commit is in bronze,
        so of rows that are tried again only those beyond are written. Answers what the table has: where it has all
        of them, its last commit.
        """
        ranges = _ranges(found)
        if self._is_unsure:
            last = last_decision(self._engine.questions, self.table, self.application)
            ends = {} if last is None else {p: until for p, (_, until) in ranges_of(last[1].facts["ranges"]).items()}
            if last is not None and all(until <= ends.get(p, 0) for p, (_, until) in ranges.items()):
                return last[1]
            if any(since < ends.get(p, 0) for p, (since, _) in ranges.items()):
                schema = self._engine.lake.schema(self.table)
                rows = self._engine.per_partition(partial(_beyond, ends=ends), [rows], schema)
                found = self.counted(rows)
                ranges = _ranges(found)
        if self._registry is not None:
            self._keep_schemas(self._registry, set(found[WRITER_SCHEMA.name].to_pylist()) - {None})
        facts = {"ranges": ranges_fact(ranges), "refused": _counts(found)[1], "fills": fills}
        self._is_unsure = True
        return self.owner.append(self.table, rows, self.application, facts)

    def _keep_schemas(self, registry: RegistrySettings, wanted: set[int]) -> None:
        """Afterwards `writer_schemas` has the schemas with these ids."""
        if new := wanted - self._kept_schemas:
            known = known_schemas(self._engine.questions, source_of(self.source))
            new -= {schema_id for schema_id, text in known.items() if text != UNKNOWN}
            schemas = Registry(registry, self._given_up)
            texts = {schema_id: text for schema_id in sorted(new) if (text := schemas[schema_id]) != UNKNOWN}
            if texts:
                self._note_schemas(texts)
            self._kept_schemas |= wanted - (new - texts.keys())

    def note(self, commit: Commit) -> None:
        """Step 2. What is written already is skipped."""
        if not commit.facts["refused"]:
            return
        reach("bronze.quarantine")
        ranges = ranges_of(commit.facts["ranges"])
        refused: Where = [[*terms, ("reason", "is not null", None)] for terms in within(ranges)]
        schema = self._engine.lake.layout[tables.QUARANTINE].schema
        columns = [name for name in schema.names if name != "source"]
        inputs = [self._engine.read(self.table, columns, refused, constants={"source": source_of(self.source)})]
        if commit.facts["fills"]:
            known: Where = [[("source", "=", self.source), *terms] for terms in within(ranges)]
            inputs.append(self._engine.read(tables.QUARANTINE, ["partition", "offset"], known))
        rows = self._engine.per_partition(partial(_to_note, ranges=ranges), inputs, schema)
        note = replace(commit, application=bronze_application(self.source))
        self._engine.append(tables.QUARANTINE, rows, note)

    def complete(self) -> None:
        """Completes what a crash has left of the last commit."""
        if (commit := unnoted_commit(self._engine.questions, self.source)) is not None:
            self.note(commit)

    def _check_share(self, found: pa.Table, records: int, refused: int) -> None:
        """A batch is judged together with those before it, until they are enough to judge."""
        seen, bad = self._unjudged
        if seen + records < QUARANTINE_SAMPLE:
            self._unjudged = seen + records, bad + refused
            return
        if refused and bad + refused > self.settings.kafka.quarantine_limit * (seen + records):
            reasons = found.filter(pc.is_valid(found["reason"]))
            worst = (
                reasons.group_by("reason")
                .aggregate([("records", "sum")])
                .sort_by([("records_sum", "descending"), ("reason", "ascending")])
            )
            reason = worst["reason"][0].as_py()
            by_place = reasons.sort_by([("partition", "ascending"), ("first", "ascending")])
            first = by_place.filter(pc.equal(by_place["reason"], reason)).slice(0, 1).to_pylist()[0]
            topic = self.settings.inputs[self.source]
            raise QuarantineLimitError(self.source, refused, records, reason, f"{topic}[{first['partition']}]@{first['first']}")
        self._unjudged = 0, 0

    def _tell_reached(self, offsets: Mapping[int, int]) -> None:
        self.owner.tell(Reached({TopicPartition(self.source, p): offset for p, offset in offsets.items()}))

    @property
    def _registry(self) -> RegistrySettings | None:
        return self.settings.sources[source_of(self.source)].registry

    @property
    def _engine(self) -> Engine:
        return self.owner.engine


def _ranges(found: pa.Table) -> dict[int, tuple[int, int]]:
    """By partition the offsets `[first, last + 1)` of rows that `Bronze.counted` has counted."""
    ends = found.group_by("partition").aggregate([("first", "min"), ("last", "max")])
    columns = (ends[name].to_pylist() for name in ("partition", "first_min", "last_max"))
    return {p: (first, last + 1) for p, first, last in zip(*columns, strict=True)}


def _beyond(rows: pa.Table, *, ends: Mapping[int, int]) -> pa.Table:
    """The rows at or beyond an offset of their partition."""
    partitions, numbers = np.unique(int64s(rows["partition"]), return_inverse=True)
    since = np.array([ends.get(int(p), 0) for p in partitions], np.int64)[numbers]
    return rows.filter(pa.array(int64s(rows["offset"]) >= since))


def _to_note(rows: pa.Table, known: pa.Table | None = None, *, ranges: Mapping[int, tuple[int, int]]) -> pa.Table:
    """The rows whose offset is in their partition's range `[from, until)`, and that are not among the known ones."""
    partitions, numbers = np.unique(int64s(rows["partition"]), return_inverse=True)
    ends = np.array([ranges.get(int(p), (0, 0)) for p in partitions], np.int64).reshape(-1, 2)[numbers]
    offsets = int64s(rows["offset"])
    found = rows.filter(pa.array((offsets >= ends[:, 0]) & (offsets < ends[:, 1])))
    return found if known is None else without_known(found, known)


def without_known(rows: pa.Table, known: pa.Table) -> pa.Table:
    """The rows whose partition and offset are not among the known ones."""
    place = ["partition", "offset"]
    numbered = rows.select(place).append_column("row", pa.array(range(rows.num_rows), pa.int64()))
    new = numbered.join(known.select(place), place, join_type="left anti")  # a join takes no lists, such as headers, along
    return rows.take(new["row"].sort())


def _counts(found: pa.Table) -> tuple[int, int]:
    """How many records there are, and how many of them are refused."""
    refused = found.filter(pc.is_valid(found["reason"]))
    return sum(found["records"].to_pylist()), sum(refused["records"].to_pylist())


def _outcomes(found: pa.Table) -> Counts:
    """What became of the records that `counted` found: `accepted`, `heartbeat`, `skipped`, or `quarantined` for a reason."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in found.to_pylist():
        if row["reason"]:
            counts["quarantined", row["reason"]] += row["records"]
            continue
        counts["heartbeat" if row["heartbeat"] else "accepted", ""] += row["timed"]
        counts["skipped", ""] += row["records"] - row["timed"]
    return +counts
