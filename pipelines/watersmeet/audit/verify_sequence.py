"""Check of a published sequence against its table, for the sink and for the topic of corrections.

Messages are in order, numbered without a gap, and have the content of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import pyarrow as pa

from watersmeet.audit.evidence import Evidence, read_table
from watersmeet.audit.problems import Findings
from watersmeet.audit.verify_evidence import Partition
from watersmeet.core.correction_sequence import CorrectionTail
from watersmeet.core.inputs import InputId
from watersmeet.core.sequence import FORGOTTEN, ID, SequenceTail
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.generations import Generation
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

Place: TypeAlias = tuple[Any, ...]
"""The place of a message in the order of its sequence."""

Content: TypeAlias = Mapping[str, Any]
"""What a message has, by name: key, value, timestamp (ms), id, and further headers of its kind."""

NOWHERE: Final[Place] = ()
"""A place before all others."""


class Message(NamedTuple):
    """A message of a sequence.

    - `event_time`: that of its merge record as it closed (ms).
    - `subject`: the record that it is about, for a sentence.
    """

    seq: int
    place: Place
    event_time: int
    subject: str
    content: Content


class RowMessage(NamedTuple):
    """The message that a row of the table has.

    - `content`: without what is not known.
    - `parts`: the records that are in no other message, by input and offset.
    """

    subject: str
    content: Content
    parts: Set[tuple[InputId, int]]


class SequenceRows(NamedTuple):
    """The rows of a partition that have a message.

    - `by_place`: those of all generations.
    - `due`: those of the newest generation, one by place.
    - `message_of`: the message of a row.
    """

    by_place: Mapping[Place, Sequence[Any]]
    due: Mapping[Place, Any]
    message_of: Callable[[Any], RowMessage]


class Kind(NamedTuple):
    """The differences between the two sequences.

    - `table`: the table whose rows have the messages.
    - `last_noted`: returns, by partition, the last message that was noted of a topic.
    - `tails_of`: returns, by partition, the last message that was out when a generation began.
    - `read`: reads a message from its headers and its content (key, value and timestamp). Raises
      ValueError where it is none of the sequence.
    - `foreign`, `unlike`, `unknown`, `missing`: what is found, for a sentence.
    - `fix`: how to repair the topic.
    """

    table: str
    last_noted: Callable[[TableReader, str], Mapping[int, SequenceTail | CorrectionTail]]
    tails_of: Callable[[Generation], Mapping[int, SequenceTail | CorrectionTail]]
    read: Callable[[Mapping[str, bytes], dict[str, Any]], Message]
    foreign: str
    unlike: str
    unknown: str
    missing: str
    fix: str


class TopicEnds(NamedTuple):
    """A sequence's topic, up to where it ended when it was looked at.

    - `topic`: its name.
    - `bounds`: by partition, the first offset and the exclusive end offset.
    - `noted`: by partition, the last number that `published` had before that.
    - `name`: the topic and Kafka's identity of it, as `published` has it: a topic that is created
      again begins anew.
    """

    topic: str
    bounds: Mapping[int, tuple[int, int]]
    noted: Mapping[int, int]
    name: str


class Limits(NamedTuple):
    """Limits up to which a topic is not checked.

    - `compared`: by partition, the place and number of the last message that a lost lake left.
      Messages up to it are not compared with the table.
    - `due`: by partition, the place up to which no row of the newest generation needs to be there.
    - `forgotten`: the partition and timestamp (ms) of messages of merge records that the tables no
      longer have, since their key was forgotten.
    """

    compared: Mapping[int, tuple[Place, int]]
    due: Mapping[int, Place]
    forgotten: Set[tuple[int, int]]


def read_ends(
    kind: Kind, reader: TableReader, settings: Settings, topic: str, partitions: int
) -> TopicEnds:
    """Return the ends of a sequence's topic, which exists, as they are now."""
    cluster = Cluster(settings.kafka)
    name = cluster.identified(topic)
    noted = {p: tail.seq for p, tail in kind.last_noted(reader, name).items()}
    return TopicEnds(topic, cluster.bounds(topic, partitions), noted, name)


def limits_of(kind: Kind, evidence: Evidence) -> Limits:
    """Return which messages of a topic are not compared, and which rows need not be there.

    The former came before the lake, the latter before the newest generation.
    """
    before = kind.tails_of(evidence.generations[0])
    compared = {p: (tail.place, tail.seq) for p, tail in before.items()}
    due = {p: tail.place for p, tail in kind.tails_of(evidence.generation).items()}
    return Limits(compared, due, _read_forgotten(evidence))


def _read_forgotten(evidence: Evidence) -> Set[tuple[int, int]]:
    """Return the partition and timestamp (ms) of messages whose rows `forget` has erased."""
    names = ["partition", "event_time"]
    rows = read_table(evidence.reader, evidence.settings, tables.FORGOTTEN, names)
    places = zip(*(rows[name].to_pylist() for name in names), strict=True)
    return {(p, timestamp_of(time)) for p, time in places}


def timestamp_of(event_time: int) -> int:
    """Return the timestamp of a message of a merge record (ms): a time of 0 is none to Kafka."""
    return max(1, event_time)


def check_sequence(
    partition: Partition,
    kind: Kind,
    ends: TopicEnds,
    limits: Limits,
    rows: SequenceRows,
    findings: Findings,
) -> None:
    """Check one partition of a topic.

    - Numbers rise by one, and places rise.
    - Each message is of a row of one of the generations, and no record is in two messages.
    - No row of the newest generation is missing up to the last message.

    Under `at_most_once` a failure may leave a gap; under `at_least_once` a message may come again.
    """
    first, end = ends.bounds.get(partition.number, (0, 0))
    check = _SequenceCheck(partition, kind, ends, limits, rows, findings, seq=None if first else -1)
    for offset, message in _messages(partition, kind, ends.topic, first, end):
        check.check_message(offset, message)
    check.check_missing()


@dataclass
class _SequenceCheck:
    """Check of one partition, whose messages are given to it in order of offset.

    - `seq`: the last number; a partition from which nothing was deleted begins with 0.
    - `last`: the largest place so far, and `where` the last message, for a sentence.
    """

    partition: Partition
    kind: Kind
    ends: TopicEnds
    limits: Limits
    rows: SequenceRows
    findings: Findings
    seq: int | None
    last: Place = NOWHERE
    where: str = ""
    places: set[Place] = field(default_factory=set)
    parts: set[tuple[InputId, int]] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.delivery = self.partition.evidence.settings.publish.delivery
        self.topic = f"{self.ends.topic}[{self.partition.number}]"

    def check_message(self, offset: int, message: Message | None) -> None:
        """Check the next message: its number, its place, and its content.

        None stands for a message that is none of the sequence.
        """
        if message is None:
            self.findings.add(self.kind.foreign, f"{self.topic}@{offset}", self.kind.fix)
            return
        if self.delivery == "at_least_once":
            identity = hash((message.seq, message.place, *message.content.values()))
            if identity in self.seen:
                return
            self.seen.add(identity)
        self.where = f"{self.topic}@{offset}: seq {message.seq}, {message.subject}"
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
        compared_place, compared_seq = self.limits.compared.get(p, (NOWHERE, -1))
        if message.place <= compared_place and message.seq <= compared_seq:
            return False
        # Rows are deleted by their last event time, which is no earlier.
        floors = self.partition.evidence.retention_bounds.times
        is_kept = message.event_time >= floors.get((self.kind.table, p), 0)
        is_forgotten = (p, timestamp_of(message.event_time)) in self.limits.forgotten
        return message.place in self.rows.by_place or (is_kept and not is_forgotten)

    def _check_content(self, message: Message) -> None:
        problems: list[tuple[str | None, Set[tuple[InputId, int]]]] = [
            (_unlike(message, row, self.kind), row.parts)
            for row in map(self.rows.message_of, self.rows.by_place.get(message.place, ()))
        ] or [(self.kind.unknown, set())]
        problem, parts = min(problems, key=lambda each: each[0] is not None)
        if problem:
            self._add(problem)
        # Where the place does not rise, that is reported already.
        repeated = sorted(self.parts & parts) if message.place > self.last else []
        if repeated:
            input_id, offset = repeated[0]
            name = self.partition.evidence.settings.input_names[input_id]
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
        since = max(begin, self.limits.due.get(p, NOWHERE))
        for place in sorted(self.rows.due.keys() - self.places):
            if since < place < self.last:
                where = f"{self.topic}: {self.rows.message_of(self.rows.due[place]).subject}"
                self.findings.add(self.kind.missing, where, self.kind.fix)

    def _add(self, what: str) -> None:
        """Report a problem of the last message."""
        self.findings.add(what, self.where, self.kind.fix)


def _messages(
    partition: Partition, kind: Kind, topic: str, first: int, end: int
) -> Iterator[tuple[int, Message | None]]:
    """Yield the messages of a partition in order of offset; None for one that is none of the
    sequence.
    """
    kafka = partition.evidence.settings.kafka
    for batch in read_range(kafka, Range(topic, partition.number, first, end)):
        times = batch["kafka_timestamp"].cast(pa.int64()).to_pylist()
        columns = (batch[name].to_pylist() for name in ("offset", "key", "value", "headers"))
        for time, offset, key, value, headers in zip(times, *columns, strict=True):
            own_headers = {
                header["key"]: header["value"] or b"" for header in reversed(headers or [])
            }
            if FORGOTTEN in own_headers:  # a tombstone is no part of the sequence
                continue
            record_id = own_headers.get(ID, b"").decode(errors="replace")
            content = {"key": key, "value": value, "timestamp": time // 1000, "id": record_id}
            try:
                message = kind.read(own_headers, content)
            except ValueError:
                message = None
            yield offset, message


def _unlike(message: Message, row: RowMessage, kind: Kind) -> str | None:
    """Return what of a message is not as a row has it; None where all is."""
    differing = [name for name, right in row.content.items() if message.content.get(name) != right]
    if not differing:
        return None
    return f"{' and '.join(differing)} differ{'s' * (len(differing) == 1)} from {kind.unlike}"
