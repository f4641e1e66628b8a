"""Expectations on silver: promises that hold for every configuration, checked by Great Expectations on the table as it is.

They are the file `schemas/silver_expectations.json`, a Great Expectations suite, and what the configuration's sources add to
it. A check reads the whole table in a few dozen small Spark jobs: right for a table now and then, too slow for every batch.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from pipelines.dev.init import schemas_directory
from pipelines.errors import WatersmeetError
from pipelines.settings import Settings

if TYPE_CHECKING:
    from great_expectations import ExpectationSuite
    from great_expectations.datasource.fluent.interfaces import Batch
    from pyspark.sql import DataFrame

SUITE_FILE = "silver_expectations.json"


@dataclass(frozen=True)
class CheckResult:
    """What became of one expectation."""

    expectation: str
    """A sentence, such as `event_time is never after last_event_time`."""
    ok: bool
    unexpected: int
    """The rows that break it; 0 where it holds, and where it could not be checked or is not about rows."""


def check_silver(silver: DataFrame | pa.Table, settings: Settings) -> list[CheckResult]:
    """Every expectation has a result, in the suite's order, whatever is broken: a missing column fails what is said of it.

    In: silver as stored (more columns may be there), in Spark or in memory. Only reads, and keeps nothing of `silver` afterwards.
    Raises WatersmeetError where Great Expectations is not installed.
    """
    expectations = silver_suite(settings.sources).expectations
    batch = _as_batch(silver)
    # Counting unexpected values costs a job or more for each expectation, so only those that failed do it.
    results = _validate(batch, expectations, "BOOLEAN_ONLY")
    broken = [each for each in expectations if not results[each.description].success]
    if broken:
        results |= _validate(batch, broken, "BASIC")
    return [_check_result(str(each.description), results[each.description]) for each in expectations]


def silver_suite(sources: Iterable[str]) -> ExpectationSuite:
    """The suite of the file, and that each source's column exists and is never null."""
    # Great Expectations takes seconds to import, and is an optional extra.
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    try:
        from great_expectations import ExpectationSuite
    except ImportError as error:
        raise WatersmeetError(
            f"Great Expectations cannot be imported ({error}): install it with `pip install 'watersmeet[quality]'`"
        ) from error
    document = json.loads((schemas_directory() / SUITE_FILE).read_text(encoding="utf-8"))
    for source in sources:
        document["expectations"] += [
            _expectation("expect_column_to_exist", source, f"the column {source} exists"),
            _expectation("expect_column_values_to_not_be_null", source, f"{source} is never null"),
        ]
    suite = ExpectationSuite(**document)
    # The constructor only logs what it cannot read, and a promise would go unchecked.
    if len(suite.expectations) != len(document["expectations"]):
        raise WatersmeetError(f"{SUITE_FILE} has expectations that this version of Great Expectations does not know")
    return suite


def _expectation(kind: str, column: str, sentence: str) -> dict[str, Any]:
    """As Great Expectations would write it into the file."""
    return {"type": kind, "kwargs": {"column": column}, "description": sentence, "severity": "critical"}


def _as_batch(silver: DataFrame | pa.Table) -> Batch:
    """In a context that lives in memory; not persisted, or Spark would keep a copy of the table until the session ends."""
    from great_expectations import get_context
    from great_expectations.data_context.types.base import ProgressBarsConfig

    # This module tells of every temporary folder, at a level of its own.
    logging.getLogger(ProgressBarsConfig.__module__).setLevel(logging.WARNING)
    with _without_warnings():
        context = get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        if isinstance(silver, pa.Table):
            in_memory = context.data_sources.add_pandas("lake").add_dataframe_asset("silver")
            return in_memory.add_batch_definition_whole_dataframe("now").get_batch({"dataframe": silver.to_pandas()})
        by_spark = context.data_sources.add_spark("lake", persist=False).add_dataframe_asset("silver")
        return by_spark.add_batch_definition_whole_dataframe("now").get_batch({"dataframe": silver})


def _validate(batch: Batch, expectations: Iterable[Any], result_format: Literal["BOOLEAN_ONLY", "BASIC"]) -> dict[Any, Any]:
    """The results by the expectations' sentences: Great Expectations returns them in an order of its own."""
    from great_expectations import ExpectationSuite

    suite = ExpectationSuite("silver", [each.configuration for each in expectations])
    with _without_warnings():
        results: list[Any] = list(batch.validate(suite, result_format=result_format).results)
    return {result.expectation_config.description: result for result in results}


def _check_result(sentence: str, result: Any) -> CheckResult:
    unexpected = 0 if result.success else int(result.result.get("unexpected_count") or 0)
    return CheckResult(sentence, bool(result.success), unexpected)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Great Expectations warns of its own deprecations, which nobody here can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
