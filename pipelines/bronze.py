"""Bronze: what Kafka said, every record once, raw, with its coordinates and what the merge needs to plan.

One Structured Streaming query per source. Its checkpoint is thrown away at every start: the table itself says where
reading goes on. A micro-batch is committed in this order:

1. *append*: its rows to `bronze_<source>`, in one Delta commit (`_append`);
2. *quarantine*: the refused ones among them, read back from bronze, to `quarantine` (`_quarantine_missing`).

After a crash before 1 the records are read from Kafka again; between 1 and 2, the next start finds the refused rows that
quarantine lacks and appends them. Quarantine is written in bronze's order, so its largest offset says what it has.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timezone

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from pipelines import tables
from pipelines.adapters.kafka import Cluster, spark_options
from pipelines.adapters.lake import Lake
from pipelines.adapters.progress import read_last_batch
from pipelines.observability import Reporter
from pipelines.settings import Settings
from pipelines.streaming import Gate, new_checkpoint, trigger
from pipelines.transforms.decode import decode
from pipelines.transforms.ranges import is_within

EARLIEST = -2
"""Spark's name for the first offset that Kafka still has."""


@dataclass
class Bronze:
    """The bronze stream of one source with `partitions` Kafka partitions; one owner at a time."""

    lake: Lake
    settings: Settings
    source: str
    partitions: int
    reporter: Reporter = field(default_factory=Reporter)

    @property
    def topic(self) -> str:
        """The Kafka topic of the source."""
        return self.settings.sources[self.source].topic

    def start(self, gate: Gate, *, once: bool) -> StreamingQuery:
        """The running query: from where the table ends to what Kafka has now (`once`), or on and on."""
        self._quarantine_missing()
        starting = {self.topic: {str(p): offset for p, offset in self.next_offsets().items()}}
        kafka = (
            self.lake.spark.readStream.format("kafka")
            .options(**spark_options(self.settings.kafka))
            .option("subscribe", self.topic)
            .option("startingOffsets", json.dumps(starting))
            .option("maxOffsetsPerTrigger", self.settings.kafka.max_offsets_per_batch)
            .option("failOnDataLoss", "true")
            .option("includeHeaders", "true")
        )
        return (
            kafka.load()
            .transform(decode(self.settings.sources[self.source].reading_rules(self.settings.merge.max_future_ms)))
            .writeStream.queryName(f"watersmeet {tables.bronze(self.source)}")
            .option("checkpointLocation", new_checkpoint(self.lake.spark, self.settings, tables.bronze(self.source)))
            .trigger(**trigger(once=once))
            .foreachBatch(gate.guard(self._append))
            .start()
        )

    def next_offsets(self) -> dict[int, int]:
        """Per partition the offset at which reading goes on: after the table's last row, or where the first start began."""
        offsets = {p: last + 1 for p, last in self._last_offsets().items()}
        begun = self._begun_at()
        if not offsets and not begun and self.settings.kafka.start == "latest":
            begun = self._begin_at_latest()
        return {p: max(offsets.get(p, EARLIEST), begun.get(p, EARLIEST)) for p in range(self.partitions)}

    def _last_offsets(self) -> dict[int, int]:
        """The largest offset of each partition in the table, without reading what silver has long passed."""
        last = read_last_batch(self.lake)
        passed = {
            tp.partition: done.until_offset - 1
            for tp, done in (last.ranges.items() if last else ())
            if tp.source == self.source and done.until_offset > 0
        }
        is_new = is_within({p: (passed.get(p, -1) + 1, None) for p in range(self.partitions)})
        found = self.lake.read(tables.bronze(self.source)).where(is_new).groupBy("partition").agg(F.max("offset"))
        return passed | dict(found.collect())

    def _begun_at(self) -> dict[int, int]:
        resets = self.lake.read(tables.RESETS).where(F.col("source") == self.source)
        return dict(resets.groupBy("partition").agg(F.max("to_offset")).collect())

    def _begin_at_latest(self) -> dict[int, int]:
        """`start: latest` is decided once, at the first start, and kept: a restart before the first record must not skip any."""
        bounds = Cluster(self.settings.kafka).bounds(self.topic, self.partitions)
        now = datetime.now(timezone.utc)
        rows = [(self.source, self.topic, p, first, following, now, "start: latest") for p, (first, following) in bounds.items()]
        self.lake.append(self.lake.spark.createDataFrame(rows, self.lake.schema(tables.RESETS)), tables.RESETS)
        return {p: following for p, (_, following) in bounds.items()}

    def _append(self, rows: DataFrame) -> None:
        seen = Observation()
        counts = F.count(F.lit(1)).alias("records"), F.count("reason").alias("refused")
        self.lake.append(rows.observe(seen, *counts), tables.bronze(self.source))
        if seen.get["refused"]:
            self._quarantine_missing()
        if seen.get["records"]:
            self.reporter.tell(tables.bronze(self.source), f"{seen.get['records']} records, {seen.get['refused']} refused")

    def _quarantine_missing(self) -> None:
        """Every refused row of bronze is in quarantine afterwards, once."""
        quarantine = self.lake.read(tables.QUARANTINE).where(F.col("source") == self.source)
        held: dict[int, int] = dict(quarantine.groupBy("partition").agg(F.max("offset")).collect())
        beyond = is_within({p: (held.get(p, -1) + 1, None) for p in range(self.partitions)})
        missing = (
            self.lake.read(tables.bronze(self.source))
            .where(F.col("reason").isNotNull() & beyond)
            .withColumn("source", F.lit(self.source))
            .select(*self.lake.schema(tables.QUARANTINE).names)
        )
        if not missing.isEmpty():
            self.lake.append(missing, tables.QUARANTINE)
