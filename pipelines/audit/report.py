"""What the report shows, read from the lake: each question is one aggregate, answered by few rows however large the lake is.

There are three kinds of time, and each has steps of its own: wall time (`report_wall`), Kafka's timestamps and event time.
All are epoch ms.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.audit.report_merge import Column, EventTime, Refused, durations, read_event_time, refused, sizes
from pipelines.audit.report_steps import Steps, in_each, span, steps_over
from pipelines.audit.report_wall import RATE_STEPS, CountIn, WallTime, read_wall_time
from pipelines.errors import ConfigurationError
from pipelines.settings import Settings

SHOWN_PARTITIONS = 8
"""More lines than this cannot be told apart, by colour or otherwise."""


class PartitionCounts(NamedTuple):
    """Where a partition stands, and what became of its records."""

    partition: int
    clock: int | None
    bronze: int = 0
    open: int = 0
    timed_out: int = 0
    late: int = 0
    quarantined: int = 0
    published: int = 0


class LastBatch(NamedTuple):
    """The last silver batch that `progress` knows, and when it was decided."""

    batch: int
    committed_at: int


class Arrivals(NamedTuple):
    """The records of each source by Kafka's own timestamp."""

    steps: Steps
    records: Sequence[CountIn]


class Report(NamedTuple):
    """Everything that is on the page. Of the `shown` partitions there are lines of their own."""

    name: str
    place: str
    made_at: int
    sources: tuple[str, ...]
    timeout_ms: int
    idle_after_ms: int | None
    last: LastBatch | None
    partitions: Sequence[PartitionCounts]
    shown: Sequence[int]
    wall: WallTime | None
    arrivals: Arrivals | None
    events: EventTime | None
    refused: Sequence[Refused]
    sizes: Sequence[Column]
    durations: Sequence[Column]


def read_report(lake: Lake, settings: Settings, made_at: int) -> Report:
    """The report as the lake is now; reads only."""
    found = partitions(lake, settings)
    shown = furthest_behind(found)
    return Report(
        settings.name,
        lake.place,
        made_at,
        tuple(settings.sources),
        settings.merge.timeout_ms,
        settings.merge.idle_after_ms,
        last_batch(lake),
        found,
        shown,
        read_wall_time(lake, settings, shown),
        arrivals(lake, settings),
        read_event_time(lake, settings, [at.clock for at in found if at.clock is not None]),
        refused(lake),
        sizes(lake, settings),
        durations(lake),
    )


def check_writable(out: Path) -> None:
    """Whether a page can be written there is known before the lake is read for it: raises ConfigurationError."""
    if not out.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--out: {out} cannot be written, since there is no folder {out.absolute().parent}; make it first"
        )
    if out.is_dir():
        raise ConfigurationError(f"--out: {out} is a folder; name the file to write, such as {out / 'report.html'}")
    if not os.access(out if out.exists() else out.absolute().parent, os.W_OK):
        raise ConfigurationError(f"--out: {out} cannot be written (no permission); name a file in a folder of yours")


def write_page(out: Path, page: str) -> None:
    """The file is the page; raises ConfigurationError where it cannot be."""
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--out: {out} cannot be written ({error.strerror}); name another file") from error


# -- where everything stands


def last_batch(lake: Lake) -> LastBatch | None:
    """The last batch; None while there is none."""
    [(batch, committed_at)] = lake.rows_if_any("SELECT MAX(batch), MAX(committed_at) FROM {progress}") or [(None, None)]
    return None if batch is None else LastBatch(batch, committed_at)


def partitions(lake: Lake, settings: Settings) -> list[PartitionCounts]:
    """Every partition that has a record in bronze, or in which silver stands anywhere."""
    found: dict[int, dict[str, Any]] = {}

    def count(name: str, sql: str) -> None:
        for partition, number in lake.rows_if_any(sql):
            known = found.setdefault(partition, {"clock": None})
            known[name] = number + known.get(name, 0) if name != "clock" else number

    by_partition = "GROUP BY `partition`"
    last = "WHERE batch = (SELECT MAX(batch) FROM {progress})"
    count("clock", f"SELECT `partition`, MAX(clock) FROM {{progress}} {last} {by_partition}")
    for source in settings.sources:
        count("bronze", f"SELECT `partition`, COUNT(*) FROM {{{tables.bronze(source)}}} {by_partition}")
    for status in ("open", "timed_out"):
        count(status, f"SELECT `partition`, COUNT(*) FROM {{silver}} WHERE status = '{status}' {by_partition}")
    count("late", f"SELECT `partition`, COUNT(*) FROM {{late}} {by_partition}")
    count("quarantined", f"SELECT `partition`, COUNT(*) FROM {{quarantine}} {by_partition}")
    # The sequence has no gap, so its last number says how many there are.
    count("published", f"SELECT `partition`, MAX(last_seq) + 1 FROM {{published}} {by_partition}")
    return [PartitionCounts(partition, **known) for partition, known in sorted(found.items())]


def furthest_behind(found: Sequence[PartitionCounts], most: int = SHOWN_PARTITIONS) -> list[int]:
    """The partitions to look at where there are too many for all: those with the smallest clocks."""
    behind = sorted(found, key=lambda at: (at.clock is None, at.clock, at.partition))
    return sorted(at.partition for at in behind[:most])


# -- Kafka's timestamps


def arrivals(lake: Lake, settings: Settings) -> Arrivals | None:
    """Every record that is in bronze; None while there is none."""
    bronzes = {source: tables.bronze(source) for source in settings.sources}
    found = span(
        row
        for bronze in bronzes.values()
        for row in lake.rows_if_any(f"SELECT MIN(kafka_timestamp), MAX(kafka_timestamp) FROM {{{bronze}}}")
    )
    if found is None:
        return None
    steps = steps_over(*found, RATE_STEPS, narrowest=1000)
    step, counted = steps.of(lake.in_ms("kafka_timestamp")), []
    for source, bronze in bronzes.items():
        known = dict(lake.rows_if_any(f"SELECT {step} AS step, COUNT(*) FROM {{{bronze}}} GROUP BY {step}"))
        counted += [CountIn(source, at, count) for at, count in in_each(steps, known)]
    return Arrivals(steps, counted)
