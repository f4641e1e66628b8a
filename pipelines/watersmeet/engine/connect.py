"""The Spark engine over Spark Connect: a thread of this process looks for new commits.

Spark Connect runs foreachBatch on its server, in a process that has nothing of a run's state.
Everything else is as in `SparkEngine`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyspark.sql import DataFrame, SparkSession

from watersmeet.engine.polling import Polling
from watersmeet.engine.spark import SparkEngine


class ConnectEngine(SparkEngine):
    """`Engine` on a session of Spark Connect."""

    from_tables_s = 0.5
    follow_tables = Polling.follow_tables

    def _run_on_rows(
        self, session: SparkSession, statement: Callable[[str], str], rows: DataFrame
    ) -> None:
        """Run a statement about rows in another session than theirs: on Spark Connect it takes
        their plan along.
        """
        with_braces = statement("\0").replace("{", "{{").replace("}", "}}")
        session.sql(with_braces.replace("\0", "{changed}"), changed=rows)

    @contextmanager
    def _in_session(self, _: SparkSession, rows: DataFrame) -> Iterator[DataFrame]:
        """Provide rows as they are: on Spark Connect a view is its session's own."""
        yield rows
