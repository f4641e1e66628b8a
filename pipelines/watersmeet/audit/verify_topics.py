"""Checks of what is published: rows are valid where they should be, and a topic has the message of
each row that has one, in order, numbered without a gap."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.audit.comparison import Row, compare
from watersmeet.audit.evidence import Evidence, timestamp_of
from watersmeet.audit.problems import Report
from watersmeet.audit.verify_rows import place
from watersmeet.audit.verify_validity import evaluated
from watersmeet.core.columns import row_values
from watersmeet.core.inputs import InputId
from watersmeet.core.message import correction_header_bytes
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
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake.history import Generation
from watersmeet.lake.published import last_tails
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

_CONTENT: Final = ("place", "key", "value", "timestamp", "id")


class Kind(NamedTuple):
    """A sequence, and what of its messages is compared beside key, value and timestamp.

    - `topic`: the topic, for a sentence.
    - `headers`: the headers that are compared, by the names that sentences give them.
    - `fix`: how to repair the topic.
    """

    sequence: Order
    topic: str
    headers: Mapping[str, str]
    fix: str


SINK: Final = Kind(
    MERGED,
    "sink",
    {"id": ID},
    "name a new topic in publish.topic: gold fills it from silver",
)
CORRECTIONS: Final = Kind(
    CORRECTED,
    "topic of corrections",
    {"id": ID, "version": VERSION, "late": LATE},
    "delete the topic: gold fills a new one from the table corrections",
)


class TopicEnds(NamedTuple):
    """A sequence's topic, up to where it ended when it was looked at.

    - `topic`: its name.
    - `bounds`: by partition, the first offset and the exclusive end offset.
    - `noted`: by partition, the last number that `published` had before that.
    """

    kind: Kind
    topic: str
    bounds: Mapping[int, tuple[int, int]]
    noted: Mapping[int, int]


def read_ends(
    reader: TableReader, settings: Settings, kind: Kind, topic: str, partitions: int
) -> TopicEnds:
    """Return the ends of a sequence's topic, which exists, as they are now."""
    cluster = Cluster(settings.kafka)
    name = cluster.identified(topic)
    noted = {p: tail.seq for p, tail in last_tails(reader, kind.sequence, name).items()}
    return TopicEnds(kind, topic, cluster.bounds(topic, partitions), noted)


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

    Under `at_most_once` a failure may leave a gap; under `at_least_once` a message may come again.
    """

    def __init__(self, evidence: Evidence, number: int, ends: TopicEnds, report: Report) -> None:
        self.evidence = evidence
        self.number = number
        self.kind = ends.kind
        self.columns = (*_CONTENT[:-1], *ends.kind.headers)
        self.findings = report[ends.kind.topic]
        self.topic = f"{ends.topic}[{number}]"
        self.noted = ends.noted.get(number, -1)
        self.delivery = evidence.settings.publish.delivery
        self._range = Range(ends.topic, number, *ends.bounds.get(number, (0, 0)))
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
        for place_, actual, expected, columns in compare(
            {message.content for message, _ in compared}, set(own), self.columns, itemgetter(0)
        ):
            if columns:
                verb = "differs" if len(columns) == 1 else "differ"
                what = f"{' and '.join(columns)} {verb} from the row of {self._table}"
                self.findings.add(what, by_place[place_], self.kind.fix)
            elif actual and not expected:
                self._check_unknown(place_, compared)
            elif not actual:
                self._check_missing(place_, expected[-1])

    def finish(self) -> None:
        """Check what is left of the topic, and that it goes as far as was noted."""
        self.check((), self.evidence.generations.newest, None)
        is_empty = self._first is None or self._seq is None
        if not is_empty and self.delivery != "at_most_once" and self.noted > (self._seq or 0):
            what = f"the last message has seq {self._seq}, and {self.noted} was published"
            self.findings.add(what, self._where, self.kind.fix)

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
            self.findings.add(what, where, self.kind.fix)
        self._seq = seq if self._seq is None else max(seq, self._seq)
        self._last = max(message.place, self._last)
        self._where = where

    def _is_lost(self, message: Message) -> bool:
        lost = self.evidence.generations[0].tails_of(self.kind.sequence).get(self.number)
        return lost is not None and message.place <= lost.place and message.seq <= lost.seq

    def _check_unknown(self, at: Place, messages: Sequence[tuple[Message, str]]) -> None:
        """Report messages that no row has, unless it was deleted or forgotten."""
        # Rows are deleted by their last event time, which is no earlier.
        floor = self.evidence.history.floors.times.get((self._table, self.number), 0)
        for message, where in messages:
            time = self.number, timestamp_of(message.event_time)
            if message.place != at or message.event_time < floor or time in self.evidence.forgotten:
                continue
            values = self.kind.sequence.values(at).items()
            text = ", ".join(f"{name} {value!r}" for name, value in values if value != "")
            what = f"no row of {self._table} has this message: {text}"
            self.findings.add(what, where, self.kind.fix)
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
            self.findings.add(f"{what}, which has later ones", where, self.kind.fix)

    def _subject(self, content: Row) -> str:
        version = f"version {content[5]} of " if len(content) > len(_CONTENT) else ""
        return f"{version}{content[4]!r}"

    # -- messages

    def _messages(self, until: Place | None) -> list[Message]:
        while self._range.size and (
            until is None or not self._read or self._read[-1].place <= until
        ):
            end = self._range.until_offset
            # No more than a batch is in memory, and none beside it is kept for later.
            with closing(read_range(self.evidence.settings.kafka, self._range)) as batches:
                if (batch := next(batches, None)) is not None:
                    self._read += self._parsed(batch)
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
                self.findings.add(what, f"{self.topic}@{offset}", self.kind.fix)
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
    ends: Sequence[TopicEnds]
    corrected_keys: Collection[tuple[str, str]]
    report: Report

    def __post_init__(self) -> None:
        self.topics = [TopicCheck(self.evidence, self.number, e, self.report) for e in self.ends]
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
            content = merged if topic.kind is SINK else corrected
            until: Place = () if clock is None else (clock + 1,)
            # What the next generation publishes is behind the tail at which it began.
            last = topic.last_of(generation)
            topic.check(content, generation, until if last is None else min(until, last))

    def check_unfinished(self, rows: pa.Table) -> None:
        """Check that nothing is said of rows that may still change."""
        is_open = rows.filter(pc.not_equal(rows["status"], "timed_out"))
        names = ("tenant", "merge_key", "event_time", "valid", "invalid_reason")
        for tenant, key, time, *actual in row_values(is_open, *names):
            self._compare(actual, [None, None], place(self.number, key, time, tenant))
        closed = rows.filter(pc.equal(rows["status"], "timed_out"))
        self._merged(closed, is_judged=True)

    def finish(self) -> None:
        """Check what is left of the topics."""
        for topic in self.topics:
            topic.finish()

    def _compare(self, actual: Sequence[Any], right: Sequence[Any], where: str) -> None:
        if list(actual) != list(right):
            what = "valid is {} ({}), and must be {} ({})".format(*actual, *right)
            self.report["rows of silver"].add(what, where)

    def _merged(self, rows: pa.Table, *, is_judged: bool) -> list[Row]:
        if not rows.num_rows:
            return []
        rows = evaluated(rows, self.evidence.epochs)
        names = (*MERGED.order, "event_time", "valid", "invalid_reason", "fault", "told")
        content: list[Row] = []
        for row in row_values(rows, *names):
            at = dict(zip(names, row, strict=True))
            tenant, key, time, valid = (
                at[n] for n in ("tenant", "merge_key", "event_time", "valid")
            )
            own_id = message_id(self.number, time, key, tenant)
            if is_judged:
                self._check_valid(at, place(self.number, key, time, tenant))
            if (tenant, key) in self.corrected_keys:
                # Where a jump has closed it later, it was valid all the same.
                self._had[own_id] = at["fault"] is None
            if valid and at["closed_at"] is not None and at["due"] is not None:
                message = key.encode(), at["told"], timestamp_of(time), own_id
                content.append((MERGED.place(at), *message))
        return content

    def _check_valid(self, at: Mapping[str, Any], where: str) -> None:
        evidence, fault = self.evidence, at["fault"]
        is_closed = evidence.following is not None and (
            at["closed_at"] is None
            or evidence.is_unpublished(MERGED, self.number, MERGED.place(at))
        )
        if is_closed and fault is None and evidence.is_closing and at["valid"]:
            return  # it is judged as if it were closed
        right: tuple[bool, str | None] = fault is None, fault
        if (is_closed and fault is None) or at["invalid_reason"] == "reset":
            right = False, "reset"
        self._compare((at["valid"], at["invalid_reason"]), right, where)

    def _corrected(self, rows: pa.Table, *, is_judged: bool) -> list[Row]:
        if not rows.num_rows:
            return []
        p = self.number
        order = pc.sort_indices(rows, [(name, "ascending") for name in CORRECTED.order])
        rows = rows.take(order)
        rows = rows.append_column("closed_time", rows["event_time"])
        seen = rows.set_column(
            rows.column_names.index("event_time"), "event_time", rows["first_event_time"]
        )
        more_bytes = correction_header_bytes(self.evidence.settings.inputs)
        rows = evaluated(seen, self.evidence.epochs, more_bytes)
        names = (
            *("source", "topic", "offset", "tenant", "merge_key", "closed_time", "version"),
            *("is_late_born", "valid", "invalid_reason", "has_message", "id", "settled_at", "u"),
            *("fault", "told"),
        )
        content: list[Row] = []
        before = self.evidence.generation.corrected_before.get(p)
        for row in row_values(rows, *names):
            values = dict(zip(names, row, strict=True))
            input_id, offset = InputId(*row[:2]), row[2]
            own_place = CORRECTED.place(values)
            own_id = late_born_id(*input_id, p, offset)
            tenant, key, time = row[3:6]
            if not values["is_late_born"]:
                own_id = message_id(p, time, key, tenant)
            elif before is None or own_place > before:
                own_id = self._opened.setdefault((tenant, key, time), own_id)
            self._judge_correction(values, own_id, is_judged=is_judged)
            if values["has_message"]:
                value = values["told"] if values["valid"] else None
                message = key.encode(), value, timestamp_of(time), values["id"]
                of_late = f"{input_id.source}/{input_id.topic}/{p}/{offset}"
                content.append((own_place, *message, str(values["version"]), of_late))
        return content

    def _judge_correction(self, row: Mapping[str, Any], own_id: str, *, is_judged: bool) -> None:
        fault = row["fault"]
        if not row["version"]:
            fault = EXCESS if row["invalid_reason"] == EXCESS else TOO_MANY
        else:
            self._had[own_id] = fault is None or self._had.get(own_id, False)
        if not is_judged:
            return
        tp = TopicPartition(InputId(row["source"], row["topic"]), self.number)
        where = f"corrections: {self.evidence.at(tp, row['offset'])}"
        right: tuple[bool, str | None] = fault is None, fault
        if is_closed := self._is_closed(row, own_id):
            right = False, "reset"
        self._compare((row["valid"], row["invalid_reason"]), right, where)
        if not row["version"]:
            return
        has_message = self._had[own_id] and not is_closed
        for name, value in {"has_message": has_message, "id": own_id}.items():
            if row[name] != value:
                what = f"{name} is {row[name]!r}, and must be {value!r}"
                self.report["corrections"].add(what, where)

    def _is_closed(self, row: Mapping[str, Any], own_id: str) -> bool:
        """Return True where a jump has closed a correction, since it had a message to come."""
        evidence = self.evidence
        if evidence.following is None or not row["version"]:
            return False
        is_unpublished = evidence.is_unpublished(CORRECTED, self.number, CORRECTED.place(row))
        if evidence.is_closing and row["invalid_reason"] != "reset":
            return False  # it is judged as it was made
        is_unknown = evidence.base is not None and row["invalid_reason"] == "reset"
        return is_unpublished and (self._had[own_id] or is_unknown)
