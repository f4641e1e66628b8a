"""Bases: saved states of the merge, from which history can be replayed, and where history begins.

A base is the state after a batch, copied into the table `bases`: rows of silver that were open or
waited, and late records that were not settled; heads of tenants (rows `head`, with `own` as event
time and `at_cut` as position); and what silver's rows `batch` do not say, as JSON, in `value` of a
row `state`. Then the journal decides it. Rows of a base that the journal does not have are those of
a crash, and nobody looks at them.

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
from typing import Any, Final, NamedTuple

import orjson
import pyarrow as pa

from watersmeet.core.columns import int64s, row_values, time_column, times_ms
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.silver import in_silver
from watersmeet.core.state import State
from watersmeet.core.tenants import HEADS, Cut
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.epochs import Epochs
from watersmeet.lake.generations import Generation
from watersmeet.lake.journal import BASE, FLOOR, Decision, read_journal
from watersmeet.lake.progress import read_batches
from watersmeet.lake.table_errors import BRING_BACK
from watersmeet.lake.table_reader import Condition, TableReader, Where

STATE: Final[Condition] = ("status", "=", "state")
HEAD: Final[Condition] = ("status", "=", "head")


class Base(NamedTuple):
    """A saved state: its number, the generation and the batch after which it was saved, and how
    many rows of the table it has.
    """

    number: int
    generation: int
    batch: int
    rows: int

    def of(self, status: Condition) -> list[list[Condition]]:
        """Return the condition for those of its rows that have a status."""
        return [[("_base", "=", self.number), status]]

    def body(self) -> dict[str, int]:
        """Return what the journal says of it beside its generation."""
        return {"number": self.number, "batch": self.batch, "rows": self.rows}


class Floors(NamedTuple):
    """Where rows begin, after deletions.

    - `base`: the number of the base with which history begins; -1: with the generation.
    - `times`: by table and partition, the time (ms) at which rows begin.
    """

    base: int
    times: Mapping[tuple[str, int], int]

    def last_of(self, *names: str) -> dict[int, int]:
        """Return, by partition, the last time (ms) at which one of these tables begins."""
        last: dict[int, int] = {}
        for (table, p), time in self.times.items():
            if table in names:
                last[p] = max(time, last.get(p, time))
        return last


def floors_of(decisions: Iterable[Decision]) -> Floors:
    """Return the last of all floors that were decided."""
    first = -1
    times: dict[tuple[str, int], int] = {}
    for body in (decision.body for decision in decisions if decision.kind == FLOOR):
        first = max(first, body["base"])
        for table, p, time in body["times"]:
            times[table, p] = max(time, times.get((table, p), time))
    return Floors(first, times)


def bases_of(decisions: Sequence[Decision]) -> list[Base]:
    """Return the bases that were decided, in order, from the one on with which history begins."""
    first = floors_of(decisions).base
    bases = {
        decision.body["number"]: Base(generation=decision.generation or 0, **decision.body)
        for decision in decisions
        if decision.kind == BASE
    }
    return [bases[number] for number in sorted(bases) if number >= first]


def read_bases(reader: TableReader, generation: Generation) -> list[Base]:
    """Return the bases of a generation, in order, as `bases_of` does."""
    every = bases_of(read_journal(reader))
    return [base for base in every if base.generation == generation.number]


def without_rows(reader: TableReader, numbers: Collection[int]) -> list[Base]:
    """Return bases as they are once a row is deleted for each number of these."""
    rows = _counted(reader, {*numbers})
    deleted = Counter(numbers)
    return [
        base._replace(rows=rows[base.number] - deleted[base.number])
        for base in bases_of(read_journal(reader))
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
    saved = orjson.loads(value)
    done = read_batches(reader, [base.batch])[base.batch]
    epoch = epochs[done.epoch]
    rules = replace(
        epoch.settings.merge.rules,
        horizons=dict(saved["horizons"]),
        epoch_start=dict(saved["epoch_start"]),
        since=dict(saved["since"]),
        tenant_horizons={(p, tenant): at for p, tenant, at in saved["tenant_horizons"]},
    )
    return State(
        base.batch + 1,
        done.cursors(),
        done.clocks,
        rules,
        heads.cast(HEADS),
        {_tp(place): Cut(until, at) for *place, until, at in saved["cuts"]},
        {_tp(place): [*map(_decided, decisions)] for *place, decisions in saved["idle"]},
        epoch.number,
        epoch.from_batch,
        base.generation,
    )


def _encoded(state: State) -> bytes:
    rules = state.rules
    return orjson.dumps(
        {
            "cuts": [[*_place(tp), *cut] for tp, cut in state.cuts.items()],
            "idle": [[*_place(tp), [*map(tuple, each)]] for tp, each in state.idle.items()],
            "horizons": [*rules.horizons.items()],
            "epoch_start": [*rules.epoch_start.items()],
            "since": [*rules.since.items()],
            "tenant_horizons": [[*place, at] for place, at in rules.tenant_horizons.items()],
        }
    )


def _place(tp: TopicPartition) -> list[Any]:
    return [*tp.input, tp.partition]


def _tp(place: list[Any]) -> TopicPartition:
    source, topic, partition = place
    return TopicPartition(InputId(source, topic), partition)


def _decided(saved: list[Any]) -> IdleDecision:
    after_offset, event_time, tenant_times = saved
    times = tuple((tenant, time) for tenant, time in tenant_times)
    return IdleDecision(after_offset, event_time, times)
