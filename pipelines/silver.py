"""The silver layer: the merge of the sources by event time, a pure function of bronze.

It is kept by one Delta commit per batch. A batch is made in these steps:

1. *plan*: exact offset ranges and clocks, from bronze beyond the last batch
   (`pipelines.running.planning`; writes nothing);
2. *read* the records of the ranges, and the open merge records;
3. *merge* them (`core.merge`), by Kafka partition;
4. *commit* the merge records that change. This one commit decides: its metadata holds the whole
   plan;
5. *notes*: write the late records, then `progress` with the version of silver that holds the batch.
   (With tenants, waiting records that are late by the rules of another epoch are noted before step
   4, since the batch removes them from silver.)

Before step 4 nothing is known of a batch, and another plan may be made. After a crash between steps
4 and 5, a start reads the plan from silver's last commit and completes the notes. Each note carries
the transaction version of the commit that it follows from, so it is written once, by whichever
process comes first.

If a source is silent, the idle policy may make a decision for it between two batches. The decision
is a row of `idle_heartbeats`, and from then on counts like a record of bronze. The lake's newest
generation says where the merge begins (`running.generations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from pipelines.core.avro_schema import AvroSchema
from pipelines.core.columns import int64s
from pipelines.core.idle import Idle, IdleDecision, decide
from pipelines.core.merge import (
    RECORD_SCHEMA,
    Batch,
    late,
    late_again,
    late_schema,
    may_change,
    merge,
    merge_in_chunks,
    record_schema,
)
from pipelines.core.plan import BatchPlan, Cursor, End, Rules, TopicPartition
from pipelines.core.reading import RECORD_BYTES
from pipelines.core.tenants import HEADS
from pipelines.core.types import DUE, TENANT
from pipelines.engine import Engine, Function, Held, InChunks, Rows
from pipelines.errors import MissingRecordsError
from pipelines.faults import fault_point
from pipelines.kafka.idle_detector import IdleDetector
from pipelines.lake import tables
from pipelines.lake.commits import DELETING, Commit
from pipelines.lake.decisions import decision_rows, read_decisions
from pipelines.lake.epochs import InheritedLateness, inherited_lateness, read_epochs
from pipelines.lake.generations import Generation, read_generations
from pipelines.lake.progress import clocks_after, facts_of, last_batch, progress_rows
from pipelines.lake.recovered import MESSAGES, has_messages, read_out, read_since
from pipelines.lake.restored import check_table
from pipelines.lake.schemas import avro_schemas
from pipelines.lake.table_reader import Where, first_offsets, row_count, within
from pipelines.lake.tenant_state import BatchEnd, TenantStateReader
from pipelines.monitoring.events import RecordsProcessed
from pipelines.running.ended import end_earlier
from pipelines.running.outcomes import outcomes
from pipelines.running.owner import Owner, now_ms
from pipelines.running.planning import Planner, Tenants
from pipelines.settings import PublishSettings, Settings

MAX_KEYS = 5_000
"""Maximum number of keys of open rows in a query; with more of them, all open rows are read."""

HELD_BATCHES = 2
"""Number of batches whose byte limit open rows may reach; larger ones are merged in chunks, if the
engine can.
"""

_OF_BRONZE = [name for name in RECORD_SCHEMA.names if name != "source"]


@dataclass
class Silver:
    """The merge of one lake over `partitions` Kafka partitions; one owner at a time.

    `silence` watches for silent sources; without it the idle policy makes no decision. `ends`:
    where a rebuild stops. `inherited`: for a rebuild, the lateness inherited from earlier
    epochs, as the lake has it.
    """

    owner: Owner
    settings: Settings
    partitions: int
    silence: IdleDetector | None = None
    ends: Mapping[TopicPartition, End] = field(default_factory=dict)
    inherited: InheritedLateness | None = None
    _held_bytes: int | None = None
    """Maximum size (bytes) of the records of open rows; None: not measured yet."""
    _planner: Planner | None = field(default=None, repr=False)
    _version: int | None = None
    """Version of silver that this owner made last. If another process has made one since, it may
    have restored an earlier one.
    """

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[BatchPlan]:
        """Merge, batch by batch, everything in bronze that the clock has reached.

        Each batch is yielded once it is committed.
        """
        while self.is_begun and not is_stopping():
            with self.owner.step("silver", "plan"):
                plan = self.planner.next()
            if plan is not None:
                self.commit(plan)
            self._notify(plan)
            if plan is not None:
                yield plan
            elif not self._decide_idle():
                return

    def commit(self, plan: BatchPlan) -> None:
        """Read, merge and commit a planned batch, and write its notes (steps 2 to 5)."""
        if self._engine.reader.version(tables.SILVER) != self._version:
            check_table(self._engine.reader, self._engine.lake, tables.SILVER)
        # After a failure, only the tables know whether the batch was committed.
        planner = self.planner
        self._planner = None
        if planner.tenants is not None and planner.begins_epoch(plan):
            self._note_waited(plan, planner)
        commit = self.owner.next_commit(tables.SILVER, facts=facts_of(plan, self.settings))
        fault_point("silver.merge")
        with self.owner.step("silver", "merge"):
            self._merge(plan, planner, commit)
            self._version = version = self.owner.confirm(tables.SILVER, commit)
        with self.owner.step("silver", "note"):
            self._note(plan, commit, version, planner)
        fault_point("silver.done")
        planner.done(plan)
        self._planner = planner

    def complete(self) -> None:
        """Complete the notes of the last batch, and what follows from the last reset.

        Recovering the planner does both.
        """
        if self.is_begun:
            _ = self.planner

    @property
    def is_begun(self) -> bool:
        """True where the lake says where its newest generation begins; before, nothing can be
        planned.
        """
        return self._planner is not None or bool(
            read_generations(self._engine.reader, self.settings)
        )

    @property
    def planner(self) -> Planner:
        """The planner of batches, recovered from the tables once the last batch's notes are
        complete.
        """
        if self._planner is None:
            self._planner = self._recover()
        return self._planner

    def _recover(self) -> Planner:
        reader = self._engine.reader
        generation = self._generation
        end_earlier(self.owner, self.settings)
        epochs = read_epochs(reader, self.settings)
        last = last_batch(reader)
        left = (
            inherited_lateness(reader, epochs, generation)
            if self.inherited is None
            else self.inherited
        )
        planner = Planner(
            reader,
            self.settings,
            generation.from_batch,
            {tp: Cursor(offset) for tp, offset in generation.begin.items()},
            {},
            {},
            self._engine.merge_bytes,
            self.ends,
            dict(left.horizons),
            dict(left.epoch_start_clock),
            (epochs.current.number, epochs.current.from_batch),
            generation.number,
        )
        if self.settings.merge.has_tenants:
            planner.tenants = Tenants(
                HEADS.empty_table(), left.tenant_horizons, read_since(reader, generation)
            )
            self._drop_undecided(-1 if last is None else last[0].batch)
        planner.decided(read_decisions(reader, generation))
        if last is not None and last[0].batch >= generation.from_batch:
            plan, version, commit = last
            if not self._is_noted(plan):
                is_first = plan.batch == generation.from_batch
                then = planner.before(
                    plan, {} if is_first else clocks_after(reader, plan.batch - 1)
                )
                self._recover_tenants(then, BatchEnd(then.cursors, then.clocks), left)
                self._note(plan, commit, version, then)
            planner.done(plan)
            self._recover_tenants(planner, BatchEnd(planner.cursors, planner.clocks), left)
        return planner

    def _recover_tenants(self, planner: Planner, moment: BatchEnd, left: InheritedLateness) -> None:
        """Give the planner the clocks and heads of tenants, if there are any, at the end of a
        batch.
        """
        if planner.tenants is not None:
            heads = TenantStateReader(self._engine.reader, self._generation)
            lag_ms = self.settings.merge.tenant_max_lag_ms or 0
            planner.tenants.clocks = heads.clocks_at(moment, lag_ms, left.global_floor)
            planner.tenants.heads = planner.tenants.clocks.heads()

    def _is_noted(self, plan: BatchPlan) -> bool:
        """Return True if `progress`, the last of a batch's notes, has the batch."""
        noted = self._engine.reader.summary(tables.PROGRESS, [], {"last": ("max", "batch")})
        return bool(noted["last"].to_pylist() == [plan.batch])

    def _merge(self, plan: BatchPlan, planner: Planner, commit: Commit) -> None:
        """Read, merge and commit a batch (steps 2 to 4).

        Large open rows are merged a chunk at a time, if the engine can. A batch that changes no
        open row is appended. (With tenants, whose records wait, a batch may always change some.)
        """
        batch = self._batch(plan, planner)
        records = self._records(plan)
        tenant = TENANT.names if batch.has_tenants else []
        of_held = [
            "partition",
            "merge_key",
            "event_time",
            "last_event_time",
            *self.settings.sources,
            RECORD_BYTES.name,
        ]
        of_held += ["due"] if batch.has_due else []
        of_held += ["status", "position", *tenant] if batch.has_tenants else []
        inputs = [*records, *self._heads(planner)]
        if self._has_messages:
            of_message = [
                "partition",
                "merge_key",
                "event_time",
                *(DUE.names if batch.has_due else ()),
                *tenant,
            ]
            inputs.append(self._engine.read(tables.RECOVERED, of_message, MESSAGES))
        expected = planner.records(plan)
        schema = batch.changed_schema()
        held = self._held(batch)
        is_new = held.keys == []  # no existing row changes
        if held.size > HELD_BATCHES * self._engine.merge_bytes and not is_new:
            merging = _merging_in_chunks(batch, len(records), expected)
            if self._engine.merge_in_chunks(held, merging, inputs, schema, self._judge, commit):
                return
        inputs.append(self._engine.read(tables.SILVER, of_held, held.where))
        changed = self._engine.per_partition(
            _merging(batch, len(records), expected), inputs, schema
        )
        write = self._engine.append if is_new else self._engine.merge
        write(tables.SILVER, self._judge(changed), commit)

    def _held(self, batch: Batch) -> Held:
        """Return the rows that are open or wait.

        If they are large and few of them may change, only those with the keys that may.
        """
        held = Held(["open", "waiting"] if batch.has_tenants else ["open"], 0)
        held = replace(held, size=self._measure_held(held))
        if held.size <= self._engine.merge_bytes or batch.has_tenants:
            return held
        keys = self._changing_keys(batch, held)
        return held if len(keys) > MAX_KEYS else replace(held, keys=keys)

    def _judge(self, changed: Rows) -> Rows:
        """Judge the rows that time out by the user's expressions."""
        return validated(self._engine, changed, self.settings.publish)

    def _measure_held(self, held: Held) -> int:
        """Return the size (bytes) of the records of these rows.

        It is measured when it may have grown beyond what a batch may have.
        """
        limit = self._engine.merge_bytes
        if self._held_bytes is None or self._held_bytes > limit:
            size = self._engine.reader.summary(
                tables.SILVER, [], {"bytes": ("sum", RECORD_BYTES.name)}, held.where
            )
            self._held_bytes = size["bytes"][0].as_py() or 0
        held_bytes = self._held_bytes
        if held_bytes <= limit:
            # A batch adds no more than this, except for single records that are larger.
            self._held_bytes += limit
        return held_bytes

    def _changing_keys(self, batch: Batch, held: Held) -> list[str]:
        """Return the keys of the open rows that a batch may change."""
        columns = [
            "partition",
            "merge_key",
            "event_time",
            "last_event_time",
            *(["due"] if batch.has_due else []),
        ]
        rows = self._engine.reader.rows(tables.SILVER, columns, held.where)
        found = rows.filter(pa.array(may_change(rows, self._keys(batch.plan), batch)))
        return sorted(set(found["merge_key"].to_pylist()))

    def _keys(self, plan: BatchPlan) -> pa.Table:
        """Return the partitions and keys of a batch's records."""
        found = []
        for source in self.settings.inputs:
            ranges = {
                tp.partition: (r.from_offset, r.until_offset)
                for tp, r in plan.ranges.items()
                if tp.source == source
            }
            keyed: Where = [
                [*terms, ("merge_key", "is not null", None)] for terms in within(ranges)
            ]
            found.append(
                self._engine.reader.rows(tables.bronze(source), ["partition", "merge_key"], keyed)
            )
        return pa.concat_tables(found)

    def _records(self, plan: BatchPlan) -> list[Rows]:
        """Return, by input, every record of the batch's ranges that has a time.

        An input of which the batch consumes nothing has no item. With tenants every input has one,
        and its range includes the first record that waits.
        """
        has_tenants = self.settings.merge.has_tenants
        records = []
        for source in self.settings.inputs:
            # With the first one that waits.
            ranges = {
                tp.partition: (
                    done.from_offset,
                    done.until_offset + has_tenants,
                )
                for tp, done in plan.ranges.items()
                if tp.source == source and (has_tenants or not done.is_empty)
            }
            if ranges:
                records.append(self._read(source, ranges))
        return records

    def _read(self, source: str, ranges: Mapping[int, tuple[int, int]]) -> Rows:
        """Return the records of bronze at these offsets that have a time."""
        timed: Where = [[*terms, ("event_time", "is not null", None)] for terms in within(ranges)]
        columns = [*_OF_BRONZE, *(TENANT.names if self.settings.merge.has_tenants else ())]
        return self._engine.read(
            tables.bronze(source), columns, timed, constants={"source": source}
        )

    def _heads(self, planner: Planner) -> list[Rows]:
        """Return the tenants' heads that the batch before has left, if there are tenants."""
        return [] if planner.tenants is None else [self._engine.rows(planner.tenants.heads)]

    def _note(self, plan: BatchPlan, commit: Commit, version: int, planner: Planner) -> None:
        """Write the notes of a batch (step 5); those that are already written are skipped."""
        fault_point("silver.notes")
        if plan.has_late:
            batch = self._batch(plan, planner)
            self._engine.append(tables.LATE, self._late(batch, planner), commit)
        fault_point("silver.progress")
        self._engine.append(
            tables.PROGRESS, progress_rows(plan, self.settings, version, now_ms()), commit
        )

    def _late(self, batch: Batch, planner: Planner) -> Rows:
        """Return the late records of a batch."""
        schema = late_schema(has_tenants=batch.has_tenants)
        records = self._records(batch.plan)
        return self._engine.per_partition(
            _finding_late(batch, len(records)), [*records, *self._heads(planner)], schema
        )

    def _note_waited(self, plan: BatchPlan, planner: Planner) -> None:
        """Write to `late` the waiting records that a new epoch's rules make late; its first batch
        is next.

        The batch removes them from silver, so they are noted before: afterwards only an older
        version would have them, which a vacuum may remove. Nobody looks at late records of batches
        that are not committed, and a start deletes them.
        """
        waits: Where = [[("status", "=", "waiting")]]
        first = self._engine.reader.summary(
            tables.SILVER, ["partition"], {"first": ("min", "position")}, waits
        )
        positions = dict(
            zip(first["partition"].to_pylist(), first["first"].to_pylist(), strict=True)
        )
        if not positions:
            return
        records = []
        for source in self.settings.inputs:
            since = self._generation.offsets_of(source)
            begins = first_offsets(
                self._engine.reader, tables.bronze(source), "event_time", positions, since
            )
            ranges = {
                p: (offset, plan.ranges[TopicPartition(source, p)].from_offset)
                for p, offset in begins.items()
            }
            records.append(self._read(source, ranges))
        columns = ["partition", "event_time", "position", *TENANT.names, *self.settings.sources]
        inputs = [*records, self._engine.read(tables.SILVER, columns, waits)]
        batch = self._batch(plan, planner)
        late = self._engine.per_partition(
            _finding_late_again(batch), inputs, late_schema(has_tenants=True)
        )
        self.owner.append(tables.LATE, late, DELETING)

    def _drop_undecided(self, last: int) -> None:
        """Delete late records of batches that a crash kept from being committed."""
        undecided: Where = [[("batch", ">", last)]]
        if row_count(self._engine.reader, tables.LATE, undecided):
            self.owner.change(
                tables.LATE, DELETING, partial(self._engine.delete, tables.LATE, undecided)
            )

    def _notify(self, plan: BatchPlan | None) -> None:
        """Report what a batch has processed, and the progress of the merge, with or without a
        batch.
        """
        if plan is not None and self.owner.is_observed:
            counts = outcomes(
                self._engine.reader,
                self.settings,
                plan,
                was_recovered=self._has_messages or bool(plan.generation),
            )
            self.owner.notify(RecordsProcessed("silver", counts))
        self.owner.notify(self.planner.progress())

    def _batch(self, plan: BatchPlan, planner: Planner) -> Batch:
        avro = avro_schemas(self._engine.reader, self.settings)
        batch = batch_of(
            plan, self.settings, planner.rules, planner.idle, avro, self._engine.lake.settings
        )
        batch = replace(batch, begins_epoch=planner.begins_epoch(plan))
        if not plan.generation and not planner.has_redriven:
            return batch
        ranges = {
            tp: (done.from_offset, done.until_offset)
            for tp, done in plan.ranges.items()
            if not done.is_empty
        }
        return replace(batch, out=read_out(self._engine.reader, self._generation, ranges))

    def _decide_idle(self) -> bool:
        """Write an idle decision if every laggard was silent for long enough; return True if it
        did.
        """
        if self.silence is None:
            return False
        planner = self.planner
        silent = self.silence.observe(planner.bronze_ends())
        heads = planner.heads()
        idle = dict[int, Idle]()
        for p in range(self.partitions):
            here = {tp.source: head for tp, head in heads.items() if tp.partition == p}
            decision = decide(
                here, {tp.source for tp in silent if tp.partition == p and not planner.waits(tp)}
            )
            if decision is not None:
                after = [TopicPartition(source, p) for source in decision.sources]
                if self.silence.has_nothing_beyond(
                    {tp: planner.cursors[tp].next_offset - 1 for tp in after}
                ):
                    idle[p] = decision
        tenant_times = planner.tenant_times(idle)
        decided = [
            (
                tp,
                IdleDecision(
                    planner.cursors[tp].next_offset - 1,
                    decision.event_time,
                    tenant_times.get(p, ()),
                ),
            )
            for p, decision in idle.items()
            for tp in (TopicPartition(source, p) for source in decision.sources)
        ]
        if decided:
            fault_point("idle.decide")
            self._planner = None  # after a failure, only the table knows whether it was decided
            self.owner.append(
                tables.IDLE_HEARTBEATS,
                decision_rows(self.settings, decided, now_ms(), planner.generation),
            )
            planner.decided(decided)
            self._planner = planner
        return bool(decided)

    @cached_property
    def _has_messages(self) -> bool:
        """True where messages were read back from the sink, which the merge must recognise."""
        return has_messages(self._engine.reader, self._generation)

    @cached_property
    def _generation(self) -> Generation:
        """The newest generation of a lake that has begun.

        No other one begins while this process is the owner.
        """
        return read_generations(self._engine.reader, self.settings).newest

    @property
    def _engine(self) -> Engine:
        return self.owner.engine


def batch_of(
    plan: BatchPlan,
    settings: Settings,
    rules: Rules,
    idle: Mapping[TopicPartition, Sequence[IdleDecision]],
    avro: Mapping[str, AvroSchema],
    of_lake: Settings | None = None,
) -> Batch:
    """Return a plan as the merge takes it, under the rules of these settings.

    `idle`: the idle policy's decisions. `avro`: the schemas of Avro sources. `of_lake`: the
    settings by which silver's columns are laid out, if they differ.
    """
    types = {name: source.value_type for name, source in (of_lake or settings).sources.items()}
    read_types = {name: source.read_type for name, source in settings.sources.items()}
    max_bytes = settings.publish.max_bytes if settings.publish.value is None else None
    has_due = (of_lake or settings).merge.has_due
    topics = tuple(settings.inputs) if settings.with_topics else ()
    return Batch(plan, types, rules, idle, max_bytes, read_types, avro, has_due, topics=topics)


def validated(engine: Engine, changed: Rows, publish: PublishSettings) -> Rows:
    """Return the rows that the merge has changed.

    Those that have timed out are judged by the user's expressions, if there are any.
    """
    if publish.valid == "true" and publish.value is None:
        return changed
    return engine.validated(changed, publish.valid, publish.value, publish.max_bytes)


def _merging(batch: Batch, sources: int, expected: Mapping[TopicPartition, int]) -> Function:
    """Return a function that applies `core.merge.merge` to the rows of a partition.

    Its inputs are those of `_split`, then what silver holds.
    """

    def merging(*inputs: pa.Table) -> pa.Table:
        """Return what a batch changes in a partition."""
        records, heads, recovered = _split(inputs[:-1], batch, sources, expected)
        return merge(records, inputs[-1], batch, recovered, heads)

    return merging


def _merging_in_chunks(
    batch: Batch, sources: int, expected: Mapping[TopicPartition, int]
) -> InChunks:
    """Return a function that applies `core.merge.merge_in_chunks`.

    Its inputs are what silver holds, in chunks, and then those of `_split`.
    """

    def merging(
        chunks: Iterator[pa.Table], *inputs: pa.Table
    ) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield each chunk, and what a batch changes in it."""
        records, heads, recovered = _split(inputs, batch, sources, expected)
        return merge_in_chunks(records, chunks, batch, recovered, heads)

    return merging


def _split(
    inputs: Sequence[pa.Table], batch: Batch, sources: int, expected: Mapping[TopicPartition, int]
) -> tuple[pa.Table, pa.Table | None, pa.Table | None]:
    """Return the records of this many sources, the tenants' heads and the messages read back.

    The heads are None without tenants, the messages None if there are none. Raises
    MissingRecordsError if a topic-partition has fewer records than the plan has seen.
    """
    records = _together(inputs[:sources], batch)
    more = [*inputs[sources:]]
    _check_complete(records, batch.plan, expected)
    heads = more.pop(0) if batch.has_tenants else None
    return records, heads, more.pop(0) if more else None


def _check_complete(
    records: pa.Table, plan: BatchPlan, expected: Mapping[TopicPartition, int]
) -> None:
    partitions = int64s(records["partition"])
    offsets = int64s(records["offset"])
    sources = records["source"].combine_chunks().dictionary_encode()
    names = sources.dictionary.to_pylist()
    numbers = int64s(sources.indices)
    here = {*np.unique(partitions).tolist()}
    for tp, count in expected.items():
        if tp.partition in here:
            done = plan.ranges[tp]
            is_its = (partitions == tp.partition) & (offsets < done.until_offset)
            number = names.index(tp.source) if tp.source in names else -1
            found = np.count_nonzero(is_its & (numbers == number))
            if found < count:
                raise MissingRecordsError(
                    tp.source, tp.partition, done.from_offset, done.until_offset, found, count
                )


def _finding_late(batch: Batch, sources: int) -> Function:
    """Return a function that applies `core.merge.late` to the records of this many sources."""

    def finding(*inputs: pa.Table) -> pa.Table:
        """Return the late records; `inputs`: records by source, and with tenants their heads."""
        return late(
            _together(inputs[:sources], batch), batch, inputs[-1] if batch.has_tenants else None
        )

    return finding


def _finding_late_again(batch: Batch) -> Function:
    """Return a function that applies `core.merge.late_again`."""

    def finding(*inputs: pa.Table) -> pa.Table:
        """Return the records that are late; `inputs`: records by source, and the waiting rows."""
        return late_again(_together(inputs[:-1], batch), inputs[-1], batch)

    return finding


def _together(records: Sequence[pa.Table], batch: Batch) -> pa.Table:
    return (
        pa.concat_tables(records)
        if records
        else record_schema(has_tenants=batch.has_tenants).empty_table()
    )
