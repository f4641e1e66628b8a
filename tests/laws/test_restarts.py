"""A batch that a crash has cut short is completed by the next start; an owner that was fenced
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
from watersmeet.lake.partitioned import PartitionedFiles
from watersmeet.lake.progress import last_batch

SOURCES = ("tracking", "orders", "returns")
WRITE = PartitionedFiles.write
WRITTEN = (tables.SILVER, tables.LATE, tables.DUPLICATES, tables.PROGRESS, tables.IDLE_HEARTBEATS)


def dying_once_written(files: PartitionedFiles, chunks: Iterable[pa.Table]) -> list[AddAction]:
    """New files are there, and no commit names them."""
    WRITE(files, chunks)
    raise CrashError


def last_batches(lake: CaseLake) -> tuple[int, int]:
    """Of which batch silver's last commit, and `progress`, tell."""
    last = last_batch(lake.reader, lake.settings)
    noted = lake.reader.summary(tables.PROGRESS, [], {"batch": ("max", "batch")})
    return -1 if last is None else last[0].batch, noted["batch"][0].as_py()


def batches(lake: CaseLake) -> tuple[int, int]:
    """How many batches silver's commits hold, and how many `progress` has."""
    noted = lake.reader.summary(tables.PROGRESS, ["batch"], {})
    return lake.reader.version(tables.SILVER), noted.num_rows


@pytest.mark.promise("N2", "O3", "O7")
@in_folders
def test_whatever_step_is_cut_off_the_next_start_completes_it_and_a_fenced_owner_changes_nothing(
    new_lake: MakeLake,
) -> None:
    cases = cases_with_ids(rich_cases(16, 500, SOURCES, refused=False))
    ids = {f"sources__{name}__id": "i" for name in SOURCES}
    lake = new_lake(cases, sources=SOURCES, **ids)

    def crash(operation: str, table: str, *, after: bool = False) -> tuple[int, int]:
        with pytest.raises(CrashError):
            list(lake.start(engine=dying_at(lake.engine, operation, table, after=after)).drain())
        return batches(lake)

    lake.arrive(0.25)
    assert crash("merge", tables.SILVER) == (0, 0), "before its commit, nothing is known of a batch"

    # The answer to a commit does not come, and the same owner goes on.
    silver = lake.start(engine=dying_at(lake.engine, "merge", tables.SILVER, after=True, times=1))
    with pytest.raises(CrashError):
        list(silver.drain())
    assert batches(lake) == (1, 0), "the commit to silver decides"
    lake.arrive(0.5)
    assert [plan.batch for plan in silver.drain()] == [1]
    assert batches(lake) == (2, 2)

    lake.arrive(0.75)
    assert crash("append", tables.LATE) == (3, 2)
    repeated = lake.reader.version(tables.DUPLICATES)
    assert crash("append", tables.DUPLICATES) == (3, 2)
    assert lake.reader.version(tables.DUPLICATES) == repeated
    assert crash("append", tables.PROGRESS) == (3, 2), (
        "a start that completes it may be cut off too"
    )
    late, repeated = (lake.reader.version(name) for name in (tables.LATE, tables.DUPLICATES))
    paused = lake.start()
    assert list(paused.drain()) == []
    assert batches(lake) == (3, 3)
    assert lake.reader.version(tables.LATE) == late, "what was written is not written again"
    assert lake.reader.version(tables.DUPLICATES) == repeated

    # An owner that is paused between its plan and its commit.
    lake.arrive()
    plan = paused.recover().next()
    assert plan is not None
    lake.token += 1
    later = lake.owner()
    later.fence(tables.SILVER)
    later.fence(tables.IDLE_HEARTBEATS)
    before = [lake.reader.version(name) for name in WRITTEN]
    with pytest.raises(LeaseLostError, match="has been taken over by another process"):
        paused.commit(plan)
    with pytest.raises(LeaseLostError):
        paused.owner.append(
            tables.IDLE_HEARTBEATS,
            lake.engine.lake.layout[tables.IDLE_HEARTBEATS].schema.empty_table(),
        )
    assert [lake.reader.version(name) for name in WRITTEN] == before
    assert lake.merge() == 1

    assert lake.silver() == expected_silver(lake.cases, SOURCES)
    assert lake.late() == expected_late(lake.cases, SOURCES)
    assert lake.duplicates() == expected_duplicates(lake.cases, SOURCES)
    rows = lake.reader.summary(tables.PROGRESS, ["batch"], {"rows": ("count", "*")}).to_pylist()
    expected = len(lake.cases) * len(SOURCES)
    assert sorted(tuple(row.values()) for row in rows) == [
        (batch, expected) for batch in range(4)
    ], "each is noted once"


@pytest.mark.promise("C24")
@pytest.mark.long
@pytest.mark.parametrize("kind", [QUICK], indirect=True, scope="module")
def test_the_same_holds_of_a_batch_that_writes_the_open_records_anew(
    new_lake: MakeLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(cases_with_ids(rich_cases(4, 1656, wealth="late")), **IDS)
    rewrite_open_records(monkeypatch)

    def crash(died_at: str, table: str, *, after: bool = False) -> int:
        """How many batches are in silver and not noted, once a start has died."""
        with pytest.raises(CrashError):
            list(lake.start(engine=dying_at(lake.engine, died_at, table, after=after)).drain())
        silver, noted = last_batches(lake)
        return silver - noted

    lake.arrive(0.3)
    lake.merge()
    rewrites = rewrites_of(lake.settings)
    lake.arrive(0.5)
    with monkeypatch.context() as patch:
        patch.setattr(PartitionedFiles, "write", dying_once_written)
        assert crash("none", tables.SILVER) == 0, "before its commit, nothing is known of a batch"
    assert rewrites_of(lake.settings) == rewrites
    assert crash("merge_in_chunks", tables.SILVER, after=True) == 1, "the commit to silver decides"
    assert crash("append", tables.PROGRESS) == 1, "a start that completes it may be cut off too"
    lake.merge()
    lake.arrive(0.8)
    assert crash("append", tables.LATE) == 1
    lake.merge()

    # An owner that is replaced before it reads what it writes anew.
    lake.arrive()
    paused, versions = lake.start(), list[int]()

    def replaced(files: PartitionedFiles, chunks: Iterable[pa.Table]) -> list[AddAction]:
        lake.token += 1
        lake.owner(lake.quick).fence(tables.SILVER)
        versions.extend(lake.quick.reader.version(name) for name in WRITTEN)
        return WRITE(files, chunks)

    with monkeypatch.context() as patch:
        patch.setattr(PartitionedFiles, "write", replaced)
        with pytest.raises(TableConflictError):
            list(paused.drain())
    assert [lake.reader.version(name) for name in WRITTEN] == versions, (
        "the fence is the last commit"
    )
    with pytest.raises(LeaseLostError):
        list(paused.drain())
    assert lake.merge()

    assert rewrites_of(lake.settings) > rewrites + 4
    assert lake.silver() == expected_silver(lake.cases)
    assert lake.late() == expected_late(lake.cases)
    assert lake.duplicates() == expected_duplicates(lake.cases)
    noted = lake.reader.select(tables.PROGRESS, ["batch", "partition", "source"]).to_pylist()
    assert len(noted) == len({tuple(row.values()) for row in noted}), "each is noted once"
