"""Random inputs for the merge, as values as they stand in Kafka, with what the merge model makes of
them."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import orjson

from tests.support.inputs import input_of, name_of, record_of
from tests.support.topics import Published
from watersmeet.core.idle import IdleDecision
from watersmeet.core.inputs import InputId, several_topics
from watersmeet.core.model import (
    MAX_BYTES,
    MAX_PARTS,
    NO_TENANT,
    MergeRules,
    Part,
    PartitionMerge,
    Record,
    SourceState,
)

SOURCES = ("tracking", "orders")
INPUTS = ("tracking/web", "tracking/app", "orders")
"""Of a source with two topics, which are not in the order of their names, and one with one."""
# UTF-8 order differs from UTF-16 order for the last but one.
KEYS = (
    "a",
    "b",
    "é",
    "\U0001f600",
    "z",
)
BAD_VALUES = (
    None,
    b"",
    b"{",
    b"[1]",
    b'{"ts":"soon","k":"a"}',
    b'{"ts":1}',
    b"\xff\xfe",
    b'{"k":"a"}',
    b'{"ts":-5,"k":"a"}',
)

HOLE = b"hole"
"""Stands for an offset at which Kafka holds no committed record: a transaction's marker, an aborted
record."""


@dataclass
class Case:
    """One partition's input: per source its values in offset order, as bytes (None: a
    tombstone)."""

    values: dict[str, list[bytes | None]]
    timeout_ms: int
    arrivals: list[str] = field(default_factory=list)
    """The sources in the order in which their records arrived; only bronze's cut into batches
    depends on it."""
    decisions: dict[str, list[IdleDecision]] = field(default_factory=dict)
    """What the idle policy has decided, by source."""
    bounds: tuple[int, int] = (MAX_PARTS, MAX_BYTES)
    """How many records a merge record may have, and how many bytes."""

    def value(self, source: str, part: Part) -> bytes | None:
        """The value of a source's part."""
        return self.values[name_of(InputId(source, part.topic))][part.offset]

    def records(self) -> Iterator[Record]:
        """What the merge model is told, in the order of arrival."""
        offsets = dict.fromkeys(self.values, 0)
        told = {source: sorted(self.decisions.get(source, ())) for source in self.values}

        def idle(source: str, before: float) -> Iterator[Record]:
            while told[source] and told[source][0].after_offset < before:
                yield record_of(source, *told[source].pop(0)[:2])

        for source in self.arrivals:
            offset, offsets[source] = offsets[source], offsets[source] + 1
            yield from idle(source, before=offset)
            record = as_record(source, offset, self.values[source][offset])
            if record is not None:
                yield record
        for source in self.values:
            yield from idle(source, before=float("inf"))

    def merged(self, inputs: Sequence[str] = SOURCES) -> PartitionMerge:
        """The model's answer."""
        rules = rules_of(inputs, self.timeout_ms)
        max_parts, max_bytes = self.bounds
        model = PartitionMerge(replace(rules, max_parts=max_parts, max_bytes=max_bytes))
        model.arrive(*self.records())
        model.advance()
        return model


def rules_of(
    inputs: Sequence[str], gap_ms: int, max_ms: int | None = None, lag_ms: int | None = None
) -> MergeRules:
    """The rules of a merge of these inputs."""
    return MergeRules(tuple(map(input_of, inputs)), gap_ms, max_ms, lag_ms)


def advance_to(
    model: PartitionMerge,
    heads: Mapping[InputId, int],
    records: Mapping[InputId, Sequence[tuple[int, Record]]],
) -> None:
    """Advance a model to what a lake without tenants has seen.

    `heads` is by input. `records` are some of the records up to there, with their positions.
    """
    for input_id, head in heads.items():
        state = model.states.setdefault(input_id, SourceState())
        # In place of the records left out.
        heartbeat_at_head = Record(input_id, 0, head, tenant=None)
        state.head = head
        state.unread = deque([*records.get(input_id, ()), (head, heartbeat_at_head)])
    model.advance()


def as_record(source: str, offset: int, value: bytes | None) -> Record | None:
    """The record of a value that one of the makers below has written; None where it is one of
    `BAD_VALUES`, or there is none."""
    if value in BAD_VALUES or value is HOLE:
        return None
    assert value is not None
    document = orjson.loads(value)
    key = document.get("k")
    tenant = document.get("g", None if key is None else NO_TENANT)
    record_id = document.get("i")
    return record_of(source, offset, document["ts"], key, tenant)._replace(
        id=None if record_id is None else str(record_id),
        size=len(value),
    )


def spelled(json: bytes) -> bytes:
    """JSON of orjson's as messages spell it: escapes of control characters have upper-case
    digits."""
    escapes = rb"\\(?:u00[0-9a-f]{2}|.)"  # also a backslash's, behind which `u001b` is a text
    return re.sub(
        escapes,
        lambda found: b"\\u" + found[0][2:].upper() if found[0][1:2] == b"u" else found[0],
        json,
    )


def keyed(key: str, event_time: int, **more: object) -> bytes:
    return orjson.dumps({"ts": event_time, "k": key, **more})


def heartbeat(event_time: int, **more: object) -> bytes:
    return orjson.dumps({"ts": event_time, "type": "heartbeat", **more})


def random_case(seed: int, timeout_ms: int = 100, sources: Sequence[str] = SOURCES) -> Case:
    """Ties, disorder, silence, heartbeats, lateness, bad records, several records of a key at one
    position: in every mixture."""
    rng = random.Random(seed)
    disorder = rng.choice([0, 0, 30, timeout_ms, 3 * timeout_ms, 6 * timeout_ms])
    step = rng.choice([0, 5, 20, timeout_ms // 2, 2 * timeout_ms])
    bad, beats = rng.choice([0, 0, 0.15]), rng.choice([0, 0.1, 0.4])
    keys = KEYS[: rng.randint(1, len(KEYS))]
    values: dict[str, list[bytes | None]] = {}
    for source in sources:
        time = rng.randint(0, timeout_ms)
        values[source] = []
        for _ in range(rng.choice([0, 1, 3, 12, 40, 40])):
            time += rng.choice([0, 0, rng.randint(0, step)])
            t = max(0, time - rng.choice([0, 0, rng.randint(0, disorder)]))
            roll = rng.random()
            if roll < bad:
                values[source].append(rng.choice(BAD_VALUES))
            elif roll < bad + beats:
                values[source].append(heartbeat(t))
            else:
                values[source].append(keyed(rng.choice(keys), t, n=len(values[source])))
    arrivals = [source for source, mine in values.items() for _ in mine]
    rng.shuffle(arrivals)
    return Case(values, timeout_ms, arrivals)


def with_ids(case: Case, seed: int) -> Case:
    """The case with ids, at `i`: many records with a key repeat one, and some have none."""
    rng = random.Random(seed)
    values = {
        source: [
            value
            if value in BAD_VALUES or value == HOLE or b'"k":' not in value or rng.random() < 0.2
            else value[:-1] + b',"i":"%d"}' % rng.randint(1, 3)
            for value in mine
        ]
        for source, mine in case.values.items()
    }
    return replace(case, values=values)


def rich_cases(
    count: int,
    first_seed: int = 0,
    sources: Sequence[str] = SOURCES,
    *,
    refused: bool = True,
    wealth: str = "late timed_out",
) -> dict[int, Case]:
    """Of many random cases those in which most happens, and a quarter that are as they come; a
    partition each.

    `refused`: whether there may be records that go to quarantine. `wealth`: what there is most of
    (late, timed_out, open).
    """
    every = [random_case(first_seed + n, sources=sources) for n in range(12 * count)]
    if not refused:
        every = [
            case
            for case in every
            if not any(value in BAD_VALUES for mine in case.values.values() for value in mine)
        ]
    plain, others = every[: count // 4], every[count // 4 :]
    others.sort(
        key=lambda case: -sum(len(getattr(case.merged(sources), name)) for name in wealth.split())
    )
    return dict(enumerate(plain + others[: count - len(plain)]))


def expected_silver(
    cases: Mapping[int, Case], inputs: Sequence[str] = SOURCES
) -> list[tuple[object, ...]]:
    """Silver's content of many partitions, as sorted tuples: (partition, key, status, event_time,
    last, parts of each source). Of a source with several topics, a part begins with its topic.
    """
    rows: list[tuple[object, ...]] = []
    for partition, case in cases.items():
        model = case.merged(inputs)
        several = several_topics(model.rules.inputs)
        for status, records in (("open", model.open.values()), ("timed_out", model.timed_out)):
            for record in records:
                key, first, last, parts = record.content()
                of_sources = tuple(
                    tuple(
                        (
                            *([p.topic] if source in several else []),
                            p.offset,
                            p.event_time,
                            _text(case.value(source, p)),
                        )
                        for p in mine
                    )
                    for source, mine in zip(model.rules.sources, parts, strict=True)
                )
                rows.append((partition, key, status, first, last, *of_sources))
    return sorted(rows, key=repr)


def expected_messages(
    cases: Mapping[int, Case], inputs: Sequence[str] = SOURCES
) -> list[Published]:
    """The published sequence, from the merge model alone."""
    messages = []
    for partition, case in cases.items():
        for seq, row in enumerate(case.merged(inputs).published_order()):
            values = {
                source: b",".join(case.value(source, p) or b"" for p in sorted(parts))
                for source, parts in row.parts.items()
            }
            value = (
                b'{"key":%s,"event_time":%d,"last_event_time":%d,"tracking":[%s],"orders":[%s]}'
                % (
                    spelled(orjson.dumps(row.key)),
                    row.event_time,
                    row.last_event_time,
                    values["tracking"],
                    values["orders"],
                )
            )
            message_id = f"{partition}/{row.event_time}/{row.key}"
            messages.append(
                Published(
                    partition, row.key.encode(), max(1, row.event_time), value, seq, message_id
                )
            )
    return messages


def expected_late(
    cases: Mapping[int, Case], inputs: Sequence[str] = SOURCES
) -> list[tuple[object, ...]]:
    """Every late record: (partition, source, offset, key, event_time, position, value)."""
    return sorted(
        (
            p,
            name_of(late.record.input),
            late.record.offset,
            late.record.key,
            late.record.event_time,
            late.position,
            value,
        )
        for p, case in cases.items()
        for late in case.merged(inputs).late
        for value in [case.values[name_of(late.record.input)][late.record.offset]]
    )


def expected_duplicates(
    cases: Mapping[int, Case], inputs: Sequence[str] = SOURCES
) -> list[tuple[object, ...]]:
    """Every duplicate: (partition, input, offset, key, event_time, id, offset of the part)."""
    return sorted(
        (p, name_of(r.input), r.offset, r.key, r.event_time, r.id, of_offset)
        for p, case in cases.items()
        for r, of_offset in case.merged(inputs).duplicates
    )


def expected_excess(
    cases: Mapping[int, Case], inputs: Sequence[str] = SOURCES
) -> list[tuple[object, ...]]:
    """Every record that is excess: (partition, input, offset, key, event_time)."""
    return sorted(
        (p, name_of(r.input), r.offset, r.key, r.event_time)
        for p, case in cases.items()
        for r in case.merged(inputs).excess
    )


def cases_with_ids(cases: Mapping[int, Case]) -> dict[int, Case]:
    """The cases with ids (`with_ids`)."""
    return {p: with_ids(case, p) for p, case in cases.items()}


def expected_quarantine(cases: Mapping[int, Case]) -> list[tuple[object, ...]]:
    """Every refused record: (partition, source, offset, value)."""
    refused = [
        (p, source, offset, value)
        for p, case in cases.items()
        for source, values in case.values.items()
        for offset, value in enumerate(values)
        if value in BAD_VALUES
    ]
    return sorted(refused, key=repr)


def _text(value: bytes | None) -> str:
    assert value is not None
    return value.decode()
