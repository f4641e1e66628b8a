"""Tenants with open or waiting rows: how far their clocks have come, and for whom others wait."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import NamedTuple

import pyarrow as pa

from watersmeet.core.columns import NULL_TIME, int64s
from watersmeet.core.plan import TopicPartition
from watersmeet.core.state import State
from watersmeet.lake import tables
from watersmeet.lake.inputs import by_input, of_topic
from watersmeet.lake.table_reader import TableReader, in_portions


class SlowestTenant(NamedTuple):
    """The number of a partition's tenants with open or waiting rows, and the one furthest behind.

    `clock`: of that tenant, in ms (None: not known).
    """

    tenants: int
    tenant: str | None
    clock: int | None


UNKNOWN_TENANT = SlowestTenant(0, None, None)


def unfinished(reader: TableReader) -> pa.Table:
    """Return how many `rows` of silver are still to change, by partition, tenant and status."""
    by, rows = ["partition", "tenant", "status"], {"rows": ("count", "*")}
    return reader.summary(tables.SILVER, by, rows, [[tables.IS_UNFINISHED]])


def times_of(rows: pa.Table, state: State) -> list[tuple[int, str, int | None]]:
    """Return each partition and tenant of such rows (`unfinished`) with its clock.

    Clocks are in ms (None: not known); the order is by partition and clock.
    """
    tenants = rows.group_by(["partition", "tenant"]).aggregate([])
    times = state.tenant_clocks(int64s(tenants["partition"]), tenants["tenant"])
    clocked = zip(
        tenants["partition"].to_pylist(), times.tolist(), tenants["tenant"].to_pylist(), strict=True
    )
    return [(p, tenant, None if time == NULL_TIME else time) for p, time, tenant in sorted(clocked)]


def slowest(rows: pa.Table, state: State) -> dict[int, SlowestTenant]:
    """Return, by partition, the number of tenants in such rows (`unfinished`), and the slowest."""
    slowest_tenants: dict[int, SlowestTenant] = {}
    for p, tenant, clock in times_of(rows, state):
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
    for input_id, its in sorted(by_input(heads).items()):
        at_head = of_topic(
            input_id, [[("partition", "=", p), ("event_time", "=", at)] for p, at in its.items()]
        )
        table = tables.bronze(input_id.source)
        for where in in_portions(at_head):
            for row in reader.summary(table, by, first_of, where).to_pylist():
                tp = TopicPartition(input_id, row["partition"])
                first = (row["first"], row["tenant"])
                first_tenants[tp] = min(first, first_tenants.get(tp, first), key=itemgetter(0))
    return {tp: tenant for tp, (_, tenant) in first_tenants.items()}
