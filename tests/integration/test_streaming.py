"""The laws of following a table: every commit is heard of, wherever the lake is."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.observability import Reporter
from pipelines.run import LAYERS, Run
from pipelines.streaming import Follower
from tests.support.cases import expected_messages
from tests.support.lakes import settings_for
from tests.support.rivers import Losses, River, until
from tests.support.topics import published


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = Lake(None, settings_for(tmp_path))
    for table in (tables.RESETS, tables.IDLE_HEARTBEATS):
        lake._create(lake._tables[table])
    return lake


def test_a_follower_of_local_tables_hears_of_every_later_commit_to_each(lake: Lake) -> None:
    lake.append_rows([("a", "t", 0, 0, 1, 1, "before")], tables.RESETS)
    seen: list[tuple[int, int]] = []
    is_worked = threading.Event()

    def work() -> None:
        seen.append((lake.version_of(tables.RESETS), lake.version_of(tables.IDLE_HEARTBEATS)))
        is_worked.set()

    follower = Follower(lake, [tables.RESETS, tables.IDLE_HEARTBEATS], work)
    try:
        for number in range(1, 4):
            is_worked.clear()
            lake.append_rows([("a", "t", 0, 0, 1, 1, "later")], tables.RESETS)
            assert is_worked.wait(60)
            assert seen[-1] == (1 + number, number - 1)
            is_worked.clear()
            lake.append_rows([("a", "t", 0, 0, 1, 1)], tables.IDLE_HEARTBEATS)
            assert is_worked.wait(60)
            assert seen[-1] == (1 + number, number)
    finally:
        follower.stop()
    assert not follower.isActive
    assert follower.exception() is None


def test_a_follower_hears_of_a_commit_whose_file_is_gone(lake: Lake) -> None:
    """As after work that has taken longer than the log is kept."""
    lake.append_rows([("a", "t", 0, 0, 1, 1, "before")], tables.RESETS)
    seen: list[int] = []
    follower = Follower(lake, [tables.RESETS], lambda: seen.append(lake.version_of(tables.RESETS)))
    try:
        follower._versions = {tables.RESETS: -2}
        until(lambda: bool(seen), "the news", 120)
    finally:
        follower.stop()
    assert seen == [1]


def test_stopping_a_follower_waits_for_what_is_under_way(lake: Lake) -> None:
    begun, may_end, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(60)
        done.set()

    follower = Follower(lake, [tables.RESETS], work)
    lake.append_rows([("a", "t", 0, 0, 1, 1, "news")], tables.RESETS)
    assert begun.wait(60)
    stopping = threading.Thread(target=follower.stop)
    stopping.start()
    assert follower.isActive
    may_end.set()
    stopping.join(60)
    assert done.is_set()
    assert not follower.isActive


def test_a_follower_that_cannot_read_a_log_says_so(lake: Lake) -> None:
    follower = Follower(lake, [tables.RESETS], lambda: None)
    shutil.rmtree(f"{lake.place}/{tables.RESETS}")
    until(lambda: not follower.isActive, "its end", 120)
    assert follower.exception() is not None


def test_where_the_lake_is_no_folder_here_sparks_streams_follow(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    river = River.make(kafka, tmp_path, "elsewhere", partitions=1)
    river.flow()
    river.flow()
    stopping = threading.Event()
    failed: list[BaseException] = []

    def is_out(expected: int) -> bool:
        return len(published(river.kafka, river.sink, 1)) >= expected or bool(failed)

    def work() -> None:
        try:
            run.until_stopped()
        except BaseException as error:
            failed.append(error)

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(Lake, "is_local", property(lambda _: False))
        run = Run(river.settings, LAYERS, Reporter(), stopping)
        running = threading.Thread(target=work)
        running.start()
        try:
            for _ in range(2):
                until(partial(is_out, len(expected_messages(river.cases))), "the messages", 240)
                river.flow()
        finally:
            stopping.set()
            running.join(120)
    assert not failed
    river.finish()
    assert river.losses(spark) == Losses()
