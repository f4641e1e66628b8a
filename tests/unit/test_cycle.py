"""A cycle: what is taken is passed on while the next batch is taken, and none is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from watersmeet import cycle

DEADLINE_S = 60

pass_on_beside = partial(cycle.pass_on_beside, ThreadPoolExecutor(1))


def never() -> bool:
    return False


class Batches:
    """As many batches as there are, and what happened to each."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.taken = 0
        self.passed = list[int]()
        self.ahead = list[int]()
        """For each batch that is taken, how many are taken and not passed on."""

    def take(self) -> bool:
        if not self.left:
            return False
        self.left -= 1
        self.taken += 1
        self.ahead.append(self.taken - len(self.passed))
        return True

    def pass_on(self) -> None:
        self.passed.append(self.taken)


def test_every_batch_is_passed_on_before_the_end() -> None:
    for count in range(5):
        batches = Batches(count)
        assert pass_on_beside(batches.take, batches.pass_on, never) == (count > 0)
        assert len(batches.passed) == count
        assert batches.passed[-1:] == ([count] if count else [])


def test_the_next_batch_is_taken_while_one_is_passed_on_and_no_further_one() -> None:
    batches = Batches(5)
    next_is_taken = threading.Semaphore(0)

    def take() -> bool:
        is_more = batches.take()
        if batches.taken > 1 or not is_more:
            next_is_taken.release()
        return is_more

    def pass_on() -> None:
        assert next_is_taken.acquire(timeout=DEADLINE_S), "the next batch waits for this one"
        batches.pass_on()

    pass_on_beside(take, pass_on, never)
    assert max(batches.ahead) <= 2


def test_a_stop_takes_no_further_batch_and_what_was_taken_is_passed_on() -> None:
    batches = Batches(5)
    pass_on_beside(batches.take, batches.pass_on, lambda: batches.taken == 2)
    assert batches.taken == 2
    assert batches.passed[-1] == 2


@pytest.mark.parametrize("failing", ["take", "pass_on"])
def test_a_failure_is_raised_once_what_is_under_way_has_ended(failing: str) -> None:
    ended = list[str]()
    begun = threading.Event()

    def step(name: str) -> Callable[[], bool]:
        def work() -> bool:
            if name == "take" and not begun.is_set():
                begun.set()
                return True
            if name == failing:
                raise ValueError(name)
            ended.append(name)
            return name == "take" and len(ended) < 3

        return work

    with pytest.raises(ValueError, match=failing):
        pass_on_beside(step("take"), step("pass_on"), never)  # type: ignore[arg-type]
    assert ended
