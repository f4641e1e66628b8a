"""Follows the sequence of each partition over a publication, and notes it in `published`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from pipelines.core.sequence import SequenceTail

Tails: TypeAlias = Mapping[int, SequenceTail]
"""The last message by partition."""


class Publication(NamedTuple):
    """The messages of a partition in one transaction: from `first_seq` up to `tail`.

    The offset of `tail` is None if it is not known.
    """

    partition: int
    first_seq: int
    tail: SequenceTail


def publications_of(ends: Tails, tails: Tails) -> list[Publication]:
    """Return what was published by partition, after these tails and up to these ends."""
    return [
        Publication(p, tails[p].seq + 1 if p in tails else 0, end)
        for p, end in sorted(ends.items())
    ]


def followed(chunks: Iterable[pa.Table], ends: dict[int, SequenceTail]) -> Iterator[pa.Table]:
    """Yield the chunks, each of one partition; put each partition's tail after them into `ends`."""
    for chunk in chunks:
        ends[chunk["partition"][0].as_py()] = end_of(chunk)
        yield chunk


def end_of(messages: pa.Table) -> SequenceTail:
    """Return a partition's tail after these messages (one or more); its offset is not known yet."""
    [last] = messages.slice(messages.num_rows - 1).to_pylist()
    closed = last["due"], last["closed_at"], last["tenant"] or ""
    return SequenceTail(last["seq"], last["event_time"], last["key"].decode(), None, *closed)


def published_row(publication: Publication) -> dict[str, Any]:
    """Return a publication as a row of `published`, without its sink and time."""
    tail = publication.tail
    return {
        "partition": publication.partition,
        "first_seq": publication.first_seq,
        "last_seq": tail.seq,
        "last_event_time": tail.event_time,
        "last_key": tail.key,
        "sink_offset": tail.offset,
        "last_due": tail.due,
        "last_closed_at": tail.closed_at,
        "last_tenant": tail.tenant,
    }
