"""The sequence of a partition in plain Python: the oracle of `core.message.messages`, and what is read back of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipelines.core.recovery import ReadBack
from pipelines.core.sequence import Tail

Place = tuple[int, str]
"""Event time (ms) and key."""


def by_key(read_back: Iterable[ReadBack]) -> dict[str, list[int]]:
    """By key, the event times already published: what `PartitionMerge.recovered` is."""
    found: dict[str, list[int]] = {}
    for event_time, key in read_back:
        found.setdefault(key, []).append(event_time)
    return found


def in_sequence(rows: Iterable[Place], tail: Tail | None) -> Iterator[tuple[int, Place]]:
    """Numbers those of the rows, which come in order, that sort after the tail, on from its number."""
    seq = -1 if tail is None else tail.seq
    for event_time, key in rows:
        if tail is None or (event_time, key.encode()) > (tail.event_time, tail.key.encode()):
            seq += 1
            yield seq, (event_time, key)
