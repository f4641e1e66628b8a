"""The evaluation of expectations by Great Expectations, on a pandas frame."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from watersmeet.core.reading import KEYED_BY
from watersmeet.core.times import utc
from watersmeet.quality.suites import PLACE, Suite, sentence_of

if TYPE_CHECKING:
    from great_expectations.datasource.fluent.interfaces import Batch

EXAMPLES: Final = 10
"""Maximum number of rows against an expectation that are shown."""

PAYLOAD: Final = frozenset([*KEYED_BY, "detail"])
"""Columns whose content, which is the senders', is never shown; nor are lists."""

_LONGEST: Final = 60

_EXCEPTION_FIELDS: Final = ("exception_traceback", "exception_message")
_KIND: Final = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception))\b", re.MULTILINE)
"""The kind of an error, with which a message, or the last line of a stack trace, begins."""


class Outcome(NamedTuple):
    """The outcome of one expectation.

    `unexpected`: how many rows are against it, if it is about rows and could be checked; else
    `observed`: what was found, or `trouble`: why it could not. `examples`: rows against it, with
    the columns by which one is found, and those that it is about.
    """

    expectation: str
    success: bool
    unexpected: int | None = None
    observed: str | None = None
    trouble: str | None = None
    examples: Sequence[dict[str, str]] = ()

    def joined(self, other: Outcome) -> Outcome:
        """Return two chunks' outcomes as one: a success where both are, with the counts added."""
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


def evaluate(
    rows: pa.Table, suites: Sequence[Suite], coordinates: Sequence[str]
) -> list[list[Outcome]]:
    """Return by suite the outcomes of its expectations; one on a missing column fails.

    `coordinates`: the columns by which people find a row. Raises ConfigurationError for an
    expectation that Great Expectations does not take, and WatersmeetError without it.
    """
    batch = _as_batch(rows)
    existing = [name for name in coordinates if name in rows.column_names]
    outcomes = []
    for suite in suites:
        results = zip(suite.documents, _validate(batch, suite.expectations, existing), strict=True)
        outcomes.append([_outcome(document, result, existing) for document, result in results])
    return outcomes


def _as_batch(rows: pa.Table) -> Batch:
    from great_expectations import get_context
    from great_expectations.data_context.types.base import ProgressBarsConfig

    with _without_warnings():
        context = get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        asset = context.data_sources.add_pandas("lake").add_dataframe_asset("rows")
        definition = asset.add_batch_definition_whole_dataframe("now")
        batch: Batch = definition.get_batch({"dataframe": rows.to_pandas()})
        return batch


def _validate(batch: Batch, expectations: Iterable[Any], coordinates: Sequence[str]) -> list[Any]:
    # Great Expectations returns results in an order of its own.
    from great_expectations import ExpectationSuite

    result_format: Any = {"result_format": "SUMMARY", "partial_unexpected_count": EXAMPLES}
    if coordinates:
        result_format["unexpected_index_column_names"] = list(coordinates)
    suite = ExpectationSuite("rows", [expectation.configuration for expectation in expectations])
    with _without_warnings():
        results = batch.validate(suite, result_format=result_format).results
    return sorted(results, key=lambda result: int((result.expectation_config.meta or {})[PLACE]))


def _outcome(document: Mapping[str, Any], result: Any, coordinates: Sequence[str]) -> Outcome:
    facts = dict(result.result)
    success = bool(result.success)
    unexpected = observed = None
    if "unexpected_count" in facts:
        unexpected = int(facts["unexpected_count"] or 0)
    elif "observed_value" in facts:
        column = result.expectation_config.kwargs.get("column", "")
        observed = _shown(column, facts["observed_value"])
    trouble = None if success or facts else _trouble(result.exception_info)
    examples = (facts.get("partial_unexpected_index_list") or [])[:EXAMPLES]
    shown = [_example(row, coordinates) for row in examples]
    return Outcome(sentence_of(document), success, unexpected, observed, trouble, shown)


def _trouble(exception_info: Any) -> str | None:
    # Only the kind of error: its message may show values.
    parts = [exception_info, *exception_info.values()] if isinstance(exception_info, dict) else []
    dicts = [part for part in parts if isinstance(part, dict)]
    texts = [str(part.get(name) or "") for part in dicts for name in _EXCEPTION_FIELDS]
    kinds = [kind for text in texts for kind in _KIND.findall(text)]
    if kinds:
        return str(kinds[-1])
    return "Great Expectations does not say why" if any(texts) else None


def _example(row: dict[str, Any], coordinates: Sequence[str]) -> dict[str, str]:
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
    # Great Expectations warns of its own deprecations, which nobody here can act on.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
