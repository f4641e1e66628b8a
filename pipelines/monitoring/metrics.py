"""The metrics of a run, in Prometheus's text format over HTTP.

They observe the run: nothing is asked, read or counted for them in a batch. Labels are names and
numbers of the configuration (a topic, a partition, a layer), and never keys or values. `METRICS` is
the whole list.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import pipelines
from pipelines.core.plan import OpenTransaction, TopicPartition
from pipelines.core.reading import Reason
from pipelines.errors import ConfigurationError, kinds, missing_package
from pipelines.monitoring.events import (
    BronzeProgress,
    Checked,
    Committed,
    Event,
    Failed,
    LagObserved,
    MergeProgress,
    Observer,
    OwnerChanged,
    Published,
    RecordsProcessed,
    Sampled,
    StepDone,
)
from pipelines.settings import Settings

STATES: Final = ("active", "held", "idle", "waiting")
BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of a step's duration, in seconds."""


class Metric(NamedTuple):
    """A metric without the prefix `watersmeet_`: its name, its kind in Prometheus, its labels, and
    its description.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


METRICS: Final = (
    Metric(
        "build_info",
        "gauge",
        ("name", "engine", "version"),
        "Always 1: which pipeline this process runs.",
    ),
    Metric(
        "owner",
        "gauge",
        ("layer",),
        "1 while this process owns the layer, 0 once it has lost or released it.",
    ),
    Metric(
        "owner_token",
        "gauge",
        ("layer",),
        "The fencing token of this process: of two owners, the larger one is right.",
    ),
    Metric("clock_seconds", "gauge", ("partition",), "The clock of the merge, in event time."),
    Metric(
        "head_seconds",
        "gauge",
        ("topic", "partition"),
        "The largest event time that the merge has seen.",
    ),
    Metric(
        "head_in_future_seconds",
        "gauge",
        ("topic", "partition"),
        "How far the head is ahead of the wall clock, beyond merge.max_future; 0 where it is not.",
    ),
    Metric(
        "lead_seconds", "gauge", ("topic", "partition"), "How far the head is ahead of the clock."
    ),
    Metric(
        "lag_records",
        "gauge",
        ("layer", "topic", "partition"),
        "Offsets in Kafka that the layer has not passed yet.",
    ),
    Metric(
        "lag_seconds",
        "gauge",
        ("topic", "partition"),
        "Age of the last record merged, in event time; 0 without a lag.",
    ),
    Metric(
        "open_transaction_offsets",
        "gauge",
        ("topic", "partition"),
        "Offsets that wait for the oldest open transaction of another producer; 0 where none is "
        "open.",
    ),
    Metric(
        "open_transaction_seconds",
        "gauge",
        ("topic", "partition"),
        "Age of that transaction, by Kafka's timestamp of its first record; 0 where none is open.",
    ),
    Metric(
        "source_state",
        "gauge",
        ("topic", "partition", "state"),
        "1 for the state that the source is in, 0 for the others.",
    ),
    Metric("open_rows", "gauge", (), "Merge records that are open."),
    Metric(
        "behind_sink_rows",
        "gauge",
        ("partition",),
        "Finished, valid merge records that are never published.",
    ),
    Metric(
        "waiting_rows",
        "gauge",
        (),
        "Records that were read and wait for their tenants' clocks; 0 without tenants.",
    ),
    Metric("tenants", "gauge", (), "Tenants with something open or waiting."),
    Metric(
        "tenant_lag_seconds",
        "gauge",
        (),
        "How far the slowest of these tenants is behind the clock, in event time.",
    ),
    Metric(
        "sequence", "gauge", ("topic", "partition"), "The number of the last message published."
    ),
    Metric(
        "quality_failed",
        "gauge",
        ("suite", "table"),
        "Expectations that the last check beside the run found not met.",
    ),
    Metric("step_seconds", "histogram", ("layer", "step"), "How long a step of a batch took."),
    Metric(
        "records_total",
        "counter",
        ("layer", "topic", "outcome", "reason"),
        "What became of the records of a topic.",
    ),
    Metric(
        "commits_total",
        "counter",
        ("table",),
        "Commits that decide on a batch or a publication, by table.",
    ),
    Metric(
        "retries_total",
        "counter",
        ("kind",),
        "Failures after which the same was tried again, by kind of error.",
    ),
    Metric(
        "errors_total", "counter", ("kind",), "All failures, tried again or not, by kind of error."
    ),
)


class Metrics:
    """The metrics of one run, which they observe; `registry` is what Prometheus's client serves."""

    def __init__(self, settings: Settings) -> None:
        from prometheus_client import (
            CollectorRegistry,
            Counter,
            Gauge,
            Histogram,
            ProcessCollector,
            disable_created_metrics,
        )

        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._settings = settings
        ProcessCollector(registry=self.registry)  # memory, processor time, open files
        make: dict[str, Any] = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}
        self._metrics: dict[str, Any] = {}
        for name, kind, labels, text in METRICS:
            more = {"buckets": BUCKETS} if kind == "histogram" else {}
            self._metrics[name] = make[kind](
                f"watersmeet_{name}", text, labels, registry=self.registry, **more
            )
        self._of("build_info", settings.name, settings.engine, pipelines.__version__).set(1)
        for error in kinds():  # an increase is only seen in a counter that was there before
            self._of("retries_total", error)
            self._of("errors_total", error)
        self._lock = threading.Lock()
        self._reached: dict[tuple[str, TopicPartition], int] = {}
        self._positions: dict[TopicPartition, int | None] = {}
        self._bounds: dict[TopicPartition, tuple[int, int]] = {}

    def __call__(self, event: Event) -> None:
        """Bring the metrics up to date."""
        with self._lock:
            match event:
                case OwnerChanged(layers, token, is_owner):
                    self._owner(layers, token, is_owner)
                case StepDone(layer, step, seconds):
                    self._of("step_seconds", layer, step).observe(seconds)
                case Committed(table):
                    self._of("commits_total", table).inc()
                case BronzeProgress(offsets):
                    self._reached |= {("bronze", tp): offset for tp, offset in offsets.items()}
                    self._lags()
                case RecordsProcessed(layer, topics):
                    for topic, counts in topics.items():
                        for (outcome, reason), records in counts.items():
                            self._of("records_total", layer, topic, outcome, reason).inc(records)
                case MergeProgress():
                    self._standing(event)
                case Published(topic, sequences):
                    for p, seq in sequences.items():
                        self._of("sequence", topic, p).set(seq)
                case Sampled(bounds, open_rows, tenants, transactions, behind_sink):
                    self._bounds.update(bounds)
                    self._lags()
                    self._transactions(bounds, transactions)
                    if open_rows is not None:
                        self._metrics["open_rows"].set(open_rows)
                    for p, rows in (behind_sink or {}).items():
                        self._of("behind_sink_rows", p).set(rows)
                    if tenants is not None:
                        self._metrics["waiting_rows"].set(tenants.waiting_rows)
                        self._metrics["tenants"].set(tenants.tenants)
                        self._metrics["tenant_lag_seconds"].set(tenants.lag_ms / 1000)
                case LagObserved(layer, topic, by_partition):
                    for p, records in by_partition.items():
                        self._of("lag_records", layer, topic, p).set(records)
                case Checked(suite, table, failed):
                    self._of("quality_failed", suite, table).set(failed)
                case Failed(kind, is_retried):
                    self._of("errors_total", kind).inc()
                    if is_retried:
                        self._of("retries_total", kind).inc()

    def _of(self, name: str, *labels: object) -> Any:
        return self._metrics[name].labels(*labels)

    def _owner(self, layers: Any, token: int, is_owner: bool) -> None:
        for layer in layers:
            self._of("owner", layer).set(is_owner)
            self._of("owner_token", layer).set(token)
            if layer == "gold":
                self._of("records_total", layer, self._settings.publish.topic, "published", "")
            if layer == "bronze":
                for topic in self._settings.inputs.values():
                    for reason in Reason:
                        self._of("records_total", layer, topic, "quarantined", reason.value)

    def _standing(self, progress: MergeProgress) -> None:
        for partition, time_ms in progress.clocks.items():
            self._of("clock_seconds", partition).set(time_ms / 1000)
        for tp, at in progress.sources.items():
            self._reached["silver", tp], self._positions[tp] = at.next_offset, at.position
            place = (self._settings.inputs[tp.source], tp.partition)
            clock = progress.clocks.get(tp.partition)
            for state in STATES:
                self._of("source_state", *place, state).set(state == at.state)
            if at.head is not None:
                self._of("head_seconds", *place).set(at.head / 1000)
                allowed = time.time() + self._settings.merge.max_future_ms / 1000
                self._of("head_in_future_seconds", *place).set(max(0.0, at.head / 1000 - allowed))
                if clock is not None:
                    self._of("lead_seconds", *place).set((at.head - clock) / 1000)
        self._lags()

    def _lags(self) -> None:
        """Set the lags, as far as it is known where Kafka ends, and where the layer is."""
        for (layer, tp), offset in self._reached.items():
            if tp not in self._bounds:
                continue
            first, end = self._bounds[tp]
            lag = max(0, end - max(first, offset))
            place = self._settings.inputs[tp.source], tp.partition
            self._of("lag_records", layer, *place).set(lag)
            merged = self._positions.get(tp)
            if layer == "silver" and merged is not None:
                self._of("lag_seconds", *place).set(
                    max(0.0, time.time() - merged / 1000) if lag else 0
                )

    def _transactions(
        self,
        bounds: Mapping[TopicPartition, tuple[int, int]],
        transactions: Mapping[TopicPartition, OpenTransaction],
    ) -> None:
        """Set what is open in the partitions that were asked for."""
        for tp in bounds:
            place = (self._settings.inputs[tp.source], tp.partition)
            found = transactions.get(tp)
            since = None if found is None else found.since
            self._of("open_transaction_offsets", *place).set(0 if found is None else found.behind)
            self._of("open_transaction_seconds", *place).set(
                0 if since is None else max(0.0, time.time() - since / 1000)
            )


@contextmanager
def serving(settings: Settings) -> Iterator[list[Observer]]:
    """Serve the metrics inside the `with` block, where the configuration asks for them.

    Yields the observers that a run is to tell, one or none. Raises ConfigurationError where the
    address cannot be used, or Prometheus's client is not installed.
    """
    if settings.metrics is None:
        yield []
        return
    try:
        from prometheus_client import make_wsgi_app
    except ImportError as error:
        raise missing_package(error, ", or leave out `metrics`") or error from None
    from pipelines.monitoring.server import MetricsServer

    metrics = Metrics(settings)
    port = settings.metrics.port
    address = settings.metrics.address
    try:
        server = MetricsServer(address, port, make_wsgi_app(metrics.registry))
    except OSError as error:
        raise ConfigurationError(
            f"metrics: port {port} of {address} cannot be used ({error.strerror}); name a free "
            "port, and an address of this host"
        ) from None
    try:
        yield [metrics]
    finally:
        server.stop()
