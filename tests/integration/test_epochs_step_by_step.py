"""Lakes that are lost near changes of their window, message by message: each is taken up exactly,
or refused."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.support.cases import SOURCES, heartbeat, keyed
from tests.support.rivers import River
from tests.support.topics import published
from watersmeet import gold
from watersmeet.audit.verify import verify
from watersmeet.core.window import Window
from watersmeet.errors import ConfigurationError
from watersmeet.lake import tables
from watersmeet.monitoring.observability import Reporter
from watersmeet.operations.evolve import evolve
from watersmeet.run import Run

pytestmark = [pytest.mark.long, pytest.mark.promise("C7"), pytest.mark.fault("lost", "rules")]

Rows = Sequence[tuple[int, str | None]]
"""Of a source, event time and key of its next records; a heartbeat has no key."""


class Lake:
    """One partition, of which a batch sees one more record of each source, and a transaction
    publishes one message."""

    def __init__(
        self, kafka: str, folder: Path, name: str, window: Window, tracking: Rows, orders: Rows
    ) -> None:
        self.river = River.make(kafka, folder, name, partitions=1)
        self.configure(window)
        self.write(tracking, orders)

    def configure(self, window: Window) -> None:
        by_gap = {"window": {"gap": f"{window.gap_ms}ms", "max": f"{window.max_ms}ms"}}
        rule = {"timeout": f"{window.gap_ms}ms"} if window.is_timeout else by_gap
        self.river.config["merge"] = {**rule, "max_records_per_batch": 2}
        self.river.write()

    def write(self, tracking: Rows, orders: Rows) -> None:
        """Into the topics, and on into bronze."""
        for source, rows in zip(SOURCES, (tracking, orders), strict=True):
            for time, key in rows:
                self.river.send(source, 0, heartbeat(time) if key is None else keyed(key, time))
        Run(self.river.settings, ["bronze"], Reporter()).once()

    def merge(self, until: int) -> None:
        """Batch by batch, until the clock has come there, and no further."""
        with Run(self.river.settings, ["silver"], Reporter()).take_layers() as owned:
            assert any(plan.clocks.get(0, -1) >= until for plan in owned.silver.drain())

    def merge_all(self) -> None:
        Run(self.river.settings, ["silver"], Reporter()).once()

    def publish(self, messages: int) -> None:
        with Run(self.river.settings, ["gold"], Reporter()).take_layers() as owned:
            assert len(list(islice(owned.gold.drain(), messages))) == messages

    def change(self, window: Window) -> None:
        """The next epoch has this window, and a batch, though nothing is new."""
        self.configure(window)
        assert evolve(self.river.reader, self.river.settings, Reporter())["applied"]
        self.merge_all()

    def lose(self, window: Window) -> None:
        """And begin again at the sink, with this window in the configuration."""
        # A start that was refused has made none.
        shutil.rmtree(self.river.folder / "lake", ignore_errors=True)
        self.river.config["kafka"]["start"] = "sink"
        self.configure(window)
        self.write([], [])

    def sent(self) -> list[tuple[str, list[int], list[int]]]:
        """Of each message the key, and by source the event times of its records, once the lake has
        published all and is sound."""
        Run(self.river.settings, ["bronze", "silver", "gold"], Reporter()).once()
        assert verify(self.river.reader, self.river.settings, full=True)["problems"] == []
        values: list[Mapping[str, Any]] = [
            orjson.loads(m.value or b"") for m in published(self.river.kafka, self.river.sink, 1)
        ]
        return [
            (value["key"], *([part["ts"] for part in value[source]] for source in SOURCES))
            for value in values
        ]


@pytest.fixture(autouse=True)
def _one_message_a_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gold, "MAX_PER_TRANSACTION", 1)


CHANGED = "was read and merged by rules that changed meanwhile"


def test_a_lake_that_is_lost_while_what_was_merged_before_a_change_is_not_out_is_refused(
    kafka: str, tmp_path: Path
) -> None:
    """And another sink is filled by the new rules alone."""
    tracking = [(40, "b"), (43, None), (45, "c"), (90, "b"), (150, None), (200, None)]
    lake = Lake(kafka, tmp_path, "lost-near", Window(100), tracking, [(150, None), (200, None)])
    lake.merge(200)
    lake.change(Window(1))
    lake.publish(1)
    with pytest.raises(ConfigurationError, match=CHANGED):
        lake.lose(Window(1))
    lake.river.config["publish"]["topic"] = "lost-near-again"
    lake.lose(Window(1))
    assert lake.sent() == [("b", [40], []), ("c", [45], []), ("b", [90], [])]


@pytest.mark.nightly
def test_a_change_and_the_way_back_are_changes(kafka: str, tmp_path: Path) -> None:
    lake = Lake(
        kafka, tmp_path, "one-clock", Window(100), [(0, "a"), (50, "x"), (120, None)], [(120, None)]
    )
    lake.merge(120)
    lake.change(Window(1))
    lake.change(Window(100))
    lake.publish(1)
    with pytest.raises(ConfigurationError, match=CHANGED):
        lake.lose(Window(100))


@pytest.mark.nightly
def test_messages_of_a_window_by_gap_are_not_taken_up_by_a_timeout(
    kafka: str, tmp_path: Path
) -> None:
    lake = Lake(
        kafka,
        tmp_path,
        "by-gap",
        Window(100, 200),
        [(40, "b"), (45, "c"), (400, None)],
        [(400, None)],
    )
    lake.merge(400)
    lake.publish(1)
    with pytest.raises(ConfigurationError, match="were made by other rules"):
        lake.lose(Window(70))
    lake.lose(Window(100, 200))
    assert lake.sent() == [("b", [40], []), ("c", [45], [])]


def test_what_an_epoch_closes_at_once_is_closed_after_its_start_also_in_a_recovered_lake(
    kafka: str, tmp_path: Path
) -> None:
    tracking = [(0, "a"), (140, "x"), (150, None)]
    lake = Lake(kafka, tmp_path, "closed-at-once", Window(100), tracking, [(150, None)])
    lake.merge(150)
    lake.publish(1)
    lake.lose(Window(100))
    lake.merge(150)
    lake.change(Window(1))
    lake.write([(200, None)], [(200, None)])
    assert lake.sent() == [("a", [0], []), ("x", [140], [])]
    closed = lake.river.reader.select(tables.MERGED, ["merge_key", "closed_at"]).to_pylist()
    assert closed == [{"merge_key": "x", "closed_at": 151}]
