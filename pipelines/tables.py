"""The tables: names, columns, and how each is laid out. Timestamps are UTC; event times are whole milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipelines.settings import Settings

SILVER = "silver"
LATE = "late"
QUARANTINE = "quarantine"
RESETS = "resets"
PUBLISHED = "published"
PROGRESS = "progress"

_KAFKA_HEADERS = "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"


def bronze(source: str) -> str:
    """The name of a source's bronze table."""
    return f"bronze_{source}"


@dataclass(frozen=True)
class Table:
    """A Delta table's layout: its columns as DDL, the columns that partition it, and its properties."""

    name: str
    ddl: str
    partitioned_by: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)


def layout(settings: Settings) -> dict[str, Table]:
    """Every table of a lake by name, as this configuration needs it."""
    tables = [_bronze(source) for source in settings.sources]
    tables += [_silver(settings), _late(), _quarantine(), _resets(), _published(), _progress()]
    return {table.name: table for table in tables}


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
    return Table(SILVER, ddl, ("status",), {**statistics, "delta.enableDeletionVectors": "true"})


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


def _resets() -> Table:
    """Offsets that were passed over on purpose: `[from_offset, to_offset)` of a topic-partition."""
    ddl = "source STRING, topic STRING, partition INT, from_offset BIGINT, to_offset BIGINT, decided_at TIMESTAMP, reason STRING"
    return Table(RESETS, ddl)


def _published() -> Table:
    """What each publication transaction wrote; `sink_offset` is that of its last message."""
    ddl = (
        "partition INT, first_seq BIGINT, last_seq BIGINT, last_event_time TIMESTAMP, last_key STRING, sink_offset BIGINT, "
        "committed_at TIMESTAMP"
    )
    return Table(PUBLISHED, ddl)


def _progress() -> Table:
    """A row for every topic-partition and batch: the offsets `[from_offset, until_offset)` that silver batch merged, and the
    time it was then. `head` and `clock` are null while there is none; `position` is the running maximum at `until_offset`.
    """
    ddl = (
        "batch BIGINT, source STRING, topic STRING, partition INT, from_offset BIGINT, until_offset BIGINT, head TIMESTAMP, "
        "clock TIMESTAMP, committed_at TIMESTAMP, position TIMESTAMP"
    )
    return Table(PROGRESS, ddl)


def _statistics(*columns: str) -> dict[str, str]:
    return {"delta.dataSkippingStatsColumns": ",".join(columns)}
