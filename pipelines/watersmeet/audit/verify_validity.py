"""Validity and messages of rows of silver, derived by the user's own expressions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.columns import lengths
from watersmeet.core.message import as_read, message_bytes, message_values
from watersmeet.core.types import TIME
from watersmeet.expressions.publish import Expressions
from watersmeet.lake.history import Epoch, Epochs


def evaluated(rows: pa.Table, epochs: Epochs, header_bytes: int = 0) -> pa.Table:
    """Return merge records, or corrections, judged by the `publish` of their epochs, with `told`,
    the value of their message, and `fault`, why they are not valid: `too_large`, or what the
    predicate says; null: they are.

    `header_bytes`: the size of the headers of a message beside those of `message_bytes`.
    """
    numbers = epochs.numbers_of(rows["batch"].to_numpy())
    by_epoch = [
        _in_epoch(rows.take(pa.array(np.flatnonzero(numbers == i))), epoch, header_bytes)
        for i, epoch in enumerate(epochs)
        if (numbers == i).any()
    ]
    order = np.argsort(np.argsort(numbers, kind="stable"), kind="stable")
    return pa.concat_tables(by_epoch).take(pa.array(order))


def _in_epoch(rows: pa.Table, epoch: Epoch, header_bytes: int) -> pa.Table:
    publish = epoch.settings.publish
    expressions = Expressions.of(epoch.settings)
    stored = rows
    for name in ("event_time", "last_event_time"):
        stored = stored.set_column(
            stored.column_names.index(name), name, pc.multiply(rows[name], 1000).cast(TIME)
        )
    sources = epoch.settings.sources
    readable = as_read(stored, {name: source.value_type for name, source in sources.items()})
    if expressions.value is None:
        types = {name: source.read_type for name, source in sources.items()}
        told = _values(as_read(stored, types), list(sources))
    else:
        told = expressions.messages(readable).values
    parts = sum(np.asarray(pc.list_value_length(rows[name])) for name in sources)
    sizes = message_bytes(*(lengths(c) for c in (told, rows["merge_key"], rows["tenant"])))
    is_too_large = pa.array(sizes + header_bytes > publish.max_bytes)
    fault = pc.coalesce(
        pc.if_else(pa.array(parts == 0), "too_large", None),
        expressions.refusals(readable),
        pc.if_else(is_too_large, "too_large", None),
    )
    return rows.append_column("fault", fault).append_column("told", told)


def _values(rows: pa.Table, sources: Sequence[str]) -> pa.ChunkedArray:
    """Return the default value of each row's message.

    Null for a row that can have none, since something in it is null.
    """
    try:
        return message_values(rows, sources)
    except ValueError:
        if rows.num_rows == 1:
            return pa.chunked_array([pa.nulls(1, pa.large_binary())])
    half = rows.num_rows // 2
    return pa.chunked_array(
        [*_values(rows[:half], sources).chunks, *_values(rows[half:], sources).chunks],
        pa.large_binary(),
    )
