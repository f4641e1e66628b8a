"""One owner at a time: a second run is refused, and a first one that was only paused cannot write once it was replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pipelines import tables
from pipelines.adapters import lease as leases
from pipelines.adapters.lake import Lake
from pipelines.adapters.lease import Lease
from pipelines.errors import LeaseTakenError
from tests.support.lakes import settings_for
from tests.support.rivers import Losses, River
from tests.support.topics import published


@pytest.fixture
def lake(spark: SparkSession, tmp_path: Path) -> Lake:
    found = Lake(spark, settings_for(tmp_path))
    found.create_missing()
    return found


def lease_of(lake: Lake, folder: Path, *layers: str) -> Lease:
    return Lease(lake, settings_for(folder), layers)


def test_a_layer_has_one_owner_and_other_layers_have_others(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEWAL_S", 0.2)
    bronze = lease_of(lake, tmp_path, "bronze")
    bronze.take()
    silver = lease_of(lake, tmp_path, "silver", "gold")
    silver.take()
    assert 0 < bronze.token < silver.token
    with pytest.raises(LeaseTakenError, match=r"bronze of .*lake is being written by process \d+ on .*; stop that one first"):
        lease_of(lake, tmp_path, "bronze", "silver").take()
    bronze.release()
    again = lease_of(lake, tmp_path, "bronze")
    again.take()
    assert again.token > silver.token
    assert not again.must_mend
    again.release()
    silver.release()


def test_a_silent_owner_is_replaced_and_learns_of_it(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEWAL_S", 0.1)
    monkeypatch.setattr(leases, "SILENCE_S", 1.0)
    first = lease_of(lake, tmp_path, "bronze")
    first.take()
    first.abandon()  # as a paused process does: it renews nothing
    second = lease_of(lake, tmp_path, "bronze")
    second.take()
    assert second.token > first.token
    assert second.must_mend
    assert second.must_fence, "this process lives: it may wake up"
    first._ended.clear()
    first._keep_renewing()
    assert first.lost is not None
    first.release()
    with pytest.raises(LeaseTakenError):
        lease_of(lake, tmp_path, "bronze").take()
    second.release()


def test_an_owner_that_gave_up_is_followed_at_once_by_one_that_mends(lake: Lake, tmp_path: Path) -> None:
    first = lease_of(lake, tmp_path, "bronze", "silver")
    first.take()
    first.release(complete=False)
    silver = lease_of(lake, tmp_path, "silver")
    silver.take()
    assert silver.must_mend
    assert not silver.must_fence
    silver.release()
    for must_mend in (True, False):
        both = lease_of(lake, tmp_path, "bronze", "silver")
        both.take()
        assert both.must_mend is must_mend, "bronze is mended by whoever takes bronze next"
        both.release()


def test_an_owner_that_is_no_process_any_more_is_replaced_at_once(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lease_of(lake, tmp_path, "bronze")
    first.take()
    first.abandon()
    monkeypatch.setattr(leases, "_is_alive", lambda *_: False)
    monkeypatch.setattr(leases, "SILENCE_S", 3600.0)
    second = lease_of(lake, tmp_path, "bronze")
    second.take()
    assert second.must_mend
    assert not second.must_fence
    second.release()


def test_a_token_is_larger_than_any_that_a_table_has_seen(lake: Lake, tmp_path: Path) -> None:
    lease = lease_of(lake, tmp_path, "bronze")
    lease.take(lambda: 41)
    assert lease.token == 42
    lease.release()


def test_a_second_run_is_refused_and_a_woken_first_one_is_fenced(
    root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path
) -> None:
    river = River.make(kafka, tmp_path, "owners", partitions=1)
    for _ in range(3):
        river.flow()
    first = river.run(point="publisher.commit")
    first.await_held()

    with pytest.raises(LeaseTakenError, match="is being written by process"):
        river.finish()

    first.pause()
    assert published(kafka, river.sink, 1) == [], "the first one's transaction is open"
    river.finish()
    after = published(kafka, river.sink, 1)
    assert after

    first.resume()
    first.let_go()
    assert first.wait() == 1
    assert "fenced and writes nothing more" in first.said()
    assert published(kafka, river.sink, 1) == after
    river.flow()
    river.finish()
    assert river.losses(spark) == Losses()


def test_a_woken_merge_writes_nothing(root_session: SparkSession, spark: SparkSession, kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "zombie", partitions=1)
    river.flow()
    first = river.run("silver", point="silver.merge")
    river.finish("bronze")
    first.await_held()
    first.pause()
    river.flow()
    river.finish()
    versions = Lake(spark, river.settings).delta(tables.SILVER).history(1).collect()[0].version
    first.resume()
    first.let_go()
    assert first.wait() == 1
    assert "fenced and writes nothing more" in first.said()
    assert Lake(spark, river.settings).delta(tables.SILVER).history(1).collect()[0].version == versions
    assert river.losses(spark) == Losses()
