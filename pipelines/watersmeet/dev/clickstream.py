"""The demo's input: shop sessions as two topics, in event-time order, with heartbeats."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import NamedTuple

from watersmeet.dev.send import send_records
from watersmeet.dry_run import SentRecord
from watersmeet.kafka.cluster import Cluster
from watersmeet.settings import KafkaSettings

SESSIONS = Path(__file__).with_name("otto") / "sessions.jsonl"
PARTITIONS = 2
HEARTBEAT_EVERY_MS = 3_600_000
"""Interval of each topic's heartbeats: without them, rare orders would stop the clock."""

TOPICS = ("tracking", "orders")
_TYPES = {
    "clicks": ("tracking", "click"),
    "carts": ("tracking", "cart"),
    "orders": ("orders", "order"),
}


class Event(NamedTuple):
    """A record to produce, with its event time."""

    time: int
    topic: str
    partition: int
    value: dict[str, int | str]


def events() -> list[Event]:
    """Return all records by event time; the last heartbeats leave the newest event open."""
    records = []
    for line in map(json.loads, SESSIONS.read_text().splitlines()):
        for event in line["events"]:
            topic, kind = _TYPES[event["type"]]
            value = {"type": kind, "ssid": line["session"], "aid": event["aid"], "ts": event["ts"]}
            records.append(Event(event["ts"], topic, line["session"] % PARTITIONS, value))
    first = min(event.time for event in records)
    last = max(event.time for event in records)
    for time, topic, partition in product(
        [*range(first, last, HEARTBEAT_EVERY_MS), last], TOPICS, range(PARTITIONS)
    ):
        records.append(Event(time, topic, partition, {"type": "heartbeat", "ts": time}))
    return sorted(records, key=lambda event: event.time)


def produce(kafka: KafkaSettings) -> Counter[str]:
    """Create both topics and fill them; return how many records each got."""
    cluster = Cluster(kafka)
    for topic in TOPICS:
        # The data are years old and carry their own time: retention by age would delete them.
        cluster.create_topic(topic, PARTITIONS, {"retention.ms": "-1"})
    records = [
        SentRecord(e.topic, e.partition, e.time, None, json.dumps(e.value).encode(), [])
        for e in events()
    ]
    send_records(kafka, ((record.topic, record) for record in records))
    return Counter(record.topic for record in records)
