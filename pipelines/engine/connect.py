"""The Spark engine over Spark Connect: threads of this process read in batches what other engines
stream.

Spark Connect runs foreachBatch on its server, in a process that has nothing of a run's state.
Everything else is as in `SparkEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pyspark.sql import DataFrame, SparkSession

from pipelines.engine import KafkaInput
from pipelines.engine.polling import followed_source, followed_versions
from pipelines.engine.spark import SparkEngine
from pipelines.engine.threads import RunningThread
from pipelines.kafka.ranges import share

FROM_KAFKA_S: Final = 1.0
"""Seconds between two requests of bronze to Kafka for new records."""

FROM_TABLES_S: Final = 0.5
"""Seconds between two looks of a layer for new commits."""


class ConnectEngine(SparkEngine):
    """`Engine` on a session of Spark Connect."""

    def follow_kafka(
        self, source: KafkaInput, work: Callable[[DataFrame], None], *, once: bool
    ) -> RunningThread:
        """See `Engine.follow_kafka`."""
        position = dict(source.offsets)

        def process_batch(until: Mapping[int, int]) -> bool:
            """Pass the next batch up to these end offsets to `work`; return False where nothing is
            new.
            """
            backlog = {p: max(until[p] - offset, 0) for p, offset in position.items()}
            counts = share(backlog, source.max_offsets_per_batch)
            reached = {p: offset + counts[p] for p, offset in position.items()}
            if not any(counts.values()):
                return False
            work(
                self.read_kafka(
                    source, {p: (offset, reached[p]) for p, offset in position.items() if counts[p]}
                )
            )
            position.update(reached)
            return True

        return followed_source(source, process_batch, once=once, every_s=FROM_KAFKA_S)

    def follow(self, name: str, tables: Sequence[str], work: Callable[[], None]) -> RunningThread:
        """See `Engine.follow`."""
        return followed_versions(
            name, lambda: [*map(self.reader.version, tables)], work, every_s=FROM_TABLES_S
        )

    def _run_on_rows(
        self, session: SparkSession, statement: Callable[[str], str], rows: DataFrame
    ) -> None:
        """Run a statement about rows in another session than theirs: on Spark Connect it takes
        their plan along.
        """
        with_braces = statement("\0").replace("{", "{{").replace("}", "}}")
        session.sql(with_braces.replace("\0", "{changed}"), changed=rows)
