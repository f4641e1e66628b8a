"""Checks beside a run, each after a number of batches of silver: no batch waits for them."""

from __future__ import annotations

import logging
import threading
from typing import Final

from watersmeet.engine import Engine
from watersmeet.errors import root_cause
from watersmeet.monitoring.events import Checked, Event, Observer, RecordsProcessed
from watersmeet.monitoring.observability import Reporter
from watersmeet.quality.check import check, unchecked
from watersmeet.quality.suites import read_suites
from watersmeet.running.owner import now_ms
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet.quality")

LOOK_EVERY_S: Final = 0.5
"""Seconds between two looks whether a check is due."""


class Checker:
    """An observer that checks the suites after `every` batches of silver, earlier ones included.

    Nothing stops where a suite or a check fails; a check is tried again after as many batches.
    Raises ConfigurationError for a wrong suite, and WatersmeetError without Great Expectations.
    """

    def __init__(
        self, engine: Engine, settings: Settings, every: int, reporter: Reporter, notify: Observer
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._every = every
        self._reporter = reporter
        self._notify = notify
        self._suites = read_suites(settings)
        for suite in self._suites:
            _ = suite.expectations  # what is wrong is reported at the start
        self._batches = 0
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Count a batch."""
        if isinstance(event, RecordsProcessed) and event.layer == "silver":
            with self._lock:
                self._batches += 1

    def follow(self, stopping: threading.Event) -> None:
        """Check whenever a check is due; what is left at the end of the run is the next one's."""
        is_counted = False
        while not stopping.wait(LOOK_EVERY_S):
            try:
                if not is_counted:
                    unchecked_batches = unchecked(self._engine.reader, self._suites)
                    is_counted = True
                    with self._lock:
                        self._batches = max(self._batches, unchecked_batches)
                if self._is_due():
                    self._check(stopping)
            except BaseException as error:  # whatever it is, the stream goes on
                log.warning(
                    "the data is not checked: %s; the next check is due after %d batches",
                    root_cause(error),
                    self._every,
                )

    def _is_due(self) -> bool:
        with self._lock:
            if self._batches < self._every:
                return False
            self._batches = 0
            return True

    def _check(self, stopping: threading.Event) -> None:
        done = check(
            self._engine, self._settings, self._suites, now_ms(), is_stopping=stopping.is_set
        )
        for result in done.results:
            failed = result.failed
            self._notify(Checked(result.suite, result.table, len(failed)))
            if failed:
                sentences = "; ".join(outcome.expectation for outcome in failed)
                log.warning(
                    "%s: the suite %s is not met: %s", result.table, result.suite, sentences
                )
        checked = sum(len(result.outcomes) for result in done.results)
        not_met = sum(len(result.failed) for result in done.results)
        news = f"{checked} expectations checked up to version {done.version} of silver, "
        self._reporter.notify(
            "quality",
            f"{news}{not_met} not met",
            expectations=checked,
            failed=not_met,
            version=done.version,
        )
