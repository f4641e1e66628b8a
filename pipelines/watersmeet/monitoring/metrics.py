"""The metrics of a run, in Prometheus's text format over HTTP.

They observe the run: nothing is asked, read or counted for them in a batch. Labels are names and
numbers of the configuration (a topic, a partition, a layer), and never keys or values. `METRICS` is
the whole list.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import watersmeet
from watersmeet.core.plan import OpenTransaction, TopicPartition
from watersmeet.core.reading import Reason
from watersmeet.errors import ConfigurationError, kinds, missing_package
from watersmeet.monitoring.events import (
    BronzeProgress,
    Checked,
    Committed,
    Event,
    Failed,
    Judged,
    LagObserved,
    MergeProgress,
    Observer,
    OwnerChanged,
    Published,
    RecordsProcessed,
    Sampled,
    StepDone,
)
from watersmeet.settings import Settings

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
        "dropped_fields_ratio",
        "gauge",
        ("source",),
        "Share of the newest records in bronze with fields that the source's schema lacks.",
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
        "not_valid_total",
        "counter",
        ("reason",),
        "Merge records that have timed out and are not valid, by reason.",
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
            options = {"buckets": BUCKETS} if kind == "histogram" else {}
            self._metrics[name] = make[kind](
                f"watersmeet_{name}", text, labels, registry=self.registry, **options
            )
        self._metric("build_info", settings.name, settings.engine, watersmeet.__version__).set(1)
        for error in kinds():  # an increase is only seen in a counter that was there before
            self._metric("retries_total", error)
            self._metric("errors_total", error)
        for reason in ("predicate", "expression", "too_large"):
            self._metric("not_valid_total", reason)
        for source in settings.sources:  # a value without a schema drops no field
            self._metric("dropped_fields_ratio", source)
        self._lock = threading.Lock()
        self._next_offsets: dict[tuple[str, TopicPartition], int] = {}
        self._positions: dict[TopicPartition, int | None] = {}
        self._bounds: dict[TopicPartition, tuple[int, int]] = {}
        self._updates: Mapping[type[Event], Callable[[Any], None]] = {
            OwnerChanged: self._owner,
            StepDone: self._step,
            Committed: self._commit,
            BronzeProgress: self._bronze_progress,
            RecordsProcessed: self._records,
            Judged: self._judged,
            MergeProgress: self._merge_progress,
            Published: self._publication,
            Sampled: self._sample,
            LagObserved: self._lag,
            Checked: self._quality,
            Failed: self._failure,
        }

    def __call__(self, event: Event) -> None:
        """Bring the metrics up to date."""
        with self._lock:
            self._updates[type(event)](event)

    def _metric(self, name: str, *labels: object) -> Any:
        return self._metrics[name].labels(*labels)

    def _owner(self, event: OwnerChanged) -> None:
        for layer in event.layers:
            self._metric("owner", layer).set(event.is_owner)
            self._metric("owner_token", layer).set(event.token)
            if layer == "gold":
                for topic in self._settings.publish.sequence_topics:
                    self._metric("records_total", layer, topic, "published", "")
            if layer == "bronze":
                for topic in self._settings.topics:
                    for reason in Reason:
                        self._metric("records_total", layer, topic, "quarantined", reason.value)

    def _step(self, event: StepDone) -> None:
        self._metric("step_seconds", event.layer, event.step).observe(event.seconds)

    def _commit(self, event: Committed) -> None:
        self._metric("commits_total", event.table).inc()

    def _bronze_progress(self, event: BronzeProgress) -> None:
        self._next_offsets |= {("bronze", tp): offset for tp, offset in event.offsets.items()}
        self._lags()

    def _records(self, event: RecordsProcessed) -> None:
        for topic, counts in event.topics.items():
            for (outcome, reason), records in counts.items():
                self._metric("records_total", event.layer, topic, outcome, reason).inc(records)

    def _judged(self, event: Judged) -> None:
        for reason, records in event.refused.items():
            self._metric("not_valid_total", reason).inc(records)

    def _merge_progress(self, event: MergeProgress) -> None:
        for partition, time_ms in event.clocks.items():
            self._metric("clock_seconds", partition).set(time_ms / 1000)
        for tp, source in event.sources.items():
            self._next_offsets["silver", tp] = source.next_offset
            self._positions[tp] = source.position
            place = (tp.input.topic, tp.partition)
            clock = event.clocks.get(tp.partition)
            for state in STATES:
                self._metric("source_state", *place, state).set(state == source.state)
            if source.head is not None:
                head_s = source.head / 1000
                allowed_s = time.time() + self._settings.merge.max_future_ms / 1000
                self._metric("head_seconds", *place).set(head_s)
                self._metric("head_in_future_seconds", *place).set(max(0.0, head_s - allowed_s))
                if clock is not None:
                    self._metric("lead_seconds", *place).set((source.head - clock) / 1000)
        self._lags()

    def _publication(self, event: Published) -> None:
        for p, seq in event.sequences.items():
            self._metric("sequence", event.topic, p).set(seq)

    def _sample(self, event: Sampled) -> None:
        self._bounds.update(event.bounds)
        self._lags()
        self._transactions(event.bounds, event.transactions)
        if event.open_rows is not None:
            self._metrics["open_rows"].set(event.open_rows)
        for p, rows in (event.behind_sink or {}).items():
            self._metric("behind_sink_rows", p).set(rows)
        for source, share in (event.dropped or {}).items():
            self._metric("dropped_fields_ratio", source).set(share)
        if event.tenants is not None:
            self._metrics["waiting_rows"].set(event.tenants.waiting_rows)
            self._metrics["tenants"].set(event.tenants.tenants)
            self._metrics["tenant_lag_seconds"].set(event.tenants.lag_ms / 1000)

    def _lag(self, event: LagObserved) -> None:
        for p, records in event.records.items():
            self._metric("lag_records", event.layer, event.topic, p).set(records)

    def _quality(self, event: Checked) -> None:
        self._metric("quality_failed", event.suite, event.table).set(event.failed)

    def _failure(self, event: Failed) -> None:
        self._metric("errors_total", event.kind).inc()
        if event.is_retried:
            self._metric("retries_total", event.kind).inc()

    def _lags(self) -> None:
        """Set the lags, as far as it is known where Kafka ends, and where the layer is."""
        for (layer, tp), offset in self._next_offsets.items():
            if tp not in self._bounds:
                continue
            first, end = self._bounds[tp]
            lag = max(0, end - max(first, offset))
            place = tp.input.topic, tp.partition
            self._metric("lag_records", layer, *place).set(lag)
            position = self._positions.get(tp)
            if layer == "silver" and position is not None:
                lag_s = max(0.0, time.time() - position / 1000) if lag else 0
                self._metric("lag_seconds", *place).set(lag_s)

    def _transactions(
        self,
        bounds: Mapping[TopicPartition, tuple[int, int]],
        transactions: Mapping[TopicPartition, OpenTransaction],
    ) -> None:
        """Set what is open in the partitions that were asked for."""
        for tp in bounds:
            place = (tp.input.topic, tp.partition)
            transaction = transactions.get(tp)
            offsets = 0
            age_s = 0.0
            if transaction is not None:
                offsets = transaction.behind
                if transaction.since is not None:
                    age_s = max(0.0, time.time() - transaction.since / 1000)
            self._metric("open_transaction_offsets", *place).set(offsets)
            self._metric("open_transaction_seconds", *place).set(age_s)


@contextmanager
def serving(settings: Settings) -> Iterator[list[Observer]]:
    """Serve the metrics inside the `with` block, where the configuration asks for them.

    Yields the observers of a run, one or none. Raises ConfigurationError where the
    address cannot be used, or Prometheus's client is not installed.
    """
    if settings.metrics is None:
        yield []
        return
    try:
        from prometheus_client import make_wsgi_app
    except ImportError as error:
        raise missing_package(error, ", or leave out `metrics`") or error from None
    from watersmeet.monitoring.server import MetricsServer

    metrics = Metrics(settings)
    port = settings.metrics.port
    address = settings.metrics.address
    try:
        server = MetricsServer(address, port, make_wsgi_app(metrics.registry))
    except OSError as error:
        raise ConfigurationError(
            f"port {port} of {address} cannot be used ({error.strerror})",
            where="metrics",
            fix="name a free port, and an address of this host",
        ) from None
    try:
        yield [metrics]
    finally:
        server.stop()
