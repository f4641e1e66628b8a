"""Offsets that Kafka deletes before they are read: told, or accepted, in a partition that was empty
and while a run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cases import keyed
from tests.support.rivers import River, until
from tests.support.topics import delete_records, produce
from watersmeet import bronze
from watersmeet.errors import WatersmeetError
from watersmeet.lake import tables
from watersmeet.monitoring.observability import Reporter
from watersmeet.run import LAYERS, Run

pytestmark = [pytest.mark.promise("C21"), pytest.mark.fault("retention")]


def lose(river: River, partition: int, first: int) -> None:
    """Ten records come to a partition of tracking, and five of them are deleted before anybody has
    read them."""
    produce(river.kafka, river.topic("tracking"), [(partition, keyed("a", n)) for n in range(10)])
    delete_records(river.kafka, river.topic("tracking"), partition, first + 5)


def offsets(river: River, partition: int) -> list[int]:
    found = river.reader.select(
        tables.bronze("tracking"), ["offset"], [[("partition", "=", partition)]]
    )
    return sorted(found["offset"].to_pylist())


def gaps(river: River) -> list[tuple[object, ...]]:
    columns = ["source", "partition", "from_offset", "to_offset", "reason"]
    return [tuple(row.values()) for row in river.reader.select(tables.RESETS, columns).to_pylist()]


def test_a_loss_in_a_partition_that_was_empty_is_told(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "loss-told")
    produce(kafka, river.topic("tracking"), [(1, keyed("a", 5))])
    river.finish()
    lose(river, 0, 0)
    with pytest.raises(
        WatersmeetError,
        match=r"no longer has offsets of tracking .*: .*\[0\] from 0 to 4; restore them",
    ):
        river.finish()
    assert offsets(river, 0) == []
    river.config["kafka"]["on_data_loss"] = "continue"
    river.write()
    river.finish()
    assert offsets(river, 0) == [5, 6, 7, 8, 9]
    assert gaps(river) == [("tracking", 0, 0, 5, "on_data_loss: continue")]
    assert river.broken_promises() == []


def test_what_was_gone_before_the_lake_began_is_no_loss(kafka: str, tmp_path: Path) -> None:
    river = River.make(kafka, tmp_path, "loss-before")
    lose(river, 0, 0)
    river.finish()
    assert (offsets(river, 0), gaps(river)) == ([5, 6, 7, 8, 9], [])


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_loss_while_a_run_goes_on_ends_it_or_is_accepted(
    kafka: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    river = River.make(kafka, tmp_path, f"loss-{policy}", partitions=1, kafka__on_data_loss=policy)
    produce(kafka, river.topic("tracking"), [(0, keyed("a", 1))])
    held, released = threading.Event(), threading.Event()

    def hold(point: str) -> None:
        if point == "bronze.append" and not released.is_set():
            held.set()
            released.wait(60)

    monkeypatch.setattr(bronze, "fault_point", hold)
    run, failures = Run(river.settings, LAYERS, Reporter()), list[Exception]()

    def follow(work: Callable[[], None]) -> None:
        try:
            work()
        except WatersmeetError as error:
            failures.append(error)

    running = threading.Thread(target=follow, args=[run.until_stopped])
    running.start()
    try:
        until(held.is_set, "the first batch", 60)
        lose(river, 0, 1)
        released.set()
        if policy == "continue":
            until(lambda: offsets(river, 0) == [0, 6, 7, 8, 9, 10], "what is left", 60)
        else:
            running.join(60)
    finally:
        released.set()
        run.stopping.set()
        running.join(60)
    if policy == "continue":
        assert failures == []
        assert gaps(river) == [("tracking", 0, 1, 6, "on_data_loss: continue")]
    else:
        [failure] = failures
        assert "no longer has offsets of" in str(failure)
        assert offsets(river, 0) == [0]
