"""What the three streams share: how a batch is kept whole when the process is told to stop, triggers, checkpoints."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from pipelines.settings import Settings

POLL = "200 milliseconds"
"""How often a waiting query looks for news: each look lists a folder, and must not eat the cores of a laptop."""


@dataclass
class Gate:
    """Lets one batch of a stream through at a time, and none once `stopping` is set: so a stop never cuts a batch in two.

    A batch that finds the gate closed returns without writing. Spark then notes it as done in the checkpoint, which does no
    harm: checkpoints are never trusted.
    """

    stopping: threading.Event
    failure: Exception | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def guard(self, work: Callable[[DataFrame], None]) -> Callable[[DataFrame, int], None]:
        """`work` as a function for foreachBatch. Where it fails, the failure is kept as it is and everything stops: Spark
        would only wrap it, and fill the log with the traces of every layer it passes through.
        """

        def batch(rows: DataFrame, _: int) -> None:
            try:
                self.run(lambda: work(rows))
            except Exception as failure:
                self.failure = failure
                self.stopping.set()

        return batch

    def run(self, work: Callable[[], None]) -> None:
        """Does the work alone, or not at all."""
        with self._lock:
            if not self.stopping.is_set():
                work()

    def close(self) -> None:
        """Returns when no batch is under way and none can begin (`stopping` must be set)."""
        with self._lock:
            pass


def trigger(*, once: bool) -> dict[str, Any]:
    """Everything available now, then the end; or on and on."""
    return {"availableNow": True} if once else {"processingTime": POLL}


def new_checkpoint(spark: SparkSession, settings: Settings, stream: str) -> str:
    """An empty checkpoint folder for this run of a stream; what earlier runs left is removed.

    The tables say where each stream stands. Spark insists on a folder of its own, so it gets one, and it is never read again.
    """
    parent = f"{settings.checkpoints}/{stream}"
    jvm: Any = spark._jvm
    path = jvm.org.apache.hadoop.fs.Path(parent)
    path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).delete(path, True)
    return f"{parent}/{uuid.uuid4()}"
