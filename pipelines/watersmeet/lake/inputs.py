"""Conditions and queries for the rows of one input (`core.inputs`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from watersmeet.core.inputs import InputId
from watersmeet.core.plan import TopicPartition
from watersmeet.lake import tables
from watersmeet.lake.table_reader import (
    Condition,
    TableReader,
    Where,
    extremes,
    within,
)

_T = TypeVar("_T")


def topic_partition(row: Mapping[str, Any]) -> TopicPartition:
    """Return the topic-partition that a row is about."""
    return TopicPartition(InputId(row["source"], row["topic"]), row["partition"])


def place_of(tp: TopicPartition) -> dict[str, Any]:
    """Return the columns of a row that say which topic-partition it is about."""
    return {**tp.input._asdict(), "partition": tp.partition}


def by_input(values: Mapping[TopicPartition, _T]) -> dict[InputId, dict[int, _T]]:
    """Return the values of topic-partitions by input, then by partition; of other inputs, none."""
    found = defaultdict[InputId, dict[int, _T]](dict)
    for tp, value in values.items():
        found[tp.input][tp.partition] = value
    return found


def of_input(input_id: InputId, where: Where = ()) -> Where:
    """Return the conditions for those rows that are of an input, in a table with all sources."""
    return [
        [("source", "=", input_id.source), ("topic", "=", input_id.topic), *term]
        for term in where or [[]]
    ]


def of_topic(input_id: InputId, where: Where = ()) -> Where:
    """Return the conditions for those rows that are of an input, in its source's bronze table."""
    return [[("topic", "=", input_id.topic), *term] for term in where or [[]]]


KEY_COLUMNS = ("merge_key", "tenant")


def of_key(key: str, tenant: str | None, columns: tuple[str, str] = KEY_COLUMNS) -> list[Condition]:
    """Return the conditions for rows of a key, of one tenant or (None) of all.

    `columns`: the two that have the key and the tenant.
    """
    pairs = zip(columns, (key, tenant), strict=True)
    return [(column, "=", text) for column, text in pairs if text is not None]


def first_offsets(
    reader: TableReader,
    input_id: InputId,
    column: str,
    bounds: Mapping[int, int],
    since: Mapping[int, int] = MappingProxyType({}),
    until: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, int]:
    """Return, by partition, the first offset in bronze whose `column` is at least the bound.

    Only offsets from `since` on, and before `until`, count. Partitions without such a row are
    absent.
    """
    offsets = within({p: (since.get(p, 0), until.get(p)) for p in bounds})
    beyond = [[*term, (column, ">=", bounds)] for term in offsets]
    table = tables.bronze(input_id.source)
    return extremes(reader, table, "offset", of_topic(input_id, beyond), "min")
