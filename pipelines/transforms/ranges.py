"""Offset ranges as conditions on bronze."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as F


def is_within(ranges: Mapping[int, tuple[int, int | None]]) -> Column:
    """True for rows in `[from, until)` of their partition (until None: unbounded); partitions not named are outside.

    Plain comparisons with literals, which Delta's column statistics can skip files by.
    """
    conditions = [
        (F.col("partition") == partition)
        & (F.col("offset") >= since)
        & (F.lit(True) if until is None else F.col("offset") < until)
        for partition, (since, until) in ranges.items()
    ]
    return reduce(Column.__or__, conditions, F.lit(False))
