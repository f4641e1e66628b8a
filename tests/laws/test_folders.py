"""A lake may be in a folder of any name: it works there, or is refused before anything is written;
on both engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.cases import Case, expected_silver, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.effort import first_then_nightly
from tests.support.lakes import CaseLake
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.engine.spark import SparkEngine
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.location import Lake
from watersmeet.lake.maintenance import maintain
from watersmeet.lake.store import check_writable
from watersmeet.run import create_missing

pytestmark = pytest.mark.promise("C23")

GOOD = [
    "%",
    "a=b&c",
    "50%",
    "a b",
    "{x}",
    "*",
    "'",
    '"',
    "`",
    ":",
    "+",
    "~",
    ";",
    "$",
    ",",
    "@",
    "é",
    "<>",
]
BAD = ["#", "?", "[x]", "|", "^", "\\", "\t", "\n", "%20", "\x7f"]


def works_in(lake: CaseLake) -> None:
    """Batches, time travel and maintenance."""
    for share in (0.5, 1.0):
        lake.arrive(share)
        lake.merge()
    assert lake.silver() == expected_silver(lake.cases)
    first = next(
        n for n in range(9) if lake.reader.select(tables.SILVER, ["merge_key"], version=n).num_rows
    )
    assert first < lake.reader.version(tables.SILVER)
    maintain(lake.engine, [tables.SILVER])
    assert lake.silver() == expected_silver(lake.cases)


def a_case() -> dict[int, Case]:
    values: list[bytes | None] = [keyed("a", 0), heartbeat(50), keyed("a", 60), heartbeat(500)]
    return {0: Case({"tracking": values, "orders": [*values]}, 100, ["tracking", "orders"] * 4)}


def below(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", first_then_nightly(GOOD, 6))
def test_the_embedded_engine_works_in_a_folder_of_this_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"x{name}y"
    folder.mkdir()
    settings = settings_for(folder)
    check_writable(Lake(settings))
    works_in(CaseLake(EmbeddedEngine(Lake(settings)), settings, a_case()))
    assert below(tmp_path) == {folder.name}
    assert below(folder) == {"lake"}


@pytest.mark.parametrize("name", BAD)
def test_it_refuses_a_folder_that_it_would_not_find_again(tmp_path: Path, name: str) -> None:
    folder = tmp_path / f"x{name}y"
    folder.mkdir()
    with pytest.raises(
        ConfigurationError, match=r"(?s)engine: embedded cannot open .*; name an object-store URI"
    ):
        check_writable(Lake(settings_for(folder)))
    assert below(folder) == set()


class SparkAlone(CaseLake):
    """A lake that no other engine can open."""

    def __post_init__(self) -> None:
        self.quick = self.engine
        create_missing(self.engine)
        self._arrived = dict.fromkeys(self.cases, 0)


@pytest.mark.nightly
def test_spark_works_in_folders_of_such_names(root_session: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "a#b?c%20d [x]"
    folder.mkdir()
    settings = settings_for(folder, engine="spark")
    check_writable(Lake(settings))
    works_in(SparkAlone(SparkEngine(root_session, Lake(settings)), settings, a_case()))
    assert below(tmp_path) == {folder.name}
