"""Point 12: how long a run takes from its start to its first message, beside what a bare Spark
session takes to its first task in Python.

400 records wait, and one in each topic is refused. The first start finds no lake; the second one
finds the lake of the first, and 400 records more. The bare session and both starts are measured in
turns; the medians count.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Set
from pathlib import Path
from statistics import median

from benchmarks import points
from benchmarks.inputs import DAY_MS, START_MS, TOPICS, heartbeat_value, record_value, session_key
from benchmarks.latency import Receiver, prepare
from benchmarks.points import Result, Sizes
from benchmarks.programs import ProgramError, embedded_broker, notify, program
from watersmeet.kafka.options import ListeningProducer
from watersmeet.settings import Settings

NUMBERS = frozenset({12})
RECORDS = 400
TURNS = 5
FIRST_TASK = "first_task"
_PATIENCE_S = 300.0


def measure(numbers: Set[int], sizes: Sizes, folder: Path) -> Iterator[Result]:
    """The point, where it is chosen."""
    if not numbers & NUMBERS:
        return
    bare: list[float] = []
    starts: dict[str, list[tuple[float, float]]] = {engine: [] for engine in sizes.engines}
    for _ in range(TURNS):
        bare.append(_first_task(folder / FIRST_TASK))
        for engine, taken in starts.items():
            taken.append(_starts(engine, sizes.partitions, folder / "start"))
        notify(
            f"to the first task {bare[-1]:.1f} s; to the first message, first and second start: "
            + "; ".join(f"{e} {t[-1][0]:.1f} and {t[-1][1]:.1f} s" for e, t in starts.items())
        )
    task = median(bare)
    for engine, taken in starts.items():
        for number, (seconds_point, ratio_point) in enumerate(points.STARTS):
            seconds = [both[number] for both in taken]
            details = {"seconds": [round(each, 2) for each in seconds]}
            yield Result(seconds_point, engine, median(seconds), details)
            details = {"seconds_of_the_first_task": [round(each, 2) for each in bare]}
            yield Result(ratio_point, engine, median(seconds) / task, details)


def _first_task(folder: Path) -> float:
    """How long a bare session takes, as a process from its start to the end of its first task."""
    with program(folder, "-m", f"benchmarks.peers.{FIRST_TASK}") as running:
        running.wait()
    return running.seconds


def _starts(engine: str, partitions: int, folder: Path) -> tuple[float, float]:
    """How long an engine takes to its first message, in a new lake, and after a restart."""
    try:
        with embedded_broker(folder / "broker") as servers:
            settings = prepare(folder, servers, engine, partitions)
            with Receiver(settings, partitions) as receiver:
                first, second = (
                    _start(settings, partitions, folder, receiver, START_MS + day * DAY_MS)
                    for day in (0, 2)
                )
            return first, second
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(
    settings: Settings, partitions: int, folder: Path, receiver: Receiver, since: int
) -> float:
    """How long a run takes to its first message of records that are sent before it, from the event
    time `since` (ms) on."""
    _send(settings, partitions, since)
    with program(folder, "-m", "watersmeet", "run") as running:
        until = time.time() + _PATIENCE_S
        while not (
            arrived := [at for at, _, event_time in receiver.arrivals if event_time >= since]
        ):
            if running.process.poll() is not None or time.time() > until:
                raise ProgramError(f"no message came: {running.said()[-2000:]}")
            time.sleep(0.02)
        running.stop()
        return arrived[0] - running.began


def _send(settings: Settings, partitions: int, since: int) -> None:
    """Sends the records, one in ten an order; a heartbeat a day later lets them all time out."""
    producer = ListeningProducer(settings.kafka, linger_ms=5)
    for number in range(RECORDS):
        session, event_time = number // 10, since + number
        value = record_value(session_key(session), event_time, TOPICS[number % 10 == 9])
        producer.produce(TOPICS[number % 10 == 9], value, partition=session % partitions)
    for topic in TOPICS:
        producer.produce(topic, "{", partition=0)
        for partition in range(partitions):
            producer.produce(topic, heartbeat_value(since + DAY_MS), partition=partition)
    producer.flush()
