"""OpenLineage events: one for each batch of a layer, with what it read and what it wrote.

The client library of OpenLineage sends them. Datasets are named by OpenLineage's conventions: a
topic by its broker, a table by the store and path of its folder. There is no convention for a table
of a catalog, which is `catalog://CATALOG` and `SCHEMA.TABLE`.
"""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import watersmeet
from watersmeet.errors import missing_package
from watersmeet.lake import tables
from watersmeet.lake.location import local_path, scheme_of
from watersmeet.monitoring.events import Event, Observer, RecordsProcessed
from watersmeet.settings import CatalogLake, Settings

if TYPE_CHECKING:
    from openlineage.client.transport import Transport

log = logging.getLogger("watersmeet.lineage")

PRODUCER: Final = f"watersmeet/{watersmeet.__version__}"
TIMEOUT_S: Final = 5.0
WAITING: Final = 1000
"""Maximum number of events that wait for a slow backend; further ones are dropped."""


class Dataset(NamedTuple):
    """A dataset by OpenLineage's two names."""

    namespace: str
    name: str


class Lineage:
    """An observer of a run that sends what it sees in a thread of its own.

    A backend that fails stops nothing, and causes one warning.
    """

    def __init__(self, settings: Settings, transport: Transport) -> None:
        from openlineage.client import OpenLineageClient

        self._settings = settings
        self._client = OpenLineageClient(transport=transport)
        self._waiting: queue.Queue[RecordsProcessed | None] = queue.Queue(WAITING)
        self._is_warned = False
        self._thread = threading.Thread(target=self._follow, name="lineage", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queue a batch for sending."""
        if isinstance(event, RecordsProcessed):
            try:
                self._waiting.put_nowait(event)
            except queue.Full:
                self._warn("it is too slow")

    def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        try:
            self._waiting.put(None, timeout=TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(TIMEOUT_S)

    def _follow(self) -> None:
        while (batch := self._waiting.get()) is not None:
            try:
                self._client.emit(self._event(batch))
            except BaseException as error:  # a backend may raise anything
                # Only the class: the error's text may contain what must not be logged.
                self._warn(type(error).__name__)

    def _warn(self, why: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            log.warning(
                "lineage: an event could not be sent (%s); the run goes on, and this is not said "
                "again",
                why,
            )

    def _event(self, batch: RecordsProcessed) -> Any:
        from openlineage.client.event_v2 import (
            InputDataset,
            Job,
            OutputDataset,
            Run,
            RunEvent,
            RunState,
        )

        inputs, outputs = self._datasets(batch)
        return RunEvent(
            eventTime=datetime.now(timezone.utc).isoformat(),
            producer=PRODUCER,
            run=Run(str(uuid.uuid4())),
            job=Job("watersmeet", f"{self._settings.name}.{batch.layer}"),
            eventType=RunState.COMPLETE,
            inputs=[InputDataset(*dataset) for dataset in inputs],
            outputs=[
                OutputDataset(*dataset, outputFacets=_written(rows)) for dataset, rows in outputs
            ],
        )

    def _datasets(
        self, batch: RecordsProcessed
    ) -> tuple[list[Dataset], list[tuple[Dataset, int | None]]]:
        """Return what a batch read, and what it wrote, with the number of rows if that is known."""
        counts: Counter[str] = Counter()
        for outcomes in batch.topics.values():
            for (outcome, _), records in outcomes.items():
                counts[outcome] += records
        topics = [self._topic(topic) for topic in batch.topics]
        if batch.layer == "repartition":
            kept = {
                self._settings.sources[name].topics[0]: repartition.from_topics
                for name, repartition in self._settings.repartitioned.items()
            }
            copied = {topic: sum(outcomes.values()) for topic, outcomes in batch.topics.items()}
            read = [self._topic(origin) for topic in copied for origin in kept[topic]]
            return read, [(self._topic(topic), rows) for topic, rows in copied.items()]
        sources = [
            name
            for name, source in self._settings.sources.items()
            if batch.topics.keys() & set(source.topics)
        ]
        bronze = [self._table(tables.bronze(source)) for source in sources]
        if batch.layer == "bronze":
            return topics, [(table, sum(counts.values())) for table in bronze]
        silver = self._table(tables.SILVER)
        if batch.layer == "silver":
            return bronze, [(silver, None)]
        return [silver], [(topic, counts["published"]) for topic in topics]

    def _topic(self, topic: str) -> Dataset:
        server = self._settings.kafka.bootstrap_servers.split(",")[0].strip().rpartition("://")[2]
        return Dataset(f"kafka://{server}", topic)

    def _table(self, table: str) -> Dataset:
        lake = self._settings.lake
        if isinstance(lake, CatalogLake):
            return Dataset(f"catalog://{lake.catalog}", f"{lake.schema_name}.{table}")
        scheme = scheme_of(lake)
        if scheme in (None, "file"):
            return Dataset("file", f"{local_path(lake)}/{table}")
        store, _, path = lake.partition("://")[2].partition("/")
        return Dataset(f"{scheme}://{store}", "/".join(filter(None, [path, table])))


def _written(rows: int | None) -> dict[str, Any]:
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

    return (
        {}
        if rows is None
        else {"outputStatistics": statistics.OutputStatisticsOutputDatasetFacet(rowCount=rows)}
    )


@contextmanager
def sending(settings: Settings) -> Iterator[list[Observer]]:
    """Send events inside the `with` block, if the configuration asks for them.

    Yields the observers that a run is to tell, one or none. Raises ConfigurationError if
    OpenLineage's client is not installed.
    """
    if settings.lineage is None:
        yield []
        return
    try:
        from openlineage.client.transport.file import FileConfig, FileTransport
        from openlineage.client.transport.http import HttpConfig, HttpTransport
    except ImportError as error:
        raise missing_package(error, ", or leave out `lineage`") or error from None
    transport: Transport
    if settings.lineage.file is not None:
        transport = FileTransport(FileConfig(settings.lineage.file, append=True))
    else:
        transport = HttpTransport(
            HttpConfig(str(settings.lineage.url), timeout=TIMEOUT_S, retry={"total": 0})
        )
    lineage = Lineage(settings, transport)
    try:
        yield [lineage]
    finally:
        lineage.close()
