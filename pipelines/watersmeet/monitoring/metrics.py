"""The metrics of a run, in Prometheus's text format over HTTP.

Nothing is asked, read or counted for them in a batch. Labels are names and numbers of the
configuration (a topic, a partition, a layer), and never keys or values.
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
from watersmeet.monitoring import events
from watersmeet.monitoring.events import Event, Observer
from watersmeet.settings import Settings

STATES: Final = ("active", "held", "idle", "waiting")
BUCKETS: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of a step's duration, in seconds."""


class Metric(NamedTuple):
    """A metric; `name` is without the prefix `watersmeet_`, and `kind` is Prometheus's."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


# Of each its kind, its name and its labels, and what it says.
_TABLE: Final = """\
gauge build_info name engine version
  Always 1: which pipeline this process runs.
gauge owner layer
  1 while this process owns the layer, 0 once it has lost or released it.
gauge owner_token layer
  The fencing token of this process: of two owners, the larger one is right.
gauge clock_seconds partition
  The clock of the merge, in event time.
gauge head_seconds topic partition
  The largest event time that the merge has seen.
gauge head_in_future_seconds topic partition
  How far the head is ahead of the wall clock, beyond merge.max_future; 0 where it is not.
gauge lead_seconds topic partition
  How far the head is ahead of the clock.
gauge lag_records layer topic partition
  Offsets in Kafka that the layer has not passed yet.
gauge lag_seconds topic partition
  Age of the last record merged, in event time; 0 without a lag.
gauge open_transaction_offsets topic partition
  Offsets that wait for the oldest open transaction of another producer; 0 where none is open.
gauge open_transaction_seconds topic partition
  Age of that transaction, by Kafka's timestamp of its first record; 0 where none is open.
gauge source_state topic partition state
  1 for the state that the source is in, 0 for the others.
gauge open_rows
  Merge records that are open.
gauge behind_sink_rows partition
  Finished, valid merge records that are never published.
gauge dropped_fields_ratio source
  Share of the newest records in bronze with fields that the source's schema lacks.
gauge waiting_rows
  Records that were read and wait for their tenants' clocks; 0 without tenants.
gauge tenants
  Tenants with something open or waiting.
gauge tenant_lag_seconds
  How far the slowest of these tenants is behind the clock, in event time.
gauge sequence topic partition
  The number of the last message published.
gauge quality_failed suite table
  Expectations that the last check beside the run found not met.
histogram step_seconds layer step
  How long a step of a batch took.
counter records_total layer topic outcome reason
  What became of the records of a topic.
counter not_valid_total reason
  Merge records that have timed out and are not valid, by reason.
counter commits_total table
  Commits that decide on a batch or a publication, by table.
counter retries_total kind
  Failures after which the same was tried again, by kind of error.
counter errors_total kind
  All failures, tried again or not, by kind of error.
"""


def _metrics(table: str) -> Iterator[Metric]:
    lines = table.splitlines()
    for head, text in zip(lines[::2], lines[1::2], strict=True):
        kind, name, *labels = head.split()
        yield Metric(name, kind, tuple(labels), text.strip())


METRICS: Final = tuple(_metrics(_TABLE))

_NO_TRANSACTION: Final = OpenTransaction(0, 0, None)


class Metrics:
    """The metrics of one run, which they observe; `registry` is what Prometheus's client serves."""

    def __init__(self, settings: Settings) -> None:
        import prometheus_client as client

        client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = client.CollectorRegistry()
        self._settings = settings
        client.ProcessCollector(registry=self.registry)  # memory, processor time, open files
        make: dict[str, Any] = {
            "gauge": client.Gauge,
            "counter": client.Counter,
            "histogram": client.Histogram,
        }
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
            events.OwnerChanged: self._owner,
            events.StepDone: self._step,
            events.Committed: self._commit,
            events.BronzeProgress: self._bronze_progress,
            events.RecordsProcessed: self._records,
            events.Judged: self._judged,
            events.MergeProgress: self._merge_progress,
            events.Published: self._publication,
            events.Sampled: self._sample,
            events.LagObserved: self._lag,
            events.Checked: self._quality,
            events.Failed: self._failure,
        }

    def __call__(self, event: Event) -> None:
        """Bring the metrics up to date."""
        with self._lock:
            self._updates[type(event)](event)

    def _metric(self, name: str, *labels: object) -> Any:
        return self._metrics[name].labels(*labels)

    def _owner(self, event: events.OwnerChanged) -> None:
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

    def _step(self, event: events.StepDone) -> None:
        self._metric("step_seconds", event.layer, event.step).observe(event.seconds)

    def _commit(self, event: events.Committed) -> None:
        self._metric("commits_total", event.table).inc()

    def _bronze_progress(self, event: events.BronzeProgress) -> None:
        self._next_offsets |= {("bronze", tp): offset for tp, offset in event.offsets.items()}
        self._lags()

    def _records(self, event: events.RecordsProcessed) -> None:
        for topic, counts in event.topics.items():
            for (outcome, reason), records in counts.items():
                self._metric("records_total", event.layer, topic, outcome, reason).inc(records)

    def _judged(self, event: events.Judged) -> None:
        for reason, records in event.refused.items():
            self._metric("not_valid_total", reason).inc(records)

    def _merge_progress(self, event: events.MergeProgress) -> None:
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

    def _publication(self, event: events.Published) -> None:
        for p, seq in event.sequences.items():
            self._metric("sequence", event.topic, p).set(seq)

    def _sample(self, event: events.Sampled) -> None:
        self._bounds.update(event.bounds)
        self._lags()
        self._transactions(event)
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

    def _lag(self, event: events.LagObserved) -> None:
        for p, records in event.records.items():
            self._metric("lag_records", event.layer, event.topic, p).set(records)

    def _quality(self, event: events.Checked) -> None:
        self._metric("quality_failed", event.suite, event.table).set(event.failed)

    def _failure(self, event: events.Failed) -> None:
        self._metric("errors_total", event.kind).inc()
        if event.is_retried:
            self._metric("retries_total", event.kind).inc()

    def _lags(self) -> None:
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

    def _transactions(self, event: events.Sampled) -> None:
        for tp in event.bounds:  # those that were asked for
            place = (tp.input.topic, tp.partition)
            _, offsets, since = event.transactions.get(tp, _NO_TRANSACTION)
            age_s = 0.0 if since is None else max(0.0, time.time() - since / 1000)
            self._metric("open_transaction_offsets", *place).set(offsets)
            self._metric("open_transaction_seconds", *place).set(age_s)


@contextmanager
def serving(settings: Settings) -> Iterator[list[Observer]]:
    """Serve the metrics, if any are configured, inside the `with` block; yield the observers.

    Raises ConfigurationError for an address that cannot be used, and without Prometheus's client.
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
    address, port = settings.metrics.address, settings.metrics.port
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
