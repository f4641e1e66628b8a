"""The newest records of a lake's bronze: a bounded number of them, and the fields that they have
and their source's schema lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from watersmeet.core.avro_schema import AvroSchema
from watersmeet.core.columns import int64s, looked_up
from watersmeet.core.dropped_fields import (
    COLUMNS,
    DroppedFields,
    Find,
    counted,
    dropped_fields,
    fields_in,
)
from watersmeet.core.inputs import InputId
from watersmeet.core.json_schema import ValueSchema
from watersmeet.core.plan import TopicPartition
from watersmeet.core.reading import RECORD_BYTES, bronze_schema
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.progress import last_batch
from watersmeet.lake.schemas import avro_schemas
from watersmeet.lake.table_reader import (
    MAX_TERMS,
    TableReader,
    Where,
    extremes,
    sizes_of,
    within,
)
from watersmeet.settings import Settings

RECORDS: Final = 10_000
"""About how many of the newest records of an input are read."""

RECORDS_BYTES: Final = 64 * 1024 * 1024
"""Maximum bytes of the records of an input that are read."""

Ends = Mapping[TopicPartition, int]
"""By topic-partition, the exclusive end offset of bronze."""


def bronze_ends(reader: TableReader, settings: Settings) -> dict[TopicPartition, int]:
    """Return the offset after the last record in bronze of each topic-partition that has any."""
    last = last_batch(reader) if reader.exists(tables.SILVER) else None
    ends = {} if last is None else {tp: done.until_offset for tp, done in last.ranges.items()}
    for input_id in settings.inputs:
        own = {tp.partition: end for tp, end in ends.items() if tp.input == input_id}
        later = row_ends(reader, input_id, own)
        ends |= {TopicPartition(input_id, p): end for p, end in later.items()}
    return ends


def row_ends(reader: TableReader, input_id: InputId, since: Mapping[int, int]) -> dict[int, int]:
    """Return, by partition, the offset after bronze's last row of an input.

    `since`: by partition, the offset before which rows need not be read, and do not count.
    """
    table = tables.bronze(input_id.source)
    if not reader.exists(table):
        return {}
    others = [[("partition", "not in", sorted(since))]] if since else [[]]
    ranges = within({p: (offset, None) for p, offset in since.items()}) if since else []
    where = of_topic(input_id, [*ranges, *others])
    return {p: offset + 1 for p, offset in extremes(reader, table, "offset", where).items()}


def newest(reader: TableReader, input_id: InputId, ends: Ends, columns: Sequence[str]) -> pa.Table:
    """Return columns of the newest records of an input that have a key, in no particular order.

    They are of up to `MAX_TERMS` partitions, about `RECORDS`, and of `RECORDS_BYTES` at most.
    """
    own = {tp.partition: end for tp, end in ends.items() if tp.input == input_id and end > 0}
    sampled = sorted(own)[:: -(-len(own) // MAX_TERMS) or 1]
    table = tables.bronze(input_id.source)
    if not sampled or not reader.exists(table):
        return bronze_schema().empty_table().select(columns)

    def last(depth: int) -> Where:
        ranges = within({p: (max(0, own[p] - depth), own[p]) for p in sampled})
        return [[*term, ("merge_key", "is not null", None)] for term in of_topic(input_id, ranges)]

    depth = max(1, RECORDS // len(sampled))
    places = reader.rows(table, ["partition", "offset", RECORD_BYTES.name], last(depth))
    behind = looked_up(int64s(places["partition"]), own, 0) - int64s(places["offset"])
    order = np.argsort(behind, kind="stable")
    too_many = behind[order][np.cumsum(sizes_of(places)[order]) > RECORDS_BYTES]
    return reader.rows(table, columns, last(min([depth, *(too_many[:1] - 1).tolist()])))


def dropped_in_lake(
    reader: TableReader, settings: Settings, ends: Ends, find: Mapping[str, Find]
) -> dict[str, DroppedFields]:
    """Return, by source, the fields that its function finds in the newest records."""
    inputs = [input_id for input_id in settings.inputs if input_id.source in find]
    return count_dropped({i: newest(reader, i, ends, COLUMNS) for i in inputs}, find)


def count_dropped(
    rows_by_input: Mapping[InputId, pa.Table], find: Mapping[str, Find]
) -> dict[str, DroppedFields]:
    """Return, by source, the fields that its function finds in the values of records."""
    fields: dict[str, list[frozenset[str]]] = {name: [] for name in find}
    for (name, _), rows in rows_by_input.items():
        if name in find:
            fields[name] += fields_in(rows, find[name])
    return {name: counted(of_source) for name, of_source in fields.items()}


def finders(reader: TableReader, settings: Settings) -> dict[str, Find]:
    """Return, for each source with a schema, what finds the fields that the lake drops now."""
    return {name: dropped_fields(schema) for name, schema in lake_schemas(reader, settings).items()}


def lake_schemas(reader: TableReader, settings: Settings) -> Mapping[str, ValueSchema | AvroSchema]:
    """Return the schemas by which the lake reads values now, of each source that has one."""
    current = read_history(reader, settings).epochs.current.settings
    schemas = {name: source.value_schema for name, source in current.sources.items()}
    every = {**schemas, **avro_schemas(reader, current)}
    return {name: schema for name, schema in every.items() if schema is not None}
