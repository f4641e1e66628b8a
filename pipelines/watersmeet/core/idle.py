"""The idle policy: when silent sources no longer stop a partition's clock, and their new heads.

A decision is data: a heartbeat of each idle source, placed after the last offset that bronze has of
it. The caller determines by the wall clock which sources are silent: those that have had no record
for long enough, and of which bronze holds everything up to Kafka's end. (A decision placed between
records that Kafka already has could precede an offset that was merged before the lake was lost.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from watersmeet.core.inputs import InputId


class IdleDecision(NamedTuple):
    """A synthetic heartbeat, with its `event_time` (ms), after the record `after_offset` (-1:
    first).

    `tenant_times`: by name, the position (ms) of each tenant to which it gives one there.
    """

    after_offset: int
    event_time: int
    tenant_times: tuple[tuple[str, int], ...] = ()


class Idle(NamedTuple):
    """The inputs of a partition that the idle policy moves, and where to (position, ms)."""

    inputs: list[InputId]
    event_time: int


def decide(heads: Mapping[InputId, int | None], silent: Collection[InputId]) -> Idle | None:
    """Return where the heads of the laggards move, if all laggards are silent; None otherwise.

    They move to the smallest head ahead of them. `heads` has every input of the partition (None: no
    record yet). Laggards are those without a head, or else with the smallest: the clock waits for
    them. A source that is ahead, or held back, is never idle, however silent.
    """
    present = [head for head in heads.values() if head is not None]
    smallest = min(present, default=None) if len(present) == len(heads) else None
    ahead = [head for head in present if smallest is None or head > smallest]
    laggards = [input_id for input_id, head in heads.items() if head == smallest]
    if not ahead or not all(input_id in silent for input_id in laggards):
        return None
    return Idle(laggards, min(ahead))
