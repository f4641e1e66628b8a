"""Makes the headers from which a lost lake is recovered, for the messages of a publication.

A message names the rules of all records that the recovery of a lost lake would read again, by
fingerprints. Records are read by the rules of the epoch in which bronze read them, and merged by
those of the epoch of silver's batch. An epoch says where bronze began to read by it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

from watersmeet.core.columns import NULL_TIME
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.recovery import (
    CloseTimeRange,
    HeaderDecisions,
    LeftBehind,
    Origin,
    life_headers,
    min_offset,
    read_again_from,
    recovery_headers,
)
from watersmeet.core.sequence import CORRECTED, NO_RECOVERY, Headers, clock_of
from watersmeet.core.window import Closing, epoch_start
from watersmeet.lake.history import Epochs, Generation, Generations
from watersmeet.lake.identity import kept_topic_ids
from watersmeet.lake.inputs import first_offsets, of_input
from watersmeet.lake.progress import first_decided, last_decisions, read_batches, read_decisions
from watersmeet.lake.published import last_sink
from watersmeet.lake.table_reader import Condition, TableReader, between
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet.gold")


def left_behind(generations: Generations, settings: Settings, partition: int) -> LeftBehind | None:
    """Return what a lake has left behind in a partition by its jumps; None without any."""
    newest = generations.newest
    if newest.kind != "reset":
        return None
    read_until = {
        name: max(each.reached.get(TopicPartition(i, partition), 0) for each in generations)
        for i, name in settings.input_names.items()
    }
    tail = newest.tails.get(partition)
    return LeftBehind(-1 if tail is None else clock_of(tail.place), read_until)


@dataclass(frozen=True)
class RecoveryHeaders:
    """Recovery headers of the newest generation of one lake."""

    reader: TableReader
    settings: Settings
    partitions: int
    epochs: Epochs
    generations: Generations

    def of(self, ends: Mapping[int, tuple[int, int]]) -> dict[int, tuple[Headers, Headers]]:
        """Return, by partition, the recovery headers of the first and of the last message of a
        publication.

        `ends`: by partition, the times (ms) of the clock that closed these two. Only where a part
        of it may be published alone, and not by a transaction, has the first message any.
        """
        rules = read_fingerprints(self.reader, self.epochs, self.generations)
        has_decisions = bool(last_decisions(self.reader, self.generations.newest))
        made = partial(self._headers, rules, has_decisions=has_decisions)
        last = made({p: (last, last) for p, (_, last) in ends.items()})
        is_atomic = self.settings.publish.delivery == "exactly_once"
        first = {} if is_atomic else made(ends)
        return {p: (first.get(p, []), headers) for p, headers in last.items()}

    def _headers(
        self, rules: Fingerprints, closed: Mapping[int, tuple[int, int]], *, has_decisions: bool
    ) -> dict[int, Headers]:
        """Return, by partition, the recovery headers of a message that was closed at the first of
        these times (ms); nothing that it is published with was closed after the second one."""
        generation = self.generations.newest
        merge = self.epochs.current.settings.merge
        lag_ms = merge.tenant_max_lag_ms
        positions = {
            p: read_again_from(first, merge.longest_ms) for p, (first, _) in closed.items()
        }
        decided = first_decided(self.reader, generation, positions) if has_decisions else {}
        min_offsets = self._min_offsets(generation, positions, decided)
        close_times = {
            p: None if lag_ms is None else CloseTimeRange(*at, lag_ms) for p, at in closed.items()
        }
        decisions = self._decisions(generation, min_offsets, close_times) if has_decisions else {}
        headers = {}
        for p, offsets in min_offsets.items():
            named = {self.settings.input_names[i]: offset for i, offset in offsets.items()}
            idle = {
                self.settings.input_names[i]: decisions[tp].merged()
                for i in offsets
                if (tp := TopicPartition(i, p)) in decisions
            }
            fingerprints = rules.of(p, offsets, positions[p])
            headers[p] = recovery_headers(named, idle, fingerprints, self._life(p))
            if headers[p][0][0] == NO_RECOVERY:
                log.warning(
                    "partition %d: what a lost lake needs of idle decisions does not fit into "
                    "a message",
                    p,
                )
        return headers

    def _life(self, partition: int) -> Headers:
        generation = self.generations.newest
        origins = {
            self.settings.input_names[tp.input]: Origin(self._topic_ids[tp.input.topic], offset)
            for tp, offset in generation.begin.items()
            if tp.partition == partition and tp.input.topic in self._topic_ids
        }
        left = left_behind(self.generations, self.settings, partition)
        return life_headers(generation.life, origins, left, self._corrected_in)

    @cached_property
    def _topic_ids(self) -> Mapping[str, str]:
        return kept_topic_ids(self.reader)

    @cached_property
    def _corrected_in(self) -> str:
        """The topic of corrections, also where the lake makes none any more; empty if none."""
        noted = last_sink(self.reader, CORRECTED) or ""
        return self.settings.publish.corrections_topic or noted.partition(" ")[0]

    def _decisions(
        self,
        generation: Generation,
        min_offsets: Mapping[int, Mapping[InputId, int]],
        close_times: Mapping[int, CloseTimeRange | None],
    ) -> dict[TopicPartition, HeaderDecisions]:
        """Return the idle policy's decisions from the offset before each min_offset on."""
        after = {
            TopicPartition(input_id, p): offset - 1
            for p, offsets in min_offsets.items()
            for input_id, offset in offsets.items()
        }
        where = list[Sequence[Condition]]()
        for input_id in self.settings.inputs:
            since = {tp.partition: (at, None) for tp, at in after.items() if tp.input == input_id}
            where += of_input(input_id, between("after_offset", since))
        decisions: dict[TopicPartition, HeaderDecisions] = {}
        for tp, decision in read_decisions(self.reader, generation, where):
            if decision.after_offset >= after[tp]:
                own = decisions.setdefault(tp, HeaderDecisions(close_times[tp.partition]))
                own.add(decision)
        return decisions

    def _min_offsets(
        self,
        generation: Generation,
        times: Mapping[int, int],
        decided: Mapping[TopicPartition, IdleDecision],
    ) -> dict[int, dict[InputId, int]]:
        """Return, by partition and input, a generation's first offset at a position (ms) >= a time.

        A position first reaches a time at the first record, or after the first decision, that has
        it (`decided`). Every source has one, since the clock has passed that time in all of them.
        """
        offsets: dict[int, dict[InputId, int]] = {partition: {} for partition in times}
        for input_id in self.settings.inputs:
            since = generation.offsets_of(input_id)
            first = first_offsets(self.reader, input_id, "event_time", times, since)
            for p, time in times.items():
                records = [(first[p], time)] if p in first else []
                tp = TopicPartition(input_id, p)
                decisions = [decided[tp]] if tp in decided else []
                offsets[p][input_id] = min_offset(
                    records, decisions, time, next_offset=since.get(p, 0)
                )
        return offsets


Offsets = Mapping[TopicPartition, int]
Span = tuple[str, Offsets, "Offsets | None"]
"""The fingerprint of rules, and the offsets `[since, until)` that were read by them.

Without `until` (None): all that bronze has from there on.
"""


def decides_until(clock: int, head: int, next_start: int, before: Closing, now: Closing) -> int:
    """Return the last position (ms) at which the rules of an epoch that ended still decide
    something in a partition.

    `clock`: that at its end; `head`: the largest one of the partition's inputs, up to which it may
    have looked. Behind what it has merged, its end decides

    - what is closed later than it was due, since the next epoch started at `next_start` (ms);
    - what is late;
    - how far tenants are: after a change of the lag, no tenant is further behind than the epoch's
      lag, counted from `head`.
    """
    horizon = clock - before.gap_ms
    ahead = [head - before.lag_ms] if before.lag_ms != now.lag_ms else []
    return max(clock, next_start, horizon + now.gap_ms - 1, *ahead)


class Fingerprints(NamedTuple):
    """Fingerprints of the rules of a generation.

    - `current`: of the current rules.
    - `ended`: by partition, of the epochs that ended, and until which position (ms) each decides.
    - `read`: the offsets that were read by other rules, each `[since, until)`.
    """

    current: str
    ended: Mapping[int, Sequence[tuple[str, int]]]
    read: Sequence[Span]

    def of(self, partition: int, offsets: Mapping[InputId, int], position: int) -> set[str]:
        """Return the fingerprints of the rules by which a partition was read and merged.

        `offsets`: by input, the first offset that was read. `position`: the first position (ms)
        that was merged.
        """
        ended = self.ended.get(partition, ())
        fingerprints = {self.current, *(name for name, until in ended if until >= position)}
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
    fingerprints = [epoch.settings.fingerprint for epoch in epochs]
    if len(set(fingerprints)) == 1:
        return Fingerprints(fingerprints[-1], {}, ())
    ended = _ended(reader, epochs, generations.newest)
    since = {epoch.number: epoch.read_since for epoch in epochs if epoch.read_since is not None}
    spans = read_spans(fingerprints, since, generations[1:])
    return Fingerprints(fingerprints[-1], ended, spans)


def _ended(
    reader: TableReader, epochs: Epochs, generation: Generation
) -> dict[int, list[tuple[str, int]]]:
    ends = [(epoch, last) for epoch, last in epochs.ends() if last >= generation.from_batch]
    batches = read_batches(reader, [last for _, last in ends]) if ends else {}
    following = [*(epoch for epoch, _ in ends[1:]), epochs.current]
    ended = defaultdict[int, list[tuple[str, int]]](list)
    starts = dict[int, int]()
    now = epochs.current.settings.merge.rules.closing
    for (epoch, last), after in zip(ends, following, strict=False):
        rules, later = (each.settings.merge.rules.closing for each in (epoch, after))
        for p, clock in batches[last].clocks.items():
            start = starts.get(p, NULL_TIME)
            starts[p] = epoch_start(clock, start, rules, later)
            heads = (done.head for tp, done in batches[last].ranges.items() if tp.partition == p)
            head = max(head for head in heads if head is not None)
            until = decides_until(clock, head, starts[p], rules, now)
            ended[p].append((epoch.settings.fingerprint, until))
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
