"""Checks of what is published: rows are valid where they should be, and a topic has the message of
each row that has one, in order, numbered without a gap."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit.comparison import Row, as_dicts, compare
from watersmeet.audit.evidence import Evidence, timestamp_of
from watersmeet.audit.problems import Report
from watersmeet.audit.verify_rows import place_of
from watersmeet.core.columns import lengths
from watersmeet.core.inputs import InputId
from watersmeet.core.message import (
    as_read,
    correction_header_bytes,
    message_bytes,
    message_values,
)
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import (
    CORRECTED,
    EXCESS,
    FORGOTTEN,
    ID,
    LATE,
    MERGED,
    TOO_MANY,
    VERSION,
    Place,
    late_born_id,
    message_id,
)
from watersmeet.core.sequence import (
    Sequence as Order,
)
from watersmeet.core.types import TIME
from watersmeet.expressions.publish import Expressions
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.history import Epoch, Epochs, Generation
from watersmeet.lake.published import is_about, last_tails, letter_ends
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

_CONTENT: Final = ("place", "key", "value", "timestamp", "id")

_LOOKED_AHEAD: Final = 500_000
"""How many messages are read, about, to find one that is missing before them: as many as are sent
at once."""


class Kind(NamedTuple):
    """A sequence, and what of its messages is compared beside key, value and timestamp.

    - `topic`: the topic, for a sentence.
    - `headers`: the headers that are compared, by the names that sentences give them.
    """

    sequence: Order
    topic: str
    headers: Mapping[str, str]


KINDS: Final = {
    MERGED.table: Kind(MERGED, "sink", {"id": ID}),
    CORRECTED.table: Kind(
        CORRECTED, "topic of corrections", {"id": ID, "version": VERSION, "late": LATE}
    ),
}
"""The sequences by the table that has their rows."""


class Topic(NamedTuple):
    """A topic that gold writes, up to where it ended when it was looked at.

    - `table`: has the rows that the topic has messages of.
    - `bounds`: by partition, the first offset and the exclusive end offset.
    - `noted`: what `published` had before that: by partition the last number, or by topic-partition
      up to which offset dead letters were sent.
    """

    table: str
    name: str
    bounds: Mapping[int, tuple[int, int]]
    noted: Mapping[Any, int]

    @property
    def fix(self) -> str:
        """Instruction to repair the topic: what is in it cannot be changed."""
        return _FIXES[self.table]


_NEW_TOPIC: Final = "name a new topic in publish."
_FIXES: Final = {
    MERGED.table: f"{_NEW_TOPIC}topic: gold fills it from silver",
    CORRECTED.table: "delete the topic: gold fills a new one from the table corrections",
    tables.LATE: f"{_NEW_TOPIC}late_topic: gold fills it from late",
    tables.QUARANTINE: f"{_NEW_TOPIC}quarantine_topic: gold fills it from quarantine",
}


def read_topics(
    reader: TableReader, settings: Settings, partitions: int, existing: Collection[str]
) -> list[Topic]:
    """Return the topics that gold writes and that exist, as they are now.

    What was noted is read first, so it is in the topic. Raises KafkaTransientError and the other
    errors of Kafka.
    """
    cluster, publish = Cluster(settings.kafka), settings.publish
    names = {MERGED.table: publish.topic, CORRECTED.table: publish.corrections_topic}
    topics = []
    for table, name in {**names, **publish.dead_letter_topics}.items():
        if name is not None and name in existing:
            sink = cluster.identified(name)
            noted: Mapping[Any, int] = (
                {p: tail.seq for p, tail in last_tails(reader, KINDS[table].sequence, sink).items()}
                if table in KINDS
                else letter_ends(reader, is_about(sink))
            )
            topics.append(Topic(table, name, cluster.bounds(name, partitions), noted))
    return topics


class Message(NamedTuple):
    """A message: its offset, number, place, `event_time` (ms) of its merge record as it closed, and
    content.
    """

    offset: int
    seq: int
    place: Place
    event_time: int
    content: Row


class TopicCheck:
    """Check of one partition of a topic, whose rows are given to it in their order, in portions.

    - Numbers rise by one, and places rise.
    - Each message is of a row of one of the generations. Not compared are messages that a lost lake
      left, and those of keys that were forgotten.
    - No row is missing from where its generation began up to the last message.

    Under `at_most_once` a failure may leave a gap; under `at_least_once` a message may come again,
    and one that was given up comes behind later ones.
    """

    def __init__(self, evidence: Evidence, number: int, topic: Topic, report: Report) -> None:
        self.evidence = evidence
        self.number = number
        self.kind = KINDS[topic.table]
        self.columns = (*_CONTENT[:-1], *self.kind.headers)
        self.report = partial(report[self.kind.topic].add, fix=topic.fix)
        self.topic = f"{topic.name}[{number}]"
        self.noted = topic.noted.get(number, -1)
        self.delivery = evidence.settings.publish.delivery
        self._range = Range(topic.name, number, *topic.bounds.get(number, (0, 0)))
        self._is_cut = self._range.from_offset > 0
        self._read: list[Message] = []
        self._later: list[Row] = []
        self._first: Place | None = None
        self._last: Place = ()
        self._seq: int | None = None if self._is_cut else -1
        self._where = ""
        self._seen = set[int]()

    def check(self, content: Sequence[Row], generation: Generation, until: Place | None) -> None:
        """Check the messages up to a place (None: all that are left), and that the rows of a
        generation that have a message have theirs.

        `content`: of each of these rows its place, and what its message has, in no order.
        """
        messages = self._messages(until)
        last = self.last_of(generation)
        tail = generation.tails_of(self.kind.sequence).get(self.number)
        since = () if tail is None else tail.place
        own = [row for row in content if row[0] > since and (last is None or row[0] <= last)]
        own += self._later
        if until is not None:
            self._later = [row for row in own if row[0] > until]
            own = [row for row in own if row[0] <= until]
        compared = []
        for message in messages:
            subject = f"seq {message.seq}, {self._subject(message.content)}"
            where = f"{self.topic}@{message.offset}: {subject}"
            self._check_order(message, where)
            if not self._is_lost(message):
                compared.append((message, where))
        by_place = {message.place: where for message, where in compared}
        sent = {message.content for message, _ in compared}
        for difference in compare(sent, set(own), self.columns, itemgetter(0)):
            at = difference.key
            if difference.columns:
                what = f"{difference.differ()} from the row of {self._table}"
                self.report(what, by_place[at])
            elif difference.actual and not difference.expected:
                self._check_unknown(at, compared)
            elif not difference.actual:
                self._check_missing(at, difference.expected[-1])

    def finish(self) -> None:
        """Check what is left of the topic, and that it goes as far as was noted."""
        self.check((), self.evidence.generations.newest, None)
        is_empty = self._first is None or self._seq is None
        if not is_empty and self.delivery != "at_most_once" and self.noted > (self._seq or 0):
            what = f"the last message has seq {self._seq}, and {self.noted} was published"
            self.report(what, self._where)

    def last_of(self, generation: Generation) -> Place | None:
        """Return the place of a generation's last message; None: it goes on."""
        following = self.evidence.generations.after(generation)
        if following is None:
            return None
        tail = following.tails_of(self.kind.sequence).get(self.number)
        return () if tail is None else tail.place

    @property
    def _table(self) -> str:
        return self.kind.sequence.table

    def _check_order(self, message: Message, where: str) -> None:
        seq = message.seq
        what = None
        if self._seq is not None and seq <= self._seq:
            what = f"seq {seq} after {self._seq}: a repeat, or out of order"
        elif self._seq is not None and seq > self._seq + 1 and self.delivery != "at_most_once":
            what = f"seq {seq} after {self._seq}: a gap"
        elif message.place <= self._last:
            what = f"{message.content[4]} is not in the order of publication"
        if what is not None:
            self.report(what, where)
        self._seq = seq if self._seq is None else max(seq, self._seq)
        self._last = max(message.place, self._last)
        self._where = where

    def _is_lost(self, message: Message) -> bool:
        lost = self.evidence.generations[0].tails_of(self.kind.sequence).get(self.number)
        return lost is not None and message.place <= lost.place and message.seq <= lost.seq

    def _check_unknown(self, at: Place, messages: Sequence[tuple[Message, str]]) -> None:
        # Rows are deleted by their last event time, which is no earlier.
        floor = self.evidence.history.floors.times.get((self._table, self.number), 0)
        for message, where in messages:
            time = self.number, timestamp_of(message.event_time)
            if message.place != at or message.event_time < floor or time in self.evidence.forgotten:
                continue
            values = self.kind.sequence.values(at).items()
            text = ", ".join(f"{name} {value!r}" for name, value in values if value != "")
            what = f"no row of {self._table} has this message: {text}"
            self.report(what, where)
            return

    def _check_missing(self, at: Place, row: Row) -> None:
        is_at_end = not self._read and self._range.from_offset >= self._range.until_offset
        if self.delivery == "at_most_once" or (is_at_end and at >= self._last):
            return
        if self._first is not None and (
            not self._is_cut or at > self._first
        ):  # else retention has deleted messages
            what = f"a row of {self._table} is missing in the {self.kind.topic}"
            where = f"{self.topic}: {self._subject(row)}"
            self.report(f"{what}, which has later ones", where)

    def _subject(self, content: Row) -> str:
        version = f"version {content[5]} of " if len(content) > len(_CONTENT) else ""
        return f"{version}{content[4]!r}"

    # -- messages

    def _messages(self, until: Place | None) -> list[Message]:
        while self._range.size and (
            until is None
            or not self._read
            or self._read[-1].place <= until
            or self._may_lack_earlier()
        ):
            end = self._range.until_offset
            # No more than a batch is in memory, and none beside it is kept for later.
            with closing(read_range(self.evidence.settings.kafka, self._range)) as batches:
                if (batch := next(batches, None)) is not None:
                    self._read += self._parsed(batch)
                    if self.delivery == "at_least_once":
                        self._read.sort(key=attrgetter("seq"))
                    end = batch["offset"][-1].as_py() + 1
            self._range = replace(self._range, from_offset=end)
        if self._first is None and self._read:
            self._first = min(message.place for message in self._read)
        count = len(self._read)
        if until is not None:
            later = (i for i, message in enumerate(self._read) if message.place > until)
            count = next(later, count)
        messages = self._read[:count]
        del self._read[:count]
        return messages

    def _may_lack_earlier(self) -> bool:
        # What was given up is sent again by the next start, behind one transaction's messages.
        if self.delivery != "at_least_once" or len(self._read) > _LOOKED_AHEAD:
            return False
        first = self._read[0].seq if self._seq is None else self._seq + 1
        seqs = {message.seq for message in self._read if message.seq >= first}
        return max(seqs, default=first - 1) - first >= len(seqs)

    def _parsed(self, batch: pa.RecordBatch) -> Iterator[Message]:
        timeout_ms = self.evidence.epochs.first_timeout_ms
        times = batch["kafka_timestamp"].cast(pa.int64()).to_pylist()
        columns = (batch[name].to_pylist() for name in ("offset", "key", "value", "headers"))
        for time, offset, key, value, headers in zip(times, *columns, strict=True):
            own = {header["key"]: header["value"] or b"" for header in reversed(headers or [])}
            if FORGOTTEN in own:  # a tombstone is no part of the sequence
                continue
            try:
                tail = self.kind.sequence.parse(own, timeout_ms)
            except ValueError:
                what = f"not a message of Watersmeet: its headers are of no row of {self._table}"
                self.report(what, f"{self.topic}@{offset}")
                continue
            timestamp = time // 1000
            texts = (
                own.get(header, b"").decode(errors="replace")
                for header in self.kind.headers.values()
            )
            content = (tail.place, key, value, timestamp, *texts)
            event_time = tail.event_time
            if event_time is None:  # nothing but the timestamp says it
                event_time = 0 if timestamp == timestamp_of(0) else timestamp
            if self.delivery == "at_least_once":
                identity = hash((tail.seq, content))
                if identity in self._seen:
                    continue
                self._seen.add(identity)
            yield Message(offset, tail.seq, tail.place, event_time, content)


@dataclass
class MessageCheck:
    """Check of the rows of one partition by the user's expressions, and of their messages.

    Corrections have a message where they, an earlier one, or their merge record are valid. What a
    late record has opened is named by the first correction.
    """

    evidence: Evidence
    number: int
    sequences: Sequence[Topic]
    corrected_keys: Collection[tuple[str, str]]
    report: Report

    def __post_init__(self) -> None:
        self.topics = [
            TopicCheck(self.evidence, self.number, e, self.report) for e in self.sequences
        ]
        # Of the generation that is looked at: late records of one correct no rows of another.
        self._generation: int | None = None
        self._had: dict[str, bool] = {}
        self._opened: dict[tuple[Any, ...], str] = {}

    def check(
        self, rows: pa.Table, clock: int | None, generation: Generation, *, is_judged: bool = True
    ) -> None:
        """Check the rows of a generation that were finished up to a clock (ms).

        `is_judged`: False where only their messages are compared.
        """
        if generation.number != self._generation:
            self._generation = generation.number
            self._had.clear()
            self._opened.clear()
        is_merged = pc.equal(rows["status"], "timed_out")
        is_corrected = pc.equal(rows["status"], "correction")
        merged = self._merged(rows.filter(is_merged), is_judged=is_judged)
        corrected = self._corrected(rows.filter(is_corrected), is_judged=is_judged)
        for topic in self.topics:
            content = merged if topic.kind.sequence is MERGED else corrected
            until: Place = () if clock is None else (clock + 1,)
            # What the next generation publishes is behind the tail at which it began.
            last = topic.last_of(generation)
            topic.check(content, generation, until if last is None else min(until, last))

    def check_unfinished(self, rows: pa.Table) -> None:
        """Check that nothing is said of rows that may still change."""
        is_closed = pc.equal(rows["status"], "timed_out")
        names = ("tenant", "merge_key", "event_time", "valid", "invalid_reason")
        for row in as_dicts(rows.filter(pc.invert(is_closed)), names):
            self._check_valid(row, None, None, self._place(row))
        self._merged(rows.filter(is_closed), is_judged=True)

    def finish(self) -> None:
        """Check what is left of the topics."""
        for topic in self.topics:
            topic.finish()

    def _place(self, row: Mapping[str, Any]) -> str:
        return place_of({**row, "partition": self.number})

    def _check_valid(
        self, row: Mapping[str, Any], valid: bool | None, reason: str | None, where: str
    ) -> None:
        if (row["valid"], row["invalid_reason"]) != (valid, reason):
            actual = f"{row['valid']} ({row['invalid_reason']})"
            what = f"valid is {actual}, and must be {valid} ({reason})"
            self.report["rows of silver"].add(what, where)

    def _merged(self, rows: pa.Table, *, is_judged: bool) -> list[Row]:
        if not rows.num_rows:
            return []
        rows = evaluated(rows, self.evidence.epochs)
        names = (*MERGED.order, "event_time", "valid", "invalid_reason", "fault", "told")
        content: list[Row] = []
        for row in as_dicts(rows, names):
            tenant, key, time, fault = (
                row[n] for n in ("tenant", "merge_key", "event_time", "fault")
            )
            own_id = message_id(self.number, time, key, tenant)
            if is_judged:
                is_reset = fault is None and self._is_closed(row, MERGED)
                if is_reset or row["invalid_reason"] == "reset":
                    self._check_valid(row, False, "reset", self._place(row))
                else:
                    self._check_valid(row, fault is None, fault, self._place(row))
            if (tenant, key) in self.corrected_keys:
                # Where a jump has closed it later, it was valid all the same.
                self._had[own_id] = fault is None
            if row["valid"] and row["closed_at"] is not None and row["due"] is not None:
                message = key.encode(), row["told"], timestamp_of(time), own_id
                content.append((MERGED.place(row), *message))
        return content

    def _corrected(self, rows: pa.Table, *, is_judged: bool) -> list[Row]:
        if not rows.num_rows:
            return []
        p, before = self.number, self.evidence.generation.corrected_before.get(self.number)
        rows = rows.sort_by([(name, "ascending") for name in CORRECTED.order])
        rows = rows.append_column("closed_time", rows["event_time"])
        rows = rows.set_column(
            rows.column_names.index("event_time"), "event_time", rows["first_event_time"]
        )
        more_bytes = correction_header_bytes(self.evidence.settings.inputs)
        names = (
            *("source", "topic", "offset", "tenant", "merge_key", "closed_time", "closed_at"),
            *("version", "is_late_born", "valid", "invalid_reason", "has_message", "id"),
            *("settled_at", "u", "fault", "told"),
        )
        content: list[Row] = []
        for row in as_dicts(evaluated(rows, self.evidence.epochs, more_bytes), names):
            source, topic, offset, *about = (row[name] for name in names[:6])
            tenant, key, time = about
            own_place, own_id = CORRECTED.place(row), message_id(p, time, key, tenant)
            if row["is_late_born"]:
                own_id = late_born_id(source, topic, p, offset)
                if before is None or own_place > before:
                    own_id = self._opened.setdefault((tenant, key, time), own_id)
            self._judge_correction(row, own_id, is_judged=is_judged)
            if row["has_message"]:
                value = row["told"] if row["valid"] else None
                message = key.encode(), value, timestamp_of(time), row["id"]
                late = f"{source}/{topic}/{p}/{offset}"
                content.append((own_place, *message, str(row["version"]), late))
        return content

    def _judge_correction(self, row: Mapping[str, Any], own_id: str, *, is_judged: bool) -> None:
        evidence, fault, reason = self.evidence, row["fault"], row["invalid_reason"]
        if row["version"]:
            self._had[own_id] = fault is None or self._had.get(own_id, False)
        else:
            fault = EXCESS if reason == EXCESS else TOO_MANY
        if not is_judged:
            return
        tp = TopicPartition(InputId(row["source"], row["topic"]), self.number)
        where = f"corrections: {tp.at(row['offset'])}"
        if not row["version"]:
            self._check_valid(row, False, fault, where)
            return
        is_unknown = evidence.base is not None and reason == "reset"
        is_closed = (self._had[own_id] or is_unknown) and self._is_closed(row, CORRECTED)
        if is_closed:
            fault = "reset"
        self._check_valid(row, fault is None, fault, where)
        has_message = self._had[own_id] and not is_closed
        for name, value in {"has_message": has_message, "id": own_id}.items():
            if row[name] != value:
                what = f"{name} is {row[name]!r}, and must be {value!r}"
                self.report["corrections"].add(what, where)

    def _is_closed(self, row: Mapping[str, Any], sequence: Order) -> bool:
        """Return True where a jump has closed a row that had a message to come."""
        evidence = self.evidence
        if evidence.following is None or (
            evidence.is_closing and row["invalid_reason"] != "reset"
        ):  # in the latter case it is judged as it was made
            return False
        return row["closed_at"] is None or evidence.is_unpublished(
            sequence, self.number, sequence.place(row)
        )


# -- rows by the user's own expressions


def evaluated(rows: pa.Table, epochs: Epochs, header_bytes: int = 0) -> pa.Table:
    """Return merge records, or corrections, judged by the `publish` of their epochs, with `told`,
    the value of their message, and `fault`, why they are not valid: `too_large`, or what the
    predicate says; null: they are.

    `header_bytes`: the size of the headers of a message beside those of `message_bytes`.
    """
    numbers = epochs.numbers_of(rows["batch"].to_numpy())
    by_epoch = [
        _in_epoch(rows.take(pa.array(np.flatnonzero(numbers == i))), epoch, header_bytes)
        for i, epoch in enumerate(epochs)
        if (numbers == i).any()
    ]
    order = np.argsort(np.argsort(numbers, kind="stable"), kind="stable")
    return pa.concat_tables(by_epoch).take(pa.array(order))


def _in_epoch(rows: pa.Table, epoch: Epoch, header_bytes: int) -> pa.Table:
    publish = epoch.settings.publish
    expressions = Expressions.of(epoch.settings)
    stored = rows
    for name in ("event_time", "last_event_time"):
        stored = stored.set_column(
            stored.column_names.index(name), name, pc.multiply(rows[name], 1000).cast(TIME)
        )
    sources = epoch.settings.sources
    readable = as_read(stored, {name: source.value_type for name, source in sources.items()})
    if expressions.value is None:
        types = {name: source.read_type for name, source in sources.items()}
        told = _values(as_read(stored, types), list(sources))
    else:
        told = expressions.messages(readable).values
    parts = sum(np.asarray(pc.list_value_length(rows[name])) for name in sources)
    sizes = message_bytes(*(lengths(c) for c in (told, rows["merge_key"], rows["tenant"])))
    is_too_large = pa.array(sizes + header_bytes > publish.max_bytes)
    fault = pc.coalesce(
        pc.if_else(pa.array(parts == 0), "too_large", None),
        expressions.refusals(readable),
        pc.if_else(is_too_large, "too_large", None),
    )
    return rows.append_column("fault", fault).append_column("told", told)


def _values(rows: pa.Table, sources: Sequence[str]) -> pa.ChunkedArray:
    """Return the default value of each row's message.

    Null for a row that can have none, since something in it is null.
    """
    try:
        return message_values(rows, sources)
    except ValueError:
        if rows.num_rows == 1:
            return pa.chunked_array([pa.nulls(1, pa.large_binary())])
    half = rows.num_rows // 2
    return pa.chunked_array(
        [*_values(rows[:half], sources).chunks, *_values(rows[half:], sources).chunks],
        pa.large_binary(),
    )
