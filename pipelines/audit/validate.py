"""Whether a configuration can run: its schemas, expressions, topics and tables, all looked at, nothing changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, BooleanType, StringType

from pipelines import tables
from pipelines.adapters.kafka import Cluster, co_partitioned, sink_settings, spark_options
from pipelines.adapters.lake import Lake
from pipelines.beginning import Beginning
from pipelines.errors import ConfigurationError, KafkaUnreachableError, WatersmeetError
from pipelines.identity import differences, identity
from pipelines.settings import Settings
from pipelines.transforms.message import message_value


class Problem(NamedTuple):
    """What is wrong, where, and what would mend it."""

    what: str
    where: str
    fix: str


def check_kafka(settings: Settings) -> list[Problem]:
    """Topics are reachable, co-partitioned, and the sink, where it exists, fits."""
    try:
        spark_options(settings.kafka)
        counts = Cluster(settings.kafka).partition_counts()
        co_partitioned(settings, counts)
    except (ConfigurationError, KafkaUnreachableError) as error:
        return [_as_problem(error, "kafka")]
    if settings.publish.topic not in counts:
        return []  # gold creates it as it must be
    return list(_unfit_settings(settings, Cluster(settings.kafka).topic_settings(settings.publish.topic)))


def _unfit_settings(settings: Settings, found: dict[str, str]) -> Iterator[Problem]:
    """Where an existing sink differs from what gold would have made, in a way that loses or refuses messages."""
    wanted = sink_settings(settings)
    at_least = {"message.timestamp.after.max.ms", "message.timestamp.before.max.ms", "max.message.bytes"}
    for name, value in wanted.items():
        has = found.get(name, value)
        if name in at_least and int(has) >= int(value):
            continue
        if name not in at_least and has == value:
            continue
        fix = f"set {name} to {value}{' or more' if name in at_least else ''} on {settings.publish.topic}"
        yield Problem(f"{settings.publish.topic} has {name}={has}", "publish.topic", fix)


def check_schemas(settings: Settings) -> list[Problem]:
    """Every schema can be the type of a column."""
    problems = []
    for name, source in settings.sources.items():
        try:
            _ = source.value_type
        except ConfigurationError as error:
            problems.append(_as_problem(error, f"sources.{name}.schema"))
    return problems


def check_expressions(spark: SparkSession, lake: Lake, settings: Settings) -> list[Problem]:
    """`valid` is a predicate and `value` a message over a merge record's content, and both say the same in every run."""
    silver = spark.createDataFrame([], lake.schema(tables.SILVER)).drop("valid", "invalid_reason", "batch")
    publish, sources = settings.publish, list(settings.sources)
    problems = _check_expression(
        silver, "publish.valid", publish.valid, lambda: F.expr(publish.valid), (BooleanType,), "a boolean"
    )
    if publish.value is not None:
        problems += _check_expression(
            silver,
            "publish.value",
            publish.value,
            lambda: message_value(silver.schema, publish, sources),
            (StringType, BinaryType),
            "a string or binary",
        )
    return problems


_OF_THE_MOMENT = re.compile(r"\b(current_\w+|localtimestamp|session_user|user|now)\(")
"""What Spark replaces by a value of the moment before it runs a query, and so calls deterministic, as its plans spell it."""


def _check_expression(
    silver: DataFrame, where: str, text: str, expression: Callable[[], Column], types: tuple[type, ...], kind: str
) -> list[Problem]:
    fix = f"use only the columns {', '.join(silver.columns)}"
    try:
        selected = silver.select(expression())
        silver.where(expression().isNotNull())  # a condition may not look beyond its row: no aggregate, window or generator
    except PySparkException as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return [Problem(f"`{text}` is not SQL over silver's columns: {reason}", where, fix)]
    found = selected.schema[0].dataType
    if not isinstance(found, types):
        return [Problem(f"`{text}` gives {found.simpleString()}", where, f"write an expression that gives {kind}")]
    plan = selected._jdf.queryExecution().analyzed()
    if not plan.deterministic() or _OF_THE_MOMENT.search(plan.toString()):
        what = f"`{text}` gives something else in every run, so a replay would not give the same messages"
        return [Problem(what, where, fix)]
    return []


def check_with_spark(lake: Lake, settings: Settings, *, with_kafka: bool) -> tuple[list[Problem], list[dict[str, Any]]]:
    """Expressions, tables, and, where Kafka can be asked, whether the lake was begun with this configuration and where reading
    would go on; the second answer is that: source, partition, from_offset, until_offset, because.
    """
    problems = check_expressions(lake.spark, lake, settings) + check_tables(lake, settings)
    if problems or not with_kafka:
        return problems, []
    partitions = co_partitioned(settings, Cluster(settings.kafka).partition_counts())
    problems = [
        _as_problem(ConfigurationError(text), "configuration") for text in differences(lake, identity(settings, partitions))
    ]
    if problems:
        return problems, []
    try:
        return [], Beginning(lake, settings, partitions).preview()
    except WatersmeetError as error:
        return [_as_problem(error, "kafka.start")], []


def check_tables(lake: Lake, settings: Settings) -> list[Problem]:
    """Tables that exist have the columns that this configuration needs."""
    problems = []
    for name, table in tables.layout(settings).items():
        if not lake.exists(name):
            continue
        found = {field.name: field.dataType.simpleString() for field in lake.stored_schema(name)}
        for field in lake.schema(name):
            wanted = field.dataType.simpleString()
            if found.get(field.name) != wanted:
                what = f"{name}.{field.name} is {found.get(field.name, 'missing')}, and this configuration needs {wanted}"
                problems.append(Problem(what, lake.identifier(table.name), "use another lake for this configuration"))
    return problems


def _as_problem(error: Exception, where: str) -> Problem:
    """The errors' sentences say where, after a colon what is wrong, and after a semicolon what would be right."""
    what, _, fix = str(error).rpartition("; ")
    place = re.match(r"([a-z_]+(?:\.[a-z0-9_]+)*): ", what)
    return Problem(what.removeprefix(place[0]) if place else what or str(error), place[1] if place else where, fix)
