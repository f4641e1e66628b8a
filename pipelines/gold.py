"""Gold: what silver has finished goes to Kafka, per partition one gapless sequence in order of (event time, key).

The sink itself says where the sequence stands. A publication is made in this order:

1. *extent*: which finished, valid records silver has beyond the last published one (`_pending`);
2. *min_offsets*: from which Kafka offsets a lost lake would be taken up again after them (`_min_offsets`);
3. *publish*: one transaction per partition, on the executors (`pipelines.adapters.publisher`);
4. *note*: a row per transaction in `published`.

After a crash before or in 3 a partition's messages are all out or not at all, and the next start reads from the sink which;
between 3 and 4, the next start writes the row that is missing. Nothing that times out later can sort before what is out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import orjson
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.kafka import Cluster, sink_settings
from pipelines.adapters.lake import Lake
from pipelines.adapters.publisher import PUBLICATION, Publication, Publisher
from pipelines.core.sequence import Tail
from pipelines.settings import Settings
from pipelines.transforms.message import message_value
from pipelines.transforms.ranges import by_partition

MAX_PER_TRANSACTION = 250_000
"""About so many messages of a partition go into one transaction: few large ones are cheap, and none outlives its timeout."""


@dataclass
class Gold:
    """The publication of one lake's silver over `partitions` sink partitions; one owner at a time."""

    lake: Lake
    settings: Settings
    partitions: int
    _tails: dict[int, Tail] | None = None

    def drain(self, is_stopping: Callable[[], bool] = lambda: False) -> Iterator[list[Publication]]:
        """Publishes everything that silver has finished; yields what each round of transactions wrote."""
        if self._tails is None:
            self._tails = self._recover()
        while not is_stopping():
            tails, self._tails = self._tails, None  # after a failure only the sink knows what is out
            publications = self._publish_next(tails)
            self._note(publications)
            self._tails = tails | {publication.partition: publication.tail for publication in publications}
            if not publications:
                return
            yield publications

    def _recover(self) -> dict[int, Tail]:
        """Where every partition's sequence stands, by the sink's own word; `published` then knows it too."""
        self._ensure_topic()
        noted = self._noted_tails()
        tails, missing = {}, []
        for partition, (_, end) in Cluster(self.settings.kafka).bounds(self._topic, self.partitions).items():
            tail, last = Publisher(self.settings).settle(partition), noted.get(partition)
            if tail is not None:
                tails[partition] = tail
                if last is None or last.seq < tail.seq:
                    missing.append(Publication.up_to(tail, partition, first_seq=0 if last is None else last.seq + 1))
            elif last is not None and end > 0:
                tails[partition] = last  # retention has emptied the partition: the sequence goes on
        self._note(missing)
        return tails

    def _ensure_topic(self) -> None:
        cluster = Cluster(self.settings.kafka)
        if self._topic not in cluster.partition_counts():
            cluster.create_topic(self._topic, self.partitions, sink_settings(self.settings))

    @property
    def _topic(self) -> str:
        return self.settings.publish.topic

    def _publish_next(self, tails: Mapping[int, Tail]) -> list[Publication]:
        """Steps 1 to 3, for as much as one transaction per partition should hold."""
        pending = self._pending(tails)
        extent = self._extent(pending)
        largest = max((row.records for row in extent.values()), default=0)
        if largest > MAX_PER_TRANSACTION:
            share = F.percentile_approx("event_time", MAX_PER_TRANSACTION / largest).alias("until")
            until = {row.partition: row.until for row in pending.groupBy("partition").agg(share).collect()}
            pending = pending.where(F.col("event_time") <= by_partition(until))
            extent = self._extent(pending)
        if not extent:
            return []
        publisher = Publisher(self.settings)
        min_offsets = self._min_offsets({partition: row.last for partition, row in extent.items()})
        published = (
            pending.select("partition", "event_time", F.col("merge_key").alias("key"), "value")
            .repartitionById(self.partitions, "partition")
            .sortWithinPartitions("partition", "event_time", "key")
            .mapInArrow(publisher.publish_batches(min_offsets, tails), PUBLICATION)
        )
        return [Publication(*row) for row in published.collect()]

    def _pending(self, tails: Mapping[int, Tail]) -> DataFrame:
        """Step 1: finished, valid records after each partition's tail: partition, event_time (ms), merge_key, value (bytes)."""
        silver = self.lake.read(tables.SILVER).where("status = 'timed_out' AND valid")
        if len(tails) == self.partitions:
            # What is true of every row wanted, said so that Delta's statistics can skip files by it.
            earliest = min(tail.event_time for tail in tails.values())
            silver = silver.where(F.col("event_time") >= F.timestamp_millis(F.lit(earliest)))
        if tails:
            time = F.unix_millis("event_time")
            tail_time = by_partition({p: tail.event_time for p, tail in tails.items()})
            tail_key = by_partition({p: tail.key for p, tail in tails.items()})
            is_after = (time > tail_time) | ((time == tail_time) & (F.col("merge_key") > tail_key))
            silver = silver.where(tail_time.isNull() | is_after)
        value = message_value(silver.schema, self.settings.publish, list(self.settings.sources))
        return silver.select(
            "partition",
            F.unix_millis("event_time").alias("event_time"),
            "merge_key",
            value.cast("binary").alias("value"),
        )

    def _extent(self, pending: DataFrame) -> dict[int, Row]:
        """Per partition how many records are pending and the last one's event time (ms)."""
        found = pending.groupBy("partition").agg(F.count(F.lit(1)).alias("records"), F.max("event_time").alias("last"))
        return {row.partition: row for row in found.collect()}

    def _min_offsets(self, last_times: Mapping[int, int]) -> dict[int, bytes]:
        """Step 2: per partition, by source, the first offset at a position >= the event time of its last message.

        A position first reaches a time at the first record that has it. Every source has such a record, since the clock has
        passed that time in all of them.
        """
        offsets: dict[int, dict[str, int]] = {partition: {} for partition in last_times}
        reached = by_partition(last_times)
        for source in self.settings.sources:
            first = (
                self.lake.read(tables.bronze(source))
                .where(F.col("event_time") >= F.timestamp_millis(F.lit(min(last_times.values()))))
                .where(F.unix_millis("event_time") >= reached)
                .groupBy("partition")
                .agg(F.min("offset"))
            )
            for partition, offset in first.collect():
                offsets[partition][source] = offset
        return {partition: orjson.dumps(by_source) for partition, by_source in offsets.items()}

    def _note(self, publications: Sequence[Publication]) -> None:
        """Step 4."""
        if not publications:
            return
        rows = self.lake.spark.createDataFrame(publications, PUBLICATION).coalesce(1)
        times = {name: F.timestamp_millis(name) for name in ("last_event_time", "committed_at")}
        self.lake.append(rows.withColumns(times), tables.PUBLISHED)

    def _noted_tails(self) -> dict[int, Tail]:
        """What `published` knows of each partition's last message."""
        last = F.max_by(
            F.struct("last_seq", F.unix_millis("last_event_time").alias("time"), "last_key", "sink_offset"), "last_seq"
        )
        rows = self.lake.read(tables.PUBLISHED).groupBy("partition").agg(last.alias("last")).collect()
        return {row.partition: Tail(*row.last) for row in rows}
