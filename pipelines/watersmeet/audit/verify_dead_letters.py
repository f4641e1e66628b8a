"""Check 7: a topic of dead letters has each record of `late`, or of `quarantine`, once and as it
came, in order of offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from watersmeet.audit.comparison import Row, compare
from watersmeet.audit.evidence import MAX_TIME, Evidence, Ints, numbers
from watersmeet.audit.problems import Findings
from watersmeet.audit.verify_topics import Topic
from watersmeet.core.columns import row_values
from watersmeet.core.dead_letters import (
    LATE,
    NEXT_OFFSETS,
    OFFSET,
    PARTITION,
    REASON,
    TOPIC,
    VALUE_BYTES,
    next_offsets,
)
from watersmeet.core.plan import TopicPartition
from watersmeet.core.reading import FORGOTTEN
from watersmeet.core.sequence import LIFE
from watersmeet.kafka.reading import Range, read_range
from watersmeet.lake import tables
from watersmeet.lake.inputs import of_input, of_topic
from watersmeet.lake.newest import row_ends
from watersmeet.lake.pieces import records_at
from watersmeet.lake.table_reader import Condition

READ = 5_000
"""Maximum number of dead letters that are in memory at a time, with the records that they were.

It is less where they have more than about `kafka.reading.BATCH_BYTES`.
"""

_COORDINATES = (REASON, TOPIC, PARTITION, OFFSET)
_CONTENT: Final = ("where", "key", "value", "headers", "reason", "bytes")


def check_dead_letters(evidence: Evidence, number: int, topic: Topic, findings: Findings) -> None:
    """Check one partition of a topic of dead letters.

    It has each source's records in order of offset, each once, with reason, place, key, value and
    headers. None is missing up to where the topic stands, and none is unknown.

    What Kafka no longer has is not missing. Not judged is what came before the history of the
    partition, and what a jump, a lost lake or `forget` has changed since. Contents are compared for
    a sample of the records, or for all.
    """
    settings = evidence.settings
    report = partial(findings.add, fix=topic.fix)
    first, end = topic.bounds.get(number, (0, 0))
    of_topic = topic.table, topic.name, first == 0
    checks = [
        _InputCheck(evidence, TopicPartition(input_id, number), *of_topic, report)
        for input_id in settings.inputs
    ]
    life = evidence.generation.life.encode()
    last: Mapping[str, Any] = {}
    where = ""
    for batch in read_range(settings.kafka, Range(topic.name, number, first, end), READ):
        for at, key, value, headers in row_values(batch, "offset", "key", "value", "headers"):
            own = [(header["key"], header["value"]) for header in headers or []]
            # A message that says nothing is not another lake's.
            if dict(own[-2:]).get(LIFE, life) != life:
                continue
            where, last = f"{topic.name}[{number}]@{at}", dict(own)
            if not _take(where, key, value, own, checks):
                names = ", ".join(_COORDINATES)
                what = f"not a dead letter of these sources: {names} do not say which record it was"
                report(what, where)
        for check in checks:
            check.check_letters()
    by_header = _read_sent_until(last, checks, where, report) if where else {}
    for check in checks:
        said = by_header.get(settings.input_names[check.tp.input], 0)
        check.check_missing([], max(min(said, MAX_TIME), topic.noted.get(check.tp, 0)))


def _take(
    where: str,
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes | None]],
    checks: Sequence[_InputCheck],
) -> bool:
    """Give a message to the check of its input; return False where it is no dead letter."""
    # A record may itself have been a dead letter: of headers with one name, ours are the last.
    for name in (NEXT_OFFSETS, LIFE):
        if headers and headers[-1][0] == name:
            headers.pop()
    rest, coordinates = headers[: -len(_COORDINATES)], headers[-len(_COORDINATES) :]
    ours = {name: (text or b"").decode(errors="replace") for name, text in coordinates}
    of_topic = [check for check in checks if check.tp.input.topic == ours.get(TOPIC)]
    text = ours.get(OFFSET, "")
    is_offset = len(text) < 20 and text.isdecimal() and int(text) < MAX_TIME
    is_place = tuple(ours) == _COORDINATES and ours[PARTITION] == str(checks[0].tp.partition)
    if not of_topic or not is_offset or not is_place:
        return False
    size, offset = None, int(text)
    if rest and rest[-1][0] == VALUE_BYTES:  # the topic had no room for the value
        size = (rest.pop()[1] or b"").decode(errors="replace")
    is_bare = size is not None and not rest and key is None
    # The sources of one topic have dead letters of their own.
    check = next((check for check in of_topic if check.expects(offset)), of_topic[0])
    where += f": {check.tp.at(offset)}"
    of_record = (None, None) if is_bare else (value, tuple(rest))
    check.take(offset, (where, key, *of_record, ours[REASON], size))
    return True


def _read_sent_until(
    headers: Mapping[str, Any],
    checks: Sequence[_InputCheck],
    where: str,
    report: Callable[[str, str], None],
) -> Mapping[str, int]:
    # The last message of a partition says, by name of the input, up to where records are there.
    names = checks[0].evidence.settings.input_names
    last = {names[check.tp.input]: check.last for check in checks}
    try:
        sent_until = next_offsets(headers)
    except ValueError:
        report(f"the last message has no {NEXT_OFFSETS}, by which gold goes on", where)
        return {source: offset + 1 for source, offset in last.items()}
    for source, offset in last.items():
        if (until := sent_until.get(source, 0)) <= offset:
            report(f"{NEXT_OFFSETS} has {until} for {source}, and offset {offset} was sent", where)
    return sent_until


@dataclass
class _InputCheck:
    """Check of the dead letters that were records of one topic-partition.

    - `is_whole`: False where retention has deleted the topic's first letters.
    - `last`: the offset of the last one.
    """

    evidence: Evidence
    tp: TopicPartition
    table: str
    name: str
    is_whole: bool
    report: Callable[[str, str], None]
    last: int = -1

    def __post_init__(self) -> None:
        evidence, tp = self.evidence, self.tp
        self._is_late = self.table == tables.LATE
        own: list[Condition] = [("partition", "=", tp.partition)]
        own.append(("offset", ">=", evidence.cursor_of(tp).next_offset))
        if self._is_late:
            own.append(("batch", "<=", evidence.last_batch))
            read_from, where = tables.LATE, of_input(tp.input, [own])
        else:
            refused: Condition = ("reason", "is not null", None)
            read_from = tables.bronze(tp.input.source)
            where = of_topic(tp.input, [[*own, refused]])
        names = ["offset", *(["batch"] if self._is_late else [])]
        self._rows = evidence.reader.select(read_from, names, where)
        self._offsets = np.unique(numbers(self._rows["offset"]))
        self._letters: dict[int, Row] = {}
        """By offset, the contents (`_CONTENT`) of letters that were not checked yet: each value is
        None where a letter need not have it."""
        self._judged = 0 if self.is_whole else None
        """How many of the records were found in the topic, or missing; None as long as it is not
        known which was the first one that is left."""

    def expects(self, offset: int) -> bool:
        """Return True if the next letter may be that of the record at this offset."""
        at = int(np.searchsorted(self._offsets, offset))
        return offset > self.last and offset in self._offsets[at : at + 1]

    def take(self, offset: int, content: Row) -> None:
        """Take note of the next letter."""
        if offset <= self.last:
            what = f"it comes after the record at offset {self.last}: a repeat, or out of order"
            self.report(what, content[0])
            return
        if self._judged is None:
            self._judged = int(np.searchsorted(self._offsets, offset))
        self.last = offset
        self._letters[offset] = content

    def check_letters(self) -> None:
        """Compare the letters that were taken with the records."""
        evidence, letters = self.evidence, self._letters
        self._letters = {}
        offsets = np.array([*letters], np.int64)
        is_known = np.isin(offsets, self._offsets)
        is_asked = is_known & ((offsets + evidence.last_batch) % evidence.one_in == 0)
        is_asked[~is_known] = self._is_judged(offsets[~is_known])
        records = {row["offset"]: row for row in self._records(offsets[is_asked])}
        actual, expected = [], []
        asked = zip(offsets[is_asked].tolist(), is_known[is_asked].tolist(), strict=True)
        for offset, is_of_table in asked:
            letter, record = letters[offset], records.get(offset)
            if record is not None and _is_forgotten(record):
                continue
            if not is_of_table:
                self.report(f"{self.table} has no such record", letter[0])
            elif record is not None:  # else check 1 says so
                actual.append(letter)
                expected.append(self._right(letter, record))
        for difference in compare(actual, expected, _CONTENT, lambda row: row[:1]):
            self.report(f"{difference.differ()} from the record's", *difference.key)
        if letters:
            self.check_missing([*letters], self.last + 1)

    def check_missing(self, sent: Sequence[int], until: int) -> None:
        """Check that no record before an offset is missing."""
        if self._judged is None:
            return
        end = int(np.searchsorted(self._offsets, until))
        missing = np.setdiff1d(self._offsets[self._judged : end], np.array(sent, np.int64))
        self._judged = max(self._judged, end)
        missing = missing[~self._is_readded(missing)]
        forgotten = [row["offset"] for row in self._records(missing) if _is_forgotten(row)]
        for offset in np.setdiff1d(missing, forgotten).tolist():
            where = f"{self.name}[{self.tp.partition}]: {self.tp.at(offset)}"
            what = f"a record of {self.table} is missing, although the topic has later ones"
            self.report(what, where)

    def _right(self, letter: Row, record: Mapping[str, Any]) -> Row:
        where, key, value, headers, _, size = letter
        has_value, has_all = size is None, headers is not None
        own = tuple((header["key"], header["value"]) for header in record["headers"] or [])
        return (
            where,
            record["key"] if has_all else key,
            record["value"] if has_value else value,
            own if has_all else headers,
            LATE if self._is_late else record["reason"],
            None if has_value else str(len(record["value"] or b"")),
        )

    def _is_judged(self, offsets: Ints) -> npt.NDArray[np.bool_]:
        # True where a record that the table lacks must not be in the topic.
        evidence, tp = self.evidence, self.tp
        is_judged = ~self._is_readded(offsets)
        if not len(offsets):
            return is_judged
        if (tables.QUARANTINE, tp.partition) in evidence.history.floors.times:
            # Of others nothing is left.
            is_judged &= np.isin(offsets, [row["offset"] for row in self._records(offsets)])
        is_judged &= offsets >= evidence.cursor_of(tp).next_offset
        first = evidence.generations[0]
        is_judged &= offsets >= first.begin.get(tp, 0)
        if first.kind != "sink" and not first.begin.get(tp, 0):
            return is_judged
        # The lost lake may have sent records that this one has not come to yet, or passes over.
        if not self._is_late:
            reached = row_ends(evidence.reader, tp.input, {}).get(tp.partition, 0)
            return is_judged & (offsets < reached)
        its: list[Condition] = [
            ("partition", "=", tp.partition),
            ("offset", "in", offsets.tolist()),
        ]
        rows = evidence.reader.select(tables.PASSED, ["offset"], of_input(tp.input, [its]))
        is_passed = np.isin(offsets, numbers(rows["offset"]))
        return is_judged & (offsets < evidence.end.until.get(tp, 0)) & ~is_passed

    def _is_readded(self, offsets: Ints) -> npt.NDArray[np.bool_]:
        # True where a record may have come to the table after later ones had been sent. Such a
        # record is not sent. A jump back finds anew which records are late, and reads refused ones
        # that bronze lacked. An epoch judges anew what waits for its tenant.
        evidence = self.evidence
        is_readded = np.zeros(len(offsets), bool)
        if self._is_late and evidence.settings.merge.has_tenants:
            firsts = [
                e.from_batch for e in evidence.epochs[1:] if e.from_batch in evidence.own_batches
            ]
            is_first = np.isin(numbers(self._rows["batch"]), firsts)
            is_readded |= np.isin(offsets, numbers(self._rows["offset"])[is_first])
        for since, until in evidence.reread_ranges.get(self.tp, ()):
            is_readded |= (offsets >= since) & (offsets < until)
        return is_readded

    def _records(self, offsets: Ints) -> Iterator[dict[str, Any]]:
        columns = ["partition", "offset", "key", "value", "headers", "reason", "detail"]
        table = tables.bronze(self.tp.input.source)
        places = ((self.tp.partition, offset) for offset in offsets.tolist())
        for rows in records_at(
            self.evidence.reader, self.tp.input, table, places, [*columns, "heartbeat"]
        ):
            yield from rows.to_pylist()


def _is_forgotten(record: Mapping[str, Any]) -> bool:
    # Bronze has it as a heartbeat without a value; a refused one has a detail that says so.
    return record["detail"] == FORGOTTEN or bool(record["heartbeat"] and record["value"] is None)
