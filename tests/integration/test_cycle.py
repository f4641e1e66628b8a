"""What one cycle has opened serves the next one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.support.rivers import River
from watersmeet.lake.by_delta_rs import DeltaRsReader
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run

TURNS = 6


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
