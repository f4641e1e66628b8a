"""A watch over the sources' topics while a run works: a change of one stops the run."""

from __future__ import annotations

import time
from collections.abc import Callable

from watersmeet.errors import KafkaTransientError, TopicChangedError
from watersmeet.kafka.cluster import Cluster
from watersmeet.settings import Settings

LOOK_EVERY_S = 5.0


class TopicMonitor:
    """A look at the sources every few seconds; `notify` is told of a broker that is waited for."""

    def __init__(
        self,
        settings: Settings,
        partitions: int,
        notify: Callable[[KafkaTransientError, str], None],
        limit_s: float,
    ) -> None:
        self._notify = notify
        self._limit_s = limit_s
        self._partitions = partitions
        self._cluster = Cluster(settings.kafka)
        self._ids = self._cluster.topic_ids(settings.topics)
        self._missing: set[str] = set()
        """The topics that the last answer did not have."""
        self._looked = self._answered = time.monotonic()

    def poll(self) -> None:
        """Look whether the sources' topics are the same; a topic has to be missing twice in a row.

        Raises TopicChangedError, or KafkaTransientError after `limit_s` without an answer.
        """
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        try:
            self._check()
            self._answered = time.monotonic()
        except KafkaTransientError as error:
            silent_s = time.monotonic() - self._answered
            if silent_s > self._limit_s:
                raise
            waits = f"waiting for {silent_s:.0f} s, at most {self._limit_s:.0f} s"
            self._notify(error, f"{error}; {waits}")
        self._looked = time.monotonic()

    def _check(self) -> None:
        existing = self._cluster.existing(self._ids)
        missing = self._ids.keys() - existing.keys()
        # A broker that has just come back may not know of a topic yet.
        deleted = missing & self._missing
        self._missing = missing
        for name, topic_id in self._ids.items():
            topic = existing.get(name)
            is_other = topic is not None and topic.topic_id != topic_id
            if name in deleted or is_other:
                suffix = " and made again" if is_other else ""
                raise TopicChangedError(f"{name} was deleted{suffix} while it was being read")
            if topic is not None and topic.partitions != self._partitions:
                raise TopicChangedError(
                    f"{name} has {topic.partitions} partitions now, and {self._partitions} are "
                    "read: its keys are in other partitions than those of the other sources",
                    fix="begin a new lake once all sources have the same number",
                )
