"""Epochs: which rules a lake has had, and from which batch of silver on each set holds.

The journal has the rules as JSON (`Settings.rules`). A batch is merged by the rules of its epoch,
and its rows are validated and published by them, whenever that happens. The first epoch begins with
batch 0, each further one where `watersmeet evolve` says so.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from watersmeet.configuration.sources import spelled, written
from watersmeet.core.columns import Int64s
from watersmeet.core.plan import TopicPartition
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.commits import Append
from watersmeet.lake.inputs import place_of, topic_partition
from watersmeet.lake.journal import RULES, Decision, decide, read_journal
from watersmeet.lake.table_reader import TableReader, row_count
from watersmeet.settings import Settings


class Epoch(NamedTuple):
    """Settings that hold from a batch of silver on, up to the first batch of the next epoch.

    - `decided_at`: when they were recorded (epoch ms).
    - `read_since`: by topic-partition, where bronze began to read by them; None: unknown.
    """

    number: int
    from_batch: int
    settings: Settings
    decided_at: int = 0
    read_since: Mapping[TopicPartition, int] | None = None


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
    return epochs_of(read_journal(reader), settings)


def epochs_of(decisions: Iterable[Decision], settings: Settings) -> Epochs:
    """Return the epochs that were decided, as `read_epochs` does."""
    epochs = list[Epoch]()
    epoch_settings = settings.before_epochs()
    for number, decision in enumerate(each for each in decisions if each.kind == RULES):
        epoch_settings = epoch_settings.under(json.loads(decision.body["configuration"]))
        since = decision.body["read_since"]
        epochs.append(
            Epoch(
                number,
                decision.body["from_batch"],
                epoch_settings,
                decision.decided_at,
                None if since is None else {topic_partition(row): row["offset"] for row in since},
            )
        )
    return Epochs(epochs or [Epoch(0, 0, settings)])


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
    general = ("kafka.max_record_bytes", "merge.max_future")
    return [
        name
        for name in settings.repartitioned
        if any(field in general or field.startswith(f"sources.{name}.") for field in changed)
    ]


def _is_same(field: str, before: Any, now: Any) -> bool:
    """Return True where two rules are the same. In a schema, the order of names does not count."""
    if field.endswith(".schema") and isinstance(before, str) and isinstance(now, str):
        before, now = json.loads(before), json.loads(now)
    return _text(before) == _text(now)


def _text(rules: Any) -> str:
    """Return rules as JSON, in which 1, 1.0 and true differ."""
    return json.dumps(rules, sort_keys=True)


def check_rules(epochs: Epochs, settings: Settings, repartitioned: str | None = None) -> None:
    """Raise ConfigurationError where the settings' rules are not those of the lake's last epoch.

    `repartitioned`: only those by which this source is read.
    """
    changed = {
        field: rules
        for field, rules in changes(epochs, settings).items()
        if repartitioned is None or repartitioned in rerouted(settings, [field])
    }
    if not changed:
        return
    fix = (
        "`watersmeet evolve` says what would change, and `watersmeet evolve --apply` records it; "
        "or set it back"
    )
    for field, (before, now) in changed.items():
        if now == {"all_of": before}:  # a list meant the first that is there, once
            fix += f" (`{field.rpartition('.')[2]}: {spelled(written(before))}`)"
    raise ConfigurationError(
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


def epoch_body(
    settings: Settings,
    number: int,
    from_batch: int,
    read_since: Mapping[TopicPartition, int] | None = None,
) -> dict[str, Any]:
    """Return what the journal says of an epoch with the settings' rules (see `Epoch`)."""
    since = [{**place_of(tp), "offset": offset} for tp, offset in (read_since or {}).items()]
    return {
        "epoch": number,
        "from_batch": from_batch,
        "configuration": _text(settings.rules()),
        "read_since": None if read_since is None else since,
    }


def begin_epoch(reader: TableReader, append: Append, settings: Settings, from_batch: int) -> None:
    """Record the settings' rules as the next epoch of a lake without an owner.

    Such a lake has no batch yet, or is being rebuilt.
    """
    decide(
        reader,
        append,
        RULES,
        lambda decisions: epoch_body(settings, _count(decisions), from_batch),
    )


def keep_first_epoch(reader: TableReader, append: Append, settings: Settings) -> None:
    """Record the first epoch of a lake that has none."""
    first = epoch_body(settings, 0, 0)
    decide(reader, append, RULES, lambda decisions: None if _count(decisions) else first)


def _count(decisions: Iterable[Decision]) -> int:
    return sum(decision.kind == RULES for decision in decisions)


def unsettled_from(epochs: Epochs, clock: int) -> int:
    """Return a time (ms) before which no late record that is not settled at a clock has its `u`.

    A tenant's clock is never further behind the clock of all than the largest lag. Where the clock
    stands, each epoch may start a millisecond beyond the one before, and settles nothing earlier.
    """
    lag_ms = max(epoch.settings.merge.tenant_max_lag_ms or 0 for epoch in epochs)
    return clock - lag_ms - (len(epochs) - 1)


def needed_ms(epochs: Epochs) -> int:
    """Return how long before a position (ms) rows of silver begin that are needed to derive again
    what comes after it.

    No merge record is open for longer than the window. A late record that is not settled there, or
    comes later, may correct one that closed before.
    """
    within = [epoch.settings.publish.within_ms for epoch in epochs]
    corrected = [ms for ms in within if ms is not None]
    longest = longest_ms(epochs)
    return longest + (max(corrected) + longest + len(epochs) if corrected else 0)


def longest_ms(epochs: Epochs) -> int:
    """Return the longest time (ms) that a merge record could be open, under any of the rules.

    It counts from the first record, by the clock of all: the longest of the windows, plus the
    largest lag of a tenant's clock.
    """
    merges = [epoch.settings.merge for epoch in epochs]
    longest_window_ms = max(merge.window.longest_ms for merge in merges)
    return longest_window_ms + max(merge.tenant_max_lag_ms or 0 for merge in merges)
