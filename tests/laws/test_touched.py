"""Tables that a platform or a person has touched: a feature works, or is refused by name with the
way back; what is missing is noticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from tests.laws.conftest import QUICK, SPARK_FOLDER, MakeLake, in_folders_of_both
from tests.support.cases import expected_silver, rich_cases
from tests.support.lakes import CaseLake, OpenSpark, folder_of
from watersmeet.engine import Engine, Input
from watersmeet.engine.session import LAYER_SETTINGS
from watersmeet.errors import ConfigurationError, MissingRecordsError
from watersmeet.lake import tables
from watersmeet.lake.features import check_features
from watersmeet.lake.maintenance import FILE_BYTES

pytestmark = [pytest.mark.promise("N21"), pytest.mark.fault("commits")]

REFUSED = {
    "inCommitTimestamp": (
        tables.SILVER,
        "SET TBLPROPERTIES ('delta.enableInCommitTimestamps' = 'true')",
    ),
    "rowTracking": (tables.SILVER, "SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')"),
    "clustering": (tables.bronze("orders"), "CLUSTER BY (partition)"),
    "columnMapping": (tables.SILVER, "SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')"),
}
WORKS = (
    "SET TBLPROPERTIES ('delta.checkpointPolicy' = 'v2', 'delta.checkpointInterval' = '1')",
    "SET TBLPROPERTIES ('delta.autoOptimize.autoCompact' = 'true', "
    "'delta.autoOptimize.optimizeWrite' = 'true')",
    "ADD CONSTRAINT numbered CHECK (partition >= 0)",
)


@pytest.fixture
def lake(new_lake: MakeLake) -> CaseLake:
    lake = new_lake(rich_cases(4, 1656, wealth="late"))
    lake.arrive(0.5)
    lake.merge()
    return lake


def alter(lake: CaseLake, open_spark: OpenSpark, table: str, what: str) -> None:
    path = f"{folder_of(lake.settings)}/{table}".replace("`", "``")
    open_spark().sql(f"ALTER TABLE delta.`{path}` {what}")


def write(lake: CaseLake, table: str, feature: str) -> None:
    """What a run writes to a table and the feature forbids delta-rs: of column mapping compaction,
    and no MERGE."""
    if feature == "columnMapping":
        lake.engine.compact(table, FILE_BYTES)
    elif table == tables.SILVER:
        lake.merge()
    else:
        lake.arrive(0.8)


def goes_on(lake: CaseLake) -> None:
    lake.arrive()
    lake.merge()
    assert lake.silver() == expected_silver(lake.cases)


@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("feature", REFUSED)
def test_what_cannot_be_written_is_refused_by_name_with_the_way_back(
    lake: CaseLake, open_spark: OpenSpark, kind: str, feature: str
) -> None:
    table, turned_on = REFUSED[feature]
    lake.arrive(0.7)
    alter(lake, open_spark, table, turned_on)
    with pytest.raises(ConfigurationError, match=f"{table} has the table feature ") as refused:
        check_features(lake.reader, lake.engine.lake)
    # A run that goes on.
    with pytest.raises(ConfigurationError, match=f"{table} has the table feature "):
        write(lake, table, feature)
    said = str(refused.value)
    assert "or go on with `engine: spark`" in said or said.endswith(": go on with `engine: spark`")
    steps = re.findall(r"DROP FEATURE (\w+)", said)
    assert bool(steps) == (feature in ("inCommitTimestamp", "rowTracking"))
    for step in steps:
        assert feature in said
        alter(lake, open_spark, table, f"DROP FEATURE {step}")
    if steps:
        check_features(lake.reader, lake.engine.lake)
        goes_on(lake)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [SPARK_FOLDER], indirect=True, scope="module")
def test_spark_goes_on_with_each_of_them(lake: CaseLake, open_spark: OpenSpark, kind: str) -> None:
    for table, turned_on in REFUSED.values():
        alter(lake, open_spark, table, turned_on)
    check_features(lake.reader, lake.engine.lake)
    lake.token += 1
    lake.owner().fence(tables.SILVER)
    lake.arrive(1.0, lake.engine)
    lake.merge()
    assert lake.silver() == expected_silver(lake.cases)


@pytest.mark.long
@in_folders_of_both
def test_what_can_be_written_works(lake: CaseLake, open_spark: OpenSpark, kind: str) -> None:
    for what in WORKS:
        alter(lake, open_spark, tables.SILVER, what)
    check_features(lake.reader, lake.engine.lake)
    goes_on(lake)


@dataclass
class Forgetful:
    """An engine whose reading passes over some rows of bronze, as that of a session which ignores
    missing files."""

    engine: Engine
    forget: Callable[[str, pa.Table], pa.Table]
    """What it returns of the rows of a table of bronze."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def from_tables(
        self, function: Any, inputs: Sequence[Input], *more: Any, **named: Any
    ) -> pa.Table:
        return self.engine.from_tables(function, [*map(self._read, inputs)], *more, **named)

    def _read(self, rows: Input) -> Input:
        if isinstance(rows, pa.Table) or not rows.table.startswith("bronze_"):
            return rows
        read = self.engine.read(rows)
        return self.forget(rows.table, read)


def one_record(table: str, rows: pa.Table) -> pa.Table:
    return rows.slice(1) if table == tables.bronze("orders") else rows


def a_whole_partition(_: str, rows: pa.Table) -> pa.Table:
    return rows.filter(pc.not_equal(rows["partition"], 0))


@pytest.mark.parametrize("forget", [one_record, a_whole_partition])
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_batch_that_reads_fewer_records_than_planned_merges_nothing(
    lake: CaseLake, forget: Callable[[str, pa.Table], pa.Table], kind: str
) -> None:
    lake.arrive()
    version = lake.reader.version(tables.SILVER)
    with pytest.raises(
        MissingRecordsError,
        match=r"bronze of \w+ has lost records: \d+ of \d+ were read of partition",
    ):
        lake.merge(Forgetful(lake.engine, forget))
    assert lake.reader.version(tables.SILVER) == version
    goes_on(lake)


@pytest.mark.long
@in_folders_of_both
def test_where_a_file_of_bronze_is_gone_nothing_is_merged_whatever_a_session_ignores(
    lake: CaseLake, open_spark: OpenSpark, kind: str
) -> None:
    silver = lake.start()
    before = {*DeltaTable(f"{folder_of(lake.settings)}/bronze_orders").file_uris()}
    lake.arrive(0.8)
    plan = silver.recover().next()
    assert plan is not None
    [new] = {*DeltaTable(f"{folder_of(lake.settings)}/bronze_orders").file_uris()} - before
    Path(unquote(new)).unlink()
    version = lake.reader.version(tables.SILVER)
    ignoring = "spark.sql.files.ignoreMissingFiles"
    assert LAYER_SETTINGS[ignoring] == "false"
    open_spark().conf.set(ignoring, "true")  # as if the layers had not their own
    try:
        # Missing records are counted; Spark's MERGE, in its session beside the given one, does not
        # even ignore the file.
        with pytest.raises(Exception, match=r"lost records|was deleted by somebody else"):
            silver.commit(plan)
    finally:
        open_spark().conf.set(ignoring, "false")
    assert lake.reader.version(tables.SILVER) == version
