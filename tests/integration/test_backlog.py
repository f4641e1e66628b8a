"""A backlog of two sources of very different rates: lockstep costs neither state nor batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cases import Case, expected_silver, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.lakes import CaseLake, OpenSpark, engine_for
from watersmeet.lake import tables

FAST, SLOW = 20_000, 200
SHARE = 2_000
STEP_MS = 5


@pytest.mark.long
@pytest.mark.promise("C17")
@pytest.mark.fault("memory")
def test_a_source_a_hundred_times_faster_costs_neither_state_nor_throughput(
    open_spark: OpenSpark, tmp_path: Path
) -> None:
    end = FAST * STEP_MS
    tracking = [keyed(f"k{n // 5}", n * STEP_MS) for n in range(FAST)]
    orders = [keyed(f"k{n * 20}", n * 100 * STEP_MS) for n in range(SLOW)]
    case = Case(
        {"tracking": [*tracking, heartbeat(end)], "orders": [*orders, heartbeat(end)]}, 1000
    )
    case.arrivals = ["tracking"] * len(case.values["tracking"]) + ["orders"] * len(
        case.values["orders"]
    )
    settings = settings_for(tmp_path, merge__timeout="1s", merge__max_records_per_batch=2 * SHARE)
    lake = CaseLake(engine_for(open_spark, settings), settings, {0: case})
    lake.arrive()
    most_open, batches = 0, 0
    for _ in lake.start().drain():
        batches += 1
        found = lake.reader.summary(
            tables.SILVER, [], {"open": ("count", "*")}, [[("status", "=", "open")]]
        )
        most_open = max(most_open, found["open"][0].as_py())
    # Full batches of the fast source, though it is far ahead in Kafka; and open is only what the
    # timeout keeps open.
    assert batches <= FAST / SHARE + 2
    assert most_open <= 1000 / STEP_MS / 5 + 5
    assert lake.silver() == expected_silver(lake.cases)
