"""What must hold of a topic of corrections, and of a consumer of it and of the sink, whatever has
happened to the lake."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import orjson
from confluent_kafka import Message

from watersmeet.core.sequence import CORRECTED, FORGOTTEN, ID, LATE, SEQ, VERSION, Place
from watersmeet.kafka.reading import headers_of
from watersmeet.lake import tables
from watersmeet.lake.history import Generation
from watersmeet.lake.table_reader import TableReader


class Version(NamedTuple):
    """A message of either topic, as a consumer of both sees it."""

    partition: int
    key: str
    seq: int
    id: str
    version: int
    value: Any


class CorrectionSeen(NamedTuple):
    """A message of the topic of corrections: its place in the order, its late record."""

    place: Place
    late: str
    version: Version


def versions(messages: Iterable[Message]) -> Iterator[Version]:
    """The messages of a topic without tombstones; those of the sink are version 0."""
    for message in messages:
        headers: dict[str, Any] = dict(headers_of(message))
        if FORGOTTEN in headers:
            continue
        value = message.value()
        yield Version(
            message.partition() or 0,
            (message.key() or b"").decode(),
            int(headers[SEQ]),
            headers[ID].decode(),
            int(headers.get(VERSION, b"0")),
            None if value is None else orjson.loads(value),
        )


def corrections_seen(messages: Iterable[Message]) -> list[CorrectionSeen]:
    """The messages of a topic of corrections, without tombstones, in order by partition."""
    kept = [m for m in messages if FORGOTTEN not in dict(headers_of(m))]
    headers: list[dict[str, Any]] = [dict(headers_of(message)) for message in kept]
    return [
        CorrectionSeen(CORRECTED.parse(names).place, names[LATE].decode(), version)
        for names, version in zip(headers, versions(kept), strict=True)
    ]


def in_one_piece(
    seen: Iterable[CorrectionSeen], delivery: str = "exactly_once"
) -> list[CorrectionSeen]:
    """The same without what a delivery mode may repeat. `at_least_once`: a message that repeats an
    earlier one, with all that it says."""
    found = dict[tuple[int, int], CorrectionSeen]()
    for each in seen:
        place = each.version.partition, each.version.seq
        assert place not in found or delivery == "at_least_once", f"{each} comes again"
        assert found.setdefault(place, each) == each, f"{each} was {found[place]}"
    return sorted(found.values(), key=lambda each: (each.version.partition, each.version.seq))


def assert_in_sequence(
    seen: Iterable[CorrectionSeen], delivery: str = "exactly_once"
) -> list[CorrectionSeen]:
    """Over all generations: numbers from 0 on without a gap, but under `at_most_once`; in order;
    and no late record in two messages with a value. Returns them without repetition."""
    pieces = in_one_piece(seen, delivery)
    before: dict[int, CorrectionSeen] = {}
    corrected = Counter[str]()
    for each in pieces:
        p = each.version.partition
        last = before.get(p)
        expected = 0 if last is None else last.version.seq + 1
        is_next = each.version.seq == expected or (
            delivery == "at_most_once" and each.version.seq > expected
        )
        assert is_next, f"correction {each.version.seq} follows {expected - 1}: {each}"
        assert last is None or last.place < each.place, f"out of order: {last}, then {each}"
        before[p] = each
        if each.version.value is not None:
            corrected[each.late] += 1
    twice = {late for late, count in corrected.items() if count > 1}
    assert twice == set(), f"late records that are corrected twice: {twice}"
    return pieces


def newest(every: Iterable[Version]) -> dict[str, Version]:
    """What a consumer of both topics keeps: by id, the message with the largest version."""
    kept: dict[str, Version] = {}
    for each in every:
        if each.id not in kept or kept[each.id].version < each.version:
            kept[each.id] = each
    return kept


def numbers_in(value: Any, sources: Collection[str]) -> Counter[int]:
    """How often a message's value has each record, which are told apart by `n`."""
    if value is None:
        return Counter()
    return Counter(part["n"] for source in sources for part in value[source])


def assert_each_record_once(every: Sequence[Version], sources: Collection[str]) -> set[int]:
    """A consumer of both topics has no record twice, and each that was ever in a message, unless a
    message without a value has taken it back. Returns the numbers of the records that it has."""
    kept = newest(every)
    counts = Counter[int]()
    for each in kept.values():
        counts.update(numbers_in(each.value, sources))
    twice = {
        number: [name for name, each in kept.items() if number in numbers_in(each.value, sources)]
        for number, count in counts.items()
        if count > 1
    }
    assert twice == {}, f"records that a consumer of both topics has twice: {twice}"
    taken_back = Counter[int]()
    sent = defaultdict[int, set[str]](set)
    for each in every:
        for number in numbers_in(each.value, sources):
            sent[number].add(each.id)
            if kept[each.id].value is None:
                taken_back[number] += 1
    missing = {number: ids for number, ids in sent.items() if not counts[number]}
    missing = {number: ids for number, ids in missing.items() if not taken_back[number]}
    assert missing == {}, f"records that a correction has dropped, by number: {missing}"
    return set(counts)


Expected = tuple[int, Place, str, str, int, Any]
"""Partition, place, id, late record, version and value of a message."""


def messages_of(
    reader: TableReader, generation: Generation, sources: Sequence[str]
) -> list[Expected]:
    """The messages that the corrections of a generation have, as the table says, those behind which
    it began left out; in order."""
    names = ["tenant", "source", "topic", "offset", "u", "settled_at", "merge_key", "partition"]
    names += ["id", "version", "valid", "first_event_time", "last_event_time", *sources]
    where = [[("generation", "=", generation.number), ("has_message", "=", True)]]
    found = list[Expected]()
    for row in reader.select(tables.CORRECTIONS, names, where).to_pylist():
        p, tenant, source, topic = (row[n] for n in ("partition", "tenant", "source", "topic"))
        encoded = tenant.encode(), row["u"], source.encode(), topic.encode()
        place = (row["settled_at"], *encoded, row["offset"])
        if p in generation.correction_tails and place <= generation.correction_tails[p].place:
            continue
        late = f"{source}/{topic}/{p}/{row['offset']}"
        value = _value(row, sources) if row["valid"] else None
        found.append((p, place, row["id"], late, row["version"], value))
    return sorted(found, key=lambda each: each[:2])


def _value(row: dict[str, Any], sources: Sequence[str]) -> dict[str, Any]:
    """The default value of a message."""
    times = {"event_time": row["first_event_time"], "last_event_time": row["last_event_time"]}
    tenant = {"tenant": row["tenant"]} if row["tenant"] else {}
    parts = {
        source: [
            orjson.loads(part["value"]) if isinstance(part["value"], str) else part["value"]
            for part in row[source]
        ]
        for source in sources
    }
    return {"key": row["merge_key"], **tenant, **times, **parts}


def assert_as_the_table_says(
    seen: Iterable[CorrectionSeen],
    expected: Sequence[Expected],
    generation: Generation,
    may_be_gone: Collection[str] | None = (),
) -> None:
    """The topic has, behind the tails at which a generation began, what the table has of it.

    `may_be_gone`: the keys of which the table may have less; None: it may have less of all.
    """
    tails = generation.correction_tails
    since = {p: tail.seq for p, tail in tails.items()}
    here = list[Expected]()
    lates = {late for _, _, _, late, *_ in expected}
    for place, late, each in seen:
        if each.seq <= since.get(each.partition, -1):
            continue
        is_kept = late in lates or (may_be_gone is not None and each.key not in may_be_gone)
        if is_kept:
            here.append((each.partition, place, each.id, late, each.version, each.value))
    assert here == list(expected), f"the topic has {here}, and the table {list(expected)}"
