"""A table is deleted, restored, or replaced by an earlier copy: a run says so and does nothing, or
goes on exactly; and once the table is back, nothing is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.integration.test_generations import FAR, fed
from tests.support.effort import first_then_nightly
from tests.support.lives import Life
from tests.support.rivers import EMBEDDED, FOLDER
from watersmeet.lake import tables

pytestmark = [pytest.mark.long, pytest.mark.promise("N22"), pytest.mark.fault("lost")]

BRONZE = tables.bronze("tracking")
LASTING = (BRONZE, tables.SILVER, tables.JOURNAL, tables.PUBLISHED, tables.ERASED)
REPLACEABLE = (tables.LEASES, tables.QUALITY)

BackAgain = Callable[[], None]


def folder_of(life: Life, table: str) -> Path:
    return life.river.folder / "lake" / table


def deleted(life: Life, table: str) -> BackAgain:
    folder = folder_of(life, table)
    folder.rename(elsewhere := life.river.folder / "elsewhere")

    def back() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        elsewhere.rename(folder)

    return back


def restored(life: Life, table: str) -> BackAgain:
    """To what it was as `copied` copies it."""
    now = DeltaTable(str(folder_of(life, table)))
    version = now.version()
    now.restore(DeltaTable(str(copy_of(life, table))).version())

    def back() -> None:
        DeltaTable(str(folder_of(life, table))).restore(version)

    return back


def copied(life: Life, table: str) -> BackAgain:
    back = deleted(life, table)
    shutil.copytree(copy_of(life, table), folder_of(life, table))
    return back


def copy_of(life: Life, table: str) -> Path:
    return life.river.folder / "copy" / table


def lived(kafka: str, folder: Path, lake: str) -> Life:
    """A lake of which there is an earlier copy. Since then it has read, merged, published, begun
    another generation, and forgotten a key that was not out."""
    life = Life.make(kafka, folder, lake=lake)
    fed(life)
    life.run()
    shutil.copytree(folder / "lake", folder / "copy")
    fed(life, 2000)
    life.call("reset", "--to", "earliest", "--yes")
    fed(life, 3000)
    life.both(("gone", 4400))
    life.run()
    life.keyed -= {life.sent - 1, life.sent - 2}
    life.call("forget", "gone", "--apply")
    life.both(("open", 4500))
    life.run()
    return life


def ends_well(life: Life) -> None:
    """Nothing is missing, and nothing is there twice."""
    life.run()
    fed(life, 6000)
    life.both((None, FAR))
    life.run()
    assert life.keyed == life.sent_once()
    life.check()
    keys = life.river.reader.select(BRONZE, ["merge_key"])["merge_key"].to_pylist()
    assert "gone" not in keys


CASES = [
    (EMBEDDED, table, how)
    for table, how in product(LASTING, (copied, deleted, restored))
    if (table, how) != (tables.PUBLISHED, copied)
]
CASES.append((EMBEDDED, tables.LEASES, restored))
FOR_EVERY_SUBMISSION = (EMBEDDED, tables.SILVER, deleted)


@pytest.mark.parametrize(
    ("lake", "table", "how"),
    first_then_nightly(
        [
            FOR_EVERY_SUBMISSION,
            *(case for case in CASES if case != FOR_EVERY_SUBMISSION),
            *((FOLDER, table, how) for _, table, how in CASES),
        ]
    ),
)
def test_a_lake_goes_on_only_once_its_table_is_back(
    kafka: str, tmp_path: Path, lake: str, table: str, how: Callable[[Life, str], BackAgain]
) -> None:
    life = lived(kafka, tmp_path, lake)
    back = how(life, table)
    said = {
        "deleted": f"the table {table} does not exist",
        "restored": f"{table} was taken back by somebody's RESTORE",
        "copied": f"the table {table} ends at",
    }[how.__name__]
    for command in (("run", "--once"), ("validate",), ("reset", "--to", "latest", "--yes")):
        assert said in life.call(*command, exit_code=2)
    back()
    ends_well(life)


@pytest.mark.parametrize(
    ("lake", "table", "how"),
    first_then_nightly(
        [
            (EMBEDDED, tables.PUBLISHED, copied),
            *product([EMBEDDED, FOLDER], REPLACEABLE, (deleted, copied)),
            (FOLDER, tables.PUBLISHED, copied),
        ],
    ),
)
def test_a_lake_goes_on_without_what_something_else_says(
    kafka: str, tmp_path: Path, lake: str, table: str, how: Callable[[Life, str], BackAgain]
) -> None:
    """Of what is published, the sink."""
    life = lived(kafka, tmp_path, lake)
    how(life, table)
    ends_well(life)


@pytest.mark.parametrize("table", first_then_nightly((tables.SILVER, BRONZE, tables.JOURNAL), 1))
def test_without_a_copy_a_new_lake_takes_up_the_sink(
    kafka: str, tmp_path: Path, table: str
) -> None:
    life = Life.make(kafka, tmp_path)
    fed(life)
    fed(life, 2000)
    life.both(("open", 4500))
    life.run()
    shutil.rmtree(folder_of(life, table))
    assert "`kafka.start: sink` it takes up the sink" in life.call("run", "--once", exit_code=2)
    life.configure("lake", "elsewhere")
    life.configure("kafka.start", "sink")
    life.run()
    life.both((None, FAR))
    life.run()
    assert life.keyed == life.sent_once()
    assert json.loads(life.call("verify", "--full", "--json"))["ok"]
