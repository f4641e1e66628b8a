"""Following by polling, in a thread, for engines that have no streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pipelines.engine.threads import RunningThread
from pipelines.kafka.cluster import Cluster
from pipelines.kafka.ends import Topics, ends_of
from pipelines.lake.table_reader import TableReader


def followed_kafka(topics: Topics, work: Callable[[], None], *, every_s: float) -> RunningThread:
    """Call `work` in a thread, at once and again whenever Kafka has more in one of the topics,
    asking after `every_s`.
    """
    look = partial(ends_of, Cluster(topics.kafka), topics)
    return _followed("kafka", look, work, every_s=every_s)


def followed_tables(
    reader: TableReader, tables: Sequence[str], work: Callable[[], None], *, every_s: float
) -> RunningThread:
    """Call `work` in a thread, at once and again whenever a table has another version, looking
    after `every_s`.
    """

    def look() -> list[int]:
        """Return the version of each table."""
        return [reader.version(table) for table in tables]

    return _followed("tables", look, work, every_s=every_s)


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
