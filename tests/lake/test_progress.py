"""A batch is the same after it was a commit, and after it was rows of `progress`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.lake.conftest import Store, settings_for
from tests.support.inputs import tp_of
from watersmeet.core.plan import BatchPlan, OffsetRange
from watersmeet.lake.commits import APPLICATION, Commit
from watersmeet.lake.progress import facts_of, last_batch, plan_of, progress_rows
from watersmeet.running.owner import Owner

T = 1_700_000_000_000
SMALL = BatchPlan(
    7,
    {
        tp_of("tracking", 0): OffsetRange(0, 5, None, T + 9, T + 12),
        tp_of("orders", 0): OffsetRange(3, 3, T, T, T),
        tp_of("tracking", 11): OffsetRange(2, 4, None, None, None),
        tp_of("orders", 11): OffsetRange(0, 0, None, None, None),
    },
    {0: T},
    has_late=True,
)


def test_a_batch_is_its_facts(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    for plan in (
        SMALL,
        replace(SMALL, has_late=False, generation=3),
        BatchPlan(0, {}, {}, has_late=False),
    ):
        facts = facts_of(plan, settings)
        assert plan_of(json.loads(json.dumps(facts)), settings) == plan
        assert (facts["batch"], facts["configuration"], facts["generation"]) == (
            plan.batch,
            settings.digest,
            plan.generation,
        )


def test_a_wide_batch_stays_small(tmp_path: Path) -> None:
    settings = settings_for(tmp_path)
    of_all = {
        tp_of(source, p): OffsetRange(
            10**10 + p, 10**10 + p + 999, T + p, T + p + 3_600_000, T + p + 7_200_000
        )
        for p in range(900)
        for source in settings.sources
    }
    facts = facts_of(
        BatchPlan(10**6, of_all, {p: T + p + 3_600_000 for p in range(900)}, has_late=True),
        settings,
    )
    assert len(Commit(APPLICATION, 3, 10**6 + 1, facts).metadata) < 130_000


def test_progress_has_a_row_for_each_topic_partition(folder_store: Store) -> None:
    folder_store.create("progress")
    rows = progress_rows(SMALL, folder_store.settings, 41, T)
    assert rows.schema == folder_store.lake.layout["progress"].schema
    folder_store.append("progress", rows)
    columns = [
        "source",
        "topic",
        "partition",
        "from_offset",
        "until_offset",
        "head",
        "clock",
        "position",
        "silver_version",
    ]
    found = folder_store.reader.select(
        "progress", columns, [[("source", "=", "tracking")]]
    ).sort_by("partition")
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        ("tracking", "tracking", 0, 0, 5, T + 12, T, T + 9, 41),
        ("tracking", "tracking", 11, 2, 4, None, None, None, 41),
    ]


@pytest.mark.promise("N2")
def test_the_last_batch_is_what_silvers_last_commit_says(folder_store: Store) -> None:
    folder_store.create("silver", "progress")
    assert last_batch(folder_store.reader, folder_store.settings) is None
    earlier, commit = (
        Commit(APPLICATION, 1, p.batch + 1, facts_of(p, folder_store.settings))
        for p in (replace(SMALL, batch=6), SMALL)
    )
    folder_store.add("silver", commit=earlier)
    folder_store.add("silver", commit=commit)
    assert last_batch(folder_store.reader, folder_store.settings) == (SMALL, 2, commit)
    folder_store.add("silver", commit=Commit("maintenance", 1, 1))
    folder_store.add("silver")
    assert last_batch(folder_store.reader, folder_store.settings) == (SMALL, 2, commit), (
        "what others have committed since changes nothing"
    )
    Owner(folder_store, 2).fence("silver")  # type: ignore[arg-type]
    assert last_batch(folder_store.reader, folder_store.settings) == (SMALL, 2, commit), (
        "under the token that decided it"
    )


@pytest.mark.promise("N11")
def test_progress_tells_where_the_log_has_forgotten(folder_store: Store) -> None:
    folder_store.create("silver", "progress")
    before = BatchPlan(
        6,
        {
            tp: OffsetRange(0, r.from_offset, None, r.position_before, None)
            for tp, r in SMALL.ranges.items()
        },
        {},
        False,
    )
    for version, plan in ((4, before), (5, SMALL)):
        folder_store.append("progress", progress_rows(plan, folder_store.settings, version, T))
    found = last_batch(folder_store.reader, folder_store.settings)
    assert found == (SMALL, 5, Commit(APPLICATION, 0, 8))
    Owner(folder_store, 2).fence("silver")  # type: ignore[arg-type]
    assert last_batch(folder_store.reader, folder_store.settings) == found, (
        "a fence of nothing says nothing"
    )
