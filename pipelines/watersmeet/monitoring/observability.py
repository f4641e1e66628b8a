"""The output of a run: a progress line on a terminal, plain log lines elsewhere, or JSON."""

from __future__ import annotations

import json
import logging
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.status import Status

from watersmeet.core.texts import without_controls

log = logging.getLogger("watersmeet")

TICK_S = 1.0
"""Interval at which progress is shown on a terminal."""

EVERY_S: Final = 10.0
"""Maximum time for which a command that works says nothing."""


class JsonLines(logging.Formatter):
    """A formatter of log records as JSON objects, each on one line.

    They have `time` (UTC), `level`, `logger`, `message`, and where known `layer`, `facts` (numbers
    by name) and `trace` (a stack trace).
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        at = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, Any] = {"time": at.isoformat(timespec="milliseconds")}
        line |= {"level": record.levelname, "logger": record.name, "message": record.getMessage()}
        for name in ("layer", "facts"):
            if value := getattr(record, name, None):
                line[name] = value
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logging(*, verbose: bool = False) -> None:
    """Send logs to standard error, so that standard output holds the answer alone.

    Unless it is `verbose`, py4j's logs are left out. They say that Spark's JVM is gone, which
    whoever asked it reports in one sentence.
    """
    logging.basicConfig(
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        level=logging.WARNING,
    )
    log.setLevel(logging.DEBUG if verbose else logging.INFO)
    if not verbose:
        for handler in logging.getLogger().handlers:
            handler.addFilter(_is_not_of_py4j)
    socketserver.BaseServer.handle_error = _log_error  # type: ignore[assignment, method-assign]


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


def _log_error(*_: object) -> None:
    # Else the error of a request to a server of this process, such as pyspark's, is printed.
    log.debug("a request failed", exc_info=True)


def log_as_json() -> None:
    """Make each line of the log a JSON object from here on."""
    for handler in logging.getLogger().handlers:
        handler.setFormatter(JsonLines())


def logs_are_json() -> bool:
    """Return True where standard error is to hold JSON objects and nothing else."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


@dataclass
class _Backlog:
    began_s: float
    total: int
    remaining: int


class Reporter:
    """A reporter of the progress of each layer; safe to call from several threads.

    Progress is the backlog that is worked through, or what is waited for meanwhile.
    """

    def __init__(
        self, status: Status | None = None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._status = status
        self._now_s = now_s
        self.latest: dict[str, str] = {}
        self._waits_for = ""
        self._waits_since_s = 0.0
        self._backlogs: dict[str, _Backlog] = {}
        self._said_s: dict[str, float] = {}
        """When news, and when a backlog, was said last (monotonic)."""
        self._lock = threading.Lock()

    def notify(self, layer: str, news: str, **facts: int | str | None) -> None:
        """Replace a layer's last news on the progress line, or else log it (JSON: with facts)."""
        with self._lock:
            self.latest[layer] = news
            self._said_s["news"] = self._now_s()
            if self._status is None:
                log.info("%s: %s", layer, news, extra={"layer": layer, "facts": facts})
            else:
                self._update(self._status)

    def begin(self, what: str = "") -> None:
        """Set what is waited for from now on, in a few words; empty: nothing."""
        with self._lock:
            self._waits_for = what
            self._waits_since_s = self._said_s["news"] = self._now_s()

    def left(self, part: str, remaining: int) -> None:
        """Set how many records a part of the work has still to do; more than before have come."""
        with self._lock:
            if not self._facts():
                self._backlogs.clear()  # what is done is no part of the next backlog
            known = self._backlogs.get(part)
            if known is None:
                self._backlogs[part] = _Backlog(self._now_s(), remaining, remaining)
                return
            known.total += max(0, remaining - known.remaining)
            known.remaining = remaining

    def tick(self) -> None:
        """Show the progress where it is due: on the progress line at each call."""
        with self._lock:
            if self._status is not None:
                self._update(self._status)
            elif self._is_due():
                facts = {"layer": "progress", "facts": self._facts()}
                log.info("progress: %s", self._line(), extra=facts)

    def _facts(self) -> dict[str, int]:
        # `done` records, `of` how many, and once some are done `rate` (1/s) and `left_s`; empty
        # without a backlog.
        backlogs = self._backlogs.values()
        if not any(backlog.remaining for backlog in backlogs):
            return {}
        total = sum(backlog.total for backlog in backlogs)
        remaining = sum(backlog.remaining for backlog in backlogs)
        facts = {"done": total - remaining, "of": total}
        elapsed_s = self._now_s() - min(backlog.began_s for backlog in backlogs)
        if facts["done"] and elapsed_s > 0:
            rate = facts["done"] / elapsed_s
            facts |= {"rate": round(rate), "left_s": round(remaining / rate)}
        return facts

    def _line(self) -> str:
        facts = self._facts()
        words = [f"{facts['done']:,} of {facts['of']:,} records"] if facts else []
        if "rate" in facts:
            words += [f"{facts['rate']:,}/s", f"{_clock(facts['left_s'])} left"]
        if self._waits_for and not facts:
            since_s = int(self._now_s() - self._waits_since_s)
            words.append(f"{self._waits_for} ({_clock(since_s)})")
        return ", ".join(words)

    def _is_due(self) -> bool:
        # A backlog every `EVERY_S`, what is waited for after that silence.
        has_backlog = bool(self._facts())
        if not has_backlog and not self._waits_for:
            self._said_s.pop("backlog", None)
            return False
        now_s = self._now_s()
        kind = "backlog" if has_backlog else "news"
        if now_s - self._said_s.setdefault(kind, now_s) < EVERY_S:
            return False
        self._said_s[kind] = self._said_s["news"] = now_s
        return True

    def leave_latest(self) -> None:
        """Write each layer's last news to a terminal, where the progress line is gone."""
        if self._status is not None:
            for layer, news in self.latest.items():
                sys.stderr.write(f"{layer}: {without_controls(news)}\n")

    def _update(self, status: Status) -> None:
        news = [f"[bold]{name}[/] {text}" for name, text in self.latest.items()]
        line = self._line()
        status.update(" · ".join([*([f"[bold]{line}[/]"] if line else []), *news]))


def _clock(seconds: int) -> str:
    if seconds >= 3600:
        return f"{seconds // 3600} h {seconds % 3600 // 60} m"
    return f"{seconds // 60} m {seconds % 60} s" if seconds >= 60 else f"{seconds} s"


@contextmanager
def working(what: str, *, has_line: bool = True) -> Iterator[Reporter]:
    """Provide a reporter that says `what` is under way, with a line after ten silent seconds.

    `has_line`: as for `reporting`.
    """
    with reporting(has_line=has_line) as reporter:
        reporter.begin(what)
        yield reporter


@contextmanager
def reporting(*, has_line: bool = True) -> Iterator[Reporter]:
    """Provide a reporter, which shows its progress every second.

    It has a progress line on a terminal, unless JSON is asked for, and else log lines. Without
    `has_line` it has log lines there, too: a signal that ends the process at once cannot hide them.
    """
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(TICK_S):
            reporter.tick()

    with ExitStack() as line:
        status = None
        if has_line and sys.stderr.isatty() and not logs_are_json():
            status = line.enter_context(Console(stderr=True).status("starting ..."))
        reporter = Reporter(status)
        thread = threading.Thread(target=tick, name="progress", daemon=True)
        thread.start()
        try:
            yield reporter
        finally:
            ended.set()
            thread.join()
