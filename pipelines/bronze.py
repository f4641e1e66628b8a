"""The bronze layer: every committed Kafka record once, raw, with its coordinates.

Each record also has the columns that planning the merge needs. There is one stream per input
(`core.inputs`), whose records arrive already read (`core.reading.read_records`). The tables say at
which offset it starts. A batch with too large a share of refused records is not written at all.
Every other batch is written in these steps:

1. *commit*: its rows go to `bronze_<source>`, in one Delta commit;
2. *note*: its refused rows, read back from bronze, go to `quarantine`.

After a crash before step 1, the records are read from Kafka again. After a crash between steps 1
and 2, the next start takes the offsets from bronze's last commit and completes the note. The note
carries the transaction version of that commit, so it is written only once.
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
from pipelines.faults import fault_point
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
from pipelines.lake.schemas import given_up_schemas, known_schemas, unknown_schemas
from pipelines.lake.table_reader import Where, within
from pipelines.monitoring.events import BronzeProgress, Counts, RecordsProcessed
from pipelines.monitoring.observability import Reporter
from pipelines.running.owner import Owner, now_ms
from pipelines.settings import Settings

QUARANTINE_SAMPLE = 1000
"""Number of records after which the share of refused ones is checked: of a few, half may well be
bad.
"""


def kafka_input(
    settings: Settings, source: str, offsets: Mapping[int, int], given_up: Collection[int] = ()
) -> KafkaInput:
    """Return how an input is read from Kafka, from these offsets on, by partition.

    `given_up`: ids of schemas that are no longer waited for.
    """
    kafka = settings.kafka
    rules = rules_of(settings, source_of(source), given_up)
    return KafkaInput(
        source, kafka, settings.inputs[source], dict(offsets), kafka.max_offsets_per_batch, rules
    )


@dataclass
class Bronze:
    """The bronze table of one source, or the part of it for one of its topics; one owner at a time.

    `source` is the name of the input.
    """

    owner: Owner
    settings: Settings
    source: str
    reporter: Reporter = field(default_factory=Reporter)
    maintenance: Maintenance | None = None
    _unchecked: tuple[int, int] = (0, 0)
    _is_unsure: bool = False
    """True after a failed batch: only the table knows whether its commit and its note were made."""
    _kept_schemas: set[int] = field(default_factory=set)
    """Ids of schemas that `writer_schemas` is known to have."""
    _running: Running | None = None
    _given_up: set[int] = field(default_factory=set)
    """Ids of schemas that are no longer waited for."""
    _erased: Mapping[int, Int64s] = field(default_factory=dict)
    _waiting_since: int | None = None
    """Time (epoch ms) since which the source has waited for schemas that the registry does not
    have.
    """

    @property
    def table(self) -> str:
        """The name of the table, or of the part of it for one topic."""
        return tables.bronze(self.source)

    @property
    def application(self) -> str:
        """The Delta application of its commits to the table."""
        return application_of(self.source)

    def start(
        self, offsets: Mapping[int, int], guard: Callable[[Callable[[], None]], None], *, once: bool
    ) -> Running:
        """Start the stream and return it. It reads from the offsets of each partition on.

        It ends at what Kafka has now (`once`), or reads without end. `guard` runs the work of a
        batch, or skips it.
        """
        self.complete()
        self._notify_progress(offsets)
        self._note_unknown_schema(None if self._running is None else self._running.failure)
        self._erased = read_erased(self._engine.reader, self.source, offsets)
        source = kafka_input(self.settings, self.source, offsets, self._given_up)
        self._running = self._engine.follow_kafka(
            source, lambda rows: guard(lambda: self._process_batch(rows)), once=once
        )
        return self._running

    def has_given_up(self, failure: Exception) -> bool:
        """Return True if the failure was a missing schema that is no longer waited for.

        Reading that starts again then does without the schema.
        """
        return unknown_schema_of(failure) in self._given_up

    def _note_unknown_schema(self, failure: Exception | None) -> None:
        """Record in `writer_schemas` which schema the registry did not have, and since when.

        Does nothing if that was not the failure. Once a source has been stopped for
        `registry.unknown_after`, the schema is given up. A schema that the lake has recorded as
        given up stays so.
        """
        registry = self._registry
        if registry is None:
            return
        after_ms = registry.unknown_after_ms
        if after_ms is not None:
            self._given_up |= given_up_schemas(self._engine.reader, source_of(self.source))
        schema_id = None if failure is None else unknown_schema_of(failure)
        if schema_id is None or schema_id in self._given_up:
            return
        now = now_ms()
        since = unknown_schemas(self._engine.reader, source_of(self.source)).get(schema_id)
        if since is None:
            since = now
            self._note_schemas({schema_id: None})
        self._waiting_since = min(since, self._waiting_since or since)
        if after_ms is not None and now - self._waiting_since >= after_ms:
            self._given_up.add(schema_id)
            self._note_schemas({schema_id: UNKNOWN})

    def _note_schemas(self, texts: Mapping[int, str | None]) -> None:
        """Append schemas to `writer_schemas`, by id: their text, None or `UNKNOWN`.

        None: the source waits for the schema. `UNKNOWN`: it no longer does.
        """
        rows = [
            (source_of(self.source), schema_id, text, now_ms()) for schema_id, text in texts.items()
        ]
        self._engine.append(
            tables.WRITER_SCHEMAS, self._engine.lake.layout[tables.WRITER_SCHEMAS].rows(rows)
        )

    def _process_batch(self, rows: Rows) -> None:
        try:
            self._take_batch(rows)
        except Exception as failure:  # an engine may read the batch only now
            self._note_unknown_schema(failure)
            raise

    def _take_batch(self, rows: Rows) -> None:
        if self._is_unsure:
            self.complete()  # Kafka may have lost refused records of the batch
        with self._engine.cached(self.without_erased(rows, self._erased)) as kept:
            with self.owner.step("bronze", "read"):
                counts = self.counted(kept)
            records, refused = _counts(counts)
            if not records:
                return
            self._check_share(counts, records, refused)
            fault_point("bronze.append")
            with self.owner.step("bronze", "append"):
                commit = self.append(kept, counts)
        with self.owner.step("bronze", "note"):
            self.note(commit)
        fault_point("bronze.done")
        self._notify_progress(
            {p: until for p, (_, until) in ranges_of(commit.facts["ranges"]).items()}
        )
        self.owner.notify(
            RecordsProcessed("bronze", {self.settings.inputs[self.source]: _outcomes(counts)})
        )
        self.reporter.notify(
            self.table, f"{records} records, {refused} refused", records=records, refused=refused
        )
        if self.maintenance is not None:
            self.maintenance.after_commit()
        self._is_unsure = False
        self._waiting_since = None

    def without_erased(self, rows: Rows, erased: Mapping[int, Int64s]) -> Rows:
        """Return rows read from Kafka as `forget` leaves them; `erased`: offsets by partition."""
        if not erased:
            return rows
        return self._engine.per_partition(
            partial(without_erased, erased=erased), [rows], self._engine.lake.schema(self.table)
        )

    def counted(self, rows: Rows) -> pa.Table:
        """Return counts of rows by partition, reason and `heartbeat`.

        With a registry, they are grouped by `writer_schema`, too. The columns are the number of
        `records`, how many of them are `timed` (have an event time), and the `first` and `last`
        offset.
        """
        values = {
            "records": ("count", "*"),
            "timed": ("count", "event_time"),
            "first": ("min", "offset"),
            "last": ("max", "offset"),
        }
        registered = [WRITER_SCHEMA.name] if self._registry is not None else []
        return self._engine.summary(rows, ["partition", "reason", "heartbeat", *registered], values)

    def append(self, rows: Rows, counts: pa.Table, *, fills: bool = False) -> Commit:
        """Commit rows to bronze (step 1) and return the commit that holds them.

        `counts`: the result of `counted`. `fills`: the rows lie between others that are already
        there.

        After a failure only the table knows whether the commit was made, and rows that are read
        again may lack records that Kafka has compacted or deleted meanwhile. Bronze has every
        offset below the end of its last commit, so when rows are tried again, only those beyond
        that end are written. If the table already has all of them, its last commit is returned.
        """
        ranges = _ranges(counts)
        if self._is_unsure:
            last = last_decision(self._engine.reader, self.table, self.application)
            ends = (
                {}
                if last is None
                else {p: until for p, (_, until) in ranges_of(last[1].facts["ranges"]).items()}
            )
            if last is not None and all(
                until <= ends.get(p, 0) for p, (_, until) in ranges.items()
            ):
                return last[1]
            if any(since < ends.get(p, 0) for p, (since, _) in ranges.items()):
                schema = self._engine.lake.schema(self.table)
                rows = self._engine.per_partition(partial(_beyond, ends=ends), [rows], schema)
                counts = self.counted(rows)
                ranges = _ranges(counts)
        if self._registry is not None:
            self._keep_schemas(self._registry, set(counts[WRITER_SCHEMA.name].to_pylist()) - {None})
        facts = {"ranges": ranges_fact(ranges), "refused": _counts(counts)[1], "fills": fills}
        self._is_unsure = True
        return self.owner.append(self.table, rows, self.application, facts)

    def _keep_schemas(self, registry: RegistrySettings, schema_ids: set[int]) -> None:
        """Add the schemas with these ids to `writer_schemas`, if it lacks them."""
        if new := schema_ids - self._kept_schemas:
            existing = known_schemas(self._engine.reader, source_of(self.source))
            new -= {schema_id for schema_id, text in existing.items() if text != UNKNOWN}
            schemas = Registry(registry, self._given_up)
            texts = {
                schema_id: text
                for schema_id in sorted(new)
                if (text := schemas[schema_id]) != UNKNOWN
            }
            if texts:
                self._note_schemas(texts)
            self._kept_schemas |= schema_ids - (new - texts.keys())

    def note(self, commit: Commit) -> None:
        """Write the refused rows of a commit to `quarantine` (step 2).

        Rows that are already written are skipped.
        """
        if not commit.facts["refused"]:
            return
        fault_point("bronze.quarantine")
        ranges = ranges_of(commit.facts["ranges"])
        refused: Where = [[*terms, ("reason", "is not null", None)] for terms in within(ranges)]
        schema = self._engine.lake.layout[tables.QUARANTINE].schema
        columns = [name for name in schema.names if name != "source"]
        inputs = [
            self._engine.read(
                self.table, columns, refused, constants={"source": source_of(self.source)}
            )
        ]
        if commit.facts["fills"]:
            noted: Where = [[("source", "=", self.source), *terms] for terms in within(ranges)]
            inputs.append(self._engine.read(tables.QUARANTINE, ["partition", "offset"], noted))
        rows = self._engine.per_partition(partial(_to_note, ranges=ranges), inputs, schema)
        note = replace(commit, application=bronze_application(self.source))
        self._engine.append(tables.QUARANTINE, rows, note)

    def complete(self) -> None:
        """Write the note of the last commit, if a crash prevented it."""
        if (commit := unnoted_commit(self._engine.reader, self.source)) is not None:
            self.note(commit)

    def _check_share(self, counts: pa.Table, records: int, refused: int) -> None:
        """Raise QuarantineLimitError if too large a share of the records is refused.

        Batches are counted together until they have enough records to judge (`QUARANTINE_SAMPLE`).
        """
        seen, bad = self._unchecked
        if seen + records < QUARANTINE_SAMPLE:
            self._unchecked = seen + records, bad + refused
            return
        if refused and bad + refused > self.settings.kafka.quarantine_limit * (seen + records):
            reasons = counts.filter(pc.is_valid(counts["reason"]))
            worst = (
                reasons.group_by("reason")
                .aggregate([("records", "sum")])
                .sort_by([("records_sum", "descending"), ("reason", "ascending")])
            )
            reason = worst["reason"][0].as_py()
            by_place = reasons.sort_by([("partition", "ascending"), ("first", "ascending")])
            first = by_place.filter(pc.equal(by_place["reason"], reason)).slice(0, 1).to_pylist()[0]
            topic = self.settings.inputs[self.source]
            raise QuarantineLimitError(
                self.source,
                refused,
                records,
                reason,
                f"{topic}[{first['partition']}]@{first['first']}",
            )
        self._unchecked = 0, 0

    def _notify_progress(self, offsets: Mapping[int, int]) -> None:
        self.owner.notify(
            BronzeProgress(
                {TopicPartition(self.source, p): offset for p, offset in offsets.items()}
            )
        )

    @property
    def _registry(self) -> RegistrySettings | None:
        return self.settings.sources[source_of(self.source)].registry

    @property
    def _engine(self) -> Engine:
        return self.owner.engine


def _ranges(counts: pa.Table) -> dict[int, tuple[int, int]]:
    """Return, by partition, the offsets `[first, last + 1)` of rows counted by `Bronze.counted`."""
    ends = counts.group_by("partition").aggregate([("first", "min"), ("last", "max")])
    columns = (ends[name].to_pylist() for name in ("partition", "first_min", "last_max"))
    return {p: (first, last + 1) for p, first, last in zip(*columns, strict=True)}


def _beyond(rows: pa.Table, *, ends: Mapping[int, int]) -> pa.Table:
    """Return the rows at or beyond an offset of their partition (`ends`)."""
    partitions, numbers = np.unique(int64s(rows["partition"]), return_inverse=True)
    since = np.array([ends.get(int(p), 0) for p in partitions], np.int64)[numbers]
    return rows.filter(pa.array(int64s(rows["offset"]) >= since))


def _to_note(
    rows: pa.Table, noted: pa.Table | None = None, *, ranges: Mapping[int, tuple[int, int]]
) -> pa.Table:
    """Return the rows in their partition's range `[from, until)` that are not among `noted`."""
    partitions, numbers = np.unique(int64s(rows["partition"]), return_inverse=True)
    ends = np.array([ranges.get(int(p), (0, 0)) for p in partitions], np.int64).reshape(-1, 2)[
        numbers
    ]
    offsets = int64s(rows["offset"])
    refused = rows.filter(pa.array((offsets >= ends[:, 0]) & (offsets < ends[:, 1])))
    return refused if noted is None else without_existing(refused, noted)


def without_existing(rows: pa.Table, existing: pa.Table) -> pa.Table:
    """Return the rows whose partition and offset are not among the existing ones."""
    place = ["partition", "offset"]
    numbered = rows.select(place).append_column("row", pa.array(range(rows.num_rows), pa.int64()))
    # Only the places are joined: a join cannot carry list columns, such as headers.
    new = numbered.join(existing.select(place), place, join_type="left anti")
    return rows.take(new["row"].sort())


def _counts(counts: pa.Table) -> tuple[int, int]:
    """Return the number of records, and how many of them are refused."""
    refused = counts.filter(pc.is_valid(counts["reason"]))
    return sum(counts["records"].to_pylist()), sum(refused["records"].to_pylist())


def _outcomes(rows: pa.Table) -> Counts:
    """Return the number of records by outcome; `rows`: rows of `Bronze.counted`.

    The outcomes are `accepted`, `heartbeat`, `skipped`, and `quarantined` with a reason.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows.to_pylist():
        if row["reason"]:
            counts["quarantined", row["reason"]] += row["records"]
            continue
        counts["heartbeat" if row["heartbeat"] else "accepted", ""] += row["timed"]
        counts["skipped", ""] += row["records"] - row["timed"]
    return +counts
