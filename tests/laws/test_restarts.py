"""A batch is there as a whole, or not at all, wherever a crash comes; an owner that was fenced
changes nothing more."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pytest
from deltalake.transaction import AddAction

from tests.laws.conftest import QUICK, MakeLake, in_folders
from tests.support.cases import (
    cases_with_ids,
    expected_duplicates,
    expected_late,
    expected_silver,
    rich_cases,
)
from tests.support.configurations import IDS
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import CaseLake
from tests.support.rewrites import rewrite_open_records, rewrites_of
from watersmeet.errors import LeaseLostError, TableConflictError
from watersmeet.lake import tables
from watersmeet.lake.data_file import PartitionedFiles
from watersmeet.lake.progress import last_batch

SOURCES = ("tracking", "orders", "returns")
WRITE = PartitionedFiles.write


def dying_once_written(files: PartitionedFiles, chunks: Iterable[pa.Table]) -> list[AddAction]:
    """New files are there, and no commit names them."""
    WRITE(files, chunks)
    raise CrashError


def batches(lake: CaseLake) -> int:
    """How many batches silver has."""
    last = last_batch(lake.reader)
    return 0 if last is None else last.batch + 1


@pytest.mark.promise("N2", "O3", "O7")
@pytest.mark.fault("kill", "owners", oracle=True)
@in_folders
def test_a_batch_that_is_cut_off_is_there_as_a_whole_or_not_and_a_fenced_owner_changes_nothing(
    new_lake: MakeLake,
) -> None:
    cases = cases_with_ids(rich_cases(16, 500, SOURCES, refused=False))
    ids = {f"sources__{name}__id": "i" for name in SOURCES}
    lake = new_lake(cases, sources=SOURCES, **ids)

    def crash(*, after: bool = False) -> int:
        dying = dying_at(lake.engine, "merge", tables.SILVER, after=after)
        with pytest.raises(CrashError):
            list(lake.start(engine=dying).drain())
        return batches(lake)

    lake.arrive(0.25)
    assert crash() == 0, "before its commit, nothing is known of a batch"

    # The answer to a commit does not come, and the same owner goes on.
    silver = lake.start(engine=dying_at(lake.engine, "merge", tables.SILVER, after=True, times=1))
    with pytest.raises(CrashError):
        list(silver.drain())
    assert batches(lake) == 1, "the commit to silver decides"
    lake.arrive(0.5)
    assert [plan.batch for plan in silver.drain()] == [1]
    assert batches(lake) == 2

    lake.arrive(0.75)
    assert crash(after=True) == 3
    version = lake.reader.version(tables.SILVER)
    paused = lake.start()
    fences = lake.reader.version(tables.SILVER) - version
    assert list(paused.drain()) == []
    assert lake.reader.version(tables.SILVER) == version + fences, "nothing is left to complete"

    # An owner that is paused between its plan and its commit.
    lake.arrive()
    plan = paused.recover().next()
    assert plan is not None
    lake.token += 1
    lake.owner().fence(tables.SILVER)
    before = lake.reader.version(tables.SILVER)
    with pytest.raises(LeaseLostError, match="has been taken over by another process"):
        paused.commit(plan)
    assert lake.reader.version(tables.SILVER) == before
    assert lake.merge() == 1

    assert lake.silver() == expected_silver(lake.cases, SOURCES)
    assert lake.late() == expected_late(lake.cases, SOURCES)
    assert lake.duplicates() == expected_duplicates(lake.cases, SOURCES)
    rows = lake.reader.summary(tables.PROGRESS, ["batch"], {"rows": ("count", "*")}).to_pylist()
    expected = len(lake.cases) * len(SOURCES)
    assert sorted(tuple(row.values()) for row in rows) == [
        (batch, expected) for batch in range(4)
    ], "each is noted once"


@pytest.mark.nightly
@pytest.mark.promise("C24")
@pytest.mark.fault("kill", "owners", "memory", oracle=True)
@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_the_same_holds_of_a_batch_that_writes_the_open_records_anew(
    new_lake: MakeLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(cases_with_ids(rich_cases(4, 1656, wealth="late")), **IDS)
    rewrite_open_records(monkeypatch)

    def crash(died_at: str, *, after: bool = False) -> int:
        """How many batches are in silver, once a start has died."""
        dying = dying_at(lake.engine, died_at, tables.SILVER, after=after)
        with pytest.raises(CrashError):
            list(lake.start(engine=dying).drain())
        return batches(lake)

    lake.arrive(0.3)
    lake.merge()
    merged = batches(lake)
    rewrites = rewrites_of(lake.settings)
    lake.arrive(0.5)
    with monkeypatch.context() as patch:
        patch.setattr(PartitionedFiles, "write", dying_once_written)
        assert crash("none") == merged, "before its commit, nothing is known of a batch"
    assert rewrites_of(lake.settings) == rewrites
    assert crash("merge_in_chunks", after=True) == merged + 1, "the commit to silver decides"
    lake.merge()
    lake.arrive(0.8)
    lake.merge()

    # An owner that is replaced before it reads what it writes anew.
    lake.arrive()
    paused, versions = lake.start(), list[int]()

    def replaced(files: PartitionedFiles, chunks: Iterable[pa.Table]) -> list[AddAction]:
        lake.token += 1
        lake.owner(lake.quick).fence(tables.SILVER)
        versions.append(lake.quick.reader.version(tables.SILVER))
        return WRITE(files, chunks)

    with monkeypatch.context() as patch:
        patch.setattr(PartitionedFiles, "write", replaced)
        with pytest.raises(TableConflictError):
            list(paused.drain())
    assert [lake.reader.version(tables.SILVER)] == versions, "the fence is the last commit"
    with pytest.raises(LeaseLostError):
        list(paused.drain())
    assert lake.merge()

    assert rewrites_of(lake.settings) > rewrites + 2
    assert lake.silver() == expected_silver(lake.cases)
    assert lake.late() == expected_late(lake.cases)
    assert lake.duplicates() == expected_duplicates(lake.cases)
    noted = lake.reader.select(tables.PROGRESS, ["batch", "partition", "source"]).to_pylist()
    assert len(noted) == len({tuple(row.values()) for row in noted}), "each is noted once"
