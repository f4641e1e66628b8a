"""The tables `published` and `dead_letters`.

They have the last messages of the sink, and the progress of dead-letter topics, by transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

from watersmeet.core import sequence as sequences
from watersmeet.core.inputs import InputId
from watersmeet.core.sequence import Place, Tail
from watersmeet.lake import tables
from watersmeet.lake.table_reader import Condition, TableReader, by_partition, lexicographic

_NAMES: Final = {"merge_key": "key"}


def tail_columns(sequence: sequences.Sequence) -> dict[str, str]:
    """Return, by column of a sequence's order, that of `published` with the last message's."""
    return {name: f"last_{_NAMES.get(name, name)}" for name in sequence.order}


def is_of(sequence: sequences.Sequence) -> Condition:
    """Return the condition for rows of `published` about a sequence."""
    return (tail_columns(sequence)[sequence.clock], "is not null", None)


def columns_of(sequence: sequences.Sequence, tail: Tail) -> dict[str, Any]:
    """Return the columns of `published` that say where in its order a last message is."""
    names = tail_columns(sequence)
    place = sequence.values(tail.place)
    return {"last_event_time": tail.event_time, **{names[name]: place[name] for name in place}}


def tail_of(sequence: sequences.Sequence, row: Mapping[str, Any]) -> Tail:
    """Return the last message of a row of `published`."""
    place = sequence.place({name: row[last] for name, last in tail_columns(sequence).items()})
    return Tail(row["last_seq"], place, row["sink_offset"], row["last_event_time"])


def last_sink(
    reader: TableReader, sequence: sequences.Sequence, conditions: Sequence[Condition] = ()
) -> str | None:
    """Return the topic of a sequence that was noted last, as `published` names it.

    Only rows that meet all conditions count; None where there are none.
    """
    sinks = reader.summary(
        tables.PUBLISHED,
        ["sink"],
        {"last": ("max", "committed_at")},
        [[*conditions, is_of(sequence)]],
    ).to_pylist()
    return max(sinks, key=itemgetter("last"))["sink"] if sinks else None


def last_noted_ms(reader: TableReader) -> int:
    """Return the largest time (epoch ms) that a row of `published` has; 0 where there is none."""
    return (
        reader.summary(tables.PUBLISHED, [], {"last": ("max", "committed_at")})["last"][0].as_py()
        or 0
    )


def last_tails(
    reader: TableReader, sequence: sequences.Sequence, sink: str | None = None
) -> dict[int, Tail]:
    """Return, by partition, the last message of a sequence that was noted of a topic.

    `sink`: the topic and Kafka's identity of it; the one that was noted last by default. Empty
    where the table does not exist.
    """
    if not reader.exists(tables.PUBLISHED):
        return {}
    sink = sink or last_sink(reader, sequence)
    if sink is None:
        return {}
    of_sink: list[Condition] = [("sink", "=", sink), is_of(sequence)]
    latest = reader.summary(
        tables.PUBLISHED, ["partition"], {"seq": ("max", "last_seq")}, [of_sink]
    )
    last = by_partition(latest, "seq")
    if not last:
        return {}
    seqs: Condition = ("last_seq", "in", sorted(set(last.values())))
    tails = _tails(reader, sequence, [*of_sink, seqs])
    return {p: tail for p, tail in tails if last[p] == tail.seq}


def tail_after(
    reader: TableReader,
    sequence: sequences.Sequence,
    sink: str,
    partition: int,
    place: Place,
    conditions: Sequence[Condition] = (),
) -> Tail | None:
    """Return the last message of the first transaction that came to a place, or beyond it.

    Only rows about this topic and partition that meet all conditions count; None without one.
    """
    values = sequence.values(place)
    names = [tail_columns(sequence)[name] for name in values]
    here: list[Condition] = [*conditions, ("sink", "=", sink), ("partition", "=", partition)]
    beyond = [[*here, *term] for term in lexicographic(names, [*values.values()], ">=")]
    first = reader.summary(tables.PUBLISHED, [], {"seq": ("min", "last_seq")}, beyond)
    seq = first["seq"][0].as_py()
    if seq is None:
        return None
    [(_, tail), *_] = _tails(reader, sequence, [*here, is_of(sequence), ("last_seq", "=", seq)])
    return tail


def _tails(
    reader: TableReader, sequence: sequences.Sequence, conditions: Sequence[Condition]
) -> list[tuple[int, Tail]]:
    names = ["partition", "last_seq", "sink_offset", "last_event_time"]
    names += tail_columns(sequence).values()
    rows = reader.select(tables.PUBLISHED, names, [conditions])
    return [(row["partition"], tail_of(sequence, row)) for row in rows.to_pylist()]


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
