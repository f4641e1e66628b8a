"""A table that somebody has restored or deleted: nothing is merged into it until it is taken
forward again or back, and then nothing is missing."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.laws.conftest import CATALOG_AT_NIGHT, FOLDER_AT_NIGHT, QUICK, MakeLake, in_folders
from tests.support.cases import SOURCES, expected_late, expected_silver, rich_cases
from tests.support.lakes import CaseLake, OpenSpark, as_published, delta_table, folder_of
from watersmeet.core.sequence import MERGED
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.lake.identity import begin_epoch, keep_first_epoch
from watersmeet.lake.published import last_tails
from watersmeet.lake.restored import check_not_behind, check_not_deleted, check_not_restored
from watersmeet.lake.table_reader import row_count
from watersmeet.operations.forget import Forgetting
from watersmeet.operations.retention import expire
from watersmeet.running.saving import save_state

pytestmark = [pytest.mark.promise("N22"), pytest.mark.fault("lost", oracle=True)]


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


LASTING = [
    tables.bronze("orders"),
    tables.SILVER,
    tables.JOURNAL,
    tables.PUBLISHED,
    tables.ERASED,
]
"""Tables whose rows nothing else says."""


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
@pytest.mark.parametrize("table", [*LASTING, tables.LEASES])
def test_so_is_every_table_whose_rows_count(
    new_lake: MakeLake, open_spark: OpenSpark, kind: str, table: str
) -> None:
    lake = new_lake(rich_cases(4, 1656, wealth="late"))
    for share in (0.3, 0.6):
        lake.arrive(share)
        lake.merge()
    before = lake.reader.version(table)
    if lake.engine.lake.layout[table].has_records:
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


def goes_on(lake: CaseLake) -> None:
    """Both layers go on, and what is finished is noted as published."""
    lake.arrive()
    lake.merge()
    rows = as_published(lake.reader, lake.engine.lake.layout, "sink (1)", 1)
    lake.quick.append(tables.PUBLISHED, rows)


def jumps_back(lake: CaseLake) -> None:
    """A jump back over what is out, after which nothing is merged yet."""
    tails = last_tails(lake.reader, MERGED)
    lake.jump(dict.fromkeys(lake.every, 0), tails)


def jumps_and_merges(lake: CaseLake) -> None:
    jumps_back(lake)
    lake.merge()


def jumps_on(lake: CaseLake) -> None:
    """A jump that closes what is open, and reads nothing again."""
    ranges = lake.plans[-1].ranges
    lake.jump({tp: ranges[tp].until_offset for tp in lake.every}, last_tails(lake.reader, MERGED))


def changes_rules(lake: CaseLake) -> None:
    begin_epoch(lake.reader, lake.quick.append, lake.settings, lake.plans[-1].batch + 1)
    goes_on(lake)


def forgets(lake: CaseLake) -> None:
    of_silver, of_orders = (
        lake.reader.select(table, ["merge_key"])["merge_key"].to_pylist()
        for table in (tables.MERGED, tables.bronze("orders"))
    )
    key = next(key for key in of_silver if key in of_orders)
    Forgetting(lake.reader, lake.settings, key).erase(lake.owner(lake.quick))


def saves(lake: CaseLake) -> None:
    lake.arrive(0.7)
    lake.merge()
    save_state(lake.owner(lake.quick), lake.settings, lake.start().recover().state)


CHANGED = r"version \d+, although a jump, or `forget`, has changed it up to version "

BEHIND: list[tuple[str, Callable[[CaseLake], None], str]] = [
    (
        tables.bronze("orders"),
        goes_on,
        r"offset \d+ of orders\[0\], although silver has merged ",
    ),
    (tables.SILVER, goes_on, r"clock .* in partition 0, although published says that silver of "),
    (tables.SILVER, jumps_back, r"\d+ rows .* knows of messages, although the journal says "),
    (tables.SILVER, saves, r"batch \d+, although bases has a state after batch "),
    (tables.JOURNAL, jumps_and_merges, r"decision \d+, although silver's last batch follows "),
    (tables.JOURNAL, changes_rules, r"decision \d+, although silver's last batch follows "),
    (tables.SILVER, jumps_on, CHANGED),
    (tables.JOURNAL, jumps_on, r"generation 0, although silver has rows that generation 1 has "),
    (tables.bronze("orders"), forgets, CHANGED),
    (tables.SILVER, forgets, CHANGED),
    (tables.ERASED, forgets, r"nothing, although the journal says that rows of .* are there"),
]
"""A table, what a lake does, and where an earlier copy of the table ends then."""


@pytest.mark.parametrize(("table", "does", "said"), BEHIND)
@in_folders
def test_an_earlier_copy_of_a_table_is_refused_and_nothing_is_missing_once_it_is_back(
    new_lake: MakeLake, table: str, does: Callable[[CaseLake], None], said: str
) -> None:
    lake = new_lake(rich_cases(2, 1656, wealth="late"))
    keep_first_epoch(lake.reader, lake.quick.append, lake.settings)
    lake.arrive(0.5)
    lake.merge()
    rows = as_published(lake.reader, lake.engine.lake.layout, "sink (1)", 0)
    lake.quick.append(tables.PUBLISHED, rows)
    folder = Path(folder_of(lake.settings)) / table
    shutil.copytree(folder, copy := folder.with_name("copy"))
    does(lake)
    check_not_behind(lake.reader, lake.settings)
    folder.rename(last := folder.with_name("last"))
    copy.rename(folder)
    with pytest.raises(ConfigurationError, match=f"the table {table} ends at {said}"):
        check_not_behind(DeltaRsReader(lake.engine.lake), lake.settings)
    shutil.rmtree(folder)
    last.rename(folder)
    check_not_behind(DeltaRsReader(lake.engine.lake), lake.settings)


@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_what_keep_has_deleted_puts_no_table_behind(new_lake: MakeLake) -> None:
    lake = new_lake(rich_cases(2, 1656), keep={"bronze": "1ms", "quarantine": "1ms"})
    lake.arrive(0.4)
    lake.merge()
    save_state(lake.owner(lake.quick), lake.settings, lake.start().recover().state)
    lake.arrive()
    lake.merge()
    rows = as_published(lake.reader, lake.engine.lake.layout, "sink (1)", 0)
    lake.quick.append(tables.PUBLISHED, rows)
    before = row_count(lake.reader, tables.bronze("orders"))
    for source in SOURCES:
        expire(lake.owner(lake.quick), lake.settings, tables.bronze(source))
    assert row_count(lake.reader, tables.bronze("orders")) < before
    check_not_behind(lake.reader, lake.settings)


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
@pytest.mark.parametrize("table", LASTING)
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
