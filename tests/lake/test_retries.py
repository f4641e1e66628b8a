"""What is tried again after a failure: only the tables know whether its commit was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.bronze import Bronze
from pipelines.engine.choice import open_engine
from pipelines.errors import CommitRepeatedError
from pipelines.kafka.idle_detector import IdleDetector
from pipelines.lake import tables
from pipelines.lake.decisions import read_decisions
from pipelines.lake.generations import Generation
from pipelines.lake.table_reader import TableReader
from pipelines.run import create_missing
from pipelines.running.owner import Owner
from tests.lake.conftest import Store
from tests.support.cases import Case, heartbeat, keyed
from tests.support.configurations import settings_for
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import CaseLake, counted, records_of

TABLE = tables.bronze("tracking")


@pytest.mark.parametrize("after", [False, True], ids=["before-its-commit", "after-its-commit"])
def test_a_batch_that_is_tried_again_is_written_once(after: bool, tmp_path: Path) -> None:
    settings = settings_for(tmp_path, engine="embedded")
    engine = open_engine(settings)
    create_missing(engine)
    bronze = Bronze(
        Owner(dying_at(engine, "append", TABLE, after=after, times=1), token=1),
        settings,
        "tracking",
    )
    for offsets in ((0, 1), (2, 3)):
        rows = records_of(
            settings, "tracking", {(0, offset): keyed("a", offset) for offset in offsets}
        )
        if offsets == (0, 1):
            with pytest.raises(CrashError):
                bronze.append(rows, counted(rows))
        bronze.append(rows, counted(rows))
        bronze.append(rows, counted(rows))  # what comes after the commit failed
    found = engine.reader.select(TABLE, ["offset"])["offset"].to_pylist()
    assert sorted(found) == [0, 1, 2, 3]
    assert engine.reader.version(TABLE) == 2


def values(*offsets: int, refused: int = -1) -> dict[tuple[int, int], bytes | None]:
    return {
        (0, offset): b"no JSON" if offset == refused else keyed("a", offset) for offset in offsets
    }


@dataclass
class Reading:
    """Bronze as a stream hands it batches; the answer to its first commit does not come."""

    bronze: Bronze
    reader: TableReader
    take: Callable[[Mapping[tuple[int, int], bytes | None]], None]

    @property
    def offsets(self) -> list[int]:
        return sorted(self.reader.select(TABLE, ["offset"])["offset"].to_pylist())

    @property
    def refused(self) -> list[int]:
        return sorted(self.reader.select(tables.QUARANTINE, ["offset"])["offset"].to_pylist())


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reading:
    """Bronze of a lake without Kafka, whose first commit is made without an answer."""
    settings = settings_for(tmp_path, engine="embedded")
    engine = open_engine(settings)
    create_missing(engine)
    batches: list[Callable[[pa.Table], None]] = []

    def follow_kafka(_: object, work: Callable[[pa.Table], None], *, once: bool) -> None:
        """Gives the test what the stream would call."""
        batches.append(work)

    monkeypatch.setattr(engine, "follow_kafka", follow_kafka)
    bronze = Bronze(
        Owner(dying_at(engine, "append", TABLE, after=True, times=1), token=1), settings, "tracking"
    )
    bronze.start({0: 0}, lambda work: work(), once=True)
    none = records_of(settings, "tracking", values(0)).slice(0, 0)

    def take(records: Mapping[tuple[int, int], bytes | None]) -> None:
        batches[0](records_of(settings, "tracking", records) if records else none)

    return Reading(bronze, engine.reader, take)


@pytest.mark.promise("N24")
@pytest.mark.parametrize("gone", [(0,), (3,), (1,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_a_batch_that_is_tried_again_is_written_once_whatever_kafka_has_lost_of_it(
    reading: Reading, gone: Sequence[int]
) -> None:
    """The first, the last, the refused record, or all of them, were compacted or deleted
    meanwhile."""
    with pytest.raises(CrashError):
        reading.take(values(0, 1, 2, 3, refused=1))
    reading.take(values(*(offset for offset in range(4) if offset not in gone), refused=1))
    assert reading.offsets == [0, 1, 2, 3]
    assert reading.refused == [1], "it is noted all the same"
    reading.take(values(4, 6, refused=6))
    assert (reading.offsets, reading.refused) == ([0, 1, 2, 3, 4, 6], [1, 6])


@pytest.mark.promise("N24")
def test_of_a_batch_that_is_tried_again_with_more_behind_it_only_that_is_written(
    reading: Reading,
) -> None:
    with pytest.raises(CrashError):
        reading.take(values(0, 1, refused=1))
    reading.take(values(1, 2, 3, refused=1))
    assert (reading.offsets, reading.refused) == ([0, 1, 2, 3], [1])


@pytest.mark.promise("N25")
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
    silver = lake.start(
        silence, dying_at(engine, "append", tables.IDLE_HEARTBEATS, after=True, times=1)
    )
    list(silver.drain())
    now_s = 11.0
    with pytest.raises(CrashError):
        list(silver.drain())
    plan = silver.recover().next()
    assert plan is not None
    assert plan.clocks == {0: 500}, "the batch after it is the one that the table tells of"
    list(silver.drain())
    assert len(read_decisions(engine.reader, Generation(0, 0, {}, {}))) == 1, (
        "nor is it decided twice"
    )
