"""Suites of the user: which files are suites, and what is said of those that are none."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.configurations import settings_for
from tests.support.quality import QualityLake, expected, suite_file
from watersmeet.dev.init import write_example
from watersmeet.errors import ConfigurationError, WatersmeetError
from watersmeet.quality.rows import check_suites
from watersmeet.quality.suites import PROMISES, read_suites
from watersmeet.settings import load_settings

NOT_NULL = expected("expect_column_values_to_not_be_null", "partition is there", column="partition")


def test_a_suite_is_about_the_table_in_its_meta_and_without_one_about_silver(
    tmp_path: Path,
) -> None:
    named = [
        suite_file(tmp_path, name, table, NOT_NULL)
        for name, table in (("one", None), ("two", "bronze"), ("three", "sink"))
    ]
    suites = read_suites(settings_for(tmp_path, quality={"suites": named}))
    assert [(suite.name, suite.table) for suite in suites if suite.name not in PROMISES] == [
        ("one", "silver"),
        ("two", "bronze_tracking"),
        ("two", "bronze_orders"),
        ("three", "sink"),
    ]


SUITE: dict[str, Any] = {"name": "mine", "meta": {"table": "silver"}, "expectations": [NOT_NULL]}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "is not JSON (Expecting property name"),
        ("[" * 100_000, "is not JSON (maximum recursion depth exceeded"),
        (json.dumps({**SUITE, "name": "\ud800"}), "is not JSON ('utf-8' codec can't encode"),
        ("[]", "is not a JSON object; write a suite"),
        (json.dumps({**SUITE, "name": " "}), "name: is missing or no text; give the suite a name"),
        (
            json.dumps({**SUITE, "expectations": []}),
            "expectations: is missing or empty; list one or more",
        ),
        (
            json.dumps({**SUITE, "expectations": [{"type": "x"}]}),
            "expectations[0]: is no expectation; write an object",
        ),
        (json.dumps({**SUITE, "meta": []}), None),
        (json.dumps({**SUITE, "meta": ["silver"]}), "meta: is no object; name the table in it"),
        (
            json.dumps({**SUITE, "meta": {"table": "sliver"}}),
            "meta.table: `sliver` is no table that is checked; did you",
        ),
        (
            json.dumps({**SUITE, "name": "silver_promises"}),
            "name: there are two suites called `silver_promises`; give each",
        ),
    ],
)
def test_a_file_that_is_no_suite_is_named_with_what_is_wrong_and_where(
    tmp_path: Path, text: str, fault: str | None
) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    settings = settings_for(tmp_path, quality={"suites": [str(file)]})
    if fault is None:
        assert read_suites(settings)[-1].table == "silver"
        return
    with pytest.raises(ConfigurationError) as refused:
        read_suites(settings)
    assert str(refused.value).startswith(f"{file}: {fault}")
    assert "\n" not in str(refused.value)
    [problem] = check_suites(settings)
    assert problem.where == "quality.suites"
    assert all(problem)


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        (
            {"type": "expect_columns_to_sing", "kwargs": {}},
            "expect_columns_to_sing not found",
        ),
        (
            {"type": "expect_column_values_to_be_in_set", "kwargs": {"column": "status"}},
            "value_set",
        ),
        ({"type": "expect_column_to_exist", "kwargs": {"column": "a"}, "colour": "red"}, "colour"),
        (
            {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "a", "mostly": 3}},
            "mostly",
        ),
    ],
)
def test_an_expectation_that_great_expectations_does_not_take_is_named(
    tmp_path: Path, wrong: dict[str, Any], fault: str
) -> None:
    file = suite_file(tmp_path, "mine", None, NOT_NULL, wrong)
    suite = read_suites(settings_for(tmp_path, quality={"suites": [file]}))[-1]
    with pytest.raises(ConfigurationError) as refused:
        _ = suite.expectations
    assert str(refused.value).startswith(f"{file}: expectations[1], {wrong['type']}: ")
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("document", "column"),
    [
        ({"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "colour"}}, "colour"),
        (
            {
                "type": "expect_column_pair_values_to_be_equal",
                "kwargs": {"column_A": "partition", "column_B": "colour"},
            },
            "colour",
        ),
        (
            {
                "type": "expect_compound_columns_to_be_unique",
                "kwargs": {"column_list": ["partition", "mergekey"]},
            },
            "mergekey",
        ),
        ({"type": "expect_column_to_exist", "kwargs": {"column": "colour"}}, None),
        ({"type": "expect_column_max_to_be_between", "kwargs": {"column": "sources_met"}}, None),
    ],
)
def test_a_column_that_is_not_there_is_refused_with_its_suite(
    tmp_path: Path, document: dict[str, Any], column: str | None
) -> None:
    file = suite_file(tmp_path, "mine", None, NOT_NULL, document)
    lake = QualityLake(tmp_path, quality={"suites": [file]})
    problems = check_suites(lake.settings)
    sentence = f"{file}: expectations[1]: silver has no column `{column}`"
    assert [problem.what for problem in problems] == ([] if column is None else [sentence])
    assert all(problem.fix for problem in problems)
    if column is not None:
        with pytest.raises(ConfigurationError, match=re.escape(sentence)):
            lake.check()


def test_the_examples_suites_are_suites(tmp_path: Path) -> None:
    write_example(tmp_path)
    suites = read_suites(load_settings(tmp_path / "watersmeet.yml", {}))
    added = {suite.name: suite for suite in suites if suite.name not in PROMISES}
    assert {name: suite.table for name, suite in added.items()} == {
        "freshness": "progress",
        "completeness": "merged",
        "quarantine": "bronze_orders",
        "event_times": "bronze_orders",
        "fields": "bronze_orders",
    }
    assert all(suite.expectations for suite in added.values())


def test_a_missing_great_expectations_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = read_suites(settings_for(tmp_path))[0]
    monkeypatch.setitem(sys.modules, "great_expectations.data_context.types.base", None)
    with pytest.raises(WatersmeetError, match=r'pip install "watersmeet\[quality\]"'):
        _ = suite.expectations
