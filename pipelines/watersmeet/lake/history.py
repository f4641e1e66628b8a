"""The history of a lake, as one value: what its journal says of it.

- Epochs: which rules the lake has had, as JSON (`Settings.rules`), and from which batch of silver
  on each set holds. A batch is merged by the rules of its epoch, and its rows are validated and
  published by them, whenever that happens. The first epoch begins with batch 0, each further one
  where `watersmeet evolve` says so.
- Generations: where the lake began, and where each jump began it anew. A generation is what is a
  pure function of its beginning and of bronze: silver's rows, late records, the idle policy's
  decisions. Batches are numbered across generations.
- Bases: saved states of the merge (`lake.state`), from which history can be replayed; floors say
  where it begins, once `keep` has deleted rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from watersmeet.core import sequence as sequences
from watersmeet.core.columns import Int64s
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import CORRECTED, MERGED, Place, Tail
from watersmeet.lake.inputs import place_of, topic_partition
from watersmeet.lake.journal import (
    BASE,
    BEGIN,
    CLOSED,
    ERASED,
    FLOOR,
    IDENTITY,
    MOVED,
    REBUILD,
    RULES,
    SKIP,
    Decision,
    read_journal,
)
from watersmeet.lake.table_reader import Condition, TableReader
from watersmeet.settings import Settings

# -- epochs


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


def _epochs(decisions: Iterable[Decision], settings: Settings) -> Epochs:
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
        "configuration": json.dumps(settings.rules(), sort_keys=True),
        "read_since": None if read_since is None else since,
    }


def unsettled_from(epochs: Epochs, clock: int) -> int:
    """Return a time (ms) before which no late record that is not settled at a clock has its `u`.

    A tenant's clock is never further behind the clock of all than the largest lag. Where the clock
    stands, each epoch may start a millisecond beyond the one before, and settles nothing earlier.
    """
    lag_ms = max(epoch.settings.merge.tenant_max_lag_ms or 0 for epoch in epochs)
    return clock - lag_ms - (len(epochs) - 1)


def unsettled(
    epochs: Epochs, generation: Generation, clocks: Mapping[int, int]
) -> list[list[Condition]]:
    """Return a term for each partition, for late records of a generation that may not be settled
    at these clocks (ms).
    """
    of_generation: Condition = ("generation", "=", generation.number)
    return [
        [of_generation, ("partition", "=", p), ("u", ">=", unsettled_from(epochs, clock))]
        for p, clock in sorted(clocks.items())
    ]


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


# -- generations


class InKafka(NamedTuple):
    """Kafka's id of a topic, and what it had of a partition: its first offset and its end."""

    topic_id: str
    first_offset: int
    end_offset: int


class Generation(NamedTuple):
    """A generation of a lake, by its beginning.

    - `from_batch`: its first batch of silver.
    - `begin`: by topic-partition, the offset that is read first.
    - `tails`: by partition, the last message of the sink at the beginning. What sorts before it is
      never published.
    - `correction_tails`: the same for the topic of corrections.
    - `kind`: `start`, `sink` (a lost lake was recovered) or `reset`; `reason` in words.
    - `epoch`: the last epoch at the beginning.
    - `life`: names the lake, in its messages as well. A lake that is taken up from its sink has
      the name of the one that was lost.
    - `reached`: by topic-partition, the offset that the generation before would have merged next.
    - `in_kafka`: what Kafka had then of topic-partitions.
    - `topics`: by the table of a sequence, the topic that has its `tails`, with Kafka's id of it
      (`core.texts.identified`).
    - `known`: how many rows of silver it has about messages that are out (`count_known`).
    """

    number: int
    from_batch: int
    begin: Mapping[TopicPartition, int]
    tails: Mapping[int, Tail]
    kind: str = "start"
    decided_at: int = 0
    reason: str = ""
    epoch: int = 0
    life: str = ""
    correction_tails: Mapping[int, Tail] = MappingProxyType({})
    reached: Mapping[TopicPartition, int] = MappingProxyType({})
    in_kafka: Mapping[TopicPartition, InKafka] = MappingProxyType({})
    topics: Mapping[str, str] = MappingProxyType({})
    known: int = 0

    def tails_of(self, sequence: sequences.Sequence) -> Mapping[int, Tail]:
        """Return, by partition, the last message of a sequence's topic at the beginning."""
        return self.tails if sequence is MERGED else self.correction_tails

    def unsent_until(self, sequence: sequences.Sequence) -> Mapping[int, Tail]:
        """Return, by partition, the message up to which no row of the generation is out.

        Up to the last correction of a lost lake, late records may be in corrections that are.
        """
        is_unknown = sequence is CORRECTED and self.kind == "sink"
        return {} if is_unknown else self.tails_of(sequence)

    def offsets_of(self, input_id: InputId) -> dict[int, int]:
        """Return, by partition, the offset of an input that is read first."""
        return {tp.partition: offset for tp, offset in self.begin.items() if tp.input == input_id}

    @property
    def corrected_before(self) -> dict[int, Place]:
        """The last correction, by partition, of a lost lake whose merge records are not known.

        Up to there late records may be in corrections that are out. Empty unless the lake was
        recovered from its sink: any other lake has the merge records itself.
        """
        tails = self.correction_tails if self.kind == "sink" else {}
        return {p: tail.place for p, tail in tails.items()}


class Generations(tuple[Generation, ...]):
    """The generations of a lake in order; none before its first start."""

    @property
    def newest(self) -> Generation:
        """The last generation. Raises IndexError where there is none."""
        return self[-1]

    def of(self, batch: int) -> Generation:
        """Return the generation of a batch of silver."""
        earlier = [generation for generation in self if generation.from_batch <= batch]
        return earlier[-1] if earlier else self[0]

    def after(self, generation: Generation) -> Generation | None:
        """Return the generation that ended this one; None for the newest."""
        return next((later for later in self if later.number == generation.number + 1), None)

    def batches(self, generation: Generation) -> list[Condition]:
        """Return the batches of a generation as a condition."""
        following = self.after(generation)
        return [
            ("batch", ">=", generation.from_batch),
            *([] if following is None else [("batch", "<", following.from_batch)]),
        ]


def _generation(begin: Decision) -> Generation:
    body = begin.body
    return Generation(
        begin.generation or 0,
        body["from_batch"],
        {topic_partition(start): start["start_offset"] for start in body["starts"]},
        _tails(MERGED, body["tails"]),
        body["kind"],
        begin.decided_at,
        body["reason"],
        body["epoch"],
        body["life"],
        _tails(CORRECTED, body["correction_tails"]),
        {topic_partition(jump): jump["from_offset"] for jump in body["jumps"]},
        {
            topic_partition(start): InKafka(*(start[name] for name in InKafka._fields))
            for start in body["starts"]
            if InKafka._fields[0] in start
        },
        body.get("topics", {}),
        body.get("known", 0),
    )


def _tails(sequence: sequences.Sequence, tails: Iterable[Mapping[str, Any]]) -> dict[int, Tail]:
    return {
        tail["partition"]: Tail(tail["seq"], sequence.place(tail), None, tail["event_time"])
        for tail in tails
    }


def generation_body(generation: Generation) -> dict[str, Any]:
    """Return what the journal says of a generation beside its number and the time."""
    return {
        "from_batch": generation.from_batch,
        "kind": generation.kind,
        "reason": generation.reason,
        "epoch": generation.epoch,
        "life": generation.life,
        "starts": [
            {
                **place_of(tp),
                "start_offset": offset,
                **(generation.in_kafka[tp]._asdict() if tp in generation.in_kafka else {}),
            }
            for tp, offset in generation.begin.items()
        ],
        "jumps": [
            {**place_of(tp), "from_offset": offset, "to_offset": generation.begin[tp]}
            for tp, offset in generation.reached.items()
        ],
        "tails": _tail_bodies(MERGED, generation.tails),
        "correction_tails": _tail_bodies(CORRECTED, generation.correction_tails),
        "topics": dict(generation.topics),
        "known": generation.known,
    }


def _tail_bodies(sequence: sequences.Sequence, tails: Mapping[int, Tail]) -> list[dict[str, Any]]:
    return [
        {
            "partition": p,
            "seq": tail.seq,
            **sequence.values(tail.place),
            "event_time": tail.event_time,
        }
        for p, tail in tails.items()
    ]


# -- bases


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


def _floors(decisions: Iterable[Decision]) -> Floors:
    first = -1
    times: dict[tuple[str, int], int] = {}
    for body in (decision.body for decision in decisions if decision.kind == FLOOR):
        first = max(first, body["base"])
        for table, p, time in body["times"]:
            times[table, p] = max(time, times.get((table, p), time))
    return Floors(first, times)


def _bases(decisions: Sequence[Decision]) -> list[Base]:
    # In order, from the one on with which history begins.
    first = _floors(decisions).base
    bases = {
        decision.body["number"]: Base(generation=decision.generation or 0, **decision.body)
        for decision in decisions
        if decision.kind == BASE
    }
    return [bases[number] for number in sorted(bases) if number >= first]


# -- all of it


def facts_of(decisions: Iterable[Decision]) -> dict[str, str]:
    """Return all facts by name; of one that was decided again, as a topic that moved, the last."""
    kept = dict[str, str]()
    for decision in decisions:
        if decision.kind in (IDENTITY, MOVED, REBUILD):
            kept |= decision.body["facts"]
    return kept


class Skip(NamedTuple):
    """Offsets of a topic-partition that were passed over: a jump, or a gap that was accepted.

    Where `to_offset` is the smaller one, a jump merges them once more.
    """

    tp: TopicPartition
    from_offset: int
    to_offset: int


@dataclass(frozen=True)
class History:
    """All that was decided about a lake.

    - `decisions`: the number of the last decision (`seq`); 0 before the first.
    - `facts`: by name, what never changes, and where topics have moved.
    - `epochs`: one or more.
    - `generations`: none before the first start.
    - `skips`: jumps, and gaps that were accepted.
    - `has_rules`: True once the first epoch is decided.
    - `closed`: the newest generation for whose predecessor nothing is left to be done.
    - `floors`: where rows begin.
    - `bases`: the saved states, from the one on with which history begins.
    - `erased`: the time (epoch ms) of the last rows of the table `erased`; 0 without any.
    - `versions`: by table, the version that it had when a jump, or `forget`, had changed its rows.
    """

    decisions: int
    facts: Mapping[str, str]
    epochs: Epochs
    generations: Generations
    skips: Sequence[Skip]
    has_rules: bool
    closed: int
    floors: Floors
    bases: Sequence[Base]
    erased: int
    versions: Mapping[str, int]

    @property
    def newest(self) -> Generation:
        """The newest generation; before the first start, one of batches from 0 on that knows of no
        topic.
        """
        return self.generations.newest if self.generations else Generation(0, 0, {}, {})

    @property
    def first_base(self) -> Base | None:
        """The base with which history begins, once rows were deleted; None: it begins with the lake
        itself.
        """
        return self.bases[0] if self.floors.base >= 0 else None

    def bases_in(self, generation: Generation) -> list[Base]:
        """Return the saved states of a generation, in order."""
        return [base for base in self.bases if base.generation == generation.number]

    def base_at(self, generation: Generation, batch: int) -> Base | None:
        """Return the last saved state of a generation up to a batch."""
        earlier = [base for base in self.bases_in(generation) if base.batch <= batch]
        return earlier[-1] if earlier else None

    @property
    def is_closed(self) -> bool:
        """True where nothing is left to be done for generations before the newest."""
        return len(self.generations) < 2 or self.closed >= self.generations.newest.number


def read_history(reader: TableReader, settings: Settings) -> History:
    """Return the history of a lake, whose settings are `settings` but for the rules.

    A lake without epochs has one, with the rules of `settings`.
    """
    return history_of(read_journal(reader), settings)


def history_of(decisions: Sequence[Decision], settings: Settings) -> History:
    """Return the history that these decisions make, which are all of a lake, in order."""
    return History(
        max((decision.seq for decision in decisions), default=0),
        facts_of(decisions),
        _epochs(decisions, settings),
        Generations(_generation(each) for each in decisions if each.kind == BEGIN),
        [
            Skip(topic_partition(jump), jump["from_offset"], jump["to_offset"])
            for decision in decisions
            if decision.kind in (BEGIN, SKIP)
            for jump in decision.body["jumps"]
        ],
        any(decision.kind == RULES for decision in decisions),
        max((each.generation or 0 for each in decisions if each.kind == CLOSED), default=0),
        _floors(decisions),
        _bases(decisions),
        next((each.body["last"] for each in reversed(decisions) if each.kind == ERASED), 0),
        dict(item for each in decisions for item in each.body.get("versions", {}).items()),
    )
