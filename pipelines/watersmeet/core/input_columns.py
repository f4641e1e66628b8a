"""Inputs in Arrow columns: of rows by source and topic, and of the parts of a source."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.inputs import InputId, of_source


def input_numbers(rows: pa.Table, inputs: Iterable[InputId]) -> pa.ChunkedArray:
    """Return for each row the number of its input among `inputs`, or null for any other.

    `rows`: the columns source and topic.
    """
    numbers = pa.chunked_array([pa.nulls(rows.num_rows, pa.int64())])
    for number, input_id in enumerate(inputs):
        is_its = pc.and_(
            pc.equal(rows["source"], input_id.source), pc.equal(rows["topic"], input_id.topic)
        )
        numbers = pc.if_else(pc.fill_null(is_its, False), number, numbers)
    return numbers


def part_topics(parts: pa.StructArray, inputs: Iterable[InputId], source: str) -> pa.Array:
    """Return the topic of each part of a source. Parts do not say it where there is only one."""
    if "topic" in parts.type.names:
        return parts.field("topic")
    [only] = of_source(inputs, source)
    return pa.repeat(pa.scalar(only.topic), len(parts))
