"""The tables: names, columns, and how each is laid out. Timestamps are UTC; event times are whole milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pipelines.core.plan import TopicPartition
from pipelines.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pipelines.adapters.lake import Lake

SILVER = "silver"
LATE = "late"
QUARANTINE = "quarantine"
IDLE_HEARTBEATS = "idle_heartbeats"
RESETS = "resets"
PUBLISHED = "published"
RECOVERED = "recovered"
PROGRESS = "progress"
CONFIGURATION = "configuration"
LEASES = "leases"

VERSIONS = "versions"

CHANGE_DATA_FEED = "delta.enableChangeDataFeed"

_SPARKS_OWN = {"delta.enableDeletionVectors": "true", "delta.enableInCommitTimestamps": "true"}
"""What a table has that is merged, rewritten and travelled in; nothing but Spark can write it."""

_KAFKA_HEADERS = "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"


def bronze(source: str) -> str:
    """The name of a source's bronze table."""
    return f"bronze_{source}"


@dataclass(frozen=True)
class Table:
    """A Delta table's layout: its columns as DDL, the columns that partition it, and its properties; and the one partition
    (column and value) that a batch takes rows from, where there is one.
    """

    name: str
    ddl: str
    partitioned_by: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    changing: tuple[str, str] | None = None

    @property
    def needs_spark(self) -> bool:
        """Whether nothing but Spark can write it."""
        return not _SPARKS_OWN.keys().isdisjoint(self.properties)


def inputs_of(settings: Settings) -> frozenset[str]:
    """The tables that the merge reads and never writes: what Kafka said, and what the idle policy has decided."""
    return frozenset([*map(bronze, settings.sources), IDLE_HEARTBEATS])


def layout(settings: Settings) -> dict[str, Table]:
    """Every table of a lake by name, as this configuration needs it."""
    tables = [_bronze(source) for source in settings.sources]
    tables += [_silver(settings), _late(), _quarantine(), _idle_heartbeats(), _resets(), _published(), _recovered()]
    tables += [_progress(), _versions(), _configuration(), _leases()]
    retention = retention_properties(settings)
    return {table.name: replace(table, properties={**retention, **table.properties}) for table in tables}


def live(lake: Lake, settings: Settings) -> DataFrame:
    """Merge records, open and timed out, and what waits in bronze for the clock (status `waiting`); nothing is written.

    Columns: silver's, and `waits_for` (array of source names, null for what has been merged): whose records it takes.
    """
    from pipelines.live import Passed, live_sql

    rows = lake.rows(
        "SELECT source, `partition`, until_offset, position FROM {progress} WHERE batch = (SELECT MAX(batch) FROM {progress})"
    )
    passed = {TopicPartition(source, p): Passed(until, position) for source, p, until, position in rows}
    return lake.spark.sql(live_sql(settings, lake.identifier, passed))


def retention_properties(settings: Settings) -> dict[str, str]:
    """How long a table keeps removed files and its log: what time travel reaches back to, and no further."""
    interval = f"interval {settings.retention_ms} milliseconds"
    return {"delta.deletedFileRetentionDuration": interval, "delta.logRetentionDuration": interval}


def _bronze(source: str) -> Table:
    """What Kafka said, every record once; `reason` and `detail` where it is refused (the row is then in `quarantine` too)."""
    ddl = (
        "topic STRING, partition INT, offset BIGINT, kafka_timestamp TIMESTAMP, timestamp_type INT, key BINARY, value BINARY, "
        f"{_KAFKA_HEADERS}, merge_key STRING, event_time TIMESTAMP, heartbeat BOOLEAN, reason STRING, detail STRING"
    )
    # Statistics on these skip files exactly: a file holds one contiguous stretch of one topic-partition.
    return Table(bronze(source), ddl, properties=_statistics("partition", "offset", "event_time", "kafka_timestamp", "reason"))


def _silver(settings: Settings) -> Table:
    """The merge. Partitioned by status, so that no batch ever opens a file of finished records again."""
    parts = ", ".join(
        f"`{name}` ARRAY<STRUCT<offset: BIGINT, event_time: TIMESTAMP, value: {source.value_type}>>"
        for name, source in settings.sources.items()
    )
    ddl = (
        "partition INT, merge_key STRING, status STRING, event_time TIMESTAMP, last_event_time TIMESTAMP, "
        f"{parts}, valid BOOLEAN, invalid_reason STRING, batch BIGINT"
    )
    statistics = _statistics("partition", "merge_key", "event_time", "last_event_time", "batch")
    # A checkpoint of the log costs a small batch as much again; between two, reading the log costs next to nothing.
    rarely = {"delta.checkpointInterval": "50"}
    changes = {CHANGE_DATA_FEED: "true" if settings.silver.change_data_feed else "false"}
    properties = {**statistics, **rarely, **_SPARKS_OWN, **changes}
    return Table(SILVER, ddl, partitioned_by=("status",), properties=properties, changing=("status", "open"))


def _late() -> Table:
    """Records that came after their time: never merged, kept."""
    ddl = (
        "source STRING, topic STRING, partition INT, offset BIGINT, merge_key STRING, event_time TIMESTAMP, "
        "position TIMESTAMP, value BINARY, batch BIGINT"
    )
    return Table(LATE, ddl)


def _quarantine() -> Table:
    """Records that could not be read, with the reason why."""
    ddl = (
        "source STRING, topic STRING, partition INT, offset BIGINT, kafka_timestamp TIMESTAMP, key BINARY, value BINARY, "
        f"{_KAFKA_HEADERS}, reason STRING, detail STRING"
    )
    return Table(QUARANTINE, ddl, properties=_statistics("source", "topic", "partition", "offset"))


def _idle_heartbeats() -> Table:
    """What the idle policy decided: a heartbeat of a silent topic-partition, placed after `after_offset` (-1: before any
    record) and before whatever comes next. Input of the merge like bronze: a rebuild takes the same decisions.
    """
    ddl = "source STRING, topic STRING, partition INT, after_offset BIGINT, event_time TIMESTAMP, decided_at TIMESTAMP"
    return Table(IDLE_HEARTBEATS, ddl)


def _resets() -> Table:
    """Offsets of a topic-partition that were passed over on purpose, `[from_offset, to_offset)`, and why: a deliberate start
    or jump, or a gap in Kafka that was accepted. Where `to_offset` is the smaller one, the stretch is merged once more.
    """
    ddl = "source STRING, topic STRING, partition INT, from_offset BIGINT, to_offset BIGINT, decided_at TIMESTAMP, reason STRING"
    return Table(RESETS, ddl)


def _published() -> Table:
    """What each publication transaction wrote; `sink_offset` is that of its last message (null under at_most_once, which
    notes before it sends). `sink` is the topic with Kafka's identity of it, which a topic made again does not share.
    """
    ddl = (
        "partition INT, first_seq BIGINT, last_seq BIGINT, last_event_time TIMESTAMP, last_key STRING, sink_offset BIGINT, "
        "committed_at TIMESTAMP, sink STRING"
    )
    return Table(PUBLISHED, ddl)


def _recovered() -> Table:
    """What a start without a lake took from the sink: the messages read back (`merge_key`, `event_time`), and for each source
    the offset at which reading began (`source`, `offset`). A row is one or the other; the rest of it is null.
    """
    ddl = "partition INT, merge_key STRING, event_time TIMESTAMP, source STRING, offset BIGINT, recovered_at TIMESTAMP"
    return Table(RECOVERED, ddl)


def _progress() -> Table:
    """A row for every topic-partition and batch: the offsets `[from_offset, until_offset)` that silver batch merged, and the
    time it was then. `head` and `clock` are null while there is none; `position` is the running maximum at `until_offset`.
    `reason` is null, but for a batch that is a reset: it merges nothing, and what comes next begins at `until_offset`.
    """
    ddl = (
        "batch BIGINT, source STRING, topic STRING, partition INT, from_offset BIGINT, until_offset BIGINT, head TIMESTAMP, "
        "clock TIMESTAMP, committed_at TIMESTAMP, position TIMESTAMP, reason STRING"
    )
    return Table(PROGRESS, ddl)


def _versions() -> Table:
    """Which version of silver each batch made and when (`committed_at`: silver's in-commit timestamp), under which
    `configuration` (a digest) and with which `code_version`; a row that a crash prevented is written by the next start.
    """
    ddl = "batch BIGINT, version BIGINT, committed_at TIMESTAMP, configuration STRING, code_version STRING"
    return Table(VERSIONS, ddl)


def _configuration() -> Table:
    """What the lake was begun with, of all that its content depends on; the first row of a field is the one that holds."""
    return Table(CONFIGURATION, "field STRING, value STRING, decided_at TIMESTAMP")


def _leases() -> Table:
    """Who writes which layer: an owner holds it from `taken` (whose `entry` is its token) to `released` or `given up`, or
    to a larger token.
    """
    ddl = "entry BIGINT, layer STRING, token BIGINT, event STRING, holder STRING, host STRING, pid INT, jvm_pid INT, at TIMESTAMP"
    return Table(LEASES, ddl)


def _statistics(*columns: str) -> dict[str, str]:
    return {"delta.dataSkippingStatsColumns": ",".join(columns)}
