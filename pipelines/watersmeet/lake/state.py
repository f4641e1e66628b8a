"""The state of the merge after a batch, replayed from the tables.

Silver's rows `batch` say how far the merge had come. Only tenants' clocks need more: the largest
event time of each tenant on each topic-partition, and the first record there that had reached the
clock. Both follow from narrow columns of bronze, and from the idle policy's decisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

import pyarrow as pa

from watersmeet.core.columns import NULL_TIME
from watersmeet.core.plan import BatchPlan, Cursor, TopicPartition
from watersmeet.core.state import State
from watersmeet.core.tenants import HEADS, Cut
from watersmeet.lake import tables
from watersmeet.lake.bases import read_state
from watersmeet.lake.decisions import Decided, read_decisions
from watersmeet.lake.epochs import Epoch, Epochs
from watersmeet.lake.generations import Generation
from watersmeet.lake.history import History
from watersmeet.lake.inputs import by_input, first_offsets, of_input, of_topic, place_of
from watersmeet.lake.progress import read_batches
from watersmeet.lake.recovered import read_since
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    between,
    extreme,
    in_portions,
)

_Times: TypeAlias = dict[tuple[TopicPartition, "str | None"], int]
"""The largest time (ms) of each tenant by topic-partition."""


def next_state(reader: TableReader, history: History) -> State:
    """Return the state that the next batch of the newest generation starts from."""
    generation = history.newest
    last = extreme(reader, tables.PROGRESS, "batch")
    batch = max(generation.from_batch - 1, -1 if last is None else last)
    state = _entered(_replayed_to(reader, history, generation, batch), history.epochs.current)
    return with_decisions(reader, generation, state)


def with_decisions(
    reader: TableReader, generation: Generation, state: State, until_batch: int | None = None
) -> State:
    """Return a state with a generation's idle decisions up to a batch (None: all of them)."""
    begins = {tp: cursor.next_offset for tp, cursor in state.cursors.items()}
    return state.deciding(_decisions(reader, generation, begins, until_batch))


def state_before(
    reader: TableReader, history: History, generation: Generation, batch: int
) -> State:
    """Return the state that a batch of a generation starts from, under the rules of its epoch."""
    return _entered(state_at(reader, history, generation, batch - 1), history.epochs.of(batch))


def state_at(reader: TableReader, history: History, generation: Generation, batch: int) -> State:
    """Return the state after a batch of a generation, under the rules of its epoch.

    Before the generation's first batch, it is the state that the generation begins with. It is
    replayed from the last base up to the batch.
    """
    state = _replayed_to(reader, history, generation, batch)
    return with_decisions(reader, generation, state, batch)


def _replayed_to(
    reader: TableReader, history: History, generation: Generation, batch: int
) -> State:
    epochs = history.epochs
    base = history.base_at(generation, batch)
    if base is None:
        state = _beginning(reader, epochs.of(generation.from_batch), generation)
    else:
        state = replace(read_state(reader, epochs, base), idle={})
    ends = ended_epochs(epochs, state.next_batch, batch)
    batches = read_batches(reader, [end for _, end in ends]) if ends else {}
    for epoch, end in ends:
        state = _replayed(reader, generation, _entered(state, epoch), batches[end])
    return state


def ended_epochs(epochs: Epochs, from_batch: int, until_batch: int) -> list[tuple[Epoch, int]]:
    """Return the epochs of a range of batches, each with its last batch there."""
    return [
        (epoch, min(end, until_batch))
        for epoch, end in [*epochs.ends(), (epochs.current, until_batch)]
        if from_batch <= end and max(epoch.from_batch, from_batch) <= until_batch
    ]


def _beginning(reader: TableReader, epoch: Epoch, generation: Generation) -> State:
    rules = epoch.settings.merge.rules
    rules = replace(rules, since=read_since(reader, generation))
    cursors = {tp: Cursor(offset) for tp, offset in generation.begin.items()}
    return State(
        generation.from_batch,
        cursors,
        {},
        rules,
        epoch=epoch.number,
        epoch_from=epoch.from_batch,
        generation=generation.number,
    )


def _entered(state: State, epoch: Epoch) -> State:
    if epoch.number == state.epoch:
        return state
    return state.entering(epoch.number, epoch.from_batch, epoch.settings.merge.rules)


def _decisions(
    reader: TableReader,
    generation: Generation,
    begins: Mapping[TopicPartition, int],
    until_batch: int | None,
) -> Iterator[Decided]:
    """Yield at least the decisions of the idle policy that a generation had after a batch (None:
    has), and that come before a record at or behind `begins`.
    """
    made: list[list[Condition]] = [[]]
    if until_batch is not None:
        made = [[("batch", "<=", until_batch)]]
        if generation.kind == "sink":  # those that a lost lake had made
            made.append([("batch", "is null", None)])
    where: Where = [
        [*term, *condition]
        for input_id, its in sorted(by_input(begins).items())
        for term in of_input(
            input_id, between("after_offset", {p: (at - 1, None) for p, at in its.items()})
        )
        for condition in made
    ]
    return read_decisions(reader, generation, where)


def _replayed(reader: TableReader, generation: Generation, state: State, plan: BatchPlan) -> State:
    """Return the state after a later batch of the state's epoch, without idle decisions."""
    lag_ms = state.rules.lag_ms
    if lag_ms is None:
        return state.replayed(plan, HEADS.empty_table(), {})
    ends = {tp: end for tp, end in plan.cursors().items() if tp.partition in plan.clocks}
    begins = {tp: state.cursors[tp].next_offset for tp in ends}
    before = {tp: state.cuts.get(tp, Cut(begin, NULL_TIME)) for tp, begin in begins.items()}
    moving = [tp for tp, cut in before.items() if cut.position < plan.clocks[tp.partition]]
    untils = _ends_of_cuts(reader, plan, {tp: before[tp].until for tp in moving})
    own: _Times = {}
    at_cut: _Times = {}
    reached: dict[TopicPartition, int] = {}
    since = {tp: min(before[tp].until, begin) for tp, begin in begins.items()}
    for tp, decision in _decisions(reader, generation, since, plan.batch):
        if tp not in ends:
            continue
        times = [((tp, tenant), time) for tenant, time in decision.tenant_times]
        if ends[tp].has_consumed(decision):
            _raise(own, times)
        if tp in untils and tp not in reached and decision.after_offset + 1 < untils[tp]:
            _raise(at_cut, times)
            if decision.event_time >= plan.clocks[tp.partition]:  # it ends the cut
                untils[tp], reached[tp] = decision.after_offset + 1, decision.event_time
    positions = ((tp, end.position) for tp, end in ends.items())
    oldest = {tp: (-1 if position is None else position) - lag_ms for tp, position in positions}
    of_ends = {tp: (begin, ends[tp].next_offset) for tp, begin in begins.items()}
    _raise(own, _largest(reader, of_ends, oldest))
    of_cuts = {tp: (before[tp].until, until) for tp, until in untils.items()}
    for (tp, tenant), time in _largest(reader, of_cuts, oldest):
        _raise(at_cut, [((tp, tenant), time)])
        if time >= plan.clocks[tp.partition]:
            reached.setdefault(tp, time)
    rows = [
        {
            **place_of(tp),
            "tenant": tenant,
            "own": own.get((tp, tenant), NULL_TIME),
            "at_cut": at_cut.get((tp, tenant), NULL_TIME),
        }
        for tp, tenant in {**own, **at_cut}
    ]
    cuts = {
        tp: Cut(until, reached.get(tp, plan.clocks[tp.partition])) for tp, until in untils.items()
    }
    return state.replayed(plan, pa.Table.from_pylist(rows, HEADS), cuts)


def _ends_of_cuts(
    reader: TableReader, plan: BatchPlan, since: Mapping[TopicPartition, int]
) -> dict[TopicPartition, int]:
    """Return the offset after the first record from `since` on that has reached the clock after a
    batch. Where none has, a decision ends the cut, which may stand after the last record.
    """
    untils = dict[TopicPartition, int]()
    # The first record that waits is in the cut, if none before it has reached the clock.
    behind = {tp: plan.ranges[tp].until_offset + 1 for tp in since}
    for input_id, its_behind in sorted(by_input(behind).items()):
        begins = {p: since[TopicPartition(input_id, p)] for p in its_behind}
        clocks = {p: plan.clocks[p] for p in its_behind}
        first = first_offsets(reader, input_id, "event_time", clocks, begins, its_behind)
        untils |= {
            TopicPartition(input_id, p): first.get(p, at - 1) + 1 for p, at in its_behind.items()
        }
    return untils


def _largest(
    reader: TableReader,
    ranges: Mapping[TopicPartition, tuple[int, int]],
    oldest: Mapping[TopicPartition, int],
) -> Iterator[tuple[tuple[TopicPartition, str | None], int]]:
    """Yield the largest event time (ms) of each tenant in ranges of offsets, of those beyond the
    time `oldest` of their topic-partition.
    """
    for input_id, its in sorted(by_input(ranges).items()):
        own = [
            [
                ("partition", "=", p),
                *(("offset", ">=", since), ("offset", "<", until)),
                ("event_time", ">", oldest[TopicPartition(input_id, p)]),
            ]
            for p, (since, until) in its.items()
            if since < until
        ]
        for where in in_portions(own):
            rows = reader.summary(
                tables.bronze(input_id.source),
                ["partition", "tenant"],
                {"time": ("max", "event_time")},
                of_topic(input_id, where),
            )
            for row in rows.to_pylist():
                yield (TopicPartition(input_id, row["partition"]), row["tenant"]), row["time"]


def _raise(times: _Times, raised: Iterable[tuple[tuple[TopicPartition, str | None], int]]) -> None:
    for place, time in raised:
        times[place] = max(time, times.get(place, time))
