"""Whether an SQL expression of the configuration can be used: it must say the same of a merge record in every run."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Final

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from pipelines.core.sql_text import impurities, is_fixed_time
from pipelines.core.types import columns_ddl, ddl
from pipelines.errors import ConfigurationError, lines_of

_OF_THE_MOMENT = re.compile(r"\b(current_\w+|localtimestamp|session_user|user|now)\(")
"""What Spark replaces by a value of the moment before it runs a query, and so calls deterministic, as its plans spell it."""
_ID = re.compile(r"#\d+L?")
_ENCRYPTION = re.compile(r"aes_encrypt\((?:[^()]|\([^()]*\))*, ECB, ")
_TO_TIME = re.compile(r"\b(?:try_)?(cast|to_date|to_timestamp\w*|(?:to_)?unix_timestamp)\(")
_HAS_COLUMN = re.compile(r"#\d")
"""How an analyzed plan spells that something becomes a date or a time, and a column or the variable of a lambda."""


def expression_problem(spark: SparkSession, text: str, columns: pa.Schema, kinds: tuple[pa.DataType, ...]) -> str | None:
    """What is wrong with an expression over these columns that must give one of `kinds`, in words; None where nothing is."""
    rows, shown = spark.createDataFrame([], columns_ddl(columns)), " ".join(text.split())
    try:
        selected = rows.select(F.expr(text).alias("value"))
        rows.where(F.expr(text).isNotNull())  # a condition may not look beyond its row: no aggregate, window or generator
    except PySparkException as error:
        reason = next(iter(lines_of(error)), type(error).__name__)
        return f"`{shown}` is not SQL over silver's columns: {reason}"
    if _has_subquery(rows, text):
        return f"`{shown}` looks beyond the merge record, by a subquery"
    found = selected.schema[0].dataType.simpleString()
    if found not in [ddl(kind).lower() for kind in kinds]:
        return f"`{shown}` gives {found}"
    return None if (why := _impurity(rows, text)) is None else f"`{shown}` {why}"


def pure(rows: DataFrame, text: str) -> Column:
    """The column of an expression, of a lake's rules perhaps, over these rows. Raises ConfigurationError for one that may give
    something else in every run: whoever may write to the lake's epochs is not trusted to evaluate anything else.
    """
    known = rows.schema.simpleString(), text
    if known not in _known_as_pure:
        why = _impurity(rows.sparkSession.createDataFrame([], rows.schema), text)
        if why is not None:
            raise ConfigurationError(f"an expression of the lake's rules is not evaluated: `{text}` {why}")
        _known_as_pure.add(known)
    return F.expr(text)


_known_as_pure: set[tuple[str, str]] = set()
"""Columns and expressions."""

_IN_EVERY_RUN: Final = "gives something else in every run, so a replay would not give the same messages"


def _impurity(rows: DataFrame, text: str) -> str | None:
    """Why an expression over these rows, of which there are none, may give something else in another run."""
    if (found := next(impurities(text), None)) is not None:
        return f"gives something else in every run, or may: {found}"
    try:
        plans = [_plan_of(rows.select(F.expr(text).alias("value"))) for _ in range(2)]
    except PySparkException as error:
        return f"is not SQL over these columns: {next(iter(lines_of(error)), type(error).__name__)}"
    if not _is_deterministic(rows, text) or _OF_THE_MOMENT.search(plans[0]) or len({_ID.sub("", p) for p in plans}) > 1:
        return _IN_EVERY_RUN
    analyzed = plans[0].partition("== Analyzed")[2].partition("== Optimized")[0]
    if len(_ENCRYPTION.findall(analyzed)) < analyzed.count("aes_encrypt("):
        return f"{_IN_EVERY_RUN}: `aes_encrypt` is random in every mode but ECB"
    if (moment := next(_moments(analyzed), None)) is not None:
        return f"{_IN_EVERY_RUN}: {moment} is taken for another time in each"
    return None


def _moments(analyzed: str) -> Iterator[str]:
    """Yield what is a date or a time in an analyzed plan although it has no column in it, and is none written out: Spark works
    it out when it plans, and knows `now` and `today` then.
    """
    for match in _TO_TIME.finditer(analyzed):
        depth, end = 1, match.end()
        while depth and end < len(analyzed):
            depth += {"(": 1, ")": -1}.get(analyzed[end], 0)
            end += 1
        inside = analyzed[match.end() : end - 1]
        source, _, kind = inside.rpartition(" as ") if match[1] == "cast" else (inside.partition(",")[0], "", "date")
        if kind.startswith(("date", "timestamp")) and not _HAS_COLUMN.search(source) and not is_fixed_time(source):
            yield f"`{source}`"


def _is_deterministic(rows: DataFrame, text: str) -> bool:
    """Whether Spark calls an expression deterministic: it takes no condition of a join that is not."""
    try:
        rows.alias("one").join(rows.sparkSession.range(1).select(F.lit(1).alias("_other")), F.expr(text).isNotNull())
    except AnalysisException:
        return False
    return True


_SUBQUERY: Final = "UNSUPPORTED_SUBQUERY_EXPRESSION_CATEGORY.HIGHER_ORDER_FUNCTION"


def _has_subquery(rows: DataFrame, text: str) -> bool:
    """Whether an expression that can be used has a subquery, which Spark takes everywhere but in the function of an array."""
    try:
        rows.select(F.transform(F.array(F.lit(0)), lambda _: F.expr(text)))
    except AnalysisException as error:
        return error.getCondition() == _SUBQUERY
    return False


def _plan_of(rows: object) -> str:
    """The plan as Spark explains it, which is printed only."""
    said = io.StringIO()
    with redirect_stdout(said):
        rows.explain("extended")  # type: ignore[attr-defined]
    return said.getvalue()
