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
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from pipelines.dev.init import schemas_directory
from pipelines.errors import WatersmeetError
from pipelines.settings import Settings

if TYPE_CHECKING:
    from great_expectations import ExpectationSuite
    from great_expectations.datasource.fluent.interfaces import Batch

SUITE_FILE = "silver_expectations.json"

_EXAMPLES = 3
"""So many unexpected values are shown: enough to look further, few enough for one line."""


@dataclass(frozen=True)
class CheckResult:
    """What became of one expectation."""

    expectation: str
    """A sentence, such as `event_time is never after last_event_time`."""
    ok: bool
    unexpected: int
    """The rows that break it; 0 where it holds, and where it could not be checked or is not about rows."""
    observed: str
    """What was found instead, with examples of unexpected values; empty where the expectation holds."""


def check_silver(silver: DataFrame, settings: Settings) -> list[CheckResult]:
    """Every expectation has a result, in the suite's order, whatever is broken: a missing column fails what is said of it.

    In: silver as stored (more columns may be there). Only reads, and keeps nothing of `silver` in memory afterwards.
    Raises WatersmeetError where Great Expectations is not installed.
    """
    suite = silver_suite(settings.sources)
    batch = _as_batch(silver)
    # Counting and collecting unexpected values costs a job or more for each expectation, so only those that failed do it.
    results = _validate(batch, suite, {"result_format": "BOOLEAN_ONLY"})
    broken = _only(suite, [name for name, result in results.items() if not result.success])
    if broken.expectations:
        results |= _validate(batch, broken, {"result_format": "BASIC", "partial_unexpected_count": _EXAMPLES})
    return [_check_result(name, results[name]) for name in _names(suite)]


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


def _as_batch(silver: DataFrame) -> Batch:
    """In a context that lives in memory; not persisted, or Spark would keep a copy of the table until the session ends."""
    from great_expectations import get_context
    from great_expectations.data_context.types.base import ProgressBarsConfig

    # This module tells of every temporary folder, at a level of its own.
    logging.getLogger(ProgressBarsConfig.__module__).setLevel(logging.WARNING)
    with _without_warnings():
        context = get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        asset = context.data_sources.add_spark("lake", persist=False).add_dataframe_asset("silver")
        return asset.add_batch_definition_whole_dataframe("now").get_batch({"dataframe": silver})


def _validate(batch: Batch, suite: ExpectationSuite, result_format: dict[str, Any]) -> dict[str, Any]:
    """The results by the expectations' sentences: Great Expectations returns them in an order of its own."""
    with _without_warnings():
        results: list[Any] = list(batch.validate(suite, result_format=result_format).results)
    return {result.expectation_config.description: result for result in results}


def _check_result(sentence: str, result: Any) -> CheckResult:
    if result.success:
        return CheckResult(sentence, True, 0, "")
    unexpected = int(result.result.get("unexpected_count") or 0)
    if unexpected:
        rows = f"{unexpected} of {result.result['element_count']} rows"
        examples = sorted({_shown(value) for value in result.result["partial_unexpected_list"] if value is not None})
        return CheckResult(sentence, False, unexpected, f"{rows}, such as {'; '.join(examples)}" if examples else rows)
    return CheckResult(sentence, False, 0, _problem(result.exception_info) or "it is not there")


def _shown(value: Any) -> str:
    """An unexpected value, or the values of several columns, for people; times in UTC."""
    if isinstance(value, dict):
        return ", ".join(f"{column} {_shown(part)}" for column, part in value.items())
    if isinstance(value, tuple):
        return ", ".join(_shown(part) for part in value)
    if isinstance(value, datetime):  # Spark hands a timestamp over in the machine's own zone, without saying so
        return value.astimezone(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return f"`{value}`"


def _problem(exception_info: dict[str, Any]) -> str | None:
    """Why an expectation could not be checked: one message, or one for each figure that could not be had."""
    infos = [exception_info] if "exception_message" in exception_info else exception_info.values()
    messages = [str(info["exception_message"]) for info in infos if info["exception_message"]]
    return f"could not be checked: {messages[0].strip().splitlines()[0]}" if messages else None


def _names(suite: ExpectationSuite) -> list[str]:
    return [str(expectation.description) for expectation in suite.expectations]


def _only(suite: ExpectationSuite, names: Iterable[str]) -> ExpectationSuite:
    from great_expectations import ExpectationSuite

    wanted = set(names)
    return ExpectationSuite(suite.name, [e.configuration for e in suite.expectations if e.description in wanted])


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Great Expectations warns of its own deprecations, which nobody here can act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
