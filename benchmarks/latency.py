"""Point 2: how long a merge record that could be published takes to a `read_committed` consumer, at
a steady rate.

All three layers run in one process; records come with the wall clock as their event time. A merge
record with event time E can be published from the acknowledgement on by which, in its partition,
the largest event time acknowledged of every source has passed E + timeout (rule 5 of the merge).
What was acknowledged and what arrived when is noted on one clock, and compared afterwards.

The MERGE job that people write by hand gets the same records, and its messages are compared in the
same way.
"""

from __future__ import annotations

import json
import random
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import OFFSET_BEGINNING, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaPartition

from benchmarks import points
from benchmarks.inputs import (
    TOPICS,
    record_value,
    session_key,
    session_of,
    write_configuration,
)
from benchmarks.peers.common import RUNS_ON
from benchmarks.points import Result, Sizes
from benchmarks.programs import Program, ProgramError, embedded_broker, notify, program
from watersmeet.core.sequence import ID, parse_message_id
from watersmeet.kafka.cluster import Cluster, sink_settings
from watersmeet.kafka.options import ListeningConsumer, ListeningProducer
from watersmeet.settings import Settings, load_settings

NUMBERS = frozenset({2})
TIMEOUT_MS = 5_000
SESSIONS_PER_S = 100
SESSION_S = 2
PATIENCE_S = 120.0
"""For so long after the measured time the last of its merge records may arrive."""
MERGE_JOB = "merge_job"

Place = Callable[[Message], tuple[int, int]]
"""Of a message, the partition and the event time (ms) of its merge record."""


def _by_id(message: Message) -> tuple[int, int]:
    headers: dict[str, Any] = dict(message.headers() or [])
    partition, event_time, *_ = parse_message_id(headers[ID].decode())
    return partition, event_time


def _by_key(partitions: int, message: Message) -> tuple[int, int]:
    """The same of a message that has no id: where the Sender puts the session."""
    key, value = (part.decode() for part in (message.key(), message.value()) if part)
    return session_of(key) % partitions, json.loads(value)["event_time"]


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

    def __init__(self, settings: Settings, partitions: int, place: Place = _by_id) -> None:
        self.arrivals: list[tuple[float, int, int]] = []
        self._place = place
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
        time, those of the MERGE job from batch to batch."""
        return min(self._latest.values()) >= event_time

    def _receive(self) -> None:
        while not self._ended.is_set():
            message = self._consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue  # nothing new, or the end of a partition
            now = time.time()
            partition, event_time = self._place(message)
            self.arrivals.append((now, partition, event_time))
            self._latest[partition] = max(self._latest[partition], event_time)


@dataclass(frozen=True)
class Latency:
    """How long merge records took at a steady rate, in seconds."""

    median: float
    tail: float
    """The 95th percentile."""
    details: Mapping[str, object]


def measure(numbers: Set[int], sizes: Sizes, folder: Path) -> Iterator[Result]:
    """The point, where it is chosen."""
    if not numbers & NUMBERS:
        return
    own = {}
    for engine in sizes.engines:
        own[engine] = found = _latency(engine, sizes, folder / "latency")
        yield Result(points.LATENCY_MEDIAN, engine, found.median, found.details)
        yield Result(points.LATENCY_95, engine, found.tail)
    try:
        job = _latency(MERGE_JOB, sizes, folder / "latency")
    except ProgramError as error:
        notify(f"{MERGE_JOB} is left out: {error}")
        return
    seconds = {"median": round(job.median, 3), "p95": round(job.tail, 3), **job.details}
    for engine, found in own.items():
        yield Result(points.MEDIAN_TO_MERGE_JOB, engine, found.median / job.median, seconds)
        yield Result(points.TAIL_TO_MERGE_JOB, engine, found.tail / job.tail)


def prepare(
    folder: Path, bootstrap_servers: str, engine: str, partitions: int, sink: str = "merged"
) -> Settings:
    """A configuration in the folder, with the timeout `TIMEOUT_MS`, and all its topics: before the
    run, so that a Receiver finds the sink.
    """
    settings = load_settings(
        write_configuration(
            folder, bootstrap_servers, timeout_ms=TIMEOUT_MS, sink=sink, engine=engine
        )
    )
    cluster = Cluster(settings.kafka)
    for topic in TOPICS:
        cluster.create_topic(topic, partitions, {"retention.ms": "-1"})
    cluster.create_topic(settings.publish.topic, partitions, sink_settings(settings))
    return settings


def _latency(name: str, sizes: Sizes, folder: Path) -> Latency:
    """Of an engine, or of the MERGE job, with a broker of its own."""
    partitions = sizes.partitions
    try:
        with embedded_broker(folder / "broker") as servers:
            if name != MERGE_JOB:
                settings = prepare(folder, servers, name, partitions)
                return _under_load(
                    settings, sizes, folder, ("watersmeet", "run"), "lake: ready", _by_id
                )
            settings = prepare(folder, servers, "spark", partitions, f"merged_by_{MERGE_JOB}")
            arguments = servers, str(folder), str(partitions), str(TIMEOUT_MS)
            command = f"benchmarks.peers.{MERGE_JOB}", *arguments
            return _under_load(
                settings, sizes, folder, command, RUNS_ON, partial(_by_key, partitions)
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _under_load(
    settings: Settings,
    sizes: Sizes,
    folder: Path,
    command: tuple[str, ...],
    is_ready: str,
    place: Place,
) -> Latency:
    """Of a program, from its words `is_ready` on."""
    sender = Sender(settings, sizes.partitions, sizes.rate)
    with (
        program(folder, "-m", *command) as running,
        Receiver(settings, sizes.partitions, place) as receiver,
    ):
        running.await_words(is_ready)
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
    # What is younger than this can be published after the measured time only. By the clock of its
    # own partition, the last that the MERGE job publishes never can.
    arrivals = [found for found in receiver.arrivals if found[2] + TIMEOUT_MS < until * 1000]
    found = latencies(sender.acknowledged, arrivals, TIMEOUT_MS)
    measured = [seconds for publishable, seconds in found if since <= publishable < until]
    if not measured:
        raise ProgramError("no merge record could be published within the measured time")
    p50, p95, p99 = (float(value) for value in np.percentile(measured, [50, 95, 99]))
    details = {
        "merge_records": len(measured),
        "p99": round(p99, 3),
        "worst": round(max(measured), 3),
        "records_sent": sent,
        "records_per_second": sizes.rate,
        "timeout_ms": TIMEOUT_MS,
    }
    return Latency(p50, p95, details)


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
