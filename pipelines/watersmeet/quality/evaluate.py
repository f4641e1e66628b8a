"""The evaluation of expectations on some rows: Great Expectations on a pandas frame in memory, or
on a Spark DataFrame.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from watersmeet.audit.show import utc
from watersmeet.quality.suites import PLACE, Suite, load_great_expectations, sentence_of

if TYPE_CHECKING:
    from great_expectations.datasource.fluent.interfaces import Batch

EXAMPLES: Final = 10
"""Maximum number of rows against an expectation that are kept, to be shown."""

PAYLOAD: Final = frozenset(["key", "value", "detail"])
"""Columns that hold what the records' senders wrote: their content is never shown. Lists are not
shown either.
"""

_LONGEST: Final = 60

_EXCEPTION_FIELDS: Final = ("exception_traceback", "exception_message")
_KIND: Final = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception))\b", re.MULTILINE)
"""The kind of an error, with which a message, or the last line of a stack trace, begins."""


class Outcome(NamedTuple):
    """The outcome of one expectation.

    - `unexpected`: how many rows are against it; None where it is not about rows, or could not be
      checked.
    - `observed`: what was found, for one that is not about rows.
    - `trouble`: why it could not be checked.
    - `examples`: some rows that are against it, with the columns by which a row is found, and those
      that the expectation is about.
    """

    expectation: str
    success: bool
    unexpected: int | None = None
    observed: str | None = None
    trouble: str | None = None
    examples: Sequence[dict[str, str]] = ()

    def joined(self, other: Outcome) -> Outcome:
        """Return this outcome and that of another chunk of rows as one: a success where both are,
        with the counts added.
        """
        counts = [count for count in (self.unexpected, other.unexpected) if count is not None]
        worse = other if self.success else self
        return Outcome(
            self.expectation,
            self.success and other.success,
            sum(counts) if counts else None,
            worse.observed,
            worse.trouble,
            [*self.examples, *other.examples][:EXAMPLES],
        )


def evaluate(rows: Any, suites: Sequence[Suite], coordinates: Sequence[str]) -> list[list[Outcome]]:
    """Return by suite the outcomes of its expectations, in their order.

    Whatever is broken, there is an outcome: an expectation on a missing column fails. `rows`: an
    Arrow table or a DataFrame (which is read several times); they are only read, and nothing of
    them is kept. `coordinates`: the columns by which people find a row. Raises ConfigurationError
    where Great Expectations does not take an expectation, and WatersmeetError where it is not
    installed.
    """
    load_great_expectations()
    expectations = [suite.expectations for suite in suites]
    batch = _as_batch(rows)
    columns = rows.column_names if isinstance(rows, pa.Table) else rows.columns
    existing = [name for name in coordinates if name in columns]
    return [
        _outcomes(suite, _validate(batch, suite_expectations, existing), existing)
        for suite, suite_expectations in zip(suites, expectations, strict=True)
    ]


def _outcomes(suite: Suite, results: Sequence[Any], coordinates: Sequence[str]) -> list[Outcome]:
    return [_outcome(suite, number, result, coordinates) for number, result in enumerate(results)]


def _as_batch(rows: Any) -> Batch:
    """Return rows as a batch in a context that lives in memory.

    They are not persisted: Spark would keep a copy of them until the session ends.
    """
    from great_expectations import get_context
    from great_expectations.data_context.types.base import ProgressBarsConfig

    with _without_warnings():
        context = get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        if isinstance(rows, pa.Table):
            in_memory = context.data_sources.add_pandas("lake").add_dataframe_asset("rows")
            return in_memory.add_batch_definition_whole_dataframe("now").get_batch(
                {"dataframe": rows.to_pandas()}
            )
        by_spark = context.data_sources.add_spark("lake", persist=False).add_dataframe_asset("rows")
        return by_spark.add_batch_definition_whole_dataframe("now").get_batch({"dataframe": rows})


def _validate(batch: Batch, expectations: Iterable[Any], coordinates: Sequence[str]) -> list[Any]:
    """Return a result for each expectation, in their order: Great Expectations returns them in an
    order of its own.
    """
    from great_expectations import ExpectationSuite

    result_format: Any = {"result_format": "SUMMARY", "partial_unexpected_count": EXAMPLES}
    if coordinates:
        result_format["unexpected_index_column_names"] = list(coordinates)
    suite = ExpectationSuite("rows", [expectation.configuration for expectation in expectations])
    with _without_warnings():
        results = batch.validate(suite, result_format=result_format).results
    return sorted(results, key=lambda result: int((result.expectation_config.meta or {})[PLACE]))


def _outcome(suite: Suite, number: int, result: Any, coordinates: Sequence[str]) -> Outcome:
    facts = dict(result.result)
    success = bool(result.success)
    unexpected = None
    observed = None
    if "unexpected_count" in facts:
        unexpected = int(facts["unexpected_count"] or 0)  # of no rows at all, Spark's sum is null
    elif "observed_value" in facts:
        column = result.expectation_config.kwargs.get("column", "")
        observed = _shown(column, facts["observed_value"])
    trouble = None if success or facts else _trouble(result.exception_info)
    examples = (facts.get("partial_unexpected_index_list") or [])[:EXAMPLES]
    return Outcome(
        sentence_of(suite.documents[number]),
        success,
        unexpected,
        observed,
        trouble,
        [_example(row, coordinates) for row in examples],
    )


def _trouble(exception_info: Any) -> str | None:
    """Return the kind of error for which an expectation could not be checked; its message may show
    values.
    """
    parts: list[Any] = []
    if isinstance(exception_info, dict):
        parts = [exception_info, *exception_info.values()]
    texts = [
        str(part.get(name) or "")
        for part in parts
        if isinstance(part, dict)
        for name in _EXCEPTION_FIELDS
    ]
    kinds = [kind for text in texts for kind in _KIND.findall(text)]
    if kinds:
        return str(kinds[-1])
    return "Great Expectations does not say why" if any(texts) else None


def _example(row: dict[str, Any], coordinates: Sequence[str]) -> dict[str, str]:
    """Return what is shown of a row, its coordinates first."""
    names = [*coordinates, *[name for name in row if name not in coordinates]]
    return {name: _shown(name, row[name]) for name in names if name in row}


def _shown(column: str, value: Any) -> str:
    if hasattr(value, "__len__") and not isinstance(value, str):
        return f"({len(value)} parts, not shown)"
    if value is None or value != value:  # NaN and NaT stand for null in pandas
        return "null"
    text = str(value)
    # A number is one that Great Expectations has counted: the content is text.
    if column in PAYLOAD and not isinstance(value, int | float):
        return f"({len(text)} characters, not shown)"
    if isinstance(value, datetime):
        return utc(round(value.timestamp() * 1000))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings inside the `with` block: Great Expectations warns of its own deprecations,
    which nobody here can act on.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
