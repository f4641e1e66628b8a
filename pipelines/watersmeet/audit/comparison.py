"""The comparer: rows that are there against rows that should be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import int64s, one_chunk
from watersmeet.core.types import TIME

Row: TypeAlias = tuple[Any, ...]
"""A row's values in the order of some columns: times in ms, a list as a tuple of its elements, a
value of a schema as JSON."""


class Difference(NamedTuple):
    """Rows of one key that only one side has.

    `columns`: those that differ, where each side has one row.
    """

    key: Row
    actual: list[Row]
    expected: list[Row]
    columns: list[str]

    def differ(self) -> str:
        """Return which columns differ, for a sentence."""
        return f"{' and '.join(self.columns)} differ{'s' * (len(self.columns) == 1)}"


def compare(
    actual: Iterable[Row],
    expected: Iterable[Row],
    columns: Sequence[str],
    key: Callable[[Row], Any],
) -> list[Difference]:
    """Return how rows differ from those expected, in order of their keys.

    A row counts as often as it comes; `columns` are those of both sides.
    """
    counts = Counter(actual)
    counts.subtract(expected)
    by_key: dict[Row, tuple[list[Row], list[Row]]] = defaultdict(lambda: ([], []))
    for row, count in counts.items():
        if count:
            by_key[key(row)][count < 0].extend([row] * abs(count))
    return [Difference(at, *by_key[at], differing(*by_key[at], columns)) for at in sorted(by_key)]


def differing(actual: list[Row], expected: list[Row], columns: Sequence[str]) -> list[str]:
    """Return the columns in which two rows differ; none where there are not two."""
    if len(actual) != 1 or len(expected) != 1:
        return []
    values = zip(columns, actual[0], expected[0], strict=True)
    return [name for name, here, there in values if here != there]


def as_rows(rows: pa.Table, columns: Sequence[str]) -> Iterator[Row]:
    """Yield rows of a table; a column that it lacks is null in all of them."""
    nothing = [None] * rows.num_rows
    lists = [listed(rows[n]) if n in rows.column_names else nothing for n in columns]
    return zip(*lists, strict=True)


def as_dicts(rows: pa.Table, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the same by the names of the columns."""
    return (dict(zip(columns, row, strict=True)) for row in as_rows(rows, columns))


def listed(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Return the values of a column as rows have them."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return list(pc.divide(column.cast(TIME).cast(pa.int64()), 1000).to_pylist())
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        lists = one_chunk(column)
        flat = lists.flatten()
        fields = [listed(pc.struct_field(flat, i)) for i in range(kind.value_type.num_fields)]
        items = list(zip(*fields, strict=True))
        ends = np.cumsum(int64s(pc.fill_null(pc.list_value_length(lists), 0))).tolist()
        slices = zip([0, *ends], ends, lists.is_valid().to_pylist(), strict=False)
        return [tuple(items[begin:end]) if is_there else None for begin, end, is_there in slices]
    values = column.to_pylist()
    return list(map(packed, values) if pa.types.is_nested(kind) else values)


def packed(value: Any) -> bytes:
    """Return a value of a column as JSON text, with Python's `str` of what JSON has no type for."""
    return orjson.dumps(value, default=str)
