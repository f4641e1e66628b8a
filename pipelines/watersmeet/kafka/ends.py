"""The ends of topics, which say whether Kafka has more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from watersmeet.kafka.cluster import Cluster
from watersmeet.settings import KafkaSettings


@dataclass(frozen=True)
class Topics:
    """Some topics of one cluster, each with so many partitions."""

    kafka: KafkaSettings
    names: Sequence[str]
    partitions: int


def ends_of(cluster: Cluster, topics: Topics) -> dict[str, dict[int, int]]:
    """Return, by topic and partition, the exclusive end offset of what is committed.

    `cluster` is the one of the topics. Raises what its questions raise.
    """
    return {topic: cluster.ends(topic, topics.partitions) for topic in topics.names}
