"""Check 6 for corrections: their topic has the rows of `corrections` that have a message.

They are in order, numbered without a gap, and have the content of their rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from typing import Any, Final

from watersmeet.audit.evidence import Evidence
from watersmeet.audit.problems import Findings
from watersmeet.audit.verify_evidence import CorrectionRow, Partition
from watersmeet.audit.verify_sequence import (
    Kind,
    Limits,
    Message,
    Place,
    RowMessage,
    SequenceRows,
    TopicEnds,
    check_sequence,
    limits_of,
    read_ends,
    timestamp_of,
)
from watersmeet.core.correction_sequence import LATE, SETTLED_AT, VERSION, U, parse_tail
from watersmeet.core.sequence import SEQ
from watersmeet.lake.published import last_corrected
from watersmeet.lake.table_reader import TableReader
from watersmeet.lake.tables import CORRECTIONS
from watersmeet.settings import Settings


def read_correction_topic(
    reader: TableReader, settings: Settings, topic: str, partitions: int
) -> TopicEnds:
    """Return the ends of the topic of corrections, which exists, as they are now."""
    return read_ends(_KIND, reader, settings, topic, partitions)


def read_correction_limits(evidence: Evidence) -> Limits:
    """Return which messages of the topic are not compared, and which rows need not be there."""
    return limits_of(_KIND, evidence)


def check_correction_topic(
    partition: Partition,
    topic: TopicEnds,
    limits: Limits,
    findings: Findings,
) -> None:
    """Check one partition of the topic, as `check_sequence` says, against `corrections`."""
    is_own = partition.evidence.is_own
    with_message = [row for row in partition.corrections if row.columns["has_message"]]
    by_place = defaultdict[Place, list[CorrectionRow]](list)
    for row in with_message:
        by_place[row.place].append(row)
    due: dict[Place, CorrectionRow] = {row.place: row for row in with_message if is_own(row.batch)}
    message_of = partial(_row_message, partition=partition.number)
    rows = SequenceRows(by_place, due, message_of)
    check_sequence(partition, _KIND, topic, limits, rows, findings)


def _row_message(row: CorrectionRow, partition: int) -> RowMessage:
    """Return the message that a row of `corrections` has."""
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
    parts = {row.late} if columns["valid"] else set()
    return RowMessage(_subject(columns["version"], columns["id"]), content, parts)


def _read(headers: Mapping[str, bytes], content: dict[str, Any]) -> Message:
    tail = parse_tail(headers)
    texts = {name: headers.get(name, b"").decode(errors="replace") for name in (VERSION, LATE)}
    subject = _subject(texts[VERSION], content["id"])
    content |= {"version": texts[VERSION], "late": texts[LATE]}
    # Of one that a late record has opened, nothing but the timestamp says the event time.
    timestamp = content["timestamp"]
    event_time = 0 if timestamp == timestamp_of(0) else timestamp
    return Message(tail.seq, tail.place, event_time, subject, content)


def _subject(version: object, record_id: str) -> str:
    return f"version {version} of {record_id!r}"


_KIND: Final = Kind(
    table=CORRECTIONS,
    last_noted=last_corrected,
    tails_of=attrgetter("correction_tails"),
    read=_read,
    foreign=f"not a correction of Watersmeet: {SEQ}, {LATE}, {SETTLED_AT} or {U} is missing",
    unlike="the row of corrections",
    unknown="corrections has no such row with a message",
    missing="a row of corrections is missing in the topic, which has later ones",
    fix="delete the topic: gold fills a new one from the table corrections",
)
