"""What a commit says about itself comes back from the table's history, whatever wrote and whatever
reads it."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import watersmeet
from tests.lake.conftest import Store
from tests.support.lakes import OpenSpark
from watersmeet.errors import LeaseLostError
from watersmeet.lake import tables
from watersmeet.lake.by_spark import SparkReader
from watersmeet.lake.commits import (
    Commit,
    is_conflict,
    last_commit,
    last_decision,
    ranges_fact,
    suppress_conflict,
)
from watersmeet.lake.table_reader import Version
from watersmeet.lake.tables import APPLICATION, DELETING, RESETTING
from watersmeet.running.owner import Owner

ROW = ("s", "t", 0, 1, 0, None)
FACTS = {
    "batch": 7,
    "reset": None,
    "text": "it's \"é\n",
    "ranges": [[0, 1, 2]],
    "nested": {"a": [None, 1.5, True]},
}


def test_a_commit_is_its_metadata() -> None:
    commit = Commit(APPLICATION, token=3, number=8, facts=FACTS)
    assert Commit.parse(commit.metadata) == commit
    assert commit.transaction_version == (3 << 32) + 8
    assert json.loads(commit.metadata) == {
        **FACTS,
        "application": "watersmeet",
        "token": 3,
        "number": 8,
        "code_version": watersmeet.__version__,
    }


def test_a_later_owner_and_a_later_number_have_a_larger_transaction_version() -> None:
    order = [Commit("a", token, number) for token in (0, 1, 2) for number in (0, 1, 2**31)]
    versions = [commit.transaction_version for commit in order]
    assert versions == sorted(set(versions))


def test_what_is_no_commit_of_ours_is_none() -> None:
    others = [
        None,
        "",
        "x",
        "[]",
        "{}",
        "1",
        '{"application": 1, "token": 1, "number": 1}',
        '{"application": "a", "token": "1"}',
    ]
    others += ['{"application": "a", "token": 1.5, "number": 1}', "[" * 100_000]
    assert [Commit.parse(text) for text in others] == [None] * len(others)


def test_facts_have_names_of_their_own() -> None:
    for name in ("application", "token", "number", "code_version"):
        with pytest.raises(ValueError, match=name):
            Commit("a", 1, 1, {name: 1})


def test_ranges_keep_their_partitions() -> None:
    ranges = {11: (0, 5), 2: (7, 7), 0: (2**40, 2**41)}
    fact = json.loads(json.dumps(ranges_fact(ranges)))
    assert fact == [[0, 2**40, 2**41], [2, 7, 7], [11, 0, 5]]
    assert {partition: (since, until) for partition, since, until in fact} == ranges


def write_by_spark(spark: SparkSession, store: Store, commit: Commit) -> None:
    options = {
        "txnAppId": commit.application,
        "txnVersion": str(commit.transaction_version),
        "userMetadata": commit.metadata,
    }
    frame = spark.createDataFrame(store.lake.layout["erased"].rows([ROW]))
    frame.write.format("delta").mode("append").options(**options).save(store.path("erased"))


@pytest.mark.long
def test_the_last_commit_of_an_application_is_found_behind_others(
    folder_store: Store, spark: SparkSession
) -> None:
    folder_store.create("erased")
    assert last_commit(folder_store.reader, "erased") is None
    folder_store.add("erased", ROW, commit=Commit(APPLICATION, 1, 4, FACTS))
    folder_store.add("erased", ROW, commit=Commit(f"{APPLICATION}-orders", 9, 1))
    for _ in range(2):
        folder_store.add("erased", ROW)
    by_spark = Commit("spark", 2, 5, FACTS)
    for _ in range(2):
        write_by_spark(spark, folder_store, by_spark)
    for asked in (folder_store.reader, SparkReader(folder_store.lake, lambda: spark)):
        for application, number, commit in (
            (APPLICATION, 1, Commit(APPLICATION, 1, 4, FACTS)),
            ("spark", 5, by_spark),
        ):
            found = last_commit(asked, "erased", application)
            assert found is not None
            assert (found[0].number, found[1]) == (number, commit)
    assert folder_store.reader.version("erased") == 5, "the second time it was there"


def owner(store: Store, token: int) -> Owner:
    return Owner(store, token)  # type: ignore[arg-type]


@pytest.mark.promise("O7")
@pytest.mark.fault("owners")
def test_an_earlier_owner_writes_nothing_once_it_is_fenced(folder_store: Store) -> None:
    folder_store.create("erased")
    decided = Commit(APPLICATION, 1, 8, FACTS)
    folder_store.add("erased", ROW, commit=decided)
    for token in (2, 2, 3):
        owner(folder_store, token).fence("erased")
        last = last_commit(folder_store.reader, "erased")
        assert last is not None
        assert (last[1].token, last[1].is_fence) == (token, True)
        assert last_decision(folder_store.reader, "erased") == (1, decided), (
            "what was done stays known"
        )
    assert folder_store.reader.version("erased") == 3, "one fence of each owner is enough"
    for token in (1, 2):
        folder_store.add("erased", ROW, commit=Commit(APPLICATION, token, 9))
        with pytest.raises(LeaseLostError, match="has been taken over by another process"):
            owner(folder_store, token).fence("erased")
    mine = owner(folder_store, 3).next_commit("erased")
    folder_store.add("erased", ROW, commit=mine)
    assert last_commit(folder_store.reader, "erased") == (
        folder_store.reader.history("erased", 1)[0],
        mine,
    )
    assert folder_store.reader.summary("erased", [], {"n": ("count", "*")})["n"].to_pylist() == [2]


@pytest.mark.promise("O8")
@pytest.mark.fault("owners")
def test_a_fence_says_what_an_earlier_owner_has_decided_just_before_it(folder_store: Store) -> None:
    """Also where that owner's numbers are below the ones that were looked at."""
    folder_store.create("erased")
    folder_store.add("erased", ROW, commit=Commit(APPLICATION, 1, 50, FACTS))
    meanwhile = Commit(APPLICATION, 2, 1, {"batch": 8})

    class Slow(Store):
        def append(self, name: str, rows: pa.Table, commit: Commit | None = None) -> None:
            folder_store.add("erased", ROW, commit=meanwhile)
            super().append(name, rows, commit)

    owner(Slow(folder_store.lake, folder_store.reader, folder_store.folder, None), 3).fence(
        "erased"
    )
    assert last_decision(folder_store.reader, "erased") == (2, meanwhile)
    owner(folder_store, 4).fence("erased")
    assert last_decision(folder_store.reader, "erased") == (2, meanwhile)


def test_a_fence_tells_what_was_decided_where_the_log_has_forgotten_it(folder_store: Store) -> None:
    folder_store.create("erased")
    decided = Commit(APPLICATION, 1, 8, FACTS)
    folder_store.add("erased", ROW, commit=decided)
    for token, forgotten in ((2, (0, 1)), (3, (2,))):
        owner(folder_store, token).fence("erased")
        DeltaTable(folder_store.path("erased")).create_checkpoint()
        for number in forgotten:
            Path(folder_store.path("erased"), "_delta_log", f"{number:020d}.json").unlink()
        assert last_decision(folder_store.reader, "erased") == (1, decided)


def test_a_table_without_a_commit_can_be_fenced(folder_store: Store) -> None:
    folder_store.create("erased")
    owner(folder_store, 2).fence("erased")
    found = last_commit(folder_store.reader, "erased")
    assert found is not None
    assert found[1] == Commit(APPLICATION, 2, 0)
    assert last_decision(folder_store.reader, "erased") is None


def test_the_fences_of_a_table_share_one_look_at_its_history(
    folder_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a catalog each look is a query of Spark, and a start has some twenty fences."""
    folder_store.create("erased")
    for number in range(30):
        folder_store.add("erased", ROW, commit=Commit(APPLICATION, 1, number + 1))
    history, looks = folder_store.reader.history, []

    def look(table: str, limit: int | None = None) -> list[Version]:
        looks.append((table, limit))
        return history(table, limit)

    monkeypatch.setattr(folder_store.reader, "history", look)
    applications = [APPLICATION, DELETING, RESETTING]
    owner(folder_store, 2).fence("erased", applications)
    assert len(looks) == 2, "one look before the fences, one after"
    for application in applications:
        last = last_commit(folder_store.reader, "erased", application)
        assert last is not None
        assert last[1] == Commit(application, 2, 0, last[1].facts)


@pytest.mark.promise("O6")
@pytest.mark.fault("commits")
@pytest.mark.parametrize("by", ["delta-rs", pytest.param("spark", marks=pytest.mark.long)])
def test_of_many_that_write_the_same_commit_one_does_and_others_find_a_conflict(
    folder_store: Store, open_spark: OpenSpark, by: str
) -> None:
    """By class, for Spark's errors and for delta-rs's."""
    folder_store.create("erased")
    commit, errors = Commit(APPLICATION, 1, 1), []
    barrier = threading.Barrier(4)

    def write() -> None:
        barrier.wait()
        try:
            if by == "spark":
                write_by_spark(open_spark(), folder_store, commit)
            else:
                folder_store.add("erased", ROW, commit=commit)
        except Exception as error:
            errors.append(error)

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [error for error in errors if not is_conflict(error)] == []
    assert folder_store.reader.summary("erased", [], {"n": ("count", "*")})["n"].to_pylist() == [1]


def test_nothing_else_is_a_conflict() -> None:
    assert not is_conflict(ValueError("a ConcurrentAppendException, it says"))
    with pytest.raises(KeyError), suppress_conflict():
        raise KeyError
    with suppress_conflict():
        pass


def test_rows_of_a_layout_have_its_types(folder_store: Store) -> None:
    table = folder_store.lake.layout[tables.PUBLISHED]
    rows = table.rows(
        [("t", 0, 1, 2, 253_402_300_799_999, "k", None, None, "id", None, None, "", *[None] * 6)]
    )
    assert rows.schema == table.schema
    assert rows["last_event_time"].cast(pa.int64()).to_pylist() == [253_402_300_799_999_000]
    assert table.rows([]).num_rows == 0
