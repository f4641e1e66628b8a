"""Check 6: the sink has silver's finished, valid records.

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
from watersmeet.audit.verify_evidence import Partition, Row
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
from watersmeet.core.sequence import ID, PLAIN, SEQ, SortKey, message_id, parse_tail
from watersmeet.lake.published import last_published
from watersmeet.lake.table_reader import TableReader
from watersmeet.lake.tables import SILVER
from watersmeet.settings import Settings


def read_sink(reader: TableReader, settings: Settings, partitions: int) -> TopicEnds:
    """Return the ends of the sink topic, which exists, as they are now."""
    return read_ends(_KIND, reader, settings, settings.publish.topic, partitions)


def read_limits(evidence: Evidence) -> Limits:
    """Return which messages of the sink are not compared, and which records need not be there."""
    return limits_of(_KIND, evidence)


def check_sink(partition: Partition, sink: TopicEnds, limits: Limits, findings: Findings) -> None:
    """Check one partition of the sink, as `check_sequence` says, against silver."""
    due = [r for r in partition.rows if r.outcome.status == "timed_out" and r.valid]
    by_place = defaultdict[Place, list[Row]](list)
    for row in (*due, *partition.published):
        by_place[row.outcome.place].append(row)
    rows = SequenceRows(
        by_place,
        {row.outcome.place: row for row in due},
        partial(_row_message, partition=partition.number),
    )
    check_sequence(partition, _KIND, sink, limits, rows, findings)


def _row_message(row: Row, partition: int) -> RowMessage:
    """Return the message that a row of silver has."""
    outcome = row.outcome
    content = {
        "key": outcome.key.encode(),
        "value": row.value,
        "timestamp": timestamp_of(outcome.event_time),
        "id": message_id(partition, outcome.event_time, outcome.key, outcome.tenant),
    }
    parts = {part[:2] for part in outcome.parts}
    return RowMessage(_subject(outcome.key, outcome.place), content, parts)


def _read(headers: Mapping[str, bytes], content: dict[str, Any]) -> Message:
    tail = parse_tail(headers)
    subject = _subject(tail.key, tail.place)
    return Message(tail.seq, tail.place, tail.event_time, subject, content)


def _subject(key: str, place: SortKey) -> str:
    tenant = f"tenant {place.tenant.decode()!r}, " if place.tenant else ""
    time = (
        f"event_time {place.time}"
        if place.closed_at == PLAIN
        else f"closed_at {place.closed_at}, due {place.time}"
    )
    return f"{tenant}key {key!r}, {time}"


_KIND: Final = Kind(
    table=SILVER,
    last_noted=last_published,
    tails_of=attrgetter("tails"),
    read=_read,
    foreign=f"not a message of Watersmeet: {SEQ} or {ID} is missing",
    unlike="silver's record",
    unknown="silver has no finished, valid record for it",
    missing="silver's record is missing in the sink, which has later ones",
    fix="name a new topic in publish.topic: gold fills it from silver",
)
