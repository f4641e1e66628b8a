"""The table `epochs`: which rules a lake has had, and from which batch of silver on each set holds.

The rules are stored as JSON (`Settings.rules`). A batch is merged by the rules of its epoch, and
its rows are validated and published by them, whenever that happens. The first epoch begins with
batch 0, each further one where `watersmeet evolve` says so.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from watersmeet.configuration.sources import spelled, written
from watersmeet.core.columns import NULL_TIME, Int64s
from watersmeet.core.model import horizon_after
from watersmeet.core.plan import TopicPartition
from watersmeet.core.window import Window, epoch_start
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.commits import Append, Commit
from watersmeet.lake.conflicts import suppress_conflict
from watersmeet.lake.generations import Generation
from watersmeet.lake.table_reader import TableReader, Where, row_count
from watersmeet.lake.tenant_state import TenantStateReader, read_batch_end
from watersmeet.settings import Settings

_APPLICATION = "watersmeet-epochs"


class Epoch(NamedTuple):
    """Settings that hold from a batch of silver on, up to the first batch of the next epoch.

    `decided_at`: when they were recorded (epoch ms).
    """

    number: int
    from_batch: int
    settings: Settings
    decided_at: int = 0


class Epochs(tuple[Epoch, ...]):
    """The epochs of a lake in order: one or more."""

    @property
    def current(self) -> Epoch:
        """The last epoch, whose rules new batches follow."""
        return self[-1]

    @property
    def first_timeout_ms(self) -> int:
        """The timeout of messages that an earlier version has left in the sink (`Sequence.parse`):
        a lake that takes them up begins with the rules by which they were made.
        """
        return self[0].settings.merge.window.gap_ms

    def of(self, batch: int) -> Epoch:
        """Return the epoch of a batch."""
        return [epoch for epoch in self if epoch.from_batch <= batch or epoch is self[0]][-1]

    def numbers_of(self, batches: Int64s) -> Int64s:
        """Return the number of the epoch of each of these batches."""
        begins = np.array([epoch.from_batch for epoch in self[1:]], np.int64)
        return np.searchsorted(begins, batches, side="right")

    def ends(self) -> list[tuple[Epoch, int]]:
        """Return each epoch before the last that saw a batch, with the number of its last batch."""
        pairs = pairwise(self)
        return [
            (epoch, after.from_batch - 1)
            for epoch, after in pairs
            if epoch.from_batch < after.from_batch
        ]


def read_epochs(reader: TableReader, settings: Settings) -> Epochs:
    """Return the epochs of a lake. Their settings are `settings` but for the rules.

    A lake without any has one epoch, with the rules of `settings`.
    """
    stored = _read(reader)
    if not stored:
        return Epochs([Epoch(0, 0, settings)])
    epochs = []
    epoch_settings = settings.before_epochs()
    for number, (from_batch, rules, decided_at) in enumerate(stored):
        epoch_settings = epoch_settings.under(rules)
        epochs.append(Epoch(number, from_batch, epoch_settings, decided_at))
    return Epochs(epochs)


def changes(epochs: Epochs, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the rules that differ, by dotted path: (in the lake's last epoch, in the settings).

    They are as lakes record them.
    """
    before = epochs.current.settings.rules()
    now = settings.rules()
    return {
        field: (before[field], now[field])
        for field in now
        if not _is_same(field, before[field], now[field])
    }


def rerouted(settings: Settings, changed: Collection[str]) -> list[str]:
    """Return the repartitioned sources whose records the changed rules may reroute.

    The partition of a record depends on every rule by which the record is read.
    """
    return [name for name in settings.repartitioned if _may_reroute(changed, name)]


def _may_reroute(fields: Collection[str], source: str) -> bool:
    general = ("kafka.max_record_bytes", "merge.max_future")
    return any(field in general or field.startswith(f"sources.{source}.") for field in fields)


def check_repartition_rules(epochs: Epochs, settings: Settings, source: str) -> None:
    """Raise ConfigurationError where a repartitioned source would be read by changed rules.

    The ones to follow are those of the lake's last epoch.
    """
    changed = {
        field: rules
        for field, rules in changes(epochs, settings).items()
        if source in rerouted(settings, [field])
    }
    if changed:
        raise _other_rules(changed)


def _is_same(field: str, before: Any, now: Any) -> bool:
    """Return True where two rules are the same. In a schema, the order of names does not count."""
    if field.endswith(".schema") and isinstance(before, str) and isinstance(now, str):
        return bool(json.loads(before) == json.loads(now))
    return bool(before == now)


def check_rules(epochs: Epochs, settings: Settings) -> None:
    """Raise ConfigurationError where the settings' rules are not those of the lake's last epoch."""
    if changed := changes(epochs, settings):
        raise _other_rules(changed)


def _other_rules(changed: Mapping[str, tuple[Any, Any]]) -> ConfigurationError:
    fix = (
        "`watersmeet evolve` says what would change, and `watersmeet evolve --apply` records it; "
        "or set it back"
    )
    for field, (before, now) in changed.items():
        if now == {"all_of": before}:  # a list meant the first that is there, once
            fix += f" (`{field.rpartition('.')[2]}: {spelled(written(before))}`)"
    return ConfigurationError(
        "the lake has other rules than this configuration", where=", ".join(changed), fix=fix
    )


def may_begin_anew(reader: TableReader, epochs: Epochs, settings: Settings) -> bool:
    """Return True where the settings' rules differ from the lake's, but change nothing that exists.

    That is so where no record was read yet and no column depends on the rules that differ.
    """
    changed = changes(epochs, settings)
    if not changed or any(field.endswith(".schema") for field in changed):
        return False
    with_rows = [tables.SILVER, *map(tables.bronze, settings.sources)]
    existing = [table for table in with_rows if reader.exists(table)]
    return not any(row_count(reader, table) for table in existing)


def epoch_row(settings: Settings, number: int, from_batch: int, now_ms: int) -> pa.Table:
    """Return the settings' rules as a row of `epochs`."""
    row = (number, from_batch, json.dumps(settings.rules(), sort_keys=True), now_ms)
    return tables.layout(settings)[tables.EPOCHS].rows([row])


def begin_epoch(
    reader: TableReader, append: Append, settings: Settings, from_batch: int, now_ms: int
) -> None:
    """Record the settings' rules as the next epoch of a lake without an owner.

    Such a lake has no batch yet, or is being rebuilt.
    """
    number = len(_read(reader))
    with suppress_conflict():  # of two concurrent first starts, one writes
        append(
            tables.EPOCHS,
            epoch_row(settings, number, from_batch, now_ms),
            Commit(_APPLICATION, 0, number + 1),
        )


def keep_first_epoch(reader: TableReader, append: Append, settings: Settings, now_ms: int) -> None:
    """Record the first epoch of a lake that has none."""
    if not _read(reader):
        begin_epoch(reader, append, settings, 0, now_ms)


def unsettled_from(epochs: Epochs, clock: int) -> int:
    """Return a time (ms) before which no late record that is not settled at a clock has its `u`.

    A tenant's clock is never further behind the clock of all than the largest lag. Where the clock
    stands, each epoch may start a millisecond beyond the one before, and settles nothing earlier.
    """
    lag_ms = max(epoch.settings.merge.tenant_max_lag_ms or 0 for epoch in epochs)
    return clock - lag_ms - (len(epochs) - 1)


def longest_ms(epochs: Epochs) -> int:
    """Return the longest time (ms) that a merge record could be open, under any of the rules.

    It counts from the first record, by the clock of all: the longest of the windows, plus the
    largest lag of a tenant's clock.
    """
    merges = [epoch.settings.merge for epoch in epochs]
    longest_window_ms = max(merge.window.longest_ms for merge in merges)
    return longest_window_ms + max(merge.tenant_max_lag_ms or 0 for merge in merges)


class EpochEnd(NamedTuple):
    """The end of an epoch in a partition: the window, and the clock (ms) then.

    - `head`: the largest head (ms) of the partition's inputs, up to which the epoch may have
      looked.
    - `next_start`: where the next epoch started (ms); the clock may still have been behind that.
    """

    window: Window
    clock: int
    head: int
    next_start: int

    @property
    def horizon(self) -> int:
        """Event time (ms) before which a record was late at the end.

        What had timed out lies before it.
        """
        return self.clock - self.window.gap_ms


def epoch_ends(
    reader: TableReader, epochs: Epochs, generation: Generation
) -> dict[int, list[EpochEnd]]:
    """Return, by partition and in order, the ends of a generation's epochs before the last."""
    ends = {last: (epoch, after) for epoch, last, after in _ended(epochs, generation)}
    if not ends:
        return {}
    where: Where = [[("batch", "in", sorted(ends)), ("clock", "is not null", None)]]
    values = {"clock": ("max", "clock"), "head": ("max", "head")}
    rows = reader.summary(tables.PROGRESS, ["batch", "partition"], values, where).to_pylist()
    ends_by_partition: dict[int, list[EpochEnd]] = {}
    start: dict[int, int] = {}
    for row in sorted(rows, key=itemgetter("batch")):
        epoch, after = ends[row["batch"]]
        p, clock = row["partition"], row["clock"]
        start |= _starts({p: clock}, start, epoch, after)
        end = EpochEnd(epoch.settings.merge.window, clock, row["head"], start[p])
        ends_by_partition.setdefault(p, []).append(end)
    return ends_by_partition


def _ended(epochs: Epochs, generation: Generation) -> Iterator[tuple[Epoch, int, Epoch]]:
    """Yield the epochs that ended in a generation: each with its last batch, and the next one.

    Epochs without a batch are left out, but for the current one.
    """
    ended = [(epoch, last) for epoch, last in epochs.ends() if last >= generation.from_batch]
    following = [*(epoch for epoch, _ in ended[1:]), epochs.current]
    for (epoch, last), after in zip(ended, following, strict=False):
        yield epoch, last, after


def _starts(
    clocks: Mapping[int, int], starts_before: Mapping[int, int], before: Epoch, after: Epoch
) -> dict[int, int]:
    """Return by partition where the next epoch started, from the clocks (ms) before it."""
    rules = before.settings.merge.closing, after.settings.merge.closing
    return {
        p: epoch_start(clock, starts_before.get(p, NULL_TIME), *rules)
        for p, clock in clocks.items()
    }


class InheritedLateness(NamedTuple):
    """Lateness that the current epoch inherits from ended ones. Times are in ms.

    - `horizons`: by partition, the largest (clock - gap) at the ends of epochs. With tenants, the
      clock is that of a tenant of which nothing was known.
    - `epoch_start`: by partition, where the current epoch started (`core.window.epoch_start`).
    - `tenant_horizons`: by partition and tenant, the horizon where it is another one.
    - `global_floor`: by topic-partition, a lower bound of every tenant's position when the lag
      changed.
    """

    horizons: Mapping[int, int] = MappingProxyType({})
    epoch_start: Mapping[int, int] = MappingProxyType({})
    tenant_horizons: Mapping[tuple[int, str], int] = MappingProxyType({})
    global_floor: Mapping[TopicPartition, int] = MappingProxyType({})


def inherited_lateness(
    reader: TableReader, epochs: Epochs, generation: Generation
) -> InheritedLateness:
    """Return the lateness that ended epochs have left in a generation (`epoch_ends`)."""
    state = TenantStateReader(reader, generation)
    start: dict[int, int] = {}
    horizons: dict[int, int] = {}
    tenant_horizons: dict[tuple[int, str], int] = {}
    global_floor: dict[TopicPartition, int] = {}
    for epoch, last, after in _ended(epochs, generation):
        merge = epoch.settings.merge
        lag_ms = merge.tenant_max_lag_ms
        gap_ms = merge.window.gap_ms
        end = read_batch_end(reader, last)
        start |= _starts(end.clocks, start, epoch, after)
        clocks = state.clocks_at(end, lag_ms, global_floor)
        unknown_clocks = clocks.unknown_tenant_clocks()
        earlier_clocks = {
            place: unknown_clocks[place[0]]
            for place in tenant_horizons
            if place[0] in unknown_clocks
        }
        for place, clock in (earlier_clocks | clocks.tenant_clocks()).items():
            before = tenant_horizons.get(place, horizons.get(place[0]))
            tenant_horizons[place] = horizon_after(before, clock, gap_ms)
        for p, clock in unknown_clocks.items():
            horizons[p] = horizon_after(horizons.get(p), clock, gap_ms)
        if epochs[epoch.number + 1].settings.merge.tenant_max_lag_ms != lag_ms:
            for tp, at in clocks.considered().items():
                floor = at - (lag_ms or 0)
                global_floor[tp] = max(floor, global_floor.get(tp, floor))
    beyond = {place: at for place, at in tenant_horizons.items() if at > horizons[place[0]]}
    return InheritedLateness(horizons, start, beyond, global_floor)


def _read(reader: TableReader) -> Sequence[tuple[int, dict[str, Any], int]]:
    if not reader.exists(tables.EPOCHS):
        return []
    columns = ["epoch", "from_batch", "configuration", "decided_at"]
    rows = reader.select(tables.EPOCHS, columns).sort_by("epoch").to_pylist()
    return [
        (row["from_batch"], json.loads(row["configuration"]), row["decided_at"]) for row in rows
    ]
