"""A batch is the same after it was rows of silver."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lake.conftest import Store
from tests.support.inputs import tp_of
from watersmeet.core.plan import BatchPlan, OffsetRange
from watersmeet.core.silver import in_silver
from watersmeet.lake.commits import Commit
from watersmeet.lake.progress import batch_rows, last_batch
from watersmeet.running.owner import Owner

T = 1_700_000_000_000
SMALL = BatchPlan(
    7,
    {
        tp_of("tracking", 0): OffsetRange(0, 5, None, T + 9, T + 12),
        tp_of("orders", 0): OffsetRange(3, 3, None, T, T),
        tp_of("tracking", 11): OffsetRange(2, 4, None, None, None),
        tp_of("orders", 11): OffsetRange(0, 0, None, None, None),
    },
    {0: T},
    generation=3,
    epoch=2,
)


def write(store: Store, plan: BatchPlan) -> None:
    rows = in_silver(batch_rows(plan, T + 1), "batch", store.lake.schema("silver"))
    store.append("silver", rows)


def test_progress_has_a_row_for_each_topic_partition(folder_store: Store) -> None:
    folder_store.create("silver")
    write(folder_store, SMALL)
    columns = ["source", "topic", "partition", "from_offset", "until_offset", "head", "clock"]
    columns += ["position", "epoch", "generation", "committed_at"]
    found = folder_store.reader.select(
        "progress", columns, [[("source", "=", "tracking")]]
    ).sort_by("partition")
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        ("tracking", "tracking", 0, 0, 5, T + 12, T, T + 9, 2, 3, T + 1),
        ("tracking", "tracking", 11, 2, 4, None, None, None, 2, 3, T + 1),
    ]


@pytest.mark.promise("N2", "N11")
@pytest.mark.fault("commits")
def test_the_last_batch_is_what_silver_says_whoever_has_committed_since(
    folder_store: Store,
) -> None:
    folder_store.create("silver")
    assert last_batch(folder_store.reader) is None
    write(folder_store, replace(SMALL, batch=6, clocks={}))
    write(folder_store, SMALL)
    assert last_batch(folder_store.reader) == SMALL
    folder_store.add("silver", commit=Commit("maintenance", 1, 1))
    folder_store.add("silver")
    Owner(folder_store, 2).fence("silver")  # type: ignore[arg-type]
    assert last_batch(folder_store.reader) == SMALL
