"""Whose Spark session it is: a session that is given stays as it was, and the layers have settings
of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.support.cases import random_case
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake, engine_for
from watersmeet.engine import Selection
from watersmeet.engine.checks import (
    ask_executors,
    check_executors,
    check_versions,
    number_of_tasks,
    problem_of_files,
)
from watersmeet.engine.session import LAYER_SETTINGS, spark_session
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.location import Lake
from watersmeet.lake.table_reader import normalise

TASKS = "spark.sql.shuffle.partitions"

OTHERS = {
    "spark.sql.session.timeZone": "Asia/Tokyo",
    "spark.sql.shuffle.partitions": "3",
    # Each of these changes what one of `EXPRESSIONS` gives.
    "spark.sql.jsonGenerator.ignoreNullFields": "false",
    "spark.sql.legacy.sizeOfNull": "false",
    "spark.sql.parser.escapedStringLiterals": "true",
    "spark.sql.decimalOperations.allowPrecisionLoss": "false",
    "spark.sql.legacy.castComplexTypesToString.enabled": "true",
    "spark.sql.legacy.timeParserPolicy": "LEGACY",
    "spark.sql.timestampType": "TIMESTAMP_NTZ",
    "spark.sql.function.concatBinaryAsString": "true",
    "spark.sql.legacy.negativeIndexInArrayInsert": "true",
    "spark.sql.variable.substitute": "true",
    # A function of the session goes before Spark's own of that name.
    "spark.sql.functionResolution.sessionOrder": "first",
    "spark.sql.path.enabled": "true",
    # What is before 1582 would be other days.
    "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
}
"""Settings of somebody's session."""

EXPRESSIONS = (
    "to_json(named_struct('a', NULL, 'b', 1))",
    "size(CAST(NULL AS ARRAY<INT>))",
    "length('\\t')",
    "CAST(1 AS DECIMAL(38, 18)) * CAST(1.123456789 AS DECIMAL(38, 18))",
    "CAST(named_struct('a', NULL, 'b', 1) AS STRING)",
    "unix_timestamp('2020-1-1', 'yyyy-MM-dd')",
    "typeof(TIMESTAMP '2020-01-01 00:00:00')",
    "typeof(concat(X'61', X'62'))",
    "array_insert(array(1, 2), -1, 3)",
    "'${env:HOME}'",
)


class With:
    """A session whose `conf` gives these values: on Databricks, one that Spark itself refuses."""

    def __init__(self, session: SparkSession, values: Mapping[str, str]) -> None:
        self.conf = values
        self.range = session.range


@pytest.fixture
def given(root_session: SparkSession, tmp_path: Path) -> Iterator[SparkSession]:
    """The suite's session, as somebody else's: active, with settings that are not the layers', and
    Delta has written in it.

    (At a first write, Delta itself changes settings of the active session.)
    """
    root_session.createDataFrame([(1,)], "id LONG").write.format("delta").save(
        str(tmp_path / "theirs")
    )
    before = dict(root_session.conf.getAll)
    for name, value in OTHERS.items():
        root_session.conf.set(name, value)
    yield root_session
    for name in {*OTHERS, *LAYER_SETTINGS}:
        root_session.conf.unset(name)
    for name in {*OTHERS, *LAYER_SETTINGS} & before.keys():
        root_session.conf.set(name, before[name])


@pytest.mark.long
def test_the_layers_have_their_own_settings_and_a_given_session_keeps_its_own(
    given: SparkSession, tmp_path: Path
) -> None:
    before = dict(given.conf.getAll)
    ours = spark_session({"spark.sql.shuffle.partitions": "7", "spark.master": "local[9]"})
    assert {name: ours.conf.get(name) for name in LAYER_SETTINGS} == LAYER_SETTINGS
    assert ours.conf.get("spark.sql.shuffle.partitions") == "3", (
        "settings under `spark:` are those of a session of our own"
    )
    assert ours.conf.get("spark.app.id") == given.conf.get("spark.app.id"), "the same cluster"

    settings = settings_for(tmp_path, engine="spark")
    lake = CaseLake(engine_for(lambda: ours, settings), settings, {0: random_case(3)})
    lake.arrive(engine=lake.engine)
    assert lake.merge() > 0
    rows = lake.engine.lake.layout[tables.PUBLISHED].schema.empty_table()
    lake.engine.append(tables.PUBLISHED, rows, Commit("test", 1, 1))
    assert dict(given.conf.getAll) == before
    assert SparkSession.getActiveSession() is given


def test_the_active_session_stays_the_one_that_was_given(
    given: SparkSession, tmp_path: Path
) -> None:
    for _ in range(2):
        engine = engine_for(lambda: spark_session({}), settings_for(tmp_path, engine="spark"))
        rows = pa.table({"tenant": ["a"]})
        assert engine.collect(engine.read(rows)).to_pylist() == [{"tenant": "a"}]
        assert SparkSession.getActiveSession() is given


@pytest.mark.usefixtures("given")
def test_times_of_any_century_are_the_same_for_all_readers_whatever_calendar_a_session_has(
    tmp_path: Path,
) -> None:
    engine = engine_for(lambda: spark_session({}), settings_for(tmp_path, engine="spark"))
    published = engine.lake.layout[tables.PUBLISHED]
    engine.create(published)
    columns = ["partition", "last_event_time"]
    times = [-62_135_596_800_000, -12_219_292_800_001, 0, 253_402_300_799_999]
    rows = [dict(zip(columns, row, strict=True)) for row in enumerate(times)]
    engine.append(published.name, published.rows_of(rows))
    by_spark = engine.collect(engine.read(Selection(published.name, columns)))
    assert sorted(normalise(by_spark).to_pylist(), key=repr) == rows
    # Spark writes the others of the file anew.
    engine.delete(published.name, [[("partition", "=", 2)]], Commit("test", 1, 1))
    left = engine.reader.select(published.name, columns).to_pylist()
    assert sorted(left, key=repr) == [row for row in rows if row["partition"] != 2]


def test_partitions_are_divided_by_the_cores_where_the_setting_is_no_number(
    root_session: SparkSession,
) -> None:
    assert number_of_tasks(root_session) == int(root_session.conf.get(TASKS) or 0)
    cores = root_session.sparkContext.defaultParallelism
    assert number_of_tasks(cast(SparkSession, With(root_session, {TASKS: "auto"}))) == cores


def test_a_session_of_our_own_has_the_settings_under_spark(root_session: SparkSession) -> None:
    assert {name: root_session.conf.get(name) for name in LAYER_SETTINGS} == LAYER_SETTINGS
    assert (root_session.conf.get("spark.master") or "").startswith("local")


def test_a_folder_of_this_machine_will_do_where_spark_runs_on_it(
    root_session: SparkSession, tmp_path: Path
) -> None:
    check_executors(root_session, Lake(settings_for(tmp_path)))
    assert list(tmp_path.iterdir()) == []


def test_executors_try_to_read_make_and_delete_files_and_leave_none(
    root_session: SparkSession, tmp_path: Path
) -> None:
    lake = Lake(settings_for(tmp_path))
    answers = ask_executors(root_session, lake)
    assert {(answer.sees, answer.problem) for answer in answers} == {(True, None)}
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert problem_of_files(lake, str(tmp_path)) == "Is a directory", "a file of the driver"
    nobody_writes = Lake(settings_for(tmp_path, lake="/proc"))
    assert problem_of_files(nobody_writes) is not None


@pytest.mark.parametrize(
    ("spark", "of_driver"),
    [("4.2.0", "4.2.0"), ("4.2.1", "4.2.0"), ("4.3.0", "4.3.0"), ("5.0.0", "5.0.0")],
)
def test_a_spark_of_the_drivers_release_will_do(spark: str, of_driver: str) -> None:
    check_versions(spark, of_driver)


@pytest.mark.parametrize(
    ("spark", "of_driver", "said"),
    [
        (
            "4.1.1",
            "4.1.1",
            "this is Spark 4.1.1, and Watersmeet needs Spark 4.2 or newer; use a newer one",
        ),
        (
            "3.5.6",
            "4.2.0",
            "this is Spark 3.5.6, and Watersmeet needs Spark 4.2 or newer; use a newer one",
        ),
        (
            "4.3.0",
            "4.2.0",
            "this is Spark 4.3.0, and the driver's pyspark is 4.2.0; install pyspark 4.3.0",
        ),
    ],
)
def test_another_spark_is_refused_in_one_sentence(spark: str, of_driver: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_versions(spark, of_driver)
    assert str(refused.value) == said
