"""Points 2 and 13: how long a merge record that could be published takes to a `read_committed`
consumer, at a steady rate.

All three layers run in one process; records come with the wall clock as their event time. A merge
record with event time E can be published from the acknowledgement on by which, in its partition,
the largest event time acknowledged of every source has passed E + timeout (rule 5 of the merge).
What was acknowledged and what arrived when is noted on one clock, and compared afterwards.

The MERGE job that people write by hand and the Kafka Streams program get the same records, and
their messages are compared in the same way.

There are two kinds of load. `ordered`: event time is the time of sending, sessions last two
seconds, the timeout is five. `overlapping`: records come up to two minutes after their event time,
out of order; sessions last five minutes, 91 begin in a second, and with a timeout of nine minutes
45,000 are open at once. The records of the time before are sent first, for the run to catch up
with.

For point 13 a sync of the disk takes five milliseconds, and an engine waits for them, or does not.

An engine gets a stream that is not clean, too, beside the clean one: of a hundred records of the
ordered load one is refused, five are late, and five repeat an earlier one.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from confluent_kafka import OFFSET_BEGINNING, KafkaError, Message
from confluent_kafka import TopicPartition as KafkaPartition

from benchmarks import peers, points
from benchmarks.inputs import (
    MAX_DELAY_MS,
    SESSION_MS,
    TOPICS,
    Kind,
    Variant,
    record_value,
    session_key,
    session_of,
    write_configuration,
)
from benchmarks.points import Result, Sizes
from benchmarks.programs import Program, ProgramError, embedded_broker, notify, slow_disk, started
from watersmeet.core.sequence import ID, parse_message_id
from watersmeet.kafka.cluster import Cluster, sink_settings
from watersmeet.kafka.options import ListeningConsumer, ListeningProducer
from watersmeet.settings import Settings, load_settings

NUMBERS = frozenset({2, 13})
TIMEOUT_MS = 5_000
SESSIONS_PER_S = 100
SESSION_S = 2
PATIENCE_S = 120.0
"""For so long after the measured time the last of its merge records may arrive."""
MERGE_JOB = "merge_job"
LATE_MS = 12 * TIMEOUT_MS
"""How far behind the others a late record is."""
PEERS = {
    MERGE_JOB: (points.MEDIAN_TO_MERGE_JOB, points.TAIL_TO_MERGE_JOB),
    peers.KAFKA_STREAMS: (points.MEDIAN_TO_KAFKA_STREAMS, points.TAIL_TO_KAFKA_STREAMS),
}
_MOST_UNSENT = 50_000
TIMEOUTS_MS: Mapping[Kind, int] = {"ordered": TIMEOUT_MS, "overlapping": 540_000}

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
        self._produce(session, int(time.time() * 1000), topic)

    def _produce(self, session: int, event_time: int, topic: str) -> None:
        value = record_value(session_key(session), event_time, topic)
        self._producer.produce(
            topic,
            value,
            partition=session % self._partitions,
            timestamp=event_time,
            on_delivery=self._acknowledge,
        )

    def _acknowledge(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            raise ProgramError(f"a record was not taken: {error}")
        at = str(message.topic()), int(message.partition() or 0)
        self.acknowledged[at].append((time.time(), message.timestamp()[1]))


class OverlappingSender(Sender):
    """Sends the overlapping load, after the records of so many milliseconds before now."""

    def __init__(self, settings: Settings, partitions: int, rate: int, history_ms: int) -> None:
        super().__init__(settings, partitions, rate)
        self._began_ms = int(time.time() * 1000) - history_ms
        self._sessions_per_ms = rate / 11 / 1000
        for number in range(history_ms * rate // 1000):
            self._send_at(self._began_ms + number * 1000 // rate, TOPICS[number % 10 == 9])
            while len(self._producer) > _MOST_UNSENT:
                self._producer.poll(0.01)
        self._producer.flush()

    def _send(self, newest: int, topic: str) -> None:  # noqa: ARG002
        self._send_at(int(time.time() * 1000), topic)

    def _send_at(self, now: int, topic: str) -> None:
        event_time = now - self._random.randrange(MAX_DELAY_MS)
        begin = event_time - self._random.randrange(SESSION_MS)
        # Counted from before the first one.
        since = begin - self._began_ms + MAX_DELAY_MS + SESSION_MS
        self._produce(int(since * self._sessions_per_ms), event_time, topic)


class MixedSender(Sender):
    """Sends the ordered load with ids, and of a hundred records one that is refused, five that are
    late, and five that repeat the one before: they move nothing, and are not among those
    acknowledged."""

    _sent = 0
    _last = 0, ""
    """Partition and value of the last click that is none of these."""

    def _produce(self, session: int, event_time: int, topic: str) -> None:
        self._sent += 1
        place = self._sent * 37 % 100  # spread over the hundred
        late = 1 <= place <= 5
        if late:
            event_time -= LATE_MS
        more = f',"id":"{self._sent}"'
        partition = session % self._partitions
        value = record_value(session_key(session), event_time, topic, more)
        if place == 0:
            self._producer.produce(topic, value[:-1], partition=partition)
        elif late:
            self._producer.produce(topic, value, partition=partition)
        elif 6 <= place <= 10 and self._last[1]:
            partition, value = self._last
            self._producer.produce(TOPICS[0], value, partition=partition)
        else:
            if topic == TOPICS[0]:
                self._last = partition, value
            self._producer.produce(
                topic,
                value,
                partition=partition,
                timestamp=event_time,
                on_delivery=self._acknowledge,
            )


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
    """The chosen ones of these points; point 13 on the first kind of input."""
    for kind in sizes.kinds if 2 in numbers else ():
        for result in _of_kind(kind, sizes, folder / "latency"):
            yield replace(result, kind=kind)
    if 13 in numbers:
        with slow_disk(folder / "disk"):
            for engine in sizes.engines:
                result = _durable(engine, sizes.kinds[0], sizes, folder / "latency")
                yield replace(result, kind=sizes.kinds[0])


def _of_kind(kind: Kind, sizes: Sizes, folder: Path) -> Iterator[Result]:
    own = {}
    for engine in sizes.engines:
        own[engine] = found = _latency(engine, kind, sizes, folder)
        yield Result(points.LATENCY_MEDIAN, engine, found.median, found.details)
        yield Result(points.LATENCY_95, engine, found.tail)
        if kind == "ordered":
            mixed = _latency(engine, kind, sizes, folder, "ids")
            both = {"median": round(mixed.median, 3), "p95": round(mixed.tail, 3), **mixed.details}
            yield Result(points.MIXED_MEDIAN, engine, mixed.median / found.median, both)
            yield Result(points.MIXED_95, engine, mixed.tail / found.tail)
    for name, (of_median, of_tail) in PEERS.items():
        try:
            peer = _latency(name, kind, sizes, folder)
        except ProgramError as error:
            notify(f"{name} is left out: {error}")
            continue
        seconds = {"median": round(peer.median, 3), "p95": round(peer.tail, 3), **peer.details}
        if peer.median <= 0:
            # Its time is the larger of both heads: it publishes before a record is over for others.
            notify(f"{name} is left out, its median is {peer.median:.2f} s: it does not wait")
            continue
        for engine, found in own.items():
            yield Result(of_median, engine, found.median / peer.median, seconds)
            yield Result(of_tail, engine, found.tail / peer.tail)


def _durable(engine: str, kind: Kind, sizes: Sizes, folder: Path) -> Result:
    """In turns, the better of two each."""
    variants: tuple[Variant, ...] = "volatile", "plain"
    medians: dict[str, list[float]] = {variant: [] for variant in variants}
    for variant in variants * 2:
        medians[variant].append(_latency(engine, kind, sizes, folder, variant).median)
    difference = min(medians["plain"]) - min(medians["volatile"])
    seconds = {
        "without": [round(each, 3) for each in medians["volatile"]],
        "with": [round(each, 3) for each in medians["plain"]],
    }
    return Result(points.DURABLE_MEDIAN, engine, difference, {"seconds": seconds})


def prepare(
    folder: Path,
    bootstrap_servers: str,
    engine: str,
    partitions: int,
    sink: str = "merged",
    timeout_ms: int = TIMEOUT_MS,
    variant: Variant = "plain",
) -> Settings:
    """A configuration in the folder, and all its topics: before the run, so that a Receiver finds
    the sink.
    """
    settings = load_settings(
        write_configuration(
            folder,
            bootstrap_servers,
            timeout_ms=timeout_ms,
            sink=sink,
            engine=engine,
            variant=variant,
        )
    )
    cluster = Cluster(settings.kafka)
    for topic in TOPICS:
        cluster.create_topic(topic, partitions, {"retention.ms": "-1"})
    cluster.create_topic(settings.publish.topic, partitions, sink_settings(settings))
    return settings


def _latency(
    name: str, kind: Kind, sizes: Sizes, folder: Path, variant: Variant = "plain"
) -> Latency:
    """Of an engine or a peer, with a broker of its own."""
    partitions, timeout_ms = sizes.partitions, TIMEOUTS_MS[kind]
    try:
        with embedded_broker(folder / "broker") as servers:
            if name not in PEERS:
                settings = prepare(
                    folder, servers, name, partitions, timeout_ms=timeout_ms, variant=variant
                )
                command = [sys.executable, "-m", "watersmeet", "run"]
                is_ready, place = "lake: ready", _by_id
            else:
                sink = f"merged_by_{name}"
                settings = prepare(folder, servers, "spark", partitions, sink, timeout_ms)
                arguments = servers, str(folder), str(partitions), str(timeout_ms)
                command = peers.command(name, *arguments)
                is_ready, place = peers.RUNS_ON, partial(_by_key, partitions)
            if kind == "ordered":
                made = MixedSender if variant == "ids" else Sender
                sender = made(settings, partitions, sizes.rate)
            else:
                history_ms = timeout_ms + MAX_DELAY_MS
                sender = OverlappingSender(settings, partitions, sizes.rate, history_ms)
            return _under_load(settings, sizes, folder, sender, command, is_ready, place)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _under_load(
    settings: Settings,
    sizes: Sizes,
    folder: Path,
    sender: Sender,
    command: Sequence[str],
    is_ready: str,
    place: Place,
) -> Latency:
    """Of a program, from its words `is_ready` on."""
    timeout_ms = settings.merge.timeout_ms or 0
    with (
        started(folder, command) as running,
        Receiver(settings, sizes.partitions, place) as receiver,
    ):
        running.await_words(is_ready)
        notify(
            f"{sizes.rate} records/s: {sizes.warm_up_s:.0f} s to warm up, {sizes.measured_s:.0f} s "
            "measured"
        )
        since = time.time() + sizes.warm_up_s
        until = since + sizes.measured_s
        # What is as young as this can be published only after the measured time, and comes after
        # all that could before.
        last = int(until * 1000) - timeout_ms + TIMEOUT_MS
        sent = sender.send_until(lambda: _is_over(until, last, receiver, running))
        if not receiver.has_passed(last):
            raise ProgramError(f"the run fell behind, or ended: {running.said()[-2000:]}")
        running.stop()
    # What is younger than this can be published after the measured time only. By the clock of its
    # own partition, the last that the MERGE job publishes never can.
    arrivals = [found for found in receiver.arrivals if found[2] + timeout_ms < until * 1000]
    found = latencies(sender.acknowledged, arrivals, timeout_ms)
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
        "timeout_ms": timeout_ms,
    }
    return Latency(p50, p95, details)


def _is_over(until: float, last: int, receiver: Receiver, running: Program) -> bool:
    """The load stays until everything that could be published in the measured time has arrived:
    whatever began before `last`."""
    if time.time() < until:
        return running.process.poll() is not None
    has_everything = receiver.has_passed(last)
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
