"""Notes the waiting records that the rules of a new epoch make late, before its first batch."""

from __future__ import annotations

from functools import partial

from watersmeet.core.merge import LATE_SCHEMA, Batch
from watersmeet.core.plan import TopicPartition
from watersmeet.core.types import TENANT
from watersmeet.engine import Selection
from watersmeet.lake import tables
from watersmeet.lake.commits import DELETING
from watersmeet.lake.generations import Generation
from watersmeet.lake.inputs import first_offsets
from watersmeet.lake.table_reader import Where, by_partition, row_count
from watersmeet.running.batch_rows import BatchRows
from watersmeet.running.merge_functions import LateAgain
from watersmeet.running.owner import Owner

_WAITS: Where = [[("status", "=", "waiting")]]


def note_late_waiting(owner: Owner, rows: BatchRows, generation: Generation, batch: Batch) -> None:
    """Write to `late` the waiting records that the rules of a new epoch make late.

    Its first batch is next and removes them from silver, so they are noted before: afterwards only
    an older version would have them, which a vacuum may remove. Nobody looks at late records of
    batches that are not committed, and a start deletes them (`drop_undecided`).
    """
    reader = owner.engine.reader
    values = {"first": ("min", "position")}
    first = reader.summary(tables.SILVER, ["partition"], values, _WAITS)
    positions = by_partition(first, "first")
    if not positions:
        return
    records = []
    for input_id in rows.settings.inputs:
        since = generation.offsets_of(input_id)
        begins = first_offsets(reader, input_id, "event_time", positions, since)
        ranges = {
            p: (offset, batch.plan.ranges[TopicPartition(input_id, p)].from_offset)
            for p, offset in begins.items()
        }
        records.append(rows.between(input_id, ranges))
    columns = ["partition", "event_time", "position", *TENANT.names, *rows.settings.sources]
    inputs = [*records, Selection(tables.SILVER, columns, _WAITS)]
    late = owner.engine.from_tables(LateAgain(batch), inputs, sorted(positions), LATE_SCHEMA)
    owner.append(tables.LATE, late, DELETING)


def drop_undecided(owner: Owner, last: int) -> None:
    """Delete late records of batches after `last`, which a crash kept from being committed."""
    undecided: Where = [[("batch", ">", last)]]
    if row_count(owner.engine.reader, tables.LATE, undecided):
        owner.change(tables.LATE, DELETING, partial(owner.engine.delete, tables.LATE, undecided))
