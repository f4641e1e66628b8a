"""Whether a rebuild has the rows of the lake: `verify --against`. Reads only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.audit.rebuild import OF_BATCH, OF_TIMEOUT, rebuilt_settings
from pipelines.audit.validate import Problem
from pipelines.audit.verify_evidence import REBUILD, Findings, first_of, read, read_silver
from pipelines.audit.verify_silver import place
from pipelines.errors import ConfigurationError, WatersmeetError
from pipelines.settings import Settings


def verify_against(lake: Lake, settings: Settings, directory: Path) -> dict[str, Any]:
    """The answer of `verify --against --json`: silver and late, as they were when it was made, against the rebuild in all
    columns but `batch`. Raises ConfigurationError where there is no rebuild, or one under another timeout.
    """
    other = Lake(lake.spark, rebuilt_settings(settings, directory))
    batch = _rebuilt_batch(other, settings, directory)
    silver, late = _as_of(lake, batch)
    found = [_silver_differences(silver, other.read(tables.SILVER)), _late_differences(late, other.read(tables.LATE), settings)]
    problems = [problem for findings in found for problem in findings.problems]
    more = sum(findings.more for findings in found)
    if more:
        problems.append(Problem(f"{more:,} more problems like these", str(directory), "mend those first, then verify again"))
    return {"ok": not problems, "problems": [problem._asdict() for problem in problems]}


def _rebuilt_batch(rebuilt: Lake, settings: Settings, directory: Path) -> int:
    facts = dict(rebuilt.rows("SELECT field, value FROM {configuration}")) if rebuilt.exists(tables.CONFIGURATION) else {}
    if OF_BATCH not in facts:
        raise ConfigurationError(f"--against: {directory} holds no complete rebuild; `watersmeet rebuild --into DIR` makes one")
    if facts[OF_TIMEOUT] != f"{settings.merge.timeout_ms} ms":
        raise ConfigurationError(
            f"--against: {directory} was derived with a timeout of {facts[OF_TIMEOUT]}, which makes other merge records; "
            "rebuild without --timeout"
        )
    return int(facts[OF_BATCH])


def _as_of(lake: Lake, batch: int) -> tuple[DataFrame, DataFrame]:
    """Silver and late right after a batch."""
    late = read(lake, tables.LATE).where(F.col("batch") <= batch)
    silver, last_batch = read_silver(lake)
    if last_batch == batch:
        return silver, late
    version = lake.rows(f"SELECT version FROM {{versions}} WHERE batch = {batch}")
    if not version:
        raise WatersmeetError(f"it is not known which version of silver batch {batch} made; rebuild anew")
    return lake.read(tables.SILVER, version[0][0]), late


def _silver_differences(found: DataFrame, rebuilt: DataFrame) -> Findings:
    def describe(row: Row) -> Problem:
        return Problem(_what(row), place(row.partition, row.merge_key, row.ms), REBUILD)

    keys = ["partition", "merge_key", "event_time"]
    different = _different(found, rebuilt, keys, [name for name in found.columns if name not in (*keys, "batch")])
    return first_of(different.withColumn("ms", F.unix_millis("event_time")), ["partition", "merge_key", "ms"], describe)


def _late_differences(found: DataFrame, rebuilt: DataFrame, settings: Settings) -> Findings:
    def describe(row: Row) -> Problem:
        where = f"late: {settings.sources[row.source].topic}[{row.partition}]@{row.offset}"
        return Problem(_what(row), where, REBUILD)

    keys = ["source", "partition", "offset"]
    return first_of(_different(found, rebuilt, keys, ["merge_key", "event_time", "position", "value"]), keys, describe)


def _different(found: DataFrame, rebuilt: DataFrame, keys: Sequence[str], content: Sequence[str]) -> DataFrame:
    """By keys, the contents that one has and the other has not: `here` and `there`, arrays of rows. (A jump back may leave rows
    with the same keys.)
    """
    here, there = (frame.select(*keys, F.struct(*content).alias("content")) for frame in (found, rebuilt))
    sides = {"here": here.exceptAll(there), "there": there.exceptAll(here)}
    both = reduce(DataFrame.union, [rows.withColumn("side", F.lit(side)) for side, rows in sides.items()])
    of_side = [F.collect_list(F.when(F.col("side") == side, F.col("content"))).alias(side) for side in sides]
    return both.groupBy(*keys).agg(*of_side)


def _what(row: Row) -> str:
    if not row.here:
        return "only the rebuild has it"
    if not row.there:
        return "the rebuild does not have it"
    names = [name for name in row.here[0].asDict() if [each[name] for each in row.here] != [each[name] for each in row.there]]
    return f"the rebuild has another {', '.join(names)}"
