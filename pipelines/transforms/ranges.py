"""What the driver knows per partition, as conditions and columns: offset ranges, clocks, positions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F

MAX_TERMS = 16
"""A condition with a term for each of hundreds of partitions grows beyond what Spark compiles, so neighbours share one."""

UNBOUNDED = 2**63 - 1


def is_within(ranges: Mapping[int, tuple[int, int | None]]) -> Column:
    """True for rows in `[from, until)` of their partition (until None: unbounded); partitions not named are outside.

    Plain comparisons with literals, which Delta's column statistics skip files by: exact for each of a few partitions; for
    many, exact per row and by the widest range of some neighbours per file.
    """
    if not ranges:
        return F.lit(False)
    bounds = {p: (since, UNBOUNDED if until is None else until) for p, (since, until) in sorted(ranges.items())}
    partitions = list(bounds)
    size = -(-len(partitions) // MAX_TERMS)
    groups = [partitions[i : i + size] for i in range(0, len(partitions), size)]
    terms = [
        F.col("partition").between(group[0], group[-1])
        & (F.col("offset") >= min(bounds[p][0] for p in group))
        & (F.col("offset") < max(bounds[p][1] for p in group))
        for group in groups
    ]
    some_group = reduce(Column.__or__, terms)
    if size == 1:
        return some_group
    since, until = ({p: bound[i] for p, bound in bounds.items()} for i in (0, 1))
    return some_group & (F.col("offset") >= by_partition(since)) & (F.col("offset") < by_partition(until))


def by_partition(values: Mapping[int, int | None] | Mapping[int, str]) -> Column:
    """The value (bigint or string) that a mapping holds for the row's `partition`, else null: a literal, found by index."""
    of_all = [values.get(p) for p in range(max(values, default=-1) + 1)]
    if not of_all:
        return F.lit(None).cast("bigint")
    kind = "string" if any(isinstance(value, str) for value in of_all) else "bigint"
    return F.get(F.array(*[F.lit(value) for value in of_all]).cast(f"array<{kind}>"), F.col("partition"))
