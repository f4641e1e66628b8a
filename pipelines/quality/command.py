"""What `watersmeet check` does, and what `validate` says of suites."""

from __future__ import annotations

from pathlib import Path

from pipelines.audit.page import check_writable, write_page
from pipelines.audit.problems import Problem, as_problem
from pipelines.engine.choice import open_engine
from pipelines.errors import ConfigurationError
from pipelines.lake.identity import check_layout
from pipelines.lake.quality import last_results
from pipelines.quality.check import Check, check
from pipelines.quality.page import page
from pipelines.quality.suites import read_suites
from pipelines.running.owner import now_ms
from pipelines.settings import Settings


def check_lake(settings: Settings, since: int | None, html: Path | None) -> Check:
    """Checks every suite on what is new, or new since a version of silver, and writes a page where one is asked for.

    Raises ConfigurationError for a wrong suite, version or file, and WatersmeetError where the lake cannot be read.
    """
    suites = read_suites(settings)
    if html is not None:
        check_writable("--html", html)  # before the lake is read for it
    engine = open_engine(settings)
    check_layout(engine.questions, engine.lake)
    done = check(engine, settings, suites, now_ms(), since=since)
    if html is not None:
        write_page("--html", html, page(done, settings, last_results(engine.questions)))
    return done


def check_suites(settings: Settings) -> list[Problem]:
    """Every suite has the form of one; whether Great Expectations takes it, a check says."""
    try:
        read_suites(settings)
    except ConfigurationError as error:
        return [as_problem(error, "quality.suites")]
    return []
