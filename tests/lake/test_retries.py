"""A batch of bronze that is tried again after a failure: only the table knows whether its commit was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.bronze import Bronze
from pipelines.engine.choice import open_engine
from pipelines.lake import tables
from pipelines.run import create_missing
from pipelines.running.owner import Owner
from tests.support.cases import keyed
from tests.support.configurations import settings_for
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import counted, records_of

TABLE = tables.bronze("tracking")


@pytest.mark.parametrize("after", [False, True], ids=["before-its-commit", "after-its-commit"])
def test_a_batch_that_is_tried_again_is_written_once(after: bool, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, engine="embedded")
    engine = open_engine(settings)
    create_missing(engine)
    bronze = Bronze(Owner(dying_at(engine, "append", TABLE, after=after, times=1), token=1), settings, "tracking")
    for offsets in ((0, 1), (2, 3)):
        rows = records_of(settings, "tracking", {(0, offset): keyed("a", offset) for offset in offsets})
        if offsets == (0, 1):
            with pytest.raises(CrashError):
                bronze.append(rows, counted(rows))
        bronze.append(rows, counted(rows))
        bronze.append(rows, counted(rows))  # what comes after the commit failed
    found = engine.questions.select(TABLE, ["offset"])["offset"].to_pylist()
    assert sorted(found) == [0, 1, 2, 3]
    assert engine.questions.version(TABLE) == 2
