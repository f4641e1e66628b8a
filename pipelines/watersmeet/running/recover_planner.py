"""Recovers the planner of silver from the tables, and completes what a crash has left undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from watersmeet.core.plan import BatchPlan, Cursor, End, Rules, TopicPartition
from watersmeet.core.step import State
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.decisions import read_decisions
from watersmeet.lake.epochs import InheritedLateness, inherited_lateness, read_epochs
from watersmeet.lake.generations import Generation
from watersmeet.lake.progress import last_batch
from watersmeet.lake.recovered import read_since
from watersmeet.lake.table_reader import TableReader
from watersmeet.lake.tenant_state import BatchEnd, TenantStateReader, read_batch_end
from watersmeet.running.epoch_start import drop_undecided
from watersmeet.running.owner import Owner
from watersmeet.running.planning import Planner
from watersmeet.settings import MergeSettings, Settings

Note: TypeAlias = Callable[[BatchPlan, Commit, int, Planner], None]
"""Writes the notes of a batch: its plan, its commit, silver's version, the planner before it."""


def recover_planner(
    owner: Owner,
    settings: Settings,
    generation: Generation,
    ends: Mapping[TopicPartition, End],
    lateness: InheritedLateness | None,
    note: Note,
) -> Planner:
    """Return the planner after a generation's last batch, once that batch's notes are complete.

    `ends`: where a rebuild stops. `lateness`: for a rebuild, that of the lake; None to read it.
    """
    reader = owner.engine.reader
    epochs = read_epochs(reader, settings)
    last = last_batch(reader, settings)
    if lateness is None:
        lateness = inherited_lateness(reader, epochs, generation)
    drop_undecided(owner, -1 if last is None else last[0].batch)
    begin = {tp: Cursor(offset) for tp, offset in generation.begin.items()}
    planner = Planner(
        reader,
        settings,
        merge_rules(settings.merge, lateness, read_since(reader, generation)),
        State(generation.from_batch, begin, {}),
        owner.engine.merge_bytes,
        epoch=(epochs.current.number, epochs.current.from_batch),
        generation=generation.number,
        ends=ends,
    )
    if last is None or last[0].batch < generation.from_batch:
        planner.decided(read_decisions(reader, generation))
        return planner
    plan, version, commit = last
    planner.state = planner.state.before(plan, {})  # the batch's notes need its decisions
    planner.decided(read_decisions(reader, generation))
    state_reader = TenantStateReader(reader, generation)

    def resume(state: State) -> None:
        """Take a state, with the clocks that follow from it."""
        end = BatchEnd(state.cursors, state.clocks)
        clocks = state_reader.clocks_at(end, planner.rules.lag_ms, lateness.global_floor)
        planner.resume(state, clocks)

    if not _is_noted(reader, plan):
        is_first = plan.batch == generation.from_batch
        before = {} if is_first else read_batch_end(reader, plan.batch - 1).clocks
        resume(planner.state.before(plan, before))
        note(plan, commit, version, planner)
    resume(planner.state.after(plan, planner.clocks))
    return planner


def merge_rules(
    merge: MergeSettings, lateness: InheritedLateness, since: Mapping[int, int]
) -> Rules:
    """Return the rules of a generation; `since` as `read_since` returns it."""
    return Rules(
        merge.window,
        lateness.horizons,
        lateness.epoch_start,
        merge.tenant_max_lag_ms,
        lateness.tenant_horizons,
        since,
    )


def _is_noted(reader: TableReader, plan: BatchPlan) -> bool:
    """Return True if `progress`, the last of a batch's notes, has the batch."""
    noted = reader.summary(tables.PROGRESS, [], {"last": ("max", "batch")})
    return bool(noted["last"].to_pylist() == [plan.batch])
