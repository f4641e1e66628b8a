"""Runs the layers: once over everything that is there, or on and on until told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from pipelines import tables
from pipelines.adapters.kafka import Cluster, co_partitioned
from pipelines.adapters.lake import APPLICATION, Lake, bronze_application
from pipelines.adapters.lease import Lease
from pipelines.adapters.spark import layer_session, spark_session
from pipelines.audit.validate import check_expressions, check_tables
from pipelines.beginning import Beginning
from pipelines.bronze import Bronze
from pipelines.errors import ConfigurationError
from pipelines.gold import Gold
from pipelines.identity import identity, keep_identity
from pipelines.maintenance import Maintenance
from pipelines.observability import Reporter
from pipelines.settings import Settings
from pipelines.silence import Silence
from pipelines.silver import Silver
from pipelines.streaming import Follower, Gate, Query, Stream, new_checkpoint, trigger
from pipelines.watch import Patience, Watch

LAYERS = ("bronze", "silver", "gold")

_WITH_BRONZE = (tables.RESETS, tables.IDLE_HEARTBEATS, tables.RECOVERED)
"""What bronze and silver both write to."""


@dataclass
class Run:
    """The chosen layers of one configuration in this process; `stopping` ends it after the batches under way."""

    settings: Settings
    layers: Sequence[str]
    reporter: Reporter
    stopping: threading.Event = field(default_factory=threading.Event)
    patience_s: float = 120.0
    """For how long trouble with Kafka is waited out."""

    def __post_init__(self) -> None:
        """Asks Kafka before it starts Spark: what is wrong there is said at once. Raises WatersmeetError."""
        self.partitions = co_partitioned(self.settings, Cluster(self.settings.kafka).partition_counts())
        self._patience = Patience(self.reporter, self.stopping, self.patience_s)
        self._spark = spark_session()
        lake = self._lake()
        problems = check_expressions(lake.spark, lake, self.settings) + check_tables(lake, self.settings)
        if problems:
            what, where, fix = problems[0]
            raise ConfigurationError(f"{where}: {what}; {fix}")
        lake.create_missing()
        self.reporter.tell("lake", "ready")

    def once(self) -> None:
        """Everything available now passes through the layers, one after the other."""
        with self.owned() as owned:
            if "bronze" in self.layers:
                watch = Watch(self.settings, self.partitions, self._patience)
                streams = [owned.bronze(source, once=True) for source in self.settings.sources]
                try:
                    for stream in streams:
                        stream.start()
                    while any(stream.is_active for stream in streams) and not owned.is_lost:
                        watch.look()
                        time.sleep(0.05)
                finally:
                    for stream in streams:
                        stream.stop()
                for stream in streams:
                    stream.raise_failure()
            owned.raise_if_lost()
            if "silver" in self.layers:
                self._patience.bear(owned.drain_silver)
            if "gold" in self.layers:
                self._patience.bear(owned.drain_gold)
            owned.raise_if_lost()

    def until_stopped(self) -> None:
        """Every layer follows the one before it. Returns once `stopping` is set and every batch under way is done; raises
        WatersmeetError where a stream failed, the others having been stopped in the same way.
        """
        with self.owned(can_be_idle=True) as owned:
            watch = Watch(self.settings, self.partitions, self._patience) if {"bronze", "gold"} & set(self.layers) else None
            streams = owned.streams()
            try:
                for stream in streams:
                    stream.start()
                while not self.stopping.wait(0.5):
                    if watch is not None:
                        watch.look()
                    for stream in streams:
                        stream.look_after()
            finally:
                self.stopping.set()
                for stream in streams:
                    stream.stop()
            owned.raise_if_lost()
            for stream in streams:
                stream.raise_failure()

    @contextmanager
    def owned(self, *, can_be_idle: bool = False) -> Iterator[Owned]:
        """The layers, written by this process alone; what an owner before left incomplete can no longer be written by it."""
        lake = self._lake()
        written = [pair for layer in self.layers for pair in _written_by(layer, self.settings)]
        lease = Lease(lake, self.settings, self.layers, on_lost=self.stopping.set)
        lease.take(lambda: max((commit.token for pair in written if (commit := lake.last_commit(*pair))), default=0))
        try:
            if lease.must_fence:
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(lambda pair: self._lake(lease.token).fence(*pair), written))
            keep_identity(lake, identity(self.settings, self.partitions))
            if "silver" in self.layers:
                self._lake(lease.token).keep_properties(tables.SILVER)
            if "bronze" in self.layers:
                Beginning(self._lake(lease.token), self.settings, self.partitions).decide()
            yield Owned(self, lease, can_be_idle=can_be_idle)
        except BaseException:
            lease.release(complete=False)
            if lease.lost is not None:
                raise lease.lost from None
            raise
        lease.release()

    def _lake(self, token: int = 0) -> Lake:
        """Each layer has a session of its own, so that none sees another's settings."""
        return Lake(layer_session(self._spark), self.settings, token)


class Owned:
    """The layers of a run that holds their lease."""

    def __init__(self, run: Run, lease: Lease, *, can_be_idle: bool) -> None:
        self._run, self._settings, self._lease = run, run.settings, lease
        idle_after_ms = self._settings.merge.idle_after_ms if can_be_idle else None
        self._silence = Silence(self._settings, idle_after_ms) if idle_after_ms is not None else None
        self._silver = Silver(self.lake(), self._settings, run.partitions, self._silence)
        self._gold = Gold(self.lake(), self._settings, run.partitions, lease.check)
        self._maintenance = {
            name: Maintenance(layer.lake, kept_by(name, self._settings))
            for name, layer in (("silver", self._silver), ("gold", self._gold))
        }

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the layers over."""
        return self._lease.lost is not None

    def raise_if_lost(self) -> None:
        """Says that another process has taken the layers over."""
        if self._lease.lost is not None:
            raise self._lease.lost

    def streams(self) -> list[Stream]:
        """What runs until it is stopped: a stream for each source, one for silver and one for gold, as far as chosen."""
        streams = []
        if "bronze" in self._run.layers:
            streams += [self.bronze(source, once=False) for source in self._settings.sources]
        if "silver" in self._run.layers:
            upstream = [tables.bronze(source) for source in self._settings.sources]
            streams.append(self._follower(tables.SILVER, upstream, self.drain_silver, self._silence_is_due))
        if "gold" in self._run.layers:
            streams.append(self._follower("gold", [tables.SILVER], self.drain_gold))
        return streams

    def bronze(self, source: str, *, once: bool) -> Stream:
        """The stream of a source; it begins where the lake says, each time it is started."""
        run = self._run
        bronze = Bronze(self.lake(), self._settings, source, run.partitions, run.reporter, self._lease.must_mend)
        bronze.maintenance = Maintenance(bronze.lake, kept_by("bronze", self._settings, source))

        def begin(gate: Gate) -> StreamingQuery:
            offsets = Beginning(bronze.lake, self._settings, run.partitions).checked_offsets(source)
            return bronze.start(gate, offsets, once=once)

        return Stream(Gate(run.stopping, run._patience), begin)

    def drain_silver(self) -> None:
        """Merges what there is."""
        for plan in self._silver.drain(self._run.stopping.is_set):
            rows = sum(done.until_offset - done.from_offset for done in plan.ranges.values())
            clock = min(plan.clocks.values(), default=None)
            self._run.reporter.tell("silver", f"batch {plan.batch}: {rows} offsets, slowest clock {_utc(clock)}")
            self._maintenance["silver"].after_commit()

    def drain_gold(self) -> None:
        """Publishes what there is."""
        for publications in self._gold.drain(self._run.stopping.is_set):
            messages = sum(p.last_seq - p.first_seq + 1 for p in publications)
            self._run.reporter.tell("gold", f"{messages} messages published to {self._settings.publish.topic}")
            self._maintenance["gold"].after_commit()

    def _silence_is_due(self) -> bool:
        return self._silence is not None and self._silence.is_due

    def _follower(
        self, name: str, upstream: Sequence[str], drain: Callable[[], None], is_due: Callable[[], bool] = lambda: False
    ) -> Stream:
        """What calls `drain` whenever a table upstream has a new commit, and whenever it is due for another reason.

        It drains once after its start as well, so that nothing depends on where exactly it begins.
        """
        lake = self.lake()

        def begin(gate: Gate) -> Query:
            if lake.is_local:
                return Follower(lake, upstream, lambda: gate.run(drain))
            news = reduce(DataFrame.union, [lake.follow(table).select(F.lit(1)) for table in upstream])
            return (
                news.writeStream.queryName(f"watersmeet {name}")
                .option("checkpointLocation", new_checkpoint(lake, self._settings, name))
                .trigger(**trigger(once=False))
                .foreachBatch(gate.guard(lambda _: drain()))  # its rows only say that there is news
                .start()
            )

        return Stream(Gate(self._run.stopping, self._run._patience), begin, drain, is_due)

    def lake(self) -> Lake:
        """The lake, in a session of its own, with the token of this owner."""
        return self._run._lake(self._lease.token)


def _written_by(layer: str, settings: Settings) -> list[tuple[str, str]]:
    """The tables that a layer writes to, each with the name under which Delta counts its commits there."""
    if layer == "bronze":
        own = [(tables.bronze(source), APPLICATION) for source in settings.sources]
        shared = [(tables.QUARANTINE, bronze_application(source)) for source in settings.sources]
        return own + shared + [(table, bronze_application()) for table in _WITH_BRONZE]
    if layer == "silver":
        own_tables = (tables.PROGRESS, tables.LATE, tables.SILVER, tables.VERSIONS, *_WITH_BRONZE)
        return [(table, APPLICATION) for table in own_tables]
    return [(tables.PUBLISHED, APPLICATION)]


def kept_by(layer: str, settings: Settings, source: str | None = None) -> list[str]:
    """The tables that the owner of a layer keeps small, with `source` that source's share: each table has one keeper."""
    if layer == "silver":
        return [tables.SILVER, tables.LATE, tables.PROGRESS, tables.VERSIONS, tables.IDLE_HEARTBEATS, tables.RESETS]
    if layer == "gold":
        return [tables.PUBLISHED]
    first = next(iter(settings.sources))
    shared = [tables.QUARANTINE, tables.RECOVERED, tables.CONFIGURATION, tables.LEASES]
    if source is None:
        return [*map(tables.bronze, settings.sources), *shared]
    return [tables.bronze(source), *(shared if source == first else [])]


def _utc(ms: int | None) -> str:
    if ms is None:
        return "undefined"
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
