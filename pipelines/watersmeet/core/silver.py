"""The rows of silver: what became of each record, and how far each batch has come.

`status` says what a row is. Rows that are `open` (a merge record) or `waiting` (a record) are
replaced by later batches; all others are final: `timed_out` (a merge record), `late`, `duplicate`,
`excess`, `passed` and `correction` (records), `idle` (a decision of the idle policy), `out` (what a
generation knows of published messages), and `batch` (a topic-partition after a batch).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from watersmeet.core.types import schema_of

OUTCOMES: Final = schema_of(
    "source string, topic string, offset bigint, value binary, u timestamp, id string, of_offset "
    "bigint, is_late boolean, is_late_born boolean, version bigint, settled_at timestamp, "
    "first_event_time timestamp, has_message boolean, after_offset bigint, decided_at timestamp, "
    "from_offset bigint, until_offset bigint, head timestamp, clock timestamp, epoch int, "
    "committed_at timestamp"
)
"""The columns of silver that merge records lack; each status has some of them."""

PASSED: Final = schema_of(
    "source string, topic string, partition int, offset bigint, tenant string, merge_key string, "
    "event_time timestamp, position timestamp, batch bigint, generation int"
)
"""The columns of a row `passed`: a record that is in a message, or copies another record."""

BATCH: Final = schema_of(
    "batch bigint, source string, topic string, partition int, from_offset bigint, until_offset "
    "bigint, head timestamp, clock timestamp, position timestamp, epoch int, generation int, "
    "committed_at timestamp"
)
"""The columns of a row `batch`: the offsets `[from_offset, until_offset)` of a topic-partition that
a batch has merged, and the times then. `head` and `clock` are null while there is none; `position`
is the running maximum at `until_offset`.
"""

IDLE: Final = schema_of(
    "source string, topic string, partition int, after_offset bigint, event_time timestamp, "
    "decided_at timestamp, tenant string, batch bigint, generation int"
)
"""The columns of a row `idle`: a heartbeat that the idle policy has placed after an offset (-1:
before any record). A decision is a row without a tenant (null), and one for each tenant with a time
of its own, with the same `after_offset` and `decided_at`.
"""

OUT: Final = schema_of(
    "source string, topic string, partition int, from_offset bigint, until_offset bigint, tenant "
    "string, merge_key string, event_time timestamp, due timestamp, closed_at timestamp, position "
    "timestamp, generation int"
)
"""The columns of a row `out`: what a generation must know of published messages. A row is one of
three; the columns of the others are null.

- A message that was read back from the sink of a lost lake: its key, tenant and times.
- Offsets `[from_offset, until_offset)` of a topic-partition that are in messages of earlier
  generations.
- With tenants, the `position` of their tenant from which on a partition's records are merged.
"""


def in_silver(rows: pa.Table, status: str | None, schema: pa.Schema) -> pa.Table:
    """Return rows with all columns of `schema`, silver's, and this status (None: they delete rows,
    see `core.merge.merge`).

    What `rows` lack is null.
    """
    count = rows.num_rows
    columns = {name: rows[name] for name in rows.column_names}
    columns["status"] = pa.repeat(pa.scalar(status, pa.string()), count)
    every = [
        columns[field.name] if field.name in columns else pa.nulls(count, field.type)
        for field in schema
    ]
    return pa.table(every, schema.names).cast(schema)


def with_status(rows: pa.Table, status: str) -> pa.Table:
    """Return those of some rows of silver that have a status."""
    return rows.filter(pc.equal(rows["status"], status))


def of_batch(rows: pa.Table, batch: int, generation: int) -> pa.Table:
    """Return rows with the numbers of their batch and generation."""
    count = rows.num_rows
    rows = rows.append_column("batch", pa.array(np.full(count, batch, np.int64)))
    return rows.append_column("generation", pa.array(np.full(count, generation, np.int32)))
