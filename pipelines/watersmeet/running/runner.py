"""Runs the cycle of a run's layers, whenever what it follows has news, until the run ends.

A batch is never cut in two, trouble with Kafka or the object store is waited out, and following
that ends by itself begins again.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from watersmeet.engine import Running
from watersmeet.errors import (
    StoreError,
    WatersmeetError,
    class_of,
    is_known,
    is_retriable,
    kind_of,
    root_cause,
)
from watersmeet.monitoring.events import Failed, Observer, ignore
from watersmeet.monitoring.observability import Reporter

T = TypeVar("T")

RETRY_S = 1.0
"""Interval between two attempts while something is in trouble."""

LOOK_EVERY_S = 0.1
"""Interval at which a run looks at what it follows."""

UNEXPLAINED = 5
"""Maximum number of an engine's own failures in a row that are tolerated while the lake's object
store is well.
"""

SAY_EVERY_S = 60.0
"""Interval between two lines about trouble of the same kind."""

ATTEMPTS = 3
"""Maximum number of times in a row, with no cycle between, that following begins after the
engine's own failure.
"""


@dataclass
class Runner:
    """Runs a cycle, which does everything that is available and looks at `stopping` between two
    batches.

    Trouble with Kafka or the lake's object store is waited out for at most `limit_s`.
    `check_store`, for a lake in an object store, raises WatersmeetError if the store is in
    trouble. `stopping` is set to end the run, by anyone, and by a failure that does not pass.
    """

    reporter: Reporter
    stopping: threading.Event
    limit_s: float = 120.0
    check_store: Callable[[], None] | None = None
    notify: Observer = ignore
    cycles: int = 0
    """Number of cycles that have succeeded."""
    failure: BaseException | None = None
    """The failure of a cycle that ended the run."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _engine_failures: tuple[int, int] = (0, 0)
    """The number of cycles that had succeeded when the engine failed last, and how often it has
    failed since.
    """

    def supervise(
        self,
        cycle: Callable[[], object],
        follow: Callable[[Callable[[], None]], Running],
        look: Callable[[], bool],
        *,
        ends: bool = False,
    ) -> None:
        """Run the cycle at once, and again whenever `follow` calls the work that it is given.

        `look` is called every `LOOK_EVERY_S`; where it returns True, the cycle is due as well. With
        `ends`, the run ends where what `follow` has begun ends without a failure once a cycle has
        succeeded; otherwise it ends when `stopping` is set, after the batches under way. Afterwards
        `stopping` is set. Raises WatersmeetError where a cycle failed for good, or what `follow`
        has begun.
        """

        def begin() -> Running:
            self._check_store()
            return follow(lambda: self.run(cycle))

        following: Running | None = None
        beside = threading.Thread(target=lambda: None)
        is_due = not ends  # what there was before the run
        try:
            following = self.retry(begin)
            while following is not None and not self.stopping.wait(0 if is_due else LOOK_EVERY_S):
                if is_due and not beside.is_alive():
                    beside = threading.Thread(target=self.run, args=[cycle], daemon=True)
                    beside.start()
                is_due = look()
                if not following.is_active:
                    if ends and self.cycles and following.failure is None:
                        break
                    if self._begins_again(following.failure):
                        following = self.retry(begin)
        finally:
            self.stopping.set()
            with self._lock:  # the batches under way are done
                pass
            if following is not None:
                following.stop()
        if self.failure is not None:
            raise _as_known(self.failure)

    def run(self, cycle: Callable[[], object]) -> None:
        """Run the cycle, one at a time. It tries its own steps again after trouble (`retry`).

        Does nothing once `stopping` is set. A failure is kept as it is and ends the run, also where
        it is no Exception, such as a panic in a Rust library. It is not raised: Spark would only
        wrap it, and fill the log with the traces of every layer that it passes through.
        """
        with self._lock:
            if self.stopping.is_set():
                return
            try:
                cycle()
                self.cycles += 1
            except BaseException as failure:
                self.failure = failure
                self.notify(Failed(kind_of(failure), is_retried=False))
                self.stopping.set()

    def retry(self, work: Callable[[], T]) -> T | None:
        """Do work, again after trouble that may pass; return its result, or None where `stopping`
        was set meanwhile.

        Raises what it raised last once the limit is passed, and at once what is not retriable.
        """
        since = None
        party = WatersmeetError
        said: dict[type[WatersmeetError], float] = {}
        unexplained = 0
        while True:
            try:
                result = work()
            except Exception as failure:
                error = self._cause(failure)
                # A store that has just come back may still fail, and yet pass the check.
                unexplained = 0 if is_retriable(error) else unexplained + 1
                if unexplained and (
                    is_known(error) or self.check_store is None or unexplained > UNEXPLAINED
                ):
                    raise error from None
                party = StoreError if unexplained else class_of(error)
                now = time.monotonic()
                since = since or now
                if now - since > self.limit_s:
                    raise WatersmeetError(
                        f"{root_cause(error)} (tried again for {self.limit_s:.0f} s)"
                    ) from None
                if now - said.get(party, -math.inf) >= SAY_EVERY_S:
                    said[party] = now
                    again = f"trying again for at most {self.limit_s:.0f} s"
                    self.reporter.notify(party.party, f"{root_cause(error)}; {again}")
                self.notify(Failed(kind_of(error), is_retried=True))
                if self.stopping.wait(RETRY_S):
                    return None
            else:
                if since is not None:
                    self.reporter.notify(party.party, party.passed)
                return result

    def _cause(self, failure: BaseException) -> BaseException:
        # Engines report trouble of the object store as errors of many classes, so the store itself
        # is checked.
        if not is_known(failure):
            try:
                self._check_store()
            except WatersmeetError as trouble:
                return trouble
        return failure

    def _check_store(self) -> None:
        if self.check_store is not None:
            self.check_store()

    def _begins_again(self, failure: BaseException | None) -> bool:
        """Say why following ended by itself, and return True unless a stop was asked for.

        It may begin again after trouble that passes, and a few times where the engine itself
        failed, or says nothing: a worker may not have started in time, or was lost. Otherwise
        raises WatersmeetError.
        """
        if self.stopping.is_set():
            return False  # an engine may report its interruption as a failure
        error = self._cause(failure or RuntimeError("no failure was reported"))
        if not is_retriable(error):
            cycles, failures = self._engine_failures
            self._engine_failures = self.cycles, failures + 1 if cycles == self.cycles else 1
            if is_known(error) or self._engine_failures[1] >= ATTEMPTS:
                raise _as_known(error)
        self.reporter.notify("streams", f"{root_cause(error)}; trying again")
        self.notify(Failed(kind_of(error), is_retried=True))
        return True


def _as_known(failure: BaseException) -> WatersmeetError:
    if isinstance(failure, WatersmeetError):
        return failure
    return WatersmeetError(f"a stream ended: {root_cause(failure)}")
