"""The idle policy's decision: when a partition's silent sources no longer stop its clock, and what time it is for them then.

A decision is data: a heartbeat of each idle source, placed after the last offset that bronze has of it. Who is silent is the
caller's to say, by the wall clock: a source that has had no record for so long, and of which bronze holds everything up to
Kafka's end. (A decision in the midst of records that Kafka has already could stand before an offset that was merged before
the lake was lost.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Decision(NamedTuple):
    """A synthetic heartbeat (ms) of a topic-partition: after the record `after_offset` (-1: before any), before the next."""

    after_offset: int
    event_time: int


class Idle(NamedTuple):
    """The sources for which the idle policy speaks in a partition, and the position (ms) that it gives all of them."""

    sources: list[str]
    event_time: int


def decide(heads: Mapping[str, int | None], silent: Collection[str]) -> Idle | None:
    """Time goes on to the smallest head of the others once every source that the clock waits for is silent; None: it does not.

    `heads` names every source of the partition; None: it has no record there yet. The clock waits for the sources without a
    head, or else for those with the smallest one. A source that is ahead of them, or held back by them, is never idle, however
    silent; nor is anyone where no source is ahead.
    """
    known = [head for head in heads.values() if head is not None]
    smallest = min(known, default=None) if len(known) == len(heads) else None
    ahead = [head for head in known if smallest is None or head > smallest]
    laggards = [source for source, head in heads.items() if head == smallest]
    if not ahead or not all(source in silent for source in laggards):
        return None
    return Idle(laggards, min(ahead))
