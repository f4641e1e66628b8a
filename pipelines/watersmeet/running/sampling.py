"""Samples what the metrics need and no layer knows, now and then, beside a run's batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Final

from watersmeet.core.columns import row_values
from watersmeet.core.plan import OpenTransaction, TopicPartition
from watersmeet.core.types import NO_TENANT
from watersmeet.kafka.cluster import Cluster
from watersmeet.kafka.reading import open_transactions
from watersmeet.lake import tables
from watersmeet.lake.history import read_history
from watersmeet.lake.newest import dropped_in_lake, finders
from watersmeet.lake.published import count_behind_sink
from watersmeet.lake.state import slowest, unfinished
from watersmeet.lake.table_reader import TableReader
from watersmeet.monitoring.events import (
    BronzeProgress,
    Committed,
    Event,
    MergeProgress,
    Observer,
    Sampled,
    TenantsSampled,
)
from watersmeet.settings import Settings

log = logging.getLogger("watersmeet.sampling")

EVERY_S: Final = 5.0
FIELDS_EVERY: Final = 12
"""Number of samples of which at most one looks at the fields of the newest records."""
TIMEOUT_S: Final = 2.5


class Sampler:
    """Samples Kafka and the lake for the observers of a run.

    Of Kafka: the ends of the sources' topics, and the transactions open there. Of the lake, after
    silver has changed: how many merge records are open, and of which tenants. Once a minute, after
    bronze has read more: how many of the newest records have fields that their schema lacks.

    The sampler also observes the run, to know whether tables have changed, and where the clocks of
    tenants are. A query that fails is repeated with the next sample.
    """

    def __init__(
        self,
        settings: Settings,
        partitions: int,
        layers: Sequence[str],
        reader: TableReader,
        notify: Observer,
    ) -> None:
        self._settings = settings
        self._partitions = partitions
        self._layers = layers
        self._reader = reader
        self._notify = notify
        self._cluster = Cluster(settings.kafka, TIMEOUT_S)
        self._silver_changed = "silver" in layers
        self._progress: MergeProgress | None = None
        self._ends: dict[TopicPartition, int] = {}
        self._samples_to_wait = 0
        self._has_new_records = False

    def __call__(self, event: Event) -> None:
        """Record a new version of silver, and the clocks."""
        if isinstance(event, Committed) and event.table == tables.SILVER:
            self._silver_changed = True
        if isinstance(event, MergeProgress):
            # The first sample was taken without clocks.
            self._silver_changed |= self._progress is None
            self._progress = event
        if isinstance(event, BronzeProgress):
            self._ends = {**self._ends, **event.offsets}
            self._has_new_records = True

    def follow(self, stopping: threading.Event) -> None:
        """Take a sample at once, and then every few seconds."""
        while True:
            try:
                self.sample()
            # Sampling must not stop the run, which reports trouble with Kafka itself.
            except BaseException as error:
                log.debug("no sample: %s", error)
            if stopping.wait(EVERY_S):
                return

    def sample(self) -> None:
        """Take a sample and report it."""
        bounds: dict[TopicPartition, tuple[int, int]] = {}
        transactions: dict[TopicPartition, OpenTransaction] = {}
        if {"bronze", "silver"} & set(self._layers):
            for input_id in self._settings.inputs:
                topic_bounds, still_open = open_transactions(
                    self._cluster, input_id.topic, range(self._partitions)
                )
                bounds |= {
                    TopicPartition(input_id, p): limits for p, limits in topic_bounds.items()
                }
                transactions |= {
                    TopicPartition(input_id, p): transaction
                    for p, transaction in still_open.items()
                }
        open_rows = None
        tenants = None
        behind_sink = None
        if self._silver_changed:
            # Before the query, so that a batch committed meanwhile is not missed.
            self._silver_changed = False
            try:
                open_rows, tenants = self._by_tenant()
                behind_sink = self._behind_sink()
            except BaseException:
                self._silver_changed = True
                raise
        dropped = self._dropped()
        self._notify(Sampled(bounds, open_rows, tenants, transactions, behind_sink, dropped))

    def _dropped(self) -> Mapping[str, float] | None:
        """Return, by source, the share of the newest records with fields that its schema lacks;
        None where it is not the time for it, or bronze has not read more.
        """
        self._samples_to_wait -= 1
        if self._samples_to_wait > 0 or not self._has_new_records:
            return None
        self._has_new_records = False
        self._samples_to_wait = FIELDS_EVERY
        find = finders(self._reader, self._settings)
        dropped = dropped_in_lake(self._reader, self._settings, self._ends, find)
        return {name: fields.having / max(1, fields.records) for name, fields in dropped.items()}

    def _behind_sink(self) -> Mapping[int, int] | None:
        """Return, by partition, how many merge records are never published; None where no
        generation has begun.
        """
        generations = read_history(self._reader, self._settings).generations
        if not generations:
            return None
        counts = count_behind_sink(self._reader, generations.newest)
        return dict.fromkeys(range(self._partitions), 0) | counts

    def _by_tenant(self) -> tuple[int, TenantsSampled]:
        rows = unfinished(self._reader)
        progress = self._progress
        counts = {"open": 0, "waiting": 0}
        for status, count in row_values(rows, "status", "rows"):
            counts[status] += count
        behind = [0]
        if progress is not None and progress.state is not None:
            slowest_tenants = slowest(rows, progress.state)
            behind += [
                progress.clocks[p] - slowest_tenant.clock
                for p, slowest_tenant in slowest_tenants.items()
                if slowest_tenant.clock is not None
            ]
        tenants = {*rows["tenant"].unique().to_pylist()} - {NO_TENANT}
        return counts["open"], TenantsSampled(counts["waiting"], len(tenants), max(behind))
