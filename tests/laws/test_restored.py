"""A table that somebody has restored or deleted: nothing is merged into it until it is taken
forward again or back, and then nothing is missing."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.laws.conftest import CATALOG_AT_NIGHT, FOLDER_AT_NIGHT, QUICK, MakeLake
from tests.support.cases import expected_late, expected_silver, rich_cases
from tests.support.lakes import CaseLake, OpenSpark, delta_table, folder_of
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.epochs import begin_epoch, keep_first_epoch
from watersmeet.lake.restored import check_not_behind, check_not_deleted, check_not_restored

pytestmark = pytest.mark.promise("N22")


def restore(lake: CaseLake, open_spark: OpenSpark, table: str, version: int) -> None:
    """As somebody would on the lake's engine."""
    if lake.settings.engine == "spark":
        delta_table(open_spark(), lake.engine.lake, table).restoreToVersion(version)
    else:
        DeltaTable(f"{folder_of(lake.settings)}/{table}").restore(version)


def refusal(lake: CaseLake) -> str:
    with pytest.raises(ConfigurationError) as refused:
        check_not_restored(lake.reader, lake.engine.lake)
    return str(refused.value)


@pytest.mark.parametrize(
    "kind", [QUICK, FOLDER_AT_NIGHT, CATALOG_AT_NIGHT], indirect=True, scope="module"
)
def test_silver_that_was_restored_is_refused_until_it_is_taken_forward_again(
    new_lake: MakeLake, open_spark: OpenSpark, kind: str
) -> None:
    lake = new_lake(rich_cases(4, 1656, wealth="late"))
    lake.arrive(0.3)
    lake.merge()
    earlier = lake.reader.version(tables.SILVER)
    running = lake.start()
    lake.arrive(0.5)
    assert list(running.drain())
    check_not_restored(lake.reader, lake.engine.lake)
    merged, last = lake.silver(), lake.reader.version(tables.SILVER)
    restore(lake, open_spark, tables.SILVER, earlier)
    lake.arrive(0.8)
    here = re.escape(lake.engine.lake.address(tables.SILVER))
    said = refusal(lake)
    assert re.search(
        rf"silver was taken back .* version {last} is gone.* RESTORE TABLE .*{here}`? TO VERSION "
        rf"AS OF {last};",
        said,
    )
    for silver in (running, lake.start()):
        with pytest.raises(ConfigurationError, match="silver was taken back by somebody's RESTORE"):
            list(silver.drain())
    restore(lake, open_spark, tables.SILVER, last)
    check_not_restored(lake.reader, lake.engine.lake)
    assert lake.silver() == merged
    lake.arrive()
    lake.merge()
    assert lake.silver() == expected_silver(lake.cases)
    assert lake.late() == expected_late(lake.cases)


ALL = [
    tables.bronze("orders"),
    tables.SILVER,
    tables.GENERATIONS,
    tables.RESETS,
    tables.EPOCHS,
    tables.PUBLISHED,
    tables.DEAD_LETTERS,
    tables.ERASED,
    tables.FORGOTTEN,
    tables.FLOORS,
    tables.CONFIGURATION,
]
"""Tables whose rows nothing else says."""


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("table", [*ALL, tables.LEASES])
def test_so_is_every_table_whose_rows_count(
    new_lake: MakeLake, open_spark: OpenSpark, kind: str, table: str
) -> None:
    lake = new_lake(rich_cases(4, 1656, wealth="late"))
    for share in (0.3, 0.6):
        lake.arrive(share)
        lake.merge()
    before = lake.reader.version(table)
    if tables.has_records(table):
        before = 1
    else:  # as a command or a run writes to it, with a token or without
        lake.engine.append(table, one_row(lake, table))
    last = lake.reader.version(table)
    check_not_restored(lake.reader, lake.engine.lake)
    restore(lake, open_spark, table, before)
    assert f"lake: {table} was taken back" in refusal(lake)
    restore(lake, open_spark, table, last)
    check_not_restored(lake.reader, lake.engine.lake)


def one_row(lake: CaseLake, table: str) -> pa.Table:
    return lake.engine.lake.layout[table].rows_of([{}])


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("table", [tables.bronze("orders"), tables.PUBLISHED])
def test_an_owner_adds_nothing_to_a_table_that_was_restored_beside_it(
    new_lake: MakeLake, open_spark: OpenSpark, kind: str, table: str
) -> None:
    lake = new_lake(rich_cases(2, 1656, wealth="late"))
    owner, before = lake.owner(), lake.reader.version(table)
    facts = dict[str, object](ranges=[])
    owner.append(table, one_row(lake, table), facts=facts)
    last = lake.reader.version(table)
    restore(lake, open_spark, table, before)
    with pytest.raises(ConfigurationError, match=f"{table} was taken back"):
        owner.append(table, one_row(lake, table), facts=facts)
    assert lake.reader.version(table) == last + 1, "nothing but the restore came"
    restore(lake, open_spark, table, last)
    owner.append(table, one_row(lake, table), facts=facts)


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("table", [tables.EPOCHS, tables.GENERATIONS])
def test_an_earlier_copy_of_what_was_decided_is_refused(
    new_lake: MakeLake, kind: str, table: str
) -> None:
    lake = new_lake(rich_cases(2, 1656, wealth="late"))
    keep_first_epoch(lake.reader, lake.quick.append, lake.settings, 0)
    lake.arrive(0.5)
    lake.merge()
    folder = Path(folder_of(lake.settings)) / table
    shutil.copytree(folder, copy := folder.with_name("copy"))
    last = lake.plans[-1].batch
    begin_epoch(lake.reader, lake.quick.append, lake.settings, last + 1, 1)
    lake.jump(dict.fromkeys(lake.every, 0))
    lake.merge()
    check_not_behind(lake.reader)
    folder.rename(folder.with_name("last"))
    copy.rename(folder)
    name = "epoch" if table == tables.EPOCHS else "generation"
    said = f"{table} ends at {name} 0, although silver has batches of {name} 1"
    with pytest.raises(ConfigurationError, match=said):
        check_not_behind(DeltaRsReader(lake.engine.lake))  # as of another start


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_a_restore_that_undoes_nothing_of_a_layer_is_none(
    new_lake: MakeLake, open_spark: OpenSpark, kind: str
) -> None:
    lake = new_lake(rich_cases(4, 1656, wealth="late"))
    lake.arrive(0.5)
    lake.merge()
    last = lake.reader.version(tables.SILVER)
    lake.engine.set_properties(tables.SILVER, {"a.comment": "of somebody"})
    restore(lake, open_spark, tables.SILVER, last)
    check_not_restored(lake.reader, lake.engine.lake)
    lake.arrive()
    lake.merge()
    assert lake.silver() == expected_silver(lake.cases)


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("table", ALL)
def test_a_table_that_is_gone_is_refused_once_the_lake_has_rows(
    new_lake: MakeLake, table: str
) -> None:
    lake = new_lake(rich_cases(2, 1656, wealth="late"))
    folder = Path(folder_of(lake.settings)) / table
    elsewhere = folder.with_name("elsewhere")
    folder.rename(elsewhere)
    check_not_deleted(lake.reader, lake.settings)
    elsewhere.rename(folder)
    lake.arrive(0.5)
    lake.merge()
    check_not_deleted(lake.reader, lake.settings)
    folder.rename(elsewhere)
    with pytest.raises(ConfigurationError, match=f"lake: the table {table} does not exist, "):
        check_not_deleted(lake.reader, lake.settings)
    elsewhere.rename(folder)
    check_not_deleted(lake.reader, lake.settings)
