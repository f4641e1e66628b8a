"""Makes the headers from which a lost lake is recovered, for the messages of a publication."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

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
from watersmeet.lake.decisions import first_decided, last_decisions, read_decisions
from watersmeet.lake.epochs import Epochs
from watersmeet.lake.fingerprints import Fingerprints, read_fingerprints
from watersmeet.lake.generations import Generation, Generations
from watersmeet.lake.identity import kept_topic_ids
from watersmeet.lake.inputs import first_offsets, of_input
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
