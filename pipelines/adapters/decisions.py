"""The table `idle_heartbeats`: what the idle policy has decided, in the order in which it holds."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.lake import APPLICATION, Lake
from pipelines.core.idle import Decision
from pipelines.core.plan import TopicPartition
from pipelines.settings import Settings

Decided = tuple[TopicPartition, Decision]


def read_decisions(lake: Lake) -> list[Decided]:
    """Every decision, by topic-partition in its order."""
    rows = lake.rows(
        "SELECT source, `partition`, after_offset, event_time FROM {idle_heartbeats} ORDER BY after_offset, event_time"
    )
    return [(TopicPartition(source, partition), Decision(after, time)) for source, partition, after, time in rows]


def write_decisions(lake: Lake, settings: Settings, decided: Sequence[Decided], application: str = APPLICATION) -> None:
    """Durable afterwards, in one commit."""
    now, sources = datetime.now(timezone.utc), settings.sources
    rows = [(tp.source, sources[tp.source].topic, tp.partition, d.after_offset, d.event_time, now) for tp, d in decided]
    ddl = "source STRING, topic STRING, partition INT, after_offset BIGINT, event_time BIGINT, decided_at TIMESTAMP"
    frame = lake.spark.createDataFrame(rows, ddl).withColumn("event_time", F.timestamp_millis("event_time"))
    lake.append(frame.coalesce(1), tables.IDLE_HEARTBEATS, application=application)
