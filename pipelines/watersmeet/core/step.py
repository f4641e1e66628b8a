"""One step of the merge: from the state after a batch to the state after the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pyarrow as pa

from watersmeet.core.clocks import Clocks, clocks_of
from watersmeet.core.merge import NO_MESSAGES, Batch, merge
from watersmeet.core.plan import BatchPlan, Cursor, TopicPartition
from watersmeet.core.tenants import HEADS


class State(NamedTuple):
    """How far the merge has come after a batch."""

    next_batch: int
    cursors: Mapping[TopicPartition, Cursor]
    """How far each topic-partition of every input was consumed."""
    clocks: Mapping[int, int]
    """The clock (ms) of each partition that has one."""
    heads: pa.Table = HEADS.empty_table()
    """What the clocks have left (`core.tenants.HEADS`)."""

    def after(self, plan: BatchPlan, clocks: Clocks) -> State:
        """Return the state after a batch that has moved the clocks."""
        cursors = {**self.cursors, **plan.cursors()}
        return State(plan.batch + 1, cursors, plan.clocks, clocks.heads())


class Step(NamedTuple):
    """The outcome of a batch."""

    changed: pa.Table
    """What `core.merge.merge` returns."""
    clocks: Clocks
    """The clocks of the batch."""
    state: State


def step(
    state: State,
    batch: Batch,
    records: pa.Table,
    unfinished: pa.Table,
    recovered: pa.Table = NO_MESSAGES,
    waited: pa.Table | None = None,
) -> Step:
    """Merge a batch. The arguments are those of `core.merge.merge`, for all partitions."""
    clocks = clocks_of(batch.rules, batch.plan, batch.idle, records, state.heads)
    return Step(
        merge(records, unfinished, batch, recovered, state.heads, waited),
        clocks,
        state.after(batch.plan, clocks),
    )
