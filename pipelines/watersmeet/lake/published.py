"""The tables `published` and `dead_letters`.

They have the last messages of the sink, and the progress of dead-letter topics, by transaction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Final

from watersmeet.core.correction_sequence import CorrectionPlace, CorrectionTail
from watersmeet.core.inputs import InputId
from watersmeet.core.sequence import SequenceTail
from watersmeet.lake import tables
from watersmeet.lake.table_reader import Condition, TableReader, by_partition

TAIL_COLUMNS: Final = (
    "last_seq",
    "last_event_time",
    "last_key",
    "sink_offset",
    "last_due",
    "last_closed_at",
    "last_tenant",
)
"""The columns of a last message, in the order of `SequenceTail`."""

OF_MERGE_RECORDS: Final[Condition] = ("last_key", "is not null", None)
"""The condition for rows of publications to the sink; all others are about corrections."""

_CORRECTION_TAIL: Final = (
    "last_seq",
    "sink_offset",
    "last_settled_at",
    "last_tenant",
    "last_u",
    "last_source",
    "last_topic",
    "last_offset",
)


def last_sink(reader: TableReader, conditions: Sequence[Condition] = ()) -> str | None:
    """Return the sink that was noted last, as `published` names it.

    Only rows that meet all conditions count; None where there are none.
    """
    of_merged: list[Condition] = [*conditions, OF_MERGE_RECORDS]
    sinks = reader.summary(
        tables.PUBLISHED, ["sink"], {"last": ("max", "committed_at")}, [of_merged]
    ).to_pylist()
    return max(sinks, key=itemgetter("last"))["sink"] if sinks else None


def last_noted_ms(reader: TableReader) -> int:
    """Return the largest time (epoch ms) that a row of `published` has; 0 where there is none."""
    return (
        reader.summary(tables.PUBLISHED, [], {"last": ("max", "committed_at")})["last"][0].as_py()
        or 0
    )


def last_published(reader: TableReader, sink: str | None = None) -> dict[int, SequenceTail]:
    """Return, by partition, the last message that was noted of a sink.

    Without a name, the sink is the one that was noted last. Empty where the table does not exist.
    """
    if not reader.exists(tables.PUBLISHED):
        return {}
    sink = sink or last_sink(reader)
    if sink is None:
        return {}
    of_sink: Condition = ("sink", "=", sink)
    latest = reader.summary(
        tables.PUBLISHED, ["partition"], {"seq": ("max", "last_seq")}, [[of_sink]]
    )
    last = by_partition(latest, "seq")
    if not last:
        return {}
    tails = reader.select(
        tables.PUBLISHED,
        ["partition", *TAIL_COLUMNS],
        [[of_sink, ("last_seq", "in", sorted(set(last.values())))]],
    )
    rows = zip(*(tails[name].to_pylist() for name in ("partition", *TAIL_COLUMNS)), strict=True)
    return {p: SequenceTail(seq, *rest) for p, seq, *rest in rows if last[p] == seq}


def last_corrected(reader: TableReader, sink: str | None = None) -> dict[int, CorrectionTail]:
    """Return, by partition, the last correction that was noted of a topic.

    `sink`: the topic and Kafka's identity of it; the one that was noted last by default.
    """
    tails = correction_tails(reader, sink)
    return {p: max(of_partition, key=attrgetter("seq")) for p, of_partition in tails.items()}


def correction_tails(
    reader: TableReader, sink: str | None = None, conditions: Sequence[Condition] = ()
) -> dict[int, list[CorrectionTail]]:
    """Return, by partition, the last correction of each transaction that was noted of a topic.

    Only rows that meet all conditions count. `sink` is as for `last_corrected`. Empty where the
    table does not exist.
    """
    if not reader.exists(tables.PUBLISHED) or "last_u" not in (
        reader.columns(tables.PUBLISHED).names
    ):
        return {}
    names = ["sink", "partition", "committed_at", *_CORRECTION_TAIL]
    where = [[*conditions, ("last_settled_at", "is not null", None)]]
    rows = reader.select(tables.PUBLISHED, names, where).to_pylist()
    if sink is None and rows:
        sink = max(rows, key=itemgetter("committed_at"))["sink"]
    tails = defaultdict[int, list[CorrectionTail]](list)
    for row in rows:
        _, partition, _, seq, offset, settled_at, tenant, u, source, topic, of_record = row.values()
        if row["sink"] == sink:
            names_of = tenant.encode(), u, source.encode(), topic.encode()
            place = CorrectionPlace(settled_at, *names_of, of_record)
            tails[partition].append(CorrectionTail(seq, place, offset))
    return dict(tails)


def last_letters(reader: TableReader, sink: str) -> dict[int, dict[InputId, int]]:
    """Return the offsets up to which records were noted as sent to a dead-letter topic.

    They are exclusive, by partition and input. `sink`: the topic and Kafka's identity of it, as
    `dead_letters` names it. Empty where the table does not exist.
    """
    noted: dict[int, dict[InputId, int]] = {}
    if not reader.exists(tables.DEAD_LETTERS):
        return noted
    topic_conditions = [[("sink", "=", sink)]]
    rows = reader.summary(
        tables.DEAD_LETTERS,
        ["partition", "source", "topic"],
        {"next": ("max", "next_offset")},
        topic_conditions,
    )
    for row in rows.to_pylist():
        input_id = InputId(row["source"], row["topic"])
        noted.setdefault(row["partition"], {})[input_id] = row["next"]
    return noted
