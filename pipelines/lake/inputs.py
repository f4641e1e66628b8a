"""Translation between inputs (`core.inputs`) and tables, which have a source and a topic instead.

The layers name inputs, and parts of tables by them. They are translated in the conditions and the
columns of a query, and in the conditions of a write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.core.inputs import SEPARATOR, source_of, topic_of
from pipelines.lake.table_reader import Condition, Where
from pipelines.lake.tables import SILVER, Table


def resolve_condition(table: str, where: Where) -> Where:
    """Return conditions on the table's own columns.

    `table` may be a part of a table, and `source` may be an input in the conditions.
    """
    terms = [list(chain.from_iterable(map(_resolved, term))) for term in where]
    if topic := topic_of(table):
        return [[("topic", "=", topic), *term] for term in terms or [[]]]
    return terms


def _resolved(condition: Condition) -> Iterator[Condition]:
    column, operator, value = condition
    if column == "source" and operator == "=" and (topic := topic_of(value)):
        yield from [("source", "=", source_of(value)), ("topic", "=", topic)]
    else:
        yield condition


def resolve_columns(
    columns: Sequence[str], table: str, layout: Mapping[str, Table], with_topics: Collection[str]
) -> Sequence[str]:
    """Return the columns to read for `columns`.

    Where a source has several topics, `source` without `topic` stands for the input.
    """
    # Silver's columns are named by sources, and its topics are in the parts.
    is_input = (
        bool(with_topics) and "source" in columns and "topic" not in columns and table != SILVER
    )
    return (
        [*columns, "topic"]
        if is_input and table in layout and "topic" in layout[table].schema.names
        else columns
    )


def with_input_names(
    rows: pa.Table, columns: Sequence[str], with_topics: Collection[str]
) -> pa.Table:
    """Return what was read with the columns of `resolve_columns`, with inputs as `source`.

    `columns`: those that were requested.
    """
    if rows.column_names == list(columns):
        return rows
    source = rows["source"]
    topic = rows["topic"]
    inputs = pc.binary_join_element_wise(source, topic, SEPARATOR)
    has_topics = pc.is_in(source, pa.array(sorted(with_topics), pa.string()))
    inputs = pc.if_else(has_topics, inputs, source)
    return rows.set_column(rows.column_names.index("source"), "source", inputs).select(
        list(columns)
    )
