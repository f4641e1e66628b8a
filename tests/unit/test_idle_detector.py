"""When a topic-partition counts as silent, by a clock that the test moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.configurations import settings_for
from tests.support.inputs import tp_of
from watersmeet.kafka.idle_detector import IdleDetector

A, B = tp_of("tracking", 0), tp_of("orders", 0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def silence(clock: Clock, tmp_path: Path) -> IdleDetector:
    return IdleDetector(settings_for(tmp_path), idle_after_ms=5000, now_s=clock)


def test_a_topic_partition_is_silent_once_it_has_ended_at_the_same_offset_for_so_long(
    silence: IdleDetector, clock: Clock
) -> None:
    assert silence.observe({A: 3, B: 3}) == set()
    clock.now += 4.999
    assert silence.observe({A: 3, B: 4}) == set()
    clock.now += 0.001
    assert silence.observe({A: 3, B: 4}) == {A}
    clock.now += 5
    assert silence.observe({A: 4, B: 4}) == {B}


def test_a_look_is_due_when_something_has_become_silent_and_not_again_at_once(
    silence: IdleDetector, clock: Clock
) -> None:
    assert not silence.is_due, "nothing was observed yet"
    silence.observe({A: 3, B: 3})
    clock.now += 1
    silence.observe({A: 3, B: 4})
    clock.now += 3.9
    assert not silence.is_due
    clock.now += 0.1
    assert silence.is_due
    silence.observe({A: 3, B: 4})
    clock.now += 0.9
    assert not silence.is_due, "a was looked at, b is not silent yet"
    clock.now += 0.1
    assert silence.is_due
    silence.observe({A: 3, B: 4})
    clock.now += 4.9
    assert not silence.is_due
    clock.now += 0.1
    assert silence.is_due, "the others may have moved on: it is looked at again from time to time"
