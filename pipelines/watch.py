"""Keeps an eye on Kafka while a run works: a broker that is away is said, and waited for, up to a limit; a topic that is not
what it was when the run began stops it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelines.adapters.kafka import Cluster
from pipelines.errors import KafkaUnreachableError, TopicChangedError, WatersmeetError, is_trouble_with_kafka, root_cause
from pipelines.observability import Reporter
from pipelines.settings import Settings

LOOK_EVERY_S = 5.0
RETRY_S = 1.0


@dataclass
class Patience:
    """How trouble with Kafka is borne: the work is done again until it succeeds, `limit_s` have passed or the run stops."""

    reporter: Reporter
    stopping: threading.Event
    limit_s: float = 120.0

    def bear(self, work: Callable[[], None]) -> None:
        """Does the work. Raises what it raised last once the limit is passed, and at once what is no trouble with Kafka."""
        since = None
        while True:
            try:
                work()
            except Exception as error:
                if not is_trouble_with_kafka(error):
                    raise
                now = time.monotonic()
                since = since or now
                if now - since > self.limit_s:
                    raise WatersmeetError(f"{root_cause(error)} (tried again for {self.limit_s:.0f} s)") from None
                self.reporter.tell("kafka", f"{root_cause(error)}; trying again for at most {self.limit_s:.0f} s")
                if self.stopping.wait(RETRY_S):
                    return
            else:
                if since is not None:
                    self.reporter.tell("kafka", "answers again")
                return


class Watch:
    """Looks at the sources every few seconds."""

    def __init__(self, settings: Settings, partitions: int, patience: Patience) -> None:
        self._patience, self._partitions = patience, partitions
        self._topics = [source.topic for source in settings.sources.values()]
        self._cluster = Cluster(settings.kafka)
        self._ids = self._cluster.topic_ids(self._topics)
        self._looked = self._answered = time.monotonic()

    def look(self) -> None:
        """Raises TopicChangedError where a source's partitions or identity changed; KafkaUnreachableError where no broker has
        answered for longer than the patience lasts.
        """
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        try:
            counts, ids = self._cluster.partition_counts(), self._cluster.topic_ids(self._topics)
        except KafkaUnreachableError as error:
            silent_s = time.monotonic() - self._answered
            if silent_s > self._patience.limit_s:
                raise
            limit_s = self._patience.limit_s
            self._patience.reporter.tell("kafka", f"{error}; waiting for {silent_s:.0f} s, at most {limit_s:.0f} s")
        else:
            self._answered = time.monotonic()
            _check(self._topics, self._partitions, counts, self._ids, ids)
        self._looked = time.monotonic()


def _check(topics: Sequence[str], partitions: int, counts: dict[str, int], before: dict[str, str], now: dict[str, str]) -> None:
    for topic in topics:
        if topic not in counts or now.get(topic) != before[topic]:
            raise TopicChangedError(f"{topic} was deleted{' and made again' if topic in counts else ''} while it was being read")
        if counts[topic] != partitions:
            raise TopicChangedError(
                f"{topic} has {counts[topic]} partitions now, and {partitions} are read: keys move to other partitions with such "
                "a change, so that nothing would meet; begin a new lake once all sources have the same number"
            )
