"""Tenants with open or waiting rows: how far their clocks have come, and for whom others wait."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

import pyarrow as pa

from watersmeet.core.clocks import Clocks
from watersmeet.core.columns import NULL_TIME, int64s
from watersmeet.core.plan import TopicPartition
from watersmeet.lake import tables
from watersmeet.lake.epochs import Epochs, inherited_lateness
from watersmeet.lake.generations import read_generations
from watersmeet.lake.inputs import of_topic
from watersmeet.lake.table_reader import TableReader, Where, in_portions
from watersmeet.lake.tenant_state import BatchEnd, TenantStateReader


class SlowestTenant(NamedTuple):
    """The number of a partition's tenants with open or waiting rows, and the one furthest behind.

    `clock`: of that tenant, in ms (None: not known).
    """

    tenants: int
    tenant: str | None
    clock: int | None


UNFINISHED: Where = [[("status", "in", ["open", "waiting"])]]
"""Condition for rows of silver that are still to change."""

UNKNOWN_TENANT = SlowestTenant(0, None, None)


def unfinished(reader: TableReader) -> pa.Table:
    """Return how many `rows` of silver are still to change, by partition, tenant and status."""
    return reader.summary(
        tables.SILVER, ["partition", "tenant", "status"], {"rows": ("count", "*")}, UNFINISHED
    )


def clocks_at(reader: TableReader, epochs: Epochs, batch: int, batch_end: BatchEnd) -> Clocks:
    """Return the clocks at the end of a batch, by the rules of `batch`.

    `batch_end`: that of `batch` or of an earlier one, for all topic-partitions or some of them.
    """
    generation = read_generations(reader, epochs.current.settings).of(batch)
    epoch = epochs.of(batch)
    lateness = inherited_lateness(
        reader, Epochs(earlier for earlier in epochs if earlier.number <= epoch.number), generation
    )
    return TenantStateReader(reader, generation).clocks_at(
        batch_end, epoch.settings.merge.tenant_max_lag_ms, lateness.global_floor
    )


def times_of(rows: pa.Table, clocks: Clocks) -> list[tuple[int, str, int | None]]:
    """Return each partition and tenant of such rows (`unfinished`) with its clock.

    Clocks are in ms (None: not known); the order is by partition and clock.
    """
    tenants = rows.group_by(["partition", "tenant"]).aggregate([])
    times = clocks.at(int64s(tenants["partition"]), tenants["tenant"])
    clocked = zip(
        tenants["partition"].to_pylist(), times.tolist(), tenants["tenant"].to_pylist(), strict=True
    )
    return [(p, tenant, None if time == NULL_TIME else time) for p, time, tenant in sorted(clocked)]


def slowest(rows: pa.Table, clocks: Clocks) -> dict[int, SlowestTenant]:
    """Return, by partition, the number of tenants in such rows (`unfinished`), and the slowest."""
    slowest_tenants: dict[int, SlowestTenant] = {}
    for p, tenant, clock in times_of(rows, clocks):
        first = slowest_tenants.get(p, SlowestTenant(0, tenant, clock))
        slowest_tenants[p] = first._replace(tenants=first.tenants + 1)
    return slowest_tenants


def tenants_of(
    reader: TableReader, heads: Mapping[TopicPartition, int]
) -> dict[TopicPartition, str | None]:
    """Return the tenant whose record took a topic-partition to its head (ms).

    A topic-partition is absent where the idle policy did, and no record in bronze.
    """
    first_tenants: dict[TopicPartition, tuple[int, str | None]] = {}
    by = ["partition", "tenant"]
    first_of = {"first": ("min", "offset")}
    for input_id in sorted({tp.input for tp in heads}):
        input_heads = [(tp.partition, head) for tp, head in heads.items() if tp.input == input_id]
        at_head = of_topic(
            input_id,
            [[("partition", "=", p), ("event_time", "=", head)] for p, head in input_heads],
        )
        table = tables.bronze(input_id.source)
        for where in in_portions(at_head):
            for row in reader.summary(table, by, first_of, where).to_pylist():
                tp = TopicPartition(input_id, row["partition"])
                first = (row["first"], row["tenant"])
                first_tenants[tp] = min(first, first_tenants.get(tp, first), key=itemgetter(0))
    return {tp: tenant for tp, (_, tenant) in first_tenants.items()}
