"""OpenLineage events: one for each batch of a layer, with what it read and what it wrote.

Datasets are named by OpenLineage's conventions: a topic by its broker, a table by the store and
path of its folder; for a table of a catalog there is none: `catalog://CATALOG` and `SCHEMA.TABLE`.
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
    """An observer of a run that sends what it sees in a thread; a failing backend stops nothing."""

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
            goes_on = "the run goes on, and this is not said again"
            log.warning("lineage: an event could not be sent (%s); %s", why, goes_on)

    def _event(self, batch: RecordsProcessed) -> Any:
        from openlineage.client import event_v2 as v2

        inputs, outputs = self._datasets(batch)
        return v2.RunEvent(
            eventTime=datetime.now(timezone.utc).isoformat(),
            producer=PRODUCER,
            run=v2.Run(str(uuid.uuid4())),
            job=v2.Job("watersmeet", f"{self._settings.name}.{batch.layer}"),
            eventType=v2.RunState.COMPLETE,
            inputs=[v2.InputDataset(*each) for each in inputs],
            outputs=[v2.OutputDataset(*each, outputFacets=_written(n)) for each, n in outputs],
        )

    def _datasets(
        self, batch: RecordsProcessed
    ) -> tuple[list[Dataset], list[tuple[Dataset, int | None]]]:
        settings = self._settings
        counts: Counter[str] = Counter()
        for outcomes in batch.topics.values():
            for (outcome, _), records in outcomes.items():
                counts[outcome] += records
        topics = [self._topic(topic) for topic in batch.topics]
        if batch.layer == "repartition":
            origins = {
                settings.sources[name].topics[0]: repartition.from_topics
                for name, repartition in settings.repartitioned.items()
            }
            read = [self._topic(origin) for topic in batch.topics for origin in origins[topic]]
            copied = [sum(outcomes.values()) for outcomes in batch.topics.values()]
            return read, [*zip(topics, copied, strict=True)]
        bronze = [
            self._table(tables.bronze(name))
            for name, source in settings.sources.items()
            if batch.topics.keys() & set(source.topics)
        ]
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

    if rows is None:
        return {}
    return {"outputStatistics": statistics.OutputStatisticsOutputDatasetFacet(rowCount=rows)}


@contextmanager
def sending(settings: Settings) -> Iterator[list[Observer]]:
    """Provide the observers, one or none, that send events as the configuration asks.

    Raises ConfigurationError if OpenLineage's client is not installed.
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
