"""`validate` says everything at once, and warns of what others have done to topics and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.audit.inputs import case_of, settings_of
from tests.support.cases import keyed
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake, write_configuration
from tests.support.quality import suite_file
from tests.support.topics import create_topics
from watersmeet.audit.validate import check_kafka, doubtful
from watersmeet.cli import _find_problems
from watersmeet.engine.choice import open_engine
from watersmeet.errors import ConfigurationError, Problem
from watersmeet.lake import tables
from watersmeet.lake.features import check_features, interval_ms, touched
from watersmeet.lake.location import Lake
from watersmeet.settings import Settings


@pytest.fixture
def lake(tmp_path: Path) -> CaseLake:
    settings = settings_for(tmp_path)
    lake = CaseLake(open_engine(settings), settings, {0: case_of([keyed("a", 1)], [keyed("a", 2)])})
    lake.arrive()
    lake.merge()
    return lake


def altered(lake: CaseLake, table: str, properties: Mapping[str, str]) -> list[Problem]:
    """What is said of a table once somebody has set these properties."""
    assert list(touched(lake.reader, lake.engine.lake)) == []
    DeltaTable(lake.engine.lake.address(table)).alter.set_table_properties({**properties})
    return list(touched(lake.reader, lake.engine.lake))


def test_all_missing_topics_are_named_and_what_else_is_wrong_with_the_others(
    kafka: str, tmp_path: Path
) -> None:
    topics = {"sources__tracking__topic": "all-tracking", "sources__orders__topic": "all-orders"}
    settings = settings_for(tmp_path, bootstrap=kafka, publish__topic="all-merged", **topics)
    create_topics(kafka, "all-merged", partitions=1, **{"retention.ms": "1000"})
    problems = check_kafka(settings)
    assert [problem.where for problem in problems][:2] == [
        "sources.tracking.topic",
        "sources.orders.topic",
    ]
    assert any("all-merged has retention.ms=1000" in problem.what for problem in problems)


def test_every_wrong_field_is_named_at_once_and_each_once(tmp_path: Path) -> None:
    file = write_configuration(settings_for(tmp_path), tmp_path)
    text = file.read_text().replace("timeout: 100ms", "timeout: soon")
    file.write_text(
        text.replace("topic: merged", "topic: merged\n  max_bytes: many\n  delivery: perhaps")
    )
    problems, warnings, preview = _find_problems(file)
    assert (warnings, preview) == ([], [])
    for field in ("merge.timeout", "publish.delivery", "publish.max_bytes"):
        assert sum(field in problem.what for problem in problems) == 1, problems
    assert all(problem.where == str(file) and problem.fix for problem in problems)


def test_a_compacted_source_is_a_warning(kafka: str, tmp_path: Path) -> None:
    create_topics(kafka, "compacted_orders", partitions=1, **{"cleanup.policy": "compact,delete"})
    create_topics(kafka, "compacted_tracking", partitions=1)
    settings = settings_of(kafka, tmp_path, "compacted")
    reader = open_engine(settings).reader
    found = doubtful(settings, Lake(settings), reader, with_kafka=True)
    [warning] = [problem for problem in found if "compacted" in problem.what]
    assert warning.where == "sources.orders.topic"
    assert "cleanup.policy=compact,delete" in warning.what
    assert check_kafka(settings) == [], "a run goes on"


def test_a_constraint_that_somebody_has_added_is_a_warning(lake: CaseLake) -> None:
    DeltaTable(lake.engine.lake.address(tables.SILVER)).alter.add_constraint(
        {"early": "partition < 3"}
    )
    [problem] = touched(lake.reader, lake.engine.lake)
    assert "silver has the constraint early, `partition < 3`" in problem.what
    assert "/silver` DROP CONSTRAINT early" in problem.fix
    check_features(lake.reader, lake.engine.lake)


@pytest.mark.parametrize(
    ("table", "key", "value", "is_said"),
    [
        (tables.PUBLISHED, "delta.appendOnly", "true", True),
        (tables.PUBLISHED, "delta.appendOnly", "false", False),
        (tables.bronze("orders"), "delta.enableChangeDataFeed", "true", True),
        (tables.SILVER, "delta.deletedFileRetentionDuration", "interval 1 hours", True),
        (tables.SILVER, "delta.deletedFileRetentionDuration", "interval 1 weeks", False),
        (tables.SILVER, "delta.deletedFileRetentionDuration", "interval 30 days", False),
        (tables.PUBLISHED, "delta.logRetentionDuration", "interval 6 days 23 hours", True),
        (tables.SILVER, "delta.targetFileSize", "1000000", False),
    ],
)
def test_a_property_that_matters_is_a_warning_and_others_may_stay(
    lake: CaseLake, table: str, key: str, value: str, is_said: bool
) -> None:
    problems = altered(lake, table, {key: value})
    assert len(problems) == is_said
    assert all(f"{table} has {key}={value}" in problem.what for problem in problems)
    check_features(lake.reader, lake.engine.lake)


def test_silver_that_nobody_may_change_is_refused(lake: CaseLake) -> None:
    altered(lake, tables.SILVER, {"delta.appendOnly": "true"})
    with pytest.raises(ConfigurationError, match=r"silver has delta\.appendOnly=true"):
        check_features(lake.reader, lake.engine.lake)


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("interval 1 week", 604_800_000),
        ("interval 604800000 milliseconds", 604_800_000),
        ("2 days 1 hour", 176_400_000),
        ("INTERVAL 90 MINUTES", 5_400_000),
        ("soon", None),
    ],
)
def test_an_interval_is_read_as_delta_writes_it(text: str, ms: int | None) -> None:
    assert interval_ms(text) == ms


def test_what_is_wrong_in_independent_parts_is_said_together_with_warnings(
    kafka: str, lake: CaseLake, tmp_path: Path
) -> None:
    """Topics that are missing, a suite about a column that is not there, and a constraint."""
    DeltaTable(lake.engine.lake.address(tables.SILVER)).alter.add_constraint({"early": "batch < 3"})
    file = write_configuration(nowhere(lake.settings, kafka), tmp_path)
    about = [
        {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": column}}
        for column in ("colour", "merge_key", "tracking_parts")
    ]
    suite = suite_file(tmp_path, "mine", None, *about)
    file.write_text(file.read_text() + f"quality: {json.dumps({'suites': [suite]})}\n")
    problems, warnings, _ = _find_problems(file)
    said = [f"{problem.where}: {problem.what}" for problem in problems]
    assert sum("there is no topic" in sentence for sentence in said) == 2
    missing = "silver has no column `colour`"
    assert f"quality.suites: {suite}: expectations[0]: {missing}" in said
    assert len(said) == 3
    assert any("has the constraint early" in warning.what for warning in warnings)


def nowhere(settings: Settings, kafka: str) -> Settings:
    """The configuration with topics that a broker does not have."""
    sources = {
        name: source.model_copy(update={"topic": f"nowhere-{name}"})
        for name, source in settings.sources.items()
    }
    broker = settings.kafka.model_copy(update={"bootstrap_servers": kafka})
    return settings.model_copy(update={"kafka": broker, "sources": sources})
