"""A batch that a crash has cut short is completed by the next start; an owner that was fenced changes nothing more."""

from __future__ import annotations

import pytest

from pipelines.errors import LeaseLostError
from pipelines.lake import tables
from tests.laws.conftest import MakeLake, in_folders_of_both
from tests.support.cases import expected_late, expected_silver, rich_cases
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import CaseLake

SOURCES = ("tracking", "orders", "returns")
WRITTEN = (tables.SILVER, tables.LATE, tables.PROGRESS, tables.IDLE_HEARTBEATS)


def batches(lake: CaseLake) -> tuple[int, int]:
    """How many batches silver's commits hold, and how many `progress` has."""
    noted = lake.questions.summary(tables.PROGRESS, ["batch"], {})
    return lake.questions.version(tables.SILVER), noted.num_rows


@pytest.mark.promise("N2", "O3", "O7")
@in_folders_of_both
def test_whatever_step_is_cut_off_the_next_start_completes_it_and_a_fenced_owner_changes_nothing(new_lake: MakeLake) -> None:
    lake = new_lake(rich_cases(16, 500, SOURCES, refused=False), sources=SOURCES)

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
    assert crash("append", tables.PROGRESS) == (3, 2), "a start that completes it may be cut off too"
    late = lake.questions.version(tables.LATE)
    paused = lake.start()
    assert list(paused.drain()) == []
    assert batches(lake) == (3, 3)
    assert lake.questions.version(tables.LATE) == late, "what was written is not written again"

    # An owner that is paused between its plan and its commit.
    lake.arrive()
    plan = paused.planner.next()
    assert plan is not None
    lake.token += 1
    later = lake.owner()
    later.fence(tables.SILVER)
    later.fence(tables.IDLE_HEARTBEATS)
    before = [lake.questions.version(name) for name in WRITTEN]
    with pytest.raises(LeaseLostError, match="has been taken over by another process"):
        paused.commit(plan)
    with pytest.raises(LeaseLostError):
        paused.owner.append(tables.IDLE_HEARTBEATS, lake.engine.lake.layout[tables.IDLE_HEARTBEATS].schema.empty_table())
    assert [lake.questions.version(name) for name in WRITTEN] == before
    assert lake.merge() == 1

    assert lake.silver() == expected_silver(lake.cases, SOURCES)
    assert lake.late() == expected_late(lake.cases, SOURCES)
    rows = lake.questions.summary(tables.PROGRESS, ["batch"], {"rows": ("count", "*")}).to_pylist()
    expected = len(lake.cases) * len(SOURCES)
    assert sorted(tuple(row.values()) for row in rows) == [(batch, expected) for batch in range(4)], "each is noted once"
