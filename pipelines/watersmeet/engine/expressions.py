"""Checks of SQL expressions of the configuration: one must say the same of a merge record in every
run.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import chain
from typing import Final

import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from watersmeet.core.sql_text import WORDS, impurities, is_fixed_time, is_moment, read_sql
from watersmeet.core.types import columns_ddl, ddl
from watersmeet.engine.session import create_rows
from watersmeet.errors import ConfigurationError, lines_of

_OF_THE_MOMENT = re.compile(
    r"\b(current_\w+|localtimestamp|session_user|user|now|variablereference)\("
)
"""Calls that Spark replaces by a value of the moment, or of its session, before it runs a query, as
its plans spell them.
"""
_CALLED_WORD = re.compile(rf"'({'|'.join(sorted(WORDS))})\(", re.IGNORECASE)
"""A call, as a parsed plan spells it, of a function that is named like a word of SQL. The word
itself has no such quote.
"""
_ID = re.compile(r"#\d+L?|(?<=\b_common_expr_)\d+")
_ENCRYPTION = re.compile(r"aes_encrypt\((?:[^()]|\([^()]*\))*, ECB, ")
_AS_TIME = re.compile(
    r" as (?:date|(?:[^()]|\([\d,]+\))*\btimestamp(?:_ntz)?\b(?:[^()]|\([\d,]+\))*)\)|, None, "
    r"(?:Some|Timestamp\w*)"
)
"""The end, in an analyzed or optimized plan, of what becomes a date or a time without a pattern."""
_TO_TIME = re.compile(r"\b(?:try_)?(?:cast|to_date|to_timestamp\w*)\(")
_HAS_COLUMN = re.compile(r"#\d")
"""A column, or the variable of a lambda, as a plan spells it."""
_NOT_TEXT = re.compile(
    r"(?:try_)?(?:cast\(.* as "
    r"(?:date|timestamp\w*|\w*int|decimal\([\d,]+\)|double)|to_(?:date|timestamp\w*)\(.*)\)"
    r"|[^()]+ [+-] make_interval\(.*\)"
)
"""What is no text, in spellings of plans that are not those of SQL."""
_READS_TEXTS = re.compile(r"\b(?=from_(?:csv|json|xml)\()")
_HIDES_CASTS = re.compile(r"\b(between|date_?part|decode|equal_null|extract|nullif|try_add)\(")
"""Functions whose casts are in the optimized plan alone, where a text without a column is a time
already.
"""


def expression_problem(
    spark: SparkSession, text: str, columns: pa.Schema, kinds: tuple[pa.DataType, ...]
) -> str | None:
    """Return what is wrong with an expression over these columns that must give one of `kinds`, in
    words; None where nothing is.
    """
    rows = _no_rows(spark, columns_ddl(columns))
    shown = " ".join(text.split())
    try:
        selected = rows.select(F.expr(text).alias("value"))
        # A condition may not look beyond its row: no aggregate, window or generator.
        rows.where(F.expr(text).isNotNull())
    except PySparkException as error:
        reason = next(iter(lines_of(error)), type(error).__name__)
        return f"`{shown}` is not SQL over silver's columns: {reason}"
    if _has_subquery(rows, text):
        return f"`{shown}` looks beyond the merge record, by a subquery"
    type_name = selected.schema[0].dataType.simpleString()
    if type_name not in [ddl(kind).lower() for kind in kinds]:
        return f"`{shown}` gives {type_name}"
    return None if (why := _impurity(rows, text)) is None else f"`{shown}` {why}"


def pure(rows: DataFrame, text: str) -> Column:
    """Return the column of an expression over these rows; the expression may be one of a lake's
    rules.

    Raises ConfigurationError for one that may give something else in every run: not everybody who
    may write to the lake's epochs may have other expressions evaluated.
    """
    key = rows.schema.simpleString(), text
    if key not in _known_as_pure:
        why = _impurity(_no_rows(rows.sparkSession, rows.schema), text)
        if why is not None:
            raise ConfigurationError(
                f"an expression of the lake's rules is not evaluated: `{text}` {why}"
            )
        _known_as_pure.add(key)
    return F.expr(text)


def _no_rows(spark: SparkSession, schema: StructType | str) -> DataFrame:
    """Return an empty DataFrame that the optimizer does not know to be empty: that of Spark Connect
    would leave nothing of an expression over it.
    """
    rows = create_rows(spark, [], schema)
    return rows.mapInArrow(lambda batches: batches, rows.schema)


_known_as_pure: set[tuple[str, str]] = set()
"""Pairs of columns and an expression."""

_IN_EVERY_RUN: Final = (
    "gives something else in every run, so a replay would not give the same messages"
)


def _impurity(rows: DataFrame, text: str) -> str | None:
    """Return why an expression over these rows, of which there are none, may give something else in
    another run; None where it may not.
    """
    if (impurity := next(impurities(text), None)) is not None:
        return f"gives something else in every run, or may: {impurity}"
    try:
        plans = [_plan_of(rows.select(F.expr(text).alias("value"))) for _ in range(2)]
    except PySparkException as error:
        return f"is not SQL over these columns: {next(iter(lines_of(error)), type(error).__name__)}"
    if (
        not _is_deterministic(rows, text)
        or _OF_THE_MOMENT.search(plans[0])
        or len({_ID.sub("", p) for p in plans}) > 1
    ):
        return _IN_EVERY_RUN
    parsed, _, more = plans[0].partition("== Analyzed")
    if word := _CALLED_WORD.search(parsed):
        return f"{_IN_EVERY_RUN}, or may: `{word[1]}` is no function of Spark's own"
    analyzed, _, optimized = more.partition("== Physical")[0].partition("== Optimized")
    if len(_ENCRYPTION.findall(analyzed)) < analyzed.count("aes_encrypt("):
        return f"{_IN_EVERY_RUN}: `aes_encrypt` is random in every mode but ECB"
    moments = _moments(rows, analyzed)
    if _HIDES_CASTS.search(analyzed):
        hidden = (
            f"`{constant}` is taken for another time in each"
            for constant, _ in read_sql(text).texts
            if is_moment(constant)
        )
        moments = chain(moments, _moments(rows, optimized), hidden)
    return None if (moment := next(moments, None)) is None else f"{_IN_EVERY_RUN}: {moment}"


def _moments(rows: DataFrame, plan: str) -> Iterator[str]:
    """Yield, in words, what becomes a date or a time in a plan and may be another one in each run.

    Spark evaluates what has no column in it when it plans, and knows `now` and `today` then: it
    must be written out. A text of a record that has no date gets today's where no pattern reads it.
    (Spark does not take such a text for a date, or for a time without a zone.)
    """
    for end in _AS_TIME.finditer(plan):
        begins = [begin.end() for begin in _TO_TIME.finditer(plan, 0, end.start())]
        sources = (plan[begin : end.start()] for begin in reversed(begins))
        source = next((text for text in sources if text.count("(") == text.count(")")), "")
        is_zoned = re.search(r"\btimestamp(type)?\b", end[0], re.IGNORECASE) is not None
        if source and not _HAS_COLUMN.search(source):
            if not is_fixed_time(source):
                yield f"`{source}` is taken for another time in each"
        elif is_zoned and _may_be_text(rows, source):
            yield (
                f"a text without a date in `{_ID.sub('', source)}` would be today's; "
                "give a pattern, as in `to_timestamp(text, 'yyyy-MM-dd HH:mm:ss')`"
            )
    for call in _READS_TEXTS.split(plan)[1:]:
        has_pattern = (
            "(timestampformat," in call.lower() and "datetimeparsingfallback" not in call.lower()
        )
        if ("TimestampType" in call and not has_pattern) or (
            "VariantType" in call and not call.startswith("from_json")
        ):
            name = call.partition("(")[0]
            yield (
                f"`{name}` takes a text without a date for today's; read it as STRING, or give "
                "`timestampFormat`"
            )
    if re.search(r", TimestampType, (true|false),", plan):
        yield (
            "`variant_get` takes a text without a date for today's; get it as STRING, and give a "
            "pattern to `to_timestamp`"
        )


def _may_be_text(rows: DataFrame, source: str) -> bool:
    """Return True where a part of a plan may be a text, or have one in it: unless Spark reads its
    spelling as SQL, and gives it another type.
    """
    if _NOT_TEXT.fullmatch(source):
        return False
    try:
        kind = rows.select(F.expr(_ID.sub("", source))).schema[0].dataType.simpleString()
    except PySparkException:
        return True
    return "string" in kind or "variant" in kind


def _is_deterministic(rows: DataFrame, text: str) -> bool:
    """Return True where Spark calls an expression deterministic: it refuses a condition of a join
    that is not.
    """
    try:
        rows.alias("one").join(
            rows.sparkSession.range(1).select(F.lit(1).alias("_other")), F.expr(text).isNotNull()
        )
    except AnalysisException:
        return False
    return True


_SUBQUERY: Final = "UNSUPPORTED_SUBQUERY_EXPRESSION_CATEGORY.HIGHER_ORDER_FUNCTION"


def _has_subquery(rows: DataFrame, text: str) -> bool:
    """Return True where an expression that can be used has a subquery, which Spark takes everywhere
    but in the function of an array.
    """
    try:
        rows.select(F.transform(F.array(F.lit(0)), lambda _: F.expr(text)))
    except AnalysisException as error:
        return error.getCondition() == _SUBQUERY
    return False


def _plan_of(rows: object) -> str:
    """Return the plan as Spark explains it; Spark only prints it."""
    output = io.StringIO()
    with redirect_stdout(output):
        rows.explain("extended")  # type: ignore[attr-defined]
    return output.getvalue()
