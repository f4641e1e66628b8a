"""Whether an SQL expression of the configuration can be used: it must say the same of a merge record in every run."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import Final

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipelines.core.types import columns_ddl, ddl
from pipelines.errors import lines_of

_OF_THE_MOMENT = re.compile(r"\b(current_\w+|localtimestamp|session_user|user|now)\(")
"""What Spark replaces by a value of the moment before it runs a query, and so calls deterministic, as its plans spell it."""


def expression_problem(spark: SparkSession, text: str, columns: pa.Schema, kinds: tuple[pa.DataType, ...]) -> str | None:
    """What is wrong with an expression over these columns that must give one of `kinds`, in words; None where nothing is."""
    rows = spark.createDataFrame([], columns_ddl(columns))
    try:
        selected = rows.select(F.expr(text).alias("value"))
        rows.where(F.expr(text).isNotNull())  # a condition may not look beyond its row: no aggregate, window or generator
    except PySparkException as error:
        reason = next(iter(lines_of(error)), type(error).__name__)
        return f"`{text}` is not SQL over silver's columns: {reason}"
    if _has_subquery(rows, text):
        return f"`{text}` looks beyond the merge record, by a subquery"
    found = selected.schema[0].dataType.simpleString()
    if found not in [ddl(kind).lower() for kind in kinds]:
        return f"`{text}` gives {found}"
    try:
        # Spark takes no condition of a join that is not deterministic.
        rows.alias("one").join(spark.range(1).select(F.lit(1).alias("_other")), F.expr(text).isNotNull())
        is_fixed = not _OF_THE_MOMENT.search(_plan_of(selected))
    except AnalysisException:
        is_fixed = False
    return None if is_fixed else f"`{text}` gives something else in every run, so a replay would not give the same messages"


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
