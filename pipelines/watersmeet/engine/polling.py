"""Following by polling, in a thread, for engines that have no streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from watersmeet.engine import Running
from watersmeet.engine.threads import RunningThread
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.ends import Topics, ends_of
from watersmeet.lake.table_reader import TableReader


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
            """Return the version of each table."""
            return [self.reader.version(table) for table in tables]

        return _followed(follower, look, work, every_s=self.from_tables_s)


def _followed(
    name: str, look: Callable[[], Any], work: Callable[[], None], *, every_s: float
) -> RunningThread:
    """Call `work` in a thread, at once and again whenever `look` returns something else, looking
    after `every_s`.
    """

    def follow(stopping: threading.Event) -> None:
        """Call `work` whenever something is new, until `stopping` is set."""
        seen = None
        while not stopping.is_set():
            current = look()
            if current == seen:
                stopping.wait(every_s)
                continue
            seen = current
            work()

    return RunningThread(name, follow)
