"""One check: every suite on what is new in its table since its last check."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from watersmeet.engine import Engine
from watersmeet.errors import ConfigurationError, KafkaRequestError, KafkaTransientError
from watersmeet.lake import tables
from watersmeet.lake.progress import BatchVersions
from watersmeet.lake.quality import Checked, last_versions
from watersmeet.lake.table_reader import TableReader, VersionGoneError
from watersmeet.quality.evaluate import Outcome, evaluate
from watersmeet.quality.rows import (
    Batches,
    Span,
    batch_at,
    chunk_limit,
    coordinates,
    missing_columns,
    published_until,
    read_batches,
    rows_of,
)
from watersmeet.quality.suites import SINK, Suite
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet.quality")

_EVERY_TIME: Final = tables.PROGRESS
"""What is looked at as it stands, also where no batch is new."""


@dataclass(frozen=True)
class SuiteResult:
    """The result of a suite on a table: that of `rows` new rows, up to a version of silver."""

    suite: str
    table: str
    version: int
    rows: int
    outcomes: Sequence[Outcome]

    @property
    def failed(self) -> list[Outcome]:
        """The expectations that do not hold."""
        return [outcome for outcome in self.outcomes if not outcome.success]


@dataclass
class Check:
    """A check at a time (epoch ms), and its results.

    `version`: silver's last one that was looked at (None before the first batch). `nothing_new`:
    tables without a new batch. `skipped`: by table, why it was not looked at.
    """

    checked_at: int
    version: int | None
    results: list[SuiteResult] = field(default_factory=list)
    nothing_new: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True where every expectation holds."""
        return not any(result.failed for result in self.results)

    def checked(self) -> list[Checked]:
        """Return the results as rows of the table `quality`."""
        at = self.checked_at
        return [
            Checked(at, r.suite, r.table, r.version, o.expectation, o.success, o.unexpected, r.rows)
            for r in self.results
            for o in r.outcomes
        ]

    def document(self) -> dict[str, Any]:
        """Return the answer of `check --json`."""
        outcomes = [outcome for result in self.results for outcome in result.outcomes]
        results = []
        for row, outcome in zip(self.checked(), outcomes, strict=True):
            found = {"observed": outcome.observed, "trouble": outcome.trouble}
            results.append({**row._asdict(), **found, "examples": list(outcome.examples)})
        return {
            "ok": self.ok,
            "checked_at": self.checked_at,
            "version": self.version,
            "results": results,
            "nothing_new": self.nothing_new,
            "skipped": self.skipped,
        }


def check(
    engine: Engine,
    settings: Settings,
    suites: Sequence[Suite],
    now_ms: int,
    *,
    since: int | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> Check:
    """Check what is new since each suite's last check, or a version; add results to `quality`.

    Where it is to stop, the rest is left for the next check. Raises ConfigurationError for a
    version or a column that there is not, and what `evaluate` raises.
    """
    for suite in suites:
        _ = suite.expectations  # one that is wrong is reported before anything is read
    if missing := missing_columns(settings, suites):
        raise ConfigurationError(*missing[0])
    reader = engine.reader
    table = engine.lake.layout[tables.QUALITY]
    if since is not None and (newest := reader.version(tables.SILVER)) < since:
        raise ConfigurationError(
            f"silver has no version {since}", where="--since", fix=f"name one from 0 to {newest}"
        )
    groups = _grouped(reader, suites, since)
    batches = read_batches(reader, min(after for _, after in groups))
    last = batches.last
    done = Check(now_ms, None if last < 0 else batches.version)
    for (name, after), group_suites in groups.items():
        if is_stopping():
            break
        try:
            until = published_until(reader, settings, last) if name == SINK else last
            if name != _EVERY_TIME and until <= after:
                done.nothing_new.append(name)
            elif until >= 0:
                done.results += _results(
                    engine, settings, batches, name, Span(after, until), group_suites, now_ms
                )
        except (KafkaTransientError, KafkaRequestError) as error:
            done.skipped[name] = str(error)
            log.warning("%s; %s is not checked", error, name)
    done.nothing_new = sorted(set(done.nothing_new))
    if done.results:
        engine.append(table.name, table.rows(done.checked()))
    return done


def unchecked(reader: TableReader, suites: Sequence[Suite]) -> int:
    """Return how many batches of silver some suite, but for the sink's, has not looked at yet."""
    in_lake = [suite for suite in suites if suite.table != SINK]
    after = min(after for _, after in _grouped(reader, in_lake, None))
    return sum(batch > after for batch in read_batches(reader, after).offsets)


def _grouped(
    reader: TableReader, suites: Sequence[Suite], since: int | None
) -> dict[tuple[str, int], list[Suite]]:
    # Suites of one table and the batch after which they look read the same rows.
    versions = last_versions(reader) if since is None else {}
    last_batch = batch_after if since is None else batch_at
    after = {version: last_batch(reader, version) for version in {since, *versions.values()}}
    groups: dict[tuple[str, int], list[Suite]] = {}
    for suite in suites:
        version = versions.get((suite.name, suite.table), since)
        groups.setdefault((suite.table, after[version]), []).append(suite)
    return groups


def batch_after(reader: TableReader, version: int | None) -> int:
    """Return the last batch of a version of silver, after which a check goes on.

    -1, so that it looks at all, where there is none or the log has forgotten the version.
    """
    with suppress(VersionGoneError):
        return batch_at(reader, version)
    return -1


def _results(
    engine: Engine,
    settings: Settings,
    batches: Batches,
    table: str,
    span: Span,
    suites: Sequence[Suite],
    now_ms: int,
) -> list[SuiteResult]:
    reader = engine.reader
    row_count = 0
    outcomes = list[list[Outcome]]()
    chunks: Iterable[Span] = [span]
    if table != _EVERY_TIME:
        chunks = batches.chunks(span, chunk_limit(reader, settings))
    for chunk in chunks:
        rows = rows_of(reader, settings, table, chunk, now_ms)
        row_count += rows.num_rows
        found = evaluate(rows, suites, coordinates(table, settings.hidden_names))
        joined = zip(outcomes, found, strict=True) if outcomes else ()
        outcomes = [list(map(Outcome.joined, *pair)) for pair in joined] or found
    version = batches.version
    if span.until < batches.last:
        version = BatchVersions(reader).of(span.until) or 0
    return [
        SuiteResult(suite.name, table, version, row_count, suite_outcomes)
        for suite, suite_outcomes in zip(suites, outcomes, strict=True)
    ]
