"""Runs the layers: once over everything that is there, or on and on until told to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from pipelines import tables
from pipelines.adapters.kafka import Cluster, co_partitioned
from pipelines.adapters.lake import Lake
from pipelines.adapters.spark import layer_session, spark_session
from pipelines.audit.validate import check_expressions, check_tables
from pipelines.bronze import Bronze
from pipelines.errors import ConfigurationError, WatersmeetError, root_cause
from pipelines.gold import Gold
from pipelines.observability import Reporter
from pipelines.settings import Settings
from pipelines.silver import Silver
from pipelines.streaming import Gate, new_checkpoint, trigger

LAYERS = ("bronze", "silver", "gold")


@dataclass
class Run:
    """The chosen layers of one configuration in this process; `stopping` ends it after the batches under way."""

    settings: Settings
    layers: Sequence[str]
    reporter: Reporter
    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Asks Kafka before it starts Spark: what is wrong there is said at once. Raises WatersmeetError."""
        self.partitions = co_partitioned(self.settings, Cluster(self.settings.kafka).partition_counts())
        self._spark = spark_session()
        lake = self._lake()
        problems = check_expressions(lake.spark, lake, self.settings) + check_tables(lake, self.settings)
        if problems:
            what, where, fix = problems[0]
            raise ConfigurationError(f"{where}: {what}; {fix}")
        lake.create_missing()
        self.reporter.tell("lake", "ready")
        self._silver = Silver(self._lake(), self.settings, self.partitions)
        self._gold = Gold(self._lake(), self.settings, self.partitions)

    def once(self) -> None:
        """Everything available now passes through the layers, one after the other."""
        if "bronze" in self.layers:
            gates = [Gate(self.stopping) for _ in self.settings.sources]
            queries = [bronze.start(gate, once=True) for bronze, gate in zip(self._bronzes(), gates, strict=True)]
            for query in queries:
                query.awaitTermination()
            _raise_failure(gates)
        if "silver" in self.layers:
            self._drain_silver()
        if "gold" in self.layers:
            self._drain_gold()

    def until_stopped(self) -> None:
        """Every layer follows the one before it. Returns once `stopping` is set and every batch under way is done; raises
        WatersmeetError where a stream failed, the others having been stopped in the same way.
        """
        gates: list[Gate] = []
        queries: list[StreamingQuery] = []
        try:
            if "bronze" in self.layers:
                for bronze in self._bronzes():
                    gates.append(Gate(self.stopping))
                    queries.append(bronze.start(gates[-1], once=False))
            if "silver" in self.layers:
                gates.append(Gate(self.stopping))
                upstream = [tables.bronze(source) for source in self.settings.sources]
                queries.append(self._follow(upstream, tables.SILVER, self._drain_silver, gates[-1]))
                gates[-1].run(self._drain_silver)
            if "gold" in self.layers:
                gates.append(Gate(self.stopping))
                queries.append(self._follow([tables.SILVER], "gold", self._drain_gold, gates[-1]))
                gates[-1].run(self._drain_gold)
            while not self.stopping.wait(0.5):
                for query in queries:
                    if not query.isActive:
                        raise WatersmeetError(
                            f"{query.name} ended: {root_cause(query.exception() or Exception('no reason given'))}"
                        )
        finally:
            self.stopping.set()
            for gate in gates:
                gate.close()
            for query in queries:
                query.stop()
        _raise_failure(gates)

    def _lake(self) -> Lake:
        """Each layer has a session of its own, so that none sees another's settings."""
        return Lake(layer_session(self._spark), self.settings)

    def _bronzes(self) -> list[Bronze]:
        return [Bronze(self._lake(), self.settings, s, self.partitions, self.reporter) for s in self.settings.sources]

    def _drain_silver(self) -> None:
        for plan in self._silver.drain(self.stopping.is_set):
            rows = sum(done.until_offset - done.from_offset for done in plan.ranges.values())
            clock = min(plan.clocks.values(), default=None)
            self.reporter.tell("silver", f"batch {plan.batch}: {rows} offsets, slowest clock {_utc(clock)}")

    def _drain_gold(self) -> None:
        for publications in self._gold.drain(self.stopping.is_set):
            messages = sum(p.last_seq - p.first_seq + 1 for p in publications)
            self.reporter.tell("gold", f"{messages} messages published to {self.settings.publish.topic}")

    def _follow(self, upstream: Sequence[str], name: str, drain: Callable[[], None], gate: Gate) -> StreamingQuery:
        """A query that calls `drain` whenever a table upstream has a new commit.

        The rows of the stream are not looked at: they only say that there is news. Whoever starts it drains once more
        afterwards, so that nothing depends on where exactly it begins.
        """
        lake = self._lake()
        news = None
        for table in upstream:
            stream = lake.follow(table).select(F.lit(1))
            news = stream if news is None else news.union(stream)
        assert news is not None

        def work(_: DataFrame) -> None:
            drain()

        return (
            news.writeStream.queryName(f"watersmeet {name}")
            .option("checkpointLocation", new_checkpoint(lake.spark, self.settings, name))
            .trigger(**trigger(once=False))
            .foreachBatch(gate.guard(work))
            .start()
        )


def _raise_failure(gates: Sequence[Gate]) -> None:
    for gate in gates:
        if gate.failure is not None:
            raise gate.failure


def _utc(ms: int | None) -> str:
    if ms is None:
        return "undefined"
    return datetime.fromtimestamp(ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
