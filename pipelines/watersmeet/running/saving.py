"""Saves the state of the merge as a base now and then, where `keep` lets rows go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import pyarrow as pa

from watersmeet.core.state import State
from watersmeet.lake import tables
from watersmeet.lake.history import Base, Generation, History, unsettled
from watersmeet.lake.journal import BASE
from watersmeet.lake.pieces import read_pieces
from watersmeet.lake.progress import read_batches
from watersmeet.lake.state import base_rows, of_base, state_at
from watersmeet.lake.table_reader import Condition, TableReader, extreme, in_portions
from watersmeet.running.correcting import Correcting
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings


def is_base_due(
    settings: Settings, saved: Mapping[int, int] | None, now: Mapping[int, int]
) -> bool:
    """Return True where a state with the clocks `now` (ms) is to be saved.

    `saved`: the clocks of the newest base; None without one.
    """
    every_ms = settings.keep.base_every_ms
    if every_ms is None or not now:
        return False
    return saved is None or any(
        p not in saved or clock >= saved[p] + every_ms for p, clock in now.items()
    )


def saved_clocks(
    reader: TableReader, history: History, generation: Generation, batch: int
) -> Mapping[int, int] | None:
    """Return the clocks (ms) of the last base of a generation up to a batch; None without one."""
    base = history.base_at(generation, batch)
    return None if base is None else read_batches(reader, [base.batch])[base.batch].clocks


def save_last_state(owner: Owner, settings: Settings, generation: Generation, batch: int) -> None:
    """Save the state after silver's last batch, if that is due."""
    reader = owner.engine.reader
    history = owner.history(settings)
    now = read_batches(reader, [batch])[batch].clocks
    if is_base_due(settings, saved_clocks(reader, history, generation, batch), now):
        state = state_at(reader, history, generation, batch)
        save_state(owner, settings, state)


def save_state(owner: Owner, settings: Settings, state: State) -> None:
    """Save the state after silver's last batch as a base: its rows, and then the decision.

    What a call leaves that ends early has a number that nobody looks at.
    """
    reader = owner.engine.reader
    last = extreme(reader, tables.BASES, "_base") or 0
    number = max(last + 1, owner.token << 20)  # no other owner copies under this number
    schema = owner.engine.lake.layout[tables.BASES].schema
    copied = (of_base(rows, number, schema) for rows in _rows(owner, settings, state))
    count = 0
    for rows in chain(copied, base_rows(state, number, schema)):
        if rows.num_rows:
            owner.append(tables.BASES, rows)
            count += rows.num_rows
    base = Base(number, state.generation, state.next_batch - 1, count)
    owner.decide(BASE, base.body(), base.generation)


def _rows(owner: Owner, settings: Settings, state: State) -> Iterator[pa.Table]:
    """Yield the rows of silver that a state has: what is unfinished, and late records that no batch
    has settled.
    """
    reader = owner.engine.reader
    names = owner.engine.lake.schema(tables.SILVER).names
    of_generation: Condition = ("generation", "=", state.generation)
    by = ("partition", "event_time")
    here = [[of_generation, tables.IS_UNFINISHED]]
    yield from read_pieces(reader, tables.SILVER, names, here, by)
    if not tables.has_corrections(settings):
        return
    history = owner.history(settings)
    correcting = Correcting(owner.engine, settings, history.newest)
    late = [
        [("status", "=", "late"), *term]
        for term in unsettled(history.epochs, history.newest, state.clocks)
    ]
    for where in in_portions(late):
        for rows in read_pieces(reader, tables.SILVER, names, where, by):
            yield correcting.not_behind(rows)
