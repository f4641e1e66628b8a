"""Whatever an engine commits is on the disk when its call returns, and what others have committed
before anything follows from it."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.lake.conftest import settings_for
from tests.support.lakes import OpenSpark
from watersmeet.engine.choice import create_tables
from watersmeet.engine.embedded import EmbeddedEngine
from watersmeet.engine.spark import SparkEngine
from watersmeet.engine.spark_writer import SparkWriter
from watersmeet.errors import WatersmeetError
from watersmeet.lake import durable, tables
from watersmeet.lake.commits import Commit
from watersmeet.lake.durable import RECENT
from watersmeet.lake.location import Lake
from watersmeet.lake.log_files import PIECE
from watersmeet.lake.torn import check_whole

pytestmark = [pytest.mark.promise("N80"), pytest.mark.fault("power")]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """What has been synced; whoever looks may empty it."""
    found, fsync = set[Path](), os.fsync

    def recording(descriptor: int) -> None:
        found.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    return found


def everything(folder: Path) -> set[Path]:
    """All but the checksums that wait for the next commit to be synced."""
    return {path for path in (folder, *folder.rglob("*")) if not is_own_checksum(path)}


def is_own_checksum(path: Path) -> bool:
    return path.suffix == ".crc" and path.read_bytes()[4:8] == PIECE.to_bytes(4, "big")


def own_checksums(folder: Path) -> set[Path]:
    return {path for path in folder.rglob(".*.crc") if is_own_checksum(path)}


def row_of(lake: Lake, table: str, **values: object) -> pa.Table:
    schema = lake.schema(table)
    return schema.empty_table().from_pylist([values], schema)


def test_every_file_of_a_commit_and_every_folder_that_names_one_is_synced_when_the_call_returns(
    tmp_path: Path, synced: set[Path]
) -> None:
    lake = Lake(settings_for(tmp_path))
    engine, silver, folder = EmbeddedEngine(lake), tables.SILVER, tmp_path / "lake"
    create_tables(engine)
    assert everything(folder) | {tmp_path} <= synced
    numbers = iter(range(1, 1000))

    def commit() -> Commit:
        return Commit("a test", 1, next(numbers))

    open_row = row_of(lake, silver, status="open", merge_key="a", partition=0, event_time=1)
    file = engine.write_files(silver, [row_of(lake, silver, status="timed_out")])
    changed = row_of(lake, silver, status="open", merge_key="b", partition=0, event_time=1)
    changed = changed.append_column("replaces", pa.nulls(1, pa.timestamp("us", "UTC")))
    changed = changed.append_column("delete_up_to", pa.nulls(1, pa.timestamp("us", "UTC")))
    calls: list[Callable[[], object]] = [
        lambda: engine.append(silver, open_row, commit()),
        lambda: engine.append(silver, open_row.slice(0, 0), commit()),
        lambda: engine.append(silver, open_row),
        lambda: engine.append_files(silver, file, commit()),
        lambda: engine.merge(silver, changed, commit()),
        lambda: engine.update(silver, [[("merge_key", "=", "a")]], {"valid": True}, commit()),
        lambda: engine.delete(silver, [[("merge_key", "=", "b")]], commit()),
        lambda: engine.append(silver, open_row, commit()),
        lambda: engine.append(silver, open_row, commit()),
        lambda: engine.compact(silver, 10**9),
        lambda: engine.set_properties(silver, {"a.comment": "more"}),
        *[lambda: engine.append(silver, open_row, commit())] * 55,  # with a checkpoint
    ]
    for number, call in enumerate(calls):
        before = everything(folder)
        synced.clear()
        call()
        made = everything(folder) - before
        assert made, f"call {number} has committed nothing"
        assert made | {path.parent for path in made} <= synced, f"call {number}"
    assert (folder / silver / "_delta_log" / "_last_checkpoint") in everything(folder)


@pytest.mark.long
def test_every_file_of_a_commit_of_spark_and_every_folder_that_names_one_is_synced(
    tmp_path: Path, synced: set[Path], open_spark: OpenSpark
) -> None:
    lake, silver, folder = Lake(settings_for(tmp_path)), tables.SILVER, tmp_path / "lake"
    engine = SparkEngine(open_spark(), lake)
    create_tables(engine)
    numbers = iter(range(1, 1000))

    def commit() -> Commit:
        return Commit("a test", 1, next(numbers))

    rows = [row_of(lake, silver, status="open", merge_key=k, event_time=1) for k in "abcdefgh"]
    few = pa.concat_tables(rows)
    changed = few.slice(0, 1)
    for name in ("replaces", "delete_up_to"):
        changed = changed.append_column(name, pa.nulls(1, pa.timestamp("us", "UTC")))
    calls: dict[str, Callable[[], object]] = {
        "append by Spark": lambda: SparkWriter.append(engine, silver, few, commit()),
        "append by tasks": lambda: engine.append(silver, engine.read(few), commit()),
        "merge": lambda: engine.merge_by_spark(silver, engine.read(changed), commit()),
        # Of a file whose rows go all, such as the merge's, Spark may leave a deletion vector that
        # no commit names: so the key is one that is only beside others.
        "delete": lambda: engine.delete(silver, [[("merge_key", "=", "b")]], commit()),
        "update": lambda: engine.update(
            silver, [[("merge_key", "=", "c")]], {"valid": True}, commit()
        ),
        "purge": lambda: SparkWriter.purge(engine, silver),
        "compact": lambda: SparkWriter.compact(engine, silver, 10**9),
        "properties": lambda: engine.set_properties(silver, {"a.comment": "more"}),
    }
    for what, call in calls.items():
        before = everything(folder)
        synced.clear()
        call()
        made = everything(folder) - before
        assert made, what
        assert made | {path.parent for path in made} <= synced, what
        check_whole(lake)


def test_a_commit_whose_call_fails_afterwards_is_durable(tmp_path: Path, synced: set[Path]) -> None:
    lake = Lake(settings_for(tmp_path))
    create_tables(EmbeddedEngine(lake))
    before = everything(tmp_path)

    def failing() -> None:
        with lake.durable.committing(tables.JOURNAL):
            row = row_of(lake, tables.JOURNAL)
            write_deltalake(str(tmp_path / "lake/journal"), row, mode="append")
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert everything(tmp_path) - before <= synced


@pytest.mark.parametrize("is_known", [False, True])
def test_what_another_process_has_committed_is_durable_before_anything_follows_from_it(
    tmp_path: Path, synced: set[Path], *, is_known: bool
) -> None:
    lake = Lake(settings_for(tmp_path))
    create_tables(EmbeddedEngine(lake))
    for _ in range(RECENT):
        lake = lake if is_known else Lake(settings_for(tmp_path))
        before = everything(tmp_path)
        write_deltalake(str(tmp_path / "lake/journal"), row_of(lake, tables.JOURNAL), mode="append")
        synced.clear()
        lake.durable.rely_on(lake.layout)
        assert everything(tmp_path) - before <= synced
    synced.clear()
    lake.durable.rely_on(lake.layout)
    assert not synced, "what is known to be durable costs nothing"


def test_a_table_that_was_made_anew_is_synced_from_its_beginning(
    tmp_path: Path, synced: set[Path]
) -> None:
    lake = Lake(settings_for(tmp_path))
    engine, folder = EmbeddedEngine(lake), tmp_path / "lake" / tables.JOURNAL
    create_tables(engine)
    engine.append(tables.JOURNAL, row_of(lake, tables.JOURNAL), Commit("a test", 1, 1))
    folder.rename(tmp_path / "elsewhere")
    synced.clear()
    engine.create(lake.layout[tables.JOURNAL])
    assert everything(folder) <= synced


def test_only_a_lake_in_a_folder_is_synced_and_only_if_it_shall_be(tmp_path: Path) -> None:
    catalog = {"lake": {"catalog": "main", "schema": "shop"}, "checkpoints": str(tmp_path)}
    others: list[dict[str, Any]] = [
        {"durable": False},
        {"lake": "s3://shop/lake"},
        {"lake": "/Volumes/main/shop/lake"},
        {"lake": "dbfs:/lake"},
        catalog,
    ]
    for other in others:
        assert Lake(settings_for(tmp_path, **other)).durable.folder is None, other
    folders: list[dict[str, Any]] = [
        {},
        {"lake": f"file:{tmp_path}/lake"},
        {"lake": f"{tmp_path}/a #lake"},
    ]
    for lake in folders:
        own = Lake(settings_for(tmp_path, **lake)).durable
        assert own.folder is not None, lake
        assert pickle.loads(pickle.dumps(own)).folder == own.folder


def test_a_disk_that_does_not_take_what_is_written_ends_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(settings_for(tmp_path))
    engine = EmbeddedEngine(lake)
    create_tables(engine)

    def failing(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(WatersmeetError, match=r"cannot be written to the disk \(Input/output"):
        engine.append(tables.JOURNAL, row_of(lake, tables.JOURNAL), Commit("a test", 1, 1))


def test_nothing_but_this_module_calls_fsync() -> None:
    package = Path(durable.__file__).parents[1]
    callers = {file.name for file in package.rglob("*.py") if "fsync(" in file.read_text()}
    # The archive of Spark's classes is no part of a lake.
    assert callers == {Path(durable.__file__).name, "class_archive.py"}
