"""Check 6: the sink is silver's finished, valid records: in order, numbered without a gap, with the content of their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.audit.problems import Findings
from pipelines.audit.verify_evidence import Evidence, Partition, Row
from pipelines.core.sequence import ID, SEQ, message_id, parse_message_id
from pipelines.core.types import TIME
from pipelines.kafka.cluster import Cluster
from pipelines.kafka.reading import Range, read_range
from pipelines.lake import tables
from pipelines.lake.questions import Questions
from pipelines.settings import Settings

REFILL = "name a new topic in publish.topic: gold fills it from silver"

Evaluate: TypeAlias = Callable[[pa.Table, Mapping[str, str]], pa.Table]
"""The user's SQL expressions, by the name of their column, over rows of silver: a row for each, in their order."""

Place: TypeAlias = tuple[int, bytes]
"""Event time (ms) and key (UTF-8): what the sequence is ordered by."""

Message: TypeAlias = "tuple[int, int, Place | None, str, bytes | None, int, bytes | None]"
"""Of a message of the sink offset, number and place (None where the headers do not say both), id, key, timestamp (ms), value."""

_ESCAPES = {i: f"\\u{i:04X}" for i in range(32)} | {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}


# -- what rows of silver should become, without the merge's own code


class Judge:
    """What `publish` says of rows of silver. The user's own expressions count where there is something to evaluate them."""

    def __init__(self, settings: Settings, evaluate: Evaluate | None = None) -> None:
        self.settings, self.evaluate = settings, evaluate
        texts = {"valid": settings.publish.valid, "value": settings.publish.value}
        self.expressions = {name: text for name, text in texts.items() if text not in (None, "true")}
        self.unevaluated = [f"publish.{name}" for name in self.expressions] if evaluate is None else []
        self._knows_messages = "publish.value" not in self.unevaluated
        is_typed = any(pa.types.is_struct(source.value_type) for source in settings.sources.values())
        self._is_exact = "value" in self.expressions or not is_typed  # else numbers may be written in several ways

    def evaluated(self, rows: pa.Table) -> pa.Table:
        """Rows of silver with what the expressions say of them, as `Row` has it."""
        stored = rows
        for name in ("event_time", "last_event_time"):
            stored = stored.set_column(stored.column_names.index(name), name, pc.multiply(rows[name], 1000).cast(TIME))
        found = None if self.evaluate is None or not self.expressions else self.evaluate(stored, self.expressions)
        told = {} if found is None else {name: found[name] for name in self.expressions}
        holds = told["valid"].fill_null(False) if "valid" in told else pa.nulls(rows.num_rows)
        value = told["value"].cast(pa.binary()) if "value" in told else pa.nulls(rows.num_rows)
        return rows.append_column("holds", holds).append_column("told", value)

    def message(self, row: Row) -> bytes | None:
        """The value of a row's message, byte for byte, but for the way to write numbers of a schema."""
        if "value" in self.expressions:
            return row.told
        key, _, first, last, parts = row.outcome
        arrays = [b'"%s":[%s]' % (s.encode(), b",".join(p[3] for p in parts if p[0] == s)) for s in self.settings.sources]
        head = key.translate(_ESCAPES).encode(), first, last
        return b'{"key":"%s","event_time":%d,"last_event_time":%d,%s}' % (*head, b",".join(arrays))

    def is_same(self, message: bytes | None, row: Row) -> bool:
        """Whether a message is the row's, as far as that is known: byte for byte, or by content where a source has a schema."""
        right = self.message(row)
        if self._is_exact or not self._knows_messages or message == right:
            return message == right or not self._knows_messages
        try:
            return bool(json.loads(message or b"", parse_int=str) == json.loads(right or b"", parse_int=str))
        except ValueError:
            return False

    def right(self, row: Row) -> list[tuple[bool | None, str | None]]:
        """What `valid` and `invalid_reason` may be; a size that is not exactly known says something only far from the limit."""
        if row.outcome.status != "timed_out":
            return [(None, None) if row.outcome.status == "open" else (False, "reset")]
        holds = row.holds if "valid" in self.expressions else True
        size, limit, slack = len(self.message(row) or b""), self.settings.publish.max_bytes, 1 if self._is_exact else 3
        rejected: list[tuple[bool | None, str | None]] = [] if holds else [(False, "predicate")]
        fits = [(True, None)] if size <= limit * slack or not self._knows_messages else []
        exceeds = [(False, "too_large")] if size * slack > limit or not self._knows_messages else []
        return rejected if holds is False else [*fits, *exceeds, *rejected]


# -- the sink


class Sink(NamedTuple):
    """The sink topic up to where it ended when it was looked at, and by partition the last number that `published` had before;
    `name`: the topic and Kafka's identity of it, as `published` has it, since a topic created again begins anew.
    """

    bounds: Mapping[int, tuple[int, int]]
    noted: Mapping[int, int]
    name: str


def read_sink(questions: Questions, settings: Settings, partitions: int) -> Sink:
    """The ends of the sink topic, which exists, as they are now."""
    topic, cluster = settings.publish.topic, Cluster(settings.kafka)
    name = f"{topic} ({cluster.topic_ids([topic])[topic]})"
    noted = _largest(questions, "last_seq", [("sink", "=", name)])
    return Sink(cluster.bounds(topic, partitions), noted, name)


def read_limits(evidence: Evidence, sink: Sink) -> tuple[dict[int, int], dict[int, int]]:
    """By partition, up to which event time (ms) messages are not compared with silver, and up to which none needs to be there.

    Not compared is what sorts at or before the last message that a lost lake left, or that stood before a jump back; and nothing
    is missing before a reset, after which time began again.
    """
    compared: dict[int, int] = {}
    due: dict[int, int] = {}
    for partition, time in zip(*(evidence.recovered[name].to_pylist() for name in ("partition", "event_time")), strict=True):
        compared[partition] = max(time, compared.get(partition, time))
    for before, reset in zip(evidence.eras, evidence.resets, strict=False):
        back = {tp.partition for tp, offset in reset.begin.items() if offset < before.until.get(tp, 0)}
        known = [("sink", "=", sink.name), ("committed_at", "<=", reset.committed_at)]
        for partition, time in _largest(evidence.questions, "last_event_time", known).items():
            due[partition] = time
            if partition in back:
                compared[partition] = max(time, compared.get(partition, time))
    return compared, due


def _largest(questions: Questions, column: str, conditions: Sequence[tuple[str, str, Any]]) -> dict[int, int]:
    """By partition the largest value of a column of `published`."""
    if not questions.exists(tables.PUBLISHED):
        return {}
    found = questions.summary(tables.PUBLISHED, ["partition"], {"largest": ("max", column)}, [conditions])
    return dict(zip(found["partition"].to_pylist(), found["largest"].to_pylist(), strict=True))


def check_sink(partition: Partition, sink: Sink, limits: Sequence[Mapping[int, int]], judge: Judge, findings: Findings) -> None:
    """Along a sink partition, numbers rise by one and places rise; each message is its silver record's, and none is missing up
    to the last. Under `at_most_once` a failure may leave a gap; under `at_least_once` a message may come again.
    """
    p, settings = partition.number, judge.settings
    (first, end), delivery, topic = sink.bounds.get(p, (0, 0)), settings.publish.delivery, f"{settings.publish.topic}[{p}]"
    compared_after, due_after = (limit.get(p, -1) for limit in limits)
    due = {
        (r.outcome.event_time, r.outcome.key.encode()): r for r in partition.rows if r.outcome.status == "timed_out" and r.valid
    }
    seq, last, where = -1 if first == 0 else None, (-1, b""), ""  # a partition from which nothing was deleted begins with 0
    out: set[Place] = set()
    said: set[int] = set()
    for message in _messages(settings, p, first, end):
        offset, number, place, id, *_ = message
        if place is None:
            findings.add(f"no {SEQ} and {ID}: not ours", f"{topic}@{offset}", REFILL)
            continue
        if delivery == "at_least_once":
            if hash(message[1:]) in said:
                continue
            said.add(hash(message[1:]))
        where = f"{topic}@{offset}: seq {number}, {_record(place)}"
        if seq is not None and number <= seq:
            findings.add(f"seq {number} after {seq}: a repeat, or out of order", where, REFILL)
        elif seq is not None and number > seq + 1 and delivery != "at_most_once":
            findings.add(f"seq {number} after {seq}: a gap", where, REFILL)
        elif place <= last:
            findings.add(f"{id} is not in order of event time and key", where, REFILL)
        if place[0] > compared_after and (wrong := _unlike(message, p, due.get(place), judge)):
            findings.add(wrong, where, REFILL)
        seq, last = max(number, number if seq is None else seq), max(place, last)
        out.add(place)
    if seq is None or not out or delivery == "at_most_once":
        return
    if (noted := sink.noted.get(p, seq)) > seq:
        findings.add(f"the last message has seq {seq}, and {noted} was published", where, REFILL)
    begin = (-1, b"") if first == 0 else min(out)  # else retention has deleted messages
    since = max(compared_after, due_after)
    for place in sorted(place for place in due if begin < place < last and place[0] > since and place not in out):
        findings.add("silver's record is missing in the sink, which has later ones", f"{topic}: {_record(place)}", REFILL)


def _messages(settings: Settings, partition: int, first: int, end: int) -> Iterator[Message]:
    """The messages of a sink partition in order of offset."""
    for batch in read_range(settings.kafka, Range(settings.publish.topic, partition, first, end)):
        times = batch["kafka_timestamp"].cast(pa.int64()).to_pylist()
        columns = (batch[name].to_pylist() for name in ("offset", "key", "value", "headers"))
        for time, offset, key, value, headers in zip(times, *columns, strict=True):
            said = {header["key"]: header["value"] or b"" for header in reversed(headers or [])}
            seq, id = said.get(SEQ, b""), said.get(ID, b"").decode(errors="replace")
            try:
                _, event_time, name = parse_message_id(id)
                place = (event_time, name.encode()) if seq.isdigit() else None
            except ValueError:
                place = None
            yield offset, int(seq) if place else -1, place, id, key, time // 1000, value


def _unlike(message: Message, partition: int, row: Row | None, judge: Judge) -> str | None:
    """What of a message is not as its row of silver has it."""
    if row is None:
        return "silver has no such finished and valid record"
    (_, _, _, id, key, timestamp, value), (name, _, time, *_) = message, row.outcome
    is_same = {"key": key == name.encode(), "value": judge.is_same(value, row), "timestamp": timestamp == max(1, time)}
    is_same["id"] = id == message_id(partition, time, name)
    differing = [part for part, same in is_same.items() if not same]
    return f"{' and '.join(differing)} not as silver's record has it" if differing else None


def _record(place: Place) -> str:
    return f"key {place[1].decode()!r}, event_time {place[0]}"
