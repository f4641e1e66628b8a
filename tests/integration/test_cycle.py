"""What one cycle has opened serves the next one, and what fails in one input is said at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.support.rivers import River
from watersmeet.errors import ConfigurationError
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run

TURNS = 6


def test_an_input_that_fails_is_not_hidden_by_a_batch_of_another(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them comes first: its batches must not let the run go on."""

    asked = []

    def fail(_: object) -> bool:
        asked.append(True)
        raise ConfigurationError("it fails", where="sources", fix="mend it")

    river = River.make(kafka, tmp_path, "one-fails")
    inputs = river.settings.inputs
    with Run(river.settings, LAYERS, Reporter()).take_layers() as cycle:
        for failing in inputs:
            river.flow()
            with monkeypatch.context() as patch:
                patch.setattr(cycle.bronze[failing], "take", fail)
                with pytest.raises(ConfigurationError, match="it fails"):
                    cycle.read(inputs)
    assert len(asked) == len(inputs), "each of them once, and no batch later"


def test_a_table_is_not_opened_anew_in_every_cycle(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_table, opened = DeltaRsReader._open, Counter[str]()

    def count(reader: DeltaRsReader, table: str, version: int | None = None) -> DeltaTable:
        opened[table] += 1
        return open_table(reader, table, version)

    river = River.make(kafka, tmp_path, "opened-once")
    with Run(river.settings, LAYERS, Reporter()).take_layers() as cycle:
        for _ in range(2):  # every thread has opened what it reads
            river.flow()
            cycle.run()
        monkeypatch.setattr(DeltaRsReader, "_open", count)
        for _ in range(TURNS):
            river.flow()
            cycle.run()
    assert opened["silver"] == 0
    assert all(times < TURNS for times in opened.values()), opened
