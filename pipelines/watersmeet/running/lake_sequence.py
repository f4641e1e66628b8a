"""The base of the sequences that gold publishes: what both ask of their lake."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from watersmeet.engine import Engine
from watersmeet.lake.epochs import Epochs, read_epochs
from watersmeet.lake.generations import Generations, read_generations
from watersmeet.running.publication_plan import LIMIT_BYTES
from watersmeet.running.transaction_size import TransactionSize
from watersmeet.settings import Settings


@dataclass
class LakeSequence:
    """A sequence of one lake's newest generation, in `partitions` partitions of a topic."""

    engine: Engine
    settings: Settings
    partitions: int
    _generations: Generations = field(default_factory=Generations)
    """Empty until the lake has begun. No other one begins while this process is the owner."""

    def has_begun(self) -> bool:
        """Return True where the lake says where its newest generation begins."""
        if not self._generations:
            self._generations = read_generations(self.engine.reader, self.settings)
        return bool(self._generations)

    @cached_property
    def epochs(self) -> Epochs:
        """The epochs of the lake; no other one begins while this process is the owner."""
        return read_epochs(self.engine.reader, self.settings)


def limit_bytes(size: TransactionSize) -> int:
    """Return the approximate maximum size (bytes) of the records of the next transaction."""
    return max(1, LIMIT_BYTES * size.limit // size.largest)
