"""The table `epochs`: which rules a lake has had, and from which batch of silver on each set holds.

The rules are stored as JSON (`Settings.rules`). A batch is merged by the rules of its epoch, and
its rows are validated and published by them, whenever that happens. The first epoch begins with
batch 0, each further one where `watersmeet evolve` says so.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa

from pipelines.core.model import horizon_after
from pipelines.core.plan import TopicPartition
from pipelines.core.window import Window
from pipelines.errors import ConfigurationError
from pipelines.lake import tables
from pipelines.lake.commits import Append, Commit
from pipelines.lake.conflicts import suppress_conflict
from pipelines.lake.generations import Generation
from pipelines.lake.heads import Heads, moment_of
from pipelines.lake.identity import check_rules_of_layout_1
from pipelines.lake.questions import Questions, Where, row_count
from pipelines.settings import Settings

_APPLICATION = "watersmeet-epochs"


class Epoch(NamedTuple):
    """Settings that hold from a batch of silver on, up to the first batch of the next epoch."""

    number: int
    from_batch: int
    settings: Settings


class Epochs(tuple[Epoch, ...]):
    """The epochs of a lake in order: one or more."""

    @property
    def current(self) -> Epoch:
        """The last epoch, whose rules new batches follow."""
        return self[-1]

    def of(self, batch: int) -> Epoch:
        """Return the epoch of a batch."""
        return [epoch for epoch in self if epoch.from_batch <= batch or epoch is self[0]][-1]

    def ends(self) -> list[tuple[Epoch, int]]:
        """Return each epoch before the last that saw a batch, with the number of its last batch."""
        pairs = pairwise(self)
        return [
            (epoch, after.from_batch - 1)
            for epoch, after in pairs
            if epoch.from_batch < after.from_batch
        ]


def read_epochs(questions: Questions, settings: Settings) -> Epochs:
    """Return the epochs of a lake. Their settings are `settings` but for the rules.

    A lake without any has one epoch, with the rules of `settings`.
    """
    found = _read(questions)
    if not found:
        return Epochs([Epoch(0, 0, settings)])
    epochs = []
    known = settings.before_epochs()
    for number, (from_batch, rules) in enumerate(found):
        known = known.under(rules)
        epochs.append(Epoch(number, from_batch, known))
    return Epochs(epochs)


def changes(epochs: Epochs, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the rules that differ, by dotted path: (in the lake's last epoch, in the settings)."""
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
    return [
        name
        for name in settings.repartitioned
        if any(
            field in ("kafka.max_record_bytes", "merge.max_future")
            or field.startswith(f"sources.{name}.")
            for field in changed
        )
    ]


def check_repartition_rules(epochs: Epochs, settings: Settings, source: str) -> None:
    """Raise ConfigurationError where a repartitioned source would be read by changed rules.

    The ones to follow are those of the lake's last epoch.
    """
    if wrong := [
        field for field in changes(epochs, settings) if source in rerouted(settings, [field])
    ]:
        raise _other_rules(wrong)


def _is_same(field: str, before: Any, now: Any) -> bool:
    """Return True where two rules are the same. In a schema, the order of names does not count."""
    if field.endswith(".schema") and isinstance(before, str) and isinstance(now, str):
        return bool(json.loads(before) == json.loads(now))
    return bool(before == now)


def check_rules(epochs: Epochs, settings: Settings) -> None:
    """Raise ConfigurationError where the settings' rules are not those of the lake's last epoch."""
    if found := changes(epochs, settings):
        raise _other_rules(found)


def _other_rules(fields: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{', '.join(fields)}: the lake has other rules than this configuration; `watersmeet "
        "evolve` says what would change, "
        "and `watersmeet evolve --apply` records it; or set it back"
    )


def may_begin_anew(questions: Questions, epochs: Epochs, settings: Settings) -> bool:
    """Return True where the settings' rules differ from the lake's, but change nothing that exists.

    That is so where no record was read yet and no column depends on the rules that differ.
    """
    found = changes(epochs, settings)
    if not found or any(field.endswith(".schema") or field == "merge.window" for field in found):
        return False
    with_rows = [
        tables.SILVER,
        tables.PROGRESS,
        tables.RECOVERED,
        *map(tables.bronze, settings.sources),
    ]
    existing = [table for table in with_rows if questions.exists(table)]
    return not any(row_count(questions, table) for table in existing)


def epoch_row(settings: Settings, number: int, from_batch: int, now_ms: int) -> pa.Table:
    """Return the settings' rules as a row of `epochs`."""
    row = (number, from_batch, json.dumps(settings.rules(), sort_keys=True), now_ms)
    return tables.layout(settings)[tables.EPOCHS].rows([row])


def begin_epoch(
    questions: Questions, append: Append, settings: Settings, from_batch: int, now_ms: int
) -> None:
    """Record the settings' rules as the next epoch of a lake without an owner.

    Such a lake has no batch yet, or is being rebuilt.
    """
    number = len(_read(questions))
    with suppress_conflict():  # of two concurrent first starts, one writes
        append(
            tables.EPOCHS,
            epoch_row(settings, number, from_batch, now_ms),
            Commit(_APPLICATION, 0, number + 1),
        )


def keep_first_epoch(questions: Questions, append: Append, settings: Settings, now_ms: int) -> None:
    """Record the first epoch of a lake that has none.

    Raises ConfigurationError where a lake of layout 1 was created with other rules.
    """
    if not _read(questions):
        check_rules_of_layout_1(questions, settings)
        begin_epoch(questions, append, settings, 0, now_ms)


def longest_ms(epochs: Epochs) -> int:
    """Return the longest time (ms) that a merge record could be open, under any of the rules.

    It counts from the first record, by the clock of all: the longest of the windows, plus the
    largest lag of a tenant's clock.
    """
    merges = [epoch.settings.merge for epoch in epochs]
    return max(merge.window.longest_ms for merge in merges) + max(
        merge.tenant_max_lag_ms or 0 for merge in merges
    )


class EpochEnd(NamedTuple):
    """The end of an epoch in a partition: the window, and the clock (ms) then.

    `head`: the largest head (ms) of the partition's inputs, up to which the epoch may have looked.
    """

    window: Window
    clock: int
    head: int

    @property
    def horizon(self) -> int:
        """Event time (ms) before which a record was late at the end.

        What had timed out lies before it.
        """
        return self.clock - self.window.gap_ms


def epoch_ends(
    questions: Questions, epochs: Epochs, generation: Generation
) -> dict[int, list[EpochEnd]]:
    """Return, by partition and in order, the ends of a generation's epochs before the last."""
    ends = {
        last: epoch.settings.merge.window
        for epoch, last in epochs.ends()
        if last >= generation.from_batch
    }
    if not ends:
        return {}
    where: Where = [[("batch", "in", sorted(ends)), ("clock", "is not null", None)]]
    values = {"clock": ("max", "clock"), "head": ("max", "head")}
    rows = questions.summary(tables.PROGRESS, ["batch", "partition"], values, where).to_pylist()
    found: dict[int, list[EpochEnd]] = {}
    for row in sorted(rows, key=itemgetter("batch")):
        found.setdefault(row["partition"], []).append(
            EpochEnd(ends[row["batch"]], row["clock"], row["head"])
        )
    return found


class Passed(NamedTuple):
    """Lateness that the current epoch inherits from ended ones. Times are in ms.

    - `horizons`: by partition, the largest (clock - gap) at the ends of epochs. With tenants, the
      clock is that of a tenant of which nothing was known.
    - `begun`: by partition, the clock at the last end.
    - `tenant_horizons`: by partition and tenant, the horizon where it is another one.
    - `of_all`: by topic-partition, a lower bound of every tenant's position when the lag changed.
    """

    horizons: Mapping[int, int] = MappingProxyType({})
    begun: Mapping[int, int] = MappingProxyType({})
    tenant_horizons: Mapping[tuple[int, str], int] = MappingProxyType({})
    of_all: Mapping[TopicPartition, int] = MappingProxyType({})


def passed(questions: Questions, epochs: Epochs, generation: Generation) -> Passed:
    """Return the lateness that ended epochs have left in a generation (`epoch_ends`)."""
    found = epoch_ends(questions, epochs, generation)
    begun = {p: mine[-1].clock for p, mine in found.items()}
    if epochs.current.settings.merge.has_tenants:
        return _passed_with_tenants(questions, epochs, generation, begun)
    return Passed({p: max(each.horizon for each in mine) for p, mine in found.items()}, begun)


def _passed_with_tenants(
    questions: Questions, epochs: Epochs, generation: Generation, begun: Mapping[int, int]
) -> Passed:
    heads = Heads(questions, generation)
    horizons: dict[int, int] = {}
    of_tenants: dict[tuple[int, str], int] = {}
    of_all: dict[TopicPartition, int] = {}
    for epoch, last in epochs.ends():
        if last < generation.from_batch:
            continue
        merge = epoch.settings.merge
        following = epochs[epoch.number + 1].settings.merge
        lag_ms = merge.tenant_max_lag_ms or 0
        gap_ms = merge.window.gap_ms
        clocks = heads.clocks_at(moment_of(questions, last), lag_ms, of_all)
        of_nobody = clocks.of_nobody()
        known = {
            each: of_nobody[each[0]] for each in of_tenants if each[0] in of_nobody
        } | clocks.of_tenants()
        of_tenants |= {
            (p, tenant): horizon_after(of_tenants.get((p, tenant), horizons.get(p)), clock, gap_ms)
            for (p, tenant), clock in known.items()
        }
        horizons |= {
            p: horizon_after(horizons.get(p), clock, gap_ms) for p, clock in of_nobody.items()
        }
        if following.tenant_max_lag_ms != merge.tenant_max_lag_ms:
            of_all |= {
                tp: max(at - lag_ms, of_all.get(tp, at - lag_ms))
                for tp, at in clocks.looked_at().items()
            }
    return Passed(
        horizons,
        begun,
        {each: at for each, at in of_tenants.items() if at > horizons[each[0]]},
        of_all,
    )


def _read(questions: Questions) -> Sequence[tuple[int, dict[str, Any]]]:
    if not questions.exists(tables.EPOCHS):
        return []
    found = questions.select(tables.EPOCHS, ["epoch", "from_batch", "configuration"]).sort_by(
        "epoch"
    )
    return [(row["from_batch"], json.loads(row["configuration"])) for row in found.to_pylist()]
