"""The demo's input: shop sessions as two topics, in event-time order, with the heartbeats that a live system would send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pipelines.kafka.cluster import Cluster
from pipelines.kafka.options import ListeningProducer
from pipelines.settings import KafkaSettings

SESSIONS = Path(__file__).with_name("otto") / "sessions.jsonl"
PARTITIONS = 2
HEARTBEAT_EVERY_MS = 3_600_000
"""Each topic says hourly how late it is: orders are rare, and without a word of theirs the clock would stand still."""

_TYPES = {"clicks": ("tracking", "click"), "carts": ("tracking", "cart"), "orders": ("orders", "order")}


class Event(NamedTuple):
    """A record to produce; a heartbeat goes to every partition and has no session."""

    time: int
    topic: str
    value: dict[str, int | str]
    session: int | None = None


def events() -> list[Event]:
    """Everything in order of event time; the last heartbeats carry the time of the newest event, so that it stays open."""
    found = [
        Event(
            event["ts"], topic, {"type": kind, "ssid": line["session"], "aid": event["aid"], "ts": event["ts"]}, line["session"]
        )
        for line in map(json.loads, SESSIONS.read_text().splitlines())
        for event in line["events"]
        for topic, kind in [_TYPES[event["type"]]]
    ]
    times = [event.time for event in found]
    return sorted([*found, *_heartbeats(min(times), max(times))], key=lambda event: (event.time, event.session is None))


def _heartbeats(first: int, last: int) -> Iterator[Event]:
    for time in [*range(first, last, HEARTBEAT_EVERY_MS), last]:
        for topic in ("tracking", "orders"):
            yield Event(time, topic, {"type": "heartbeat", "ts": time})


def produce(kafka: KafkaSettings) -> dict[str, int]:
    """Creates both topics and fills them; returns how many records each got."""
    cluster = Cluster(kafka)
    for topic in ("tracking", "orders"):
        # The data are years old and carry their own time: retention by age would delete them.
        cluster.create_topic(topic, PARTITIONS, {"retention.ms": "-1"})
    producer = ListeningProducer(kafka)
    counts = {"tracking": 0, "orders": 0}
    for event in events():
        partitions = range(PARTITIONS) if event.session is None else [event.session % PARTITIONS]
        for partition in partitions:
            producer.produce(event.topic, json.dumps(event.value), partition=partition, timestamp=event.time)
            counts[event.topic] += 1
        producer.poll(0)
    producer.flush()
    return counts
