"""Layers that start at the same time in processes of their own all create the lake's tables."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.configurations import settings_for
from watersmeet.engine.choice import create_tables, open_engine
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.lake.tables import Table


def test_processes_that_create_the_same_tables_at_once_all_have_them(tmp_path: Path) -> None:
    engines = [open_engine(settings_for(tmp_path)) for _ in range(6)]
    with ThreadPoolExecutor(len(engines)) as pool:
        list(pool.map(create_tables, engines))
    for engine in engines:
        assert all(map(engine.reader.exists, engine.lake.layout))


def test_a_catalog_that_says_that_a_name_is_taken_meanwhile_stops_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(settings_for(tmp_path))
    create = EmbeddedEngine.create

    def taken(self: EmbeddedEngine, table: Table) -> None:
        create(self, table)
        raise RuntimeError("TABLE_OR_VIEW_ALREADY_EXISTS")

    monkeypatch.setattr(EmbeddedEngine, "create", taken)
    create_tables(engine)

    def refused(_: EmbeddedEngine, table: Table) -> None:
        raise RuntimeError(f"PERMISSION_DENIED: {table.name}")

    monkeypatch.setattr(EmbeddedEngine, "create", refused)
    create_tables(engine)  # all are there
    with pytest.raises(RuntimeError, match="PERMISSION_DENIED"):
        create_tables(open_engine(settings_for(tmp_path, lake=str(tmp_path / "another"))))
