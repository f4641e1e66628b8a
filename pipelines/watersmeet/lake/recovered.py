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

PartsAmong = Callable[[Mapping[TopicPartition, Int64s]], Mapping[TopicPartition, Int64s]]
"""Takes offsets by topic-partition, and returns those of parts of messages."""


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
    reader: TableReader,
    generation: Generation,
    ranges: Ranges | None = None,
    parts_among: PartsAmong | None = None,
) -> dict[TopicPartition, Int64s]:
    """Return, by topic-partition, the offsets of records that a generation skips, in order.

    A message of an earlier generation has them, or they are copies of records that one has, or that
    this generation has not refused: its rules of reading have changed since the redrive, or the
    lake was lost. `ranges`: the offsets to look at; all without. `parts_among`: tells which records
    from before the generation messages have, beside those that it knows itself.
    """
    begin = generation.begin
    within_all = {tp: (at, None) for tp, at in begin.items()} if ranges is None else ranges
    copies, earlier = list[tuple[TopicPartition, Int64s]](), defaultdict[Any, list[Int64s]](list)
    for tp, pair in _copied(reader, within_all):
        if pair[1] >= begin.get(tp, 0):
            copies.append((tp, pair[:1]))
        else:
            earlier[tp].append(pair)
    pairs = {tp: np.stack(its, axis=1) for tp, its in earlier.items()}
    named = {tp: np.unique(originals) for tp, (_, originals) in pairs.items()}
    parts = parts_among(named) if parts_among is not None and named else {}
    is_out = {tp: np.isin(its, parts.get(tp, ())) for tp, (_, its) in pairs.items()}
    before = {tp: (int(its[0]), begin[tp]) for tp, its in named.items()}
    for tp, since, until in _parts_of_messages(reader, generation, before):
        originals = pairs[tp][1]
        is_out[tp] |= (originals >= since) & (originals < until)
    copies += [(tp, at[is_out[tp]]) for tp, (at, _) in pairs.items()]
    return joined([*parts_of_messages(reader, generation, within_all), *copies])


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
    for tp, since, until in _parts_of_messages(reader, generation, ranges):
        yield tp, np.arange(since, until, dtype=np.int64)


def _parts_of_messages(
    reader: TableReader,
    generation: Generation,
    ranges: Mapping[TopicPartition, tuple[int, int | None]],
) -> Iterator[tuple[TopicPartition, int, int]]:
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
            yield tp, since, until


def with_copies(
    reader: TableReader, out: Mapping[TopicPartition, Int64s]
) -> Mapping[TopicPartition, Int64s]:
    """Return sorted offsets by topic-partition with those of all copies of these records, and of
    the records that these are copies of.

    A generation knows no copies of what lies before its beginning, and none that a later record
    has. Of what `keep` has deleted, silver tells which records were passed over as copies.
    """

    def is_one_out(tp: TopicPartition, copies: Int64s, originals: Int64s) -> Booleans:
        is_copy_out: Booleans = np.isin(copies, out[tp])
        return is_copy_out ^ np.isin(originals, out[tp])

    while True:
        found = joined(_copied(reader, dict.fromkeys(out, (0, None)), is_one_out))
        spans = {tp: (int(its[0]), int(its[-1]) + 1) for tp, its in out.items() if len(its)}
        for tp, copies, originals in _passed_copies(reader, spans):
            is_new = np.isin(originals, out[tp]) & ~np.isin(copies, out[tp])
            if is_new.any():
                found = joined([*found.items(), (tp, copies[is_new])])
        if not found:
            return out
        out = joined([*out.items(), *found.items()])


def copies_of_deleted(
    reader: TableReader, generation: Generation, floors: Mapping[TopicPartition, int]
) -> Iterator[tuple[TopicPartition, Int64s]]:
    """Yield, by topic-partition, the offsets of redriven records that the generation has passed
    over, as silver says, and whose originals lie before an offset (`floors`).

    Bronze need not have the originals any more, nor silver the rows of messages that have them:
    `keep` deletes before these offsets.
    """
    spans = {tp: (0, until) for tp, until in floors.items()}
    of_generation: Condition = ("generation", "=", generation.number)
    for tp, copies, _ in _passed_copies(reader, spans, of_generation):
        yield tp, copies


def _passed_copies(
    reader: TableReader, spans: Ranges, *conditions: Condition
) -> Iterator[tuple[TopicPartition, Int64s, Int64s]]:
    """Yield, by topic-partition, redriven records that were passed over, as silver says, and the
    records that they name, which lie in a range of offsets (`spans`).
    """
    for input_id, its in sorted(by_input(spans).items()):
        table = tables.bronze(input_id.source)
        passed = [("status", "=", "passed"), ("source", "=", input_id.source), *conditions]
        names = [*BY_OFFSET, REDRIVEN_FROM.name]
        named = between(REDRIVEN_FROM.name, its)
        for piece in pieces(reader, table, of_topic(input_id, named), BY_OFFSET):
            rows = reader.select(table, names, piece)
            claims = {(p, at): original for p, at, original in row_values(rows, *names)}
            places = (int64s(rows[name]) for name in BY_OFFSET)
            for chunk in of_few_rows(input_id, tables.SILVER, *places):
                copies = read_chunk(reader, chunk, BY_OFFSET, passed)
                offsets = int64s(copies["offset"])
                for p, numbers in groups(int64s(copies["partition"])).items():
                    own = offsets[numbers]
                    originals = np.array([claims[p, at] for at in own.tolist()], np.int64)
                    yield TopicPartition(input_id, p), own, originals


def _copied(
    reader: TableReader,
    ranges: Mapping[TopicPartition, tuple[int, int | None]],
    may_be_copies: Callable[[TopicPartition, Int64s, Int64s], Booleans] | None = None,
) -> Iterator[tuple[TopicPartition, Int64s]]:
    """Yield the offset of each redriven record in a range, with that of the record that it is a
    copy of.

    A record that only says that it was redriven is another record, and no copy. `may_be_copies`:
    returns which copies of which records are asked for, all without; nothing else is read of the
    others.
    """
    for input_id, input_ranges in sorted(by_input(ranges).items()):
        redriven: Where = [
            [*terms, (REDRIVEN_FROM.name, "is not null", None)] for terms in within(input_ranges)
        ]
        columns = ["partition", "offset", REDRIVEN_FROM.name, RECORD_BYTES.name]
        rows = reader.select(tables.bronze(input_id.source), columns, of_topic(input_id, redriven))
        claims = {
            (p, at): ((p, original), size) for p, at, original, size in row_values(rows, *columns)
        }
        originals = _originals(reader, input_id, claims)
        if may_be_copies is not None:
            places = np.array([(*at, of) for at, (_, of) in originals.items()], np.int64)
            for p, numbers in groups(places.reshape(-1, 3)[:, 0]).items():
                _, copied, named = places[numbers].T
                is_asked = may_be_copies(TopicPartition(input_id, p), copied, named)
                for at in copied[~is_asked].tolist():
                    del originals[p, at]
        for (p, at), (_, original) in _with_equal_bytes(reader, input_id, originals):
            yield TopicPartition(input_id, p), np.array([at, original], np.int64)


_Place: TypeAlias = tuple[int, int]
"""The partition and offset of a record of an input."""

_MOST_REDRIVES: Final = 10
"""How often a record may be refused and redriven, and is still known: anybody may write a longer
chain of claims, each of which is a query.
"""


def _originals(
    reader: TableReader, input_id: InputId, claims: Mapping[_Place, tuple[_Place, int]]
) -> dict[_Place, _Place]:
    """Return of redriven records, by place, the one that they may be copies of.

    That is the record with the place that a redriven one says it had, or, where this was refused
    and was redriven itself, the first one before that was not. It is not larger than its copy:
    a small record may name any other, and its bytes are to be read.

    `claims`: that place of each, and how many bytes it has.
    """
    columns = ["partition", "offset", REDRIVEN_FROM.name, RECORD_BYTES.name, "reason"]
    table = tables.bronze(input_id.source)
    sizes, before = dict[_Place, int](), dict[_Place, _Place]()
    named = {original for original, _ in claims.values()}
    for _ in range(_MOST_REDRIVES):
        for rows in records_at(reader, input_id, table, named, columns):
            for p, at, original, size, reason in row_values(rows, *columns):
                if reason is None:
                    sizes[p, at] = size
                elif original is not None:
                    before[p, at] = p, original
        named = {before[place] for place in named & before.keys()}
    originals = dict[_Place, _Place]()
    for at, (original, size) in claims.items():
        while original in before:
            original = before[original]
        if sizes.get(original, size + 1) <= size:
            originals[at] = original
    return originals


def _with_equal_bytes(
    reader: TableReader, input_id: InputId, originals: Mapping[_Place, _Place]
) -> Iterator[tuple[_Place, _Place]]:
    table = tables.bronze(input_id.source)
    columns = ["partition", "offset", "key", "value"]
    digests = {}
    for rows in records_at(reader, input_id, table, {*originals, *originals.values()}, columns):
        for row in rows.to_pylist():
            digest = fingerprint(row["key"], row["value"], ())
            digests[row["partition"], row["offset"]] = digest
    return (each for each in originals.items() if digests.get(each[0], b"") == digests.get(each[1]))
