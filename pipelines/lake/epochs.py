"""Epochs: which rules a lake has had, and from which batch of silver on each of them holds.

The table `epochs` has the rules as JSON (`Settings.rules`). A batch is merged, and its rows are judged and published, by the
rules of its epoch, whenever that happens. The first epoch begins with batch 0, and another one where `watersmeet evolve` says so.
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
    """The settings that hold from a batch of silver on, to the first batch of the next epoch."""

    number: int
    from_batch: int
    settings: Settings


class Epochs(tuple[Epoch, ...]):
    """The epochs of a lake in their order: one or more."""

    @property
    def current(self) -> Epoch:
        """The last one, whose rules new batches follow."""
        return self[-1]

    def of(self, batch: int) -> Epoch:
        """The epoch of a batch."""
        return [epoch for epoch in self if epoch.from_batch <= batch or epoch is self[0]][-1]

    def ends(self) -> list[tuple[Epoch, int]]:
        """Every epoch but the last that saw a batch, and its last one."""
        pairs = pairwise(self)
        return [(epoch, after.from_batch - 1) for epoch, after in pairs if epoch.from_batch < after.from_batch]


def read_epochs(questions: Questions, settings: Settings) -> Epochs:
    """The epochs of a lake; all but the rules is as in `settings`. A lake without any has one, with these rules."""
    found = _read(questions)
    if not found:
        return Epochs([Epoch(0, 0, settings)])
    epochs, known = [], settings.before_epochs()
    for number, (from_batch, rules) in enumerate(found):
        known = known.under(rules)
        epochs.append(Epoch(number, from_batch, known))
    return Epochs(epochs)


def changes(epochs: Epochs, settings: Settings) -> dict[str, tuple[Any, Any]]:
    """By dotted path, the rules that differ: as the lake's last epoch has them, and as the settings have them."""
    before, now = epochs.current.settings.rules(), settings.rules()
    return {field: (before[field], now[field]) for field in now if not _is_same(field, before[field], now[field])}


def rerouted(settings: Settings, changed: Collection[str]) -> list[str]:
    """Return the repartitioned sources by whose rules, some of which changed, records go to partitions: all that reading a record
    takes.
    """
    return [
        name
        for name in settings.repartitioned
        if any(
            field in ("kafka.max_record_bytes", "merge.max_future") or field.startswith(f"sources.{name}.") for field in changed
        )
    ]


def check_repartition_rules(epochs: Epochs, settings: Settings, source: str) -> None:
    """Raise ConfigurationError where a repartitioned source would be read by other rules than the lake's last epoch."""
    if wrong := [field for field in changes(epochs, settings) if source in rerouted(settings, [field])]:
        raise _other_rules(wrong)


def _is_same(field: str, before: Any, now: Any) -> bool:
    """Whether two rules say the same; in a schema the order of names says nothing."""
    if field.endswith(".schema") and isinstance(before, str) and isinstance(now, str):
        return bool(json.loads(before) == json.loads(now))
    return bool(before == now)


def check_rules(epochs: Epochs, settings: Settings) -> None:
    """Raises ConfigurationError where the settings' rules are not those of the lake's last epoch."""
    if found := changes(epochs, settings):
        raise _other_rules(found)


def _other_rules(fields: Iterable[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{', '.join(fields)}: the lake has other rules than this configuration; `watersmeet evolve` says what would change, "
        "and `watersmeet evolve --apply` records it; or set it back"
    )


def may_begin_anew(questions: Questions, epochs: Epochs, settings: Settings) -> bool:
    """Whether the settings' rules, which differ from the lake's, change nothing that is there: no record was read yet, and no
    column depends on them.
    """
    found = changes(epochs, settings)
    if not found or any(field.endswith(".schema") or field == "merge.window" for field in found):
        return False
    with_rows = [tables.SILVER, tables.PROGRESS, tables.RECOVERED, *map(tables.bronze, settings.sources)]
    existing = [table for table in with_rows if questions.exists(table)]
    return not any(row_count(questions, table) for table in existing)


def epoch_row(settings: Settings, number: int, from_batch: int, now_ms: int) -> pa.Table:
    """Return the settings' rules as a row of `epochs`."""
    row = (number, from_batch, json.dumps(settings.rules(), sort_keys=True), now_ms)
    return tables.layout(settings)[tables.EPOCHS].rows([row])


def begin_epoch(questions: Questions, append: Append, settings: Settings, from_batch: int, now_ms: int) -> None:
    """Records the settings' rules as the next epoch of a lake without an owner, which has no batch yet or is being rebuilt."""
    number = len(_read(questions))
    with suppress_conflict():  # of two first starts, one writes
        append(tables.EPOCHS, epoch_row(settings, number, from_batch, now_ms), Commit(_APPLICATION, 0, number + 1))


def keep_first_epoch(questions: Questions, append: Append, settings: Settings, now_ms: int) -> None:
    """Afterwards the lake has an epoch. Raises ConfigurationError where a lake of layout 1 was begun with other rules."""
    if not _read(questions):
        check_rules_of_layout_1(questions, settings)
        begin_epoch(questions, append, settings, 0, now_ms)


def longest_ms(epochs: Epochs) -> int:
    """For how long (ms) after its first record a merge record could be open at most, by the clock of all, under any of the rules:
    the longest of the windows, and the largest lag of a tenant's clock.
    """
    merges = [epoch.settings.merge for epoch in epochs]
    return max(merge.window.longest_ms for merge in merges) + max(merge.tenant_max_lag_ms or 0 for merge in merges)


class EpochEnd(NamedTuple):
    """Where an epoch ended in a partition: its window, the clock (ms) then, and the largest head (ms) of its inputs, up to which
    it may have looked.
    """

    window: Window
    clock: int
    head: int

    @property
    def horizon(self) -> int:
        """The event time (ms) before which a record was late at the end; what had timed out lies before it."""
        return self.clock - self.window.gap_ms


def epoch_ends(questions: Questions, epochs: Epochs, generation: Generation) -> dict[int, list[EpochEnd]]:
    """By partition, where the epochs before the last ended within a generation."""
    ends = {last: epoch.settings.merge.window for epoch, last in epochs.ends() if last >= generation.from_batch}
    if not ends:
        return {}
    where: Where = [[("batch", "in", sorted(ends)), ("clock", "is not null", None)]]
    values = {"clock": ("max", "clock"), "head": ("max", "head")}
    rows = questions.summary(tables.PROGRESS, ["batch", "partition"], values, where).to_pylist()
    found: dict[int, list[EpochEnd]] = {}
    for row in sorted(rows, key=itemgetter("batch")):
        found.setdefault(row["partition"], []).append(EpochEnd(ends[row["batch"]], row["clock"], row["head"]))
    return found


class Passed(NamedTuple):
    """What ended epochs have left, by partition: the largest clock - gap at their ends, and the clock at the last one (ms).

    With tenants the horizon is that of the clock of a tenant of which nothing was known. `tenant_horizons`: by partition and
    tenant, where it is another one; `of_all`: by topic-partition what all tenants had at the least (ms) when the lag changed.
    """

    horizons: Mapping[int, int] = MappingProxyType({})
    begun: Mapping[int, int] = MappingProxyType({})
    tenant_horizons: Mapping[tuple[int, str], int] = MappingProxyType({})
    of_all: Mapping[TopicPartition, int] = MappingProxyType({})


def passed(questions: Questions, epochs: Epochs, generation: Generation) -> Passed:
    """What the epochs have left in a generation at these ends (`epoch_ends`)."""
    found = epoch_ends(questions, epochs, generation)
    begun = {p: mine[-1].clock for p, mine in found.items()}
    if epochs.current.settings.merge.has_tenants:
        return _passed_with_tenants(questions, epochs, generation, begun)
    return Passed({p: max(each.horizon for each in mine) for p, mine in found.items()}, begun)


def _passed_with_tenants(questions: Questions, epochs: Epochs, generation: Generation, begun: Mapping[int, int]) -> Passed:
    heads = Heads(questions, generation)
    horizons: dict[int, int] = {}
    of_tenants: dict[tuple[int, str], int] = {}
    of_all: dict[TopicPartition, int] = {}
    for epoch, last in epochs.ends():
        if last < generation.from_batch:
            continue
        merge, following = epoch.settings.merge, epochs[epoch.number + 1].settings.merge
        lag_ms, gap_ms = merge.tenant_max_lag_ms or 0, merge.window.gap_ms
        clocks = heads.clocks_at(moment_of(questions, last), lag_ms, of_all)
        of_nobody = clocks.of_nobody()
        known = {each: of_nobody[each[0]] for each in of_tenants if each[0] in of_nobody} | clocks.of_tenants()
        of_tenants |= {
            (p, tenant): horizon_after(of_tenants.get((p, tenant), horizons.get(p)), clock, gap_ms)
            for (p, tenant), clock in known.items()
        }
        horizons |= {p: horizon_after(horizons.get(p), clock, gap_ms) for p, clock in of_nobody.items()}
        if following.tenant_max_lag_ms != merge.tenant_max_lag_ms:
            of_all |= {tp: max(at - lag_ms, of_all.get(tp, at - lag_ms)) for tp, at in clocks.looked_at().items()}
    return Passed(horizons, begun, {each: at for each, at in of_tenants.items() if at > horizons[each[0]]}, of_all)


def _read(questions: Questions) -> Sequence[tuple[int, dict[str, Any]]]:
    if not questions.exists(tables.EPOCHS):
        return []
    found = questions.select(tables.EPOCHS, ["epoch", "from_batch", "configuration"]).sort_by("epoch")
    return [(row["from_batch"], json.loads(row["configuration"])) for row in found.to_pylist()]
