"""The embedded engine as its users start it: every command without a JVM, and what it refuses in
one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import every_command_does_its_work
from tests.support.configurations import settings_for
from tests.support.rivers import River
from watersmeet.engine.choice import open_engine
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.lake.by_delta_rs import DeltaRsReader


@pytest.mark.promise("R12")
@pytest.mark.long
def test_every_command_does_its_work_without_java(kafka: str, tmp_path: Path) -> None:
    every_command_does_its_work(River.make(kafka, tmp_path, "no-java"))


def test_a_lake_that_the_engine_cannot_open_is_refused_in_one_sentence(tmp_path: Path) -> None:
    catalog = {"lake": {"catalog": "main", "schema": "shop"}, "checkpoints": str(tmp_path)}
    for place in (
        catalog,
        {"lake": "dbfs:/shop", "checkpoints": str(tmp_path)},
        {"lake": str(tmp_path / "no. #1")},
    ):
        with pytest.raises(
            ConfigurationError, match=r"engine: embedded cannot open .*; name an object-store URI"
        ):
            open_engine(settings_for(tmp_path, engine="embedded", **place))


def test_the_log_of_a_table_is_summed_up_and_cleaned_up(tmp_path: Path) -> None:
    """As Delta on Spark does it at every so many commits."""
    engine = open_engine(
        settings_for(tmp_path, engine="embedded").model_copy(update={"retention_ms": 1})
    )
    layout = engine.lake.layout[tables.SILVER]
    engine.create(layout)
    commits = 3 * int(layout.properties["delta.checkpointInterval"])
    for _ in range(commits):
        engine.append(tables.SILVER, layout.rows([]))
    log = Path(engine.lake.address(tables.SILVER)) / "_delta_log"
    assert (log / "_last_checkpoint").exists()
    assert len(list(log.glob("*.json"))) < commits
    assert DeltaRsReader(engine.lake).version(tables.SILVER) == commits
