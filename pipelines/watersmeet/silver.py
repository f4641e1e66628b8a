"""The silver layer: the merge of the sources by event time, a pure function of bronze.

It is kept by one Delta commit per batch. A batch is made in these steps:

1. *plan*: exact offset ranges and clocks, from bronze beyond the last batch
   (`watersmeet.running.planning`; writes nothing);
2. *read* the records of the ranges, and the open merge records;
3. *merge* them (`core.merge`), by Kafka partition;
4. *commit* the merge records that change. This one commit decides: its metadata holds the whole
   plan;
5. *notes*: write the late records, the repeated ones, the corrections that are due, then
   `progress` with the version of silver that holds the batch.
   (Waiting records that are late by the rules of another epoch are noted before step 4, since the
   batch removes them from silver: `running.epoch_start`.)

Before step 4 nothing is known of a batch, and another plan may be made. After a crash between steps
4 and 5, a start reads the plan from silver's last commit and completes the notes. Each note carries
the transaction version of the commit that it follows from, so it is written once, by whichever
process comes first.

If a source is silent, the idle policy may make a decision for it between two batches
(`running.idle_policy`). The decision is a row of `idle_heartbeats`, and from then on counts like a
record of bronze. The lake's newest generation says where the merge begins (`running.generations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa

from watersmeet.core.merge import LATE_SCHEMA, Batch
from watersmeet.core.plan import BatchPlan, End, TopicPartition
from watersmeet.engine import Engine
from watersmeet.expressions.publish import Expressions
from watersmeet.faults import fault_point
from watersmeet.kafka.idle_detector import IdleDetector
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.epochs import InheritedLateness
from watersmeet.lake.generations import Generation, read_generations
from watersmeet.lake.progress import facts_of, progress_rows
from watersmeet.lake.restored import check_table
from watersmeet.running.batch_rows import BatchRows
from watersmeet.running.batches import make_batch
from watersmeet.running.correcting import Correcting
from watersmeet.running.ended import end_earlier
from watersmeet.running.epoch_start import note_late_waiting
from watersmeet.running.idle_policy import decide_idle, write_decisions
from watersmeet.running.outcomes import notify_merge
from watersmeet.running.owner import Owner, now_ms
from watersmeet.running.planning import Planner
from watersmeet.running.recover_planner import recover_planner
from watersmeet.settings import Settings

HELD_BATCHES = 2
"""Number of batches whose byte limit open rows may reach; larger ones are merged in chunks."""


@dataclass
class Silver:
    """The merge of one lake over `partitions` Kafka partitions; one owner at a time.

    `idle_detector` watches for silent sources; without it the idle policy makes no decision.
    `ends`: where a rebuild stops. `inherited`: for a rebuild, the lateness inherited from earlier
    epochs, as the lake has it.
    """

    owner: Owner
    settings: Settings
    partitions: int
    idle_detector: IdleDetector | None = None
    ends: Mapping[TopicPartition, End] = field(default_factory=dict)
    inherited: InheritedLateness | None = None
    _planner: Planner | None = field(default=None, repr=False)
    _version: int | None = None
    """Version of silver that this owner made last; one made since may be a restored earlier one."""

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[BatchPlan]:
        """Merge, batch by batch, everything in bronze that the clock has reached.

        Each batch is yielded once it is committed.
        """
        while self.has_begun() and not is_stopping():
            planner = self.recover()
            with self.owner.step("silver", "plan"):
                plan = planner.next()
            if plan is not None:
                self.commit(plan)
            notify_merge(self.owner, self._rows, plan, planner)
            if plan is not None:
                yield plan
            elif not self._decide_idle(planner):
                return

    def commit(self, plan: BatchPlan) -> None:
        """Read, merge and commit a planned batch, and write its notes (steps 2 to 5)."""
        if self._engine.reader.version(tables.SILVER) != self._version:
            check_table(self._engine.reader, self._engine.lake, tables.SILVER)
        planner = self.recover()
        self._planner = None  # after a failure, only the tables know whether it was committed
        batch = make_batch(self._engine, self.settings, plan, planner, self._generation)
        if batch.begins_epoch:
            note_late_waiting(self.owner, self._rows, self._generation, batch)
        commit = self.owner.next_commit(tables.SILVER, facts=facts_of(plan, self.settings))
        fault_point("silver.merge")
        with self.owner.step("silver", "merge"):
            self._merge(batch, planner, commit)
            self._rows.merged(planner.size(plan))
            self._version = version = self.owner.confirm(tables.SILVER, commit)
        with self.owner.step("silver", "note"):
            self._note(plan, commit, version, planner)
        fault_point("silver.done")
        planner.done(plan)
        self._planner = planner

    def complete(self) -> None:
        """Complete the notes of the last batch, and what follows from the last reset."""
        if self.has_begun():
            self.recover()

    def has_begun(self) -> bool:
        """Return True where the lake says where its newest generation begins.

        Before, nothing can be planned.
        """
        if self._planner is not None:
            return True
        return bool(read_generations(self._engine.reader, self.settings))

    def recover(self) -> Planner:
        """Return the planner of batches.

        At first, and after a failure, it is recovered from the tables, once the last batch's notes
        are complete.
        """
        if self._planner is None:
            end_earlier(self.owner, self.settings)
            self._planner = recover_planner(
                self.owner, self.settings, self._generation, self.ends, self.inherited, self._note
            )
        return self._planner

    def _merge(self, batch: Batch, planner: Planner, commit: Commit) -> None:
        """Read, merge and commit a batch (steps 2 to 4).

        Changing rows that are large are merged a chunk at a time, if the engine can. A batch that
        changes no open row is appended.
        """
        inputs = self._rows.inputs(batch, planner)
        functions = inputs.functions(batch, self._expressions)
        schema = batch.changed_schema()
        unfinished = self._rows.select_unfinished(batch, planner.clocks, inputs.record_count)
        held_bytes = HELD_BATCHES * self._engine.merge_bytes
        if unfinished.where_bytes > held_bytes and unfinished.has_changing:
            merging = functions.merge_in_chunks
            if self._engine.merge_in_chunks(unfinished, merging, inputs.rows, schema, commit):
                return
        rows = [*inputs.rows, self._rows.open_rows(unfinished)]
        size = planner.size(batch.plan) + unfinished.where_bytes
        changed = self._engine.from_tables(
            functions.merge, rows, planner.partitions, schema, size=size
        )
        if not unfinished.has_changing:
            self._engine.append(tables.SILVER, changed, commit)
            return
        large = unfinished if unfinished.size > held_bytes else None
        self._engine.merge(tables.SILVER, changed, commit, large=large)

    def _note(self, plan: BatchPlan, commit: Commit, version: int, planner: Planner) -> None:
        """Write the notes of a batch (step 5); those that are already written are skipped."""
        fault_point("silver.notes")
        if plan.has_late:
            batch = make_batch(self._engine, self.settings, plan, planner, self._generation)
            inputs = replace(self._rows.inputs(batch, planner), counts=[], messages=[])
            find_late = inputs.functions(batch, self._expressions).late
            late = self._engine.from_tables(
                find_late,
                inputs.rows,
                planner.partitions,
                LATE_SCHEMA,
                size=planner.size(plan),
            )
            self._engine.append(tables.LATE, late, commit)
        fault_point("silver.duplicates")
        with self._correcting.of(plan, planner) as corrected:
            repeated = [self._rows.duplicates(plan.batch), corrected.duplicates]
            duplicates = pa.concat_tables(repeated)
            if duplicates.num_rows:
                self._engine.append(tables.DUPLICATES, duplicates, commit)
            fault_point("silver.corrections")
            if corrected.corrections is not None:
                self._engine.append(tables.CORRECTIONS, corrected.corrections, commit)
        fault_point("silver.progress")
        rows = progress_rows(plan, self.settings, version, now_ms())
        self._engine.append(tables.PROGRESS, rows, commit)

    def _decide_idle(self, planner: Planner) -> bool:
        """Write idle decisions for laggards that are silent; return True if there were any."""
        if self.idle_detector is None:
            return False
        decided = decide_idle(planner, self.idle_detector, self.partitions)
        if decided:
            self._planner = None  # after a failure, only the table knows whether it was decided
            write_decisions(self.owner, self.settings, planner, decided)
            self._planner = planner
        return bool(decided)

    @cached_property
    def _rows(self) -> BatchRows:
        return BatchRows(self._engine, self.settings, self._generation)

    @property
    def _expressions(self) -> Expressions:
        return Expressions.of(self.settings)

    @cached_property
    def _correcting(self) -> Correcting:
        return Correcting(self._engine, self.settings, self._generation, self._rows)

    @cached_property
    def _generation(self) -> Generation:
        """The newest generation; no other one begins while this process is the owner."""
        return read_generations(self._engine.reader, self.settings).newest

    @property
    def _engine(self) -> Engine:
        return self.owner.engine
