"""Kafka answers the end of a transaction before every partition shows it."""

from __future__ import annotations

import time

from watersmeet.kafka.cluster import Cluster
from watersmeet.settings import KafkaSettings


def await_end(settings: KafkaSettings, topic: str, end: int, partition: int = 0) -> None:
    """Returns once the partition's committed records end at that offset."""
    cluster, deadline = Cluster(settings), time.monotonic() + 30
    while (found := cluster.bounds_of(topic, [partition])[partition][1]) != end:
        assert time.monotonic() < deadline, f"{topic}[{partition}] ends at {found}, not at {end}"
        time.sleep(0.02)
