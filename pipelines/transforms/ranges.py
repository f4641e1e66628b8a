"""What the driver knows per partition, as conditions and columns: offset ranges, clocks, positions."""

from __future__ import annotations

from collections.abc import Mapping

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
    near = F.expr(_near(ranges))
    if len(ranges) <= MAX_TERMS:
        return near
    since, until = _bounds(ranges)
    return near & (F.col("offset") >= by_partition(since)) & (F.col("offset") < by_partition(until))


def within(ranges: Mapping[int, tuple[int, int | None]]) -> str:
    """The same as a condition in SQL."""
    if len(ranges) <= MAX_TERMS:
        return _near(ranges)
    since, until = (case({p: str(bound) for p, bound in bounds.items()}) for bounds in _bounds(ranges))
    return f"({_near(ranges)}) AND `offset` >= {since} AND `offset` < {until}"


def case(values: Mapping[int, str], table: str = "") -> str:
    """In SQL, the value (an expression) that a mapping holds for the row's `partition`, else null; `table` ends in a dot."""
    branches = " ".join(f"WHEN {p} THEN {value}" for p, value in values.items())
    return f"CASE {table}`partition` {branches} END"


def _near(ranges: Mapping[int, tuple[int, int | None]]) -> str:
    """In SQL: exact for a few partitions; for many, true of whatever is within, and of some rows that are not."""
    since, until = _bounds(ranges)
    partitions = list(since)
    size = -(-len(partitions) // MAX_TERMS) or 1
    terms = [
        f"`partition` BETWEEN {group[0]} AND {group[-1]} "
        f"AND `offset` >= {min(since[p] for p in group)} AND `offset` < {max(until[p] for p in group)}"
        for group in (partitions[i : i + size] for i in range(0, len(partitions), size))
    ]
    return " OR ".join(f"({term})" for term in terms) or "FALSE"


def _bounds(ranges: Mapping[int, tuple[int, int | None]]) -> tuple[dict[int, int], dict[int, int]]:
    ordered = sorted(ranges.items())
    since = {p: first for p, (first, _) in ordered}
    return since, {p: UNBOUNDED if until is None else until for p, (_, until) in ordered}


def by_partition(values: Mapping[int, int | None] | Mapping[int, str]) -> Column:
    """The value (bigint or string) that a mapping holds for the row's `partition`, else null: a literal, found by index."""
    of_all = [values.get(p) for p in range(max(values, default=-1) + 1)]
    if not of_all:
        return F.lit(None).cast("bigint")
    kind = "string" if any(isinstance(value, str) for value in of_all) else "bigint"
    return F.get(F.array(*[F.lit(value) for value in of_all]).cast(f"array<{kind}>"), F.col("partition"))
