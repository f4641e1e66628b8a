"""The table `generations`: where the lake began, and where each jump began it anew.

A generation is what is a pure function of its beginning and of bronze: silver's rows, late records,
the idle policy's decisions. Batches of silver are numbered across generations: those of one lie
between its `from_batch` and that of the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import pyarrow as pa

from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import CORRECTED, MERGED, Place, Sequence, Tail
from watersmeet.lake import tables
from watersmeet.lake.inputs import topic_partition
from watersmeet.lake.table_reader import Condition, TableReader, row_count
from watersmeet.settings import Settings

_NAMES: Final = {"source": "late_source", "topic": "late_topic", "offset": "late_offset"}
"""The columns of a last message that have other names here, by those of its sequence's order."""


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

    def tails_of(self, sequence: Sequence) -> Mapping[int, Tail]:
        """Return, by partition, the last message of a sequence's topic at the beginning."""
        return self.tails if sequence is MERGED else self.correction_tails

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
    if not reader.exists(tables.GENERATIONS):
        return Generations()
    existing = reader.columns(tables.GENERATIONS).names
    names = [n for n in tables.layout(settings)[tables.GENERATIONS].schema.names if n in existing]
    by_number: dict[int, list[dict[str, Any]]] = {}
    for row in reader.select(tables.GENERATIONS, names).to_pylist():
        by_number.setdefault(row["generation"], []).append(row)
    return Generations(_generation(number, rows) for number, rows in sorted(by_number.items()))


def _generation(number: int, rows: Collection[Mapping[str, Any]]) -> Generation:
    begin = {topic_partition(row): row["start_offset"] for row in rows if row["source"] is not None}
    of_topics = [row for row in rows if row["source"] is None]
    merged, corrected = (
        {row["partition"]: _tail(kind, row) for row in of_topics if row[kind.clock] is not None}
        for kind in (MERGED, CORRECTED)
    )
    first = next(iter(rows))
    facts = (first[name] for name in ("kind", "decided_at", "reason", "epoch", "life"))
    generation = Generation(number, first["from_batch"], begin, merged, *facts)
    return generation._replace(correction_tails=corrected)


def _tail(sequence: Sequence, row: Mapping[str, Any]) -> Tail:
    place = {name: row[_NAMES.get(name, name)] for name in sequence.order}
    place["tenant"] = place["tenant"] or ""
    return Tail(row["seq"], sequence.place(place), None, row["event_time"])


def generation_rows(settings: Settings, generation: Generation) -> pa.Table:
    """Return a generation as rows of the table.

    There is one for every topic-partition, and one for every partition of the sink, and of the
    topic of corrections, with messages.
    """
    facts = {
        "generation": generation.number,
        "from_batch": generation.from_batch,
        "kind": generation.kind,
        "decided_at": generation.decided_at,
        "reason": generation.reason,
        "epoch": generation.epoch,
        "life": generation.life,
    }
    rows: list[dict[str, Any]] = [
        {
            **facts,
            **tp.input._asdict(),
            "partition": tp.partition,
            "start_offset": offset,
        }
        for tp, offset in generation.begin.items()
    ]
    for sequence in (MERGED, CORRECTED):
        for p, tail in generation.tails_of(sequence).items():
            place = sequence.values(tail.place)
            place["tenant"] = place["tenant"] or None
            its = {_NAMES.get(name, name): value for name, value in place.items()}
            rows.append(
                {**facts, "partition": p, "seq": tail.seq, "event_time": tail.event_time, **its}
            )
    return tables.layout(settings)[tables.GENERATIONS].rows_of(rows)


def is_begun(reader: TableReader) -> bool:
    """Return True where the lake has begun: the table has a row."""
    return reader.exists(tables.GENERATIONS) and row_count(reader, tables.GENERATIONS) > 0
