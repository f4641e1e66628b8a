"""What the three streams share: how a batch is kept whole when the process is told to stop, triggers, checkpoints."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from pyspark.sql import DataFrame

from pipelines.adapters.lake import Lake
from pipelines.errors import WatersmeetError, is_trouble_with_kafka, root_cause
from pipelines.settings import Settings
from pipelines.watch import Patience

POLL = "200 milliseconds"
"""How often a waiting query looks for news: each look lists a folder, and must not eat the cores of a laptop."""

_LOOK_S = 0.05
_LOOKS_PER_READING = 40
"""How often a follower looks for a file of the name that a table's next commit has, and how often it reads the log."""

FROM_KAFKA = "1 second"
"""How often bronze asks Kafka: each batch costs about as much as a thousand records, and the later layers need the cores too."""


@dataclass
class Gate:
    """Lets one batch of a stream through at a time, and none once `stopping` is set: so a stop never cuts a batch in two.

    A batch that finds the gate closed returns without writing. Spark then notes it as done in the checkpoint, which does no
    harm: checkpoints are never trusted.
    """

    stopping: threading.Event
    patience: Patience
    failure: Exception | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def guard(self, work: Callable[[DataFrame], None]) -> Callable[[DataFrame, int], None]:
        """`work` as a function for foreachBatch."""

        def batch(rows: DataFrame, _: int) -> None:
            self.run(lambda: work(rows))

        return batch

    def run(self, work: Callable[[], None]) -> None:
        """Does the work alone, again while there is trouble with Kafka, or not at all.

        Where it fails, the failure is kept as it is and everything stops: Spark would only wrap it, and fill the log with the
        traces of every layer it passes through.
        """
        with self._lock:
            if self.stopping.is_set():
                return
            try:
                self.patience.bear(work)
            except Exception as failure:
                self.failure = failure
                self.stopping.set()

    def close(self) -> None:
        """Returns when no batch is under way and none can begin (`stopping` must be set)."""
        with self._lock:
            pass


class Query(Protocol):
    """What runs until it is stopped, or fails: a StreamingQuery, or a `Follower`."""

    @property
    def isActive(self) -> bool:  # noqa: N802
        """Whether it runs."""
        ...

    def exception(self) -> Exception | None:
        """What has ended it."""
        ...

    def stop(self) -> None:
        """Ends it."""
        ...


class Follower:
    """Calls `work` whenever one of some tables of a local lake has a new commit. Spark's stream on a Delta table would do the
    same, and plan and note a micro-batch each time, of which nothing is wanted but that there is news.
    """

    def __init__(self, lake: Lake, tables: Sequence[str], work: Callable[[], None]) -> None:
        self._lake, self._work = lake, work
        self._versions = {table: lake.version_of(table) for table in tables}
        self._failure: Exception | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"follows {', '.join(tables)}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        try:
            for look in count():
                if self._ended.wait(_LOOK_S):
                    return
                # The next commit's file may be gone again by the time that long work is done.
                is_thorough = look % _LOOKS_PER_READING == 0
                if is_thorough or any(self._lake.has_version(table, seen + 1) for table, seen in self._versions.items()):
                    before, self._versions = self._versions, {table: self._lake.version_of(table) for table in self._versions}
                    if self._versions != before:
                        self._work()
        except Exception as failure:
            self._failure = failure

    @property
    def isActive(self) -> bool:  # noqa: N802
        """Whether it still looks."""
        return self._thread.is_alive()

    def exception(self) -> Exception | None:
        """What has ended it: no log could be read."""
        return self._failure

    def stop(self) -> None:
        """Returns once it does not look any more, and nothing of its work is under way."""
        self._ended.set()
        self._thread.join()


@dataclass
class Stream:
    """A query that is begun anew where Kafka was away, and its gate. `drain` is also done at the start and when it `is_due`."""

    gate: Gate
    begin: Callable[[Gate], Query]
    drain: Callable[[], None] = lambda: None
    is_due: Callable[[], bool] = lambda: False
    _query: Query | None = None
    _aside: threading.Thread | None = None

    def start(self) -> None:
        """Begins; while there is trouble with Kafka, again."""
        self.gate.patience.bear(self._begin)

    def _begin(self) -> None:
        self._query = self.begin(self.gate)
        self._drain_aside()

    def _drain_aside(self) -> None:
        """In a thread of its own: while records keep coming, a drain may take as long as the run."""
        if self._aside is None or not self._aside.is_alive():
            self._aside = threading.Thread(target=self.gate.run, args=[self.drain], daemon=True)
            self._aside.start()

    @property
    def is_active(self) -> bool:
        """Whether the query runs."""
        return self._query is not None and self._query.isActive

    def look_after(self) -> None:
        """Begins a query anew that has ended for trouble with Kafka; raises WatersmeetError where it ended for another reason."""
        if self.is_due():
            self._drain_aside()
        if self.is_active or self.gate.stopping.is_set():
            return
        failure = self._exception()
        if failure is not None and not is_trouble_with_kafka(failure):
            raise WatersmeetError(f"a stream ended: {root_cause(failure)}")
        self.gate.patience.reporter.tell("kafka", f"{root_cause(failure or Exception('a stream ended'))}; trying again")
        self.start()

    def stop(self) -> None:
        """Ends the query after the batch under way (`stopping` must be set, or the query at its end)."""
        if self.gate.stopping.is_set():
            self.gate.close()
        if self._query is not None:
            self._query.stop()

    def raise_failure(self) -> None:
        """Raises what ended the stream, if anything did."""
        if self.gate.failure is not None:
            raise self.gate.failure
        failure = self._exception()
        if failure is not None:
            raise WatersmeetError(f"a stream ended: {root_cause(failure)}")

    def _exception(self) -> Exception | None:
        return None if self._query is None else self._query.exception()


def trigger(*, once: bool, every: str = POLL) -> dict[str, Any]:
    """Everything available now, then the end; or on and on."""
    return {"availableNow": True} if once else {"processingTime": every}


def new_checkpoint(lake: Lake, settings: Settings, stream: str) -> str:
    """An empty checkpoint folder for this run of a stream; what earlier runs left is removed.

    The tables say where each stream stands. Spark insists on a folder of its own, so it gets one, and it is never read again.
    """
    parent = f"{settings.checkpoints}/{stream}"
    lake.files.delete(parent)
    return f"{parent}/{uuid.uuid4()}"


def offsets_under_way(lake: Lake, checkpoint: str, topic: str, begun: Mapping[int, int]) -> int | None:
    """How many offsets of the topic the batch under way holds at most, by what Spark has noted of it before it began; None where
    that cannot be read. `begun`: where the query began.
    """
    folder = lake.files.local_path(f"{checkpoint}/offsets")
    if folder is None:
        return None
    try:
        noted = sorted((int(file.name), file) for file in Path(folder).iterdir() if file.name.isdecimal())
        ends = [_noted_offsets(file.read_text(), topic) for _, file in noted[-2:]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not ends:
        return None
    since = ends[0] if len(ends) == 2 else begun
    return sum(end - since.get(p, 0) for p, end in ends[-1].items())


def _noted_offsets(text: str, topic: str) -> dict[int, int]:
    """The last line of what Spark notes is, for Kafka, the offset after the batch by topic and partition."""
    return {int(p): int(offset) for p, offset in json.loads(text.splitlines()[-1])[topic].items()}
