"""Following by polling, in a thread of this process, for engines that have no streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from watersmeet.engine import Running
from watersmeet.kafka.cluster import Cluster, Topics, ends_of
from watersmeet.lake.table_reader import TableReader


class RunningThread:
    """A thread that calls `follow` with the event that tells it to end, and keeps what that raises,
    also where it is no Exception: a panic in a Rust library is none.
    """

    def __init__(self, name: str, follow: Callable[[threading.Event], None]) -> None:
        self.failure: BaseException | None = None
        self._stopping = threading.Event()
        self._follow = follow
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Tell the thread to end, and return once it has."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._follow(self._stopping)
        except BaseException as failure:
            self.failure = failure


class Polling:
    """The part of an engine without streams that follows Kafka and tables."""

    reader: TableReader
    from_kafka_s: float
    """Seconds between two requests of bronze to Kafka for new records."""
    from_tables_s: float
    """Seconds between two looks of a layer for new commits."""

    def follow_kafka(self, topics: Topics, work: Callable[[], None]) -> RunningThread:
        """See `Engine.follow_kafka`."""
        look = partial(ends_of, Cluster(topics.kafka), topics)
        return _followed("kafka", look, work, every_s=self.from_kafka_s)

    def follow_tables(
        self, tables: Sequence[str], work: Callable[[], None], follower: str
    ) -> Running:
        """See `Engine.follow_tables`."""

        def look() -> list[int]:
            return [self.reader.version(table) for table in tables]

        return _followed(follower, look, work, every_s=self.from_tables_s)


def _followed(
    name: str, look: Callable[[], Any], work: Callable[[], None], *, every_s: float
) -> RunningThread:
    def follow(stopping: threading.Event) -> None:
        seen = None
        while not stopping.is_set():
            current = look()
            if current == seen:
                stopping.wait(every_s)
                continue
            seen = current
            work()

    return RunningThread(name, follow)
