"""The work of `watersmeet check`, and the check of suites by `validate`."""

from __future__ import annotations

from pathlib import Path

from watersmeet.ask.page import check_writable, write_page
from watersmeet.audit.problems import as_problem
from watersmeet.engine.choice import open_engine
from watersmeet.errors import ConfigurationError, Problem
from watersmeet.lake.identity import check_layout
from watersmeet.lake.quality import last_results
from watersmeet.lake.torn import check_whole
from watersmeet.quality.check import Check, check
from watersmeet.quality.page import page
from watersmeet.quality.rows import missing_columns
from watersmeet.quality.suites import read_suites
from watersmeet.running.owner import now_ms
from watersmeet.settings import Settings


def check_lake(settings: Settings, since: int | None, html: Path | None) -> Check:
    """Check every suite on what is new, or since a version of silver, and write a page if asked.

    Raises ConfigurationError for a wrong suite, version or file, else WatersmeetError.
    """
    suites = read_suites(settings)
    if html is not None:
        check_writable("--html", html)  # before the lake is read for it
    engine = open_engine(settings)
    check_whole(engine.lake)
    check_layout(engine.reader, engine.lake)
    done = check(engine, settings, suites, now_ms(), since=since)
    if html is not None:
        write_page("--html", html, page(done, settings, last_results(engine.reader)))
    return done


def check_suites(settings: Settings) -> list[Problem]:
    """Return a problem where a suite lacks its form, or is about a column that there is not."""
    try:
        return missing_columns(settings, read_suites(settings))
    except ConfigurationError as error:
        return [as_problem(error, "quality.suites")]
