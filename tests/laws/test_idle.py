"""The idle policy in silver: its decisions are data, and the merge model with the same data gives
the same rows."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.laws.conftest import MakeLake, in_folders
from tests.support.cases import Case, expected_late, expected_silver, heartbeat, keyed, rich_cases
from tests.support.crashes import CrashError, dying_at
from tests.support.lakes import CaseLake, decisions_of
from watersmeet.core.idle import IdleDecision
from watersmeet.core.plan import TopicPartition
from watersmeet.kafka.idle_detector import IdleDetector
from watersmeet.lake import tables

pytestmark = [pytest.mark.promise("C2"), pytest.mark.fault("silence", oracle=True)]


RANDOM = 16
SILENT, BOTH = RANDOM, RANDOM + 1


class Clock:
    """Wall time in the hands of the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Quiet(IdleDetector):
    """Kafka, as far as this lake's bronze was filled: nothing beyond, unless it `is_behind`."""

    is_behind = False

    def has_nothing_beyond(self, after: Mapping[TopicPartition, int]) -> bool:
        return not self.is_behind and bool(after)


def case_of(tracking: list[bytes | None], orders: list[bytes | None]) -> Case:
    return Case(
        {"tracking": tracking, "orders": orders},
        100,
        ["tracking"] * len(tracking) + ["orders"] * len(orders),
    )


def more(lake: CaseLake, partition: int, *orders: bytes) -> None:
    lake.cases[partition].values["orders"] += orders
    lake.cases[partition].arrivals += ["orders"] * len(orders)


@in_folders
def test_of_a_source_that_stays_silent_a_run_keeps_the_last_decision_alone(
    new_lake: MakeLake,
) -> None:
    """Each has a time for every tenant, and each batch looked at all of them."""
    case = case_of([keyed("a", 0)], [heartbeat(10)])
    lake, clock = new_lake({0: case}, merge__idle_after="10s"), Clock()
    silver = lake.start(Quiet(lake.settings, 10_000, now_s=clock), lake.quick)
    kept = TopicPartition(lake.settings.inputs[0], 0)
    for n in range(1, 6):
        more(lake, 0, heartbeat(n * 1000))
        lake.arrive()
        clock.now += 10
        list(silver.drain())
        clock.now += 10
        list(silver.drain())
    assert [each.event_time for each in decisions_of(lake.reader)["tracking", 0]][-1] == 5000
    assert len(decisions_of(lake.reader)["tracking", 0]) > 3
    for planner in (silver.recover(), lake.start().recover()):
        assert len(planner.state.idle[kept]) == 1
        assert planner.progress().sources[kept].state == "idle"


@pytest.mark.promise("C1")
@in_folders
def test_silences_give_what_the_model_gives_with_the_same_decisions(new_lake: MakeLake) -> None:
    cases = rich_cases(RANDOM, 5000, refused=False)
    cases[SILENT] = case_of([keyed("a", 20), heartbeat(500)], [keyed("a", 10)])
    cases[BOTH] = case_of([heartbeat(50)], [heartbeat(50)])
    lake, clock = new_lake(cases, merge__idle_after="10s"), Clock()
    silence = Quiet(lake.settings, 10_000, now_s=clock)
    silver = lake.start(silence, lake.quick)
    lake.arrive()
    list(silver.drain())
    clock.now = 9.9
    list(silver.drain())
    assert decisions_of(lake.reader) == {}, "not silent for long enough"
    clock.now, silence.is_behind = 10.0, True
    list(silver.drain())
    assert decisions_of(lake.reader) == {}, "bronze is behind Kafka: the source is not silent"

    silence.is_behind = False
    dying = lake.start(silence, dying_at(lake.engine, "merge", tables.SILVER))
    with pytest.raises(CrashError):
        list(dying.drain())
    plans = list(lake.start(silence).drain())
    assert plans, "what nobody has written is decided again"
    found = decisions_of(lake.reader)
    assert len(found) > 6
    assert found["orders", SILENT] == [IdleDecision(0, 500)]
    assert ("tracking", SILENT) not in found, "never the one that is ahead"
    assert not {("orders", BOTH), ("tracking", BOTH)} & found.keys(), (
        "nobody is idle where nobody is waited for"
    )
    lake.take_decisions()
    assert lake.silver() == expected_silver(lake.cases)
    assert lake.late() == expected_late(lake.cases)

    more(lake, SILENT, keyed("b", 420), keyed("c", 390))
    lake.arrive()
    dying = lake.start(engine=dying_at(lake.engine, "merge", tables.SILVER))
    with pytest.raises(CrashError):
        list(dying.drain())
    lake.merge()
    assert [row[3] for row in lake.late() if row[0] == SILENT] == ["c"], (
        "its position is that of the decision"
    )
    assert lake.silver() == expected_silver(lake.cases)
    assert lake.late() == expected_late(lake.cases)
    assert list(lake.start().drain()) == [], "a restart finds nothing to do"
