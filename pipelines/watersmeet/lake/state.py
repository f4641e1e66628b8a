"""The state of the merge after a batch, replayed from the tables, and saved in the table `bases`.

Silver's rows `batch` say how far the merge had come. Only tenants' clocks need more: the largest
event time of each tenant on each topic-partition, and the first record there that had reached the
clock. Both follow from narrow columns of bronze since the last base, and from the idle policy's
decisions.

A base is the state after a batch, from which history can be replayed: rows of silver that were open
or waited, and late records that were not settled; heads of tenants (rows `head`, with `own` as
event time and `at_cut` as position); and what silver's rows `batch` do not say, as JSON, in `value`
of a row `state`. Then the journal decides it. Rows of a base that the journal does not have are
those of a crash, and nobody looks at them.

`keep` decides a floor before it deletes rows, so that a reader who knows it misses nothing above
it. A floor names the base with which history begins: everything after that base can be derived
again from what is left. It also has, by table and partition, times (ms) before which rows are
deleted: merge records (`silver`) and `corrections` by last event time, `late` and `passed` by
position, `duplicates` and `excess` by event time, `quarantine` by Kafka's timestamp.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa

from watersmeet.core.columns import NULL_TIME, int64s, row_values, time_column, times_ms
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import BatchPlan, Cursor, TopicPartition
from watersmeet.core.silver import in_silver
from watersmeet.core.state import State
from watersmeet.core.tenants import HEADS, Cut
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.history import Base, Epoch, Epochs, Generation, History
from watersmeet.lake.inputs import by_input, first_offsets, of_input, of_topic, place_of
from watersmeet.lake.progress import Decided, read_batches, read_decisions
from watersmeet.lake.recovered import read_since
from watersmeet.lake.table_errors import BRING_BACK
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    between,
    extreme,
    within,
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
    ends = [
        (epoch, min(end, batch))
        for epoch, end in [*epochs.ends(), (epochs.current, batch)]
        if state.next_batch <= end and max(epoch.from_batch, state.next_batch) <= batch
    ]
    batches = read_batches(reader, [end for _, end in ends]) if ends else {}
    for epoch, end in ends:
        state = _replayed(reader, generation, _entered(state, epoch), batches[end])
    return state


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
        spans = {p: (since, until) for p, (since, until) in its.items() if since < until}
        if not spans:
            continue
        times = {p: oldest[TopicPartition(input_id, p)] for p in spans}
        younger = [[*term, ("event_time", ">", times)] for term in within(spans)]
        rows = reader.summary(
            tables.bronze(input_id.source),
            ["partition", "tenant"],
            {"time": ("max", "event_time")},
            of_topic(input_id, younger),
        )
        for row in rows.to_pylist():
            yield (TopicPartition(input_id, row["partition"]), row["tenant"]), row["time"]


def _raise(times: _Times, raised: Iterable[tuple[tuple[TopicPartition, str | None], int]]) -> None:
    for place, time in raised:
        times[place] = max(time, times.get(place, time))


STATE: Final[Condition] = ("status", "=", "state")
HEAD: Final[Condition] = ("status", "=", "head")


def without_rows(
    reader: TableReader, bases: Iterable[Base], numbers: Collection[int]
) -> list[Base]:
    """Return bases as they are once a row is deleted for each number of these."""
    rows = _counted(reader, {*numbers})
    deleted = Counter(numbers)
    return [
        base._replace(rows=rows[base.number] - deleted[base.number])
        for base in bases
        if base.number in deleted
    ]


def check_bases(reader: TableReader, bases: Sequence[Base]) -> None:
    """Raise ConfigurationError where the table lacks rows of one of these bases."""
    counts = _counted(reader, {base.number for base in bases})
    for base in bases:
        if (count := counts.get(base.number, 0)) < base.rows:
            raise ConfigurationError(
                f"the table bases has {count:,} of the {base.rows:,} rows of the state that was "
                f"saved after batch {base.batch}: an earlier copy of it was put in its place, or "
                "rows were deleted",
                where="lake",
                fix=BRING_BACK,
            )


def _counted(reader: TableReader, numbers: Set[int]) -> dict[int, int]:
    if not numbers or not reader.exists(tables.BASES):
        return {}
    where: Where = [[("_base", "in", sorted(numbers))]]
    rows = reader.summary(tables.BASES, ["_base"], {"rows": ("count", "*")}, where)
    return dict(row_values(rows, "_base", "rows"))


def base_rows(state: State, number: int, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of a base beside those of silver: heads, and its row `state`.

    `schema`: the columns of the table.
    """
    facts = {"_base": number, "generation": state.generation, "batch": state.next_batch - 1}
    heads = state.heads.drop_columns(["own", "at_cut"])
    for name, column in (("event_time", "own"), ("position", "at_cut")):
        heads = heads.append_column(name, time_column(int64s(state.heads[column])))
    if heads.num_rows:
        yield in_silver(_with(heads, facts), "head", schema)
    columns = {"value": pa.array([_encoded(state)], pa.binary()), "partition": [0]}
    row = pa.table(columns)
    yield in_silver(_with(row, facts), "state", schema)


def _with(rows: pa.Table, facts: Mapping[str, Any]) -> pa.Table:
    for name, value in facts.items():
        rows = rows.append_column(name, pa.repeat(pa.scalar(value), rows.num_rows))
    return rows


def of_base(rows: pa.Table, number: int, schema: pa.Schema) -> pa.Table:
    """Return rows of silver as rows of a base."""
    rows = _with(rows, {"_base": number})
    return rows.select(schema.names).cast(schema)


def read_state(reader: TableReader, epochs: Epochs, base: Base) -> State:
    """Return the state that a base has saved, under the rules of its epoch. How far it had come,
    silver's rows `batch` say.

    Raises ConfigurationError where rows of the base are gone.
    """
    check_bases(reader, [base])
    [value] = reader.select(tables.BASES, ["value"], base.of(STATE))["value"].to_pylist()
    columns = [*HEADS.names[:4], "event_time", "position"]
    rows = reader.rows(tables.BASES, columns, base.of(HEAD))
    times = (pa.array(times_ms(rows[name])) for name in ("event_time", "position"))
    heads = pa.Table.from_arrays([*(rows[name] for name in HEADS.names[:4]), *times], HEADS.names)
    saved = msgspec.json.decode(value, type=_Saved)
    done = read_batches(reader, [base.batch])[base.batch]
    epoch = epochs[done.epoch]
    rules = replace(
        epoch.settings.merge.rules,
        horizons=dict(saved.horizons),
        epoch_start=dict(saved.epoch_start),
        since=dict(saved.since),
        tenant_horizons={(p, tenant): time for p, tenant, time in saved.tenant_horizons},
    )
    return State(
        base.batch + 1,
        done.cursors(),
        done.clocks,
        rules,
        heads.cast(HEADS),
        {TopicPartition(InputId(s, t), p): Cut(*cut) for s, t, p, *cut in saved.cuts},
        {TopicPartition(InputId(s, t), p): decisions for s, t, p, decisions in saved.idle},
        epoch.number,
        epoch.from_batch,
        base.generation,
    )


class _Saved(msgspec.Struct):
    """What a row `state` says, in `value`."""

    cuts: list[tuple[str, str, int, int, int]]
    idle: list[tuple[str, str, int, list[IdleDecision]]]
    horizons: list[tuple[int, int]]
    epoch_start: list[tuple[int, int]]
    since: list[tuple[int, int]]
    tenant_horizons: list[tuple[int, str, int]]


def _encoded(state: State) -> bytes:
    rules = state.rules
    saved = _Saved(
        [(*tp.input, tp.partition, *cut) for tp, cut in state.cuts.items()],
        [(*tp.input, tp.partition, [*decisions]) for tp, decisions in state.idle.items()],
        [*rules.horizons.items()],
        [*rules.epoch_start.items()],
        [*rules.since.items()],
        [(*place, time) for place, time in rules.tenant_horizons.items()],
    )
    return msgspec.json.encode(saved)


class SlowestTenant(NamedTuple):
    """The number of a partition's tenants with open or waiting rows, and the one furthest behind.

    `clock`: of that tenant, in ms (None: not known).
    """

    tenants: int
    tenant: str | None
    clock: int | None


UNKNOWN_TENANT = SlowestTenant(0, None, None)


def unfinished(reader: TableReader) -> pa.Table:
    """Return how many `rows` of silver are still to change, by partition, tenant and status."""
    by, rows = ["partition", "tenant", "status"], {"rows": ("count", "*")}
    return reader.summary(tables.SILVER, by, rows, [[tables.IS_UNFINISHED]])


def times_of(rows: pa.Table, state: State) -> list[tuple[int, str, int | None]]:
    """Return each partition and tenant of such rows (`unfinished`) with its clock.

    Clocks are in ms (None: not known); the order is by partition and clock.
    """
    tenants = rows.group_by(["partition", "tenant"]).aggregate([])
    times = state.tenant_clocks(int64s(tenants["partition"]), tenants["tenant"])
    clocked = zip(
        tenants["partition"].to_pylist(), times.tolist(), tenants["tenant"].to_pylist(), strict=True
    )
    return [(p, tenant, None if time == NULL_TIME else time) for p, time, tenant in sorted(clocked)]


def slowest(rows: pa.Table, state: State) -> dict[int, SlowestTenant]:
    """Return, by partition, the number of tenants in such rows (`unfinished`), and the slowest."""
    slowest_tenants: dict[int, SlowestTenant] = {}
    for p, tenant, clock in times_of(rows, state):
        first = slowest_tenants.get(p, SlowestTenant(0, tenant, clock))
        slowest_tenants[p] = first._replace(tenants=first.tenants + 1)
    return slowest_tenants


def tenants_of(
    reader: TableReader, heads: Mapping[TopicPartition, int]
) -> dict[TopicPartition, str | None]:
    """Return the tenant whose record took a topic-partition to its head (ms).

    A topic-partition is absent where the idle policy did, and no record in bronze.
    """
    first_tenants: dict[TopicPartition, tuple[int, str | None]] = {}
    by = ["partition", "tenant"]
    first_of = {"first": ("min", "offset")}
    for input_id, its in sorted(by_input(heads).items()):
        at_heads = between("event_time", {p: (at, at + 1) for p, at in its.items()})
        table = tables.bronze(input_id.source)
        for row in reader.summary(table, by, first_of, of_topic(input_id, at_heads)).to_pylist():
            tp = TopicPartition(input_id, row["partition"])
            first = (row["first"], row["tenant"])
            first_tenants[tp] = min(first, first_tenants.get(tp, first), key=itemgetter(0))
    return {tp: tenant for tp, (_, tenant) in first_tenants.items()}
