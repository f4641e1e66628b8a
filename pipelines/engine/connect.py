"""The Spark engine over Spark Connect: a thread of this process looks for news.

Spark Connect runs foreachBatch on its server, in a process that has nothing of a run's state.
Everything else is as in `SparkEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from pipelines.engine.polling import followed_kafka, followed_tables
from pipelines.engine.spark import SparkEngine
from pipelines.engine.threads import RunningThread
from pipelines.kafka.ends import Topics

FROM_KAFKA_S: Final = 1.0
"""Seconds between two requests of bronze to Kafka for new records."""

FROM_TABLES_S: Final = 0.5
"""Seconds between two looks of a layer for new commits."""


class ConnectEngine(SparkEngine):
    """`Engine` on a session of Spark Connect."""

    def follow_kafka(self, topics: Topics, work: Callable[[], None]) -> RunningThread:
        """See `Engine.follow_kafka`."""
        return followed_kafka(topics, work, every_s=FROM_KAFKA_S)

    def follow_tables(self, tables: Sequence[str], work: Callable[[], None]) -> RunningThread:
        """See `Engine.follow_tables`."""
        return followed_tables(self.reader, tables, work, every_s=FROM_TABLES_S)

    def _run_on_rows(
        self, session: SparkSession, statement: Callable[[str], str], rows: DataFrame
    ) -> None:
        """Run a statement about rows in another session than theirs: on Spark Connect it takes
        their plan along.
        """
        with_braces = statement("\0").replace("{", "{{").replace("}", "}}")
        session.sql(with_braces.replace("\0", "{changed}"), changed=rows)
