"""The silver layer: the merge of the sources by event time, a pure function of bronze.

It is kept by one Delta commit per batch, which holds everything that the batch has made:

1. *plan*: exact offset ranges and clocks, from bronze beyond the last batch
   (`watersmeet.running.planning`; writes nothing);
2. *read* the records of the ranges, and the open merge records;
3. *merge* them (`core.merge`), by Kafka partition, and correct what is settled
   (`watersmeet.running.correcting`);
4. *commit* the merge records that change, a row for each record that was not merged, the
   corrections, and for each topic-partition how far the batch has come.

Before step 4 nothing is known of a batch, and another plan may be made. Afterwards nothing is left
to do.

If a source is silent, the idle policy may make a decision for it. The decision counts like a record
of bronze, and is a row in the commit of the batch that it lets go on.
The lake's newest generation says where the merge begins (`running.generations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from watersmeet.core.idle import Idle, IdleDecision, decide
from watersmeet.core.merge import Batch
from watersmeet.core.plan import BatchPlan, End, TopicPartition
from watersmeet.core.silver import in_silver
from watersmeet.core.state import State
from watersmeet.engine import Engine
from watersmeet.expressions.publish import Expressions
from watersmeet.faults import fault_point
from watersmeet.kafka.idle_detector import IdleDetector
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.history import Generation
from watersmeet.lake.progress import Decided, batch_rows, decision_rows, facts_of
from watersmeet.lake.state import next_state
from watersmeet.running.batch_rows import BatchRows
from watersmeet.running.correcting import Correcting
from watersmeet.running.generations import end_earlier
from watersmeet.running.merge_functions import MergeFunctions
from watersmeet.running.outcomes import notify_merge
from watersmeet.running.owner import Owner, now_ms
from watersmeet.running.planning import Planner, make_batch
from watersmeet.running.saving import is_base_due, save_state, saved_clocks
from watersmeet.settings import Settings

HELD_BATCHES = 2
"""Number of batches whose byte limit open rows may reach; larger ones are merged in chunks."""


@dataclass
class Silver:
    """The merge of one lake over `partitions` Kafka partitions; one owner at a time.

    `idle_detector` watches for silent sources; without it the idle policy makes no decision.
    `begin` and `ends`: the state that a rebuild starts from, and where it stops.
    """

    owner: Owner
    settings: Settings
    partitions: int
    idle_detector: IdleDetector | None = None
    ends: Mapping[TopicPartition, End] = field(default_factory=dict)
    begin: State | None = None
    _planner: Planner | None = field(default=None, repr=False)
    _saved: Mapping[int, int] | None = field(default=None, repr=False)
    """The clocks (ms) of the newest base."""
    _decided: list[Decided] = field(default_factory=list, repr=False)
    """Idle decisions that the next batch commits."""

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[BatchPlan]:
        """Merge, batch by batch, everything in bronze that the clock has reached.

        Each batch is yielded once it is committed.
        """
        while self.has_begun() and not is_stopping():
            planner = self.recover()
            with self.owner.step("silver", "plan"):
                plan = planner.next()
                if plan is None:
                    plan = self._decide_idle(planner)
            if plan is not None:
                self.commit(plan)
            notify_merge(self.owner, self._rows, plan, planner)
            if plan is None:
                return
            yield plan

    def commit(self, plan: BatchPlan) -> None:
        """Read, merge and commit a planned batch (steps 2 to 4)."""
        planner = self.recover()
        self.owner.rely_on_what_was_read()
        self._planner = None  # after a failure, only the table knows whether it was committed
        batch = make_batch(self._engine, self.settings, plan, planner, self._generation)
        decisions = self.owner.history(self.settings).decisions
        commit = self.owner.next_commit(tables.SILVER, facts=facts_of(plan, decisions))
        fault_point("silver.merge")
        with self.owner.step("silver", "merge"):
            self._merge(batch, planner, commit)
            self._rows.merged(planner.size(plan))
            self.owner.confirm(tables.SILVER, commit)
        fault_point("silver.done")
        planner.done(plan)
        self._decided = []
        self._planner = planner
        self._save(planner.state)

    def _save(self, state: State) -> None:
        if self.settings.keep.base_every_ms is None:
            return
        if self._saved is None:
            history = self.owner.history(self.settings)
            reader = self._engine.reader
            self._saved = saved_clocks(reader, history, self._generation, state.next_batch)
        if is_base_due(self.settings, self._saved, state.clocks):
            with self.owner.step("silver", "save"):
                save_state(self.owner, self.settings, state)
            self._saved = state.clocks

    def complete(self) -> None:
        """Complete what follows from the last reset."""
        if self.has_begun():
            self.recover()

    def has_begun(self) -> bool:
        """Return True where the lake says where its newest generation begins.

        Before, nothing can be planned.
        """
        if self._planner is not None:
            return True
        return bool(self.owner.history(self.settings).generations)

    def recover(self) -> Planner:
        """Return the planner of batches; at first, and after a failure, recovered from the
        tables.
        """
        if self._planner is None:
            end_earlier(self.owner, self.settings)
            self._decided = []
            reader = self._engine.reader
            state = self.begin or next_state(reader, self.owner.history(self.settings))
            size = self._engine.merge_bytes
            self._planner = Planner(reader, self.settings, state, size, self.ends)
        return self._planner

    def _merge(self, batch: Batch, planner: Planner, commit: Commit) -> None:
        # Changing rows that are large are merged a chunk at a time, if the engine can. A batch that
        # changes no open row is appended.
        inputs = self._rows.inputs(batch, planner)
        beside = [rows for _, rows in inputs]
        functions = MergeFunctions(batch, self._expressions, [kind for kind, _ in inputs])
        schema = batch.changed_schema()
        record_count = sum(planner.records(batch.plan).values())
        unfinished = self._rows.select_unfinished(batch, planner, record_count)
        following = self._correcting.settling(
            batch, planner.clocks, planner.state.clocks, self._own_rows(batch)
        )
        held_bytes = HELD_BATCHES * self._engine.merge_bytes
        if unfinished.where_bytes > held_bytes and unfinished.has_changing:
            merging = functions.merge_in_chunks
            if self._engine.merge_in_chunks(unfinished, merging, beside, schema, commit, following):
                return
        rows = [*beside, self._rows.open_rows(unfinished)]
        size = planner.size(batch.plan) + unfinished.where_bytes
        changed = self._engine.from_tables(
            functions.merge, rows, planner.partitions, schema, size=size
        )
        if not unfinished.has_changing:
            self._engine.append(tables.SILVER, changed, commit, following)
            return
        large = unfinished if unfinished.size > held_bytes else None
        self._engine.merge(tables.SILVER, changed, commit, large=large, following=following)

    def _own_rows(self, batch: Batch) -> pa.Table:
        plan = batch.plan
        schema = batch.changed_schema()
        now = now_ms()
        decisions = decision_rows(self._decided, now, plan.batch, plan.generation)
        rows = [
            in_silver(batch_rows(plan, now), "batch", schema),
            in_silver(decisions, "idle", schema),
        ]
        return pa.concat_tables(rows)

    def _decide_idle(self, planner: Planner) -> BatchPlan | None:
        if self.idle_detector is None:
            return None
        decided = _idle_decisions(planner, self.idle_detector, self.partitions)
        if not decided:
            return None
        fault_point("idle.decide")
        before = planner.state
        planner.state = before.deciding(decided)
        plan = planner.next()
        if plan is None:  # they let nothing go on
            planner.state = before
        else:
            self._decided = decided
        return plan

    @cached_property
    def _rows(self) -> BatchRows:
        return BatchRows(self._engine, self.settings, self._generation)

    @property
    def _expressions(self) -> Expressions:
        return Expressions.of(self.settings)

    @cached_property
    def _correcting(self) -> Correcting:
        return Correcting(self._engine, self.settings, self._generation)

    @cached_property
    def _generation(self) -> Generation:
        """The newest generation; no other one begins while this process is the owner."""
        return self.owner.history(self.settings).generations.newest

    @property
    def _engine(self) -> Engine:
        return self.owner.engine


def _idle_decisions(planner: Planner, detector: IdleDetector, partitions: int) -> list[Decided]:
    # A source is silent if nothing has come for long enough, and nothing waits in bronze.
    silent = detector.observe(planner.bronze_ends())
    heads = planner.heads()
    idle = dict[int, Idle]()
    for p in range(partitions):
        partition_heads = {tp.input: head for tp, head in heads.items() if tp.partition == p}
        inputs = {tp.input for tp in silent if tp.partition == p and not planner.waits(tp)}
        decision = decide(partition_heads, inputs)
        if decision is not None and _has_nothing_beyond(planner, detector, p, decision):
            idle[p] = decision
    tenant_times = planner.tenant_times(idle)
    decided = []
    for p, decision in idle.items():
        for tp in (TopicPartition(input_id, p) for input_id in decision.inputs):
            times = planner.raised(tp, tenant_times.get(p, ()))
            decided.append(
                (tp, IdleDecision(_last_offset(planner, tp), decision.event_time, times))
            )
    return decided


def _has_nothing_beyond(planner: Planner, detector: IdleDetector, p: int, decision: Idle) -> bool:
    after = [TopicPartition(input_id, p) for input_id in decision.inputs]
    return detector.has_nothing_beyond({tp: _last_offset(planner, tp) for tp in after})


def _last_offset(planner: Planner, tp: TopicPartition) -> int:
    return planner.state.cursors[tp].next_offset - 1
