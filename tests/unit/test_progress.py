"""A command says how far it is, and is not silent for longer than ten seconds while it works."""

from __future__ import annotations

import io
import json
import logging
import time
from pathlib import Path

import pytest
from rich.console import Console

from tests.support.commands import in_process
from watersmeet.errors import ConfigurationError
from watersmeet.monitoring import observability
from watersmeet.monitoring.observability import JsonLines, Reporter


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def said(
    caplog: pytest.LogCaptureFixture, reporter: Reporter, clock: Clock, seconds: int
) -> list[str]:
    """What the log gets within so many seconds."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "watersmeet"):
        for _ in range(seconds):
            clock.s += 1
            reporter.tick()
    return caplog.messages


def test_a_backlog_is_said_every_ten_seconds_with_rate_and_time_left(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(now_s=clock)
    reporter.left("tracking", 3_000)
    reporter.left("orders", 2_000)
    assert said(caplog, reporter, clock, 9) == []
    reporter.left("tracking", 2_000)
    reporter.notify("silver", "batch 1")
    assert said(caplog, reporter, clock, 2) == ["progress: 1,000 of 5,000 records, 91/s, 44 s left"]
    reporter.left("tracking", 4_000)
    assert said(caplog, reporter, clock, 10) == [
        "progress: 1,000 of 7,000 records, 48/s, 2 m 6 s left"
    ], "2,000 more have come"
    reporter.left("orders", 0)
    assert said(caplog, reporter, clock, 10) == [
        "progress: 3,000 of 7,000 records, 97/s, 41 s left"
    ], "what one part has done counts until all have"
    reporter.left("tracking", 0)
    assert said(caplog, reporter, clock, 60) == [], "nothing is left to do"
    reporter.left("tracking", 10)
    assert said(caplog, reporter, clock, 11) == ["progress: 0 of 10 records"]


def test_what_is_waited_for_is_said_after_ten_silent_seconds(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    reporter = Reporter(now_s=clock)
    reporter.begin("waits for a session of Spark")
    assert said(caplog, reporter, clock, 25) == [
        "progress: waits for a session of Spark (10 s)",
        "progress: waits for a session of Spark (20 s)",
    ]
    reporter.notify("lake", "ready")
    assert said(caplog, reporter, clock, 9) == [], "something else was said"
    reporter.begin("works on the next batch")
    assert said(caplog, reporter, clock, 10) == ["progress: works on the next batch (10 s)"]
    reporter.begin()
    assert said(caplog, reporter, clock, 60) == [], "a run without news is silent"


def test_in_json_a_backlog_has_its_numbers(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    reporter = Reporter(now_s=clock)
    reporter.left("tracking", 4_000)
    said(caplog, reporter, clock, 1)
    clock.s += 9
    reporter.left("tracking", 1_000)
    said(caplog, reporter, clock, 1)
    [record] = caplog.records
    line = json.loads(JsonLines().format(record))
    assert line["layer"] == "progress"
    assert line["facts"] == {"done": 3000, "of": 4000, "rate": 273, "left_s": 4}


def test_the_last_news_stay_on_a_terminal_when_a_run_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporter = Reporter(Console(file=io.StringIO()).status("starting ..."))
    reporter.notify("silver", "batch 0")
    reporter.notify("silver", "batch 1")
    reporter.notify("gold", "2 messages\x1b[31m published")
    reporter.leave_latest()
    assert capsys.readouterr().err == "silver: batch 1\ngold: 2 messages[31m published\n"


LOADS = "watersmeet.cli.load_settings"
SLOW = {
    "fetch": "watersmeet.jvm.artifacts.fetch",
    "validate": LOADS,
    "try examples.jsonl": "watersmeet.dry_run.try_file",
    "status": LOADS,
    "explain 7": LOADS,
    "sql query": LOADS,
    "verify": LOADS,
    "rebuild --into again": LOADS,
    "redrive --reason no_key": LOADS,
    "forget 7": LOADS,
    "check": LOADS,
    "report --out page.html": LOADS,
    "reset --to latest": LOADS,
    "evolve": LOADS,
    "maintain": LOADS,
    "broker start": "watersmeet.dev.broker.start",
    "broker send examples.jsonl": "watersmeet.commands.broker.load_settings",
    "broker stop": "watersmeet.dev.broker.stop",
}
"""A function that each command calls while it works; `run` says of itself what it does."""


@pytest.mark.parametrize("command", SLOW)
def test_every_command_says_what_is_under_way(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def is_said() -> bool:
        return any(message.startswith("progress: ") for message in caplog.messages)

    def work(*_: object, **__: object) -> None:
        deadline_s = time.monotonic() + 60
        while not is_said() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        raise ConfigurationError("enough", fix="nothing")

    monkeypatch.setattr(observability, "EVERY_S", 0.0)
    monkeypatch.setattr(observability, "TICK_S", 0.01)
    monkeypatch.setattr(SLOW[command], work)
    with caplog.at_level(logging.INFO, "watersmeet"):
        done = in_process(*command.split(), cwd=tmp_path)
    assert (done.returncode, "enough" in done.stdout + done.stderr) == (2, True), done
    assert is_said()
