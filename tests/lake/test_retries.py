"""What is tried again after a failure: only the tables know whether its commit was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.lake.conftest import Store
from tests.support.cases import Case, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.crashes import CrashError, dying_at
from tests.support.inputs import tp_of
from tests.support.lakes import CaseLake, begin_at, records_of
from watersmeet.bronze import Bronze
from watersmeet.engine import Summary, Taken
from watersmeet.engine.choice import open_engine
from watersmeet.errors import CommitRepeatedError
from watersmeet.kafka.idle_detector import IdleDetector
from watersmeet.lake import tables
from watersmeet.lake.history import Generation
from watersmeet.lake.progress import last_batch, read_decisions
from watersmeet.lake.table_reader import TableReader
from watersmeet.run import create_missing
from watersmeet.running.next_offsets import NextOffsets
from watersmeet.running.owner import Owner
from watersmeet.settings import Settings

TABLE = tables.bronze("tracking")


def values(*offsets: int, refused: int = -1) -> dict[tuple[int, int], bytes | None]:
    return {
        (0, offset): b"no JSON" if offset == refused else keyed("a", offset) for offset in offsets
    }


@dataclass
class Reading:
    """Bronze over a topic whose records the test holds; some of its engine's calls may fail."""

    bronze: Bronze
    settings: Settings
    reader: TableReader
    records: dict[tuple[int, int], bytes | None]

    @contextmanager
    def taken(
        self, _: object, ranges: Mapping[int, tuple[int, int]], summary: Summary
    ) -> Iterator[Taken]:
        """What Kafka has in these ranges."""
        first, end = ranges[0]
        there = {place: v for place, v in self.records.items() if first <= place[1] < end}
        rows = records_of(
            self.settings, self.settings.inputs_by_name["tracking"], there or values(0)
        )
        rows = rows if there else rows.slice(0, 0)
        yield Taken(rows, summary.of(rows), {0: end})

    def take(self, records: Mapping[tuple[int, int], bytes | None], end: int) -> None:
        """A batch of these records, before this offset."""
        self.records = dict(records)
        self.bronze.take({0: end})

    @property
    def offsets(self) -> list[int]:
        return sorted(self.reader.select(TABLE, ["offset"])["offset"].to_pylist())

    @property
    def refused(self) -> list[int]:
        return sorted(self.reader.select(tables.QUARANTINE, ["offset"])["offset"].to_pylist())


def reading_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, after: bool, **overrides: Any
) -> Reading:
    """Bronze of a lake without Kafka, whose first commit fails before it is made, or after."""
    settings = settings_for(tmp_path, engine="embedded", **overrides)
    engine = open_engine(settings)
    create_missing(engine)
    owner = Owner(dying_at(engine, "append", TABLE, after=after, times=1), token=1)
    next_offsets = NextOffsets(engine.reader, settings, 1, owner)
    begin_at(Owner(engine, token=1), settings, {tp_of(s, 0): 0 for s in settings.inputs})
    monkeypatch.setattr(next_offsets, "bounds", lambda _: {0: (0, 100)})
    monkeypatch.setattr(next_offsets, "leader_epochs", lambda _: {})
    monkeypatch.setattr(next_offsets, "replaced", lambda *_: {})
    bronze = Bronze(owner, settings, settings.inputs_by_name["tracking"], next_offsets)
    reading = Reading(bronze, settings, engine.reader, {})
    monkeypatch.setattr(engine, "taken", reading.taken)
    return reading


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reading:
    """Bronze whose first commit is made without an answer."""
    return reading_of(tmp_path, monkeypatch, after=True)


@pytest.mark.parametrize("after", [False, True], ids=["before-its-commit", "after-its-commit"])
def test_a_batch_that_is_tried_again_is_written_once(
    after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = reading_of(tmp_path, monkeypatch, after=after)
    with pytest.raises(CrashError):
        reading.take(values(0, 1), 2)
    for end in (2, 2, 4, 4):
        reading.take(values(*range(end)), end)
    assert reading.offsets == [0, 1, 2, 3]
    assert reading.reader.version(TABLE) == 2


@pytest.mark.promise("N24")
@pytest.mark.fault("commits", "retention")
@pytest.mark.parametrize("gone", [(0,), (3,), (1,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_a_batch_that_is_tried_again_is_written_once_whatever_kafka_has_lost_of_it(
    reading: Reading, gone: Sequence[int]
) -> None:
    """The first, the last, the refused record, or all of them, were compacted or deleted
    meanwhile."""
    with pytest.raises(CrashError):
        reading.take(values(0, 1, 2, 3, refused=1), 4)
    reading.take(values(*(offset for offset in range(4) if offset not in gone), refused=1), 4)
    assert reading.offsets == [0, 1, 2, 3]
    assert reading.refused == [1], "it is noted all the same"
    reading.take(values(4, 6, refused=6), 7)
    assert (reading.offsets, reading.refused) == ([0, 1, 2, 3, 4, 6], [1, 6])


@pytest.mark.promise("N24")
@pytest.mark.fault("commits")
def test_of_a_batch_that_is_tried_again_with_more_behind_it_only_that_is_written(
    reading: Reading,
) -> None:
    with pytest.raises(CrashError):
        reading.take(values(0, 1, refused=1), 2)
    reading.take(values(0, 1, 2, 3, refused=1), 4)
    assert (reading.offsets, reading.refused) == ([0, 1, 2, 3], [1])


def test_records_of_a_batch_that_is_tried_again_count_once_towards_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = reading_of(tmp_path, monkeypatch, after=False)
    mostly_bad = {(0, n): b"no JSON" if n % 4 else keyed("a", n) for n in range(600)}
    with pytest.raises(CrashError):
        reading.take(mostly_bad, 600)
    reading.take(mostly_bad, 600)
    assert len(reading.offsets) == 600, "of fewer than a thousand, most may be bad"


@pytest.mark.promise("N25")
@pytest.mark.fault("commits")
def test_a_commit_of_an_earlier_try_that_says_something_else_is_not_taken_for_the_later_one(
    folder_store: Store,
) -> None:
    """The earlier try was still under way when its answer did not come, and lands first."""
    folder_store.create("published")
    owner = Owner(folder_store, token=1)  # type: ignore[arg-type]
    nothing = folder_store.lake.layout["published"].schema.empty_table()
    earlier, later = (
        owner.next_commit("published", facts={"batch": 0, "offsets": [n]}) for n in (1, 2)
    )
    assert earlier.transaction_version == later.transaction_version
    for commit in (earlier, later):
        folder_store.append("published", nothing, commit)
    with pytest.raises(CommitRepeatedError, match="was made by an earlier try"):
        owner.confirm("published", later)
    assert owner.confirm("published", earlier) == 1


@pytest.mark.promise("N25")
@pytest.mark.fault("commits", "silence")
def test_an_idle_decision_whose_answer_did_not_come_is_known_when_it_is_tried_again(
    tmp_path: Path,
) -> None:
    settings = settings_for(tmp_path, engine="embedded", merge__idle_after="10s")
    engine = open_engine(settings)
    case = Case(
        {"tracking": [heartbeat(500)], "orders": [keyed("a", 10)]}, 100, ["tracking", "orders"]
    )
    lake = CaseLake(engine, settings, {0: case})
    lake.arrive()
    now_s = 0.0
    silence = IdleDetector(settings, 10_000, now_s=lambda: now_s)
    silence.has_nothing_beyond = bool  # type: ignore[method-assign, assignment]
    list(lake.start(silence).drain())
    now_s = 11.0
    silver = lake.start(silence, dying_at(engine, "merge", tables.SILVER, after=True, times=1))
    with pytest.raises(CrashError):
        list(silver.drain())
    last = last_batch(engine.reader)
    assert last is not None
    assert last.clocks == {0: 500}, "it was committed with the batch that it lets go on"
    assert silver.recover().next() is None
    list(silver.drain())
    assert len([*read_decisions(engine.reader, Generation(0, 0, {}, {}))]) == 1, (
        "nor is it decided twice"
    )
