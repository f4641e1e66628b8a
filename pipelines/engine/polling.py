"""Following by polling, in a thread, for engines that have no streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from pipelines.engine import KafkaInput
from pipelines.engine.threads import RunningThread
from pipelines.kafka.cluster import Cluster
from pipelines.lake import tables


def followed_source(
    source: KafkaInput,
    process_batch: Callable[[Mapping[int, int]], bool],
    *,
    once: bool,
    every_s: float,
) -> RunningThread:
    """Follow a source in a thread: up to where Kafka ends now (`once`), or without end, asking
    again after `every_s`.

    `process_batch` processes the next batch up to these exclusive end offsets, by partition, and
    returns whether there was one.
    """
    cluster = Cluster(source.kafka)

    def follow(stopping: threading.Event) -> None:
        """Take batch after batch until `stopping` is set; with `once`, only up to the ends at the
        start.
        """
        last = _ends(cluster, source)
        while not stopping.is_set():
            if process_batch(last):
                continue
            if once:
                return
            stopping.wait(every_s)
            last = _ends(cluster, source)

    return RunningThread(tables.bronze(source.source), follow)


def has_news(source: KafkaInput) -> bool:
    """Return True where Kafka has offsets of a source beyond where reading begins.

    Raises KafkaTransientError and the like.
    """
    return any(end > source.offsets[p] for p, end in _ends(Cluster(source.kafka), source).items())


def _ends(cluster: Cluster, source: KafkaInput) -> dict[int, int]:
    """Return the exclusive end offset that Kafka has now, by partition of the source."""
    return {p: end for p, (_, end) in cluster.bounds_of(source.topic, source.offsets).items()}


def followed_versions(
    name: str, versions: Callable[[], list[int]], work: Callable[[], None], *, every_s: float
) -> RunningThread:
    """Call `work` in a thread, at once and again whenever a table has another version, looking
    after `every_s`.
    """

    def follow(stopping: threading.Event) -> None:
        """Call `work` whenever a version has changed, until `stopping` is set."""
        seen = None
        while not stopping.is_set():
            current = versions()
            if current == seen:
                stopping.wait(every_s)
                continue
            seen = current
            work()

    return RunningThread(name, follow)
