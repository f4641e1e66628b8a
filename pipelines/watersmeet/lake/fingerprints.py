"""Fingerprints of rules in messages, for the recovery of a lost lake.

A message names the rules of all records that the recovery of a lost lake would read again. Records
are read by the rules of the epoch in which bronze read them, and merged by those of the epoch of
silver's batch. The first start of an epoch notes where it begins to read (`keep_read_since`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from watersmeet.core.columns import NULL_TIME
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.window import Window, epoch_start
from watersmeet.lake.epochs import Epochs
from watersmeet.lake.generations import Generation, Generations
from watersmeet.lake.progress import read_batches
from watersmeet.lake.table_reader import TableReader

Offsets = Mapping[TopicPartition, int]
Span = tuple[str, Offsets, "Offsets | None"]
"""The fingerprint of rules, and the offsets `[since, until)` that were read by them.

Without `until` (None): all that bronze has from there on.
"""


class Ended(NamedTuple):
    """An epoch that ended in a partition: its rules, their window, and the clock (ms) then.

    - `head`: the largest head (ms) of the partition's inputs, up to which the epoch may have
      looked.
    - `next_start`: where the next epoch started (ms); the clock may still have been behind that.
    - `lag_ms`: how far a tenant's clock could be behind.
    """

    fingerprint: str
    window: Window
    clock: int
    head: int
    next_start: int
    lag_ms: int

    @property
    def horizon(self) -> int:
        """Event time (ms) before which a record was late at the end.

        What had timed out lies before it.
        """
        return self.clock - self.window.gap_ms


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
        for ended in self.ended.get(partition, ()):
            is_late = ended.horizon > position - self.gap_ms
            is_ahead = ended.lag_ms != self.lag_ms and ended.head - ended.lag_ms >= position
            if max(ended.clock, ended.next_start) >= position or is_late or is_ahead:
                fingerprints.add(ended.fingerprint)
        for fingerprint, since, until in self.read:
            for input_id, offset in offsets.items():
                tp = TopicPartition(input_id, partition)
                if until is None or max(offset, since.get(tp, 0)) < until.get(tp, 0):
                    fingerprints.add(fingerprint)
        return fingerprints


def read_fingerprints(
    reader: TableReader, epochs: Epochs, generations: Generations
) -> Fingerprints:
    """Return the fingerprints for the messages of the newest generation."""
    newest = generations.newest
    now = epochs.current.settings
    fingerprints = [epoch.settings.fingerprint for epoch in epochs]
    fixed = now.fingerprint, now.merge.window.gap_ms, now.merge.tenant_max_lag_ms or 0
    if len(set(fingerprints)) == 1:
        return Fingerprints(*fixed, {}, ())
    ended = _ended(reader, epochs, newest)
    since = {epoch.number: epoch.read_since for epoch in epochs if epoch.read_since is not None}
    return Fingerprints(*fixed, ended, read_spans(fingerprints, since, generations[1:]))


def _ended(reader: TableReader, epochs: Epochs, generation: Generation) -> dict[int, list[Ended]]:
    ends = [(epoch, last) for epoch, last in epochs.ends() if last >= generation.from_batch]
    batches = read_batches(reader, [last for _, last in ends]) if ends else {}
    following = [*(epoch for epoch, _ in ends[1:]), epochs.current]
    ended = defaultdict[int, list[Ended]](list)
    starts = dict[int, int]()
    for (epoch, last), after in zip(ends, following, strict=False):
        rules, later = epoch.settings.merge.rules, after.settings.merge.rules
        for p, clock in batches[last].clocks.items():
            start = starts.get(p, NULL_TIME)
            starts[p] = epoch_start(clock, start, rules.closing, later.closing)
            heads = (done.head for tp, done in batches[last].ranges.items() if tp.partition == p)
            head = max(head for head in heads if head is not None)
            name, lag_ms = epoch.settings.fingerprint, rules.lag_ms or 0
            ended[p].append(Ended(name, rules.window, clock, head, starts[p], lag_ms))
    return ended


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
