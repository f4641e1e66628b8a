"""One step of the merge: from the state after a batch to the state after the next one."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from watersmeet.core.clocks import Clocks, clocks_of
from watersmeet.core.merge import NO_MESSAGES, Batch, merge
from watersmeet.core.state import State


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
