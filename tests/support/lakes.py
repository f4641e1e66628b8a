"""Lakes for tests: configurations, bronze filled without Kafka (through the real decoding), silver read back as tuples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pipelines import tables
from pipelines.adapters.lake import Lake
from pipelines.bronze import Bronze
from pipelines.settings import Settings, load_settings
from pipelines.silver import Silver
from pipelines.transforms.decode import decode
from tests.support.cases import SOURCES, Case

KAFKA_ROW = (
    "topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, timestampType INT, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
KAFKA_TIME = datetime(2026, 1, 1, tzinfo=timezone.utc)


def settings_for(folder: Path, *, bootstrap: str = "127.0.0.1:1", sources: Sequence[str] = SOURCES, **overrides: Any) -> Settings:
    """A configuration whose records look like those of `cases`: key `k`, event time `ts`; overrides by dotted name."""
    values: dict[str, Any] = {
        "name": "test",
        "lake": str(folder / "lake"),
        "kafka": {"bootstrap_servers": bootstrap},
        "sources": {
            name: {"topic": name, "key": "k", "event_time": "ts", "heartbeat": {"field": "type", "equals": "heartbeat"}}
            for name in sources
        },
        "merge": {"timeout": "100ms"},
        "publish": {"topic": "merged"},
    }
    for path, value in overrides.items():
        *outer, last = path.split("__")
        target = values
        for name in outer:
            target = target[name]
        target[last] = value
    return Settings.model_validate(values, context={"folder": folder})


def write_configuration(settings: Settings, folder: Path) -> Path:
    """What `settings_for` made, as a file (with the topic, the predicate and the sink that it was given)."""
    heartbeat = {"field": "type", "equals": "heartbeat"}
    values = {
        "name": settings.name,
        "lake": str(settings.lake),
        "kafka": {"bootstrap_servers": settings.kafka.bootstrap_servers},
        "sources": {
            name: {"topic": source.topic, "key": "k", "event_time": "ts", "heartbeat": heartbeat}
            for name, source in settings.sources.items()
        },
        "merge": {"timeout": f"{settings.merge.timeout_ms}ms", "max_records_per_batch": settings.merge.max_records_per_batch},
        "publish": {"topic": settings.publish.topic, "valid": settings.publish.valid},
    }
    file = folder / "watersmeet.yml"
    file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    assert load_settings(file, {}).digest == settings.digest
    return file


def fill_bronze(lake: Lake, settings: Settings, source: str, values: Mapping[tuple[int, int], bytes | None]) -> None:
    """Appends records, given by (partition, offset), to the source's bronze as if Kafka had just delivered them."""
    if not values:
        return
    topic = settings.sources[source].topic
    rows: list[tuple[object, ...]] = [
        (topic, p, offset, KAFKA_TIME, 0, None, value, []) for (p, offset), value in sorted(values.items())
    ]
    decoded = lake.spark.createDataFrame(rows, KAFKA_ROW).transform(
        decode(settings.sources[source].reading_rules(settings.merge.max_future_ms))
    )
    lake.append(decoded, tables.bronze(source))


class CaseLake:
    """Many cases in one lake, a partition each; `arrive` hands records over in the cases' order of arrival."""

    def __init__(self, spark: SparkSession, settings: Settings, cases: Mapping[int, Case]) -> None:
        self.lake, self.settings, self.cases = Lake(spark, settings), settings, cases
        self.lake.create_missing()
        self._arrived = dict.fromkeys(cases, 0)

    def arrive(self, share: float = 1.0) -> None:
        """The next records of every case: up to this share of all of them."""
        new: dict[str, dict[tuple[int, int], bytes | None]] = {source: {} for source in self.settings.sources}
        for partition, case in self.cases.items():
            until = max(self._arrived[partition], round(share * len(case.arrivals)))
            for i in range(self._arrived[partition], until):
                source = case.arrivals[i]
                offset = case.arrivals[:i].count(source)
                new[source][partition, offset] = case.values[source][offset]
            self._arrived[partition] = until
        for source, values in new.items():
            fill_bronze(self.lake, self.settings, source, values)
            Bronze(self.lake, self.settings, source, self.partitions)._quarantine_missing()

    @property
    def partitions(self) -> int:
        return max(self.cases) + 1

    def merge(self) -> int:
        """One start of silver that drains what there is; returns the number of batches."""
        return len(list(Silver(self.lake, self.settings, self.partitions).drain()))

    def silver(self) -> list[tuple[object, ...]]:
        """Silver's content, in the form of `expected_silver`."""
        return silver_of(self.lake, list(self.settings.sources))


def silver_of(lake: Lake, sources: Sequence[str] = SOURCES) -> list[tuple[object, ...]]:
    """Silver's content, in the form of `expected_silver`."""
    parts = [
        F.transform(s, lambda p: F.struct(p["offset"], F.unix_millis(p["event_time"]), p["value"])).alias(s) for s in sources
    ]
    times = [F.unix_millis(t) for t in ("event_time", "last_event_time")]
    rows = lake.read(tables.SILVER).select("partition", "merge_key", "status", *times, *parts).collect()
    plain = [(*row[:5], *[tuple(tuple(part) for part in parts) for parts in row[5:]]) for row in rows]
    return sorted(plain, key=repr)


def late_of(lake: Lake) -> list[tuple[object, ...]]:
    """Late records, in the form of `expected_late`."""
    times = [F.unix_millis(name) for name in ("event_time", "position")]
    late = lake.read(tables.LATE).select("partition", "source", "offset", "merge_key", *times, "value")
    return sorted(tuple(row) for row in late.collect())


def quarantined_of(lake: Lake) -> list[tuple[object, ...]]:
    """Refused records, in the form of `expected_quarantine`."""
    rows = lake.read(tables.QUARANTINE).select("partition", "source", "offset", "value").collect()
    return sorted(((*row[:3], None if row.value is None else bytes(row.value)) for row in rows), key=repr)
