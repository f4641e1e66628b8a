"""Recovers the planner of silver from the tables."""

from __future__ import annotations

from collections.abc import Mapping

from watersmeet.core.plan import Cursor, End, Rules, TopicPartition
from watersmeet.core.step import State
from watersmeet.engine import Engine
from watersmeet.lake.decisions import read_decisions
from watersmeet.lake.epochs import InheritedLateness, inherited_lateness, read_epochs
from watersmeet.lake.generations import Generation
from watersmeet.lake.progress import last_batch
from watersmeet.lake.recovered import read_since
from watersmeet.lake.tenant_state import BatchEnd, TenantStateReader
from watersmeet.running.planning import Planner
from watersmeet.settings import MergeSettings, Settings


def recover_planner(
    engine: Engine,
    settings: Settings,
    generation: Generation,
    ends: Mapping[TopicPartition, End],
    lateness: InheritedLateness | None,
) -> Planner:
    """Return the planner after a generation's last batch.

    `ends`: where a rebuild stops. `lateness`: for a rebuild, that of the lake; None to read it.
    """
    reader = engine.reader
    epochs = read_epochs(reader, settings)
    last = last_batch(reader)
    if lateness is None:
        lateness = inherited_lateness(reader, epochs, generation)
    begin = {tp: Cursor(offset) for tp, offset in generation.begin.items()}
    planner = Planner(
        reader,
        settings,
        merge_rules(settings.merge, lateness, read_since(reader, generation)),
        State(generation.from_batch, begin, {}),
        engine.merge_bytes,
        epoch=(epochs.current.number, epochs.current.from_batch),
        generation=generation.number,
        ends=ends,
    )
    if last is not None and last.batch >= generation.from_batch:
        planner.state = State(last.batch + 1, {**begin, **last.cursors()}, last.clocks)
    planner.decided(read_decisions(reader, generation))
    if planner.state.clocks:
        end = BatchEnd(planner.state.cursors, planner.state.clocks)
        state_reader = TenantStateReader(reader, generation)
        clocks = state_reader.clocks_at(end, planner.rules.lag_ms, lateness.global_floor)
        planner.resume(planner.state, clocks)
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
        merge.bounds,
    )
