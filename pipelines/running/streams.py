"""Runs the layers' streams.

A batch is never cut in two, trouble with Kafka or the object store is waited out, and a stream that
ends is started again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

from pipelines.engine import Running
from pipelines.engine.threads import RunningThread
from pipelines.errors import (
    StoreError,
    WatersmeetError,
    is_known,
    is_of_registry,
    is_retriable,
    kind_of,
    root_cause,
)
from pipelines.monitoring.events import Failed, Observer, ignore
from pipelines.monitoring.observability import Reporter

RETRY_S = 1.0

NEWS_S = 0.1
"""Interval at which a following stream checks whether those before it are done."""

UNEXPLAINED = 5
"""Maximum number of an engine's own failures in a row that are tolerated while the lake's object
store is well.
"""

ATTEMPTS = 3
"""Maximum number of starts in a row, with no batch between, of a stream that ends by its engine's
own failure.
"""


@dataclass
class RetryPolicy:
    """Retries work while Kafka or the lake's object store is in trouble.

    The work is done again until it succeeds, `limit_s` have passed or the run stops. `check_store`,
    for a lake in an object store, raises WatersmeetError if the store is in trouble.
    """

    reporter: Reporter
    stopping: threading.Event
    limit_s: float = 120.0
    check_store: Callable[[], None] | None = None
    notify: Observer = ignore

    def run(
        self, work: Callable[[], None], passes_on: Callable[[Exception], bool] = lambda _: False
    ) -> None:
        """Do the work, again after trouble that may pass.

        Raises what it raised last once the limit is passed. What is not retriable is raised at
        once, and so is a failure that `passes_on` selects.
        """
        since = None
        where = ""
        unexplained = 0
        while True:
            try:
                work()
            except Exception as failure:
                if passes_on(failure):
                    raise
                error = self.cause(failure)
                # A store that has just come back may still fail, and yet pass the check.
                unexplained = 0 if is_retriable(error) else unexplained + 1
                if unexplained and (
                    is_known(error) or self.check_store is None or unexplained > UNEXPLAINED
                ):
                    raise error from None
                where = "store" if unexplained or isinstance(error, StoreError) else "kafka"
                now = time.monotonic()
                since = since or now
                if now - since > self.limit_s:
                    raise WatersmeetError(
                        f"{root_cause(error)} (tried again for {self.limit_s:.0f} s)"
                    ) from None
                self.reporter.notify(
                    where, f"{root_cause(error)}; trying again for at most {self.limit_s:.0f} s"
                )
                self.notify(Failed(kind_of(error), is_retried=True))
                if self.stopping.wait(RETRY_S):
                    return
            else:
                if since is not None:
                    self.reporter.notify(where, "answers again")
                return

    def cause(self, failure: Exception) -> Exception:
        """Return the trouble of the object store, if an engine's error may come from there.

        Otherwise return the error itself. Engines report such trouble as errors of many classes, so
        the store itself is checked.
        """
        if not is_known(failure):
            try:
                self.ready()
            except WatersmeetError as trouble:
                return trouble
        return failure

    def ready(self) -> None:
        """Raise WatersmeetError if the lake's object store is in trouble."""
        if self.check_store is not None:
            self.check_store()


def never(_: Exception) -> bool:
    """Return False for every failure."""
    return False


@dataclass
class BatchGate:
    """Lets one batch of a stream through at a time, and none once `stopping` is set.

    So a stop never cuts a batch in two. A batch that finds the gate closed returns without writing.
    Spark then notes it as done in the checkpoint, which does no harm: checkpoints are never read.
    """

    retry_policy: RetryPolicy
    passes_on: Callable[[Exception], bool] = never
    """Selects the failures of a batch that end the stream without the run, to be started again."""
    failure: Exception | None = None
    succeeded: int = 0
    """Number of batches that have succeeded."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def stopping(self) -> threading.Event:
        """The event that is set once no further batch may begin."""
        return self.retry_policy.stopping

    def run(self, work: Callable[[], None]) -> None:
        """Run one batch at a time, again after transient trouble (`RetryPolicy`).

        Does nothing once `stopping` is set. If the batch fails, its failure is kept as it is and
        everything stops. It is not raised: Spark would only wrap it, and fill the log with the
        traces of every layer that it passes through.
        """
        with self._lock:
            if self.stopping.is_set():
                return
            try:
                self.retry_policy.run(work, self.passes_on)
                self.succeeded += 1
            except Exception as failure:
                if self.passes_on(failure):
                    raise
                self.failure = failure
                self.retry_policy.notify(Failed(kind_of(failure), is_retried=False))
                self.stopping.set()

    def close(self) -> None:
        """Return when no batch is under way and none can begin (`stopping` must be set)."""
        with self._lock:
            pass


@dataclass
class Stream:
    """A stream with its gate; it is started again if it ended for a reason that may pass.

    `begin` starts it; its batches go through the gate. `drain` is called at the start as well, and
    whenever it `is_due`. If it `ends`, it is done once it has ended without a failure.
    """

    batch_gate: BatchGate
    begin: Callable[[BatchGate], Running]
    drain: Callable[[], None] | None = None
    is_due: Callable[[], bool] = lambda: False
    ends: bool = False
    _running: Running | None = None
    _aside: threading.Thread | None = None
    _failed: list[int] = field(default_factory=list)
    _troubled: tuple[int, float] | None = None
    """The number of batches that had succeeded when a registry's trouble began, and when that was
    (monotonic).
    """

    def start(self) -> None:
        """Start the stream, again while there is trouble with Kafka or the object store."""
        self.batch_gate.retry_policy.run(self._begin)

    def _begin(self) -> None:
        self.batch_gate.retry_policy.ready()
        self._running = self.begin(self.batch_gate)
        self._drain_aside()

    def _drain_aside(self) -> None:
        """Drain in a thread of its own: while records keep coming, a drain may take as long as the
        run.
        """
        if self.drain is not None and (self._aside is None or not self._aside.is_alive()):
            self._aside = threading.Thread(
                target=self.batch_gate.run, args=[self.drain], daemon=True
            )
            self._aside.start()

    @property
    def is_active(self) -> bool:
        """True while it runs."""
        return self._running is not None and self._running.is_active

    @property
    def is_done(self) -> bool:
        """True once it was started and has come to its end."""
        return (
            self.ends
            and self._running is not None
            and not self.is_active
            and self._failure() is None
        )

    def supervise(self) -> None:
        """Start the stream again if it has ended for a reason that may pass.

        Raises WatersmeetError if it ended for another reason.
        """
        if self.is_due():
            self._drain_aside()
        if self.is_active or self.is_done or self.batch_gate.stopping.is_set():
            return
        failure = self._failure()
        if failure is not None:
            failure = self.batch_gate.retry_policy.cause(failure)
        is_accepted = failure is not None and self.batch_gate.passes_on(failure)
        if (
            failure is not None
            and not is_accepted
            and not is_retriable(failure)
            and not self._may_pass(failure)
        ):
            raise WatersmeetError(f"a stream ended: {root_cause(failure)}")
        if failure is not None and is_of_registry(failure):
            self._check_registry_trouble(failure)
        ended = failure or Exception("a stream ended")
        self.batch_gate.retry_policy.reporter.notify(
            "streams", f"{root_cause(ended)}; trying again"
        )
        self.batch_gate.retry_policy.notify(Failed(kind_of(ended), is_retried=True))
        self.start()

    def _check_registry_trouble(self, failure: Exception) -> None:
        """Raise WatersmeetError if a registry was in trouble for the limit, with no batch between.

        The limit is that of `RetryPolicy`. (Trouble with Kafka is watched by the run.)
        """
        succeeded = self.batch_gate.succeeded
        now = time.monotonic()
        limit_s = self.batch_gate.retry_policy.limit_s
        if self._troubled is None or self._troubled[0] != succeeded:
            self._troubled = succeeded, now
        if now - self._troubled[1] > limit_s:
            raise WatersmeetError(f"{root_cause(failure)} (tried again for {limit_s:.0f} s)")
        self.batch_gate.stopping.wait(RETRY_S)

    def _may_pass(self, failure: Exception) -> bool:
        """Return True if the engine itself failed, and the stream may be started once more.

        A worker may not have started in time, or was lost. A failure of a batch never comes here:
        the gate keeps it.
        """
        self._failed = [
            succeeded for succeeded in self._failed if succeeded == self.batch_gate.succeeded
        ] + [self.batch_gate.succeeded]
        return not is_known(failure) and len(self._failed) < ATTEMPTS

    def stop(self) -> None:
        """End the stream after the batch under way.

        `stopping` must be set, or the stream must be at its end.
        """
        if self.batch_gate.stopping.is_set():
            self.batch_gate.close()
        if self._running is not None:
            self._running.stop()

    def raise_failure(self) -> None:
        """Raise what ended the stream, if anything did.

        Once `stopping` is set, only the failure of a batch is raised: an engine may report its
        interruption as a failure.
        """
        failure = self.batch_gate.failure or (
            None if self.batch_gate.stopping.is_set() else self._failure()
        )
        if isinstance(failure, WatersmeetError):
            raise failure
        if failure is not None:
            raise WatersmeetError(f"a stream ended: {root_cause(failure)}")

    def _failure(self) -> Exception | None:
        return None if self._running is None else self._running.failure


def start_all(streams: Sequence[Stream]) -> None:
    """Start the streams of a run side by side: an engine may take seconds for each.

    Raises the failure of a stream that cannot be started. The run then stops, so that no other one
    waits for Kafka any longer.
    """
    with ThreadPoolExecutor(max(1, len(streams))) as pool:
        starting = {pool.submit(stream.start): stream for stream in streams}
        for started in as_completed(starting):
            if started.exception() is not None:
                starting[started].batch_gate.stopping.set()
            started.result()


def following(
    batch_gate: BatchGate,
    drain: Callable[[], None],
    upstream: Sequence[Stream],
    news: threading.Event,
) -> Running:
    """Return a stream that drains what other streams of this process hand on, until they are done.

    The drain under way is the last once a run stops. `news` is set whenever one of them has handed
    something on.
    """

    def upstream_is_done() -> bool:
        """Return True if all streams that this one follows have ended."""
        return all(stream.is_done for stream in upstream)

    def follow(_: threading.Event) -> None:
        """Drain whenever there is news, and once more after the upstream has ended."""
        is_last = False
        while not (is_last or batch_gate.stopping.is_set()):
            is_last = upstream_is_done()  # asked before the drain, which then sees all there is
            news.clear()
            batch_gate.run(drain)
            while not (upstream_is_done() or batch_gate.stopping.is_set() or news.wait(NEWS_S)):
                pass

    return RunningThread("following", follow)
