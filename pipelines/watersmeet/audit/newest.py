"""Doubts about the newest records of a lake's bronze.

Any of them may have fields that its source's schema lacks, and a key that another source has in
another partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import pyarrow as pa

from watersmeet.audit.partitioning import Place, check_places
from watersmeet.core.columns import row_values
from watersmeet.core.dropped_fields import COLUMNS, DroppedFields
from watersmeet.core.inputs import InputId
from watersmeet.core.types import TENANT
from watersmeet.errors import Problem
from watersmeet.lake.newest import Ends, count_dropped, finders, newest
from watersmeet.lake.table_reader import TableReader
from watersmeet.settings import Settings

_PLACES: Final = ("merge_key", "partition", "offset", *TENANT.names)


def doubts_of_newest(reader: TableReader, settings: Settings, ends: Ends) -> list[Problem]:
    """Return what looks wrong with the newest records: dropped fields, and keys that never meet."""
    find = finders(reader, settings)
    rows_by_input: dict[InputId, pa.Table] = {}
    for input_id in settings.inputs:
        columns = {*_PLACES, *(COLUMNS if input_id.source in find else ())}
        rows_by_input[input_id] = newest(reader, input_id, ends, sorted(columns))
    partitions = 1 + max((tp.partition for tp in ends), default=0)
    return [
        *dropped_problems(count_dropped(rows_by_input, find)),
        *check_places(settings, partitions, _places(settings, rows_by_input)),
    ]


def dropped_problems(dropped: Mapping[str, DroppedFields]) -> Iterator[Problem]:
    """Yield a problem for each source whose records have fields that its schema lacks."""
    for name, fields in dropped.items():
        if fields.having:
            what = (
                f"of the last {fields.records:,} records {fields.having:,} have fields that the "
                f"schema lacks, so that only bronze keeps them: {fields}"
            )
            fix = "add those that you need to the schema, and see `watersmeet evolve`"
            yield Problem(what, f"sources.{name}.schema", fix)


def _places(settings: Settings, rows_by_input: Mapping[InputId, pa.Table]) -> Iterator[Place]:
    names = settings.input_names
    for input_id, rows in rows_by_input.items():
        for key, p, offset, tenant in row_values(rows, *_PLACES):
            yield Place(key, names[input_id], input_id.topic, p, offset, tenant or "")
