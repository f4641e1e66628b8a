"""Finds records that are parts of published messages.

A generation that begins before them must not merge them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import MappingProxyType

import numpy as np
import pyarrow as pa

from watersmeet.core.columns import Int64s, groups, int64s
from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition, by_topic_partition
from watersmeet.core.repeated import RECORD_IDS
from watersmeet.core.sequence import CORRECTED, MERGED, Place, Tail
from watersmeet.core.sequence import Sequence as Order
from watersmeet.core.too_large import records_of
from watersmeet.lake import tables
from watersmeet.lake.history import Generation, Generations, read_history
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.pieces import BY_TIME, read_pieces, records_at
from watersmeet.lake.published import with_message
from watersmeet.lake.recovered import joined, parts_of_messages, with_copies
from watersmeet.lake.table_reader import Condition, TableReader, Where, within
from watersmeet.settings import Settings

_NO_OFFSETS = np.array([], np.int64)

_FIRST_TIMES = {MERGED.table: "event_time", CORRECTED.table: "first_event_time"}
"""By the table of a sequence, the column with the time of a message's first part."""

PARTS = pa.schema(
    {
        "source": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
    }
)
"""The schema of records by their coordinates."""


def offsets_out(
    reader: TableReader,
    settings: Settings,
    generations: Generations,
    tails: Mapping[str, Mapping[int, Tail]],
    spans: Mapping[TopicPartition, tuple[int, int]] = MappingProxyType({}),
) -> Mapping[TopicPartition, Int64s]:
    """Return, by topic-partition, the sorted offsets of all records that must not be merged again.

    These are the parts of messages and of corrections, the records that earlier generations have
    passed over, those of which nothing tells any more whether they were published, late records
    that repeat one of all these, and whatever a redrive has sent twice that is one of them.

    - `tails`: by the table of a sequence, the last messages of its topic now.
    - `spans`: the offsets `[from, until)` that are to be merged once more.
    """
    found = [passed_over(reader, generations.newest), _deleted_offsets(reader, settings, spans)]
    names = ["generation", "partition", "batch", "valid", *part_columns(settings)]
    for sequence, where in (MERGED, [with_message(MERGED)]), (CORRECTED, []):
        if reader.exists(sequence.table):
            columns = [*names, *sequence.order]
            for rows in read_pieces(reader, sequence.table, columns, where, BY_TIME):
                published = _published(rows, sequence, generations, tails.get(sequence.table, {}))
                parts = places_of_parts(published, settings.inputs)
                found.append(offsets_of(parts, settings.inputs))
    if generations[0].kind == "sink":  # what it has passed over, the sink of the lost lake had
        of_first: Where = [[("status", "=", "passed"), ("generation", "=", generations[0].number)]]
        recovered = reader.rows(tables.SILVER, PARTS.names, of_first)
        found.append(offsets_of(recovered.cast(PARTS), settings.inputs))
    out = joined(chain.from_iterable(parts.items() for parts in found))
    repeated = late_duplicates(reader, settings.inputs, out)
    return with_copies(reader, joined([*out.items(), *repeated.items()]))


def _published(
    rows: pa.Table, sequence: Order, generations: Generations, tails: Mapping[int, Tail]
) -> pa.Table:
    """Return those finished rows that are published, up to the last messages (`tails`).

    All valid rows of the generations before the newest are, and the corrections that a lost lake
    has published.
    """
    newest = generations.newest
    is_behind = sequence.is_up_to(rows, _places_in(newest.tails_of(sequence)))
    is_out = sequence.is_up_to(rows, _places_in(tails)) & ~is_behind
    is_out |= int64s(rows["batch"]) < newest.from_batch
    is_out &= rows["valid"].to_numpy().astype(np.bool_)
    if sequence is CORRECTED:
        is_of_first = int64s(rows["generation"]) == generations[0].number
        is_out |= sequence.is_up_to(rows, generations[0].corrected_before) & is_of_first
    return rows.filter(pa.array(is_out))


def parts_among(
    reader: TableReader,
    settings: Settings,
    generation: Generation,
    records: Mapping[TopicPartition, Int64s],
) -> dict[TopicPartition, Int64s]:
    """Return, by topic-partition, those of these offsets whose records are parts of messages, or of
    corrections, of earlier generations.

    All valid rows of these are published. They are found by the keys and times that bronze has of
    the records.
    """
    found = list[tuple[TopicPartition, Int64s]]()
    names = ["partition", "offset", "merge_key", "event_time"]
    columns = ["partition", *part_columns(settings)]
    for tp, offsets in records.items():
        places = ((tp.partition, at) for at in offsets.tolist())
        for rows in records_at(reader, tp.input, tables.bronze(tp.input.source), places, names):
            keys = {key for key in rows["merge_key"].to_pylist() if key is not None}
            if not keys:
                continue
            times = int64s(rows["event_time"].drop_null())
            earlier: list[Condition] = [
                ("generation", "<", generation.number),
                ("partition", "=", tp.partition),
                ("merge_key", "in", sorted(keys)),
                ("last_event_time", ">=", int(times.min())),
                ("valid", "=", True),
            ]
            for table, first in _FIRST_TIMES.items():
                where: Where = [[*earlier, (first, "<=", int(times.max()))]]
                for messages in read_pieces(reader, table, columns, where, BY_TIME):
                    parts = places_of_parts(messages, settings.inputs)
                    in_message = offsets_of(parts, settings.inputs).get(tp, _NO_OFFSETS)
                    found.append((tp, np.intersect1d(offsets, in_message)))
    return joined(found)


def late_duplicates(
    reader: TableReader, inputs: Sequence[InputId], out: Mapping[TopicPartition, Int64s]
) -> dict[TopicPartition, Int64s]:
    """Return, by topic-partition, the sorted offsets of late records that repeat one of these.

    They corrected nothing; where what they repeat is passed over, they would count as new. `out`:
    by topic-partition, sorted offsets.
    """
    if not reader.exists(tables.DUPLICATES):
        return {}
    names = [*PARTS.names, "of_offset"]
    rows = reader.rows(tables.DUPLICATES, names, [[("is_late", "=", True)]])
    of_offsets = int64s(rows["of_offset"])
    offsets = int64s(rows["offset"])
    repeated = dict[TopicPartition, Int64s]()
    for tp, numbers in by_topic_partition(rows, inputs, offsets).items():
        # What a record repeats is of its own topic.
        is_out = np.isin(of_offsets[numbers], out.get(tp, _NO_OFFSETS))
        repeated[tp] = np.unique(offsets[numbers][is_out])
    return repeated


def _deleted_offsets(
    reader: TableReader, settings: Settings, spans: Mapping[TopicPartition, tuple[int, int]]
) -> dict[TopicPartition, Int64s]:
    """Return, by topic-partition, the sorted offsets of all records that may be parts of rows of
    silver, or of corrections, which `keep` has deleted.

    Nothing tells which of them were published: those of another merge record, by other rules or
    without some of the parts, may sort behind the sink's last message. So all of them count that
    are older than the rows that are there, and in none of these. `spans`: by topic-partition, the
    offsets `[from, until)` that are asked for.
    """
    floors = read_history(reader, settings).floors
    times = floors.last_of(tables.SILVER, tables.PASSED, tables.CORRECTIONS)
    if not times:
        return {}
    older: Where = [[("event_time", "<", times)]]
    names = ["partition", *part_columns(settings)]
    of_rows = (
        offsets_of(places_of_parts(rows, settings.inputs), settings.inputs)
        for rows in read_pieces(reader, tables.SILVER, names, older, ("partition", "event_time"))
    )
    kept = joined(chain.from_iterable(parts.items() for parts in of_rows))
    deleted = list[tuple[TopicPartition, Int64s]]()
    for input_id in settings.inputs:
        asked = within({tp.partition: span for tp, span in spans.items() if tp.input == input_id})
        old = of_topic(input_id, [[*term, ("event_time", "<", times)] for term in asked])
        records = reader.rows(tables.bronze(input_id.source), ["partition", "offset"], old)
        offsets = int64s(records["offset"])
        for p, numbers in groups(int64s(records["partition"])).items():
            tp = TopicPartition(input_id, p)
            deleted.append((tp, np.setdiff1d(offsets[numbers], kept.get(tp, _NO_OFFSETS))))
    return joined(deleted)


def _places_in(tails: Mapping[int, Tail]) -> dict[int, Place]:
    return {p: tail.place for p, tail in tails.items()}


def passed_over(reader: TableReader, generation: Generation) -> dict[TopicPartition, Int64s]:
    """Return, by topic-partition, the sorted offsets that earlier messages have.

    The generation leaves these records out.
    """
    return joined(parts_of_messages(reader, generation, dict.fromkeys(generation.begin, (0, None))))


def offsets_of(parts: pa.Table, inputs: Sequence[InputId]) -> dict[TopicPartition, Int64s]:
    """Return, by topic-partition, the offsets of records by their coordinates."""
    offsets = int64s(parts["offset"])
    return {tp: offsets[rows] for tp, rows in by_topic_partition(parts, inputs, offsets).items()}


def part_columns(settings: Settings) -> list[str]:
    """Return the columns of silver that name the records which are in a merge record."""
    return [*settings.sources, *([RECORD_IDS.name] if settings.has_ids else [])]


def places_of_parts(rows: pa.Table, inputs: Sequence[InputId]) -> pa.Table:
    """Return the places of the parts of merge records, and of their duplicates."""
    return records_of(rows, inputs, ["partition"]).select(PARTS.names).cast(PARTS)
