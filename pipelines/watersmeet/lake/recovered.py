"""Records that must not be merged: parts of published messages, and copies of other records.

Rows `out` of silver know the parts, and redriven records in bronze say which records they copy. Of
a lake that was lost, the first generation knows the messages that were read back from the sink,
by key and time. After a jump back, a generation knows the offsets of the parts of all messages of
earlier generations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import Booleans, Int64s, as_ranges, groups, int64s, row_values
from watersmeet.core.headers import fingerprint
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.core.reading import RECORD_BYTES, REDRIVEN_FROM
from watersmeet.core.silver import OUT, in_silver
from watersmeet.lake import tables
from watersmeet.lake.history import Generation
from watersmeet.lake.inputs import by_input, of_input, of_topic, place_of, topic_partition
from watersmeet.lake.pieces import BY_OFFSET, of_few_rows, pieces, read_chunk, records_at
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    between,
    by_partition,
    extremes,
    row_count,
    within,
)
from watersmeet.lake.tables import Table

_OUT: Final[Condition] = ("status", "=", "out")
MESSAGES: Final[Where] = [[_OUT, ("merge_key", "is not null", None)]]
"""Condition for the rows that are messages of a lost lake."""

Ranges = Mapping[TopicPartition, tuple[int, int]]
"""Offsets `[from, until)` by topic-partition."""


def has_messages(reader: TableReader, generation: Generation) -> bool:
    """Return True where a generation knows messages that were read back from the sink."""
    return generation.number == 0 and row_count(reader, tables.SILVER, MESSAGES) > 0


def count_known(reader: TableReader, generation: Generation) -> int:
    """Return how many rows a generation has about messages, without those that `forget` erases."""
    known = [_OUT, ("generation", "=", generation.number), ("merge_key", "is null", None)]
    return row_count(reader, tables.SILVER, [known])


def read_back_until(reader: TableReader, generation: Generation, longest_ms: int) -> dict[int, int]:
    """Return, by partition, the clock (ms) up to which records may come that are in messages which
    were read back from the sink.

    `longest_ms`: for how long a merge record may take records. Empty without such messages.
    """
    if not has_messages(reader, generation):
        return {}
    last = extremes(reader, tables.SILVER, "event_time", MESSAGES)
    return {p: time + longest_ms for p, time in last.items()}


def read_since(reader: TableReader, generation: Generation) -> dict[int, int]:
    """Return, by partition, the position (ms) from which on a lost lake's records are merged.

    A record counts by the position of its tenant. Empty without tenants.
    """
    if generation.number:
        return {}
    known: Where = [[_OUT, ("position", "is not null", None)]]
    rows = reader.select(tables.SILVER, ["partition", "position"], known)
    return by_partition(rows, "position")


def read_out(
    reader: TableReader, generation: Generation, ranges: Ranges | None = None
) -> dict[TopicPartition, Int64s]:
    """Return, by topic-partition, the offsets of records that a generation skips, in order.

    A message of an earlier generation has them, or they are copies of records that this one has.
    `ranges`: the offsets to look at; all without.
    """
    within_all = (
        {tp: (begin, None) for tp, begin in generation.begin.items()} if ranges is None else ranges
    )
    return joined(
        [
            *parts_of_messages(reader, generation, within_all),
            *_offsets_of_copies(reader, generation, within_all),
        ]
    )


def joined(parts: Iterable[tuple[TopicPartition, Int64s]]) -> dict[TopicPartition, Int64s]:
    """Return all offsets by topic-partition, in order, each once."""
    offsets = defaultdict(list)
    for tp, part_offsets in parts:
        offsets[tp].append(part_offsets)
    return {tp: np.unique(np.concatenate(part_offsets)) for tp, part_offsets in offsets.items()}


def rows_of_parts(part_offsets: Mapping[TopicPartition, Int64s]) -> list[dict[str, Any]]:
    """Return the offsets of parts of messages as rows (`core.silver.OUT`).

    There is one for each range `[from_offset, until_offset)`. `part_offsets`: by topic-partition,
    in order.
    """
    return [
        {**place_of(tp), "from_offset": since, "until_offset": until}
        for tp, offsets in part_offsets.items()
        for since, until in as_ranges(offsets)
    ]


def out_rows(rows: Iterable[Mapping[str, Any]], generation: int, schema: pa.Schema) -> pa.Table:
    """Return what a generation must know of published messages as rows of silver, whose columns are
    `schema`; `rows`: with columns of `core.silver.OUT`.
    """
    known = ({**row, "generation": generation} for row in rows)
    return in_silver(Table(tables.SILVER, OUT).rows_of(known), "out", schema)


def parts_of_messages(
    reader: TableReader,
    generation: Generation,
    ranges: Mapping[TopicPartition, tuple[int, int | None]],
) -> Iterator[tuple[TopicPartition, Int64s]]:
    """Yield, by topic-partition, offsets of parts of messages of earlier generations; in a rebuild,
    of whatever the generation has passed over.

    `ranges`: the offsets to look at (until None: no end).
    """
    if not ranges:
        return
    where = list[Sequence[Condition]]()
    for input_id, its in sorted(by_input(ranges).items()):
        own = {p: (at + 1, None) for p, (at, _) in its.items()}
        behind = of_input(input_id, between("until_offset", own))
        where += [[_OUT, ("generation", "=", generation.number), *term] for term in behind]
    names = ["source", "topic", "partition", "from_offset", "until_offset"]
    for row in reader.select(tables.SILVER, names, where).to_pylist():
        tp = topic_partition(row)
        since, until = ranges.get(tp, (0, 0))
        since = max(since, row["from_offset"])
        until = row["until_offset"] if until is None else min(until, row["until_offset"])
        if since < until:
            yield tp, np.arange(since, until, dtype=np.int64)


def _offsets_of_copies(
    reader: TableReader,
    generation: Generation,
    ranges: Mapping[TopicPartition, tuple[int, int | None]],
) -> Iterator[tuple[TopicPartition, Int64s]]:
    """Yield the offsets of redriven records whose original this lake has not refused.

    Since the redrive, its rules of reading have changed, or the lake was lost.
    """
    begin = generation.begin
    return _copied(reader, ranges, lambda tp, originals: originals >= begin.get(tp, 0))


def copies_of(
    reader: TableReader, out: Mapping[TopicPartition, Int64s]
) -> Iterator[tuple[TopicPartition, Int64s]]:
    """Yield the offsets of redriven records that are copies of these records; `out`: by
    topic-partition, sorted offsets.

    A generation that begins between a record and its copy does not know the record.
    """
    ranges = dict.fromkeys(out, (0, None))
    return _copied(reader, ranges, lambda tp, originals: np.isin(originals, out[tp]))


def _copied(
    reader: TableReader,
    ranges: Mapping[TopicPartition, tuple[int, int | None]],
    may_be_copied: Callable[[TopicPartition, Int64s], Booleans],
) -> Iterator[tuple[TopicPartition, Int64s]]:
    # A record that only says that it was redriven is another record, and no copy.
    for input_id, input_ranges in sorted(by_input(ranges).items()):
        redriven: Where = [
            [*terms, (REDRIVEN_FROM.name, "is not null", None)] for terms in within(input_ranges)
        ]
        columns = ["partition", "offset", REDRIVEN_FROM.name, RECORD_BYTES.name]
        rows = reader.select(tables.bronze(input_id.source), columns, of_topic(input_id, redriven))
        claims = dict[_Place, tuple[_Place, int]]()
        for p, numbers in groups(int64s(rows["partition"])).items():
            own = rows.take(pa.array(numbers))
            originals = int64s(own[REDRIVEN_FROM.name])
            own = own.filter(pa.array(may_be_copied(TopicPartition(input_id, p), originals)))
            for _, offset, original, size in row_values(own, *columns):
                claims[p, offset] = (p, original), size
        for p, offset in _copies(reader, input_id, claims):
            yield TopicPartition(input_id, p), np.array([offset], np.int64)


def copies_of_deleted(
    reader: TableReader, generation: Generation, floors: Mapping[TopicPartition, int]
) -> Iterator[tuple[TopicPartition, Int64s]]:
    """Yield, by topic-partition, the offsets of redriven records that the generation has passed
    over, as silver says, and whose originals lie before an offset (`floors`).

    Bronze need not have the originals any more: `keep` deletes before these offsets.
    """
    passed: list[Condition] = [("status", "=", "passed"), ("generation", "=", generation.number)]
    for input_id, its in sorted(by_input(floors).items()):
        table, source = tables.bronze(input_id.source), ("source", "=", input_id.source)
        before = between(REDRIVEN_FROM.name, {p: (0, until) for p, until in its.items()})
        for piece in pieces(reader, table, of_topic(input_id, before), BY_OFFSET):
            claims = reader.select(table, BY_OFFSET, piece)
            places = (int64s(claims[name]) for name in BY_OFFSET)
            for chunk in of_few_rows(input_id, tables.SILVER, *places):
                copies = read_chunk(reader, chunk, BY_OFFSET, [*passed, source])
                copied = int64s(copies["offset"])
                for p, numbers in groups(int64s(copies["partition"])).items():
                    yield TopicPartition(input_id, p), copied[numbers]


_Place: TypeAlias = tuple[int, int]
"""The partition and offset of a record of an input."""


def _copies(
    reader: TableReader, input_id: InputId, claims: Mapping[_Place, tuple[_Place, int]]
) -> Iterator[_Place]:
    """Yield the records with the bytes of an original that was read.

    `claims`: the place that each redriven record says it had, and how many bytes it has. Bytes are
    read of nothing that is larger than the record which claims to be its copy: a small record may
    name any other.
    """
    table = tables.bronze(input_id.source)
    read: Condition = ("reason", "is null", None)
    named = {original for original, _ in claims.values()}
    columns = ["partition", "offset", RECORD_BYTES.name]
    sizes = {
        (p, at): size
        for rows in records_at(reader, input_id, table, named, columns, [read])
        for p, at, size in row_values(rows, *columns)
    }
    copies = {
        at: original
        for at, (original, size) in claims.items()
        if sizes.get(original, size + 1) <= size
    }
    columns = ["partition", "offset", "key", "value"]
    digests = {}
    for rows in records_at(reader, input_id, table, {*copies, *copies.values()}, columns):
        for row in rows.to_pylist():
            digest = fingerprint(row["key"], row["value"], ())
            digests[row["partition"], row["offset"]] = digest
    return (at for at, original in copies.items() if digests.get(at, b"") == digests.get(original))
