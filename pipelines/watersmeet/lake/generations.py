"""Generations: where the lake began, and where each jump began it anew, as the journal says.

A generation is what is a pure function of its beginning and of bronze: silver's rows, late records,
the idle policy's decisions. Batches of silver are numbered across generations: those of one lie
between its `from_batch` and that of the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import CORRECTED, MERGED, Place, Sequence, Tail
from watersmeet.lake.commits import Append
from watersmeet.lake.inputs import place_of, topic_partition
from watersmeet.lake.journal import BEGIN, Decision, decide, read_journal
from watersmeet.lake.table_reader import Condition, TableReader
from watersmeet.settings import Settings


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

    def tails_of(self, sequence: Sequence) -> Mapping[int, Tail]:
        """Return, by partition, the last message of a sequence's topic at the beginning."""
        return self.tails if sequence is MERGED else self.correction_tails

    def unsent_until(self, sequence: Sequence) -> Mapping[int, Tail]:
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


def read_generations(reader: TableReader, settings: Settings) -> Generations:
    """Return the generations of a lake as they are now; none before its first start."""
    del settings
    return generations_of(read_journal(reader))


def generations_of(decisions: Iterable[Decision]) -> Generations:
    """Return the generations that were decided; none before the first start of a lake."""
    return Generations(_generation(begin) for begin in decisions if begin.kind == BEGIN)


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


def _tails(sequence: Sequence, tails: Iterable[Mapping[str, Any]]) -> dict[int, Tail]:
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


def begin_generation(reader: TableReader, append: Append, generation: Generation) -> None:
    """Decide a generation without an owner, where nobody else writes to the lake."""
    body = generation_body(generation)
    decide(reader, append, BEGIN, lambda _: body, generation.number)


def _tail_bodies(sequence: Sequence, tails: Mapping[int, Tail]) -> list[dict[str, Any]]:
    return [
        {
            "partition": p,
            "seq": tail.seq,
            **sequence.values(tail.place),
            "event_time": tail.event_time,
        }
        for p, tail in tails.items()
    ]
