"""Point 2: how long a merge record that could be published takes to a `read_committed` consumer, at
a steady rate.

All three layers run in one process; records come with the wall clock as their event time. A merge
record with event time E can be published from the acknowledgement on by which, in its partition,
the largest event time acknowledged of every source has passed E + timeout (rule 5 of the merge).
What was acknowledged and what arrived when is noted on one clock, and compared afterwards.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Set
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import OFFSET_BEGINNING, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaPartition

from benchmarks import points
from benchmarks.inputs import TOPICS, record_value, session_key, write_configuration
from benchmarks.points import Result, Sizes
from benchmarks.programs import Program, ProgramError, embedded_broker, notify, program
from pipelines.core.sequence import ID, parse_message_id
from pipelines.kafka.cluster import Cluster, sink_settings
from pipelines.kafka.options import ListeningConsumer, ListeningProducer
from pipelines.settings import Settings, load_settings

NUMBERS = frozenset({2})
TIMEOUT_MS = 5_000
SESSIONS_PER_S = 100
SESSION_S = 2
PATIENCE_S = 120.0
"""For so long after the measured time the last of its merge records may arrive."""


class Sender:
    """Sends records at a steady rate, one in ten an order; each belongs to one of the sessions of
    the last two seconds."""

    def __init__(self, settings: Settings, partitions: int, rate: int) -> None:
        self.acknowledged: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        """By topic and partition, in order: when a record was acknowledged (s), and its event time
        (ms)."""
        self._partitions, self._rate, self._random = partitions, rate, random.Random(1)
        self._producer = ListeningProducer(settings.kafka, linger_ms=5)

    def send_until(self, is_over: Callable[[], bool]) -> int:
        """Returns how many records were sent, once all of them are acknowledged."""
        began, sent = time.time(), 0
        while not is_over():
            due = int((time.time() - began) * self._rate)
            while sent < due:
                self._send(int((time.time() - began) * SESSIONS_PER_S), TOPICS[sent % 10 == 9])
                sent += 1
            self._producer.poll(0.005)
        self._producer.flush()
        return sent

    def _send(self, newest: int, topic: str) -> None:
        session = newest + self._random.randrange(SESSION_S * SESSIONS_PER_S)
        now = int(time.time() * 1000)
        value = record_value(session_key(session), now, topic)
        self._producer.produce(
            topic,
            value,
            partition=session % self._partitions,
            timestamp=now,
            on_delivery=self._acknowledge,
        )

    def _acknowledge(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            raise ProgramError(f"a record was not taken: {error}")
        at = str(message.topic()), int(message.partition() or 0)
        self.acknowledged[at].append((time.time(), message.timestamp()[1]))


class Receiver:
    """Notes each committed message of the sink as it arrives: when (s), its partition, and its
    event time (ms)."""

    def __init__(self, settings: Settings, partitions: int) -> None:
        self.arrivals: list[tuple[float, int, int]] = []
        self._latest = dict.fromkeys(range(partitions), 0)
        self._consumer = ListeningConsumer(settings.kafka)
        self._consumer.assign(
            [KafkaPartition(settings.publish.topic, p, OFFSET_BEGINNING) for p in range(partitions)]
        )
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._receive, name="receiver", daemon=True)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._consumer.close()

    def has_passed(self, event_time: int) -> bool:
        """Whether every partition has come this far: a partition's messages are in order of event
        time."""
        return min(self._latest.values()) >= event_time

    def _receive(self) -> None:
        while not self._ended.is_set():
            message = self._consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue  # nothing new, or the end of a partition
            now = time.time()
            headers: dict[str, Any] = dict(message.headers() or [])
            partition, event_time, *_ = parse_message_id(headers[ID].decode())
            self.arrivals.append((now, partition, event_time))
            self._latest[partition] = event_time


def measure(numbers: Set[int], sizes: Sizes, folder: Path) -> Iterator[Result]:
    """The point, where it is chosen."""
    if not numbers & NUMBERS:
        return
    for engine in sizes.engines:
        try:
            with embedded_broker(folder / "latency" / "broker") as bootstrap_servers:
                yield from _measure(bootstrap_servers, engine, sizes, folder / "latency")
        finally:
            shutil.rmtree(folder / "latency", ignore_errors=True)


def prepare(folder: Path, bootstrap_servers: str, engine: str, partitions: int) -> Settings:
    """A configuration in the folder, with the timeout `TIMEOUT_MS`, and all its topics: before the
    run, so that a Receiver finds the sink.
    """
    settings = load_settings(
        write_configuration(folder, bootstrap_servers, timeout_ms=TIMEOUT_MS, engine=engine)
    )
    cluster = Cluster(settings.kafka)
    for topic in TOPICS:
        cluster.create_topic(topic, partitions, {"retention.ms": "-1"})
    cluster.create_topic(settings.publish.topic, partitions, sink_settings(settings))
    return settings


def _measure(bootstrap_servers: str, engine: str, sizes: Sizes, folder: Path) -> Iterator[Result]:
    settings = prepare(folder, bootstrap_servers, engine, sizes.partitions)
    sender = Sender(settings, sizes.partitions, sizes.rate)
    with (
        program(folder, "-m", "pipelines", "run") as running,
        Receiver(settings, sizes.partitions) as receiver,
    ):
        running.await_words("lake: ready")
        notify(
            f"{sizes.rate} records/s: {sizes.warm_up_s:.0f} s to warm up, {sizes.measured_s:.0f} s "
            "measured"
        )
        since = time.time() + sizes.warm_up_s
        until = since + sizes.measured_s
        sent = sender.send_until(lambda: _is_over(until, receiver, running))
        if not receiver.has_passed(int(until * 1000)):
            raise ProgramError(f"the run fell behind, or ended: {running.said()[-2000:]}")
        running.stop()
    found = latencies(sender.acknowledged, receiver.arrivals, TIMEOUT_MS)
    measured = [seconds for publishable, seconds in found if since <= publishable < until]
    if not measured:
        raise ProgramError("no merge record could be published within the measured time")
    p50, p95, p99 = (float(value) for value in np.percentile(measured, [50, 95, 99]))
    details = {
        "merge_records": len(measured),
        "p99": round(p99, 3),
        "worst": round(max(measured), 3),
        "records_sent": sent,
    }
    yield Result(
        points.LATENCY_MEDIAN,
        engine,
        p50,
        {**details, "records_per_second": sizes.rate, "timeout_ms": TIMEOUT_MS},
    )
    yield Result(points.LATENCY_95, engine, p95)


def _is_over(until: float, receiver: Receiver, running: Program) -> bool:
    """The load stays until everything that could be published in the measured time has arrived."""
    if time.time() < until:
        return running.process.poll() is not None
    # What is as young as this can be published only after the measured time, and comes after all
    # that could before.
    has_everything = receiver.has_passed(int(until * 1000))
    return has_everything or time.time() > until + PATIENCE_S or running.process.poll() is not None


def latencies(
    acknowledged: dict[tuple[str, int], list[tuple[float, int]]],
    arrivals: Iterable[tuple[float, int, int]],
    timeout_ms: int,
) -> list[tuple[float, float]]:
    """Of each merge record when it could be published, and how many seconds later it arrived."""
    moments, heads = {}, {}
    for at, records in acknowledged.items():
        moments[at] = [moment for moment, _ in records]
        heads[at] = np.maximum.accumulate(
            np.array([event_time for _, event_time in records], dtype=np.int64)
        )
    found = []
    for arrived, partition, event_time in arrivals:
        publishable = max(
            moments[topic, partition][
                int(np.searchsorted(heads[topic, partition], event_time + timeout_ms, side="right"))
            ]
            for topic in TOPICS
        )
        found.append((publishable, arrived - publishable))
    return found
