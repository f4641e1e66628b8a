"""Checks of whether a configuration can run: of its options, schemas, expressions, topics and
tables.

All of them are looked at, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa

from watersmeet.audit.doubts import (
    check_sample,
    doubtful_topics,
    local_times_twice,
    unmet_in_lake,
)
from watersmeet.audit.problems import as_problem, as_problems
from watersmeet.core.inputs import InputId
from watersmeet.core.types import ddl, widened
from watersmeet.errors import ConfigurationError, Problem, WatersmeetError
from watersmeet.expressions.publish import Expressions
from watersmeet.kafka.cluster import (
    Cluster,
    co_partitioned,
    copy_settings,
    sink_settings,
    topics_of,
    unpartitioned,
    written_topics,
)
from watersmeet.kafka.options import check_options
from watersmeet.kafka.registry import Registry
from watersmeet.lake import tables
from watersmeet.lake.features import check_features, touched
from watersmeet.lake.history import read_history
from watersmeet.lake.identity import (
    check_layout,
    check_rules,
    differences,
    may_begin_anew,
)
from watersmeet.lake.location import Lake
from watersmeet.lake.restored import (
    check_not_behind,
    check_not_deleted,
    check_not_restored,
)
from watersmeet.lake.store import check_writable
from watersmeet.lake.table_reader import TableReader
from watersmeet.running.generations import preview
from watersmeet.running.next_offsets import NextOffsets, read_facts
from watersmeet.settings import Settings


def check_kafka(settings: Settings) -> list[Problem]:
    """Return problems with Kafka.

    librdkafka must take the options. Topics must be reachable and co-partitioned, and the sink must
    fit where it exists.
    """
    if wrong := check_options(settings.kafka):
        return wrong
    cluster = Cluster(settings.kafka)
    problems: list[Problem] = []
    try:
        counts = cluster.partition_counts(topics_of(settings))
        origins = {
            name: (kept.from_topics, cluster.partition_counts(kept.from_topics))
            for name, kept in settings.repartitioned.items()
        }
        problems += [
            Problem(
                f"there is no topic {topic}",
                f"sources.{name}.repartition.from",
                "create it, or name the topic that has the records",
            )
            for name, (topics, existing) in origins.items()
            for topic in topics
            if topic not in existing
        ]
        problems += [error.problem for error in unpartitioned(settings, counts)]
        cluster.check_transactions()
        required: list[tuple[str, str, Mapping[str, str]]] = []
        for name, (topics, existing) in origins.items():
            [topic] = settings.sources[name].topics
            if topic in counts and existing.keys() >= set(topics):
                required.append((f"sources.{name}.topic", topic, copy_settings(cluster, topics)))
        for name, topic in written_topics(settings).items():
            # Gold creates a missing one with these settings.
            if topic in counts and topic in settings.publish.sequence_topics:
                required.append((f"publish.{name}", topic, sink_settings(settings)))
            elif topic in counts and counts.keys() >= set(settings.topics):
                copied = copy_settings(cluster, settings.topics)
                required.append((f"publish.{name}", topic, copied))
        for where, topic, needed in required:
            problems += _unfit_settings(where, topic, needed, cluster.topic_settings(topic))
    except WatersmeetError as error:
        problems.append(as_problem(error, "kafka"))
    return problems


def doubtful(
    settings: Settings, lake: Lake, reader: TableReader, *, with_kafka: bool
) -> list[Problem]:
    """Return what breaks no rule and still matters: of the topics of sources, where Kafka can be
    asked, and of the lake's tables.

    What cannot be read is left out: that is a problem of the other checks.
    """
    problems: list[Problem] = []
    of_topics = [partial(doubtful_topics, settings)] if with_kafka else []
    for doubts in (*of_topics, partial(touched, reader, lake)):
        with suppress(WatersmeetError):
            problems += doubts()
    return problems


def check_keys(settings: Settings, reader: TableReader) -> tuple[list[Problem], list[Problem]]:
    """Check, as far as the last records say, that a key is in one partition of all sources.

    This is for a configuration that fits Kafka. Returns the problems, and then what looks wrong but
    may be meant: keys that never meet, event times decades from Kafka's timestamps, and local times
    that are there twice.

    Where the lake's rules have changed, what bronze has is left to `verify`: it may have been read
    by other rules.
    """
    try:
        partitions = co_partitioned(
            settings, Cluster(settings.kafka).partition_counts(topics_of(settings))
        )
        has_changed = len(read_history(reader, settings).epochs) > 1
        reading = NextOffsets(reader, settings, partitions)

        def since(input_id: InputId) -> Mapping[int, int]:
            return reading.of(input_id) if has_changed else {}

        unmet = partial(unmet_in_lake, reader, settings)
        problems, doubts = check_sample(settings, partitions, since, unmet)
        return problems, [*doubts, *local_times_twice(settings)]
    except WatersmeetError as error:
        return [as_problem(error, "kafka")], []


def _unfit_settings(
    where: str, topic: str, required: Mapping[str, str], actual: Mapping[str, str]
) -> Iterator[Problem]:
    # Only differences that lose or refuse messages count.
    at_least = {
        "message.timestamp.after.max.ms",
        "message.timestamp.before.max.ms",
        "max.message.bytes",
    }
    for name, value in required.items():
        has = actual.get(name, value)
        if has == value or (name in at_least and int(has) >= int(value)):
            continue
        fix = f"set {name} to {value}{' or more' if name in at_least else ''} on {topic}"
        if (where, name) == ("publish.topic", "max.message.bytes"):
            fix += "; or, where it cannot be set, make publish.max_bytes as much smaller"
        yield Problem(f"{topic} has {name}={has}", where, fix)


def check_schemas(settings: Settings) -> list[Problem]:
    """Return a problem for each schema that cannot be the type of a column.

    The column has the fields of all schemas that the lake has had.
    """
    problems = []
    for name, source in settings.sources.items():
        where = f"sources.{name}.schema"
        try:
            _ = source.value_type
            problems += [
                Problem(
                    f"field `{field}` differs from `{other}`, which the lake has had, only in "
                    "case, which columns do not",
                    where,
                    "spell it as it was, or use another name",
                )
                for field, other in source.clashing_fields()
            ]
        except ConfigurationError as error:
            problems.append(as_problem(error, where))
        except ValueError as error:  # the schema gives a field another type than an earlier one did
            fix = "keep the type that the field had, or use another name"
            problems.append(Problem(str(error), where, fix))
    return problems


def check_registries(settings: Settings) -> list[Problem]:
    """Return a problem for each schema registry that does not answer."""
    problems = []
    for name, registry in settings.registries.items():
        try:
            Registry(registry).check()
        except WatersmeetError as error:
            problems.append(as_problem(error, f"sources.{name}.registry"))
    return problems


def check_expressions(settings: Settings) -> list[Problem]:
    """Check that `valid` is a predicate and `value` a message over a merge record's content.

    Both must say the same in every run. Returns the problems.
    """
    return Expressions.of(settings).problems(tables.layout(settings)[tables.SILVER].schema)


def check_lake(
    lake: Lake,
    reader: TableReader,
    settings: Settings,
    *,
    with_kafka: bool,
) -> tuple[list[Problem], list[dict[str, Any]]]:
    """Check expressions and tables, and whether the lake was begun with this configuration.

    The latter only where Kafka can be asked. Returns the problems, and where reading would go on:
    source, partition, from_offset, until_offset, because.
    """
    problems = _check_tables(lake, reader, settings)
    if problems or not with_kafka:
        return problems, []
    try:
        counts = Cluster(settings.kafka).partition_counts(topics_of(settings))
        partitions = co_partitioned(settings, counts)
        facts, moved = read_facts(reader, settings, partitions)
        unmoved = {field: fact for field, fact in facts.items() if field not in moved}
        problems = differences(reader, unmoved)
        if not may_begin_anew(reader, epochs := read_history(reader, settings).epochs, settings):
            check_rules(epochs, settings)
        return problems, [] if problems else preview(reader, settings, partitions)
    except WatersmeetError as error:
        return [as_problem(error, "kafka.start")], []


def _check_tables(lake: Lake, reader: TableReader, settings: Settings) -> list[Problem]:
    problems: list[Problem] = []
    try:
        check_writable(lake)
        if lake.is_catalog:
            from watersmeet.engine.catalog import check_catalog  # imports Spark
            from watersmeet.engine.session import spark_session

            check_catalog(spark_session(settings.spark), lake)
        problems += check_expressions(settings)
        check_layout(reader, lake)  # what else is wrong with another lake's tables says nothing
    except WatersmeetError as error:
        return [*problems, as_problem(error, "lake")]
    lake_problems: list[Problem] = []
    for check in (
        partial(check_features, reader, lake),
        partial(check_not_restored, reader, lake),
        partial(check_not_deleted, reader, settings),
        partial(check_not_behind, reader, settings),
    ):
        try:
            check()
        except WatersmeetError as error:
            lake_problems += as_problems(error, "lake")
    if not lake_problems:
        lake_settings = read_history(reader, settings).epochs.current.settings.under(
            settings.rules()
        )
        problems += check_schemas(lake_settings) or check_tables(Lake(lake_settings), reader)
    return [*problems, *dict.fromkeys(lake_problems)]


def check_tables(lake: Lake, reader: TableReader) -> list[Problem]:
    """Return a problem for each needed column that an existing table lacks or has in another type.

    A column that fits once fields are added is no problem.
    """
    problems = []
    for name, table in lake.layout.items():
        existing = reader.columns(name) if reader.exists(name) else table.schema
        for field in table.schema:
            is_there = field.name in existing.names
            if is_there and _becomes(existing.field(field.name).type, field.type):
                continue
            has = ddl(existing.field(field.name).type) if is_there else "missing"
            what = f"{name}.{field.name} is {has}, and this configuration needs {ddl(field.type)}"
            fix = "use another lake for this configuration"
            problems.append(Problem(what, lake.address(name), fix))
    return problems


def _becomes(before: pa.DataType, needed: pa.DataType) -> bool:
    try:
        return ddl(widened(before, needed)) == ddl(needed)
    except ValueError:
        return False
