"""The sequence of a partition in plain Python: the oracle of what is published next, and what is
read back of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from watersmeet.core.model import PublishedRecord
from watersmeet.core.sequence import MERGED, Place, Tail


def merged_tail(
    seq: int,
    event_time: int,
    key: str,
    due: int,
    closed_at: int,
    tenant: str = "",
    offset: int | None = None,
) -> Tail:
    """The last message of a partition of the sink."""
    place = {"closed_at": closed_at, "tenant": tenant, "due": due, "merge_key": key}
    return Tail(seq, MERGED.place(place), offset, event_time)


def published_record(message: Tail) -> tuple[str, PublishedRecord]:
    """The key of a message, and what the model knows of it."""
    place = MERGED.values(message.place)
    times = message.event_time or 0, place["due"], place["closed_at"]
    return place["merge_key"], PublishedRecord(*times, place["tenant"])


def by_key(read_back: Iterable[Tail]) -> dict[str, list[PublishedRecord]]:
    """By key, what is already published: what `PartitionMerge.recovered` is."""
    found: dict[str, list[PublishedRecord]] = {}
    for key, record in map(published_record, read_back):
        found.setdefault(key, []).append(record)
    return found


def published(times: Mapping[str, Sequence[int]], timeout: int) -> dict[str, list[PublishedRecord]]:
    """By key, messages with these event times, of a timeout."""
    return {
        key: [PublishedRecord(time, time + timeout, time + timeout + 1) for time in mine]
        for key, mine in times.items()
    }


def in_sequence(places: Iterable[Place], tail: Tail | None) -> Iterator[tuple[int, Place]]:
    """Numbers those of the places, which come in order, that sort after the tail, on from its
    number."""
    seq = -1 if tail is None else tail.seq
    for place in places:
        if tail is None or place > tail.place:
            seq += 1
            yield seq, place
