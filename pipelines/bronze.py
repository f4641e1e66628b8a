"""Bronze: what Kafka said, every record once, raw, with its coordinates and what the merge needs to plan.

One Structured Streaming query per source. Its checkpoint is thrown away at every start: the table itself says where
reading goes on. A micro-batch of which too large a share would be refused is not written at all. Any other is committed in
this order:

1. *append*: its rows to `bronze_<source>`, in one Delta commit (`_append`);
2. *quarantine*: the refused ones among them, read back from bronze, to `quarantine` (`_quarantine_missing`).

After a crash before 1 the records are read from Kafka again; between 1 and 2, the next start finds the refused rows that
quarantine lacks and appends them. Quarantine is written in bronze's order, so its largest offset says what it has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from pipelines import tables
from pipelines.adapters.kafka import spark_options
from pipelines.adapters.lake import Lake, bronze_application
from pipelines.errors import QuarantineLimitError
from pipelines.faults import reach
from pipelines.maintenance import Maintenance
from pipelines.observability import Reporter
from pipelines.settings import Settings
from pipelines.streaming import Gate, new_checkpoint, trigger
from pipelines.transforms.decode import decode
from pipelines.transforms.ranges import is_within

QUARANTINE_SAMPLE = 1000
"""The share of refused records is looked at once so many were read: of a few, half may well be bad."""


@dataclass
class Bronze:
    """The bronze stream of one source with `partitions` Kafka partitions; one owner at a time."""

    lake: Lake
    settings: Settings
    source: str
    partitions: int
    reporter: Reporter = field(default_factory=Reporter)
    must_mend: bool = True
    """Whether the owner before may have left a batch half written."""
    maintenance: Maintenance | None = None
    _unjudged: tuple[int, int] = (0, 0)

    @property
    def topic(self) -> str:
        """The Kafka topic of the source."""
        return self.settings.sources[self.source].topic

    def start(self, gate: Gate, offsets: Mapping[int, int], *, once: bool) -> StreamingQuery:
        """The running query: from the offsets given for each partition to what Kafka has now (`once`), or on and on."""
        if self.must_mend:
            self._quarantine_missing()
            self.must_mend = False
        kafka = (
            self.lake.spark.readStream.format("kafka")
            .options(**spark_options(self.settings.kafka))
            # These partitions and no others: one that is added later has keys of the others, and must not be merged.
            .option("assign", json.dumps({self.topic: list(range(self.partitions))}))
            .option("startingOffsets", json.dumps({self.topic: {str(p): offset for p, offset in offsets.items()}}))
            .option("maxOffsetsPerTrigger", self.settings.kafka.max_offsets_per_batch)
            .option("failOnDataLoss", "true")
            .option("includeHeaders", "true")
        )
        return (
            kafka.load()
            .transform(decode(self.settings.sources[self.source].reading_rules(self.settings.merge.max_future_ms)))
            .writeStream.queryName(f"watersmeet {tables.bronze(self.source)}")
            .option("checkpointLocation", new_checkpoint(self.lake, self.settings, tables.bronze(self.source)))
            .trigger(**trigger(once=once))
            .foreachBatch(gate.guard(self._append))
            .start()
        )

    def _append(self, rows: DataFrame) -> None:
        rows = rows.persist()
        try:
            found = rows.agg(F.count(F.lit(1)).alias("records"), F.count("reason").alias("refused")).collect()[0]
            if not found.records:
                return
            self._check_share(rows, found.records, found.refused)
            reach("bronze.append")
            self.lake.append(rows, tables.bronze(self.source))
        finally:
            rows.unpersist()
        reach("bronze.quarantine")
        if found.refused:
            self._quarantine_missing()
        reach("bronze.done")
        self.reporter.tell(tables.bronze(self.source), f"{found.records} records, {found.refused} refused")
        if self.maintenance is not None:
            self.maintenance.after_commit()

    def _check_share(self, rows: DataFrame, records: int, refused: int) -> None:
        """A batch is judged together with those before it, until they are enough to judge."""
        seen, bad = self._unjudged
        if seen + records < QUARANTINE_SAMPLE:
            self._unjudged = seen + records, bad + refused
            return
        if refused and bad + refused > self.settings.kafka.quarantine_limit * (seen + records):
            where = F.concat_ws("", "topic", F.lit("["), "partition", F.lit("]@"), "offset")
            of_reason = (
                rows.where("reason IS NOT NULL").groupBy("reason").agg(F.count(F.lit(1)).alias("n"), F.min(where).alias("at"))
            )
            worst = of_reason.orderBy(F.desc("n"), "reason").first()
            assert worst is not None
            raise QuarantineLimitError(self.source, refused, records, worst.reason, worst.at)
        self._unjudged = 0, 0

    def _quarantine_missing(self) -> None:
        """Every refused row of bronze is in quarantine afterwards, once: both are written in the order of offsets."""
        bronze, last = tables.bronze(self.source), "SELECT `partition`, MAX(`offset`) FROM"
        refused: dict[int, int] = dict(self.lake.rows(f"{last} {{{bronze}}} WHERE reason IS NOT NULL GROUP BY `partition`"))
        held: dict[int, int] = dict(self.lake.rows(f"{last} {{quarantine}} WHERE source = '{self.source}' GROUP BY `partition`"))
        missing = {p: (held.get(p, -1) + 1, offset + 1) for p, offset in refused.items() if held.get(p, -1) < offset}
        if missing:
            self._append_quarantine(self._refused().where(is_within(missing)))

    def quarantine_all(self) -> None:
        """The same where records were added to bronze out of their order."""
        missing = self._refused().join(self._quarantine(), ["partition", "offset"], "left_anti")
        if not missing.isEmpty():
            self._append_quarantine(missing)

    def _refused(self) -> DataFrame:
        return self.lake.read(tables.bronze(self.source)).where(F.col("reason").isNotNull())

    def _quarantine(self) -> DataFrame:
        return self.lake.read(tables.QUARANTINE).where(F.col("source") == self.source).select("partition", "offset")

    def _append_quarantine(self, refused: DataFrame) -> None:
        rows = refused.withColumn("source", F.lit(self.source)).select(*self.lake.schema(tables.QUARANTINE).names)
        self.lake.append(rows, tables.QUARANTINE, application=bronze_application(self.source))
