"""The topics that a source's records come from, as Kafka has them."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from watersmeet.core.repartition import InputPartition
from watersmeet.errors import ConfigurationError, TopicChangedError
from watersmeet.kafka.cluster import Cluster
from watersmeet.settings import Settings

CHECK_EVERY_S: Final = 5.0
"""Interval at which the topics are checked for a new identity or new partitions."""


@dataclass
class OriginTopics:
    """The topics that the records of one source come from, at the last `poll`."""

    settings: Settings
    source: str
    bounds: Mapping[InputPartition, tuple[int, int]] = field(default_factory=dict)
    """The first offset that Kafka has and the exclusive end offset, by input."""
    identities: Mapping[str, str] = field(default_factory=dict)
    """Each topic's name together with Kafka's own identity of it, by the name."""
    _counts: Mapping[str, int] = field(default_factory=dict)
    _checked_at_s: float | None = None

    def __post_init__(self) -> None:
        self.names = self.settings.repartitioned[self.source].from_topics
        self._cluster = Cluster(self.settings.kafka)
        self._missing: Collection[str] = self.names
        """The topics that the last answer did not have; all before the first one."""

    @property
    def ends(self) -> dict[InputPartition, int]:
        """The exclusive end offset by input."""
        return {tp: end for tp, (_, end) in self.bounds.items()}

    def poll(self) -> bool:
        """Ask Kafka for the bounds, and now and then for the topics themselves.

        Return True where the topics were asked for, too. Raises ConfigurationError if one does not
        exist, or has existed and is missing twice in a row, TopicChangedError if one was replaced.
        """
        now = time.monotonic()
        is_due = self._checked_at_s is None or now - self._checked_at_s > CHECK_EVERY_S
        if is_due:
            self._check()
            self._checked_at_s = now
        self.bounds = {
            InputPartition(topic, p): bounds
            for topic in self.names
            for p, bounds in self._cluster.bounds(topic, self._counts[topic]).items()
        }
        return is_due

    def _check(self) -> None:
        existing = self._cluster.existing(self.names)
        missing = [name for name in self.names if name not in existing]
        if nowhere := [name for name in missing if name in self._missing]:
            raise ConfigurationError(
                f"there is no topic {nowhere[0]} at {self.settings.kafka.bootstrap_servers}",
                where=f"sources.{self.source}.repartition.from",
                fix="create it, or name the one that has the records",
            )
        self._missing = missing
        if missing:  # a broker that has just come back may not know of it yet
            return
        self._counts = {name: topic.partitions for name, topic in existing.items()}
        identities = {name: topic.identified for name, topic in existing.items()}
        for topic, before in self.identities.items():
            if identities[topic] != before:
                raise TopicChangedError(
                    f"{topic} was deleted and made again while it was being repartitioned"
                )
        self.identities = identities

    def backlog(self, offsets: Mapping[InputPartition, int]) -> dict[str, dict[int, int]]:
        """Return how many offsets lie between these and the ends, by topic and partition."""
        backlog: dict[str, dict[int, int]] = {topic: {} for topic in self.names}
        for tp, (first, end) in self.bounds.items():
            backlog[tp.topic][tp.partition] = max(0, end - max(first, offsets[tp]))
        return backlog
