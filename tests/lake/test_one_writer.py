"""No table of a lake is changed by delta-rs and by Spark at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from tests.laws.test_engine import gathered
from tests.support.configurations import settings_for
from watersmeet.engine import spark_writer
from watersmeet.engine.embedded import EmbeddedEngine, WrittenFiles
from watersmeet.engine.spark import SparkEngine
from watersmeet.engine.spark_writer import SparkWriter
from watersmeet.lake import tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.location import Lake
from watersmeet.run import create_missing

COMMIT = Commit("test", 1, 1)
TABLE = tables.bronze("tracking")


class Session:
    """A session of Spark that runs nothing; what it is asked for is written down by `used`."""

    def __init__(self, used: Callable[..., Any]) -> None:
        self._used = used
        self.conf = SimpleNamespace(get=lambda *_: "2")
        self.catalog = SimpleNamespace(dropGlobalTempView=lambda _: None)

    def table(self, _: str) -> Any:
        return Rows(self._used)

    def sql(self, statement: str) -> Any:
        if "DRY RUN" not in statement:
            self._used()
        return SimpleNamespace(count=lambda: 0)


class Rows:
    """Rows of Spark, which can be written."""

    def __init__(self, used: Callable[..., Any]) -> None:
        self.save = self._used = used

    def __getattr__(self, name: str) -> Any:
        return self if name == "write" else lambda *_, **__: self


CHANGES: dict[str, Callable[[SparkEngine, Any], object]] = {
    "append by delta-rs": lambda e, _: e.append(TABLE, nothing(e), COMMIT),
    "append of files": lambda e, _: e.append(TABLE, WrittenFiles(here(e), []), COMMIT),
    "append by Spark": lambda e, rows: SparkWriter.append(e, TABLE, rows, COMMIT),
    "merge by delta-rs": lambda e, _: e.merge(tables.SILVER, gathered(e), COMMIT),
    "merge by Spark": lambda e, rows: e.merge(TABLE, rows, COMMIT),
    "delete": lambda e, _: e.delete(TABLE, [], COMMIT),
    "update": lambda e, _: e.update(TABLE, [], {"reason": None}, COMMIT),
    "evolve": lambda e, _: e.evolve_schema(e.lake.layout[TABLE]),
    "compact by delta-rs": lambda e, _: e.compact(TABLE, 1),
    "compact by Spark": lambda e, _: SparkWriter.compact(e, TABLE, 1),
    "purge": lambda e, _: e.purge(TABLE),
    "purge by delta-rs": lambda e, _: e.purge(tables.ERASED),
    "vacuum": lambda e, _: e.vacuum(TABLE),
    "properties": lambda e, _: e.set_properties(TABLE, {"a": "b"}),
}


def nothing(engine: SparkEngine) -> pa.Table:
    return engine.lake.schema(TABLE).empty_table()


def here(engine: SparkEngine) -> EmbeddedEngine:
    return EmbeddedEngine(engine.lake)


@pytest.mark.parametrize("change", CHANGES)
def test_nobody_else_changes_a_table_while_one_of_the_writers_does(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(settings_for(tmp_path, engine="spark"))
    create_missing(EmbeddedEngine(lake))
    was_alone = list[bool]()
    others = {"merge by delta-rs": tables.SILVER, "purge by delta-rs": tables.ERASED}
    table = others.get(change, TABLE)

    def used(*_: Any, **__: Any) -> None:
        """Note whether another thread would have to wait now."""
        with ThreadPoolExecutor(1) as other:
            lock = engine._changes.get(table)
            was_alone.append(lock is not None and not other.submit(lock.acquire, False).result())

    session: Any = Session(used)
    engine = SparkEngine(session, lake)
    for name in ("append", "merge", "compact", "purge"):
        monkeypatch.setattr(EmbeddedEngine, name, used)
    monkeypatch.setattr(SparkWriter, "rows", lambda *_: Rows(used))
    monkeypatch.setattr(spark_writer, "session_with", _session_with)
    CHANGES[change](engine, Rows(used))
    assert was_alone == [True]


class _session_with:  # noqa: N801 - stands for the function
    def __init__(self, session: Any, _: object) -> None:
        self._session = session

    def __enter__(self) -> Any:
        return self._session

    def __exit__(self, *_: object) -> None:
        pass
