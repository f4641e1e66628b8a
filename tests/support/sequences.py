"""The sequence of a partition in plain Python: the oracle of `core.message.messages`, and what is
read back of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from watersmeet.core.model import PublishedRecord
from watersmeet.core.recovery import ReadBack
from watersmeet.core.sequence import SequenceTail, SortKey


def by_key(read_back: Iterable[ReadBack]) -> dict[str, list[PublishedRecord]]:
    """By key, what is already published: what `PartitionMerge.recovered` is."""
    found: dict[str, list[PublishedRecord]] = {}
    for message in read_back:
        found.setdefault(message.key, []).append(
            PublishedRecord(message.event_time, message.due, message.closed_at)
        )
    return found


def published(times: Mapping[str, Sequence[int]]) -> dict[str, list[PublishedRecord]]:
    """By key, messages with these event times, of timeouts."""
    return {key: [PublishedRecord(time) for time in mine] for key, mine in times.items()}


def in_sequence(
    places: Iterable[SortKey], tail: SequenceTail | None
) -> Iterator[tuple[int, SortKey]]:
    """Numbers those of the places, which come in order, that sort after the tail, on from its
    number."""
    seq = -1 if tail is None else tail.seq
    for place in places:
        if tail is None or place > tail.place:
            seq += 1
            yield seq, place
