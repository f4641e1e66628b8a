"""The report's questions about merge records: how they lie in event time, how large they are, and what never became part of one.

All times are epoch ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipelines.adapters.lake import Lake
from pipelines.audit.report_steps import Steps, in_each, span, steps_over
from pipelines.audit.report_wall import RATE_STEPS, STEPS
from pipelines.settings import Settings

LATE = "late"

_SIZES = (*range(1, 9), *(2**n for n in range(4, 32)))
"""The largest size in each column of the histogram: sizes are few and small, or go far."""

_FINISHED = "status = 'timed_out' AND COALESCE(invalid_reason, '') <> 'reset'"
"""A record that a jump has closed never got all of its parts."""


class Refused(NamedTuple):
    """So many records of a source were never merged: they were late, or in quarantine for this reason."""

    why: str
    source: str
    records: int


class Column(NamedTuple):
    """A column of a histogram: so many have a value from `least` to `most`."""

    least: int
    most: int
    records: int


class OpenIn(NamedTuple):
    """So many merge records were open on average, in the step of event time from `at` on."""

    at: int
    mean: float


class MatchedIn(NamedTuple):
    """Of the `records` that begin in the step from `at` on: how many have a part of each source, and of every source."""

    at: int
    records: int
    by_source: tuple[int, ...]
    by_all: int


class EventTime(NamedTuple):
    """What silver holds by event time; up to `complete_until`, the smallest clock, nothing can be added but in open records."""

    steps: Steps
    complete_until: int | None
    open: Sequence[OpenIn]
    match_steps: Steps
    matched: Sequence[MatchedIn]


def read_event_time(lake: Lake, settings: Settings, clocks: Sequence[int]) -> EventTime | None:
    """None while silver is empty."""
    found = span(lake.rows_if_any("SELECT MIN(event_time), MAX(event_time) FROM {silver}"))
    if found is None:
        return None
    until = max([found[1], *clocks])
    steps = steps_over(found[0], until, STEPS)
    match_steps = steps_over(*found, RATE_STEPS)
    return EventTime(
        steps,
        min(clocks, default=None),
        # A step that the largest clock is still in would have a mean of what is not known yet.
        [known for known in open_in(lake, steps, settings.merge.timeout_ms) if known.at + steps.width <= until],
        match_steps,
        matched(lake, match_steps, list(settings.sources)),
    )


def open_in(lake: Lake, steps: Steps, timeout_ms: int) -> list[OpenIn]:
    """The mean number of open merge records in every step: each is open from its event time on, for as long as the timeout.

    Those that a jump closed are left out. The mean over a step is what was open when it began, with those that begin in it and
    without those that end in it, each for the share of the step that is left then.
    """
    begins = lake.in_ms("event_time")
    begun = _counted(lake, steps, begins)
    ended = _counted(lake, steps, f"({begins} + {timeout_ms})")
    means, now = [], 0
    for start in steps.starts:
        (coming, coming_share), (going, going_share) = begun.get(start, (0, 0.0)), ended.get(start, (0, 0.0))
        means.append(OpenIn(start, now + coming * coming_share - going * going_share))
        now += coming - going
    return means


def _counted(lake: Lake, steps: Steps, time_sql: str) -> dict[int, tuple[int, float]]:
    """By step, how many merge records have such a time in it, and which share of the step is left after it on average."""
    step = steps.of(time_sql)
    found = lake.rows_if_any(
        f"SELECT {step} AS step, COUNT(*), AVG({steps.width} - {time_sql} % {steps.width}) FROM {{silver}} "
        f"WHERE COALESCE(invalid_reason, '') <> 'reset' GROUP BY {step}",
    )
    return {at: (records, left / steps.width) for at, records, left in found}


def matched(lake: Lake, steps: Steps, sources: Sequence[str]) -> list[MatchedIn]:
    """By the event time of finished merge records; a step without any is left out."""
    step, has = steps.of(lake.in_ms("event_time")), [f"cardinality(`{source}`) > 0" for source in sources]
    counts = [f"SUM(CASE WHEN {condition} THEN 1 ELSE 0 END)" for condition in [*has, " AND ".join(has)]]
    found = lake.rows_if_any(
        f"SELECT {step} AS step, COUNT(*), {', '.join(counts)} FROM {{silver}} WHERE {_FINISHED} GROUP BY {step} ORDER BY step",
    )
    return [MatchedIn(at, records, tuple(by_source), by_all) for at, records, *by_source, by_all in found]


# -- totals


def refused(lake: Lake) -> list[Refused]:
    """Why records were never merged, by source."""
    late = lake.rows_if_any("SELECT source, COUNT(*) FROM {late} GROUP BY source ORDER BY source")
    quarantined = lake.rows_if_any(
        "SELECT reason, source, COUNT(*) FROM {quarantine} GROUP BY reason, source ORDER BY reason, source"
    )
    return [*(Refused(LATE, *row) for row in late), *(Refused(*row) for row in quarantined)]


def sizes(lake: Lake, settings: Settings) -> list[Column]:
    """How many parts finished merge records have: columns up to the largest, empty ones between them too."""
    parts = " + ".join(f"cardinality(`{source}`)" for source in settings.sources)
    cases = " ".join(f"WHEN parts <= {most} THEN {i}" for i, most in enumerate(_SIZES))
    number = f"CASE {cases} ELSE {len(_SIZES)} END"
    all_sizes = f"SELECT {parts} AS parts FROM {{silver}} WHERE {_FINISHED}"
    known = dict(lake.rows_if_any(f"SELECT {number} AS number, COUNT(*) FROM ({all_sizes}) AS sizes GROUP BY {number}"))
    least = (0, *_SIZES)
    return [Column(least[i] + 1, _SIZES[i], known.get(i, 0)) for i in range(max(known, default=-1) + 1)]


def durations(lake: Lake) -> list[Column]:
    """How long finished merge records last (ms), from the first to the last event time of their parts; the first column has
    those of no duration, with a single part as a rule.
    """
    lasted = f"({lake.in_ms('last_event_time')} - {lake.in_ms('event_time')})"
    where = f"FROM {{silver}} WHERE {_FINISHED}"
    [(longest,)] = lake.rows_if_any(f"SELECT MAX({lasted}) {where}") or [(None,)]
    if longest is None:
        return []
    [(none,)] = lake.rows_if_any(f"SELECT COUNT(*) {where} AND event_time = last_event_time")
    # A column begins with the ms after the one before it: the first of them is 1 ms.
    steps = steps_over(0, max(0, longest - 1), 40)
    step = steps.of(f"({lasted} - 1)")
    known = dict(lake.rows_if_any(f"SELECT {step} AS step, COUNT(*) {where} AND event_time < last_event_time GROUP BY {step}"))
    columns = [Column(at + 1, at + steps.width, count) for at, count in in_each(steps, known)]
    return [Column(0, 0, none), *(columns if longest else [])]
