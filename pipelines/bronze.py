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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from pipelines import tables
from pipelines.adapters.kafka import spark_options
from pipelines.adapters.lake import Lake, bronze_application
from pipelines.core.reading import ReadingRules
from pipelines.errors import QuarantineLimitError
from pipelines.faults import reach
from pipelines.maintenance import Maintenance
from pipelines.observability import Reporter
from pipelines.settings import Settings
from pipelines.streaming import FROM_KAFKA, Gate, new_checkpoint, offsets_under_way, trigger
from pipelines.transforms.decode import decode, decode_fetched
from pipelines.transforms.ranges import is_within

FEW_RECORDS = 20_000
FEW_BYTES = 64 * 1024 * 1024
"""The driver takes a batch of up to so many offsets, and so many bytes if its records are no larger than others were."""

LARGE_RECORD = 64 * 1024
"""So many bytes a record may have for all that is known before the first."""

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
    _bytes_each: float = 0.0
    """The largest average of a batch yet."""

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
        checkpoint = new_checkpoint(self.lake, self.settings, tables.bronze(self.source))

        def append(kafka: DataFrame) -> None:
            count = offsets_under_way(self.lake, checkpoint, self.topic, offsets) if self.lake.is_local else None
            self._append(kafka, count)

        return (
            kafka.load()
            .writeStream.queryName(f"watersmeet {tables.bronze(self.source)}")
            .option("checkpointLocation", checkpoint)
            .trigger(**trigger(once=once, every=FROM_KAFKA))
            .foreachBatch(gate.guard(append))
            .start()
        )

    def _append(self, kafka: DataFrame, offsets: int | None) -> None:
        few = min(FEW_RECORDS, FEW_BYTES / (self._bytes_each or LARGE_RECORD))
        is_small = offsets is not None and offsets <= few
        records, refused = self._append_fetched(kafka) if is_small else self._append_by_spark(kafka)
        if not records:
            return
        reach("bronze.quarantine")
        if refused:
            self._quarantine_missing()
        reach("bronze.done")
        self.reporter.tell(tables.bronze(self.source), f"{records} records, {refused} refused")
        if self.maintenance is not None:
            self.maintenance.after_commit()

    @cached_property
    def _rules(self) -> ReadingRules:
        return self.settings.sources[self.source].reading_rules(self.settings.merge.max_future_ms)

    @cached_property
    def _decode_fetched(self) -> Callable[[pa.Table], pa.Table]:
        return decode_fetched(self._rules)

    def _append_fetched(self, kafka: DataFrame) -> tuple[int, int]:
        """Step 1 for few records: read by Spark, the rest by the driver; how many, and how many of them are refused."""
        found = self._decode_fetched(kafka.toArrow())
        records, refused = found.num_rows, found.num_rows - found["reason"].null_count
        if records:
            self._judge(lambda: self.lake.frame(found, self.lake.schema(tables.bronze(self.source))), records, refused)
            self.lake.append_fetched(found, tables.bronze(self.source), apart="partition")
            self._bytes_each = max(self._bytes_each, found.nbytes / records)
        return records, refused

    def _append_by_spark(self, kafka: DataFrame) -> tuple[int, int]:
        """The same for many; they are kept while it is found out how many are refused."""
        rows = kafka.transform(decode(self._rules)).persist()
        try:
            counts = F.count(F.lit(1)).alias("records"), F.count("reason").alias("refused")
            found = rows.agg(*counts, F.sum(F.coalesce(F.octet_length("value"), F.lit(0))).alias("bytes")).collect()[0]
            if found.records:
                self._judge(lambda: rows, found.records, found.refused)
                self.lake.append(rows, tables.bronze(self.source))
                self._bytes_each = max(self._bytes_each, found.bytes / found.records)
        finally:
            rows.unpersist()
        return found.records, found.refused

    def _judge(self, rows: Callable[[], DataFrame], records: int, refused: int) -> None:
        """The last thing before step 1: raises QuarantineLimitError where too many are refused."""
        self._check_share(rows, records, refused)
        reach("bronze.append")

    def _check_share(self, rows: Callable[[], DataFrame], records: int, refused: int) -> None:
        """A batch is judged together with those before it, until they are enough to judge."""
        seen, bad = self._unjudged
        if seen + records < QUARANTINE_SAMPLE:
            self._unjudged = seen + records, bad + refused
            return
        if refused and bad + refused > self.settings.kafka.quarantine_limit * (seen + records):
            where = F.concat_ws("", "topic", F.lit("["), "partition", F.lit("]@"), "offset")
            counts = F.count(F.lit(1)).alias("n"), F.min(where).alias("at")
            of_reason = rows().where("reason IS NOT NULL").groupBy("reason").agg(*counts)
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
