"""Silver again, from bronze alone, in a folder of its own; also as it would be under another timeout.

A rebuild goes exactly as far as silver was: up to the offsets and the clocks of its last batch, and through every deliberate
reset at the place where it was made. So it can be compared row by row (`verify --against`), while the lake itself goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.decisions import Decided, read_decisions
from pipelines.adapters.lake import Lake, wall_clock_ms
from pipelines.audit.verify_evidence import Evidence, read, read_evidence
from pipelines.core.plan import BatchPlan, End, OffsetRange
from pipelines.errors import ConfigurationError
from pipelines.settings import Settings
from pipelines.silver import Silver

OF_BATCH, OF_TIMEOUT = "rebuild.batch", "merge.timeout"
"""What a rebuild notes of itself in its table `configuration`: the last batch that it repeats, and its timeout."""

_APPLICATION = "watersmeet-rebuild"


def rebuild(
    lake: Lake,
    settings: Settings,
    directory: Path,
    timeout_ms: int | None = None,
    tell: Callable[[BatchPlan], None] = lambda _: None,
) -> dict[str, Any]:
    """The answer of `rebuild --json`: where it is, how far it goes, and what silver holds beside what it holds there.

    `tell` hears of each batch. Raises ConfigurationError where the folder is not empty, or there is nothing to rebuild.
    """
    evidence = read_evidence(lake, settings, _partitions(lake), full=True)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigurationError(f"--into: {directory} is not an empty folder; name a new one")
    merge = settings.merge if timeout_ms is None else settings.merge.model_copy(update={"timeout_ms": timeout_ms})
    wanted = rebuilt_settings(settings, directory).model_copy(update={"merge": merge})
    into = Lake(lake.spark, wanted, inputs=lake)
    into.create_missing()
    silver = _Rebuilding(into, wanted, evidence)
    for plan in silver.again():
        tell(plan)
    facts = {OF_BATCH: str(evidence.last_batch), OF_TIMEOUT: f"{merge.timeout_ms} ms"}
    now = wall_clock_ms()
    into.append_once([(name, value, now) for name, value in facts.items()], tables.CONFIGURATION, _APPLICATION, None)
    return {
        "into": str(directory),
        "batch": evidence.last_batch,
        "timeout_ms": {"lake": settings.merge.timeout_ms, "rebuilt": merge.timeout_ms},
        "lake": content_of(evidence.silver, read(lake, tables.LATE).where(F.col("batch") <= evidence.last_batch), settings),
        "rebuilt": content_of(into.read(tables.SILVER), into.read(tables.LATE), settings),
    }


def rebuilt_settings(settings: Settings, directory: Path) -> Settings:
    """The same configuration for a lake in that folder."""
    return settings.model_copy(update={"lake": str(directory.absolute())})


def content_of(silver: DataFrame, late: DataFrame, settings: Settings) -> dict[str, Any]:
    """How many merge records there are, open, timed out, valid, and *complete* (with parts of every source); and of each source
    how many records were merged, how many of them into a complete merge record, and how many were late.
    """
    sources = list(settings.sources)
    is_complete = reduce(Column.__and__, [F.size(source) > 0 for source in sources])
    counts = {
        "records": F.lit(True),
        "open": F.col("status") == "open",
        "timed_out": F.col("status") == "timed_out",
        "valid": F.coalesce("valid", F.lit(False)),
        "complete": is_complete,
    }
    found = silver.agg(
        F.struct(*[F.count_if(condition).alias(name) for name, condition in counts.items()]).alias("counts"),
        F.struct(*[F.sum(F.size(source)).alias(source) for source in sources]).alias("merged"),
        F.struct(*[F.sum(F.when(is_complete, F.size(source))).alias(source) for source in sources]).alias("matched"),
    ).collect()[0]
    late_of = {row.source: row["count"] for row in late.groupBy("source").count().collect()}
    of_sources = {
        source: {
            "merged": found.merged[source] or 0,
            "in_complete_records": found.matched[source] or 0,
            "late": late_of.get(source, 0),
        }
        for source in sources
    }
    return {**found.counts.asDict(), "sources": of_sources}


class _Rebuilding(Silver):
    """Silver again, stretch by stretch from one reset to the next."""

    def __init__(self, lake: Lake, settings: Settings, evidence: Evidence) -> None:
        super().__init__(lake, settings, len({tp.partition for tp in evidence.until}))
        self._evidence, self._stretch = evidence, 0

    def again(self) -> Iterator[BatchPlan]:
        """Every batch, resets too."""
        for i, reset in enumerate([*self._evidence.resets, None]):
            here = self._evidence.stretches[i]
            self._stretch, self.ends = i, {tp: End(until, here.heads.get(tp)) for tp, until in here.until.items()}
            self._recovered, self._idle = self._read_recovered(), self._read_idle(here.begin)
            yield from self.drain()
            if reset is not None:
                ranges = {tp: OffsetRange(here.until[tp], offset, None, None, None) for tp, offset in reset.begin.items()}
                plan = BatchPlan(self.next_batch, ranges, {}, has_late=False, reset=reset.reason)
                self.commit(plan)
                yield plan

    def _read_decisions(self) -> list[Decided]:
        """As they were taken before the stretch ended."""
        ended_at = self._evidence.stretches[self._stretch].ended_at
        return read_decisions(self.lake, None if ended_at is None else ended_at // 1000)

    def _read_recovered(self) -> DataFrame | None:
        known = self._evidence.recovered().where(F.col("stretch") <= self._stretch)
        return known.withColumn("event_time", F.timestamp_millis("event_time")) if known.take(1) else None

    def _remember_published(self, plan: BatchPlan, comes_again: Mapping[str, Column]) -> None:
        """The lake itself has remembered it, and this reads it there."""


def _partitions(lake: Lake) -> int:
    if not lake.exists(tables.PROGRESS) or (found := lake.rows("SELECT MAX(`partition`) + 1 FROM {progress}")[0][0]) is None:
        raise ConfigurationError(
            f"{lake.place}: silver has merged nothing yet, so there is nothing to derive again; run it first"
        )
    return int(found)
