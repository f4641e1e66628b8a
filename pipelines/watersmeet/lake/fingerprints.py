"""Fingerprints of rules in messages, for the recovery of a lost lake.

A message names the rules of all records that the recovery of a lost lake would read again. Records
are read by the rules of the epoch in which bronze read them, and merged by those of the epoch of
silver's batch. The first start of an epoch notes where it begins to read (`keep_read_since`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import orjson

from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.lake.commits import Append
from watersmeet.lake.epochs import EpochEnd, Epochs, epoch_ends
from watersmeet.lake.generations import Generation, Generations
from watersmeet.lake.identity import keep_facts, kept_facts
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

Offsets = Mapping[TopicPartition, int]
Span = tuple[str, Offsets, "Offsets | None"]
"""The fingerprint of rules, and the offsets `[since, until)` that were read by them.

Without `until` (None): all that bronze has from there on.
"""


class Ended(NamedTuple):
    """An ended epoch in a partition: its rules, and where it ended.

    `lag_ms`: how far a tenant's clock could be behind.
    """

    fingerprint: str
    end: EpochEnd
    lag_ms: int


class Fingerprints(NamedTuple):
    """Fingerprints of the rules of a generation.

    - `current`: of the current rules, with their gap and lag (ms).
    - `ended`: by partition, the epochs that ended.
    - `read`: the offsets that were read by other rules, each `[since, until)`.
    """

    current: str
    gap_ms: int
    lag_ms: int
    ended: Mapping[int, Sequence[Ended]]
    read: Sequence[Span]

    def of(self, partition: int, offsets: Mapping[InputId, int], position: int) -> set[str]:
        """Return the fingerprints of the rules by which a partition was read and merged.

        `offsets`: by input, the first offset that was read. `position`: the first position (ms)
        that was merged. An epoch that ended before `position` counts, too, where its end
        still decides

        - what is closed later than it was due, since the next epoch started behind `position`; or
        - what is late; or
        - how far tenants are: after a change of the lag, no tenant is further behind than the
          epoch's lag, counted from the largest head that the epoch has looked at.
        """
        fingerprints = {self.current}
        for fingerprint, end, lag_ms in self.ended.get(partition, ()):
            is_late = end.horizon > position - self.gap_ms
            is_ahead = lag_ms != self.lag_ms and end.head - lag_ms >= position
            if max(end.clock, end.next_start) >= position or is_late or is_ahead:
                fingerprints.add(fingerprint)
        for fingerprint, since, until in self.read:
            for input_id, offset in offsets.items():
                tp = TopicPartition(input_id, partition)
                if until is None or max(offset, since.get(tp, 0)) < until.get(tp, 0):
                    fingerprints.add(fingerprint)
        return fingerprints


def read_fingerprints(
    reader: TableReader, settings: Settings, epochs: Epochs, generations: Generations
) -> Fingerprints:
    """Return the fingerprints for the messages of the newest generation."""
    newest = generations.newest
    now = epochs.current.settings
    fingerprints = [epoch.settings.fingerprint for epoch in epochs]
    fixed = now.fingerprint, now.merge.window.gap_ms, now.merge.tenant_max_lag_ms or 0
    if len(set(fingerprints)) == 1:
        return Fingerprints(*fixed, {}, ())
    ended_epochs = [epoch for epoch, last in epochs.ends() if last >= newest.from_batch]
    ended: dict[int, list[Ended]] = {}
    for p, ends in epoch_ends(reader, epochs, newest).items():
        ended[p] = [
            Ended(epoch.settings.fingerprint, end, epoch.settings.merge.tenant_max_lag_ms or 0)
            for epoch, end in zip(ended_epochs[-len(ends) :], ends, strict=True)
        ]
    since_by_epoch = read_since(reader, settings, len(fingerprints))
    return Fingerprints(*fixed, ended, read_spans(fingerprints, since_by_epoch, generations[1:]))


def read_spans(
    fingerprints: Sequence[str], read_since: Mapping[int, Offsets], jumps: Sequence[Generation] = ()
) -> Sequence[Span]:
    """Return the offsets that were read by other rules than the last of `fingerprints`.

    `read_since`: by epoch, where bronze began to read by its rules. While an epoch is missing
    there, everything was read by the rules of earlier ones: silver may merge, and gold publish,
    without bronze.
    """
    begins = {0: dict[TopicPartition, int](), **read_since}
    numbers = sorted(begins)
    following = zip(numbers, [*numbers[1:], -1], strict=True)
    spans: list[Span] = [
        (fingerprints[number], begins[number], begins.get(after)) for number, after in following
    ]
    for jump in jumps:  # a jump reads what bronze lacks by the rules of its epoch
        until = begins.get(next((n for n in numbers if n > jump.epoch), -1))
        spans.append((fingerprints[jump.epoch], jump.begin, until))
    return [span for span in spans if span[0] != fingerprints[-1]]


def read_since(
    reader: TableReader, settings: Settings, epochs: int
) -> dict[int, dict[TopicPartition, int]]:
    """Return, by the number of an epoch, where bronze began to read by its rules.

    Epochs by whose rules it has read nothing are missing.
    """
    kept = kept_facts(reader)
    begins = dict[int, dict[TopicPartition, int]]()
    for number in range(1, epochs):
        for input_id, name in settings.input_names.items():
            if (text := kept.get(_fact(number, name))) is not None:
                offsets = orjson.loads(text)
                begins.setdefault(number, {}).update(
                    {TopicPartition(input_id, int(p)): at for p, at in offsets.items()}
                )
    return begins


def keep_read_since(
    reader: TableReader,
    append: Append,
    settings: Settings,
    epochs: Epochs,
    next_offsets: Mapping[InputId, Mapping[int, int]],
) -> None:
    """Note bronze's next offsets, by input and partition, as the first by the current rules.

    Only the first note of an epoch counts.
    """
    facts: dict[str, str] = {}
    for input_id, offsets in next_offsets.items():
        text = orjson.dumps({str(p): offset for p, offset in offsets.items()}).decode()
        facts[_fact(epochs.current.number, settings.input_names[input_id])] = text
    keep_facts(reader, append, settings, facts)


def is_noted(reader: TableReader, settings: Settings, number: int) -> bool:
    """Return True where the offsets at which bronze began to read by an epoch's rules are noted.

    For the first epoch, they need no note.
    """
    return number == 0 or number in read_since(reader, settings, number + 1)


def _fact(number: int, name: str) -> str:
    return f"epochs.{number}.{name}.read_since"
