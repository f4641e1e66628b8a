"""The history of a lake: what its journal says, as one value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from watersmeet.core.plan import TopicPartition
from watersmeet.lake.bases import Base, Floors, bases_of, floors_of
from watersmeet.lake.epochs import Epochs, epochs_of
from watersmeet.lake.generations import Generation, Generations, generations_of
from watersmeet.lake.identity import facts_of
from watersmeet.lake.inputs import topic_partition
from watersmeet.lake.journal import (
    BEGIN,
    CLOSED,
    ERASED,
    RULES,
    SKIP,
    Decision,
    read_journal,
)
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings


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
    """Return the history of a lake, whose settings are `settings` but for the rules."""
    return history_of(read_journal(reader), settings)


def history_of(decisions: Sequence[Decision], settings: Settings) -> History:
    """Return the history that these decisions make, which are all of a lake, in order."""
    return History(
        max((decision.seq for decision in decisions), default=0),
        facts_of(decisions),
        epochs_of(decisions, settings),
        generations_of(decisions),
        [
            Skip(topic_partition(jump), jump["from_offset"], jump["to_offset"])
            for decision in decisions
            if decision.kind in (BEGIN, SKIP)
            for jump in decision.body["jumps"]
        ],
        any(decision.kind == RULES for decision in decisions),
        max((each.generation or 0 for each in decisions if each.kind == CLOSED), default=0),
        floors_of(decisions),
        bases_of(decisions),
        next((each.body["last"] for each in reversed(decisions) if each.kind == ERASED), 0),
        dict(item for each in decisions for item in each.body.get("versions", {}).items()),
    )
