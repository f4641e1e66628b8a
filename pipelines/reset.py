"""A deliberate jump: reading goes on elsewhere, with fresh state. It says first what it would do.

The jump is a batch of silver that merges nothing, so it is decided, completed after a crash, and kept out of a second owner's
hands just as any other (`pipelines.silver`): open records are closed unpublished, and `resets` has a row for every
topic-partition. Where it goes back, records that bronze lacks are read first; what it has is merged again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipelines import tables
from pipelines.adapters.kafka import Cluster, spark_options
from pipelines.adapters.lake import Lake
from pipelines.beginning import Beginning
from pipelines.bronze import Bronze
from pipelines.core.plan import BatchPlan, OffsetRange, TopicPartition
from pipelines.gold import Gold
from pipelines.settings import Settings
from pipelines.silver import Silver
from pipelines.transforms.decode import decode


class Jump(NamedTuple):
    """One topic-partition: the offset that would be read next, the one that will be, and the end of what Kafka has."""

    source: str
    partition: int
    from_offset: int
    to_offset: int
    end: int

    @property
    def skipped(self) -> int:
        """Offsets that will never be merged."""
        return max(0, self.to_offset - self.from_offset)

    @property
    def read_again(self) -> int:
        """Offsets that will be merged a second time."""
        return max(0, self.from_offset - self.to_offset)


@dataclass
class Reset:
    """A jump of every topic-partition of a lake that this process owns, to `earliest`, `latest` or a Kafka timestamp (ms)."""

    lake: Lake
    settings: Settings
    partitions: int
    to: str | int

    def __post_init__(self) -> None:
        """Completes what a crash has left, so that the jump is from where everything stands."""
        Gold(self.lake, self.settings, self.partitions).recover()
        self._silver = Silver(self.lake, self.settings, self.partitions)
        cursors, cluster = self._silver.cursors, Cluster(self.settings.kafka)
        self.jumps = []
        for source, kept in self.settings.sources.items():
            bounds = cluster.bounds(kept.topic, self.partitions)
            if isinstance(self.to, int):
                targets = cluster.offsets_at(kept.topic, self.partitions, self.to)
            else:
                targets = {p: end if self.to == "latest" else first for p, (first, end) in bounds.items()}
            for p, target in targets.items():
                self.jumps.append(Jump(source, p, cursors[TopicPartition(source, p)].next_offset, target, bounds[p][1]))

    def preview(self) -> dict[str, Any]:
        """What the jump does: by topic-partition, and how many open records it closes."""
        open_rows = self.lake.read(tables.SILVER).where("status = 'open'").count()
        jumps = [{**jump._asdict(), "skipped": jump.skipped, "read_again": jump.read_again} for jump in self.jumps]
        return {"to": str(self.to), "open_records_closed": open_rows, "jumps": jumps}

    def commit(self) -> None:
        """Makes the jump."""
        for source in self.settings.sources:
            self._fetch_missing(source)
        ranges = {
            TopicPartition(jump.source, jump.partition): OffsetRange(jump.from_offset, jump.to_offset, None, None, None)
            for jump in self.jumps
        }
        reason = f"reset --to {self.to}"
        self._silver.commit(BatchPlan(self._silver.next_batch, ranges, {}, has_late=False, reset=reason))

    def _fetch_missing(self, source: str) -> None:
        """Bronze has every record between where the jump goes back to and where it was, each once."""
        topic = self.settings.sources[source].topic
        ahead = Beginning(self.lake, self.settings, self.partitions).next_offsets(source)
        back = {j.partition: (j.to_offset, ahead[j.partition]) for j in self.jumps if j.source == source and j.read_again}
        back = {p: (since, until) for p, (since, until) in back.items() if since < until}
        if not back:
            return
        kafka = (
            self.lake.spark.read.format("kafka")
            .options(**spark_options(self.settings.kafka))
            .option("assign", json.dumps({topic: sorted(back)}))
            .option("startingOffsets", json.dumps({topic: {str(p): since for p, (since, _) in back.items()}}))
            .option("endingOffsets", json.dumps({topic: {str(p): until for p, (_, until) in back.items()}}))
            .option("includeHeaders", "true")
        )
        known = self.lake.read(tables.bronze(source)).select("partition", "offset")
        missing = (
            kafka.load()
            .transform(decode(self.settings.sources[source].reading_rules(self.settings.merge.max_future_ms)))
            .join(known, ["partition", "offset"], "left_anti")
            .select(*self.lake.schema(tables.bronze(source)).names)
            .sortWithinPartitions("partition", "offset")
        )
        if not missing.isEmpty():
            self.lake.append(missing, tables.bronze(source))
        Bronze(self.lake, self.settings, source, self.partitions).quarantine_all()
