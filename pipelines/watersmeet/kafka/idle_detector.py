"""A watch for silent sources: the idle policy may decide for those, and for no others."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from watersmeet.core.plan import TopicPartition
from watersmeet.errors import KafkaTransientError
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import Range, read_range
from watersmeet.settings import Settings


@dataclass
class IdleDetector:
    """One is silent once bronze has got nothing of it for `idle_after_ms`, as this run saw."""

    settings: Settings
    idle_after_ms: int
    now_s: Callable[[], float] = time.monotonic
    _since: dict[TopicPartition, tuple[int, float]] = field(default_factory=dict)
    _observed: float = 0.0

    def observe(self, ends: Mapping[TopicPartition, int]) -> set[TopicPartition]:
        """Note where bronze ends (the next offset); return the topic-partitions that are silent."""
        now = self._observed = self.now_s()
        for tp, end in ends.items():
            if tp not in self._since or self._since[tp][0] != end:
                self._since[tp] = end, now
        return {tp for tp in ends if (now - self._since[tp][1]) * 1000 >= self.idle_after_ms}

    @property
    def is_due(self) -> bool:
        """True where something became silent since the last look, or was for as long again."""
        now = self.now_s()
        silent_for = self.idle_after_ms / 1000
        became_silent = [
            since + silent_for for _, since in self._since.values() if since + silent_for <= now
        ]
        return bool(became_silent) and (
            max(became_silent) > self._observed or now - self._observed >= silent_for
        )

    def has_nothing_beyond(self, after: Mapping[TopicPartition, int]) -> bool:
        """Return True where Kafka says that it has no record after these, and no open transaction.

        Else bronze is behind, or nobody can read the records yet.
        """
        kafka = self.settings.kafka
        cluster = Cluster(kafka)
        try:
            for tp, offset in after.items():
                topic = tp.input.topic
                bounds, unsettled = cluster.bounds_and_unsettled(topic, [tp.partition])
                first, end = bounds[tp.partition]
                rest = Range(topic, tp.partition, max(first, offset + 1), end)
                if unsettled or any(read_range(kafka, rest, max_records=1)):
                    return False
        except KafkaTransientError:
            return False
        return True
