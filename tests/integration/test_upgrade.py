"""A lake as an earlier release left it is taken up by this one: nothing lost, nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.lake import tables
from tests.support.effort import first_then_nightly
from tests.support.kept import FOLDER_OF_ARCHIVES, kept_river
from tests.support.rivers import EMBEDDED, FOLDER, Losses, River

pytestmark = pytest.mark.long

LAYOUTS = sorted(int(archive.name.partition(".")[0]) for archive in FOLDER_OF_ARCHIVES.iterdir())


def test_a_lake_of_every_layout_is_kept() -> None:
    assert list(range(1, tables.LAYOUT_VERSION + 1)) == LAYOUTS


@pytest.mark.promise("C14")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "lake"),
    first_then_nightly(
        [(layout, lake) for lake in (EMBEDDED, FOLDER) for layout in LAYOUTS], len(LAYOUTS)
    ),
)
def test_a_lake_of_every_layout_is_taken_up(
    layout: int, lake: str, tmp_path: Path, on_spark: Callable[[River], River]
) -> None:
    with kept_river(layout, tmp_path, lake) as kept:
        river = on_spark(kept)
        assert river.reader.properties(tables.SILVER)[tables.LAYOUT] == str(layout)
        batches = river.reader.version(tables.PROGRESS)
        river.finish()
        assert river.reader.version(tables.PROGRESS) > batches, (
            "it had records that were not merged yet"
        )
        river.flow()
        river.finish()
        assert river.reader.properties(tables.SILVER)[tables.LAYOUT] == str(tables.LAYOUT_VERSION)
        assert river.losses() == Losses()
        assert river.broken_promises() == []
