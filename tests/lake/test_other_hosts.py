"""What tasks of Spark read and write on hosts that see the lake otherwise than the driver does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tests.support.configurations import settings_for
from watersmeet.engine import Selection
from watersmeet.engine.embedded import EmbeddedEngine, WrittenFiles
from watersmeet.engine.tasks import FromTables
from watersmeet.errors import LakeNotSharedError
from watersmeet.lake import tables
from watersmeet.lake.location import Lake
from watersmeet.run import create_missing

TABLE = tables.ERASED


def appended(engine: EmbeddedEngine, *offsets: int) -> int:
    """Append a row for each offset; return the version of the table."""
    rows = [("tracking", "tracking", 0, offset, 0, None) for offset in offsets]
    engine.append(TABLE, engine.lake.layout[TABLE].rows(rows))
    return engine.reader.version(TABLE)


def as_it_is(rows: pa.Table) -> pa.Table:
    return rows


@pytest.fixture
def engine(tmp_path: Path) -> EmbeddedEngine:
    engine = EmbeddedEngine(Lake(settings_for(tmp_path)))
    create_missing(engine)
    return engine


Task = Callable[[int], list[int]]


@pytest.fixture
def task(engine: EmbeddedEngine, request: pytest.FixtureRequest) -> Task:
    """A task in this process, as in a worker: it returns the offsets of a version."""

    def run(version: int) -> list[int]:
        schema = pa.schema([("partition", pa.int32()), ("offset", pa.int64())])
        rows = Selection(TABLE, schema.names, version=version)
        tasks = FromTables(engine.lake, request.node.name, as_it_is, [rows], [[0]], schema)
        batches = tasks(iter([pa.record_batch({"id": [0]})]))
        return sorted(pa.Table.from_batches(batches, schema)["offset"].to_pylist())

    return run


def hidden(engine: EmbeddedEngine, version: int, folder: Path) -> Callable[[], object]:
    """Hide a commit, as the cache of an NFS client does; return what makes it seen again."""
    commit = Path(engine.reader.path(TABLE), "_delta_log", f"{version:020}.json")
    elsewhere = commit.rename(folder / commit.name)
    return lambda: elsewhere.rename(commit)


def test_a_task_reads_the_version_that_the_driver_has_seen_whatever_came_since(
    engine: EmbeddedEngine, task: Task
) -> None:
    versions = [appended(engine, n) for n in range(4)]
    for version in (versions[1], versions[2], versions[0], versions[3], versions[3]):
        assert task(version) == [*range(versions.index(version) + 1)]


@pytest.mark.parametrize("is_warm", [False, True], ids=["at first", "later"])
@pytest.mark.parametrize("back", [0, 1], ids=["its last", "one between"])
def test_a_task_whose_host_does_not_see_a_commit_raises_what_is_tried_again(
    engine: EmbeddedEngine, task: Task, tmp_path: Path, back: int, is_warm: bool
) -> None:
    first = appended(engine, 0)
    if is_warm:
        assert task(first) == [0]
    last = [appended(engine, n) for n in (1, 2)][-1]
    show = hidden(engine, last - back, tmp_path)
    with pytest.raises(LakeNotSharedError, match=f"^{TABLE}: an executor does not see all of"):
        task(last)
    show()
    assert task(last) == [0, 1, 2]


def test_a_task_whose_host_does_not_see_a_data_file_raises_what_is_tried_again(
    engine: EmbeddedEngine, task: Task
) -> None:
    version = appended(engine, 1)
    [file] = DeltaTable(engine.reader.uri(TABLE)).file_uris()
    Path(file.removeprefix("file://")).unlink()
    with pytest.raises(LakeNotSharedError, match=f"all of version {version};"):
        task(version)


def test_no_commit_names_a_file_that_is_not_there_as_it_was_written(engine: EmbeddedEngine) -> None:
    entries = [
        *engine.write_files(TABLE, [engine.lake.layout[TABLE].rows([])]),
        *engine.write_files(TABLE, [engine.lake.layout[TABLE].rows([])]),
    ]
    WrittenFiles(engine, entries).check(TABLE)
    for changed in (replace(entries[1], path="elsewhere"), replace(entries[1], size=1)):
        with pytest.raises(LakeNotSharedError, match=f"^{TABLE}: its file {changed.path} has"):
            WrittenFiles(engine, [entries[0], changed]).check(TABLE)
