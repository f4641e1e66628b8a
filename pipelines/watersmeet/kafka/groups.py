"""Commits of progress to consumer groups, for Kafka's own tools; nothing reads them back.

A consumer that subscribes to nothing commits: it joins no group. (librdkafka's admin client can
commit, too, but may abort the process where the coordinator goes away meanwhile.)
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from confluent_kafka import KafkaError
from confluent_kafka import TopicPartition as KafkaPartition

from watersmeet.core.plan import TopicPartition
from watersmeet.errors import KafkaTransientError, WatersmeetError
from watersmeet.kafka.failures import failure
from watersmeet.kafka.options import ListeningConsumer
from watersmeet.monitoring.events import BronzeProgress, Event, MergeProgress
from watersmeet.settings import KafkaSettings, Settings

log = logging.getLogger("watersmeet.groups")

EVERY_S: Final = 1.0
"""Seconds between two commits of offsets, where there are new ones."""

TIMEOUT_S: Final = 6.0
_LOOK_S: Final = 0.01
"""Seconds that a look for the answer takes, which goes on to its end."""
_AGAIN_S: Final = 0.1


class Group:
    """A consumer group that is only committed to, by one thread."""

    def __init__(self, kafka: KafkaSettings, name: str) -> None:
        self._kafka = kafka
        self._resource = f"consumer group {name}"
        self._answers: list[KafkaError | None] = []
        # librdkafka has to answer a commit within some time, also where there is no coordinator.
        timeouts = {"session_timeout_ms": round(TIMEOUT_S * 1000), "heartbeat_interval_ms": 1000}
        self._consumer = ListeningConsumer(kafka, group_id=name, on_commit=self._answer, **timeouts)

    def commit(self, offsets: Mapping[tuple[str, int], int]) -> None:
        """Commit offsets by topic and partition.

        Raises KafkaTransientError where no broker takes them in time, or another WatersmeetError.
        """
        since = time.monotonic()
        while True:
            try:
                return self._commit(offsets, since)
            except KafkaTransientError:
                # A coordinator that has just moved, or is being made, refuses at once.
                if time.monotonic() - since > TIMEOUT_S:
                    raise
                time.sleep(_AGAIN_S)

    def _commit(self, offsets: Mapping[tuple[str, int], int], since: float) -> None:
        self._consumer.poll(0)  # answers to commits before this one do not count
        self._answers.clear()
        self._consumer.commit(
            offsets=[KafkaPartition(*place, offset) for place, offset in offsets.items()],
            asynchronous=True,
        )
        while not self._answers:
            message = self._consumer.poll(_LOOK_S)
            if message is not None and (error := message.error()) is not None:
                raise failure(self._kafka, error, "READ", self._resource)
            self._consumer.errors.check(since, TIMEOUT_S, "READ", self._resource)
        if (refused := self._answers.pop()) is not None:
            raise failure(self._kafka, refused, "READ", self._resource)

    def _answer(self, error: KafkaError | None, partitions: list[KafkaPartition]) -> None:
        refused = [partition.error for partition in partitions if partition.error is not None]
        self._answers.append(error or (refused[0] if refused else None))


class Groups:
    """An observer that commits the next offsets to `watersmeet-NAME-bronze` and `-silver`, and
    those that it is told of by `note` to the group of their layer.

    A group that cannot be committed to stops nothing: it is tried again, and warned of once.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._groups: dict[str, Group] = {}
        self._offsets = defaultdict[str, dict[TopicPartition, int]](dict)
        self._new: set[str] = set()
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Note how far a layer is."""
        if isinstance(event, BronzeProgress):
            self.note("bronze", event.offsets)
        elif isinstance(event, MergeProgress):
            self.note("silver", {tp: state.next_offset for tp, state in event.sources.items()})

    def follow(self, stopping: threading.Event) -> None:
        """Commit new offsets from time to time, and once more at the end."""
        while not stopping.wait(EVERY_S):
            self.commit()
        self.commit()

    def commit(self) -> None:
        """Commit the offsets of each layer that is further than the last time."""
        with self._lock:
            new = {layer: dict(self._offsets[layer]) for layer in self._new}
            self._new.clear()
        # In threads, since a first commit waits for the group's coordinator.
        with ThreadPoolExecutor(max(1, len(new))) as pool:
            list(pool.map(self._commit, new.keys(), new.values()))

    def name(self, layer: str) -> str:
        """Return the name of a layer's group."""
        return f"watersmeet-{self._settings.name}-{layer}"

    def note(self, layer: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Note the next offsets of a layer."""
        with self._lock:
            noted = self._offsets[layer]
            if offsets.items() - noted.items():
                noted.update(offsets)
                self._new.add(layer)

    def _commit(self, layer: str, offsets: Mapping[TopicPartition, int]) -> None:
        try:
            if layer not in self._groups:
                self._groups[layer] = Group(self._settings.kafka, self.name(layer))
            least: dict[tuple[str, int], int] = {}
            # Of two sources of one topic, the one that is behind counts.
            for tp, offset in offsets.items():
                place = tp.input.topic, tp.partition
                least[place] = min(offset, least.get(place, offset))
            self._groups[layer].commit(least)
        except KafkaTransientError:  # which the run itself reports
            with self._lock:
                self._new.add(layer)
        except WatersmeetError as error:
            if layer not in self._warned:
                self._warned.add(layer)
                unseen = "the run goes on, and Kafka's own tools do not show the lag of"
                log.warning("%s; %s %s", error, unseen, layer)
