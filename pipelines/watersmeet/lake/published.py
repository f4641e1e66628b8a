"""What is out and what is not, of the sink, the topic of corrections, and topics of dead letters.

The table `published` has the last messages, and the progress of topics of dead letters, by
transaction. Conditions for the rows of a sequence (`core.sequence`) say which have a message, which
sort after a place, and which of a generation would have a message and have none: that follows from
the beginning of a generation, and from that of the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, TypeAlias

from watersmeet.core import sequence as sequences
from watersmeet.core.columns import row_values
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.sequence import MERGED, Place, Tail, clock_of
from watersmeet.core.sequence import Sequence as Order
from watersmeet.core.texts import identified, topic_and_id
from watersmeet.lake import tables
from watersmeet.lake.history import Generation
from watersmeet.lake.progress import read_batches
from watersmeet.lake.table_reader import (
    Aggregates,
    Condition,
    TableReader,
    Where,
    between,
    by_partition,
    extreme,
    extremes,
)
from watersmeet.settings import Settings

_NAMES: Final = {"merge_key": "key"}
_TOPIC: Final = ["topic", "topic_id"]


def topic_of(settings: Settings, sequence: sequences.Sequence) -> str | None:
    """Return the topic of a sequence; None of corrections that the lake does not make."""
    publish = settings.publish
    return publish.topic if sequence is sequences.MERGED else publish.corrections_topic


def topic_columns(sink: str) -> dict[str, str]:
    """Return the columns of `published` that say which topic was written to.

    `sink`: the topic and Kafka's identity of it (`Cluster.identified`).
    """
    return dict(zip(_TOPIC, topic_and_id(sink), strict=True))


def sink_of(row: Mapping[str, Any]) -> str:
    """Return the topic of a row of `published` with Kafka's identity of it."""
    return identified(row["topic"], row["topic_id"])


def is_about(sink: str) -> list[Condition]:
    """Return the conditions for rows of `published` about a topic (`topic_columns`)."""
    return [(name, "=", text) for name, text in topic_columns(sink).items()]


def is_about_last(reader: TableReader, topic: str) -> list[Condition]:
    """Return the conditions for rows of `published` about the last topic of a name: one that was
    made again lacks what the former one had.
    """
    last: Aggregates = {"at": ("max", "committed_at")}
    where: Where = [[("topic", "=", topic)]]
    topics = (
        reader.summary(tables.PUBLISHED, list(_TOPIC), last, where).to_pylist()
        if reader.exists(tables.PUBLISHED)
        else []
    )
    newest = max(topics, key=itemgetter("at"), default=None)
    return is_about(topic if newest is None else sink_of(newest))


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


def last_sink(
    reader: TableReader, sequence: sequences.Sequence, conditions: Sequence[Condition] = ()
) -> str | None:
    """Return the topic of a sequence that was noted last, as `published` names it.

    Only rows that meet all conditions count; None where there are none.
    """
    sinks = reader.summary(
        tables.PUBLISHED,
        _TOPIC,
        {"last": ("max", "committed_at")},
        [[*conditions, is_of(sequence)]],
    ).to_pylist()
    return sink_of(max(sinks, key=itemgetter("last"))) if sinks else None


def last_noted_ms(reader: TableReader) -> int:
    """Return the largest time (epoch ms) that a row of `published` has; 0 where there is none."""
    return extreme(reader, tables.PUBLISHED, "committed_at") or 0


def last_tails(
    reader: TableReader,
    sequence: sequences.Sequence,
    sink: str | None = None,
    conditions: Iterable[Condition] = (),
) -> dict[int, Tail]:
    """Return, by partition, the last message of a sequence that was noted of a topic.

    `sink`: the topic and Kafka's identity of it; the one that was noted last by default. Only rows
    that meet all conditions count. Empty where the table does not exist.
    """
    if not reader.exists(tables.PUBLISHED):
        return {}
    sink = sink or last_sink(reader, sequence)
    if sink is None:
        return {}
    of_sink: list[Condition] = [*is_about(sink), is_of(sequence), *conditions]
    last = extremes(reader, tables.PUBLISHED, "last_seq", [of_sink])
    if not last:
        return {}
    seqs: Condition = ("last_seq", "in", sorted(set(last.values())))
    order = tail_columns(sequence)
    names = ["partition", "last_seq", "sink_offset", "last_event_time", *order.values()]
    tails = {}
    for row in reader.select(tables.PUBLISHED, names, [[*of_sink, seqs]]).to_pylist():
        if last[row["partition"]] == row["last_seq"]:
            place = sequence.place({name: row[column] for name, column in order.items()})
            tails[row["partition"]] = Tail(
                row["last_seq"], place, row["sink_offset"], row["last_event_time"]
            )
    return tails


def last_tails_in(
    reader: TableReader, sequence: sequences.Sequence, topic: str | None
) -> dict[int, Tail]:
    """Return what `last_tails` does, of the topic with this name as it was when it was noted last.

    Empty where nothing was noted of it.
    """
    if topic is None or not reader.exists(tables.PUBLISHED):
        return {}
    sink = last_sink(reader, sequence, [("topic", "=", topic)])
    return {} if sink is None else last_tails(reader, sequence, sink)


Clocks: TypeAlias = list[tuple[sequences.Sequence, dict[int, int]]]
"""Of each sequence, by partition, the largest clock (ms) that has closed a published row."""


def last_clocks(reader: TableReader) -> Clocks:
    """Return how far the messages that were noted have come, of all topics."""
    if not reader.exists(tables.PUBLISHED):
        return []
    kinds = (sequences.MERGED, sequences.CORRECTED)
    last: Aggregates = {kind.table: ("max", tail_columns(kind)[kind.clock]) for kind in kinds}
    rows = reader.summary(tables.PUBLISHED, ["partition"], last).to_pylist()
    return [
        (kind, {row["partition"]: at for row in rows if (at := row[kind.table]) is not None})
        for kind in kinds
    ]


def letter_ends(
    reader: TableReader, conditions: Sequence[Condition] = ()
) -> dict[TopicPartition, int]:
    """Return, by topic-partition, up to which offset (exclusive) a topic of dead letters was noted
    to have its records, by the rows that meet all conditions.

    Empty where the table does not exist.
    """
    if not reader.exists(tables.PUBLISHED):
        return {}
    of_letters = [*conditions, ("first_seq", "is null", None)]
    by = ["partition", "last_source", "last_topic"]
    last: Aggregates = {"last": ("max", "last_offset")}
    rows = reader.summary(tables.PUBLISHED, by, last, [of_letters])
    return {
        TopicPartition(InputId(source, topic), p): offset + 1
        for p, source, topic, offset in row_values(rows, *by, "last")
    }


def reached(
    reader: TableReader, generation: Generation, until_batch: int
) -> dict[TopicPartition, int]:
    """Return, by topic-partition, the next offset of a generation before batch `until_batch`."""
    if until_batch <= generation.from_batch:
        return dict(generation.begin)
    last = until_batch - 1
    cursors = read_batches(reader, [last])[last].cursors()
    return {**generation.begin, **{tp: cursor.next_offset for tp, cursor in cursors.items()}}


def unpublished(sequence: Order, ended: Generation, newest: Generation) -> Where:
    """Return the condition for rows of a sequence that the former generation has made and
    that are in no message.

    `ended`: the generation before `newest`. Its rows sort after the tail at which the newest
    begins, or at or before the one behind which it published itself (`Generation.unsent_until`).
    """
    batches: list[Condition] = [
        ("batch", ">=", ended.from_batch),
        ("batch", "<", newest.from_batch),
    ]
    partitions = {tp.partition for tp in newest.begin}
    return [
        *_beside_tails(sequence, "<=", ended.unsent_until(sequence), batches),
        *_beside_tails(sequence, ">", newest.tails_of(sequence), batches, partitions),
    ]


def _beside_tails(
    sequence: Order,
    operator: str,
    tails: Mapping[int, Tail],
    batches: Sequence[Condition],
    partitions: Collection[int] | None = None,
) -> Where:
    # Of these partitions, or of all with a tail; of one without a tail, all rows.
    every = tails.keys() if partitions is None else {*partitions}
    places = {p: sequence.values(tails[p].place) for p in sorted(every & tails.keys())}
    values = {name: {p: its[name] for p, its in places.items()} for name in sequence.order}
    without: list[Condition] = [("partition", "in", sorted(every - tails.keys()))]
    terms = [*_beside(values, operator), without]
    return [[*with_message(sequence), *batches, *term] for term in terms]


def count_behind_sink(
    reader: TableReader, generation: Generation, sequence: Order = MERGED
) -> dict[int, int]:
    """Return, by partition, how many rows of the newest generation would have a message and are
    never published, since they sort at or before the tail at which it began.
    """
    batches: list[Condition] = [("batch", ">=", generation.from_batch)]
    tails = generation.tails_of(sequence)
    return _count(reader, _beside_tails(sequence, "<=", tails, batches))


def count_to_publish(
    reader: TableReader,
    generation: Generation,
    tails: Mapping[int, Tail],
    partitions: Collection[int],
) -> dict[int, int]:
    """Return, by partition, how many finished, valid rows of the newest generation are still to be
    published.

    `tails`: the last message of each of these partitions that has one.
    """
    return _count(reader, _to_publish(generation, tails, partitions))


def first_to_publish(
    reader: TableReader, generation: Generation, tails: Mapping[int, Tail]
) -> int | None:
    """Return the first batch with rows as `count_to_publish` counts them; None without any."""
    partitions = {tp.partition for tp in generation.begin}
    where = _to_publish(generation, tails, partitions)
    batch: int | None = extreme(reader, tables.SILVER, "batch", where, "min")
    return batch


def _to_publish(
    generation: Generation, tails: Mapping[int, Tail], partitions: Collection[int]
) -> Where:
    batches: list[Condition] = [("batch", ">=", generation.from_batch)]
    return _beside_tails(MERGED, ">", {**generation.tails, **tails}, batches, partitions)


def _count(reader: TableReader, where: Where) -> dict[int, int]:
    rows = reader.summary(tables.SILVER, ["partition"], {"rows": ("count", "*")}, where)
    return by_partition(rows, "rows")


def with_message(sequence: Order) -> list[Condition]:
    """Return the condition for the rows that have a message."""
    return [(name, "=", value) for name, value in sequence.with_message.items()]


def after(sequence: Order, place: Place | None) -> Where:
    """Return the condition for the rows that sort after a place, or after all that begin so.

    Without a place, all do.
    """
    return [[]] if place is None else _beside(sequence.values(place), ">")


def up_to(sequence: Order, place: Place) -> Where:
    """Return the condition for the rows that do not sort after a place, or all that begin so."""
    return _beside(sequence.values(place), "<=")


def may_be_beyond(sequence: Order, tails: Mapping[int, Tail], partitions: Iterable[int]) -> Where:
    """Return a condition for rows that may sort after the tail of their partition.

    All rows that do meet it. It has few terms, however many partitions there are.
    """
    since = {p: clock_of(tails[p].place) if p in tails else -1 for p in partitions}
    return between(sequence.clock, {p: (clock, None) for p, clock in since.items()})


def _beside(values: Mapping[str, Any], operator: str) -> Where:
    # Lexicographically: the first column counts first.
    columns = [*values.items()]
    terms: list[list[Condition]] = []
    for number, (name, value) in enumerate(columns, 1):
        compared = operator if number == len(columns) else operator[0]
        same: list[Condition] = [(column, "=", its) for column, its in columns[: number - 1]]
        terms.append([*same, (name, compared, value)])
    return terms
