"""The runner without Spark: a batch is never cut in two, trouble is waited out, and following that
ends begins again or is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace

import pytest

from tests.support.panics import PanicException
from watersmeet.engine.polling import RunningThread
from watersmeet.errors import (
    CommitRepeatedError,
    ConfigurationError,
    KafkaUnreachableError,
    RegistryUnreachableError,
    StoreAccessError,
    StoreUnreachableError,
    UnknownWriterSchemaError,
    WatersmeetError,
)
from watersmeet.monitoring.events import Event, Failed
from watersmeet.monitoring.observability import Reporter
from watersmeet.running import runner as runners
from watersmeet.running.runner import Runner

DEADLINE_S = 60


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "RETRY_S", 0.001)
    monkeypatch.setattr(runners, "LOOK_EVERY_S", 0.001)


def away() -> KafkaUnreachableError:
    return KafkaUnreachableError("no Kafka broker answers at nowhere:1 (no answer)")


def runner(limit_s: float = DEADLINE_S) -> Runner:
    return Runner(Reporter(), threading.Event(), limit_s)


def nothing() -> None:
    """A cycle with nothing to do."""


def not_due() -> bool:
    return False


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@dataclass
class Work:
    """Fails as often as there are failures, then succeeds."""

    failures: list[BaseException] = field(default_factory=list)
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)


class Following:
    """Something that an engine runs, in the hands of the test."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.is_active = True
        self.stops = 0
        self.failure: BaseException | None = None

    def end(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.is_active = False

    def stop(self) -> None:
        self.stops += 1
        self.is_active = False


class Supervised:
    """A runner at work in a thread of its own."""

    def __init__(
        self,
        cycle: Callable[[], None] = nothing,
        *begins: Exception,
        ends: bool = False,
        look: Callable[[], bool] = not_due,
    ) -> None:
        self.runner = runner()
        self.begun: list[Following] = []
        self.raised: list[BaseException] = []
        self._failing = list(begins)
        self._thread = threading.Thread(target=self._run, args=[cycle, ends, look], daemon=True)
        self._thread.start()

    def _run(self, cycle: Callable[[], None], ends: bool, look: Callable[[], bool]) -> None:
        try:
            self.runner.supervise(cycle, self._follow, look, ends=ends)
        except BaseException as failure:
            self.raised.append(failure)

    def _follow(self, work: Callable[[], None]) -> Following:
        if self._failing:
            raise self._failing.pop(0)
        self.begun.append(Following(work))
        return self.begun[-1]

    def begin(self, times: int = 1) -> Following:
        """What was begun for this time."""
        await_that(lambda: len(self.begun) >= times or not self._thread.is_alive())
        return self.begun[times - 1]

    def end(self) -> None:
        """Wait until it has ended; raise what it raised."""
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        for failure in self.raised:
            raise failure

    def stop(self) -> None:
        """Ask it to stop."""
        self.runner.stopping.set()
        self.end()


# -- what is tried again


def test_trouble_with_kafka_is_waited_out_and_told() -> None:
    told: list[Event] = []
    work = Work([away(), away()])
    it = runner()
    it.notify = told.append
    it.retry(work)
    assert work.calls == 3
    assert [event.is_retried for event in told if isinstance(event, Failed)] == [True, True]


class Told(Reporter):
    """Keeps the lines that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def notify(self, layer: str, news: str, **_: int | str | None) -> None:
        self.lines.append(f"{layer}: {news}")


def test_trouble_is_told_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = count(1000.0, 1.0)
    monkeypatch.setattr(runners, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    told = Told()
    Runner(told, threading.Event(), 1000).retry(Work([away() for _ in range(150)]))
    assert [line.partition(" (")[0] for line in told.lines] == [
        *["kafka: no Kafka broker answers at nowhere:1"] * 3,
        "kafka: answers again",
    ]


@pytest.mark.parametrize(
    ("trouble", "lines"),
    [
        (StoreUnreachableError("s3://lake"), ("store", "answers again")),
        (RegistryUnreachableError("http://registry", "no answer"), ("registry", "answers again")),
        (UnknownWriterSchemaError("http://registry", 7), ("registry", "goes on")),
        (CommitRepeatedError("silver", "./lake"), ("lake", "goes on")),
    ],
)
def test_lines_about_trouble_name_who_is_in_trouble(
    trouble: WatersmeetError, lines: tuple[str, str]
) -> None:
    told = Told()
    Runner(told, threading.Event(), DEADLINE_S).retry(Work([trouble]))
    assert told.lines == [
        f"{lines[0]}: {trouble}; trying again for at most {DEADLINE_S} s",
        ": ".join(lines),
    ]


def test_another_error_is_raised_at_once() -> None:
    work = Work([ConfigurationError("bad"), ConfigurationError("worse")])
    with pytest.raises(ConfigurationError, match="bad"):
        runner().retry(work)
    assert work.calls == 1


def test_trouble_that_outlasts_the_patience_is_told_in_one_sentence() -> None:
    work = Work([away() for _ in range(10**5)])
    with pytest.raises(
        WatersmeetError, match=r"no Kafka broker answers at nowhere:1 .*\(tried again for 0 s\)"
    ):
        runner(limit_s=0.01).retry(work)


def test_a_run_that_stops_waits_no_longer() -> None:
    it = runner()
    it.stopping.set()
    work = Work([away() for _ in range(100)])
    it.retry(work)
    assert work.calls == 1


def test_what_a_store_in_trouble_makes_an_engine_raise_is_waited_out_whatever_it_is() -> None:
    """Also what fails while the store has come back and is well when it is asked; but not for
    ever."""
    troubles: list[Exception | None] = [
        StoreUnreachableError("s3://shop/lake"),
        None,
        StoreUnreachableError("s3://shop/lake"),
    ]
    asked: list[str] = []

    def check_store() -> None:
        asked.append("asked")
        if trouble := troubles.pop(0) if troubles else None:
            raise trouble

    it = runner()
    it.check_store = check_store
    work = Work(
        [OSError("some request failed"), ValueError("half a file"), OSError("some request failed")]
    )
    it.retry(work)
    assert (work.calls, len(asked)) == (4, 3)
    work = Work([OSError("a disk of this machine is full") for _ in range(100)])
    with pytest.raises(OSError, match="a disk of this machine is full"):
        it.retry(work)
    assert work.calls == runners.UNEXPLAINED + 1


def test_a_store_that_refuses_is_told_at_once_in_place_of_the_engines_error() -> None:
    def check_store() -> None:
        raise StoreAccessError("the object store refuses writing at s3://shop/lake")

    it = runner()
    it.check_store = check_store
    work = Work([OSError("403"), OSError("403")])
    with pytest.raises(StoreAccessError, match="refuses writing at s3://shop/lake"):
        it.retry(work)
    assert work.calls == 1


# -- a cycle


def test_no_cycle_begins_once_the_run_stops() -> None:
    it = runner()
    work = Work()
    it.run(work)
    it.stopping.set()
    it.run(work)
    assert work.calls == 1


@pytest.mark.parametrize("failure", [ConfigurationError("bad"), PanicException("bad")])
def test_a_failure_of_a_cycle_is_kept_as_it_is_and_stops_everything(failure: BaseException) -> None:
    it = runner()
    it.run(Work([failure]))
    assert it.failure is failure
    assert it.stopping.is_set()
    supervised = Supervised(Work([failure]))
    with pytest.raises(WatersmeetError, match="bad"):
        supervised.end()


def test_a_panic_in_a_rust_library_is_never_taken_for_the_end_of_the_work() -> None:
    def follow(work: Callable[[], None]) -> RunningThread:
        return RunningThread("cycle", lambda _: work())

    panic = PanicException("no thread can be started")
    with pytest.raises(WatersmeetError, match=f"a stream ended: PanicException: {panic}"):
        runner().supervise(Work([panic]), follow, not_due, ends=True)


def test_one_cycle_runs_at_a_time() -> None:
    it = runner()
    begun = threading.Event()
    may_end = threading.Event()
    order: list[str] = []

    def first() -> None:
        order.append("first begins")
        begun.set()
        assert may_end.wait(DEADLINE_S)
        order.append("first ends")

    threads = [threading.Thread(target=it.run, args=[first])]
    threads[0].start()
    assert begun.wait(DEADLINE_S)
    threads.append(threading.Thread(target=it.run, args=[lambda: order.append("second")]))
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert order == ["first begins", "first ends", "second"]


def test_a_stop_comes_after_the_batches_under_way() -> None:
    begun = threading.Event()
    may_end = threading.Event()
    order: list[str] = []

    def cycle() -> None:
        begun.set()
        assert may_end.wait(DEADLINE_S)
        order.append("batch")

    supervised = Supervised(cycle)
    following = supervised.begin()
    assert begun.wait(DEADLINE_S)

    def stop() -> None:
        supervised.stop()
        order.append("stopped")

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert order == []
    may_end.set()
    stopping.join(DEADLINE_S)
    assert order == ["batch", "stopped"]
    assert following.stops == 1


def test_what_was_there_before_is_done_at_once_though_following_cannot_begin() -> None:
    done = threading.Semaphore(0)
    supervised = Supervised(lambda: done.release(), *[away() for _ in range(50)])
    assert done.acquire(timeout=DEADLINE_S)
    supervised.begin().work()
    assert done.acquire(timeout=DEADLINE_S)
    supervised.stop()


def test_a_cycle_runs_whenever_it_is_due_and_never_twice_at_once() -> None:
    done = threading.Semaphore(0)
    is_due = False
    supervised = Supervised(lambda: done.release(), look=lambda: is_due)
    assert done.acquire(timeout=DEADLINE_S)
    assert not done.acquire(timeout=0.05)
    is_due = True
    assert done.acquire(timeout=DEADLINE_S)
    supervised.stop()


# -- what is followed


def test_following_begins_again_while_kafka_is_away() -> None:
    supervised = Supervised(nothing, away(), away())
    assert supervised.begin().is_active
    supervised.stop()
    assert len(supervised.begun) == 1


@pytest.mark.parametrize("failure", [away(), None], ids=["kafka-is-away", "without-a-word"])
def test_following_that_ended_by_itself_begins_again(failure: Exception | None) -> None:
    supervised = Supervised()
    supervised.begin().end(failure)
    assert supervised.begin(2).is_active
    supervised.stop()
    assert len(supervised.begun) == 2, "what runs is left alone"


def test_following_that_ended_for_a_reason_that_does_not_pass_is_told() -> None:
    supervised = Supervised()
    supervised.begin().end(ConfigurationError("odd"))
    with pytest.raises(ConfigurationError, match="odd"):
        supervised.end()
    assert supervised.runner.stopping.is_set()


@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        (ValueError("a worker did not start"), "ValueError: a worker did not start"),
        (PanicException("no thread"), "PanicException: no thread"),
        (None, "RuntimeError: no failure was reported"),
    ],
)
def test_an_engine_that_fails_by_itself_may_begin_again_and_not_for_ever(
    failure: BaseException | None, sentence: str
) -> None:
    supervised = Supervised()
    await_that(lambda: supervised.runner.cycles == 1)
    for attempt in range(1, runners.ATTEMPTS):
        supervised.begin(attempt).end(failure)
    supervised.begin(runners.ATTEMPTS).work()
    # A cycle that succeeds between two failures makes the next one the first again.
    for attempt in range(runners.ATTEMPTS, 2 * runners.ATTEMPTS):
        supervised.begin(attempt).end(failure)
    with pytest.raises(WatersmeetError, match=f"a stream ended: {sentence}"):
        supervised.end()
    assert len(supervised.begun) == 2 * runners.ATTEMPTS - 1


def test_a_run_ends_where_what_ends_has_done_its_work_and_goes_on_where_not() -> None:
    supervised = Supervised(ends=True)
    supervised.begin().end(away())
    supervised.begin(2).end()
    supervised.begin(3).work()
    supervised.begin(3).end()
    supervised.end()
    assert len(supervised.begun) == 3
    assert supervised.runner.cycles == 1, "only what is begun runs the cycle"


def test_what_an_engine_calls_a_failure_after_a_stop_was_asked_for_is_none() -> None:
    supervised = Supervised()
    following = supervised.begin()
    supervised.runner.stopping.set()
    following.end(ValueError("interrupted while it planned"))
    supervised.stop()
    assert len(supervised.begun) == 1


def test_what_a_look_raises_ends_the_run_after_the_batches_under_way() -> None:
    order: list[str] = []
    begun = threading.Event()
    may_end = threading.Event()

    def cycle() -> None:
        begun.set()
        assert may_end.wait(DEADLINE_S)
        order.append("batch")

    def look() -> bool:
        assert begun.wait(DEADLINE_S)
        may_end.set()
        raise ConfigurationError("a topic changed")

    supervised = Supervised(cycle, look=look)
    with pytest.raises(ConfigurationError, match="a topic changed"):
        supervised.end()
    assert order == ["batch"]
    assert supervised.begun[0].stops == 1
