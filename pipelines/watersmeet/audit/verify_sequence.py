"""Check 6: the sink and the topic of corrections have the rows of their tables that have a message.

Messages are in order, numbered without a gap, and have the content of their rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from watersmeet.audit.evidence import timestamp_of
from watersmeet.audit.problems import Findings
from watersmeet.audit.verify_evidence import CorrectionRow, Partition, Row
from watersmeet.core.inputs import InputId
from watersmeet.core.sequence import (
    CORRECTED,
    FORGOTTEN,
    ID,
    LATE,
    MERGED,
    VERSION,
    Place,
    Sequence,
    message_id,
)
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake.published import last_tails
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

NOWHERE: Final[Place] = ()
"""A place before all others."""

Content: TypeAlias = Mapping[str, Any]
"""What a message has, by name: key, value, timestamp (ms), and headers as text."""

RowMessage: TypeAlias = tuple[Content, Set[tuple[InputId, int]]]
"""What the message of a row has, and the records that are in no other, by input and offset."""


class Kind(NamedTuple):
    """A sequence, and what of its messages is compared beside their place.

    - `topic`: the topic, for a sentence.
    - `headers`: the headers that are compared, by the names that they have in `Content`.
    - `rows`: returns the rows that a partition has in the table, of all generations.
    - `message_of`: returns the message of a row of a partition.
    - `fix`: how to repair the topic.
    """

    sequence: Sequence
    topic: str
    headers: Mapping[str, str]
    rows: Callable[[Partition], Iterable[Row | CorrectionRow]]
    message_of: Callable[[Any, int], RowMessage]
    fix: str


class TopicEnds(NamedTuple):
    """A sequence's topic, up to where it ended when it was looked at.

    - `topic`: its name.
    - `bounds`: by partition, the first offset and the exclusive end offset.
    - `noted`: by partition, the last number that `published` had before that.
    - `name`: the topic and Kafka's identity of it, as `published` has it: a topic that is created
      again begins anew.
    """

    kind: Kind
    topic: str
    bounds: Mapping[int, tuple[int, int]]
    noted: Mapping[int, int]
    name: str


class Message(NamedTuple):
    """A message of a sequence; `event_time` (ms) is that of its merge record as it closed."""

    seq: int
    place: Place
    event_time: int
    content: Content


def read_ends(
    reader: TableReader, settings: Settings, kind: Kind, topic: str, partitions: int
) -> TopicEnds:
    """Return the ends of a sequence's topic, which exists, as they are now."""
    cluster = Cluster(settings.kafka)
    name = cluster.identified(topic)
    noted = {p: tail.seq for p, tail in last_tails(reader, kind.sequence, name).items()}
    return TopicEnds(kind, topic, cluster.bounds(topic, partitions), noted, name)


def check_sequence(partition: Partition, ends: TopicEnds, findings: Findings) -> None:
    """Check one partition of a topic.

    - Numbers rise by one, and places rise.
    - Each message is of a row of one of the generations, and no record is in two messages. Not
      compared are messages that a lost lake left, and those of keys that were forgotten.
    - No row of the newest generation is missing from where that began up to the last message.

    Under `at_most_once` a failure may leave a gap; under `at_least_once` a message may come again.
    """
    first, end = ends.bounds.get(partition.number, (0, 0))
    rows = defaultdict[Place, list[Row | CorrectionRow]](list)
    for row in ends.kind.rows(partition):
        if row.has_message:
            rows[row.place].append(row)
    check = _SequenceCheck(partition, ends, rows, findings, seq=None if first else -1)
    for offset, message in _messages(partition, ends, first, end):
        check.check_message(offset, message)
    check.check_missing()


@dataclass
class _SequenceCheck:
    """Check of one partition, whose messages are given to it in order of offset.

    - `rows`: those that have a message, by place.
    - `seq`: the last number; a partition from which nothing was deleted begins with 0.
    - `last`: the largest place so far, and `where` the last message, for a sentence.
    """

    partition: Partition
    ends: TopicEnds
    rows: Mapping[Place, list[Row | CorrectionRow]]
    findings: Findings
    seq: int | None
    last: Place = NOWHERE
    where: str = ""
    places: set[Place] = field(default_factory=set)
    parts: set[tuple[InputId, int]] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.evidence = self.partition.evidence
        self.delivery = self.evidence.settings.publish.delivery
        self.kind = self.ends.kind
        self.table = self.kind.sequence.table
        self.topic = f"{self.ends.topic}[{self.partition.number}]"

    def check_message(self, offset: int, message: Message | None) -> None:
        """Check the next message: its number, its place, and its content.

        None stands for a message that is none of the sequence.
        """
        where = f"{self.topic}@{offset}"
        if message is None:
            what = f"not a message of Watersmeet: its headers are of no row of {self.table}"
            self.findings.add(what, where, self.kind.fix)
            return
        if self.delivery == "at_least_once":
            identity = hash((message.seq, message.place, *message.content.values()))
            if identity in self.seen:
                return
            self.seen.add(identity)
        self.where = f"{where}: seq {message.seq}, {_subject(message.content)}"
        self._check_order(message)
        if self._is_compared(message):
            self._check_content(message)
        self.seq = message.seq if self.seq is None else max(message.seq, self.seq)
        self.last = max(message.place, self.last)
        self.places.add(message.place)

    def _check_order(self, message: Message) -> None:
        seq = message.seq
        if self.seq is not None and seq <= self.seq:
            self._add(f"seq {seq} after {self.seq}: a repeat, or out of order")
        elif self.seq is not None and seq > self.seq + 1 and self.delivery != "at_most_once":
            self._add(f"seq {seq} after {self.seq}: a gap")
        elif message.place <= self.last:
            self._add(f"{message.content['id']} is not in the order of publication")

    def _is_compared(self, message: Message) -> bool:
        """Return True where the table must have a row for a message."""
        p = self.partition.number
        lost = self.evidence.generations[0].tails_of(self.kind.sequence).get(p)
        if lost is not None and message.place <= lost.place and message.seq <= lost.seq:
            return False
        # Rows are deleted by their last event time, which is no earlier.
        floor = self.evidence.retention_bounds.times.get((self.table, p), 0)
        is_forgotten = (p, timestamp_of(message.event_time)) in self.evidence.forgotten
        return message.place in self.rows or (message.event_time >= floor and not is_forgotten)

    def _check_content(self, message: Message) -> None:
        if message.place not in self.rows:
            place = self.kind.sequence.values(message.place).items()
            text = ", ".join(f"{name} {value!r}" for name, value in place if value != "")
            self._add(f"no row of {self.table} has this message: {text}")
            return
        rows = map(self._message_of, self.rows[message.place])
        problems = [(self._unlike(message, content), parts) for content, parts in rows]
        problem, parts = min(problems, key=lambda each: each[0] is not None)
        if problem:
            self._add(problem)
        # Where the place does not rise, that is reported already.
        repeated = sorted(self.parts & parts) if message.place > self.last else []
        if repeated:
            input_id, offset = repeated[0]
            name = self.evidence.settings.input_names[input_id]
            self._add(f"the record {name}@{offset} is in an earlier message, too")
        self.parts |= parts

    def check_missing(self) -> None:
        """Check, after the last message, that no row that is due is missing up to it."""
        p = self.partition.number
        if self.seq is None or not self.places or self.delivery == "at_most_once":
            return
        noted_seq = self.ends.noted.get(p, -1)
        if noted_seq > self.seq:
            self._add(f"the last message has seq {self.seq}, and {noted_seq} was published")
        # Else retention has deleted messages.
        begin = NOWHERE if self.ends.bounds[p][0] == 0 else min(self.places)
        tail = self.evidence.generation.tails_of(self.kind.sequence).get(p)
        since = begin if tail is None else max(begin, tail.place)
        for place in sorted(self.rows.keys() - self.places):
            own = [row for row in self.rows[place] if self.evidence.is_own(row.batch)]
            if own and since < place < self.last:
                content, _ = self._message_of(own[-1])
                what = f"a row of {self.table} is missing in the {self.kind.topic}"
                where = f"{self.topic}: {_subject(content)}"
                self.findings.add(f"{what}, which has later ones", where, self.kind.fix)

    def _message_of(self, row: Row | CorrectionRow) -> RowMessage:
        return self.kind.message_of(row, self.partition.number)

    def _unlike(self, message: Message, content: Content) -> str | None:
        """Return what of a message is not as a row has it; None where all is."""
        differing = [name for name, right in content.items() if message.content.get(name) != right]
        if not differing:
            return None
        differ = "differs" if len(differing) == 1 else "differ"
        return f"{' and '.join(differing)} {differ} from the row of {self.table}"

    def _add(self, what: str) -> None:
        """Report a problem of the last message."""
        self.findings.add(what, self.where, self.kind.fix)


def _messages(
    partition: Partition, ends: TopicEnds, first: int, end: int
) -> Iterator[tuple[int, Message | None]]:
    """Yield the messages of a partition in order of offset; None for one that is none of the
    sequence.
    """
    evidence = partition.evidence
    timeout_ms = evidence.epochs.first_timeout_ms
    topic_range = Range(ends.topic, partition.number, first, end)
    for batch in read_range(evidence.settings.kafka, topic_range):
        times = batch["kafka_timestamp"].cast(pa.int64()).to_pylist()
        columns = (batch[name].to_pylist() for name in ("offset", "key", "value", "headers"))
        for time, offset, key, value, headers in zip(times, *columns, strict=True):
            own_headers = {
                header["key"]: header["value"] or b"" for header in reversed(headers or [])
            }
            if FORGOTTEN in own_headers:  # a tombstone is no part of the sequence
                continue
            try:
                tail = ends.kind.sequence.parse(own_headers, timeout_ms)
            except ValueError:
                yield offset, None
                continue
            timestamp = time // 1000
            content = {"key": key, "value": value, "timestamp": timestamp}
            for name, header in ends.kind.headers.items():
                content[name] = own_headers.get(header, b"").decode(errors="replace")
            event_time = tail.event_time
            if event_time is None:  # nothing but the timestamp says it
                event_time = 0 if timestamp == timestamp_of(0) else timestamp
            yield offset, Message(tail.seq, tail.place, event_time, content)


def _subject(content: Content) -> str:
    """Return what a message is about, for a sentence."""
    version = f"version {content['version']} of " if "version" in content else ""
    return f"{version}{content['id']!r}"


# -- the two kinds


def _of_merge_record(row: Row, partition: int) -> RowMessage:
    outcome = row.outcome
    content = {
        "key": row.key.encode(),
        "value": row.value,
        "timestamp": timestamp_of(outcome.event_time),
        "id": message_id(partition, outcome.event_time, row.key, row.tenant),
    }
    return content, {part[:2] for part in outcome.parts}


def _of_correction(row: CorrectionRow, partition: int) -> RowMessage:
    columns = row.columns
    (source, topic), offset = row.late
    content = {
        "key": row.key.encode(),
        "value": row.value if columns["valid"] else None,
        "timestamp": timestamp_of(columns["event_time"]),
        "id": columns["id"],
        "version": str(columns["version"]),
        "late": f"{source}/{topic}/{partition}/{offset}",
    }
    # A jump back merges the late record of one that is not valid again.
    return content, {row.late} if columns["valid"] else set()


SINK: Final = Kind(
    MERGED,
    "sink",
    {"id": ID},
    lambda partition: (*partition.rows, *partition.published),
    _of_merge_record,
    "name a new topic in publish.topic: gold fills it from silver",
)
CORRECTIONS: Final = Kind(
    CORRECTED,
    "topic of corrections",
    {"id": ID, "version": VERSION, "late": LATE},
    lambda partition: partition.corrections,
    _of_correction,
    "delete the topic: gold fills a new one from the table corrections",
)
