"""Streams without Spark: a batch is never cut in two, trouble with Kafka is waited out, what ended
is begun anew or told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pipelines.errors import (
    ConfigurationError,
    KafkaUnreachableError,
    StoreAccessError,
    StoreUnreachableError,
    WatersmeetError,
)
from pipelines.monitoring.observability import Reporter
from pipelines.running import streams
from pipelines.running.streams import BatchGate, RetryPolicy, Stream

DEADLINE_S = 60


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "RETRY_S", 0.001)


def away() -> KafkaUnreachableError:
    return KafkaUnreachableError("nowhere:1", "no answer")


def gate(limit_s: float = DEADLINE_S) -> BatchGate:
    return BatchGate(RetryPolicy(Reporter(), threading.Event(), limit_s))


@dataclass
class Work:
    """Fails as often as there are failures, then succeeds."""

    failures: list[Exception] = field(default_factory=list)
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)


class Fake:
    """Something that an engine runs, in the hands of the test."""

    def __init__(self) -> None:
        self.is_active, self.stops = True, 0
        self.failure: Exception | None = None

    def end(self, failure: Exception | None = None) -> None:
        self.is_active, self.failure = False, failure

    def stop(self) -> None:
        self.is_active, self.stops = False, self.stops + 1


def stream(
    passage: BatchGate, drain: Callable[[], None] | None = None, *begins: Exception
) -> tuple[Stream, list[Fake]]:
    """A stream of fakes; where it begins for the first times, these errors are raised."""
    begun: list[Fake] = []
    fails = list(begins)

    def begin(_: BatchGate) -> Fake:
        if fails:
            raise fails.pop(0)
        begun.append(Fake())
        return begun[-1]

    return Stream(passage, begin, drain), begun


# -- patience


def test_trouble_with_kafka_is_waited_out_and_told() -> None:
    work, passage = Work([away(), away()]), gate()
    passage.retry_policy.run(work)
    assert work.calls == 3


def test_another_error_is_raised_at_once() -> None:
    work = Work([ConfigurationError("bad"), ConfigurationError("worse")])
    with pytest.raises(ConfigurationError, match="bad"):
        gate().retry_policy.run(work)
    assert work.calls == 1


def test_trouble_that_outlasts_the_patience_is_told_in_one_sentence() -> None:
    work = Work([away() for _ in range(10**5)])
    with pytest.raises(
        WatersmeetError, match=r"no Kafka broker answers at nowhere:1 .*\(tried again for 0 s\)"
    ):
        gate(limit_s=0.01).retry_policy.run(work)


def test_a_run_that_stops_waits_no_longer() -> None:
    passage = gate()
    passage.stopping.set()
    work = Work([away() for _ in range(100)])
    passage.retry_policy.run(work)
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

    passage = gate()
    passage.retry_policy.check_store = check_store
    work = Work(
        [OSError("some request failed"), ValueError("half a file"), OSError("some request failed")]
    )
    passage.retry_policy.run(work)
    assert (work.calls, len(asked)) == (4, 3)
    work = Work([OSError("a disk of this machine is full") for _ in range(100)])
    with pytest.raises(OSError, match="a disk of this machine is full"):
        passage.retry_policy.run(work)
    assert work.calls == streams.UNEXPLAINED + 1


def test_a_store_that_refuses_is_told_at_once_in_place_of_the_engines_error() -> None:
    def check_store() -> None:
        raise StoreAccessError("s3://shop/lake", "writing")

    passage, work = gate(), Work([OSError("403"), OSError("403")])
    passage.retry_policy.check_store = check_store
    with pytest.raises(StoreAccessError, match="refuses writing at s3://shop/lake"):
        passage.retry_policy.run(work)
    assert work.calls == 1


# -- the gate


def test_no_batch_begins_once_the_run_stops() -> None:
    passage, work = gate(), Work()
    passage.run(work)
    passage.stopping.set()
    passage.run(work)
    assert work.calls == 1


def test_a_failure_is_kept_and_stops_everything() -> None:
    passage = gate()
    failure = ConfigurationError("bad")
    passage.run(Work([failure]))
    assert passage.failure is failure
    assert passage.stopping.is_set()


def test_one_batch_passes_at_a_time_and_closing_waits_for_it() -> None:
    passage, begun, may_end = gate(), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        order.append("first begins")
        begun.set()
        assert may_end.wait(DEADLINE_S)
        order.append("first ends")

    threads = [threading.Thread(target=passage.run, args=[first])]
    threads[0].start()
    assert begun.wait(DEADLINE_S)
    threads.append(threading.Thread(target=passage.run, args=[lambda: order.append("second")]))
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert order == ["first begins", "first ends", "second"]

    for each in (begun, may_end, order):
        each.clear()
    thread = threading.Thread(target=passage.run, args=[first])
    thread.start()
    assert begun.wait(DEADLINE_S)
    passage.stopping.set()

    def close() -> None:
        passage.close()
        order.append("closed")

    closing = threading.Thread(target=close)
    closing.start()
    may_end.set()
    closing.join(DEADLINE_S)
    thread.join(DEADLINE_S)
    assert order == ["first begins", "first ends", "closed"]


# -- a stream


def test_a_stream_begins_again_while_kafka_is_away() -> None:
    river, begun = stream(gate(), None, away(), away())
    river.start()
    assert river.is_active
    assert len(begun) == 1


def test_streams_are_started_at_once_and_none_waits_where_another_cannot_start() -> None:
    passage, together = gate(), threading.Barrier(2, timeout=DEADLINE_S)

    def begin(failure: Exception) -> Callable[[BatchGate], Fake]:
        met = list[int]()

        def fail(_: BatchGate) -> Fake:
            if not met:
                met.append(together.wait())
            raise failure

        return fail

    with pytest.raises(ConfigurationError, match="bad"):
        streams.start_all(
            [Stream(passage, begin(away())), Stream(passage, begin(ConfigurationError("bad")))]
        )
    assert passage.stopping.is_set()


def test_a_stream_that_ended_for_trouble_with_kafka_is_begun_anew() -> None:
    river, begun = stream(gate())
    river.start()
    begun[0].end(away())
    assert not river.is_active
    river.supervise()
    assert river.is_active
    assert len(begun) == 2
    river.supervise()
    assert len(begun) == 2, "what runs is left alone"
    river.raise_failure()


def test_a_stream_that_ended_without_a_word_is_begun_anew() -> None:
    river, begun = stream(gate())
    river.start()
    begun[0].end()
    river.supervise()
    assert len(begun) == 2


def test_a_stream_that_ended_for_a_reason_that_does_not_pass_is_told() -> None:
    river, begun = stream(gate())
    river.start()
    begun[0].end(ConfigurationError("odd"))
    with pytest.raises(WatersmeetError, match="a stream ended: odd"):
        river.supervise()
    with pytest.raises(WatersmeetError, match="odd"):
        river.raise_failure()


def test_an_engine_that_fails_by_itself_may_begin_anew_and_not_for_ever() -> None:
    passage = gate()
    river, begun = stream(passage)
    river.start()
    for attempt in range(2 * (streams.ATTEMPTS - 1)):
        begun[-1].end(ValueError("a worker did not start"))
        river.supervise()
        assert river.is_active
        if attempt == streams.ATTEMPTS - 2:
            # A batch that succeeds between two failures makes the next one the first again.
            passage.run(lambda: None)
    begun[-1].end(ValueError("a worker did not start"))
    with pytest.raises(WatersmeetError, match="a stream ended: ValueError: a worker did not start"):
        river.supervise()


def test_a_stream_that_ends_is_done_where_it_ended_well_and_begun_anew_where_not() -> None:
    river, begun = stream(gate())
    river.ends = True
    river.start()
    assert not river.is_done
    begun[0].end(away())
    river.supervise()
    assert not river.is_done
    begun[1].end()
    assert river.is_done
    river.supervise()
    assert len(begun) == 2
    river.raise_failure()


def test_a_failure_of_a_batch_is_raised_as_it_is() -> None:
    passage = gate()
    river, begun = stream(passage)
    river.start()
    passage.run(Work([ConfigurationError("bad")]))
    river.supervise()
    assert len(begun) == 1, "a run that stops begins nothing"
    with pytest.raises(ConfigurationError, match="bad"):
        river.raise_failure()


def test_what_an_engine_calls_a_failure_after_a_stop_was_asked_for_is_none() -> None:
    passage = gate()
    river, begun = stream(passage)
    river.start()
    passage.stopping.set()
    begun[0].end(ValueError("interrupted while it planned"))
    river.supervise()
    river.stop()
    river.raise_failure()
    assert len(begun) == 1


def test_a_stop_comes_after_the_batch_under_way() -> None:
    passage, begun_work, may_end = gate(), threading.Event(), threading.Event()
    order: list[str] = []

    def work() -> None:
        begun_work.set()
        assert may_end.wait(DEADLINE_S)
        order.append("batch")

    river, begun = stream(passage)
    river.start()
    running = threading.Thread(target=passage.run, args=[work])
    running.start()
    assert begun_work.wait(DEADLINE_S)
    passage.stopping.set()

    def stop() -> None:
        river.stop()
        order.append("stopped")

    stopping = threading.Thread(target=stop)
    stopping.start()
    assert order == []
    may_end.set()
    stopping.join(DEADLINE_S)
    running.join(DEADLINE_S)
    assert order == ["batch", "stopped"]
    assert begun[0].stops == 1


def test_what_was_there_before_is_drained_at_the_start_and_whenever_it_is_due() -> None:
    drained = threading.Semaphore(0)
    passage, is_due = gate(), False
    river, _ = stream(passage, drained.release)
    river.is_due = lambda: is_due
    river.start()
    assert drained.acquire(timeout=DEADLINE_S)
    river.supervise()
    passage.run(lambda: None)
    assert not drained.acquire(blocking=False)
    is_due = True
    end = threading.Event()

    def look() -> None:
        while not end.is_set():  # a drain that is still ending is not begun twice
            river.supervise()

    looking = threading.Thread(target=look)
    looking.start()
    assert drained.acquire(timeout=DEADLINE_S)
    end.set()
    looking.join(DEADLINE_S)
    passage.stopping.set()
    river.stop()


# -- what follows other streams of a run that ends


def following(river: Stream, drained: Callable[[], None], news: threading.Event) -> Stream:
    passage = BatchGate(river.batch_gate.retry_policy)
    follower = Stream(
        passage, lambda _: streams.following(passage, drained, [river], news), ends=True
    )
    follower.start()
    return follower


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_is_handed_on_is_drained_while_it_comes_and_once_more_after_its_end() -> None:
    river, begun = stream(gate())
    river.ends = True
    river.start()
    handed_on, drained, news = [0], list[int](), threading.Event()
    follower = following(river, lambda: drained.append(handed_on[0]), news)
    await_that(lambda: drained == [0])
    handed_on[0] = 1
    news.set()
    await_that(lambda: drained == [0, 1])
    assert not follower.is_done
    handed_on[0] = 2
    begun[0].end()
    await_that(lambda: follower.is_done)
    assert drained == [0, 1, 2]


def test_what_follows_waits_for_a_stream_that_was_not_begun_yet() -> None:
    river, begun = stream(gate())
    river.ends = True
    drained, news = list[bool](), threading.Event()
    follower = following(river, lambda: drained.append(bool(begun)), news)
    await_that(lambda: drained == [False])
    assert not river.is_done
    river.start()
    begun[0].end()
    await_that(lambda: follower.is_done)
    assert drained == [False, True]


def test_what_follows_a_stream_that_failed_waits_for_the_one_begun_anew() -> None:
    river, begun = stream(gate())
    river.ends = True
    river.start()
    follower = following(river, lambda: None, threading.Event())
    begun[0].end(away())
    river.supervise()
    assert not follower.is_done
    begun[1].end()
    await_that(lambda: follower.is_done)


def test_what_follows_ends_with_the_drain_under_way_once_the_run_stops() -> None:
    river, _ = stream(gate())
    river.ends = True
    river.start()
    entered, may_go, drains = threading.Event(), threading.Event(), list[str]()

    def drain() -> None:
        drains.append("begun")
        entered.set()
        assert may_go.wait(DEADLINE_S)
        drains.append("done")

    follower = following(river, drain, threading.Event())
    assert entered.wait(DEADLINE_S)
    river.batch_gate.stopping.set()
    assert follower.is_active
    may_go.set()
    follower.stop()
    assert not follower.is_active
    assert drains == ["begun", "done"]


def test_a_drain_that_fails_stops_the_run_and_is_raised() -> None:
    river, _ = stream(gate())
    river.ends = True
    river.start()
    follower = following(river, Work([ConfigurationError("bad")]), threading.Event())
    await_that(river.batch_gate.stopping.is_set)
    follower.stop()
    with pytest.raises(ConfigurationError, match="bad"):
        follower.raise_failure()
